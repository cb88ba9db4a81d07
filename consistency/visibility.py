"""Wait, within bounds, for an object that exists but may not be visible to this client yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ckpt.consistency import environment
from ckpt.errors import NotFound, NotVisible

T = TypeVar("T")


def when_visible(
    read: Callable[[], T], *, timeout_s: float, still_expected: Callable[[], None] | None = None
) -> T:
    """Call `read`, again while it raises NotFound, and raise NotVisible after `timeout_s` seconds.

    `still_expected` is called before each new attempt; it raises if waiting has become pointless.
    """
    backoff = environment.Backoff(timeout_s, first_pause_s=0.02, longest_pause_s=1.0)
    while True:
        try:
            return read()
        except NotFound as error:
            missing = error
        if still_expected is not None:
            still_expected()
        if backoff.is_over:
            raise NotVisible(
                f"the commit lists this object, but it did not become visible in {timeout_s:g} s",
                url=missing.url,
                key=missing.key,
            ) from missing
        backoff.pause()
