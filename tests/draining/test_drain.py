"""`ckpt.drain`: checkpoints of a node's disk become durable elsewhere; killed, cut off, damaged, on several nodes."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.clock import SkippingClock, skip_pauses_of_s3
from support.commands import edit_commit, flip
from support.proxy import Call, FaultProxy
from support.ranks import start
from support.saves import FailingPlanner
from support.states import digest, emptied, random_tensor
from support.strict_s3 import Request, StrictS3

import ckpt
from ckpt.backends.registry import open_store
from ckpt.consistency import environment
from ckpt.draining.drain import Drained
from ckpt.draining.folder_lock import held
from ckpt.errors import AccessDenied, ConfigurationError, SaveFailed
from ckpt.format.records import read_commit
from ckpt.format.run_record import RunRecord, write_run
from ckpt.writing.coordinator import Coordinator

MIB = 1 << 20
DURABLE = "s3://bucket/run"


def state_of(seed: int) -> dict[str, Any]:
    return {"large": random_tensor(3 * MIB, seed=seed), "small": random_tensor(9, seed=seed), "seed": seed}


def save(local: Path, step: int, seed: int | None = None, **more: Any) -> None:
    state = state_of(step if seed is None else seed)
    ckpt.save(state, local / f"step-{step}", no_dist=True, tags={"step": str(step)}, **more)


def holds(url: str | Path, seed: int, **more: Any) -> bool:
    loaded = {key: emptied(value) for key, value in state_of(0).items()}
    ckpt.load(loaded, url, no_dist=True, **more)
    return bool(digest(loaded) == digest(state_of(seed)))


def outcomes(drained: list[Drained]) -> list[tuple[str, str]]:
    return [(each.path, each.state) for each in drained]


@pytest.fixture
def local(tmp_path: Path) -> Path:
    return tmp_path / "local"


@pytest.fixture
def durable(tmp_path: Path) -> Path:
    return tmp_path / "durable"


@pytest.fixture
def to_server(server: StrictS3) -> dict[str, Any]:
    return {"storage_options": server.options}


# -- what becomes of checkpoints -----------------------------------------------------------------------


@pytest.mark.slow
def test_all_become_durable_in_order(local: Path, server: StrictS3, to_server: dict[str, Any]) -> None:
    for step in (20, 100, 3):
        save(local, step)
    done = list(ckpt.drain(local, DURABLE, **to_server))
    assert outcomes(done) == [("step-3", "durable"), ("step-20", "durable"), ("step-100", "durable")]
    assert [each.step for each in done] == [3, 20, 100]
    assert done[0].url == f"{DURABLE}/step-3"
    assert all(each.sent_bytes >= 12 * MIB and each.took_s > 0 for each in done)
    commits = [each.name for each in server.sent("PutObject") if each.name.endswith("commit.json")]
    assert commits == ["run/step-3/commit.json", "run/step-20/commit.json", "run/step-100/commit.json"]
    assert all(holds(f"{DURABLE}/step-{step}", step, **to_server) for step in (3, 20, 100))
    assert ckpt.verify(f"{DURABLE}/step-3", **to_server).ok


def test_nothing_is_sent_twice(local: Path, server: StrictS3, to_server: dict[str, Any]) -> None:
    save(local, 1)
    list(ckpt.drain(local, DURABLE, **to_server))
    server.requests.clear()
    assert [
        (each.state, each.sent_bytes, each.took_s) for each in ckpt.drain(local, DURABLE, **to_server)
    ] == [("durable", 0, 0.0)]
    assert {each.method for each in server.requests} <= {"GET", "HEAD"}


def test_stock_readers_read_it(local: Path, durable: Path) -> None:
    save(local, 1)
    list(ckpt.drain(local, durable))
    loaded = {"large": torch.zeros(3 * MIB)}
    dcp.load(loaded, storage_reader=dcp.FileSystemReader(durable / "step-1"))
    assert digest(loaded["large"]) == digest(state_of(1)["large"])


def test_what_is_not_committed_stays(local: Path, durable: Path) -> None:
    save(local, 1)
    with pytest.raises(SaveFailed):
        save(local, 2, planner=FailingPlanner(2, lambda: 1 / 0))
    (local / "logs").mkdir()
    (local / "logs" / "x.txt").write_text("x")
    assert outcomes(list(ckpt.drain(local, durable))) == [("step-1", "durable")]
    assert sorted(path.name for path in durable.iterdir()) == ["step-1"]


def test_the_newest_only(local: Path, durable: Path) -> None:
    for step in (1, 2, 3):
        save(local, step)
    assert outcomes(list(ckpt.drain(local, durable, newest=1, keep_local=1))) == [
        ("step-1", "left out"),
        ("step-2", "left out"),
        ("step-3", "durable"),
    ]
    assert [path.name for path in durable.iterdir()] == ["step-3"]
    assert [path.name for path in local.iterdir()] == ["step-3"]


def test_room_is_made_of_what_is_durable(local: Path, durable: Path) -> None:
    for step in (1, 2, 3, 4):
        save(local, step)
    data = next((local / "step-1").glob("rank-00000/*.distcp"))
    flip(data, 1000)
    done = list(ckpt.drain(local, durable, keep_local=2))
    assert outcomes(done)[1:] == [(f"step-{step}", "durable") for step in (2, 3, 4)]
    assert done[0].state == "failed"
    assert "do not match their checksum" in done[0].reason
    assert sorted(path.name for path in local.iterdir()) == ["step-1", "step-3", "step-4"]
    assert not (durable / "step-1" / "commit.json").exists()


def test_what_is_being_saved_again_is_not_removed(local: Path, durable: Path) -> None:
    for step in (1, 2):
        save(local, step)
    with held(str(local / "step-1")) as is_free:
        assert is_free
        list(ckpt.drain(local, durable, keep_local=1))
        assert ckpt.verify(local / "step-1").ok
    list(ckpt.drain(local, durable, keep_local=1))
    assert [path.name for path in local.iterdir()] == ["step-2"]


def test_a_step_that_was_saved_again(local: Path, durable: Path) -> None:
    """A run that went back saves a step anew: the later one replaces the earlier one, and never the other way."""
    save(local, 1, seed=5)
    edit_commit(local / "step-1", lambda record: record.update(created_at="2026-01-01T00:00:00+00:00"))
    before = local.with_name("before")
    shutil.copytree(local, before)
    list(ckpt.drain(local, durable))
    save(local, 1, seed=6)
    assert outcomes(list(ckpt.drain(local, durable))) == [("step-1", "durable")]
    assert holds(durable / "step-1", 6)
    assert len(list((durable / "step-1").glob("rank-00000/*.json"))) == 1
    (old,) = ckpt.drain(before, durable)
    assert (old.state, "a save that is later is committed here" in old.reason) == ("failed", True)
    assert holds(durable / "step-1", 6)


def test_a_step_that_is_saved_again_meanwhile_waits_for_those_before_it(local: Path, durable: Path) -> None:
    for step in (1, 3):
        save(local, step)
    drained = ckpt.drain(local, durable, follow=True, poll_s=0.05)
    done = [next(drained)]
    save(local, 2)
    save(local, 3, seed=4)
    done += [next(drained), next(drained)]
    drained.close()
    assert outcomes(done) == [(f"step-{step}", "durable") for step in (1, 2, 3)]
    assert holds(durable / "step-3", 4)


@pytest.mark.parametrize("when", ["before", "while it is sent"])
def test_what_the_run_has_removed_is_not_committed(local: Path, durable: Path, when: str) -> None:
    save(local, 1)
    with contextlib.closing(open_store(local / "step-1")) as store:
        commit = read_commit(store)
    assert commit is not None
    record = RunRecord(removed=[commit.record.id])

    def remove(*_: int) -> None:
        with contextlib.closing(open_store(durable)) as store:
            write_run(store, record)

    if when == "before":
        remove()
    (done,) = ckpt.drain(local, durable, progress=remove)
    assert (done.state, done.reason) == ("left out", "it was removed there")
    assert (sent := [path.name for path in durable.glob("step-1/*")]) == [] or when != "before"
    assert "commit.json" not in sent


def test_anothers_checkpoint_is_not_replaced(local: Path, durable: Path) -> None:
    save(local, 1)
    save(local, 2)
    dcp.save({"t": torch.zeros(3)}, storage_writer=dcp.FileSystemWriter(durable / "step-1"), no_dist=True)
    first, second = ckpt.drain(local, durable)
    assert (first.state, second.state) == ("failed", "durable")
    assert "another program wrote this" in first.reason


def test_checkpoints_that_name_bytes_of_others(local: Path, durable: Path) -> None:
    state = state_of(1)
    ckpt.save(state, local / "step-1", no_dist=True, digests=True)
    ckpt.save(state | {"small": torch.ones(9)}, local / "step-2", no_dist=True, base=local / "step-1")
    first, second = ckpt.drain(local, durable, keep_local=1)
    assert (first.state, second.state) == ("durable", "durable")
    assert second.sent_bytes < MIB
    assert (local / "step-1").exists()  # the later one names its bytes
    shutil.rmtree(local)
    loaded = {key: emptied(value) for key, value in state.items()}
    ckpt.load(loaded, durable / "step-2", no_dist=True)
    assert digest(loaded["large"]) == digest(state["large"])


def test_the_newest_only_with_what_it_names(local: Path, durable: Path) -> None:
    state = state_of(1)
    ckpt.save(state, local / "step-1", no_dist=True, digests=True)
    save(local, 2)
    ckpt.save(state | {"small": torch.ones(9)}, local / "step-3", no_dist=True, base=local / "step-1")
    assert sorted(outcomes(list(ckpt.drain(local, durable, newest=1)))) == [
        ("step-1", "durable"),
        ("step-2", "left out"),
        ("step-3", "durable"),
    ]


def test_what_it_names_is_not_durable_yet(local: Path, durable: Path) -> None:
    state = state_of(1)
    ckpt.save(state, local / "step-1", no_dist=True, digests=True)
    ckpt.save(state | {"small": torch.ones(9)}, local / "step-2", no_dist=True, base=local / "step-1")
    (local / "step-1" / "commit.json").rename(local / "kept")
    (only,) = ckpt.drain(local, durable, keep_local=1)
    assert (only.path, only.state, only.reason) == (
        "step-2",
        "waiting",
        "a checkpoint whose bytes it names is not durable yet",
    )
    (local / "kept").rename(local / "step-1" / "commit.json")
    assert outcomes(list(ckpt.drain(local, durable))) == [("step-1", "durable"), ("step-2", "durable")]


def test_a_step_that_was_saved_again_and_is_not_durable_stays(local: Path, durable: Path) -> None:
    """It was durable as it was saved first; what is there now is not."""
    for step in (1, 2):
        save(local, step)
    edit_commit(local / "step-1", lambda record: record.update(created_at="2026-01-01T00:00:00+00:00"))
    drains = ckpt.drain(
        local, durable, follow=True, poll_s=0.01, keep_local=1, finish=(finish := threading.Event())
    )
    assert [next(drains).state, next(drains).state] == ["durable", "durable"]
    shutil.rmtree(local / "step-1")
    save(local, 1, seed=7)
    next((local / "step-1").glob("rank-00000/*.json")).rename(local / "manifest")
    waiting = next(drains)
    assert (waiting.path, waiting.state) == ("step-1", "waiting")
    finish.set()
    assert list(drains) == []
    assert (local / "step-1" / "commit.json").exists()


# -- several nodes -------------------------------------------------------------------------------------


@pytest.fixture
def nodes(sharded_place: Path, tmp_path: Path) -> list[Path]:
    """The disks of two nodes: each has its rank's files, the index and the commit."""
    disks = [tmp_path / f"node{node}" for node in range(2)]
    for node, disk in enumerate(disks):
        shutil.copytree(sharded_place, disk / "step-100")
        for path in (disk / "step-100" / f"rank-0000{1 - node}").iterdir():
            if path.suffix != ".index":
                path.unlink()
    return disks


