"""The keys of values that are each rank's own: their number, `ranks`, and a member for each rank, `rank-00000` and so on."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

RANKS = "ranks"
_RANK = re.compile(r"rank-(\d{5,10})")


def rank_key(rank: int) -> str:
    return f"rank-{rank:05d}"


def rank_of(key: object) -> int | None:
    """Return the rank whose member a key names; None of any other key."""
    match = _RANK.fullmatch(key) if isinstance(key, str) else None
    rank = None if match is None else int(match[1])
    return rank if rank is not None and rank_key(rank) == key else None


def ranks_named(keys: Collection[Any]) -> set[int]:
    """Return the ranks whose members these keys are: none if a dict of these keys is not each rank's own."""
    if RANKS not in keys:
        return set()
    ranks = {rank_of(key) for key in keys if not (isinstance(key, str) and key == RANKS)}
    return {rank for rank in ranks if rank is not None} if None not in ranks else set()
