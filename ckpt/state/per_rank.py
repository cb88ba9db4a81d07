"""Save values that are each rank's own: `ckpt.per_rank`."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ckpt.errors import LoadFailed
from ckpt.format.fqns import Path
from ckpt.state.rank_keys import RANKS, rank_key, rank_of, ranks_named
from ckpt.state.stored import StoredPart
from ckpt.state.structure import (
    Structure,
    build,
    children,
    is_flattened,
    leaves,
    made_like,
    name_of,
    structure_of,
)
from ckpt.state.targets import Targets
from ckpt.torch_private import local_tensor

_logger = logging.getLogger(__name__)

Merge = Callable[[Sequence[Any], int, int], Any]
"""Makes the state of a rank of those of all ranks that saved: `merge(states, rank, world_size)`."""


def rank_and_world_size() -> tuple[int, int]:
    is_initialized = dist.is_available() and dist.is_initialized()
    return (dist.get_rank(), dist.get_world_size()) if is_initialized else (0, 1)


def per_rank(part: Any, merge: Merge | None = None) -> PerRank:
    """Mark a part as each rank's own: a loader's position, a buffer, metrics.

        manager.save(step, model=model, loader=ckpt.per_rank(loader))
        manager.restore(model=model, loader=ckpt.per_rank(loader))

    Each rank gets its own back on the same number of ranks. On another number a merge function makes the state of a
    rank of those of all ranks that saved; without one that is an error.

    Args:
        part: with `state_dict` and `load_state_dict`; or any value, which a restore returns in `Restored.state`.
        merge: called as `merge(states, rank, world_size)`; default the part's method `merge_ranks`, if it has one.
    """
    return PerRank(part, merge)


class PerRank:
    """A part, or a value, that is each rank's own: see `per_rank`."""

    kind = "per rank"

    def __init__(self, part: Any, merge: Merge | None = None) -> None:
        self.part = part
        self._merge = merge if merge is not None else getattr(part, "merge_ranks", None)
        self._asked: dict[int, StoredPart] = {}
        self._saved = 0
        self._name = ""

    def state_dict(self) -> dict[str, Any]:
        rank, size = rank_and_world_size()
        return {RANKS: size, rank_key(rank): local_values(self._own_state())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        rank, size = rank_and_world_size()
        if state[RANKS] == size:
            self._give(state[rank_key(rank)])
        else:
            self._give(self._merged([state[rank_key(other)] for other in range(state[RANKS])]))

    def structures(self, value: Mapping[str, Any], name: str) -> dict[Path, Structure]:
        found = {(key,): structure_of(own, f"{name}.{key}") for key, own in value.items() if key != RANKS}
        return {unit: structure for unit, structure in found.items() if structure}

    def plan(self, part: StoredPart, targets: Targets) -> None:
        self._name = part.name
        self._asked = {}
        self._saved = 0
        rank, size = rank_and_world_size()
        by_rank = ranks_of(part)
        if by_rank is None:  # no rank's own: it is for all
            if not part.values and not part.nodes:
                targets.missing.append(part.name)
                return
            by_rank = {rank: part}
        else:
            self._saved = len(by_rank)
            targets.asked.update(value.name for value in part.values.values())  # other ranks ask for the rest
            if not self._is_merged and rank in by_rank:
                by_rank = {rank: by_rank[rank]}
            elif targets.is_dry:
                targets.unchecked.update(value.name for value in part.values.values())
                return
            elif fault := _lacking(part.name, by_rank):
                targets.faults.append(fault)
                return
            elif self._merge is None:
                targets.faults.append(self._no_merge(self._saved, size))
                return
            else:
                targets.unchecked.update(value.name for value in part.values.values())
        self._asked = by_rank
        live = {} if targets.is_dry or self._is_merged else dict(leaves(local_values(self._own_state())))
        for own in by_rank.values():
            for path, value in own.values.items():
                if value.shape is None:
                    targets.object(value)
                else:
                    targets.as_stored(value, live=live.get(path))
            build(dict.fromkeys(own.values), own.nodes, None, own.name)

    def take(self, values: Mapping[str, Any]) -> None:
        states = [
            build({path: values[value.name] for path, value in own.values.items()}, own.nodes, None, own.name)
            for own in self._asked.values()
        ]
        if states:
            self._give(self._merged(states) if self._is_merged else states[0])

    def live(self) -> dict[str, Any]:
        """Return this rank's own by stored names; nothing if a merge made it."""
        if self._is_merged or not self._asked:
            return {}
        own = dict(leaves(local_values(self._own_state())))
        return {
            value.name: own.get(path) for part in self._asked.values() for path, value in part.values.items()
        }

    @property
    def _is_merged(self) -> bool:
        """Tell whether other ranks' own are needed: as many as load have saved, or one for all."""
        return self._saved not in (0, rank_and_world_size()[1])

    def _own_state(self) -> Any:
        return self.part.state_dict() if hasattr(self.part, "state_dict") else self.part

    def _give(self, state: Any) -> None:
        if hasattr(self.part, "load_state_dict"):
            self.part.load_state_dict(state)
        else:
            self.part = state

    def _merged(self, states: Sequence[Any]) -> Any:
        rank, size = rank_and_world_size()
        if self._merge is None:
            raise LoadFailed(self._no_merge(len(states), size))
        return self._merge(states, rank, size)

    def _no_merge(self, saved: int, size: int) -> str:
        return (
            f"{self._name!r} is each rank's own, {saved} ranks saved it, and {size} load: give a merge function, "
            "ckpt.per_rank(part, merge=...), or restore on as many ranks, or leave it out"
        )


def without_marks(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a state with what `per_rank` has marked, which holds what was loaded, in place of the marks."""
    if not any(isinstance(value, PerRank) for value in state.values()):
        return state
    return {name: value.part if isinstance(value, PerRank) else value for name, value in state.items()}


def ranks_of(part: StoredPart) -> dict[int, StoredPart] | None:
    """Return what each rank saved of a part; None if it is no rank's own."""
    ranks = _places(part).get(())
    if not ranks:
        return None
    found = {rank: StoredPart(f"{part.name}.{rank_key(rank)}") for rank in sorted(ranks)}
    for path, value in part.values.items():
        if (rank := rank_of(path[0])) is not None:
            found[rank].values[path[1:]] = value
    for path, node in part.nodes.items():
        if path and (rank := rank_of(path[0])) is not None:
            found[rank].nodes[path[1:]] = node
    return found


def _places(part: StoredPart) -> dict[Path, set[int]]:
    """Return where in a part ranks saved their own, and which ranks."""
    members: dict[Path, set[str | int]] = {}
    for path in (*part.values, *part.nodes):
        for at, key in enumerate(path):
            if rank_of(key) is not None:
                members.setdefault(path[:at], set())
                break
    if not members:
        return {}
    for path in (*part.values, *part.nodes):
        for at, key in enumerate(path):
            if path[:at] in members:
                members[path[:at]].add(key)
                break
    found = {place: ranks_named(keys) for place, keys in members.items() if place not in part.values}
    return {place: ranks for place, ranks in found.items() if ranks}


def _lacking(name: str, ranks: Collection[int]) -> str:
    """Name the first rank whose own is not there; empty if none is missing."""
    lacking = next(rank for rank in itertools.count() if rank not in ranks)
    if lacking == len(ranks):
        return ""
    return f"{name!r} is each rank's own, and the checkpoint lacks {name}.{rank_key(lacking)}, but has those of later ranks"


def local_values(value: Any) -> Any:
    """Return a value with each rank's own elements in place of sharded tensors."""
    if isinstance(value, DTensor):
        return local_tensor(value).detach()
    if isinstance(value, Mapping) and any(
        isinstance(item, DTensor | Mapping | list) for item in value.values()
    ):
        items = {key: local_values(item) for key, item in value.items()}
        return items if type(value) is dict or not isinstance(value, dict) else made_like(value, items)
    if type(value) is list and is_flattened(value):
        return [local_values(item) for item in value]
    return value


def marked(value: Any, name: str, patterns: Collection[str], places: dict[Path, Any], path: Path = ()) -> Any:
    """Return a value with each rank's own in place of what matches a pattern; note in `places` what stood there."""
    shown = name_of((name, *path))
    if any(fnmatchcase(shown, pattern) for pattern in patterns):
        rank, size = rank_and_world_size()
        places[path] = value
        return {RANKS: size, rank_key(rank): local_values(value)}
    if not is_flattened(value) or not any(_may_match(shown, pattern) for pattern in patterns):
        return value
    if isinstance(value, Mapping):
        return {key: marked(item, name, patterns, places, (*path, str(key))) for key, item in value.items()}
    return [marked(item, name, patterns, places, (*path, number)) for number, item in children(value)]


def by_units(structures: Mapping[Path, Structure], places: Collection[Path]) -> dict[Path, Structure]:
    """Return structures, by whole paths, in units that all ranks share, and this rank's own units below marked places."""
    rank, _ = rank_and_world_size()
    marks = {*places}
    # What is shared, and would stand above units of the ranks, gets a unit in the same place.
    shared = {place[:at]: (*place, RANKS) for place in places for at in range(len(place) + 1)}
    found: dict[Path, Structure] = {}
    for unit, structure in structures.items():
        for path, node in structure.items():
            whole = (*unit, *path)
            own = shared.get(unit, unit)
            for at in range(len(whole) + 1) if marks else ():
                if whole[:at] in marks:
                    own = (*whole[:at], rank_key(rank))
                    whole = (*own, *whole[at:])
                    tensors = {member: kind for member, kind in node.tensors.items() if kind != "dtensor"}
                    node = replace(node, tensors=tensors)
                    break
            found.setdefault(own, {})[whole] = node
    return found


def _may_match(name: str, pattern: str) -> bool:
    """Tell whether a name below this one can match: the text before the first wildcard decides."""
    literal = re.split(r"[*?\[]", pattern, maxsplit=1)[0]
    return literal.startswith(f"{name}.") or f"{name}.".startswith(literal)


def own_part(part: StoredPart, targets: Targets) -> StoredPart:
    """Return a part with this rank's own values where ranks saved theirs."""
    places = _places(part)
    if not places:
        return part
    rank, size = rank_and_world_size()
    for place, ranks in {} if targets.is_dry else places.items():
        name = name_of((part.name, *place))
        if fault := _lacking(name, ranks):
            targets.faults.append(fault)
        elif len(ranks) != size:
            targets.faults.append(
                f"{name!r} is each rank's own, {len(ranks)} ranks saved it, and {size} load: restore on "
                "as many ranks, or give the part as ckpt.per_rank(part, merge=...)"
            )
    chosen = StoredPart(part.name)
    for path, value in part.values.items():
        at = next((at for at in range(len(path)) if path[:at] in places), None)
        if at is None:
            chosen.values[path] = value
            continue
        targets.asked.add(value.name)
        if len(places[path[:at]]) != size:
            targets.unchecked.add(value.name)
        if rank_of(path[at]) == rank:
            chosen.values[path[:at] + path[at + 1 :]] = value
    for path, node in part.nodes.items():
        at = next((at for at in range(len(path)) if path[:at] in places), None)
        if at is None:
            chosen.nodes[path] = node
        elif rank_of(path[at]) == rank:
            chosen.nodes[path[:at] + path[at + 1 :]] = node
    return chosen
