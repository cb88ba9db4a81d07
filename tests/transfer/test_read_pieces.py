"""Any region of any stored tensor into any target, through any cutting into requests."""

from __future__ import annotations

import gc
import math
import random
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.states import bits
from support.tiers import examples

import ckpt.transfer.fetcher
import ckpt.transfer.pieces
from ckpt.backends.base import put_bytes
from ckpt.backends.registry import open_store
from ckpt.consistency.checksums import block_crcs
from ckpt.format.elements import StoredTensor
from ckpt.transfer.array_pieces import array_pieces
from ckpt.transfer.boxes import flat_boxes
from ckpt.transfer.buffer_pool import StagingPool
from ckpt.transfer.fetcher import Fetcher, StoredFile
from ckpt.transfer.pieces import MemorySink, Piece
from ckpt.transfer.read_pieces import region_pieces
from ckpt.transfer.read_requests import plan_requests
from ckpt.transfer.tensor_memory import copy_flat, memory_of

DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.int64, torch.complex128, torch.float8_e4m3fn]


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Any, ...]:
    """A stored tensor (its dimensions in any order in memory), regions of it, and how to read."""
    dimensions = draw(st.integers(0, 4))
    most = 60 if dimensions <= 2 else 7
    shape = draw(st.lists(st.integers(1, most), min_size=dimensions, max_size=dimensions))
    order = draw(st.permutations(range(dimensions)))
    dtype = draw(st.sampled_from(DTYPES))
    first_byte = draw(st.sampled_from([0, 64, 1000, 3]))
    regions = []
    for _ in range(draw(st.integers(1, 3))):
        offsets = [draw(st.integers(0, shape[d] - 1)) for d in order]
        lengths = [draw(st.integers(0, shape[d] - o)) for d, o in zip(order, offsets, strict=True)]
        regions.append((offsets, lengths, draw(st.booleans())))
    grid = draw(st.sampled_from([1, 64, 256]))
    blocks = draw(st.sampled_from([4, 16, 64]))
    return shape, order, dtype, first_byte, regions, grid, blocks


@settings(max_examples=examples(400), suppress_health_check=[HealthCheck.too_slow])
@given(layouts())
def test_any_region_through_any_requests(layout: tuple[Any, ...]) -> None:
    shape, order, dtype, first_byte, regions, grid, blocks = layout
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ckpt.transfer.pieces, "_STRIDED_BYTES", 2048)
        patch.setattr(ckpt.transfer.pieces, "_WORTH_SKIPPING_BYTES", 512)
        random_bytes = random.Random(math.prod(shape)).randbytes
        raw = torch.frombuffer(
            bytearray(random_bytes(math.prod(shape) * dtype.itemsize) or b"\0"), dtype=torch.uint8
        )
        tensor = raw[: math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape).permute(order)
        tail = torch.zeros(100, dtype=torch.uint8)
        file = torch.cat([torch.zeros(first_byte, dtype=torch.uint8), raw, tail])
        stored = StoredTensor(first_byte, dtype, tuple(tensor.shape), tuple(tensor.stride()))
        pieces: list[Piece] = []
        expected = []
        for offsets, lengths, reverse in regions:
            target = torch.zeros(lengths, dtype=dtype)
            if reverse and len(lengths) > 1:
                target = torch.zeros(lengths[::-1], dtype=dtype).permute(list(reversed(range(len(lengths)))))
            pieces += region_pieces(stored, offsets, lengths, target)
            box = tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))
            expected.append((tensor[box], target))
            # The same region, as it lies in the file, into an array.
            at = sorted(range(len(order)), key=lambda d: order[d])
            array = np.zeros([lengths[d] for d in at], dtype=(np.void, dtype.itemsize))
            pieces += array_pieces(first_byte, shape, [offsets[d] for d in at], array)
            filled = torch.from_numpy(array.reshape(-1).view(np.uint8))
            expected.append((tensor[box].permute(at), filled))
        _read(pieces, file, grid, blocks)
        for wanted, target in expected:
            assert bits(target) == bits(wanted)


