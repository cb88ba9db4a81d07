"""Probe what the credentials allow, and say what works without the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from ckpt.consistency.probes.examine import Finding, Subject, Verdict
from ckpt.errors import AccessDenied, StorageError

_WITHOUT = {
    "put": "nothing can be saved; loads work",
    "get": "nothing can be loaded, nor saved: a save looks first at what is there",
    "look for what is not there": "saves fail: they cannot tell a free place from a forbidden one. "
    "S3 answers so without s3:ListBucket: grant it",
    "list": "saves and loads work; ckpt ls and gc, and the search for the latest checkpoint, do not",
    "delete": "saves and loads work; what an overwritten checkpoint held stays, and ckpt rm, gc and "
    "retention fail",
    "list uploads": "saves and loads work; ckpt gc cannot find what dead uploads left: add a lifecycle "
    "rule that aborts them",
    "abort uploads": "saves and loads work; the parts of a failed upload stay, and cost: add a lifecycle "
    "rule that aborts them",
}
_NEEDED = frozenset({"put", "get", "look for what is not there"})
_OPTIONAL = frozenset({"list", "list uploads", "abort uploads"})
"""Not every server offers these."""


def permissions(subject: Subject) -> Iterator[Finding]:
    """Try each operation once, and add those that were carried out to `subject.allowed`.

    The storage's other errors are raised.
    """
    for operation, carry_out in _operations(subject):
        try:
            carry_out()
        except StorageError as error:
            if not isinstance(error, AccessDenied) and operation not in _OPTIONAL:
                raise
            verdict = Verdict.PROBLEM if operation in _NEEDED else Verdict.CAREFUL
            result, advice = f"refused: {error.message}", _WITHOUT[operation]
            yield Finding(f"permission to {operation}", verdict, result, advice, {"allowed": False})
        else:
            subject.allowed.add(operation)
    granted = [operation for operation in _WITHOUT if operation in subject.allowed]
    if granted:
        yield Finding("permissions", Verdict.FINE, f"may {', '.join(granted)}", measured={"allowed": granted})


def _operations(subject: Subject) -> Iterator[tuple[str, Callable[[], object]]]:
    first, key = subject.first, "access/object"

    def put() -> None:
        for client in subject.clients:
            client.prepare("")
        first.put(key, b"an object of ckpt doctor")

    yield "put", put
    if "put" not in subject.allowed:
        return
    yield "get", partial(first.read, key)
    yield "look for what is not there", partial(first.exists, "access/nothing")
    yield "list", partial(first.names, "access/")
    yield "delete", partial(first.delete, [key])
    raw = first.store.raw_requests()
    if raw is not None:
        upload_id = raw.begin(key)
        yield "list uploads", partial(raw.uploads, key)
        yield "abort uploads", partial(raw.abort, key, upload_id)
