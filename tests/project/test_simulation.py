"""The simulation of thousands of ranks counts what real jobs of a few ranks send, write and read."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.scale.check import check
from benchmarks.scale.network import Bucket, Storage

ROOT = Path(__file__).parents[2]


@pytest.mark.ranks
@pytest.mark.parametrize(("text", "ranks"), [("hsdp2", 4), ("tp2pp2dp2", 8)])
def test_bytes_messages_and_requests_are_those_of_a_job(text: str, ranks: int) -> None:
    """Of a first save, a later one, and a load, phase by phase."""
    rows = check(text, ranks, rounds=1)
    assert len([row for row in rows if row.must_equal]) >= 45
    assert [row for row in rows if not row.is_right] == []
    assert {row.operation for row in rows if row.measured} == {"first save", "later save", "load"}


@pytest.mark.ranks  # it imports torch twice
def test_a_command_prints_all_figures_as_json() -> None:
    command = [
        sys.executable,
        "-m",
        "benchmarks.scale.simulate",
        "--model",
        "t5-small",
        "--ranks",
        "24",
        "--json",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    case = json.loads(done.stdout)
    first, later, load = (case["operations"][name] for name in ("first save", "later save", "load"))
    assert later["phases"]["plan"]["received_bytes"] == 16 * 8  # of those next to it in the tree of ranks
    assert first["phases"]["plan"]["received_bytes"] > 23 * 32
    assert first["others"]["PUT"] == 2 * 23
    assert load["phases"]["manifests"]["requests"]["GET"] == 1
    assert case["data_bytes"] < 24 * case["most_bytes"]


def test_requests_that_come_at_once_wait_for_tokens_of_their_prefix() -> None:
    storage = Storage(latency_s=0.01, writes=Bucket(100.0, 50.0), reads=Bucket(200.0, 50.0))
    assert storage.seconds(Counter(PUT=40), steps=1) == pytest.approx(0.01)
    assert storage.seconds(Counter(PUT=250), steps=1) == pytest.approx(2.01)
    assert storage.seconds(Counter(PUT=250, GET=450), steps=2) == pytest.approx(2.02)
    spread = Storage(latency_s=0.01, writes=Bucket(100.0, 50.0), prefixes=5)
    assert spread.seconds(Counter(PUT=250), steps=1) == pytest.approx(0.01)
