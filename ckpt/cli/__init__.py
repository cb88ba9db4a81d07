"""The `ckpt` command: arguments and output of each verb. The work is done in `ckpt.tools` and its like."""

from __future__ import annotations

import os
import signal
from typing import NoReturn


def main() -> None:
    """Run the command with the arguments of this process. Ctrl-C ends it at once while nothing is to be cleaned up."""
    signal.signal(signal.SIGINT, _leave)
    from ckpt.cli.app import app

    app()


def _leave(*_: object) -> NoReturn:
    os.write(2, b"interrupted\n")
    os._exit(130)
