"""`ckpt ls`: name the checkpoints under a root by their records, not by a listing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import flip, options_of, run, run_json, run_on_terminal, run_process
from support.servers import S3Server

import ckpt
from ckpt.backends.posix import PosixStore
from ckpt.errors import AccessDenied, NotFound, StorageUnavailable
from ckpt.format.names import step_of


def listed(root: object, *more: str) -> dict[str, dict[str, Any]]:
    return {each["path"]: each for each in run_json("ls", root, *more)["checkpoints"]}


def latest(checkpoints: dict[str, dict[str, Any]]) -> list[str]:
    return [path for path, each in checkpoints.items() if each["latest"]]


def save(place: object, **more: Any) -> None:
    ckpt.save({"t": torch.arange(10.0)}, str(place), **more)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, sharded_place: Path, stock_place: Path) -> Path:
    """A root with checkpoints in every state."""
    root = tmp_path_factory.mktemp("root")
    shutil.copytree(sharded_place, root / "run" / "step-200")
    shutil.copytree(stock_place, root / "stock" / "500")
    save(root / "run" / "step-1000", tags={"note": "x"})
    save(root / "run" / "other", tags={"step": "30"})
    save(root / "run" / "step-2000")
    (root / "run" / "step-2000" / "commit.json").unlink()
    save(root / "run" / "step-3000")
    flip(root / "run" / "step-3000" / "commit.json", 40)
    save(root / "unsealed" / "7")
    path = root / "unsealed" / "7" / ".metadata"
    path.write_bytes(path.read_bytes()[:-34])
    (root / "unsealed" / "7" / "commit.json").unlink()
    (root / "notes").mkdir()
    (root / "notes" / "commit.json").write_text("{}")
    (root / "notes" / "text").write_text("mine")
    return root


def test_every_state(root: Path) -> None:
    checkpoints = listed(root)
    facts = {path: (each["state"], each["step"], each["latest"]) for path, each in checkpoints.items()}
    assert facts == {
        "unsealed/7": ("incomplete", 7, False),
        "run/other": ("committed", 30, False),
        "run/step-200": ("committed", 100, False),  # by its tag
        "stock/500": ("foreign", 500, False),
        "run/step-1000": ("committed", 1000, True),
        "run/step-2000": ("incomplete", 2000, False),
        "run/step-3000": ("damaged", 3000, False),
    }
    assert list(checkpoints) == [
        "run/other", "run/step-200", "run/step-1000", "run/step-2000", "run/step-3000", "stock/500", "unsealed/7",
    ], "by folder, then step"  # fmt: skip
    whole = checkpoints["run/step-200"]
    assert (whole["world_size"], whole["tags"]) == (2, {"step": "100"})
    data = sum(path.stat().st_size for path in (root / "run" / "step-200").rglob("*.distcp"))
    assert whole["size_bytes"] == data
    assert abs(whole["created_at_s"] - time.time()) < 3600
    stock = root / "stock" / "500"
    assert checkpoints["stock/500"]["size_bytes"] == sum(p.stat().st_size for p in stock.iterdir())
    assert checkpoints["run/step-3000"]["problem"] == "the record's checksum does not fit"


def test_the_latest_is_one_that_has_its_records(root: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(root, tmp_path / "root"))
    next((copy / "run" / "step-1000").rglob("*.index")).unlink()
    assert latest(listed(copy)) == ["run/step-200"]
    manifest = next((copy / "run" / "step-200").glob("rank-00001/*.json"))
    manifest.write_bytes(manifest.read_bytes()[:-1])
    assert latest(listed(copy)) == ["run/other"]
    next((copy / "run" / "other").rglob("*.distcp")).unlink()
    assert latest(listed(copy)) == []


def test_each_folder_has_its_latest(tmp_path: Path) -> None:
    for path in ("a/step-1", "a/step-30", "b/step_4_ckp", "b/step_12_ckp", "alone"):
        save(tmp_path / path)
    checkpoints = listed(tmp_path)
    assert list(checkpoints) == ["alone", "a/step-1", "a/step-30", "b/step_4_ckp", "b/step_12_ckp"]
    assert latest(checkpoints) == ["alone", "a/step-30", "b/step_12_ckp"]


def test_a_save_that_was_killed_before_any_file_was_whole(tmp_path: Path) -> None:
    """All that it leaves are files with temporary names."""
    place = tmp_path / "run" / "step-3"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "rename", _killed)
        patch.setattr(os, "replace", _killed)
        patch.setattr(os, "link", _killed)
        patch.setattr(os, "unlink", _killed)
        with pytest.raises(ckpt.errors.SaveFailed):
            ckpt.save({"t": torch.arange(1e5)}, place)
    (left,) = place.glob("rank-00000/*")
    assert left.name.endswith(".ckpt-tmp")
    each = listed(tmp_path)["run/step-3"]
    assert (each["state"], each["size_bytes"]) == ("incomplete", left.stat().st_size)


def _killed(*arguments: Any, **options: Any) -> None:
    raise OSError("killed")


def test_a_root_that_is_a_checkpoint_and_depth(root: Path) -> None:
    assert listed(root / "run" / "step-1000")[""]["state"] == "committed"
    assert list(listed(root, "--depth", "1")) == []
    assert "run/step-1000" in listed(root, "--depth", "2")


def test_ls_as_a_user(root: Path) -> None:
    ran = run_process("ls", root)
    assert ran.code == 0, ran.err
    (line,) = [line for line in ran.out.splitlines() if "step-1000" in line]
    assert line.split()[:4] == ["*", "run/step-1000", "1000", "committed"]
    assert "note=x" in line


def test_states_have_colors_on_a_terminal(root: Path) -> None:
    shown = run_on_terminal("ls", root, columns=120).out
    assert ("\x1b[32mcommitted\x1b[0m" in shown, "\x1b[31mdamaged\x1b[0m" in shown) == (True, True)


def test_it_starts_without_torch() -> None:
    code = "import sys, ckpt.cli.app, ckpt.tools.ls; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_ls_on_s3(s3: S3Server) -> None:
    bucket = s3.new_bucket()
    root, options = f"s3://{bucket}/run", s3.options
    for step in (1, 20, 3):
        save(f"{root}/step-{step}", storage_options=options)
    client = s3.client()
    client.put_object(Bucket=bucket, Key="run/step-99/rank-00000/0123456789abcdef-0.distcp", Body=b"left")
    client.put_object(Bucket=bucket, Key="runner/step-7/commit.json", Body=b"elsewhere")
    checkpoints = listed(root, *options_of(options))
    assert [(path, each["state"]) for path, each in checkpoints.items()] == [
        ("step-1", "committed"), ("step-3", "committed"), ("step-20", "committed"), ("step-99", "incomplete"),
    ]  # fmt: skip
    assert latest(checkpoints) == ["step-20"]
    assert run("ls", f"s3://{bucket}/nothing", *options_of(options)).code == 3
    assert run("ls", "s3://no-such-bucket-here/x", *options_of(options)).code == 3


def test_objects_that_a_listing_shows_late_are_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Folders are all that is listed."""
    save(tmp_path / "step-1")

    def nothing(self: PosixStore, prefix: str = "") -> Iterator[Any]:
        return iter(())

    monkeypatch.setattr(PosixStore, "list", nothing)
    assert listed(tmp_path)["step-1"]["latest"]


