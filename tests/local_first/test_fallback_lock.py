"""`fallback=`: one job carries from its folder, where the file system has locks."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.ranks import fork_context, start

import ckpt
from ckpt.errors import ConfigurationError
from ckpt.local_first import folder


def _manager(place: Path) -> ckpt.CheckpointManager:
    return ckpt.CheckpointManager(place / "durable", save=1, fallback=place / "fallback", preflight=False)


def _hold(place: Path, pipe: Connection) -> None:
    manager = _manager(place)
    pipe.send("holds it")
    pipe.recv()
    manager.close()


@contextlib.contextmanager
def _job(place: Path) -> Iterator[tuple[Any, Connection]]:
    """Another process that holds the folder, until something is sent to it."""
    ours, its = fork_context().Pipe()
    with start(_hold, place, its) as process:
        assert ours.poll(60)
        assert ours.recv() == "holds it"
        yield process, ours


@pytest.mark.smoke
def test_a_second_job_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "_LEASE_S", 0.2)
    with _job(tmp_path) as (job, pipe):
        with pytest.raises(ConfigurationError, match=rf"another job \(.* pid {job.pid} .*\) saves to"):
            _manager(tmp_path)
        pipe.send("end")
        job.join(60)
        assert job.exitcode == 0
    _manager(tmp_path).close()


@pytest.mark.smoke
def test_one_that_ends_in_time_is_waited_for(tmp_path: Path) -> None:
    with _job(tmp_path) as (job, _):
        job.kill()
        _manager(tmp_path).close()


def test_a_file_system_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def flock(file: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(folder, "fcntl", SimpleNamespace(flock=flock, LOCK_EX=2, LOCK_NB=4))
    with caplog.at_level(logging.WARNING):
        _manager(tmp_path).close()
    assert "has no locks (" in caplog.text
