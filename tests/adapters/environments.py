"""Make an environment for each framework: its pinned wheels on top of the tests' own environment."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from support.rooms import ROOT

_HERE = Path(__file__).parent
_INSTALL_TIMEOUT_S = 900
_TESTS_TIMEOUT_S = 300


def python_of(host: str) -> Path:
    """Return the Python of a host's environment, which is made if it is not there or its pins have changed.

    Skips the test, naming host and reason, if the wheels cannot be installed.
    """
    pins = _HERE / f"{host}.txt"
    if not pins.exists():  # nothing beyond our own environment
        return Path(sys.executable)
    folder = _HERE / ".venvs" / host
    folder.parent.mkdir(exist_ok=True)
    parent = sysconfig.get_paths()["purelib"]
    wanted = hashlib.sha256(f"{parent}\n{sys.version}\n{pins.read_text()}".encode()).hexdigest()
    ready = folder / "ready"
    python = folder / "bin" / "python"
    with open(folder.parent / f"{host}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if ready.exists() and ready.read_text() == wanted:
            return python
        venv.create(folder, clear=True, symlinks=True, with_pip=True)
        (site,) = folder.glob("lib/python*/site-packages")
        (site / "parent.pth").write_text(f"import site; site.addsitedir({parent!r})\n")
        install = [
            str(python),
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "-r",
            str(pins),
        ]
        try:
            done = subprocess.run(
                install, capture_output=True, text=True, check=False, timeout=_INSTALL_TIMEOUT_S
            )
        except subprocess.TimeoutExpired:
            pytest.skip(f"{host}: its wheels were not installed within {_INSTALL_TIMEOUT_S} s")
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
            pytest.skip(f"{host}: its wheels cannot be installed: {last}")
        ready.write_text(wanted)
    return python


def run_inside(host: str) -> None:
    """Run the tests of `inside/<host>.py` in the host's environment."""
    tests = _HERE / "inside" / f"{host}.py"
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "PYTHONSAFEPATH": "1"}
    command = [
        str(python_of(host)),
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--import-mode",
        "importlib",
        str(tests),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=_TESTS_TIMEOUT_S, cwd=ROOT, env=environ
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
