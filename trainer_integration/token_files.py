"""Read token files: flat files of a tokenizer's output, mapped into memory."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ckpt.errors import ConfigurationError, FormatError, NotFound
from ckpt.trainer_integration.sources import Source, Tokens, as_tokens, fingerprint_of

__all__ = ["TokenFiles", "write_token_file"]

_OFFSETS = ".offsets.npy"
_LOOKED_AT = 8192
_MAX_HIGH = 16
"""The high halves of tokens of 32 bits are below it, for vocabularies of up to a million."""


class TokenFiles(Source):
    """Read documents from flat files of tokens.

    A file is `.npy`, or else raw tokens of type `dtype`. The offsets of its documents are in
    `<file>.offsets.npy` beside it: int64, ascending, the first 0, the last the number of tokens.
    Without such a file it is cut every `document_tokens` tokens.

    Args:
        paths: the files, in an order that is the same on all ranks and in all runs.
        dtype: of raw files; default uint16, unless a file looks as if it held uint32.
        document_tokens: length of a document in files without offsets.

    Raises:
        NotFound, FormatError: a file is missing, or is not a token file.
    """

    def __init__(
        self,
        paths: Sequence[str | os.PathLike[str]],
        *,
        dtype: npt.DTypeLike | None = None,
        document_tokens: int | None = None,
    ) -> None:
        self._paths = [Path(path).absolute() for path in paths]
        self._raw_dtype, self._document_tokens = (
            np.dtype(np.uint16 if dtype is None else dtype),
            document_tokens,
        )
        self._is_default_dtype = dtype is None
        self._open: dict[int, tuple[Tokens, npt.NDArray[np.int64] | None]] = {}
        sizes = [self._facts(number) for number in range(len(self._paths))]
        if not sizes:
            raise ConfigurationError("TokenFiles needs at least one path")
        self._starts = [0, *accumulate(documents for documents, _ in sizes)]
        self.documents = self._starts[-1]
        self.fingerprint = fingerprint_of(sizes)

    def tokens(self, document: int) -> Tokens:
        number = bisect_right(self._starts, document) - 1
        tokens, offsets = self._mapped(number)
        index = document - self._starts[number]
        if offsets is not None:
            start, stop = int(offsets[index]), int(offsets[index + 1])
            if not 0 <= start <= stop <= len(tokens):
                raise FormatError(
                    f"{self._paths[number]}{_OFFSETS}: document {index} is tokens {start} to {stop} of {len(tokens)}"
                )
            return tokens[start:stop]
        length = self._document_tokens or 0
        return tokens[index * length : (index + 1) * length]

    def lengths(self, documents: npt.NDArray[np.int64], /) -> npt.NDArray[np.int64]:
        lengths = np.empty(len(documents), np.int64)
        files = np.searchsorted(self._starts, documents, "right") - 1
        for number in np.unique(files).tolist():
            here = files == number
            tokens, offsets = self._mapped(number)
            index = documents[here] - self._starts[number]
            if offsets is not None:
                lengths[here] = offsets[index + 1] - offsets[index]
            else:
                length = self._document_tokens or 0
                lengths[here] = np.minimum(length, len(tokens) - index * length)
        if len(lengths) and lengths.min() < 0:
            raise FormatError(f"the offsets of the documents next to {self._paths[0]} do not ascend")
        return lengths

    def _facts(self, number: int) -> tuple[int, int]:
        """Count the documents and tokens of a file; check that all files are of one type."""
        tokens, offsets = self._mapped(number)
        path = self._paths[number]
        if number == 0:
            self.dtype = tokens.dtype
        if tokens.dtype != self.dtype:
            raise FormatError(
                f"{path} holds {tokens.dtype}, but the first file {self.dtype}; all files need the same type"
            )
        if offsets is not None:
            return len(offsets) - 1, len(tokens)
        if self._is_default_dtype and path.suffix != ".npy" and _looks_wider(tokens):
            raise ConfigurationError(
                f"{path} looks as if it held uint32, not uint16: every second number is small. Pass dtype=np.uint32, or "
                "dtype=np.uint16 if that is right"
            )
        if not self._document_tokens:
            raise NotFound(
                f"{path}{_OFFSETS} is missing; write it with write_token_file, or pass document_tokens"
            )
        return -(-len(tokens) // self._document_tokens), len(tokens)

    def _mapped(self, number: int) -> tuple[Tokens, npt.NDArray[np.int64] | None]:
        if number not in self._open:
            path = self._paths[number]
            offsets_path = Path(f"{path}{_OFFSETS}")
            tokens = _map(path, None if path.suffix == ".npy" else self._raw_dtype)
            offsets = _map(offsets_path, None) if offsets_path.exists() else None
            _check(path, tokens, offsets)
            self._open[number] = tokens, offsets
        return self._open[number]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}}  # a mapped array would pickle as its bytes


def write_token_file(
    path: str | os.PathLike[str],
    documents: Iterable[Sequence[int] | Tokens],
    *,
    dtype: npt.DTypeLike = np.uint16,
) -> None:
    """Write documents as raw tokens, and their offsets to a file beside them."""
    offsets = [0]
    with open(path, "wb") as file:
        for document in documents:
            try:
                tokens = as_tokens(document, np.dtype(dtype))
            except ConfigurationError as error:
                raise ConfigurationError(f"document {len(offsets) - 1}: {error.message}") from None
            file.write(tokens.tobytes())
            offsets.append(offsets[-1] + tokens.size)
    np.save(f"{os.fspath(path)}{_OFFSETS}", np.array(offsets, np.int64), allow_pickle=False)


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
    low, high = tokens[:_LOOKED_AT:2], tokens[1:_LOOKED_AT:2]
    return len(high) > 0 and int(high.max()) < _MAX_HIGH and int(low.max()) >= _MAX_HIGH


def _check(path: Path, tokens: Tokens, offsets: npt.NDArray[np.int64] | None) -> None:
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise FormatError(
            f"{path} must be one list of integer tokens, not {tokens.ndim}-dimensional {tokens.dtype}"
        )
    if offsets is None:
        return
    fits = offsets.ndim == 1 and offsets.dtype == np.int64 and len(offsets) > 0
    if not fits or offsets[0] != 0 or offsets[-1] != len(tokens):
        raise FormatError(f"{path}{_OFFSETS} does not describe {path}, which holds {len(tokens)} tokens")
