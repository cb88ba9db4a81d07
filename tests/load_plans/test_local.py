"""Reads planned by columns are those that DCP's own planner plans, item by item."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.ranks import run_ranks
from support.states import bits, random_tensor
from support.tiers import examples
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import ckpt
from ckpt.errors import LoadFailed
from ckpt.format.columns import Columns, ObjectRow, TensorColumns
from ckpt.format.dcp_view import metadata_of
from ckpt.load_plans import local
from ckpt.load_plans.local import local_plan, planned_by_columns, read_items

Box = tuple[list[int], list[int]]


@st.composite
def boxes(draw: st.DrawFn, shape: list[int]) -> list[Box]:
    """A grid of cuts, whose cells may be empty, in any order; or any boxes, which may overlap and leave gaps."""
    if draw(st.booleans()):
        cells: list[Box] = [([], [])]
        for extent in shape:
            inner = draw(st.lists(st.integers(0, extent), max_size=4))
            cuts = [0, *sorted(inner), extent]
            pairs = list(itertools.pairwise(cuts))
            cells = [([*o, low], [*s, high - low]) for o, s in cells for low, high in pairs]
        return draw(st.permutations(cells))
    some: list[Box] = []
    for _ in range(draw(st.integers(0, 8))):
        offsets = [draw(st.integers(0, extent)) for extent in shape]
        some.append((offsets, [draw(st.integers(0, n - o)) for n, o in zip(shape, offsets, strict=True)]))
    return some


@st.composite
def sharded(draw: st.DrawFn) -> tuple[list[int], list[Box], list[Box]]:
    shape = draw(st.lists(st.integers(0, 12), max_size=4))
    return shape, draw(boxes(shape)), draw(boxes(shape))


def tensor_columns(shape: list[int], stored: list[Box]) -> TensorColumns:
    rows = (len(stored), len(shape))
    places = np.zeros((3, len(stored)), dtype=np.int64)
    offsets = np.array([box[0] for box in stored], dtype=np.int64).reshape(rows)
    sizes = np.array([box[1] for box in stored], dtype=np.int64).reshape(rows)
    return TensorColumns("float32", tuple(shape), False, offsets, sizes, *places)


def chunks_of(some: list[Box]) -> list[ChunkStorageMetadata]:
    return [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in some]


def all_of(items: list[ReadItem]) -> list[Any]:
    """With the numbers of chunks, by which items do not compare."""
    return [(item, item.dest_index.index, item.storage_index.index) for item in items]


@given(sharded())
@example(([], [([], [])], [([], [])]))
@example(([0, 3], [([0, 0], [0, 3])], [([0, 0], [0, 3])]))
@settings(max_examples=examples(400), deadline=None)
def test_items_are_those_of_dcp(case: tuple[list[int], list[Box], list[Box]]) -> None:
    shape, stored, wanted = case
    described = TensorStorageMetadata(TensorProperties(), torch.Size(shape), chunks_of(stored))
    expected = create_read_items_for_chunk_list("t", described, chunks_of(wanted))
    found = read_items("t", tensor_columns(shape, stored), chunks_of(wanted))
    assert all_of(found) == all_of(expected)
    assert all(type(item.lengths) is torch.Size for item in found)


def rows_of(count: int, columns: int = 5) -> TensorColumns:
    return tensor_columns([count, columns], [([row, 0], [1, columns]) for row in range(count)])


def planner_for(state: dict[str, Any], columns: Columns, **options: bool) -> DefaultLoadPlanner:
    planner = DefaultLoadPlanner(**options)
    planner.set_up_planner(state, metadata_of(columns), is_coordinator=True)
    return planner


COLUMNS = Columns(
    files=["f"],
    entries={
        "many": rows_of(100),
        "lr": ObjectRow(0, 0, 1),
        "few": rows_of(3),
        "deep.many": rows_of(64),
        "list.0": rows_of(70),
        "unused": rows_of(90),
    },
)


@pytest.mark.parametrize("partial", [False, True])
def test_plan_is_that_of_dcp(partial: bool) -> None:
    state = {
        "many": torch.zeros(100, 5),
        "lr": 1,
        "few": torch.zeros(3, 5),
        "deep": {"many": torch.zeros(64, 5)},
        "list": [torch.zeros(70, 5)],
        **({"new": torch.zeros(2)} if partial else {}),
    }
    by_columns = planner_for(dict(state), COLUMNS, allow_partial_load=partial)
    metadata = by_columns.metadata
    expected = planner_for(dict(state), COLUMNS, allow_partial_load=partial).create_local_plan()
    found = local_plan(by_columns)
    assert all_of(found.items) == all_of(expected.items)
    assert len(found.items) == 100 + 1 + 3 + 64 + 70
    assert dataclasses.replace(found, items=[]) == dataclasses.replace(expected, items=[])
    assert by_columns.metadata is metadata


def test_names_of_before_torch_2_4() -> None:
    columns = Columns(files=["f"], entries={"a": rows_of(50), "list": rows_of(50)})
    state = {"a": torch.zeros(50, 5), "list": [torch.zeros(50, 5)]}
    outcomes = []
    for plan in (local_plan, DefaultLoadPlanner.create_local_plan):
        try:
            outcomes.append(str(all_of(plan(planner_for(dict(state), columns)).items)))
        except Exception as error:
            outcomes.append(f"{type(error).__name__}: {error}")
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize(
    "state",
    [
        {"many": torch.zeros(100, 5), "absent": torch.zeros(2)},
        {"many": torch.zeros(100, 6)},
        {"many": "an object"},
    ],
    ids=["missing", "shape", "type"],
)
def test_errors_are_those_of_dcp(state: dict[str, Any]) -> None:
    errors = []
    for plan in (local_plan, DefaultLoadPlanner.create_local_plan):
        planner = planner_for(dict(state), COLUMNS)
        metadata = planner.metadata
        with pytest.raises((RuntimeError, ValueError)) as caught:
            plan(planner)
        assert planner.metadata is metadata
        errors.append((type(caught.value), str(caught.value)))
    assert errors[0] == errors[1]


def test_planners_of_their_own_plan_themselves() -> None:
    class Own(DefaultLoadPlanner):
        def create_local_plan(self) -> LoadPlan:
            return LoadPlan([])

    planner = Own()
    with planned_by_columns(planner):
        assert vars(planner).get("create_local_plan") is None
    stock = DefaultLoadPlanner()
    with planned_by_columns(stock), planned_by_columns(stock):
        assert "create_local_plan" in vars(stock)
    assert "create_local_plan" not in vars(stock)


WHOLE = {f"t{number}": random_tensor(24 + number, 10) for number in range(4)}


def _save(rank: int, place: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    state = {name: distribute_tensor(whole, mesh, [Shard(0), Shard(1)]) for name, whole in WHOLE.items()}
    ckpt.save({**state, "step": 7}, place)


def _load(rank: int, place: str) -> None:
    planned: list[str] = []
    by_columns = read_items

    def counted(fqn: str, *args: Any) -> list[ReadItem]:
        planned.append(fqn)
        return by_columns(fqn, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "_FEW_CHUNKS", 1)
        patch.setattr(local, "read_items", counted)
        mesh = init_device_mesh("cpu", (3,))
        state: dict[str, Any] = {
            name: distribute_tensor(torch.zeros_like(whole), mesh, [Shard(number % 2)])
            for number, (name, whole) in enumerate(WHOLE.items())
        }
        state["step"] = 0
        ckpt.load(state, place)
        assert planned == list(WHOLE)
        assert state["step"] == 7
        for name, whole in WHOLE.items():
            assert isinstance(state[name], DTensor)
            assert bits(state[name].full_tensor()) == bits(whole)
        wrong = {"t0": torch.zeros(3) if rank == 1 else torch.zeros(24, 10)}
        with pytest.raises(
            LoadFailed, match=r"'t0' is \(24, 10\) in the checkpoint, and \(3,\) in the program"
        ) as caught:
            ckpt.load(wrong, place)
        assert set(caught.value.failures) == {1}


@pytest.mark.filterwarnings("ignore")
def test_a_job_of_another_size_loads_by_columns(tmp_path: Path) -> None:
    run_ranks(4, _save, str(tmp_path / "c"))
    run_ranks(3, _load, str(tmp_path / "c"))
