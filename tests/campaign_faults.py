"""What goes wrong in the fault campaign: classes of faults, each injected at a drawn place of one save."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proxy import Call, Rule

__all__ = [
    "FAULTS",
    "UNSEEN",
    "CannotMount",
    "Trial",
    "draw",
    "file_system",
    "install",
    "network_rule",
    "note_time",
    "thaw",
]

MIB = 1 << 20

UNSEEN = "corrupted request, unseen by the server"
"""No store without end-to-end checksums can refuse it, so a save may commit it; but no load may give it for good."""

# By a proxy between the client and a server; for one request, or for all from one on.
NETWORK: dict[str, str | int] = {
    "delay": "delay", "throttling": "throttle", "reset in mid-body": "reset", "half-close": "half-close",
    "truncated reply": "cut", "corrupted reply": "flip", "corrupted request": "damage",
    UNSEEN: "damage unseen", "lost reply": "lose", "late request": "late",
    "500": 500, "503 SlowDown": 503, "403 after expiry": 403,
    "no answer": "stall", "server stops reading": "stop reading", "slow-loris": "trickle",
}  # fmt: skip

# By the kernel, or at a system call that changes the file system.
LOCAL = ("disk full", "file system hangs", "EIO", "short writes")

# Of one rank, or of all of them.
PROCESSES: dict[str, signal.Signals] = {"SIGKILL": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP}

FAULTS = (
    *NETWORK,
    *LOCAL,
    *(f"{name} at a {where}" for name in PROCESSES for where in ("request", "system call")),
)

SYSTEM_CALLS = ("mkdir", "open", "writev", "fsync", "close", "replace", "link", "unlink")
_open, _close = os.open, os.close  # before `install` puts others in their place
_FIFREEZE, _FITHAW = 0xC0045877, 0xC0045878


@dataclass(frozen=True)
class Trial:
    """One save and what goes wrong in it.

    Attributes:
        first: there is no checkpoint at the place yet.
        position: the request, or system call of the victim, at which it begins; 1, 2, ...
        lasts: it goes on from there; otherwise it happens once.
        carried_out: a request is carried out before its client is killed or stopped.
        resumes: a stopped rank goes on when the others have failed.
        victims: the ranks that it befalls, where it befalls ranks.
        fraction: of the new checkpoint fits onto the disk.
    """

    seed: int
    fault: str
    ranks: int
    first: bool
    in_background: bool
    position: int
    lasts: bool
    carried_out: bool
    resumes: bool
    victims: tuple[int, ...]
    fraction: float

    @property
    def on_s3(self) -> bool:
        return self.fault in NETWORK or self.fault.endswith("at a request")

    @property
    def signal(self) -> signal.Signals | None:
        return PROCESSES.get(self.fault.split()[0])


def draw(seed: int) -> Trial:
    """The trial of that seed. Any so many seeds in a row have each class of faults once."""
    chance = random.Random(seed)
    fault = FAULTS[seed % len(FAULTS)]
    ranks = chance.randint(1, 3)
    on_s3 = fault in NETWORK or fault.endswith("at a request")
    return Trial(
        seed=seed,
        fault=fault,
        ranks=ranks,
        first=chance.random() < 0.3,
        in_background=chance.random() < 0.3,
        position=chance.randint(1, 10 + 9 * ranks if on_s3 else 40),
        lasts=chance.random() < 0.5,
        carried_out=chance.random() < 0.5,
        resumes=ranks == 1 or chance.random() < 0.5,
        victims=tuple(range(ranks)) if chance.random() < 0.2 else (chance.randrange(ranks),),
        fraction=chance.random(),
    )


# -- between the client and the server --------------------------------------------------------------------


def network_rule(trial: Trial, pids: list[int], happened: Callable[[], None]) -> Rule:
    """The proxy's rule during the save; `happened` is called when the fault begins."""
    lock, count = threading.Lock(), 0

    def rule(call: Call) -> str | int:
        nonlocal count
        with lock:
            count += 1
            number = count
        if number != trial.position and not (trial.lasts and number > trial.position):
            return "pass"
        if trial.signal is None:
            happened()
            return NETWORK[trial.fault]
        if number == trial.position:
            happened()
            for victim in trial.victims:
                os.kill(pids[victim], trial.signal)
            return "pass" if trial.carried_out else "reset"
        return "pass"

    return rule


# -- in a rank --------------------------------------------------------------------------------------------


def install(trial: Trial, rank: int, place: str, happened: Callable[[], None]) -> None:
    """Have this process's system calls fail, or it itself at one, as the trial says."""
    if trial.on_s3 or rank not in trial.victims or trial.fault == "disk full":
        return
    lock, count = threading.Lock(), 0

    def around(name: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal count
        with lock:
            count += 1
            number = count
        due = number == trial.position or (trial.lasts and number > trial.position)
        if not due:
            return call(*args, **kwargs)
        if number == trial.position:
            if trial.fault == "file system hangs":
                with contextlib.suppress(OSError):  # another rank has done it
                    _ioctl(os.path.dirname(place), _FIFREEZE)
            happened()
        return _fail(trial, number, name, functools.partial(call, *args, **kwargs), args)

    for name in SYSTEM_CALLS:
        setattr(os, name, functools.partial(around, name, getattr(os, name)))


def _fail(trial: Trial, number: int, name: str, call: Callable[[], Any], args: tuple[Any, ...]) -> Any:
    if trial.fault == "EIO":
        if name == "close":
            call()
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    if trial.fault == "short writes" and name == "writev":
        return os.write(args[0], memoryview(args[1][0])[: max(1, len(args[1][0]) // 2)])
    if number > trial.position:
        return call()
    if trial.signal is not None and not trial.carried_out:
        os.kill(os.getpid(), trial.signal)
    try:
        return call()
    finally:
        if trial.signal is not None and trial.carried_out:
            os.kill(os.getpid(), trial.signal)


# -- the place ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def file_system(trial: Trial, folder: Path, checkpoint_bytes: int) -> Iterator[Path]:
    """A directory to save in, on a file system of its own where the trial needs one.

    Raises:
        CannotMount
    """
    mount = folder / "disk"
    mount.mkdir()
    if trial.fault == "disk full":
        size = int(checkpoint_bytes * (trial.fraction + (0 if trial.first else 1))) + MIB
        _run("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", mount)
    elif trial.fault == "file system hangs":
        image = folder / "image"
        with image.open("wb") as file:
            file.truncate(24 * MIB + 3 * checkpoint_bytes)
        _run("mkfs.ext4", "-q", image)
        _run("mount", "-o", "loop", image, mount)
    else:
        yield mount
        return
    try:
        yield mount
    finally:
        thaw(mount)
        _run("umount", "-l", mount)


class CannotMount(Exception):
    """This machine or user cannot mount file systems."""


def _run(*command: object) -> None:
    try:
        done = subprocess.run([str(word) for word in command], capture_output=True, check=False)
    except OSError as error:
        raise CannotMount(str(error)) from error
    if done.returncode:
        raise CannotMount(f"{command[0]}: {done.stderr.decode().strip()}")


def thaw(mount: Path) -> None:
    """Let a frozen file system go on."""
    with contextlib.suppress(OSError):
        _ioctl(mount, _FITHAW)


def _ioctl(path: str | Path, request: int) -> None:
    fd = _open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.ioctl(fd, request, 0)
    finally:
        _close(fd)


def note_time(path: Path) -> None:
    """Note when something happened, once, for whoever survives it."""
    with contextlib.suppress(FileExistsError):
        fd = _open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        os.write(fd, str(time.monotonic()).encode())
        _close(fd)
