"""`ckpt.watch`: every durable checkpoint once and in order, over restarts, outages and bad folders."""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.clock import SkippingClock
from support.commands import flip
from support.commits import EPOCH_S, commit
from support.servers import S3Server

import ckpt
from ckpt.backends.memory import MemoryStore
from ckpt.backends.posix import PosixStore
from ckpt.backends.registry import open_store
from ckpt.consistency import environment
from ckpt.errors import AccessDenied, ConfigurationError, IntegrityError, StorageError, StorageUnavailable
from ckpt.format.run_record import RunCheckpoint, RunRecord, write_run
from ckpt.watching.cursor import Cursor
from ckpt.watching.sights import Sights


class Clock(SkippingClock):
    """One on which waiting for an event takes no time either."""

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        self.sleep(timeout_s)
        return event.is_set()


@pytest.fixture
def clock() -> Iterator[Clock]:
    clock = Clock()
    with environment.replaced(clock):
        yield clock


def steps(root: object, **more: Any) -> list[int | None]:
    """Watch until nothing is left."""
    return [each.step for each in ckpt.watch(str(root), timeout_s=0, **more)]


def test_those_that_are_there_and_those_that_come(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = tmp_path / "run"
    assert steps(root) == [], "a run that has not begun"
    assert caplog.messages == [f"there is no folder {root} yet"]
    commit(root, "step-2", at_s=2)
    commit(root, "step-10", at_s=2)  # in the same second
    commit(root, "step-1", at_s=1)
    (root / "logs").mkdir()
    seen = []
    for checkpoint in ckpt.watch(root, timeout_s=0):
        seen.append(checkpoint.step)
        if checkpoint.step == 2:
            commit(root, "step-11", at_s=11)
        if checkpoint.step == 11:
            commit(root, "step-10", at_s=12)  # went back, and saved it again
    assert seen == [1, 2, 10, 11, 10]


def test_it_waits_until_there_is_one(tmp_path: Path, clock: Clock) -> None:
    clock.later(3600, lambda: commit(tmp_path, "step-1"))
    clock.later(7200, lambda: commit(tmp_path, "step-2", at_s=1))
    clock.later(90_000, lambda: commit(tmp_path, "step-3", at_s=1))
    checkpoints = ckpt.watch(tmp_path, timeout_s=7200, poll_s=600)
    assert [checkpoint.step for checkpoint in checkpoints] == [1, 2]


def stock_save(place: Path, age_s: float) -> None:
    """Save as stock PyTorch does, `age_s` seconds ago."""
    shutil.rmtree(place, ignore_errors=True)
    dcp.save({"t": torch.ones(3)}, storage_writer=dcp.FileSystemWriter(place), no_dist=True)
    at_s = time.time() - age_s
    os.utime(place / ".metadata", (at_s, at_s))


def test_what_is_yielded(tmp_path: Path) -> None:
    ckpt.save({"t": torch.ones(3)}, tmp_path / "last", tags={"step": "7", "note": "x"})
    stock_save(tmp_path / "step-5", age_s=-3600)
    ours, stock = ckpt.watch(tmp_path, timeout_s=0, after=4)
    assert (stock.path, stock.step, stock.is_stock) == ("step-5", 5, True)
    (listed,) = (each for each in ckpt.list_checkpoints(tmp_path) if each.state == "committed")
    for name in ("path", "url", "id", "step", "created_at_s", "size_bytes", "world_size", "tags"):
        assert getattr(ours, name) == getattr(listed, name)
    ckpt.load({"t": torch.zeros(3)}, ours.url)


def test_a_root_that_is_saved_into_again_and_again(tmp_path: Path) -> None:
    ids = [commit(tmp_path, ".", at_s=1)]
    seen = []
    for checkpoint in ckpt.watch(tmp_path, timeout_s=0):
        seen.append(checkpoint.id)
        assert (checkpoint.path, checkpoint.url) == ("", str(tmp_path))
        if len(ids) < 3:
            ids.append(commit(tmp_path, ".", at_s=2))
    assert seen == ids


def test_a_stock_checkpoint_that_is_saved_again(tmp_path: Path) -> None:
    stock_save(tmp_path / "step-5", age_s=0)
    seen = 0
    for _ in ckpt.watch(tmp_path, timeout_s=0):
        seen += 1
        if seen == 1:
            stock_save(tmp_path / "step-5", age_s=-3600)
    assert seen == 2


def test_one_that_is_removed_before_its_turn(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step in (1, 2, 3):
        commit(tmp_path, f"step-{step}", at_s=step)
    seen = []
    for checkpoint in ckpt.watch(tmp_path, timeout_s=0):
        seen.append(checkpoint.step)
        shutil.rmtree(tmp_path / "step-2", ignore_errors=True)
    assert seen == [1, 3]
    assert f"{tmp_path / 'step-2'} was removed" in caplog.text


def test_done_is_what_the_loop_came_back_from(tmp_path: Path) -> None:
    cursor = tmp_path / "cursors" / "eval.json"
    root = tmp_path / "run"
    for step in (1, 2, 3):
        commit(root, f"step-{step}", at_s=step)
    checkpoints = ckpt.watch(root, cursor=cursor, timeout_s=0)
    assert [next(checkpoints).step, next(checkpoints).step] == [1, 2]
    with pytest.raises(ConfigurationError, match="another watcher uses the cursor"):
        steps(root, cursor=cursor)
    checkpoints.close()
    assert steps(root, cursor=cursor) == [2, 3]
    assert steps(root, cursor=str(cursor)) == []
    commit(root, "step-2", at_s=4)
    assert steps(root, cursor=cursor) == [2], "saved again"


def test_a_cursor_in_a_store(tmp_path: Path) -> None:
    for step in (1, 2):
        commit(tmp_path, f"step-{step}", at_s=step)
    cursor = "memory://cursors/of-this-test"
    assert next(ckpt.watch(tmp_path, cursor=cursor)).step == 1
    assert steps(tmp_path, cursor=cursor) == [1, 2]
    assert steps(tmp_path, cursor=cursor) == []


def test_two_watchers_with_a_cursor_that_cannot_be_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2, 3):
        commit(tmp_path, f"step-{step}", at_s=step)
    first, second = (ckpt.watch(tmp_path, cursor="memory://cursors/of-two", timeout_s=0) for _ in range(2))
    assert [next(first).step, next(second).step, next(first).step] == [1, 1, 2]
    with pytest.raises(ConfigurationError, match="another watcher writes to this cursor"):
        next(second)
    put = MemoryStore.put

    def put_without_an_answer(*given: Any, **named: Any) -> None:
        monkeypatch.setattr(MemoryStore, "put", put)
        put(*given, **named)
        raise StorageUnavailable("no answer")

    monkeypatch.setattr(MemoryStore, "put", put_without_an_answer)
    assert next(first).step == 3, "what it has written itself is no other's"


def test_cursors_that_cannot_be_used(tmp_path: Path) -> None:
    root, other, cursor = tmp_path / "run", tmp_path / "other", tmp_path / "cursor"
    commit(root, "step-1")
    assert steps(root, cursor=cursor) == [1]
    with pytest.raises(ConfigurationError, match=f"that of {root}; name another file for {other}"):
        steps(other, cursor=cursor)
    flip(cursor, 20)
    with pytest.raises(IntegrityError, match="remove it to begin anew"):
        steps(root, cursor=cursor)
    cursor.write_text("{}")
    with pytest.raises(IntegrityError, match="this is no cursor"):
        steps(root, cursor=cursor)
    for place in ("s3://cursor", "/"):
        with pytest.raises(ConfigurationError, match="names no file"):
            steps(root, cursor=place)
    with pytest.raises(ConfigurationError, match="is a folder"):
        steps(root, cursor=tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="is a file; name the folder of a run"):
        steps(tmp_path / "file")
    with pytest.raises(ConfigurationError, match="cannot be locked"):
        steps(root, cursor=tmp_path / "file" / "cursor")


def test_a_cursor_does_not_grow_without_bound() -> None:
    cursor = Cursor(None, "root")
    there = {(f"step-{step}", "now") for step in range(200)}
    cursor.add(there, there=there)
    for number in range(1500):
        cursor.add([("latest", str(number))], there={*there, ("latest", str(number))})
    assert len(cursor._done) <= 200 + 1 + 1000
    assert there | {("latest", "1499"), ("latest", "600")} <= cursor._done.keys()
    assert ("latest", "400") not in cursor


def test_where_to_begin(tmp_path: Path) -> None:
    root, cursor = tmp_path / "run", tmp_path / "cursor"
    for step in (1, 2, 3):
        commit(root, f"step-{step}", at_s=step)
    assert steps(root, after=2) == [3]
    assert steps(root, skip_to_latest=True) == [3]
    assert steps(root, skip_existing=True, cursor=cursor) == []
    commit(root, "step-4", at_s=4)
    assert steps(root, skip_existing=True, cursor=cursor) == [4], "it goes on from the cursor"
    with pytest.raises(ConfigurationError, match="poll_s"):
        ckpt.watch(root, poll_s=0)
    with pytest.raises(ConfigurationError, match="timeout_s"):
        ckpt.watch(root, timeout_s=-1)


def test_skipping_what_is_there_when_the_first_start_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, cursor = tmp_path / "run", tmp_path / "cursor"
    commit(root, "step-1", at_s=1)
    with monkeypatch.context() as patch:
        patch.setattr(PosixStore, "folders", raises(AccessDenied("not yours")))
        with pytest.raises(AccessDenied):
            steps(root, skip_existing=True, cursor=cursor)
    assert steps(root, skip_existing=True, cursor=cursor) == []
    empty = {"root": tmp_path / "empty", "skip_existing": True, "cursor": tmp_path / "empty-cursor"}
    assert steps(**empty) == []
    commit(tmp_path / "empty", "step-1", at_s=1)
    assert steps(**empty) == [1], "an empty root was looked at"


def raises(error: Exception) -> Any:
    def call(*_: object) -> Any:
        raise error

    return call


def test_skipping_what_comes_meanwhile(tmp_path: Path) -> None:
    commit(tmp_path, "step-1", at_s=1)
    cursor = tmp_path / "cursor"
    seen = []
    for checkpoint in ckpt.watch(tmp_path, timeout_s=0, skip_to_latest=True, cursor=cursor):
        seen.append(checkpoint.step)
        if checkpoint.step == 1:
            for step in (2, 3, 4):
                commit(tmp_path, f"step-{step}", at_s=step)
    assert seen == [1, 4]
    assert steps(tmp_path, cursor=cursor) == [], "those skipped are done"


def test_it_can_be_stopped(tmp_path: Path) -> None:
    stop = threading.Event()
    commit(tmp_path, "step-1")
    for _ in ckpt.watch(tmp_path, stop=stop, poll_s=1000):
        threading.Timer(0.02, stop.set).start()


# -- storage that fails, or holds what cannot be read ------------------------------------------------------


def fail_until(monkeypatch: pytest.MonkeyPatch, clock: Clock, end_s: float, error: StorageError) -> None:
    """Let listings of local folders fail for a while."""
    folders, begin_s = PosixStore.folders, clock.monotonic()

    def fails(store: PosixStore, prefix: str = "") -> Iterator[str]:
        if clock.monotonic() < begin_s + end_s:
            raise error
        return folders(store, prefix)

    monkeypatch.setattr(PosixStore, "folders", fails)


def test_an_outage_of_ten_minutes(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    commit(tmp_path, "step-1")
    fail_until(monkeypatch, clock, 600, StorageUnavailable("no answer", url="here"))
    assert next(ckpt.watch(tmp_path)).step == 1
    (line,) = caplog.messages
    assert line == "trying again for 3600 s at most: here: no answer"


def test_an_outage_that_does_not_end(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_until(monkeypatch, clock, 1e9, StorageUnavailable("no answer"))
    with pytest.raises(StorageUnavailable):
        next(ckpt.watch(tmp_path, outage_s=600))
    assert 600 <= clock.skipped_s < 700
    with pytest.raises(StorageUnavailable):
        steps(tmp_path)
    assert clock.skipped_s < 700, "who takes what is there is told at once"


def test_what_is_done_is_noted_though_the_time_is_up(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, cursor = tmp_path / "run", tmp_path / "cursor"
    commit(root, "step-1")
    with monkeypatch.context() as patch:
        for _ in ckpt.watch(root, cursor=cursor, timeout_s=10):
            clock.sleep(20)  # longer than the watcher has
            patch.setattr("ckpt.watching.cursor.put_bytes", raises(StorageUnavailable("no answer")))
            clock.later(600, patch.undo)
    assert clock.skipped_s > 600
    assert steps(root, cursor=cursor) == []


def test_one_that_is_out_of_sight_for_a_moment(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        commit(tmp_path, f"step-{step}", at_s=step)
    is_there, answers = Sights.is_there, iter([False])
    monkeypatch.setattr(Sights, "is_there", lambda *given: is_there(*given) if next(answers, True) else False)
    assert [each.step for each in ckpt.watch(tmp_path, timeout_s=60)] == [2, 1]


@pytest.mark.parametrize(
    ("format", "key", "reader"),
    [("ckpt", ".metadata", "stock PyTorch"), ("safetensors", "model.safetensors.index.json", "transformers")],
)
def test_it_waits_for_what_other_programs_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, format: Any, key: str, reader: str
) -> None:
    caplog.set_level(logging.WARNING)
    for step in (1, 2):
        ckpt.save({"t": torch.ones(3)}, tmp_path / f"step-{step}", no_dist=True, format=format)
    caplog.clear()
    for step in (1, 2):
        (tmp_path / f"step-{step}" / key).rename(tmp_path / f"{step}")
    clock = Clock()
    clock.later(30, lambda: (tmp_path / "1").rename(tmp_path / "step-1" / key))
    with environment.replaced(clock):
        seen = {each.step: clock.skipped_s for each in ckpt.watch(tmp_path, timeout_s=0)}
    assert list(seen) == [1, 2]
    assert 20 <= seen[1] < 40, "the next look"  # beside the pauses real time passes
    assert 55 <= seen[2] <= 65, "it was killed"
    place = tmp_path / "step-2"
    (line,) = caplog.messages
    assert line.startswith(f"{place}: {key} is missing, so {reader} cannot read it")
    assert f"`ckpt gc {place}` writes it" in line


def test_it_waits_for_the_metadata_of_the_save_that_replaced_another(tmp_path: Path, clock: Clock) -> None:
    now_s = time.time()
    commit(tmp_path, "last", 1, at_s=now_s - EPOCH_S)
    os.utime(tmp_path / "last" / "commit.json", (now_s + 10, now_s + 10))  # after `.metadata`
    clock.later(20, lambda: os.utime(tmp_path / "last" / ".metadata", (now_s + 20, now_s + 20)))
    assert steps(tmp_path) == [1]
    assert 20 <= clock.skipped_s < 30


def test_those_of_yesterday_are_not_waited_for(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    commit(tmp_path, "step-1", shown=False)
    assert steps(tmp_path) == [1]
    assert clock.skipped_s == 0
    assert "cannot read it" in caplog.text


def test_denied_access_ends_it_at_once(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_until(monkeypatch, clock, 1e9, AccessDenied("not yours"))
    with pytest.raises(AccessDenied, match="not yours"):
        next(ckpt.watch(tmp_path))
    assert clock.skipped_s == 0


def test_bad_folders_hide_no_others(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = tmp_path / "run"
    for step in (1, 2, 3):
        commit(root, f"step-{step}", at_s=step)
    flip(root / "step-1" / "commit.json", 40)
    (root / "commit.json").write_text("{}")
    (root / "outside").symlink_to(tmp_path)
    (root / "step-9\n[red]").mkdir()
    (root / "ckpt-run.json").write_text("{}")
    assert steps(root) == [2, 3]
    assert [line.split(":")[0] for line in caplog.messages] == [
        "the run's record cannot be used, its checkpoints are listed", "passed over",
    ], "once each"  # fmt: skip
    commit(root, "step-1", at_s=4)
    assert steps(root, after=0) == [2, 3, 1]


def test_the_record_tells_of_a_save_that_no_other_look_would_see_soon(tmp_path: Path) -> None:
    """Of many checkpoints that were there before, each look opens some."""
    store = PosixStore(str(tmp_path))
    for step in range(150):
        commit(tmp_path, f"step-{step:03d}", at_s=step)

    def record(saved_at_s: float) -> None:
        last = RunCheckpoint(step=149, path="step-149", saved_at_s=saved_at_s)
        write_run(store, RunRecord(checkpoints=[last]))

    record(1.0)
    sights = Sights(store)
    assert len(list(sights.look(everywhere=False))) == 150
    assert not list(sights.look(everywhere=False))
    replaced = [commit(tmp_path, f"step-{step}", at_s=400) for step in (148, 149)]
    record(2.0)
    assert [sight.checkpoint.id for sight in sights.look(everywhere=False)] == [replaced[1]]
    later = [sight.checkpoint.id for _ in range(3) for sight in sights.look(everywhere=False)]
    assert later == [replaced[0]], "in its turn"


def test_a_look_costs_a_bounded_number_of_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(150):
        commit(tmp_path, f"step-{number}", at_s=number)
        (tmp_path / f"notes-{number}").mkdir()
    sights = Sights(PosixStore(str(tmp_path)))
    list(sights.look(everywhere=False))
    requests: list[str] = []
    for name in ("stat", "read_into", "list"):
        monkeypatch.setattr(PosixStore, name, counted(getattr(PosixStore, name), requests))
    list(sights.look(everywhere=False))
    assert len(requests) <= 64 + 3 * 64 + 5


def counted(method: Any, calls: list[str]) -> Any:
    def call(store: PosixStore, key: str, *more: Any) -> Any:
        calls.append(key)
        return method(store, key, *more)

    return call


def test_on_a_server(s3: S3Server, caplog: pytest.LogCaptureFixture) -> None:
    url = f"s3://{s3.new_bucket()}/run"
    options: dict[str, Any] = {"storage_options": s3.options}
    caplog.set_level(logging.WARNING)
    for step in (1, 2, 3):
        ckpt.save({"t": torch.ones(1)}, f"{url}/step-{step}", tags={"step": str(step)}, **options)
    seen = []
    cursor = f"{url}/eval.cursor"
    for checkpoint in ckpt.watch(url, timeout_s=0, cursor=cursor, **options):
        seen.append(checkpoint.step)
        if seen == [1]:
            ckpt.remove(f"{url}/step-2", **options)
        if seen == [1, 3]:
            ckpt.save({"t": torch.ones(1)}, f"{url}/step-1", tags={"step": "1"}, **options)
            ckpt.save({"t": torch.ones(1)}, f"{url}/step-4", tags={"step": "4"}, **options)
    assert seen == [1, 3, 1, 4]
    assert steps(url, cursor=cursor, **options) == []
    with pytest.raises(AccessDenied):
        steps(url, storage_options={**s3.options, "anon": True, "key": None, "secret": None})
    assert open_store(url, s3.options).stat("eval.cursor").size_bytes > 100
