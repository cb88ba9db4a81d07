"""Plan a load from the checkpoint's side: it says what there is, the program says where it belongs."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ckpt.errors import LoadFailed
from ckpt.load_plans.local import local_plan
from ckpt.options import LoadOptions
from ckpt.state.model_state import ModelState
from ckpt.state.optimizer_state import OptimizerState
from ckpt.state.per_rank import PerRank, own_part, rank_and_world_size
from ckpt.state.random_state import RandomState
from ckpt.state.state_parts import Part, each_part, model_of, part_of, sorted_names, with_members
from ckpt.state.stored import StoredPart, StoredState, rename_by, structure_names
from ckpt.state.targets import Region, Targets, shortened
from ckpt.torch_private import ShardedTensor, flatten_sharded_tensors
from ckpt.words import printable

_logger = logging.getLogger(__name__)

_MAX_FAULTS = 20


class StateLoadPlanner(DefaultLoadPlanner):
    """Load into the parts of a state dict what the checkpoint has of them.

    Args:
        options: of the load.
        restores: the program's own run is restored: parts that are not asked for are named as a warning.
        records: digests of all that is delivered are kept in `delivered`, for a certificate.
        restored_apart: parts that something else restores, such as tables of rows.
        as_dcp: the load is a call of `dcp.load`, which has no options: what the program has no place for is left out.
    """

    fills_all = True  # `ckpt.reading.coverage` checks it

    def __init__(
        self,
        options: LoadOptions | None = None,
        *,
        restores: bool = False,
        records: bool = False,
        restored_apart: Collection[str] = (),
        as_dcp: bool = False,
    ) -> None:
        super().__init__(flatten_state_dict=False, allow_partial_load=True)
        self.options = options or LoadOptions()
        self._restores = restores
        self._elsewhere = frozenset({"rng", *restored_apart})
        self._as_dcp = as_dcp
        self.records = records
        self._parts: dict[str, Part] = {}
        self._targets: Targets | None = None
        self.delivered: Any = None
        self.missing: tuple[str, ...] = ()
        self.left_over: tuple[str, ...] = ()
        self._dense: dict[str, str] = {}  # a tensor of each class whose shards are cut otherwise here

    @property
    def targets(self) -> Targets:
        assert self._targets is not None, "targets_for has not been called"
        return self._targets

    def targets_for(
        self, state_dict: dict[str, Any], metadata: Metadata, texts: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the targets of a state dict, by stored name.

        Raises LoadFailed, which names all of them, for names and shapes that do not fit.
        """
        if any(part.is_meta for part in _parts_of(state_dict).values() if isinstance(part, ModelState)):
            self.plan_dry(state_dict, metadata, texts)  # a model that is refused stays on the meta device
            self._judge()
        self._plan(state_dict, metadata, texts)
        self._judge()
        for note in self.targets.notes:
            _logger.info("%s", note)
        if self.missing:
            _logger.warning("the checkpoint lacks %s", shortened(self.missing))
        return self.targets.values

    def read_before(self, metadata: Metadata) -> list[str]:
        """List the objects that are read before the plan: what flattening lost. Most checkpoints have none."""
        return structure_names(metadata)

    def plan_dry(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata,
        texts: Mapping[str, Any],
        objects: Mapping[str, Any] | None = None,
    ) -> None:
        """Compare names alone: nothing is going to be loaded. `objects` were read before."""
        self._plan(state_dict, metadata, texts, is_dry=True, objects=objects)

    def _plan(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata,
        texts: Mapping[str, Any],
        *,
        is_dry: bool = False,
        objects: Mapping[str, Any] | None = None,
    ) -> None:
        self.metadata = metadata
        stored = StoredState.of(metadata, texts, rename_by(self.options.rename))
        self._targets = targets = Targets(self.options, stored, is_dry=is_dry, objects=objects or {})
        self._parts = _parts_of(state_dict, stored)
        plan_parts(self._parts, targets)
        targets.settle_missing()
        self.missing = tuple(targets.missing)

    def _judge(self) -> None:
        """Refuse what this rank finds. Left-over names alone are for all ranks to judge, as soon as all have planned."""
        _, size = rank_and_world_size()
        faults = self.targets.faults
        if faults or self.missing or (self.targets.is_dry and size == 1):
            left_over = self._holding({*self._below()} - self.targets.asked)
            self._refuse(left_over, "the program" if size == 1 else "this rank", faults)

    def _refuse(self, left_over: Sequence[str], who: str = "the program", faults: Sequence[str] = ()) -> None:
        """Raise LoadFailed for `faults`, and for names that only one side has, if the options want all."""
        is_strict = self.options.strict is not False
        missing = self.missing if is_strict else ()
        left_over = left_over if is_strict and not self._as_dcp else ()
        if not (faults or missing or left_over):
            return
        texts = [*faults[:_MAX_FAULTS]]
        if len(faults) > _MAX_FAULTS:
            texts.append(f"and {len(faults) - _MAX_FAULTS} more")
        if missing:
            texts.append(f"the checkpoint lacks {shortened(missing)}")
        if left_over:
            texts.append(f"{who} has no place for {shortened(left_over)}, which the checkpoint has")
        text = "; ".join(texts)
        if not self._as_dcp:
            others = self.targets.stored.names.keys() - self.targets.asked
            text += _advice(missing, others)
            if self.targets.can_resize:
                text += "; on_shape='resize' of LoadOptions loads the part that both have"
            if missing or left_over:
                text += "; strict=False loads the rest" if missing else "; strict=False leaves them out"
        raise LoadFailed(text)

    def live(self) -> dict[str, Any]:
        """Return the program's values by their stored names, as they are now."""
        found: dict[str, Any] = {}
        for part in self._parts.values():
            found |= part.live()
        return found

    def copy_casts(self) -> None:
        """Check and copy what was loaded in another dtype or shape than the program has."""
        for name, live in self.targets.in_program.items():
            self.state_dict[name] = self.targets.values[name] = live  # not the buffer, which the copy frees
        self.targets.after.reverse()
        while self.targets.after:  # each is dropped, with what it holds, as soon as it is done
            self.targets.after.pop()()
        self.state_dict |= self.targets.in_program  # also what turned out to be one tensor with another

    def put_back(self) -> None:
        """Give the loaded values to the parts, and keep none of them."""
        values = self.targets.values | self.state_dict
        for kind, name in self._dense.items():
            message = (
                "%r and others were saved in shards of the class %s, and are dense in shards cut otherwise"
            )
            _logger.warning(message, name, kind)
        each_part({name: partial(part.take, values) for name, part in self._parts.items()})
        self.targets.forget_values()
        self.state_dict = {}
        self.original_state_dict = {}

    # -- what DCP calls ------------------------------------------------------------------------------------

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.original_state_dict = state_dict
        is_nested = any(isinstance(value, ShardedTensor) for value in state_dict.values())
        self.state_dict = flatten_sharded_tensors(state_dict) if is_nested else dict(state_dict)
        self.mappings = {}
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        value: Any = self.state_dict[index.fqn]
        return (
            value.__get_tensor_shard__(index) if isinstance(value, Region) else super().lookup_tensor(index)
        )

    def take_tensor(self, item: ReadItem, tensor: torch.Tensor) -> bool:
        """Take a tensor of a class of its own, such as one of few bits, in place of a target that was made for it.

        On another sharding the target stays, and gets its values.
        """
        name = item.dest_index.fqn
        made = self.state_dict[name] if name in self.targets.made else None
        if type(tensor) is torch.Tensor or not isinstance(made, torch.Tensor):
            return False
        local = made.to_local() if isinstance(made, DTensor) else made
        if tensor.size() != local.size():
            self._dense.setdefault(type(tensor).__name__, name)
            return False
        if isinstance(made, DTensor):
            layout = made.device_mesh, made.placements
            tensor = DTensor.from_local(
                tensor, *layout, run_check=False, shape=made.size(), stride=made.stride()
            )
        self.state_dict[name] = tensor
        return True

    def create_local_plan(self) -> LoadPlan:
        return local_plan(self)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        asked = {item.dest_index.fqn for plan in global_plan for item in plan.items} | self.targets.asked
        parts = self.targets.stored.parts.values()
        own = [{value.name for value in part.values.values()} for part in parts]
        self._judge_left_over({*self._below()}.union(*(names for names in own if names & asked)), asked)
        return super().create_global_plan(global_plan)

    def bits_asked(self) -> tuple[int, ...]:
        """Return two numbers: which stored names this rank asks for, and which are below the parts it asks for."""
        asked, below = self.targets.asked, set(self._below())
        names = self._stored()
        return _bits(name in asked for name in names), _bits(name in below for name in names)

    def judge_all(self, bits: Sequence[int]) -> None:
        """Name what no rank asks for: each stage of a pipeline asks for its own part."""
        names = self._stored()
        asked, below = ({*itertools.compress(names, _flags(each, len(names)))} for each in bits)
        self._judge_left_over(below, asked)
        if self.is_coordinator:
            self._name_others()

    def _below(self) -> list[str]:
        """List the stored names of the parts that this rank asks for."""
        stored = self.targets.stored
        return [value.name for name in self._parts for value in stored.part(name).values.values()]

    def _judge_left_over(self, below: set[str], asked: set[str]) -> None:
        others = (part for name, part in self.targets.stored.parts.items() if name not in self._elsewhere)
        every = {value.name for part in others for value in part.values.values()}
        self.left_over = tuple(sorted(every - asked))
        left_over = self._holding(below - asked)
        self._refuse(left_over)
        if left_over and self.is_coordinator:
            text = shortened(left_over)
            _logger.warning("the program has no place for %s, which the checkpoint has", text)

    def _holding(self, names: Iterable[str]) -> list[str]:
        """Sort names of which there is anything to read: a tensor without elements is never asked for."""
        stored = self._stored()
        return sorted(name for name in names if _holds(stored[name]))

    def _name_others(self) -> None:
        others = sorted(
            name
            for name, part in self.targets.stored.parts.items()
            if name not in self._elsewhere
            and name not in self._parts
            and not any(value.name in self.targets.asked for value in part.values.values())
        )
        if not others:
            return
        level = logging.WARNING if self._restores else logging.INFO
        shown = ", ".join(map(printable, others[:10]))
        shown += f" and {len(others) - 10} more" if len(others) > 10 else ""
        _logger.log(level, "the checkpoint has more, which is not asked for: %s", shown)

    def _stored(self) -> dict[str, STORAGE_TYPES]:
        assert self.metadata is not None  # it is set by now
        return self.metadata.state_dict_metadata


