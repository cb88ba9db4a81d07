"""Probe the time of requests, the bytes per second, and whether the clocks agree."""

from __future__ import annotations

import secrets
import statistics
from collections.abc import Callable, Iterator
from functools import partial

from ckpt.backends.base import MIB
from ckpt.backends.bodies import CheckedBody
from ckpt.consistency import environment
from ckpt.consistency.probes.examine import Finding, Subject, Verdict

_ROUNDS = 10
_SIZES_BYTES = (4 * MIB, 64 * MIB)
_LONGEST_PUT_S = 10.0
_SKEW_S, _REFUSED_SKEW_S = 5.0, 900.0


def latency(subject: Subject) -> Iterator[Finding]:
    """Time small puts, looks and reads, one after the other."""
    first = subject.first
    took_s: dict[str, list[float]] = {"put": [], "look": [], "read": []}
    for number in range(_ROUNDS):
        key = f"latency/{number}"
        took_s["put"].append(_timed(partial(first.put, key, b"x")))
        took_s["look"].append(_timed(partial(first.stat, key)))
        took_s["read"].append(_timed(partial(first.store.read_into, key, 0, [memoryview(bytearray(1))])))
    medians_s = {operation: statistics.median(times_s) for operation, times_s in took_s.items()}
    result = ", ".join(f"{operation} {1000 * median_s:.2g} ms" for operation, median_s in medians_s.items())
    measured = {f"{operation}_s": median_s for operation, median_s in medians_s.items()}
    yield Finding("latency", Verdict.FINE, f"{result} (medians)", measured=measured)


def throughput(subject: Subject) -> Iterator[Finding]:
    """Time one object, written and read back; a large one where a small one was fast."""
    store, key = subject.first.store, "throughput/object"
    subject.first.written.add(key)
    put_s = read_s = 0.0
    done_bytes = 0
    for size_bytes in _SIZES_BYTES:
        if put_s * size_bytes / _SIZES_BYTES[0] > _LONGEST_PUT_S:
            break
        done_bytes = size_bytes
        body, target = CheckedBody(secrets.token_bytes(size_bytes)), bytearray(size_bytes)
        put_s = _timed(partial(store.put, key, body))
        read_s = _timed(partial(store.read_into, key, 0, [memoryview(target)]))
    put_rate, read_rate = done_bytes / put_s, done_bytes / read_s
    result = (
        f"put {put_rate / MIB:,.0f} MiB/s, read {read_rate / MIB:,.0f} MiB/s "
        f"({done_bytes / MIB:.0f} MiB, {store.threads} threads)"
    )
    measured = {"size_bytes": done_bytes, "put_bytes_per_s": put_rate, "read_bytes_per_s": read_rate}
    yield Finding("throughput", Verdict.FINE, result, measured=measured)


def clock(subject: Subject) -> Iterator[Finding]:
    """Compare the storage's clock with this machine's, by the date of an object just written."""
    before_s = environment.now()
    subject.first.put("clock/object", b"x")
    after_s = environment.now()
    dated_s = subject.first.stat("clock/object").modified_at_s
    if dated_s is None:
        yield Finding("clock", Verdict.UNKNOWN, "this storage dates nothing")
        return
    # Dates may be whole seconds, cut off.
    skew_s = dated_s - after_s if dated_s > after_s else min(0.0, dated_s + 1 - before_s)
    result = "agrees" if abs(skew_s) <= 1 else f"{abs(skew_s):.0f} s {'ahead' if skew_s > 0 else 'behind'}"
    measured = {"skew_s": skew_s}
    if abs(skew_s) <= _SKEW_S:
        yield Finding("clock", Verdict.FINE, result, measured=measured)
        return
    advice = "set the clocks: the ages in `ckpt ls` and `ckpt gc --dry-run` go by that of this machine"
    if abs(skew_s) >= _REFUSED_SKEW_S:
        advice += ". S3 refuses requests that are 15 minutes off"
    yield Finding("clock", Verdict.CAREFUL, result, advice, measured)


def _timed(action: Callable[[], object]) -> float:
    began_s = environment.monotonic()
    action()
    return max(environment.monotonic() - began_s, 1e-9)
