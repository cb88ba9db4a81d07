"""The adapter for Lightning beyond the law: resuming, retention, asynchronous saves, errors."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from support.rooms import ROOT

from adapters.environments import python_of


@pytest.mark.xdist_group("lightning")
def test_the_checks_of_lightning(tmp_path: Path) -> None:
    checks = Path(__file__).with_name("lightning_checks.py")
    command: list[str | Path] = [
        python_of("lightning"),
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        checks,
    ]
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
