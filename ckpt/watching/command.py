"""Run a command for a checkpoint: again if it fails, and ended with all that it started."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Literal

from ckpt.consistency import environment
from ckpt.errors import ConfigurationError, StorageError
from ckpt.watching.sights import WatchedCheckpoint

_logger = logging.getLogger(__name__)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_GRACE_S = 10.0
"""How long a command that is to end has for that."""

_PLACEHOLDER = re.compile(r"\{(url|path|step|id)\}")

Outcome = Literal["done", "failed", "removed"]


@dataclass(frozen=True)
class Execution:
    """The end of a command for one checkpoint.

    Attributes:
        outcome: `removed` if it failed, and the checkpoint is not there any more.
        problem: why the last attempt failed; None if it did not.
        exit_code: that of the last attempt; negative is a signal, None if it did not start.
    """

    outcome: Outcome
    attempts: int
    exit_code: int | None
    took_s: float
    problem: str | None


class Signals:
    """Raise KeyboardInterrupt for SIGINT, SIGTERM and SIGHUP, but never while `held`; in the main thread.

    A command is in a session of its own: when a terminal closes, nothing else would end it.

    Attributes:
        last: the signal that came last.
    """

    def __init__(self) -> None:
        self.last = signal.SIGTERM
        self._is_held = self._came = False

    @contextlib.contextmanager
    def caught(self) -> Iterator[None]:
        """Catch the signals in the block."""
        signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        caught = [each for each in signals if signal.getsignal(each) != signal.SIG_IGN]  # as nohup has it
        before = {each: signal.signal(each, self._handle) for each in caught}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Put off a signal that comes in the block until its end."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
            if self._came:
                self._came = False
                raise KeyboardInterrupt

    def _handle(self, number: int, _: FrameType | None) -> None:
        self.last = signal.Signals(number)
        if self._is_held:
            self._came = True
        else:
            raise KeyboardInterrupt


class Command:
    """A command for checkpoints, without a shell: names in a checkpoint's place cannot become commands.

    Args:
        text: words as a shell reads them. In each, `{url}`, `{path}`, `{step}` and `{id}` are
            replaced; the same are in the environment, as `CKPT_URL`, ...
        retries: how often it is tried again after a failure.
        timeout_s: how long one attempt may take.
        stdout: the file descriptor that its output goes to, if not that of this process.
    """

    def __init__(
        self,
        text: str,
        *,
        retries: int = 2,
        timeout_s: float | None = None,
        stdout: int | None = None,
        signals: Signals | None = None,
        on_failure: Callable[[WatchedCheckpoint, int, str], object] = lambda *_: None,
    ) -> None:
        try:
            self._words = shlex.split(text)
        except ValueError as error:
            raise ConfigurationError(f"the command cannot be read: {error}") from None
        if not self._words:
            raise ConfigurationError("the command is empty")
        if "{" not in self._words[0] and shutil.which(self._words[0]) is None:
            raise ConfigurationError(f"the command {self._words[0]!r} is not there, or cannot be executed")
        self._retries, self._timeout_s, self._stdout = retries, timeout_s, stdout
        self._signals = signals or Signals()
        self._on_failure = on_failure

    def run(self, checkpoint: WatchedCheckpoint, is_there: Callable[[WatchedCheckpoint], bool]) -> Execution:
        """Run the command until it succeeds, or its attempts are used up, or the checkpoint is gone."""
        began_s, pause_s = environment.monotonic(), _FIRST_PAUSE_S
        for attempt in range(1, self._retries + 2):
            exit_code, problem = self._attempt(checkpoint, attempt)
            outcome: Outcome = "done" if problem is None else "failed"
            if problem is not None and not _is_there(checkpoint, is_there):
                outcome = "removed"
            took_s = environment.monotonic() - began_s
            if outcome != "failed" or attempt > self._retries:
                break
            self._on_failure(checkpoint, attempt, f"{problem}; again in {pause_s:.0f} s")
            environment.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return Execution(outcome, attempt, exit_code, took_s, problem)

    def _attempt(self, checkpoint: WatchedCheckpoint, attempt: int) -> tuple[int | None, str | None]:
        """Run the command once; return its exit code, and why it failed."""
        facts = {
            "url": checkpoint.url,
            "path": checkpoint.path,
            "step": "" if checkpoint.step is None else str(checkpoint.step),
            "id": checkpoint.id,
        }
        environ = {f"CKPT_{name.upper()}": value for name, value in facts.items()}
        words = [_filled_in(word, facts) for word in self._words]
        process: subprocess.Popen[bytes] | None = None
        try:
            with self._signals.held():  # else a process could start that nobody knows of
                process = subprocess.Popen(
                    words,
                    stdin=subprocess.DEVNULL,
                    stdout=self._stdout,
                    env={**os.environ, **environ, "CKPT_ATTEMPT": str(attempt)},
                    start_new_session=True,
                )
            exit_code = process.wait(self._timeout_s)
        except (OSError, ValueError) as error:  # a key of S3 may hold a NUL, which no argument can
            return None, f"it cannot be started: {getattr(error, 'strerror', error)}"
        except subprocess.TimeoutExpired:
            assert process is not None
            _end(process, signal.SIGTERM)
            if process.returncode is None:  # another attempt would run beside it
                raise ConfigurationError(
                    f"the command (process {process.pid}) did not end within {self._timeout_s:g} s, and cannot be "
                    "ended: does it run as another user?"
                ) from None
            return process.returncode, f"it did not end within {self._timeout_s:g} s"
        except BaseException:
            if process is not None:
                _end(process, self._signals.last)
            raise
        if exit_code < 0:
            return exit_code, f"it was ended by {_signal_name(-exit_code)}"
        return exit_code, f"exit code {exit_code}" if exit_code else None


def _is_there(checkpoint: WatchedCheckpoint, is_there: Callable[[WatchedCheckpoint], bool]) -> bool:
    try:
        return is_there(checkpoint)
    except StorageError:
        return True  # another attempt will show


def _filled_in(word: str, facts: dict[str, str]) -> str:
    return _PLACEHOLDER.sub(lambda match: facts[match[1]], word)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _end(process: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to the process and all that it started; kill what is left after a while.

    One of another user (`sudo`) can go on: then `returncode` stays None, and a line says so.
    """
    try:
        _send(process, number)
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        pass
    finally:  # a second signal, too: nothing waits any longer, and no attempt follows
        _send(process, signal.SIGKILL)
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            _logger.warning("the command (process %d) could not be ended, and goes on", process.pid)


def _send(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
