"""Find out how a server handles "only if absent", before the first commit that depends on it.

Servers honour `If-None-Match`, refuse it, or ignore it silently; neither name nor version tells
which. Three small requests do: put an object, put it again, delete it.
"""

from __future__ import annotations

import contextlib
import logging
import threading

from ckpt.backends.base import Condition, RawRequests, Store
from ckpt.backends.bodies import CheckedBody
from ckpt.errors import AlreadyExists, CheckpointError, StorageError, StorageUnavailable

_logger = logging.getLogger(__name__)
_lock = threading.Lock()
_known: dict[str, Condition | None] = {}
"""By endpoint and bucket, in this process; None where it could not be measured."""

_VERBS: dict[Condition | None, str] = {Condition.IGNORED: "ignores", Condition.REFUSED: "refuses"}


def learn_condition(store: Store, key: str) -> None:
    """Tell `store` how its server handles "only if absent", measured with an object at `key`.

    A store without such a server, or without permission to ask, keeps its careful path: it looks
    before it puts.
    """
    raw = store.raw_requests()
    if raw is None:
        return
    place = raw.bucket_url
    with _lock:
        if place not in _known:
            condition = None
            try:
                condition = measure_condition(store, raw, key)
            except StorageUnavailable:
                return  # not an answer; the next save asks again
            except CheckpointError as error:
                _logger.info("%s: conditional puts could not be tried: %s", place, error)
            _known[place] = condition
            if condition in _VERBS:
                _logger.warning(
                    '%s: the server %s "only if absent" (If-None-Match). Two jobs that save a first checkpoint at '
                    "one place at the same moment can both report success, and one of them is lost: give every "
                    "place one writer at a time",
                    place,
                    _VERBS[condition],
                )
        raw.learn(_known[place])


def measure_condition(store: Store, raw: RawRequests, key: str, *, in_parts: bool = False) -> Condition:
    """Measure how the server handles "only if absent", with an object at `key`, a name of its own.

    With `in_parts`, it is tried on the completion of an upload in parts.
    """
    part_size_bytes = 1 << 20 if in_parts else None

    def create(text: bytes) -> bool:
        return raw.put(key, CheckedBody(text), create=True, part_size_bytes=part_size_bytes)

    try:
        if not create(b"first"):
            return Condition.REFUSED
        create(b"second")
        return Condition.IGNORED
    except AlreadyExists:
        # Of the first put too: then a try of it whose reply was lost had made the object.
        return Condition.HONOURED
    finally:
        with contextlib.suppress(StorageError):
            store.delete([key])
