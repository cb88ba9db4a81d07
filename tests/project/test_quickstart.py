"""The README's first example runs as it stands."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.rooms import ROOT


@pytest.mark.ranks
def test_the_quickstart_runs_twice_and_goes_on(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / "quickstart.py"), str(tmp_path)]
    for _ in range(2):
        run = subprocess.run(command, check=True, capture_output=True, text=True)
        assert "first: committed" in run.stdout
        assert "run/step-00000010: committed, step 10" in run.stdout
        assert "run/step-00000004" not in run.stdout  # the last three are kept
