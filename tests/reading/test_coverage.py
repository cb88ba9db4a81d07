"""A load fills every element of every destination, or says what the checkpoint lacks."""

from __future__ import annotations

import itertools
import pickle
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from support.ranks import run_ranks
from support.states import bits, random_tensor
from support.tiers import examples
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ckpt
from ckpt.errors import FormatError
from ckpt.format.columns import packed
from ckpt.state.load_planner import StateLoadPlanner
from ckpt.transfer.boxes import Box, tiled_box, tiling_fault

pytestmark = pytest.mark.filterwarnings("ignore")

WHOLE = random_tensor(64, 50)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stock checkpoint of one tensor in four chunks."""
    place = tmp_path_factory.mktemp("sharded") / "c"
    run_ranks(4, _save, str(place))
    return place


def _save(rank: int, place: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    state = {"t": distribute_tensor(WHOLE, mesh, [Shard(0), Shard(1)]), "other": random_tensor(3)}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(place))


def _changed(place: Path, copy: Path, edit: Callable[[Metadata], Any]) -> Path:
    copy.mkdir()
    for path in place.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    metadata = pickle.loads((place / ".metadata").read_bytes())
    edit(metadata)
    (copy / ".metadata").write_bytes(pickle.dumps(metadata))
    return copy


def _chunks(metadata: Metadata) -> list[ChunkStorageMetadata]:
    found = metadata.state_dict_metadata["t"]
    assert isinstance(found, TensorStorageMetadata)
    return found.chunks


def test_chunks_that_fit_together(sharded: Path) -> None:
    loaded = {"t": torch.zeros(64, 50)}
    ckpt.load(loaded, sharded)
    assert bits(loaded["t"]) == bits(WHOLE)


@pytest.mark.parametrize("strict", [True, False])
def test_restores_of_the_manager_are_checked_too(sharded: Path, tmp_path: Path, strict: bool) -> None:
    place = _changed(sharded, tmp_path / "c", lambda found: _chunks(found).pop(1))

    def load(name: str, size: list[int]) -> None:
        planner = NamingLoadPlanner(strict=strict, optional=["t", "other", "new"], optimizers=())
        ckpt.load({name: torch.zeros(size), "new": torch.zeros(2)}, place, planner=planner)

    load("other", [3])
    with pytest.raises(FormatError, match="no chunks that together make up the part of 't'"):
        load("t", [64, 50])


@pytest.mark.parametrize("lacking", [0, 1, 2, 3])
def test_a_chunk_that_the_metadata_lack(sharded: Path, tmp_path: Path, lacking: int) -> None:
    place = _changed(sharded, tmp_path / "c", lambda found: _chunks(found).pop(lacking))
    with pytest.raises(FormatError, match="no chunks that together make up the part of 't'"):
        ckpt.load({"t": torch.zeros(64, 50)}, place)
    other = {"other": torch.zeros(3)}
    ckpt.load(other, place)
    assert bits(other["other"]) == bits(random_tensor(3))


def test_a_tensor_without_chunks(sharded: Path, tmp_path: Path) -> None:
    place = _changed(sharded, tmp_path / "c", lambda found: _chunks(found).clear())
    with pytest.raises(FormatError, match="holds no chunk of 't'"):
        ckpt.load({"t": torch.zeros(64, 50)}, place)


def test_chunks_that_overlap_and_leave_a_gap(sharded: Path, tmp_path: Path) -> None:
    """Their sizes add up to the tensor's."""

    def edit(found: Metadata) -> None:
        chunks = _chunks(found)
        chunks[-1] = chunks[0]

    place = _changed(sharded, tmp_path / "c", edit)
    with pytest.raises(FormatError, match="no chunks that together make up"):
        ckpt.load({"t": torch.zeros(64, 50)}, place)


def test_a_planner_of_its_own_may_leave_things_out(sharded: Path) -> None:
    class Half(dcp.DefaultLoadPlanner):
        def create_local_plan(self) -> Any:
            plan = super().create_local_plan()
            plan.items[:] = [item for item in plan.items if item.dest_offsets[0] == 0]
            return plan

    loaded = {"t": torch.zeros(64, 50)}
    ckpt.load(loaded, sharded, planner=Half())
    assert bits(loaded["t"][:32]) == bits(WHOLE[:32])
    assert not loaded["t"][32:].any()


@settings(max_examples=examples(500))
@given(st.integers(0, 2**32))
def test_tiled_box_is_right(seed: int) -> None:
    chance = random.Random(seed)
    dimensions = chance.randrange(4)
    cuts = [sorted({0, 4, *(chance.randrange(1, 4) for _ in range(2))}) for _ in range(dimensions)]
    boxes: list[Box] = [
        (tuple(begin for begin, _ in sides), tuple(end for _, end in sides))
        for sides in itertools.product(*(list(itertools.pairwise(cut)) for cut in cuts))
    ]
    chance.shuffle(boxes)
    for _ in range(chance.randrange(3)):
        if chance.random() < 0.5 and len(boxes) > 1:
            boxes.pop()
        else:
            boxes.append(chance.choice(boxes))
    count: dict[tuple[int, ...], int] = {}
    for begin, end in boxes:
        for place in itertools.product(*(range(b, e) for b, e in zip(begin, end, strict=True))):
            count[place] = count.get(place, 0) + 1
    begin = tuple(min(box[0][d] for box in boxes) for d in range(dimensions))
    end = tuple(max(box[1][d] for box in boxes) for d in range(dimensions))
    places = set(itertools.product(*(range(b, e) for b, e in zip(begin, end, strict=True))))
    fits = count.keys() == places and set(count.values()) == {1}
    assert tiled_box(boxes) == ((begin, end) if fits else None)


def test_chunks_of_very_many_dimensions_are_whole() -> None:
    corners = list(itertools.product((0, 1), repeat=13))
    boxes: list[Box] = [(corner, tuple(begin + 1 for begin in corner)) for corner in corners]
    assert tiling_fault(boxes, [2] * 13) is None
    assert tiling_fault(boxes[1:], [2] * 13) == f"[{', '.join(['0:1'] * 13)}] is not stored"


@pytest.mark.parametrize("rows", [40, pytest.param(400, id="a hundred thousand", marks=pytest.mark.long)])
def test_each_of_many_chunks_is_looked_at_once(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    corners: list[bytes] = []

    def note(offsets: Sequence[int]) -> bytes:
        corners.append(packed(offsets))
        return corners[-1]

    monkeypatch.setattr("ckpt.transfer.boxes.packed", note)
    boxes: list[Box] = [
        ((row, column), (row + 1, column + 1)) for row in range(rows) for column in range(250)
    ]
    assert tiled_box(boxes) == ((0, 0), (rows, 250))
    assert len(corners) == 4 * (len(boxes) + 1)
    assert tiled_box(boxes[1:]) is None
    corners.clear()
    many: list[Box] = [(tuple([i % 7] * 40), tuple([i % 7 + 1] * 40)) for i in range(1000)]
    assert tiled_box(many) is None  # each has 2**40 corners
    assert not corners