def test_empty_folders_are_nothing(tmp_path: Path) -> None:
    """Servers that keep objects in folders leave some behind."""
    save(tmp_path / "step-1")
    (tmp_path / "step-2" / "rank-00000").mkdir(parents=True)
    assert set(listed(tmp_path)) == {"step-1"}


def test_numbers_are_made_for_people(tmp_path: Path) -> None:
    tags = {"step": "5", "metric.val_loss": "9.122579574584961", "commit": "1234567890123"}
    ckpt.save({"t": torch.ones(3)}, tmp_path / "step-5", tags=tags)
    ckpt.save({"t": torch.ones(300)}, tmp_path / "step-10000")
    header, first, second = run("ls", tmp_path).out.splitlines()
    assert first.endswith("  9.123  commit=1234567890123")
    ends = [line.index("committed") for line in (first, second)]
    assert ends[0] == ends[1]
    assert first[: ends[0]].rstrip().endswith("     5")
    assert header.index("step") + 4 == len(second[: ends[1]].rstrip())
    assert listed(tmp_path)["step-5"]["tags"] == tags


def test_an_empty_root(tmp_path: Path) -> None:
    assert run("ls", tmp_path / "nothing").code == 3
    with pytest.raises(NotFound):
        ckpt.list_checkpoints(tmp_path / "nothing")
    (tmp_path / "text").write_text("x")
    assert run("ls", tmp_path).out == "no checkpoints\n"


