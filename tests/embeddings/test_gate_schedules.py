"""Random schedules of updates, marks and cuts, on one thread and on several; broken gates are caught."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from ckpt.embeddings import UpdateGate
from ckpt.embeddings.gate import _Update
from ckpt.errors import CheckpointError

Update = tuple[int, int, int]
"""A source, an epoch, and a number within it."""

EPOCHS = 3


class Schedule:
    """Send what some sources send, in any order, and cut when that is possible.

    An update begins, then other messages come in, then it ends: as on several threads, but drawn from a seed.
    """

    def __init__(self, gate: Callable[..., UpdateGate], seed: int) -> None:
        self.random = random.Random(seed)
        self.sources = range(self.random.randint(1, 3))
        self.gate = gate(list(self.sources), max_queued=1000)
        self.counts = [[self.random.randint(0, 3) for _ in self.sources] for _ in range(EPOCHS)]
        self.applied: list[Update] = []
        self.futures: list[Future[None]] = []
        self.cuts = self.sent = self.depth = 0
        self.messages: list[tuple[str, Update]] = []

    def run(self) -> None:
        while self.cuts < EPOCHS:
            self.step()
        assert not [kind for kind, _ in self.messages if kind == "update"]
        assert all(future.done() and future.exception() is None for future in self.futures)

    def step(self) -> None:
        if self.sent <= min(self.gate.epoch + 1, EPOCHS - 1) and self.random.random() < 0.2:
            self.send()
        elif self.messages and self.random.random() < 0.8:
            self.deliver(self.messages.pop(self.random.randrange(len(self.messages))))
        elif self.depth == 0 or not self.gate._is_cutting:
            self.try_to_cut()

    def send(self) -> None:
        """Let all sources send an epoch: at most that after the one whose cut is due."""
        for source in self.sources:
            count = self.counts[self.sent][source]
            self.messages += [("update", (source, self.sent, number)) for number in range(count)]
            self.messages += [("mark", (source, self.sent, count))] * self.random.randint(1, 2)
        self.sent += 1

    def deliver(self, message: tuple[str, Update]) -> None:
        kind, update = message
        if kind == "mark" and update[1] < self.cuts - 1:
            return  # a copy that came two cuts late
        if kind == "mark":
            self.gate.mark(*update)
        else:
            self.futures.append(self.gate.submit(update[0], update[1], lambda: self.apply(update)))

    def apply(self, update: Update) -> None:
        self.others()
        self.applied.append(update)

    def others(self) -> None:
        """Do what other threads may do meanwhile."""
        if self.depth < 4:
            self.depth += 1
            for _ in range(self.random.randint(0, 3)):
                self.step()
            self.depth -= 1

    def try_to_cut(self) -> None:
        expected = [
            (source, epoch, number)
            for epoch in range(self.cuts + 1)
            if epoch < EPOCHS
            for source in self.sources
            for number in range(self.counts[epoch][source])
        ]
        try:
            with self.gate.cut(timeout_s=0) as epoch:
                assert epoch == self.cuts
                assert sorted(self.applied) == sorted(expected), "at the begin of the cut"
                self.cuts += 1
                self.others()
                assert sorted(self.applied) == sorted(expected), "at its end"
        except CheckpointError as error:
            if "cannot be taken" not in str(error):
                raise


def test_a_cut_holds_the_updates_of_its_epochs_each_once() -> None:
    for seed in range(300):
        Schedule(UpdateGate, seed).run()


class NoQueue(UpdateGate):
    """Applies updates of the next epoch at once."""

    def submit(self, source: int, epoch: int, apply: Callable[[], object]) -> Future[None]:
        future = super().submit(source, epoch, apply)
        while self._queue:
            self._apply(self._queue.popleft())
        return future


class NoCount(UpdateGate):
    """Cuts when all have marked."""

    def _is_complete(self) -> bool:
        return len(self._now.marked) == len(self._sources)


class NoMarks(UpdateGate):
    """Cuts when all marked updates are applied, and does not wait for the other marks."""

    def _is_complete(self) -> bool:
        return all(self._now.applied[source] >= count for source, count in self._now.marked.items())


class BeforeTheLast(UpdateGate):
    """Cuts when all have come, the last of which may be being applied."""

    def _is_complete(self) -> bool:
        return super()._is_complete() or (
            len(self._now.marked) == len(self._sources) and self._now.arrived == self._now.marked
        )


class QueueFirst(UpdateGate):
    """Applies the queue, and then cuts."""

    def _wait_for_all(self, timeout_s: float) -> None:
        super()._wait_for_all(timeout_s)
        while self._queue:
            self._apply(self._queue.popleft())


class Forgets(UpdateGate):
    """Loses one of several queued updates."""

    def _take(self) -> _Update | None:
        taken = super()._take()
        if taken is not None and self._due:
            super()._take()
        return taken


@pytest.mark.parametrize("broken", [NoQueue, NoCount, NoMarks, BeforeTheLast, QueueFirst, Forgets])
def test_a_broken_gate_is_caught(broken: type[UpdateGate]) -> None:
    caught = 0
    for seed in range(60):
        schedule = Schedule(broken, seed)
        try:
            for _ in range(400):
                schedule.step()
                if schedule.cuts == EPOCHS:
                    break
            else:
                caught += 1  # its cut never comes
        except (AssertionError, CheckpointError):
            caught += 1
    assert caught > 5


def test_threads_send_while_others_cut() -> None:
    sources, shared, count = range(4), 3, 30
    gate, applied, lock = UpdateGate(sources, max_queued=10_000), set[Update](), threading.Lock()
    cut_taken = [threading.Event() for _ in range(EPOCHS)]

    def apply(update: Update) -> None:
        with lock:
            assert update not in applied
            applied.add(update)

    def send(source: int, part: int) -> list[Future[None]]:
        futures = []
        for epoch in range(EPOCHS):
            if epoch >= 2:
                assert cut_taken[epoch - 2].wait(20)
            for number in range(part, count, shared):
                futures.append(gate.submit(source, epoch, lambda u=(source, epoch, number): apply(u)))  # type: ignore[misc]
            gate.mark(source, epoch, count)
        return futures

    with ThreadPoolExecutor(len(sources) * shared) as pool:
        sending = [pool.submit(send, source, part) for source in sources for part in range(shared)]
        try:
            for epoch in range(EPOCHS):
                with gate.cut(timeout_s=20) as cut:
                    before = set(applied)
                    assert cut == epoch
                    assert before == {
                        (s, e, n) for s in sources for e in range(epoch + 1) for n in range(count)
                    }
                    cut_taken[epoch].set()
                    assert applied == before
        except BaseException as error:
            gate.fail(error)
            raise
        finally:
            for event in cut_taken:
                event.set()
        for future in sending:
            assert all(update.done() for update in future.result(timeout=20))
