"""Sequences of tokens for training, cut from logical shards: an iterable data set for any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info

from ckpt.errors import ConfigurationError
from ckpt.trainer_integration.data_order.fair_turns import Turns
from ckpt.trainer_integration.data_order.positions import Positions
from ckpt.trainer_integration.data_order.shards import Cursor, Position, Shard
from ckpt.trainer_integration.sources import Source, Tokens, as_tokens

__all__ = ["DEFAULT_SHARDS", "Sample", "ShardedDataset"]

DEFAULT_SHARDS = 1920
"""2^7 x 3 x 5: many numbers of ranks divide it."""


class Sample(NamedTuple):
    """One sequence: of which shard, where the shard is after it, and its tokens (fewer or none at the very end)."""

    shard: int
    position: Position
    tokens: Tokens


class ShardedDataset(IterableDataset[dict[str, Any]]):
    """One rank's share of the sequences.

    Iterating yields, per sequence, a dict of `tokens` (int64, `sequence_length`), `shard` and `position`. Where
    an iteration begins is in `positions`, which the consumer moves on with `positions.record(batch)` and saves.
    `RescalableLoader` does both; this class is for loaders of others, such as torchdata's `StatefulDataLoader`.

    Args:
        sources: where documents come from, by name, or a single source.
        sequence_length: tokens in a sequence. It may change from run to run.
        weights: shares of the sequences by the sources' names, in any unit; equal by default.
        shards: logical shards per source, at least one for each worker of all ranks. Fixed for a run's life.
        seed: of the order of documents; None keeps the order in which they are stored.
        epochs: after how many passes to end; None never ends. The last sequence of each shard is then filled up
            with `pad_token`.
        bos_token, eos_token: put before and after each document.
        rank, world_size: among the ranks that read different data; by default those of torch.distributed.

    Raises:
        ConfigurationError: an argument is wrong.
    """

    def __init__(
        self,
        sources: Source | Mapping[str, Source],
        *,
        sequence_length: int,
        weights: Mapping[str, float] | None = None,
        shards: int = DEFAULT_SHARDS,
        seed: int | None = 0,
        epochs: int | None = None,
        pad_token: int | None = None,
        bos_token: int | None = None,
        eos_token: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        super().__init__()
        self._sources = dict(sources) if isinstance(sources, Mapping) else {"data": sources}
        self._weights = _shares(self._sources, weights)
        self._sequence_length, self._shard_count = sequence_length, shards
        self._seed, self._epochs, self._pad_token = seed, epochs, pad_token
        self._delimiters = {"bos_token": bos_token, "eos_token": eos_token}
        self.rank, self.world_size = _place_among_ranks(rank, world_size)
        self._check()
        self._shards = dict(self._own_shards())
        fingerprints = {
            name: f"{source.documents} documents, {source.fingerprint}"
            for name, source in self._sources.items()
        }
        settings = {"version": 1, "sources": fingerprints, "shards": shards, "seed": seed, **self._delimiters}
        self.positions = Positions(self._shards, settings)

    @property
    def own_shards(self) -> Sequence[int]:
        """Indices of this rank's shards."""
        return [*self._shards]

    def samples(self, shards: Sequence[int]) -> Samples:
        """The sequences of some of this rank's shards, from their positions onwards."""
        return Samples(self, shards)

    def turns(self, positions: Mapping[int, Position]) -> Turns:
        """Whose turn it is among shards at these positions."""
        turns = Turns()
        for index, position in positions.items():
            self.add_turn(turns, index, position)
        return turns

    def add_turn(self, turns: Turns, index: int, position: Position) -> None:
        """Let a shard take part again, unless it is at its end."""
        shard = self._shards[index]
        if self._epochs is None or position.epoch < self._epochs:
            phase, weight = shard.number / shard.total, self._weights[shard.source_name]
            turns.add(index, taken=position.sequences, phase=phase, weight=weight)

    def cursor(self, index: int, position: Position) -> Cursor:
        shard = self._shards[index]
        source = self._sources[shard.source_name]
        return Cursor(shard, source, position, seed=self._seed, epochs=self._epochs, **self._delimiters)

    def padded(self, tokens: Tokens) -> Tokens:
        """`tokens` as int64, filled up to a whole sequence."""
        row = np.full(self._sequence_length, self._pad_token or 0, np.int64)
        row[: len(tokens)] = tokens
        return row

    @property
    def sequence_length(self) -> int:
        return self._sequence_length

    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return _Rows(self, self.own_shards[first::step])

    def _own_shards(self) -> Iterator[tuple[int, Shard]]:
        """Every `world_size`-th shard of each source, so that ranks in step read shards that stand in a row."""
        for place, (name, source) in enumerate(self._sources.items()):
            for shard in Shard.all_of(name, source.documents, self._shard_count):
                if shard.number % self.world_size == self.rank:
                    yield place * self._shard_count + shard.number, shard

    def _check(self) -> None:
        if self._sequence_length < 1:
            raise ConfigurationError(f"sequence_length must be positive, not {self._sequence_length}")
        if not self.world_size <= self._shard_count:
            raise ConfigurationError(f"{self._shard_count} shards are too few for {self.world_size} ranks")
        if self._epochs is not None and self._pad_token is None:
            raise ConfigurationError("epochs end in the middle of a sequence: give pad_token to fill it up")
        for name, source in self._sources.items():
            if source.documents < self._shard_count:
                raise ConfigurationError(
                    f"{name} has {source.documents} documents, fewer than shards={self._shard_count}"
                )
            as_tokens([token for token in self._delimiters.values() if token is not None], source.dtype)


