"""The progress of this rank in a save or a load: its step, its operations, its idle time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from ckpt.backends.cancellable_reads import CANCELLED
from ckpt.consistency import environment
from ckpt.errors import CheckpointError, StorageError, StorageUnavailable

_MIB = 1 << 20


@dataclass(eq=False)
class Operation:
    """One operation of a store; if `cancelled`, nobody waits for it, and it must end soon."""

    action: str
    key: str
    size_bytes: int = 0
    sent_bytes: int = 0
    cancelled: bool = False
    began_at_s: float = field(default_factory=environment.monotonic)

    def check(self) -> None:
        """Raise StorageError if this operation was cancelled."""
        if self.cancelled:
            raise StorageError(CANCELLED, key=self.key)

    def __str__(self) -> str:
        sent, size = self.sent_bytes / _MIB, self.size_bytes / _MIB
        text = f"{self.action} {self.key}".rstrip()
        return f"{text} ({sent:.1f} of {size:.1f} MiB)" if self.size_bytes else text


class Progress:
    """Steps of a save or load, and operations of the store within them.

    Progress is a step that begins, an operation that the storage answered, a part of one that was
    sent. A byte is none: a server may take or give one every ten seconds. Nor is work after a
    failure: all of it has to fit into the time that is left.

    Attributes:
        given_up: why this save or load has failed elsewhere, so that this rank need not go on.
        is_ending: it has failed, here or elsewhere, and this rank is only cleaning up.
        is_waiting: this rank has done its part of a step, and waits for the others.
    """

    def __init__(self) -> None:
        self._operations: dict[int, Operation] = {}
        self._overlooked: str | None = None
        self.restart()

    def begin(self, step: str) -> None:
        self._step, self.is_waiting = step, False
        if not self._failing:
            self.moved()

    def wait_for(self, event: str) -> None:
        """Begin to wait for the other ranks; `event` completes "waiting for"."""
        self._step, self.is_waiting = f"waiting for {event}", True
        self.moved()

    def clean_up(self) -> None:
        """Begin to clean up in the time that is left, on ranks without a failure too."""
        self._step, self.is_waiting = "cleaning up", False
        self._failing = self.is_ending = True

    @contextlib.contextmanager
    def cleaning_up(self) -> Iterator[None]:
        """Let operations run although the call was given up before; a new reason ends these too."""
        self._overlooked = self.given_up
        try:
            yield
        finally:
            self._overlooked = None

    @property
    def refusal(self) -> str | None:
        """Why operations must not run any more; None if they may."""
        return None if self.given_up is self._overlooked else self.given_up

    def restart(self) -> None:
        self.given_up: str | None = None
        self._failing = self.is_ending = False
        self.begin("beginning")

    @contextlib.contextmanager
    def operation(self, action: str, key: str, size_bytes: int = 0) -> Iterator[Operation]:
        """Note an operation of the store while it runs."""
        operation = Operation(action, key, size_bytes)
        self._operations[id(operation)] = operation
        if not self._failing:
            self.moved()
        try:
            yield operation
            self._failing = self.is_ending
            self.moved()
        except BaseException as error:
            is_answer = isinstance(error, CheckpointError) and not isinstance(error, StorageUnavailable)
            self._failing = self._failing or not is_answer
            raise
        finally:
            del self._operations[id(operation)]

    def moved(self) -> None:
        self._moved_at_s = environment.monotonic()

    @property
    def idle_s(self) -> float:
        """The time since the last progress."""
        return environment.monotonic() - self._moved_at_s

    def __str__(self) -> str:
        running = [operation for operation in list(self._operations.values()) if not operation.cancelled]
        # The others, or the step, will have to wait for the oldest.
        oldest = min(running, key=lambda operation: operation.began_at_s, default=None)
        return self._step if oldest is None else f"{self._step}: {oldest}"
