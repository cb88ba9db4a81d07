"""Choose the folders of a run's saves, the same on all ranks."""

from __future__ import annotations

import contextlib
import logging
import math

from ckpt.backends.registry import open_store
from ckpt.errors import CheckpointError
from ckpt.format.records import read_commit
from ckpt.ranks.group import Ranks
from ckpt.trainer_integration.run.history import History
from ckpt.writing.pins import is_referred

_logger = logging.getLogger(__name__)


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
            self._past = self._ranks.from_first(self._later_steps)
        is_again = step in self._past
        self._past.add(step)
        if is_again:
            history.named |= self._ranks.from_first(lambda: self._named_at(step))
        return history.path(step)

    def _later_steps(self) -> set[int]:
        """List the steps after the one that was resumed of which a checkpoint may exist, also a superseded one.

        Those that only a listing has are noted: they are abandoned too.
        """
        later = {path: step for path, step in self._history.steps().items() if step > self._resumed_at}
        if later:
            self._history.find(later)
        return set(later.values())

    def _named_at(self, step: int) -> set[str]:
        """List the folders of a step whose bytes other checkpoints name; none if storage does not answer."""
        history = self._history
        found: set[str] = set()
        try:
            for path in (path for path, number in history.steps().items() if number == step):
                with contextlib.closing(open_store(history.url(path), history.storage_options)) as store:
                    commit = read_commit(store)
                    if commit is not None and is_referred(store, commit):
                        found.add(path)
        except CheckpointError as error:
            _logger.warning("which checkpoints name bytes of step %d is not known: %s", step, error)
        return found
