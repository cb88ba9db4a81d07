"""Tables saved and restored by real saves, compared with what they were at each."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.row_stores import DictRows

import ckpt
from ckpt.embeddings import UpdateGate, saving
from ckpt.embeddings import shard as shard_module
from ckpt.embeddings.cut import Cut
from ckpt.embeddings.rows import Column, DenseRows, Ids
from ckpt.embeddings.saving import Tables
from ckpt.embeddings.shard import TableShard
from ckpt.errors import ConfigurationError, LoadFailed, SaveFailed

RowsById = dict[int, dict[str, torch.Tensor]]
COLUMNS = {"values": Column(4, torch.float32), "adagrad": Column(1, torch.float64)}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_module, "BLOCK_BYTES", 16 * 7)  # 7 rows


def rows_like(ids: Ids, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "values": torch.randn(len(ids), 4, generator=generator),
        "adagrad": torch.rand(len(ids), 1, generator=generator, dtype=torch.float64),
    }


def restored(url: Path, shards: int = 1) -> RowsById:
    """Restore a table into so many shards of its own; return its rows by id."""
    rows: RowsById = {}
    for number in range(shards):
        store = DictRows(COLUMNS, number, shards)
        Tables(TableShard("user", store, shard=number, shards=shards)).restore(url)
        assert not rows.keys() & store.rows.keys()
        rows.update(store.rows)
    return rows


def same(rows: RowsById, others: RowsById) -> bool:
    return rows.keys() == others.keys() and all(
        torch.equal(row[name], others[id][name]) for id, row in rows.items() for name in COLUMNS
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.long) for n in range(1, 12))])
def test_any_checkpoint_restores_the_rows_of_its_time_on_any_number_of_shards(
    tmp_path: Path, seed: int
) -> None:
    random = np.random.default_rng(seed)
    store = DictRows(COLUMNS)
    shard = TableShard("user", store, max_deltas=3, max_delta_ratio=1.0)
    tables = Tables(shard)
    expected: dict[int, tuple[Path, RowsById]] = {}
    kinds = []
    for step in range(12):
        ids = np.unique(random.integers(0, 400, size=120 if step == 0 else random.integers(0, 15)))
        with shard.writing(ids):
            store.write(ids, rows_like(ids, step))
        shard.evict(random.integers(0, 400, size=random.integers(0, 10)))
        url = tmp_path / f"step-{step}"
        tables.save({"step": step, "dense": torch.full([3], step)}, url)
        assert shard._chain is not None
        kinds.append(len(shard._chain.generations))
        expected[step] = (url, {id: {n: v.clone() for n, v in row.items()} for id, row in store.rows.items()})
        if random.random() < 0.3:  # another process goes on
            store = DictRows(COLUMNS)
            shard = TableShard("user", store, max_deltas=3, max_delta_ratio=1.0)
            tables = Tables(shard)
            tables.restore(url)
            assert same(store.rows, expected[step][1])
    assert 1 < max(kinds) <= 4
    for step, (url, rows) in expected.items():
        for shards in (1, 3):
            assert same(restored(url, shards), rows), (step, shards)
        state = {"step": -1, "dense": torch.zeros(3)}
        ckpt.load(state, url)
        assert state["step"] == step
        assert ckpt.verify(url).ok


def test_a_dense_table_is_saved_by_its_changes_and_restored_into_its_memory(tmp_path: Path) -> None:
    values, state = torch.randn(1000, 4), torch.zeros(1000)
    shard = TableShard("item", DenseRows(0, values=values, adagrad=state))
    tables = Tables(shard)
    tables.save({}, tmp_path / "0")
    for step in range(1, 4):
        ids = torch.randint(0, 1000, [20])
        with shard.writing(ids):
            values[ids] += 1
            state[ids] += step
        tables.save({}, tmp_path / str(step))
    full, delta = (next(iter(ckpt.list_checkpoints(tmp_path / name))).size_bytes for name in ("0", "3"))
    assert full is not None
    assert delta is not None
    assert delta < full / 5
    for shards in (1, 4):
        pieces = []
        for number in range(shards):
            count = 1000 // shards
            part, adagrad = torch.zeros(count, 4), torch.zeros(count)
            rows = DenseRows(number * count, values=part, adagrad=adagrad)
            counts = Tables(TableShard("item", rows, shard=number, shards=shards)).restore(tmp_path / "3")
            assert counts["item"] >= count
            pieces.append((part, adagrad))
        assert torch.equal(torch.cat([part for part, _ in pieces]), values)
        assert torch.equal(torch.cat([adagrad for _, adagrad in pieces]), state)


def test_quantized_deltas_are_off_by_no_more_than_they_say(tmp_path: Path) -> None:
    values = torch.randn(200, 64)
    shard = TableShard("item", DenseRows(0, values=values), quantize={"values": 8}, max_delta_ratio=2.0)
    tables = Tables(shard)
    tables.save({}, tmp_path / "0")
    ids = torch.arange(0, 200, 3)
    with shard.writing(ids):
        values[ids] = torch.randn(len(ids), 64)
    tables.save({}, tmp_path / "1")
    back = torch.zeros(200, 64)
    other = TableShard("item", DenseRows(0, values=back), quantize={"values": 8})
    Tables(other).restore(tmp_path / "1")
    untouched = torch.ones(200, dtype=torch.bool)
    untouched[ids] = False
    assert torch.equal(back[untouched], values[untouched])
    assert not torch.equal(back, values)
    step = (values.amax(1) - values.amin(1)) / 510
    assert ((back - values).abs().amax(1) <= step * 1.001).all()


def test_rows_change_during_a_background_save(tmp_path: Path) -> None:
    values = torch.randn(500, 4)
    before = values.clone()
    shard = TableShard("item", DenseRows(0, values=values))
    tables = Tables(shard)
    future = tables.async_save({}, tmp_path / "0")
    for number in range(0, 500, 10):
        with shard.writing(np.arange(number, number + 10)):
            values[number : number + 10] = -1
    future.result()
    back = torch.zeros(500, 4)
    Tables(TableShard("item", DenseRows(0, values=back))).restore(tmp_path / "0")
    assert torch.equal(back, before)
    tables.save({}, tmp_path / "1")
    Tables(TableShard("item", DenseRows(0, values=back))).restore(tmp_path / "1")
    assert torch.equal(back, values)


def test_a_base_that_is_gone_means_a_base_again(tmp_path: Path) -> None:
    values = torch.randn(100, 4)
    shard = TableShard("item", DenseRows(0, values=values))
    tables = Tables(shard)
    tables.save({}, tmp_path / "0")
    ckpt.remove(tmp_path / "0")
    with shard.writing([3]):
        values[3] = 7
    with pytest.raises(ckpt.errors.CheckpointError, match="base"):
        tables.save({}, tmp_path / "1")
    tables.save({}, tmp_path / "1")
    back = torch.zeros(100, 4)
    Tables(TableShard("item", DenseRows(0, values=back))).restore(tmp_path / "1")
    assert torch.equal(back, values)


def test_another_table_than_stored_is_one_clear_error(tmp_path: Path) -> None:
    Tables(TableShard("item", DenseRows(0, values=torch.zeros(10, 4)))).save({"a": 1}, tmp_path / "0")
    ckpt.save({"a": 1}, tmp_path / "none")

    def restore(name: str, url: str = "0", **columns: torch.Tensor) -> None:
        Tables(TableShard(name, DenseRows(0, **columns))).restore(tmp_path / url)

    with pytest.raises(LoadFailed, match="no table 'user'; it has item"):
        restore("user", values=torch.zeros(10, 4))
    with pytest.raises(LoadFailed, match="or any other"):
        restore("user", "none", values=torch.zeros(10, 4))
    with pytest.raises(ConfigurationError, match=r"'values'.* is float32 x 5 here and float32 x 4"):
        restore("item", values=torch.zeros(10, 5))
    with pytest.raises(ConfigurationError, match="is bfloat16 x 4 here"):
        restore("item", values=torch.zeros(10, 4, dtype=torch.bfloat16))
    with pytest.raises(ConfigurationError, match=r"'momentum'.* is float32 x 1 here and missing in"):
        restore("item", values=torch.zeros(10, 4), momentum=torch.zeros(10))
    with pytest.raises(ConfigurationError, match="one shard of each table"):
        Tables(*[TableShard("item", DenseRows(0, values=torch.zeros(1)))] * 2)


def dense(
    count: int = 100, value: float = 0.0, name: str = "item", **more: Any
) -> tuple[torch.Tensor, TableShard, Tables]:
    values = torch.full((count, 4), value)
    shard = TableShard(name, DenseRows(0, values=values), **more)
    return values, shard, Tables(shard)


def test_frozen_names_nothing_of_tables(tmp_path: Path) -> None:
    values, shard, tables = dense()
    for step in range(3):
        with shard.writing(np.arange(100)):
            values.fill_(step)
        tables.save({"dense": torch.ones(100_000)}, tmp_path / f"{step}", frozen=["*"])
    back, _, others = dense(value=-1.0)
    others.restore(tmp_path / "2")
    assert torch.equal(back, values)
    assert ckpt.inspect(tmp_path / "2").commit.bases  # type: ignore[union-attr]


def test_a_save_or_restore_waits_for_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values, shard, tables = dense()
    begun, go_on = threading.Event(), threading.Event()
    read = Cut.read

    def slow(cut: Cut, column: str, block: int) -> torch.Tensor:
        begun.set()
        assert go_on.wait(60)
        return read(cut, column, block)

    monkeypatch.setattr(Cut, "read", slow)
    first = tables.async_save({}, tmp_path / "0")
    assert begun.wait(60)
    with shard.writing([3]):
        values[3] = 7
    threading.Timer(0.05, go_on.set).start()
    tables.async_save({}, tmp_path / "1")
    assert first.done()
    with shard.writing([3]):
        values[3] = 8
    tables.restore(tmp_path / "1")
    assert (values[3] == 7).all()
    with shard.writing([3]), pytest.raises(ConfigurationError, match="outside of `writing`"):
        tables.restore(tmp_path / "0")
    with shard.writing([3]), pytest.raises(ConfigurationError, match="outside of `writing`"):
        tables.save({}, tmp_path / "2")


def test_a_shard_that_nobody_keeps_is_found_before_the_save(tmp_path: Path) -> None:
    _, _, tables = dense(shard=1, shards=2)
    with pytest.raises(ConfigurationError, match="each shard of 'item' once, and keep 1 of 2"):
        tables.save({}, tmp_path / "0")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("count", "goes_on"), [(100, True), (60, False), (150, False)])
def test_a_chain_goes_on_where_it_holds_the_rows_of_the_store(
    tmp_path: Path, count: int, goes_on: bool
) -> None:
    dense()[2].save({}, tmp_path / "0")
    values, shard, tables = dense(count, 5.0)
    tables.restore(tmp_path / "0", on_shape="resize")
    assert (shard._chain is not None) == goes_on
    tables.save({}, tmp_path / "1")
    back, _, others = dense(count, 1.0)
    others.restore(tmp_path / "1")
    assert torch.equal(back, values)


def test_tables_of_which_one_begins_anew_stay_within_few_checkpoints(tmp_path: Path) -> None:
    _, one, _ = dense(name="one", max_deltas=3)
    _, two, _ = dense(name="two", max_deltas=3)
    tables = Tables(one, two)
    for step in range(8):
        one.touch([step])
        two.touch(np.arange(100) if step == 2 else [step])
        tables.save({}, tmp_path / f"{step}")
        assert one._chain
        assert two._chain
        assert len(one._chain.generations) == len(two._chain.generations)


def test_a_base_that_is_damaged_or_elsewhere_means_a_base_again(tmp_path: Path) -> None:
    _, _, tables = dense()
    state = {"dense": torch.ones(50)}
    tables.save(state, tmp_path / "0")
    tables.save(state, tmp_path / "0")  # in its own place, and in another folder
    tables.save(state, tmp_path / "other" / "0")
    (manifest,) = (tmp_path / "other" / "0" / "rank-00000").glob("*.json")
    manifest.write_bytes(manifest.read_bytes()[:-9] + b"x" * 9)
    with pytest.raises(SaveFailed, match="stored bytes"):
        tables.save(state, tmp_path / "other" / "1")
    tables.save(state, tmp_path / "other" / "1")
    with pytest.raises(ConfigurationError, match="chooses planner itself"):
        tables.save(state, tmp_path / "other" / "2", planner=saving.TablePlanner())


def test_a_restore_that_fails_leads_to_a_base(tmp_path: Path) -> None:
    _, _, tables = dense()
    tables.save({}, tmp_path / "0")
    (data,) = (tmp_path / "0" / "rank-00000").glob("*.distcp")
    content = data.read_bytes()
    data.write_bytes(content[: len(content) // 2])
    with pytest.raises(ckpt.errors.CheckpointError):
        tables.restore(tmp_path / "0")
    tables.save({}, tmp_path / "1")
    assert not ckpt.inspect(tmp_path / "1").commit.bases  # type: ignore[union-attr]


def test_a_save_takes_the_rows_when_the_updates_of_its_epoch_are_there(tmp_path: Path) -> None:
    values, shard, tables = dense()
    gate = UpdateGate([0])

    def update() -> None:
        with shard.writing([3]):
            values[3] += 1

    gate.submit(0, 0, update)
    later = gate.submit(0, 1, update)
    gate.mark(0, 0, 2)
    with pytest.raises(SaveFailed, match=r"the cut of epoch 0 .* 1 of 2 updates of source 0 have not"):
        tables.save({}, tmp_path / "0", gate=gate, timeout_s=1)
    threading.Timer(0.05, gate.submit, (0, 0, update)).start()
    future = tables.async_save({}, tmp_path / "0", gate=gate)
    assert later.done()
    future.result(60)
    back, _, others = dense(value=-1.0)
    others.restore(tmp_path / "0")
    assert (back[3] == 2).all()
    assert (values[3] == 3).all()


def test_the_future_raises_what_fails_and_the_next_save_has_the_rows(tmp_path: Path) -> None:
    values, shard, tables = dense()
    tables.save({}, tmp_path / "0")
    with shard.writing([3]):
        values[3] = 7
    for state, message in (({"tables": 1}, "the key 'tables'"), ("a", "must be a dict")):
        future = tables.async_save(state, tmp_path / "1")  # type: ignore[arg-type]
        with pytest.raises((ConfigurationError, SaveFailed), match=message):
            future.result(60)
    weights = torch.ones(3)
    future = tables.async_save({"dense": weights}, tmp_path / "1")
    weights.zero_()
    future.result(60)
    back, _, others = dense()
    others.restore(tmp_path / "1")
    assert torch.equal(back, values)
    loaded = {"dense": torch.zeros(3)}
    ckpt.load(loaded, tmp_path / "1")
    assert loaded["dense"].tolist() == [1.0] * 3


def test_gates_that_save_different_cuts_are_named() -> None:
    saving._check_epochs([None, 3, 3, None])
    with pytest.raises(ConfigurationError, match="rank 1 that of epoch 3, rank 3 that of epoch 4"):
        saving._check_epochs([None, 3, 3, 4])
