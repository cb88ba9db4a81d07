"""Save values that are each rank's own: `ckpt.per_rank`."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ckpt.errors import LoadFailed
from ckpt.format.fqns import Path
from ckpt.state.stored import StoredPart, StoredValue
from ckpt.state.structure import Structure, build, children, is_flattened, leaves, name_of, structure_of
from ckpt.state.targets import Targets
from ckpt.torch_private import local_tensor

_logger = logging.getLogger(__name__)

_RANKS = "ranks"
_RANK = re.compile(r"rank-(\d{5,})")

Merge = Callable[[Sequence[Any], int, int], Any]
"""Makes the state of a rank of those of all ranks that saved: `merge(states, rank, world_size)`."""


def rank_and_world_size() -> tuple[int, int]:
    is_initialized = dist.is_available() and dist.is_initialized()
    return (dist.get_rank(), dist.get_world_size()) if is_initialized else (0, 1)


def rank_key(rank: int) -> str:
    return f"rank-{rank:05d}"


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
        self._asked: dict[int, dict[Path, StoredValue]] = {}
        self._stored = StoredPart("")
        self._name = ""

    def state_dict(self) -> dict[str, Any]:
        rank, size = rank_and_world_size()
        return {_RANKS: size, rank_key(rank): local_values(self._own_state())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        rank, size = rank_and_world_size()
        if state[_RANKS] == size:
            self._give(state[rank_key(rank)])
        else:
            self._give(self._merged([state[rank_key(other)] for other in range(state[_RANKS])]))

    def structures(self, value: Mapping[str, Any], name: str) -> dict[Path, Structure]:
        found = {(key,): structure_of(own, f"{name}.{key}") for key, own in value.items() if key != _RANKS}
        return {unit: structure for unit, structure in found.items() if structure}

    def plan(self, part: StoredPart, targets: Targets) -> None:
        self._stored, self._name, self._asked = part, part.name, {}
        rank, size = rank_and_world_size()
        saved = ranks_of(part, ())
        if saved == 0:
            targets.missing.append(part.name)
            return
        targets.asked.update(value.name for value in part.values.values())  # other ranks ask for the rest
        if saved != size:
            targets.unchecked.update(value.name for value in part.values.values())
            if not self._can_merge():
                targets.faults.append(self._no_merge(saved, size))
                return
        live = {} if targets.is_dry else dict(leaves(local_values(self._own_state())))
        for other in [rank] if saved == size else range(saved):
            own = part.below((rank_key(other),))
            self._asked[other] = own
            for path, value in own.items():
                if value.shape is None:
                    targets.object(value)
                else:
                    targets.as_stored(value, live=live.get(path) if saved == size else None)

    def take(self, values: Mapping[str, Any]) -> None:
        states = []
        for other, own in self._asked.items():
            found = {path: values[value.name] for path, value in own.items()}
            structure = self._stored.structure((rank_key(other),))
            states.append(build(found, structure, None, f"{self._name}.{rank_key(other)}"))
        if not states:
            return
        _, size = rank_and_world_size()
        self._give(states[0] if ranks_of(self._stored, ()) == size else self._merged(states))

    def live(self) -> dict[str, Any]:
        """Return this rank's own by stored names; nothing if a merge made it."""
        rank, size = rank_and_world_size()
        if self._asked.keys() != {rank} or ranks_of(self._stored, ()) != size:
            return {}
        own = dict(leaves(local_values(self._own_state())))
        return {value.name: own.get(path) for path, value in self._asked[rank].items()}

    def _own_state(self) -> Any:
        return self.part.state_dict() if hasattr(self.part, "state_dict") else self.part

    def _give(self, state: Any) -> None:
        if hasattr(self.part, "load_state_dict"):
            self.part.load_state_dict(state)
        else:
            self.part = state

    def _can_merge(self) -> bool:
        return self._merge is not None

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


def ranks_of(part: StoredPart, below: Path) -> int:
    """Return how many ranks saved their own at a path; 0 if none did."""
    keys = {
        path[len(below)]
        for path in [*part.values, *part.nodes]
        if len(path) > len(below) and path[: len(below)] == below
    }
    numbers = [int(match[1]) for key in keys if (match := _RANK.fullmatch(str(key)))]
    others = {key for key in keys if key != _RANKS and not _RANK.fullmatch(str(key))}
    return max(numbers) + 1 if numbers and not others else 0


def local_values(value: Any) -> Any:
    """Return a value with each rank's own elements in place of sharded tensors."""
    if isinstance(value, DTensor):
        return local_tensor(value).detach()
    if isinstance(value, Mapping) and any(
        isinstance(item, DTensor | Mapping | list) for item in value.values()
    ):
        items = {key: local_values(item) for key, item in value.items()}
        return items if type(value) is dict else _like(value, items)
    if type(value) is list and is_flattened(value):
        return [local_values(item) for item in value]
    return value


def _like(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    made = value.copy() if hasattr(value, "copy") else {}
    made.update(items)
    return made


def marked(value: Any, name: str, patterns: Collection[str]) -> Any:
    """Return a value with each rank's own in place of what matches a pattern."""
    if any(fnmatchcase(name, pattern) for pattern in patterns):
        rank, size = rank_and_world_size()
        return {_RANKS: size, rank_key(rank): local_values(value)}
    if not is_flattened(value) or not any(_may_match(name, pattern) for pattern in patterns):
        return value
    if isinstance(value, Mapping):
        items = {key: marked(item, f"{name}.{key}", patterns) for key, item in value.items()}
        return items if type(value) is dict else _like(value, items)
    return [marked(item, f"{name}.{number}", patterns) for number, item in children(value)]


def _may_match(name: str, pattern: str) -> bool:
    """Tell whether a name below this one can match: the text before the first wildcard decides."""
    literal = re.split(r"[*?\[]", pattern, maxsplit=1)[0]
    return literal.startswith(f"{name}.") or f"{name}.".startswith(literal)


def own_part(part: StoredPart, targets: Targets) -> StoredPart:
    """Return a part with this rank's own values where ranks saved theirs."""
    below = {
        path[:at]
        for path in [*part.values, *part.nodes]
        if any(str(key).startswith("rank-") for key in path)
        for at in range(len(path))
        if _RANK.fullmatch(str(path[at]))
    }
    own = {path: ranks_of(part, path) for path in below}
    own = {path: saved for path, saved in own.items() if saved}
    if not own:
        return part
    rank, size = rank_and_world_size()
    chosen = StoredPart(part.name)
    for path, saved in own.items():
        if saved != size:
            targets.faults.append(
                f"{name_of((part.name, *path))!r} is each rank's own, {saved} ranks saved it, and {size} load: restore on "
                "as many ranks, or give the part as ckpt.per_rank(part, merge=...)"
            )
    for path, value in part.values.items():
        top = next((each for each in own if path[: len(each)] == each), None)
        if top is None:
            chosen.values[path] = value
            continue
        targets.asked.add(value.name)
        if own[top] != size:
            targets.unchecked.add(value.name)
        if len(path) > len(top) and path[len(top)] == rank_key(rank):
            chosen.values[top + path[len(top) + 1 :]] = value
    for path, node in part.nodes.items():
        top = next((each for each in own if path[: len(each)] == each), None)
        if top is None or len(path) == len(top):
            chosen.nodes[path] = node
        elif path[len(top)] == rank_key(rank):
            chosen.nodes[top + path[len(top) + 1 :]] = node
    return chosen