def test_the_last_node_commits(nodes: list[Path], sharded_place: Path, durable: Path) -> None:
    (first,) = ckpt.drain(nodes[1], durable)
    assert (first.state, "rank-00000" in first.reason) == ("waiting", True)
    assert not (durable / "step-100" / "commit.json").exists()
    (second,) = ckpt.drain(nodes[0], durable)
    assert second.state == "durable"
    (again,) = ckpt.drain(nodes[1], durable)
    assert (again.state, again.sent_bytes) == ("durable", 0)
    assert ckpt.diff(sharded_place, durable / "step-100").same
    assert ckpt.verify(durable / "step-100").ok


def test_what_garbage_collection_removed_is_sent_again(
    nodes: list[Path], sharded_place: Path, durable: Path
) -> None:
    """A node was away for longer than the grace period: the files of the other one are leftovers, for all that is known."""
    (first,) = ckpt.drain(nodes[0], durable)
    assert ckpt.collect_garbage(durable, grace_s=0).items
    settled = {first.path: (first.id, first.state)}
    (again,) = ckpt.drain(nodes[0], durable, settled=settled)
    assert [first.state, again.state] == ["waiting", "waiting"]
    assert [each.state for each in ckpt.drain(nodes[1], durable)] == ["durable"]
    assert ckpt.diff(sharded_place, durable / "step-100").same


