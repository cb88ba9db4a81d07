"""What lies in a checkpoint's folder and is no part of it, and which of that this library left there."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection

from ckpt.backends.base import ObjectStat, Store
from ckpt.errors import StorageError
from ckpt.tools.findings import Stray

__all__ = ["find_strays", "is_our_name", "is_probe"]

_OUR_NAMES = re.compile(r"rank-\d{5,}/[0-9a-f]{16}(-\d+\.distcp|\.json|\.index|\.metadata|\.probe)")

_MAX_STRAYS = 10_000


def is_our_name(key: str) -> bool:
    """Whether a key, relative to its checkpoint, is one that this library gives to what it writes once."""
    return _OUR_NAMES.fullmatch(key) is not None


def is_probe(key: str) -> bool:
    """Whether a key with a name of ours is that of an object which belongs to no checkpoint, not even to its save's."""
    return key.endswith(".probe")


def find_strays(store: Store, known: Collection[str]) -> list[Stray] | None:
    """Objects and unfinished puts at a place that are not `known`; None if the storage would not list them."""
    try:
        unknown = (stat for stat in store.list() if stat.key not in known)
        found = [
            Stray(stat.key, stat.size_bytes, stat.modified_at_s, is_our_name(stat.key))
            for stat in itertools.islice(unknown, _MAX_STRAYS)
        ]

        def note(stat: ObjectStat) -> bool:
            ours = is_our_name(stat.key)
            if len(found) < 2 * _MAX_STRAYS:
                found.append(Stray(stat.key, stat.size_bytes, stat.modified_at_s, ours, unfinished=True))
            return False

        store.abandon(choose=note)
        return found
    except StorageError:
        return None
