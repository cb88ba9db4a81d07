"""Probe a mount: the calls that give a file its name, their durability, and the free space."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator

from ckpt.consistency import environment
from ckpt.consistency.probes.examine import Finding, Subject, Verdict

_LOW_BYTES = 1 << 30
_NOT_KNOWN_BYTES = 1 << 50
"""The free space that rclone reports when it cannot know; s3fs reports more."""
_ABSURD_BYTES = 1 << 60


def names(subject: Subject) -> Iterator[Finding]:
    """Try hard links, which take a name once, and renames, which replace a file."""
    directory = subject.first.store.directory
    if directory is None:
        return
    old, new, name = (os.path.join(directory, "names", text) for text in ("old", "new", "name"))
    for key, data in (("names/old", b"old"), ("names/new", b"new")):
        subject.first.put(key, data)
    subject.first.written.add("names/name")
    refused = _refused(lambda: os.link(old, name))
    if refused is not None:
        yield Finding(
            "hard links", Verdict.CAREFUL, f"refused: {refused}",
            "the library looks, then renames, which is not atomic: give every place one writer at a time", {"works": False},
        )  # fmt: skip
        os.rename(old, name)
    elif _refused(lambda: os.link(new, name)) is None:
        yield Finding(
            "hard links", Verdict.PROBLEM, "a name that was taken was taken again",
            "two saves at one place replace each other", {"works": False},
        )  # fmt: skip
    else:
        yield Finding("hard links", Verdict.FINE, "a name is taken once", measured={"works": True})
    os.rename(new, name)
    with open(name, "rb") as file:
        replaced = file.read() == b"new"
    if replaced:
        yield Finding("rename over a file", Verdict.FINE, "replaces it", measured={"works": True})
    else:
        advice = "saves that replace a checkpoint are not safe here"
        yield Finding("rename over a file", Verdict.PROBLEM, "does not replace it", advice, {"works": False})


def durability(subject: Subject) -> Iterator[Finding]:
    """Time fsync of a file and of a directory."""
    directory = subject.first.store.directory
    if directory is None:
        return
    subject.first.put("durability/first", b"file")
    subject.first.written.add("durability/second")
    path = os.path.join(directory, "durability")
    for what, sync in (
        ("a file", lambda: _write(os.path.join(path, "second"))),
        ("a directory", lambda: _fsync(path)),
    ):
        began_s = environment.monotonic()
        refused = _refused(sync)
        took_s = environment.monotonic() - began_s
        if refused is not None:
            advice = (
                "after a power loss a name, or what is behind it, may be gone; ask what the mount promises"
            )
            yield Finding(
                f"fsync of {what}", Verdict.CAREFUL, f"refused: {refused}", advice, {"works": False}
            )
        else:
            result = f"works, {1000 * took_s:.2g} ms"
            yield Finding(
                f"fsync of {what}", Verdict.FINE, result, measured={"works": True, "took_s": took_s}
            )


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
        yield Finding(
            "free space", Verdict.PROBLEM, f"{result}, but room for {stat.f_favail} files", advice, measured
        )
    elif free_bytes < _LOW_BYTES:
        yield Finding("free space", Verdict.CAREFUL, result, advice, measured)
    else:
        yield Finding("free space", Verdict.FINE, result, measured=measured)


def _write(path: str) -> None:
    with open(path, "wb") as file:
        file.write(b"file")
        file.flush()
        os.fsync(file.fileno())


def _fsync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _refused(call: Callable[[], object]) -> str | None:
    """Return the file system's refusal of `call`; None if it worked. Errors of disks and networks are raised."""
    try:
        call()
    except OSError as error:
        if error.errno in (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ESTALE, errno.ENOTCONN, errno.ENOENT):
            raise
        return error.strerror or str(error)
    return None
