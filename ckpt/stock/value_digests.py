"""Digest an object by its types and values: two objects that are the same have one digest, however their parts are shared."""

from __future__ import annotations

import hashlib
import io
import struct
from collections.abc import Iterable
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch

from ckpt.consistency.checksums import crc64nvme

_DIGEST_BYTES = 16
_CYCLE = b"\0cycle"


def value_digest(value: Any) -> bytes:
    """Return the digest of an object; floats count bit for bit, the order of keys and where tensors lie do not.

    Raises whatever an object raises that cannot be pickled, RecursionError if it is nested too deeply, and TypeError for
    tensors that are not dense.
    """
    return _Walk().digest(value)


class _Walk:
    """The walk over one object; digested parts stay alive, so that no other part takes their ids."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, bytes]] = {}

    def digest(self, value: Any) -> bytes:
        known = self._known.get(id(value))
        if known is not None:
            return known[1]
        self._known[id(value)] = value, _CYCLE  # until it is known
        digest = _hashed(type(value), self._parts(value))
        self._known[id(value)] = value, digest
        return digest

    def _parts(self, value: Any) -> Iterable[bytes]:
        """List the bytes of a value to hash, apart from its type."""
        plain = _plain(value)
        if plain is not None:
            return [plain]
        if isinstance(value, torch.Tensor):
            return _tensor_parts(value)
        if isinstance(value, dict):
            pairs = sorted(self.digest(key) + self.digest(each) for key, each in value.items())
            return [*pairs, self.digest(getattr(value, "__dict__", None))]
        if isinstance(value, list | tuple):
            return map(self.digest, value)
        if isinstance(value, set | frozenset):
            return sorted(map(self.digest, value))
        # As pickle sees it: its maker, arguments, state, elements and pairs.
        reduced = value.__reduce_ex__(4)
        if isinstance(reduced, str):
            return [reduced.encode()]
        make, arguments, *more = reduced
        rest = [list(each) if number else each for number, each in enumerate(more[:3])]
        return map(self.digest, [make, arguments, *rest])


def _plain(value: Any) -> bytes | None:
    """Return the bytes of a value without parts; None for any other."""
    if value is None:
        return b""
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    if isinstance(value, int):
        return int(value).to_bytes(int(value).bit_length() // 8 + 1, "little", signed=True)
    if isinstance(value, float):
        return struct.pack("<d", value)
    if isinstance(value, complex):
        return struct.pack("<dd", value.real, value.imag)
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    if isinstance(value, io.BytesIO):
        return value.getvalue()
    if isinstance(value, torch.dtype | torch.device | torch.layout | torch.memory_format):
        return str(value).encode()
    if isinstance(value, type | FunctionType | BuiltinFunctionType):  # known by their names
        return f"{value.__module__}.{value.__qualname__}".encode()
    return None


def _tensor_parts(tensor: torch.Tensor) -> list[bytes]:
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise TypeError(f"a tensor of layout {tensor.layout} has no digest")
    data = tensor.to("cpu").contiguous().flatten().view(torch.uint8).numpy().data
    return [
        str(tensor.dtype).encode(),
        repr(tuple(tensor.shape)).encode(),
        struct.pack("<Q", crc64nvme(data)),
    ]


def _hashed(kind: type, parts: Iterable[bytes]) -> bytes:
    name = "io.BytesIO" if issubclass(kind, io.BytesIO) else f"{kind.__module__}.{kind.__qualname__}"
    digest = hashlib.blake2b(name.encode(), digest_size=_DIGEST_BYTES)
    for part in parts:
        digest.update(struct.pack("<Q", len(part)))
        digest.update(part)
    return digest.digest()
