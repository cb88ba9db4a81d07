"""End a process that carries within the time that SIGTERM leaves it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

_LAST_REQUESTS_S = 2.0
"""After `stop`, for requests that are on their way; one that the store does not answer may take minutes."""


@dataclass
class Grace:
    """Time in which to carry what fits, once `begin` is called; then the process ends, whatever it waits for.

    To be killed at any request is safe, so ending there is too.

    Attributes:
        finish: set when it begins, or by the end of a trainer: to carry what is there.
        stop: set `seconds` after `begin`: to end soon.
        last_words: called if the process has not ended `_LAST_REQUESTS_S` after that, just before it is ended.
    """

    seconds: float
    last_words: Callable[[], None]
    finish: threading.Event = field(default_factory=threading.Event)
    stop: threading.Event = field(default_factory=threading.Event)
    _has_begun: bool = False
    _ended: threading.Event = field(default_factory=threading.Event)

    def begin(self) -> None:
        """Start the time; a signal handler may call it, also again."""
        self.finish.set()
        if not self._has_begun:
            self._has_begun = True
            threading.Thread(target=self._run_out, daemon=True).start()

    def end(self) -> None:
        """Say that nothing is carried any more."""
        self._ended.set()

    def _run_out(self) -> None:
        if self._ended.wait(self.seconds):
            return
        self.stop.set()
        if not self._ended.wait(_LAST_REQUESTS_S):
            try:
                self.last_words()
            finally:
                os._exit(1)
