"""Run the tests of `platforms/`, each file in an environment of its own: `<name>.txt`."""

from __future__ import annotations

from pathlib import Path

import pytest

from adapters.environments import run_tests

PLATFORMS = Path(__file__).parent / "platforms"


@pytest.mark.parametrize("name", sorted(path.stem for path in PLATFORMS.glob("*.py")))
@pytest.mark.timeout(1200)  # the first run installs the wheels
def test_platform(name: str) -> None:
    run_tests(name, PLATFORMS / f"{name}.py", timeout_s=900)
