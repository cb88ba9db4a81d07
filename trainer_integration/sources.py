"""Read documents of tokens by number, from anything with rows; the base class for other sources."""

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
    """Documents of tokens by number. Worker processes get a pickled copy, without open files.

    Attributes:
        documents: their number.
        dtype: of the tokens, an integer type.
        fingerprint: changes when the documents do; positions saved for others are refused.
    """

    documents: int
    dtype: np.dtype[Any]
    fingerprint: str

    @abstractmethod
    def tokens(self, document: int) -> Tokens:
        """Return a document's tokens, one-dimensional. Called once per sequence: keep it cheap."""

    def cuts(self, start: int, stop: int) -> Sequence[int]:
        """List the ascending numbers that cut `start` to `stop` into blocks cheap to read.

        Documents are shuffled inside of their block, and blocks among each other.
        """
        return ()


class Rows(Protocol):
    """Rows by number, such as a Hugging Face `Dataset`."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> Any: ...


class MapSource(Source):
    """Read documents from rows: a Hugging Face `Dataset`, a map-style torch `Dataset`, a list.

    Args:
        rows: read one at a time, by number; it has to pickle, or be inherited by forked workers.
        column: the column to read; None takes the row itself.
        tokenize: turns a value into tokens; None if values are tokens already.
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
    """Keep the values used last, up to a number of bytes. Pickles empty."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes, self._size_bytes = budget_bytes, 0
        self._values: OrderedDict[Hashable, tuple[T, int]] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], T], nbytes: Callable[[T], int]) -> T:
        """Return the value kept under `key`, or make it now."""
        entry = self._values.get(key)
        if entry is not None:
            self._values.move_to_end(key)
            return entry[0]
        value = make()
        size_bytes = nbytes(value)
        if size_bytes <= self._budget_bytes:
            self._values[key] = value, size_bytes
            self._size_bytes += size_bytes
        while self._size_bytes > self._budget_bytes:
            _, (_, dropped_bytes) = self._values.popitem(last=False)
            self._size_bytes -= dropped_bytes
        return value

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._budget_bytes,)


def as_tokens(values: Any, dtype: np.dtype[Any]) -> Tokens:
    """Convert `values` to an array. Raises ConfigurationError if they do not fit."""
    tokens = np.asarray(values)
    if tokens.size == 0:
        return np.empty(0, dtype)
    limits = np.iinfo(dtype)
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ConfigurationError(
            f"a document must be one list of integer tokens, not {tokens.ndim}-dimensional {tokens.dtype}"
        )
    if tokens.dtype != dtype and (tokens.min() < limits.min or tokens.max() > limits.max):
        raise ConfigurationError(
            f"tokens from {tokens.min()} to {tokens.max()} do not fit {dtype}; use a wider dtype"
        )
    return tokens.astype(dtype, copy=False)


def fingerprint_of(*facts: Any) -> str:
    """Make a short text that changes with any of the facts."""
    return f"{zlib.crc32(repr(facts).encode()):08x}"
