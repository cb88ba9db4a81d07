"""Find the checkpoints of a run that a restore may take, the preferred ones first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ckpt.errors import CommitConflict, ConfigurationError, LoadFailed, NotCommitted, NotFound
from ckpt.format.run_record import RUN_KEY
from ckpt.local_first.holdings import Holding
from ckpt.reading.latest import Candidate
from ckpt.trainer_integration.keeping import Best
from ckpt.trainer_integration.run.in_flight import Saves

GONE = (NotCommitted, NotFound, CommitConflict)
_MAX_LOOKS = 20
"""How often to list the run, while another process removes what was listed."""


class Choice(NamedTuple):
    """A checkpoint to load, or to pass over because of its fault, or as it `is_lost`: not there any more.

    `near` is what the nodes have of it, if it is to be read from there first; `is_durable` if it can be read from the
    run's root too.
    """

    step: int
    path: str
    candidate: Candidate
    is_lost: bool = False
    near: Holding | None = None
    is_durable: bool = True


class Search:
    """Find checkpoints to try, the preferred ones first; on the first rank.

    Another process may commit a newer checkpoint and remove older ones meanwhile. So when one that
    was listed is not there, record and listing are read again before anything older is taken.
    """

    def __init__(self, step: int | str, saves: Saves) -> None:
        self._step, self._saves, self._history = step, saves, saves.history
        self._settled: set[str] = set()  # folders that were tried, or hold no checkpoint
        self._gone: list[tuple[int, str]] = []  # that hold no checkpoint, since one was last found
        self._has_moved = False
        self._choices = self._find()

    def next(self) -> Choice | None:
        """Return the next checkpoint to try; None if there is no other."""
        return next(self._choices, None)

    def is_gone(self, choice: Choice) -> bool:
        """Tell whether a checkpoint that could not be loaded was replaced or removed meanwhile."""
        try:
            self._has_moved = self._history.examine(choice.path) != choice.candidate
        except GONE:
            self._has_moved = True
        if self._has_moved:
            self._settled.discard(choice.path)
        return self._has_moved

    def _find(self) -> Iterator[Choice]:
        self._saves.wait_booked()
        for _ in range(_MAX_LOOKS):
            self._history.look_again()
            self._has_moved = False
            for number, path in self._unsettled():
                try:
                    candidate = self._history.examine(path)
                except GONE as error:
                    self._has_moved = True
                    if not isinstance(error, CommitConflict):
                        self._settled.add(path)
                        self._gone.append((number, path))
                    continue
                if self._has_moved:
                    self._history.look_again()
                    if self._unsettled()[:1] != [(number, path)]:
                        break
                    self._has_moved = False
                self._settled.add(path)
                yield from self._lost(number)
                yield Choice(number, path, candidate)
                if self._has_moved:
                    break
            if not self._has_moved:
                return
        raise LoadFailed(
            "checkpoints of this run are removed faster than they can be read: is another process saving "
            "here? Try again",
            url=self._history.place,
        )

    def _lost(self, instead: int) -> Iterator[Choice]:
        """Report checkpoints that are gone, though on record, and would have come before step `instead`."""
        recorded = {checkpoint.path for checkpoint in self._history.durable()}
        lost = [(number, path) for number, path in self._gone if path in recorded]
        self._gone.clear()
        if lost:
            steps = counted([number for number, _ in lost])
            fault = (
                f"{RUN_KEY} lists {steps} as committed, but no checkpoint is there any more; the next one that is "
                f"there is of step {instead}: stop and bring it back, unless it was removed on purpose"
            )
            yield Choice(*lost[0], Candidate(fault), is_lost=True)

    def _unsettled(self) -> list[tuple[int, str]]:
        return [(number, path) for number, path in self._candidates() if path not in self._settled]

    def _candidates(self) -> list[tuple[int, str]]:
        if self._step == "latest-valid":
            return self._history.candidates()
        if self._step == "best":
            for rule in () if self._saves.keep is None else self._saves.keep.rules():
                if isinstance(rule, Best):
                    return self._history.best(rule)
            raise ConfigurationError("step='best' needs a rule keeping.best(...) in keep=")
        if isinstance(self._step, str):
            raise ConfigurationError(f"step must be an integer, 'latest-valid' or 'best', not {self._step!r}")
        return self._history.at(self._step)


def counted(steps: Sequence[int]) -> str:
    """Show some steps in a text."""
    return (
        f"{len(steps)} checkpoints (steps {min(steps)} to {max(steps)})" if steps[1:] else f"step {steps[0]}"
    )
