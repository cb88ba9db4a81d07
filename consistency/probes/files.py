"""Probe a mount: the calls that give a file its name, their durability, and the free space."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from ckpt.backends.paths import link_refusal
from ckpt.consistency import environment
from ckpt.consistency.probes.examine import Finding, Subject, Verdict

_LOW_BYTES = 1 << 30
_NOT_KNOWN_BYTES = 1 << 50
"""The free space that rclone reports when it cannot know; s3fs reports more."""
_ABSURD_BYTES = 1 << 60


def names(subject: Subject) -> Iterator[Finding]:
    """Try hard links, which take a name once, and renames, which replace a file."""
    if subject.first.store.directory is None:
        return
    folder = Path(subject.first.store.directory, "names")
    old, new, name = folder / "old", folder / "new", folder / "name"
    subject.first.put("names/old", b"old")
    subject.first.put("names/new", b"new")
    subject.first.written.add("names/name")
    if (refusal := link_refusal(old, name)) is not None:
        advice = "the library looks, then renames, which is not atomic: give every place one writer at a time"
        yield Finding("hard links", Verdict.CAREFUL, f"refused: {refusal.strerror}", advice, {"works": False})
        os.rename(old, name)
    elif link_refusal(new, name) is None:
        result, advice = "a name that was taken was taken again", "two saves at one place replace each other"
        yield Finding("hard links", Verdict.PROBLEM, result, advice, {"works": False})
    else:
        yield Finding("hard links", Verdict.FINE, "a name is taken once", measured={"works": True})
    os.rename(new, name)
    if name.read_bytes() == b"new":
        yield Finding("rename over a file", Verdict.FINE, "replaces it", measured={"works": True})
    else:
        advice = "saves that replace a checkpoint are not safe here"
        yield Finding("rename over a file", Verdict.PROBLEM, "does not replace it", advice, {"works": False})


def durability(subject: Subject) -> Iterator[Finding]:
    """Time fsync of a file and of a directory."""
    if subject.first.store.directory is None:
        return
    folder = Path(subject.first.store.directory, "durability")
    subject.first.put("durability/first", b"file")
    subject.first.written.add("durability/second")
    for kind, sync in (
        ("a file", lambda: _write_durably(folder / "second")),
        ("a directory", lambda: _fsync(folder)),
    ):
        check = f"fsync of {kind}"
        began_s = environment.monotonic()
        refusal = _refusal(sync)
        took_s = environment.monotonic() - began_s
        if refusal is None:
            measured = {"works": True, "took_s": took_s}
            yield Finding(check, Verdict.FINE, f"works, {1000 * took_s:.2g} ms", measured=measured)
        else:
            advice = (
                "after a power loss a name, or what is behind it, may be gone; ask what the mount promises"
            )
            yield Finding(check, Verdict.CAREFUL, f"refused: {refusal}", advice, {"works": False})


def space(subject: Subject) -> Iterator[Finding]:
    """Measure the space that is left for this user."""
    directory = subject.first.store.directory
    if directory is None:
        yield Finding("free space", Verdict.UNKNOWN, "this storage does not tell")
        return
    stat = os.statvfs(directory)
    free_bytes = stat.f_bavail * stat.f_frsize
    measured = {"free_bytes": free_bytes, "free_files": stat.f_favail if stat.f_files else None}
    if free_bytes == _NOT_KNOWN_BYTES or free_bytes >= _ABSURD_BYTES:
        yield Finding("free space", Verdict.UNKNOWN, "this mount does not tell", measured=measured)
        return
    result = f"{free_bytes / 2**30:,.1f} GiB"
    advice = "a save needs room for the new checkpoint beside the one that it replaces"
    if stat.f_files and stat.f_favail < 1000:
        result += f", but room for {stat.f_favail} files"
        yield Finding("free space", Verdict.PROBLEM, result, advice, measured)
    elif free_bytes < _LOW_BYTES:
        yield Finding("free space", Verdict.CAREFUL, result, advice, measured)
    else:
        yield Finding("free space", Verdict.FINE, result, measured=measured)


def _write_durably(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        file.write(b"file")
        os.fsync(file.fileno())


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _refusal(call: Callable[[], object]) -> str | None:
    """Return the file system's refusal of `call`, if any. Raises errors of disks and networks."""
    try:
        call()
    except OSError as error:
        if error.errno in (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ESTALE, errno.ENOTCONN, errno.ENOENT):
            raise
        return error.strerror or str(error)
    return None
