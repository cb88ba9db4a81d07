"""Which slice of a tensor a rank holds: FSDP, HSDP, tensor parallelism under FSDP."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from ckpt.acceptance.models import Parameter
from ckpt.errors import ConfigurationError
from ckpt.transfer.boxes import Box

__all__ = ["Mesh", "parse_mesh"]


@dataclass(frozen=True)
class Mesh:
    """Ranks in a grid of replicas x shards x tensor-parallel ranks, the last one fastest, as torch numbers them."""

    replicas: int
    shards: int
    tp: int

    @property
    def world_size(self) -> int:
        return self.replicas * self.shards * self.tp

    def box(self, parameter: Parameter, rank: int) -> Box | None:
        """The slice that `rank` holds, of at least one element; None if it holds nothing.

        Tensor parallelism cuts first, FSDP2 cuts the first dimension of what is left; both as `torch.chunk` does.
        """
        begin, end = [0] * len(parameter.shape), list(parameter.shape)
        if parameter.tp_dim is not None:
            _cut(begin, end, parameter.tp_dim, rank % self.tp, self.tp)
        _cut(begin, end, 0, rank // self.tp % self.shards, self.shards)
        if any(start >= stop for start, stop in zip(begin, end, strict=True)):
            return None
        return tuple(begin), tuple(end)

    def shard_elements(self, parameters: list[Parameter], rank: int) -> int:
        """Elements that `rank` holds of all `parameters`."""
        boxes = (self.box(parameter, rank) for parameter in parameters)
        return sum(math.prod(b - a for a, b in zip(*box, strict=True)) for box in boxes if box is not None)


def parse_mesh(text: str, world_size: int) -> Mesh:
    """`fsdp`, `hsdp` (two replicas), `hsdp2xfsdp4`, `tp2` or `tp2xfsdp4`.

    Raises:
        ConfigurationError: it is none of these, or does not make up `world_size` ranks.
    """
    if world_size < 1:
        raise ConfigurationError(f"world size must be at least 1, not {world_size}")
    found = re.fullmatch(r"(?:(hsdp|tp)(\d{0,7}))?(x?)(?:fsdp(\d{0,7}))?", text)
    if found is None or not text or bool(found[3]) != bool(found[1] and "fsdp" in text):
        raise ConfigurationError(f"mesh {text[:80]!r}: write fsdp, hsdp, hsdp2xfsdp4 or tp2xfsdp4")
    first = int(found[2] or 2) if found[1] else 1
    shards = int(found[4]) if found[4] else (world_size // first if first else 0)
    replicas, tp = (first, 1) if found[1] == "hsdp" else (1, first)
    mesh = Mesh(replicas, shards, tp)
    if mesh.world_size != world_size or world_size < 1:
        raise ConfigurationError(
            f"mesh {text!r} does not fit {world_size} ranks: {first} x {shards} are {first * shards}"
        )
    return mesh


def _cut(begin: list[int], end: list[int], dim: int, index: int, parts: int) -> None:
    each = -(-(end[dim] - begin[dim]) // parts)
    start = min(begin[dim] + index * each, end[dim])
    begin[dim], end[dim] = start, min(start + each, end[dim])
