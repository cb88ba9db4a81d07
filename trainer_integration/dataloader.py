"""Load data with a state that reshards: nothing is read twice, nothing is left out."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from ckpt.child_processes import isolate_children
from ckpt.errors import CheckpointError, ConfigurationError
from ckpt.ranks.group import Ranks
from ckpt.trainer_integration.data_order.plan import Sample
from ckpt.trainer_integration.dataset import ShardedDataset
from ckpt.trainer_integration.run.loader_workers import outlive

__all__ = ["RescalableLoader"]

_logger = logging.getLogger(__name__)


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
        parts = dataset.positions.order.parts
        if parts is not None and num_workers > parts:
            raise ConfigurationError(f"this rank has {parts} shards, too few for {num_workers} workers")
        self.dataset, self.batch_size, self._num_workers = dataset, batch_size, num_workers
        self._pin_memory = pin_memory
        self._handed_out = 0
        self._recorded = 0
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
        """Count the epochs that are complete (`Positions.epoch`)."""
        return self.dataset.positions.epoch

    def state_dict(self) -> dict[str, Any]:
        """Return the positions (see `Positions`) without waiting for ranks or workers."""
        if self.dataset.options.positions and self._handed_out > 1 and not self._recorded:
            _logger.warning(
                "%d batches were handed out and none was recorded: with DataOptions(positions=True) the state stays where it "
                "is until loader.record(batch) is called after each step",
                self._handed_out,
            )
        return self.dataset.positions.state_dict()

    def state_dict_of_all_ranks(self) -> dict[str, Any]:
        """Return the positions of all ranks, for a framework that saves those of one; all ranks call it."""
        with closing(Ranks(None, no_dist=False)) as ranks:
            return ranks.join(self.state_dict(), _united)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`. An iteration that has begun raises at its next batch.

        Raises ConfigurationError if it is of other data, or of data cut in another way.
        """
        self.dataset.positions.load_state_dict(state)

    def record(self, batch: Mapping[str, Any]) -> None:
        """Note that a batch was used for training; with `DataOptions(positions=True)` nothing else moves the state.

        A batch may be recorded twice. Raises ConfigurationError if it has no `shard` and `position`.
        """
        self.dataset.positions.record(batch)
        self._recorded += 1

    def __iter__(self) -> Iterator[Any]:
        """Yield batches: int64, `batch_size` x `sequence_length`; the last ones may be smaller.

        With `DataOptions(positions=True)` each is a dict of them as `tokens`, and of `shard` and `position` for `record`.

        Raises:
            ConfigurationError: another rank reads other data, or has other settings.
            FormatError: a document cannot be read; the next call raises again.
            CheckpointError: a worker died, or does not answer.
            RuntimeError: torch's, wherever the main thread is at the moment when a worker dies.
        """
        self.dataset.begin()
        return _Batches(self)

    def _batch(self, samples: Iterator[Sample]) -> list[Sample]:
        return list(itertools.islice(samples, self.batch_size))

    def _tensors(self, batch: list[Sample]) -> Any:
        """Make what is handed out; None of a batch without tokens."""
        used = [sample for sample in batch if len(sample.tokens) or sample.is_filler]
        if not used:
            return None
        tokens = self._pinned(self.dataset.rows([sample.tokens for sample in used]))
        if not self.dataset.options.positions:
            return tokens
        shards = torch.tensor([sample.shard for sample in batch])
        return {
            "tokens": tokens,
            "shard": shards,
            "position": torch.tensor([sample.position for sample in batch]),
        }

    def _pinned(self, rows: Any) -> torch.Tensor:
        tokens = torch.from_numpy(rows)
        return tokens.pin_memory() if self._pin_memory else tokens

    def samples(self) -> Iterator[Sample]:
        """Yield the samples of this rank in the same order for any number of workers."""
        if not self._num_workers:
            return self.dataset.samples()
        isolate_children()
        order = self.dataset.positions.order
        taken = [order.taken() for _ in range(self._num_workers)]
        return order.joined([self._stream(number, each) for number, each in enumerate(taken)], taken)

    def _stream(self, number: int, taken: torch.Tensor | None) -> Iterator[Sample]:
        # torch would draw seeds from the trainer's generator, once more in a resumed run.
        seeds = torch.Generator().manual_seed((torch.initial_seed() + number) % (1 << 63))
        # One loader for each worker: one loader of many workers would have an order of its own.
        part = _WorkerPart(self.dataset, number, self._num_workers, taken)
        loader: DataLoader[Sample] = DataLoader(part, generator=seeds, **self._worker_options)
        return _FromWorker(iter(loader), number)


class _Batches:
    """An iteration over a loader. After an error of a source it raises again, as the data are not over."""

    def __init__(self, loader: RescalableLoader) -> None:
        self._loader = loader
        self._generation = loader.dataset.positions.generation
        self._samples = loader.samples()
        self._error: Exception | None = None
        self._without_tokens: list[Sample] = []  # to be noted with the next batch

    def __iter__(self) -> _Batches:
        return self

    def close(self) -> None:
        """End the workers."""
        self._samples = iter(())

    def __next__(self) -> Any:
        positions = self._loader.dataset.positions
        while True:
            if self._error is not None:
                raise self._error
            try:
                batch = self._loader._batch(self._samples)
            except Exception as error:
                self._error = error
                raise
            if positions.generation != self._generation:
                raise CheckpointError(
                    "another iteration over this loader has begun, or a state was loaded: begin a new iteration"
                )
            if not batch:
                raise StopIteration
            if not self._loader.dataset.options.positions:
                positions.advance((sample.shard, sample.position) for sample in batch)
            batch = [*self._without_tokens, *batch]
            if (tensors := self._loader._tensors(batch)) is not None:
                self._without_tokens = []
                self._loader._handed_out += 1
                return tensors
            self._without_tokens = batch


class _WorkerPart(IterableDataset[Sample]):
    """Read the part of one worker."""

    def __init__(
        self, dataset: ShardedDataset, number: int, workers: int, taken: torch.Tensor | None = None
    ) -> None:
        super().__init__()
        self._dataset, self._number, self._workers, self._taken = dataset, number, workers, taken

    def __iter__(self) -> Iterator[Sample]:
        return self._dataset.samples(self._number, self._workers, self._taken)


class _FromWorker(Iterator[Sample]):
    """The samples of a worker. Raises CheckpointError if it died or does not answer."""

    def __init__(self, samples: Iterator[Sample], number: int) -> None:
        self._samples, self._number = samples, number

    def __next__(self) -> Sample:
        try:
            return next(self._samples)
        except RuntimeError as error:  # torch's, for a worker that died or does not answer
            raise CheckpointError(f"the worker {self._number} that reads data failed: {error}") from error


def _outlive(_: int) -> None:
    outlive()


def _unchanged(sample: Any) -> Any:
    return sample


def _united(one: Any, other: Any) -> Any:
    """Join nested dicts of two ranks; of a value that both have, the first one stays."""
    if not isinstance(one, Mapping):
        return one
    both = {name: _united(one[name], other[name]) for name in one.keys() & other.keys()}
    return {**other, **one, **both}
