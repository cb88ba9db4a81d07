"""Loading that names every key that is missing in a checkpoint, or that it has and nobody asks for."""

from __future__ import annotations

import bisect
import logging
from collections.abc import Collection
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.planner import LoadPlan

from ckpt.errors import LoadFailed

__all__ = ["NamingLoadPlanner"]

_logger = logging.getLogger(__name__)

_MAX_NAMES = 20


class NamingLoadPlanner(DefaultLoadPlanner):
    """DCP's planner, strict in both directions, or in none.

    Keys below a top-level name that is not in the state are of no concern: who asks for `model` gets it from a
    checkpoint that also holds an optimizer.

    Args:
        strict: a key that is missing, or left over, is an error; otherwise it keeps its value, or is left out.
        optional: top-level names that may be missing, also in part, or left over.
        optimizers: top-level names of states as `OptimizerState` has them. What they hold for a parameter of which
            the checkpoint has nothing is set to zero: the parameter had got no gradient yet when it was saved.
    """

    def __init__(
        self, *, strict: bool, optional: Collection[str] = (), optimizers: Collection[str] = ()
    ) -> None:
        super().__init__(allow_partial_load=True)
        self._strict, self._optional, self._optimizers = strict, frozenset(optional), frozenset(optimizers)
        self.missing: tuple[str, ...] = ()

    def create_local_plan(self) -> LoadPlan:
        plan = super().create_local_plan()
        missing = sorted(self.state_dict.keys() - self._stored().state_dict_metadata.keys())
        self.missing = tuple(fqn for fqn in missing if _top(fqn) not in self._optional)
        anew = self._not_begun(self.missing)
        self._judge("the checkpoint lacks", [fqn for fqn in self.missing if fqn not in anew])
        if anew:
            _logger.warning(
                "the checkpoint has no optimizer state, which begins at zero, for %s", _some(sorted(anew))
            )
            for fqn in anew:
                _zero(self.state_dict[fqn])
        return plan

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        # Of all ranks: each stage of a pipeline asks for its own part.
        asked = {item.dest_index.fqn for plan in global_plan for item in plan.items} | self.state_dict.keys()
        tops = {_top(fqn) for fqn in asked} - self._optional
        stored = self._stored().state_dict_metadata
        left_over = [fqn for fqn in stored if _top(fqn) in tops and fqn not in asked]
        self._judge(
            "the state lacks, and the checkpoint has,", sorted(f for f in left_over if _holds(stored[f]))
        )
        return super().create_global_plan(global_plan)

    def _not_begun(self, missing: Collection[str]) -> set[str]:
        """The keys of parameters of which the optimizer had nothing to save, though it had of others."""
        stored = sorted(self._stored().state_dict_metadata)

        def has_below(*path: object) -> bool:
            prefix = "".join(f"{name}." for name in path)
            place = bisect.bisect(stored, prefix)
            return place < len(stored) and stored[place].startswith(prefix)

        found: set[str] = set()
        for fqn in missing:
            path = self.mappings[fqn]
            of_optimizer = path[0] in self._optimizers and path[1:2] == ("state",)
            if of_optimizer and has_below(*path[:2]) and not has_below(*path[:3]):
                found.add(fqn)
        return found

    def _stored(self) -> Metadata:
        assert self.metadata is not None  # DCP has set it by now
        return self.metadata

    def _judge(self, what: str, fqns: Collection[str]) -> None:
        if not fqns:
            return
        text = f"{what} {_some(fqns)}"
        if self._strict:
            raise LoadFailed(f"{text}; strict=False loads the rest")
        _logger.warning("%s", text)


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


def _holds(description: object) -> bool:
    """Whether there is anything to ask for: nobody reads a tensor without elements."""
    return isinstance(description, BytesStorageMetadata) or 0 not in getattr(description, "size", ())
