"""Compute the slice of a tensor that a rank holds: FSDP, HSDP, tensor parallelism under FSDP."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ckpt.acceptance.models import Parameter
from ckpt.errors import ConfigurationError
from ckpt.transfer.boxes import Box


@dataclass(frozen=True)
class Mesh:
    """A grid of replicas x shards x tensor-parallel ranks; the last one fastest, as in torch."""

    replicas: int
    shards: int
    tp: int

    @property
    def world_size(self) -> int:
        return self.replicas * self.shards * self.tp

    def box(self, parameter: Parameter, rank: int) -> Box | None:
        """Compute the slice that `rank` holds; None if it has no element."""
        # Tensor parallelism cuts first, then FSDP2 in dimension 0; both as `torch.chunk` does.
        begin, end = [0] * len(parameter.shape), list(parameter.shape)
        if parameter.tp_dim is not None:
            _cut(begin, end, parameter.tp_dim, rank % self.tp, self.tp)
        _cut(begin, end, 0, rank // self.tp % self.shards, self.shards)
        if any(start >= stop for start, stop in zip(begin, end, strict=True)):
            return None
        return tuple(begin), tuple(end)


def parse_mesh(text: str, world_size: int) -> Mesh:
    """Parse `fsdp`, `hsdp` (two replicas), `hsdp2xfsdp4`, `tp2` or `tp2xfsdp4`."""
    if world_size < 1:
        raise ConfigurationError(f"the world size must be at least 1, not {world_size}")
    match = re.fullmatch(r"(?:(hsdp|tp)(\d{0,7}))?(x?)(?:fsdp(\d{0,7}))?", text)
    if match is None or not text or bool(match[3]) != bool(match[1] and "fsdp" in text):
        raise ConfigurationError(
            f"mesh {text[:80]!r} is not understood; write fsdp, hsdp, hsdp2xfsdp4 or tp2xfsdp4"
        )
    first = int(match[2] or 2) if match[1] else 1
    shards = int(match[4]) if match[4] else (world_size // first if first else 0)
    replicas, tp = (first, 1) if match[1] == "hsdp" else (1, first)
    mesh = Mesh(replicas, shards, tp)
    if mesh.world_size != world_size:
        raise ConfigurationError(
            f"mesh {text!r} has {first} x {shards} = {first * shards} ranks, but the world size is {world_size}"
        )
    return mesh


def _cut(begin: list[int], end: list[int], dim: int, index: int, parts: int) -> None:
    each = -(-(end[dim] - begin[dim]) // parts)
    start = min(begin[dim] + index * each, end[dim])
    begin[dim], end[dim] = start, min(start + each, end[dim])
