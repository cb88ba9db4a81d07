"""Which checkpoint is opened: one and the same on all ranks, whole, or an error that all of them raise."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.ranks import run_ranks
from support.states import bits, digest, emptied, random_tensor, sharded_state
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

import ckpt
from ckpt.backends import memory
from ckpt.backends.base import put_bytes
from ckpt.backends.registry import open_store
from ckpt.errors import CheckpointError, CommitConflict, NotCommitted, NotFound, Truncated

pytestmark = pytest.mark.filterwarnings("ignore")


# -- all ranks the same --------------------------------------------------------------------------------


class _Overtaken(ckpt.CheckpointReader):
    """Between the first rank's opening and the others', a save replaces the checkpoint."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if dist.get_rank() != 0:
            dist.barrier()
            return super().read_metadata(*args, **kwargs)
        found = super().read_metadata(*args, **kwargs)
        place = Path(self.checkpoint_id)
        old = {path: path.read_bytes() for path in place.glob("rank-*/*")}
        ckpt.save({"t": torch.ones(10)}, place, no_dist=True)
        for path, data in old.items():  # as if nothing were ever deleted
            path.write_bytes(data)
        dist.barrier()
        return found


def test_ranks_that_opened_different_commits(tmp_path: Path) -> None:
    ckpt.save({"t": torch.zeros(10)}, tmp_path)
    for failures in run_ranks(3, _load_overtaken, str(tmp_path)):
        assert [(type(error), "load again" in str(error)) for error in failures] == [(CommitConflict, True)]


def _load_overtaken(rank: int, url: str) -> list[BaseException]:
    try:
        dcp.load({"t": torch.full((10,), 5.0)}, storage_reader=_Overtaken(url))
    except CheckpointException as error:
        return [wrapped[0] for wrapped in error.failures.values()]
    return []


def test_ranks_that_opened_different_stock_checkpoints(tmp_path: Path) -> None:
    dcp.save({"t": torch.zeros(10)}, storage_writer=dcp.FileSystemWriter(tmp_path))
    reader = ckpt.CheckpointReader(tmp_path)
    plans = []
    for _ in range(2):
        reader.set_up_storage_reader(reader.read_metadata(), True, rank=0)
        plans.append(reader.prepare_local_plan(dcp.planner.LoadPlan([])))
    assert reader.prepare_global_plan(plans) == plans
    dcp.save({"t": torch.zeros(10)}, storage_writer=dcp.FileSystemWriter(tmp_path))
    reader.set_up_storage_reader(reader.read_metadata(), True, rank=0)
    plans.append(reader.prepare_local_plan(dcp.planner.LoadPlan([])))
    with pytest.raises(CommitConflict):
        reader.prepare_global_plan(plans)


# -- saved without collectives -------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["data", "metadata"])
def test_a_failure_on_one_rank_reaches_all(tmp_path: Path, damage: str) -> None:
    """DCP itself would leave the others waiting in a barrier."""
    kind, name = (Truncated, "__1_0.distcp") if damage == "data" else (NotFound, "__1.metadata")
    for found in run_ranks(2, _load_damaged, str(tmp_path), damage, timeout_s=50):
        assert found == [(kind.__name__, name)] * 2


def _load_damaged(rank: int, url: str, damage: str) -> list[tuple[str, str | None]]:
    state = sharded_state()
    dcp.save(state, storage_writer=dcp.FileSystemWriter(url), use_collectives=False)
    if rank == 1:
        path = Path(url) / ("__1_0.distcp" if damage == "data" else "__1.metadata")
        if damage == "data":
            path.write_bytes(path.read_bytes()[:100])
        else:
            path.unlink()
    dist.barrier()
    errors: list[Any] = []
    try:
        ckpt.load(emptied(state), url)
    except CheckpointError as error:
        errors.append(error)
    try:
        dcp.load(emptied(state), storage_reader=ckpt.CheckpointReader(url))
    except CheckpointException as error:
        errors += [wrapped[0] for wrapped in error.failures.values()]
    return [(type(error).__name__, error.key) for error in errors]


def test_parts_are_those_of_the_group(tmp_path: Path) -> None:
    """Ranks of a group that is not the world: the parts are numbered by the group."""
    found = run_ranks(3, _load_in_a_group, str(tmp_path))
    assert found[0] is None
    assert all(loaded == saved for loaded, saved in found[1:])


