"""What a probe may ask of a server, beside the operations of a store."""

from __future__ import annotations

import enum
from typing import Protocol

from ckpt.backends.bodies import Body

__all__ = ["Condition", "Trials"]


class Condition(enum.Enum):
    """What a server makes of "only if absent"."""

    HONOURED = "honoured"
    REFUSED = "refused"
    IGNORED = "ignored"


class Trials(Protocol):
    """Requests as they are: nothing is looked at before, and nothing is done instead of what a server refuses.

    All raise `ckpt.errors`; keys are those of the store.
    """

    place: str
    """What answers alike: endpoint and bucket."""

    def put(self, key: str, body: Body, *, create: bool = False, part_size_bytes: int | None = None) -> bool:
        """One put, or an upload in parts of that size; returns False where the server does not offer it.

        Raises:
            AlreadyExists: with `create`, if the server says so.
        """

    def learn(self, condition: Condition | None) -> None:
        """Have the store go by this answer from now on; None: there was none."""

    def begin(self, key: str) -> str:
        """Begin an upload in parts; returns its id."""

    def send_part(self, key: str, upload_id: str, number: int, body: Body) -> None:
        """Send one part."""

    def uploads(self, key: str) -> list[str]:
        """The ids of the unfinished uploads of `key`."""

    def abort(self, key: str, upload_id: str) -> None:
        """Abort an upload."""
