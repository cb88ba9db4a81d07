"""What this rank is doing in a save or a load, and for how long it has not got on with it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from ckpt.consistency import environment
from ckpt.errors import CheckpointError, StorageUnavailable

__all__ = ["Operation", "Progress"]

_MIB = 1 << 20


@dataclass(eq=False)
class Operation:
    """One operation of a store.

    Attributes:
        abandoned: nobody waits for it any more; it must end as soon as it can.
    """

    action: str
    key: str
    size_bytes: int = 0
    sent_bytes: int = 0
    abandoned: bool = False
    began_at_s: float = field(default_factory=environment.monotonic)

    def __str__(self) -> str:
        sent = (
            f" ({self.sent_bytes / _MIB:.1f} of {self.size_bytes / _MIB:.1f} MiB)" if self.size_bytes else ""
        )
        return f"{self.action} {self.key}{sent}"


class Progress:
    """Steps of a save or load, and operations of the store within them.

    Progress is a step that begins, an operation that the storage answered, a part of one that was sent. Not a
    byte: a server that takes or gives one every ten seconds makes none. Nor what is done after a failure: all
    of it has to fit into the time that is left.

    Attributes:
        given_up: why this save or load has failed elsewhere, so that this rank need not go on.
        is_ending: it has failed, here or elsewhere, and this rank is only cleaning up.
    """

    def __init__(self) -> None:
        self._operations: dict[int, Operation] = {}
        self.restart()

    def begin(self, step: str) -> None:
        """A new step."""
        self._step, self.is_waiting = step, False
        if not self._failing:
            self.moved()

    def wait_for(self, what: str) -> None:
        """This rank has done its part of a step, and waits for what others do."""
        self._step, self.is_waiting = f"waiting for {what}", True
        self.moved()

    def clean_up(self) -> None:
        """Only the time that is left is for what comes now, also on a rank that had no part in the failure."""
        self._step, self.is_waiting = "cleaning up", False
        self._failing = self.is_ending = True

    def restart(self) -> None:
        """A new save or load."""
        self.given_up: str | None = None
        self._failing = self.is_ending = False
        self.begin("beginning")

    @contextlib.contextmanager
    def operation(self, action: str, key: str, size_bytes: int = 0) -> Iterator[Operation]:
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
        return environment.monotonic() - self._moved_at_s

    def __str__(self) -> str:
        operations = [found for found in list(self._operations.values()) if not found.abandoned]
        # The oldest is what the others, or the step, will have to wait for.
        oldest = min(operations, key=lambda found: found.began_at_s, default=None)
        return self._step if oldest is None else f"{self._step}: {oldest}"
