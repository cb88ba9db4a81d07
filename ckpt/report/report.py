"""Make the report of a checkpoint, or of a run's root."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckpt.backends.base import Store
from ckpt.backends.registry import open_store
from ckpt.errors import CheckpointError, NotCommitted, NotFound
from ckpt.format.run_record import read_run
from ckpt.reading.checkpoint import ReadSettings
from ckpt.reading.opening import open_parts
from ckpt.report.checkpoint import checkpoint_facts
from ckpt.report.events import RunEvent, read_events
from ckpt.report.history import run_facts
from ckpt.report.page import page_of
from ckpt.tools.inspect import describe, inspect
from ckpt.tools.ls import ListedCheckpoint, list_checkpoints
from ckpt.transfer.reports import Report as ReportProgress
from ckpt.transfer.reports import Tally, no_report

EVENTS_NAME = "events.jsonl"
"""The file of events in a local root that is read without being asked for."""

_PATIENCE_S = 5.0
"""For records that storage may show late; a root has none."""


@dataclass(frozen=True)
class Report:
    """A page, and what it is about.

    Attributes:
        kind: `checkpoint` or `run`.
        url: of the checkpoint or root, without credentials.
        html: the page.
    """

    kind: str
    url: str
    html: str


def make_report(
    url: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    events: str | os.PathLike[str] | None = None,
    depth: int = 3,
    progress: ReportProgress | None = None,
) -> Report:
    """Draw the checkpoint at `url`, or the run whose checkpoints lie below it. Reads records, no data.

    Args:
        storage_options: of the place, by name, as for a save there.
        events: the local file in which `JsonLines` wrote the events of the run; by default `events.jsonl` in a
            local root, if it is there.
        depth: levels of folders below a root to search.
        progress: called as by `list_checkpoints` of a root, and as by `inspect` of a checkpoint.

    Raises:
        NotFound, NotCommitted: there is neither a checkpoint nor one below it.
        IntegrityError, FormatError, UnsafeContent: a record is damaged, unknown or unsafe.
        StorageError: the storage refused, or could not be reached.
    """
    progress = progress or no_report
    told: Sequence[RunEvent] = () if events is None else read_events(events)
    with contextlib.closing(open_store(url, storage_options)) as store:
        try:
            settings = ReadSettings(visibility_timeout_s=_PATIENCE_S, tally=Tally(progress))
            parts = open_parts(store, settings, models=True)
        except (NotFound, NotCommitted) as none_here:
            return _run_report(url, store, storage_options, told, depth, none_here, progress)
        inspection = describe(store.url, parts)
    facts = {"kind": "checkpoint", "made_at_s": time.time(), "checkpoint": checkpoint_facts(inspection, told)}
    return Report("checkpoint", inspection.url, page_of(facts, _title(inspection.url)))


def _run_report(
    url: str | os.PathLike[str],
    store: Store,
    storage_options: Mapping[str, Any] | None,
    events: Sequence[RunEvent],
    depth: int,
    none_here: CheckpointError,
    progress: ReportProgress,
) -> Report:
    """Draw a run. Raises `none_here` if there is no checkpoint in it."""
    checkpoints = list_checkpoints(url, storage_options=storage_options, depth=depth, progress=progress)
    if not checkpoints:
        raise none_here
    beside = os.path.join(store.directory, EVENTS_NAME) if store.directory else None
    if not events and beside is not None and os.path.isfile(beside):
        events = read_events(beside)
    record = None
    with contextlib.suppress(CheckpointError):
        record = read_run(store)
    latest = max((each for each in checkpoints if each.latest), key=_moment, default=None)
    facts: dict[str, Any] = {
        "kind": "run",
        "made_at_s": time.time(),
        "run": run_facts(store.url, checkpoints, record, events),
        "checkpoint": None,
    }
    if latest is not None:
        try:
            inspection = inspect(latest.url, storage_options=storage_options, progress=progress)
            facts["checkpoint"] = checkpoint_facts(inspection, events)
        except CheckpointError as error:  # the history is worth a page without it
            facts["problem"] = f"{latest.path} cannot be shown: {error.message}"
    return Report("run", store.url, page_of(facts, _title(store.url)))


def _moment(listed: ListedCheckpoint) -> float:
    return listed.created_at_s or 0.0


def _title(url: str) -> str:
    return url.rstrip("/").rpartition("/")[2] or url
