"""Save and load the state of optimizers by the names of their parameters, without a step, and without a cast."""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ckpt.errors import ConfigurationError
from ckpt.format.fqns import Path
from ckpt.state import flat_parameters
from ckpt.state.canonical_names import without_fabric
from ckpt.state.model_state import ModelState
from ckpt.state.one_optimizer import WHOLE, OneOptimizer, parameters_of
from ckpt.state.optimizer_groups import (
    EXTRA,
    GROUPS,
    PARAMS,
    STATE,
    Name,
    homes_of,
    parameters_of_groups,
    stored_groups,
    stored_names,
)
from ckpt.state.parts import text_of_wrong_object
from ckpt.state.stored import StoredPart, StoredValue
from ckpt.state.structure import Structure, structure_of
from ckpt.state.targets import Targets, shortened

_ADAM_MOMENTS = 2

_FSDP1_BY_NUMBER = (
    "an optimizer of parameters that FSDP1 shards holds this rank's shards, and only its model tells of what: give both, "
    "as in training_state(model=model, optimizer=optimizer)"
)


class OptimizerState:
    """Save and load optimizers by parameter: names and structure are those of torch's `get_optimizer_state_dict`.

    For each parameter its state, whatever keys, types and shapes that has; for each group its options and the names
    of its parameters; and under `extra`, by the first parameter, what an optimizer's `state_dict` has beyond both.

    Args:
        model: whose canonical names the parameters have; None numbers them, as `Optimizer.state_dict` does.
        optimizer: one or several.

    Raises:
        ConfigurationError: not an optimizer.
    """

    kind = "optimizer"

    def __init__(
        self,
        model: ModelState | nn.Module | Sequence[nn.Module] | None,
        optimizer: Optimizer | Iterable[Optimizer],
    ) -> None:
        optimizers = [optimizer] if isinstance(optimizer, Optimizer) else optimizer
        if isinstance(optimizers, Mapping) or not isinstance(optimizers, Iterable):
            raise ConfigurationError(text_of_wrong_object("optimizer", "torch.optim.Optimizer", optimizer))
        optimizers = [without_fabric(each) for each in optimizers]
        if not all(isinstance(each, Optimizer) for each in optimizers):
            raise ConfigurationError(text_of_wrong_object("optimizer", "torch.optim.Optimizer", optimizer))
        self._model = model if isinstance(model, ModelState | None) else ModelState(model)
        if model is None and any(flat_parameters.are_shards(parameters_of(each)) for each in optimizers):
            raise ConfigurationError(_FSDP1_BY_NUMBER)
        self._optimizers = [OneOptimizer(self._model, each) for each in optimizers]
        self._part = StoredPart("")
        self._renamed: Callable[[str], str] = str

    # -- saving --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state, and change nothing. Raises ConfigurationError for a parameter without a name, or with two optimizers."""
        state: dict[str, Any] = {STATE: {}, GROUPS: []}
        seen: set[Name] = set()
        for own in self._own_states():
            _add_names(seen, own[GROUPS])
            state[STATE] |= own[STATE]
            state[GROUPS] += own[GROUPS]
            if own.get(EXTRA):
                state.setdefault(EXTRA, {}).update(own[EXTRA])
        return state

    def structures(self, value: Mapping[str, Any], name: str) -> dict[Path, Structure]:
        """Return what flattening loses, for each parameter, each group, and the rest."""
        found: dict[Path, Structure] = {}
        if any(isinstance(key, int) for key in value[STATE]):  # by number, which flattening turns into text
            found[()] = structure_of(value, name)
        else:
            for key, state in value[STATE].items():
                found[STATE, key] = structure_of(state, f"{name}.{STATE}.{key}")
            for number, group in enumerate(value[GROUPS]):
                found[GROUPS, number] = structure_of(group, f"{name}.{GROUPS}.{number}")
            for key, extra in value.get(EXTRA, {}).items():
                found[EXTRA, key] = structure_of(extra, f"{name}.{EXTRA}.{key}")
        return {unit: structure for unit, structure in found.items() if structure}

    def size_bytes(self) -> int:
        """Estimate the size; an optimizer that has no state yet counts as Adam."""
        total = 0
        for optimizer in (each.optimizer for each in self._optimizers):
            trained = [p for p in parameters_of(optimizer) if p.requires_grad]
            total += _tensor_bytes(optimizer.state) or _ADAM_MOMENTS * _tensor_bytes(trained)
        models = [] if self._model is None else self._model.fsdp_models
        return flat_parameters.shards(models[0]) * total if models else total

    def _own_states(self) -> list[dict[str, Any]]:
        with self._names_kept():
            return [each.state() for each in self._optimizers]

    def _names_kept(self) -> contextlib.AbstractContextManager[None]:
        """Ask the model for its names once: there may be an optimizer for each parameter."""
        return contextlib.nullcontext() if self._model is None else self._model.names.unchanged()

    # -- loading -------------------------------------------------------------------------------------------

    def plan(self, part: StoredPart, targets: Targets) -> None:
        """Ask for all that is stored of the parameters of this rank."""
        self._part = part
        self._renamed = targets.stored.renamed
        for path, value in part.values.items():
            # Options of groups are few, and each rank finds its own among them.
            if path[:1] == (GROUPS,):
                if value.shape is None:
                    targets.object(value)
                else:
                    targets.as_stored(value)
        stored: dict[Name, dict[Path, StoredValue]] = defaultdict(dict)
        for path, value in part.values.items():
            if path[:1] == (STATE,) and len(path) > 1:
                stored[path[1]][path[2:]] = value
        for path in part.nodes:  # a state that holds nothing
            if path[:1] == (STATE,) and len(path) == 2:
                stored[path[1]]
        known = {path[0] for path in [*part.values, *part.nodes] if path}
        if not known and self._optimizers:
            targets.missing.append(part.name)
        elif known and not known & {GROUPS, EXTRA}:
            targets.faults.append(
                f"{part.name!r} has no param_groups in the checkpoint: it is no state of an optimizer"
            )
        with self._names_kept():
            for each in self._optimizers:
                _replace(each.optimizer, targets.replaced)
            for each in self._optimizers:
                each.plan(part, stored, targets)
            if groups := parameters_of_groups(part, targets.objects, self._renamed):
                for each in self._optimizers:
                    each.match(groups)

    def take(self, values: Mapping[str, Any]) -> None:
        """Set the optimizers to what was loaded."""
        groups = stored_groups(self._part, values, self._renamed)
        with self._names_kept():
            for each in self._optimizers:
                each.take(values, groups)

    def live(self) -> dict[str, Any]:
        """Return the optimizers' values by the stored names of the last load; what was not stored by that of a save."""
        found: dict[str, Any] = {}
        for each, own in zip(self._optimizers, self._own_states(), strict=True):
            found |= each.live(own)
        return found

    def check_groups(self, state: Mapping[str, Any]) -> None:
        """Check that the groups of a state are found by their parameters. Raises LoadFailed."""
        whole = {name for name, extra in state.get(EXTRA, {}).items() if WHOLE in extra}
        for each in self._optimizers if state[GROUPS] else ():
            by_group = each.names_by_group()
            if not whole & {str(name) for name in itertools.chain(*by_group)}:
                homes_of(by_group, state[GROUPS], self._model)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the optimizers to a state as `state_dict` gives it."""
        for each in self._optimizers:
            names = [*itertools.chain(*each.names_by_group())]
            found = stored_names(self._model, state[STATE], names)
            own = {name: state[STATE][stored] for name, stored in found.items()}
            extra = state.get(EXTRA, {})
            known = stored_names(self._model, extra, [*map(str, names)])
            each.set(own, state[GROUPS], extra[next(iter(known.values()))] if known else {})


def _replace(optimizer: Optimizer, replaced: Mapping[int, nn.Parameter]) -> None:
    """Let an optimizer that was made of parameters on the meta device hold those in their place."""
    if replaced:
        for group in optimizer.param_groups:
            # In the same list: LBFGS has another name for it.
            group[PARAMS][:] = [replaced.get(id(parameter), parameter) for parameter in group[PARAMS]]


def _tensor_bytes(values: Any) -> int:
    if isinstance(values, torch.Tensor):
        return values.numel() * values.element_size()
    if isinstance(values, Mapping):
        return sum(map(_tensor_bytes, values.values()))
    return sum(map(_tensor_bytes, values)) if isinstance(values, list | tuple) else 0


def _add_names(seen: set[Name], groups: Iterable[Mapping[str, Any]]) -> None:
    """Note the parameters of an optimizer. Raises ConfigurationError if another one has them too."""
    names = {name for group in groups for name in group[PARAMS]}
    if twice := seen & names:
        raise ConfigurationError(
            f"several optimizers have {shortened(sorted(map(str, twice)))}, and the state of one would stand for all: "
            "save each as a part of its own, as in training_state(model=model, first=..., second=...)"
        )
    seen |= names
