"""Fork a fresh process for every measurement from an interpreter that has imported torch already."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

from benchmarks.run.servers import ROOT

__all__ = ["Forks"]


class Forks:
    """`python -m benchmarks.run.worker --serve`, its standard input and output.

    Args:
        python: the interpreter of the environment that is measured.
        environment: its environment variables; each task brings its own.
    """

    def __init__(self, python: Path, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [str(python), "-m", "benchmarks.run.worker", "--serve"],
            cwd=ROOT, env=environment, text=True, start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def run(
        self, asked: Path, answered: Path, errors: Path, environment: Mapping[str, str], timeout_s: float
    ) -> int:
        """Have the task in file `asked` done by a new process; return its exit status.

        Raises:
            TimeoutError: it took too long. It has been ended, and this object is of no more use.
            OSError: the interpreter is gone; says why.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        request = [str(asked), str(answered), str(errors), dict(environment)]
        try:
            print(json.dumps(request), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            pass
        else:
            if not select.select([self._process.stdout], [], [], timeout_s)[0]:
                self.close()
                raise TimeoutError(f"took longer than {timeout_s:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise OSError(" ".join(self._process.stderr.read().strip().splitlines()[-4:]))
        return int(line)

    def close(self) -> None:
        """End the interpreter and its measurement."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()
