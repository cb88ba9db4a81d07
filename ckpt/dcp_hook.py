"""Let DCP's own functions, writers and readers use this library's storage, without another line changed."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.staging import StagingOptions
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import StorageWriter

from ckpt.backends.fsspec_listings import forget_listings
from ckpt.backends.options import options_dict
from ckpt.collective import agreed_values, load_by, place_of
from ckpt.dcp_storage import DcpStorage
from ckpt.errors import CheckpointError, ConfigurationError
from ckpt.format.fqns import STRUCTURE
from ckpt.ranks.group import Ranks, check_group
from ckpt.reading.reader import CheckpointReader, check_trusted
from ckpt.state.load_planner import StateLoadPlanner
from ckpt.torch_private import (
    CALL_MODULES,
    DEFAULT_STAGER,
    EXECUTE_SAVE,
    STAGER_MODULE,
    STORAGE_SETUP,
    STORAGE_SETUP_MODULES,
    ProcessExecutor,
    fsspec_storage,
)
from ckpt.writing.stager import COMMON_MEMORY, CommonStager
from ckpt.writing.writer import CheckpointWriter

_logger = logging.getLogger(__name__)

_stock_choice: Callable[..., Any] = getattr(STORAGE_SETUP_MODULES[0], STORAGE_SETUP)
_stock_stager: type = getattr(STAGER_MODULE, DEFAULT_STAGER)
_stock_execute_save: Callable[..., Metadata] = getattr(ProcessExecutor, EXECUTE_SAVE)
_stock_calls: dict[str, Callable[..., Any]] = {
    name: next(getattr(module, name) for module in CALL_MODULES if hasattr(module, name))
    for name in ("save", "async_save", "load")
}
_stock_kinds: set[type] = set()
"""The classes that `install` takes over."""

_ACCELERATE = "accelerate.accelerator"

_settings: _Settings | None = None
"""The arguments of `install`, while it holds."""

_logged: set[str] = set()


def install(
    *, storage_options: Mapping[str, Any] | None = None, trusted_objects: Collection[str] = ()
) -> None:
    """Let DCP use this library wherever it, or a framework, would use PyTorch's own storage.

    That is `dcp.save`, `dcp.load` and `dcp.async_save` with a `checkpoint_id`, and every
    `FileSystemWriter`, `FileSystemReader`, `FsspecWriter` and `FsspecReader` that is made from now
    on, wherever its class was imported before: it is a `CheckpointWriter` or `CheckpointReader`
    for the same place. Other writers and readers, also subclasses of these, stay as they are. What
    is taken over is logged once, and from which module it came; a warning names a writer that is not.
    `dcp.async_save` copies the state as `ckpt.async_save` does, unless it is given a stager. `Accelerator.save_state` and
    `load_state` of accelerate, which would make a folder of a URL's name, refuse URLs.

    For this process only; its places are all that `ckpt.save` takes. A second call replaces the
    arguments.

    Args:
        storage_options: for all URLs, as for `ckpt.save`; a plain path takes none.
        trusted_objects: for all loads, as for `ckpt.load`.

    Raises:
        ConfigurationError: an argument is wrong.
    """
    global _settings
    settings = _Settings(options_dict(storage_options), check_trusted(trusted_objects))
    uninstall()
    _settings = settings
    for module in STORAGE_SETUP_MODULES:
        setattr(module, STORAGE_SETUP, functools.partial(_choose, _settings))
    setattr(STAGER_MODULE, DEFAULT_STAGER, InstalledStager)
    for name, stock_call in _stock_calls.items():
        call = _loading(_settings, stock_call) if name == "load" else _saving(stock_call)
        for module in CALL_MODULES:
            if hasattr(module, name):
                setattr(module, name, call)
    setattr(ProcessExecutor, EXECUTE_SAVE, staticmethod(functools.partial(_execute_save, _settings)))
    for stock in (FileSystemWriter, FileSystemReader, *fsspec_storage()):
        if stock not in _stock_kinds:
            ours = InstalledWriter if issubclass(stock, StorageWriter) else InstalledReader
            stock.register(ours)  # for `isinstance`
            # It stays there, as Python makes no instance of a class that a `__new__` was taken back from.
            stock.__new__ = staticmethod(_new(stock, ours))
            _stock_kinds.add(stock)
    if _ACCELERATE in sys.modules:
        _refuse_urls(sys.modules[_ACCELERATE])
    else:
        sys.meta_path.insert(0, _accelerate_finder)


def uninstall() -> None:
    """Undo `install`; does nothing without it. Writers and readers made meanwhile stay what they are."""
    global _settings
    for module in STORAGE_SETUP_MODULES:
        setattr(module, STORAGE_SETUP, _stock_choice)
    setattr(STAGER_MODULE, DEFAULT_STAGER, _stock_stager)
    for name, call in _stock_calls.items():
        for module in CALL_MODULES:
            if hasattr(module, name):
                setattr(module, name, call)
    sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not _accelerate_finder]
    COMMON_MEMORY.clear()
    setattr(ProcessExecutor, EXECUTE_SAVE, staticmethod(_stock_execute_save))
    _settings = None
    _logged.clear()


class InstalledStager(CommonStager):
    """Copy the state of a `dcp.async_save` that is given neither a stager nor a writer that is one."""

    def __init__(self, options: StagingOptions) -> None:
        super().__init__()


class InstalledWriter(CheckpointWriter):
    """What a `FileSystemWriter` or `FsspecWriter` is after `install`."""

    @property
    def path(self) -> str | Path:
        """The place, as PyTorch's writer has it."""
        return _path(self._url)


