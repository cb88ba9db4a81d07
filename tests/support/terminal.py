"""A terminal, to run real processes on and to see what a person would see."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import pyte

if TYPE_CHECKING:
    from typing_extensions import Self

CKPT = str(Path(sys.executable).parent / "ckpt")
_UNSET = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "CKPT_DEBUG")


class Terminal:
    """A process on a terminal of its own; `screen` is what it shows, `raw` all that the process has written.

    Args:
        stdout: the file for its standard output, instead of the terminal.
    """

    def __init__(
        self,
        *command: object,
        columns: int = 80,
        lines: int = 24,
        environment: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stdout: int | None = None,
    ) -> None:
        self.screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self.screen)
        self.raw = bytearray()
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        inherited = {name: value for name, value in os.environ.items() if name not in _UNSET}
        self.process = subprocess.Popen(
            ["setsid", "--ctty", *map(str, command)],  # so that Ctrl-C reaches it, as from a keyboard
            stdin=theirs,
            stdout=theirs if stdout is None else stdout,
            stderr=theirs,
            env={**inherited, "TERM": "xterm-256color", **(environment or {})},
            cwd=cwd,
        )
        os.close(theirs)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        os.close(self._ours)

    @property
    def text(self) -> str:
        """The screen's lines, without spaces at their ends."""
        return "\n".join(line.rstrip() for line in self.screen.display).rstrip()

    @property
    def written(self) -> str:
        """All that was written, without escape sequences."""
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.raw.decode(errors="replace")).replace("\r\n", "\n")

    def press(self, keys: str) -> None:
        """Type keys; `\\x03` is Ctrl-C."""
        os.write(self._ours, keys.encode())

    def wait_until(self, seen: Callable[[str], object], timeout_s: float = 60.0) -> str:
        """Wait until the screen shows something; return the screen."""
        deadline = time.monotonic() + timeout_s
        while not seen(self.text):
            assert time.monotonic() < deadline, f"not seen:\n{self.text}"
            assert self._read(deadline), f"the process ended before it was seen:\n{self.written}"
        return self.text

    def wait(self, timeout_s: float = 60.0) -> int:
        """Wait until the process ends; return its exit code."""
        deadline = time.monotonic() + timeout_s
        while self._read(deadline):
            assert time.monotonic() < deadline, f"still running:\n{self.text}"
        return self.process.wait(max(1.0, deadline - time.monotonic()))

    def _read(self, deadline: float) -> bool:
        """Read what the process has written; False if it has closed the terminal."""
        ready, _, _ = select.select([self._ours], [], [], max(0.0, min(0.2, deadline - time.monotonic())))
        if not ready:
            return True
        part = b""
        with contextlib.suppress(OSError):
            part = os.read(self._ours, 1 << 16)
        self.raw += part
        self._stream.feed(part)
        return bool(part)


def run_on_screen(*command: object, columns: int = 80, lines: int = 60, timeout_s: float = 60.0) -> str:
    """Run a command on a terminal; return what it shows at the end."""
    with Terminal(*command, columns=columns, lines=lines) as terminal:
        terminal.wait(timeout_s)
        return terminal.text
