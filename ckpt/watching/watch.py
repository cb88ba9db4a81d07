"""Yield each new durable checkpoint of a root once, in the order of the commits: `ckpt.watch`."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ckpt.backends.options import options_dict
from ckpt.backends.registry import normal_url, open_store
from ckpt.consistency import environment
from ckpt.consistency.commit import STOCK_METADATA_KEY
from ckpt.consistency.patience import patiently
from ckpt.errors import ConfigurationError, StorageError
from ckpt.watching.cursor import Cursor
from ckpt.watching.sights import Sight, Sights, WatchedCheckpoint

_logger = logging.getLogger(__name__)

_LAG_S = 60.0
"""How long storage that may lag has to show what is there."""
_SKEW_S = 3600.0
"""By how much clocks may differ, when a commit is taken for an old one."""
_STOCK_S = 60.0
"""How long after a commit to wait for what other programs look for (`.metadata`)."""
_FIRST_PAUSE_S = 1.0

T = TypeVar("T")


def watch(
    root: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    cursor: str | os.PathLike[str] | None = None,
    after: int | None = None,
    skip_existing: bool = False,
    skip_to_latest: bool = False,
    poll_s: float = 10.0,
    timeout_s: float | None = None,
    lag_s: float | None = None,
    outage_s: float = 3600.0,
    threads: int | None = None,
    stop: threading.Event | None = None,
) -> Generator[WatchedCheckpoint, None, None]:
    """Yield each durable checkpoint directly below `root`, or at it, once, in the order of the commits.

    It begins with those that are there, and waits for more. A folder that is saved into again is a
    new checkpoint. One that is removed before its turn is passed over, with a line in the log. One
    whose `.metadata` or index of a model, for other programs, is not there yet waits a minute for it.

    Args:
        storage_options: of the root, by name, as for a save there.
        threads: folders that are looked at in parallel.
        cursor: a file, or URL, that remembers what is done. A checkpoint is done when the loop
            comes back for the next one: one during which the program was killed comes again.
        after: yield no checkpoint of this step or an earlier one.
        skip_existing: begin with the first checkpoint that is not there yet, unless there is a
            cursor to go on from.
        skip_to_latest: of several that wait, yield the last one only.
        poll_s: seconds between two looks.
        timeout_s: end when nothing new came for so long; 0 yields what is there. None waits for
            ever.
        lag_s: how long storage may take to show what was written; a checkpoint waits for so long
            for earlier ones. By default 0 where every client sees it at once, else 60.
        outage_s: how long storage may give no answer before that is an error.
        stop: end when it is set.

    Raises:
        ConfigurationError: an argument is wrong, or another watcher uses the cursor.
        AccessDenied: at once; other errors of storage once they last longer than `outage_s`.
    """
    watcher = Watcher(
        root=root,
        storage_options=storage_options,
        cursor=cursor,
        after=after,
        skip_existing=skip_existing,
        skip_to_latest=skip_to_latest,
        poll_s=poll_s,
        timeout_s=timeout_s,
        lag_s=lag_s,
        outage_s=outage_s,
        threads=threads,
        stop=stop,
    )
    return watcher.checkpoints()


@dataclass(frozen=True)
class _Waiting:
    """A checkpoint that was seen, and when it is certain that all earlier ones are seen too.

    Attributes:
        ripe_at_s: a look at all folders that begins then, or later, shows them.
        look: the number of the look that showed it.
        complete_by_s: until then it waits for what other programs read.
    """

    sight: Sight
    ripe_at_s: float
    look: int
    complete_by_s: float


@dataclass(kw_only=True, eq=False)
class Watcher:
    """Follow a root; `watch` explains the arguments.

    Attributes:
        url: the root, without credentials.
    """

    root: str | os.PathLike[str]
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)
    cursor: str | os.PathLike[str] | None
    after: int | None
    skip_existing: bool
    skip_to_latest: bool
    poll_s: float
    timeout_s: float | None
    lag_s: float | None
    outage_s: float
    threads: int | None = None
    stop: threading.Event | None = None

    def __post_init__(self) -> None:
        if not self.poll_s > 0:
            raise ConfigurationError(f"poll_s must not be {self.poll_s!r}")
        for name in ("timeout_s", "lag_s", "outage_s"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ConfigurationError(f"{name} must not be {value!r}")
        if self.cursor is not None:
            self.cursor = normal_url(self.cursor)
        self.storage_options = options_dict(self.storage_options)
        self._store = open_store(self.root, self.storage_options, threads=self.threads)
        self.url = self._store.url
        directory = self._store.directory
        if directory is not None and os.path.isfile(directory):
            raise ConfigurationError(f"{self.url} is a file; name the folder of a run")
        self._timeout_s = math.inf if self.timeout_s is None else self.timeout_s
        self._stop = self.stop or threading.Event()
        self._sights = Sights(self._store)
        self._waiting: dict[tuple[str, str], _Waiting] = {}
        self._turns: deque[_Waiting] = deque()
        self._busy_at_s = environment.monotonic()
        self._cursor: Cursor | None = None

    def checkpoints(self) -> Generator[WatchedCheckpoint, None, None]:
        """Yield the checkpoints. One is done when the next one is asked for."""
        with contextlib.closing(self._store), contextlib.ExitStack() as closing:
            self._busy_at_s = environment.monotonic()
            self._cursor = self._patiently(lambda: Cursor(self.cursor, self.url, self.storage_options))
            closing.callback(self._cursor.close)
            if self.skip_existing and self._cursor.is_new:
                self._patiently(self._skip_all)
            self._patiently(self._cursor.begin)
            if self._store.directory is not None and not os.path.isdir(self._store.directory):
                _logger.warning("there is no folder %s yet", self.url)
            while not self._stop.is_set():
                try:
                    checkpoint = self._patiently(self._next)
                except StorageError:
                    if self._stop.is_set():
                        return
                    raise
                if checkpoint is not None:
                    yield checkpoint
                    self._done(checkpoint)
                    self._busy_at_s = environment.monotonic()
                elif self._is_over() and not self._waiting and not self._turns:
                    return
                else:
                    self._pause()

    def _done(self, *checkpoints: WatchedCheckpoint) -> None:
        """Note checkpoints as done, durably: they would be done twice, so an outage is waited for always."""
        names = [_name(checkpoint) for checkpoint in checkpoints]
        self._patiently(lambda: self._open_cursor.add(names, there=self._sights.names()), until_over=False)

    def is_there(self, checkpoint: WatchedCheckpoint) -> bool:
        """Tell whether a checkpoint is still there, neither removed nor replaced."""
        return self._sights.is_there(checkpoint)

    @property
    def _open_cursor(self) -> Cursor:
        assert self._cursor is not None
        return self._cursor

    def _next(self) -> WatchedCheckpoint | None:
        """Return the checkpoint whose turn it is, if there is one."""
        if self.skip_to_latest or not self._turns:
            got_turn = self._look()
            while self.skip_to_latest and got_turn:
                got_turn = self._look()
        if self.skip_to_latest and len(self._turns) > 1:
            skipped = [self._turns.popleft().sight.checkpoint for _ in range(len(self._turns) - 1)]
            _logger.info("skipped %d earlier checkpoints of %s", len(skipped), self.url)
            self._done(*skipped)
        while self._turns:
            turn = self._turns[0]
            checkpoint = turn.sight.checkpoint
            is_there = self._sights.is_there(checkpoint)
            if is_there and self._is_incomplete(turn):
                return None
            self._turns.popleft()
            if is_there:
                return checkpoint
            self._sights.offer_again(checkpoint)  # storage that lags may show it again
            _logger.warning("%s was removed, or saved again, before its turn", checkpoint.url)
        return None

    def _is_incomplete(self, turn: _Waiting) -> bool:
        """Tell whether to wait for what other programs read; once the time is up, tell people."""
        if environment.monotonic() < turn.complete_by_s:
            return not self._sights.is_readable_by_others(turn.sight, surely=True)
        if not self._sights.is_readable_by_others(turn.sight, surely=False):
            key, url = turn.sight.stock_key, turn.sight.checkpoint.url
            reader = "stock PyTorch" if key == STOCK_METADATA_KEY else "transformers"
            text = "%s: %s is missing, so %s cannot read it (a save that was killed?); `ckpt gc %s` writes it"
            _logger.warning(text, url, key, reader, url)
        return False

    def _look(self) -> bool:
        """Look at the root, again if that may give a checkpoint its turn; tell whether one got it."""
        turns = len(self._turns)
        while True:
            began_s = environment.monotonic()
            self._see(everywhere=bool(self._waiting))
            self._take_turns(began_s)
            now_s = environment.monotonic()
            if self._turns or not any(each.ripe_at_s <= now_s for each in self._waiting.values()):
                return len(self._turns) > turns

    def _see(self, *, everywhere: bool) -> None:
        lag_s = self.lag_s
        if lag_s is None:
            lag_s = 0.0 if self._store.capabilities.cross_client_visibility else _LAG_S
        in_turn = {_name(turn.sight.checkpoint) for turn in self._turns}
        for sight in self._sights.look(everywhere=everywhere):
            checkpoint = sight.checkpoint
            name = _name(checkpoint)
            is_wanted = self.after is None or checkpoint.step is None or checkpoint.step > self.after
            is_known = name in self._waiting or name in in_turn or name in self._open_cursor
            if is_known or not is_wanted:
                continue
            is_old = (checkpoint.created_at_s or 0.0) < environment.now() - lag_s - _SKEW_S
            now_s = environment.monotonic()
            ripe_at_s = now_s if is_old else now_s + lag_s
            complete_by_s = now_s if is_old else ripe_at_s + _STOCK_S
            self._waiting[name] = _Waiting(sight, ripe_at_s, self._sights.looks, complete_by_s)

    def _take_turns(self, began_s: float) -> None:
        """Give those their turn of which all earlier ones are seen, after a look that began at `began_s`.

        What was committed before a checkpoint that is ripe was visible to the look, which showed it:
        so those before it in the order are certain too.
        """
        ordered = sorted(self._waiting.values(), key=lambda each: each.sight.order)
        is_ripe = [each.ripe_at_s <= began_s and each.look < self._sights.looks for each in ordered]
        while is_ripe and not is_ripe[-1]:
            is_ripe.pop()
        for each in ordered[: len(is_ripe)]:
            del self._waiting[_name(each.sight.checkpoint)]
            self._turns.append(each)

    def _skip_all(self) -> None:
        self._see(everywhere=True)
        self._done(*(each.sight.checkpoint for each in self._waiting.values()))
        self._waiting.clear()

    def _is_over(self) -> bool:
        return environment.monotonic() - self._busy_at_s >= self._timeout_s

    def _pause(self) -> None:
        """Wait for the next look, which is due when a checkpoint is ripe, and at the end."""
        now_s = environment.monotonic()
        until_s = [now_s + self.poll_s * (0.75 + 0.5 * environment.jitter())]
        until_s += [each.ripe_at_s for each in self._waiting.values()]
        if self._turns:  # the first one is incomplete
            until_s.append(now_s + _FIRST_PAUSE_S)
        elif not self._waiting:
            until_s.append(self._busy_at_s + self._timeout_s)
        environment.wait(self._stop, max(0.0, min(until_s) - now_s))

    def _patiently(self, call: Callable[[], T], *, until_over: bool = True) -> T:
        """Call `call`, again while the storage gives no answer; `until_over`: not after `timeout_s`."""
        return patiently(
            call,
            outage_s=self.outage_s,
            stop=self._stop,
            first_pause_s=min(_FIRST_PAUSE_S, self.poll_s),
            is_over=lambda: until_over and self._is_over(),
        )


def _name(checkpoint: WatchedCheckpoint) -> tuple[str, str]:
    return checkpoint.path, checkpoint.id
