"""The fsspec store over file systems that promise less than they seem to."""

from __future__ import annotations

import gc
import http.server
import re
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.http_core import Handler, http_server
from support.servers import free_port
from support.strict_s3 import Upload, strict_s3

import ckpt
from ckpt.backends.base import PutMode, put_bytes, read_bytes
from ckpt.backends.fsspec_store import FsspecStore
from ckpt.backends.registry import open_store
from ckpt.errors import (
    AccessDenied,
    AlreadyExists,
    IntegrityError,
    NotFound,
    StorageError,
    StorageUnavailable,
    Truncated,
    UnsafeContent,
)

DATA = bytes(range(256)) * 4


@pytest.fixture
def web() -> Iterator[str]:
    """A web server that ignores ranges under /whole, honours them under /ranges, and halves under /half."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("range", ""))
            data = DATA
            if wanted and not self.path.startswith("/whole"):
                data = DATA[int(wanted[1]) : int(wanted[2]) + 1]
            if wanted and self.path.startswith("/half"):
                data = data[: len(data) // 2]
            self.send_response(206 if wanted and not self.path.startswith("/whole") else 200)
            self.send_header("content-length", str(len(DATA if self.command == "HEAD" else data)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data)

        do_HEAD = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize("place", ["whole", "ranges"])
def test_ranges_are_right_whatever_the_server_does(web: str, place: str) -> None:
    store = open_store(f"{web}/{place}")
    for start, stop in [(0, 4), (5, 1000), (0, len(DATA)), (1000, 1024)]:
        target = bytearray(stop - start)
        store.read_into("k", start, [memoryview(target)])
        assert target == DATA[start:stop]
    # As long as the whole file, but not the same bytes.
    with pytest.raises(Truncated, match=f"ends at byte {len(DATA)}"):
        store.read_into("k", 10, [memoryview(bytearray(len(DATA)))])


@pytest.mark.parametrize(
    ("status", "kind"),
    [(401, AccessDenied), (403, AccessDenied), (404, NotFound), (500, StorageUnavailable)],
)
def test_web_servers_that_refuse(status: int, kind: type[StorageError]) -> None:
    class Refusing(Handler):
        def serve(self) -> None:
            self.answer(status, {}, b"")

    with http_server(Refusing) as port, pytest.raises(kind) as caught:
        open_store(f"http://127.0.0.1:{port}/x").stat("k")
    assert type(caught.value) is kind
    assert str(status) in str(caught.value)


def test_no_web_server() -> None:
    """fsspec itself raises FileNotFoundError."""
    url = f"http://127.0.0.1:{free_port()}/x"
    store = open_store(url)
    for call in (store.stat, lambda key: store.read_into(key, 0, [memoryview(bytearray(1))])):
        with pytest.raises(StorageUnavailable, match="Cannot connect"):
            call("k")
    with pytest.raises(StorageUnavailable):
        ckpt.inspect(url)


def test_fewer_bytes_than_there_are(web: str) -> None:
    with pytest.raises(StorageError, match="gave 50 bytes instead"):
        open_store(f"{web}/half").read_into("k", 10, [memoryview(bytearray(100))])


def test_the_empty_create_is_conditional() -> None:
    """s3fs commits an empty file without the condition."""
    with strict_s3() as server:
        server.requires_checksums = False
        options = {name: server.options[name] for name in ("endpoint_url", "key", "secret")}
        store = open_store("fsspec+s3://bucket/root", options)
        put_bytes(store, "k", b"", mode=PutMode.CREATE)
        assert server.sent("PutObject")[-1].headers["if-none-match"] == "*"
        assert not store.capabilities.conditional_create
        with pytest.raises(AlreadyExists):
            put_bytes(store, "k", b"", mode=PutMode.CREATE)
        server.rule = lambda request: "shorten" if request.operation == "CompleteMultipartUpload" else "pass"
        with pytest.raises(IntegrityError, match="kept 5 of 6 bytes"):
            put_bytes(store, "short", b"012345")
        assert server.objects["root/short"] == b"01234"  # it may be another writer's by now
        assert not server.uploads
        store.close()


@pytest.mark.parametrize("scheme", ["s3", "fsspec+s3"])
def test_a_second_page_of_unfinished_uploads(scheme: str) -> None:
    with strict_s3() as server:
        server.uploads |= {f"id-{number}": Upload(f"root/k{number:04}", 0.0) for number in range(1001)}
        options = {name: server.options[name] for name in ("endpoint_url", "key", "secret")}
        store = open_store(f"{scheme}://bucket/root", options)
        assert store.abandon("k", choose=lambda upload: upload.key == "k1000") == 1
        assert len(server.uploads) == 1000
        assert "id-1000" not in server.uploads
        store.close()


@pytest.mark.parametrize("data", [b"", b"x"])
def test_a_create_that_loses_a_race(data: bytes) -> None:
    """The look before it found nothing; the condition decides."""
    with strict_s3() as server:
        server.requires_checksums = False
        server.objects["root/k"] = b"first"
        server.rule = lambda request: (404, "NotFound") if request.method == "HEAD" else "pass"
        options = {name: server.options[name] for name in ("endpoint_url", "key", "secret")}
        store = open_store("fsspec+s3://bucket/root", options)
        with pytest.raises(AlreadyExists):
            put_bytes(store, "k", data, mode=PutMode.CREATE)
        assert server.objects["root/k"] == b"first"
        assert not server.uploads
        store.close()


def test_local_links_that_lead_out(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "f").write_bytes(b"x")
    (tmp_path / "root" / "d").symlink_to("../outside")
    store = open_store(f"fsspec+file://{tmp_path}/root")
    for action in (
        lambda: read_bytes(store, "d/f"),
        lambda: put_bytes(store, "d/new", b"x"),
        lambda: store.delete(["d/f"]),
        lambda: store.prepare("d/new"),
    ):
        with pytest.raises(UnsafeContent):
            action()
    assert [path.name for path in (tmp_path / "outside").iterdir()] == ["f"]


class _Fragile:
    """A file system with one connection, errors of its own, and sizes that it does not always know."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {"/r/a": b"1", "/r/b": b"2"}
        self.busy = False

    def invalidate_cache(self, path: str | None = None) -> None:
        pass

    def info(self, path: str) -> dict[str, Any]:
        assert not self.busy, "two threads on one connection"
        self.busy = True
        time.sleep(0.001)
        self.busy = False
        if path not in self.files:
            raise FileNotFoundError(path)
        return {"name": path, "size": None if path == "/r/unsized" else len(self.files[path]), "type": "file"}

    def rm_file(self, path: str) -> None:
        if path == "/r/kept":
            raise ValueError("550 Permission denied.")
        if path not in self.files:
            raise ValueError("550 No such file or directory.")
        del self.files[path]


