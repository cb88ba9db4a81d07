"""DCP's `Metadata` to and from bytes, without ever running what a pickle says.

Stock PyTorch stores its metadata as a pickle, and so must we for its readers. Unpickling runs code of the
pickle's choice; here it cannot:

1. the opcodes are scanned first: only those that plain data need, and no memo index that would make the
   unpickler allocate at will;
2. every class and function the pickle names resolves to an inert stand-in that is made for this one call,
   or the load is refused;
3. the stand-ins are turned into DCP's classes field by field, each checked.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from ckpt.collector import no_gc
from ckpt.errors import ConfigurationError, FormatError, UnsafeContent

__all__ = ["decode_metadata", "encode_metadata"]

_MAX_PLAIN_NODES = 50_000_000


def encode_metadata(metadata: Metadata) -> bytes:
    """The pickle that stock readers expect.

    Raises:
        ConfigurationError: they hold what no safe reader could load: `planner_data` that are more than plain
            values, tensors that are not strided, descriptions of another kind than DCP's two.
    """
    try:
        _check_plain(metadata.planner_data)
    except ValueError as error:
        raise ConfigurationError(
            f"the planner's planner_data holds {error}; only dict, list, tuple, str, bytes, numbers, bool and None "
            "can be stored safely"
        ) from None
    for fqn, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, TensorStorageMetadata):
            if stored.properties.layout is not torch.strided:
                raise ConfigurationError(f"{fqn!r} has the layout {stored.properties.layout}; save it dense")
        elif not isinstance(stored, BytesStorageMetadata):
            raise ConfigurationError(f"the planner describes {fqn!r} by a {type(stored).__name__}")
    with no_gc():
        return pickle.dumps(metadata, protocol=4)


def decode_metadata(data: bytes | bytearray | memoryview, *, url: str, key: str) -> Metadata:
    """The metadata in a pickle that may be hostile.

    Raises:
        UnsafeContent: the pickle asks for something that metadata never need.
        FormatError: it does not describe metadata.
    """
    try:
        with no_gc():
            _scan_opcodes(memoryview(data))
            return _metadata(_InertUnpickler(io.BytesIO(data)).load())
    except UnsafeContent as error:
        raise UnsafeContent(f"refused: {error.message}", url=url, key=key) from None
    except Exception as error:
        text = f"not valid checkpoint metadata: {type(error).__name__}: {error}"
        raise FormatError(text[:500], url=url, key=key) from error


# -- the opcodes ---------------------------------------------------------------------------------------

_ARGUMENT_BYTES: dict[int, int] = {
    **dict.fromkeys(b"(.012NRabde}l]st)u\x81\x85\x86\x87\x88\x89\x8f\x90\x91\x93\x94", 0),
    **dict.fromkeys(b"Khq\x80", 1),
    **dict.fromkeys(b"M", 2),
    **dict.fromkeys(b"Jjr", 4),
    **dict.fromkeys(b"G\x95", 8),
}
_COUNT_BYTES: dict[int, int] = {**dict.fromkeys(b"\x8cCU\x8a", 1), **dict.fromkeys(b"XBT", 4)}
_STOP, _LONG_BINPUT = b".r"


def _scan_opcodes(data: memoryview) -> None:
    """Walk over the opcodes without carrying any out.

    `LONG_BINPUT 2**31` would make the C unpickler allocate 32 GiB, and `BYTEARRAY8` any amount.
    """
    position, end = 0, data.nbytes
    while position < end:
        opcode = data[position]
        position += 1
        size = _ARGUMENT_BYTES.get(opcode)
        if size is None:
            width = _COUNT_BYTES.get(opcode)
            if width is None:
                raise UnsafeContent(f"a pickle with opcode {opcode:#04x}, which metadata never need")
            size = width + int.from_bytes(data[position : position + width], "little")
        elif opcode == _STOP:
            return
        elif opcode == _LONG_BINPUT and int.from_bytes(data[position : position + 4], "little") > end:
            raise UnsafeContent("a pickle whose memo would not fit into memory")
        position += size
    raise FormatError("the pickle has no end")


# -- stand-ins -----------------------------------------------------------------------------------------


class _InertUnpickler(pickle.Unpickler):
    """Resolves DCP's names to stand-ins of its own, so that a pickle cannot touch the real classes."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._known: dict[tuple[str, str], Any] = {
            ("torch", "Size"): tuple,
            ("torch.serialization", "_get_layout"): str,
            ("collections", "OrderedDict"): OrderedDict,
        }
        for module, names in _STAND_INS.items():
            for name in names:
                self._known[module, name] = type(name, (_StandIn,), {"__slots__": ("state",)})
        for module in ("pathlib", "pathlib._local"):
            for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"):
                self._known[module, name] = lambda *parts: "/".join(parts)
        self._known[_METADATA, "_MEM_FORMAT_ENCODING"] = lambda value: value

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._known:
            return self._known[module, name]
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise UnsafeContent(f"a pickle that asks for {module[:80]}.{name[:80]}")


