"""Write a checkpoint of many ranks in one process, with the library's own pieces: small shards of a few tensors.

PYTHONPATH=tests python -m support.many_ranks PATH 16384
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ckpt.backends.registry import open_store
from ckpt.format.names import rank_directory
from ckpt.save_plans.receipt_messages import RankReceipt
from ckpt.stock.item_frame import frame
from ckpt.transfer.buffer_pool import StagingPool
from ckpt.transfer.file_body import BytesPayload
from ckpt.writing.coordinator import Coordinator
from ckpt.writing.layout import Entry
from ckpt.writing.rank_files import RankFiles
from ckpt.writing.receipts import records_of, timings_of
from ckpt.writing.save_objects import SaveObjects

ROWS, WIDTH = 2, 4
"""Of a rank's shard, float32."""


def write_ms(rank: int) -> int:
    """Say how long a rank takes: the later half of every 64 longer, one in 1000 longest."""
    return 900 + 25 * (rank % 64) // 2 + rank * 7919 % 101 + (1100 if rank % 1000 == 7 else 0)


def save_as_many_ranks(
    url: str, ranks: int, tensors: int = 20, *, options: Mapping[str, Any] | None = None, value: float = 1.0
) -> None:
    """Save `tensors` tensors of `ranks` row shards each; each rank writes one file."""
    store = open_store(url, options)
    framed = frame(torch.float32, torch.Size([ROWS, WIDTH]))
    names = [f"layers.{number}.weight" for number in range(tensors)]
    shard = torch.full((ROWS, WIDTH), value).numpy().tobytes()
    pool = StagingPool(128 << 20, for_device=False)
    receipts: list[RankReceipt] = []
    place = url.rstrip("/").rpartition("/")[2]
    first = SaveObjects(0)
    for rank in range(ranks):
        objects = first if rank == 0 else SaveObjects(rank)
        store.prepare(rank_directory(rank))
        entries = [
            Entry(MetadataIndex(name, (rank * ROWS, 0)), framed.head, BytesPayload(shard), framed.tail, True)
            for name in names
        ]
        files = RankFiles(store, objects, pool, None)
        files.put([entries])
        receipts.append(replace(files.finish(place), write_ms=write_ms(rank), retries=int(rank % 1000 == 7)))
    chunks = [
        ChunkStorageMetadata(torch.Size([rank * ROWS, 0]), torch.Size([ROWS, WIDTH])) for rank in range(ranks)
    ]
    properties, size = TensorProperties(dtype=torch.float32), torch.Size([ROWS * ranks, WIDTH])
    metadata = Metadata({name: TensorStorageMetadata(properties, size, chunks) for name in names})
    metadata.planner_data = {name: tuple(name.split(".")) for name in names}
    columns, record = records_of(metadata, receipts, save_id=first.token, world_size=ranks, tags={})
    coordinator = Coordinator(store, first)
    coordinator.look(overwrite=False)
    began_at_s = dict(zip(("plan_s", "write_s", "commit_s"), (0.0, 1.5, 4.0), strict=True))
    coordinator.commit(columns, record, timings=timings_of(began_at_s, receipts))
    store.close()


if __name__ == "__main__":
    save_as_many_ranks(sys.argv[1], int(sys.argv[2]))
