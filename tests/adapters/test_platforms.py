"""Run the tests of `platforms/`, each file in an environment of its own: `<name>.txt`."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from adapters.environments import python_of

PLATFORMS = Path(__file__).parent / "platforms"


@pytest.mark.parametrize("name", sorted(path.stem for path in PLATFORMS.glob("*.py")))
@pytest.mark.timeout(1200)  # the first run installs the wheels
def test_platform(name: str) -> None:
    command = [
        str(python_of(name)),
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        str(PLATFORMS / f"{name}.py"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2_000:]
