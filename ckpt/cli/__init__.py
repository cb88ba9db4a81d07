"""The `ckpt` command: arguments and output of each verb. The work is done in `ckpt.tools` and its like."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import NoReturn

from ckpt.cli.printing import streams


def main() -> None:
    """Run the command with the arguments of this process. Ctrl-C ends it at once while nothing is to be cleaned up."""
    streams.replace_standard_streams()
    signal.signal(signal.SIGINT, _leave)
    from ckpt.cli.app import app
    from ckpt.cli.printing.output import code_after_output

    try:
        app(prog_name="ckpt")
    except SystemExit as ended:
        sys.exit(code_after_output(ended.code))


def _leave(*_: object) -> NoReturn:
    with contextlib.suppress(OSError):  # such as a full disk
        os.write(2, b"interrupted\n")
    os._exit(130)
