"""Inside torchtitan: what its users set, and the upload process, which needs a script of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import ckpt
from adapters.environments import python_of, run_inside
from adapters.test_law import Host, life_of, run_life


@pytest.mark.timeout(700)
def test_uses() -> None:
    run_inside("torchtitan")


def test_async_with_pinned_mem(tmp_path: Path) -> None:
    host = Host("torchtitan", options={"async_mode": "async_with_pinned_mem"})
    python = python_of(host.name)
    life = replace(life_of(host, tmp_path), steps=6)
    assert run_life(host, python, life, world_size=2)["resumed_step"] is None
    assert [each.step for each in ckpt.list_checkpoints(life.root)] == [4, 6]
    again = run_life(host, python, replace(life, steps=7), world_size=1)
    assert again["resumed_step"] == 6
