"""Read token files: flat files of a tokenizer's output, mapped into memory or read from a store."""

from __future__ import annotations

import contextlib
import io
import os
import secrets
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ckpt.errors import ConfigurationError, FormatError, NotFound
from ckpt.trainer_integration.data_store.block_reader import (
    DEFAULT_DISK_CACHE_BYTES,
    BlockReader,
    StoredFile,
    find_files,
)
from ckpt.trainer_integration.data_store.stored_tokens import StoredTokens
from ckpt.trainer_integration.sources import (
    DEFAULT_CACHE_BYTES,
    Sliced,
    Source,
    Tokens,
    as_tokens,
    fingerprint_of,
)
from ckpt.whole_files import write_whole

__all__ = ["TokenFiles", "write_token_file"]

_OFFSETS = ".offsets.npy"
_LOOKED_AT = 8192
_MAX_HIGH = 16
"""The high halves of tokens of 32 bits are below it, for vocabularies of up to a million."""


class TokenFiles(Source):
    """Read documents from flat files of tokens.

    A file is `.npy`, or else raw tokens of type `dtype`. The offsets of its documents are in
    `<file>.offsets.npy` in the same folder: int64, ascending, the first 0, the last the number of tokens.
    Without such a file it is cut every `document_tokens` tokens.

    Files on the local disk are mapped into memory. Those of stores are read in blocks of 64 KiB, before they are used and
    many at a time.

    Args:
        paths: the files, in an order that is the same on all ranks and in all runs: paths, or URLs of any store of this
            library (`s3://bucket/a.bin`).
        dtype: of raw files; default uint16, unless a file looks as if it held uint32.
        document_tokens: length of a document in files without offsets.
        storage_options: of the stores; see `ckpt.backends.registry.open_store`.
        disk_cache: a folder of the local disk for what is read from stores; ranks and runs can share it.
        disk_cache_bytes: the most that the folder takes. Blocks are removed at random to make room.
        cache_bytes: memory of each process for blocks of stores.

    Raises:
        NotFound, FormatError: a file is missing, or is not a token file.
        StorageError: a store does not answer, or gives no access.
    """

    def __init__(
        self,
        paths: Sequence[str | os.PathLike[str]],
        *,
        dtype: npt.DTypeLike | None = None,
        document_tokens: int | None = None,
        storage_options: Mapping[str, Any] | None = None,
        disk_cache: str | os.PathLike[str] | None = None,
        disk_cache_bytes: int = DEFAULT_DISK_CACHE_BYTES,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
    ) -> None:
        self._raw_dtype, self._document_tokens = (
            np.dtype(np.uint16 if dtype is None else dtype),
            document_tokens,
        )
        self._is_default_dtype = dtype is None
        self._reader = BlockReader(
            storage_options=storage_options, disk_cache=disk_cache, disk_cache_bytes=disk_cache_bytes,
            cache_bytes=cache_bytes,
        )  # fmt: skip
        self._files = _with_offsets(find_files(paths, self._reader, at_random=True), self._reader)
        self.reads_ahead = any(isinstance(file, StoredFile) for file, _ in self._files)
        self._open: dict[int, tuple[_Flat, npt.NDArray[np.int64] | None]] = {}
        sizes = [self._facts(number) for number in range(len(self._files))]
        if not sizes:
            raise ConfigurationError("TokenFiles needs at least one path")
        self._starts = [0, *accumulate(documents for documents, _ in sizes)]
        self.documents = self._starts[-1]
        self.fingerprint = fingerprint_of(sizes)

    def tokens(self, document: int) -> Tokens:
        tokens, start, stop = self._place(document)
        return tokens[start:stop]

    def sliced(self, document: int) -> Sliced:
        tokens, start, stop = self._place(document)
        if not isinstance(tokens, StoredTokens):
            return tokens[start:stop]
        if tokens.is_in_memory:
            self._keep_whole(bisect_right(self._starts, document) - 1, tokens)
            return self.tokens(document)
        return tokens.part(start, stop)

    def _keep_whole(self, number: int, tokens: StoredTokens) -> None:
        """Put the blocks of a file together, so that it is read as a local one from now on."""
        self._open[number] = tokens.whole(), self._open[number][1]
        opened = (self._opened(number)[0] for number in range(len(self._files)))
        self.reads_ahead = any(isinstance(each, StoredTokens) for each in opened)

    def ahead(self, document: int, start: int = 0, stop: int | None = None) -> None:
        tokens, begin, end = self._place(document)
        if isinstance(tokens, StoredTokens):
            tokens.ahead(min(begin + start, end), end if stop is None else min(begin + stop, end))

    def _place(self, document: int) -> tuple[_Flat, int, int]:
        """Return the file of a document, and which of its tokens it is."""
        number = bisect_right(self._starts, document) - 1
        tokens, offsets = self._opened(number)
        index = document - self._starts[number]
        if offsets is None:
            length = self._document_tokens or 0
            return tokens, index * length, min((index + 1) * length, len(tokens))
        start, stop = int(offsets[index]), int(offsets[index + 1])
        if not 0 <= start <= stop <= len(tokens):
            raise FormatError(
                f"{_text(self._files[number][0])}{_OFFSETS}: document {index} is tokens {start} to {stop} of {len(tokens)}"
            )
        return tokens, start, stop

    def lengths(self, documents: npt.NDArray[np.int64], /) -> npt.NDArray[np.int64]:
        lengths = np.empty(len(documents), np.int64)
        files = np.searchsorted(self._starts, documents, "right") - 1
        for number in np.flatnonzero(np.bincount(files)).tolist():
            here = files == number
            tokens, offsets = self._opened(number)
            index = documents[here] - self._starts[number]
            if offsets is not None:
                lengths[here] = offsets[index + 1] - offsets[index]
            else:
                length = self._document_tokens or 0
                lengths[here] = np.minimum(length, len(tokens) - index * length)
        if len(lengths) and lengths.min() < 0:
            raise FormatError(
                f"the offsets of the documents next to {_text(self._files[0][0])} do not ascend"
            )
        return lengths

    def _facts(self, number: int) -> tuple[int, int]:
        """Count the documents and tokens of a file; check that all files are of one type."""
        tokens, offsets = self._opened(number)
        path = _text(self._files[number][0])
        if number == 0:
            self.dtype = tokens.dtype
        if tokens.dtype != self.dtype:
            raise FormatError(
                f"{path} holds {tokens.dtype}, but the first file {self.dtype}; all files need the same type"
            )
        if offsets is not None:
            return len(offsets) - 1, len(tokens)
        if self._is_default_dtype and not path.endswith(".npy") and _looks_wider(tokens[:_LOOKED_AT]):
            raise ConfigurationError(
                f"{path} looks as if it held uint32, not uint16: every second number is small. Pass dtype=np.uint32, or "
                "dtype=np.uint16 if that is right"
            )
        if not self._document_tokens:
            raise NotFound(
                f"{path}{_OFFSETS} is missing; write it with write_token_file, or pass document_tokens"
            )
        return -(-len(tokens) // self._document_tokens), len(tokens)

    def _opened(self, number: int) -> tuple[_Flat, npt.NDArray[np.int64] | None]:
        if number not in self._open:
            if not self._open:
                self._fetch_heads()
            file, offsets_file = self._files[number]
            raw_dtype = None if _text(file).endswith(".npy") else self._raw_dtype
            tokens = self._flat(file, raw_dtype)
            offsets: Any = None if offsets_file is None else self._flat(offsets_file, None)
            if isinstance(offsets, StoredTokens):
                offsets = offsets.whole()
            _check(_text(file), tokens, offsets)
            self._open[number] = tokens, offsets
        return self._open[number]

    def _flat(self, file: StoredFile | Path, raw_dtype: np.dtype[Any] | None) -> Any:
        if isinstance(file, StoredFile):
            return StoredTokens(self._reader, file, raw_dtype)
        return _map(file, raw_dtype)

    def _fetch_heads(self) -> None:
        """Begin to fetch what is read of each file when it is opened."""
        for file, offsets in self._files:
            if isinstance(offsets, StoredFile):
                self._reader.ahead(offsets, 0, offsets.size_bytes)
            if isinstance(file, StoredFile) and (offsets is None or file.url.endswith(".npy")):
                self._reader.ahead(file, 0, min(file.size_bytes, 1))

    def __getstate__(self) -> dict[str, Any]:
        is_stored = any(isinstance(file, StoredFile) for file, _ in self._files)
        # A mapped array would pickle as its bytes.
        return {**self.__dict__, "_open": {}, "reads_ahead": is_stored}


_Flat = Tokens | StoredTokens
_Pair = tuple["StoredFile | Path", "StoredFile | Path | None"]


def _with_offsets(files: Sequence[StoredFile | Path], reader: BlockReader) -> list[_Pair]:
    """Return files and those of their offsets, if they have them."""
    stored = iter(
        reader.find([f"{file.full_url}{_OFFSETS}" for file in files if isinstance(file, StoredFile)])
    )
    pairs: list[_Pair] = []
    for file in files:
        if isinstance(file, StoredFile):
            found = next(stored)
            pairs.append((file, None if found is None else reader.open([found])[0]))
        else:
            offsets = Path(f"{file}{_OFFSETS}")
            pairs.append((file, offsets if offsets.exists() else None))
    return pairs


def _text(file: StoredFile | Path) -> str:
    return file.url if isinstance(file, StoredFile) else str(file)


def write_token_file(
    path: str | os.PathLike[str],
    documents: Iterable[Sequence[int] | Tokens],
    *,
    dtype: npt.DTypeLike = np.uint16,
) -> None:
    """Write documents as raw tokens, and their offsets to a file next to them.

    A file that is there is replaced once all is written: programs that have it mapped keep reading the older one.
    """
    offsets = [0]
    partial = f"{os.fspath(path)}.{secrets.token_hex(8)}.tmp"
    try:
        with open(partial, "xb") as file:
            for document in documents:
                try:
                    tokens = as_tokens(document, np.dtype(dtype))
                except ConfigurationError as error:
                    raise ConfigurationError(f"document {len(offsets) - 1}: {error.message}") from None
                file.write(tokens.tobytes())
                offsets.append(offsets[-1] + tokens.size)
        head = io.BytesIO()
        np.save(head, np.array(offsets, np.int64), allow_pickle=False)
        write_whole(f"{os.fspath(path)}{_OFFSETS}", head.getvalue())
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise


def _map(path: Path, raw_dtype: np.dtype[Any] | None) -> Any:
    """Map a file into memory; `raw_dtype` None reads the type from the head of a `.npy`."""
    try:
        if raw_dtype is None:
            return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
        if path.stat().st_size == 0:
            return np.empty(0, raw_dtype)
        return np.asarray(np.memmap(path, raw_dtype, "r"))
    except FileNotFoundError:
        raise NotFound(f"{path} does not exist") from None
    except (ValueError, EOFError) as error:
        raise FormatError(f"{path}: {error}") from error


def _looks_wider(tokens: Tokens) -> bool:
    """Tell whether numbers of 16 bits are likely to be the halves of numbers of 32 bits."""
    low = tokens[::2]
    high = tokens[1::2]
    return len(high) > 0 and int(high.max()) < _MAX_HIGH and int(low.max()) >= _MAX_HIGH


def _check(path: str, tokens: _Flat, offsets: npt.NDArray[np.int64] | None) -> None:
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise FormatError(
            f"{path} must be one list of integer tokens, not {tokens.ndim}-dimensional {tokens.dtype}"
        )
    if offsets is None:
        return
    fits = offsets.ndim == 1 and offsets.dtype == np.int64 and len(offsets) > 0
    if not fits or offsets[0] != 0 or offsets[-1] != len(tokens):
        raise FormatError(f"{path}{_OFFSETS} does not describe {path}, which holds {len(tokens)} tokens")
