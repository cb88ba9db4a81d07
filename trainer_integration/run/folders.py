"""Choose the folders of a run's saves, the same on all ranks."""

from __future__ import annotations

import math

from ckpt.ranks.group import Ranks
from ckpt.trainer_integration.run.history import History


class Folders:
    """Name the folder of each save: not one whose bytes superseded checkpoints still name.

    Attributes:
        may_ask: after the run went back to an earlier step, storage is asked which folders those are.
    """

    def __init__(self, ranks: Ranks, history: History) -> None:
        self._ranks = ranks
        self._history = history
        self.may_ask = True
        self._resumed_at = math.inf
        self._past: set[int] = set()

    def path(self, step: int) -> str:
        """Name the folder for a save. All ranks call it."""
        history = self._history
        if not self.may_ask:
            return history.path(step)
        if history.resumed_at != self._resumed_at:
            self._resumed_at = history.resumed_at
            self._past = self._ranks.from_first(lambda: history.steps_after(history.resumed_at))
        is_again = step in self._past
        self._past.add(step)
        if is_again:
            history.named |= self._ranks.from_first(lambda: history.named_at(step))
        return history.path(step)
