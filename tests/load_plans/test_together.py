"""Loads that tell all ranks only what differs end as DCP's own do, which gathers the plans of all."""

from __future__ import annotations

import random
import socket
from collections.abc import Callable, Iterable
from functools import partial, reduce
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.ranks import run_ranks
from support.states import bits, random_tensor
from support.tiers import examples
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import ckpt
from ckpt.errors import AccessDenied, CheckpointError, CommitConflict, LoadFailed, UnsafeContent
from ckpt.load_plans.together import Failure, Told
from ckpt.ranks.failures import StepFailed, load_error
from ckpt.ranks.many_failures import MAX_FAILURES
from ckpt.reading.checkpoint import Checkpoint
from ckpt.reading.read_once import Replicas
from ckpt.state.load_planner import StateLoadPlanner

PATCH = pytest.MonkeyPatch()
"""Of one rank, whose process ends with its function."""


class Keeping(DefaultLoadPlanner):
    """Keeps the plan that it is given at last."""

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        self.plan = new_plan
        return super().finish_plan(new_plan)


class KeepingDcp(Keeping):
    """Has a global step of its own, for which DCP gathers the plans."""

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return super().create_global_plan(global_plan)


def count_gathers() -> list[int]:
    """Count how often ranks gather objects."""
    seen = [0]
    for name in ("gather_object", "all_gather_object"):
        gather = getattr(dist, name)

        def counted(*args: Any, gather: Callable[..., Any] = gather, **kwargs: Any) -> Any:
            seen[0] += 1
            return gather(*args, **kwargs)

        PATCH.setattr(dist, name, counted)
    return seen


# -- results -----------------------------------------------------------------------------------------------

SHAPES = {"a": (24, 6), "b": (7,), "c.d": (5, 3, 2), "e": (1, 4)}


