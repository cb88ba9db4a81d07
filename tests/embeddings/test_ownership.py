"""Rows are counted: at a save and after a restore each belongs to one rank, or ranks and ranges are named."""

from __future__ import annotations

import logging
import logging.handlers
import queue
import re
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from support.ranks import run_ranks
from support.row_stores import DictRows

import ckpt
from ckpt.embeddings import Column, DenseRows, Tables, TableShard
from ckpt.embeddings.ownership import RowCount
from ckpt.embeddings.rows import Ids, Order
from ckpt.embeddings.shard import Due, entries_of
from ckpt.errors import CheckpointError, ConfigurationError

COLUMNS = {"values": Column(2, torch.float32)}


def dense(first: int, count: int, rank: int = 0, ranks: int = 1, *, gaps: bool = False) -> Tables:
    rows = DenseRows(first, values=torch.zeros(count))
    return Tables(TableShard("user", rows, shard=rank, shards=ranks, allow_gaps=gaps))


class Interleaved(DictRows):
    """Rows of a program that shards by the rest of a division."""

    order: Order = "id"

    def owns(self, ids: Ids) -> NDArray[np.bool_]:
        return np.equal(ids % self.shards, self.shard)


def interleaved(rest: int, rank: int, ranks: int) -> Tables:
    rows = Interleaved(COLUMNS, rest, ranks)
    ids = np.arange(rest, 40, ranks)
    rows.write(ids, {"values": torch.zeros(len(ids), 2)})
    return Tables(TableShard("user", rows, shard=rank, shards=ranks))


SAVES = {  # of rank 0 and 1: what the error says
    "twice": ([(0, 50), (40, 60)], "rows 40 to 49 of the table 'user' belong to two ranks: rank 0 keeps rows 0 to 49, "),
    "within": ([(0, 50), (10, 5)], "rows 10 to 14 of the table 'user' belong to two ranks"),
    "no rank": ([(0, 50), (60, 40)], "rows 50 to 59 of the table 'user' belong to no rank: rank 0 keeps rows 0 to 49"),
    "rest": ([], "belongs to rank 1 and to rank 0, by `owns`"),
}  # fmt: skip
RESTORES = {  # of 100 rows
    "smaller": ([(0, 50), (50, 40)], "rows 90 to 99 of the table 'user' in .* belong to no rank: .*, rank 1 keeps rows 50 to 89"),
    "twice and none": ([(0, 50), (40, 50)], "rows 40 to 49 of .* belong to two ranks"),
    "gap": ([(0, 40), (60, 40)], "rows 40 to 59 of .* belong to no rank"),
}  # fmt: skip


def _tables_of(case: str, ranges: list[tuple[int, int]], rank: int) -> Tables:
    return interleaved(0, rank, 2) if case == "rest" else dense(*ranges[rank], rank, 2)


def _save_all(rank: int, root: str) -> dict[str, str]:
    found = {}
    for case, (ranges, _) in SAVES.items():
        try:
            _tables_of(case, ranges, rank).save({}, f"{root}/{case}")
        except CheckpointError as error:
            found[case] = str(error)
    ok = [dense(50 * rank, 50, rank, 2), dense(60 * rank, 50, rank, 2, gaps=True), interleaved(rank, rank, 2)]
    for number, tables in enumerate(ok):
        tables.save({}, f"{root}/{number}")
    # Alone, ranks learn of the others' rows with the next save; with the manager at the restore.
    for case, (ranges, _) in RESTORES.items():
        tables = _tables_of(case, ranges, rank)
        tables.restore(f"{root}/0")
        with pytest.raises((CheckpointError, ConfigurationError)) as caught:
            tables.save({}, f"{root}/{case}")
        found[case] = str(caught.value)
        tables.restore(f"{root}/0", on_shape="resize")
        if case == "smaller":
            tables.save({}, f"{root}/{case}")
            assert dense(0, 90).restore(f"{root}/{case}") == {"user": 90}
    weight = torch.zeros(3)
    with ckpt.CheckpointManager(f"{root}/run", save=1, tables=dense(50 * rank, 50, rank, 2)) as manager:
        manager.step(1, {"weight": weight})
    tables = dense(*RESTORES["smaller"][0][rank], rank, 2)
    with ckpt.CheckpointManager(f"{root}/run", save=1, tables=tables) as manager:
        with pytest.raises(ConfigurationError) as refused:
            manager.restore({"weight": weight})
        found["manager"] = str(refused.value)
        resize = ckpt.options.LoadOptions(on_shape="resize")
        assert manager.restore({"weight": weight}, options=resize) is not None
    return found


def test_ranks_and_ranges_are_named(tmp_path: Path) -> None:
    found, other = run_ranks(2, _save_all, str(tmp_path))
    assert found.keys() == other.keys() == {*SAVES, *RESTORES, "manager"}
    for case, (_, text) in (SAVES | RESTORES | {"manager": RESTORES["smaller"]}).items():
        assert any(re.search(text, each[case]) for each in (found, other)), found[case]


def test_a_table_that_shrinks_is_an_error_or_a_choice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dense(0, 1000).save({}, tmp_path / "0")
    text = "rows 800 to 999 of the table 'user' in .* belong to no rank: this process keeps rows 0 to 799"
    with pytest.raises(ConfigurationError, match=text):
        dense(0, 800).restore(tmp_path / "0")
    with caplog.at_level(logging.WARNING):
        assert dense(0, 800).restore(tmp_path / "0", on_shape="resize") == {"user": 800}
    assert "rows 800 to 999" in caplog.text
    assert dense(0, 1200).restore(tmp_path / "0") == {"user": 1000}
    part = TableShard("user", Interleaved(COLUMNS, 0, 2))
    interleaved(0, 0, 1).save({}, tmp_path / "1")
    with pytest.raises(ConfigurationError, match=r"40 rows of .* were written, and this process took 20"):
        Tables(part).restore(tmp_path / "1")


