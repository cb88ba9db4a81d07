"""Four ranks, each with a folder of its own as its node's disk: saved there, restored from wherever it is nearest."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import flip
from support.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import ckpt
from ckpt.errors import LoadFailed
from ckpt.trainer_integration.events import Event

ROWS, COLUMNS = 2048, 256


def full_of(step: int) -> torch.Tensor:
    return torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS) + step


def state_of(world: int, step: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (world,))
    return {
        "sharded": distribute_tensor(full_of(step), mesh, [Shard(0)]),
        "replicated": distribute_tensor(full_of(step)[:600], mesh, [Replicate()]),
        "step": torch.tensor(step),
    }


def _train(rank: int, world: int, folder: str, nodes: str, steps: list[int]) -> int | None:
    with ckpt.CheckpointManager(
        f"{folder}/durable", save=1, local=f"{folder}/node{nodes[rank]}", preflight=False
    ) as manager:
        for step in steps:
            manager.step(step, state_of(world, step))
        return manager.wait_durable(60)


def _restore(rank: int, world: int, folder: str, nodes: str) -> tuple[int, dict[str, float]]:
    events: list[Event] = []
    state = state_of(world, 0)
    with ckpt.CheckpointManager(
        f"{folder}/durable",
        save=1,
        local=f"{folder}/node{nodes[rank]}",
        preflight=False,
        events=[events.append],
    ) as manager:
        try:
            found = manager.restore(state)
        except LoadFailed:
            return -1, {event.reason: 0.0 for event in events if event.kind == "passed_over"}
    assert found is not None
    for name, rows in (("sharded", ROWS), ("replicated", 600)):
        tensor = state[name]
        assert isinstance(tensor, DTensor)
        assert torch.equal(tensor.full_tensor(), full_of(found.step)[:rows])
    assert int(state["step"]) == found.step
    values = [dict(event.values) for event in events if event.kind == "restored"]
    return found.step, values[0] if values else {}


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    assert run_ranks(4, _train, 4, str(tmp_path), "0123", [1, 2]) == [2, 2, 2, 2]
    return tmp_path


def restored(folder: Path, nodes: str = "0123") -> tuple[int, dict[str, float]]:
    steps = run_ranks(len(nodes), _restore, len(nodes), str(folder), nodes)
    assert len({step for step, _ in steps}) == 1
    step, read = steps[0]
    return step, read


def data_bytes(folder: Path, rank: int) -> int:
    files = (folder / "durable/step-00000002" / f"rank-{rank:05}").iterdir()
    return sum(file.stat().st_size for file in files if not file.name.endswith(".index"))


def remove_durable(folder: Path, *steps: int) -> None:
    (folder / "durable/ckpt-run.json").unlink()
    for step in steps:
        shutil.rmtree(folder / f"durable/step-{step:08}")


def test_all_nodes_alive(trained: Path) -> None:
    step, read = restored(trained)
    assert step == 2
    assert read["durable_bytes"] == 0
    assert read["neighbours_bytes"] > 0  # what one rank has saved for all


def test_nodes_in_another_order(trained: Path) -> None:
    step, read = restored(trained, "1230")
    assert step == 2
    assert read["durable_bytes"] == 0


def test_all_on_one_node(tmp_path: Path) -> None:
    run_ranks(4, _train, 4, str(tmp_path), "0000", [1, 2])
    assert restored(tmp_path, "0000")[1]["neighbours_bytes"] == 0


def test_a_node_that_was_replaced(trained: Path) -> None:
    shutil.rmtree(trained / "node1")
    lost_bytes = data_bytes(trained, 1)
    for _ in range(2):  # the second time that node knows the checkpoint, and has none of its files
        step, read = restored(trained)
        assert step == 2
        assert 0 < read["durable_bytes"] <= 1.02 * lost_bytes


def test_a_node_that_was_replaced_before_it_was_durable(trained: Path) -> None:
    """A newer checkpoint that a lost node had a part of does not count; an older durable one does."""
    shutil.rmtree(trained / "node1")
    remove_durable(trained, 2)
    assert restored(trained)[0] == 1


def test_nothing_is_whole(trained: Path) -> None:
    shutil.rmtree(trained / "node1")
    remove_durable(trained, 1, 2)
    step, reasons = restored(trained)
    assert step == -1
    assert [*reasons] == ["the nodes have 3 of its 4 parts, and it is not durable"]


def test_the_durable_place_completes_it(trained: Path) -> None:
    """The lost node had sent its part; those of the others are only on their disks."""
    shutil.rmtree(trained / "node1")
    for name in (".metadata", "commit.json", "rank-00000", "rank-00002", "rank-00003"):
        path = trained / "durable/step-00000002" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    (trained / "durable/ckpt-run.json").unlink()
    step, read = restored(trained)
    assert step == 2
    assert 0 < read["durable_bytes"] <= 1.02 * data_bytes(trained, 1)


def test_nothing_durable_is_needed(trained: Path) -> None:
    shutil.rmtree(trained / "durable")
    assert restored(trained)[0] == 2


def test_another_number_of_ranks(trained: Path) -> None:
    step, read = restored(trained, "01")
    assert step == 2
    lost_bytes = data_bytes(trained, 2) + data_bytes(trained, 3)
    assert 0 < read["durable_bytes"] <= 1.02 * lost_bytes
    step, read = restored(trained, "012345")
    assert (step, read["durable_bytes"]) == (2, 0)


def test_a_damaged_file_on_another_node(trained: Path) -> None:
    (run,) = (trained / "node2").iterdir()
    (file,) = (run / "step-00000002/rank-00002").glob("*.distcp")
    flip(file, 300_000)
    step, read = restored(trained, "1230")
    assert step == 2
    assert 0 < read["durable_bytes"] <= 2 * (1 << 19)


def test_a_stale_node(trained: Path) -> None:
    """A node that comes back with files of a save that was made again since."""
    shutil.copytree(trained / "node3", trained / "stale")
    run_ranks(4, _train, 4, str(trained), "0123", [2, 3])
    shutil.rmtree(trained / "node3")
    (trained / "stale").rename(trained / "node3")
    assert restored(trained)[0] == 3
