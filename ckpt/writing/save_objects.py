"""Keep the names of the objects of a save, so that a failed save leaves none behind."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from ckpt.backends.base import Store
from ckpt.consistency import environment

_logger = logging.getLogger(__name__)


@dataclass
class SaveObjects:
    """The objects of one rank in one save that no checkpoint lists yet.

    `token` is drawn for each save: no name is written twice, so a store that lags can only show
    "not there".
    """

    rank: int = 0
    token: str = field(default_factory=lambda: environment.token())
    _keys: list[str] = field(default_factory=list)

    def add(self, *keys: str) -> None:
        """Note objects, before they exist."""
        self._keys += keys

    def release(self) -> None:
        """Forget all objects: a checkpoint lists them now, or may do so."""
        self._keys.clear()

    def discard(self, store: Store) -> bool:
        """Delete all objects, as well as it goes; return whether they are. Only for a save that was surely not committed."""
        keys, self._keys = self._keys, []
        try:
            store.delete(keys)
        except Exception as error:  # a failed save has an error of its own to report
            message = "rank %d could not delete what a failed save wrote to %s (`ckpt gc` can): %s"
            _logger.warning(message, self.rank, store.url, error)
            return False
        return True