class InstalledReader(CheckpointReader):
    """What a `FileSystemReader` or `FsspecReader` is after `install`."""

    _is_in_load = False

    @property
    def path(self) -> str | Path:
        """The place, as PyTorch's reader has it."""
        return _path(self._url)

    def begin_load(self) -> None:
        """Expect DCP to call `read_metadata` next, and then `set_up_storage_reader`."""
        self._is_in_load = True

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata; unlike `dcp.load`, a program that asks for it itself gets the error now."""
        metadata = super().read_metadata(*args, **kwargs)
        is_in_load, self._is_in_load = self._is_in_load, False
        if self._failure is not None and not is_in_load:
            raise self._failure
        return metadata


def _path(url: str) -> str | Path:
    return url if "://" in url else Path(url)


@dataclass(frozen=True)
class _Settings:
    """The arguments of `install`."""

    storage_options: Mapping[str, Any] = field(repr=False)
    trusted_objects: Collection[str]

    def arguments(self, kind: type[DcpStorage], place: Any, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keyword arguments of `kind`, a writer or reader; `given` are those for PyTorch's."""
        is_url = isinstance(place, str) and "://" in place
        options = {**(self.storage_options if is_url else {}), **given.get("kwargs", {})}
        if issubclass(kind, CheckpointReader):
            return {"storage_options": options, "trusted_objects": self.trusted_objects}
        threads = given.get("thread_count", 1)
        return {
            "storage_options": options,
            "overwrite": given.get("overwrite", True),
            "threads": threads if threads > 1 else None,  # 1 is PyTorch's default, and slow
        }


# -- what takes the place of functions of DCP ----------------------------------------------------------


def _choose(settings: _Settings, storage: Any, checkpoint_id: Any, reader: bool = False) -> Any:
    """Choose a writer or reader, as DCP's `_storage_setup`."""
    if storage:
        _log_if_foreign(storage)
        if isinstance(storage, InstalledReader):
            storage.begin_load()
    elif checkpoint_id:
        kind: type[DcpStorage] = CheckpointReader if reader else CheckpointWriter
        call = "loads" if reader else "saves"
        _log_once(logging.INFO, f"{call} with a checkpoint_id in {_caller()} are taken over")
        return kind(checkpoint_id, **settings.arguments(kind, checkpoint_id, {}))
    return _stock_choice(storage, checkpoint_id, reader)


