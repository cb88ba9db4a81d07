"""Read the events that a `CheckpointManager` wrote with `JsonLines`, whoever wrote the file."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ckpt.errors import ConfigurationError, NotFound

_MAX_BYTES = 64 << 20
"""Of the end of the file: a year of saves each ten minutes takes a third of that."""
_MAX_LINE = 1 << 16
_MAX_VALUES = 64


@dataclass(frozen=True)
class RunEvent:
    """An event of a run; see `ckpt.trainer_integration.events.Event`."""

    kind: str
    step: int | None
    at_s: float
    reason: str
    url: str
    values: Mapping[str, float]


def read_events(path: str | os.PathLike[str]) -> list[RunEvent]:
    """Read the events of a file, by time; lines that are no events are left out.

    Raises:
        NotFound: there is no such file.
        ConfigurationError: it cannot be read, or has no events.
    """
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _MAX_BYTES))
            data = file.read(_MAX_BYTES)
    except FileNotFoundError:
        raise NotFound("there is no such file of events (--events)", url=os.fspath(path)) from None
    except OSError as error:
        raise ConfigurationError(f"--events: {error.strerror}", url=os.fspath(path)) from error
    events = sorted(_decoded(data), key=lambda event: event.at_s)
    if data and not events:
        raise ConfigurationError(
            "--events: this file has no line that is an event; give the file of "
            "`ckpt.trainer_integration.events.JsonLines`",
            url=os.fspath(path),
        )
    return events


def _decoded(data: bytes) -> Iterator[RunEvent]:
    for line in data.splitlines():
        if not line.startswith(b"{") or len(line) > _MAX_LINE:
            continue
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError):
            continue
        kind, at_s, step = fields.get("kind"), _number(fields.get("at_s")), fields.get("step")
        if not isinstance(kind, str) or at_s is None:
            continue
        known_step = step if type(step) is int and 0 <= step < 1 << 53 else None
        reason, url = (
            text if isinstance(text := fields.get(name), str) else "" for name in ("reason", "url")
        )
        numbers = {name: number for name, value in fields.items() if (number := _number(value)) is not None}
        values = {name: numbers[name] for name in list(numbers)[:_MAX_VALUES] if name not in ("at_s", "step")}
        yield RunEvent(kind, known_step, at_s, reason, url, values)


def _number(value: Any) -> float | None:
    """Return a number of a size that a date or a duration may have; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if math.isfinite(value) and abs(value) < 1 << 53 else None
