"""Load what the tests need where they run: not in the controller of pytest-xdist, for which its workers wait."""

from __future__ import annotations

import os
import signal

import pytest


def pytest_configure(config: pytest.Config) -> None:
    # A test has little to compute, and many run at once: threads that wait for each other only heat the cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Programs begun in the background ignore Ctrl-C, and so would all that they begin.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(config, "workerinput") or config.getoption("dist", "no") == "no":
        config.pluginmanager.import_plugin("support.fixtures")
