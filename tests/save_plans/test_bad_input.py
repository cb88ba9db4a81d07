"""States of real ranks that do not fit together, and errors that all ranks have: what each rank is told."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import ckpt
from ckpt.errors import CheckpointError, SaveFailed

RANKS = 4


def _shards(rows: int, local: torch.Tensor) -> DTensor:
    mesh = init_device_mesh("cpu", (RANKS,))
    return DTensor.from_local(local, mesh, [Shard(0)], shape=torch.Size([rows, 3]), stride=(3, 1))


def _states(rank: int) -> dict[str, Callable[[], dict[str, Any]]]:
    usual = {"b": torch.ones(3)}
    return {
        "shape": lambda: usual | {"w": torch.zeros(4 if rank != 2 else 5)},
        "dtype": lambda: (
            usual | {"w": _shards(8, torch.zeros(2, 3).to((torch.float32, torch.half)[rank == 1]))}
        ),
        "global": lambda: (
            usual | {"w": _shards(8 if rank != 3 else 12, torch.zeros(2 if rank != 3 else 3, 3))}
        ),
        "kind": lambda: usual | {"w": torch.zeros(4) if rank != 1 else "text"},
        "local": lambda: usual | {"w": _shards(10, torch.zeros([3, 4, 3, 1][rank], 3))},
        "all": lambda: usual | {"w": torch.zeros(4).to_sparse()},
    }


EXPECTED = {
    "shape": "'w' is a tensor of float32 (4,) on rank 0, 1, 3, and a tensor of float32 (5,) on rank 2",
    "dtype": "'w' is a tensor of float32 (8, 3) on rank 0, 2, 3, and a tensor of float16 (8, 3) on rank 1",
    "global": "'w' is a tensor of float32 (8, 3) on rank 0, 1, 2, and a tensor of float32 (12, 3) on rank 3",
    "kind": "'w' is a tensor of float32 (4,) on rank 0, 2, 3, and an object on rank 1",
    "local": "'w' was planned as torch.float32 (3, 3) but is torch.float32 (4, 3); the local tensor of a DTensor must",
    "all": "also failed: rank 1, 2, 3",
}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, tuple[str, int, int]]]:
    root = tmp_path_factory.mktemp("root")
    results = run_ranks(RANKS, _save_all, str(root))
    assert not [*root.rglob("*.distcp"), *root.rglob("commit.json")]
    return results


def _save_all(rank: int, root: str) -> dict[str, tuple[str, int, int]]:
    """Save each; return the message, how many ranks failed, and the characters that were logged."""
    log = _Log()
    logging.getLogger().addHandler(log)
    texts: dict[str, tuple[str, int, int]] = {}
    for name, state in _states(rank).items():
        log.characters = 0
        with pytest.raises(SaveFailed) as caught:
            ckpt.save(state(), f"{root}/{name}")
        texts[name] = str(caught.value), caught.value.failed_ranks, log.characters
    return texts


class _Log(logging.Handler):
    characters = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.characters += len(self.format(record))


@pytest.mark.parametrize("name", EXPECTED)
def test_all_ranks_are_told_the_same(name: str, told: list[dict[str, tuple[str, int, int]]]) -> None:
    texts = {each[name][0] for each in told}
    assert len(texts) == 1
    (text,) = texts
    assert EXPECTED[name] in text
    assert "rank" in text
    assert len(text) < 1000
    assert all(each[name][2] < 2000 for each in told)


def test_those_that_fail_alike_are_counted(told: list[dict[str, tuple[str, int, int]]]) -> None:
    assert [each["all"][1] for each in told] == [RANKS] * RANKS


def test_a_mesh_need_not_divide(tmp_path: Path) -> None:
    """Rows as torch.chunk gives them, to some ranks none; and a rank that plans nothing."""
    assert run_ranks(RANKS, _uneven, str(tmp_path / "c")) == [None] * RANKS
    assert ckpt.verify(tmp_path / "c").ok


def _uneven(rank: int, url: str) -> None:
    mesh = init_device_mesh("cpu", (RANKS,))
    state: dict[str, Any] = {
        f"w{rows}": distribute_tensor(torch.arange(3.0 * rows).reshape(rows, 3), mesh, [Shard(0)])
        for rows in (10, 5, 2)
    }
    ckpt.save(state, url)
    loaded = {name: DTensor.from_local(torch.zeros_like(each.to_local()), mesh, [Shard(0)], shape=each.shape, stride=(3, 1))
              for name, each in state.items()}  # fmt: skip
    ckpt.load(loaded, url)
    for name, tensor in state.items():
        assert torch.equal(loaded[name].to_local(), tensor.to_local())
    dist.barrier()
    wrong = {"w10": torch.zeros(11 if rank == 2 else 10, 3)}
    with pytest.raises(CheckpointError) as caught:
        ckpt.load(wrong, url)
    assert "w10" in str(caught.value)
    assert "rank 2" in str(caught.value)
    assert len(str(caught.value)) < 1000
