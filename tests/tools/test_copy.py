"""`ckpt cp`: copy a checkpoint whole or not at all, and send nothing twice without need."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.commands import edit_index, flip, judge_age_by_mtime, options_of, run, run_json, run_process
from support.servers import S3Server
from support.states import digest, emptied, random_tensor

import ckpt
from ckpt.backends.base import put_bytes
from ckpt.backends.posix import PosixStore
from ckpt.backends.registry import open_store
from ckpt.consistency.seal import unseal_json
from ckpt.errors import NotCommitted, NotFound
from ckpt.format.columns import Columns, TensorColumns
from ckpt.tools.copy_claims import CopyClaims


def loaded(place: Path | str, **more: Any) -> Any:
    """Everything in a checkpoint, on one rank."""
    inspection = ckpt.inspect(place, **more)
    state: dict[str, Any] = {
        fqn: torch.zeros(info.shape, dtype=getattr(torch, info.dtype))
        for fqn, info in inspection.tensors.items()
    }
    state |= dict.fromkeys(inspection.objects)
    ckpt.load(state, place, **more)
    return digest(state)


cp = functools.partial(run_json, "cp")


def files(place: Path) -> dict[str, bytes]:
    return {p.relative_to(place).as_posix(): p.read_bytes() for p in place.rglob("*") if p.is_file()}


def assert_whole(place: Path | str, *more: str) -> None:
    report = run_json("verify", place, *more)
    assert (report["ok"], report["strays"]) == (True, [])


def test_there_and_back_over_s3(sharded_place: Path, s3: S3Server, tmp_path: Path) -> None:
    url, back = f"s3://{s3.new_bucket()}/copies/a", tmp_path / "back"
    options = json.dumps(s3.options)
    sent = cp(sharded_place, url, "--dst-storage-options", options)
    data = list(sharded_place.rglob("*.distcp"))
    nbytes = sum(path.stat().st_size for path in data)
    assert (sent["sent_files"], sent["sent_bytes"], sent["kept_files"]) == (len(data), nbytes, 0)
    assert_whole(url, *options_of(s3.options))
    cp(url, back, "--storage-options", options, "--dst-storage-options", "{}")
    assert_whole(back)
    assert loaded(back) == loaded(sharded_place) == loaded(url, storage_options=s3.options)
    again = cp(sharded_place, url, "--dst-storage-options", options)
    assert (again["already_there"], again["sent_files"]) == (True, 0)


def test_a_copy_is_a_save_of_its_own(sharded_place: Path, tmp_path: Path) -> None:
    """Everything gets a new name; what people want to know of it stays."""
    copy = tmp_path / "copy"
    cp(sharded_place, copy)
    assert not {path for path in files(sharded_place) if path.startswith("rank-")} & set(files(copy))
    records = [
        json.loads(unseal_json((p / "commit.json").read_bytes(), url="", key=""))
        for p in (sharded_place, copy)
    ]
    kept = ("created_at", "library", "torch", "world_size", "data_bytes", "tags", "format", "version")
    assert [records[0][name] for name in kept] == [records[1][name] for name in kept]
    assert records[0]["id"] != records[1]["id"]
    assert sorted(data for path, data in files(sharded_place).items() if path.endswith(".distcp")) == sorted(
        data for path, data in files(copy).items() if path.endswith(".distcp")
    )
    state = {"large": torch.zeros(900, 1000)}
    dcp.load(state, storage_reader=dcp.FileSystemReader(copy), no_dist=True)
    assert digest(state) == digest({"large": random_tensor(900, 1000)})


def interrupted(monkeypatch: pytest.MonkeyPatch, when: Callable[[str], bool], *arguments: object) -> None:
    """Run `ckpt cp` until a put of a chosen key, where Ctrl-C is pressed."""
    original = PosixStore.put

    def put(self: PosixStore, key: str, *rest: Any, **more: Any) -> None:
        if when(key):
            raise KeyboardInterrupt
        original(self, key, *rest, **more)

    monkeypatch.setattr(PosixStore, "put", put)
    ran = run("cp", *arguments)
    monkeypatch.undo()
    assert ran.code == 130
    assert "the same command goes on" in ran.err


def test_interrupted_after_its_commit_and_run_again(
    sharded_place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "copy"
    interrupted(monkeypatch, lambda key: key == ".metadata", sharded_place, copy)
    assert loaded(copy) == loaded(sharded_place)
    assert not (copy / ".metadata").exists()
    assert cp(sharded_place, copy)["already_there"]
    assert run_json("verify", copy)["ok"]


@pytest.mark.parametrize("where", ["first", "second", "manifest", "index", "commit.json"])
def test_interrupted_anywhere_and_run_again(
    sharded_place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    copy, seen = tmp_path / "copy", []

    def when(key: str) -> bool:
        seen.append(key)
        if where in ("first", "second"):
            data = [key for key in seen if key.endswith(".distcp")]
            return key.endswith(".distcp") and len(data) == {"first": 1, "second": 2}[where]
        return key.endswith({"manifest": ".json", "index": ".index"}.get(where, where)) and key[:4] in (
            "rank",
            where[:4],
        )

    interrupted(monkeypatch, when, sharded_place, copy, "--threads", "1")
    with pytest.raises((NotCommitted, NotFound)):
        loaded(copy)
    before = files(copy)
    left = {key for key in before if key.endswith(".distcp")}
    done = cp(sharded_place, copy)
    total = len(list(sharded_place.rglob("*.distcp")))
    kept = 0 if where == "commit.json" else len(left)  # that one may still be about to commit
    assert (done["kept_files"], done["sent_files"]) == (kept, total - kept)
    assert len(left) == {"first": 0, "second": 1, "manifest": 1}.get(where, total)
    after = files(copy)
    # No name was written twice with other bytes.
    assert all(after[key] == data for key, data in before.items() if not key.endswith(".probe"))
    report = run_json("verify", copy)
    assert report["ok"]
    assert all(stray["ours"] for stray in report["strays"])
    if where != "commit.json":
        assert {Path(stray["key"]).suffix for stray in report["strays"]} <= {".index", ".probe"}
    assert loaded(copy) == loaded(sharded_place)


@pytest.mark.long
def test_killed_and_run_again(sharded_place: Path, tmp_path: Path) -> None:
    """SIGKILL in the middle of a real process, then to the end."""
    source, copy = sharded_place, tmp_path / "copy"
    code = """
