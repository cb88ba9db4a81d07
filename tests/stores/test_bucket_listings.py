"""Listings of buckets: prefixes that end in a slash, as directory buckets require, and answers that are cut off."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.clock import skip_pauses_of_s3
from support.commands import run
from support.strict_s3 import Request, StrictS3, Upload

import ckpt
from ckpt.backends.base import MIB, Store, put_bytes
from ckpt.backends.bodies import CheckedBody
from ckpt.backends.registry import open_store
from ckpt.errors import StorageError

KEYS = ["model-1", "model-2", "model-a/deep/x", "other", "rank-0/a", "rank-0/b", "rank-10/c"]


def as_directory_bucket(request: Request) -> str | tuple[int, str]:
    """Refuse a prefix that does not end in a slash, as S3 Express does."""
    prefix = request.query.get("prefix", "")
    return (400, "InvalidRequest") if prefix and not prefix.endswith("/") else "pass"


def as_endless(request: Request) -> str:
    is_listing = not request.name or request.operation in ("ListMultipartUploads", "ListParts")
    return "endless" if request.method == "GET" and is_listing else "pass"


def options_of(server: StrictS3, scheme: str) -> dict[str, Any]:
    named = ("endpoint_url", "key", "secret")
    return {name: server.options[name] for name in named} if scheme == "fsspec+s3" else server.options


@pytest.fixture(params=["s3", "cos", "fsspec+s3"])
def store(request: pytest.FixtureRequest, server: StrictS3) -> Iterator[Store]:
    server.requires_checksums = False
    store = open_store(f"{request.param}://bucket/root", options_of(server, request.param))
    for key in KEYS:
        put_bytes(store, key, b"x")
    yield store
    store.close()


@pytest.mark.parametrize(
    "prefix", ["", "model-", "model-a", "model-a/", "model-a/de", "rank-", "rank-0/", "rank-0/b", "none", "o"]
)
def test_prefixes_end_in_a_slash(server: StrictS3, store: Store, prefix: str) -> None:
    server.rule = as_directory_bucket
    assert sorted(stat.key for stat in store.list(prefix)) == [key for key in KEYS if key.startswith(prefix)]


def test_uploads_and_folders_are_listed_by_folders(server: StrictS3, store: Store) -> None:
    server.rule = as_directory_bucket
    server.uploads |= {"id-1": Upload("root/model-3", 0.0), "id-2": Upload("root/other-2", 0.0)}
    assert sorted(store.folders()) == ["model-a", "rank-0", "rank-10"]
    assert store.abandon("model-") == 1
    assert [*server.uploads] == ["id-2"]


LISTINGS: dict[str, Callable[[Store], object]] = {
    "list": lambda store: [*store.list()],
    "list a part of a name": lambda store: [*store.list("model-")],
    "folders": lambda store: [*store.folders()],
    "abandon": lambda store: store.abandon(),
}


@pytest.mark.parametrize("call", [*LISTINGS])
def test_an_answer_that_is_cut_off_without_a_token_is_an_error(
    server: StrictS3, store: Store, call: str
) -> None:
    server.rule = as_endless
    with pytest.raises(StorageError, match="it is not complete"):
        LISTINGS[call](store)


def test_parts_that_are_cut_off_are_not_taken_for_all(
    server: StrictS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The upload is not gone on with: it is begun again, with all its parts."""
    skip_pauses_of_s3(monkeypatch)
    server.requires_checksums = False
    data = bytes(11 * MIB)
    noted = _Note()
    store = open_store("s3://bucket/root", server.options)
    server.rule = lambda request: (
        (503, "SlowDown") if request.query.get("partNumber") == "3" else as_endless(request)
    )
    with pytest.raises(StorageError):
        store.put_resumable("k", CheckedBody(data), noted)
    server.rule = as_endless
    assert store.put_resumable("k", CheckedBody(data), noted) == 0
    assert server.objects["root/k"] == data
    store.close()


class _Note:
    """A note in memory."""

    data: bytes | None = None

    def read(self) -> bytes | None:
        return self.data

    def write(self, data: bytes) -> None:
        self.data = data

    def clear(self) -> None:
        self.data = None


@pytest.mark.parametrize("scheme", ["s3", "fsspec+s3"])
def test_commands_work_in_a_directory_bucket(server: StrictS3, scheme: str, tmp_path: Path) -> None:
    server.requires_checksums = scheme == "s3"
    server.rule = as_directory_bucket
    options = options_of(server, scheme)
    url = f"{scheme}://bucket/run"
    for step in (1, 2, 3):
        ckpt.save({"w": torch.full((4,), float(step))}, f"{url}/step-{step}", storage_options=options)
    assert [each.step for each in ckpt.list_checkpoints(url, storage_options=options)] == [1, 2, 3]
    assert ckpt.scrub(url, storage_options=options).ok
    assert ckpt.collect_garbage(f"{scheme}://bucket", storage_options=options).items == []
    ckpt.remove(f"{url}/step-1", storage_options=options)
    given = [f"--storage-options={name}={value}" for name, value in options.items()]
    for command in (["ls", url], ["report", url, "-o", tmp_path / "r.html"], ["verify", f"{url}/step-2"]):
        ran = run(*command, *given)
        assert ran.code == 0, ran
