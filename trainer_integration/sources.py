"""What a loader reads: numbered documents, each a run of tokens."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from ckpt.errors import ConfigurationError

__all__ = ["Cache", "MapSource", "Source", "Tokenize", "Tokens", "fingerprint_of"]

Tokens = npt.NDArray[np.integer[Any]]
Tokenize = Callable[[Any], Sequence[int]]

T = TypeVar("T")

DEFAULT_CACHE_BYTES = 256 << 20


class Source(ABC):
    """Numbered documents of tokens. It is copied into worker processes, so it pickles, without what it has open.

    Attributes:
        documents: how many there are.
        dtype: of the tokens, an integer type.
        fingerprint: changes when the documents do; positions saved for others are refused.
    """

    documents: int
    dtype: np.dtype[Any]
    fingerprint: str

    @abstractmethod
    def tokens(self, document: int) -> Tokens:
        """One document's tokens, one-dimensional. Asked for again for each sequence cut from it: keep it cheap."""

    def cuts(self, start: int, stop: int) -> Sequence[int]:
        """Ascending numbers between `start` and `stop`: what lies between two is cheap to read together.

        Documents are shuffled inside of such blocks, and the blocks among each other.
        """
        return ()


class Rows(Protocol):
    """Anything with numbered rows, such as a Hugging Face `Dataset`."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> Any: ...


class MapSource(Source):
    """Documents of anything with rows: a Hugging Face `Dataset`, a map-style torch `Dataset`, a list.

    Args:
        rows: read one at a time, by number; it has to pickle, or be inherited by forked workers.
        column: what to take of each row; None takes the row itself.
        tokenize: makes tokens of it; None where it is tokens already.
        dtype: what the tokens are kept as.
        cache_bytes: memory for documents that are not read to their end yet.
    """

    def __init__(
        self,
        rows: Rows,
        column: str | None = None,
        *,
        tokenize: Tokenize | None = None,
        dtype: npt.DTypeLike = np.int32,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
    ) -> None:
        self._rows, self._column, self._tokenize = rows, column, tokenize
        self.documents, self.dtype = len(rows), np.dtype(dtype)
        # Hugging Face's own fingerprint names the transformations that made a data set.
        self.fingerprint = fingerprint_of(self.documents, column, getattr(rows, "_fingerprint", None))
        self._cache: Cache[Tokens] = Cache(cache_bytes)

    def tokens(self, document: int) -> Tokens:
        return self._cache.get(document, lambda: self._read(document), lambda tokens: tokens.nbytes)

    def _read(self, document: int) -> Tokens:
        value = self._rows[document]
        if self._column is not None:
            value = value[self._column]
        return as_tokens(value if self._tokenize is None else self._tokenize(value), self.dtype)


class Cache(Generic[T]):
    """What was used last, up to a number of bytes; larger things are handed through. Pickles empty."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes, self._held_bytes = budget_bytes, 0
        self._held: OrderedDict[Hashable, tuple[T, int]] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], T], nbytes: Callable[[T], int]) -> T:
        """What is held under `key`, or else made now."""
        found = self._held.get(key)
        if found is not None:
            self._held.move_to_end(key)
            return found[0]
        made = make()
        size = nbytes(made)
        if size <= self._budget_bytes:
            self._held[key] = made, size
            self._held_bytes += size
        while self._held_bytes > self._budget_bytes:
            _, (_, dropped) = self._held.popitem(last=False)
            self._held_bytes -= dropped
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._budget_bytes,)


def as_tokens(values: Any, dtype: np.dtype[Any]) -> Tokens:
    """`values` as a one-dimensional array. Raises ConfigurationError for what are no tokens of that type."""
    found = np.asarray(values)
    if found.size == 0:
        return np.empty(0, dtype)
    limits = np.iinfo(dtype)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise ConfigurationError(f"not a run of tokens: {found.ndim}-dimensional, {found.dtype}")
    if found.dtype != dtype and (found.min() < limits.min or found.max() > limits.max):
        raise ConfigurationError(f"tokens from {found.min()} to {found.max()} do not fit {dtype}")
    return found.astype(dtype, copy=False)


def fingerprint_of(*facts: Any) -> str:
    """A short text that changes with any of the facts."""
    return f"{zlib.crc32(repr(facts).encode()):08x}"
