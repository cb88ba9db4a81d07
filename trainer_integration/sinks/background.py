"""Send events to a server from a thread, so that training never waits for it."""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import time

from ckpt.trainer_integration.events import Event, FailureLog

_logger = logging.getLogger("ckpt.manager")

_LIMIT = 1000


class Background:
    """A sink that sends in a daemon thread, in order, at most 1000 events behind.

    When it falls further behind, the oldest events are dropped, with a warning. A failure is a
    warning too, once for each type of error until one is sent. When the manager closes, or else the
    program ends, it waits once up to `flush_s` for the rest.
    """

    def __init__(self, flush_s: float = 10.0) -> None:
        self._flush_s = flush_s
        self._waiting: queue.Queue[Event] = queue.Queue(_LIMIT)
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._failure_log = FailureLog(type(self).__name__)
        self._has_dropped = self._gave_up = False

    def __call__(self, event: Event) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._send_all, name=type(self).__name__, daemon=True)
                self._thread.start()
                atexit.register(self.flush)
            self._gave_up = False
            while True:
                try:
                    self._waiting.put_nowait(event)
                    return
                except queue.Full:
                    self._drop_oldest()

    def send(self, event: Event) -> None:
        """Send one event; called in the thread, which survives any error."""
        raise NotImplementedError

    def flush(self) -> bool:
        """Wait up to `flush_s` until all events are sent, but not again after it gave up; tell whether they were."""
        deadline_s = time.monotonic() + self._flush_s
        with self._waiting.all_tasks_done:
            while self._waiting.unfinished_tasks:
                if self._gave_up:
                    return False
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    self._gave_up = True
                    _logger.warning(
                        "%s has not sent %d events within %g s; they are given up",
                        type(self).__name__,
                        self._waiting.unfinished_tasks,
                        self._flush_s,
                    )
                    return False
                self._waiting.all_tasks_done.wait(left_s)
        return True

    def _send_all(self) -> None:
        while True:
            event = self._waiting.get()
            try:
                self.send(event)
                self._failure_log.worked()
            except Exception as error:
                self._failure_log.failed(event, error)
            finally:
                self._waiting.task_done()

    def _drop_oldest(self) -> None:
        try:
            self._waiting.get_nowait()
        except queue.Empty:
            return
        self._waiting.task_done()
        if not self._has_dropped:
            self._has_dropped = True
            _logger.warning("%s is %d events behind; the oldest are dropped", type(self).__name__, _LIMIT)
