"""Digest the blocks of files cryptographically, and all that a commit names by a tree: good against forgery.

Checksums (`ckpt.consistency.checksums`) find damage at memory speed, and anybody can make bytes that have a given one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from ckpt.errors import ConfigurationError

ALGORITHMS = ("blake3", "sha256")
DIGEST_BYTES = 32
"""Of both."""

_LEAF, _NODE = b"\0", b"\1"
"""What a leaf and a node begin with (RFC 6962), so that neither passes for the other."""


class Hasher(Protocol):
    """A digest that is being computed."""

    def update(self, data: memoryview | bytes, /) -> object: ...

    def digest(self) -> bytes: ...


def hasher_of(algorithm: str) -> Callable[[memoryview | bytes], Hasher]:
    """Return what begins a digest with its first bytes. Raises ConfigurationError: unknown, or not installed."""
    if algorithm == "sha256":
        return hashlib.sha256
    if algorithm != "blake3":
        raise ConfigurationError(
            f"block digests are {' or '.join(map(repr, ALGORITHMS))}, not {algorithm!r:.60}"
        )
    try:
        return _blake3()
    except ImportError:
        raise ConfigurationError(
            "digests of the kind blake3 need the package blake3: pip install './ckpt-storage[sign]'"
        ) from None


def _blake3() -> Callable[[memoryview | bytes], Hasher]:
    from blake3 import blake3

    begin: Callable[[memoryview | bytes], Hasher] = blake3
    return begin


def checked_algorithm(algorithm: str | None) -> str | None:
    """Return the argument `block_digests`, if digests of the kind can be made here. Raises as `hasher_of`."""
    if algorithm is not None:
        hasher_of(algorithm)
    return algorithm


def digest_of(algorithm: str, data: bytes | bytearray | memoryview) -> bytes:
    """Digest bytes. Raises as `hasher_of`."""
    return hasher_of(algorithm)(memoryview(data)).digest()


def tree_root(algorithm: str, digests: Sequence[bytes]) -> bytes:
    """Return the root of the Merkle tree over `digests`, in the shape of RFC 6962 (2.1). Raises as `hasher_of`."""
    begin = hasher_of(algorithm)
    level = [begin(_LEAF + digest).digest() for digest in digests]
    if not level:
        return begin(b"").digest()
    while len(level) > 1:
        pairs = [begin(_NODE + a + b).digest() for a, b in zip(level[::2], level[1::2], strict=False)]
        level = pairs + level[2 * len(pairs) :]  # one without a pair goes up as it is
    return level[0]


class FileBlockDigests:
    """The digests of all blocks of a file, whose bytes come in pieces: of one block in order, of others in any."""

    def __init__(self, algorithm: str, nbytes: int, block_size_bytes: int) -> None:
        """Raises as `hasher_of`."""
        self._begin = hasher_of(algorithm)
        self._nbytes, self._block = nbytes, block_size_bytes
        self._digests = bytearray(DIGEST_BYTES * -(-nbytes // block_size_bytes))
        self._begun: dict[int, Hasher] = {}

    def see(self, position: int, piece: memoryview) -> None:
        """Digest a piece of one block; the first one begins it anew, as a part may be sent again."""
        number, offset = divmod(position, self._block)
        if offset == 0:
            hasher = self._begin(piece)
        else:
            hasher = self._begun.pop(number)
            hasher.update(piece)
        if position + piece.nbytes in ((number + 1) * self._block, self._nbytes):
            self._digests[DIGEST_BYTES * number : DIGEST_BYTES * (number + 1)] = hasher.digest()
        else:
            self._begun[number] = hasher

    def packed(self) -> bytes:
        """Return the digests one after the other, as the manifest keeps them."""
        return bytes(self._digests)


def block_digests(algorithm: str, buffers: Iterable[memoryview], block_size_bytes: int) -> list[bytes]:
    """Digest every block of the bytes in `buffers`, which start at a block's start. Raises as `hasher_of`."""
    begin = hasher_of(algorithm)
    digests: list[bytes] = []
    hasher, missing = None, block_size_bytes
    for buffer in buffers:
        start = 0
        while start < buffer.nbytes:
            piece = buffer[start : start + missing]
            if hasher is None:
                hasher = begin(piece)
            else:
                hasher.update(piece)
            start += piece.nbytes
            missing -= piece.nbytes
            if missing == 0:
                digests.append(hasher.digest())
                hasher, missing = None, block_size_bytes
    if hasher is not None:
        digests.append(hasher.digest())
    return digests
