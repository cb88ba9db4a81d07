"""Plan a load from the checkpoint's side: it says what there is, the program says where it belongs."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
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

from ckpt.errors import LoadFailed
from ckpt.load_plans.local import local_plan
from ckpt.options import LoadOptions
from ckpt.state.model_state import ModelState
from ckpt.state.parts import PlainValue
from ckpt.state.per_rank import PerRank, own_part
from ckpt.state.random_state import RandomState
from ckpt.state.state_parts import Part, part_of, sorted_names
from ckpt.state.stored import StoredState, rename_by
from ckpt.state.targets import Region, Targets, shortened
from ckpt.torch_private import ShardedTensor, flatten_sharded_tensors

_logger = logging.getLogger(__name__)


class StateLoadPlanner(DefaultLoadPlanner):
    """Load into the parts of a state dict what the checkpoint has of them.

    Args:
        options: of the load.
        restores: the program's own run is restored: parts that are not asked for are named as a warning.
        records: digests of all that is delivered are kept in `delivered`, for a certificate.
        takes_any_plain: as for DCP, a plain dict of the caller's need not have all that the checkpoint has of it.
    """

    fills_all = True  # `ckpt.reading.coverage` checks it

    def __init__(
        self,
        options: LoadOptions | None = None,
        *,
        restores: bool = False,
        records: bool = False,
        takes_any_plain: bool = False,
    ) -> None:
        super().__init__(flatten_state_dict=False, allow_partial_load=True)
        self.options = options or LoadOptions()
        self._restores, self._takes_any_plain = restores, takes_any_plain
        self.records = records
        self._parts: dict[str, Part] = {}
        self._targets: Targets | None = None
        self.delivered: Any = None
        self.missing: tuple[str, ...] = ()
        self.left_over: tuple[str, ...] = ()

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
        stored = StoredState.of(metadata, texts, rename_by(self.options.rename))
        self._targets = targets = Targets(self.options, stored)
        self._plan(state_dict, targets)
        self._judge(targets)
        return targets.values

    def plan_dry(self, state_dict: dict[str, Any], metadata: Metadata, texts: Mapping[str, Any]) -> None:
        """Compare names alone: nothing is going to be loaded."""
        stored = StoredState.of(metadata, texts, rename_by(self.options.rename))
        self._targets = Targets(self.options, stored, is_dry=True)
        self._plan(state_dict, self._targets)

    def _plan(self, state_dict: dict[str, Any], targets: Targets) -> None:
        self._parts = {name: part_of(name, state_dict[name], state_dict) for name in sorted_names(state_dict)}
        plan_parts(self._parts, targets)
        if self._takes_any_plain:
            plain = [name for name, part in self._parts.items() if isinstance(part, PlainValue)]
            targets.asked |= {
                each.name for name in plain for each in targets.stored.part(name).values.values()
            }
        targets.settle_missing()
        self.missing = tuple(targets.missing)

    def _judge(self, targets: Targets) -> None:
        if targets.faults:
            more = f"; and {len(targets.faults) - 5} more" if len(targets.faults) > 5 else ""
            raise LoadFailed("; ".join(targets.faults[:5]) + more)
        if targets.missing:
            text = f"the checkpoint lacks {shortened(targets.missing)}"
            if self.options.strict is not False:
                raise LoadFailed(
                    f"{text}{_advice(targets.missing, targets.stored)}; strict=False loads the rest"
                )
            _logger.warning("%s", text)
        for note in targets.notes:
            _logger.info("%s", note)

    def not_asked(self) -> tuple[str, ...]:
        """Return the stored names that have no place in the program, of parts that it does not ask for too."""
        parts = [part for name, part in self.targets.stored.parts.items() if name != "rng"]
        names = {value.name for part in parts for value in part.values.values()}
        return tuple(sorted(names - self.targets.asked))

    def live(self) -> dict[str, Any]:
        """Return the program's values by their stored names, as they are now."""
        found: dict[str, Any] = {}
        for part in self._parts.values():
            found |= part.live()
        return found

    def put_back(self) -> None:
        """Give the loaded values to the parts."""
        for then in self.targets.after:
            then()
        values = self.targets.values | self.state_dict | self.targets.in_program
        for part in self._parts.values():
            part.take(values)

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
        """Take a tensor of a class of its own, such as one of few bits, in place of a target that was made for it."""
        name = item.dest_index.fqn
        if (
            type(tensor) is torch.Tensor
            or name not in self.targets.made
            or not isinstance(self.state_dict[name], torch.Tensor)
        ):
            return False
        self.state_dict[name] = tensor
        return True

    def create_local_plan(self) -> LoadPlan:
        return local_plan(self)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        asked = {item.dest_index.fqn for plan in global_plan for item in plan.items} | self.targets.asked
        parts = self.targets.stored.parts.values()
        own = [{value.name for value in part.values.values()} for part in parts]
        below = itertools.chain(self._below(), *(names for names in own if names & asked))
        self._judge_left_over({*below} - asked)
        return super().create_global_plan(global_plan)

    def bits_asked(self) -> tuple[int, ...]:
        """Return two numbers: which stored names this rank asks for, and which are below the parts it asks for."""
        asked, below = self.targets.asked, set(self._below())
        names = self._stored()
        return _bits(name in asked for name in names), _bits(name in below for name in names)

    def judge_all(self, bits: Sequence[int]) -> None:
        """Name what no rank asks for: each stage of a pipeline asks for its own part."""
        asked, below = bits
        names = self._stored()
        if left_over := below & ~asked:
            self._judge_left_over(itertools.compress(names, _flags(left_over, len(names))))
        if self.is_coordinator:
            self._name_others()

    def _below(self) -> list[str]:
        """List the stored names of the parts that this rank asks for."""
        stored = self.targets.stored
        return [value.name for name in self._parts for value in stored.part(name).values.values()]

    def _judge_left_over(self, names: Iterable[str]) -> None:
        stored = self._stored()
        left_over = sorted(name for name in names if _holds(stored[name]))
        if not left_over:
            return
        self.left_over = tuple(left_over)
        text = f"the program has no place for {shortened(left_over)}, which the checkpoint has"
        if self.options.strict is not False:
            raise LoadFailed(
                f"{text}{_advice_for_left(left_over, self.targets)}; strict=False leaves them out"
            )
        if self.is_coordinator:
            _logger.warning("%s", text)

    def _name_others(self) -> None:
        others = sorted(
            name
            for name, part in self.targets.stored.parts.items()
            if name != "rng"
            and name not in self._parts
            and not any(value.name in self.targets.asked for value in part.values.values())
        )
        if not others:
            return
        level = logging.WARNING if self._restores else logging.INFO
        shown = ", ".join(others[:10]) + (f" and {len(others) - 10} more" if len(others) > 10 else "")
        _logger.log(level, "the checkpoint has more, which is not asked for: %s", shown)

    def _stored(self) -> dict[str, STORAGE_TYPES]:
        assert self.metadata is not None  # it is set by now
        return self.metadata.state_dict_metadata


