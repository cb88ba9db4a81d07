"""Make an environment for each framework: its pinned wheels on top of the tests' own environment."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import signal
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.rooms import ROOT

_HERE = Path(__file__).parent
_INSTALL_TIMEOUT_S = 900
_TIMEOUT_S = 600


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
    run_tests(host, tests, "--import-mode", "importlib", environ={"PYTHONSAFEPATH": "1"})


def run_tests(host: str, tests: Path, *options: str, **running: Any) -> None:
    """Run a file of tests in the host's environment; `running` is for `run`."""
    run(host, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, str(tests), **running)


def run(
    host: str,
    *arguments: str,
    folder: Path = ROOT,
    environ: Mapping[str, str] | None = None,
    timeout_s: float = _TIMEOUT_S,
) -> str:
    """Run the host's Python in a folder, and return its output; what it has started ends with it."""
    common = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [str(python_of(host)), *arguments], cwd=folder, env={**common, **(environ or {})},
        start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=timeout_s)
    finally:
        end(process)
    assert process.returncode == 0, output[-8000:]
    return output


def end(process: subprocess.Popen[Any]) -> None:
    """End the leader of a session, and whatever it has started there."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
