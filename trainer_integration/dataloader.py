"""Load data with a state that reshards: nothing is read twice, nothing is left out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from ckpt.child_processes import isolate_children
from ckpt.errors import CheckpointError, ConfigurationError
from ckpt.trainer_integration.data_order.shards import Position
from ckpt.trainer_integration.dataset import Sample, ShardedDataset
from ckpt.trainer_integration.run.loader_workers import outlive

__all__ = ["RescalableLoader"]


class RescalableLoader:
    """Iterate over batches of a `ShardedDataset`, with the position in the data as a `Stateful`.

    The state is that of the batches handed out, never of those that workers have read ahead. Each
    iteration begins there; workers end with it. Each worker process reads some of the rank's
    shards; batches are the same, in the same order, for any number of workers, 0 included. A SIGTERM
    to all processes of a job ends no worker before its trainer.

    Args:
        batch_size: sequences per batch of this rank. It may change from run to run.
        num_workers: processes that read; 0 reads in this one.
        prefetch_factor: sequences that a worker reads ahead.
        pin_memory: hand out batches in page-locked memory.
        multiprocessing_context: how processes start, as in torch's `DataLoader`.
        timeout_s: the longest wait for one sequence of a worker.

    Raises ConfigurationError if an argument is wrong.
    """

    unites_ranks = True  # each rank's state has its own shards, a checkpoint those of all

    def __init__(
        self,
        dataset: ShardedDataset,
        *,
        batch_size: int,
        num_workers: int = 0,
        prefetch_factor: int = 16,
        pin_memory: bool = False,
        multiprocessing_context: Any = None,
        timeout_s: float = 600.0,
    ) -> None:
        if batch_size < 1 or num_workers < 0 or prefetch_factor < 1 or timeout_s <= 0:
            raise ConfigurationError(
                "batch_size, prefetch_factor and timeout_s must be positive, num_workers not negative"
            )
        if num_workers > len(dataset.own_shards):
            raise ConfigurationError(
                f"this rank has {len(dataset.own_shards)} shards, too few for {num_workers} workers"
            )
        self.dataset, self.batch_size, self._num_workers = dataset, batch_size, num_workers
        self._pin_memory = pin_memory
        self._worker_options: dict[str, Any] = {
            "batch_size": None,
            "collate_fn": _unchanged,
            "num_workers": 1,
            "prefetch_factor": prefetch_factor,
            "timeout": timeout_s,
            "multiprocessing_context": multiprocessing_context,
            "worker_init_fn": _outlive,
        }

    @property
    def epoch(self) -> int:
        """Count the epochs that all of this rank's shards have completed."""
        return self.dataset.positions.epoch

    def state_dict(self) -> dict[str, Any]:
        """Return the positions (see `Positions`) without waiting for ranks or workers."""
        return self.dataset.positions.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`. An iteration that has begun raises at its next batch.

        Raises ConfigurationError if it is of other data, or of data cut in another way.
        """
        self.dataset.positions.load_state_dict(state)

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Yield batches: int64, `batch_size` x `sequence_length`; the last one may be smaller.

        Raises:
            CheckpointError: a worker died, or does not answer.
            RuntimeError: torch's, wherever the main thread is at the moment when a worker dies.
        """
        positions = self.dataset.positions
        positions.generation += 1
        generation = positions.generation
        samples = self._samples()
        while batch := self._batch(samples):
            if positions.generation != generation:
                raise CheckpointError(
                    "another iteration over this loader has begun, or a state was loaded: iterate anew"
                )
            positions.advance((sample.shard, sample.position) for sample in batch)
            if rows := [self.dataset.padded(sample.tokens) for sample in batch if len(sample.tokens)]:
                tokens = torch.from_numpy(np.stack(rows))
                yield tokens.pin_memory() if self._pin_memory else tokens

    def _batch(self, samples: Iterator[Sample]) -> list[Sample]:
        """Collect a batch: one sample per row, and empty ones, with which shards may end."""
        batch: list[Sample] = []
        rows = 0
        while rows < self.batch_size and (sample := next(samples, None)) is not None:
            batch.append(sample)
            rows += len(sample.tokens) > 0
        return batch

    def _samples(self) -> Iterator[Sample]:
        """Yield the samples of all shards in the same order for any number of workers."""
        shards = self.dataset.own_shards
        positions = self.dataset.positions.of(shards)
        if not self._num_workers:
            return self.dataset.samples(positions)
        streams: dict[int, Iterator[Sample]] = {}
        isolate_children()
        for number in range(self._num_workers):
            part = shards[number :: self._num_workers]
            # torch would draw seeds from the trainer's generator, once more in a resumed run.
            seeds = torch.Generator().manual_seed((torch.initial_seed() + number) % (1 << 63))
            worker = _WorkerShards(self.dataset, self.dataset.positions.of(part))
            # One loader for each worker: one loader of many workers would have an order of its own.
            loader: DataLoader[Sample] = DataLoader(worker, generator=seeds, **self._worker_options)
            streams |= dict.fromkeys(part, iter(loader))
        return self.dataset.in_turn(positions, lambda index: _next(streams[index], index))


class _WorkerShards(IterableDataset[Sample]):
    """Read the shards of one worker."""

    def __init__(self, dataset: ShardedDataset, positions: Mapping[int, Position]) -> None:
        super().__init__()
        self._dataset, self._positions = dataset, positions

    def __iter__(self) -> Iterator[Sample]:
        return self._dataset.samples(self._positions)


def _next(stream: Iterator[Sample], index: int) -> Sample:
    """Read the next sample of a worker, which has to be of shard `index`."""
    try:
        sample = next(stream, None)
    except RuntimeError as error:  # torch's, for a worker that died or does not answer
        raise CheckpointError(f"the worker that reads shard {index} failed: {error}") from error
    if sample is None or sample.shard != index:
        raise CheckpointError(f"the worker that reads shard {index} returned no sample of it")
    return sample


def _outlive(_: int) -> None:
    outlive()


def _unchanged(sample: Any) -> Any:
    return sample
