"""Digests of payloads: the same whatever the order of the parts, and of all bytes."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
import xxhash

from ckpt.consistency.checksums import BLOCK_SIZE_BYTES, crc64nvme, cut_crcs, joined_blocks
from ckpt.consistency.digests import FileDigests, PayloadDigest, StoredDigest
from ckpt.references.digests import Comparison, compare
from ckpt.transfer.buffer_pool import StagingPool
from ckpt.transfer.file_body import FileBody, FileItem, TensorPayload
from ckpt.transfer.tensor_memory import memory_of

_PART_BYTES = 2 * BLOCK_SIZE_BYTES


def written(tensors: list[torch.Tensor], *, seed: int = 0) -> list[StoredDigest]:
    """Digest tensors as a file is sent, its parts in some order, one of them twice."""
    items: list[FileItem] = []
    end = 0
    for tensor in tensors:
        payload = TensorPayload(lambda tensor=tensor: tensor, tensor.nbytes, "t")  # type: ignore[misc]
        items.append(FileItem(end, b"h" * 64, payload, b"t" * 64))
        end += items[-1].length
        end += -end % 64
    digests = [PayloadDigest(item.payload_offset, item.payload.nbytes) for item in items]
    body = FileBody(items, StagingPool(), see=FileDigests(digests).see)
    starts = list(range(0, body.nbytes, _PART_BYTES))
    for start in random.Random(seed).sample(starts, len(starts)) + starts[:1]:
        with body.part(start, min(start + _PART_BYTES, body.nbytes)):
            pass
    return [
        StoredDigest(
            digest.start, digest.stop - digest.start, BLOCK_SIZE_BYTES, digest.digest(), digest.probe
        )
        for digest in digests
    ]


def tensors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    sizes = (3, 1000, 700_000, 0, 16, 40_000, 131_072, 300_001)
    made = [torch.randn(size, generator=generator) for size in sizes]
    return [*made, torch.randn(500, 300, generator=generator).t(), torch.randn(2, generator=generator)]


def equal(tensor: torch.Tensor, stored: StoredDigest) -> bool:
    return compare([Comparison(lambda: tensor, stored)], StagingPool(), lambda: None)[0]


def test_a_digest_does_not_depend_on_the_order_of_parts() -> None:
    assert written(tensors(), seed=1) == written(tensors(), seed=2)


def test_the_digest_of_what_lies_in_one_block_is_that_of_its_bytes() -> None:
    for tensor, stored in zip(tensors(), written(tensors()), strict=True):
        blocks = {stored.start // BLOCK_SIZE_BYTES, (stored.start + stored.nbytes - 1) // BLOCK_SIZE_BYTES}
        if len(blocks) == 1 or not stored.nbytes:
            assert stored.digest == xxhash.xxh3_128_digest(memory_of(tensor.contiguous()))


@pytest.mark.parametrize("with_probe", [True, False])
def test_tensors_are_equal_only_if_all_bytes_are(with_probe: bool) -> None:
    """Wherever the change is, and wherever the tensor lies in its file or in memory."""
    for tensor, written_one in zip(tensors(), written(tensors()), strict=True):
        stored = written_one if with_probe else written_one._replace(probe=b"")
        for layout in (tensor, torch.stack([tensor, tensor], -1)[..., 0]):
            assert equal(layout, stored)
        flat = tensor.reshape(-1)
        for place in {0, len(flat) // 2, len(flat) - 1} if len(flat) else ():
            changed = flat.clone()
            changed[place] += 1
            assert not equal(changed, stored), place
        if len(flat):
            assert not equal(flat[1:], stored)


def test_what_begins_otherwise_is_read_no_further() -> None:
    """A GPU's tensor is copied for nothing else."""
    tensor = torch.randn(700_000)
    (stored,) = written([tensor])
    asked = 0

    def resolve() -> torch.Tensor:
        nonlocal asked
        asked += 1
        return tensor + 1

    assert compare([Comparison(resolve, stored)], StagingPool(), lambda: None) == [False]
    assert asked == 1


def test_hostile_places_of_digests_are_no_matches() -> None:
    tensor = torch.randn(700_000).reshape(1000, 700).t()
    (stored,) = written([tensor])
    assert equal(tensor, stored)
    for change in ({"start": stored.start + 1}, {"block_size_bytes": (1 << 16) + 1}, {"nbytes": 1 << 60}):
        assert not equal(tensor, stored._replace(**change))  # type: ignore[arg-type]
    assert not compare([Comparison(lambda: None, stored)], StagingPool(), lambda: None)[0]


@pytest.mark.parametrize("seed", range(200))
def test_checksums_of_pieces_are_those_of_their_bytes(seed: int) -> None:
    """Whatever the buffers and the cuts: they may be empty, lie beyond the end, come twice or end with a block."""
    draw = random.Random(seed)
    data, block = draw.randbytes(draw.choice([0, 1, 64, 999, 1000])), draw.choice([1, 7, 64, 1000])
    cuts = sorted(draw.choices([0, block, len(data), 2000, *range(len(data))], k=draw.randint(0, 6)))
    ends = sorted([0, *draw.choices(range(len(data) + 1), k=draw.randint(0, 6)), len(data)])
    buffers = [memoryview(data)[a:b] for a, b in itertools.pairwise(ends)]
    seen: list[tuple[int, bytes]] = []
    pieces = cut_crcs(buffers, block, cuts, lambda position, run: seen.append((position, bytes(run))))
    edges = sorted({0, len(data), *range(0, len(data), block), *(cut for cut in cuts if cut < len(data))})
    assert pieces == [(a, b - a, crc64nvme(data[a:b])) for a, b in itertools.pairwise(edges)]
    assert seen == [(a, data[a:b]) for a, b in itertools.pairwise(sorted({*edges, *ends}))]
    blocks = [crc64nvme(data[at : at + block]) for at in range(0, len(data), block)]
    assert joined_blocks(pieces, block) == blocks
