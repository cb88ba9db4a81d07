"""Compute what each rank of a mesh holds and writes: FSDP, HSDP, and tensor x pipeline x data parallelism."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ckpt.errors import ConfigurationError
from ckpt.format.runs import MANY_CHUNKS
from ckpt.planning.models import Model

Numbers = NDArray[np.float64]
_AXIS = re.compile(r"(tp|pp|dp|hsdp|fsdp)(\d{0,7})")
_MAX_RANKS = 1 << 20

FRAME_BYTES, ALIGNMENT_BYTES = 1568, 64
"""Bytes around a tensor in a data file, and where the next one begins (docs/format.md)."""


@dataclass(frozen=True)
class Mesh:
    """A grid of pipeline stages x replicas x shards x tensor-parallel ranks, the last one fastest.

    Attributes:
        free: the axis that grows with the number of ranks.
    """

    pp: int = 1
    dp: int = 1
    fsdp: int = 1
    tp: int = 1
    free: str = "fsdp"

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.fsdp * self.tp

    def with_free(self, size: int) -> Mesh:
        """Return the mesh with another size of the free axis."""
        sizes = {"pp": self.pp, "dp": self.dp, "fsdp": self.fsdp, "tp": self.tp, self.free: size}
        return Mesh(**sizes, free=self.free)

    def __str__(self) -> str:
        sizes = {"tp": self.tp, "pp": self.pp, "dp": self.dp, "fsdp": self.fsdp}
        return "x".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "fsdp1"


def parse_mesh(text: str, ranks: int) -> Mesh:
    """Parse `fsdp`, `hsdp` (two replicas), `dp2xfsdp4`, `tp8xpp16xfsdp`, `tp8xpp64xdp32`.

    One axis may stand without a number: it has the ranks that the others leave.

    Raises:
        ConfigurationError: it is not understood, or does not have that many ranks.
    """
    if not 1 <= ranks <= _MAX_RANKS:
        raise ConfigurationError(f"the number of ranks must be from 1 to {_MAX_RANKS:,}, not {ranks}")
    sizes: dict[str, int | None] = {}
    for part in ("hsdp2xfsdp" if text == "hsdp" else text).lower().split("x"):
        match = _AXIS.fullmatch(part)
        name = match[1].replace("hsdp", "dp") if match is not None else ""
        if match is None or name in sizes or match[2] == "0":
            raise ConfigurationError(
                f"the mesh {text[:80]!r} is not understood: write fsdp, hsdp2xfsdp4, tp8xpp16xfsdp or tp8xpp64xdp32"
            )
        sizes[name] = int(match[2]) if match[2] else None
    open_axes = [name for name, size in sizes.items() if size is None]
    known = math.prod(size for size in sizes.values() if size is not None)
    if len(open_axes) > 1:
        raise ConfigurationError(f"the mesh {text[:80]!r}: only one axis may stand without a number")
    if open_axes and ranks % known == 0:
        sizes[open_axes[0]] = ranks // known
        known = ranks
    if known != ranks:
        text = (
            f"the mesh {text[:80]!r} has {known:,} ranks"
            if not open_axes
            else (f"the mesh {text[:80]!r} needs a multiple of {known:,} ranks")
        )
        raise ConfigurationError(f"{text}, not {ranks:,}")
    free = open_axes[0] if open_axes else "fsdp" if "fsdp" in sizes or "dp" not in sizes else "dp"
    return Mesh(**{name: size for name, size in sizes.items() if size is not None}, free=free)


@dataclass(frozen=True)
class Layout:
    """What ranks hold and write; arrays over [pp, fsdp, tp], the same for all replicas.

    Attributes:
        held_bytes: of the tensors of one rank.
        file_bytes, items: what one position of the mesh writes, all its replicas together, as it is stored.
            Slices that several ranks hold are written once, and spread over these ranks.
        shared_items: slices that a rank holds, and other tensor-parallel ranks too.
        regular: tensors whose slices the index holds as runs; `rows`: slices of all others.
    """

    mesh: Mesh
    held_bytes: Numbers
    file_bytes: Numbers
    items: Numbers
    shared_items: Numbers
    regular: int
    rows: float

    @property
    def writers(self) -> Numbers:
        """How many replicas of each position have something to write."""
        return np.minimum(self.mesh.dp, np.ceil(self.items - 1e-9))

    def per_node(self, of_rank: Numbers, ranks_per_node: int) -> float:
        """Return the largest sum over the ranks of one node; `of_rank` is [pp, fsdp, tp]."""
        mesh = self.mesh
        shape = (mesh.pp, mesh.dp, mesh.fsdp, mesh.tp)
        ranks = np.broadcast_to(of_rank[:, None], shape).reshape(-1)
        starts = np.arange(0, len(ranks), ranks_per_node)
        return float(np.add.reduceat(ranks, starts).max())


def layout_of(model: Model, mesh: Mesh) -> Layout:
    """Cut the tensors of a model: tensor parallelism first, then FSDP in dimension 0, both as `torch.chunk` does.

    Raises:
        ConfigurationError: there are more pipeline stages than layers.
    """
    blocks = model.blocks
    if mesh.pp > blocks:
        raise ConfigurationError(
            f"the mesh has {mesh.pp} pipeline stages, and {model.name} only {blocks} layers"
        )
    held, stored, items, shared = (np.zeros((mesh.pp, mesh.fsdp, mesh.tp)) for _ in range(4))
    regular, rows = 0, 0.0
    kinds = Counter(
        (tensor.shape, tensor.item_bytes, tensor.tp_dim, tensor.block * mesh.pp // blocks)
        for tensor in model.tensors
    )
    for (shape, item_bytes, tp_dim, stage), count in kinds.items():
        elements, copies = _elements(shape, tp_dim, mesh)
        exists = count * (elements > 0)
        framed = elements * item_bytes + FRAME_BYTES
        held[stage] += count * item_bytes * elements
        stored[stage] += exists * np.ceil(framed / ALIGNMENT_BYTES) * ALIGNMENT_BYTES / copies
        items[stage] += exists / copies
        shared[stage] += exists * (copies > 1)
        slices = float((elements > 0).sum()) / copies
        if slices >= MANY_CHUNKS and copies == 1:
            regular += count
        else:
            rows += count * slices
    return Layout(mesh, held, stored, items, shared, regular, rows)


def _elements(shape: tuple[int, ...], tp_dim: int | None, mesh: Mesh) -> tuple[Numbers, int]:
    """Count the elements of a tensor on the ranks of a stage [fsdp, tp], and how many of these hold the same."""
    if not shape:
        return np.ones((mesh.fsdp, mesh.tp)), mesh.fsdp * mesh.tp
    lengths = [np.full(mesh.tp, length) for length in shape]
    if tp_dim is not None:
        lengths[tp_dim] = _chunks(np.array([shape[tp_dim]]), mesh.tp)[:, 0]
    rows = _chunks(lengths[0], mesh.fsdp)
    rest = np.prod(np.array(lengths[1:], dtype=np.float64), axis=0) if lengths[1:] else np.ones(mesh.tp)
    return rows * rest, mesh.tp if tp_dim is None else 1


def _chunks(lengths: NDArray[np.int64], parts: int) -> NDArray[np.int64]:
    """Return the lengths [parts, ...] of the pieces into which `torch.chunk` cuts each of `lengths`."""
    each = -(-lengths // parts)
    begins = np.arange(parts).reshape(-1, 1) * each
    return np.clip(lengths - begins, 0, each)
