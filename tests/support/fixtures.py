"""Fixtures that several folders use, and the hooks that sort the tests into tiers."""

from __future__ import annotations

import fcntl
import gc
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckpt.backends import memory
from ckpt.backends.base import Store
from ckpt.backends.registry import open_store
from support.commands import sharded_checkpoint, stock_checkpoint
from support.proxy import FaultProxy, fault_proxy
from support.ranks import fork_from_here
from support.saves import Place
from support.servers import IamServer, S3Server, iam_server, moto_server
from support.strict_s3 import StrictS3, strict_s3
from support.tiers import in_shard, load_profile, mark_tiers

load_profile()  # before the test modules, which ask it how many examples they draw
gc.disable()  # until all is imported: that makes many objects, and no garbage


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    """A moto server: the semantics of S3 over a real socket."""
    with moto_server() as server:
        yield server


@pytest.fixture(scope="session")
def iam() -> Iterator[IamServer]:
    with iam_server() as server:
        yield server


@pytest.fixture
def server() -> Iterator[StrictS3]:
    """A server of S3 that is strict about checksums and uploads, and lies on request."""
    with strict_s3() as server:
        yield server
        server.objects.clear()  # threads of kept connections refer to them


@pytest.fixture
def proxy(server: StrictS3) -> Iterator[FaultProxy]:
    """A network between client and `server` that fails on request."""
    with fault_proxy(server) as proxy:
        yield proxy


@pytest.fixture
def proxied(proxy: FaultProxy) -> Place:
    """A place on `server` behind `proxy`."""
    return "s3://bucket/c", proxy.options


@pytest.fixture(params=["s3", pytest.param("cos", marks=pytest.mark.server)])
def store(request: pytest.FixtureRequest, server: StrictS3) -> Iterator[Store]:
    """A client of `server`, once of each kind: `make test` runs the second kind only in tests marked `smoke`."""
    store = open_store(f"{request.param}://bucket/root", server.options, threads=3)
    yield store
    store.close()


@pytest.fixture(autouse=True)
def _memory_stores_are_emptied() -> Iterator[None]:
    yield
    memory._places.clear()


@pytest.fixture(autouse=True)
def _no_credentials_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "AWS_PROFILE",
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_ENDPOINT_URL",
        "IBM_API_KEY_ID",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_tiers(items)
    items[:] = in_shard(items, os.environ.get("SHARD", "1/1"))


def pytest_collection_finish() -> None:
    gc.enable()
    gc.freeze()  # what lives on need not be walked again and again, nor copied by whoever is forked


@pytest.fixture(scope="session", autouse=True)
def _fork_server() -> None:
    """Before the first test, but when pytest captures already what ranks print."""
    fork_from_here()


@pytest.fixture(scope="session")
def sharded_place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that two ranks saved, to be read only."""
    return _made_once(tmp_path_factory, "saved", sharded_checkpoint)


@pytest.fixture(scope="session")
def stock_place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same as stock PyTorch saves it, to be read only."""
    return _made_once(tmp_path_factory, "stock", stock_checkpoint)


def _made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """A checkpoint that all workers of pytest-xdist share: the first that needs it makes it."""
    root = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    place = root / name / "step-100"
    with open(root / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.exists():
            place.parent.mkdir()
            make(place)
    return place


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 40 MB."""
    mount = tmp_path / "disk"
    mount.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", mount], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip(f"cannot mount a small tmpfs here: {done.stderr.decode().strip()}")
    yield mount
    subprocess.run(["umount", mount], check=True)
