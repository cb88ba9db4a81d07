"""What a command imports: `--help`, and a look at a local run, neither torch nor an SDK."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ckpt

_HEAVY = {
    "torch",
    "numpy",
    "boto3",
    "botocore",
    "ibm_boto3",
    "ibm_botocore",
    "fsspec",
    "pandas",
    "pyarrow",
    "safetensors",
}
_CODE = """
import json, sys
import ckpt.cli
sys.argv = ["ckpt", *json.loads(sys.argv[1])]
try:
    ckpt.cli.main()
except SystemExit as ended:
    assert not ended.code, ended.code
print("\\n" + json.dumps(sorted(sys.modules)))
"""


@pytest.mark.parametrize("arguments", [["--help"], ["ls", "--help"], ["ls"], ["ls", "--json"]])
def test_it_imports_nothing_heavy(arguments: list[str], tmp_path: Path) -> None:
    more: set[str] = set()
    if "--help" not in arguments:
        ckpt.save({"w": torch.zeros(3)}, tmp_path / "step-1", tags={"step": "1"})
        (tmp_path / "step-2" / "rank-00000").mkdir(parents=True)  # an interrupted save
        arguments = [*arguments, str(tmp_path)]
    else:
        more = {"rich", "awscrt"}
    command = [sys.executable, "-c", _CODE, json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    imported = {name.partition(".")[0] for name in json.loads(done.stdout.splitlines()[-1])}
    assert "typer" in imported
    assert not imported & (_HEAVY | more)
