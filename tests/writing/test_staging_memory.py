"""The memory of states that another process saves: where it comes from."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="Linux tells what memory is made of")
MEMFD = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this Python makes no files of memory")


@MEMFD
def test_memory_for_another_process_is_none_of_dev_shm() -> None:
    # Of which a container has 64 MB, where nobody asked for more.
    staged = ckpt.Stager(shared_memory=True).stage({"t": torch.arange(1000)})
    name = region_at(staged["t"].data_ptr())[0]
    assert "memfd:ckpt" in name
    assert "/dev/shm" not in name


@MEMFD
def test_a_program_that_is_started_does_not_keep_the_memory() -> None:
    staged = ckpt.Stager(shared_memory=True).stage({"t": torch.arange(1000)})
    command = ["ls", "-l", "/proc/self/fd"]
    found = subprocess.run(command, check=True, close_fds=False, capture_output=True, text=True, timeout=60)
    assert staged["t"].sum() == 499_500
    assert "pipe:" in found.stdout  # it was asked
    assert "memfd" not in found.stdout


@MEMFD
def test_memory_comes_from_dev_shm_where_a_sandbox_has_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)
    staged = ckpt.Stager(shared_memory=True).stage({"t": torch.arange(1000)})
    assert "/dev/shm" in region_at(staged["t"].data_ptr())[0]


_SMALL = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=1m none /dev/shm && exec "$@"', "-"]
_SAVE = """
import sys
import torch
import torch.distributed as dist
import ckpt

if __name__ == "__main__":
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}.group", rank=0, world_size=1)
    state = {"t": torch.arange(1 << 20)}
    with ckpt.CheckpointManager(sys.argv[1], save=1, async_mode="process") as manager:
        manager.save(1, state, rng=False)
        manager.wait_durable()
        state["t"].zero_()
        assert manager.restore(state, rng=False)
    assert torch.equal(state["t"], torch.arange(1 << 20))
"""


@MEMFD
@pytest.mark.long
def test_a_process_saves_where_dev_shm_is_small(tmp_path: Path) -> None:
    if (
        not shutil.which("unshare")
        or subprocess.run([*_SMALL, "true"], check=False, capture_output=True).returncode
    ):
        pytest.skip("nothing can be mounted here")
    script = tmp_path / "save.py"
    script.write_text(_SAVE)
    subprocess.run([*_SMALL, sys.executable, str(script), str(tmp_path / "run")], check=True, timeout=120)


@pytest.fixture
def by_file_name() -> Iterator[None]:
    before = torch.multiprocessing.get_sharing_strategy()  # type: ignore[no-untyped-call]
    torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
    yield
    torch.multiprocessing.set_sharing_strategy(before)  # type: ignore[no-untyped-call]


@LINUX
def test_memory_is_shared_by_name_where_that_is_wanted(by_file_name: None) -> None:
    staged = ckpt.Stager(shared_memory=True).stage({"t": torch.arange(1000)})
    assert "/dev/shm" in region_at(staged["t"].data_ptr())[0]


def region_at(address: int) -> list[str]:
    """Return the lines about the memory region of an address."""
    begins: Any = None
    lines: list[str] = []
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            if begins is not None and begins[0] <= address < begins[1]:
                return lines
            begins, lines = [int(part, 16) for part in line.split()[0].split("-")], []
        lines.append(line)
    return lines
