"""File systems of fsspec in this process see what this library changes, without being asked to look again."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import s3fs
import torch
from support.servers import S3Server

import ckpt
from ckpt.backends.base import put_bytes
from ckpt.backends.fsspec_listings import forget_listings
from ckpt.backends.registry import open_store


@pytest.fixture
def bucket(s3: S3Server) -> Iterator[str]:
    name = s3.new_bucket()
    yield name
    s3fs.S3FileSystem.clear_instance_cache()
    s3.drop_bucket(name)


def of_frameworks(s3: S3Server) -> Any:
    """The file system through which a framework lists, as torchtitan does: one for all who ask for it."""
    return s3fs.S3FileSystem(key=s3.access_key, secret=s3.secret_key, endpoint_url=s3.endpoint_url)


def names(files: Any, folder: str) -> set[str]:
    return {path.rpartition("/")[2] for path in files.ls(folder)}


@pytest.mark.parametrize("scheme", ["s3", "fsspec+s3"])
def test_saves_and_removals_are_seen(s3: S3Server, bucket: str, scheme: str) -> None:
    root = f"{scheme}://{bucket}/run"
    options = {name: value for name, value in s3.options.items() if value is not None}
    files = of_frameworks(s3)
    for step in (1, 2, 3):
        ckpt.save({"x": torch.ones(3)}, f"{root}/step-{step}", storage_options=options)
        assert names(files, f"{bucket}/run") == {f"step-{n}" for n in range(1, step + 1)}
        assert "commit.json" in names(files, f"{bucket}/run/step-{step}")
    ckpt.remove(f"{root}/step-2", storage_options=options)
    assert names(files, f"{bucket}/run") == {"step-1", "step-3"}
    assert not files.exists(f"{bucket}/run/step-2/commit.json")
    assert names(files, bucket) == {"run"}


def test_a_file_system_that_fails_fails_no_save(s3: S3Server, bucket: str) -> None:
    class Broken(s3fs.S3FileSystem):  # type: ignore[misc]
        def invalidate_cache(self, path: str | None = None) -> None:
            raise RuntimeError("broken")

    Broken(anon=True)
    store = open_store(f"s3://{bucket}", s3.options)
    put_bytes(store, "k", b"x")
    store.delete(["k"])
    store.close()
    Broken.clear_instance_cache()


def test_fsspec_is_not_imported_for_it() -> None:
    code = (
        "import sys; from ckpt.backends.fsspec_listings import forget_listings;"
        "forget_listings('s3://bucket/run', ['a/b']); assert 'fsspec' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    forget_listings("/a/path", ["k"])