def _saving(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Make what `dcp.save` and `dcp.async_save` are meanwhile: parts are saved with the structure that they have."""

    @functools.wraps(stock)
    def save(state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        writer = kwargs.get("storage_writer")
        place = kwargs.get("checkpoint_id")
        if isinstance(writer, DcpStorage):
            place = place or writer.checkpoint_id
        elif writer is not None:
            place = None
        if place:
            check_group(kwargs.get("no_dist", False))
            _make_folder(place)
        is_plain = not args and kwargs.get("planner") is None
        if is_plain and place and _has_parts(state_dict) and STRUCTURE not in state_dict:
            with closing(_ranks(kwargs)) as ranks:
                state_dict = agreed_values(state_dict, place_of(place), ranks)
        return stock(state_dict, *args, **kwargs)

    return save


def _make_folder(place: Any) -> None:
    """Make the folder of a save that begins, as PyTorch's writer does. An empty one is no checkpoint.

    Trainers count the folders that exist by then, and choose by them which checkpoints they remove.
    """
    if "://" in str(place) and not str(place).startswith("file://"):
        return
    with suppress(CheckpointError), closing(CheckpointWriter(place)) as writer:
        writer.make_folder()


def _ranks(kwargs: Mapping[str, Any]) -> Ranks:
    """Return the ranks of a call of DCP."""
    return Ranks(kwargs.get("process_group"), no_dist=kwargs.get("no_dist", False))


def _loading(settings: _Settings, stock: Callable[..., Any]) -> Callable[..., Any]:
    """Make what `dcp.load` is meanwhile: parts get back what the checkpoint has of them, not what they had."""

    @functools.wraps(stock)
    def load(state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        reader, place = kwargs.get("storage_reader"), kwargs.get("checkpoint_id")
        if args or kwargs.get("planner") is not None or not _has_parts(state_dict):
            return stock(state_dict, *args, **kwargs)
        if reader is None and place:
            reader = _choose(settings, None, place, reader=True)
        if not isinstance(reader, CheckpointReader):
            return stock(state_dict, *args, **kwargs)
        if place:
            reader.reset(place)
        planner = StateLoadPlanner(as_dcp=True)
        with closing(_ranks(kwargs)) as ranks:
            load_by(state_dict, reader.checkpoint_id, planner, lambda _: reader, ranks)
        return None

    return load


def _has_parts(state_dict: object) -> bool:
    """Tell whether there are values that make and take a state of their own."""
    return isinstance(state_dict, Mapping) and any(
        not isinstance(value, torch.Tensor) and isinstance(value, Stateful) for value in state_dict.values()
    )


def _execute_save(settings: _Settings, **arguments: Any) -> Metadata:
    """Have another process save, as DCP's `_execute_save_impl`, in which nothing is installed."""
    writer, place = arguments.get("storage_writer"), arguments.get("checkpoint_id")
    if writer is None and place:
        writer = arguments["storage_writer"] = _choose(settings, None, place)
    elif writer is not None:
        _log_if_foreign(writer)
    metadata: Metadata = _stock_execute_save(**arguments)
    if isinstance(writer, DcpStorage):
        # What that process lets its fsspec forget, this one still remembers.
        forget_listings(os.fspath(place or writer.checkpoint_id), [""])
    return metadata


def _new(stock: Any, ours: type[DcpStorage]) -> Callable[..., Any]:
    """Make a `__new__` for `stock` that, while `install` holds, makes an instance of `ours` in its place."""
    signature = inspect.signature(stock.__init__)

    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        # Subclasses, such as that for Hugging Face's format, are left alone, and copies, made without arguments.
        is_taken_over = _settings is not None and cls is stock and (args or kwargs)
        given = signature.bind(None, *args, **kwargs).arguments if is_taken_over else {}
        if not given or _stays(stock, given):
            return object.__new__(cls)
        assert _settings is not None
        made = ours(given["path"], **_settings.arguments(ours, given["path"], given))
        unused = sorted(given.keys() - {"self", "path", "overwrite", "thread_count", "kwargs"})
        note = f"; without effect: {', '.join(unused)}" if unused else ""
        _log_once(logging.INFO, f"{stock.__name__} in {_caller()} is taken over{note}")
        return made

    new.__wrapped__ = stock.__init__  # type: ignore[attr-defined]  # for `inspect.signature`
    return new


def _stays(stock: type, given: Mapping[str, Any]) -> bool:
    """Tell whether arguments ask for what only PyTorch's class can do, and log it."""
    wanted = [name for name in ("_extensions", "_extension_registry") if given.get(name)]
    torch_save = SerializationFormat.TORCH_SAVE
    if given.get("serialization_format", torch_save) is not torch_save:
        wanted.append("serialization_format")
    if wanted:
        text = f"{stock.__name__}({wanted[0]}=...) in {_caller()} is not taken over: this library has no such format"
        _log_once(logging.WARNING, text)
    return bool(wanted)


# -- accelerate, which saves by DCP only what FSDP shards -------------------------------------------------


class _AccelerateFinder(MetaPathFinder):
    """Reach accelerate when a program imports it after `install`."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != _ACCELERATE:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _refuse_urls(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_accelerate_finder = _AccelerateFinder()


def _refuse_urls(accelerate: ModuleType) -> None:
    """Let `Accelerator.save_state` and `load_state` refuse a URL while `install` holds: they would make a folder `s3:`."""
    for name in ("save_state", "load_state"):
        stock = getattr(accelerate.Accelerator, name)
        if not hasattr(stock, "__wrapped__"):
            setattr(accelerate.Accelerator, name, _for_paths(stock))


def _for_paths(stock: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        place = str(given.get("output_dir", given.get("input_dir")))
        if _settings is not None and "://" in place:
            raise ConfigurationError(
                f"Accelerator.{stock.__name__} knows local folders alone; for a URL call {stock.__name__}(accelerator, url) of "
                "ckpt.trainer_integration.adapters.accelerate",
                url=place_of(place),
            )
        return stock(*args, **kwargs)

    return call


# -- what is logged --------------------------------------------------------------------------------------


def _log_if_foreign(storage: Any) -> None:
    """Log, once for each class, that `install` leaves a writer or reader alone."""
    kind = type(storage)
    if isinstance(storage, DcpStorage):
        return
    text = f"{kind.__module__}.{kind.__qualname__} is used as it is: "
    if kind in _stock_kinds:
        text += "it was made before ckpt.install(), or stays PyTorch's for its arguments"
    else:
        text += "ckpt.install() takes over FileSystemWriter, FsspecWriter and their readers, no other class"
    if isinstance(storage, StorageWriter):
        _log_once(logging.WARNING, f"{text}; what it saves has none of the promises of this library")
    else:
        _log_once(logging.INFO, text)


def _log_once(level: int, text: str) -> None:
    """Log a text once on the first rank."""
    is_first = not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
    if is_first and text not in _logged:
        _logged.add(text)
        _logger.log(level, "%s", text)


def _caller() -> str:
    """Name the module that called DCP, or made a writer or reader."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        module = str(frame.f_globals.get("__name__"))
        if module.startswith("concurrent."):
            return "a thread of dcp.async_save"
        if module != __name__ and not module.startswith("torch.distributed.checkpoint."):
            break
        frame = frame.f_back
    return str(frame.f_globals.get("__name__"))