class Samples(Iterator[Sample]):
    """Sequences of some shards, in turn."""

    def __init__(self, dataset: ShardedDataset, shards: Sequence[int]) -> None:
        self._dataset = dataset
        self.restart({index: dataset.positions[index] for index in shards})

    def restart(self, positions: Mapping[int, Position]) -> None:
        self.positions = dict(positions)
        self._turns = self._dataset.turns(self.positions)
        self._cursors: dict[int, Cursor] = {}

    def __next__(self) -> Sample:
        if not self._turns:
            raise StopIteration
        index = self._turns.next()
        cursor = self._cursors.get(index)
        if cursor is None:
            cursor = self._cursors[index] = self._dataset.cursor(index, self.positions[index])
        tokens = cursor.take(self._dataset.sequence_length)
        self.positions[index] = cursor.position
        self._dataset.add_turn(self._turns, index, cursor.position)
        return Sample(index, cursor.position, tokens)


class _Rows(Iterator[dict[str, Any]]):
    """Samples as torch's default collation wants them, with the state that torchdata asks of an iterator."""

    def __init__(self, dataset: ShardedDataset, shards: Sequence[int]) -> None:
        self._dataset, self._samples = dataset, dataset.samples(shards)

    def __next__(self) -> dict[str, Any]:
        while not len((sample := next(self._samples)).tokens):
            pass
        position = np.array(sample.position, np.int64)
        return {"tokens": self._dataset.padded(sample.tokens), "shard": sample.shard, "position": position}

    def state_dict(self) -> dict[str, Any]:
        # Plain values, each under a name: torchdata sends what changed, and tensors would take a file each.
        return {str(index): [*position] for index, position in self._samples.positions.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._samples.restart({int(index): Position(*values) for index, values in state.items()})


def _shares(sources: Mapping[str, Source], weights: Mapping[str, float] | None) -> dict[str, float]:
    if not sources:
        raise ConfigurationError("no sources are given")
    shares = dict.fromkeys(sources, 1.0) if weights is None else dict(weights)
    if set(shares) != set(sources) or not all(0 < weight < float("inf") for weight in shares.values()):
        raise ConfigurationError(
            f"weights are positive numbers for each of {', '.join(map(str, sources))}, not {weights}"
        )
    return shares


def _place_among_ranks(rank: int | None, world_size: int | None) -> tuple[int, int]:
    if (rank is None) != (world_size is None):
        raise ConfigurationError("give rank and world_size both, or neither")
    if rank is None or world_size is None:
        known = dist.is_available() and dist.is_initialized()
        return (dist.get_rank(), dist.get_world_size()) if known else (0, 1)
    if not 0 <= rank < world_size:
        raise ConfigurationError(f"rank {rank} is not among {world_size} ranks")
    return rank, world_size
