"""Processes and mounts of a test, which end with it whatever happens."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from support.servers import spawn

Process: TypeAlias = "subprocess.Popen[bytes]"


def start(command: Sequence[object], log: Path, environment: Mapping[str, str] | None = None) -> Process:
    """A program in the foreground that writes to `log`."""
    with log.open("ab") as output:
        return spawn(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
        )


def stop(process: Process, timeout_s: float = 10) -> None:
    process.terminate()
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextlib.contextmanager
def mounted(
    command: Sequence[object], mount_point: Path, log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[Process]:
    """A FUSE file system, served by `command` in the foreground."""
    mount_point.mkdir()
    process = start(command, log, environment)
    try:
        _wait_for_mount(process, mount_point, log)
        yield process
    finally:
        if _is_mount(mount_point) and subprocess.run(["umount", mount_point], check=False).returncode:
            subprocess.run(["umount", "--lazy", mount_point], check=False)
        stop(process)


def _wait_for_mount(process: Process, mount_point: Path, log: Path, timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while not _is_mount(mount_point):
        if process.poll() is not None or time.monotonic() >= deadline:
            raise RuntimeError(f"{process.args!r} did not mount: {log.read_text(errors='replace')[-2000:]}")
        time.sleep(0.05)


def _is_mount(path: Path) -> bool:
    # Not by looking at the path: a file system whose daemon is dead or stuck would not answer.
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    return any(line.split(" ")[4] == str(path) for line in mounts)


def run(
    command: Sequence[object], *, timeout_s: float = 60, environment: Mapping[str, str] | None = None
) -> str:
    """A program that has to end well; returns what it wrote."""
    done = subprocess.run(
        [str(part) for part in command],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**os.environ, **(environment or {})},
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{command[0]} ended with status {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout
