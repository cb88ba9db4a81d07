"""The adapter for Ray Train beyond the law: workers that Ray starts again, nodes that it drains, errors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import ckpt
from adapters.environments import python_of, run_tests
from adapters.life import Kill, Life
from adapters.test_law import HOSTS, life_of, run_life

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.timeout(1500)]
(RAY,) = (host for host in HOSTS if host.name == "ray_train")


def test_the_checks_of_ray() -> None:
    checks = Path(__file__).with_name("ray_checks.py")
    run_tests("ray", checks)


def test_ray_goes_on_after_a_worker_was_killed_in_a_save(tmp_path: Path) -> None:
    kill = Kill(1, "step-00000004", "data")
    life, report, result = run_ray(tmp_path, kill, {"die_once": True})
    assert report["resumed_step"] == 2
    assert result == {"checkpoint": f"{life.root}/run/step-00000006", "metrics": {"step": 6, "loss": 1 / 6}}
    steps = [each.step for each in ckpt.list_checkpoints(life.root) if each.state == "committed"]
    assert steps == [4, 6]  # keep=2


def test_a_node_that_ray_drains_is_saved_before_it_goes(tmp_path: Path) -> None:
    life, report, result = run_ray(tmp_path, None, {"drain_at": 5, "async_mode": "thread"})
    assert report["resumed_step"] is None
    assert result["checkpoint"] == f"{life.root}/run/step-00000006"  # it trained on to its end
    steps = [each.step for each in ckpt.list_checkpoints(life.root) if each.state == "committed"]
    assert steps == [5, 6]


def run_ray(folder: Path, kill: Kill | None, options: Mapping[str, Any]) -> tuple[Life, Any, Any]:
    """Train six steps on two workers; return the life, its report, and what Ray's result says."""
    life = replace(life_of(RAY, folder), steps=6, kill=kill, options=options)
    report = run_life(RAY, python_of("ray"), life, world_size=2)
    return life, report, json.loads((Path(life.scratch) / "result.json").read_text())
