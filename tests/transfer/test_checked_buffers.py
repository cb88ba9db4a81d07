"""Blocks that are checked while they come, whatever a store shows of them."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

import ckpt.backends.cancellable_reads as reads
from ckpt.backends.base import Store, put_bytes
from ckpt.backends.bodies import WatchedBuffers, fill, showing, split
from ckpt.backends.posix import PosixStore
from ckpt.backends.registry import open_store
from ckpt.backends.wrapper import WrappedStore
from ckpt.consistency.checksums import CheckedBuffers, block_crcs, crc64nvme, joined_blocks, joined_runs
from ckpt.errors import IntegrityError, StorageUnavailable, Truncated
from ckpt.local_first.near_store import NearStore
from ckpt.transfer.fetcher import StoredFile, at_once, read_pieces, read_verified

BLOCK = 1000
DATA = random.Random(1).randbytes(10 * BLOCK + 77)
CRCS = block_crcs([memoryview(DATA)], BLOCK)


def buffers_of(*sizes: int) -> list[memoryview]:
    return [memoryview(bytearray(size)) for size in sizes]


@pytest.mark.parametrize("seed", range(50))
def test_what_comes_in_any_pieces_has_the_same_checksums(seed: int) -> None:
    draw = random.Random(seed)
    ends = sorted(draw.choices(range(len(DATA) + 1), k=draw.randrange(9)))
    checked = CheckedBuffers(
        buffers_of(*(end - begin for begin, end in zip([0, *ends], [*ends, len(DATA)], strict=True))), BLOCK
    )
    left, position = [*checked], 0
    with showing(checked) as came:
        while left:
            size = min(draw.choice([1, 10, 999, 1000, 1001, 5000]), len(DATA) - position)
            piece, left = split(left, size)
            fill(piece, memoryview(DATA)[position : position + size])
            position += size
            if draw.random() < 0.9:
                came(size)
            else:  # the rest is not shown
                fill(left, memoryview(DATA)[position:])
                break
    assert checked.crcs() == CRCS


def test_what_a_failed_read_has_shown_does_not_count() -> None:
    checked = CheckedBuffers(buffers_of(len(DATA)), BLOCK)
    with pytest.raises(OSError, match="broken"), showing(checked) as came:  # noqa: PT012
        fill(checked, memoryview(bytes(5 * BLOCK)))
        came(5 * BLOCK)
        raise OSError("broken")
    fill(checked, memoryview(DATA))  # by a store that shows nothing
    assert checked.crcs() == CRCS


def test_a_read_that_was_given_up_shows_nothing_any_more() -> None:
    """Its thread may run on for a while, when the next read of these buffers has begun."""
    checked = CheckedBuffers(buffers_of(len(DATA)), BLOCK)
    old, new = showing(checked), showing(checked)
    came = old.__enter__()
    with new:
        fill(checked, memoryview(DATA))
        came(5 * BLOCK)
        fill(checked, memoryview(bytes(5 * BLOCK)))
        came(BLOCK)
    zeroed = bytes(5 * BLOCK) + DATA[5 * BLOCK :]
    assert checked.crcs() == block_crcs([memoryview(zeroed)], BLOCK)
    old.__exit__(None, None, None)


def test_other_buffers_are_not_looked_at() -> None:
    with showing(buffers_of(5)) as came:
        came(5)


class Late(WrappedStore):
    """Fills the buffers with other bytes, and has shown them, when it fails."""

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        with showing(buffers) as came:
            fill(buffers, memoryview(bytes(len(DATA))))
            came(len(DATA))
        raise StorageUnavailable("too late", url=self.url, key=key)


def test_the_next_place_counts_where_the_first_has_failed_after_all() -> None:
    far = open_store("memory://checked/far")
    put_bytes(far, "k", DATA)
    near = NearStore([("near", Late(open_store("memory://checked/near"))), ("far", far)])
    checked = CheckedBuffers(buffers_of(len(DATA)), BLOCK)
    near.read_into("k", 0, checked)
    assert bytes(checked[0]) == DATA
    assert checked.crcs() == CRCS


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr(reads, "_CACHED_PIECE_BYTES", 2 * BLOCK)
    store = PosixStore(str(tmp_path))
    put_bytes(store, "k", DATA)
    return store


def read(store: Store) -> list[int]:
    shown: list[int] = []

    class Watched(WatchedBuffers):
        def begin(self) -> None:
            shown.clear()

        def came(self, nbytes: int) -> None:
            position = sum(shown)
            shown.append(nbytes)
            assert b"".join(self)[position : position + nbytes] == DATA[position : position + nbytes]

    buffers = Watched(buffers_of(300, 0, 3 * BLOCK, len(DATA) - 300 - 3 * BLOCK))
    store.read_into("k", 0, buffers)
    assert b"".join(buffers) == DATA
    return shown


def test_a_cached_file_comes_in_pieces(file: Store, tmp_path: Path) -> None:
    with (tmp_path / "k").open("rb") as opened:
        try:
            os.preadv(opened.fileno(), [bytearray(1)], 0, os.RWF_NOWAIT)
        except (AttributeError, NotImplementedError, OSError):  # tmpfs, for one
            pytest.skip("this system, or file system, does not tell what is cached")
    assert read(file) == [2 * BLOCK] * 5 + [77]


def test_a_file_comes_at_once_where_nobody_tells_what_is_cached(
    file: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reads, "_NOWAIT", None)
    assert read(file) == [len(DATA)]


@pytest.mark.parametrize("cached_bytes", [0, 1, 2 * BLOCK, 3 * BLOCK, len(DATA)])
def test_a_file_that_is_cached_in_part(
    file: Store, cached_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last byte is; then comes what is cached, and the rest at once."""
    nowait, preadv = 1 << 30, os.preadv

    def read_some(fd: int, buffers: Sequence[memoryview], offset: int, flags: int = 0) -> int:
        if flags == nowait and offset < len(DATA) - 1:
            if offset >= cached_bytes:
                raise BlockingIOError
            buffers = split(buffers, cached_bytes - offset)[0]
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(reads, "_NOWAIT", nowait)
    monkeypatch.setattr(os, "preadv", read_some)
    shown = read(file)
    pieces = [min(2 * BLOCK, cached_bytes - start) for start in range(0, cached_bytes, 2 * BLOCK)]
    rest = len(DATA) - cached_bytes
    assert shown == [*pieces, *([rest] if rest else [])]


