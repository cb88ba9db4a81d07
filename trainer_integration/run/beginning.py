"""Refuse a run that does not begin above the steps of its root: it would overwrite one, or never have the newest."""

from __future__ import annotations

import logging
from typing import Literal

from ckpt.errors import CheckpointError, ConfigurationError
from ckpt.trainer_integration.run.held_errors import errors_held
from ckpt.trainer_integration.run.in_flight import Saves

_logger = logging.getLogger(__name__)


class Beginning:
    """Compare the first step of a manager that has restored nothing with the checkpoints of its root, once.

    Attributes:
        is_settled: nothing is left to compare, on all ranks: the run was restored, or its first step was compared.
    """

    def __init__(self, saves: Saves, on_existing: Literal["error", "new-run"]) -> None:
        self._saves, self._on_existing = saves, on_existing
        self._has_failed = False
        self.is_settled = False

    def check(self, step: int, *, is_save: bool = False) -> None:
        """Refuse the first step if a checkpoint of it or of a later one exists; or give all up. All ranks call it.

        Where storage cannot be asked, the next save asks again.

        Raises ConfigurationError.
        """
        if not self.is_settled and (is_save or not self._has_failed):
            with errors_held():  # else ranks would take what a handler raises for an answer of the storage
                self._compare(step)

    def _compare(self, step: int) -> None:
        try:
            newest, is_known = self._saves.newest_of_others()
            if newest is not None and step <= newest[0]:
                if self._on_existing == "error":
                    raise _refused(step, newest, self._saves.history.place)
                self._saves.begin_new_run()
        except ConfigurationError:
            raise
        except CheckpointError as error:  # the same on all ranks
            if not self._has_failed:
                _logger.warning("whether the root holds an earlier run's checkpoints is not known: %s", error)
            self._has_failed = True
            return
        self.is_settled = is_known
        self._has_failed = not is_known


def _refused(step: int, newest: tuple[int, str], place: str) -> ConfigurationError:
    fate = "be overwritten" if step == newest[0] else "stay the newest"
    text = (
        f"this run has restored nothing and begins at step {step}, not above step {newest[0]} of {newest[1]}, "
        f"which would {fate}: call restore() before the first step to resume that run; or choose another root; "
        'or pass options=ckpt.options.ManagerOptions(on_existing="new-run"), which keeps the old checkpoints, but no longer restores '
        "or counts them"
    )
    return ConfigurationError(text, url=place)
