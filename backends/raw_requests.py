"""Single requests to a server, for probes; not part of the contract of stores."""

from __future__ import annotations

import enum
from typing import Protocol

from ckpt.backends.bodies import Body


class Condition(enum.Enum):
    """How a server treats "only if absent"."""

    HONOURED = "honoured"
    REFUSED = "refused"
    IGNORED = "ignored"


class RawRequests(Protocol):
    """Requests as they are.

    Nothing is checked before, and nothing replaces a request that is refused. All raise
    `ckpt.errors`; keys are those of the store.
    """

    bucket_url: str
    """Endpoint and bucket: for all keys in it, the server answers alike."""

    def put(self, key: str, body: Body, *, create: bool = False, part_size_bytes: int | None = None) -> bool:
        """Put an object, in parts if their size is given; False if the server cannot.

        Raises:
            AlreadyExists: with `create`, if the server says so.
        """

    def learn(self, condition: Condition | None) -> None:
        """Have the store act on this measurement from now on; None: it could not be measured."""

    def begin(self, key: str) -> str:
        """Begin an upload in parts; returns its id."""

    def send_part(self, key: str, upload_id: str, number: int, body: Body) -> None:
        """Send one part."""

    def uploads(self, key: str) -> list[str]:
        """List the ids of the unfinished uploads of `key`."""

    def abort(self, key: str, upload_id: str) -> None:
        """Abort an upload."""
