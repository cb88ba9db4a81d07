"""Read DCP's `Metadata`, as stock PyTorch stores it, from a pickle without running any code of it.

The pickle is read into inert stand-ins, which then become DCP's classes field by field, each
checked.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp

from ckpt.errors import FormatError, UnsafeContent
from ckpt.format.mistaken_files import mistaken_for
from ckpt.format.planner_data import NotPlain, check_planner_data
from ckpt.gc_pause import no_gc
from ckpt.stock.inert_unpickler import StandIn, load_inert
from ckpt.stock.stored_paths import StoredPath, path_text, refusal
from ckpt.torch_private import StorageInfo

_MAX_DIMENSIONS = 64
_MAX_EXTENSIONS = 64
_CHUNK_BYTES = 8
_SLACK_BYTES = 1 << 20

_LAYOUTS = {str(layout): layout for layout in vars(torch).values() if isinstance(layout, torch.layout)}


def decode_metadata(data: bytes | bytearray | memoryview, *, url: str, key: str) -> dcp.Metadata:
    """Decode the metadata in a pickle that may be hostile.

    Raises UnsafeContent if it asks for what metadata never needs, FormatError if it is none.
    """
    try:
        with no_gc():
            return _metadata(load_inert(bytes(data), _CLASSES, foreign_paths=True), len(data))
    except Exception as error:
        if isinstance(error, UnsafeContent) and mistaken_for(data) is None:
            raise UnsafeContent(f"refused: {error.message}", url=url, key=key) from None
        text = mistaken_for(data) or f"not valid checkpoint metadata: {type(error).__name__}: {error}"
        raise FormatError(text[:500], url=url, key=key) from error


_CLASSES = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "BytesStorageMetadata",
        "ChunkStorageMetadata", "TensorProperties",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    # Where older versions of torch had it.
    "torch.distributed._shard.sharded_tensor.metadata": ("TensorProperties",),
}  # fmt: skip


# -- from stand-ins to DCP's classes -------------------------------------------------------------------


def _metadata(stand_in: Any, pickle_bytes: int) -> dcp.Metadata:
    state, chunks = _state(stand_in, "Metadata"), _Chunks(pickle_bytes)
    tensors = _checked(state["state_dict_metadata"], dict)
    planner_data = state.get("planner_data")
    try:
        check_planner_data(planner_data)
    except NotPlain as error:
        _refuse_path(error.value)
        raise
    storage = state.get("storage_data")
    return dcp.Metadata(
        state_dict_metadata={
            _checked(fqn, str): _storage_type(value, chunks) for fqn, value in tensors.items()
        },
        planner_data=planner_data,
        storage_data=_storage(_checked(storage, dict), _Paths(pickle_bytes)),
        storage_meta=_storage_meta(state.get("storage_meta")),
        version=_optional(state.get("version"), str),
    )


class _Chunks:
    """Make the chunks of all tensors: no more of them than a pickle of that size could list one by one.

    Two bytes of a pickle list a chunk once more; chunks that are not shared, with their places, take
    more bytes than are counted here.
    """

    def __init__(self, pickle_bytes: int) -> None:
        self._left_bytes = pickle_bytes + _SLACK_BYTES

    def of(self, listed: Any, dimensions: int) -> list[dcp.ChunkStorageMetadata]:
        stand_ins = _checked(listed, list)
        self._left_bytes -= len(stand_ins) * (_CHUNK_BYTES + dimensions)
        if self._left_bytes < 0:
            raise ValueError("far more chunks than are stored of them")
        return [_chunk(stand_in, dimensions) for stand_in in stand_ins]


def _storage_type(stand_in: Any, chunks: _Chunks) -> dcp.TensorStorageMetadata | dcp.BytesStorageMetadata:
    if type(stand_in).__name__ == "BytesStorageMetadata":
        return dcp.BytesStorageMetadata()
    state = _state(stand_in, "TensorStorageMetadata")
    size = _size(state["size"])
    listed = chunks.of(state["chunks"], len(size))
    return dcp.TensorStorageMetadata(_properties(state["properties"]), size, listed)


def _chunk(stand_in: Any, dimensions: int) -> dcp.ChunkStorageMetadata:
    state = _state(stand_in, "ChunkStorageMetadata")
    offsets, sizes = _size(state["offsets"]), _size(state["sizes"])
    if not len(offsets) == len(sizes) == dimensions:
        raise ValueError("a chunk with another number of dimensions than its tensor")
    return dcp.ChunkStorageMetadata(offsets, sizes)


def _properties(stand_in: Any) -> dcp.TensorProperties:
    # The other fields are deprecated and play no part in loading.
    dtype, layout, requires_grad = _state(stand_in, "TensorProperties", tuple)[:3]
    if _checked(layout, str) not in _LAYOUTS:  # hashing a tuple can overrun the stack
        raise ValueError(f"a tensor of layout {layout[:40]}")
    return dcp.TensorProperties(_checked(dtype, torch.dtype), _LAYOUTS[layout], requires_grad is True)


def _index(stand_in: Any) -> dcp.MetadataIndex:
    state = _state(stand_in, "MetadataIndex")
    offset = state.get("offset")
    return dcp.MetadataIndex(
        _checked(state["fqn"], str),
        None if offset is None else _size(offset),
        _optional(state.get("index"), int),
    )


class _Paths:
    """Make texts of the paths of all items: together not much longer than the pickle, which may repeat their parts."""

    def __init__(self, pickle_bytes: int) -> None:
        self._left = pickle_bytes + _SLACK_BYTES

    def of(self, path: Any) -> str:
        if not isinstance(path, StoredPath):
            return _checked(path, str)  # type: ignore[no-any-return]
        text = path_text(path, self._left)
        self._left -= len(text) + 1
        return text


def _storage(storage: dict[Any, Any], paths: _Paths) -> dict[dcp.MetadataIndex, StorageInfo]:
    items = [(_index(key), _storage_info(value, paths)) for key, value in storage.items()]
    # The hash of an offset is no secret: looking at it first keeps a dict of equal ones from being built.
    if len({hash(index) for index, _ in items}) != len(items):
        raise ValueError("an item that is listed twice")
    return dict(items)


def _storage_info(stand_in: Any, paths: _Paths) -> StorageInfo:
    state = _state(stand_in, "_StorageInfo")
    descriptors = state.get("transform_descriptors")
    if descriptors is not None:
        if len(_checked(descriptors, list)) > _MAX_EXTENSIONS:
            raise ValueError(f"an item that is transformed {len(descriptors)} times")
        descriptors = [_checked(name, str) for name in descriptors]
    return StorageInfo(
        paths.of(state["relative_path"]),
        _natural(state["offset"]),
        _natural(state["length"]),
        descriptors,
    )


def _storage_meta(stand_in: Any) -> dcp.StorageMeta | None:
    if stand_in is None:
        return None
    state = _state(stand_in, "StorageMeta")
    location = state.get("checkpoint_id")
    if isinstance(location, StoredPath):  # where it was saved to, which no load needs
        location = None
    return dcp.StorageMeta(
        checkpoint_id=_optional(location, str), save_id=_optional(state.get("save_id"), str)
    )


def _state(stand_in: Any, name: str, kind: type = dict) -> Any:
    _refuse_path(stand_in)
    if not isinstance(stand_in, StandIn) or type(stand_in).__name__ != name:
        raise ValueError(f"{type(stand_in).__name__[:40]} in place of {name}")
    return _checked(stand_in.state, kind)


def _size(sizes: Any) -> torch.Size:
    if len(_checked(sizes, tuple)) > _MAX_DIMENSIONS:
        raise ValueError(f"a size of {len(sizes)} dimensions")
    return torch.Size([_natural(value) for value in sizes])


def _natural(value: Any) -> int:
    # Sums and products of a few of them must stay exact in 64 bits wherever they go.
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError("a size or offset that is not a number of bytes or elements")
    return value


def _checked(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        _refuse_path(value)
        raise TypeError(f"{type(value).__name__[:40]} in place of {kind.__name__}")
    return value


def _refuse_path(value: Any) -> None:
    """Raise UnsafeContent for an instance of another package's class where metadata has no path."""
    is_class = isinstance(value, type) and issubclass(value, StoredPath)
    if is_class or isinstance(value, StoredPath):
        raise UnsafeContent(refusal(value.class_name))


def _optional(value: Any, kind: type) -> Any:
    return None if value is None else _checked(value, kind)
