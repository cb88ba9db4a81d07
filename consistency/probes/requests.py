"""Probe how a server handles conditions, checksums, and uploads in parts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from ckpt.backends.base import MIB, Condition, RawRequests, transfer_size_bytes
from ckpt.backends.bodies import CheckedBody, Part
from ckpt.consistency.conditional_create import measure_condition
from ckpt.consistency.probes.examine import Finding, Subject, Verdict
from ckpt.errors import AccessDenied, NotFound, StorageError, StorageUnavailable

_LOOKS = "the library looks before it puts, which is not atomic: give every place one writer at a time"
_RESULTS = {
    Condition.HONOURED: (Verdict.FINE, "honoured", ""),
    Condition.REFUSED: (Verdict.CAREFUL, "refused as not implemented", _LOOKS),
    Condition.IGNORED: (Verdict.CAREFUL, "silently ignored: a second put replaced the first", _LOOKS),
}


def conditions(subject: Subject) -> Iterator[Finding]:
    """Try "only if absent" on a single put and on the completion of an upload in parts."""
    store, raw = subject.first.store, subject.first.store.raw_requests()
    if raw is None:
        return
    for in_parts, check in ((False, "conditional put"), (True, "conditional upload in parts")):
        key = f"conditions/{'parts' if in_parts else 'single'}"
        subject.first.written.add(key)
        condition = measure_condition(store, raw, key, in_parts=in_parts)
        verdict, result, advice = _RESULTS[condition]
        if not in_parts:
            for client in subject.clients:
                learner = client.store.raw_requests()
                if learner is not None:
                    learner.learn(condition)
        elif condition is not Condition.HONOURED:
            verdict = Verdict.FINE
            advice = "commit records are not sent in parts, and what is, is looked for before"
        yield Finding(check, verdict, result, advice, {"if_none_match": condition.value})


def checksums(subject: Subject) -> Iterator[Finding]:
    """Find out whether the server refuses bytes that do not match the checksum sent along."""
    raw = subject.first.store.raw_requests()
    if raw is None:
        return
    verified = {}
    for unit, part_size_bytes in (("single put", None), ("part", MIB)):
        key = f"checksums/{unit.replace(' ', '-')}"
        subject.first.written.add(key)
        try:
            raw.put(key, _MislabelledBody(b"other bytes"), part_size_bytes=part_size_bytes)
            verified[unit] = False
        except (AccessDenied, StorageUnavailable, NotFound):
            raise
        except StorageError:
            verified[unit] = True
    check = "checksums sent along"
    if raw.checksum == "md5" and all(verified.values()):
        result = "CRC64NVME is refused; Content-MD5 is sent instead, and verified"
        advice = (
            'give the storage option checksum="md5": else each process is refused once before it sends that'
        )
        yield Finding(check, Verdict.CAREFUL, result, advice, verified)
        return
    if all(verified.values()):
        yield Finding(check, Verdict.FINE, "verified", measured=verified)
        return
    ignored = " and ".join(f"of a {unit}" for unit, is_verified in verified.items() if not is_verified)
    result = f"not verified: a wrong one {ignored} was taken"
    advice = "damage on the way to the server is found when it is loaded, not when it is saved: use https"
    yield Finding(check, Verdict.CAREFUL, result, advice, verified)


class _MislabelledBody(CheckedBody):
    """A body with a wrong checksum."""

    def part(self, start: int, stop: int) -> contextlib.AbstractContextManager[Part]:
        return contextlib.nullcontext(Part([self._view[start:stop]], 1, md5=bytes(16)))

    def crc64nvme(self) -> int:  # type: ignore[override]
        return 1


def limits(subject: Subject) -> Iterator[Finding]:
    """Find out which parts of an upload the server takes."""
    raw = subject.first.store.raw_requests()
    if raw is None:
        return
    key = "limits/small-parts"
    subject.first.written.add(key)
    small = _is_taken(lambda: raw.put(key, CheckedBody(bytes(MIB + 1)), part_size_bytes=MIB))
    last, beyond = _takes_part(raw, 10_000), _takes_part(raw, 10_001)
    measured = {"parts_under_5_mib": small, "part_10000": last, "part_10001": beyond}
    result = f"parts under 5 MiB {_taken(small)}, part number 10,000 {_taken(last)}, 10,001 {_taken(beyond)}"
    if last:
        yield Finding("uploads in parts", Verdict.FINE, result, measured=measured)
        return
    measured["part_1000"] = thousand = _takes_part(raw, 1000)
    size_bytes = transfer_size_bytes(subject.first.store.threads)
    advice = (
        f"files of {'up to' if thousand else 'fewer than'} 1,000 parts can be stored, "
        f"{1000 * size_bytes / 2**30:.0f} GiB at {size_bytes // MIB} MiB a part: "
        "for larger ones give the storage option part_size_bytes"
    )
    result += f", 1,000 {_taken(thousand)}"
    yield Finding("uploads in parts", Verdict.CAREFUL, result, advice, measured)


def _taken(taken: bool) -> str:
    return "taken" if taken else "refused"


def _takes_part(raw: RawRequests, number: int) -> bool:
    key = "limits/numbers"
    upload_id = raw.begin(key)
    try:
        return _is_taken(lambda: raw.send_part(key, upload_id, number, CheckedBody(b"part")))
    finally:
        with contextlib.suppress(StorageError):
            raw.abort(key, upload_id)


def _is_taken(request: Callable[[], object]) -> bool:
    """Return whether the server took a request; raise errors that are no answer."""
    try:
        return request() is not False  # as `put` says of a server that cannot
    except (AccessDenied, StorageUnavailable):
        raise
    except StorageError:
        return False


def uploads(subject: Subject) -> Iterator[Finding]:
    """Find out whether an unfinished upload can be found and aborted."""
    raw = subject.first.store.raw_requests()
    if raw is None:
        return
    if not {"list uploads", "abort uploads"} <= subject.allowed:
        yield Finding("unfinished uploads", Verdict.UNKNOWN, "needs permission to list and abort uploads")
        return
    key = "limits/orphan"
    upload_id = raw.begin(key)
    try:
        listed = upload_id in raw.uploads(key)
    finally:
        raw.abort(key, upload_id)
    gone = upload_id not in raw.uploads(key)
    measured = {"listed": listed, "aborted": gone}
    if listed and gone:
        yield Finding("unfinished uploads", Verdict.FINE, "can be found and aborted", measured=measured)
    else:
        result = "are listed after they were aborted" if listed else "are not listed"
        advice = "ckpt gc cannot remove what dead uploads leave: add a lifecycle rule that aborts them"
        yield Finding("unfinished uploads", Verdict.CAREFUL, result, advice, measured)
