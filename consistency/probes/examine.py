"""Examine what a storage really does, by probes that are each bounded in time.

A probe answers one question by trying, through the same stores that carry checkpoints. All that
probes write lies in one folder, whose names the clients remember.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckpt.consistency import environment
from ckpt.consistency.probes.clients import Client, OutOfTime
from ckpt.errors import CheckpointError, StorageUnavailable

_GRACE_S = 10.0
"""For a probe whose time is over to notice."""


class Verdict(enum.Enum):
    """The meaning of a finding for checkpoints."""

    FINE = "fine"
    CAREFUL = "careful"
    """Works, but with a limit to know of."""
    PROBLEM = "problem"
    """Saves or loads can fail, or be wrong."""
    UNKNOWN = "not measured"


@dataclass(frozen=True)
class Finding:
    """A result of a probe.

    Attributes:
        check: the subject of the probe.
        result: the observation, in words.
        advice: its meaning, and the remedy.
        measured: the observation in values; times in seconds, None where something never came.
    """

    check: str
    verdict: Verdict
    result: str
    advice: str = ""
    measured: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Subject:
    """The place to examine; `lag_s` is the longest that a client took to see another's change."""

    first: Client
    second: Client | None
    wait_s: float
    allowed: set[str] = field(default_factory=set)
    lag_s: float = 0.0

    @property
    def clients(self) -> Sequence[Client]:
        return [self.first] if self.second is None else [self.first, self.second]


@dataclass(frozen=True)
class Probe:
    """A check that needs permission to some operations; the error of a `vital` one is raised."""

    check: str
    run: Callable[[Subject], Iterator[Finding]]
    limit_s: float = 30.0
    needs: frozenset[str] = frozenset({"put", "get"})
    vital: bool = False


def examine(
    subject: Subject, probes: Sequence[Probe], *, timeout_s: float, progress: Callable[[str], None]
) -> list[Finding]:
    """Run the probes, one after the other, for `timeout_s` seconds in all.

    A probe that does not return in time is a finding. If it does not return at all, the storage
    hangs, and the others are left out. Raises the error of a vital probe.
    """
    deadline = environment.monotonic() + timeout_s
    findings: list[Finding] = []
    hangs = False
    for probe in probes:
        left_s = deadline - environment.monotonic()
        missing = probe.needs - subject.allowed
        if missing:
            reason = f"needs permission to {' and '.join(sorted(missing))}"
        elif hangs:
            reason = "the storage hangs"
        elif left_s <= 0:
            reason = "out of time"
        else:
            progress(probe.check)
            results, hangs = _run(probe, subject, min(left_s, probe.limit_s))
            findings += results
            continue
        findings.append(Finding(probe.check, Verdict.UNKNOWN, reason))
    return findings


def _run(probe: Probe, subject: Subject, limit_s: float) -> tuple[list[Finding], bool]:
    """Run a probe in a thread, as what hangs can only be left behind; return whether it hangs."""
    findings: list[Finding] = []
    errors: list[CheckpointError] = []

    def work() -> None:
        try:
            findings.extend(probe.run(subject))  # up to an error, if there is one
        except OutOfTime:
            findings.append(Finding(probe.check, Verdict.UNKNOWN, "took too long"))
        except CheckpointError as error:
            errors.append(error)
        except Exception as error:  # a store that breaks its contract
            errors.append(CheckpointError(f"unexpected {type(error).__name__}: {error}"))

    thread = threading.Thread(target=work, name="ckpt-probe", daemon=True)
    _set_deadline(subject, environment.monotonic() + limit_s)
    try:
        thread.start()
        thread.join(limit_s + _GRACE_S)
    except BaseException:  # interrupted
        _set_deadline(subject, 0.0)
        thread.join(_GRACE_S)
        raise
    hangs = thread.is_alive()
    if hangs:
        errors.append(StorageUnavailable(f"no answer in {limit_s:.0f} s", url=subject.first.store.url))
    for error in errors:
        if probe.vital:
            raise error
        result, advice = f"{type(error).__name__}: {error}", "saves and loads can meet this too"
        findings.append(Finding(probe.check, Verdict.PROBLEM, result, advice))
    return [*findings], hangs  # what hangs may go on


def _set_deadline(subject: Subject, deadline: float) -> None:
    for client in subject.clients:
        client.deadline = deadline
