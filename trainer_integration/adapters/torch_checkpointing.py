"""Give torch_checkpointing the storage of this library: `StorageConfig`, on paths and URLs.

Its writer saves into a temporary folder, and renames that at the end. Here the files go where they
belong at once, under names of this library, and the rename is our commit: no byte is copied.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from ckpt.backends.base import Store, exists
from ckpt.backends.options import options_dict
from ckpt.backends.registry import normal_url, open_store
from ckpt.errors import (
    AccessDenied,
    CommitError,
    ConfigurationError,
    FormatError,
    NotCommitted,
    NotFound,
    UnsafeContent,
)
from ckpt.format.names import is_rank_directory, step_of
from ckpt.reading.foreign_files import FileReader, ForeignFiles, ForeignPlaces
from ckpt.stock.inert_unpickler import load_inert
from ckpt.tools.remove import remove
from ckpt.torch_private import default_store
from ckpt.trainer_integration.adapters.host import require_host
from ckpt.writing.foreign_files import CHUNK_BYTES, FilesSave, FileStream, WrittenFiles, commit_files

require_host("torch_checkpointing", oldest="0.1.1", before="0.2")

from torch_checkpointing.barriers import DefaultStoreBarrierConfig
from torch_checkpointing.checkpoint_writer import (
    CallbackArgs,
    CheckpointWriter,
    CheckpointWriterArgs,
    _temp_dir_path,
)
from torch_checkpointing.metadata_manager import DefaultMetadataManager
from torch_checkpointing.metadata_serialization import METADATA_FILE_NAME
from torch_checkpointing.storage import base_storage

__all__ = ["StorageConfig"]

_LOST_SLASH = re.compile(r"([a-z][a-z0-9+.-]+):/(?!/)")
"""`pathlib` makes `s3:/bucket` of `s3://bucket`."""

_REQUEST_TIMEOUT = timedelta(minutes=5)


class _Keys(DefaultStoreBarrierConfig):
    """Keys in the store of the default process group that no other start of the run has, from any process."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._kept = default_store() if dist.is_available() and dist.is_initialized() else None
        """The server of a TCPStore ends with the last reference to it."""

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_kept": None}

    def connect(self) -> Any:
        connection = self._resolve_store_connection()
        if connection is None:
            raise ConfigurationError("StorageConfig has to be made after init_process_group")
        store = connection.create_client_store(_REQUEST_TIMEOUT)
        return dist.PrefixStore(f"{self.key_prefix}/{self.generation}", store)


@dataclass
class StorageConfig(base_storage.StorageConfig):
    """Save and load with this library: `CheckpointManager.Config(storage_config=StorageConfig())`.

    A checkpoint's id is a path or URL, or what follows `root`. Make it on all ranks at the same
    point of the program, after `init_process_group`.

    Attributes:
        root: prefix of relative ids.
        storage_options: as for `ckpt.save`.

    Raises:
        ConfigurationError: the root or an option is wrong.
    """

    root: str = ""
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.root:
            self.root = normal_url(self.root)
            self.storage_options = options_dict(self.storage_options)
            open_store(self.root, self.storage_options).close()
        self._keys = _Keys("ckpt-storage")

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


_make_writer = CheckpointWriter.__init__


@functools.wraps(_make_writer)
def _make_known_writer(self: CheckpointWriter, args: CheckpointWriterArgs) -> None:
    """Have a writer tell our storage when each of its writes begins, and ends before the barrier."""
    _make_writer(self, args)
    if isinstance(self._storage, Storage):
        self._args = self._storage.known_to(args)


CheckpointWriter.__init__ = _make_known_writer


@dataclass
class _Save:
    """What a rank writes between the callbacks of its writer.

    Attributes:
        folder: the temporary one, as torch_checkpointing names it.
        attempt: how often this rank has begun to save to this place, without another one in between.
    """

    folder: Path
    place: str
    attempt: int
    rank: int
    world_size: int
    store: Store
    files: FilesSave
    has_metadata: bool = False

    def key(self, rank: int) -> str:
        return f"{rank}/{self.attempt}/{self.place}"