def test_a_column_of_long_rows_into_an_array(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its elements is a piece of its own, and a view of the array, not a number."""
    monkeypatch.setattr(ckpt.transfer.pieces, "_WORTH_SKIPPING_BYTES", 512)
    array = np.zeros((10, 1), dtype=np.int32)
    pieces = list(array_pieces(0, (10, 300), (0, 7), array))
    assert len(pieces) == 10
    _read(pieces, torch.arange(3000, dtype=torch.int32).view(torch.uint8), 64, 64)
    assert array.ravel().tolist() == list(range(7, 3000, 300))


def _read(pieces: list[Piece], file: torch.Tensor, grid: int, blocks: int) -> None:
    """Check the plan, then carry it out as a load does, verification included."""
    served = {id(piece): 0 for piece in pieces}
    planned = plan_requests(
        pieces, grid_bytes=grid, file_bytes=file.numel(), gap_bytes=grid // 2, request_bytes=grid * blocks
    )
    for request in planned:
        assert request.start % grid == 0
        assert request.stop % grid == 0 or request.stop == file.numel()
        starts = [part.start for part in request.slices]
        assert starts == sorted(starts)
        for part in request.slices:
            assert request.start <= part.start < part.stop <= request.stop
            assert part.piece.sink.unit_bytes or (part.start, part.stop) == (
                part.piece.start,
                part.piece.stop,
            )
            served[id(part.piece)] += part.stop - part.start
    assert all(served[id(piece)] == piece.stop - piece.start for piece in pieces)
    data = bits(file)
    store = open_store("memory://pieces/x")
    put_bytes(store, "file", data)
    crcs = block_crcs([memoryview(data)], grid) if grid > 1 else None
    stored = StoredFile("file", len(data), grid, crcs)
    fetcher = Fetcher(store, StagingPool(), lambda read: read())
    with ThreadPoolExecutor(2) as threads, pytest.MonkeyPatch.context() as patch:
        patch.setattr(ckpt.transfer.fetcher, "_DIRECT_BYTES", 32)
        patch.setattr(ckpt.transfer.fetcher, "transfer_size_bytes", lambda threads: grid * blocks)
        fetcher.run([(stored, pieces)], threads)


def test_a_row_slice_reads_two_blocks_at_most() -> None:
    """256 KiB out of a 16 MiB shard."""
    block = 1 << 20
    stored = StoredTensor.row_major(704, torch.float32, (4096, 1024))
    target = torch.zeros(64, 1024)
    for row in range(0, 4096 - 64, 64):
        pieces = list(region_pieces(stored, (row, 0), (64, 1024), target))
        assert len(pieces) == 1
        assert isinstance(pieces[0].sink, MemorySink)
        (request,) = plan_requests(
            pieces, grid_bytes=block, file_bytes=17 * block, gap_bytes=block // 2, request_bytes=32 << 20
        )
        assert request.stop - request.start <= 2 * block


def test_sparse_rows_are_not_read_whole() -> None:
    """One column out of rows of 8 MiB: each row's block, not the rows."""
    stored = StoredTensor.row_major(0, torch.float32, (10, 2 << 20))
    target = torch.zeros(10, 1)
    pieces = list(region_pieces(stored, (0, 5), (10, 1), target))
    total = sum(
        request.stop - request.start
        for request in plan_requests(
            pieces, grid_bytes=1 << 20, file_bytes=80 << 20, gap_bytes=1 << 19, request_bytes=32 << 20
        )
    )
    assert total == 10 << 20


def test_blocks_larger_than_a_request() -> None:
    """Then a request is a block, and no block is read twice."""
    block = 64 << 20
    stored = StoredTensor.row_major(704, torch.uint8, (3 * block,))
    pieces = list(region_pieces(stored, (0,), (3 * block,), torch.empty(3 * block, dtype=torch.uint8)))
    requests = list(
        plan_requests(
            pieces, grid_bytes=block, file_bytes=3 * block + 800, gap_bytes=block // 2, request_bytes=32 << 20
        )
    )
    assert [(r.start, r.stop) for r in requests] == [
        (0, block),
        (block, 2 * block),
        (2 * block, 3 * block),
        (3 * block, 3 * block + 800),
    ]


def test_regions_outside_are_refused() -> None:
    stored = StoredTensor.row_major(0, torch.float32, (4, 5))
    for offsets, lengths in [((0, 0), (5, 5)), ((3, 0), (2, 5)), ((-1, 0), (1, 1)), ((0, 0), (4, 4))]:
        with pytest.raises(ValueError, match="region"):
            list(region_pieces(stored, offsets, lengths, torch.zeros(4, 5)))


@settings(max_examples=examples(300))
@given(st.lists(st.integers(1, 6), max_size=4), st.data())
def test_flat_boxes_are_the_flat_range(shape: list[int], data: st.DataObject) -> None:
    total = math.prod(shape)
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    tensor = torch.arange(total).reshape(shape)
    boxes = list(flat_boxes(shape, start, stop))
    found = (
        torch.cat([tensor[box].reshape(-1) for box in boxes]) if boxes else torch.empty(0, dtype=torch.int64)
    )
    assert found.tolist() == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape))
    copied = torch.zeros((stop - start) * 8, dtype=torch.uint8)
    copy_flat(tensor.clone().t() if len(shape) == 2 else tensor, start, stop, memory_of(copied))
    if len(shape) != 2:
        assert copied.view(torch.int64).tolist() == list(range(start, stop))


def test_memory_outlives_its_tensor_s_last_user() -> None:
    """A read that was given up ends later, and must not write to what has become other memory."""
    tensor = torch.zeros(1000, dtype=torch.uint8)
    alive = weakref.ref(tensor)
    part = memory_of(tensor)[10:20]
    del tensor
    gc.collect()
    assert alive() is not None
    part[:] = bytes(range(10))
    part.release()
    assert alive() is None
