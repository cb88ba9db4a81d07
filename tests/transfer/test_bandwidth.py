"""The bandwidth cap: every byte sent has waited for its turn."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from support.servers import S3Server

import ckpt
from ckpt.errors import ConfigurationError
from ckpt.transfer import bandwidth as pacing


class Clock:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(pacing, "time", clock)
    return clock


def test_bytes_take_their_time(clock: Clock) -> None:
    pacer = pacing.Pacer(10_000_000)
    for _ in range(100):
        pacer.wait(1_000_000)
    pacer.wait(0)
    assert 9.9 <= clock.now_s - 1000.0 <= 10.0


def test_a_pause_gives_no_credit(clock: Clock) -> None:
    pacer = pacing.Pacer(10_000_000)
    clock.now_s += 3600
    for _ in range(10):
        pacer.wait(10_000_000)
    assert clock.now_s - 4600.0 > 8.9


@pytest.mark.parametrize("rate", [0, -1, 999_999, math.nan])
def test_too_little_is_refused(tmp_path: Path, rate: float) -> None:
    with pytest.raises(ConfigurationError, match="max_bandwidth_bytes_per_s must be at least 1000000"):
        ckpt.CheckpointWriter(tmp_path, max_bandwidth_bytes_per_s=rate)
    with pytest.raises(ConfigurationError, match="max_bandwidth_bytes_per_s"):
        ckpt.save({}, tmp_path, max_bandwidth_bytes_per_s=rate)


@pytest.mark.parametrize("kind", ["posix", "s3", "s3fs"])
def test_every_byte_of_a_save_is_paced(
    kind: str, tmp_path: Path, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    monkeypatch.setattr(pacing.Pacer, "wait", lambda self, nbytes: sent.append(nbytes))
    url, options = {
        "posix": (str(tmp_path / "c"), {}),
        "s3": (f"s3://{s3.new_bucket()}/c", {**s3.options, "part_size_bytes": 5 << 20}),
        "s3fs": (f"fsspec+s3://{s3.new_bucket()}/c", s3.options),
    }[kind]
    state = {"large": torch.ones(3_000_000), "small": torch.ones(10), "object": "x"}
    metadata = ckpt.save(state, url, storage_options=options, max_bandwidth_bytes_per_s=1e9)
    stored = sum(info.length for info in metadata.storage_data.values())
    assert stored <= sum(sent) <= stored + 256
    if kind == "s3":
        assert max(sent) <= 256 << 10
