"""`ckpt inspect`: everything in the records, nothing of the data."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import options_of, run, run_process, sharded_checkpoint, stock_checkpoint
from support.ranks import run_ranks
from support.servers import S3Server
from support.states import random_tensor

import ckpt
from ckpt.backends.registry import open_store
from ckpt.reading.checkpoint import ReadSettings, open_checkpoint


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("saved") / "step-100"
    sharded_checkpoint(place)
    return place


def inspected(*arguments: object) -> dict[str, Any]:
    ran = run("inspect", "--json", *arguments)
    assert ran.code == 0, ran.err
    return ran.json


def test_what_is_inside(place: Path) -> None:
    found = inspected(place)
    metadata = open_checkpoint(open_store(place), ReadSettings()).metadata
    tensors = {info["fqn"]: info for info in found["tensors"]}
    objects = {info["fqn"] for info in found["objects"]}
    assert tensors.keys() | objects == metadata.state_dict_metadata.keys()
    for fqn, info in tensors.items():
        stored: Any = metadata.state_dict_metadata[fqn]
        assert (info["shape"], info["dtype"]) == (list(stored.size), str(stored.properties.dtype)[6:])
        assert info["nbytes"] == math.prod(stored.size) * stored.properties.dtype.itemsize
        assert info["chunks"] == len(stored.chunks)
    assert tensors["sharded.rows"]["sharding"] == "dim 0: 2"
    assert tensors["sharded.columns"]["sharding"] == "dim 1: 2"
    assert tensors["sharded.replicated"]["sharding"] == "whole"
    assert (found["format"], found["version"]) == ("ckpt-storage", 2)
    commit = json.loads((place / "commit.json").read_text())
    assert found["commit"] == {
        name: commit[name]
        for name in ("id", "created_at", "library", "torch", "world_size", "data_bytes", "tags")
    }
    parts = {fqn: info["part"] for fqn, info in tensors.items()}
    assert parts["model.head.weight"] == "weights"
    assert parts["optim.state.head.weight.exp_avg"] == "optimizer"
    assert parts["large"] == "other"
    weights = sum(math.prod(info["shape"]) for info in tensors.values() if info["part"] == "weights")
    assert found["parameters"] == weights > 8000
    assert sum(found["bytes_by_dtype"].values()) == sum(info["nbytes"] for info in tensors.values())
    files = {path.relative_to(place).as_posix() for path in place.rglob("*.distcp")}
    assert {file["path"] for file in found["files"]} == files


def test_who_holds_which_slice(place: Path) -> None:
    (rows,) = inspected(place, "--tensor", "*.rows")["tensors"]
    assert [(s["offsets"], s["sizes"], s["rank"]) for s in rows["slices"]] == [
        ([0, 0], [384, 300], 0),
        ([384, 0], [384, 300], 1),
    ]
    for piece in rows["slices"]:
        data = (place / piece["file"]).read_bytes()[piece["offset"] : piece["offset"] + piece["length"]]
        assert data.startswith(b"PK")
    assert "slices" not in inspected(place)["tensors"][0]
    text = run("inspect", place, "--tensor", "*.rows").out
    assert "[384:768, 0:300]" in text


def test_no_data_is_read(place: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(place, tmp_path / "c"))
    for path in [*copy.rglob("*.distcp"), *copy.glob("rank-*/*.json"), copy / ".metadata"]:
        path.unlink()
    found, expected = inspected(copy), inspected(place)
    assert {**found, "url": ""} == {**expected, "url": ""}


def test_as_a_user(place: Path) -> None:
    ran = run_process("inspect", place)
    assert ran.code == 0, ran.err
    assert ran.err == ""
    assert "\x1b" not in ran.out
    lines = ran.out.splitlines()
    assert all(line == line.rstrip() for line in lines)
    assert any("exp_avg_sq  float32 61x24" in line for line in lines)
    assert "step = 100" in ran.out


def test_s3(s3: S3Server, place: Path) -> None:
    url = f"s3://{s3.new_bucket()}/run/step-100"
    sharded_checkpoint(url, s3.options)
    found, expected = inspected(url, *options_of(s3.options)), inspected(place)
    assert [t["fqn"] for t in found["tensors"]] == [t["fqn"] for t in expected["tensors"]]
    assert found["parameters"] == expected["parameters"]
    pairs = [f"{name}={value}" for name, value in s3.options.items()]
    arguments = [argument for pair in pairs for argument in ("--storage-options", pair)]
    assert inspected(url, *arguments) == found


def test_stock(tmp_path: Path, place: Path) -> None:
    stock_checkpoint(tmp_path / "stock")
    found, expected = inspected(tmp_path / "stock"), inspected(place)
    assert (found["format"], found["version"], found["commit"]) == ("stock", None, None)
    by_name = [sorted(what["tensors"], key=lambda info: info["fqn"]) for what in (found, expected)]
    assert by_name[0] == by_name[1]
    (rows,) = inspected(tmp_path / "stock", "--tensor", "*.rows")["tensors"]
    assert [(s["sizes"], s["rank"]) for s in rows["slices"]] == [([384, 300], 0), ([384, 300], 1)]


def _save_apart(rank: int, place: str) -> None:
    import torch.distributed.checkpoint as dcp

    writer = dcp.FileSystemWriter(place)
    dcp.save({"t": random_tensor(3 + rank)}, storage_writer=writer, use_collectives=False)


def test_stock_saved_without_collectives(tmp_path: Path) -> None:
    run_ranks(2, _save_apart, str(tmp_path))
    found = inspected(tmp_path)
    assert [(t["fqn"], t["shape"]) for t in found["tensors"]] == [("rank 0: t", [3]), ("rank 1: t", [4])]
    ran = run("verify", tmp_path, "--json")
    assert ran.json["checked_files"] == 2
    assert ran.code == 0


def test_names_cannot_paint_the_terminal(tmp_path: Path) -> None:
    state = {"\x1b[31mred\x07": torch.ones(2), "[bold]x[/bold]": torch.ones(3), "a\nb": 1}
    ckpt.save(state, tmp_path, tags={"[red]": "\x1b[2J"})
    text = run("inspect", tmp_path).out
    assert "\x1b" not in text
    assert "\\x1b[31mred\\x07" in text
    assert "[bold]x[/bold]" in text
    assert "a\\nb" in text
    assert {t["fqn"] for t in inspected(tmp_path)["tensors"]} | {"a\nb"} == state.keys()


def test_a_pipe_that_closes(place: Path) -> None:
    import subprocess
    import sys

    script = Path(sys.executable).parent / "ckpt"
    shell = f"{script} inspect {place} --json | head -c 10"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {shell}"], capture_output=True, check=False)
    assert done.stderr == b""
    assert done.stdout == b'{"url": "/'


def test_completion_and_help() -> None:
    words = {"_CKPT_COMPLETE": "complete_bash", "COMP_WORDS": "ckpt ins", "COMP_CWORD": "1"}
    assert run_process(environment=words).out.split() == ["inspect"]
    help_text = run_process("--help")
    assert help_text.code == 0
    assert "Exit codes" in help_text.out
    assert run_process("--version").out.startswith("ckpt-storage ")
    assert run_process("nonsense").code == 2


def test_no_color_and_color(place: Path) -> None:
    import os
    import pty
    import subprocess
    import sys

    def on_a_terminal(**environment: str) -> bytes:
        ours, theirs = pty.openpty()
        script = str(Path(sys.executable).parent / "ckpt")
        env = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
        with subprocess.Popen(
            [script, "verify", str(place)],
            stdout=theirs,
            stderr=theirs,
            env={**env, "TERM": "xterm", **environment},
        ) as process:
            os.close(theirs)
            found = b""
            while True:
                try:
                    part = os.read(ours, 4096)
                except OSError:
                    break
                if not part:
                    break
                found += part
        os.close(ours)
        assert process.returncode == 0, found
        return found

    assert b"\x1b[1;32m" in on_a_terminal()
    assert b"\x1b[1;32m" not in on_a_terminal(NO_COLOR="1")