import sys, time
from ckpt.backends.posix import PosixStore
original = PosixStore.put
def put(self, key, *rest, **more):
    if key.startswith("rank-00001/"):
        print("now", flush=True)
        time.sleep(600)
    original(self, key, *rest, **more)
PosixStore.put = put
from ckpt.cli import main
sys.argv = ["ckpt", *sys.argv[1:]]
main()
"""
    command = [sys.executable, "-c", code, "cp", str(source), str(copy), "--threads", "2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "now\n"
        deadline = time.monotonic() + 60
        while not list(copy.glob("rank-00000/*-0.distcp")):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    with pytest.raises(NotCommitted):
        loaded(copy)
    left = len(list(copy.rglob("*.distcp")))
    assert left > 0
    # It may have put a manifest, or have been about to put one or a file.
    killed = {path.relative_to(copy).as_posix() for path in copy.rglob("*.json")}
    unfinished = [path.relative_to(copy) for path in copy.rglob(".*.ckpt-tmp")]
    killed |= {(path.parent / path.name[1:].rsplit(".", 2)[0]).as_posix() for path in unfinished}
    done = cp(source, copy)
    assert done["kept_files"] == left
    assert loaded(copy) == loaded(source)
    report = run_json("verify", copy)
    assert report["ok"]
    strays = {stray["key"] for stray in report["strays"]} - killed
    assert {Path(key).suffix for key in strays} == {".probe"}  # bars the killed one


@pytest.mark.long
def test_ctrl_c_as_a_user(sharded_place: Path, tmp_path: Path) -> None:
    """The process ends by itself, says how to go on, and leaves nothing visible."""
    fifo = tmp_path / "source" / "rank-00000"
    shutil.copytree(sharded_place, tmp_path / "source")
    code = """
import os, signal, sys
from ckpt.backends.posix import PosixStore
original = PosixStore.read_into
def read_into(self, key, *rest):
    original(self, key, *rest)
    if key.endswith(".distcp"):
        os.kill(os.getpid(), signal.SIGINT)
