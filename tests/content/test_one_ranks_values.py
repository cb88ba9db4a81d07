"""Values of which one rank's stand for all: they are those of one rank, whole, or the save says that they are not."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from support.parts import Part
from support.ranks import run_ranks
from torch import nn

import ckpt
from ckpt.errors import SaveFailed


class Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logging.getLogger("ckpt").addHandler(self)
        logging.getLogger("ckpt").setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _buffers(rank: int, folder: str) -> None:
    def make(mark: float) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.BatchNorm1d(3) for _ in range(4)])
        for buffer in model.buffers():
            buffer.fill_(mark)
        return model

    log = Log()
    with ckpt.CheckpointManager(f"{folder}/run", save=1, preflight=False) as manager:
        for step in (1, 2):
            manager.save(step, model=make(10 * step + rank))
            manager.wait_durable(240)
        fresh = make(-1)
        manager.restore(model=fresh)
    for name, buffer in fresh.named_buffers():
        assert {*buffer.reshape(-1).tolist()} == {20.0}, f"{name} is rank 0's, as all the others"
    named = [line for line in log.lines if line.startswith("buffers differ")]
    assert len(named) == (rank == 0), "once"


def test_buffers_that_differ_are_all_of_rank_0(tmp_path: Path) -> None:
    run_ranks(4, _buffers, str(tmp_path))


def _part(rank: int, folder: str) -> None:
    log = Log()
    part = Part(
        {"last": 10 + rank, "count": 20 + rank, "inner": {"t": torch.full((9,), 30.0 + rank), "n": rank}}
    )
    ckpt.save({"metrics": part}, f"{folder}/a")
    fresh = Part({})
    ckpt.load({"metrics": fresh}, f"{folder}/a")
    assert fresh.value["inner"]["t"].tolist() == [30.0] * 9
    del fresh.value["inner"]["t"]
    assert fresh.value == {"last": 10, "count": 20, "inner": {"n": 0}}
    assert any("ranks hold other values" in line for line in log.lines) == (rank == 0)


def test_a_part_that_differs_is_that_of_one_rank(tmp_path: Path) -> None:
    run_ranks(3, _part, str(tmp_path))


def _keys(rank: int, folder: str) -> None:
    log = Log()
    loader = Part({"shards": {f"shard-{rank}.tar": 100 + rank}})
    with pytest.raises(SaveFailed, match=r"loader=ckpt\.per_rank"):
        ckpt.save({"loader": loader}, f"{folder}/a")
    average = Part({"shadow": {f"stage{rank}": torch.full((2,), float(rank))}, "decay": 0.9})
    ckpt.save({"average": average}, f"{folder}/b")
    assert any("other keys of 'average'" in line for line in log.lines) == (rank == 0)
    fresh = Part({})
    ckpt.load({"average": fresh}, f"{folder}/b")
    assert sorted(fresh.value["shadow"]) == ["stage0", "stage1"]


def test_keys_of_one_rank_only(tmp_path: Path) -> None:
    run_ranks(2, _keys, str(tmp_path))


def _containers(rank: int, folder: str) -> None:
    tensor = torch.ones(2)
    cases: dict[str, list[Any]] = {
        "empty-list": [[], [tensor]],
        "none": [None, {"w": tensor}],
        "objects": [[1], [tensor]],
    }
    with pytest.raises(SaveFailed, match=r"a value on some ranks, and a container on others: 'x'"):
        ckpt.save({"x": [None, {"w": tensor}][rank]}, f"{folder}/whole")
    for name, pair in cases.items():
        for number, order in enumerate((pair, pair[::-1])):
            for value in (Part({"held": order[rank], "more": 1}), {"held": order[rank], "more": 1}):
                place = f"{folder}/{name}{number}{type(value).__name__}"
                with pytest.raises(
                    SaveFailed, match=r"a value on some ranks, and a container on others: 'x.held'"
                ):
                    ckpt.save({"x": value}, place)


def test_a_value_that_is_a_container_elsewhere(tmp_path: Path) -> None:
    run_ranks(2, _containers, str(tmp_path))


def _kinds_of_keys(rank: int, folder: str) -> None:
    log = Log()
    ckpt.save({"x": Part({"held": {1: 2} if rank else {"1": 2}})}, f"{folder}/a")
    assert any("other keys of 'x'" in line for line in log.lines) == (rank == 0)


def test_keys_of_other_types(tmp_path: Path) -> None:
    run_ranks(2, _kinds_of_keys, str(tmp_path))


def _marked(rank: int, folder: str) -> None:
    log = Log()
    state = {
        "metrics": Part({"own": {1: rank}, "all": 5}),
        "loader": Part({"position": rank, "seed": 3}),
        "sampler": Part({"drawn": rank, "empty": {}}),
    }
    options = ckpt.options.SaveOptions(per_rank=["metrics.own", "loader.position", "sampler"])
    ckpt.save(state, f"{folder}/a", options=options)
    assert not [line for line in log.lines if "ranks hold other" in line]
    fresh = {name: Part({}) for name in state}
    ckpt.load(fresh, f"{folder}/a")
    assert {name: part.value for name, part in fresh.items()} == {
        name: part.value for name, part in state.items()
    }


def test_keys_that_patterns_mark_are_no_difference(tmp_path: Path) -> None:
    run_ranks(2, _marked, str(tmp_path))


def _with_dots(rank: int, folder: str) -> None:
    value = {"a": 1, "a.b": 2} | ({"more": 3} if rank else {})
    ckpt.save({"x": Part(value)}, f"{folder}/a")


def test_a_key_with_a_dot_is_no_container(tmp_path: Path) -> None:
    run_ranks(2, _with_dots, str(tmp_path))


def _own_notes(rank: int, folder: str) -> None:
    """One value differs: the first rank's stand for the shared ones, and each rank keeps the structure of its own."""
    part = Part({"shared": 10 + rank, "own": {1: rank, "none": {}}})
    options = ckpt.options.SaveOptions(per_rank=["x.own"])
    ckpt.save({"x": part}, f"{folder}/a", options=options)
    fresh = Part({})
    ckpt.load({"x": fresh}, f"{folder}/a")
    assert fresh.value == {"shared": 10, "own": {1: rank, "none": {}}}


def test_what_is_each_ranks_own_keeps_its_structure(tmp_path: Path) -> None:
    run_ranks(2, _own_notes, str(tmp_path))
