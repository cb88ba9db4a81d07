"""Train the dense part in step with the other trainers, on rows that live elsewhere."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed import rpc
from torch.nn import functional

import ckpt
from ckpt.embeddings import Tables, home_of
from ckpt.embeddings.rows import Ids
from ckpt.state import training_state
from examples.recommender import server
from examples.recommender.checkpoints import url_of
from examples.recommender.click_log import TABLES, ClickLog, Clicks
from examples.recommender.model import Ranker, distributed, exact
from examples.recommender.options import Options


@dataclass
class Rows:
    """The rows of one table that a trainer needs for a batch.

    Attributes:
        ids, counts: each id once, and how many samples use it.
        places: for each slice, where the rows of its samples are among `ids`.
        homes: the server of each id.
    """

    ids: Ids
    counts: Ids
    places: list[Ids]
    homes: NDArray[np.int64]

    @classmethod
    def of(cls, slices: list[Ids], servers: int) -> Rows:
        ids, inverse, counts = np.unique(np.concatenate(slices), return_inverse=True, return_counts=True)
        ends = np.cumsum([len(each) for each in slices])[:-1]
        return cls(ids, counts, np.split(inverse, ends), home_of(ids, servers))


@dataclass
class Ahead:
    """A batch whose rows have been asked for."""

    step: int
    slices: list[Clicks]
    rows: dict[str, Rows]
    replies: list[Any]


class Trainer:
    """One of the dense trainers."""

    def __init__(self, options: Options, number: int, group: Any) -> None:
        torch.manual_seed(options.seed)
        self._options, self._number, self._group = options, number, group
        self.model = Ranker(options.width)
        self._network = distributed(self.model, group)
        self._optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.log = ClickLog(options.seed)
        self._tables = Tables()  # none here: but one save is of all processes
        self._names = [f"server{server}" for server in range(options.servers)]
        self._epoch, self._sent = 0, 0
        self._under_way: deque[Any] = deque()

    def state(self) -> dict[str, Any]:
        return training_state(model=self._network, optimizer=self._optimizer, rng=False, log=self.log)

    def restore(self, step: int) -> None:
        url, options = url_of(self._options, step), self._options.storage_options
        ckpt.load(self.state(), url, storage_options=options, process_group=self._group)

    def steps(self) -> Iterator[tuple[int, float]]:
        """Train one batch after another up to the last; rows are asked for `staleness` batches ahead.

        Yields the number of the step, and its loss. Where a checkpoint is due, call `cut` before going on.
        """
        last, ahead = self._options.steps, deque[Ahead]()
        asked = self.log.step
        while self.log.step < last:
            while asked < min(last, self.log.step + 1 + self._options.staleness):
                asked += 1
                ahead.append(self._ask(asked))
            loss = self._train(ahead.popleft())
            yield self.log.step, loss
        self._see_to_updates(wait=True)

    def _ask(self, step: int) -> Ahead:
        slices = self.log.slices(step, self._number, self._options.trainers)
        rows = {name: Rows.of([each.ids[name] for each in slices], self._options.servers) for name in TABLES}
        replies = []
        for number, name in enumerate(self._names):
            ids = {table: torch.from_numpy(each.ids[each.homes == number]) for table, each in rows.items()}
            replies.append(rpc.rpc_async(name, server.lookup, (step, ids)))
        return Ahead(step, slices, rows, replies)

    def _train(self, batch: Ahead) -> float:
        """Compute all slices of this trainer, add up gradients with the others, send those of the rows."""
        embeddings = self._received(batch)
        gradients = {name: torch.zeros_like(values) for name, values in embeddings.items()}
        total = 0.0
        self._optimizer.zero_grad()
        for number, clicks in enumerate(batch.slices):
            places = {name: torch.from_numpy(batch.rows[name].places[number]) for name in TABLES}
            inputs = {name: embeddings[name][places[name]].requires_grad_() for name in TABLES}
            is_last = number == len(batch.slices) - 1
            with contextlib.nullcontext() if is_last else self._network.no_sync():
                logits = self._network(inputs["users"], inputs["items"])
                loss = functional.binary_cross_entropy_with_logits(
                    logits, torch.from_numpy(clicks.labels), reduction="sum"
                )
                loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item() / len(clicks.labels)
            for name in TABLES:
                gradient = inputs[name].grad
                assert gradient is not None
                gradients[name].index_add_(0, places[name], exact(gradient))
        self._optimizer.step()
        self.log.step = step = batch.step
        self.model.ledger += torch.tensor([1, step, step * step])
        self._send(batch, gradients)
        return total / len(batch.slices)

    def _received(self, batch: Ahead) -> dict[str, torch.Tensor]:
        """Wait for the rows of a batch."""
        embeddings = {
            name: torch.empty(len(rows.ids), self._options.width) for name, rows in batch.rows.items()
        }
        for number, reply in enumerate(batch.replies):
            for name, values in reply.wait().items():
                embeddings[name][torch.from_numpy(batch.rows[name].homes == number)] = values
        return embeddings

    def _send(self, batch: Ahead, gradients: dict[str, torch.Tensor]) -> None:
        """Send one update to each server, and go on."""
        for number, name in enumerate(self._names):
            update = {}
            for table, rows in batch.rows.items():
                own = torch.from_numpy(rows.homes == number)
                ids, counts = torch.from_numpy(rows.ids)[own], torch.from_numpy(rows.counts)[own]
                update[table] = ids, counts, gradients[table][own]
            arguments = (self._number, self._epoch, batch.step, update)
            self._under_way.append(rpc.rpc_async(name, server.update, arguments))
        self._sent += 1
        self._see_to_updates()

    def _see_to_updates(self, *, wait: bool = False) -> None:
        """Raise the error of an update that failed."""
        while self._under_way and (wait or self._under_way[0].done()):
            self._under_way.popleft().wait()

    def cut(self, step: int) -> Future[Any]:
        """Tell the servers that all updates of this epoch are on their way, and save with them."""
        marks = [
            rpc.rpc_async(name, server.mark, (self._number, self._epoch, self._sent)) for name in self._names
        ]
        for reply in marks:
            reply.wait()
        saved = self._tables.async_save(
            self.state(),
            url_of(self._options, step),
            storage_options=self._options.storage_options,
            timeout_s=self._options.timeout_s,
        )
        self._epoch, self._sent = self._epoch + 1, 0
        return saved
