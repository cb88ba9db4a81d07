"""Handlers of signals that raise at any moment inside a manager's calls: its state stays whole, and nothing hangs."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.backends.posix import PosixStore
from ckpt.errors import CheckpointError, SaveFailed
from ckpt.trainer_integration import saving
from ckpt.trainer_integration.run import held_errors
from ckpt.trainer_integration.run.held_errors import errors_held, pause, wait_for

SHORT_S, LONG_S = 1e-5, 0.02

# Python itself drops, with this warning, an error that a handler raises in a callback of the collector or in `__del__`.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


class Interrupt(BaseException):
    """Like KeyboardInterrupt: no library may take it for a failure."""


@contextmanager
def handler(number: signal.Signals, error: type[BaseException]) -> Iterator[list[int]]:
    """Raise `error` at each signal; count them."""
    come: list[int] = []

    def raise_it(_: int, frame: object) -> None:
        come.append(len(come))
        raise error("from a handler")

    before = signal.signal(number, raise_it)
    try:
        yield come
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(number, before)


def state_of(step: int) -> dict[str, Any]:
    return {"weight": torch.full((1000,), float(step)), "step": step}


def _saves_at_random_moments(
    root: Path, error: type[BaseException], moments: random.Random, saves: int, **options: Any
) -> int:
    """Save with a signal at a random moment of each call, then without; return how many errors came out of calls."""
    raised = 0
    with handler(signal.SIGALRM, error) as come:
        manager = ckpt.CheckpointManager(root, save=1, preflight=False, **options)
        for step in range(1, saves + 1):
            call = manager.step if step % 2 else manager.save
            try:
                signal.setitimer(signal.ITIMER_REAL, moments.uniform(SHORT_S, LONG_S))
                call(step, state_of(step))
                if step % 3 == 0:
                    manager.wait_durable(240)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except error:
                raised += 1
            call(
                step, state_of(step)
            )  # saves it if that was not done: an error is one of ours, and fails the test
            assert step in manager._saves.steps
        assert manager.wait_durable(240) == saves
        try:
            signal.setitimer(signal.ITIMER_REAL, moments.uniform(SHORT_S, 1e-3))
            manager.close()
            signal.setitimer(signal.ITIMER_REAL, 0)
        except error:
            raised += 1
        manager.close()
        removed = manager._saves._booked
        assert removed is None or removed.wait(60), "a close that was interrupted does not stop the removals"
        assert len(come) >= raised
    return raised


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["thread", "off"])
@pytest.mark.parametrize("error", [Interrupt, RuntimeError])
def test_errors_of_handlers_break_no_save(tmp_path: Path, mode: str, error: type[BaseException]) -> None:
    raised = _saves_at_random_moments(tmp_path, error, random.Random(mode), 40, async_mode=mode)
    assert raised > 0
    _check_all_there(tmp_path, 40)


@pytest.mark.long
@pytest.mark.parametrize("mode", ["thread", "off"])
@pytest.mark.parametrize("seed", range(5))
def test_errors_at_many_moments(tmp_path: Path, mode: str, seed: int) -> None:
    error = (Interrupt, RuntimeError)[seed % 2]
    rule = {"keep": 3, "async_mode": mode}
    assert _saves_at_random_moments(tmp_path, error, random.Random(seed), 100, **rule) > 0
    _check_all_there(tmp_path, 100, kept=3)


def _check_all_there(root: Path, steps: int, kept: int | None = None) -> None:
    found = [each.step for each in ckpt.list_checkpoints(root) if each.state == "committed"]
    first = 1 if kept is None else steps - kept + 1
    assert sorted(found, key=lambda step: step or 0) == [*range(first, steps + 1)]
    with ckpt.CheckpointManager(root, save=1) as manager:
        state = state_of(-1)
        restored = manager.restore(state)
        assert restored is not None
        assert state["weight"][0] == restored.step == steps


@pytest.mark.parametrize("mode", ["thread", "off"])
def test_errors_of_handlers_lose_no_emergency_save(tmp_path: Path, mode: Any) -> None:
    moments = random.Random(mode)
    for trial in range(20):
        root = tmp_path / str(trial)
        rule = saving.every_steps(1000) | saving.on_preemption(grace_s=60)
        with (
            handler(signal.SIGALRM, RuntimeError),
            ckpt.CheckpointManager(root, save=rule, async_mode=mode, preflight=False) as manager,
        ):
            step = 0
            while not manager.preempted:
                step += 1
                try:
                    if step == 2:
                        signal.raise_signal(signal.SIGTERM)
                        signal.setitimer(signal.ITIMER_REAL, moments.uniform(SHORT_S, LONG_S))
                    manager.step(step, state_of(step))
                except RuntimeError:
                    continue
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            assert manager.wait_durable(240) == step <= 3
        assert [each.step for each in ckpt.list_checkpoints(root)] == [step]


def test_a_wait_for_a_save_can_be_interrupted_and_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_put, put = threading.Event(), PosixStore.put

    def put_later(self: PosixStore, key: str, *rest: Any, **more: Any) -> None:
        assert not key.endswith(".distcp") or may_put.wait(120)
        put(self, key, *rest, **more)

    monkeypatch.setattr(PosixStore, "put", put_later)
    with (
        handler(signal.SIGALRM, Interrupt) as come,
        ckpt.CheckpointManager(tmp_path, save=1) as manager,
    ):
        manager.step(1, state_of(1))
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        try:
            with pytest.raises(Interrupt):
                manager.wait_durable()
            assert manager.durable_step is None
            assert come == [0]
        finally:
            may_put.set()
        assert manager.wait_durable() == 1


# -- the block -------------------------------------------------------------------------------------------


def _outcome(work: Callable[[], None]) -> list[str]:
    reached: list[str] = []
    try:
        with errors_held():
            work()
            reached.append("end of the block")
    except BaseException as error:
        reached.append(type(error).__name__)
    return reached


def test_the_handler_runs_and_its_error_waits() -> None:
    with handler(signal.SIGALRM, RuntimeError) as come:
        mine = signal.getsignal(signal.SIGALRM)
        noted: list[int] = []

        def work() -> None:
            signal.raise_signal(signal.SIGALRM)
            noted.append(len(come))
            with errors_held():
                signal.raise_signal(signal.SIGALRM)
            noted.append(len(come))

        assert _outcome(work) == ["end of the block", "RuntimeError"]
        assert noted == [1, 2], "without delay, and an inner block changes nothing"
        assert signal.getsignal(signal.SIGALRM) is mine


def test_the_second_interrupt_does_not_wait() -> None:
    with handler(signal.SIGALRM, Interrupt), handler(signal.SIGUSR2, RuntimeError):

        def work() -> None:
            for number in (signal.SIGUSR2, signal.SIGUSR2, signal.SIGALRM):
                signal.raise_signal(number)

        assert _outcome(work) == ["end of the block", "Interrupt"]

        def work_twice() -> None:
            work()
            work()

        assert _outcome(work_twice) == ["Interrupt"]


def test_the_failure_of_the_block_comes_first(caplog: pytest.LogCaptureFixture) -> None:
    with handler(signal.SIGALRM, RuntimeError), handler(signal.SIGUSR2, Interrupt):

        def work(*numbers: signal.Signals) -> None:
            for number in numbers:
                signal.raise_signal(number)
            raise SaveFailed("disk full")

        assert _outcome(lambda: work(signal.SIGALRM)) == ["SaveFailed"]
        assert "from a handler" in caplog.text
        assert _outcome(lambda: work(signal.SIGALRM, signal.SIGUSR2)) == ["Interrupt"]


def test_waits_in_the_block_raise_what_is_put_off() -> None:
    event = threading.Event()
    with handler(signal.SIGALRM, Interrupt):
        for wait in (lambda: wait_for(event), lambda: wait_for(event, 60.0), lambda: pause(0.01)):

            def work(wait: Callable[[], object] = wait) -> None:
                signal.raise_signal(signal.SIGALRM)
                wait()

            assert _outcome(work) == ["Interrupt"]
    began_s = time.monotonic()
    assert not wait_for(event, 0.01)
    event.set()
    assert wait_for(event, 0.0)
    assert time.monotonic() - began_s >= 0.01


def test_a_handler_that_the_block_has_set_stays() -> None:
    other = signal.default_int_handler
    with handler(signal.SIGALRM, Interrupt):
        with errors_held():
            signal.signal(signal.SIGALRM, other)
        assert signal.getsignal(signal.SIGALRM) is other


def test_what_was_left_behind_raises_as_before() -> None:
    """An error may come while handlers are restored: the next block does not wrap twice."""
    with handler(signal.SIGALRM, Interrupt):
        mine = signal.getsignal(signal.SIGALRM)
        with errors_held():
            left = signal.getsignal(signal.SIGALRM)
        signal.signal(signal.SIGALRM, left)
        with pytest.raises(Interrupt):
            signal.raise_signal(signal.SIGALRM)
        with errors_held():
            pass
        assert signal.getsignal(signal.SIGALRM) is mine
    assert held_errors._hold is None


def test_other_threads_hold_nothing() -> None:
    with handler(signal.SIGALRM, Interrupt):
        mine, seen = signal.getsignal(signal.SIGALRM), []

        def work() -> None:
            with errors_held():
                seen.append(signal.getsignal(signal.SIGALRM))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert seen == [mine]


def test_a_save_in_the_background_whose_thread_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def refused(self: threading.Thread) -> None:
        if self.name == "ckpt-async-save":
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", refused)
    with pytest.raises((RuntimeError, CheckpointError), match="can't start new thread"):
        ckpt.async_save(state_of(1), tmp_path / "a")
    monkeypatch.undo()
    ckpt.async_save(state_of(1), tmp_path / "a").result(60)
