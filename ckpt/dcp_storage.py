"""Share what DCP's writer and reader both need: a store, a budget, errors that travel."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ckpt.backends.base import Store
from ckpt.backends.options import options_dict, redact_url
from ckpt.backends.registry import is_bucket, normal_url, open_store
from ckpt.errors import CheckpointError, ConfigurationError
from ckpt.ranks.deadline_store import DeadlineStore
from ckpt.ranks.group import check_timeout
from ckpt.ranks.heartbeat import Limits
from ckpt.ranks.progress import Progress
from ckpt.settings import settings_for
from ckpt.transfer.bandwidth import wait_for_turn
from ckpt.transfer.buffer_pool import DEFAULT_MEMORY_BUDGET_BYTES, StagingPool

_logger = logging.getLogger(__name__)


class DcpStorage:
    """The base of `CheckpointWriter` and `CheckpointReader`.

    Attributes:
        progress: what this rank is doing now.
        interrupt: the Ctrl-C or `SystemExit` of this rank that ended the save or load.
    """

    _own_memory = False
    _bounded: DeadlineStore

    def __init__(
        self,
        url: str | os.PathLike[str],
        storage_options: Mapping[str, Any] | None,
        threads: int | None,
        memory_budget_bytes: int | None,
        timeout_s: float | None,
    ) -> None:
        super().__init__()
        self._storage_options, self._threads = options_dict(storage_options), threads
        budget_bytes = memory_budget_bytes
        if budget_bytes is None:
            budget_bytes = settings_for(normal_url(url)).memory_budget_bytes or DEFAULT_MEMORY_BUDGET_BYTES
        self._pool = StagingPool(budget_bytes, for_device=True)
        self._limit_s = None if timeout_s is None else Limits(check_timeout(timeout_s)).stall_s
        self.progress = Progress()
        self.interrupt: BaseException | None = None
        self._wrap: Callable[[Store], Store] | None = None
        self._open(url)
        self._rank, self._size = 0, 1

    def use(self, progress: Progress, wrap: Callable[[Store], Store] | None = None) -> None:
        """Report to `progress` from now on, and wrap each store: for callers inside this library."""
        self.progress, self._wrap = progress, wrap or self._wrap
        self._bounded = self._bounded.reporting_to(progress)
        self._store = self._wrapped()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a save or load, at another place if one is given."""
        if checkpoint_id is not None and normal_url(checkpoint_id) != self._url:
            store = self._store
            self._open(checkpoint_id)
            store.close()

    def make_folder(self) -> None:
        """Make the folder of a save that begins, where storage has folders. Raises StorageError."""
        self._store.prepare("")

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Tell whether a store can be opened at this place."""
        try:
            open_store(checkpoint_id).close()
        except CheckpointError:
            return False
        return True

    @property
    def checkpoint_id(self) -> str:
        """The checkpoint's place, without credentials."""
        return self._store.url

    def warn_of_bucket(self) -> None:
        """Log a warning if this place is a whole bucket, and no folder in it."""
        if is_bucket(self.checkpoint_id):
            place = self.checkpoint_id.rstrip("/")
            _logger.warning("%s is a whole bucket: name a folder in it, such as %s/step-1", place, place)

    def close(self) -> None:
        """Release connections and threads. It can be used again; it then opens new ones."""
        self._store.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({redact_url(self._url)!r})"

    @staticmethod
    def _flag(name: str, value: object) -> bool:
        """Return an argument that must be a bool: any str, also "no", would count as True."""
        if not isinstance(value, bool):
            raise ConfigurationError(f"{name} must be True or False, not {value!r:.100}")
        return value

    def _open(self, url: str | os.PathLike[str]) -> None:
        text = normal_url(url)
        store = open_store(text, self._storage_options, threads=self._threads)
        self._url = text
        self._store = self._guarded(store)
        self._files_per_rank = settings_for(text).files_per_rank

    def _wait_for_turn(self) -> None:
        wait_for_turn(self._store, self._rank, self._size)

    def _guarded(self, store: Store) -> Store:
        self._bounded = DeadlineStore(store, self.progress, self._limit_s, own_memory=self._own_memory)
        return self._wrapped()

    def _wrapped(self) -> Store:
        return self._bounded if self._wrap is None else self._wrap(self._bounded)

    @contextlib.contextmanager
    def _errors_named(self) -> Iterator[None]:
        """Give every error the rank and the place, in a form that can travel to the other ranks."""
        try:
            yield
        except CheckpointError as error:
            error.rank = self._rank if error.rank is None else error.rank
            error.url = error.url or self.checkpoint_id
            raise
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            raise CheckpointError(message, url=self.checkpoint_id, rank=self._rank) from error
        except BaseException as error:
            self.interrupt = error
            message = f"interrupted: {type(error).__name__}"
            raise CheckpointError(message, url=self.checkpoint_id, rank=self._rank) from error
