"""Four ranks, each with a folder of its own as its node's disk: saved there, restored from wherever it is nearest."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.commands import flip
from support.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import ckpt
from ckpt.errors import LoadFailed, StorageFull
from ckpt.local_first import partners, saving
from ckpt.local_first.partners import Node, share_of, sources_of
from ckpt.trainer_integration.events import Event
from ckpt.writing.stager import COMMON_MEMORY

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
        return manager.wait_durable(240)


def _train_from(rank: int, world: int, folder: str, nodes: str, begun: int, steps: list[int]) -> None:
    with ckpt.CheckpointManager(
        f"{folder}/durable", save=1, local=f"{folder}/node{nodes[rank]}", preflight=False
    ) as manager:
        assert manager.restore(state_of(world, 0), step=begun)
        for step in steps:
            manager.step(step, state_of(world, step))
        manager.wait_durable(240)


def _restore(rank: int, world: int, folder: str, nodes: str) -> tuple[int, dict[str, float]]:
    events: list[Event] = []
    state = state_of(world, 0)
    with ckpt.CheckpointManager(
        f"{folder}/durable",
        save=1,
        local=ckpt.LocalTier(f"{folder}/node{nodes[rank]}", drain_timeout_s=10),
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
    files = (folder / "durable/step-00000002" / f"rank-{rank:05}").glob("*.distcp")
    return sum(file.stat().st_size for file in files)


def remove_durable(folder: Path, *steps: int) -> None:
    """Have checkpoints be as before they were durable."""
    (folder / "durable/ckpt-run.json").unlink()
    for step in steps:
        shutil.rmtree(folder / f"durable/step-{step:08}")
    forget_durable(folder)


def forget_durable(folder: Path) -> None:
    for status in folder.glob("node*/*/ckpt-drain.json"):
        status.unlink()


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


def test_killed_while_the_nodes_commit(trained: Path) -> None:
    """The first rank's node has the commit record: that says that all have written all, though two have none yet."""
    remove_durable(trained, 1, 2)
    for node in (1, 3):
        for record in (trained / f"node{node}").glob("*/step-*/commit.json"):
            record.unlink()
    step, read = restored(trained)
    assert step == 2
    assert read["durable_bytes"] == 0
    assert len([*trained.glob("node*/*/step-00000002/commit.json")]) == 4
    assert ckpt.verify(trained / "durable/step-00000002").ok


def test_the_durable_place_completes_it(trained: Path) -> None:
    """The lost node had sent its part; those of the others are only on their disks."""
    shutil.rmtree(trained / "node1")
    for name in (".metadata", "commit.json", "rank-00000", "rank-00002", "rank-00003"):
        path = trained / "durable/step-00000002" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    remove_durable(trained)
    step, read = restored(trained)
    assert step == 2
    assert 0 < read["durable_bytes"] <= 1.02 * data_bytes(trained, 1)


def test_nothing_durable_is_needed(trained: Path) -> None:
    shutil.rmtree(trained / "durable")
    forget_durable(trained)
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


def test_a_file_that_is_too_short_on_another_node(trained: Path) -> None:
    """It is damage, as on the own disk: what is not durable is passed over."""
    for file in trained.glob("node*/*/step-00000002/rank-00000/*.distcp"):
        os.truncate(file, file.stat().st_size - 1000)
    assert restored(trained, "1230")[0] == 2
    remove_durable(trained, 2)
    assert restored(trained, "1230")[0] == 1


def test_a_stale_node(trained: Path) -> None:
    """A node that comes back with files of a save that was made again since."""
    shutil.copytree(trained / "node3", trained / "stale")
    run_ranks(4, _train_from, 4, str(trained), "0123", 1, [2, 3])
    shutil.rmtree(trained / "node3")
    (trained / "stale").rename(trained / "node3")
    assert restored(trained)[0] == 3


def _train_with_copies(rank: int, world: int, folder: str, nodes: str, steps: list[int]) -> int | None:
    events: list[Event] = []
    tier = ckpt.LocalTier(f"{folder}/node{nodes[rank]}", copies=1)
    with ckpt.CheckpointManager(
        f"{folder}/durable", save=1, local=tier, preflight=False, events=[events.append]
    ) as manager:
        for step in steps:
            manager.step(step, state_of(world, step))
        assert not [event for event in events if event.kind == "not_copied"]
        return manager.wait_durable(240)


