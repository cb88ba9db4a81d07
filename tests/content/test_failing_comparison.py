"""A rank that cannot compare its replicas fails the save on all ranks, which name it; none waits for another."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from support.ranks import run_ranks

import ckpt
from ckpt.content import replicas
from ckpt.errors import SaveFailed
from ckpt.writing import column_save


@pytest.mark.parametrize(
    ("place", "culprit"), [("begin", 1), ("digests", 1), ("details", 1), ("details", 0), ("differences", 0)]
)
def test_a_failing_comparison_fails_the_save(place: str, culprit: int, tmp_path: Path) -> None:
    run_ranks(2, _save, place, culprit, str(tmp_path))
    assert not [*(tmp_path / "step-1").rglob("*.distcp")]


def _save(rank: int, place: str, culprit: int, root: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if rank == culprit:
            patched: Any = column_save if place == "differences" else replicas.Replicas
            patch.setattr(patched, "__init__" if place == "begin" else place, _fail)
        state = {"model": {"w": torch.randn(10) + rank}}
        with pytest.raises(SaveFailed, match="out of order") as failed:
            ckpt.save(state, f"{root}/step-1", timeout_s=30)
    assert list(failed.value.failures) == [culprit]
    assert "not known" not in str(failed.value)
    # The ranks still go together.
    ckpt.save(state, f"{root}/saved/step-1")
    ckpt.load(state, f"{root}/saved/step-1")


def _fail(*args: Any, **kwargs: Any) -> NoReturn:
    raise RuntimeError("out of order")