@pytest.fixture
def fragile() -> FsspecStore:
    store = FsspecStore("ftp://host/r")
    store._files._opened = _Fragile(), "/r"
    return store


def test_one_connection_is_not_shared(fragile: FsspecStore) -> None:
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(20):
                fragile.stat("a")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert failures == []


def test_deletes_are_judged_by_their_result(fragile: FsspecStore) -> None:
    fragile.delete(["a", "a", "never/was"])
    assert set(fragile._files._open()[0].files) == {"/r/b"}
    fragile._files._open()[0].files["/r/kept"] = b""
    with pytest.raises(StorageError, match="550 Permission denied"):
        fragile.delete(["kept"])


def test_unknown_sizes_are_an_error(fragile: FsspecStore) -> None:
    fragile._files._open()[0].files["/r/unsized"] = b""
    with pytest.raises(StorageError, match="does not tell the size"):
        fragile.stat("unsized")


def test_close_lets_go_of_the_file_system(tmp_path: Path) -> None:
    store = FsspecStore(f"fsspec+file://{tmp_path}")
    with pytest.raises(NotFound):
        store.stat("k")
    file_system = weakref.ref(store._files._open()[0])
    store.close()
    gc.collect()
    assert file_system() is None
    put_bytes(store, "k", b"x")  # and opens again when it is used again
