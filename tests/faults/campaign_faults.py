"""Draw the faults of the campaign from a seed, and inject them into a save or load."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import random
import signal
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.fault_disk import Orders, fault_disk
from support.proxy import Call, Rule

from ckpt.backends.base import MIB

UNSEEN = "corrupted request, unseen by the server"
"""A store without end-to-end checksums lets a save commit it; but no load may return it."""

# By a proxy between the client and a server; for one request, or for all from one on.
NETWORK: dict[str, str | int] = {
    "delay": "delay", "throttling": "throttle", "reset in mid-body": "reset", "half-close": "half-close",
    "truncated reply": "cut", "corrupted reply": "flip", "corrupted request": "damage",
    UNSEEN: "damage unseen", "lost reply": "lose", "late request": "late",
    "500": 500, "503 SlowDown": 503, "403 after expiry": 403,
    "no answer": "stall", "server stops reading": "stop reading", "slow-loris": "trickle",
}  # fmt: skip
REPLIES: dict[str, str | int] = {"reply stops": "hold", "reply trickles": "dribble"}

# By the kernel: a tmpfs that is too small, an ext4 that is frozen or whose disk goes away, FUSE.
LOCAL = ("disk full", "file system hangs", "disk dies", "EIO", "short writes")
IN_FUSE = {"EIO": "EIO", "short writes": "short", "short reads": "short", "reads hang": "hang"}

# Of one rank, or of all of them.
PROCESSES: dict[str, signal.Signals] = {"SIGKILL": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP}
AT_A_REQUEST = tuple(f"{name} at a request" for name in PROCESSES)

LOADING = ", loading"
"""The end of the names of faults that befall a load."""

FAULTS = (
    *NETWORK,
    *LOCAL,
    *AT_A_REQUEST,
    *(f"{name} at a system call" for name in PROCESSES),
    *(fault + LOADING for fault in (
        "delay", "throttling", "reset in mid-body", "half-close", "truncated reply", "corrupted reply", "500",
        "503 SlowDown", "403 after expiry", "no answer", "slow-loris", *REPLIES,
        "disk dies", "EIO", "short reads", "reads hang", *AT_A_REQUEST,
    )),
)  # fmt: skip

WRITING = ("mkdir", "open", "writev", "fsync", "close", "replace", "link", "unlink")
READING = ("open", "preadv", "close")
_open, _close = os.open, os.close  # before `install` puts others in their place
_FIFREEZE, _FITHAW = 0xC0045877, 0xC0045878
_LOOP_SET_STATUS64, _LOOP_GET_STATUS64, _SIZE_LIMIT_AT = 0x4C04, 0x4C05, 32


@dataclass(frozen=True)
class Trial:
    """One save or load, and the fault in it.

    Attributes:
        first: there is no checkpoint at the place yet. (What is loaded is always there.)
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
    def loads(self) -> bool:
        return self.fault.endswith(LOADING)

    @property
    def kind(self) -> str:
        """The fault, whatever it befalls."""
        return self.fault.removesuffix(LOADING)

    @property
    def on_s3(self) -> bool:
        return self.kind in NETWORK or self.kind in REPLIES or self.kind in AT_A_REQUEST

    @property
    def signal(self) -> signal.Signals | None:
        return PROCESSES.get(self.kind.split()[0])


def draw(seed: int) -> Trial:
    """Draw the trial of a seed; as many seeds in a row as there are faults have each one once."""
    chance = random.Random(seed)
    fault = FAULTS[seed % len(FAULTS)]
    ranks = chance.randint(1, 3)
    loads = fault.endswith(LOADING)
    on_s3 = fault.removesuffix(LOADING) in (*NETWORK, *REPLIES, *AT_A_REQUEST)
    most = (4 + 4 * ranks if on_s3 else 20) if loads else (10 + 9 * ranks if on_s3 else 40)
    return Trial(
        seed=seed,
        fault=fault,
        ranks=ranks,
        first=chance.random() < 0.3 and not loads,
        in_background=chance.random() < 0.3,
        position=chance.randint(1, most),
        lasts=chance.random() < 0.5,
        carried_out=chance.random() < 0.5,
        resumes=ranks == 1 or chance.random() < 0.5,
        victims=tuple(range(ranks)) if chance.random() < 0.2 else (chance.randrange(ranks),),
        fraction=chance.random(),
    )


# -- between the client and the server -------------------------------------------------------------


def network_rule(trial: Trial, pids: list[int], happened: Callable[[], None]) -> Rule:
    """Return the proxy's rule; it calls `happened` when the fault begins."""
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
            return {**NETWORK, **REPLIES}[trial.kind]
        if number == trial.position:
            happened()
            for victim in trial.victims:
                os.kill(pids[victim], trial.signal)
            return "pass" if trial.carried_out else "reset"
        return "pass"

    return rule


# -- in a rank -------------------------------------------------------------------------------------


