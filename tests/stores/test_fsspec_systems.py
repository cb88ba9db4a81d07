"""The file systems of fsspec that docs/storage.md lists: each with real servers or files, from many threads, with deadlines."""

from __future__ import annotations

import contextlib
import functools
import http.server
import os
import re
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import run
from support.strict_s3 import StrictS3

import ckpt
from ckpt.backends.base import Store, put_bytes
from ckpt.backends.registry import open_store
from ckpt.errors import StorageUnavailable

Root = tuple[str, dict[str, Any]]
"""The URL of a folder of checkpoints and its storage options."""

# fsspec's own blockcache leaves its files open.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

STATE = {f"w{number}": torch.full((30_000,), float(number)) for number in range(12)}
READ_ONLY = {"http", "tar", "zip", "simplecache", "filecache", "blockcache"}
SYSTEMS = [
    "file", "local", "memory", "s3", "sftp", "http", "tar", "zip", "simplecache", "filecache", "blockcache"
]  # fmt: skip


class _Pages(http.server.SimpleHTTPRequestHandler):
    """Python's web server with ranges; its listings have no sizes."""

    def do_GET(self) -> None:
        path = self.translate_path(self.path)
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("range", ""))
        if wanted is None or not os.path.isfile(path):
            super().do_GET()
            return
        data = Path(path).read_bytes()
        part = data[int(wanted[1]) : int(wanted[2]) + 1]
        self.send_response(206)
        self.send_header("content-length", str(len(part)))
        self.send_header("content-range", f"bytes {wanted[1]}-{int(wanted[1]) + len(part) - 1}/{len(data)}")
        self.end_headers()
        self.wfile.write(part)

    def log_message(self, *_: Any) -> None:
        pass


@contextlib.contextmanager
def web_server(folder: Path) -> Iterator[str]:
    handler = functools.partial(_Pages, directory=folder)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


def fill(folder: Path) -> Path:
    """Save a checkpoint in a new folder."""
    ckpt.save(STATE, folder / "run" / "step-1")
    return folder / "run"


@contextlib.contextmanager
def root_on(system: str, tmp_path: Path, server: StrictS3) -> Iterator[Root]:
    """A root with a checkpoint in a file system."""
    server.requires_checksums = False
    s3 = {name: server.options[name] for name in ("endpoint_url", "key", "secret")}
    cache = {"cache_storage": str(tmp_path / "cache")}
    with contextlib.ExitStack() as stack:
        root: Root
        if system == "sftp":
            pytest.importorskip("paramiko")
            from support.sftp import sftp_server

            url, options = stack.enter_context(sftp_server(tmp_path))
            root = f"{url}/run", options
        elif system == "http":
            root = stack.enter_context(web_server(fill(tmp_path))), {}
        elif system in ("tar", "zip"):
            shutil.make_archive(str(tmp_path / "run"), system, fill(tmp_path).parent, "run")
            root = f"{system}://run::{tmp_path}/run.{system}", {}
        elif system == "simplecache":
            ckpt.save(STATE, "fsspec+s3://bucket/run/step-1", storage_options=s3)
            root = "simplecache::s3://bucket/run", {"s3": s3, "simplecache": cache}
        elif system in ("filecache", "blockcache"):
            root = f"{system}::file://{fill(tmp_path)}", {system: cache}
        else:
            urls = {"s3": "bucket/run", "memory": f"/{tmp_path.name}"}
            root = f"fsspec+{system}://{urls.get(system, tmp_path / 'run')}", s3 if system == "s3" else {}
        if system not in READ_ONLY:
            ckpt.save(STATE, f"{root[0]}/step-1", storage_options=root[1])
        yield root


def checkpoint_in(root: str) -> str:
    """The URL of a root's checkpoint; in a chain the first link holds the path."""
    first, link, rest = root.partition("::")
    return f"{first}/step-1::{rest}" if link and "://" in first else f"{root}/step-1"


@pytest.mark.parametrize("system", SYSTEMS)
def test_checkpoints_are_saved_listed_loaded_and_verified(
    system: str, tmp_path: Path, server: StrictS3
) -> None:
    with root_on(system, tmp_path, server) as root:
        place, options = root
        url = checkpoint_in(place)
        assert [each.path for each in ckpt.list_checkpoints(place, storage_options=options)] == ["step-1"]
        loaded = {name: torch.zeros_like(value) for name, value in STATE.items()}
        ckpt.load(loaded, url, storage_options=options, threads=8)
        assert all(torch.equal(loaded[name], value) for name, value in STATE.items())
        assert ckpt.verify(url, storage_options=options, threads=8).ok


