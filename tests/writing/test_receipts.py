"""The coordinator commits only what every rank has reported."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from torch.distributed.checkpoint.metadata import Metadata

from ckpt.errors import CommitError
from ckpt.save_plans.receipt_messages import RankReceipt
from ckpt.writing.receipts import records_of


@pytest.mark.parametrize(
    ("world_size", "reported", "missing"),
    [
        (3, range(1, 3), "0"),
        (20, [*range(7), *range(9, 20)], "7, 8"),
        (16384, range(16380), "16380, 16381, 16382, 16383"),
        (16384, range(0, 16384, 2), "1, 3, 5, 7, 9 and 8,187 more"),
    ],
    ids=["first", "two", "last", "half"],
)
def test_names_few_of_the_ranks_that_are_missing(
    world_size: int, reported: Sequence[int], missing: str
) -> None:
    receipts = [RankReceipt(rank, "c", None, [], b"") for rank in reported]
    with pytest.raises(CommitError, match=f"missing: {missing}$"):
        records_of(Metadata({}), receipts, save_id="0" * 16, world_size=world_size, tags={})
