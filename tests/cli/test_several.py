"""Several checkpoints in one command, and the columns of `ckpt ls`."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from support.commands import flip, run, run_json, run_on_terminal

import ckpt
from ckpt.consistency.seal import seal_json


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three checkpoints, and one that was not committed."""
    root = tmp_path_factory.mktemp("run")
    for step in (1, 2, 3, 4):
        state = {"model": {"a": torch.full((4,), float(step)), "b": torch.ones(2)}, "step": step}
        tags = {"step": str(step), "metric.loss": str(1 / step), "note": "x"}
        ckpt.save(state, root / f"step-{step}", tags=tags)
    (root / "step-4" / "commit.json").unlink()
    return root


@pytest.fixture
def root(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "run"))


def lines(text: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("command", ["verify", "inspect", "rm", "cp"])
def test_an_error_of_one_url_does_not_keep_the_others_from_being_done(command: str, root: Path) -> None:
    urls = [root / "step-1", root / "nothing", root / "step-2"]
    more = [root / "copies"] if command == "cp" else []
    ran = run(command, *urls, *more, "--json")
    first, wrong, last = lines(ran.out)
    assert ran.code == 3
    assert wrong["exit_code"] == 3
    place = "destination" if command == "cp" else "url"
    folder = root / "copies" if command == "cp" else root
    assert [first[place], last[place]] == [str(folder / "step-1"), str(folder / "step-2")]
    assert (root / "step-1" / "commit.json").exists() is (command != "rm")


def test_a_digest_is_that_of_one_checkpoint_and_copies_need_names_of_their_own(root: Path) -> None:
    urls = [root / "step-1", root / "step-2"]
    for command, more in (("verify", []), ("inspect", []), ("cp", [root / "copies"])):
        ran = run(command, *urls, *more, "--expect", f"sha256:{'0' * 64}")
        assert ran.code == 2
        assert "digest of one checkpoint" in ran.err
    ran = run("cp", root / "step-1", root / "step-1", root / "copies")
    assert ran.code == 2
    assert not (root / "copies").exists()


def test_verify_of_a_run_checks_all_that_are_committed(root: Path) -> None:
    ran = run("verify", root)
    assert ran.code == 0
    assert [line.split(" (")[0] for line in ran.out.splitlines()] == [
        "not checked: step-4 is not committed", *(f"ok: {root}/step-{step}" for step in (1, 2, 3)),
    ]  # fmt: skip
    data = next((root / "step-2").glob("rank-*/*.distcp"))
    flip(data, data.stat().st_size - 8)
    ran = run("verify", root, "--json")
    assert ran.code == 1
    assert [each["ok"] for each in lines(ran.out)] == [True, False, True]
    assert run("verify", root / "step-4").code == 3, "one that is not committed is an error, as before"


def test_rm_says_that_a_folder_of_checkpoints_is_one(root: Path) -> None:
    ran = run("rm", root)
    assert ran.code == 3
    assert (
        f"this is a folder of 4 checkpoints, not a checkpoint: give those to remove, as {root}/step-1"
        in ran.err
    )
    assert f"this is a folder of 4 checkpoints, not a checkpoint: give those to remove, as {root}/step-1" in (
        run("rm", root.parent).err
    )
    assert run("verify", root).code == 0


@pytest.mark.parametrize(
    ("pattern", "advice"),
    [("nosuch", ""), ("modl.a", "did you mean 'model.a'"), ("model", "did you mean 'model.a' or 'model.b'?")],
)
def test_inspect_of_a_tensor_that_is_not_there_is_an_error(root: Path, pattern: str, advice: str) -> None:
    ran = run("inspect", root / "step-1", "--tensor", pattern)
    assert (ran.code, ran.out) == (3, "")
    assert f"there is no tensor '{pattern}' in this checkpoint" in ran.err
    assert advice in ran.err
    assert run_json("inspect", root / "step-1", "--tensor", pattern, code=3)["exit_code"] == 3


def test_diff_counts_tensors_and_objects_apart(root: Path) -> None:
    ran = run("diff", root / "step-1", root / "step-2")
    assert ran.code == 1
    assert "different: 1 of 2 tensors and 1 of 1 object in both differ (" in ran.out


def test_ls_shows_metrics_as_columns_and_sorts_by_any(root: Path) -> None:
    heading, *rows = (line.split() for line in run("ls", root).out.splitlines())
    assert heading == ["checkpoint", "step", "state", "size", "age", "ranks", "loss", "tags"]
    assert rows[2][-2:] == ["0.3333", "note=x"]
    ran = run("ls", root, "--latest", "--columns", "loss,note")
    assert [line.split() for line in ran.out.splitlines()] == [
        ["checkpoint", "loss", "note"], ["*", "step-3", "0.3333", "x"],
    ]  # fmt: skip
    for sort, steps in (("loss", [4, 3, 2, 1]), ("-loss", [1, 2, 3, 4]), ("-step", [4, 3, 2, 1])):
        assert [each["step"] for each in run_json("ls", root, "--sort", sort)["checkpoints"]] == steps
    ran = run("ls", root, "--sort", "los")
    assert ran.code == 2
    assert "there is no 'los' (did you mean loss?)" in ran.err
    ran = run_on_terminal("ls", root, columns=50)
    assert "no room for ranks, loss, tags: --columns chooses" in ran.out


def test_ls_shows_metrics_that_were_added_later_and_which_bases_others_name(tmp_path: Path) -> None:
    weights = torch.nn.Linear(2000, 20)
    with ckpt.CheckpointManager(tmp_path, save=1, references=True) as manager:
        for step in (1, 2):
            with torch.no_grad():
                weights.bias.add_(1)
            manager.step(step, model=weights)
        manager.wait_durable()
        manager.annotate(2, {"bleu": 30.0})
    first, second = run_json("ls", tmp_path)["checkpoints"]
    assert (first["metrics"], second["metrics"]) == ({}, {"bleu": 30.0})
    heading, named, _ = run("ls", tmp_path).out.splitlines()
    assert heading.split()[-3:] == ["named", "by", "bleu"]
    assert named.endswith("  1 other")


def test_rm_keeps_the_newest_of_a_folder_of_models(tmp_path: Path) -> None:
    for step in (1, 2, 10, 9):
        ckpt.save({"w": torch.ones(3)}, tmp_path / f"step-{step}", format="safetensors")
    (tmp_path / "step-11").mkdir()
    (tmp_path / "step-11" / "commit.json").write_text("{}")
    assert len(lines(run("rm", tmp_path, "--keep", 2, "--dry-run", "--json").out)) == 2
    assert run("rm", tmp_path, "--keep", 2).code == 0
    assert sorted(each.name for each in tmp_path.iterdir()) == ["step-10", "step-11", "step-9"]
    assert "has no more than 2" in run("rm", tmp_path, "--keep", 2).out


def test_rm_keeps_the_newest_by_time_where_names_have_no_steps(tmp_path: Path) -> None:
    for created, name in enumerate(("step-1", "step-2", "final")):
        ckpt.save({"w": torch.zeros(1)}, tmp_path / name, format="safetensors")
        _set_created(tmp_path / name, f"2026-01-0{created + 1}T00:00:00+00:00")
    assert run("rm", tmp_path, "--keep", 2).code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["final", "step-2"]


def _set_created(folder: Path, created_at: str) -> None:
    record = json.loads((folder / "commit.json").read_bytes())
    del record["crc64nvme"]
    (folder / "commit.json").write_bytes(seal_json(json.dumps({**record, "created_at": created_at}).encode()))


def test_rm_keeps_what_a_link_leads_to(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        ckpt.save({"w": torch.zeros(1)}, tmp_path / f"step-{step}", format="safetensors")
    os.symlink("step-1", tmp_path / "best")
    assert run("rm", tmp_path, "--keep", 1).code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "step-1", "step-3"]


def test_cp_names_what_is_copied_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        ckpt.save({"w": torch.zeros(1)}, tmp_path / f"step-{step}")
    monkeypatch.chdir(tmp_path / "step-1")
    assert run("cp", ".", "../step-2", tmp_path / "copies").code == 0
    assert sorted(path.name for path in (tmp_path / "copies").iterdir()) == ["step-1", "step-2"]


@pytest.mark.parametrize("kind", ["link", "folder"])
def test_a_commit_that_is_no_file_is_damage(kind: str, tmp_path: Path) -> None:
    for step in (1, 2):
        ckpt.save({"w": torch.zeros(1)}, tmp_path / f"step-{step}")
    place = tmp_path / "step-2" / "commit.json"
    place.unlink()
    if kind == "link":
        os.symlink("nothing", place)
    else:
        place.mkdir()
    assert run("verify", tmp_path).code == 3
    assert [each.state for each in ckpt.list_checkpoints(tmp_path)] == ["committed", "damaged"]


def test_rm_keeps_bases_of_what_it_keeps_and_leaves_runs_of_a_manager_alone(tmp_path: Path) -> None:
    state = {"w": torch.randn(200_000), "n": torch.zeros(1)}
    for step in range(4):
        state["n"] += 1
        base = {"base": tmp_path / f"step-{step - 1}"} if step else {"digests": True}
        ckpt.save(state, tmp_path / f"step-{step}", **base)
    assert run("rm", tmp_path, "--keep", 1).code == 0
    assert sorted(each.name for each in tmp_path.iterdir()) == ["step-0", "step-3"]
    with ckpt.CheckpointManager(tmp_path / "run", save=1) as manager:
        manager.step(1, model=torch.nn.Linear(1, 1))
    ran = run("rm", tmp_path / "run", "--keep", 1)
    assert ran.code == 2
    assert "a CheckpointManager saves here: give it keep=1" in ran.err
