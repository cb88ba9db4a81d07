"""`ckpt inspect`: show everything in the records, and read nothing of the data."""

from __future__ import annotations

import functools
import json
import math
import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.commands import options_of, run, run_json, run_on_terminal, run_process, sharded_checkpoint
from support.ranks import run_ranks
from support.servers import S3Server
from support.states import SAVABLE_DTYPES, random_tensor, transformer_state

import ckpt
from ckpt.backends.registry import open_store
from ckpt.reading.checkpoint import ReadSettings
from ckpt.reading.opening import open_checkpoint
from ckpt.tools.cat import short_text

inspect = functools.partial(run_json, "inspect")


def test_all_records_are_shown(sharded_place: Path) -> None:
    printed = inspect(sharded_place)
    metadata = open_checkpoint(open_store(sharded_place), ReadSettings()).metadata
    tensors = {info["fqn"]: info for info in printed["tensors"]}
    objects = {info["fqn"] for info in printed["objects"]}
    assert tensors.keys() | objects == metadata.state_dict_metadata.keys()
    for fqn, info in tensors.items():
        stored: Any = metadata.state_dict_metadata[fqn]
        assert (info["shape"], info["dtype"]) == (list(stored.size), str(stored.properties.dtype)[6:])
        assert info["nbytes"] == math.prod(stored.size) * stored.properties.dtype.itemsize
        assert info["chunks"] == len(stored.chunks)
    assert tensors["sharded.rows"]["sharding"] == "dim 0: 2"
    assert tensors["sharded.columns"]["sharding"] == "dim 1: 2"
    assert tensors["sharded.replicated"]["sharding"] == "whole"
    assert (printed["format"], printed["version"]) == ("ckpt-storage", 2)
    commit = json.loads((sharded_place / "commit.json").read_text())
    assert printed["commit"] == {
        name: commit[name]
        for name in ("id", "created_at", "library", "torch", "world_size", "data_bytes", "tags")
    }
    parts = {fqn: info["part"] for fqn, info in tensors.items()}
    assert parts["model.head.weight"] == "weights"
    assert parts["optim.state.head.weight.exp_avg"] == "optimizer"
    assert parts["large"] == "other"
    weights = sum(math.prod(info["shape"]) for info in tensors.values() if info["part"] == "weights")
    assert printed["parameters"] == weights > 8000
    assert sum(printed["bytes_by_dtype"].values()) == sum(info["nbytes"] for info in tensors.values())
    files = {path.relative_to(sharded_place).as_posix() for path in sharded_place.rglob("*.distcp")}
    assert {file["path"] for file in printed["files"]} == files


def test_slices_name_their_rank_and_bytes(sharded_place: Path) -> None:
    (rows,) = inspect(sharded_place, "--tensor", "*.rows")["tensors"]
    assert [(s["offsets"], s["sizes"], s["rank"]) for s in rows["slices"]] == [
        ([0, 0], [384, 300], 0),
        ([384, 0], [384, 300], 1),
    ]
    for stored in rows["slices"]:
        data = (sharded_place / stored["file"]).read_bytes()[stored["offset"] :][: stored["length"]]
        assert data.startswith(b"PK")
    assert "slices" not in inspect(sharded_place)["tensors"][0]
    assert "[384:768, 0:300]" in run("inspect", sharded_place, "--tensor", "*.rows").out


def test_no_data_is_read(sharded_place: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(sharded_place, tmp_path / "c"))
    for path in [*copy.rglob("*.distcp"), *copy.glob("rank-*/*.json"), copy / ".metadata"]:
        path.unlink()
    assert {**inspect(copy), "url": ""} == {**inspect(sharded_place), "url": ""}


@pytest.mark.long
def test_inspect_as_a_user(sharded_place: Path) -> None:
    ran = run_process("inspect", sharded_place)
    assert ran.code == 0, ran.err
    assert ran.err == ""
    assert "\x1b" not in ran.out
    lines = ran.out.splitlines()
    assert all(line == line.rstrip() for line in lines)
    assert any(line.split()[:1] == ["rows"] and line.endswith("dim 0: 2") for line in lines)
    assert any(line.split()[:2] == ["step", "100"] for line in lines)
    assert any(line.split()[:2] == ["tags", "step=100"] for line in lines)