def plan_parts(parts: Mapping[str, Part], targets: Targets) -> None:
    """Ask for all parts: models first, whose parameters say how the rest is sharded."""

    def plan(name: str, part: Part) -> None:
        stored = targets.stored.part(name)
        if not isinstance(part, PerRank | RandomState):
            stored = own_part(stored, targets)
        part.plan(stored, targets)
        if isinstance(part, ModelState):
            targets.likes.update(part.parameters())

    order = sorted(parts, key=lambda name: not isinstance(parts[name], ModelState))
    each_part({name: partial(plan, name, parts[name]) for name in order})


def _parts_of(state_dict: dict[str, Any], stored: StoredState | None = None) -> dict[str, Part]:
    """Take a state dict apart. An optimizer whose stored state is by name has a model of the same state dict, if one fits."""
    members = with_members(state_dict)
    parts = {name: part_of(name, members[name], state_dict) for name in sorted_names(members)}
    if stored is not None:
        for name, value in members.items():
            if isinstance(value, Optimizer) and not _is_numbered(stored.part(name)):
                parts[name] = OptimizerState(model_of(value, parts), value)
    return parts


def _is_numbered(part: StoredPart) -> bool:
    """Tell whether a state of an optimizer is by the numbers of its parameters."""
    keys = {path[1] for path in part.values if path[:1] in (("state",), ("extra",)) and len(path) > 1}
    return bool(keys) and all(str(key).isdecimal() for key in keys)