@pytest.mark.parametrize("order", ["id", "hash"])
def test_ids_are_any_64_bits(tmp_path: Path, order: Order) -> None:
    ids = np.array([7, 1 << 63, (1 << 64) - 1, 0x9E3779B97F4A7C15, (1 << 63) - 1], dtype=np.uint64)
    stores = []
    for _ in range(2):
        stores.append(DictRows(COLUMNS) if order == "hash" else Interleaved(COLUMNS))
    shard = TableShard("user", stores[0], max_delta_ratio=4.0)
    tables = Tables(shard)
    for step, changed in enumerate((ids, ids[1:3])):
        with shard.writing(changed):
            stores[0].write(changed.view(np.int64), {"values": torch.full((len(changed), 2), float(step))})
        tables.save({}, tmp_path / f"{step}")
    shard.evict(ids[3:4])
    tables.save({}, tmp_path / "2")
    assert ckpt.inspect(tmp_path / "2").commit.bases  # type: ignore[union-attr]
    Tables(TableShard("user", stores[1])).restore(tmp_path / "2")
    found = {id: float(row["values"][0]) for id, row in stores[1].rows.items()}
    assert found == {7: 0.0, -(1 << 63): 1.0, -1: 1.0, (1 << 63) - 1: 0.0}


def test_dense_rows_end_with_64_bits(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="exceed 64 bits"):
        dense((1 << 63) - 5, 6)
    for first in ((1 << 63) - 5, -(1 << 63)):
        dense(first, 5).save({}, tmp_path / f"{first}")
        assert dense(first, 5).restore(tmp_path / f"{first}") == {"user": 5}


def _restore_wrong(rank: int, root: str) -> tuple[dict[str, str], list[str]]:
    """Restore what only the next save can compare with other ranks; return its errors and warnings."""
    logged: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
    logging.getLogger("ckpt").addHandler(logging.handlers.QueueHandler(logged))
    errors: dict[str, str] = {}

    def save(case: str, tables: Tables) -> None:
        try:
            tables.save({}, f"{root}/{case}")
        except CheckpointError as error:
            errors[case] = str(error)

    item = TableShard("item", DenseRows(3 * rank, values=torch.zeros(3)), shard=rank, shards=2)
    for step in (1, 2):
        Tables(*dense(50 * rank, 50, rank, 2).shards, item).save({}, f"{root}/step-{step}")
    tables = dense(50 * rank, 50, rank, 2)
    tables.restore(f"{root}/step-{1 + rank}", strict=False)
    save("steps", tables)
    tables = Tables(*dense(45 * rank, 45, rank, 2).shards, item)
    for part in ("user", "item"):
        tables.restore(f"{root}/step-1", parts=[part])
    save("parts", tables)
    tables = dense(50 * rank, 50, rank, 2)
    if rank == 0:
        tables.restore(f"{root}/step-1", parts=["user"])
    save("one rank", tables)
    dist.destroy_process_group()
    tables = dense(45 * rank, 45, rank, 2)
    tables.restore(f"{root}/step-1", parts=["user"])
    dist.init_process_group("gloo", store=dist.FileStore(f"{root}/ranks", 2), rank=rank, world_size=2)
    save("before the group", tables)
    return errors, [logged.get().getMessage() for _ in range(logged.qsize())]


def test_a_save_judges_all_that_was_restored(tmp_path: Path) -> None:
    """Ranks that restored other checkpoints, several `parts`, one rank of two, before there was a group."""
    (errors, warnings), others = run_ranks(2, _restore_wrong, str(tmp_path))
    assert errors.keys() == others[0].keys() == {"steps", "parts", "before the group"}
    assert re.search("'user' from different checkpoints: rank 0 .*step-1, rank 1 .*step-2", errors["steps"])
    assert all("rows 90 to 99" in errors[case] for case in ("parts", "before the group"))
    assert "rank 0 has restored its shard of 'user'; no rank has restored shard 1" in warnings


def test_rows_are_counted_whatever_divides_them() -> None:
    """The halves of a range by one bit of a CRC have equal sums of ids, and of their squares."""
    ids = np.arange(1024)
    bits = np.array([zlib.crc32(int(id).to_bytes(8, "little")) & 1 for id in ids])
    half = ids[bits == 0]
    assert 2 * len(half) == len(ids)
    assert 2 * (half**2).sum() == (ids**2).sum()
    assert RowCount.of(half) + RowCount.of(half) != RowCount.of(ids)
    assert RowCount.of(half) + RowCount.of(ids[bits == 1]) == RowCount.of(ids)


def test_rows_that_two_ranks_saved_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Older versions saved them, as where all ranks gave `first_id=0`."""
    entries: dict[str, torch.Tensor] = {}
    for number in (0, 1):
        rows = DenseRows(3 * number, values=torch.full((5,), float(number)))
        shard = TableShard("user", rows, shard=number, shards=2)
        shard.begin()
        for name, value in entries_of(shard.choose()).items():
            entries[name] = value.read() if isinstance(value, Due) else value
    ckpt.save({"tables": entries}, tmp_path / "0")
    assert dense(0, 10).restore(tmp_path / "0") == {"user": 10}
    assert "shards 0 and 1 of the table 'user' both have rows 3 to 4" in caplog.text
