"""Simulate a storage system that lies, and its clients, in virtual time: one seed, one history.

Whenever a process sends a request, the world may let any other one go first, and then decides what
becomes of it. A `Choices` makes every decision, within the bounds of a `Model`; docs/consistency.md
says what is assumed.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable
from typing import Protocol, TypeVar

from greenlet import getcurrent

from ckpt.backends.base import Capabilities
from ckpt.errors import AccessDenied, AlreadyExists, CheckpointError, NotFound, StorageUnavailable
from ckpt.testing.choices import Choices
from ckpt.testing.simulated_objects import Model, Objects, Version
from ckpt.testing.virtual_time import Crashed, Process, VirtualTime

__all__ = ["FAULTS", "Escaped", "Watcher", "World"]

FAULTS = ("none", "crash", "stall", "lost request", "lost reply", "late", "sent twice", "refused")
"""What can become of a request; the first is that it works."""

_READ_FAULTS = ("none", "crash", "stall", "lost request", "refused")
T = TypeVar("T")


class Escaped(BaseException):
    """A process sent a request from another thread, where the world has no say in it."""


class Watcher(Protocol):
    """Sees the truth, which no client does."""

    def changed(self, world: World, name: str, before: Version | None, after: Version) -> None:
        """Object to a change that just took effect: what this raises ends the run."""


class World(Objects, VirtualTime):
    """One storage system, its clients, and their time; for `environment.replaced`.

    Attributes:
        counts: how often each fault came up.
        trace: what happened, if it is a list.
        objection: the watcher's first.
        is_late: the request that is being carried out was given up by its client.
    """

    def __init__(self, choices: Choices, model: Model | None = None, watcher: Watcher | None = None) -> None:
        VirtualTime.__init__(self, choices)
        Objects.__init__(self, choices, model or Model())
        self.watcher = watcher
        self.counts: Counter[str] = Counter()
        self.trace: list[str] | None = None
        self.objection: Exception | None = None
        self.is_late = False
        self._lock = threading.RLock()
        self._skew_s: dict[str, float] = {}
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
            visible_is_durable=True,
        )
        weights = {**dict.fromkeys(FAULTS, 0.0), **model.faults, "none": 1.0}
        self._weights = [weights[fault] for fault in FAULTS]
        self._read_weights = [weights[fault] if fault in _READ_FAULTS else 0.0 for fault in FAULTS]

    def now(self) -> float:
        node = getattr(getcurrent(), "node", "")
        if node not in self._skew_s:
            skew_s = self.model.clock_skew_s
            self._skew_s[node] = skew_s * (2 * self.choices.fraction("clock") - 1) if skew_s else 0.0
        return super().now() + self._skew_s[node]

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        super().run(lambda: self.objection is not None or until())
        if self.objection is not None:
            raise self.objection

    def change(self, node: str, name: str, data: bytes | None) -> None:
        """`name` holds `data` from now on (None: is deleted), by the process that acts, if any."""
        before = next(reversed(self.versions.get(name, [])), None)
        after = self.add(node, name, data, self._acting)
        if after is not None and self.watcher is not None and self.objection is None:
            try:
                self.watcher.changed(self, name, before, after)
            except Exception as error:
                self.objection = error

    # -- requests ----------------------------------------------------------------------------------

    def request(
        self, node: str, text: str, effect: Callable[[], T], *, writes: bool, url: str, key: str
    ) -> T:
        """Carry out a request of `node`, or not, or later, or twice. Raises Escaped."""
        process = getcurrent()
        if not isinstance(process, Process):
            if self.running is not None:
                raise Escaped(f"{self.running}: {text} {key}")
            with self._lock:
                return effect()
        if process.crashed:
            raise Crashed
        process.pause()
        process.requests += 1
        self.now_s += self.model.request_s * self.choices.duration()
        fault = FAULTS[self.choices.pick(text, self._weights if writes else self._read_weights)]
        self._note(f"{process}: {text} {key} {'' if fault == 'none' else fault.upper()}")
        if fault == "none":
            result = self._carry_out(process, effect)
            if writes and self.model.echo_s and self.choices.pick("echo", (0.8, 0.2)):
                self.counts["echo"] += 1
                self._carry_out_in(self.model.echo_s * self.choices.fraction("late"), process, effect)
            return result
        process.faults += 1
        self.counts[fault] += 1
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
            process.pause()
            try:
                return self._carry_out(process, effect)
            except AlreadyExists as error:
                error.settled = False  # what is there may be its own work
                raise
        if fault == "lost reply":
            with contextlib.suppress(CheckpointError):
                self._carry_out(process, effect)
        elif fault == "late":
            self._carry_out_in(self.model.late_s * self.choices.fraction("late"), process, effect)
        raise StorageUnavailable(f"no answer ({fault})", url=url, key=key)

    def _carry_out(self, process: Process, effect: Callable[[], T]) -> T:
        self._acting = process
        try:
            return effect()
        finally:
            self._acting = None

    def _carry_out_in(self, delay_s: float, process: Process, effect: Callable[[], object]) -> None:
        def carry_out() -> None:
            self._note("a late request is carried out")
            self.is_late = True
            with contextlib.suppress(CheckpointError):
                self._carry_out(process, effect)
            self.is_late = False

        self.call_later(delay_s, carry_out)

    def _note(self, text: str) -> None:
        if self.trace is not None:
            self.trace.append(f"{self.now_s:9.3f} {text}")
