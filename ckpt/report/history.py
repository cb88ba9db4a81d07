"""Gather what the page shows of a run: its checkpoints, how old the last durable one was, what failed."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import Any

from ckpt.format.run_record import RunRecord
from ckpt.report.events import RunEvent
from ckpt.report.modules import shortened
from ckpt.tools.ls import ListedCheckpoint

_MAX_CHECKPOINTS, _MAX_SAVES, _MAX_FAILURES, _MAX_STARTS = 2000, 4000, 500, 500
"""The newest of each, in a page of a few MB."""
_MAX_TEXT, _MAX_NAME, _MAX_METRICS = 300, 40, 8
_FAILURES = frozenset(
    ("failed", "passed_over", "not_removed", "not_local", "not_durable", "not_copied", "drain_failed")
)
_FIGURES = ("stall_s", "plan_s", "write_s", "commit_s", "upload_s", "size_bytes", "retries")


def run_facts(
    root: str, checkpoints: Sequence[ListedCheckpoint], record: RunRecord | None, events: Sequence[RunEvent]
) -> dict[str, Any]:
    """Return what the page shows of a run, fit for JSON."""
    saves = _saves(checkpoints, events)
    gaps_s = [later["at_s"] - earlier["at_s"] for earlier, later in itertools.pairwise(saves)]
    failures = [event for event in events if event.kind in _FAILURES]
    starts_s = [start.at_s for start in record.starts] if record else []
    return {
        "url": root,
        "checkpoints": [_checkpoint(each) for each in checkpoints[-_MAX_CHECKPOINTS:]],
        "count": len(checkpoints),
        "has_events": bool(events),
        "saves": saves[-_MAX_SAVES:],
        "interval_median_s": statistics.median(gaps_s) if gaps_s else None,
        "interval_max_s": max(gaps_s, default=None),
        "failed": sum(event.kind == "failed" for event in failures),
        "failures": [_failure(event) for event in failures[-_MAX_FAILURES:]],
        "starts_s": starts_s[-_MAX_STARTS:],
    }


def _saves(checkpoints: Sequence[ListedCheckpoint], events: Sequence[RunEvent]) -> list[dict[str, Any]]:
    """List when checkpoints became durable, and of which moment of the training they are, by time.

    The events tell also of those that are gone by now; the rest is known from the checkpoints.
    """
    saves = [
        {"step": event.step, "at_s": event.at_s, "state_s": event.at_s - event.values.get("upload_s", 0.0)}
        | {name: event.values[name] for name in _FIGURES if name in event.values}
        for event in events
        if event.kind == "durable"
    ]
    steps = {save["step"] for save in saves}
    for each in checkpoints:
        if each.state == "committed" and each.created_at_s is not None and each.step not in steps:
            save: dict[str, Any] = {"step": each.step, "at_s": each.created_at_s, "retries": each.retries}
            save["state_s"] = each.created_at_s - (each.save_s or 0.0)
            save["size_bytes"] = each.size_bytes
            if each.save_s is not None:
                save["upload_s"] = each.save_s
            saves.append(save)
    return sorted(saves, key=lambda save: save["at_s"])


def _checkpoint(each: ListedCheckpoint) -> dict[str, Any]:
    return {
        "path": shortened(each.path, _MAX_TEXT),
        "state": each.state,
        "step": each.step,
        "size_bytes": each.size_bytes,
        "referred_bytes": each.referred_bytes,
        "created_at_s": each.created_at_s,
        "world_size": each.world_size,
        "save_s": each.save_s,
        "metrics": {
            shortened(name, _MAX_NAME): value for name, value in [*each.metrics.items()][:_MAX_METRICS]
        },
        "retries": each.retries,
        "latest": each.latest,
        "problem": shortened(each.problem or "", _MAX_TEXT),
    }


def _failure(event: RunEvent) -> dict[str, Any]:
    reason = shortened(event.reason, _MAX_TEXT)
    return {"at_s": event.at_s, "kind": event.kind, "step": event.step, "reason": reason}
