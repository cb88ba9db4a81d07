"""Training jobs on simulated storage: the library's own save and load, run by ranks that crash, stall and come back.

What is ours runs as it ships: `ckpt.api._save` with everything below it, and `CheckpointReader`. In DCP's place
stands `_save_state_dict` below: the same steps, with collectives over simulated ranks.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch
from greenlet import getcurrent
from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem

import ckpt.api
from ckpt.backends import registry
from ckpt.backends.base import Store
from ckpt.consistency import environment
from ckpt.consistency.commit import COMMIT_KEY, STOCK_METADATA_KEY, proves_no_commit
from ckpt.errors import CheckpointError, NotCommitted, NotFound, SaveFailed
from ckpt.format.records import decode_manifest, read_commit
from ckpt.ranks.collective_errors import is_connection_error
from ckpt.ranks.heartbeat import Answer
from ckpt.ranks.progress import Progress
from ckpt.reading.reader import CheckpointReader
from ckpt.testing.simulated_store import SimulatedStore
from ckpt.testing.simulator import World
from ckpt.testing.virtual_time import Process
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
    """The library in `world`: its clock, and its storage under `simulated://`."""

    def open_there(url: str, options: object, *, threads: int) -> Store:
        return SimulatedStore(world, this_process().node, url)

    registry.register("simulated", open_there)
    try:
        with environment.replaced(world):
            yield
    finally:
        registry._registered.pop("simulated")


@contextlib.contextmanager
def simulated(world: World) -> Iterator[None]:
    """The same, with simulated ranks in the place of DCP's."""
    api = vars(ckpt.api)
    before = api["save_state_dict"]
    api["save_state_dict"] = _save_state_dict
    try:
        with simulated_storage(world):
            yield
    finally:
        api["save_state_dict"] = before


# -- ranks -----------------------------------------------------------------------------------------


class LostContact(RuntimeError):
    """What gloo says when a rank is gone."""

    def __init__(self) -> None:
        super().__init__("Connection closed by peer")


class Group:
    """The ranks of one job, and what they say to each other."""

    def __init__(self, world: World, size: int) -> None:
        self.world, self.size = world, size
        self.members: list[Process] = []
        self._said: dict[tuple[str, int], dict[int, Any]] = {}
        self._calls: dict[tuple[str, int], int] = {}
        self._broken = False

    def gather(self, rank: int, value: Any) -> list[Any]:
        """All values, on rank 0; the others only send theirs."""
        said = self._slot("gather", rank)
        said[rank] = value
        if rank == 0:
            self._wait(lambda: len(said) == self.size)
        elif self._broken:
            raise LostContact
        return [said.get(other) for other in range(self.size)]

    def broadcast(self, rank: int, value: Any) -> Any:
        """Rank 0's value, everywhere."""
        said = self._slot("broadcast", rank)
        if rank == 0:
            if any(member.crashed for member in self.members):
                self._lose()
            said[0] = value
        else:
            self._wait(lambda: 0 in said)
        return said[0]

    def _slot(self, kind: str, rank: int) -> dict[int, Any]:
        call = self._calls[kind, rank] = self._calls.get((kind, rank), 0) + 1
        return self._said.setdefault((kind, call), {})

    def _wait(self, said: Callable[[], bool]) -> None:
        def decided() -> bool:
            return said() or self._broken or any(member.crashed for member in self.members)

        def is_slow() -> bool:
            """All are there and at work: that may take as long as it takes, up to a day."""
            return not decided() and not any(member.stalled or member.done for member in self.members)

        for _ in range(144):
            self.world.wait_for(decided, COLLECTIVE_TIMEOUT_S)
            if not is_slow():
                break
        if not said():
            self._lose()

    def _lose(self) -> None:
        self._broken = True
        raise LostContact


class Ranks:
    """Stands in for `ckpt.ranks.group.Ranks`."""

    no_dist = False

    def __init__(self, group: Group, rank: int) -> None:
        self.group, self.rank, self.size = self, rank, group.size
        self._group = group
        self.progress = Progress()

    def together(self, local: Callable[[], Any], combine: Callable[[list[Any]], Any]) -> Any:
        """One step of DCP's: `local` on every rank, `combine` on the first, its result on all."""
        mine: Any
        try:
            mine = local()
        except Exception as error:
            mine = _Failed(error)
        values = self._group.gather(self.rank, mine)
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

    def roll_call(self, error: Exception) -> dict[int, Answer]:
        environment.sleep(10)
        silent = [member.crashed or member.stalled for member in self._group.members]
        alive = Answer(True, failure=str(error), cause="connection" if is_connection_error(error) else "own")
        return {rank: Answer(False) if silent[rank] else alive for rank in range(self.size)}


class _Failed:
    def __init__(self, error: Exception) -> None:
        self.error = error


def _save_state_dict(
    state_dict: Content,
    *,
    storage_writer: CheckpointWriter,
    planner: Any,
    process_group: Ranks,
    no_dist: bool,
) -> Metadata:
    """DCP's function of this name, over simulated ranks."""
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
    return ranks.together(lambda: writer.write_data(plans[ranks.rank], planner).wait(), finish)  # type: ignore[no-any-return]


@functools.cache
def _planned(size: int) -> tuple[list[SavePlan], Metadata]:
    planners = [DefaultSavePlanner(flatten_state_dict=False) for _ in range(size)]
    for rank, planner in enumerate(planners):
        planner.set_up_planner({f"rank{rank}": torch.zeros(1)}, is_coordinator=rank == 0)
    return planners[0].create_global_plan([planner.create_local_plan() for planner in planners])


class _Planner(SavePlanner):
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
    """How checkpoints are saved, found and deleted. Each is called in a process of a world."""

    keeps_records = False
    """Whether `commit.json` is what it is for this library, and to be watched."""

    @abstractmethod
    def save(self, url: str, group: Group, rank: int, content: Content) -> None:
        """On every rank. Raises SurelyFailed or anything else."""

    @abstractmethod
    def load(self, url: str) -> Content:
        """Raises Uncommitted, or anything else if there is one that cannot be loaded."""

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
            ckpt.api._save(content, writer, None, Ranks(group, rank))  # type: ignore[arg-type]
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
        """The commit first: from then on there is no checkpoint."""
        store = registry.open_store(url)
        found = read_commit(store)
        if found is None:  # or it is not seen here
            raise SurelyFailed("there is nothing to delete")
        store.delete([COMMIT_KEY])
        record = found.record
        keys = [STOCK_METADATA_KEY, record.described_by.path]
        for ref in record.manifests:
            with contextlib.suppress(CheckpointError):
                data = bytearray(ref.size_bytes)
                store.read_into(ref.path, 0, [memoryview(data)])
                keys += [file.path for file in decode_manifest(data, url=url, key=ref.path).files]
            keys.append(ref.path)
        store.delete(keys)
