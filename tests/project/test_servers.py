"""Servers of tests end with the tests, also when those are killed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

_STARTS_ONE_AND_DIES = """
import os, signal, subprocess, time
from pathlib import Path
from support.servers import spawn
pid = spawn(["sleep", "300"], stdout=subprocess.DEVNULL).pid
while not Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"sleep"):
    time.sleep(0.01)  # from then on the kernel knows with whom it ends
print(pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="there is no setpriv")
def test_a_server_ends_with_the_process_that_started_it() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    killed = subprocess.run(
        [sys.executable, "-c", _STARTS_ONE_AND_DIES], env=environment, stdout=subprocess.PIPE, check=False
    )
    assert killed.returncode == -9
    deadline = time.monotonic() + 30
    while _runs(int(killed.stdout)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    """Whether a process is there, and not only to be waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
