"""Restores of some tables and columns, and what saves notice of earlier ones."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.row_stores import DictRows

import ckpt
from ckpt.embeddings import Column, DenseRows, Tables, TableShard
from ckpt.embeddings.rows import Ids, Rows
from ckpt.errors import ConfigurationError, LoadFailed, SaveFailed


def user(value: float, name: str = "user", **columns: torch.Tensor) -> TableShard:
    return TableShard(name, DenseRows(0, values=torch.full((20, 2), value), **columns))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A base and a delta of `user`, with values of 1, then 2 in row 3, and a column of Adagrad."""
    shard = user(1.0, adagrad=torch.ones(20))
    tables = Tables(shard, user(5.0, "item"))
    tables.save({}, tmp_path / "0")
    with shard.writing([3]):
        shard.rows.write(np.array([3]), {"values": torch.full((1, 2), 2.0)})
    tables.save({}, tmp_path / "1")
    return tmp_path / "1"


def values_of(shard: TableShard, column: str = "values") -> list[float]:
    rows = shard.rows.read(np.arange(20), [column])[column]
    return [float(each) for each in rows[:, 0]]


AFTER = [1.0] * 3 + [2.0] + [1.0] * 16


@pytest.mark.parametrize("chosen", [{"strict": False}, {"parts": ["user.values"]}, {"parts": ["*.values"]}])
def test_values_alone_are_restored_by_choice(
    saved: Path, chosen: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    shards = user(0.0), user(0.0, exp_avg=torch.full((20,), 7.0)), user(0.0, adagrad=torch.full((20,), 7.0))
    for shard in shards[:2]:
        with pytest.raises(
            ConfigurationError, match="'adagrad' of the table 'user' is missing here and float32 x 1"
        ):
            Tables(shard).restore(saved)
    for shard in shards:
        tables = Tables(shard)
        assert tables.restore(saved, **chosen) == {"user": 21}
        assert values_of(shard) == AFTER
        is_missing = "strict" in chosen and "exp_avg" in shard.rows.columns
        assert tables.missing == (("user.exp_avg",) if is_missing else ())
    assert values_of(shards[1], "exp_avg") == [7.0] * 20
    assert values_of(shards[2], "adagrad") == ([7.0] * 20 if "parts" in chosen else [1.0] * 20)
    assert ("columns that were not restored: user.adagrad" in caplog.text) == ("strict" in chosen)
    # What was not restored is in the next save, which writes all rows.
    Tables(shards[2]).save({}, saved.parent / "2")
    back = user(0.0, adagrad=torch.zeros(20))
    Tables(back).restore(saved.parent / "2")
    assert values_of(back, "adagrad") == values_of(shards[2], "adagrad")


def test_rows_of_a_growing_table_begin_with_zeros_in_other_columns(saved: Path) -> None:
    rows = DictRows({"values": Column(2, torch.float32), "exp_avg": Column(3, torch.float64)})
    Tables(TableShard("user", rows)).restore(saved, strict=False)
    assert [float(row["values"][0]) for _, row in sorted(rows.rows.items())] == AFTER
    assert all(row["exp_avg"].tolist() == [0.0] * 3 for row in rows.rows.values())


def test_a_table_more_or_less_is_named(saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    shards = user(0.0, adagrad=torch.zeros(20)), user(9.0, "shop")
    with pytest.raises(LoadFailed, match="no table 'shop'; it has item, user; strict=False"):
        Tables(*shards).restore(saved)
    tables = Tables(*shards)
    assert tables.restore(saved, strict=False) == {"user": 21}
    assert tables.missing == ("shop",)
    assert "the next save lacks them: item" in caplog.text
    assert values_of(shards[1]) == [9.0] * 20
    caplog.clear()
    assert Tables(*shards).restore(saved, parts=["user"]) == {"user": 21}
    assert not caplog.text
    for wrong in ("usr", "user.vlues"):
        with pytest.raises(ConfigurationError, match=f"parts= names '{wrong}', and this program has"):
            Tables(*shards).restore(saved, parts=[wrong])
    with pytest.raises(ConfigurationError, match="parts must be a list"):
        Tables(*shards).restore(saved, parts="user")
    wide = TableShard("user", DenseRows(0, values=torch.zeros(20, 3)))
    with pytest.raises(
        ConfigurationError, match=r"'values' .* float32 x 3 here and float32 x 2 in the checkpoint"
    ):
        Tables(wide).restore(saved, strict=False)


def test_no_row_changes_before_all_tables_fit(saved: Path) -> None:
    shard = user(0.0, adagrad=torch.zeros(20))
    wide = TableShard("item", DenseRows(0, values=torch.zeros(20, 3)))
    with pytest.raises(ConfigurationError, match="float32 x 3 here"):
        Tables(shard, wide).restore(saved)
    assert values_of(shard) == [0.0] * 20


def test_zeros_of_wide_columns_are_written_in_steps(tmp_path: Path) -> None:
    """However narrow the stored columns are: a batch of theirs holds many rows."""
    narrow = DictRows({"count": Column(1, torch.int32)})
    ids = np.arange(1000)
    narrow.write(ids, {"count": torch.ones(1000, 1, dtype=torch.int32)})
    Tables(TableShard("user", narrow)).save({}, tmp_path / "0")
    sizes: list[int] = []

    class Wide(DictRows):
        def write(self, ids: Ids, rows: Rows) -> None:
            sizes.append(rows["values"].nbytes)
            super().write(ids, rows)

    wide = Wide({**narrow.columns, "values": Column(16 << 10, torch.float32)})
    assert Tables(TableShard("user", wide)).restore(tmp_path / "0", strict=False) == {"user": 1000}
    assert len(wide.rows) == 1000
    assert max(sizes) <= 20 << 20


def test_the_manager_restores_a_table_more_and_names_it(tmp_path: Path) -> None:
    weight = torch.zeros(2)
    with ckpt.CheckpointManager(tmp_path, save=1, tables=Tables(user(1.0))) as manager:
        manager.step(1, {"weight": weight})
    tables = Tables(user(0.0), user(9.0, "item"))
    with ckpt.CheckpointManager(tmp_path, save=1, tables=tables) as manager:
        restored = manager.restore({"weight": weight}, strict=False)
        assert restored is not None
        assert restored.missing == ("tables.item",)
        manager.step(2, {"weight": weight + 1})
    back = Tables(user(0.0), user(0.0, "item"))
    assert back.restore(tmp_path / "step-00000002") == {"user": 20, "item": 20}


def test_merges_bases_and_evictions_are_no_loss_of_rows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    values = torch.zeros(400, 4)
    rows = DictRows({"values": Column(4, torch.float32)})
    bounds: dict[str, Any] = {"max_deltas": 3, "max_delta_ratio": 0.6}
    item, users = (
        TableShard("item", DenseRows(0, values=values), **bounds),
        TableShard("user", rows, **bounds),
    )
    tables = Tables(item, users)
    random = np.random.default_rng(0)
    with caplog.at_level(logging.WARNING):
        for step in range(1, 16):
            ids = np.unique(random.integers(0, 400, 30))
            with item.writing(ids), users.writing(ids):
                values[torch.from_numpy(ids)] = float(step)
                rows.write(ids, {"values": torch.full((len(ids), 4), float(step))})
            users.evict(random.integers(0, 400, 10))
            tables.save({}, tmp_path / f"step-{step}")
        assert not caplog.text
        for id in list(rows.rows)[:50]:  # without `evict`
            del rows.rows[id]
        users.restart()
        tables.save({}, tmp_path / "step-16")
        assert "the table 'user' has" in caplog.text
        caplog.clear()
        Tables(users).save({}, tmp_path / "step-17")
    assert "the table 'item' is in" in caplog.text


def test_a_broken_base_is_noticed_by_the_next_save(tmp_path: Path) -> None:
    """Wherever the bit is: all blocks of the files that are named are read."""
    values = torch.zeros(100_000, 16)
    shard = TableShard("user", DenseRows(0, values=values))
    tables = Tables(shard)
    tables.save({}, tmp_path / "0")
    (data,) = (tmp_path / "0").rglob("*.distcp")
    content = bytearray(data.read_bytes())
    content[len(content) * 7 // 11] ^= 4
    data.write_bytes(content)
    with shard.writing([3]):
        values[3] = 1
    with pytest.raises(SaveFailed, match="do not match their checksum"):
        tables.save({}, tmp_path / "1")
    tables.save({}, tmp_path / "1")
    back = torch.ones(100_000, 16)
    Tables(TableShard("user", DenseRows(0, values=back))).restore(tmp_path / "1")
    assert torch.equal(back, values)


@pytest.mark.parametrize("is_new", [False, True])
def test_tables_alone_go_back_and_on(tmp_path: Path, is_new: bool) -> None:
    """A location whose rows later checkpoints name is not replaced; these removed, it is, by deltas."""
    shard = user(0.0)
    tables = Tables(shard)
    expected: dict[int, list[float]] = {}

    def save(step: int, value: float) -> None:
        with shard.writing([step]):
            shard.rows.write(np.array([step]), {"values": torch.full((1, 2), value)})
        tables.save({}, tmp_path / f"step-{step}")
        expected[step] = values_of(shard)

    for step in range(1, 6):
        save(step, float(step))
    if is_new:
        shard = user(0.0)
        tables = Tables(shard)
    tables.restore(tmp_path / "step-2")
    assert values_of(shard) == expected[2]
    with pytest.raises(SaveFailed, match=r"\.\./step-4, \.\./step-5 refer to its bytes: it is not replaced"):
        save(3, 30.0)
    for step in (5, 4, 3):
        ckpt.remove(tmp_path / f"step-{step}")
    for step in range(3, 7):
        save(step, 10.0 * step)
        assert ckpt.inspect(tmp_path / f"step-{step}").commit.bases  # type: ignore[union-attr]
    for step, values in expected.items():
        back = user(-1.0)
        Tables(back).restore(tmp_path / f"step-{step}")
        assert values_of(back) == values
