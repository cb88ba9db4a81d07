"""Inside torch_checkpointing: what its users do with a storage."""

from __future__ import annotations

import pytest

from adapters.environments import run_inside


@pytest.mark.timeout(700)
def test_uses() -> None:
    run_inside("torch_checkpointing")
