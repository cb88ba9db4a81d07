"""Match the groups of an optimizer with those of a checkpoint, by the names of their parameters."""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from ckpt.errors import LoadFailed
from ckpt.format.fqns import paths_of
from ckpt.state.canonical_names import without_wrappers
from ckpt.state.model_state import ModelState
from ckpt.state.stored import StoredPart
from ckpt.state.structure import build
from ckpt.state.targets import shortened

_logger = logging.getLogger(__name__)

STATE = "state"
GROUPS = "param_groups"
PARAMS = "params"
EXTRA = "extra"

_LABELS = "param_names"
BY_PARAMETER = {PARAMS, _LABELS}
"""What a group has of each parameter, in their order."""

Name = str | int


def homes_of(
    by_group: Sequence[Sequence[Name]], groups: Sequence[Mapping[str, Any]], model: ModelState | None
) -> list[list[int]]:
    """Find the stored groups of each group by its parameters. Raises LoadFailed, which names them, if it has none."""
    homes: dict[Name, int] = {}
    for number, group in enumerate(groups):
        for name in group.get(PARAMS, ()):
            homes.setdefault(name, number)
    known = stored_names(model, homes, [*itertools.chain(*by_group)])
    found: list[list[int]] = []
    for own in by_group:
        lost = [str(name) for name in own if name not in known]
        if lost and groups:
            raise LoadFailed(
                f"the checkpoint has no group of the optimizer for {shortened(lost)}: make the optimizer of the "
                "parameters that it had when it was saved, or leave it out of the restore"
            )
        found.append(sorted({homes[known[name]] for name in own if name in known}))
    # One without parameters is found by its place among those of its optimizer, or else in order.
    empty = [number for number, group in enumerate(groups) if not group.get(PARAMS)]
    for place in [place for place, own in enumerate(by_group) if not own]:
        by_place = [
            numbers[0] + place - other for other, numbers in enumerate(found) if by_group[other] and numbers
        ]
        found[place] = [number for number in [*by_place, *empty] if number in empty][:1]
        empty = [number for number in empty if number not in found[place]]
    return found


def matched(
    by_group: Sequence[Sequence[Name]],
    groups: Sequence[Mapping[str, Any]],
    homes: Sequence[Sequence[int]],
    model: ModelState | None,
) -> list[dict[str, Any]]:
    """Return the stored options of each group. Raises LoadFailed if its parameters had several."""
    labels: dict[Name, str] = {}
    for group in groups:
        if len(group.get(_LABELS, ())) == len(group.get(PARAMS, ())):
            labels |= zip(group.get(PARAMS, ()), group.get(_LABELS, ()), strict=True)
    known = stored_names(model, labels, [*itertools.chain(*by_group)]) if labels else {}
    chosen = []
    for own, numbers in zip(by_group, homes, strict=True):
        # Groups that were one get tensors of their own, which the program may change one by one.
        options = copy.deepcopy(_common_options([groups[number] for number in numbers], own))
        if own and known.keys() >= {*own}:
            options[_LABELS] = [labels[known[name]] for name in own]
        chosen.append(options)
    return chosen


def stored_names(
    model: ModelState | None, stored: Mapping[Name, Any], names: Sequence[Name]
) -> dict[Name, Name]:
    """Find the stored name of each parameter: its own, another one of its, or one of an older checkpoint."""
    found: dict[Name, Name] = {}
    same = {} if model is None else model.same_tensors()
    older: dict[str, Name] | None = None
    numbers = {str(name): name for name in stored} if all(str(name).isdecimal() for name in stored) else {}
    taken = {*names}  # each of these is a parameter of its own
    for number, name in enumerate(names):
        known: Name | None = name
        if name not in stored:
            if older is None:  # only now: nearly always all are found
                older = {without_wrappers(each): each for each in stored if isinstance(each, str)}
            tries: list[Name] = [*same.get(str(name), ()), older.get(str(name), name)]
            tries.append(numbers.get(str(number), name))  # numbered, as Optimizer.state_dict has it
            known = next((each for each in tries if each in stored and each not in taken), None)
        if known is not None:
            found[name] = known
    return found


def stored_groups(
    part: StoredPart, values: Mapping[str, Any], renamed: Callable[[str], str]
) -> list[dict[str, Any]]:
    """Return the stored groups, with the names that their parameters have in the program."""
    found = {path: values[value.name] for path, value in part.below((GROUPS,)).items()}
    groups = build(found, part.structure((GROUPS,)), None, f"{part.name}.{GROUPS}")
    if not isinstance(groups, list):
        return []
    above = f"{part.name}.{STATE}."
    for group in groups:
        names = group.get(PARAMS, ())
        group[PARAMS] = [_renamed(name, above, renamed) for name in names]
    return groups


def names_in_groups(metadata: Metadata) -> list[str]:
    """List the stored names of the objects that hold the names of each group's parameters."""
    paths = paths_of(metadata.planner_data)
    return sorted(
        name
        for name in metadata.state_dict_metadata
        if len(path := paths.get(name, ())) == 4 and (path[1], path[3]) == (GROUPS, PARAMS)
    )


def parameters_of_groups(
    part: StoredPart, objects: Mapping[str, Any], renamed: Callable[[str], str]
) -> list[dict[str, Any]]:
    """Return the names that the parameters of each stored group have in the program; nothing if they were not read."""
    stored = part.below((GROUPS,))
    found = {path[0]: objects.get(value.name) for path, value in stored.items() if path[1:] == (PARAMS,)}
    above = f"{part.name}.{STATE}."
    groups = []
    for number in range(len(found)):
        names = found.get(number)
        if not isinstance(names, list) or not all(isinstance(name, str | int) for name in names):
            return []
        groups.append({PARAMS: [_renamed(name, above, renamed) for name in names]})
    return groups


def _renamed(name: Any, above: str, renamed: Callable[[str], str]) -> Any:
    return renamed(above + name).removeprefix(above) if isinstance(name, str) else name


def _common_options(groups: Sequence[Mapping[str, Any]], names: Sequence[Name]) -> dict[str, Any]:
    """Return the options that several stored groups agree on. Raises LoadFailed if they do not."""
    if not groups:
        return {}
    first = _options(groups[0])
    for other in groups[1:]:
        options = _options(other)
        differing = sorted(
            key for key in first.keys() | options.keys() if not equal(first.get(key), options.get(key))
        )
        if differing:
            raise LoadFailed(
                f"a group of the optimizer holds parameters that were in groups with other {', '.join(differing)}: "
                f"{shortened([*map(str, names)])}; divide the parameters into groups as they were when they were saved"
            )
    return first


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in BY_PARAMETER}


def equal(some: Any, other: Any) -> bool:
    if isinstance(some, torch.Tensor) and isinstance(other, torch.Tensor):
        return some.shape == other.shape and bool((some == other).all())
    return type(some) is type(other) and bool(some == other)


def note_options(group: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Say which options only the checkpoint or only the program has."""
    new = sorted(map(str, options.keys() - group.keys()))
    gone = sorted(map(str, group.keys() - options.keys() - BY_PARAMETER))
    if new:
        _logger.info(
            "a group of the optimizer gets options that the program does not set: %s", ", ".join(new)
        )
    if gone and options:
        _logger.warning(
            "the checkpoint has no options %s of the optimizer: the program's stay", ", ".join(gone)
        )
