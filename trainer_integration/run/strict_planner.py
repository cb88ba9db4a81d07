"""Load strictly: name every key that a checkpoint lacks, or has and nobody asks for."""

from __future__ import annotations

import bisect
import itertools
import logging
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import STORAGE_TYPES, BytesStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan

from ckpt.errors import LoadFailed
from ckpt.load_plans.local import local_plan

_logger = logging.getLogger(__name__)

_MAX_NAMES = 20


class NamingLoadPlanner(DefaultLoadPlanner):
    """Plan a load as DCP does, strict in both directions, or in none.

    Keys below a top-level name that is not in the state do not count: `model` alone can be loaded
    from a checkpoint that also holds an optimizer.

    Args:
        optional: top-level names that may be missing, also in part, or left over.
        optimizers: top-level names of states as `OptimizerState` has them. Where the checkpoint has
            nothing of a parameter, which had no gradient yet, they begin at zero.
    """

    fills_all = True  # `ckpt.reading.coverage` checks it

    def __init__(self, *, strict: bool, optional: Collection[str], optimizers: Collection[str]) -> None:
        super().__init__(allow_partial_load=True)
        self._strict, self._optional, self._optimizers = strict, optional, optimizers
        self.missing: tuple[str, ...] = ()  # keys that the checkpoint does not have

    def create_local_plan(self) -> LoadPlan:
        plan = local_plan(self)
        missing = sorted(self.state_dict.keys() - self._stored().keys())
        self.missing = tuple(fqn for fqn in missing if _top(fqn) not in self._optional)
        anew = self._not_begun()
        self._judge("the checkpoint lacks", sorted(set(self.missing).difference(anew)))
        if anew:
            _logger.warning("optimizer state that the checkpoint lacks begins at zero: %s", _some(anew))
        for fqn in anew:
            _zero(self.state_dict[fqn])
        return plan

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        # Of all ranks: each stage of a pipeline asks for its own part.
        asked = {item.dest_index.fqn for plan in global_plan for item in plan.items} | self.state_dict.keys()
        tops = self._tops(asked)
        self._judge_left_over(fqn for fqn in self._stored() if _top(fqn) in tops and fqn not in asked)
        return super().create_global_plan(global_plan)

    def bits_asked(self) -> tuple[int, ...]:
        """Return two numbers: which stored names this rank asks for, and which are below the same top names."""
        stored, own = self._stored(), self.state_dict.keys()
        tops = self._tops(own if self.is_coordinator else own & stored.keys())  # as DCP's plans tell it
        return _bits(fqn in own for fqn in stored), _bits(_top(fqn) in tops for fqn in stored)

    def judge_all(self, bits: Sequence[int]) -> None:
        """Name what no rank asks for."""
        asked, below = bits
        if left_over := below & ~asked:
            names = self._stored()
            self._judge_left_over(itertools.compress(names, _flags(left_over, len(names))))

    def _tops(self, fqns: Iterable[str]) -> set[str]:
        return {_top(fqn) for fqn in fqns}.difference(self._optional)

    def _judge_left_over(self, fqns: Iterable[str]) -> None:
        stored = self._stored()
        left_over = sorted(fqn for fqn in fqns if _holds(stored[fqn]))
        if self._strict or self.is_coordinator:  # one rank warns for all
            self._judge("the state lacks, and the checkpoint has,", left_over)

    def _not_begun(self) -> list[str]:
        """Find keys of parameters that have no optimizer state in a checkpoint where others do."""
        stored = sorted(self._stored())

        def has_below(*path: object) -> bool:
            prefix = "".join(f"{name}." for name in path)
            number = bisect.bisect(stored, prefix)
            return number < len(stored) and stored[number].startswith(prefix)

        def is_new(path: tuple[object, ...]) -> bool:
            of_optimizer = path[0] in self._optimizers and path[1:2] == ("state",)
            return of_optimizer and has_below(*path[:2]) and not has_below(*path[:3])

        return [fqn for fqn in self.missing if is_new(self.mappings[fqn])]

    def _stored(self) -> dict[str, STORAGE_TYPES]:
        assert self.metadata is not None  # DCP has set it by now
        return self.metadata.state_dict_metadata

    def _judge(self, fault: str, fqns: Collection[str]) -> None:
        if fqns and self._strict:
            raise LoadFailed(f"{fault} {_some(fqns)}; strict=False loads the rest")
        if fqns:
            _logger.warning("%s %s", fault, _some(fqns))


def _some(fqns: Collection[str]) -> str:
    more = f" and {len(fqns) - _MAX_NAMES} more" if len(fqns) > _MAX_NAMES else ""
    return f"{len(fqns)} key(s): {', '.join([*fqns][:_MAX_NAMES])}{more}"


def _zero(value: Any) -> None:
    if hasattr(value, "local_shards"):  # a tensor of FSDP1
        for shard in value.local_shards():
            shard.tensor.zero_()
    elif isinstance(value, torch.Tensor):
        value.zero_()


def _top(fqn: str) -> str:
    return fqn.partition(".")[0]


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
