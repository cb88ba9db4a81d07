from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.row_stores import DictRows

from ckpt.embeddings import cut as cut_module
from ckpt.embeddings import shard as shard_module
from ckpt.embeddings.chain import first_to_merge
from ckpt.embeddings.cut import Cut
from ckpt.embeddings.rows import Column, DenseRows, home_of
from ckpt.embeddings.shard import TableShard
from ckpt.errors import CheckpointError, ConfigurationError

COLUMNS = {"values": Column(4, torch.float32), "adagrad": Column(1, torch.float32)}


def dense(count: int = 100, first_id: int = 1000) -> DenseRows:
    values = torch.arange(count * 4, dtype=torch.float32).reshape(count, 4)
    return DenseRows(first_id, values=values, adagrad=torch.zeros(count))


def growing() -> DictRows:
    rows = DictRows(COLUMNS)
    ids = np.arange(0, 300, 3)
    rows.write(ids, {"values": torch.randn(100, 4), "adagrad": torch.zeros(100, 1)})
    return rows


def following(shard: TableShard) -> Cut:
    shard.begin()
    return shard.choose(first_to_merge([shard.costs()]))


def first(shard: TableShard) -> Cut:
    shard.begin()
    return shard.choose()


def contents(cut: Cut) -> dict[str, torch.Tensor]:
    blocks = range(cut.generation.blocks)
    return {name: torch.cat([cut.read(name, block) for block in blocks]) for name in cut.columns}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_module, "BLOCK_BYTES", 16 * 7)  # 7 rows
    monkeypatch.setattr(cut_module, "_PIECE_BYTES", 16 * 3)


def test_a_block_is_read_in_pieces_between_which_rows_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = dense()
    shard = TableShard("user", rows)
    cut = first(shard)
    expected = rows.read(cut.ids[:7], ["values"])["values"]

    def write(_: float) -> None:
        writing = threading.Thread(target=change)
        writing.start()
        writing.join(20)
        assert not writing.is_alive()

    def change() -> None:
        with shard.writing(cut.ids):
            rows.write(cut.ids, {"values": torch.zeros(len(cut.ids), 4)})

    monkeypatch.setattr("ckpt.embeddings.cut.time.sleep", write)
    assert torch.equal(cut.read("values", 0), expected)


@pytest.mark.parametrize("make", [dense, growing])
def test_rows_change_while_they_are_read_and_the_cut_does_not(make: Callable[[], Any]) -> None:
    rows = make()
    shard = TableShard("user", rows)
    ids = np.sort(rows.ids())
    cut = first(shard)
    expected = rows.read(cut.ids, COLUMNS)
    assert sorted(cut.ids.tolist()) == ids.tolist()
    random = np.random.default_rng(1)
    for _ in range(20):
        batch = random.choice(ids, size=12)
        with shard.writing(batch):
            unique = np.unique(batch)
            rows.write(unique, {"values": torch.randn(len(unique), 4), "adagrad": torch.ones(len(unique), 1)})
        got = contents(cut)
        assert all(torch.equal(got[name], expected[name]) for name in COLUMNS)
    assert cut.aside_bytes > 0


def test_rows_that_come_and_go_during_a_save_belong_to_the_next() -> None:
    rows = growing()
    shard = TableShard("user", rows)
    cut = first(shard)
    expected = rows.read(cut.ids, COLUMNS)
    shard.evict([0, 3])
    with shard.writing([1, 3]):
        rows.write(np.array([1, 3]), {"values": torch.ones(2, 4), "adagrad": torch.ones(2, 1)})
    got = contents(cut)
    assert all(torch.equal(got[name], expected[name]) for name in COLUMNS)
    shard.settle(durable=True)
    delta = following(shard)
    assert delta.generation.kind == "delta"
    assert sorted(delta.ids.tolist()) == [1, 3]
    assert delta.evicted.tolist() == [0, 3]


