"""Measure how long a rank plans its part of a load: this library by columns, and DCP's planner.

    python -m benchmarks.scale.load_plans gpt-22b --ranks 1024 16384 [--every 16]

The checkpoint was saved under FSDP by as many ranks as load it; the rank is one in the middle. DCP plans every 16th
tensor only, because it takes minutes; its time is that times 16.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.scale.plans import parse_layout, state_of
from ckpt.acceptance.models import MODELS
from ckpt.format.columns import Columns, TensorColumns
from ckpt.format.dcp_view import metadata_of
from ckpt.load_plans.local import local_plan


def stored_rows(tensor: DTensor, ranks: int) -> TensorColumns:
    """Make the columns of a tensor that FSDP cut along dimension 0."""
    shape = tuple(tensor.shape)
    step = -(-shape[0] // ranks)
    begins = np.arange(0, shape[0], step)
    offsets = np.zeros((len(begins), len(shape)), dtype=np.int64)
    sizes = np.tile(np.array(shape, dtype=np.int64), (len(begins), 1))
    offsets[:, 0], sizes[:, 0] = begins, np.minimum(step, shape[0] - begins)
    places = np.zeros((3, len(begins)), dtype=np.int64)
    return TensorColumns("float32", shape, False, offsets, sizes, *places)


def flat(state: dict[str, Any], prefix: str = "") -> dict[str, DTensor]:
    found: dict[str, DTensor] = {}
    for name, value in state.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found


def measure(model: str, ranks: int, every: int) -> dict[str, Any]:
    """Measure one model on so many ranks."""
    dist.init_process_group("fake", store=FakeStore(), rank=ranks // 16, world_size=ranks)
    layout = parse_layout("fsdp", ranks)
    tensors = flat(state_of(list(MODELS[model]()), layout, init_device_mesh("cpu", layout.mesh)))
    entries = {fqn: stored_rows(tensor, ranks) for fqn, tensor in tensors.items()}
    metadata = metadata_of(Columns(files=["f"], entries={**entries}))

    def planned(state: dict[str, DTensor], plan: Any) -> tuple[list[Any], float]:
        planner = DefaultLoadPlanner()
        planner.set_up_planner(state, metadata)
        begun = time.process_time()
        items = plan(planner).items
        return items, time.process_time() - begun

    by_columns, columns_s = planned(tensors, local_plan)
    part = {fqn: tensor for number, (fqn, tensor) in enumerate(tensors.items()) if number % every == 0}
    by_dcp, dcp_s = planned(part, DefaultLoadPlanner.create_local_plan)
    assert [item for item in by_columns if item.dest_index.fqn in part] == by_dcp
    dist.destroy_process_group()
    return {
        "model": model,
        "ranks": ranks,
        "tensors": len(tensors),
        "chunks": sum(len(each.file) for each in entries.values()),
        "items": len(by_columns),
        "by columns, CPU s": round(columns_s, 3),
        "by DCP, CPU s": round(dcp_s * len(tensors) / len(part), 3),
        "of which measured, CPU s": round(dcp_s, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=sorted(MODELS))
    parser.add_argument("--ranks", type=int, nargs="+", default=[1024, 16384])
    parser.add_argument("--every", type=int, default=16)
    arguments = parser.parse_args()
    for ranks in arguments.ranks:
        print(json.dumps(measure(arguments.model, ranks, arguments.every)))


if __name__ == "__main__":
    main()