def install(trial: Trial, rank: int, place: str, happened: Callable[[], None]) -> None:
    """Have the disk, or this process itself, fail at one of its system calls, as the trial says."""
    at_a_call = trial.kind in ("file system hangs", "disk dies") or trial.kind.endswith("at a system call")
    if not at_a_call or rank not in trial.victims:
        return
    lock, count = threading.Lock(), 0

    def around(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal count
        with lock:
            count += 1
            is_due = count == trial.position
        if not is_due:
            return call(*args, **kwargs)
        if trial.signal is None:
            mount = Path(place).parent
            with contextlib.suppress(OSError):  # another rank has done it
                if trial.kind == "disk dies":
                    _die(mount)
                else:
                    _ioctl(mount, _FIFREEZE)
        happened()
        if trial.signal is not None and not trial.carried_out:
            os.kill(os.getpid(), trial.signal)
        try:
            return call(*args, **kwargs)
        finally:
            if trial.signal is not None and trial.carried_out:
                os.kill(os.getpid(), trial.signal)

    for name in READING if trial.loads else WRITING:
        setattr(os, name, functools.partial(around, getattr(os, name)))


# -- the place -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """A directory to save in.

    Attributes:
        path: where the ranks find it.
        plain: where it is found without faults.
        begin: called when the save or load is to begin.
        mend: ends all faults.
    """

    path: Path
    plain: Path
    begin: Callable[[], None] = lambda: None
    mend: Callable[[], None] = lambda: None


@contextlib.contextmanager
def file_system(trial: Trial, folder: Path, checkpoint_bytes: int, note: Path) -> Iterator[Place]:
    """Make a place to save in, on a file system of its own where the trial needs one.

    `note` gets the time at which a fault of the file system itself begins. Raises CannotMount.
    """
    mount = folder / "disk"
    mount.mkdir()
    if trial.kind == "disk full":
        size = int(checkpoint_bytes * (trial.fraction + (0 if trial.first else 1))) + MIB
        _run("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", mount)
        try:
            yield Place(mount, mount, begin=lambda: note_time(note))
        finally:
            _run("umount", "-l", mount)
    elif trial.kind in ("file system hangs", "disk dies"):
        with _disk(folder, mount, 24 * MIB + 3 * checkpoint_bytes) as place:
            yield place
    elif trial.kind in IN_FUSE:
        orders = Orders(IN_FUSE[trial.kind], trial.loads, trial.position, trial.lasts, str(note))
        with contextlib.ExitStack() as stack:
            try:
                disk = stack.enter_context(fault_disk(folder, mount))
            except OSError as error:
                raise CannotMount(str(error)) from error
            yield Place(mount, disk.source, begin=lambda: disk.give(orders), mend=disk.release)
    else:
        yield Place(mount, mount)


@contextlib.contextmanager
def _disk(folder: Path, mount: Path, size_bytes: int) -> Iterator[Place]:
    """Use a file as a disk, with ext4 on it."""
    image = folder / "image"
    with image.open("wb") as file:
        file.truncate(size_bytes)
    _run("mkfs.ext4", "-q", image)
    device = _run("losetup", "--find", "--show", image)
    try:
        _run("mount", device, mount)
        try:
            yield Place(mount, mount, lambda: _mount_again(device, mount), lambda: _revive(device, mount))
        finally:
            _revive(device, mount)
            _run("umount", "-l", mount)
    finally:
        _run("losetup", "--detach", device)


def _mount_again(device: str, mount: Path) -> None:
    """Have everything read again; what was not yet written is lost if the disk has died."""
    _run("umount", mount)
    _run("mount", device, mount)


def _revive(device: str, mount: Path) -> None:
    """Let a frozen file system go on, and a disk that went away come back."""
    with contextlib.suppress(OSError):
        _ioctl(mount, _FITHAW)
    if _limit_size(device, 0):
        _run("umount", "-l", mount)
        _run("mount", device, mount)


def _die(mount: Path) -> None:
    """Have reads and writes of the disk fail with EIO: no block is behind the first any more."""
    _limit_size(f"/dev/loop{os.minor(os.stat(mount).st_dev)}", 512)


def _limit_size(device: str, size_bytes: int) -> bool:
    """Use only so many bytes of a loop device's file (0: all); return whether that is a change."""
    fd = _open(device, os.O_RDONLY)
    try:
        status = bytearray(232)
        fcntl.ioctl(fd, _LOOP_GET_STATUS64, status)
        before = struct.unpack_from("Q", status, _SIZE_LIMIT_AT)[0]
        struct.pack_into("Q", status, _SIZE_LIMIT_AT, size_bytes)
        fcntl.ioctl(fd, _LOOP_SET_STATUS64, status)
        return bool(before != size_bytes)
    finally:
        _close(fd)


class CannotMount(Exception):
    """This machine or user cannot mount file systems."""


def _run(*command: object) -> str:
    try:
        process = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    except OSError as error:
        raise CannotMount(str(error)) from error
    if process.returncode:
        raise CannotMount(f"{command[0]}: {process.stderr.strip()}")
    return process.stdout.strip()


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
