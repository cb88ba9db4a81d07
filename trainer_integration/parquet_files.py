"""Read Parquet files, one row group at a time, from the local disk or from a store."""

from __future__ import annotations

import itertools
import logging
import os
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ckpt.errors import ConfigurationError, FormatError, NotFound
from ckpt.trainer_integration.data_store.block_reader import (
    DEFAULT_DISK_CACHE_BYTES,
    BlockReader,
    StoredFile,
    find_files,
)
from ckpt.trainer_integration.data_store.stored_stream import StoredStream
from ckpt.trainer_integration.sources import (
    DEFAULT_CACHE_BYTES,
    Cache,
    Source,
    Tokenize,
    Tokens,
    as_tokens,
    fingerprint_of,
    is_of_store,
)

__all__ = ["ParquetFiles"]

_logger = logging.getLogger(__name__)

_FOOTER_BYTES = 1 << 16


class _Group(NamedTuple):
    """A row group: its file, its number there, and the bytes of the column, which are fetched ahead."""

    file: StoredFile | Path
    number: int
    start: int
    stop: int

    @property
    def path(self) -> str:
        return self.file.url if isinstance(self.file, StoredFile) else str(self.file)


class ParquetFiles(Source):
    """Read documents from the rows of Parquet files, through pyarrow.

    Rows are shuffled inside of their row group, and row groups among each other. A worker wants one
    row group of each of its shards in `cache_bytes`; with less it reads them again and again.

    Args:
        paths: the files, in an order that is the same on all ranks and in all runs: paths, or URLs of any store of this
            library (`s3://bucket/a.parquet`).
        column: holds lists of tokens, or values for `tokenize`.
        tokenize: turns a value into tokens; None if the column holds tokens.
        cache_bytes: memory for row groups, and as much for documents not read to their end yet, and for what was read
            from stores.
        storage_options, disk_cache, disk_cache_bytes: of stores, as for `TokenFiles`.

    Raises:
        NotFound, FormatError: a file is missing, or is not a Parquet file with this column.
        StorageError: a store does not answer, or gives no access.
    """

    def __init__(
        self,
        paths: Sequence[str | os.PathLike[str]],
        column: str,
        *,
        tokenize: Tokenize | None = None,
        dtype: npt.DTypeLike = np.int32,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        storage_options: Mapping[str, Any] | None = None,
        disk_cache: str | os.PathLike[str] | None = None,
        disk_cache_bytes: int = DEFAULT_DISK_CACHE_BYTES,
    ) -> None:
        self._column, self._tokenize = column, tokenize
        self.dtype = np.dtype(dtype)
        self._groups: list[_Group] = []
        self._ends: list[int] = []  # documents up to the end of each row group
        self._reader = BlockReader(
            storage_options=storage_options, disk_cache=disk_cache, disk_cache_bytes=disk_cache_bytes,
            cache_bytes=cache_bytes,
        )  # fmt: skip
        files = find_files(paths, self._reader)
        for file in files:
            if isinstance(file, StoredFile):
                self._reader.ahead(file, max(0, file.size_bytes - _FOOTER_BYTES), file.size_bytes)
        for file in files:
            self._note_groups(file)
        self.reads_ahead = any(isinstance(file, StoredFile) for file in files)
        if not self._ends:
            raise ConfigurationError("the Parquet files have no rows")
        self.documents = self._ends[-1]
        self.fingerprint = fingerprint_of(column, self._ends)
        self._row_groups: Cache[Any] = Cache(cache_bytes)
        self._documents: Cache[Tokens] = Cache(cache_bytes)
        self._used: OrderedDict[int, int] = OrderedDict()  # bytes of row groups, those used last at the end
        self._has_warned = False

    def tokens(self, document: int) -> Tokens:
        return self._documents.get(document, lambda: self._read(document), lambda tokens: tokens.nbytes)

    samples = 2

    def ahead(self, document: int, start: int = 0, stop: int | None = None) -> None:
        number = bisect_right(self._ends, document)
        group = self._groups[number]
        if isinstance(group.file, StoredFile) and number not in self._row_groups:
            self._reader.ahead(group.file, group.start, group.stop)

    def finished(self, document: int) -> None:
        self._documents.drop(document)

    def cuts(self, start: int, stop: int) -> Sequence[int]:
        return self._ends[bisect_right(self._ends, start) : bisect_left(self._ends, stop)]

    def _read(self, document: int) -> Tokens:
        group = bisect_right(self._ends, document)
        row = document - (self._ends[group - 1] if group else 0)
        value = self._rows_of(group)[row]
        if not value.is_valid:
            return np.empty(0, self.dtype)
        try:
            if self._tokenize is not None:
                return as_tokens(self._tokenize(value.as_py()), self.dtype)
            # A copy: a view would keep the whole row group in memory, which the cache does not count.
            tokens: Tokens = as_tokens(value.values.to_numpy(zero_copy_only=False), self.dtype).copy()
        except Exception as error:
            where = f"{self._groups[group].path}, row group {self._groups[group].number}, row {row}"
            if isinstance(error, ConfigurationError):
                raise ConfigurationError(f"{where}: {error.message}") from None
            raise FormatError(f"{where}: {type(error).__name__}: {error}") from error
        return tokens

    def _rows_of(self, group: int) -> Any:
        is_kept = group in self._row_groups
        column = self._row_groups.get(
            group, lambda: self._row_group(group), lambda column: int(column.nbytes)
        )
        if not is_kept and group in self._used:
            self._warn(group)
        self._used[group] = int(column.nbytes)
        self._used.move_to_end(group)
        return column

    def _warn(self, group: int) -> None:
        """Say once that row groups are read again and again."""
        if self._has_warned:
            return
        self._has_warned = True
        others = itertools.takewhile(lambda each: each != group, reversed(self._used))
        needed = self._used[group] + sum(self._used[each] for each in others)
        _logger.warning(
            "row group %d of %s is read again, as cache_bytes is too small for the row groups that are read in turn: with "
            "cache_bytes=%d each is read once. Or write smaller row groups, or take fewer shards",
            self._groups[group].number, self._groups[group].path, needed,
        )  # fmt: skip

    def _row_group(self, group: int) -> Any:
        path = self._groups[group].path
        number = self._groups[group].number
        try:
            with self._opened(self._groups[group].file) as file:
                return file.read_row_group(number, columns=[self._column], use_threads=False).column(0)
        except (OSError, ValueError) as error:  # pyarrow's are of these
            if is_of_store(error):
                raise
            raise FormatError(f"{path}, row group {number}: {error}") from error

    def _note_groups(self, path: StoredFile | Path) -> None:
        with self._opened(path) as file:
            first = _Group(path, 0, 0, 0)
            _check_column(first.path, file.schema_arrow, self._column, self._tokenize)
            for number in range(file.num_row_groups):
                group = file.metadata.row_group(number)
                if group.num_rows:
                    start, stop = _bytes_of(group, self._column)
                    self._groups.append(_Group(path, number, start, stop))
                    self._ends.append(group.num_rows + (self._ends[-1] if self._ends else 0))

    def _opened(self, file: StoredFile | Path) -> Any:
        import pyarrow
        import pyarrow.parquet

        path = file.url if isinstance(file, StoredFile) else file
        try:
            opened = StoredStream(self._reader, file) if isinstance(file, StoredFile) else file
            return pyarrow.parquet.ParquetFile(opened)
        except FileNotFoundError as error:
            if is_of_store(error):
                raise
            raise NotFound(f"{path} does not exist") from None
        except pyarrow.ArrowInvalid as error:
            raise FormatError(f"{path}: {error}") from error


def _bytes_of(group: Any, column: str) -> tuple[int, int]:
    """Return where a column of a row group begins and ends in its file."""
    parts = [group.column(number) for number in range(group.num_columns)]
    own = [part for part in parts if part.path_in_schema.split(".")[0] == column]
    starts = [part.dictionary_page_offset or part.data_page_offset for part in own]
    stops = [start + part.total_compressed_size for start, part in zip(starts, own, strict=True)]
    return min(starts), max(stops)


def _check_column(path: str, schema: Any, column: str, tokenize: Tokenize | None) -> None:
    from pyarrow import types

    if column not in schema.names:
        raise FormatError(f"{path} has no column {column!r}; it has {', '.join(schema.names)}"[:500])
    kind = schema.field(column).type
    of_tokens = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    if tokenize is None and not (of_tokens and types.is_integer(kind.value_type)):
        raise ConfigurationError(
            f"{path}: column {column!r} holds {kind}, not lists of tokens; pass tokenize= to make tokens of it"
        )
