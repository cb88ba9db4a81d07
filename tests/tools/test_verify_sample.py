"""`ckpt verify --sample`: which blocks are drawn, what that finds, and what it says of what it can miss."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.commands import run, run_json
from support.damage import BLOCK_BYTES, Block, blocks_of, flipped, save_small_blocks

import ckpt
from ckpt.acceptance.counted_store import CountedStore, Counts
from ckpt.backends.base import Store
from ckpt.backends.registry import open_store
from ckpt.consistency.sampling import BlockSample
from ckpt.errors import ConfigurationError
from ckpt.tools import record_checks
from ckpt.tools import verify as verifying


class DataReads(CountedStore):
    """Counts what is read of data files alone."""

    def read_into(self, key: str, offset: int, buffers: list[memoryview]) -> None:  # type: ignore[override]
        reads = super().read_into if key.endswith(".distcp") else self._inner.read_into
        reads(key, offset, buffers)

    def read_whole(self, key: str, check: Callable[[int], None]) -> bytearray:
        return self._inner.read_whole(key, check)


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counts:
    """What `ckpt.verify` has read of data files since it was looked at last."""
    counted = Counts()

    def opened(*arguments: object, **more: object) -> Store:
        return DataReads(open_store(*arguments, **more), counted, lambda nbytes: None)  # type: ignore[arg-type]

    monkeypatch.setattr(verifying, "open_store", opened)
    return counted


def saved(place: Path, blocks: int) -> list[Block]:
    save_small_blocks(place, blocks)
    return blocks_of(place)


def found_share(place: Path, rounds: Callable[[], Iterator[list[Block]]], share: float, seeds: int) -> float:
    """Verify samples of damaged checkpoints; return how often damage was found."""
    found = total = 0
    for number, damaged in enumerate(rounds()):
        with flipped(damaged):
            for seed in range(seeds):
                result = ckpt.verify(place, sample=share, seed=1000 * number + seed)
                found, total = found + (not result.ok), total + 1
    return found / total


def test_draws_are_even_and_can_be_repeated() -> None:
    for fraction, sizes in (0.05, [1, 19, 600, 33]), (0.3, [7, 100]), (0.7, [1, 1, 998]), (1.0, [5, 5]):
        drawn: dict[int, int] = {}
        for seed in range(100):
            sample, again = BlockSample.of(fraction, seed), BlockSample.of(fraction, seed)
            begin = 0
            for size in sizes:
                blocks = list(sample.draw(size))
                assert blocks == sorted(set(blocks))
                assert all(0 <= block < size for block in blocks)
                for block in blocks:
                    drawn[begin + block] = drawn.get(begin + block, 0) + 1
                begin += size
            whole = list(again.draw(sum(sizes)))  # however the blocks are spread over files
            assert (sample.blocks, sample.read_blocks) == (sum(sizes), len(whole))
            assert abs(len(whole) - fraction * sum(sizes)) <= 1
        assert sum(drawn.values()) == pytest.approx(100 * fraction * sum(sizes), rel=0.02)
        if fraction >= 0.3:
            assert all(drawn.get(block) for block in range(sum(sizes)))
    # Pinned: a seed means the same blocks in every version.
    assert list(BlockSample.of(0.05, 7).draw(100)) == [13, 29, 48, 66, 83]


def test_neighbours_are_read_at_once() -> None:
    sample = BlockSample.of(1.0, 0)
    assert list(sample.ranges(10 * BLOCK_BYTES + 5, BLOCK_BYTES, 4 * BLOCK_BYTES)) == [
        (0, 4 * BLOCK_BYTES), (4 * BLOCK_BYTES, 8 * BLOCK_BYTES), (8 * BLOCK_BYTES, 10 * BLOCK_BYTES + 5),
    ]  # fmt: skip
    assert sample.blocks == sample.read_blocks == 11


def test_only_the_sample_is_read_and_all_is_said(
    tmp_path: Path, counts: Counts, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "step-1"
    blocks = saved(place, 400)
    monkeypatch.setattr(record_checks, "MIN_SAMPLE_BYTES", 1 << 20)
    whole = ckpt.verify(place, sample=0.1, seed=5)
    assert whole.ok
    assert whole.sample is not None
    assert (whole.sample.blocks, whole.sample.fraction) == (len(blocks), 0.1)
    assert counts.read_bytes == whole.checked_bytes <= 0.1 * len(blocks) * BLOCK_BYTES + BLOCK_BYTES
    assert whole.sample.missed_one == pytest.approx(0.9)
    assert whole.sample.missed_percent == pytest.approx(0.9 ** round(len(blocks) / 100))

    # What it says is what happens: one damaged block in forty, and a tenth is read.
    chosen = random.Random(1)
    rate = found_share(place, lambda: (chosen.sample(blocks, len(blocks) // 40) for _ in range(4)), 0.1, 8)
    missed = BlockSample.of(0.1, 0).missed(len(blocks) // 40)
    assert rate == pytest.approx(1 - missed, abs=0.25)
    # A run of damaged blocks, as of a lost extent, is always found.
    assert found_share(place, lambda: iter([blocks[31:50]]), 0.1, 5) == 1.0

    # The seed of a finding finds it again; the size and the records are checked whatever is drawn.
    with flipped(blocks[7:8]):
        seeds = [seed for seed in range(60) if not ckpt.verify(place, sample=0.1, seed=seed).ok]
        assert (
            run_json("verify", place, "--sample", "10%", "--seed", seeds[0], code=1)["sample"]["seed"]
            == seeds[0]
        )
        ran = run("verify", place, "--sample", "0.1", "--seed", seeds[0])
        assert (ran.code, f"--seed {seeds[0]};" in ran.out) == (1, True)
    blocks[0][0].write_bytes(b"")
    assert next(damage.kind for damage in ckpt.verify(place, sample=1e-9).damages) == "size"


def test_a_small_checkpoint_is_read_whole(tmp_path: Path, stock_place: Path) -> None:
    place = tmp_path / "step-1"
    saved(place, 8)
    ran = run("verify", place, "--sample", "1%")
    assert (ran.code, "read all of 9 blocks: there are few" in ran.out) == (0, True)
    for more in (
        {"sample": 0},
        {"sample": 1.1},
        {"sample": float("nan")},
        {"seed": 3},
        {"sample": 0.1, "quick": True},
    ):
        with pytest.raises(ConfigurationError):
            ckpt.verify(place, **more)
    assert run("verify", stock_place, "--sample", "5%").code == 2
    assert run("verify", place, "--sample", "5 parsecs").code == 2


@pytest.mark.long
def test_one_percent_damaged_is_found_by_reading_a_twentieth(tmp_path: Path, counts: Counts) -> None:
    """The measurement behind docs/cli.md: 10,240 blocks, 102 of them damaged at random, 512 read."""
    place = tmp_path / "step-1"
    blocks = saved(place, 10_240)
    ckpt.verify(place, sample=0.05, seed=1)
    assert counts.read_bytes <= 0.05 * len(blocks) * BLOCK_BYTES
    chosen = random.Random(2)
    rate = found_share(
        place, lambda: (chosen.sample(blocks, len(blocks) // 100) for _ in range(10)), 0.05, 100
    )
    print(f"found {rate:.4f} of the time in {len(blocks)} blocks")
    assert rate > 0.99
