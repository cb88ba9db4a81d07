"""Commit and open the metadata of many ranks: plans without data, in one process each."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from benchmarks.jobs.sharded import rows_of, write_item
from benchmarks.jobs.transfer import figures_of
from benchmarks.run.meter import metered
from benchmarks.run.task import Outcome, Task

__all__ = ["commit", "open_metadata"]

_TENSORS = 500


def commit(task: Task) -> dict[str, float]:
    """Commit the plans of `parameters["ranks"]` ranks (timed without the planner), then open them
    elsewhere.
    """
    contender: Any = task.make_contender()
    plans, metadata = _plans(task.parameters["ranks"])
    writer = contender.writer(task.place)
    writer.reset(task.place)
    writer.set_up_storage_writer(True, rank=0, use_collectives=True)
    writer.prepare_local_plan(plans[0])
    results = _our_results(plans, task.place) if task.contender == "ours" else _stock_results(plans)
    with metered() as reading:
        writer.finish(metadata, results)
    figures = figures_of(reading, 0)
    figures["commit_s"] = figures.pop("wall_s")
    files = [path for path in Path(task.place).rglob("*") if path.is_file()]
    stock = Path(task.place) / ".metadata"  # this library leaves out one that is too large
    figures["dot_metadata_mb"] = stock.stat().st_size / 1e6 if stock.exists() else 0.0
    figures["opened_mb"] = _opened_bytes(files) / 1e6
    return {**figures, **_in_another_process(task)}


def open_metadata(task: Task) -> dict[str, float]:
    """Open metadata as each rank does before it plans: `open_s` by reading, `adopt_s` from rank
    0's.
    """
    contender: Any = task.make_contender()
    reader = contender.reader(task.place)
    with metered() as reading:
        metadata = reader.read_metadata()
    assert len(metadata.state_dict_metadata) == _TENSORS
    figures = {"open_s": reading.wall_s, "open_peak_mb": reading.peak_bytes / 1e6}
    if task.contender == "ours":
        shared = reader.open().share()
        del metadata
        started_s = time.perf_counter()
        contender.reader(task.place).adopt(shared)
        figures |= {"adopt_s": time.perf_counter() - started_s, "shared_mb": len(shared) / 1e6}
    return figures


def _plans(ranks: int) -> tuple[list[SavePlan], Metadata]:
    tensor = torch.empty(4096, 64, device="meta")
    names = [f"model.layers.{number // 10}.block.{number % 10}.weight" for number in range(_TENSORS)]
    plans = [
        SavePlan([write_item(name, tensor, rows_of(tensor, rank, ranks)) for name in names])
        for rank in range(ranks)
    ]
    return create_default_global_save_plan(plans)


def _stock_results(plans: list[SavePlan]) -> list[list[WriteResult]]:
    return [
        [
            WriteResult(item.index, 1 << 20, _StorageInfo(f"__{rank}_0.distcp", number << 20, 1 << 20))
            for number, item in enumerate(plan.items)
        ]
        for rank, plan in enumerate(plans)
    ]


def _our_results(plans: list[SavePlan], place: str) -> list[list[WriteResult]]:
    """Make the results that this library's ranks would have reported; the one place that knows its
    receipts.
    """
    from ckpt.format.names import data_key, last_segment, manifest_key
    from ckpt.format.records import ManifestRef
    from ckpt.save_plans.receipt_messages import RankReceipt
    from ckpt.writing.receipts import PlacedItem, pack_items
    from ckpt.writing.writer import RECEIPT

    results = []
    for rank, plan in enumerate(plans):
        token = f"{rank:016x}"
        rows = [
            PlacedItem(item.index.fqn, tuple(item.index.offset), item.index.index, 0, number << 20, 1 << 20)
            for number, item in enumerate(plan.items)
            if item.index.offset is not None
        ]
        manifest = ManifestRef(
            path=manifest_key(rank, token), size_bytes=1, crc64nvme="0" * 16,
            rank=rank, files=1, items=len(rows), data_bytes=len(rows) << 20,
        )  # fmt: skip
        files = [data_key(rank, token, 0)]
        receipt = RankReceipt(rank, last_segment(place), manifest, files, pack_items(rows))
        results.append([WriteResult(RECEIPT, 0, receipt)])
    return results


def _opened_bytes(files: list[Path]) -> int:
    """Return the bytes that a reader opens: the index if there is one, else the sealed or the stock
    metadata.
    """
    for wanted in ("*index*", "*[0-9a-f].metadata", ".metadata"):
        sizes = [path.stat().st_size for path in files if path.match(wanted)]
        if sizes:
            return sum(sizes)
    raise FileNotFoundError("no metadata were written")


def _in_another_process(task: Task) -> dict[str, float]:
    """Run `open_metadata` in a process that does not hold the plans, whose heap would slow it down."""
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder) / "task.json", Path(folder) / "outcome.json"
        asked.write_text(Task("open_metadata", task.contender, task.place).to_json())
        subprocess.run(
            [sys.executable, "-m", "benchmarks.run.worker", str(asked), str(answered)],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        outcome = Outcome.from_json(answered.read_text())
    if outcome.error:
        raise RuntimeError(outcome.error)
    return outcome.figures
