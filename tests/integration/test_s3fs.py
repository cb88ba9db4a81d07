"""s3fs-fuse: two mounts of one bucket are two nodes, each with a view of its own."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import daemons
import jobs
import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from needs import needs
from support.ranks import run_ranks
from support.servers import S3Server
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlan

import ckpt
from ckpt.errors import NotFound

pytestmark = needs("s3fs", "s3fs", fuse=True)

NEGATIVE_CACHE = ("-o", "enable_noobj_cache")


@contextlib.contextmanager
def s3fs_mount(
    server: S3Server, bucket: str, mount_point: Path, options: Sequence[str]
) -> Iterator[daemons.Process]:
    passwords = mount_point.with_suffix(".passwords")
    passwords.write_text(f"{server.access_key}:{server.secret_key}")
    passwords.chmod(0o600)
    command = [
        "s3fs", bucket, mount_point, "-f", "-o", f"passwd_file={passwords}", "-o", f"url={server.endpoint_url}",
        "-o", "use_path_request_style", "-o", "sigv4", "-o", "retries=2", "-o", "connect_timeout=2", *options,
    ]  # fmt: skip
    with daemons.mounted(command, mount_point, mount_point.with_suffix(".log")) as process:
        yield process


@contextlib.contextmanager
def two_nodes(s3: S3Server, folder: Path, options: Sequence[str]) -> Iterator[list[Path]]:
    """Two mounts of one bucket."""
    bucket = s3.new_bucket()
    nodes = [folder / "a", folder / "b"]
    with s3fs_mount(s3, bucket, nodes[0], options), s3fs_mount(s3, bucket, nodes[1], options):
        yield nodes


@pytest.mark.parametrize("early", [False, True], ids=["no look", "an early look"])
@pytest.mark.parametrize("options", [(), NEGATIVE_CACHE], ids=["default", "negative cache"])
def test_rank_0_makes_the_directory(
    s3: S3Server, tmp_path: Path, options: Sequence[str], early: bool
) -> None:
    """The failure that this project began with: it takes a cache of missing names, and a look before the save."""
    with two_nodes(s3, tmp_path, options) as nodes:
        errors = run_ranks(2, _save_as_it_was, [str(node / "step-1") for node in nodes], early)
        if options and early:
            assert all("rank 1" in error.lower() or "rank:1" in error.lower() for error in errors), errors
            assert all("No such file or directory" in error for error in errors)
        else:
            assert errors == ["", ""]

        # On the same mounts, at a place that was looked at as early.
        urls = [str(node / "step-2") for node in nodes]
        assert run_ranks(2, _save_and_load, urls, early) == [[True, True]] * 2
        # By other processes, each through the mount of the other rank.
        assert run_ranks(2, jobs.loads, urls[::-1], {}, 2) == [True, True]


class _AsItWas(dcp.FileSystemWriter):
    """Rank 0 makes the directory, and all others take it to be there."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self.fs.mkdir(self.path)
        return super().prepare_global_plan(plans)


def _save_as_it_was(rank: int, urls: Sequence[str], early: bool) -> str:
    if early:
        assert not os.path.exists(urls[rank])
    dist.barrier()
    try:
        dcp.save(jobs.state_of(rank, 1), storage_writer=_AsItWas(urls[rank]))
    except CheckpointException as error:
        return str(error)
    return ""


def _save_and_load(rank: int, urls: Sequence[str], early: bool) -> list[bool]:
    """Two saves at a place, each loaded through the other mounts, where all names were looked for before."""
    other = urls[1 - rank]
    if early:
        with pytest.raises(NotFound):  # is there anything to resume from?
            ckpt.load(jobs.state_of(rank, 0), urls[rank], visibility_timeout_s=1)
    dist.barrier()
    same = []
    for seed in (1, 2):
        jobs.save(rank, urls, {}, seed)
        same.append(jobs.loads(rank, urls[::-1], {}, seed))
    assert os.path.exists(other)
    return same


def test_the_mount_dies_in_mid_save(s3: S3Server, tmp_path: Path) -> None:
    """SIGKILL of s3fs: an error on all ranks, not a save that looks whole."""
    bucket = s3.new_bucket()
    with s3fs_mount(s3, bucket, tmp_path / "a", ()), s3fs_mount(s3, bucket, tmp_path / "b", ()) as process:
        urls = [str(tmp_path / name / "step-1") for name in ("a", "b")]
        run_ranks(2, jobs.save, urls, {}, 1)
        for kinds, message in run_ranks(2, jobs.failing_save_when_killed, urls, process.pid, 2):
            assert kinds == ["StorageUnavailable"]
            assert "rank 1" in message
        assert run_ranks(2, jobs.loads, urls[:1] * 2, {}, 1) == [True, True]
