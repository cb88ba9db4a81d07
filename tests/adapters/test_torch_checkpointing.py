"""Inside torch_checkpointing: what its users do with a storage."""

from __future__ import annotations

from adapters.environments import run_inside


def test_uses() -> None:
    run_inside("torch_checkpointing")
