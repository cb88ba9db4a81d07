"""Load what the tests need where they run: not in the controller of pytest-xdist, for which its workers wait."""

from __future__ import annotations

import signal

import pytest


def pytest_configure(config: pytest.Config) -> None:
    # Programs begun in the background ignore Ctrl-C, and so would all that they begin.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(config, "workerinput") or config.getoption("dist", "no") == "no":
        config.pluginmanager.import_plugin("support.fixtures")
