"""`ckpt rm` and `ckpt gc`: the commit goes first, and nothing that is not ours, listed or old goes at all."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.commands import flip, options_of, run, run_process, sharded_checkpoint, stock_checkpoint
from support.servers import S3Server
from support.states import random_tensor

import ckpt
from ckpt.backends.base import Capabilities
from ckpt.backends.posix import PosixStore
from ckpt.errors import NotCommitted


@pytest.fixture(autouse=True)
def _ages_by_mtime(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that `make_old` can make files old."""
    monkeypatch.setattr("ckpt.backends.posix._changed_at_s", lambda found: found.st_mtime)


LEFT = "rank-00000/0123456789abcdef-0.distcp"


def files(place: Path) -> set[str]:
    return {path.relative_to(place).as_posix() for path in place.rglob("*") if not path.is_dir()}


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


def save_and_die(place: Path, value: float, where: str) -> None:
    """A real save in a process that dies `before` its commit, or `between` .metadata and commit.json."""
    code = f"""
import os, torch, ckpt, ckpt.writing.coordinator, ckpt.consistency.commit as commit
if {where!r} == "before":
    commit.publish.__globals__["read_commit_bytes"] = lambda store: os._exit(9)
else:
    commit.publish.__globals__["_put_record"] = lambda *_: os._exit(9)
ckpt.save({{"t": torch.full((10,), {value})}}, {str(place)!r})
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 9


def gc(root: Path | str, *more: str, code: int = 0) -> dict[str, Any]:
    ran = run("gc", root, "--json", *more)
    assert ran.code == code, (ran.out, ran.err)
    return ran.json


# -- rm ------------------------------------------------------------------------------------------------


def test_rm_removes_all_of_it(tmp_path: Path) -> None:
    place, other = tmp_path / "step-1", tmp_path / "step-2"
    sharded_checkpoint(place)
    save(other)
    before = files(place)
    ran = run("rm", place, "--dry-run", "--json")
    assert ran.code == 0
    assert set(ran.json["keys"]) == before == files(place)
    ran = run("rm", place, "--json")
    assert ran.json["keys"][:2] == ["commit.json", ".metadata"]
    assert not place.exists()
    assert torch.equal(load(other), torch.ones(10))
    assert run("rm", place).code == 3


def test_rm_leaves_what_the_commit_does_not_list(tmp_path: Path) -> None:
    save(tmp_path)
    (tmp_path / LEFT).write_bytes(b"left")
    (tmp_path / "notes.txt").write_text("mine")
    assert run_process("rm", tmp_path).out.startswith("removed ")
    assert files(tmp_path) == {LEFT, "notes.txt"}


def test_rm_takes_the_commit_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted after any deletion, there is no checkpoint, and the rest is known for what it is."""
    original = PosixStore.delete

    def delete(self: PosixStore, keys: Any) -> None:
        original(self, keys)
        raise KeyboardInterrupt

    save(tmp_path / "c")
    monkeypatch.setattr(PosixStore, "delete", delete)
    ran = run("rm", tmp_path / "c")
    assert ran.code == 130
    assert "ckpt gc" in ran.err
    monkeypatch.undo()
    with pytest.raises(NotCommitted):
        load(tmp_path / "c")
    gc(tmp_path, "--grace", "0")
    assert not (tmp_path / "c").exists()


def test_rm_of_a_checkpoint_with_a_lost_manifest(tmp_path: Path) -> None:
    save(tmp_path / "c")
    next((tmp_path / "c").glob("rank-*/*.json")).unlink()
    assert run("rm", tmp_path / "c").code == 0
    assert not (tmp_path / "c").exists()


def test_rm_of_what_is_not_ours(tmp_path: Path) -> None:
    stock_checkpoint(tmp_path / "stock")
    before = files(tmp_path / "stock")
    ran = run("rm", tmp_path / "stock")
    assert (ran.code, files(tmp_path / "stock")) == (3, before)
    assert "another program" in ran.err
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "commit.json").write_text("{}")
    assert run("rm", tmp_path / "x").code == 3
    assert files(tmp_path / "x") == {"commit.json"}
    save(tmp_path / "damaged")
    flip(tmp_path / "damaged" / "commit.json", 50)
    before = files(tmp_path / "damaged")
    assert run("rm", tmp_path / "damaged").code == 1
    assert files(tmp_path / "damaged") == before