@pytest.mark.parametrize("kind", ["base", "delta"])
def test_rows_change_between_the_cut_and_the_choice_of_what_it_writes(kind: str) -> None:
    rows = growing()
    shard = TableShard("user", rows, max_delta_ratio=9.0)
    if kind == "delta":
        first(shard)
        shard.settle(durable=True)
    shard.touch([0, 3, 6, 9])
    before = {id: rows.read(np.array([id]), COLUMNS) for id in rows.ids().tolist()}
    cut = shard.begin()

    def write(*ids: int) -> None:
        with shard.writing(ids):
            rows.write(
                np.array(ids), {"values": torch.randn(len(ids), 4), "adagrad": torch.ones(len(ids), 1)}
            )

    write(3, 12, 1)  # of the delta, of the base alone, of neither
    write(3, 1)
    shard.evict([0, 15, 1])
    write(0, 15)  # they come again
    shard.evict([9])
    shard.choose(first_to_merge([shard.costs()]))
    write(6, 1, 18)
    shard.evict([3])
    assert cut.generation.kind == kind
    assert sorted(cut.ids.tolist()) == ([0, 3, 6, 9] if kind == "delta" else sorted(before))
    got = contents(cut)
    for number, id in enumerate(cut.ids.tolist()):
        assert all(torch.equal(got[name][number], before[id][name][0]) for name in COLUMNS), id
    shard.settle(durable=True)
    shard.begin()
    assert sorted(shard.choose(first_to_merge([shard.costs()])).ids.tolist()) == [0, 1, 6, 12, 15, 18]


def test_a_save_that_fails_before_the_choice_loses_nothing() -> None:
    shard = TableShard("user", growing())
    first(shard)
    shard.settle(durable=True)
    shard.touch([3])
    shard.begin()
    with shard.writing([6]):
        pass
    shard.settle(durable=False)
    assert sorted(following(shard).ids.tolist()) == [3, 6]


def test_what_a_failed_save_did_not_save_is_in_the_next() -> None:
    rows = dense()
    shard = TableShard("user", rows)
    first(shard)
    shard.settle(durable=True)
    shard.touch([1001, 1002])
    failed = following(shard)
    shard.settle(durable=False)
    shard.touch([1005])
    cut = following(shard)
    assert cut.ids.tolist() == [1001, 1002, 1005]
    assert cut.generation.number > failed.generation.number


def test_deltas_are_merged_and_an_evicted_row_is_not_brought_back() -> None:
    rows = growing()
    shard = TableShard("user", rows, max_deltas=2, max_delta_ratio=10.0)
    first(shard)
    shard.settle(durable=True)
    for ids in ([3, 6], [6, 9]):
        shard.touch(ids)
        following(shard)
        shard.settle(durable=True)
    shard.evict([6])
    shard.touch([12])
    cut = following(shard)
    assert [g.kind for g in cut.chain.generations] == ["base", "delta"]
    assert sorted(cut.ids.tolist()) == [3, 9, 12]
    assert cut.evicted.tolist() == [6]
    shard.settle(durable=False)
    shard.touch([15])
    assert sorted(following(shard).ids.tolist()) == [3, 9, 12, 15]


def test_copies_are_bounded_and_training_goes_on() -> None:
    rows = dense()
    shard = TableShard("user", rows, max_aside_bytes=10 * 20)
    cut = first(shard)
    with shard.writing(np.arange(1000, 1010)):
        rows.write(np.arange(1000, 1010), {"values": torch.ones(10, 4)})
    contents(cut)
    with shard.writing([1010]):
        rows.write(np.array([1010]), {"values": torch.ones(1, 4)})
    assert cut.aside_bytes == 0
    with pytest.raises(CheckpointError, match="max_aside_bytes"):
        cut.read("values", 0)
    shard.touch([1011])
    shard.settle(durable=False)
    assert first(shard).generation.rows == 100


