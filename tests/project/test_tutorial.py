"""The tutorial runs from its first cell to the last, as in a notebook: one process, one cell after the other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.rooms import ROOT

_NOTEBOOK = ROOT / "examples/tutorial.ipynb"


def _cells() -> list[str]:
    notebook = json.loads(_NOTEBOOK.read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    for cell in notebook["cells"]:
        assert not cell.get("outputs"), "leave the outputs out"
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


def test_its_cells_are_python() -> None:
    for number, cell in enumerate(_cells()):
        compile(cell, f"cell {number}", "exec")


@pytest.mark.long
@pytest.mark.ranks
def test_it_runs(tmp_path: Path) -> None:
    script = tmp_path / "tutorial.py"
    script.write_text("\n\n".join(_cells()))
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, timeout=270, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    for text in ("3 ranks begin with step 6", "incomplete", "IntegrityError", "'0.bias'"):
        assert text in run.stdout
