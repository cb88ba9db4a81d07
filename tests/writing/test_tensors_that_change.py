"""A tensor that changes while it is saved: the save fails and names it, or what is stored has its checksum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.backends import posix
from ckpt.errors import SaveFailed

_ELEMENTS = 3 << 20  # two parts of a file


def _sweep_of_a_fused_optimizer(tensor: torch.Tensor) -> None:
    parameter = torch.nn.Parameter(tensor.detach())
    parameter.grad = torch.ones_like(parameter)
    torch.optim.AdamW([parameter], fused=True).step()


CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "one element": lambda tensor: tensor[12_345].add_(1),
    "a view": lambda tensor: tensor.view(3, -1)[1:, 7].mul_(2),
    "foreach": lambda tensor: torch._foreach_mul_([tensor], 2.0),
    "data": lambda tensor: tensor.data.add_(1),
    "NumPy": lambda tensor: tensor.numpy().fill(3),
    "a fused optimizer": _sweep_of_a_fused_optimizer,
}


def changing(
    monkeypatch: pytest.MonkeyPatch, tensor: torch.Tensor, change: Callable[[torch.Tensor], object]
) -> None:
    """Change the tensor when its checksums are known, and before the first byte is written."""
    write_all, todo = posix._write_all, [change]

    def changed_before(fd: int, buffers: Sequence[memoryview]) -> None:
        if todo and sum(buffer.nbytes for buffer in buffers) > 1 << 20:
            todo.pop()(tensor)
        write_all(fd, buffers)

    monkeypatch.setattr(posix, "_write_all", changed_before)


@pytest.mark.parametrize("how", CHANGES)
def test_the_save_fails_and_names_the_tensor(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ckpt.save({"other": torch.ones(30_000), "model": {"weight": torch.full((_ELEMENTS,), 4.0)}}, tmp_path)
    state: dict[str, Any] = {"other": torch.zeros(30_000), "model": {"weight": torch.ones(_ELEMENTS)}}
    changing(monkeypatch, state["model"]["weight"], CHANGES[how])
    with pytest.raises(SaveFailed, match=r"'model\.weight' was changed while it was saved"):
        ckpt.save(state, tmp_path)
    ckpt.load(state, tmp_path)
    assert torch.equal(state["model"]["weight"], torch.full((_ELEMENTS,), 4.0))


def test_tensors_that_do_not_count_their_changes_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch.inference_mode():
        tensor = torch.ones(_ELEMENTS)

    def change(tensor: torch.Tensor) -> None:
        with torch.inference_mode():
            tensor[77] = 5

    changing(monkeypatch, tensor, change)
    ckpt.save({"t": tensor}, tmp_path)
    loaded = torch.zeros(_ELEMENTS)
    ckpt.load({"t": loaded}, tmp_path)
    assert torch.equal(loaded, torch.ones(_ELEMENTS))


def test_a_copy_may_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.ones(_ELEMENTS)
    changing(monkeypatch, tensor, lambda tensor: tensor.add_(1))
    ckpt.async_save({"t": tensor}, tmp_path).result(60)
    loaded = torch.zeros(_ELEMENTS)
    ckpt.load({"t": loaded}, tmp_path)
    assert torch.equal(loaded, torch.ones(_ELEMENTS))
    assert tensor[0] == 2
