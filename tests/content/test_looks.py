"""What is seen of bytes on their way: NaNs, zeros, and a digest that does not depend on how they are cut."""

from __future__ import annotations

import itertools
import random
import secrets

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiers import examples

from ckpt.consistency.checksums import BLOCK_SIZE_BYTES, block_crcs, crc64nvme
from ckpt.content.looks import FileLook, Payloads
from ckpt.format.dtypes import dtype_name

FLOATS = [
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
]  # fmt: skip


def laid_out(tensors: list[torch.Tensor]) -> tuple[bytearray, Payloads]:
    """Lay tensors into a file, each at a multiple of 64 bytes."""
    data, starts, stops = bytearray(), [], []
    for tensor in tensors:
        data += secrets.token_bytes(-len(data) % 64 + 64)
        starts.append(len(data))
        data += tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        stops.append(len(data))
    count = len(tensors)
    payloads = Payloads(
        [f"t{number}" for number in range(count)],
        ["model"] * count,
        [dtype_name(tensor.dtype) for tensor in tensors],
        starts,
        stops,
        [tensor.element_size() for tensor in tensors],
    )
    return data, payloads


def look_at(tensors: list[torch.Tensor], turn: int | None = 0) -> FileLook:
    """Lay tensors into a file, and see all of it."""
    data, payloads = laid_out(tensors)
    look = FileLook(payloads, len(data), turn)
    view = memoryview(data)
    for start in range(0, len(data), BLOCK_SIZE_BYTES):
        piece = view[start : start + BLOCK_SIZE_BYTES]
        look.note(start, [(0, piece.nbytes, crc64nvme(piece))])
        look.look(start, [piece])
    return look


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("count", [2, 300, 200_000])
def test_a_nan_is_seen_in_all_dtypes(dtype: torch.dtype, count: int) -> None:
    values = torch.randn(count, dtype=torch.float64).clamp(-2, 2).to(dtype)
    bad = values.clone()
    bad[count // 2] = torch.full((1,), float("nan"), dtype=torch.float64).to(dtype)[0]
    look = look_at([values, bad, torch.zeros(count, dtype=dtype)], turn=None)
    assert look.not_finite() == [("model", "t1")]
    assert look.zero() == [("model", "t2")]


@pytest.mark.parametrize("dtype", FLOATS[:5], ids=str)
def test_infinities_are_seen(dtype: torch.dtype) -> None:
    values = torch.ones(100, dtype=dtype)
    values[7] = float("-inf")
    for turn in (None, 0):
        look = look_at([torch.ones(100, dtype=dtype), values], turn)
        assert (look.not_finite(), look.infinite()) == ([], [("model", "t1")])
        values[8] = float("nan")
        look = look_at([values], turn)
        assert (look.not_finite(), look.infinite()) == ([("model", "t0")], [])
        values[8] = 1.0


def test_the_largest_and_the_smallest_numbers_are_fine() -> None:
    tensors = []
    for dtype in FLOATS[:4]:
        info = torch.finfo(dtype)
        tensors.append(torch.tensor([info.max, info.min, info.tiny, info.smallest_normal] * 50, dtype=dtype))
        tensors.append(torch.tensor([0.0, info.smallest_normal / 2] * 50, dtype=dtype))
    look = look_at(tensors, turn=None)
    assert (look.not_finite(), look.infinite(), look.zero()) == ([], [], [])


@pytest.mark.slow
def test_a_sample_is_another_one_in_each_save() -> None:
    """One row of one tensor: each save sees a part, all together see all."""
    tensor = torch.randn(4 << 20)
    tensor[1_000_000:1_000_400] = float("nan")
    seen = sum(bool(look_at([tensor], turn).not_finite()) for turn in range(256))
    assert 0 < seen < 32


@settings(deadline=None, max_examples=examples(60))
@given(st.integers(0, 10**9))
def test_no_tensor_is_passed_over(seed: int) -> None:
    """Whatever their sizes and dtypes, however the parts and buffers are cut, and whichever sample is drawn."""
    draw = random.Random(seed)
    tensors, bad, empty = [], [], []
    for number in range(draw.randint(1, 12)):
        dtype = draw.choice(FLOATS)
        count = draw.choice(
            [2, 900, 9_000, 20_000, 50_000, 140_000, 700_000]
        ) // dtype.itemsize + draw.randint(2, 99)
        kind = draw.choice(["fine", "fine", "nan", "zero", "sparse"])
        value = {"fine": 1.5, "nan": float("nan")}.get(kind, 0.0)
        tensors.append(torch.full((count,), value, dtype=torch.float64).to(dtype))
        if kind == "sparse":
            tensors[-1][draw.randrange(count)] = torch.full((1,), 1.5, dtype=torch.float64).to(dtype)[0]
        bad += [("model", f"t{number}")] if kind == "nan" else []
        empty += [("model", f"t{number}")] if kind == "zero" else []
    data, payloads = laid_out(tensors)
    look = FileLook(payloads, len(data), draw.randrange(1 << 64))
    view = memoryview(data)
    step = BLOCK_SIZE_BYTES * draw.randint(1, 9)
    for start in range(0, len(data), step):
        stop = min(start + step, len(data))
        inside = [edge for edge in (*payloads.starts, *payloads.stops) if start < edge < stop]
        cuts = sorted({start, stop, *(edge for edge in inside if draw.random() < 0.7)})
        look.look(start, [view[begin:end] for begin, end in itertools.pairwise(cuts)])
    assert (look.not_finite(), look.zero()) == (bad, empty)


@pytest.mark.parametrize(
    ("nbytes", "beside"),
    [
        (200_000, 0),
        (256 * 255 * 4, 0),
        (101 << 10, 0),
        ((2 << 20) + (255 << 10), 0),
        (4000, 0),
        (4000, 1100),
        (9000, 1100),
    ],
)
def test_all_samples_together_see_all(nbytes: int, beside: int) -> None:
    """A single NaN, wherever it is, is seen by one of the saves, also among many small tensors."""
    others = [torch.ones(1000) for _ in range(beside)]
    places = {0, nbytes // 4 - 1, *random.Random(nbytes).sample(range(nbytes // 4), 3)}
    for place in places:
        tensor = torch.ones(nbytes // 4)
        tensor[place] = float("nan")
        slots = -(-nbytes // 64) if nbytes < 64 << 10 else 256
        data, payloads = laid_out([tensor, *others])
        found = 0
        for turn in range(slots):
            look = FileLook(payloads, len(data), turn)
            look.look(0, [memoryview(data)])
            found += look.not_finite() == [("model", "t0")]
        assert found


@pytest.mark.parametrize("turn", range(10))
def test_small_tensors_of_a_small_file_are_looked_at_as_a_whole(turn: int) -> None:
    """A sample of 64 bytes would miss what was never trained in three saves of ten."""
    half = torch.ones(300, dtype=torch.bfloat16)
    half[100:] = float("inf")
    assert look_at([torch.randn(1000), half], turn).infinite() == [("model", "t1")]


def test_many_small_tensors_are_looked_at_by_some_elements() -> None:
    tensors = [torch.randn(1000) for _ in range(1100)]
    tensors[77] = torch.full((1000,), float("nan"))
    tensors[88] = torch.zeros(1000)
    tensors[99] = torch.empty(0)
    tensors[100] = torch.zeros(1)
    look = look_at(tensors)
    assert look.not_finite() == [("model", "t77")]
    assert look.zero() == [("model", "t88")]  # a single number is no array


@settings(deadline=None, max_examples=examples(60))
@given(st.integers(0, 10**9))
def test_the_digest_depends_on_the_bytes_alone(seed: int) -> None:
    """Not on pieces, their order, or where in the file they lie; and parts that are sent again change nothing."""
    draw = random.Random(seed)
    sizes = [draw.choice([4, 8, 1000, 70_000, 300_000, 1_200_000]) for _ in range(draw.randint(1, 9))]
    parts = sorted(draw.choice(["a", "b"]) for _ in sizes)
    payloads_of = [np.random.default_rng(seed + n).bytes(size) for n, size in enumerate(sizes)]
    digests = []
    for lead in (0, 64 * draw.randint(1, 20_000)):
        data, starts, stops = bytearray(lead), [], []
        for payload in payloads_of:
            data += bytes(-len(data) % 64)
            starts.append(len(data))
            data += payload
            stops.append(len(data))
        names = [str(number) for number in range(len(sizes))]
        look = FileLook(
            Payloads(names, parts, ["int32"] * len(sizes), starts, stops, [4] * len(sizes)), len(data)
        )
        view = memoryview(data)
        blocks = list(range(0, len(data), BLOCK_SIZE_BYTES))
        draw.shuffle(blocks)
        for start in [*blocks, *blocks[:2]]:
            stop = min(start + BLOCK_SIZE_BYTES, len(data))
            cuts = {start, stop, *(draw.randrange(start, stop) for _ in range(draw.randint(0, 3)))}
            cuts |= {cut for cut in look.cuts if start < cut < stop}
            for begin, end in itertools.pairwise(sorted(cuts)):
                look.note(begin, [(0, end - begin, crc64nvme(view[begin:end]))])
                look.look(begin, [view[begin:end]])
        digests.append(look.parts(block_crcs([view], BLOCK_SIZE_BYTES)))
    assert digests[0] == digests[1]
    for part in {*parts}:
        runs: list[bytes] = []
        run = b""
        for size, payload, name in zip(sizes, payloads_of, parts, strict=True):
            if size > 4 and name == part:
                run += (bytes(-len(run) % 64) if run else b"") + payload
            elif run:
                runs, run = [*runs, run], b""
        assert digests[0].get(part, []) == [crc64nvme(each) for each in ([*runs, run] if run else runs)]