@pytest.mark.parametrize("system", SYSTEMS)
def test_many_threads_read_the_right_bytes(system: str, tmp_path: Path, server: StrictS3) -> None:
    with root_on(system, tmp_path, server) as root:
        stores = [open_store(checkpoint_in(root[0]), root[1], threads=8) for _ in range(2)]
        (key, size) = max(
            ((stat.key, stat.size_bytes) for stat in stores[0].list()), key=lambda each: each[1]
        )
        whole = bytearray(size)
        stores[0].read_into(key, 0, [memoryview(whole)])
        begun = threading.Barrier(8)

        def read(number: int) -> None:
            store = stores[number % 2]
            if number < 8:
                begun.wait(60)
            start = number * 8_192 % (size - 100_000)
            part = bytearray(100_000)
            store.read_into(key, start, [memoryview(part)])
            assert part == whole[start : start + 100_000]

        with ThreadPoolExecutor(8) as threads:
            list(threads.map(read, range(24)))
        for store in stores:
            store.close()


@pytest.fixture
def silent() -> Iterator[int]:
    """The port of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listening:
        yield int(listening.getsockname()[1])


CALLS: dict[str, Callable[[Store], object]] = {
    "stat": lambda store: store.stat("k"),
    "read": lambda store: store.read_into("k", 0, [memoryview(bytearray(1))]),
    "list": lambda store: [*store.list()],
    "folders": lambda store: [*store.folders()],
    "put": lambda store: put_bytes(store, "k", b"x"),
    "delete": lambda store: store.delete(["k"]),
    "abandon": lambda store: store.abandon("k"),
    "prepare": lambda store: store.prepare("k"),
}


@pytest.mark.parametrize("scheme", ["fsspec+s3", "http", "sftp", "simplecache::s3"])
@pytest.mark.parametrize("call", [*CALLS])
def test_every_call_has_a_deadline(silent: int, scheme: str, call: str) -> None:
    options: dict[str, Any] = {"call_timeout_s": 0.2}
    url = f"{scheme}://bucket/run"
    if scheme == "sftp":
        pytest.importorskip("paramiko")
        options |= {"port": silent, "username": "u", "password": "p-secret", "banner_timeout": 60}
        url = "sftp://127.0.0.1/run"
    elif scheme == "http":
        url = f"http://127.0.0.1:{silent}/run"
        if call in ("put", "delete", "prepare", "abandon"):
            return  # which web servers do not have
    else:
        s3 = {"key": "k", "secret": "s-secret", "endpoint_url": f"http://127.0.0.1:{silent}"}
        options |= {"s3": s3} if "::" in scheme else s3
        if call == "prepare":
            return  # asks no server
    store = open_store(url, options)
    with pytest.raises(StorageUnavailable, match=r"no answer within 0 s .*call_timeout_s"):
        CALLS[call](store)
    store.close()


@pytest.mark.parametrize("command", ["verify", "inspect", "ls", "cat", "rm", "report"])
def test_commands_have_deadlines(silent: int, command: str, tmp_path: Path) -> None:
    of_commands: dict[str, list[object]] = {"cat": ["w"], "report": ["-o", tmp_path / "r.html"]}
    more = of_commands.get(command, [])
    url = f"http://127.0.0.1:{silent}/run/step-1"
    ran = run(command, url, *more, "--storage-options", '{"call_timeout_s": 0.2}')
    assert ran.code == 4, ran
    assert "no answer within" in ran.err


def test_the_file_system_that_hung_is_not_used_again(tmp_path: Path) -> None:
    """The next call opens another connection, and the waiting calls do so too."""
    paramiko = pytest.importorskip("paramiko")
    from support.sftp import _Files, sftp_server

    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "k").write_bytes(b"abc")
    hangs = threading.Event()
    ends = threading.Event()
    answer = _Files.stat

    def stat(self: Any, path: str) -> Any:
        if path.endswith("/k") and not hangs.is_set():
            hangs.set()
            ends.wait(60)
        return answer(self, path)

    assert paramiko
    _Files.stat = stat  # type: ignore[method-assign]
    try:
        with sftp_server(tmp_path) as (url, options):
            store = open_store(f"{url}/run", {**options, "call_timeout_s": 1.5})
            with pytest.raises(StorageUnavailable, match="no answer"):
                store.stat("k")
            assert store.stat("k").size_bytes == 3
            ends.set()
            store.close()
    finally:
        _Files.stat = answer  # type: ignore[method-assign]
        ends.set()
