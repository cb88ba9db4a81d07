"""A storage system that lies, and the clients that use it, in virtual time: one seed, one history.

A `World` holds objects and the processes that work on them. Each process is ordinary code over a
`SimulatedStore`; whenever it sends a request, the world may let any other process go first, and then decides
what becomes of the request. Nothing sleeps: when all processes wait, the clock jumps.

What a world does to its clients is its `Model`:

- **Visibility.** What a node did, it sees at once. Others see it after a lag of their own, drawn for each
  version and node, up to the model's bound for creates, overwrites, deletes, and listings.
- **Negative caching.** A name that was looked up too early stays missing on that node for a while.
- **Stale attributes.** The answer to `stat` may be the one of a while ago, while a read gets newer bytes.
- **Requests** (`FAULTS`) get lost; are carried out, but their reply is lost; are carried out long after their
  client gave up, in another order; are sent twice, the first reply having been lost; are refused.
- **Uploads** in parts, of which a crash or failure leaves some behind.
- **Processes** crash between any two requests, for good, or stall and wake when others have gone on (zombies).
- **Clocks** of nodes differ.

Every decision is made by a `Choices`. A `Watcher` is told of every change the moment it takes effect.

Assumed of any storage, in every model: a name shows the whole of one version or none; a version that a node has
seen does not give way to an older one; a lag ends within its bound; a request that was answered is not
carried out again later (`echo_s` lifts that).

Processes are greenlets (package `greenlet`, in the extra `test`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from greenlet import getcurrent, greenlet

from ckpt.backends.base import Capabilities
from ckpt.consistency.environment import Environment
from ckpt.errors import AccessDenied, AlreadyExists, CheckpointError, NotFound, StorageUnavailable
from ckpt.testing.choices import Choices
from ckpt.testing.simulated_objects import Model, Objects, Version

__all__ = ["FAULTS", "Crashed", "Escaped", "Process", "Stuck", "Watcher", "World"]

FAULTS = ("none", "crash", "stall", "lost request", "lost reply", "late", "sent twice", "refused")
"""What can become of a request; the first is that it works."""

_READ_FAULTS = ("crash", "stall", "lost request", "refused")
T = TypeVar("T")


class Crashed(BaseException):
    """The process is gone: nothing it does any more has an effect."""


class Escaped(BaseException):
    """A process sent a request from another thread, where the world has no say in what becomes of it."""


class Stuck(Exception):
    """All processes wait for each other."""


class Process(greenlet):  # type: ignore[misc]
    """A program that runs on a node of a world.

    Attributes:
        result, error: what it returned, or raised, once it is `done`.
        crashed: it was killed.
        faults: how many of its requests did not simply work.
        requests: how many it has sent.
        read: what it last read, by name.
        looked: at which request it last asked for a name, and whether it was told that there is one.
    """

    def __init__(self, world: World, name: str, node: str, program: Callable[[], Any]) -> None:
        super().__init__(self._go, world.main)
        self.world, self.name, self.node, self._program = world, name, node, program
        self.result: Any = None
        self.error: BaseException | None = None
        self.done = self.crashed = self.stalled = False
        self.faults = 0
        self.wakes_at_s = 0.0
        self.until: Callable[[], bool] | None = None
        self.requests = 0
        self.read: dict[str, Version] = {}
        self.looked: dict[str, tuple[int, bool]] = {}

    def _go(self) -> None:
        try:
            self.result = self._program()
        except Crashed:
            pass
        except Exception as error:
            self.error = error
        self.done = True

    def ready(self, now_s: float) -> bool:
        return self.wakes_at_s <= now_s or (self.until is not None and self.until())

    def __repr__(self) -> str:
        return f"{self.name} on {self.node}"


class Watcher(Protocol):
    """Sees the truth, which no client does."""

    def changed(self, world: World, name: str, before: Version | None, after: Version) -> None:
        """Called right after a change took effect; what it raises ends the run, whatever the process catches."""


class World(Objects, Environment):
    """One storage system, its clients, and their time. `environment.replaced(world)` puts code into it.

    Attributes:
        counts: how often each fault came up.
        trace: what happened, if it is a list.
        objection: the watcher's first.
        is_late: the request that is being carried out was given up by its client.
    """

    def __init__(self, choices: Choices, model: Model | None = None, watcher: Watcher | None = None) -> None:
        super().__init__(choices, model or Model())
        self.watcher, self.main = watcher, getcurrent()
        self.processes: list[Process] = []
        self._alive: list[Process] = []
        self.counts: dict[str, int] = {}
        self.trace: list[str] | None = None
        self.objection: Exception | None = None
        self.is_late = False
        self._running: Process | None = None
        self._lock = threading.RLock()
        self._late: list[tuple[float, int, Callable[[], object]]] = []
        self._tokens = self._delayed = 0
        self._skew_s: dict[str, float] = {}
        self._last: Process | None = None
        self._acting: Process | None = None
        self.adopt(self.model)

    def adopt(self, model: Model) -> None:
        """Be like `model` from now on."""
        self.model = model
        self.capabilities = Capabilities(
            conditional_create=model.conditional_create,
            atomic_replace=True,
            list_after_write=not model.list_lag_s,
            cross_client_visibility=not model.visibility_s,
        )
        self._weights = model.weights(FAULTS)
        self._read_weights = [
            w if f == "none" or f in _READ_FAULTS else 0.0 for f, w in zip(FAULTS, self._weights, strict=True)
        ]

    # -- time and chance (Environment) ---------------------------------------------------------------------

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, duration_s: float) -> None:
        process = getcurrent()
        if isinstance(process, Process):
            self._wait(process, self.now_s + duration_s)
        else:
            self.settle(duration_s)

    def now(self) -> float:
        process = getcurrent()
        node = process.node if isinstance(process, Process) else ""
        if node not in self._skew_s:
            skew_s = self.model.clock_skew_s
            self._skew_s[node] = skew_s * (2 * self.choices.fraction("clock") - 1) if skew_s else 0.0
        return 1_700_000_000 + self.now_s + self._skew_s[node]

    def token(self) -> str:
        self._tokens += 1
        return f"{self._tokens:016x}"

    def jitter(self) -> float:
        return 0.5

    # -- processes -----------------------------------------------------------------------------------------

    def start(self, name: str, node: str, program: Callable[[], Any]) -> Process:
        process = Process(self, name, node, program)
        process.wakes_at_s = self.now_s
        self.processes.append(process)
        self._alive.append(process)
        return process

    def wait_for(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Let the others go on until `condition` holds; returns whether it did in time. For processes."""
        process = getcurrent()
        assert isinstance(process, Process)
        if not condition():
            self._wait(process, self.now_s + timeout_s, condition)
        return condition()

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Let processes run until all are done, or `until` holds.

        Raises:
            Stuck: none can ever go on.
        """
        while not until():
            if self.objection is not None:
                raise self.objection
            if not self._alive:
                return
            if self._late:
                self._carry_out_late()
            ready = [process for process in self._alive if process.ready(self.now_s)]
            if ready:
                self._resume(self._choose(ready))
            else:
                self._jump(self._alive)

    def step(self, process: Process) -> None:
        """Let `process` go on to its next request, whatever it waits for."""
        self._carry_out_late()
        self._resume(process)

    def crash(self, process: Process) -> None:
        """Kill it between two requests."""
        process.crashed = True
        if process in self._alive:
            if process:
                self._switch_to(process)
            process.done = True
            self._alive.remove(process)

    def settle(self, duration_s: float) -> None:
        """Let time pass, and what is on its way arrive."""
        end_s = self.now_s + duration_s
        while self._late and min(self._late)[0] <= end_s:
            self.now_s = max(self.now_s, min(self._late)[0])
            self._carry_out_late()
        self.now_s = end_s

    def _choose(self, ready: list[Process]) -> Process:
        if len(ready) == 1:
            return ready[0]
        if self._last in ready:  # going on is the uneventful choice
            ready.remove(self._last)
            ready.insert(0, self._last)
        return ready[self.choices.pick("run", [1.0] * len(ready))]

    def _resume(self, process: Process) -> None:
        self._last = process
        process.stalled = False
        process.wakes_at_s, process.until = self.now_s, None
        self._switch_to(process)
        if process.done:
            self._alive.remove(process)

    def _switch_to(self, process: Process) -> None:
        self._running = process
        try:
            process.switch()
        finally:
            self._running = None

    def _jump(self, alive: Sequence[Process]) -> None:
        times = [process.wakes_at_s for process in alive] + [at_s for at_s, _, _ in self._late]
        self.now_s = max(self.now_s, min(times))
        if self.now_s == float("inf"):
            raise Stuck(f"all wait: {', '.join(map(str, alive))}")

    def _wait(self, process: Process, until_s: float, condition: Callable[[], bool] | None = None) -> None:
        process.wakes_at_s, process.until = until_s, condition
        process.parent.switch()
        if process.crashed:
            raise Crashed

    # -- requests ------------------------------------------------------------------------------------------

    def request(
        self, node: str, text: str, effect: Callable[[], T], *, writes: bool, url: str, key: str
    ) -> T:
        """Carry out a request of `node`, or not, or later, or twice.

        Raises:
            Escaped: it is a process's, but comes from another thread.
        """
        process = getcurrent()
        if not isinstance(process, Process):
            if self._running is not None:
                raise Escaped(f"{self._running}: {text} {key}")
            with self._lock:
                return effect()
        if process.crashed:
            raise Crashed
        process.parent.switch()
        if process.crashed:
            raise Crashed
        process.requests += 1
        self.now_s += self.model.request_s * self.choices.duration()
        fault = FAULTS[self.choices.pick(text, self._weights if writes else self._read_weights)]
        self._note(f"{process}: {text} {key} {'' if fault == 'none' else fault.upper()}")
        if fault == "none":
            return self._answered(process, effect, writes)
        process.faults += 1
        self.counts[fault] = self.counts.get(fault, 0) + 1
        return self._misfortune(process, fault, effect, url, key)

    def _misfortune(self, process: Process, fault: str, effect: Callable[[], T], url: str, key: str) -> T:
        if fault == "crash":
            process.crashed = True
            raise Crashed
        if fault == "stall":
            process.stalled = True
            self._wait(process, self.now_s + self.model.stall_s)
            return self._carry_out(process, effect)
        if fault == "refused":
            raise AccessDenied("refused", url=url, key=key, settled=True)
        if fault == "sent twice":
            with contextlib.suppress(NotFound, AlreadyExists):
                self._carry_out(process, effect)
            process.parent.switch()
            if process.crashed:
                raise Crashed
            return _second_try(lambda: self._carry_out(process, effect))
        if fault == "lost reply":
            with contextlib.suppress(CheckpointError):
                self._carry_out(process, effect)
        elif fault == "late":
            self._carry_out_in(self.model.late_s * self.choices.fraction("late"), process, effect)
        raise StorageUnavailable(f"no answer ({fault})", url=url, key=key)

    def _answered(self, process: Process, effect: Callable[[], T], writes: bool) -> T:
        result = self._carry_out(process, effect)
        if writes and self.model.echo_s and self.choices.pick("echo", (0.8, 0.2)):
            self.counts["echo"] = self.counts.get("echo", 0) + 1
            self._carry_out_in(self.model.echo_s * self.choices.fraction("late"), process, effect)
        return result

    def _carry_out(self, process: Process, effect: Callable[[], T]) -> T:
        self._acting = process
        try:
            return effect()
        finally:
            self._acting = None

    def _carry_out_in(self, delay_s: float, process: Process, effect: Callable[[], object]) -> None:
        self._delayed += 1
        self._late.append((self.now_s + delay_s, self._delayed, lambda: self._carry_out(process, effect)))

    def _carry_out_late(self) -> None:
        while self._late and min(self._late)[0] <= self.now_s:
            due = min(self._late)
            self._late.remove(due)
            self._note("a late request is carried out")
            self.is_late = True
            with contextlib.suppress(CheckpointError):
                due[2]()
            self.is_late = False

    def _note(self, text: str) -> None:
        if self.trace is not None:
            self.trace.append(f"{self.now_s:9.3f} {text}")

    def change(self, node: str, name: str, data: bytes | None) -> None:
        """`name` holds `data` from now on (None: is deleted), by the process that acts, if any."""
        before = next(reversed(self.versions.get(name, [])), None)
        after = self.add(node, name, data, self._acting)
        if after is not None and self.watcher is not None and self.objection is None:
            try:
                self.watcher.changed(self, name, before, after)
            except Exception as error:
                self.objection = error


def _second_try(effect: Callable[[], T]) -> T:
    """The same request again; it does not know that what it finds may be its own work."""
    try:
        return effect()
    except AlreadyExists as error:
        error.settled = False
        raise
