"""Servers of tests end with the tests, also when those are killed, and keep the promises of S3."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError
from support.servers import S3Server

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


@pytest.mark.server
def test_one_of_two_that_create_an_object_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where both could find that there is none before one of them writes."""
    from moto.s3.models import S3Backend
    from support.moto_s3 import make_s3_server

    first, second, put = threading.Lock(), threading.Event(), S3Backend.put_object

    def put_together(self: S3Backend, *arguments: Any, **more: Any) -> Any:
        if first.acquire(blocking=False):
            assert second.wait(60)
        second.set()
        return put(self, *arguments, **more)

    class NotedLock:
        def __init__(self) -> None:
            self._lock = threading.Lock()

        def __enter__(self) -> None:
            if not self._lock.acquire(blocking=False):
                second.set()
                self._lock.acquire()

        def __exit__(self, *_: object) -> None:
            self._lock.release()

    http: Any = make_s3_server(0)
    http.app._writing = NotedLock()
    threading.Thread(target=http.serve_forever, daemon=True).start()
    server = S3Server(f"http://127.0.0.1:{http.server_port}")
    bucket = server.new_bucket()
    monkeypatch.setattr(S3Backend, "put_object", put_together)

    def create(client: Any) -> bool:
        try:
            client.put_object(Bucket=bucket, Key="k", Body=b"", IfNoneMatch="*")
            return True
        except ClientError:
            return False

    clients = [server.client(), server.client()]
    with ThreadPoolExecutor(2) as threads:
        assert sorted(threads.map(create, clients)) == [False, True]
    http.shutdown()


def _runs(pid: int) -> bool:
    """Whether a process is there, and not only to be waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