@pytest.mark.parametrize("nodes", ["0123", "0011"])
def test_copies_on_another_node(tmp_path: Path, nodes: str) -> None:
    """A node is lost before its part was durable: the copies have all of it, and become durable."""
    assert run_ranks(4, _train_with_copies, 4, str(tmp_path), nodes, [1, 2]) == [2] * 4
    sent_bytes = [
        json.loads(path.read_text())["checkpoints"]["step-00000002"]["sent_bytes"]
        for path in sorted(tmp_path.glob("node*/*/ckpt-drain.json"))
    ]
    assert all(sent_bytes)
    assert sum(sent_bytes) == sum(data_bytes(tmp_path, rank) for rank in range(4))  # nothing twice
    whole = {path.name: path.stat().st_size for path in (tmp_path / "durable/step-00000002").rglob("*.*")}
    shutil.rmtree(tmp_path / "node1")
    shutil.rmtree(tmp_path / "durable")
    for status in tmp_path.glob("node*/*/ckpt-drain.json"):
        status.unlink()
    step, read = restored(tmp_path, nodes)
    assert (step, read["durable_bytes"]) == (2, 0)
    # All that is there is carried, by whoever has it.
    again = {path.name: path.stat().st_size for path in (tmp_path / "durable/step-00000002").rglob("*.*")}
    assert again == whole


def test_a_node_is_replaced_while_there_are_copies(tmp_path: Path) -> None:
    """The next job with copies carries what only another node has; what each has itself is carried once."""
    assert run_ranks(4, _train_with_copies, 4, str(tmp_path), "0123", [1, 2]) == [2] * 4
    parts_bytes = [data_bytes(tmp_path, rank) for rank in range(4)]
    shutil.rmtree(tmp_path / "node1")
    shutil.rmtree(tmp_path / "durable")
    for status in tmp_path.glob("node*/*/ckpt-drain.json"):
        status.unlink()
    run_ranks(4, _train_with_copies, 4, str(tmp_path), "0123", [])
    found = [
        json.loads(path.read_text())["checkpoints"]["step-00000002"]
        for path in sorted(tmp_path.glob("node[023]/*/ckpt-drain.json"))
    ]
    assert ckpt.verify(tmp_path / "durable/step-00000002").ok
    assert [each["sent_bytes"] for each in found] == [
        parts_bytes[0],
        parts_bytes[2] + parts_bytes[1],
        parts_bytes[3],
    ]


def _leased() -> int:
    """Count the states that are staged in memory."""
    COMMON_MEMORY._take_back()
    return COMMON_MEMORY._in_use


def _memory_in_use(rank: int, folder: str, copies: int) -> list[int]:
    """Return how many states are staged when copies are made, and when the save is local."""
    found: list[int] = []
    make_copies = partners.copy_from_partners

    def look(*args: Any) -> Any:
        found.append(_leased())
        return make_copies(*args)

    def look_too(event: Event) -> None:
        if event.kind == "local":
            found.append(_leased())

    vars(saving)["copy_from_partners"] = look
    tier = ckpt.LocalTier(f"{folder}/node{rank}", copies=copies)
    more: dict[str, Any] = {"preflight": False, "events": [look_too]}
    with ckpt.CheckpointManager(f"{folder}/durable", save=1, local=tier, **more) as manager:
        manager.step(1, state_of(2, 1))
        assert manager.wait_durable(240) == 1
    return found


@pytest.mark.parametrize("copies", [0, 1])
def test_memory_is_free_when_the_local_write_ends(tmp_path: Path, copies: int) -> None:
    """The copies on other nodes, too, are made from the disk."""
    first, second = run_ranks(2, _memory_in_use, str(tmp_path), copies)
    assert first == [0] * (1 + copies)  # events are the first rank's
    assert second == [0] * copies


def test_a_node_is_lost_for_which_the_others_wait(tmp_path: Path) -> None:
    """They have sent what is theirs, and say so; what only a copy has is missing, and nobody has given it up."""
    assert run_ranks(4, _train_with_copies, 4, str(tmp_path), "0123", [1, 2]) == [2] * 4
    lost_bytes = data_bytes(tmp_path, 1)
    shutil.rmtree(tmp_path / "node1")
    shutil.rmtree(tmp_path / "durable/step-00000002/rank-00001")
    for name in ("step-00000002/commit.json", "step-00000002/.metadata", "ckpt-run.json"):
        (tmp_path / "durable" / name).unlink()
    for path in tmp_path.glob("node*/*/ckpt-drain.json"):
        status = json.loads(path.read_text())
        status["checkpoints"]["step-00000002"] |= {"state": "waiting", "reason": "a file is not there"}
        path.write_text(json.dumps(status))
    run_ranks(4, _train_with_copies, 4, str(tmp_path), "0123", [])
    found = [
        json.loads(path.read_text())["checkpoints"]["step-00000002"]
        for path in sorted(tmp_path.glob("node[023]/*/ckpt-drain.json"))
    ]
    assert ckpt.verify(tmp_path / "durable/step-00000002").ok
    assert [each["sent_bytes"] for each in found] == [0, lost_bytes, 0]