def test_inspect_on_s3(s3: S3Server, sharded_place: Path) -> None:
    url = f"s3://{s3.new_bucket()}/run/step-100"
    sharded_checkpoint(url, s3.options)
    printed, expected = inspect(url, *options_of(s3.options)), inspect(sharded_place)
    assert [info["fqn"] for info in printed["tensors"]] == [info["fqn"] for info in expected["tensors"]]
    assert printed["parameters"] == expected["parameters"]
    pairs = [f"{name}={value}" for name, value in s3.options.items()]
    arguments = [argument for pair in pairs for argument in ("--storage-options", pair)]
    assert inspect(url, *arguments) == printed


def test_stock(stock_place: Path, sharded_place: Path) -> None:
    printed, expected = inspect(stock_place), inspect(sharded_place)
    assert (printed["format"], printed["version"], printed["commit"]) == ("stock", None, None)
    by_name = [sorted(each["tensors"], key=lambda info: info["fqn"]) for each in (printed, expected)]
    assert by_name[0] == by_name[1]
    (rows,) = inspect(stock_place, "--tensor", "*.rows")["tensors"]
    assert [(s["sizes"], s["rank"]) for s in rows["slices"]] == [([384, 300], 0), ([384, 300], 1)]


def _save_apart(rank: int, place: str) -> None:
    writer = dcp.FileSystemWriter(place)
    dcp.save({"t": random_tensor(3 + rank)}, storage_writer=writer, use_collectives=False)


def test_stock_saved_without_collectives(tmp_path: Path) -> None:
    run_ranks(2, _save_apart, str(tmp_path))
    tensors = inspect(tmp_path)["tensors"]
    assert [(t["fqn"], t["shape"]) for t in tensors] == [("rank 0: t", [3]), ("rank 1: t", [4])]
    assert run_json("verify", tmp_path)["checked_files"] == 2


def test_names_cannot_paint_the_terminal(tmp_path: Path) -> None:
    state = {"\x1b[31mred\x07": torch.ones(2), "[bold]x[/bold]": torch.ones(3), "a\nb": 1}
    ckpt.save(state, tmp_path, tags={"[red]": "\x1b[2J"})
    text = run("inspect", tmp_path).out
    assert "\x1b" not in text
    assert "\\x1b[31mred\\x07" in text
    assert "[bold]x[/bold]" in text
    assert "a\\nb" in text
    assert {t["fqn"] for t in inspect(tmp_path)["tensors"]} | {"a\nb"} == state.keys()


@pytest.fixture(scope="module")
def transformer_place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("run") / "step-1000"
    metric = {"step": "1000", "metric.val_loss": "9.122579574584961"}
    ckpt.save(transformer_state(), place, tags=metric)
    return place


def test_a_transformer_fits_one_screen(transformer_place: Path) -> None:
    lines = run("inspect", transformer_place).out.splitlines()
    assert len(lines) <= 40
    rows = {line.split("  ")[0]: line for line in map(str.strip, reversed(lines)) if line}
    assert "layers.0..29  x 30" in rows["layers.0..29"]
    assert "bfloat16 8x8" in rows["self_attn.{k_proj, o_proj, q_proj, v_proj}.weight"]
    assert rows["lr"].split()[1] == "0.00085"
    assert rows["weight_decay"].split()[1:3] == ["0.1,", "0.0"]
    assert "(0.9, 0.999)" in rows["betas"]
    assert rows["loader.shards.000000..000047"].split()[1:3] == ["x", "48"]
    assert next(line for line in lines if line.startswith("step ")).split()[1] == "1000"
    names = [line.split()[0] for line in lines if line[:1].strip()]
    assert names[1:5] == ["loader.shards.000000..000047", "model", "optim", "step"]
    assert "val_loss=9.123" in rows["tags"]
    assert next(number for number, line in enumerate(lines) if line.startswith("checkpoint ")) > 20


@pytest.mark.parametrize("columns", [80, 120])
def test_a_terminal(transformer_place: Path, columns: int) -> None:
    ran = run_on_terminal("inspect", transformer_place, columns=columns)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", ran.out).splitlines()
    facts = next(number for number, line in enumerate(lines) if line.startswith("checkpoint "))
    assert len(lines) <= 42
    assert max(map(len, lines[:facts])) <= columns
    assert lines[facts - 2].startswith("step ")