def test_rm_of_a_record_that_lists_what_is_not_ours(tmp_path: Path) -> None:
    """A forged manifest names a file of the user's, and one that a link leads to."""
    from support.commands import edit_commit, edit_listed

    from ckpt.consistency.seal import seal_json, unseal_json

    place = tmp_path / "c"
    save(place)
    (place / "notes.txt").write_text("mine")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "0123456789abcdef-0.distcp").write_text("another's")
    (place / "rank-00007").symlink_to(tmp_path / "other")

    def change(record: dict[str, Any]) -> None:
        ref = record["manifests"][0]
        data = json.loads(unseal_json((place / ref["path"]).read_bytes(), url="", key=""))
        file = data["files"][0]
        data["files"] += [
            {**file, "path": path} for path in ("notes.txt", "rank-00007/0123456789abcdef-0.distcp")
        ]
        edit_listed(place, ref, seal_json(json.dumps(data, separators=(",", ":")).encode()))

    edit_commit(place, change)
    assert run("rm", place).code == 1
    assert (place / "notes.txt").read_text() == "mine"
    assert (tmp_path / "other" / "0123456789abcdef-0.distcp").read_text() == "another's"


def test_rm_on_s3(s3: S3Server) -> None:
    bucket = s3.new_bucket()
    save(f"s3://{bucket}/run/step-1", storage_options=s3.options)
    save(f"s3://{bucket}/run/step-10", storage_options=s3.options)
    assert run("rm", f"s3://{bucket}/run/step-1", *options_of(s3.options)).code == 0
    keys = [found["Key"] for found in s3.client().list_objects_v2(Bucket=bucket)["Contents"]]
    assert keys
    assert all(key.startswith("run/step-10/") for key in keys)


# -- gc ------------------------------------------------------------------------------------------------


def test_gc_removes_a_probe_that_stayed(tmp_path: Path) -> None:
    """It belongs to no checkpoint, though it has the token of one."""
    save(tmp_path)
    index = next(tmp_path.rglob("*.index"))
    index.with_suffix(".probe").write_bytes(b"first")
    make_old(tmp_path)
    found = gc(tmp_path)
    assert [item["key"] for item in found["items"]] == [
        index.with_suffix(".probe").relative_to(tmp_path).as_posix()
    ]
    assert torch.equal(load(tmp_path), torch.ones(10))


@pytest.mark.parametrize("where", ["before", "between"])
def test_gc_removes_what_a_dead_first_save_left(tmp_path: Path, where: str) -> None:
    save_and_die(tmp_path / "step-2", 2.0, where)
    save(tmp_path / "step-1")
    left = files(tmp_path / "step-2")
    assert len(left) == {"before": 3, "between": 4}[where]  # data, manifest, index, then .metadata
    assert gc(tmp_path)["young"] == len(left)
    assert files(tmp_path / "step-2") == left
    make_old(tmp_path)
    found = gc(tmp_path, "--dry-run")
    assert {item["key"] for item in found["items"]} == left == files(tmp_path / "step-2")
    nbytes = sum((tmp_path / "step-2" / key).stat().st_size for key in left)
    assert found["freed_bytes"] == nbytes
    assert {item["key"] for item in gc(tmp_path)["items"]} == left
    assert not (tmp_path / "step-2").exists()
    assert torch.equal(load(tmp_path / "step-1"), torch.ones(10))
    assert gc(tmp_path)["items"] == []


