"""Standard streams that never decide what a command does: closed, full, narrow-coded, or read by a program that has gone."""

from __future__ import annotations

import errno
import io
import os
import select
import sys
from typing import Any, TextIO

_STDIN, _STDOUT, _STDERR = range(3)


class _Sink(io.FileIO):
    """A file that takes all bytes, and drops them from the first failure on.

    Attributes:
        failure: the first error of a write.
    """

    failure: OSError | None = None

    def write(self, data: Any) -> int:
        while self.failure is None:
            try:
                written: int | None = super().write(data)
            except OSError as error:
                self.failure = error
                break
            if written is not None:
                return written
            select.select([], [self], [])  # another program has made the terminal non-blocking
        return memoryview(data).nbytes


def replace_standard_streams() -> None:
    """Open closed streams as `/dev/null`, and let writes to the others never raise.

    Characters that the encoding of an output lacks are escaped. Children inherit the opened descriptors.
    """
    for fd in range(_STDIN, _STDERR + 1):
        try:
            os.fstat(fd)
        except OSError:  # the lowest one that is free is taken
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    sys.stdin = sys.stdin or io.TextIOWrapper(io.FileIO(_STDIN, closefd=False))
    sys.stdout = _writable(_STDOUT, sys.stdout)
    sys.stderr = _writable(_STDERR, sys.stderr)


def _writable(fd: int, before: TextIO | None) -> TextIO:
    """Make a stream for a descriptor, like the one of Python, which is None if it was closed."""
    return io.TextIOWrapper(
        io.BufferedWriter(_Sink(fd, "wb", closefd=False)),
        encoding=getattr(before, "encoding", "utf-8"),
        errors="backslashreplace",
        line_buffering=fd == _STDERR or os.isatty(fd),
        write_through=getattr(before, "write_through", False),
    )


def output_failure() -> OSError | None:
    """Return the first error of a write to standard output, after a flush."""
    sys.stdout.flush()
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    return raw.failure if isinstance(raw, _Sink) else None


def output_is_unread() -> bool:
    """Return True if the program that read standard output has gone."""
    failure = output_failure()
    return failure is not None and failure.errno == errno.EPIPE