def _load_in_a_group(rank: int, url: str) -> Any:
    group = dist.new_group([1, 2])
    if rank == 0:
        return None
    state = {"mine": random_tensor(40 + rank, 3, seed=rank)}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(url), use_collectives=False, process_group=group)
    loaded = emptied(state)
    dcp.load(loaded, storage_reader=ckpt.CheckpointReader(url), process_group=group)
    return digest(loaded), digest(state)


# -- ours without its commit ---------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [0, 1, 10, 33])
def test_ours_without_a_commit_is_no_stock_checkpoint(tmp_path: Path, cut: int) -> None:
    """Also if whatever copied it cut off what follows the pickle's end."""
    ckpt.save({"t": random_tensor(10)}, tmp_path)
    (tmp_path / "commit.json").unlink()
    path = tmp_path / ".metadata"
    data = path.read_bytes()
    path.write_bytes(data[: len(data) - cut])
    pickle.loads(path.read_bytes())
    with pytest.raises(NotCommitted, match="the save or copy did not finish"):
        ckpt.load({"t": torch.zeros(10)}, tmp_path)


# -- saved over by another program ---------------------------------------------------------------------


@pytest.mark.smoke
def test_stock_saved_over_ours(tmp_path: Path) -> None:
    """The older state must not load as if it were the newest."""
    ckpt.save({"t": torch.zeros(3)}, tmp_path)
    dcp.save({"t": torch.ones(3)}, storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
    for load in (
        lambda state: ckpt.load(state, tmp_path),
        lambda state: dcp.load(state, storage_reader=ckpt.CheckpointReader(tmp_path), no_dist=True),
    ):
        state = {"t": torch.full((3,), 7.0)}
        with pytest.raises((CommitConflict, CheckpointException), match="saved over the checkpoint"):
            load(state)
        assert torch.equal(state["t"], torch.full((3,), 7.0))
    damage = ckpt.verify(tmp_path).damages[0]
    assert (damage.kind, damage.key) == ("stock_metadata", ".metadata")
    (tmp_path / "commit.json").unlink()  # as the message says
    ckpt.load(state, tmp_path)
    assert torch.equal(state["t"], torch.ones(3))


# -- replaced while it is read -------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "second"), [(0, 5000), (5000, 0)])
def test_a_commit_replaced_between_looking_and_reading(first: int, second: int) -> None:
    url = f"memory://opening-{first}-{second}/c"
    ckpt.save({"t": torch.zeros(5)}, url, tags={"note": "x" * first})
    _when_read(
        url, "commit.json", 1, lambda: ckpt.save({"t": torch.ones(5)}, url, tags={"note": "x" * second})
    )
    loaded = {"t": torch.full((5,), 7.0)}
    ckpt.load(loaded, url)
    assert torch.equal(loaded["t"], torch.ones(5))


@pytest.mark.parametrize(("first", "second"), [(1, 300), (300, 1)])
def test_stock_metadata_replaced_between_looking_and_reading(tmp_path: Path, first: int, second: int) -> None:
    states = [{f"t{i}": torch.full((5,), float(n)) for i in range(n)} for n in (first, second)]
    for number, state in enumerate(states):
        dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / str(number)))
    url = f"memory://opening-stock-{first}/c"
    store = open_store(url)

    def put(number: int) -> None:
        for path in sorted((tmp_path / str(number)).iterdir()):
            put_bytes(store, path.name, path.read_bytes())

    put(0)
    # The first read is of the place where a seal would be.
    _when_read(url, ".metadata", 2, lambda: put(1))
    loaded = {"t0": torch.zeros(5)}
    ckpt.load(loaded, url)
    assert torch.equal(loaded["t0"], torch.full((5,), float(second)))


def _when_read(url: str, key: str, at: int, act: Callable[[], Any]) -> None:
    """`act()` just before the `at`-th read of `key`."""
    reads: list[str] = []

    def fault(operation: str, name: str, when: str) -> None:
        if (operation, when) == ("read", "before") and name.endswith(key):
            reads.append(name)
            if len(reads) == at:
                act()

    memory.inject(url, fault)


def test_a_checkpoint_moved_elsewhere_is_the_same(tmp_path: Path) -> None:
    state = {"t": random_tensor(10)}
    ckpt.save(state, tmp_path / "a")
    shutil.move(tmp_path / "a", tmp_path / "b")
    loaded = {"t": torch.zeros(10)}
    ckpt.load(loaded, tmp_path / "b")
    assert bits(loaded["t"]) == bits(state["t"])
