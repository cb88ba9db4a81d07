"""Remember the content of the last save in each series that this process saved to, or loaded from.

A series are the checkpoints of one folder whose names differ in their numbers alone: `run/model-100`, `run/model-200`.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from typing import TypeVar

import msgspec

from ckpt.content.judging import Saved
from ckpt.content.parts import MAX_PARTS
from ckpt.format.records import CommitRecord

T = TypeVar("T")

_MAX_SERIES = 16

_last: OrderedDict[str, Saved] = OrderedDict()
_seen: OrderedDict[str, None] = OrderedDict()
_lock = threading.Lock()


def remember(saved: Saved) -> None:
    """Keep it as the last one of its series."""
    series = _series(saved.url)
    with _lock:
        _keep(_last, series, saved)
        _keep(_seen, series, None)


def note_written(url: str) -> None:
    """Remember that this rank has looked at all that it wrote to a series."""
    with _lock:
        _keep(_seen, _series(url), None)


def is_new(url: str) -> bool:
    """Tell whether this rank has neither written to the series of the checkpoint at `url` nor loaded from it."""
    with _lock:
        return _series(url) not in _seen


def _keep(entries: OrderedDict[str, T], series: str, entry: T) -> None:
    entries[series] = entry
    entries.move_to_end(series)
    while len(entries) > _MAX_SERIES:
        entries.popitem(last=False)


def note_loaded(url: str, record: CommitRecord | None) -> None:
    """Have later saves compared with a checkpoint that was loaded."""
    saved = None if record is None else saved_as(url, record)
    if saved is not None:
        remember(saved)


def saved_as(url: str, record: CommitRecord) -> Saved | None:
    """Return what a record says; None if its save made no checks, or if it says more than a save would."""
    if record.content is msgspec.UNSET or len(record.content) > MAX_PARTS:
        return None
    return Saved(url, record.step(url), record.content, record.world_size, refers=bool(record.owners))


def last_like(url: str) -> Saved | None:
    """Return the last one in the series of the checkpoint at `url`."""
    with _lock:
        return _last.get(_series(url))


def _series(url: str) -> str:
    folder, _, name = url.rstrip("/").rpartition("/")
    return f"{folder}/{re.sub('[0-9]+', '#', name)}"
