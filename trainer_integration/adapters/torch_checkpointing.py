"""Give torch_checkpointing the storage of this library: `StorageConfig`, on paths and URLs.

Its writer saves into a temporary folder, and renames that at the end. Here the files go where they
belong at once, under names of this library, and the rename is our commit: no byte is copied.
"""

from __future__ import annotations

import contextlib
import io
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ckpt.backends.base import Store, exists
from ckpt.backends.registry import open_store
from ckpt.errors import (
    AccessDenied,
    ConfigurationError,
    FormatError,
    NotCommitted,
    NotFound,
    UnsafeContent,
)
from ckpt.format.names import is_rank_directory
from ckpt.reading.foreign_files import FileReader, ForeignFiles, is_committed
from ckpt.stock.inert_unpickler import load_inert
from ckpt.tools.ls import step_of
from ckpt.tools.remove import remove
from ckpt.trainer_integration.adapters.host import require_host
from ckpt.trainer_integration.adapters.torch_checkpointing_saves import SavedFiles, SharedKeys
from ckpt.writing.foreign_files import CHUNK_BYTES, FileStream, commit_files

require_host("torch_checkpointing", oldest="0.1.0", before="0.2")

from torch_checkpointing.metadata_manager import DefaultMetadataManager
from torch_checkpointing.metadata_serialization import METADATA_FILE_NAME
from torch_checkpointing.storage import base_storage

__all__ = ["StorageConfig"]

_LOST_SLASH = re.compile(r"([a-z][a-z0-9+.-]+):/(?!/)")
"""`pathlib` makes `s3:/bucket` of `s3://bucket`."""

_MAX_FOLDERS = 4
"""Levels of folders in a checkpoint that are looked through for its root."""

_KEPT_OPEN = 4


@dataclass
class StorageConfig(base_storage.StorageConfig):
    """Save and load with this library: `CheckpointManager.Config(storage_config=StorageConfig())`.

    A checkpoint's id is a path or URL, or what follows `root`. Make it on all ranks at the same
    point of the program, after `init_process_group`.

    Attributes:
        root: prefix of relative ids.
        storage_options: as for `ckpt.save`.
        temp_dir_prefix: that of `CheckpointWriterConfig`, if it is another one.

    Raises:
        ConfigurationError: the root or an option is wrong.
    """

    root: str = ""
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)
    temp_dir_prefix: str = "tmp_"

    def __post_init__(self) -> None:
        if not self.temp_dir_prefix:
            raise ConfigurationError(
                "temp_dir_prefix must not be empty: the commit takes the place of a rename"
            )
        if self.root:
            open_store(self.root, self.storage_options).close()
        is_distributed = dist.is_available() and dist.is_initialized()
        self._rank = dist.get_rank() if is_distributed else 0
        self._world_size = dist.get_world_size() if is_distributed else 1
        self._keys = SharedKeys(self._rank, is_alone=self._world_size == 1)

    def create_storage(self) -> Storage:
        """Make the storage of a process; torch_checkpointing calls it."""
        if not torch.cuda.is_available():
            DefaultMetadataManager._all_gather_pickled_data = _gather_on_cpu
        return Storage(self)


def _gather_on_cpu(self: Any, data: Any, process_group: Any = None) -> dict[int, Any]:
    """Do what the original does, which only works with CUDA."""
    gathered: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(gathered, data, group=process_group)
    return dict(enumerate(gathered))


