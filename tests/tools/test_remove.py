"""`ckpt rm`: remove the records first, and nothing that is not ours or not listed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.commands import (
    edit_manifest,
    file_names,
    flip,
    options_of,
    run,
    run_json,
    run_on_terminal,
    run_process,
)
from support.servers import S3Server

import ckpt
from ckpt.backends.posix import PosixStore
from ckpt.cli.printing.output import Output
from ckpt.cli.upkeep import rm
from ckpt.errors import AccessDenied, NotCommitted
from ckpt.tools.ls import ListedCheckpoint

LEFTOVER = "rank-00000/0123456789abcdef-0.distcp"


def save(place: Path | str, **more: Any) -> None:
    ckpt.save({"t": torch.ones(10)}, place, **more)


def load(place: Path) -> torch.Tensor:
    state = {"t": torch.zeros(10)}
    ckpt.load(state, place)
    return state["t"]


def test_all_of_a_checkpoint_is_removed(sharded_place: Path, tmp_path: Path) -> None:
    place, other = Path(shutil.copytree(sharded_place, tmp_path / "step-1")), tmp_path / "step-2"
    save(other)
    before = file_names(place)
    assert set(run_json("rm", place, "--dry-run")["keys"]) == before == file_names(place)
    assert run_json("rm", place)["keys"][:2] == [".metadata", "commit.json"]
    assert not place.exists()
    assert torch.equal(load(other), torch.ones(10))
    assert run("rm", place).code == 3


def test_only_what_is_there_is_named(tmp_path: Path) -> None:
    save(tmp_path / "c")
    (tmp_path / "c" / ".metadata").unlink()
    assert ckpt.remove(tmp_path / "c", dry_run=True).keys[0] == "commit.json"
    assert ".metadata" not in ckpt.remove(tmp_path / "c").keys


def test_on_a_terminal_the_newest_is_not_removed_by_mistake(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path / f"step-{step}")
    refused = run_on_terminal("rm", tmp_path / "step-3", answer="n\n")
    assert refused.code == 1
    assert "step-3 is the newest of 3 checkpoints in its folder. Remove it? [y/N]" in refused.out
    assert run_on_terminal("rm", tmp_path / "step-3", answer="\x04").code == 130
    assert run_on_terminal("rm", tmp_path / "step-3", "--dry-run").code == 0
    assert (tmp_path / "step-3").exists()
    asked = run_on_terminal("rm", tmp_path / "step-1")  # not the newest
    assert (asked.code, "Remove it?" in asked.out) == (0, False)
    assert run_on_terminal("rm", f"{tmp_path}/step-3/", answer="y\n").code == 0
    assert run_on_terminal("rm", tmp_path / "step-2", "-y").code == 0
    assert list(tmp_path.iterdir()) == []


def test_a_question_shows_no_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    confirm = Mock(return_value=False)
    monkeypatch.setattr("typer.confirm", confirm)
    newest = ListedCheckpoint("step-1", "", "committed", 1, latest=True)
    for result in ([newest], AccessDenied("cannot list")):
        answer = Mock(side_effect=[result])
        monkeypatch.setattr("ckpt.list_checkpoints", answer)
        assert not rm._agreed("sftp://me:hunter2@host/run/step-1", None, Output(as_json=False))
    asked = [call.args[0] for call in confirm.call_args_list]
    assert "the only one of 1 checkpoint" in asked[0]
    assert "may be the newest" in asked[1]
    assert "hunter2" not in f"{asked}"


def test_files_that_the_commit_does_not_list_stay(tmp_path: Path) -> None:
    save(tmp_path)
    (tmp_path / LEFTOVER).write_bytes(b"left")
    (tmp_path / "notes.txt").write_text("mine")
    assert run_process("rm", tmp_path).out.startswith("removed ")
    assert file_names(tmp_path) == {LEFTOVER, "notes.txt"}


def test_empty_folders_of_other_programs_stay(tmp_path: Path) -> None:
    save(tmp_path / "run")
    (tmp_path / "run" / "tensorboard").mkdir()
    assert run("rm", tmp_path / "run").code == 0
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["tensorboard"]


@pytest.mark.parametrize("last", [".metadata", "commit.json"])
def test_the_records_go_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: str) -> None:
    """Interrupted after any deletion: a whole checkpoint, or none, and the rest is known for what it is."""
    original = PosixStore.delete

    def delete(self: PosixStore, keys: Any) -> None:
        original(self, keys)
        if last in keys:
            raise KeyboardInterrupt

    save(tmp_path / "c")
    with monkeypatch.context() as patch:
        patch.setattr(PosixStore, "delete", delete)
        ran = run("rm", tmp_path / "c")
    assert ran.code == 130
    assert "ckpt gc" in ran.err
    assert not (tmp_path / "c" / ".metadata").exists()  # nobody takes it for whole who looks there alone
    if last == ".metadata":
        assert torch.equal(load(tmp_path / "c"), torch.ones(10))
        run_json("rm", tmp_path / "c")
        return
    with pytest.raises(NotCommitted):
        load(tmp_path / "c")
    run_json("gc", tmp_path, "--grace", "0")
    assert not (tmp_path / "c").exists()


def test_a_lost_manifest_is_no_obstacle(tmp_path: Path) -> None:
    save(tmp_path / "c")
    next((tmp_path / "c").glob("rank-*/*.json")).unlink()
    assert run("rm", tmp_path / "c").code == 0
    assert not (tmp_path / "c").exists()


def test_foreign_and_damaged_checkpoints_stay(stock_place: Path, tmp_path: Path) -> None:
    stock = Path(shutil.copytree(stock_place, tmp_path / "stock"))
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "commit.json").write_text("{}")
    save(tmp_path / "damaged")
    flip(tmp_path / "damaged" / "commit.json", 50)
    before = file_names(tmp_path)
    ran = run("rm", stock)
    assert ran.code == 3
    assert "another program" in ran.err
    assert run("rm", tmp_path / "x").code == 3
    assert run("rm", tmp_path / "damaged").code == 1
    assert file_names(tmp_path) == before


def test_a_forged_manifest_removes_no_foreign_file(tmp_path: Path) -> None:
    """It names a file of the user's, and one that a link leads to."""
    place, foreign = tmp_path / "c", tmp_path / "other" / "0123456789abcdef-0.distcp"
    save(place)
    (place / "notes.txt").write_text("mine")
    foreign.parent.mkdir()
    foreign.write_text("another's")
    (place / "rank-00007").symlink_to(foreign.parent)

    def forge(manifest: dict[str, Any]) -> None:
        names = "notes.txt", f"rank-00007/{foreign.name}"
        manifest["files"] += [{**manifest["files"][0], "path": name} for name in names]

    edit_manifest(place, forge)
    assert run("rm", place).code == 0  # it asks no manifest what to remove
    assert (place / "notes.txt").read_text() == "mine"
    assert foreign.read_text() == "another's"


def test_rm_on_s3(s3: S3Server) -> None:
    bucket = s3.new_bucket()
    for name in "step-1", "step-10":
        save(f"s3://{bucket}/run/{name}", storage_options=s3.options)
    assert run("rm", f"s3://{bucket}/run/step-1", *options_of(s3.options)).code == 0
    keys = [stat["Key"] for stat in s3.client().list_objects_v2(Bucket=bucket)["Contents"]]
    assert keys
    assert all(key.startswith("run/step-10/") for key in keys)
