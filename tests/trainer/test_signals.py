"""Several managers in a process note signals, and close in any order; other programs' handlers stay in use."""

from __future__ import annotations

import itertools
import logging
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from ckpt.torch_private import WORKER_LOOP, WORKER_LOOP_MODULE, WORKER_SIGNALS, WORKER_SIGNALS_MODULE
from ckpt.trainer_integration.run.signals import Signals

NUMBERS = (signal.SIGUSR1, signal.SIGTERM)


def _state() -> list[Any]:
    loops = [getattr(WORKER_LOOP_MODULE, WORKER_LOOP), getattr(WORKER_SIGNALS_MODULE, WORKER_SIGNALS)]
    return [*map(signal.getsignal, (*NUMBERS, signal.SIGCHLD)), *loops]


@pytest.fixture
def called() -> Iterator[list[int]]:
    """Calls of the program's handlers of SIGUSR1 and SIGCHLD; all is as before at the end of the test."""
    calls: list[int] = []
    numbers = (*NUMBERS, signal.SIGCHLD)
    before = {number: signal.getsignal(number) for number in numbers}
    for number in (signal.SIGUSR1, signal.SIGCHLD):
        signal.signal(number, lambda number, frame: calls.append(number))
    mine = _state()
    yield calls
    assert _state() == mine
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
def test_several_close_in_any_order(called: list[int], order: tuple[int, ...]) -> None:
    several = [Signals(NUMBERS[: 1 + index % 2]) for index in range(3)]
    for index in order:
        several[index].guard()
        for each in several:
            each.received = None
        signal.raise_signal(signal.SIGUSR1)
        closed = order[: order.index(index)]
        assert [each.received for each in several] == [
            None if number in closed else "SIGUSR1" for number in range(3)
        ]
        several[index].close()
    assert called.count(signal.SIGUSR1) == 3


def test_one_is_always_open(called: list[int]) -> None:
    """No handler is left behind for each that was open."""
    last = Signals(NUMBERS)
    for _ in range(2 * sys.getrecursionlimit()):
        last, before = Signals(NUMBERS), last
        before.close()
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGUSR1)
    assert last.received == "SIGUSR1"
    last.close()
    assert called.count(signal.SIGUSR1) == 1


def test_two_put_one_guard(called: list[int]) -> None:
    one, other = Signals(NUMBERS), Signals(NUMBERS)
    for _ in range(sys.getrecursionlimit()):
        one.guard()
        other.guard()
    signal.raise_signal(signal.SIGCHLD)
    assert called == [signal.SIGCHLD]
    for each in (one, other):
        each.close()


def test_workers_outlive_the_signals_of_all(called: list[int]) -> None:
    one = Signals([signal.SIGUSR1])
    other = Signals([signal.SIGTERM])
    loop = getattr(WORKER_LOOP_MODULE, WORKER_LOOP)
    assert loop.args == ({*NUMBERS},)
    one.close()
    loop = getattr(WORKER_LOOP_MODULE, WORKER_LOOP)
    assert loop.args == ({signal.SIGTERM},)
    assert isinstance(pickle.loads(pickle.dumps(loop)), partial), "for workers that are spawned"
    other.close()


def test_it_closes_in_another_thread(called: list[int]) -> None:
    """Only the main thread can change handlers; those that are left pass signals on."""
    before = signal.getsignal(signal.SIGUSR1)
    signals = Signals([signal.SIGUSR1])
    thread = threading.Thread(target=signals.close)
    thread.start()
    thread.join()
    signal.raise_signal(signal.SIGUSR1)
    assert called == [signal.SIGUSR1]
    assert signals.received is None
    Signals([signal.SIGUSR1]).close()
    assert signal.getsignal(signal.SIGUSR1) is before, "the next one takes them away"


_REPLACED = """
import signal
from ckpt.trainer_integration.run.signals import Signals
signals = Signals([signal.SIGTERM])
ours = signal.getsignal(signal.SIGTERM)
signal.signal(signal.SIGTERM, lambda *rest: ours(*rest))
signals.close()
signal.raise_signal(signal.SIGTERM)
print("it ignores the signal")
"""


def test_a_handler_that_others_call_takes_the_default_action_when_it_is_closed() -> None:
    command = [sys.executable, "-c", _REPLACED]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, ""), done.stderr


def test_a_handler_of_children_that_always_raises_is_logged_once(
    called: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    mine = signal.getsignal(signal.SIGCHLD)

    def raise_it(number: int, frame: object) -> None:
        raise RuntimeError("a child has died")

    signal.signal(signal.SIGCHLD, raise_it)
    signals = Signals([signal.SIGTERM])
    signal.raise_signal(signal.SIGTERM)
    with caplog.at_level(logging.WARNING):
        signal.raise_signal(signal.SIGCHLD)
        signals.guard()
    assert caplog.text.count("a child has died") == 1
    signals.close()
    assert signal.getsignal(signal.SIGCHLD) is raise_it
    signal.signal(signal.SIGCHLD, mine)
