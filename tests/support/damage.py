"""Damage blocks of real files, and save checkpoints that have many of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

import torch

import ckpt

BLOCK_BYTES = 1 << 16
"""The smallest that the format allows."""

Block = tuple[Path, int]
"""A data file, and where the block begins in it."""


def save_small_blocks(
    place: Path | str, blocks: int, *, tensors: int = 4, seed: int = 0, **more: object
) -> None:
    """Save a checkpoint of about so many blocks of 64 KiB."""
    elements = blocks * BLOCK_BYTES // 8 // tensors
    state = {f"w{n}": torch.arange(elements) + seed + n for n in range(tensors)}
    with contextlib.ExitStack() as patched:
        for module in ("transfer.file_body", "writing.rank_files", "content.looks"):
            patched.enter_context(mock.patch(f"ckpt.{module}.BLOCK_SIZE_BYTES", BLOCK_BYTES))
        ckpt.save(state, place, no_dist=True, checks="off", **more)  # type: ignore[arg-type]


def blocks_of(place: Path) -> list[Block]:
    """List the blocks of a checkpoint's data files."""
    return [
        (path, at)
        for path in sorted(place.rglob("*.distcp"))
        for at in range(0, path.stat().st_size, BLOCK_BYTES)
    ]


def flip_blocks(blocks: Sequence[Block]) -> None:
    """Flip a bit in each of these blocks, in place; called again, that is undone."""
    for path, at in blocks:
        with path.open("r+b") as file:
            file.seek(at + 17)
            (byte,) = file.read(1)
            file.seek(at + 17)
            file.write(bytes([byte ^ 4]))


@contextlib.contextmanager
def flipped(blocks: Sequence[Block]) -> Iterator[None]:
    """Have these blocks damaged meanwhile."""
    flip_blocks(blocks)
    try:
        yield
    finally:
        flip_blocks(blocks)
