"""DCP's own path: its plans travel as columns, and are checked as DCP checks them."""

from __future__ import annotations

import itertools
import pickle
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.simulated_plans import Tensor, structure_of
from torch.distributed.checkpoint import default_planner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import Shard

from ckpt.save_plans.packed import packed_plan
from ckpt.save_plans.validation import quick_validation
from ckpt.torch_private import replace_plan_validation


def plan(count: int, name: str = "w{}") -> SavePlan:
    tensors = [Tensor(f"{n}", (64, 3), (Shard(0),)) for n in range(count)]
    objects = [Tensor("step", (), is_object=True), Tensor("scalar", ())]
    items = structure_of([*tensors, *objects], (8,), 3).items
    renamed = [replace(each, index=replace(each.index, fqn=name.format(each.index.fqn))) for each in items]
    return SavePlan(renamed, planner_data={"a": ("a",)})


def test_equal_and_smaller() -> None:
    original = plan(300)
    data = pickle.dumps(packed_plan(original))
    assert pickle.loads(data) == original
    assert type(pickle.loads(data).items) is list
    assert len(data) < len(pickle.dumps(original)) / 8


@pytest.mark.parametrize("name", ["a\0b{}", "ü{}", "\ud800{}", "{}"])
def test_names(name: str) -> None:
    original = plan(3, name=name)
    assert pickle.loads(pickle.dumps(packed_plan(original))) == original


def test_items_of_another_kind_stay_as_they_are() -> None:
    class Item(type(plan(1).items[0])):  # type: ignore[misc]
        pass

    (item, *_) = plan(1).items
    original = SavePlan([Item(item.index, item.type, None, item.tensor_data)])
    assert packed_plan(original) is original


def _chunks(cuts: list[list[int]]) -> list[ChunkStorageMetadata]:
    made: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((), ())]
    for cut in cuts:
        pieces = list(itertools.pairwise(cut))
        made = [((*o, a), (*s, b - a)) for o, s in made for a, b in pieces]
    return [ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in made]


def test_validation_gives_dcp_s_answers() -> None:
    stock: Any = default_planner._validate_global_plan
    stock = getattr(stock, "__wrapped__", stock)
    quick = quick_validation(stock)
    chance = random.Random(0)
    faults = 0
    for _ in range(300):
        shape = tuple(chance.randint(0, 6) for _ in range(chance.randint(0, 3)))
        cuts = [sorted({0, size, *(chance.randint(0, size) for _ in range(2))}) for size in shape]
        chunks = _chunks([cut if len(cut) > 1 else [0, 0] for cut in cuts])
        chance.shuffle(chunks)
        change = chance.choice(["none", "lost", "twice", "moved"])
        if change == "lost":
            chunks = chunks[1:] or chunks
        elif change == "twice":
            chunks = [*chunks, chunks[0]]
        elif change == "moved" and shape:
            moved = torch.Size([chunks[0].offsets[0] + 1, *chunks[0].offsets[1:]])
            chunks = [ChunkStorageMetadata(moved, chunks[0].sizes), *chunks[1:]]
        described = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size(shape), chunks)
        metadata, plans = Metadata({"t": described}), [SavePlan([]), SavePlan([])]
        answer = stock(plans, metadata)
        assert quick(plans, metadata) == answer
        faults += answer is False or bool(isinstance(answer, list) and answer)
    assert 50 < faults < 250


def test_a_tall_stack_of_rows_is_checked_without_comparing_all_pairs() -> None:
    asked: list[Any] = []
    rows = [ChunkStorageMetadata(torch.Size([n, 0]), torch.Size([1, 9000])) for n in range(4000)]
    described = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([4000, 9000]), rows)
    quick_validation(lambda _, metadata: asked.append(metadata))(
        [SavePlan([])] * 2, Metadata({"t": described})
    )
    assert asked == [Metadata({})]


def test_dcp_asks_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    stock: Any = default_planner._validate_global_plan
    monkeypatch.setattr(default_planner, "_validate_global_plan", getattr(stock, "__wrapped__", stock))
    replace_plan_validation(quick_validation)
    first: Any = default_planner._validate_global_plan
    assert first.__wrapped__ is getattr(stock, "__wrapped__", stock)
    replace_plan_validation(quick_validation)
    assert default_planner._validate_global_plan is first
