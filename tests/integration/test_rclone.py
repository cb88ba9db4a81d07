"""rclone: a server that ignores preconditions, and a mount whose fsync lies."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jobs
import pytest
from needs import RCLONE, needs
from rclone import rclone_mount, rclone_server
from support.ranks import run_ranks
from support.servers import S3Server
from systems import SystemTests

from ckpt.backends.base import Store
from ckpt.backends.registry import open_store

pytestmark = needs("rclone", RCLONE)
mounts = needs("rclone mount", RCLONE, "fusermount3", fuse=True)[-1]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with rclone_server(tmp_path_factory.mktemp("rclone")) as running:
        yield running


class TestServe(SystemTests):
    @pytest.fixture
    def s3_server(self, server: S3Server) -> S3Server:
        return server

    def creates_atomically(self, store: Store) -> bool:
        return False

    def raw_pending(self, store: Store) -> int:
        try:
            return super().raw_pending(store)
        except self.client.exceptions.NoSuchUpload:  # its answer where there is none
            return 0

    def test_preconditions_are_ignored(self) -> None:
        for body in (b"old", b"new"):
            self.client.put_object(Bucket=self.bucket, Key="k", Body=body, IfNoneMatch="*")
        assert self.client.get_object(Bucket=self.bucket, Key="k")["Body"].read() == b"new"


def test_an_object_of_more_than_4_gib(tmp_path: Path) -> None:
    """Offsets that do not fit 32 bits. The file is sparse."""
    with rclone_server(tmp_path, hashes=False) as server:
        bucket = server.new_bucket()
        with (tmp_path / "buckets" / bucket / "long").open("wb") as file:
            file.seek(1 << 32)
            file.write(b"behind")
        store = open_store(f"s3://{bucket}", server.options)
        assert store.stat("long").size_bytes == (1 << 32) + 6
        stored = bytearray(9)
        store.read_into("long", (1 << 32) - 3, [memoryview(stored)[:4], memoryview(stored)[4:]])
        assert stored == b"\0\0\0behind"
        store.close()


# -- mounts ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def two_nodes(s3: S3Server, folder: Path, cache_mode: str) -> Iterator[list[Path]]:
    """Two mounts of one bucket."""
    bucket = s3.new_bucket()
    nodes = [folder / "a", folder / "b"]
    with rclone_mount(s3, bucket, nodes[0], cache_mode), rclone_mount(s3, bucket, nodes[1], cache_mode):
        yield nodes


@mounts
def test_fsync_lies_where_writes_are_cached(s3: S3Server, tmp_path: Path) -> None:
    """What the refusal below is for: synced, closed, and lost with the process that serves the mount."""
    bucket = s3.new_bucket()
    with rclone_mount(s3, bucket, tmp_path / "a", "writes") as process:
        with open(tmp_path / "a" / "file", "wb") as file:
            file.write(b"x" * 1000)
            file.flush()
            os.fsync(file.fileno())
        process.kill()
        process.wait()
    assert "Contents" not in s3.client().list_objects_v2(Bucket=bucket)


@mounts
@pytest.mark.parametrize("cache_mode", ["writes", "full"])
def test_saves_are_refused_where_fsync_lies(s3: S3Server, tmp_path: Path, cache_mode: str) -> None:
    with two_nodes(s3, tmp_path, cache_mode) as nodes:
        urls = [str(node / "run" / "step-1") for node in nodes]
        for kinds, message in run_ranks(2, jobs.failing_save, urls, {}, 1):
            assert kinds == ["ConfigurationError", "ConfigurationError"]
            assert "cannot promise that a save is durable" in message
        for node in nodes:
            assert [path for path in node.rglob("*") if path.is_file()] == []


@mounts
def test_durability_can_be_given_up(s3: S3Server, tmp_path: Path) -> None:
    """With fsync=False a save is there for the other mount when it has been written back."""
    with two_nodes(s3, tmp_path, "writes") as nodes:
        urls = [str(node / "run" / "step-1") for node in nodes]
        run_ranks(2, jobs.save, urls, {"fsync": False}, 1)
        for node in nodes:
            _eventually(lambda node=node: len(list(node.rglob("*.distcp"))) > 1)  # type: ignore[misc]
        assert run_ranks(2, jobs.loads, urls[::-1], {}, 1) == [True, True]


@mounts
@pytest.mark.parametrize("cache_mode", ["off", "minimal"])
def test_two_nodes(s3: S3Server, tmp_path: Path, cache_mode: str) -> None:
    """Without a cache of writes, what is closed is stored: saves work, and load through the other mount."""
    with two_nodes(s3, tmp_path, cache_mode) as nodes:
        urls = [str(node / "run" / "step-1") for node in nodes]
        for seed in (1, 2):
            run_ranks(2, jobs.save, urls, {}, seed)
            assert run_ranks(2, jobs.loads, urls[::-1], {}, seed) == [True, True]


def _eventually(condition: Callable[[], bool], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)