def test_what_was_shown_of_a_file_that_is_too_short_does_not_count(file: Store) -> None:
    checked = CheckedBuffers(buffers_of(len(DATA) + 1), BLOCK)
    with pytest.raises(Truncated):
        file.read_into("k", 0, checked)
    other = memoryview(bytes(len(DATA) + 1))
    fill(checked, other)  # by a store that shows nothing
    assert checked.crcs() == block_crcs([other], BLOCK)


def test_a_damaged_block_of_a_cached_file_is_found(file: Store, tmp_path: Path) -> None:
    path = tmp_path / "k"
    damaged = bytearray(DATA)
    damaged[4 * BLOCK + 5] ^= 1
    path.write_bytes(damaged)
    stored = StoredFile("k", len(DATA), BLOCK, CRCS)
    with pytest.raises(IntegrityError) as caught:
        read_verified(file, stored, 0, buffers_of(len(DATA)), at_once)
    assert (caught.value.start, caught.value.stop) == (4 * BLOCK, 5 * BLOCK)
    path.write_bytes(DATA)
    assert read_verified(file, stored, 0, buffers_of(len(DATA)), at_once) == CRCS


@pytest.mark.parametrize("seed", range(30))
def test_pieces_between_cuts_have_checksums_too(seed: int) -> None:
    """Whatever comes when, and whether the file has checksums of its own or not."""
    draw = random.Random(seed)
    cuts = sorted({draw.randrange(len(DATA) + 1) for _ in range(draw.randrange(1, 12))})
    checked = CheckedBuffers(buffers_of(len(DATA)), BLOCK, cuts)
    with showing(checked) as came:
        fill(checked, memoryview(DATA))
        came(draw.randrange(len(DATA)))
    pieces = checked.pieces()
    assert joined_blocks(pieces, BLOCK) == CRCS
    ends = [begin + nbytes for begin, nbytes, _ in pieces]
    assert {*cuts} - {0} <= {*ends}
    for start, stop in itertools.pairwise([0, *cuts, len(DATA)]):
        between = [piece for piece in pieces if start <= piece[0] < stop]
        assert joined_runs(between) == crc64nvme(DATA[start:stop])


@pytest.mark.parametrize("crcs", [CRCS, None])
def test_a_read_returns_the_checksums_between_cuts(tmp_path: Path, crcs: list[int] | None) -> None:
    (tmp_path / "f").write_bytes(DATA)
    stored = StoredFile("f", len(DATA), BLOCK if crcs else 1, crcs)
    with closing(PosixStore(str(tmp_path))) as store:
        pieces = read_pieces(store, stored, 2 * BLOCK, buffers_of(5 * BLOCK), at_once, cuts=[70, 3333])
    own = [piece for piece in pieces if 70 <= piece[0] < 3333]
    assert joined_runs(own) == crc64nvme(DATA[2 * BLOCK + 70 : 2 * BLOCK + 3333])
