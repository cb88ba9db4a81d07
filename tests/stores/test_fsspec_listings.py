"""File systems of fsspec in this process see what this library changes, without being asked to look again."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import s3fs
import torch
import torch.distributed.checkpoint as dcp
from fsspec import AbstractFileSystem
from fsspec.utils import infer_storage_options
from support.ranks import run_ranks
from support.servers import S3Server
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

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


def of_frameworks(options: dict[str, Any]) -> Any:
    """The file system through which a framework lists, as torchtitan does: one for all who ask for it."""
    return s3fs.S3FileSystem(**options)


def names(files: Any, folder: str) -> set[str]:
    return {path.rpartition("/")[2] for path in files.ls(folder)}


@pytest.mark.parametrize("scheme", ["s3", "fsspec+s3"])
def test_saves_and_removals_are_seen(s3: S3Server, bucket: str, scheme: str) -> None:
    root = f"{scheme}://{bucket}/run"
    files = of_frameworks(s3.options)
    for step in (1, 2, 3):
        ckpt.save({"x": torch.ones(3)}, f"{root}/step-{step}", storage_options=s3.options)
        assert names(files, f"{bucket}/run") == {f"step-{n}" for n in range(1, step + 1)}
        assert "commit.json" in names(files, f"{bucket}/run/step-{step}")
    ckpt.remove(f"{root}/step-2", storage_options=s3.options)
    assert names(files, f"{bucket}/run") == {"step-1", "step-3"}
    assert not files.exists(f"{bucket}/run/step-2/commit.json")
    assert names(files, bucket) == {"run"}


def save_elsewhere(rank: int, options: dict[str, Any], bucket: str) -> set[str]:
    """Save by another process, whose file systems are not those of this one."""
    ckpt.install(storage_options=options)
    files = of_frameworks(options)
    files.pipe_file(f"{bucket}/run/first", b"")
    assert names(files, f"{bucket}/run") == {"first"}
    future = dcp.async_save(
        {"x": torch.ones(3)},
        checkpoint_id=f"s3://{bucket}/run/step-1",
        async_checkpointer_type=AsyncCheckpointerType.PROCESS,
    )
    future.result()  # type: ignore[union-attr]
    return names(files, f"{bucket}/run")


@pytest.mark.long
def test_saves_by_another_process_are_seen(s3: S3Server, bucket: str) -> None:
    assert run_ranks(1, functools.partial(save_elsewhere, options=s3.options, bucket=bucket)) == [
        {"first", "step-1"}
    ]


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


def test_places_are_named_as_the_file_system_names_them() -> None:
    class Azure(AbstractFileSystem):  # type: ignore[misc]
        protocol = ("abfs", "abfss")
        forgotten: ClassVar[list[str]] = []

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            parts = infer_storage_options(path)
            return str(parts["username"] + parts["path"])

        def invalidate_cache(self, path: str | None = None) -> None:
            self.forgotten.append(str(path))

    Azure()
    forget_listings("abfs://container@account.dfs.core.windows.net/run", ["step-1/commit.json"])
    assert sorted(Azure.forgotten) == ["container", "container/run", "container/run/step-1"]
    Azure.clear_instance_cache()


def test_fsspec_is_not_imported_for_it() -> None:
    code = (
        "import sys; from ckpt.backends.fsspec_listings import forget_listings;"
        "forget_listings('s3://bucket/run', ['a/b']); assert 'fsspec' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    forget_listings("/a/path", ["k"])
