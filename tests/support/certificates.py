"""Loads whose deliveries are recorded, for certificates."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from typing import Any

import torch
from torch.distributed.checkpoint.planner import LoadPlanner
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ckpt.collective import load_by
from ckpt.ranks.group import Ranks
from ckpt.reading.delivered import DeliveredDigests
from ckpt.reading.reader import CheckpointReader
from ckpt.tools.certificate import Certificate
from ckpt.torch_private import flatten_sharded_tensors, flatten_state_dict


def flat(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state by flat names, as DCP flattens it."""
    names: dict[str, Any] = flatten_state_dict(flatten_sharded_tensors(dict(state)))[0]
    return names


def load_recorded(
    state: dict[str, Any],
    url: str,
    *,
    planner: LoadPlanner | None = None,
    no_dist: bool = True,
    read_once: bool = True,
    **options: Any,
) -> DeliveredDigests:
    """Load as `ckpt.load` does; return the delivered digests."""
    recorded: list[DeliveredDigests] = []

    def make_reader(ranks: Ranks) -> CheckpointReader:
        reader = CheckpointReader(url, **options)
        reader.use_ranks(ranks, read_once=read_once)
        recorded.append(reader.record_delivered())
        return reader

    with closing(Ranks(None, no_dist=no_dist)) as ranks:
        load_by(state, url, planner, make_reader, ranks)
    return recorded[0]


def kinds(found: Certificate) -> dict[str, tuple[str, ...]]:
    """The findings of a certificate, by kind: names alone."""
    lists = {
        "cast": tuple(cast.name for cast in found.cast),
        "resized": found.resized,
        "different": found.different,
        "missing": found.missing,
        "left_over": found.left_over,
        "untouched": found.untouched,
        "unchecked": found.unchecked,
    }
    return {kind: names for kind, names in lists.items() if names}


def sharded(whole: torch.Tensor, mesh: DeviceMesh, *dims: int | None) -> DTensor:
    """A tensor sharded along a dimension for each of the mesh; None replicates."""
    return distribute_tensor(whole, mesh, [Replicate() if d is None else Shard(d) for d in dims])
