"""Run processes in virtual time: one goes on while all others wait, and nothing sleeps.

Each process is ordinary code in a greenlet. Under `environment.replaced(VirtualTime(choices))`,
what it would sleep, wait for or start in a thread happens in virtual time. When all wait, the clock
jumps.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import threading
from collections.abc import Callable
from typing import Any

from greenlet import getcurrent, greenlet

from ckpt.consistency.environment import Environment
from ckpt.testing.choices import Choices

__all__ = ["EPOCH_S", "Crashed", "Process", "Stuck", "VirtualTime"]

EPOCH_S = 1_700_000_000.0
"""When simulated time begins, in seconds since 1970."""


class Crashed(BaseException):
    """The process was killed: nothing it does any more has an effect."""


class Stuck(Exception):
    """All processes wait for each other."""


class Process(greenlet):  # type: ignore[misc]
    """A program that runs on a node.

    Keep processes out of the keys and values of a dict or tuple that holds nothing else: one that
    runs does not count as collectable, so what refers only to such objects is never freed.

    Attributes:
        result, error: what the program returned or raised, once it is `done`.
        crashed, stalled: it was killed, or does nothing for a while.
        requests, faults: how many it has sent to simulated storage, and how many did not work.
        read: the `Version` that it last read, by name.
        looked: at which request it last asked for a name, whether one was there, and when.
    """

    def __init__(self, time: VirtualTime, name: str, node: str, program: Callable[[], Any]) -> None:
        # Not an attribute: a program that is done must not keep alive what it refers to.
        super().__init__(functools.partial(self._go, program), time.main)
        self.name, self.node = name, node
        self.result: Any = None
        self.error: BaseException | None = None
        self.done = self.crashed = self.stalled = False
        self.wakes_at_s = time.now_s
        self.until: Callable[[], bool] | None = None
        self.requests = self.faults = 0
        self.read: dict[str, Any] = {}
        self.looked: dict[str, tuple[int, bool, float]] = {}

    def _go(self, program: Callable[[], Any]) -> None:
        try:
            self.result = program()
        except Crashed:
            pass
        except Exception as error:
            self.error = error
        self.done = True

    def ready(self, now_s: float) -> bool:
        return self.wakes_at_s <= now_s or (self.until is not None and self.until())

    def pause(self) -> None:
        """Let others go on. Raises Crashed if this process was killed meanwhile."""
        self.parent.switch()
        if self.crashed:
            raise Crashed

    def __repr__(self) -> str:
        return f"{self.name} on {self.node}"


class VirtualTime(Environment):
    """The time, and the processes in it: all that were ever started, and the one that runs now."""

    def __init__(self, choices: Choices) -> None:
        self.choices, self.main = choices, getcurrent()
        self.now_s = 0.0
        self.processes: list[Process] = []
        self.running: Process | None = None
        self._alive: list[Process] = []
        self._last: Process | None = None
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._tokens, self._calls = itertools.count(1), itertools.count()

    # -- as an Environment -------------------------------------------------------------------------

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, duration_s: float) -> None:
        process = getcurrent()
        if isinstance(process, Process):
            self._wait(process, self.now_s + duration_s)
        else:
            self.settle(duration_s)

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        return self.wait_for(event.is_set, timeout_s)

    def start_thread(self, work: Callable[[], object], name: str) -> None:
        process = getcurrent()
        assert isinstance(process, Process)
        self.start(f"{process.name} {name}", process.node, work)

    def now(self) -> float:
        return EPOCH_S + self.now_s

    def token(self) -> str:
        return f"{next(self._tokens):016x}"

    def jitter(self) -> float:
        return 0.5

    # -- processes ---------------------------------------------------------------------------------

    def start(self, name: str, node: str, program: Callable[[], Any]) -> Process:
        process = Process(self, name, node, program)
        self.processes.append(process)
        self._alive.append(process)
        return process

    def wait_for(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Let other processes go on until `condition` holds; return whether it did in time."""
        process = getcurrent()
        assert isinstance(process, Process)
        if not condition():
            self._wait(process, self.now_s + timeout_s, condition)
        return condition()

    def call_later(self, delay_s: float, call: Callable[[], object]) -> None:
        """Have `call` made when that time has passed, by no process."""
        heapq.heappush(self._due, (self.now_s + delay_s, next(self._calls), call))

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Let processes run until all are done, or `until` holds. Raises Stuck if none can."""
        while self._alive and not until():
            self._make_calls(self.now_s)
            ready = [process for process in self._alive if process.ready(self.now_s)]
            if len(ready) > 1:
                ready.sort(key=lambda process: process is not self._last)  # going on is uneventful
                self._resume(ready[self.choices.pick("run", [1.0] * len(ready))])
            elif ready:
                self._resume(ready[0])
            else:
                times_s = [process.wakes_at_s for process in self._alive] + [due[0] for due in self._due]
                self.now_s = max(self.now_s, min(times_s))
                if self.now_s == float("inf"):
                    raise Stuck(f"all wait: {', '.join(map(str, self._alive))}")

    def step(self, process: Process) -> None:
        """Let `process` go on until it waits again, whatever it waits for now."""
        self._make_calls(self.now_s)
        self._resume(process)

    def crash(self, process: Process) -> None:
        """Kill a process that waits."""
        process.crashed = True
        if process in self._alive:
            if process:  # it has begun
                self._switch_to(process)
            process.done = True
            self._alive.remove(process)

    def end(self) -> None:
        """Kill what still runs: a process that waits is never freed, nor what it refers to."""
        for process in list(self._alive):
            self.crash(process)

    def settle(self, duration_s: float) -> None:
        """Let time pass, in which no process goes on, and make the calls that are due."""
        end_s = self.now_s + duration_s
        self._make_calls(end_s)
        self.now_s = end_s

    def _resume(self, process: Process) -> None:
        self._last = process
        process.stalled = False
        process.wakes_at_s, process.until = self.now_s, None
        self._switch_to(process)
        if process.done:
            self._alive.remove(process)

    def _switch_to(self, process: Process) -> None:
        self.running = process
        try:
            process.switch()
        finally:
            self.running = None

    def _wait(self, process: Process, until_s: float, condition: Callable[[], bool] | None = None) -> None:
        process.wakes_at_s, process.until = until_s, condition
        process.pause()

    def _make_calls(self, until_s: float) -> None:
        while self._due and self._due[0][0] <= until_s:
            at_s, _, call = heapq.heappop(self._due)
            self.now_s = max(self.now_s, at_s)
            call()