def test_garbage_collection_passes_over_what_a_living_drain_has_sent(
    nodes: list[Path], server: StrictS3, to_server: dict[str, Any]
) -> None:
    assert [each.state for each in ckpt.drain(nodes[0], DURABLE, **to_server)] == ["waiting"]
    server.dates_s = dict.fromkeys(server.dates_s, time.time() - 48 * 3600)
    sent = len(server.sent("PutObject"))
    assert [each.state for each in ckpt.drain(nodes[0], DURABLE, **to_server)] == ["waiting"]
    assert len(server.sent("PutObject")) == sent + 1  # a manifest
    assert ckpt.collect_garbage(DURABLE, **to_server).items == []
    assert [each.state for each in ckpt.drain(nodes[1], DURABLE, **to_server)] == ["durable"]
    assert ckpt.verify(f"{DURABLE}/step-100", **to_server).ok


def test_another_node_commits_in_between(
    nodes: list[Path], sharded_place: Path, durable: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the other node has committed meanwhile is no checkpoint that this one replaces, and deletes."""
    (first,) = ckpt.drain(nodes[0], durable)
    assert first.state == "waiting"
    look, others = Coordinator.look, list[Drained]()

    def look_late(self: Coordinator, **more: Any) -> None:
        if not others:
            others.append(first)
            others[:] = ckpt.drain(nodes[1], durable)
        look(self, **more)

    monkeypatch.setattr(Coordinator, "look", look_late)
    (second,) = ckpt.drain(nodes[0], durable)
    assert [second.state, *(each.state for each in others)] == ["durable", "durable"]
    assert ckpt.verify(durable / "step-100").ok
    assert ckpt.diff(sharded_place, durable / "step-100").same


def test_a_later_save_is_committed_in_between(
    local: Path, tmp_path: Path, durable: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(local, 1)
    edit_commit(local / "step-1", lambda record: record.update(created_at="2026-01-01T00:00:00+00:00"))
    save(tmp_path / "later", 1, seed=2)
    look, others = Coordinator.look, list[Drained]()

    def look_late(self: Coordinator, **more: Any) -> None:
        monkeypatch.setattr(Coordinator, "look", look)
        others.extend(ckpt.drain(tmp_path / "later", durable))
        look(self, **more)

    monkeypatch.setattr(Coordinator, "look", look_late)
    (earlier,) = ckpt.drain(local, durable)
    assert [earlier.state, *(each.state for each in others)] == ["failed", "durable"]
    assert "a save that is later is committed here" in earlier.reason
    assert holds(durable / "step-1", 2)


def test_a_node_that_waits_asks_less_and_less(
    nodes: list[Path], server: StrictS3, to_server: dict[str, Any]
) -> None:
    """Thousands of nodes may wait for one: not all of them at each poll."""
    stop, clock = threading.Event(), threading.Timer(2.0, lambda: stop.set())
    clock.start()
    found = [*ckpt.drain(nodes[1], DURABLE, follow=True, poll_s=0.01, stop=stop, **to_server)]
    assert {each.state for each in found} == {"waiting"}
    assert len(server.requests) < 150  # 26 when this was written, 579 without pauses


def test_nodes_at_the_same_time(nodes: list[Path], tmp_path: Path) -> None:
    for turn in range(5):
        durable, finish = tmp_path / f"durable{turn}", threading.Event()
        found: list[Drained] = []

        def follow(disk: Path, durable: Path, finish: threading.Event, found: list[Drained]) -> None:
            found.extend(ckpt.drain(disk, durable, follow=True, poll_s=0.01, finish=finish))

        threads = [
            threading.Thread(target=follow, args=[disk, durable, finish, found])
            for disk in nodes
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        deadline_s = time.monotonic() + 60
        while sum(each.state == "durable" for each in [*found]) < len(threads):
            time.sleep(0.01)
            assert time.monotonic() < deadline_s
            assert "failed" not in {each.state for each in found}
            assert any(thread.is_alive() for thread in threads)
        finish.set()
        for thread in threads:
            thread.join()
        assert ckpt.verify(durable / "step-100").ok


class _Clock(SkippingClock):
    """Its waits for an event are over at once too."""

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        self.sleep(timeout_s)
        return event.is_set()


# -- trouble -------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("answer", [(500, "InternalError"), (503, "SlowDown")])
def test_the_durable_place_is_in_trouble_for_a_while(
    local: Path,
    server: StrictS3,
    to_server: dict[str, Any],
    answer: tuple[int, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    skip_pauses_of_s3(monkeypatch)
    save(local, 1)
    clock = _Clock()

    def rule(request: Request) -> str | tuple[int, str]:
        return answer if clock.skipped_s < 600 else "pass"

    server.rule = rule
    with environment.replaced(clock):
        assert outcomes(list(ckpt.drain(local, DURABLE, **to_server))) == [("step-1", "durable")]
    assert clock.skipped_s >= 600
    assert holds(f"{DURABLE}/step-1", 1, **to_server)


def test_a_place_that_refuses_is_an_error_at_once(
    local: Path, server: StrictS3, to_server: dict[str, Any]
) -> None:
    save(local, 1)
    server.rule = lambda request: (403, "AccessDenied") if request.method == "PUT" else "pass"
    with pytest.raises(AccessDenied):
        list(ckpt.drain(local, DURABLE, **to_server))


def test_stopped(local: Path, server: StrictS3, to_server: dict[str, Any]) -> None:
    save(local, 1)
    save(local, 2)
    stop = threading.Event()

    def rule(request: Request) -> str:
        if request.operation == "UploadPart":
            stop.set()
        return "pass"

    server.rule = rule
    done = list(ckpt.drain(local, DURABLE, stop=stop, **to_server))
    assert outcomes(done) == [("step-1", "waiting"), ("step-2", "waiting")]
    assert {each.reason for each in done} == {"stopped before it was durable"}
    assert not [name for name in server.objects if name.endswith("commit.json")]
    server.rule = lambda request: "pass"
    assert {each.state for each in ckpt.drain(local, DURABLE, **to_server)} == {"durable"}
    assert not server.uploads


def _drain(local: str, options: dict[str, Any]) -> None:
    list(ckpt.drain(local, DURABLE, storage_options=options))


@pytest.mark.long
def test_killed_at_every_request(local: Path, proxy: FaultProxy, server: StrictS3) -> None:
    """SIGKILL before and after each request: never a torn checkpoint; the next one goes on."""
    save(local, 1)
    at, deaths = 0, 0
    while True:
        at += 1
        for carried_out in (False, True):
            server.objects.clear()
            died = _kill_at(proxy, local, at, carried_out)
            if f"{DURABLE[12:]}/step-1/commit.json" in server.objects:
                assert holds(f"{DURABLE}/step-1", 1, storage_options=server.options)
            _drain(str(local), server.options)
            assert holds(f"{DURABLE}/step-1", 1, storage_options=server.options)
            assert "run/step-1/.metadata" in server.objects
            deaths += died
        if not died:
            break
    assert deaths >= 2 * 12


def _kill_at(proxy: FaultProxy, local: Path, at: int, carried_out: bool) -> bool:
    """Kill a drain at its n-th request; return False if it made fewer."""
    before, died, is_killed = len(proxy.calls), threading.Event(), threading.Event()

    def rule(call: Call) -> str:
        if call.number - before != at:
            return "pass"
        died.set()
        if carried_out:
            return "lose"
        is_killed.wait(60)
        return "reset"

    proxy.rule = rule
    with start(_drain, str(local), proxy.options) as drainer:
        while drainer.exitcode is None and not died.is_set():
            drainer.join(0.01)
    is_killed.set()
    proxy.settle()
    proxy.rule = lambda call: "pass"
    return died.is_set()


@pytest.mark.parametrize("wrong", [{"newest": 0}, {"keep_local": 0}, {"poll_s": 0}, {"outage_s": -1}])
def test_wrong_arguments(local: Path, durable: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        list(ckpt.drain(local, durable, **wrong))
    with pytest.raises(ConfigurationError, match="the same place"):
        list(ckpt.drain(local, local))


def test_nothing_to_carry(local: Path, durable: Path) -> None:
    assert list(ckpt.drain(local, durable)) == []