def test_depth_and_all(transformer_place: Path) -> None:
    shallow = run("inspect", transformer_place, "--depth", "1").out.splitlines()
    assert [line.split()[0] for line in shallow[1:5]] == [
        "loader.shards.000000..000047", "model", "optim", "step",
    ]  # fmt: skip
    assert shallow[5] == ""
    everything = run("inspect", transformer_place, "--all").out
    for name in ("        up_proj.weight", "  000047", "rank-00000/"):
        assert name in everything
    assert everything.count("q_proj.weight") == 60
    assert ".." not in everything


def test_as_many_values_are_read_as_a_person_looks_at(
    transformer_place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckpt.cli.inspect._MAX_VALUES", 50)
    (row,) = [line for line in run("inspect", transformer_place).out.splitlines() if "loader" in line]
    assert "[0], [16], [32], ..." in row


def test_values_that_cannot_be_read_are_left_out(transformer_place: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(transformer_place, tmp_path / "c"))
    for path in copy.rglob("*.distcp"):
        path.unlink()
    ran = run("inspect", copy)
    assert ran.code == 0
    assert "values are not shown: " in ran.out
    assert "layers.0..29" in ran.out


def test_objects_that_would_run_code_have_no_value(tmp_path: Path) -> None:
    state = {"odd": [torch.Generator], "plain": {"x": 1}}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
    rows = {line.split()[0]: line for line in run("inspect", tmp_path).out.splitlines()[1:3]}
    assert rows["odd"].split()[1] == "object"
    assert rows["plain.x"].split()[1] == "1"


def test_values_are_not_larger_than_they_look(tmp_path: Path) -> None:
    """A view of 2**40 elements that takes one, and an object that is compressed."""
    from torch.distributed.checkpoint._extension import ZStandard

    state = {"view": (torch.zeros(1).expand(1 << 40),), "sparse": (torch.eye(2).to_sparse(),)}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "a"), no_dist=True)
    rows = {line.split()[0]: line for line in run("inspect", tmp_path / "a").out.splitlines()[1:3]}
    assert "(tensor(" in rows["view"]
    assert len(rows["view"]) < 120
    pytest.importorskip("zstandard", reason="torch's zstd extension needs the zstandard package")
    writer = dcp.FileSystemWriter(tmp_path / "b", _extensions=[ZStandard()])
    dcp.save({"zeros": ("0" * 1000,)}, storage_writer=writer, no_dist=True)
    (row,) = run("inspect", tmp_path / "b").out.splitlines()[1:2]
    assert row.split()[:2] == ["zeros", "object"]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_short_texts_of_tensors(device: str) -> None:
    for dtype in SAVABLE_DTYPES:
        assert len(short_text(torch.zeros(4, dtype=dtype, device=device))) <= 60
    assert len(short_text(torch.zeros(1, device=device).expand(1 << 40))) <= 60


@pytest.mark.long
def test_a_pipe_that_closes(sharded_place: Path) -> None:
    script = Path(sys.executable).parent / "ckpt"
    shell = f"{script} inspect {sharded_place} --json | head -c 10"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {shell}"], capture_output=True, check=False)
    assert done.stderr == b""
    assert done.stdout == b'{"url": "/'


@pytest.mark.long
def test_completion_and_help() -> None:
    words = {"_CKPT_COMPLETE": "complete_bash", "COMP_WORDS": "ckpt ins", "COMP_CWORD": "1"}
    assert run_process(environment=words).out.split() == ["inspect"]
    help_text = run_process("--help")
    assert help_text.code == 0
    assert "Exit codes" in help_text.out
    assert run_process("--version").out.startswith("ckpt-storage ")
    assert run_process("nonsense").code == 2


@pytest.mark.long
def test_no_color_and_color(sharded_place: Path) -> None:
    def on_a_terminal(**environment: str) -> bytes:
        ours, theirs = pty.openpty()
        script = str(Path(sys.executable).parent / "ckpt")
        env = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
        with subprocess.Popen(
            [script, "verify", sharded_place],
            stdout=theirs,
            stderr=theirs,
            env={**env, "TERM": "xterm", **environment},
        ) as process:
            os.close(theirs)
            shown = b""
            while True:
                try:
                    part = os.read(ours, 4096)
                except OSError:
                    break
                if not part:
                    break
                shown += part
        os.close(ours)
        assert process.returncode == 0, shown
        return shown

    assert b"\x1b[1;32m" in on_a_terminal()
    assert b"\x1b[1;32m" not in on_a_terminal(NO_COLOR="1")
