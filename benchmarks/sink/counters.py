"""Count requests by operation, payload bytes both ways, bytes sent by key."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Any

__all__ = ["Counters"]


class Counters:
    """Count, from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        with self._lock:
            self._requests: Counter[str] = Counter()
            self._sent_by_key: Counter[str] = Counter()
            self._received_bytes = self._sent_bytes = 0
            self._cpu_from_s = time.process_time()

    def add(self, operation: str, key: str, received_bytes: int, sent_bytes: int) -> None:
        with self._lock:
            self._requests[operation] += 1
            self._received_bytes += received_bytes
            self._sent_bytes += sent_bytes
            if sent_bytes:
                self._sent_by_key[key] += sent_bytes

    def report(self) -> dict[str, Any]:
        with self._lock:
            return {
                "requests": dict(self._requests),
                "received_bytes": self._received_bytes,
                "sent_bytes": self._sent_bytes,
                "sent_by_key": dict(self._sent_by_key),
                "cpu_s": time.process_time() - self._cpu_from_s,
            }
