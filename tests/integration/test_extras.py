"""Plain pip finds versions for each extra that agree, in the index that it is configured for."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from support.environments import environment
from support.rooms import ROOT

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("pip")]

_EXTRAS = ("s3", "cos", "fsspec", "data", "tune", "sign", "pkcs11", "all", "testing", "bench", "dev")


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the base dependencies: torch is large, and is not what is tried."""
    folder = tmp_path_factory.mktemp("pip")
    made = environment(folder / "environment")
    reached = _pip(made, "download", "--no-deps", "--dest", folder / "files", "six")
    if reached.returncode:
        pytest.skip(f"there is no package index: {reached.stderr.strip()[-200:]}")
    return made


@pytest.mark.parametrize("extra", _EXTRAS)
def test_pip_finds_versions_that_agree(python: Path, extra: str, tmp_path: Path) -> None:
    """That it need not try years of releases is asserted offline, in `tests/project/test_wheel.py`."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = _pip(
        python, "install", "--dry-run", "--no-build-isolation", "--report", tmp_path / "report.json",
        f"{ROOT}[{extra}]",
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    installed = json.loads((tmp_path / "report.json").read_text())["install"]
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"[{extra}]: {len(installed)} packages, {cpu_s:.1f} s of CPU")  # `pytest -rP` shows it
    names = {package["metadata"]["name"] for package in installed}
    assert not {"boto3", "aiobotocore"} <= names


def _pip(python: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "--python", python, "--no-cache-dir", *arguments]
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