def _state(chance: random.Random, meshes: list[Any], fill: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    state: dict[str, Any] = {"step": chance.randint(1, 9)}
    for number, (name, shape) in enumerate(SHAPES.items()):
        mesh = chance.choice(meshes)
        whole = fill(random_tensor(*shape, seed=number))
        placements = [chance.choice([Replicate(), *map(Shard, range(len(shape)))]) for _ in range(mesh.ndim)]
        state[name] = chance.choice([whole, distribute_tensor(whole, mesh, placements)])
    return state


def _both_ways(rank: int, place: str) -> None:
    gathers = count_gathers()
    meshes = [init_device_mesh("cpu", shape) for shape in ((4,), (2, 2))]
    for seed in range(6):
        url, chance = f"{place}/{seed}", random.Random(seed)  # the same on all ranks
        saved = _state(chance, meshes, lambda whole: whole)
        ckpt.save(saved, url)
        before, loads = chance.getstate(), []
        for planner in (Keeping(), KeepingDcp()):
            chance.setstate(before)
            state = _state(chance, meshes, torch.zeros_like)
            gathered = gathers[0]
            ckpt.load(state, url, planner=planner)
            assert (gathers[0] > gathered) is isinstance(planner, KeepingDcp)
            loads.append((planner.plan, {name: bits(_local(value)) for name, value in state.items()}))
        (plan, values), (expected, expected_values) = loads
        assert plan.items == expected.items
        assert [item.dest_index.index for item in plan.items] == [i.dest_index.index for i in expected.items]
        assert plan == expected
        assert values == expected_values
        assert state["step"] == saved["step"]


def _local(value: Any) -> torch.Tensor:
    return torch.tensor(value) if isinstance(value, int) else getattr(value, "to_local", lambda: value)()


def test_plans_and_values_are_those_of_dcp(tmp_path: Path) -> None:
    run_ranks(4, _both_ways, str(tmp_path))


def test_dcp_loads_if_one_planner_has_a_global_step_of_its_own(tmp_path: Path) -> None:
    run_ranks(3, _mixed, str(tmp_path / "c"))


def _mixed(rank: int, url: str) -> None:
    saved = {f"t{rank}": random_tensor(20, seed=rank), "both": random_tensor(30)}
    ckpt.save(saved, url)
    opened = []

    def open_again(*args: Any) -> NoReturn:
        opened.append(args)
        raise AssertionError("opened again")

    PATCH.setattr(ckpt.CheckpointReader, "_open_any", open_again)
    for own in range(3):
        state = {name: torch.zeros_like(value) for name, value in saved.items()}
        ckpt.load(state, url, planner=KeepingDcp() if own == rank else Keeping())
        assert {name: bits(value) for name, value in state.items()} == {n: bits(v) for n, v in saved.items()}
    assert opened == []  # all use the one that the first rank opened


class Counting(NamingLoadPlanner):
    """Inherits what says what the global step needs, and has a step of its own."""

    steps = 0

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        self.steps += 1
        return super().create_global_plan(global_plan)


def test_a_global_step_of_a_subclass_is_carried_out(tmp_path: Path) -> None:
    ckpt.save({"t": random_tensor(20)}, tmp_path / "c", no_dist=True)
    planner = Counting(strict=True, optional=set(), optimizers=())
    state = {"t": torch.zeros_like(random_tensor(20))}
    ckpt.load(state, tmp_path / "c", planner=planner, no_dist=True)
    assert planner.steps == 1
    assert bits(state["t"]) == bits(random_tensor(20))


# -- names that no rank asks for ---------------------------------------------------------------------------

names = st.sampled_from([f"{top}.{name}" for top in ("model", "optimizer", "rng") for name in "abcd"])


@given(
    st.sets(names, min_size=1), st.lists(st.sets(names), min_size=1, max_size=4), st.booleans(), st.booleans()
)
@example({"model.a", "model.b"}, [{"model.a"}, {"model.b"}], True, False)
@example({"model.a", "model.b"}, [{"model.a"}, set()], True, False)
@example({"model.a"}, [{"model.b"}], True, True)
@settings(max_examples=examples(300), deadline=None)
def test_left_over_names_are_those_of_dcp(
    stored: set[str], ranks: list[set[str]], strict: bool, nothing_first: bool
) -> None:
    if nothing_first:
        ranks = [set(), *ranks]
    metadata = Metadata({name: BytesStorageMetadata() for name in sorted(stored)})
    planners = []
    for rank, asked in enumerate(ranks):
        planner = NamingLoadPlanner(strict=strict, optional={"rng"}, optimizers=())
        planner.set_up_planner(dict.fromkeys(sorted(asked), 0), metadata, rank == 0)
        planners.append(planner)
    plans = [LoadPlan([_item(name) for name in sorted(asked & stored)]) for asked in ranks]
    expected = _text_of(lambda: planners[0].create_global_plan(plans))
    told = reduce(Told.join, [Told(bits=planner.bits_asked()) for planner in planners])
    for planner in planners:
        assert _text_of(partial(planner.judge_all, told.bits)) == expected


def _item(name: str) -> ReadItem:
    index = MetadataIndex(name)
    return ReadItem(LoadItemType.BYTE_IO, index, torch.Size(), index, torch.Size(), torch.Size())


def _text_of(step: Callable[[], object]) -> str:
    try:
        step()
    except LoadFailed as error:
        return str(error)
    return ""


# -- failures ----------------------------------------------------------------------------------------------


class Strange(Exception):
    """Does not travel: pickle makes it of one argument."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(one)


def _fail(error: BaseException) -> Callable[..., NoReturn]:
    def fail(*args: Any) -> NoReturn:
        raise error

    return fail


FAILURES: list[tuple[str, Callable[[int], BaseException]]] = [
    ("set_up_planner", lambda rank: ValueError("no plan")),
    ("create_local_plan", lambda rank: CheckpointError("no plan", rank=rank)),
    ("finish_plan", lambda rank: AccessDenied("not for you")),
    ("resolve_tensor", lambda rank: KeyError("t")),
    ("load_bytes", lambda rank: UnsafeContent("not this one")),
]


def test_failures_are_those_of_dcp_on_all_ranks(tmp_path: Path) -> None:
    run_ranks(3, _failing, str(tmp_path / "c"), timeout_s=120)


def _failing(rank: int, url: str) -> None:
    saved = {"t": random_tensor(1000), "object": {"n": 1}}
    ckpt.save(saved, url)
    for method, make in FAILURES:
        for failing in ([1], [0, 2], [0, 1, 2]):
            seen = []
            for planner in (Keeping(), KeepingDcp()):
                if rank in failing:
                    setattr(planner, method, _fail(make(rank)))
                if method == "finish_plan" and isinstance(planner, KeepingDcp):
                    continue  # in DCP's way the ranks that have not failed would wait for those that have
                with pytest.raises(CheckpointError) as caught:
                    ckpt.load(
                        {"t": torch.zeros(1000), "object": {"n": 0}}, url, planner=planner, timeout_s=60
                    )
                error = caught.value
                failures = getattr(error, "failures", {})
                kinds = {other: type(each).__name__ for other, each in failures.items()}
                seen.append((type(error), str(error), error.rank, kinds))
            assert seen[0] == seen[-1]
            assert isinstance(seen[0][0], type)
            assert not seen[0][3] or set(seen[0][3]) == set(failing)
    planner = Keeping()
    if rank == 2:
        vars(planner)["create_local_plan"] = _fail(Strange("one", "two"))
    with pytest.raises(LoadFailed, match="rank 2: Strange: one"):
        ckpt.load({"t": torch.zeros(1000)}, url, planner=planner)
    loaded = torch.zeros(1000)
    ckpt.load({"t": loaded}, url)  # the group is as good as before
    assert bits(loaded) == bits(random_tensor(1000))


def test_ranks_that_opened_different_checkpoints(tmp_path: Path) -> None:
    run_ranks(3, _different, str(tmp_path / "c"))


def _different(rank: int, url: str) -> None:
    ckpt.save({"t": torch.ones(3)}, url)
    if rank == 2:
        PATCH.setattr(Checkpoint, "identity", "another")
    for planner in (None, KeepingDcp()):
        with pytest.raises(CommitConflict, match="the ranks opened different checkpoints") as caught:
            ckpt.load({"t": torch.zeros(3)}, url, planner=planner)
        assert caught.value.rank == 0


def test_failures_of_thousands_are_counted() -> None:
    def told(ranks: Iterable[int]) -> Told:
        one = [Told(failed=1, failures={rank: Failure.of(ValueError("wrong"), rank)}) for rank in ranks]
        return reduce(Told.join, one)

    joined = told(range(500)).join(told(range(500, 3000)))
    assert joined.failed == 3000
    assert len(joined.failures) == MAX_FAILURES
    errors = {rank: each.error for rank, each in joined.failures.items()}
    failed = StepFailed("plan", errors, joined.failed)
    error = load_error(failed, "file:///c")
    assert isinstance(error, LoadFailed)
    assert error.failed_ranks == 3000
    assert "3,000 ranks in all" in str(error)


def test_ranks_that_want_little_do_not_ask_each_other(tmp_path: Path) -> None:
    asked = run_ranks(2, _asks, str(tmp_path))
    assert asked == [[0, 3, 2]] * 2  # the first time also on how many nodes they are


def _asks(rank: int, root: str) -> list[int]:
    """Load little, much, and much on one rank alone; count the questions of this rank."""
    counts = []
    with mock.patch.object(socket, "gethostname", return_value=f"node{rank}"):
        for number, elements in enumerate((8, 1 << 20, 1 << 20 if rank else 8)):
            state = {f"w{rank}" if number == 2 else "w": torch.ones(elements)}
            ckpt.save(state, f"{root}/{number}")
            with mock.patch.object(Replicas, "_join", autospec=True, side_effect=Replicas._join) as join:
                ckpt.load(state, f"{root}/{number}")
            counts.append(join.call_count)
    return counts
