"""Run training jobs on simulated storage, with ranks that crash, stall and come back.

What is ours runs as it ships: `ckpt.collective.save_values` with everything below it, and `CheckpointReader`. In
DCP's place stands `_save_state_dict` below: the same steps, with collectives over simulated ranks.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from greenlet import getcurrent
from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem

import ckpt.collective
from ckpt.backends import registry
from ckpt.backends.base import Store
from ckpt.consistency import environment
from ckpt.consistency.commit import proves_no_commit
from ckpt.errors import CommitConflict, NotCommitted, NotFound, SaveFailed
from ckpt.ranks.collective_errors import is_connection_error
from ckpt.ranks.progress import Progress
from ckpt.ranks.roll_call import Answer, RollCall
from ckpt.reading.reader import CheckpointReader
from ckpt.testing.simulated_store import SimulatedStore
from ckpt.testing.simulator import World
from ckpt.testing.virtual_time import Process
from ckpt.writing import column_save
from ckpt.writing.writer import CheckpointWriter

COLLECTIVE_TIMEOUT_S = 600.0

Content = tuple[int, ...]
"""What a checkpoint holds: one number per rank."""


def this_process() -> Process:
    process = getcurrent()
    assert isinstance(process, Process)
    return process


@contextlib.contextmanager
def simulated_storage(world: World) -> Iterator[None]:
    """Put the library into `world`: its clock, and its storage under `simulated://`."""

    def open_simulated(url: str, options: object, *, threads: int) -> Store:
        return SimulatedStore(world, this_process().node, url)

    registry.register("simulated", open_simulated)
    try:
        with environment.replaced(world):
            yield
    finally:
        registry._factories.pop("simulated")


@contextlib.contextmanager
def simulated(world: World) -> Iterator[None]:
    """Put the library into `world`, with simulated ranks in the place of DCP's."""
    with (
        mock.patch.object(
            column_save, "save_columns", return_value=None
        ),  # as with a planner of another kind
        mock.patch.object(column_save, "save_state_dict", _save_state_dict),
        simulated_storage(world),
    ):
        yield


# -- ranks -----------------------------------------------------------------------------------------


class LostContact(RuntimeError):
    """The error of gloo when a rank is gone."""

    def __init__(self) -> None:
        super().__init__("Connection closed by peer")


class Group:
    """The ranks of one job, and their collectives."""

    def __init__(self, world: World, size: int) -> None:
        self.world, self.size = world, size
        self.members: list[Process] = []
        self._values: dict[tuple[str, int], dict[int, Any]] = {}
        self._calls: dict[tuple[str, int], int] = {}
        self._broken = False

    def is_done(self) -> bool:
        return all(member.done for member in self.members)

    def is_over(self) -> bool:
        return self.is_done() or any(member.crashed or member.stalled for member in self.members)

    def gather(self, rank: int, value: Any) -> list[Any]:
        """Return all values on rank 0; the others only send theirs."""
        values = self._slot("gather", rank)
        values[rank] = value
        if rank == 0:
            self._wait(lambda: len(values) == self.size)
        elif self._broken:
            raise LostContact
        return [values.get(member) for member in range(self.size)]

    def broadcast(self, rank: int, value: Any) -> Any:
        """Return rank 0's value on all ranks."""
        values = self._slot("broadcast", rank)
        if rank == 0:
            if any(member.crashed for member in self.members):
                self._lose()
            values[0] = value
        else:
            self._wait(lambda: 0 in values)
        return values[0]

    def _slot(self, kind: str, rank: int) -> dict[int, Any]:
        call = self._calls[kind, rank] = self._calls.get((kind, rank), 0) + 1
        return self._values.setdefault((kind, call), {})

    def _wait(self, has_arrived: Callable[[], bool]) -> None:
        def is_decided() -> bool:
            return has_arrived() or self._broken or any(member.crashed for member in self.members)

        for _ in range(144):  # ranks that are all at work may take up to a day
            is_over = self.world.wait_for(is_decided, COLLECTIVE_TIMEOUT_S)
            if is_over or any(member.stalled or member.done for member in self.members):
                break
        if not has_arrived():
            self._lose()

    def _lose(self) -> None:
        self._broken = True
        raise LostContact