class Storage(base_storage.Storage):
    """The storage of one process."""

    mmap_fill_chunk_bytes = CHUNK_BYTES

    def __init__(self, config: StorageConfig) -> None:
        self._config = config
        self._places = ForeignPlaces(config.root, config.storage_options)
        self._metadata: bytes | None = None
        self._save: _Save | None = None
        self._attempt = "", 0
        self._shared: Any = None

    # -- places --------------------------------------------------------------------------------------

    def remap_path(self, path: Path) -> str:
        """Return the URL, or the absolute path, that torch_checkpointing means."""
        text = path.as_posix()
        root = self._config.root.rstrip("/")
        if root and not path.is_absolute() and not _LOST_SLASH.match(text):
            return f"{root}/{text}"
        return _LOST_SLASH.sub(r"\1://", text, count=1)

    def _source(self, path: Path, *, again: bool = False, wait: bool = False) -> tuple[ForeignFiles, str]:
        return self._places.source(self.remap_path(path), again=again, wait=wait)

    def _raw(self, path: Path) -> tuple[Store, str]:
        """Find a file as torch_checkpointing's own storage writes it; not those of torn saves."""
        whole = self.remap_path(path)
        if not (place := self._places.parent(whole)):
            raise NotFound("not there", url=whole)
        store, name = self._places.store(place), whole[len(place) + 1 :]
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

    def known_to(self, args: CheckpointWriterArgs) -> CheckpointWriterArgs:
        """Return the arguments of a writer with callbacks of this storage beside those of the user."""
        if not args.config.write_to_temp_dir:
            raise ConfigurationError(
                "this storage needs CheckpointWriterConfig(write_to_temp_dir=True): its commit takes the place of the "
                "rename"
            )

        def begin(call: CallbackArgs) -> None:
            self._begin(Path(call.path), args)  # first: ranks count what they begin
            if args.pre_write_callback is not None:
                args.pre_write_callback(call)

        def finish(call: CallbackArgs) -> None:
            if args.pre_finalize_callback is not None:
                args.pre_finalize_callback(call)
            self._finish()

        return dataclasses.replace(args, pre_write_callback=begin, pre_finalize_callback=finish)

    def _begin(self, path: Path, args: CheckpointWriterArgs) -> None:
        """Begin this rank's part of a save; nothing that an earlier one has left gets into it."""
        if self._save is not None:
            self._save.store.close()
            self._save = None
        place, info = self.remap_path(path), args.rank_info
        self._attempt = place, self._attempt[1] + 1 if self._attempt[0] == place else 1
        rank, size = info.role_rank, info.role_world_size
        store = open_store(place, self._config.storage_options)
        folder = _temp_dir_path(path, args.config.temp_dir_prefix)
        files = FilesSave(store, rank)
        self._save = save = _Save(folder, place, self._attempt[1], rank, size, store, files)
        if self._shared is None:
            self._shared = self._config._keys.connect() if size > 1 else dist.HashStore()
        self._shared.delete_key(save.key(rank))

    def _finish(self) -> None:
        """End this rank's part, before the barrier, and tell the first rank exactly which files belong to it."""
        save = self._save
        assert save is not None
        if save.rank == 0 and self._metadata is not None and not save.has_metadata:
            # A synchronous saver writes them with its first save alone, and refuses a state that has changed.
            self.write(save.folder / METADATA_FILE_NAME, self._metadata)
        data = zlib.compress(msgspec.msgpack.encode(save.files.finish()), 1)
        self._shared.set(save.key(save.rank), data)

    def _written(self, save: _Save) -> list[WrittenFiles]:
        """Return the files of all ranks, which have told them before the barrier."""
        keys = [save.key(rank) for rank in range(save.world_size)]
        absent = [rank for rank, key in enumerate(keys) if not self._shared.check([key])]
        if absent:
            raise CommitError(
                f"nothing was committed: rank {absent[0]} has not said that its part of this save is complete "
                f"({len(absent)} of {save.world_size} ranks); if some ranks tried more often than others, save to "
                "another place",
                url=save.store.url,
            )
        data = [zlib.decompress(self._shared.get(key)) for key in keys]
        for key in keys:
            self._shared.delete_key(key)
        return [msgspec.msgpack.decode(each, type=WrittenFiles) for each in data]

    def stream_write(self, path: Path) -> FileStream:
        """Open a file of a checkpoint for writing."""
        save = self._save
        if save is None or not path.is_relative_to(save.folder):
            raise ConfigurationError(
                f"{self.remap_path(path)!r} is in no checkpoint that is being saved: this storage takes the files of "
                "torch_checkpointing's CheckpointWriter alone"
            )
        save.has_metadata |= path == save.folder / METADATA_FILE_NAME
        return save.files.open(path.relative_to(save.folder).as_posix())

    def write(self, path: Path, data: Any) -> None:
        with self.stream_write(path) as stream:
            stream.write(data)
        if self._save is not None and path == self._save.folder / METADATA_FILE_NAME:
            self._metadata = bytes(data)

    def rename(
        self, src_path: Path, dst_path: Path, is_directory: bool = False, background_cleanup: bool = False
    ) -> None:
        """Commit the checkpoint whose files were written to `src_path`; the first rank is asked to."""
        save = self._save
        if save is None or (src_path, self.remap_path(dst_path)) != (save.folder, save.place):
            raise io.UnsupportedOperation(
                f"{dst_path}: only a whole checkpoint can be renamed, by its writer"
            )
        step = step_of(save.place)
        tags = {"writer": "torch_checkpointing"} | ({} if step is None else {"step": str(step)})
        commit_files(save.store, self._written(save), tags)

    def mkdir(self, path: Path, recursive: bool = True) -> None:
        """Make no folder: it is there when a file is in it."""

    def rmdir(self, path: Path) -> None:
        """Remove a checkpoint, its commit first. Raises NotCommitted if there is none of this library."""
        place = self.remap_path(path)
        self._places.forget(place)
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
        if self._save is not None and path == self._save.folder:
            return True  # asked before the rename, which finds out
        if self._has(path) or self._is_raw(path):
            return True
        prompt = self._places.store(self.remap_path(path)).capabilities.cross_client_visibility
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
            store = self._places.store(self.remap_path(path))
            files = {stat.key for stat in store.list() if "/" not in stat.key}
            folders = {
                each for each in store.folders() if self._has(path / each) or self._is_raw(path / each)
            }
            return sorted(files | folders)
