"""transformers' `Trainer` and accelerate, with this library: their tests run in the host's own environment."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from support.rooms import ROOT

import ckpt
from adapters.environments import python_of

_TIMEOUT_S = 500


@pytest.mark.xdist_group("huggingface")
def test_the_cases_inside_of_the_host(tmp_path: Path) -> None:
    cases = Path(__file__).parent / "inside" / "huggingface_cases.py"
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command = [str(python_of("huggingface")), "-m", "pytest", *options, str(cases)]
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, env=environ, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as tests:
        try:
            output, _ = tests.communicate(timeout=_TIMEOUT_S)
        finally:
            tests.kill()
    assert tests.returncode == 0, output[-8000:]


@pytest.mark.xdist_group("huggingface")
def test_the_example_goes_on(tmp_path: Path) -> None:
    script = ROOT / "examples" / "huggingface" / "train.py"
    for steps in ("2", "4"):
        command = [str(python_of("huggingface")), str(script), "--steps", steps, "--save-steps", "2"]
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, env=environ, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=200
        )
        assert done.returncode == 0, done.stderr[-4000:]
    assert [each.step for each in ckpt.list_checkpoints(str(tmp_path / "run"))] == [2, 4]
    assert "train_loss" in done.stdout
