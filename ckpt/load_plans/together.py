"""Load as `dcp.load` does, step by step, but tell all ranks only what differs between them.

DCP's first rank gathers the plans of all ranks and sends them back. Planners like DCP's own change nothing in
them: there all ranks have to know of failures, and whether they opened the same checkpoint.
"""

from __future__ import annotations

import contextlib
import itertools
import pickle
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, runtime_checkable

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner

from ckpt.errors import CheckpointError
from ckpt.load_plans.local import planned_by_columns
from ckpt.ranks.failures import StepFailed
from ckpt.ranks.group import Ranks, portable
from ckpt.ranks.many_failures import some_of
from ckpt.ranks.progress import Progress
from ckpt.torch_private import load_state_dict

T = TypeVar("T")

_FEW = 2
"""Checkpoints that are told of: more than one is an error."""


class Reader(Protocol):
    """The parts of a `CheckpointReader` that a load uses."""

    progress: Progress
    interrupt: BaseException | None

    def read_metadata(self) -> Any: ...

    def set_up_storage_reader(self, metadata: Any, is_coordinator: bool, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan: ...

    def check_identities(self, identities: Collection[str]) -> None: ...

    def wants_little(self, plan: LoadPlan) -> bool: ...

    def read_alone(self) -> None: ...

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Any: ...

    def rewind(self) -> None: ...


@runtime_checkable
class AskingPlanner(Protocol):
    """A planner whose global step needs only some bits of each rank, where all load one checkpoint."""

    def bits_asked(self) -> tuple[int, ...]: ...

    def judge_all(self, bits: Sequence[int]) -> None: ...


@dataclass(frozen=True)
class Failure:
    """An error of a rank; `stack` is where it was raised, if it is not one of this library's."""

    error: BaseException
    stack: traceback.StackSummary

    @classmethod
    def of(cls, error: Exception, rank: int) -> Failure:
        """Make one that can travel to the other ranks, of the same type if possible."""
        if not isinstance(error, CheckpointError):
            frames = traceback.extract_tb(error.__traceback__)
            stack = traceback.StackSummary.from_list(
                [(f.filename, f.lineno or 0, f.name, f.line) for f in frames]
            )
            with contextlib.suppress(Exception):  # one that is not what it was travels as text
                pickle.loads(pickle.dumps((error, stack)))
                return cls(error, stack)
        return cls(portable(error, rank), traceback.StackSummary())


@dataclass(frozen=True)
class Told:
    """What ranks tell each other after a step.

    Attributes:
        keeps_dcp: one of them has a planner with a global step of its own.
        identities: the checkpoints that they opened; few.
        bits: of an `AskingPlanner`; those of all ranks are combined by or.
        wants_little: each of them reads so little that they need not look for what several want.
        failed: how many of them failed.
        failures: some of these, by rank.
    """

    keeps_dcp: bool = False
    identities: frozenset[str] = frozenset()
    bits: tuple[int, ...] = ()
    wants_little: bool = True
    failed: int = 0
    failures: Mapping[int, Failure] = field(default_factory=dict)

    def join(self, other: Told) -> Told:
        return Told(
            self.keeps_dcp or other.keeps_dcp,
            frozenset(sorted(self.identities | other.identities)[:_FEW]),
            tuple(
                some | others for some, others in itertools.zip_longest(self.bits, other.bits, fillvalue=0)
            ),
            self.wants_little and other.wants_little,
            self.failed + other.failed,
            _some({**self.failures, **other.failures}),
        )


def load_planned(
    state_dict: dict[str, Any],
    reader: Any,
    planner: LoadPlanner | None,
    ranks: Ranks,
    *,
    is_shared: bool,
) -> None:
    """Load a state; as DCP does it if the planner of any rank has a global step of its own.

    Args:
        is_shared: all ranks opened the same checkpoint, not each its own part.

    Raises CheckpointException as `dcp.load` does, on all ranks, if one failed.
    """
    planner = DefaultLoadPlanner() if planner is None else planner
    with planned_by_columns(planner):
        load = _Load(reader, planner, ranks)
        plan = load.plan(state_dict, is_shared=is_shared)
        if plan is None:
            group = {"process_group": ranks.group, "no_dist": ranks.no_dist}
            load_state_dict(state_dict, storage_reader=reader, planner=planner, **group)
        else:
            load.read(plan)


class _Load:
    """The steps of a load on one rank."""

    def __init__(self, reader: Reader, planner: LoadPlanner, ranks: Ranks) -> None:
        self._reader, self._planner, self._ranks = reader, planner, ranks
        self._asking = planner if isinstance(planner, AskingPlanner) and _asks(planner) else None
        self._is_own_group = ranks.is_own_group

    def plan(self, state_dict: dict[str, Any], *, is_shared: bool) -> LoadPlan | None:
        """Plan what this rank reads; return None, on all ranks, if DCP has to load."""
        plan, told = None, Told(keeps_dcp=True)
        if is_shared if self._asking is not None else _leaves_global_step(self._planner):
            planned, failed = self._attempt(lambda: self._local(state_dict))
            plan, told = planned or (None, failed)
        self._reader.progress.wait_for("the plans of all ranks")
        told = self._tell("plan", told)
        if told.keeps_dcp:
            if plan is not None:
                self._reader.rewind()
            return None
        self._judge(told)
        if told.wants_little:
            self._reader.read_alone()
        return plan

    def read(self, plan: LoadPlan) -> None:
        """Read into the state of this rank."""
        _, told = self._attempt(lambda: self._reader.read_data(plan, self._planner).wait())
        self._tell("read", told)

    def _local(self, state_dict: dict[str, Any]) -> tuple[LoadPlan, Told]:
        is_first, rank = self._ranks.rank == 0, self._ranks.rank
        metadata = self._reader.read_metadata()
        self._planner.set_up_planner(state_dict, metadata, is_first)
        self._reader.set_up_storage_reader(metadata, is_first, rank=rank, use_collectives=True)
        plan = self._reader.prepare_local_plan(self._planner.create_local_plan())
        identity = plan.storage_data
        told = Told(
            identities=frozenset([identity] if isinstance(identity, str) else []),
            bits=() if self._asking is None else self._asking.bits_asked(),
            wants_little=self._reader.wants_little(plan),
        )
        # DCP finishes plans after the global step. Here no rank may fail between that and its reads,
        # in which the others wait for it.
        return self._planner.finish_plan(plan), told

    def _judge(self, told: Told) -> None:
        """Carry out the global step, with the same outcome on all ranks."""
        try:
            self._reader.check_identities(told.identities)
            if self._asking is not None:
                self._asking.judge_all(told.bits)
        except CheckpointError as error:
            raise StepFailed("plan", {0: portable(error, 0)}, 1) from None

    def _attempt(self, work: Callable[[], T]) -> tuple[T | None, Told]:
        """Return a result, and the failure that all ranks are told."""
        rank = self._ranks.rank
        try:
            return work(), Told()
        except Exception as error:
            failure = Failure.of(error, rank)
        except BaseException as error:  # of this rank alone, for which the others must not wait
            self._reader.interrupt = self._reader.interrupt or error
            text = f"interrupted: {type(error).__name__}"
            failure = Failure.of(CheckpointError(text, rank=rank), rank)
        return None, Told(failed=1, failures={rank: failure})

    def _tell(self, step: str, told: Told) -> Told:
        """Tell all ranks, and hear from them; raise StepFailed if one failed."""
        if self._is_own_group and not self._ranks.is_own_group:
            raise RuntimeError("the ranks gave up their process group")
        told = self._ranks.join(told, Told.join)
        if told.failed:
            errors = {rank: each.error for rank, each in told.failures.items()}
            stacks = {rank: each.stack for rank, each in told.failures.items()}
            raise StepFailed(step, errors, told.failed, stacks)
        return told


def _asks(planner: object) -> bool:
    """Tell whether the class whose global step it is says what that needs; a class below it may have its own."""
    kind = next((kind for kind in type(planner).__mro__ if "create_global_plan" in vars(kind)), None)
    defined = () if kind is None else vars(kind).keys()
    return {"bits_asked", "judge_all"} <= {*defined} and "create_global_plan" not in vars(planner)


def _leaves_global_step(planner: LoadPlanner) -> bool:
    """Tell whether a planner has DCP's global step, which changes nothing."""
    return (
        isinstance(planner, DefaultLoadPlanner)
        and type(planner).create_global_plan is DefaultLoadPlanner.create_global_plan
        and "create_global_plan" not in vars(planner)
    )


def _some(failures: Mapping[int, Failure]) -> dict[int, Failure]:
    chosen = some_of({rank: each.error for rank, each in failures.items()})
    return {rank: failures[rank] for rank in chosen}