def _train_where_a_disk_is_full(rank: int, folder: str) -> list[str]:
    def refuse(*args: Any) -> None:
        raise StorageFull("the disk is full", url=folder)

    if rank == 1:
        vars(partners)["put_once"] = refuse
    events: list[Event] = []
    tier = ckpt.LocalTier(f"{folder}/node{rank}", copies=1)
    with ckpt.CheckpointManager(
        f"{folder}/durable", save=1, local=tier, preflight=False, events=[events.append]
    ) as manager:
        manager.step(1, state_of(2, 1))
        assert manager.wait_durable(240) == 1
    return [f"{event.kind}: {event.reason}" for event in events if event.kind in ("local", "not_copied")]


def test_a_copy_that_cannot_be_made(tmp_path: Path) -> None:
    told, _ = run_ranks(2, _train_where_a_disk_is_full, str(tmp_path))
    assert len(told) == 2
    assert "another node has no copy: rank 1: " in told[0]
    assert "the disk is full" in told[0]
    assert restored(tmp_path, "01")[0] == 1


def test_copies_need_two_disks(tmp_path: Path) -> None:
    events: list[Event] = []
    tier = ckpt.LocalTier(tmp_path / "local", copies=1)
    with ckpt.CheckpointManager(tmp_path / "durable", save=1, local=tier, events=[events.append]) as manager:
        manager.step(1, {"x": torch.ones(3)})
    assert [event.reason for event in events if event.kind == "not_copied"] == [
        "copies would be lost with what they are copies of: all ranks share one disk"
    ]


@given(
    domains=st.lists(st.sampled_from(["a", "b", "c", ""]), min_size=1, max_size=9),
    ranks_per_node=st.integers(1, 3),
)
def test_each_node_keeps_the_copies_of_one_other(domains: list[str], ranks_per_node: int) -> None:
    nodes = [
        Node(tuple(range(ranks_per_node * number, ranks_per_node * (number + 1))), domain)
        for number, domain in enumerate(domains)
    ]
    node_of = {rank: node for node in nodes for rank in node.ranks}
    sources = {rank: sources_of(rank, nodes) for rank in node_of}
    if len(nodes) == 1:
        assert set(sources.values()) == {()}
        return
    assert sorted(source for each in sources.values() for source in each) == sorted(node_of)
    apart = 2 * max(Counter(domains).values()) <= len(nodes)
    for rank, (source,) in sources.items():
        assert node_of[source] is not node_of[rank]
        assert not apart or node_of[source].domain != node_of[rank].domain


def test_nodes_with_other_numbers_of_ranks() -> None:
    nodes = [Node((0, 1, 2)), Node((3,)), Node((4, 5))]
    assert [sources_of(rank, nodes) for rank in range(6)] == [(4,), (5,), (), (0, 1, 2), (3,), ()]


@given(
    st.lists(st.dictionaries(st.sampled_from("abcde"), st.integers(0, 5), max_size=5), min_size=1, max_size=5)
)
def test_each_file_has_one_node_that_carries_it(held: list[dict[str, int]]) -> None:
    written = dict(zip("abcde", range(5), strict=True))
    nodes = [
        Node((number,), has={"id": {path: written[path] for path in paths}})
        for number, paths in enumerate(held)
    ]
    shares = [share_of(node, nodes) for node in nodes]
    assert [share.ranks for share in shares] == [{number} for number in range(len(nodes))]
    for number, share in enumerate(shares):  # also of what it has damaged, and so does not list
        assert share.left["id"] >= {
            path for other in (*held[:number], *held[number + 1 :]) for path in other
        } - {*held[number]}
    carried = [{*paths} - share.left["id"] for paths, share in zip(held, shares, strict=True)]
    assert sorted(itertools.chain(*carried)) == sorted({*itertools.chain(*held)})
    for number, paths in enumerate(held):  # the one that wrote it, if it has it
        assert all(path in carried[number] for path in paths if written[path] == number)


def test_a_node_without_the_record_carries_what_no_other_has() -> None:
    """It is given the record by the restore: of what was written there, the others knew nothing."""
    nodes = [Node((0,), has={"id": {"a": 1}}), Node((1,))]
    assert [share_of(node, nodes).left for node in nodes] == [{"id": frozenset()}, {"id": frozenset("a")}]
