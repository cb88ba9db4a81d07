"""Plan a save back in the program that saves, before it is acknowledged: no byte is read."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from ckpt.errors import CheckpointError, ConfigurationError
from ckpt.format.fqns import STRUCTURE, Path
from ckpt.geometry import global_shape, has_geometry
from ckpt.options import LoadOptions
from ckpt.save_plans.unplannable import fault_of, may_fail
from ckpt.state.load_planner import plan_parts
from ckpt.state.model_state import ModelState
from ckpt.state.optimizer_state import OptimizerState
from ckpt.state.parts import PartState, PlainValue
from ckpt.state.rank_digests import GROUPS
from ckpt.state.refused_values import local_enums, refusals
from ckpt.state.state_parts import Part
from ckpt.state.stored import StoredPart, StoredState, StoredValue
from ckpt.state.structure import build, children, is_flattened, leaves, name_of
from ckpt.state.targets import Targets, shortened

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def check_resumable(
    parts: Mapping[str, Part], values: Mapping[str, Any], trusted: Collection[str] = ()
) -> None:
    """Check that a program like this one restores what this rank is about to save: names, shapes, structure, groups.

    Args:
        parts: of the state, by name.
        values: what is saved of them, and what flattening loses.
        trusted: names of objects that loads trust.

    Raises ConfigurationError, which names what could not be restored.
    """
    parts = {
        name: PartState(name, _Taken(values[name])) if isinstance(part, PartState) else part
        for name, part in parts.items()
        if not _is_plain(part, values[name])
    }
    found = [
        ((name, *path), leaf)
        for name, value in values.items()
        if name in parts or name == STRUCTURE
        for path, leaf in _leaves(parts.get(name), value)
    ]
    tensors = [leaf for _, leaf in found if isinstance(leaf, torch.Tensor)]
    if any(may_fail(tensor) and fault_of(tensor) is not None for tensor in tensors):
        return  # it has no shape to plan by; the save names it
    named = [(name_of(path), path, leaf) for path, leaf in found]
    texts = {name: leaf for name, path, leaf in named if path[0] == STRUCTURE}
    stored = StoredState(
        (_stored(name, leaf) for name, _, leaf in named), {name: path for name, path, _ in named}, texts
    )
    targets = Targets(LoadOptions(), stored, is_dry=True)
    try:
        with ExitStack() as stack:
            for part in parts.values():
                if isinstance(part, ModelState):
                    stack.enter_context(part.names.unchanged())
            plan_parts(parts, targets)
            for name, part in parts.items():
                if isinstance(part, OptimizerState) and isinstance(values[name].get(GROUPS), list):
                    part.check_groups(values[name])
                elif isinstance(part, PartState | PlainValue):
                    _check_structure(stored.part(name), values[name])
    except CheckpointError as error:
        raise ConfigurationError(_refused(error.message)) from None
    targets.settle_missing()
    faults = [*targets.faults, *_of_refused_classes(named)]
    faults += (fault for text in texts.values() for fault in local_enums(text))
    faults += (
        fault
        for name, path, leaf in named
        if not isinstance(leaf, torch.Tensor) and path[0] != STRUCTURE
        for fault in refusals(name, leaf, trusted)
    )
    if targets.missing:
        faults.append(f"the program wants {shortened(targets.missing)}, which this save would not have")
    below = {value.name for name in parts for value in stored.part(name).values.values()}
    if left_over := sorted(below - targets.asked):
        faults.append(f"the program would have no place for {shortened(left_over)}")
    if faults:
        raise ConfigurationError(_refused("; ".join(faults[:5])))


@dataclass
class _Taken:
    """A part whose state has been taken: to ask for it again may count, or move a loader."""

    state: Any

    def state_dict(self) -> Any:
        return self.state


def _leaves(part: Part | None, value: Any) -> Iterator[tuple[Path, Any]]:
    """List the values that are planned back: of an optimizer one for each parameter, which finds all of its state."""
    if not isinstance(part, OptimizerState):
        yield from leaves(value)
        return
    for key, below in value.items():
        if key != "state":
            yield from leaves(below, (key,))
            continue
        for name, own in below.items():
            found = leaves(own, (key, str(name)))
            yield from itertools.islice(found, 1) if _is_plain_dict(own) else found


def _is_plain(part: Part, value: Any) -> bool:
    """Tell whether a part is the very dict that is saved, of which flattening loses nothing: it fits itself."""
    return isinstance(part, PlainValue) and part.state_dict() is value and _is_plain_dict(value)


def _is_plain_dict(value: Any) -> bool:
    if type(value) is not dict or not value:
        return False
    for key, item in value.items():
        if type(key) is not str:
            return False
        kind = type(item)
        if kind in _PLAIN:
            if may_fail(item) or has_geometry(item):
                return False
        elif kind not in (int, float, bool, str) and not _is_plain_dict(item):
            return False
    return True


def _of_refused_classes(named: Sequence[tuple[str, Path, Any]]) -> Iterator[str]:
    """Name tensors of the program's own classes that a load would refuse to make."""
    for name, _, value in named:
        kind = type(value)
        if kind in _PLAIN:
            continue
        is_own = isinstance(value, torch.Tensor) and kind.__module__.partition(".")[0] != "torch"
        if is_own and kind not in torch.serialization.get_safe_globals():
            yield (
                f"{name!r} is a {kind.__module__}.{kind.__qualname__}, which a load makes only after "
                "torch.serialization.add_safe_globals has declared the class"
            )


def _refused(reason: str) -> str:
    return f"the program that saves could not restore it: {reason}"


def _stored(name: str, value: Any) -> StoredValue:
    if type(value) in _PLAIN and not has_geometry(value):
        return StoredValue(name, tuple(value.shape), value.dtype)
    if isinstance(value, torch.Tensor) or hasattr(value, "local_shards"):
        return StoredValue(name, global_shape(value), value.dtype)
    return StoredValue(name)


def _check_structure(part: StoredPart, value: Any) -> None:
    """Check that containers come back with their keys and lengths."""
    built = build(dict(leaves(value)), part.structure(), value, part.name)
    path = _difference(value, built)
    if path is not None:
        raise ConfigurationError(
            f"{part.name}{path!r} would come back with other keys: use a dict or a list of its own"
        )


def _difference(value: Any, built: Any, path: str = "") -> str | None:
    if not is_flattened(value):
        return None if built is value else path
    if isinstance(value, Mapping):
        if not isinstance(built, Mapping) or value.keys() != built.keys():
            return path
        pairs = ((str(key), item, built[key]) for key, item in value.items())
    else:
        if not isinstance(built, list) or len(value) != len(built):
            return path
        pairs = (
            (str(number), item, other) for (number, item), other in zip(children(value), built, strict=True)
        )
    return next(
        (
            found
            for key, item, other in pairs
            if (found := _difference(item, other, f"{path}.{key}")) is not None
        ),
        None,
    )