PosixStore.read_into = read_into
from ckpt.cli import main
sys.argv = ["ckpt", *sys.argv[1:]]
main()
"""
    command = [sys.executable, "-c", code, "cp", str(tmp_path / "source"), str(tmp_path / "copy")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 130, done.stderr
    assert re.fullmatch(r"error: interrupted\. .* goes on where this one stopped\.\n", done.stderr)
    assert not (tmp_path / "copy" / "commit.json").exists()
    assert fifo.exists()


def test_leftovers_that_are_not_right_are_not_used(
    sharded_place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "copy"
    interrupted(monkeypatch, lambda key: key.endswith(".index"), sharded_place, copy)
    (wrong, *_) = sorted(copy.rglob("*.distcp"))
    flip(wrong, 70_000)
    damaged = wrong.read_bytes()
    done = cp(sharded_place, copy)
    total = len(list(sharded_place.rglob("*.distcp")))
    assert (done["kept_files"], done["sent_files"]) == (total - 1, 1)
    assert wrong.read_bytes() == damaged  # nobody's name is written twice
    assert loaded(copy) == loaded(sharded_place)


def test_a_damaged_source(sharded_place: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(sharded_place, tmp_path / "source"))
    path = next(source.rglob("*.distcp"))
    flip(path, 100_000)
    error = cp(source, tmp_path / "copy", code=1)["error"]
    assert error["type"] == "IntegrityError"
    assert error["key"] == path.relative_to(source).as_posix()
    assert error["start"] <= 100_000 < error["stop"]
    with pytest.raises((NotCommitted, NotFound)):
        loaded(tmp_path / "copy")
    flip(path, 100_000)
    assert cp(source, tmp_path / "copy")["sent_files"] > 0


def test_a_copy_that_sent_nothing_leaves_nothing(tmp_path: Path) -> None:
    ckpt.save({"t": random_tensor(300, 1000)}, tmp_path / "source")
    (path,) = (tmp_path / "source").rglob("*.distcp")
    flip(path, 100)
    assert cp(tmp_path / "source", tmp_path / "copy", code=1)["error"]["type"] == "IntegrityError"
    assert not files(tmp_path / "copy")


def test_a_source_whose_records_disagree(sharded_place: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(sharded_place, tmp_path / "source"))

    def edit(columns: Columns) -> None:
        large = columns.entries["large"]
        assert isinstance(large, TensorColumns)
        columns.entries["large"] = dataclasses.replace(large, offset=large.offset + 64)

    edit_index(source, edit)
    assert cp(source, tmp_path / "copy", code=1)["error"]["type"] == "FormatError"
    assert not (tmp_path / "copy" / "commit.json").exists()


def test_only_our_checkpoints_are_overwritten(sharded_place: Path, stock_place: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    ckpt.save({"t": torch.ones(3)}, other)
    before = files(other)
    assert cp(sharded_place, other, code=1)["error"]["type"] == "AlreadyExists"
    assert files(other) == before
    cp(sharded_place, other, "--overwrite")
    assert loaded(other) == loaded(sharded_place)
    assert not set(before) & set(files(other)) - {"commit.json", ".metadata"}
    assert_whole(other)
    foreign = Path(shutil.copytree(stock_place, tmp_path / "foreign"))
    assert cp(sharded_place, foreign, "--overwrite", code=1)["error"]["type"] == "AlreadyExists"
    assert files(foreign) == files(stock_place)
    assert cp(sharded_place, sharded_place, code=2)["error"]["type"] == "ConfigurationError"
    assert cp(tmp_path / "nothing", other, code=3)["error"]["type"] == "NotFound"


def test_an_interrupted_overwrite_keeps_what_was_there(
    sharded_place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "place"
    ckpt.save({"t": torch.ones(3)}, place)
    interrupted(monkeypatch, lambda key: key.endswith(".index"), sharded_place, place, "--overwrite")
    state = {"t": torch.zeros(3)}
    ckpt.load(state, place)
    assert torch.equal(state["t"], torch.ones(3))
    done = cp(sharded_place, place, "--overwrite")
    assert (done["sent_files"], done["kept_files"]) == (0, len(list(sharded_place.rglob("*.distcp"))))
    (stray,) = run_json("verify", place)["strays"]  # it keeps the first copy from its commit
    assert stray["key"].endswith(".probe")


# -- stock checkpoints ---------------------------------------------------------------------------------


def test_stock_is_copied_as_it_is(stock_place: Path, tmp_path: Path, s3: S3Server) -> None:
    url, back = f"s3://{s3.new_bucket()}/stock", tmp_path / "back"
    options = json.dumps(s3.options)
    assert cp(stock_place, url, "--dst-storage-options", options)["format"] == "stock"
    cp(url, back, "--storage-options", options, "--dst-storage-options", "{}")
    assert files(back) == files(stock_place)
    again = cp(stock_place, back)
    assert (again["already_there"], again["sent_files"]) == (True, 0)
    state = emptied({"large": random_tensor(900, 1000)})
    dcp.load(state, storage_reader=dcp.FileSystemReader(back), no_dist=True)
    assert digest(state) == digest({"large": random_tensor(900, 1000)})


def test_stock_metadata_comes_last_and_a_copy_goes_on(
    stock_place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(monkeypatch, lambda key: key == ".metadata", stock_place, tmp_path / "copy")
    assert files(tmp_path / "copy").keys() == files(stock_place).keys() - {".metadata"}
    done = cp(stock_place, tmp_path / "copy")
    assert (done["sent_files"], done["kept_files"]) == (0, len(files(stock_place)) - 1)
    assert files(tmp_path / "copy") == files(stock_place)


def test_stock_does_not_replace_what_is_there(stock_place: Path, sharded_place: Path, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "__0_0.distcp").write_bytes(b"mine")
    assert cp(stock_place, tmp_path / "a", code=1)["error"]["type"] == "AlreadyExists"
    assert (tmp_path / "a" / "__0_0.distcp").read_bytes() == b"mine"
    ours = Path(shutil.copytree(sharded_place, tmp_path / "ours"))
    error = cp(stock_place, ours, "--overwrite", code=1)["error"]
    assert (error["type"], error["key"]) == ("AlreadyExists", "commit.json")
    assert "a checkpoint of this library is committed here; choose another" in error["message"]
    assert files(ours) == files(sharded_place)
    short = Path(shutil.copytree(stock_place, tmp_path / "short"))
    path = short / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-10])
    assert cp(short, tmp_path / "b", code=1)["error"]["type"] == "IntegrityError"
    assert not (tmp_path / "b").exists()


@pytest.mark.long
def test_cp_as_a_user(sharded_place: Path, tmp_path: Path) -> None:
    ran = run_process("cp", sharded_place, tmp_path / "copy")
    assert ran.code == 0, ran.err
    assert re.fullmatch(r"copied to .*: \d+ files sent \(.*\)\n", ran.out)
    assert ran.err == ""


@pytest.mark.parametrize("version", ["ckpt-v1", "ckpt-v2"])
def test_older_formats(version: str, tmp_path: Path) -> None:
    source = Path(__file__).parents[1] / "data" / version
    cp(source, tmp_path / "copy")
    assert_whole(tmp_path / "copy")
    assert loaded(tmp_path / "copy") == loaded(source)
    assert json.loads((tmp_path / "copy" / "commit.json").read_text())["version"] == 2
    assert cp(source, tmp_path / "copy")["already_there"]


def test_old_leftovers_are_not_used(
    sharded_place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ckpt gc` could take them away before the copy is committed."""
    copy = tmp_path / "copy"
    interrupted(monkeypatch, lambda key: key.endswith(".index"), sharded_place, copy)
    judge_age_by_mtime(monkeypatch)
    for path in copy.rglob("*.distcp"):
        os.utime(path, (time.time() - 13 * 3600,) * 2)
    assert cp(sharded_place, copy)["kept_files"] == 0
    assert loaded(copy) == loaded(sharded_place)


