"""The simulation of thousands of ranks counts what real jobs of a few ranks send, write and read."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.scale.check import check
from benchmarks.scale.network import Bucket, Storage


@pytest.mark.ranks
@pytest.mark.parametrize(("text", "ranks"), [("hsdp2", 4), ("tp2pp2dp2", 8)])
def test_bytes_messages_and_requests_are_those_of_a_job(text: str, ranks: int) -> None:
    """Of a first save, a later one, and a load, phase by phase."""
    rows = check(text, ranks, rounds=1)
    assert len([row for row in rows if row.must_equal]) >= 45
    assert [row for row in rows if not row.is_right] == []
    assert {row.operation for row in rows if row.measured} == {"first save", "later save", "load"}


def test_requests_that_come_at_once_wait_for_tokens_of_their_prefix() -> None:
    storage = Storage(latency_s=0.01, writes=Bucket(100.0, 50.0), reads=Bucket(200.0, 50.0))
    assert storage.seconds(Counter(PUT=40), steps=1) == pytest.approx(0.01)
    assert storage.seconds(Counter(PUT=250), steps=1) == pytest.approx(2.01)
    assert storage.seconds(Counter(PUT=250, GET=450), steps=2) == pytest.approx(2.02)
    spread = Storage(latency_s=0.01, writes=Bucket(100.0, 50.0), prefixes=5)
    assert spread.seconds(Counter(PUT=250), steps=1) == pytest.approx(0.01)
