"""Let what the product waits for pass at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ckpt.consistency.environment import Environment


class SkippingClock(Environment):
    """The real clock, except that a sleep is over at once and moves the clock on, in every thread.

    Install it with `ckpt.consistency.environment.replaced`.
    """

    def __init__(self) -> None:
        self.skipped_s = 0.0
        self._plans: list[tuple[float, Callable[[], object]]] = []

    def monotonic(self) -> float:
        return super().monotonic() + self.skipped_s

    def now(self) -> float:
        return super().now() + self.skipped_s

    def sleep(self, duration_s: float) -> None:
        self.skipped_s += duration_s
        due = [plan for plan in self._plans if plan[0] <= self.monotonic()]
        self._plans = [plan for plan in self._plans if plan not in due]
        for _, action in due:
            action()

    def later(self, delay_s: float, action: Callable[[], object]) -> None:
        """Call `action` in the first sleep that ends `delay_s` seconds from now or later."""
        self._plans.append((self.monotonic() + delay_s, action))


def skip_pauses_of_s3(monkeypatch: pytest.MonkeyPatch) -> SkippingClock:
    """Let the S3 stores, and the SDKs below them, repeat a request at once."""
    clock = SkippingClock()
    own = "ckpt.backends.s3_protocol"
    for module in (
        f"{own}.store",
        f"{own}.renewed_credentials",
        "botocore.endpoint",
        "ibm_botocore.endpoint",
    ):
        monkeypatch.setattr(f"{module}.time", clock)
    return clock
