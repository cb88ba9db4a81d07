"""The adapter for Lightning beyond the law: resuming, retention, asynchronous saves, errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from adapters.environments import run_tests


@pytest.mark.timeout(700)
@pytest.mark.xdist_group("lightning")
def test_the_checks_of_lightning() -> None:
    checks = Path(__file__).with_name("lightning_checks.py")
    run_tests("lightning", checks)
