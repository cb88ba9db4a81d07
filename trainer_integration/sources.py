"""Read documents of tokens by number, from anything with rows; the base class for other sources."""

from __future__ import annotations

import hashlib
import zlib
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from ckpt.errors import ConfigurationError, StorageError

__all__ = ["Cache", "MapSource", "Source", "Tokenize", "Tokens", "fingerprint_of"]

Tokens = npt.NDArray[np.integer[Any]]
Tokenize = Callable[[Any], Sequence[int]]

T = TypeVar("T")


class Sliced(Protocol):
    """Tokens of which slices are taken; an array is one."""

    def __len__(self) -> int: ...

    def __getitem__(self, where: slice, /) -> Any: ...


DEFAULT_CACHE_BYTES = 256 << 20
_MAX_COUNTED = 10**6
"""Rows whose lengths are counted: it takes each process a microsecond or more a row."""


class Source(ABC):
    """Documents of tokens by number. Worker processes get a pickled copy, without open files.

    Attributes:
        documents: their number.
        dtype: of the tokens, an integer type.
        fingerprint: what is known of all documents without reading them, such as the sizes of files; it and a sample of
            documents say whether positions were saved for these data.
    """

    documents: int
    dtype: np.dtype[Any]
    fingerprint: str = ""

    reads_ahead: bool = False
    """Whether `ahead` is called with the documents that are read soon."""

    samples = 16
    """Documents that are read to recognise the data: fewer where one is dear to read."""

    @abstractmethod
    def tokens(self, document: int) -> Tokens:
        """Return a document's tokens, one-dimensional. Called once per sequence: keep it cheap."""

    def sliced(self, document: int) -> Sliced:
        """Return a document of which a part is taken: a source that can need not read all of it."""
        return self.tokens(document)

    def ahead(self, document: int, start: int = 0, stop: int | None = None) -> None:  # noqa: B027 (most are local)
        """Begin to fetch tokens `start` to `stop` of a document that is read soon, without waiting for them."""

    def lengths(self, documents: npt.NDArray[np.int64], /) -> npt.NDArray[np.int64] | None:
        """Return how many tokens some documents have; None if that is not known without reading them."""
        return None

    def finished(self, document: int) -> None:  # noqa: B027 (most keep nothing)
        """Forget a document that was read to its end."""

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

    Without `tokenize`, up to 10^6 rows are counted once: where the lengths of documents are known, all ranks read in one
    order.

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
        if not (hasattr(rows, "__len__") and hasattr(rows, "__getitem__")):
            raise ConfigurationError(
                f"rows= needs a length and rows by number, and a {type(rows).__name__} has not both: give a map-style data "
                "set (of Hugging Face: load_dataset(..., streaming=False))"
            )
        self._rows, self._column, self._tokenize = rows, column, tokenize
        self.documents, self.dtype = len(rows), np.dtype(dtype)
        self._lengths: npt.NDArray[np.int64] | None = None
        self._counts = tokenize is None and self.documents <= _MAX_COUNTED
        self._cache: Cache[Tokens] = Cache(cache_bytes)

    def tokens(self, document: int) -> Tokens:
        return self._cache.get(document, lambda: self._read(document), lambda tokens: tokens.nbytes)

    def lengths(self, documents: npt.NDArray[np.int64], /) -> npt.NDArray[np.int64] | None:
        if self._counts and self._lengths is None:
            try:
                self._lengths = np.fromiter(
                    (len(self._read(n)) for n in range(self.documents)), np.int64, self.documents
                )
            except Exception:
                self._counts = False  # a row that cannot be read is named when its turn comes
        return None if self._lengths is None else self._lengths[documents]

    def finished(self, document: int) -> None:
        self._cache.drop(document)

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
        value = self.kept(key)
        if value is None:
            value = make()
            self.keep(key, value, nbytes(value))
        return value

    def kept(self, key: Hashable) -> T | None:
        """Return the value kept under `key`, if there is one."""
        entry = self._values.get(key)
        if entry is None:
            return None
        self._values.move_to_end(key)
        return entry[0]

    def keep(self, key: Hashable, value: T, size_bytes: int) -> None:
        """Keep a value under a key that has none."""
        if size_bytes <= self._budget_bytes:
            self._values[key] = value, size_bytes
            self._size_bytes += size_bytes
        while self._size_bytes > self._budget_bytes:
            _, (_, dropped_bytes) = self._values.popitem(last=False)
            self._size_bytes -= dropped_bytes

    def __contains__(self, key: Hashable) -> bool:
        return key in self._values

    def drop(self, key: Hashable) -> None:
        """Forget the value under `key`, if there is one."""
        _, size_bytes = self._values.pop(key, (None, 0))
        self._size_bytes -= size_bytes

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._budget_bytes,)


def is_of_store(error: Exception) -> bool:
    """Tell whether a store failed, and not a file of this machine or a document."""
    return isinstance(error, StorageError) and error.url is not None


class Look(NamedTuple):
    """A look at a sample of a source's documents: a text that changes with them, and their mean length in tokens."""

    content: str
    mean_tokens: float


def look_at(source: Source) -> Look:
    """Read up to 16 documents, spread over the whole source."""
    count = min(source.samples, source.documents)
    numbers = sorted({(source.documents - 1) * at // max(1, count - 1) for at in range(count)})
    digest = hashlib.blake2b(repr((source.documents, source.fingerprint)).encode(), digest_size=8)
    tokens = 0
    for number in numbers:
        source.ahead(number)
    for number in numbers:
        try:
            document = np.asarray(source.tokens(number), np.int64)
        except Exception as error:
            if is_of_store(error):
                raise  # the data may be as they were
            digest.update(b"unreadable")  # it is named when its turn comes
            continue
        tokens += len(document)
        digest.update(len(document).to_bytes(8, "little") + document.tobytes())
    return Look(digest.hexdigest(), tokens / max(1, len(numbers)))


def as_tokens(values: Any, dtype: np.dtype[Any]) -> Tokens:
    """Convert `values` to an array. Raises ConfigurationError if they do not fit."""
    if hasattr(values, "input_ids") or isinstance(values, dict):
        raise ConfigurationError(
            f"a document must be one list of integer tokens, not a {type(values).__name__}: a tokenizer of Hugging Face "
            'returns several values, of which tokens are ["input_ids"]'
        )
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
