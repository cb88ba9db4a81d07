"""The first examples run as they stand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.rooms import ROOT

import ckpt


@pytest.mark.ranks
def test_the_quickstart_runs_twice_and_goes_on(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / "quickstart.py"), str(tmp_path)]
    for _ in range(2):
        run = subprocess.run(command, check=True, capture_output=True, text=True)
        assert "first: committed" in run.stdout
        assert "run/step-00000010: committed, step 10" in run.stdout
        assert "run/step-00000004" not in run.stdout  # the last three are kept


@pytest.mark.ranks
def test_a_worker_follows_the_weights(tmp_path: Path) -> None:
    def save(step: int) -> str:
        model = torch.nn.Linear(256, 256)
        torch.nn.init.constant_(model.weight, step)
        torch.nn.init.zeros_(model.bias)
        ckpt.save(model.state_dict(), tmp_path / f"step-{step}", format="safetensors")
        return f"step {step}: {256 * step:.6f}\n"

    said = save(1)
    command = [
        sys.executable,
        str(ROOT / "examples" / "follow_weights.py"),
        str(tmp_path),
        "--timeout-s",
        "10",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == said
        assert save(2) == worker.stdout.readline()
        assert worker.stdout.read() == ""
    assert worker.returncode == 0