@pytest.mark.parametrize(
    ("path", "step"),
    [
        ("step-100", 100), ("step_100", 100), ("100", 100), ("run7/step-5", 5), ("epoch=3-step=100", 100),
        ("epoch=3-step=100.ckpt", 100), ("latest", None), ("llama-7b", None), ("7b", None), ("step-" + "9" * 40, None),
        ("step-00000100", 100), ("checkpoint-12/", 12), ("", None), ("step_4_ckp", 4), ("step-00000005.again", 5),
        ("step=100-epoch=3.ckpt", 100), ("global_step100", 100), ("iter_0000100", 100), ("checkpoint7", 7),
        ("y4", None), ("footstep-3", 3), ("run7", None),
    ],
)  # fmt: skip
def test_steps(path: str, step: int | None) -> None:
    assert step_of(path) == step


def test_an_unreachable_record_does_not_make_an_older_checkpoint_the_latest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        ckpt.save({"t": torch.ones(3)}, tmp_path / f"step-{step}")
    stat = PosixStore.stat

    def nothing(self: PosixStore, prefix: str = "") -> Iterator[Any]:
        return iter(())

    def failing(self: PosixStore, key: str) -> Any:
        if key.startswith("step-2/rank-"):
            raise StorageUnavailable("gone", url=self.url, key=key)
        return stat(self, key)

    monkeypatch.setattr(PosixStore, "list", nothing)
    monkeypatch.setattr(PosixStore, "stat", failing)
    assert run("ls", tmp_path).code == 4


def test_one_bad_folder_hides_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit record that is a link out of the root, and a folder that only root may list."""
    root = tmp_path / "run"
    ckpt.save({"t": torch.ones(3)}, root / "step-1")
    ckpt.save({"t": torch.ones(3)}, tmp_path / "elsewhere")
    for name in ("linked", "lost+found"):
        (root / name).mkdir()
    (root / "linked" / "commit.json").symlink_to(tmp_path / "elsewhere" / "commit.json")
    folders = PosixStore.folders

    def refused(self: PosixStore, prefix: str = "") -> Any:
        if prefix == "lost+found/":
            raise AccessDenied("cannot list: Permission denied", url=self.url, key=prefix)
        return folders(self, prefix)

    monkeypatch.setattr(PosixStore, "folders", refused)
    assert {path: each["state"] for path, each in listed(root).items()} == {
        "step-1": "committed", "linked": "damaged", "lost+found": "unreadable",
    }  # fmt: skip
    assert set(run_json("gc", root)["skipped"]) == {"linked", "lost+found"}


def test_objects_that_nobody_may_look_at_hide_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest checkpoint of one run is readable but for the folder of a rank."""
    for place in ("a/step-1", "a/step-2", "b/step-1"):
        ckpt.save({"t": torch.ones(3)}, tmp_path / place)
    stat, names = PosixStore.stat, PosixStore.list

    def refused(original: Any) -> Any:
        def look(self: PosixStore, key: str = "", *rest: Any) -> Any:
            if "a/step-2" in f"{self.url}/{key}" and not key.endswith(("commit.json", ".metadata")):
                raise AccessDenied("Permission denied", url=self.url, key=key)
            return original(self, key, *rest)

        return look

    monkeypatch.setattr(PosixStore, "stat", refused(stat))
    monkeypatch.setattr(PosixStore, "list", refused(names))
    assert [path for path, each in listed(tmp_path).items() if each["latest"]] == ["a/step-1", "b/step-1"]