def plan_parts(parts: Mapping[str, Part], targets: Targets) -> None:
    """Ask for all parts: models first, whose parameters say how the rest is sharded."""
    order = sorted(parts, key=lambda name: not isinstance(parts[name], ModelState))
    for name in order:
        part, stored = parts[name], targets.stored.part(name)
        if not isinstance(part, PerRank | RandomState):
            stored = own_part(stored, targets)
        part.plan(stored, targets)
        if isinstance(part, ModelState):
            targets.likes.update(part.parameters())


def _advice(missing: Collection[str], stored: StoredState) -> str:
    """Suggest the prefix under which the checkpoint has what is missing."""
    first = min(missing, key=len)
    for begin in range(first.count(".") + 1):
        tail = first.split(".", begin)[-1]
        if "." not in tail and "." in first:
            break  # a last key alone, such as `weight`, is that of many
        for name in stored.names:
            if name != first and (name == tail or name.endswith(f".{tail}")):
                old, new = name[: -len(tail)], first[: -len(tail)]
                return f"; the checkpoint has {name!r}: LoadOptions(rename={{{old!r}: {new!r}}}) may be meant"
    return ""


def _advice_for_left(left_over: Sequence[str], targets: Targets) -> str:
    for name in left_over:
        tail = name.partition(".")[2]
        for own in targets.missing:
            if tail and own.endswith(f".{tail.rpartition('.')[2]}"):
                return f"; the program has {own!r}: LoadOptions(rename=...) gives names of the program"
    return ""


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
