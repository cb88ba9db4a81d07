"""Cut sequences of tokens from logical shards: an iterable dataset for any number of ranks."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info

from ckpt.errors import ConfigurationError
from ckpt.trainer_integration.data_order.positions import Positions
from ckpt.trainer_integration.data_order.shards import Cursor, Position, Shard
from ckpt.trainer_integration.sources import Source, Tokens, as_tokens

__all__ = ["DEFAULT_SHARDS", "Sample", "ShardedDataset"]

DEFAULT_SHARDS = 1920
"""2^7 x 3 x 5: divisible by many numbers of ranks."""


class Sample(NamedTuple):
    """A sequence of a shard, and the position after it. At the end it has fewer tokens, or none."""

    shard: int
    position: Position
    tokens: Tokens


class ShardedDataset(IterableDataset[dict[str, Any]]):
    """Yield one rank's share of the sequences.

    Each is a dict of `tokens` (int64, `sequence_length`), `shard` and `position`. An iteration
    begins at `positions`, which the consumer advances with `positions.record(batch)` and saves.
    `RescalableLoader` does both; use this class with other loaders, such as torchdata's
    `StatefulDataLoader`.

    Args:
        sources: the documents: one source, or several by name.
        sequence_length: tokens in a sequence. It may change from run to run.
        weights: shares of the sequences by the sources' names, in any unit; equal by default.
        shards: logical shards per source, at least one for each worker of all ranks. Fixed for a
            run's life.
        seed: of the order of documents; None keeps the order in which they are stored.
        epochs: the number of passes; None never ends. The last sequence of each shard is then
            filled up with `pad_token`.
        bos_token, eos_token: put before and after each document.
        rank, world_size: among the ranks that read different data; by default those of
            torch.distributed.

    Raises ConfigurationError if an argument is wrong.
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
        self.sequence_length, self._shard_count = sequence_length, shards
        self._seed, self._epochs, self._pad_token = seed, epochs, pad_token
        self._delimiters = {"bos_token": bos_token, "eos_token": eos_token}
        self.rank, self.world_size = _rank_and_world_size(rank, world_size)
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
        """List the indices of this rank's shards."""
        return [*self._shards]

    def samples(self, positions: Mapping[int, Position]) -> Iterator[Sample]:
        """Read the sequences of some of this rank's shards, in turn, from `positions` onwards."""
        options = {"seed": self._seed, "epochs": self._epochs, **self._delimiters}
        cursors: dict[int, Cursor] = {}
        for index, position in positions.items():
            shard = self._shards[index]
            cursors[index] = Cursor(shard, self._sources[shard.source_name], position, **options)

        def read(index: int) -> Sample:
            tokens = cursors[index].take(self.sequence_length)
            return Sample(index, cursors[index].position, tokens)

        return self.in_turn(positions, read)

    def in_turn(self, positions: Mapping[int, Position], read: Callable[[int], Sample]) -> Iterator[Sample]:
        """Yield the samples that `read` returns of shards, the one furthest behind its share first.

        A shard's next turn follows from its own position alone. So any subset of the shards, read
        on its own, is read in the order that it has among all.
        """
        waiting: list[tuple[float, int]] = []

        def wait(index: int, position: Position) -> None:
            shard = self._shards[index]
            if self._epochs is None or position.epoch < self._epochs:
                # The number spreads shards of equal turns.
                turns = position.sequences + shard.number / shard.total
                heapq.heappush(waiting, (turns / self._weights[shard.source_name], index))

        for index, position in positions.items():
            wait(index, position)
        while waiting:
            sample = read(heapq.heappop(waiting)[1])
            wait(sample.shard, sample.position)
            yield sample

    def padded(self, tokens: Tokens) -> Tokens:
        """Convert `tokens` to int64, filled up to a whole sequence."""
        row = np.full(self.sequence_length, self._pad_token or 0, np.int64)
        row[: len(tokens)] = tokens
        return row

    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return _TorchSamples(self, self.positions.of(self.own_shards[first::step]))

    def _own_shards(self) -> Iterator[tuple[int, Shard]]:
        """List every `world_size`-th shard: ranks in step then read neighbouring shards."""
        for number, (name, source) in enumerate(self._sources.items()):
            for shard in Shard.all_of(name, source.documents, self._shard_count):
                if shard.number % self.world_size == self.rank:
                    yield number * self._shard_count + shard.number, shard

    def _check(self) -> None:
        if self.sequence_length < 1:
            raise ConfigurationError(f"sequence_length must be positive, not {self.sequence_length}")
        if self.world_size > self._shard_count:
            raise ConfigurationError(
                f"{self._shard_count} shards are too few for {self.world_size} ranks; raise shards="
            )
        if self._epochs is not None and self._pad_token is None:
            raise ConfigurationError("epochs= needs pad_token=, which fills up the last sequence of a shard")
        for name, source in self._sources.items():
            if source.documents < self._shard_count:
                raise ConfigurationError(
                    f"source {name!r} has {source.documents} documents, fewer than shards={self._shard_count}"
                )
            as_tokens([token for token in self._delimiters.values() if token is not None], source.dtype)


class _TorchSamples(Iterator[dict[str, Any]]):
    """Yield samples for torch's default collation, with a state as torchdata wants it."""

    def __init__(self, dataset: ShardedDataset, positions: dict[int, Position]) -> None:
        self._dataset = dataset
        self._restart(positions)

    def _restart(self, positions: dict[int, Position]) -> None:
        self._positions, self._samples = positions, self._dataset.samples(positions)

    def __next__(self) -> dict[str, Any]:
        try:
            for index, position, tokens in self._samples:
                self._positions[index] = position
                if len(tokens):
                    row, numbers = self._dataset.padded(tokens), np.array(position, np.int64)
                    return {"tokens": row, "shard": index, "position": numbers}
        except Exception:
            self._restart(self._positions)  # a generator that raised is over; the data are not
            raise
        raise StopIteration

    def state_dict(self) -> dict[str, Any]:
        # Plain values under names: torchdata sends changed ones; tensors would take a file each.
        return {str(index): [*position] for index, position in self._positions.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._restart({int(index): Position(*values) for index, values in state.items()})


def _shares(sources: Mapping[str, Source], weights: Mapping[str, float] | None) -> dict[str, float]:
    if not sources:
        raise ConfigurationError("sources= is empty")
    shares = dict.fromkeys(sources, 1.0) if weights is None else dict(weights)
    if set(shares) != set(sources) or not all(0 < weight < float("inf") for weight in shares.values()):
        names = ", ".join(map(str, sources))
        raise ConfigurationError(f"weights must be a positive number for each of {names}, not {weights}")
    return shares


def _rank_and_world_size(rank: int | None, world_size: int | None) -> tuple[int, int]:
    if (rank is None) != (world_size is None):
        raise ConfigurationError("give rank and world_size both, or neither")
    if rank is None or world_size is None:
        is_initialized = dist.is_available() and dist.is_initialized()
        return (dist.get_rank(), dist.get_world_size()) if is_initialized else (0, 1)
    if not 0 <= rank < world_size:
        raise ConfigurationError(f"rank must be from 0 to {world_size - 1} (world_size - 1), not {rank}")
    return rank, world_size
