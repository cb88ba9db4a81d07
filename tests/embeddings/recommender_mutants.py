"""Train the example's recommender with a mistake in the cut; see whether its ledger notices.

    PYTHONPATH=. python tests/embeddings/recommender_mutants.py no-queue ROOT

Some updates, and the cut itself, are slow, so that what can overtake does. A right program does not mind.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from typing import Any

from ckpt.embeddings import TableShard, UpdateGate
from examples.recommender import server, worker
from examples.recommender.checkpoints import committed
from examples.recommender.launch import FAILED, WRONG, launch
from examples.recommender.ledger import Ledger, LedgerWrong
from examples.recommender.options import Options
from examples.recommender.server import Server


class NoWait(UpdateGate):
    """Cuts at once, without waiting for what is on its way."""

    def submit(self, source: int, epoch: int, apply: Callable[[], object]) -> Future[None]:
        apply()
        applied: Future[None] = Future()
        applied.set_result(None)
        return applied

    def mark(self, source: int, epoch: int, updates: int) -> None:
        pass

    @contextlib.contextmanager
    def cut(self, timeout_s: float = 0.0) -> Iterator[int]:
        yield 0


class NoQueue(UpdateGate):
    """Applies the updates of the next epoch before the cut of this one."""

    def __init__(self, sources: Collection[int], *, max_queued: int = 0) -> None:
        super().__init__(sources, max_queued=1000)

    def submit(self, source: int, epoch: int, apply: Callable[[], object]) -> Future[None]:
        apply()
        return super().submit(source, epoch, lambda: None)


class Forgetful(Server):
    """Does not tell of one batch's changes, so that the delta lacks them."""

    def _change(self, batch: int, updates: list[Any]) -> None:
        if batch != 7:
            super()._change(batch, updates)
            return
        for name, rows in self.rows.items():
            ids, counts, gradients = server.sums([update[name] for update in updates])
            with self.shards[name].lock:
                rows.update(ids, counts, gradients, batch)


def _slow_down() -> None:
    """Let every third batch's updates come late, and the cut of a shard too."""
    update, begin = Server.update, TableShard.begin

    def late_update(self: Server, trainer: int, epoch: int, batch: int, rows: Any) -> Any:
        if (trainer + batch) % 3 == 0:
            time.sleep(0.05)
        return update(self, trainer, epoch, batch, rows)

    def late_begin(self: TableShard) -> Any:
        time.sleep(0.1)
        return begin(self)

    setattr(Server, "update", late_update)  # noqa: B010
    setattr(TableShard, "begin", late_begin)  # noqa: B010


def main(mutant: str, root: str) -> int:
    """Return 0 if each checkpoint is right, WRONG if one is not."""
    _slow_down()
    if mutant == "forgetful":
        vars(worker)["Server"] = Forgetful
    else:
        gates = {"none": UpdateGate, "no-wait": NoWait, "no-queue": NoQueue}
        vars(server)["UpdateGate"] = gates[mutant]
    options = Options(root=root, steps=20, save_every=5, staleness=2, keep=100, timeout_s=30.0)
    codes = launch(options, deadline_s=120.0)
    if any(codes):
        print(f"ended with {codes}", file=sys.stderr)
        return FAILED
    for step in committed(options):
        try:
            Ledger(options).check_checkpoint(step)
        except LedgerWrong as error:
            print(error)
            return WRONG
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
