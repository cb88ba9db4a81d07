"""Report the decisions of a `CheckpointManager` to logs, metrics and files."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckpt.backends.options import scrub, url_secrets
from ckpt.words import age, printable

__all__ = ["Event", "Events", "JsonLines", "OpenTelemetry"]

_logger = logging.getLogger("ckpt.manager")

_LEVELS = {
    **dict.fromkeys(
        (
            "failed",
            "passed_over",
            "not_removed",
            "unmeasured",
            "not_local",
            "not_durable",
            "not_copied",
            "drain_failed",
        ),
        logging.WARNING,
    ),
    **dict.fromkeys(("staged", "kept"), logging.DEBUG),
}
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


@dataclass(frozen=True)
class Event:
    """A decision or an outcome on the first rank.

    Attributes:
        kind: `preflight`, `restored`, `passed_over` (a checkpoint that cannot be loaded, or is gone), `due` (a
            save begins), `not_due` (it was asked for, but not made), `staged`, `durable`, `failed`,
            `kept`, `removed`, `not_removed`, `unmeasured` (no checkpoint has a rule's metric). With `local=` or
            `fallback=` also `local` and `fallback` (it is there, and not durable yet), `not_local`, `not_durable`,
            `not_copied` (to another node's disk), and `drain_failed` (the process that carries has ended).
        values: figures by name, units last (`stall_s`, `upload_s`, `size_bytes`, `durable_age_s`).
        at_s: seconds since 1970.
        url: the checkpoint's place, without credentials; of `durable` and `removed`.
    """

    kind: str
    step: int | None
    reason: str = ""
    values: Mapping[str, float] = field(default_factory=dict)
    at_s: float = field(default_factory=time.time)
    url: str = ""


Listener = Callable[[Event], None]


class FailureLog:
    """Warn of the failures of one listener, once for each type until it works again."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._last: type[Exception] | None = None

    def failed(self, event: Event, error: Exception) -> None:
        if self._last is type(error):  # texts can differ each time, by addresses of objects
            return
        self._last, text = type(error), str(error)
        shown = scrub(text, url_secrets(text))  # a tracking server's URL can have a password in it
        _logger.warning("%s failed on the event %r: %s", self._name, event.kind, shown)

    def worked(self) -> None:
        self._last = None


class Events:
    """Send events to the log and to listeners. A failing listener is only logged."""

    def __init__(self, listeners: Sequence[Listener]) -> None:
        self._listeners = [(listener, FailureLog(f"the listener {listener!r}")) for listener in listeners]

    def tell(self, event: Event) -> None:
        _logger.log(_LEVELS.get(event.kind, logging.INFO), "%s", _line(event))
        if event.kind == "restored" and event.step is not None and not _is_heard(logging.INFO):
            with contextlib.suppress(AttributeError, OSError, ValueError):  # standard error is closed
                sys.stderr.write(f"ckpt: {printable(_line(event))}\n")
        for listener, failures in self._listeners:
            try:
                listener(event)
                failures.worked()
            except Exception as error:
                failures.failed(event, error)

    def flush(self) -> None:
        """Let listeners that send in the background send the rest, while their runs and servers live."""
        for listener, _ in self._listeners:
            if flush := getattr(listener, "flush", None):
                try:
                    flush()
                except Exception as error:
                    _logger.warning("the listener %r failed to flush: %s", listener, type(error).__name__)


def _is_heard(level: int) -> bool:
    """Return whether a handler gets log lines of this level, or the program has set a level for this library's."""
    has_chosen = logging.getLogger("ckpt").level != logging.NOTSET
    return has_chosen or (_logger.isEnabledFor(level) and _logger.hasHandlers())


def _line(event: Event) -> str:
    """Word an event for people; listeners get its figures."""
    step = "" if event.step is None else f"step {event.step} "
    values = defaultdict(float, event.values)
    if event.kind == "durable":
        again = f", {values['retries']:.0f} requests were sent again" if values["retries"] else ""
        size, took, waited = _size(values["size_bytes"]), values["upload_s"], values["stall_s"]
        if "carry_s" in values:  # it has been local before
            return f"{step}durable: {_size(values['sent_bytes'])} sent by the first node, in {values['carry_s']:.2f} s"
        return f"{step}saved: {size} in {took:.2f} s, training waited {waited:.2f} s{again}"
    if event.kind in ("local", "fallback"):
        size, took, waited = _size(values["size_bytes"]), values["local_s"], values["stall_s"]
        return f"{step}{event.kind}: {size} in {took:.2f} s, training waited {waited:.2f} s"
    if event.kind == "staged":
        return f"{step}staged in {values['stall_s']:.2f} s"
    if event.kind == "restored" and step:
        ago = f", saved {age(values['durable_age_s'])} ago" if "durable_age_s" in values else ""
        return f"{step}restored in {values['load_s']:.2f} s: {event.reason}{ago}"
    return f"{step}{event.kind.replace('_', ' ')}: {event.reason}"


def _size(size_bytes: float) -> str:
    """Write a size with three digits."""
    power = 0
    while size_bytes >= 999.5 and power < len(_UNITS) - 1:
        size_bytes, power = size_bytes / 1000, power + 1
    return f"{size_bytes:.3g} {_UNITS[power]}"


class JsonLines:
    """Append each event as a line of JSON to a local file."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.path.abspath(path)

    def __call__(self, event: Event) -> None:
        line = {"at_s": event.at_s, "kind": event.kind, "step": event.step, "reason": event.reason}
        if event.url:
            line["url"] = event.url
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line | dict(event.values)) + "\n")


class OpenTelemetry:
    """Feed a meter of OpenTelemetry (`opentelemetry.metrics.get_meter(...)`).

    It gets counters of events by kind, of bytes and of requests sent again, histograms of seconds,
    and gauges of the last durable step and its age.
    """

    def __init__(self, meter: Any) -> None:
        self._events = meter.create_counter("ckpt.events", description="events by kind")
        self._bytes = meter.create_counter("ckpt.durable.size", unit="By", description="bytes made durable")
        self._retries = meter.create_counter("ckpt.retries", description="requests sent again")
        self._seconds = {
            name: meter.create_histogram(f"ckpt.{name.removesuffix('_s')}", unit="s")
            for name in ("stall_s", "upload_s", "plan_s", "write_s", "commit_s", "load_s")
        }
        self._step = meter.create_gauge("ckpt.durable.step", description="the last durable step")
        self._age = meter.create_gauge(
            "ckpt.durable.age", unit="s", description="age of the last durable step"
        )

    def __call__(self, event: Event) -> None:
        self._events.add(1, {"kind": event.kind})
        if event.kind == "durable":
            self._bytes.add(int(event.values.get("size_bytes", 0)))
            self._retries.add(int(event.values.get("retries", 0)))
            self._step.set(event.step or 0)
        for name, histogram in self._seconds.items():
            if name in event.values:
                histogram.record(event.values[name])
        if "durable_age_s" in event.values:
            self._age.set(event.values["durable_age_s"])
