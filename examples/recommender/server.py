"""Keep a shard of each table: answer lookups, apply updates, and save all of one step."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch
from torch.distributed import rpc

from ckpt.embeddings import Tables, TableShard, UpdateGate
from ckpt.embeddings.rows import Ids
from examples.recommender.checkpoints import url_of
from examples.recommender.click_log import TABLES
from examples.recommender.hash_rows import HashRows
from examples.recommender.options import Options

Update = Mapping[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
"""By table: ids, each once; how many samples used each; their gradients, summed."""

Later = torch.futures.Future


class Server:
    """One embedding process.

    Each trainer sends one update for each batch, also where it has no ids of this server: so the server can tell
    which batches are complete, and lets a lookup wait for those that it must see.
    """

    def __init__(self, options: Options, number: int, step: int) -> None:
        """`step`: the last one of the checkpoint that this life goes on from."""
        self._options = options
        self.rows = {name: HashRows(options.width, number, options.servers) for name in TABLES}
        self.shards = {
            name: TableShard(name, rows, shard=number, shards=options.servers)
            for name, rows in self.rows.items()
        }
        self.tables = Tables(*self.shards.values())
        self.gate = UpdateGate(
            sources=range(options.trainers), max_queued=(options.staleness + 1) * options.trainers
        )
        self._lock = threading.Lock()
        self._marked = threading.Condition()
        self._due = -1  # the newest epoch that a trainer has marked
        self._applied: Counter[int] = Counter()  # updates of trainers, and evictions, by batch
        self._complete = step
        self._waiting: list[tuple[int, Callable[[], None]]] = []
        self._parts: dict[int, list[Update]] = defaultdict(list)

    # -- called by trainers --------------------------------------------------------------------------------

    def lookup(self, batch: int, ids: Mapping[str, torch.Tensor]) -> Later[dict[str, torch.Tensor]]:
        """Return embeddings when all batches before `batch - staleness` have been applied; no thread waits."""
        later: Later[dict[str, torch.Tensor]] = Later()

        def answer() -> None:
            values = {}
            for name, wanted in ids.items():
                with self.shards[name].lock:
                    values[name] = torch.from_numpy(self.rows[name].lookup(wanted.numpy()))
            later.set_result(values)

        needed = batch - 1 - self._options.staleness
        with self._lock:
            if self._complete < needed:
                self._waiting.append((needed, answer))
                return later
        answer()
        return later

    def update(self, trainer: int, epoch: int, batch: int, update: Update) -> Later[None]:
        """Apply a trainer's update of a batch, now or after the cut that is due."""
        later: Later[None] = Later()

        def pass_on(done: Future[None]) -> None:
            error = done.exception()
            later.set_result(None) if error is None else later.set_exception(error)  # type: ignore[arg-type]

        self.gate.submit(trainer, epoch, lambda: self._apply(batch, update)).add_done_callback(pass_on)
        return later

    def mark(self, trainer: int, epoch: int, updates: int) -> None:
        """Note that a trainer has sent so many updates of an epoch here: a checkpoint is due."""
        self.gate.mark(trainer, epoch, updates)
        with self._marked:
            self._due = max(self._due, epoch)
            self._marked.notify()

    # -- inside --------------------------------------------------------------------------------------------

    def _apply(self, batch: int, update: Update) -> None:
        """Apply an update as it comes; without staleness those of all trainers at once, so that nothing depends
        on which samples which of them had."""
        if self._options.staleness > 0:
            self._change(batch, [update])
        else:
            with self._lock:
                self._parts[batch].append(update)
                is_last = len(self._parts[batch]) == self._options.trainers
                parts = self._parts.pop(batch) if is_last else []
            if is_last:
                self._change(batch, parts)
        self._count(batch)

    def _count(self, batch: int) -> None:
        """Note that a trainer's update of a batch is applied, or that rows were evicted after it; answer lookups that
        waited for this: whether they see an evicted row must not depend on who is faster."""
        with self._lock:
            self._applied[batch] += 1
            while self._applied[self._complete + 1] == self._expected(self._complete + 1):
                self._complete += 1
                del self._applied[self._complete]
            due = [answer for needed, answer in self._waiting if needed <= self._complete]
            self._waiting = [each for each in self._waiting if each[0] > self._complete]
        for answer in due:
            answer()

    def _expected(self, batch: int) -> int:
        return self._options.trainers + self._options.is_eviction(batch)

    def _change(self, batch: int, updates: list[Update]) -> None:
        for name, rows in self.rows.items():
            ids, counts, gradients = sums([update[name] for update in updates])
            with self.shards[name].writing(ids):
                rows.update(ids, counts, gradients, batch)

    def save(self, step: int, *, begin: Callable[[], object] = lambda: None) -> Future[Any]:
        """Save the rows as all updates up to this step, and no other, have made them.

        Waits for the first mark without a deadline, as nobody knows how long the steps before it take. `begin` is
        called when all updates are there.
        """
        with self._marked:
            self._marked.wait_for(lambda: self._due >= self.gate.epoch)
        with self.gate.cut(self._options.timeout_s):
            begin()
            if self._options.is_eviction(step):
                for name, shard in self.shards.items():
                    shard.evict(self.rows[name].unused_since(step - self._options.evict_after))
                self._count(step)
            return self.tables.async_save(
                {},
                url_of(self._options, step),
                storage_options=self._options.storage_options,
                timeout_s=self._options.timeout_s,
            )


def sums(parts: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> tuple[Ids, Ids, Any]:
    """Add up counts and gradients by id. Gradients are exact (`model.exact`), so their order does not matter."""
    ids, places = np.unique(np.concatenate([each[0].numpy() for each in parts]), return_inverse=True)
    counts = np.zeros(len(ids), dtype=np.int64)
    np.add.at(counts, places, np.concatenate([each[1].numpy() for each in parts]))
    gradients = np.zeros((len(ids), parts[0][2].shape[1]), dtype=np.float32)
    np.add.at(gradients, places, np.concatenate([each[2].numpy() for each in parts]))
    return ids, counts, gradients


# -- what trainers call by RPC -----------------------------------------------------------------------------

_server: Server


def serve(server: Server) -> None:
    global _server
    _server = server


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def lookup(batch: int, ids: Mapping[str, torch.Tensor]) -> Later[dict[str, torch.Tensor]]:
    return _server.lookup(batch, ids)


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def update(trainer: int, epoch: int, batch: int, update: Update) -> Later[None]:
    return _server.update(trainer, epoch, batch, update)


def mark(trainer: int, epoch: int, updates: int) -> None:
    _server.mark(trainer, epoch, updates)