@pytest.mark.parametrize("where", ["before", "between"])
def test_gc_keeps_the_checkpoint_that_a_dead_save_was_to_replace(tmp_path: Path, where: str) -> None:
    place = tmp_path / "latest"
    save(place)
    whole = {key: (place / key).read_bytes() for key in files(place)}
    save_and_die(place, 2.0, where)
    assert len(files(place)) == len(whole) + 3
    make_old(tmp_path)
    found = gc(tmp_path)
    assert found["restored"] == ([] if where == "before" else ["latest"])
    assert {key: (place / key).read_bytes() for key in files(place)} == whole
    state = {"t": torch.zeros(10)}
    dcp.load(state, storage_reader=dcp.FileSystemReader(place), no_dist=True)
    assert torch.equal(state["t"], torch.ones(10))
    assert run("verify", place, "--json").json["strays"] == []


def test_gc_restores_nothing_while_a_save_may_be_running(tmp_path: Path) -> None:
    save(tmp_path)
    make_old(tmp_path)
    (tmp_path / LEFT).write_bytes(b"left")
    os.utime(tmp_path / LEFT, (0, 0))
    save(tmp_path / "other", 2.0)
    shutil.copy(tmp_path / "other" / ".metadata", tmp_path / ".metadata")
    found = gc(tmp_path, "--depth", "0")
    assert ([item["key"] for item in found["items"]], found["restored"]) == ([LEFT], [])


def test_gc_leaves_a_checkpoint_whose_commit_is_not_seen_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Storage that lags: the data are old and seen, the commit is there and is not."""
    place, unseen = tmp_path / "run" / "c", tmp_path / "commit.json"
    save(place)
    make_old(tmp_path)
    before = files(place)
    (place / "commit.json").rename(unseen)
    monkeypatch.setattr(PosixStore, "capabilities", Capabilities())
    waited: list[float] = []

    def appear(seconds: float) -> None:
        waited.append(seconds)
        unseen.rename(place / "commit.json")

    monkeypatch.setattr("ckpt.consistency.environment.sleep", appear)
    found = gc(tmp_path / "run")
    assert (found["items"], list(found["skipped"]), len(waited)) == ([], ["c"], 1)
    assert files(place) == before


def test_gc_leaves_what_another_program_puts_there_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look and the deletion, stock PyTorch saves where a save of ours died."""
    save_and_die(tmp_path / "run" / "c", 2.0, "between")
    make_old(tmp_path)
    stock_checkpoint(tmp_path / "stock")
    monkeypatch.setattr(PosixStore, "capabilities", Capabilities())
    monkeypatch.setattr(
        "ckpt.consistency.environment.sleep",
        lambda seconds: shutil.copytree(tmp_path / "stock", tmp_path / "run" / "c", dirs_exist_ok=True),
    )
    assert gc(tmp_path / "run")["items"] == []
    assert (tmp_path / "run" / "c" / ".metadata").read_bytes() == (
        tmp_path / "stock" / ".metadata"
    ).read_bytes()