def _advice(missing: Sequence[str], others: Collection[str]) -> str:
    """Suggest the prefix under which the checkpoint has what is missing; `others` are the names that are not asked for."""
    if not missing:
        return ""
    first = min(missing, key=len)
    seen = set[tuple[str, str]]()
    for name in sorted(others, key=lambda other: (-_common_keys(first, other), other)):
        common = _common_keys(first, name)
        if not common:
            break
        tail = ".".join(first.split(".")[-common:])
        old = name.removesuffix(tail)
        new = first.removesuffix(tail)
        if (old, new) in seen:
            continue
        seen.add((old, new))
        below = [own for own in missing if own.startswith(new)]
        # A last key alone, such as `weight`, is that of many.
        is_clear = common > 1 or len(below) > 1 or "." not in first
        if is_clear and all(old + own.removeprefix(new) in others for own in below):
            return f"; the checkpoint has {name!r}: LoadOptions(rename={{{old!r}: {new!r}}}) may be meant"
    return ""


def _common_keys(some: str, other: str) -> int:
    """Count the keys, from the last one on, that two names have in common."""
    pairs = zip(reversed(some.split(".")), reversed(other.split(".")), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _bits(flags: Iterable[bool]) -> int:
    packed = np.packbits(np.fromiter(flags, dtype=np.bool_), bitorder="little")
    return int.from_bytes(packed.tobytes(), "little")


def _flags(bits: int, count: int) -> list[int]:
    data = np.frombuffer(bits.to_bytes(-(-count // 8), "little"), dtype=np.uint8)
    flags: list[int] = np.unpackbits(data, count=count, bitorder="little").tolist()
    return flags


def _holds(description: object) -> bool:
    """Tell whether there is anything to read: a tensor without elements is never asked for."""
    return isinstance(description, BytesStorageMetadata) or 0 not in getattr(description, "size", ())
