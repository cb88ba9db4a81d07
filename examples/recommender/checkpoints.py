"""Name the checkpoints of a run, find the latest, remove the old ones."""

from __future__ import annotations

import contextlib

import ckpt
from ckpt.errors import NotCommitted, NotFound, StillReferred
from examples.recommender.options import Options


def url_of(options: Options, step: int) -> str:
    return f"{options.root.rstrip('/')}/step-{step:06d}"


def committed(options: Options) -> list[int]:
    """List the steps of the checkpoints that are there, in order."""
    try:
        listed = ckpt.list_checkpoints(options.root, storage_options=options.storage_options, depth=1)
    except NotFound:
        return []
    return sorted(each.step for each in listed if each.state == "committed" and each.step is not None)


def remove_old(options: Options) -> list[int]:
    """Remove all but the last checkpoints and what they refer to; return the steps that are gone."""
    removed = []
    for step in committed(options)[: -options.keep]:
        # One whose rows a later one refers to stays until that is removed.
        with contextlib.suppress(StillReferred, NotFound, NotCommitted):
            ckpt.remove(url_of(options, step), storage_options=options.storage_options)
            removed.append(step)
    return removed