class _StandIn:
    """An object of a pickle: its class's name, and the state it was given."""

    __slots__ = ()
    state: Any

    def __setstate__(self, state: Any) -> None:
        self.state = state


_METADATA = "torch.distributed.checkpoint.metadata"
_STAND_INS = {
    _METADATA: (
        "Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "BytesStorageMetadata",
        "ChunkStorageMetadata", "TensorProperties",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
}  # fmt: skip


# -- from stand-ins to DCP's classes -------------------------------------------------------------------


def _metadata(found: Any) -> Metadata:
    state = _state(found, "Metadata")
    tensors = _checked(state["state_dict_metadata"], dict)
    planner_data = state.get("planner_data")
    _check_plain(planner_data)
    storage = state.get("storage_data")
    return Metadata(
        state_dict_metadata={_checked(fqn, str): _storage_type(value) for fqn, value in tensors.items()},
        planner_data=planner_data,
        storage_data={_index(k): _storage_info(v) for k, v in _checked(storage, dict).items()},
        storage_meta=_storage_meta(state.get("storage_meta")),
        version=_optional(state.get("version"), str),
    )


def _storage_type(found: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if type(found).__name__ == "BytesStorageMetadata":
        return BytesStorageMetadata()
    state = _state(found, "TensorStorageMetadata")
    size = _size(state["size"])
    chunks = [_chunk(chunk, len(size)) for chunk in _checked(state["chunks"], list)]
    return TensorStorageMetadata(_properties(state["properties"]), size, chunks)


def _chunk(found: Any, dimensions: int) -> ChunkStorageMetadata:
    state = _state(found, "ChunkStorageMetadata")
    offsets, sizes = _size(state["offsets"]), _size(state["sizes"])
    if not len(offsets) == len(sizes) == dimensions:
        raise ValueError("a chunk with another number of dimensions than its tensor")
    return ChunkStorageMetadata(offsets, sizes)


def _properties(found: Any) -> TensorProperties:
    # The other fields are deprecated and play no part in loading.
    dtype, layout, requires_grad = _state(found, "TensorProperties", tuple)[:3]
    if layout != "torch.strided":
        raise ValueError(f"a tensor of layout {str(layout)[:40]}")
    return TensorProperties(dtype=_checked(dtype, torch.dtype), requires_grad=bool(requires_grad))


def _index(found: Any) -> MetadataIndex:
    state = _state(found, "MetadataIndex")
    offset = state.get("offset")
    return MetadataIndex(
        _checked(state["fqn"], str),
        None if offset is None else _size(offset),
        _optional(state.get("index"), int),
    )


def _storage_info(found: Any) -> _StorageInfo:
    state = _state(found, "_StorageInfo")
    descriptors = state.get("transform_descriptors")
    if descriptors is not None:
        descriptors = [_checked(name, str) for name in _checked(descriptors, list)]
    return _StorageInfo(
        _checked(state["relative_path"], str),
        _natural(state["offset"]),
        _natural(state["length"]),
        descriptors,
    )


def _storage_meta(found: Any) -> StorageMeta | None:
    if found is None:
        return None
    state = _state(found, "StorageMeta")
    return StorageMeta(
        checkpoint_id=_optional(state.get("checkpoint_id"), str), save_id=_optional(state.get("save_id"), str)
    )


def _state(found: Any, name: str, kind: type = dict) -> Any:
    if not isinstance(found, _StandIn) or type(found).__name__ != name:
        raise ValueError(f"{type(found).__name__[:40]} in place of {name}")
    return _checked(found.state, kind)


def _size(found: Any) -> torch.Size:
    return torch.Size([_natural(value) for value in _checked(found, tuple)])


def _natural(found: Any) -> int:
    # Sums and products of a few of them must stay exact in 64 bits wherever they go.
    if type(found) is not int or not 0 <= found < 1 << 62:
        raise ValueError("a size or offset that is not a number of bytes or elements")
    return found


def _checked(found: Any, kind: type) -> Any:
    if not isinstance(found, kind):
        raise TypeError(f"{type(found).__name__[:40]} in place of {kind.__name__}")
    return found


def _optional(found: Any, kind: type) -> Any:
    return None if found is None else _checked(found, kind)


def _check_plain(value: Any) -> None:
    """Raise ValueError unless `value` is made of plain values only; each shared part is looked at once."""
    seen: set[int] = set()
    todo = [value]
    while todo:
        found = todo.pop()
        kind = type(found)
        if kind in (str, int, float, bool, bytes, type(None)):
            continue
        if kind not in (dict, OrderedDict, list, tuple):
            raise ValueError(f"a {kind.__module__}.{kind.__qualname__}")
        if id(found) in seen:
            continue
        seen.add(id(found))
        if len(seen) > _MAX_PLAIN_NODES:
            raise ValueError("too many values")
        todo.extend(found)
        if isinstance(found, dict):
            todo.extend(found.values())
