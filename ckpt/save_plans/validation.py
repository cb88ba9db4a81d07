"""Check DCP's global plans sooner than DCP does, with the same answers.

DCP compares chunks pair by pair where a tensor is divided along another dimension than its longest:
11 seconds for one matrix of 6,144 rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.distributed.checkpoint.metadata import STORAGE_TYPES, BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.planner import SavePlan

from ckpt.save_plans.tiling import chunks_tile

Validation = Callable[[list[SavePlan], Metadata], Any]


def quick_validation(stock: Validation) -> Validation:
    """Make a check that asks `stock`, DCP's own, only about tensors which are not proven to be right."""

    @functools.wraps(stock)
    def validate(global_plan: list[SavePlan], metadata: Metadata) -> Any:
        doubtful: dict[str, STORAGE_TYPES] = {
            fqn: stored
            for fqn, stored in metadata.state_dict_metadata.items()
            if not isinstance(stored, BytesStorageMetadata) and not chunks_tile(stored.chunks, stored.size)
        }
        return stock(global_plan, Metadata(doubtful))  # before torch 2.13 the answer is no list

    return validate
