"""Gather what the page shows of a checkpoint: the numbers of `ckpt.inspect`, and its save."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ckpt.report.events import RunEvent
from ckpt.report.modules import PARTS, shortened, tree_of
from ckpt.tools.inspect import Inspection

_MAX_RANKS = 1 << 15
_MAX_TAGS = 40
_MAX_TEXT = 300


def checkpoint_facts(inspection: Inspection, events: Sequence[RunEvent] = ()) -> dict[str, Any]:
    """Return what the page shows of a checkpoint, fit for JSON. `events` may tell more about its save."""
    commit = inspection.commit
    facts: dict[str, Any] = {
        "url": inspection.url,
        "format": inspection.format,
        "version": inspection.version,
        "parameters": inspection.parameters,
        "tensors": len(inspection.tensors),
        "objects": len(inspection.objects),
        "files": len(inspection.files),
        "stored_bytes": inspection.stored_bytes,
        "referred_bytes": 0 if commit is None else commit.carried_bytes,
        "bytes_by_dtype": inspection.bytes_by_dtype(),
        "bytes_by_part": inspection.bytes_by_part(),
        "seconds": inspection.seconds,
        "ranks": _ranks(inspection),
        "parts": PARTS,
        "tree": tree_of(inspection),
        "commit": None,
        "bases": [],
        "event": {},
    }
    if commit is None:
        return facts
    tags = {shortened(name, _MAX_TEXT): shortened(text, _MAX_TEXT) for name, text in commit.tags.items()}
    return facts | {
        "commit": {
            "id": shortened(commit.id, _MAX_TEXT),
            "created_at": shortened(commit.created_at, _MAX_TEXT),
            "library": shortened(commit.library, _MAX_TEXT),
            "torch": shortened(commit.torch, _MAX_TEXT),
            "world_size": commit.world_size,
            "data_bytes": commit.data_bytes,
            "tags": dict(list(tags.items())[:_MAX_TAGS]),
        },
        "bases": [
            {"path": base.path, "id": base.id, "referred_bytes": base.carried_bytes}
            for base in commit.owners.values()
        ],
        "event": _event_of(commit.tags.get("step"), inspection.url, events),
    }


def _ranks(inspection: Inspection) -> dict[str, list[Any]]:
    """Return the figures of the ranks as columns: they take a quarter of the room."""
    ranks = inspection.ranks[:_MAX_RANKS]
    return {
        "rank": [each.rank for each in ranks],
        "bytes": [each.data_bytes for each in ranks],
        "s": [each.write_s for each in ranks],
        "retries": [each.retries for each in ranks],
    }


def _event_of(step: str | None, url: str, events: Sequence[RunEvent]) -> dict[str, float]:
    """Find the figures that the manager told when this checkpoint became durable."""
    for event in reversed(events):
        named = event.url.rstrip("/") == url.rstrip("/") if event.url else str(event.step) == step
        if event.kind == "durable" and named:
            return dict(event.values)
    return {}