class Ranks:
    """Stand in for `ckpt.ranks.group.Ranks`."""

    no_dist = False

    def __init__(self, group: Group, rank: int) -> None:
        self.group, self.rank, self.size = self, rank, group.size
        self._group = group
        self.progress = Progress()

    def together(self, local: Callable[[], Any], combine: Callable[[list[Any]], Any]) -> Any:
        """Carry out a step of DCP: `local` on all ranks, `combine` on the first one."""
        value: Any
        try:
            value = local()
        except Exception as error:
            value = _Failed(error)
        values = self._group.gather(self.rank, value)
        answer: Any = None
        if self.rank == 0:
            failures = {rank: value.error for rank, value in enumerate(values) if isinstance(value, _Failed)}
            if not failures:
                try:
                    answer = combine(values)
                except Exception as error:
                    failures = {0: error}
            if failures:
                answer = CheckpointException(
                    "save", {rank: _wrap_exception(e) for rank, e in failures.items()}
                )
        answer = self._group.broadcast(self.rank, answer)
        if isinstance(answer, CheckpointException):
            raise answer
        return answer

    def roll_call(self, error: Exception) -> RollCall:
        environment.sleep(10)
        silent = [member.crashed or member.stalled for member in self._group.members]
        alive = Answer(True, failure=str(error), cause="connection" if is_connection_error(error) else "own")
        answers = {rank: Answer(False) if silent[rank] else alive for rank in range(self.size)}
        return RollCall(answers, is_complete=True)


@dataclass(frozen=True)
class _Failed:
    error: Exception


def _save_state_dict(
    state_dict: Content,
    *,
    storage_writer: CheckpointWriter,
    planner: Any,
    process_group: Ranks,
    no_dist: bool,
) -> Metadata:
    """Save as DCP's function of this name does, over simulated ranks."""
    ranks, writer = process_group, storage_writer
    plans, template = _planned(ranks.size)
    metadata = copy.copy(template)

    def plan() -> SavePlan:
        writer.reset()
        writer.set_up_storage_writer(ranks.rank == 0, rank=ranks.rank, use_collectives=True)
        return writer.prepare_local_plan(plans[ranks.rank])

    def finish(results: list[Any]) -> Metadata:
        writer.finish(metadata, results)
        return metadata

    ranks.together(plan, writer.prepare_global_plan)
    planner = _Planner(state_dict[ranks.rank])
    result = ranks.together(lambda: writer.write_data(plans[ranks.rank], planner).wait(), finish)
    assert isinstance(result, Metadata)
    return result


@functools.cache
def _planned(size: int) -> tuple[list[SavePlan], Metadata]:
    planners = [DefaultSavePlanner(flatten_state_dict=False) for _ in range(size)]
    for rank, planner in enumerate(planners):
        planner.set_up_planner({f"rank{rank}": torch.zeros(1)}, is_coordinator=rank == 0)
    return planners[0].create_global_plan([planner.create_local_plan() for planner in planners])


class _Planner(SavePlanner):
    """Give the data of a plan; a save in simulation asks its planner for nothing else."""

    def __init__(self, value: int) -> None:
        self._tensor = torch.tensor([float(value)])

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        return self._tensor

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    create_local_plan = create_global_plan = finish_plan = set_up_planner  # type: ignore[assignment]


# -- protocols -------------------------------------------------------------------------------------


class Uncommitted(Exception):
    """There is no checkpoint."""


class Protocol(ABC):
    """Save, load and delete checkpoints, in a process of a world."""

    keeps_records = False
    """True if `commit.json` is this library's, and to be watched."""

    @abstractmethod
    def save(self, url: str, group: Group, rank: int, content: Content) -> None:
        """Save one rank's part. Raises SurelyFailed or anything else."""

    @abstractmethod
    def load(self, url: str) -> Content:
        """Load a checkpoint. Raises Uncommitted, or anything else if it cannot be loaded."""

    @abstractmethod
    def delete(self, url: str) -> None: ...


class SurelyFailed(Exception):
    """The save is known not to have happened."""


class Ours(Protocol):
    """This library."""

    keeps_records = True

    def save(self, url: str, group: Group, rank: int, content: Content) -> None:
        # Records of different sizes, as stale sizes do harm.
        tags = {"note": "x" * (content[0] // 100 % 5)}
        # Operations that can be given up run in threads of their own, which a simulation has not.
        writer = CheckpointWriter(url, threads=1, tags=tags, timeout_s=None)
        try:
            ckpt.collective.save_values(content, writer, None, Ranks(group, rank))  # type: ignore[arg-type]
        except SaveFailed as error:
            if error.failures and all(proves_no_commit(failure) for failure in error.failures.values()):
                raise SurelyFailed(str(error)) from error
            raise

    def load(self, url: str) -> Content:
        reader = CheckpointReader(url, threads=1, timeout_s=None)
        try:
            metadata = reader.read_metadata()
            reader.set_up_storage_reader(metadata, True, rank=0)
        except (NotFound, NotCommitted) as error:
            raise Uncommitted from error
        state = {fqn: torch.zeros(1) for fqn in metadata.state_dict_metadata}
        planner = DefaultLoadPlanner(flatten_state_dict=False)
        planner.set_up_planner(state, metadata, True)
        reader.read_data(planner.create_local_plan(), planner)
        return tuple(int(state[f"rank{rank}"].item()) for rank in range(len(state)))

    def delete(self, url: str) -> None:
        try:
            ckpt.remove(url)
        except (NotFound, NotCommitted, CommitConflict) as error:  # or it is not seen here
            raise SurelyFailed("there is nothing to delete") from error
