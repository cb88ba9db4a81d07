from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.commands import sharded_checkpoint, stock_checkpoint
from support.proxy import FaultProxy, fault_proxy
from support.saves import Place
from support.servers import IamServer, S3Server, iam_server, moto_server
from support.strict_s3 import StrictS3, strict_s3
from support.tiers import load_profile, mark_tiers

from ckpt.backends.base import Store
from ckpt.backends.registry import open_store

load_profile()  # before the test modules, which ask it how many examples they draw


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


def pytest_configure() -> None:
    """Programs begun in the background ignore Ctrl-C, and so would all that they begin."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_tiers(items)


@pytest.fixture(scope="session")
def sharded_place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that two ranks saved, to be read only."""
    place = tmp_path_factory.mktemp("saved") / "step-100"
    sharded_checkpoint(place)
    return place


@pytest.fixture(scope="session")
def stock_place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same as stock PyTorch saves it, to be read only."""
    place = tmp_path_factory.mktemp("stock") / "step-100"
    stock_checkpoint(place)
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