def test_a_copy_that_was_taken_for_interrupted_spoils_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sources that share files, one destination: what the second commits stays as it is."""
    same, copy = random_tensor(1 << 20), tmp_path / "copy"
    monkeypatch.setattr("ckpt.writing.layout.MIN_FILE_BYTES", 1 << 20)
    for name, seed in ("a", 1), ("b", 2):
        ckpt.save({"a": same, "b": random_tensor(1 << 20, seed=seed)}, tmp_path / name, threads=2)
    put, began = PosixStore.put, []

    def put_after_the_other(self: PosixStore, key: str, *rest: Any, **more: Any) -> None:
        if key.endswith(".distcp"):
            began.append(key)
            if len(began) == 2:
                assert cp(tmp_path / "b", copy)["kept_files"] == 1
        put(self, key, *rest, **more)

    monkeypatch.setattr(PosixStore, "put", put_after_the_other)
    ran = run("cp", tmp_path / "a", copy, "--threads", "1")
    assert (ran.code, "another copy" in ran.err) == (1, True), ran.err
    assert run_json("verify", copy)["ok"]
    assert loaded(copy) == loaded(tmp_path / "b")


@pytest.mark.smoke
def test_files_of_a_copy_that_may_yet_commit_are_taken_by_nobody(tmp_path: Path) -> None:
    """Also not by a third copy, after a second one has found that and left its mark."""
    store = open_store(f"memory://{tmp_path.name}/copy")
    first, second, third = (CopyClaims(store, f"{number:016x}") for number in (1, 2, 3))
    token = first.new()
    put_bytes(store, f"rank-00000/{1:016x}.index", b"index")
    first.check()  # and stalls, right before its commit
    assert not second.take(token)
    assert not third.take(token)
