"""transformers' `Trainer` and accelerate, with this library: their tests run in the host's own environment."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.rooms import ROOT

import ckpt
from adapters.environments import run, run_tests

_INSIDE = Path(__file__).parent / "inside"


@pytest.mark.xdist_group("huggingface")
def test_the_cases_inside_of_the_host() -> None:
    run_tests("huggingface", _INSIDE / "huggingface_cases.py", "-p", "no:xdist")


@pytest.mark.xdist_group("huggingface")
@pytest.mark.parametrize("how", ["ddp", "fsdp", "fsdp lora"])
def test_two_ranks_pass_over_a_damaged_checkpoint_and_write_a_model(how: str, tmp_path: Path) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = str(_INSIDE / "huggingface_ranks.py")
    run("huggingface", *launcher, script, str(tmp_path), *how.split(), folder=tmp_path)
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["resumed"], report["served"]) == ([], [])
    assert report["files"].count(".safetensors") == 1


@pytest.mark.xdist_group("trl")
@pytest.mark.parametrize("what", ["lora", "whole"])
def test_trl_goes_on_as_an_uninterrupted_run(what: str, tmp_path: Path) -> None:
    script = str(_INSIDE / "huggingface_sft.py")
    digests = [
        run("trl", script, str(tmp_path / root), steps, what, folder=tmp_path).splitlines()[-1]
        for root, steps in (("native", "6"), ("ours", "4"), ("ours", "6"))
    ]
    assert digests[0] == digests[2] != digests[1]
    assert [each.step for each in ckpt.list_checkpoints(str(tmp_path / "ours"))] == [4, 6]


@pytest.mark.xdist_group("huggingface")
def test_the_example_goes_on(tmp_path: Path) -> None:
    script = ROOT / "examples" / "huggingface" / "train.py"
    for steps in ("2", "4"):
        options = "--steps", steps, "--save-steps", "2"
        output = run("huggingface", str(script), *options, folder=tmp_path)
    assert [each.step for each in ckpt.list_checkpoints(str(tmp_path / "run"))] == [2, 4]
    assert "train_loss" in output
