"""Decide which owners' bytes a checkpoint may name, so that little of what is kept is waste."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping

MAX_OWNERS = 16
_MIN_USE = 0.5
"""The part of an owner's data that must be named, or its tensors are written anew."""


def choose_owners(
    carried_bytes: Mapping[str, int], data_bytes: Mapping[str, int], exempt: Collection[str] = ()
) -> set[str]:
    """Choose owners by how much would be named of each, and how much each has; `exempt` ones before others."""
    useful = [
        owner
        for owner, nbytes in carried_bytes.items()
        if owner in exempt or nbytes >= _MIN_USE * data_bytes[owner]
    ]
    useful.sort(key=lambda owner: (owner not in exempt, -carried_bytes[owner], owner))
    return set(useful[:MAX_OWNERS])


def choose_entries(
    by_entry: Mapping[str, Mapping[str, int]],
    data_bytes: Mapping[str, int],
    exempt: Collection[str] = (),
) -> tuple[set[str], set[str]]:
    """Choose the entries to carry, of those whose bytes are given by entry and owner; return them and their owners.

    An entry in several owners is carried if all of them are chosen.
    """
    entries = set(by_entry)
    while True:
        owners = choose_owners(sum_by_owner(by_entry[fqn] for fqn in entries), data_bytes, exempt)
        kept = {fqn for fqn in entries if by_entry[fqn].keys() <= owners}
        if kept == entries:
            return entries, owners
        entries = kept


def sum_by_owner(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Add up bytes by owner."""
    total: dict[str, int] = defaultdict(int)
    for part in parts:
        for owner, nbytes in part.items():
            total[owner] += nbytes
    return dict(total)