def test_gc_leaves_a_copy_that_keeps_the_times_of_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`cp -a`, `rsync -a`, `mv` to another disk: old times, on files that came a moment ago."""
    monkeypatch.undo()
    save(tmp_path / "c")
    make_old(tmp_path)
    shutil.copytree(
        tmp_path / "c", tmp_path / "run" / "c", ignore=shutil.ignore_patterns("commit.json", ".metadata")
    )
    before = files(tmp_path / "run")
    found = gc(tmp_path / "run")
    assert (found["items"], found["young"]) == ([], 3)
    assert files(tmp_path / "run") == before


def test_gc_touches_nothing_else(tmp_path: Path) -> None:
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
    stock_checkpoint(tmp_path / "stock")
    (tmp_path / "stock" / "rank-00000").mkdir()
    (tmp_path / "stock" / LEFT).write_bytes(b"x")
    save(tmp_path / "damaged")
    (tmp_path / "damaged" / LEFT).write_bytes(b"x")
    flip(tmp_path / "damaged" / "commit.json", 50)
    save(tmp_path / "unsealed")
    (tmp_path / "unsealed" / "commit.json").unlink()
    path = tmp_path / "unsealed" / ".metadata"
    path.write_bytes(pickle.dumps(pickle.loads(path.read_bytes())))
    (tmp_path / ".hidden.0123456789abcdef.ckpt-tmp").write_bytes(b"x")
    before = files(tmp_path)
    make_old(tmp_path)
    found = gc(tmp_path)
    assert found["items"] == []
    assert set(found["skipped"]) == {"damaged", "unsealed"}
    assert files(tmp_path) == before
    text = run("gc", tmp_path).out
    assert "left alone damaged: its commit record cannot be read" in text


def test_gc_does_not_follow_links_into_another_checkpoint(tmp_path: Path) -> None:
    save(tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "rank-00000").symlink_to(tmp_path / "a" / "rank-00000")
    (tmp_path / "b" / "rank-00001").mkdir()
    make_old(tmp_path)
    before = files(tmp_path / "a")
    gc(tmp_path)
    assert files(tmp_path / "a") == before


def test_gc_of_temporary_files(tmp_path: Path) -> None:
    save(tmp_path / "c")
    left = [
        "c/rank-00000/.0123456789abcdef-0.distcp.0123456789abcdef.ckpt-tmp", "c/.commit.json.0123456789abcdef.ckpt-tmp",
        "d/rank-00003/.0123456789abcdef.json.0123456789abcdef.ckpt-tmp",
    ]  # fmt: skip
    for key in left:
        (tmp_path / key).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / key).write_bytes(b"x")
    assert gc(tmp_path)["young"] == 3
    make_old(tmp_path)
    before = files(tmp_path)
    found = gc(tmp_path)
    assert {f"{item['place']}/{item['key']}" for item in found["items"]} == {
        "c/rank-00000/0123456789abcdef-0.distcp", "c/commit.json", "d/rank-00003/0123456789abcdef.json",
    }  # fmt: skip
    assert files(tmp_path) == before - set(left)


def test_gc_on_s3(s3: S3Server) -> None:
    bucket, client = s3.new_bucket(), s3.client()
    root = f"s3://{bucket}/run"
    save(f"{root}/step-1", storage_options=s3.options)
    before = {found["Key"] for found in client.list_objects_v2(Bucket=bucket)["Contents"]}
    for key in (f"run/step-1/{LEFT}", f"run/step-2/{LEFT}", "run/other.bin"):
        client.put_object(Bucket=bucket, Key=key, Body=b"left")
    uploads = [
        f"run/step-1/{LEFT}",
        f"run/step-3/{LEFT}",
        "run/step-1/.metadata",
        "run/other.bin",
        "run/stock/.metadata",
    ]
    for key in [*uploads, f"elsewhere/{LEFT}"]:
        client.create_multipart_upload(Bucket=bucket, Key=key)
    options = options_of(s3.options)
    assert [item for item in gc(root, *options)["items"] if not item["unfinished"]] == []
    found = gc(root, "--grace", "0", *options)
    assert {(item["place"], item["key"]) for item in found["items"]} == {("step-1", LEFT), ("step-2", LEFT)}
    after = {found["Key"] for found in client.list_objects_v2(Bucket=bucket)["Contents"]}
    assert after == before | {"run/other.bin"}
    pending = {upload["Key"] for upload in client.list_multipart_uploads(Bucket=bucket)["Uploads"]}
    assert pending == {"run/other.bin", "run/stock/.metadata", f"elsewhere/{LEFT}"}
    assert torch.equal(load(f"{root}/step-1", storage_options=s3.options), torch.ones(10))


def test_grace_periods(tmp_path: Path) -> None:
    save(tmp_path)
    (tmp_path / LEFT).write_bytes(b"left")
    make_old(tmp_path, hours=2)
    for grace, young in ("3h", 1), ("200m", 1), ("9000s", 1), ("1d", 1), ("1h", 0):
        assert gc(tmp_path, "--grace", grace, "--dry-run")["young"] == young
    for nonsense in ("soon", "-1h", "1 year"):
        assert run("gc", tmp_path, "--grace", nonsense).code == 2
    assert run("gc", tmp_path / "nothing").code == 3
    out = run("gc", tmp_path, "--grace", "1h").out
    assert "removed 1 leftover, 4 B" in out
    ckpt.save({"t": random_tensor(3)}, tmp_path)
