"""What is read, by whom and how: the arguments of a data set, checked, and the documents of its sources."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ckpt.errors import ConfigurationError, FormatError
from ckpt.options import DataOptions
from ckpt.trainer_integration.data_order.epoch_stream import Lengths, Piece
from ckpt.trainer_integration.data_order.permutation import Numbers
from ckpt.trainer_integration.sources import Look, Sliced, Source, Tokens, as_tokens, is_of_store, look_at

_logger = logging.getLogger(__name__)


class Sample(NamedTuple):
    """A sequence, and how its order notes that it was used. At the end it has fewer tokens, or none.

    Attributes:
        shard: of which it is; where all ranks read in one order, its source.
        is_filler: it is a row of padding: for a sequence that other ranks have and this one lacks at the end, or of which all
            was skipped.
    """

    shard: int
    position: tuple[int, ...]
    tokens: Tokens
    is_filler: bool = False


@dataclass
class Plan:
    """The arguments of a data set.

    Attributes:
        weights: of all sources, by name; 0 for those that are not read.
        shards: into which documents are dealt; where lengths are known, the streams that are read in turn.
    """

    sources: Mapping[str, Source]
    weights: Mapping[str, float]
    sequence_length: int
    shards: int
    seed: int | None
    epochs: int | None
    rank: int
    world_size: int
    bos_token: int | None
    eos_token: int | None
    options: DataOptions
    _skipped: set[tuple[str, int]] = field(default_factory=set, init=False)
    _looks: dict[str, Look] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._around: dict[str, tuple[Tokens, Tokens]] = {
            name: (self._delimiter(self.bos_token, source), self._delimiter(self.eos_token, source))
            for name, source in self.sources.items()
        }

    @staticmethod
    def _delimiter(token: int | None, source: Source) -> Tokens:
        return as_tokens([] if token is None else [token], source.dtype)

    def ends_at(self, epoch: int) -> bool:
        """Tell whether a source is read no more from an epoch on."""
        return self.epochs is not None and epoch >= self.epochs and self.options.on_exhausted != "repeat"

    @property
    def are_lengths_known(self) -> bool:
        return all(source.lengths(np.zeros(1, np.int64)) is not None for source in self.sources.values())

    def lengths(self, name: str) -> Lengths:
        """Return the lengths of a source's documents with their delimiters."""
        return _Lengths(self.sources[name], sum(map(len, self._around[name])))

    def documents(self, name: str) -> str:
        return f"{self.sources[name].documents} documents"

    def content(self, name: str) -> str:
        """Return a text that changes with the documents of a source."""
        return self._look(name).content

    def mean_tokens(self, name: str) -> float:
        """Return the mean length of a sample of documents, at least 1."""
        return max(1.0, self._look(name).mean_tokens)

    def _look(self, name: str) -> Look:
        if name not in self._looks:
            self._looks[name] = look_at(self.sources[name])
        return self._looks[name]

    @property
    def reads_ahead(self) -> bool:
        return any(source.reads_ahead for source in self.sources.values())

    def ahead(self, name: str, document: int, start: int = 0, stop: int | None = None) -> None:
        """Have a source fetch tokens of a document that is read soon; if it cannot, it raises when they are read."""
        with contextlib.suppress(Exception):
            self.sources[name].ahead(document, start, stop)

    def document(self, name: str, number: int, where: str = "") -> tuple[Tokens, Sliced, Tokens]:
        """Return a document: its tokens between its delimiters.

        Raises FormatError, which names it, and the StorageError of a store, which names an object: it is no fault of the document.
        """
        before, after = self._around[name]
        try:
            return before, self.sources[name].sliced(number), after
        except Exception as error:
            if is_of_store(error):
                raise
            fault = (
                f"{error}"
                if isinstance(error, FormatError | ConfigurationError)
                else f"{type(error).__name__}: {error}"
            )
            raise FormatError(f"source {name!r}, document {number}{where}: {fault}") from error

    def skips(self, name: str, number: int, error: FormatError) -> bool:
        """Tell whether a document that cannot be read may be skipped, and note it: each process may skip as many."""
        most = self.options.skip_bad_documents
        if (name, number) in self._skipped:
            return True
        if len(self._skipped) >= most:
            return False
        self._skipped.add((name, number))
        _logger.warning("skipped (%d of %d): %s", len(self._skipped), most, error)
        return True

    def copy(self, name: str, piece: Piece, room: Tokens) -> None:
        """Copy a piece of a document into the begin of `room`. Raises FormatError also if the document is shorter."""
        before, tokens, after = parts = self.document(name, piece.document)
        start = piece.offset - len(before)
        stop = start + piece.tokens
        if start >= 0 and stop < len(tokens):  # most pieces, and fast
            room[: piece.tokens] = tokens[start:stop]
            return
        if stop > len(tokens) + len(after):
            raise FormatError(
                f"source {name!r}, document {piece.document} has {len(tokens)} tokens, fewer than its source says"
            )
        copy_parts(parts, piece.offset, room[: piece.tokens])
        if stop == len(tokens) + len(after):
            self.sources[name].finished(piece.document)


class _Lengths:
    """The lengths of a source's documents with their delimiters; it pickles with its source."""

    def __init__(self, source: Source, delimiters: int) -> None:
        self._source, self._delimiters = source, delimiters

    def __call__(self, documents: Numbers) -> Numbers:
        lengths = self._source.lengths(documents)
        assert lengths is not None
        return lengths + self._delimiters


def copy_parts(parts: tuple[Sliced, ...], start: int, room: Tokens) -> int:
    """Fill `room` with the tokens of all parts from `start` on; return how many there were."""
    copied = 0
    size = len(room)
    for part in parts:
        length = len(part)
        if start < length and copied < size:
            count = min(length - start, size - copied)
            room[copied : copied + count] = part[start : start + count]
            copied += count
            start = 0
        elif start >= length:
            start -= length
    return copied
