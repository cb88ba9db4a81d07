"""Plan a save back in the program that saves, before it is acknowledged: no byte is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ckpt.errors import CheckpointError, ConfigurationError
from ckpt.format.fqns import STRUCTURE
from ckpt.geometry import global_shape
from ckpt.options import LoadOptions
from ckpt.save_plans.unplannable import fault_of, may_fail
from ckpt.state.load_planner import plan_parts
from ckpt.state.optimizer_state import OptimizerState
from ckpt.state.parts import PartState, PlainValue
from ckpt.state.state_parts import Part
from ckpt.state.stored import StoredPart, StoredState, StoredValue
from ckpt.state.structure import build, children, is_flattened, leaves, name_of
from ckpt.state.targets import Targets, shortened


def check_resumable(parts: Mapping[str, Part], values: Mapping[str, Any]) -> None:
    """Check that a program like this one restores what this rank is about to save: names, shapes, structure, groups.

    Args:
        parts: of the state, by name.
        values: what is saved of them, and what flattening loses.

    Raises ConfigurationError, which names what could not be restored.
    """
    tensors = [value for _, value in _values(values) if isinstance(value, torch.Tensor)]
    if any(may_fail(tensor) and fault_of(tensor) is not None for tensor in tensors):
        return  # it has no shape to plan by; the save names it
    paths = {
        name_of((name, *path)): (name, *path) for name, value in values.items() for path, _ in leaves(value)
    }
    texts = {name: value for name, value in _values(values) if name.startswith(f"{STRUCTURE}.")}
    stored = StoredState((_stored(name, value) for name, value in _values(values)), paths, texts)
    targets = Targets(LoadOptions(), stored, is_dry=True)
    try:
        plan_parts(parts, targets)
        for name, part in parts.items():
            if isinstance(part, OptimizerState):
                part.check_groups(values[name])
            elif isinstance(part, PartState | PlainValue):
                _check_structure(stored.part(name), values[name])
    except CheckpointError as error:
        raise ConfigurationError(_refused(error.message)) from None
    targets.settle_missing()
    faults = [*targets.faults, *_of_refused_classes(values)]
    if targets.missing:
        faults.append(f"the program wants {shortened(targets.missing)}, which this save would not have")
    below = {value.name for name in parts for value in stored.part(name).values.values()}
    if left_over := sorted(below - targets.asked):
        faults.append(f"the program would have no place for {shortened(left_over)}")
    if faults:
        raise ConfigurationError(_refused("; ".join(faults[:5])))


def _of_refused_classes(values: Mapping[str, Any]) -> Iterator[str]:
    """Name tensors of the program's own classes that a load would refuse to make."""
    for name, value in _values(values):
        kind = type(value)
        is_own = isinstance(value, torch.Tensor) and kind.__module__.partition(".")[0] != "torch"
        if is_own and kind not in torch.serialization.get_safe_globals():
            yield (
                f"{name!r} is a {kind.__module__}.{kind.__qualname__}, which a load makes only after "
                "torch.serialization.add_safe_globals has declared the class"
            )


def _refused(reason: str) -> str:
    return f"the program that saves could not restore it: {reason}"


def _values(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        for path, leaf in leaves(value):
            yield name_of((name, *path)), leaf


def _stored(name: str, value: Any) -> StoredValue:
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
