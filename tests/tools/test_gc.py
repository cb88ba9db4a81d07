"""`ckpt gc`: remove leftovers of dead saves, and nothing that is foreign, listed or young."""

from __future__ import annotations

import functools
import json
import os
import pickle
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.commands import (
    file_names,
    flip,
    judge_age_by_mtime,
    options_of,
    run,
    run_json,
    run_on_terminal,
)
from support.ranks import exit_code_of
from support.servers import S3Server
from support.states import random_tensor

import ckpt
from ckpt.backends.base import Capabilities, ObjectStat
from ckpt.backends.posix import PosixStore
from ckpt.errors import NotCommitted, SaveFailed

gc = functools.partial(run_json, "gc")
MODEL_INDEX = "model.safetensors.index.json"
LEFTOVER = "rank-00000/0123456789abcdef-0.distcp"


@pytest.fixture(autouse=True)
def _ages_by_mtime(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that `make_old` can make files old."""
    judge_age_by_mtime(monkeypatch)


def load(place: Path | str, **more: Any) -> torch.Tensor:
    state = {"t": torch.zeros(10)}
    ckpt.load(state, place, **more)
    return state["t"]


def save(place: Path | str, value: float = 1.0, **more: Any) -> None:
    ckpt.save({"t": torch.full((10,), value)}, place, **more)


def make_old(place: Path, hours: float = 48) -> None:
    for path in place.rglob("*"):
        if path.is_file():
            os.utime(path, (time.time() - hours * 3600,) * 2)


def save_and_die(place: Path, where: str) -> None:
    """Save twos in a process that dies `before` its commit, or `between` commit.json and .metadata."""
    assert exit_code_of(_save_and_die, str(place), where) == 9


def _save_and_die(place: str, where: str) -> None:
    put = PosixStore.put

    def put_or_die(store: PosixStore, key: str, *args: Any, **more: Any) -> None:
        if key == {"before": "commit.json", "between": ".metadata"}[where]:
            os._exit(9)
        put(store, key, *args, **more)

    setattr(PosixStore, "put", put_or_die)  # noqa: B010
    save(place, 2.0)


def stock_load(place: Path) -> torch.Tensor:
    state = {"t": torch.zeros(10)}
    dcp.load(state, storage_reader=dcp.FileSystemReader(place), no_dist=True)
    return state["t"]


def test_gc_removes_a_probe_that_stayed(tmp_path: Path) -> None:
    """It belongs to no checkpoint, though it has the token of one."""
    save(tmp_path)
    probe = next(tmp_path.rglob("*.index")).with_suffix(".probe")
    probe.write_bytes(b"first")
    make_old(tmp_path)
    assert [item["key"] for item in gc(tmp_path)["items"]] == [probe.relative_to(tmp_path).as_posix()]
    assert torch.equal(load(tmp_path), torch.ones(10))


@pytest.mark.smoke
@pytest.mark.parametrize("has_metadata", [False, True], ids=["", "as versions before 0.2 left it"])
def test_leftovers_of_a_dead_first_save_are_removed(tmp_path: Path, has_metadata: bool) -> None:
    dead = tmp_path / "step-2"
    if has_metadata:
        save(dead)
        (dead / "commit.json").unlink()
    else:
        save_and_die(dead, "before")
    save(tmp_path / "step-1")
    leftovers = file_names(dead)
    assert len(leftovers) == 3 + has_metadata  # data, manifest, index
    assert gc(tmp_path)["young"] == len(leftovers)
    assert file_names(dead) == leftovers
    make_old(tmp_path)
    dry_run = gc(tmp_path, "--dry-run")
    assert {item["key"] for item in dry_run["items"]} == leftovers == file_names(dead)
    assert dry_run["freed_bytes"] == sum((dead / key).stat().st_size for key in leftovers)
    assert {item["key"] for item in gc(tmp_path)["items"]} == leftovers
    assert not dead.exists()
    assert torch.equal(load(tmp_path / "step-1"), torch.ones(10))
    assert gc(tmp_path)["items"] == []


@pytest.mark.smoke
@pytest.mark.parametrize("left", ["nothing", "metadata", "an object"])
def test_a_commit_record_that_came_back_alone_goes(tmp_path: Path, left: str) -> None:
    """Its put was carried out after `ckpt rm`; while something that it lists is there, nobody knows."""
    place = tmp_path / "step-1"
    save(place)
    kept = {"nothing": ["commit.json"], "metadata": ["commit.json", ".metadata"]}
    names = kept.get(left, [name for name in file_names(place) if not name.endswith(".distcp")])
    for path in [path for path in place.rglob("*") if path.is_file()]:
        if str(path.relative_to(place)) not in names:
            path.unlink()
    assert gc(tmp_path)["items"] == []  # it is young
    make_old(tmp_path)
    assert {item["key"] for item in gc(tmp_path)["items"]} == ({*names} if left != "an object" else set())
    assert place.exists() is (left == "an object")


def test_the_checkpoint_that_a_dead_save_was_to_replace_stays(tmp_path: Path) -> None:
    place = tmp_path / "latest"
    save(place)
    whole = {key: (place / key).read_bytes() for key in file_names(place)}
    save_and_die(place, "before")
    assert len(file_names(place)) == len(whole) + 3
    make_old(tmp_path)
    assert gc(tmp_path)["restored"] == []
    assert {key: (place / key).read_bytes() for key in file_names(place)} == whole
    assert torch.equal(stock_load(place), torch.ones(10))
    assert run_json("verify", place)["strays"] == []


@pytest.mark.smoke
def test_a_first_save_that_died_after_its_commit_is_written_for_stock_readers(tmp_path: Path) -> None:
    """Who looks for `.metadata` alone never sees it half done: a host that restarts saves it again."""
    place = tmp_path / "step-1"
    save_and_die(place, "between")
    assert torch.equal(load(place), torch.full((10,), 2.0))
    assert not (place / ".metadata").exists()
    assert gc(tmp_path)["restored"] == []  # a save may be running
    make_old(tmp_path)
    assert gc(tmp_path, "--dry-run")["restored"] == ["step-1"]
    assert not (place / ".metadata").exists()
    assert gc(tmp_path)["restored"] == ["step-1"]
    assert torch.equal(stock_load(place), torch.full((10,), 2.0))
    assert run_json("verify", place)["damages"] == gc(tmp_path)["restored"] == []


def test_an_overwriting_save_that_died_after_its_commit(tmp_path: Path) -> None:
    """Stock readers load the checkpoint before, whole, until `.metadata` is written anew."""
    place = tmp_path / "latest"
    save(place)
    save_and_die(place, "between")
    assert torch.equal(load(place), torch.full((10,), 2.0))
    assert torch.equal(stock_load(place), torch.ones(10))
    make_old(tmp_path)
    report = gc(tmp_path)
    assert (report["restored"], len(report["items"])) == (["latest"], 3)
    assert torch.equal(stock_load(place), torch.full((10,), 2.0))
    assert run_json("verify", place)["strays"] == []


def test_metadata_that_came_long_after_the_commit_is_compared(tmp_path: Path) -> None:
    """A save stalled after its commit, was replaced, put its `.metadata`, and died."""
    save(tmp_path)
    late = (tmp_path / ".metadata").read_bytes()
    save(tmp_path, 2.0)
    (tmp_path / ".metadata").write_bytes(late)
    make_old(tmp_path, 49)
    assert gc(tmp_path)["restored"] == []
    make_old(tmp_path)
    os.utime(tmp_path / "commit.json", (time.time() - 49 * 3600,) * 2)
    assert gc(tmp_path)["restored"] == [""]
    assert torch.equal(stock_load(tmp_path), torch.full((10,), 2.0))
    assert gc(tmp_path)["restored"] == []


def test_a_save_again_where_one_died_after_its_commit(tmp_path: Path) -> None:
    save_and_die(tmp_path, "between")
    save(tmp_path, 3.0)
    assert torch.equal(load(tmp_path), stock_load(tmp_path))
    assert run_json("verify", tmp_path)["strays"] == []


def test_nothing_is_restored_while_a_save_may_be_running(tmp_path: Path) -> None:
    save(tmp_path)
    make_old(tmp_path)
    (tmp_path / LEFTOVER).write_bytes(b"left")
    os.utime(tmp_path / LEFTOVER, (0, 0))
    save(tmp_path / "other", 2.0)
    shutil.copy(tmp_path / "other" / ".metadata", tmp_path / ".metadata")
    report = gc(tmp_path, "--depth", "0")
    assert ([item["key"] for item in report["items"]], report["restored"]) == ([LEFTOVER], [])


def test_a_checkpoint_whose_commit_is_not_seen_yet_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On storage that lags the data can be old and seen, and the commit there and not seen."""
    place, unseen = tmp_path / "run" / "c", tmp_path / "commit.json"
    save(place)
    make_old(tmp_path)
    before = file_names(place)
    (place / "commit.json").rename(unseen)
    monkeypatch.setattr(PosixStore, "capabilities", Capabilities())
    waited_s: list[float] = []

    def appear(duration_s: float) -> None:
        waited_s.append(duration_s)
        unseen.rename(place / "commit.json")

    monkeypatch.setattr("ckpt.consistency.environment.sleep", appear)
    report = gc(tmp_path / "run")
    assert (report["items"], list(report["skipped"]), len(waited_s)) == ([], ["c"], 1)
    assert file_names(place) == before


def test_a_checkpoint_that_the_listing_does_not_show_yet_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save replaced an older one: its commit has a name that the listing shows, its data has not."""
    place = tmp_path / "run" / "c"
    save(place)
    older = {path for path in place.rglob("*") if path.is_file()}
    save(place, 2.0)
    make_old(tmp_path)
    before, real_list = file_names(place), PosixStore.list

    def lagging(self: PosixStore, prefix: str = "") -> Iterator[ObjectStat]:
        shown = (stat for stat in real_list(self, prefix))
        return (stat for stat in shown if Path(self.url, stat.key) in older)

    monkeypatch.setattr(PosixStore, "list", lagging)
    assert gc(tmp_path / "run")["items"] == []
    assert file_names(place) == before
    assert torch.equal(load(place), torch.full_like(load(place), 2.0))


@pytest.mark.smoke
def test_files_that_another_program_writes_meanwhile_stay(
    stock_place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look and the deletion, stock PyTorch saves where a save of ours died."""
    place = tmp_path / "run" / "c"
    save_and_die(place, "before")
    make_old(tmp_path)
    monkeypatch.setattr(PosixStore, "capabilities", Capabilities())
    monkeypatch.setattr(
        "ckpt.consistency.environment.sleep",
        lambda duration_s: shutil.copytree(stock_place, place, dirs_exist_ok=True),
    )
    assert gc(tmp_path / "run")["items"] == []
    assert (place / ".metadata").read_bytes() == (stock_place / ".metadata").read_bytes()


def test_a_copy_that_keeps_the_times_of_its_files_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`cp -a`, `rsync -a`, `mv` to another disk: old times, on files that came a moment ago."""
    monkeypatch.undo()
    save(tmp_path / "c")
    make_old(tmp_path)
    records = shutil.ignore_patterns("commit.json", ".metadata")
    shutil.copytree(tmp_path / "c", tmp_path / "run" / "c", ignore=records)
    before = file_names(tmp_path / "run")
    report = gc(tmp_path / "run")
    assert (report["items"], report["young"]) == ([], 3)
    assert file_names(tmp_path / "run") == before


def test_nothing_else_is_touched(stock_place: Path, tmp_path: Path) -> None:
    """Foreign checkpoints, foreign names, damaged commits, files whose token the commit lists."""
    save(tmp_path / "ours")
    token = next((tmp_path / "ours").glob("rank-*/*.json")).stem
    kept = [
        "notes.txt", "rank-00000/notes.txt", "rank-00000/0123456789ABCDEF-0.distcp", "rank-1/0123456789abcdef-0.distcp",
        "deep/rank-00000/x.distcp", f"rank-00000/{token}-7.distcp", "__0_0.distcp",
    ]  # fmt: skip
    for key in kept:
        (tmp_path / "ours" / key).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "ours" / key).write_bytes(b"x")
    shutil.copytree(stock_place, tmp_path / "stock")
    (tmp_path / "stock" / "rank-00000").mkdir()
    (tmp_path / "stock" / LEFTOVER).write_bytes(b"x")
    save(tmp_path / "damaged")
    (tmp_path / "damaged" / LEFTOVER).write_bytes(b"x")
    flip(tmp_path / "damaged" / "commit.json", 50)
    save(tmp_path / "unsealed")
    (tmp_path / "unsealed" / "commit.json").unlink()
    path = tmp_path / "unsealed" / ".metadata"
    path.write_bytes(pickle.dumps(pickle.loads(path.read_bytes())))
    (tmp_path / ".hidden.0123456789abcdef.ckpt-tmp").write_bytes(b"x")
    before = file_names(tmp_path)
    make_old(tmp_path)
    report = gc(tmp_path)
    assert report["items"] == []
    assert set(report["skipped"]) == {"damaged", "unsealed"}
    assert file_names(tmp_path) == before
    assert "skipped damaged: its commit record cannot be read" in run("gc", tmp_path).out


def test_links_are_not_followed_into_another_checkpoint(tmp_path: Path) -> None:
    save(tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "rank-00000").symlink_to(tmp_path / "a" / "rank-00000")
    (tmp_path / "b" / "rank-00001").mkdir()
    make_old(tmp_path)
    before = file_names(tmp_path / "a")
    gc(tmp_path)
    assert file_names(tmp_path / "a") == before


def test_temporary_files(tmp_path: Path) -> None:
    save(tmp_path / "c")
    leftovers = [
        "c/rank-00000/.0123456789abcdef-0.distcp.0123456789abcdef.ckpt-tmp", "c/.commit.json.0123456789abcdef.ckpt-tmp",
        "d/rank-00003/.0123456789abcdef.json.0123456789abcdef.ckpt-tmp", "c/.config.json.0123456789abcdef.ckpt-tmp",
    ]  # fmt: skip
    for key in leftovers:
        (tmp_path / key).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / key).write_bytes(b"x")
    assert gc(tmp_path)["young"] == 4
    make_old(tmp_path)
    before = file_names(tmp_path)
    assert {f"{item['place']}/{item['key']}" for item in gc(tmp_path)["items"]} == {
        "c/rank-00000/0123456789abcdef-0.distcp", "c/commit.json", "d/rank-00003/0123456789abcdef.json",
        "c/config.json",
    }  # fmt: skip
    assert file_names(tmp_path) == before - set(leftovers)


def folders_of(root: Path) -> set[str]:
    return {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_dir()}


def test_what_a_killed_save_left_on_a_disk(tmp_path: Path) -> None:
    """A temporary file, whose size counts, and folders, in one of which nothing had been written yet."""
    killed = tmp_path / "step-2"
    for rank in range(2):
        (killed / f"rank-{rank:05d}").mkdir(parents=True)
    (killed / "rank-00001" / ".0123456789abcdef-0.distcp.0123456789abcdef.ckpt-tmp").write_bytes(bytes(1000))
    make_old(tmp_path)
    assert gc(tmp_path, "--dry-run")["freed_bytes"] == 1000
    assert killed.exists()
    assert "1000 B" in run("gc", tmp_path).out
    assert not killed.exists()


def test_empty_folders_of_other_programs_stay(tmp_path: Path) -> None:
    """A stock save between its mkdir and its first write, for one."""
    save(tmp_path)
    others = {
        "tensorboard",
        "lightning_logs",
        "lightning_logs/version_0",
        "stock-7",
        "rank-1",
        "rank-00000/mine",
    }
    for name in others:
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
    (tmp_path / "rank-00001").mkdir()
    (tmp_path / "rank-00001" / "0123456789abcdef-0.distcp").write_bytes(b"left")
    make_old(tmp_path)
    assert len(gc(tmp_path)["items"]) == 1
    assert folders_of(tmp_path) == {*others, "rank-00000"}


def test_a_leftover_takes_one_line_of_a_terminal(tmp_path: Path) -> None:
    """Its name is cut in the middle, as the ends tell which it is."""
    for number in range(3):
        path = tmp_path / f"step-{number}" / LEFTOVER
        path.parent.mkdir(parents=True)
        path.write_bytes(b"left")
    make_old(tmp_path)
    lines = run_on_terminal("gc", tmp_path, "--dry-run", columns=56).out.splitlines()
    assert [line.partition("  ")[0].strip() for line in lines[1:4]] == ["step-0", "step-1", "step-2"]
    assert all("rank-00000/" in line and "-0.distcp" in line for line in lines[1:4])


def test_folders_in_folders_in_folders(tmp_path: Path) -> None:
    path = f"{tmp_path}/{LEFTOVER}"
    os.makedirs(os.path.dirname(path))
    Path(path).write_bytes(b"left")
    make_old(tmp_path)
    deepest = str(tmp_path)
    for _ in range(1500):
        deepest += "/d"
        os.mkdir(deepest)
    try:
        assert len(gc(tmp_path)["items"]) == 1
    finally:
        while deepest != str(tmp_path):
            os.rmdir(deepest)
            deepest = os.path.dirname(deepest)


@pytest.mark.parametrize("on_s3", [False, True])
def test_a_clock_that_is_wrong_makes_nothing_old(
    tmp_path: Path, s3: S3Server, monkeypatch: pytest.MonkeyPatch, on_s3: bool
) -> None:
    """The storage dates objects, so it is asked for the time."""
    root, options = str(tmp_path), list[str]()
    if on_s3:
        root, options = f"s3://{s3.new_bucket()}/run", options_of(s3.options)
        s3.client().put_object(Bucket=root.split("/")[2], Key=f"run/{LEFTOVER}", Body=b"left")
    else:
        (tmp_path / LEFTOVER).parent.mkdir()
        (tmp_path / LEFTOVER).write_bytes(b"left")
    monkeypatch.setattr("ckpt.consistency.environment.now", lambda: time.time() + 25 * 3600)
    report = gc(root, *options)
    assert (report["items"], report["young"]) == ([], 1)
    monkeypatch.setattr("ckpt.consistency.environment.now", lambda: time.time() - 25 * 3600)
    report = gc(root, "--grace", "0", *options)
    assert ([item["key"] for item in report["items"]], report["young"]) == ([LEFTOVER], 0)


def test_gc_on_s3(s3: S3Server) -> None:
    bucket, client = s3.new_bucket(), s3.client()
    root, options = f"s3://{bucket}/run", options_of(s3.options)
    save(f"{root}/step-1", storage_options=s3.options)
    before = {stat["Key"] for stat in client.list_objects_v2(Bucket=bucket)["Contents"]}
    for key in (f"run/step-1/{LEFTOVER}", f"run/step-2/{LEFTOVER}", "run/other.bin"):
        client.put_object(Bucket=bucket, Key=key, Body=b"left")
    uploads = [
        f"run/step-1/{LEFTOVER}",
        f"run/step-3/{LEFTOVER}",
        "run/step-1/.metadata",
        "run/other.bin",
        "run/stock/.metadata",
    ]
    for key in [*uploads, f"elsewhere/{LEFTOVER}"]:
        client.create_multipart_upload(Bucket=bucket, Key=key)
    assert [item for item in gc(root, *options)["items"] if not item["unfinished"]] == []
    report = gc(root, "--grace", "0", *options)
    assert {(item["place"], item["key"]) for item in report["items"]} == {
        ("step-1", LEFTOVER),
        ("step-2", LEFTOVER),
    }
    after = {stat["Key"] for stat in client.list_objects_v2(Bucket=bucket)["Contents"]}
    assert after == before | {"run/other.bin"}
    pending = {upload["Key"] for upload in client.list_multipart_uploads(Bucket=bucket)["Uploads"]}
    assert pending == {"run/other.bin", "run/stock/.metadata", f"elsewhere/{LEFTOVER}"}
    assert torch.equal(load(f"{root}/step-1", storage_options=s3.options), torch.ones(10))


def test_objects_that_go_at_any_request_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_of = tmp_path / "run"
    before = tmp_path / "before"
    for step in (1, 2, 3, 4):
        save(before / f"step-{step}", step, digests=True)
    ckpt.save({"t": torch.ones(10)}, before / "step-5", base=before / "step-4")
    shutil.rmtree(before / "step-5")
    shutil.rmtree(before / "step-2" / "rank-00000")
    (before / "step-3" / LEFTOVER).write_bytes(b"left")
    ckpt.save({"t": torch.ones(10)}, before / "step-6", format="safetensors")
    (before / "step-6" / "commit.json").unlink()
    make_old(before)
    number = calls = 0

    def removing(name: str) -> Any:
        method = getattr(PosixStore, name)

        def call(store: PosixStore, *arguments: Any, **more: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == number:
                for step in (2, 3, 4, 6):
                    shutil.rmtree(run_of / f"step-{step}", ignore_errors=True)
            return method(store, *arguments, **more)

        return call

    for name in ("list", "stat", "read_into", "folders", "delete"):
        monkeypatch.setattr(PosixStore, name, removing(name))
    while calls >= number:
        number += 1 + number // 8
        calls = 0
        shutil.rmtree(run_of, ignore_errors=True)
        shutil.copytree(before, run_of)
        ckpt.collect_garbage(run_of, grace_s=3600, uncommitted_models=number % 2 == 0)
        assert load(run_of / "step-1").equal(torch.ones(10))
    assert number > 30


def test_grace_periods(tmp_path: Path) -> None:
    save(tmp_path)
    (tmp_path / LEFTOVER).write_bytes(b"left")
    make_old(tmp_path, hours=2)
    for grace, young in ("3h", 1), ("200m", 1), ("9000s", 1), ("1d", 1), ("1h", 0):
        assert gc(tmp_path, "--grace", grace, "--dry-run")["young"] == young
    for nonsense in ("soon", "-1h", "1 year"):
        assert run("gc", tmp_path, "--grace", nonsense).code == 2
    assert run("gc", tmp_path / "nothing").code == 3
    assert "removed 1 leftover, 4 B" in run("gc", tmp_path, "--grace", "1h").out
    ckpt.save({"t": random_tensor(3)}, tmp_path)


def save_model(place: Path) -> dict[str, torch.Tensor]:
    state = {"a": random_tensor(100), "b": random_tensor(100, seed=1)}
    ckpt.save(state, place, format="safetensors", max_shard_size=400)
    assert len([*place.glob("model-*-of-00002.safetensors")]) in (2, 4)
    return state


@pytest.mark.parametrize("index", ["ours", "another program's", "of one file", "none"])
def test_a_model_that_lost_its_commit_stays(tmp_path: Path, index: str) -> None:
    """A reader of safetensors may still use it: only the user's word removes it."""
    place = tmp_path / "step-1"
    state = save_model(place)
    (place / "commit.json").unlink()
    if index == "another program's":
        files = json.loads((place / MODEL_INDEX).read_text())["weight_map"]
        (place / MODEL_INDEX).write_text(json.dumps({"weight_map": files}))
    elif index == "of one file":
        next(place.glob("model-*-00001-of-*")).unlink()
    elif index == "none":
        (place / MODEL_INDEX).unlink()
    make_old(tmp_path)
    before = file_names(place)
    for _ in range(2):
        report = gc(tmp_path)
        assert (report["items"], report["models"], report["skipped"]) == ([], ["step-1"], {})
    shown = run("gc", tmp_path).out
    assert "--uncommitted-models" in shown
    for verb in ("rm", "verify", "inspect"):
        assert run(verb, place).code != 0
    (listed,) = ckpt.list_checkpoints(tmp_path)
    assert listed.state == "incomplete"
    with pytest.raises(NotCommitted):
        ckpt.load(dict(state), place)
    if index in ("ours", "of one file"):
        with pytest.raises(SaveFailed, match=r"lost its commit\.json"):
            ckpt.save(state, place, format="safetensors", overwrite=False)
    assert file_names(place) == before
    report = gc(tmp_path, "--uncommitted-models")
    assert {item["key"] for item in report["items"]} == before - (
        {MODEL_INDEX} if index == "another program's" else set()
    )
    assert report["models"] == []


def test_a_model_with_a_missing_file_and_no_index_goes(tmp_path: Path) -> None:
    """No program takes it for whole; nor is anything removed beside an index that nobody can read."""
    place = tmp_path / "step-1"
    save_model(place)
    (place / "commit.json").unlink()
    next(place.glob("model-*-00001-of-*")).unlink()
    (place / "other.safetensors.index.json").write_text("{")
    (place / MODEL_INDEX).unlink()
    make_old(tmp_path)
    assert "not a valid index" in gc(tmp_path)["skipped"]["step-1"]
    (place / "other.safetensors.index.json").unlink()
    report = gc(tmp_path)
    assert (len(report["items"]), report["models"], report["skipped"]) == (3, [], {})
    assert not place.exists()


def test_what_stands_beside_a_committed_model_goes(tmp_path: Path) -> None:
    """Files of a save that died before its commit: the index names those of the save before."""
    state = save_model(tmp_path)
    (tmp_path / "commit.json").rename(tmp_path / "kept")
    (tmp_path / MODEL_INDEX).unlink()
    save_model(tmp_path)
    first = {name for name in file_names(tmp_path) if name.startswith("model-")}
    (tmp_path / "kept").unlink()
    make_old(tmp_path)
    report = gc(tmp_path)
    assert len([item for item in report["items"] if item["key"].startswith("model-")]) == 2 < len(first)
    loaded = {name: torch.zeros(100) for name in state}
    ckpt.load(loaded, tmp_path)
    assert torch.equal(loaded["a"], state["a"])
