"""Cut sequences of tokens from logical shards: an iterable dataset for any number of ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info

from ckpt.errors import ConfigurationError
from ckpt.options import DataOptions, check_options
from ckpt.trainer_integration.data_order.agreement import Agreement
from ckpt.trainer_integration.data_order.plan import Plan, Sample
from ckpt.trainer_integration.data_order.positions import Positions
from ckpt.trainer_integration.sources import Source, Tokens

__all__ = ["DEFAULT_SHARDS", "Sample", "ShardedDataset"]

DEFAULT_SHARDS = 1920
"""2^7 x 3 x 5: divisible by many numbers of ranks."""


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
        options: a `ckpt.options.DataOptions`.
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
        options: DataOptions | None = None,
    ) -> None:
        super().__init__()
        named = dict(sources) if isinstance(sources, Mapping) else {"data": sources}
        self.sequence_length, self._pad_token = sequence_length, pad_token
        self.rank, self.world_size = _rank_and_world_size(rank, world_size)
        self.options = DataOptions() if options is None else options
        check_options("options", self.options, DataOptions)
        shares = _shares(named, weights)
        if sequence_length < 1:
            raise ConfigurationError(f"sequence_length must be positive, not {sequence_length}")
        if shards < 1:
            raise ConfigurationError(f"shards must be positive, not {shards}")
        if epochs is not None and pad_token is None:
            raise ConfigurationError("epochs= needs pad_token=, which fills up the last sequence")
        for name, source in named.items():
            if not source.documents:
                raise ConfigurationError(f"source {name!r} has no documents")
        plan = Plan(
            named, shares, sequence_length, shards, seed, epochs, self.rank, self.world_size, bos_token, eos_token,
            self.options,
        )  # fmt: skip
        self.positions = Positions(plan)
        if self.options.skip_bad_documents and pad_token is None and self.positions.order.kind == "global":
            raise ConfigurationError(
                "skip_bad_documents= needs pad_token= where the lengths of documents are known: it fills up what is left of a "
                "sequence"
            )
        self._agreement = Agreement(self.rank, self.world_size)

    def begin(self) -> None:
        """Begin an iteration. Raises ConfigurationError if another rank reads other data or has other settings."""
        self._agreement.check({**self.positions.settings(), **self.positions.ends()})
        self.positions.restart()

    def samples(self, first: int = 0, step: int = 1, taken: torch.Tensor | None = None) -> Iterator[Sample]:
        """Read this rank's sequences: every `step`-th part of them from the `first` on, in turn."""
        order = self.positions.order
        return order.samples(order.part(first, step), first, step, taken)

    def rows(self, sequences: Sequence[Tokens]) -> Tokens:
        """Make rows of int64, filled up to whole sequences."""
        rows = np.empty((len(sequences), self.sequence_length), np.int64)
        for row, tokens in zip(rows, sequences, strict=True):
            row[: len(tokens)] = tokens
            if len(tokens) < self.sequence_length:
                row[len(tokens) :] = self._pad_token or 0
        return rows

    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker = get_worker_info()
        if worker is None:
            self.begin()
            return _TorchSamples(self, 0, 1)
        return _TorchSamples(self, worker.id, worker.num_workers)


class _TorchSamples(Iterator[dict[str, Any]]):
    """Yield samples for torch's default collation, with a state as torchdata wants it."""

    def __init__(self, dataset: ShardedDataset, first: int, step: int) -> None:
        self._dataset, self._part = dataset, (first, step)
        self._order = dataset.positions.order
        self._at = self._order.part(first, step)
        self._restart()

    def _restart(self) -> None:
        self._samples = self._order.samples(self._at, *self._part)

    def __next__(self) -> dict[str, Any]:
        try:
            for sample in self._samples:
                self._order.note(self._at, sample)
                if len(sample.tokens) or sample.is_filler:
                    numbers = np.array(sample.position, np.int64)
                    return {
                        "tokens": self._dataset.rows([sample.tokens])[0],
                        "shard": sample.shard,
                        "position": numbers,
                    }
        except Exception:
            self._restart()  # a generator that raised is over; the data are not
            raise
        raise StopIteration

    def state_dict(self) -> dict[str, Any]:
        # Plain values under names: torchdata sends changed ones; tensors would take a file each.
        return dict(self._at)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._at = dict(state)
        self._restart()


def _shares(sources: Mapping[str, Source], weights: Mapping[str, float] | None) -> dict[str, float]:
    if not sources:
        raise ConfigurationError("sources= is empty")
    shares = dict.fromkeys(sources, 1.0) if weights is None else dict(weights)
    are_numbers = all(0 <= weight < float("inf") for weight in shares.values())
    if set(shares) != set(sources) or not are_numbers or not any(shares.values()):
        names = ", ".join(map(str, sources))
        raise ConfigurationError(
            f"weights must be a number for each of {names}, not all of them 0, not {weights}"
        )
    return {name: float(shares[name]) for name in sources}


def _rank_and_world_size(rank: int | None, world_size: int | None) -> tuple[int, int]:
    if (rank is None) != (world_size is None):
        raise ConfigurationError("give rank and world_size both, or neither")
    if rank is None or world_size is None:
        if dist.is_available() and dist.is_initialized():
            return dist.get_rank(), dist.get_world_size()
        started = os.environ.get("WORLD_SIZE", "1")
        if started.isdecimal() and int(started) > 1 and "RANK" in os.environ:
            raise ConfigurationError(
                f"WORLD_SIZE is {started} and there is no process group: call torch.distributed.init_process_group first, or "
                "give rank= and world_size="
            )
        return 0, 1
    if not 0 <= rank < world_size:
        raise ConfigurationError(f"rank must be from 0 to {world_size - 1} (world_size - 1), not {rank}")
    return rank, world_size
