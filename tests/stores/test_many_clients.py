"""Many processes that begin at once at one bucket, which takes a part of their requests and refuses the others."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field

import pytest
from support.strict_s3 import Request, StrictS3

PROCESSES, THREADS, OBJECTS = 6, 4, 12
RATE_PER_S, BURST = 40.0, 20.0

CLIENT = """
import sys
from concurrent.futures import ThreadPoolExecutor
from ckpt.backends.base import put_bytes, read_bytes
from ckpt.backends.registry import open_store

endpoint, rank, threads, objects = sys.argv[1], *map(int, sys.argv[2:])
options = {"endpoint_url": endpoint, "key": "k", "secret": "s", "max_attempts": 3}
store = open_store("s3://bucket/run", options, threads=threads)
store.capabilities

def work(number):
    put_bytes(store, f"rank-{rank:05}/{number}", b"x" * 1000)
    assert read_bytes(store, f"rank-{rank:05}/{number}", size_bytes=1000) == b"x" * 1000

print("ready", flush=True)
sys.stdin.readline()
with ThreadPoolExecutor(threads) as pool:
    list(pool.map(work, range(objects)))
print(store.retries)
"""


@dataclass
class TokenBucket:
    """Take so many requests a second, and refuse the others with 503 SlowDown."""

    tokens: float = BURST
    at_s: float = field(default_factory=time.monotonic)
    refused: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, request: Request) -> str | tuple[int, str]:
        now_s = time.monotonic()
        with self.lock:
            self.tokens = min(BURST, self.tokens + (now_s - self.at_s) * RATE_PER_S)
            self.at_s = now_s
            if self.tokens >= 1:
                self.tokens -= 1
                return "pass"
            self.refused += 1
            return 503, "SlowDown"


@pytest.mark.long
def test_a_burst_of_processes_gets_through(server: StrictS3) -> None:
    """With as many attempts as other failures get, 3, some of them would give up."""
    command = [sys.executable, "-c", CLIENT, server.endpoint_url]
    clients = [
        subprocess.Popen(
            [*command, str(rank), str(THREADS), str(OBJECTS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(PROCESSES)
    ]
    try:
        for client in clients:
            assert client.stdout is not None
            assert client.stdout.readline() == "ready\n"
        server.requests.clear()
        server.rule = bucket = TokenBucket()
        for client in clients:
            assert client.stdin is not None
            client.stdin.write("go\n")
            client.stdin.flush()
        retries = [int(client.communicate(timeout=300)[0]) for client in clients]
    finally:
        for client in clients:
            client.kill()
    assert [client.returncode for client in clients] == [0] * PROCESSES
    assert len(server.objects) == PROCESSES * OBJECTS
    succeeded = len(server.requests) - bucket.refused
    assert succeeded >= 2 * PROCESSES * OBJECTS
    assert bucket.refused > 0
    assert sum(retries) == bucket.refused
    assert len(server.requests) <= 4 * succeeded
