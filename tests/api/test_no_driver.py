"""A build of torch for an accelerator, on a node without its driver: a login node, CI."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.state.random_state import RandomState
from ckpt.trainer_integration import saving
from ckpt.tuning.trial import made_state


@pytest.fixture(autouse=True)
def _built_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_accelerator_getAccelerator", lambda: torch.device("cuda"))
    assert torch.accelerator.current_accelerator() == torch.device("cuda")
    assert not torch.accelerator.is_available()


def test_trials_of_tune_are_on_the_cpu() -> None:
    assert {tensor.device.type for tensor in made_state(1 << 20).values()} == {"cpu"}


@pytest.mark.parametrize("mode", ["off", "thread"])
def test_saves_and_restores(mode: Any, tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    with ckpt.CheckpointManager(tmp_path / "run", save=saving.every_steps(1), async_mode=mode) as manager:
        assert manager.step(1, model=model, optimizer=optimizer)
    with ckpt.CheckpointManager(tmp_path / "run", save=saving.every_steps(1)) as manager:
        fresh = torch.nn.Linear(2, 2)
        assert manager.restore(model=fresh, optimizer=torch.optim.AdamW(fresh.parameters()))
    future = ckpt.async_save({"w": torch.ones(3), "rng": RandomState()}, tmp_path / "other")
    future.result(60)
    ckpt.save(model.state_dict(), tmp_path / "hf", format="safetensors")
    ckpt.load({"w": torch.zeros(3), "rng": RandomState()}, tmp_path / "other")