def test_misuse_is_one_clear_error() -> None:
    shard = TableShard("user", dense())
    with pytest.raises(ConfigurationError, match="the id 7 does not belong into shard 0 of 1 of 'user'"):
        shard.touch([1003, 7])
    with pytest.raises(ConfigurationError, match="does not belong"), shard.writing([1100]):
        pass
    first(shard)
    with pytest.raises(ConfigurationError, match="has not ended"):
        first(shard)
    with pytest.raises(ConfigurationError, match="while they are being saved"):
        shard.touch([1001])
    with pytest.raises(ConfigurationError, match="evicts none"):
        shard.evict([1001])
    shard.settle(durable=False)
    with pytest.raises(ConfigurationError, match="outside of `writing`"), shard.writing([1001]):
        first(shard)
    wrong: list[dict[str, Any]] = [
        {"name": "a.b"},
        {"name": ""},
        {"shard": 1},
        {"max_deltas": 0},
        {"max_deltas": 15},
        {"rows": DenseRows(0, values=torch.zeros(3, 0))},
        {"rows": DenseRows(0, values=torch.zeros(3, 2).double()), "quantize": {"values": 8}},
        {"max_delta_ratio": 0.0},
        {"quantize": {"nothing": 8}},
        {"quantize": {"values": 5}},
    ]
    for arguments in wrong:
        with pytest.raises(ConfigurationError):
            TableShard(**{"name": "user", "rows": dense(), **arguments})


def test_homes_are_even_and_few_rows_move() -> None:
    ids = np.arange(100_000)
    counts = np.bincount(home_of(ids, 7), minlength=7)
    assert counts.min() > 0.95 * 100_000 / 7
    assert home_of(ids[:5], 1).tolist() == [0] * 5
    assert (
        home_of(np.array([0, 1, 2, 12345]), 1 << 20).tolist()
        == home_of(np.array([0, 1, 2, 12345]), 1 << 20).tolist()
    )


def test_rows_that_change_outside_of_writing_fail_the_save_and_are_in_the_next() -> None:
    shard = TableShard("user", dense())
    first(shard)
    shard.settle(durable=True)
    shard.touch([1005])
    cut = following(shard)
    with pytest.raises(ConfigurationError, match="so that save fails"):
        shard.touch([1005, 1007])
    with pytest.raises(CheckpointError, match="outside of `writing`"):
        cut.read("values", 0)
    shard.settle(durable=False)
    assert following(shard).ids.tolist() == [1005, 1007]


def test_ids_that_could_not_be_restored_are_refused() -> None:
    ids = np.arange(100)
    others = DictRows(COLUMNS, 1, 2)
    foreign = ids[~others.owns(ids)][:1]
    shard = TableShard("user", others, shard=1, shards=2)
    with pytest.raises(ConfigurationError, match="does not belong into shard 1 of 2"):
        shard.evict(foreign)
    others.write(foreign, {"values": torch.ones(1, 4), "adagrad": torch.ones(1, 1)})
    with pytest.raises(ConfigurationError, match="does not belong into shard 1 of 2"):
        first(shard)


def test_a_store_that_owns_more_than_its_part_of_the_hash_is_refused() -> None:
    """Two ranks, whose stores both own all rows: each update would be saved twice, and one of them restored."""
    shards = [TableShard("user", growing(), shard=rank, shards=2) for rank in (0, 1)]
    ids = np.arange(100)
    for shard in shards:
        with pytest.raises(ConfigurationError, match=r"by `owns` and `home_of`"), shard.writing(ids):
            pass


def test_bitmaps_of_dense_rows_begin_with_their_first_row() -> None:
    shard = TableShard("user", dense())
    first(shard)
    shard.settle(durable=True)
    bitmap = np.zeros(100, dtype=bool)
    bitmap[[0, 99]] = True
    shard.touch(bitmap)
    assert following(shard).ids.tolist() == [1000, 1099]
