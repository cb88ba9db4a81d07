"""Look after what is carried, now and then, behind the trainer."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

_logger = logging.getLogger(__name__)

_LOOK_S, _JOIN_S = 0.5, 5.0
_FIRST_LOOK_S = 10.0
"""When to look first, unless a save or the end of a restore is sooner: a restore needs the cores, and the process that
carries takes some when it starts."""


class Watch:
    """Calls `look` now and then in a thread of its own, and soon when somebody waits for it."""

    def __init__(self, look: Callable[[], None]) -> None:
        self._look, self._is_closed, self._asked = look, False, threading.Event()
        self._lock, self._waiting, self._has_begun = threading.Lock(), list[threading.Event](), False
        self._thread = threading.Thread(target=self._run, name="ckpt-tier", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """Look now, if it has not looked yet."""
        if not self._has_begun:
            self._asked.set()

    def wait_looked(self, until_s: float) -> None:
        looked = threading.Event()
        with self._lock:
            self._waiting.append(looked)
            self._asked.set()
        looked.wait(max(0.0, min(until_s - time.monotonic(), threading.TIMEOUT_MAX)))

    def close(self) -> None:
        """End it; what a store holds up ends by itself."""
        self._is_closed = True
        self._asked.set()
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        failure = ""
        self._asked.wait(_FIRST_LOOK_S)
        self._has_begun = True
        while True:
            with self._lock:
                self._asked.clear()
                waiting, self._waiting = self._waiting, []
            try:
                self._look()
            except Exception as error:
                if failure != str(error):  # once, and not twice a second
                    _logger.exception("looking after local checkpoints failed")
                failure = str(error)
            for looked in waiting:
                looked.set()
            self._asked.wait(_LOOK_S)
            if self._is_closed:
                return
