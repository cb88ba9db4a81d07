"""When the ranks of a large job begin to ask a bucket."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from support.clock import SkippingClock
from support.strict_s3 import StrictS3
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan

from ckpt.backends.registry import open_store
from ckpt.consistency import environment
from ckpt.transfer.bandwidth import turn_s, wait_for_turn
from ckpt.writing.writer import CheckpointWriter


@pytest.mark.parametrize("size", [1001, 4096, 16384])
def test_turns_come_as_fast_as_a_prefix_takes_requests(size: int) -> None:
    turns_s = [turn_s(rank, size) for rank in range(size)]
    assert turns_s[0] == 0
    assert max(turns_s) <= size / 3500
    each_tenth = Counter(int(10 * at_s) for at_s in turns_s)
    assert max(each_tenth.values()) <= 360


def test_only_thousands_of_ranks_at_a_bucket_wait(server: StrictS3, tmp_path: Path) -> None:
    clock = SkippingClock()
    with environment.replaced(clock):
        wait_for_turn(open_store("s3://bucket/x", server.options), 7, 1000)
        wait_for_turn(open_store(tmp_path), 7, 16384)
        assert clock.skipped_s == 0
        wait_for_turn(open_store("s3://bucket/x", server.options), 7, 16384)
        assert clock.skipped_s == turn_s(7, 16384) > 0


@pytest.mark.parametrize("size", [16384, 8])
def test_a_save_waits_for_its_turn(server: StrictS3, size: int) -> None:
    writer = CheckpointWriter("s3://bucket/c", storage_options=server.options)
    writer.set_up_storage_writer(False, rank=7, size=size)
    clock = SkippingClock()
    with environment.replaced(clock):
        writer.write_data(SavePlan([]), DefaultSavePlanner()).wait()
    assert clock.skipped_s == (turn_s(7, size) if size > 1000 else 0)
