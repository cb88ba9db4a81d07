"""`ckpt convert` on many ranks: they share the work, fail together, and name a rank that is gone."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.conversions import ENDINGS, FORMATS, read
from support.ranks import run_ranks
from support.states import digest, random_tensor

import ckpt
from ckpt.backends.posix import PosixStore
from ckpt.conversion.target import Target
from ckpt.conversion.torch_source import TorchFileSource
from ckpt.errors import CheckpointError, StorageUnavailable


@pytest.mark.smoke
def test_ranks_share_the_work(tmp_path: Path) -> None:
    saved = {f"w{n}": random_tensor(1000 + n, 100, seed=n) for n in range(6)} | {
        "half": random_tensor(9, dtype=torch.float16)
    }
    torch.save(saved, tmp_path / "a.pt")
    targets = {form: tmp_path / f"{form}-out{ENDINGS[form]}" for form in FORMATS}
    options = {str(target): {"to": form, "max_shard_bytes": 500_000} for form, target in targets.items()}
    for results in zip(*run_ranks(3, _convert, str(tmp_path / "a.pt"), options), strict=True):
        assert results[0] == results[1] == results[2]
        assert (results[0]["tensors"], results[0]["sent_bytes"] > 2_400_000) == (7, True)
    for form, target in targets.items():
        assert digest(read(target, form)) == digest(saved)
    commit = ckpt.inspect(targets["ckpt"]).commit
    assert commit is not None
    assert commit.world_size == 3
    assert len({path.parts[-2] for path in targets["ckpt"].rglob("*.distcp")}) == 3
    assert {path.name[:3] for path in targets["dcp"].rglob("*.distcp")} == {"__0", "__1", "__2"}


def test_a_large_tensor_is_shared_too(tmp_path: Path) -> None:
    saved = {"w": random_tensor(50_000, 1000)}
    torch.save(saved, tmp_path / "a.pt")
    run_ranks(2, _convert, str(tmp_path / "a.pt"), {str(tmp_path / "out"): {}})
    assert ckpt.inspect(tmp_path / "out").tensors["w"].chunks == 3
    assert digest(read(tmp_path / "out", "dcp")) == digest(saved)


def _convert(rank: int, source: str, targets: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    return [vars(ckpt.convert(source, target, **options)) for target, options in targets.items()]


def test_one_rank_fails(tmp_path: Path) -> None:
    torch.save({f"w{n}": random_tensor(1000, 100, seed=n) for n in range(4)}, tmp_path / "a.pt")
    options = {
        str(tmp_path / form): {"to": form, "max_shard_bytes": 300_000}
        for form in ("ckpt", "dcp", "safetensors")
    }
    for texts in run_ranks(2, _all_fail, str(tmp_path / "a.pt"), options):
        assert len(texts) == 3
        assert all("rank 1" in text and "disk of rank 1" in text for text in texts)
    assert not [path for target in options for path in Path(target).rglob("*") if path.is_file()]


def _all_fail(rank: int, source: str, targets: dict[str, dict[str, Any]]) -> list[str]:
    if rank == 1:

        def put(self: PosixStore, key: str, *rest: Any, **more: Any) -> None:
            raise StorageUnavailable("disk of rank 1")

        pytest.MonkeyPatch().setattr(PosixStore, "put", put)
    return [_error_of(source, target, options) for target, options in targets.items()]


def _error_of(source: str, target: str, options: dict[str, Any]) -> str:
    try:
        ckpt.convert(source, target, **options)
    except CheckpointError as error:
        return str(error)
    return "it worked"


@pytest.mark.ranks
def test_under_torchrun(tmp_path: Path) -> None:
    """As a user does it; one process speaks."""
    saved = {f"w{n}": random_tensor(300, 100, seed=n) for n in range(4)}
    torch.save(saved, tmp_path / "a.pt")
    folder = Path(sys.executable).parent
    command = [str(folder / "torchrun"), "--standalone", "--nproc-per-node", "2", "--no-python"]
    more = [
        "convert",
        str(tmp_path / "a.pt"),
        str(tmp_path / "hf"),
        "--to",
        "safetensors",
        "--max-shard-size",
        "130KB",
        "--json",
    ]
    done = subprocess.run(
        [*command, str(folder / "ckpt"), *more], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert (json.loads(line)["files"], json.loads(line)["tensors"]) == (4, 4)
    assert digest(read(tmp_path / "hf", "safetensors")) == digest(saved)


@pytest.mark.ranks
def test_under_torchrun_an_error_is_one_json_object(tmp_path: Path) -> None:
    folder = Path(sys.executable).parent
    command = [str(folder / "torchrun"), "--standalone", "--nproc-per-node", "2", "--no-python"]
    more = ["convert", str(tmp_path / "nothing"), str(tmp_path / "a.pt"), "--json"]
    done = subprocess.run(
        [*command, str(folder / "ckpt"), *more], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode != 0
    (line,) = done.stdout.splitlines()
    assert json.loads(line)["exit_code"] == 3


@pytest.mark.parametrize(
    ("form", "way"),
    [
        ("ckpt", "killed"),
        pytest.param("dcp", "stopped", marks=pytest.mark.long),
        pytest.param("safetensors", "killed", marks=pytest.mark.long),
        pytest.param("torch", "stopped", marks=pytest.mark.long),
    ],
)
def test_a_rank_that_is_gone_is_named(form: str, way: str, tmp_path: Path) -> None:
    """The others fail in time; of what they wrote nothing is left."""
    torch.save({f"w{n}": random_tensor(1000, 100, seed=n) for n in range(4)}, tmp_path / "a.pt")
    target = tmp_path / f"out{ENDINGS[form]}"
    options = {"to": form, "max_shard_bytes": 300_000, "timeout_s": 8.0}
    killed, stopped = ([1], []) if way == "killed" else ([], [1])
    arguments = (str(tmp_path / "a.pt"), str(target), options, way)
    message, _ = run_ranks(2, _gone_convert, *arguments, killed=killed, stopped=stopped)
    assert "rank 1 does not answer" in message
    left = {path.relative_to(tmp_path).as_posix() for path in target.rglob("*") if path.is_file()}
    of_rank_1 = {
        "ckpt": "out/rank-00001/",
        "dcp": "out/__1_",
        "safetensors": "out/model-0000[24]-of",
        "torch": "nothing",
    }
    assert all(re.match(of_rank_1[form], name) for name in left), left


def _gone_convert(rank: int, source: str, target: str, options: dict[str, Any], way: str) -> str:
    def go(self: object) -> None:
        time.sleep(1)  # the others have written theirs
        os.kill(os.getpid(), signal.SIGKILL if way == "killed" else signal.SIGSTOP)

    if rank == 1:
        # It is asked once this rank has written all that is its own; of one file that is nothing.
        whole = options["to"] == "torch"
        pytest.MonkeyPatch().setattr(
            Target if whole else TorchFileSource, "_agree" if whole else "check_unchanged", go
        )
    return _error_of(source, target, options)


def test_ranks_that_see_different_sources(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        dcp.save(
            {"w": random_tensor(50, seed=rank)},
            storage_writer=dcp.FileSystemWriter(tmp_path / str(rank)),
            no_dist=True,
        )
    texts = run_ranks(2, _convert_own, str(tmp_path), str(tmp_path / "out"))
    assert all("different sources" in text for text in texts)


def _convert_own(rank: int, sources: str, target: str) -> str:
    return _error_of(f"{sources}/{rank}", target, {})