class Storage(base_storage.Storage):
    """The storage of one process."""

    mmap_fill_chunk_bytes = CHUNK_BYTES

    def __init__(self, config: StorageConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._stores: dict[str, Store] = {}
        self._open: dict[str, ForeignFiles] = {}
        self._metadata: bytes | None = None
        self._saved = SavedFiles(config._keys, config._rank, config._world_size)

    # -- places --------------------------------------------------------------------------------------

    def remap_path(self, path: Path) -> str:
        """Return the URL, or the absolute path, that torch_checkpointing means."""
        text = path.as_posix()
        root = self._config.root.rstrip("/")
        if root and not path.is_absolute() and not _LOST_SLASH.match(text):
            return f"{root}/{text}"
        return _LOST_SLASH.sub(r"\1://", text, count=1)

    def _target(self, path: Path) -> tuple[str, str] | None:
        """Find the place, and the file in it, of a path in a temporary folder; None if it is in none."""
        parts, prefix = path.parts, self._config.temp_dir_prefix
        for number in range(len(parts) - 1, -1, -1):
            if parts[number].startswith(prefix) and parts[number] != prefix:
                place = Path(*parts[:number], parts[number].removeprefix(prefix))
                return self.remap_path(place), "/".join(parts[number + 1 :])
        return None

    def _store(self, place: str) -> Store:
        with self._lock:
            if place not in self._stores:
                while len(self._stores) >= _KEPT_OPEN:
                    self._stores.pop(next(iter(self._stores))).close()
                self._stores[place] = open_store(place, self._config.storage_options)
            return self._stores[place]

    def _parent(self, place: str) -> str:
        """Return the folder of a place; an empty text at the top: a bucket, `root`, a first folder."""
        scheme, separator, rest = place.rpartition("://")
        above = rest.rpartition("/")[0]
        return f"{scheme}{separator}{above}" if above and place != self._config.root.rstrip("/") else ""

    def _source(self, path: Path, *, again: bool = False, wait: bool = False) -> tuple[ForeignFiles, str]:
        """Find the place and name of a file; raises NotCommitted if no checkpoint is at or above it.

        `again`: see whether the checkpoint at `path` was replaced. `wait`: give storage
        that may lag time to show one there.
        """
        places = [(self.remap_path(path), "")]
        while len(places) < _MAX_FOLDERS and (above := self._parent(places[-1][0])):
            place, name = places[-1]
            places.append((above, f"{place[len(above) + 1 :]}/{name}".rstrip("/")))
        with self._lock:
            if again and (files := self._open.get(places[0][0])) is not None and not files.is_current:
                self._forget(places[0][0])
            for place, name in places:
                if place in self._open:
                    return self._open[place], name
        options = self._config.storage_options
        for number, (place, name) in enumerate(places):
            try:
                if is_committed(place, options, wait=wait and number == 0):
                    return self._opened(place), name
            except AccessDenied:  # credentials may be for the folder that was asked for alone
                if number == 0:
                    raise
        raise NotCommitted("no checkpoint is committed here", url=self.remap_path(path))

    def _opened(self, place: str) -> ForeignFiles:
        with self._lock:
            if place not in self._open:
                while len(self._open) >= _KEPT_OPEN:
                    self._forget(next(iter(self._open)))
                self._open[place] = ForeignFiles(place, self._config.storage_options)
            return self._open[place]

    def _forget(self, place: str) -> None:
        files = self._open.pop(place, None)
        if files is not None:
            files.close()

    def _raw(self, path: Path) -> tuple[Store, str]:
        """Find a file as torch_checkpointing's own storage writes it; not those of torn saves."""
        whole = self.remap_path(path)
        if not (place := self._parent(whole)):
            raise NotFound("not there", url=whole)
        store, name = self._store(place), whole[len(place) + 1 :]
        if any(map(is_rank_directory, store.folders())):
            raise NotCommitted("no checkpoint is committed here", url=store.url)
        return store, name

    def _is_raw(self, path: Path) -> bool:
        """Tell whether something is there that torch_checkpointing's own storage may have written."""
        try:
            store, name = self._raw(path)
            if name == "*":
                return next(store.list(), None) is not None
            if exists(store, name):
                return True
        except NotCommitted:
            return False
        except NotFound:  # the folder above
            pass
        except AccessDenied:  # to the folder above, which was not asked for
            if path.name == "*":
                raise
        return path.name != "*" and self._is_raw(path / "*")

    # -- writing -------------------------------------------------------------------------------------

    def stream_write(self, path: Path) -> FileStream:
        """Open a file of a checkpoint for writing."""
        target = self._target(path)
        if target is None:
            raise ConfigurationError(
                f"{self.remap_path(path)!r} is in no checkpoint that is being saved: this storage needs "
                f"CheckpointWriterConfig(write_to_temp_dir=True, temp_dir_prefix={self._config.temp_dir_prefix!r}), "
                "and takes no other files"
            )
        place, name = target
        writer, note = self._saved.begin(place, name)
        return FileStream(self._store(place), name, writer, note)

    def write(self, path: Path, data: Any) -> None:
        with self.stream_write(path) as stream:
            stream.write(data)
        if path.name == METADATA_FILE_NAME:
            self._metadata = bytes(data)

    def rename(
        self, src_path: Path, dst_path: Path, is_directory: bool = False, background_cleanup: bool = False
    ) -> None:
        """Commit the checkpoint whose files were written to `src_path`; the first rank is asked to."""
        target = self._target(src_path / "file")
        if not is_directory or target is None or target[0] != self.remap_path(dst_path):
            raise io.UnsupportedOperation(
                f"{dst_path}: only a whole checkpoint can be renamed, by its writer"
            )
        if self._metadata is not None and METADATA_FILE_NAME not in self._saved.names(target[0]):
            # A synchronous saver writes them with its first save alone, and refuses a state that has changed.
            self.write(src_path / METADATA_FILE_NAME, self._metadata)
        step = step_of(target[0])
        tags = {"writer": "torch_checkpointing"} | ({} if step is None else {"step": str(step)})
        store = self._store(target[0])
        commit_files(store, self._saved.take(target[0], store.url), tags)

    def mkdir(self, path: Path, recursive: bool = True) -> None:
        """Make no folder: it is there when a file is in it. But a writer begins its save with this."""
        if (target := self._target(path / "file")) is not None:
            self._saved.begin_again(target[0], target[1].rpartition("/")[0])

    def rmdir(self, path: Path) -> None:
        """Remove a checkpoint, its commit first. Raises NotCommitted if there is none of this library."""
        place = self.remap_path(path)
        with self._lock:
            self._forget(place)
        remove(place, storage_options=self._config.storage_options)

    def delete(self, path: Path) -> None:
        raise io.UnsupportedOperation(
            f"{path}: single files of a checkpoint cannot be deleted; rmdir removes it"
        )

    # -- reading -------------------------------------------------------------------------------------

    def _reader(self, path: Path) -> FileReader:
        try:
            with contextlib.suppress(NotCommitted):
                source, name = self._source(path)
                return source.open(name)
            store, name = self._raw(path)
            size_bytes = store.stat(name).size_bytes
        except NotFound as error:
            raise FileNotFoundError(str(error)) from None

        def read(start: int, nbytes: int) -> memoryview:
            data = memoryview(bytearray(nbytes))
            store.read_into(name, start, [data])
            return data

        return FileReader(size_bytes, read)

    def stream_read(self, path: Path, read_args: base_storage.ReadArgs | None = None) -> io.RawIOBase:
        """Open a file for reading, in any order; checked, if this library wrote it."""
        reader = self._reader(path)
        if path.name == METADATA_FILE_NAME:
            return io.BytesIO(self._checked(path, reader.read()))  # type: ignore[return-value]
        if read_args is None or read_args.pre_read_full_file:
            return io.BytesIO(reader.read())  # type: ignore[return-value]
        return reader

    def _checked(self, path: Path, pickled: bytes) -> bytes:
        """Return metadata if nothing in it could run code when torch_checkpointing unpickles it."""
        try:
            load_inert(pickled, {})
        except UnsafeContent:
            raise
        except Exception as error:
            text = f"cannot be read: {type(error).__name__}: {error}"
            raise FormatError(text, url=self.remap_path(path)) from error
        return pickled

    def getsize(self, path: Path) -> int:
        return self._reader(path).size_bytes

    def exists(self, path: Path) -> bool:
        if (target := self._target(path / "file")) is not None:
            if target[1] == "file":  # every rank asks for the whole folder once all have passed the barrier
                self._saved.announce(target[0])
            return True  # asked before the rename, which finds out
        if self._has(path) or self._is_raw(path):
            return True
        prompt = self._store(self.remap_path(path)).capabilities.cross_client_visibility
        return not prompt and self._has(path, wait=True)

    def _has(self, path: Path, *, wait: bool = False) -> bool:
        try:
            source, name = self._source(path, again=True, wait=wait)
            return not name or any(each == name or each.startswith(f"{name}/") for each in source.names)
        except NotCommitted:
            return False

    def isdir(self, path: Path) -> bool:
        try:
            source, name = self._source(path, again=True)
            return not name or any(each.startswith(f"{name}/") for each in source.names)
        except NotCommitted:
            return self._is_raw(path / "*")

    def ls(self, path: Path) -> list[str]:
        """List a folder: the files of a checkpoint, or the checkpoints of a run."""
        try:
            source, name = self._source(path)
            prefix = f"{name}/" if name else ""
            inside = (each.removeprefix(prefix) for each in source.names if each.startswith(prefix))
            return sorted({each.partition("/")[0] for each in inside})
        except NotCommitted:
            store = self._store(self.remap_path(path))
            files = {stat.key for stat in store.list() if "/" not in stat.key}
            folders = {
                each for each in store.folders() if self._has(path / each) or self._is_raw(path / each)
            }
            return sorted(files | folders)
