"""Columns as runs say what rows say; a few bytes that claim much are refused, and never take much memory."""

from __future__ import annotations

import dataclasses
import random
import tracemalloc
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from support.tiers import examples
from torch.distributed.checkpoint.metadata import MetadataIndex

from ckpt.errors import FormatError
from ckpt.format.columns import Columns, Integers, ObjectRow, TensorColumns, compressed, expanded
from ckpt.format.dcp_view import metadata_of, stored_bytes
from ckpt.format.index import check_columns, decode_index, encode_index
from ckpt.format.runs import NUMBERS, Runs, TensorRuns, find_runs, shortest
from ckpt.save_plans.rules import Rule, lay_out
from ckpt.stock.metadata_writer import estimated_bytes, pickled_metadata

MIB = 1 << 20
ROWS = ("offsets", "sizes", "file", "offset", "length")


@st.composite
def columns_of_numbers(draw: Any) -> Integers:
    """Regular columns, with a few numbers that are not, and irregular ones."""
    parts = [np.empty(0, dtype=np.int64)]
    for _ in range(draw(st.integers(1, 5))):
        start, step, outer = (draw(st.integers(0, 1 << 40)) for _ in range(3))
        counts = draw(st.integers(1, 20)), draw(st.integers(1, 20))
        grid = start + step * np.arange(counts[0]) + outer * np.arange(counts[1])[:, None]
        parts.append(grid.reshape(-1)[:: draw(st.sampled_from([1, -1]))])
        parts.append(np.array(draw(st.lists(st.integers(0, (1 << 62) - 1), max_size=4)), dtype=np.int64))
    return np.concatenate(parts)


@settings(max_examples=examples(200))
@given(columns_of_numbers())
def test_runs_hold_any_column(values: Integers) -> None:
    runs = find_runs(values, len(values))
    assert runs is not None
    assert runs.count == len(values)
    assert np.array_equal(runs.values(), values)
    assert [runs.at(row) for row in range(len(values))] == values.tolist()
    assert (runs.total, runs.highest) == (sum(values.tolist()), values.max())
    with pytest.raises(IndexError):
        runs.at(len(values))
    with pytest.raises(ValueError, match="read-only"):
        runs.values()[0] = 1
    if len(runs.table) > 1:
        assert find_runs(values, len(runs.table) - 1) is None


@pytest.mark.parametrize("count", [1, 2, 7, 256])
@pytest.mark.parametrize("inner", [1, 2, 8])
def test_a_grid_is_one_run(count: int, inner: int) -> None:
    values = (np.arange(inner) * 3 + 1000 * np.arange(count)[:, None]).reshape(-1)
    runs = find_runs(values, 2)
    assert runs is not None
    assert len(runs.table) == 1


def tensor_of(shape: Sequence[int], rule: Rule, *, dtype: str = "float32") -> TensorColumns:
    """A sharded tensor, whose chunks lie one in each file at the same place; with a shorter last one."""
    layout = lay_out(shape, rule)
    rows = np.arange(len(layout.offsets))
    return TensorColumns(
        dtype, tuple(shape), True, layout.offsets, layout.sizes, rows, np.full(len(rows), 64), layout.elements * 4
    )  # fmt: skip


LAYOUTS = {
    "fsdp": ((1001, 7), Rule(0, (512,), (0,))),
    "fsdp of few": ((300, 7), Rule(0, (512,), (0,))),
    "fsdp and tp": ((640, 64), Rule(0, (64, 8), (0, 1))),
    "tp and fsdp of one dimension": ((640, 64), Rule(0, (64, 8), (0, 0), (0,))),
    "three dimensions": ((32, 16, 8), Rule(0, (16, 8, 4), (0, 1, 2))),
}


def index_of(*tensors: TensorColumns) -> Columns:
    entries: dict[str, Any] = {f"layers.{number}.weight": each for number, each in enumerate(tensors)}
    files = [f"rank-{rank:05d}/{rank:016x}-0.distcp" for rank in range(max(each.count for each in tensors))]
    return Columns(files, entries | {"lr": ObjectRow(1, 0, 8)}, {"lr": ("lr",)}, "0" * 16, "1.0.0")


def assert_equal(a: Columns, b: Columns) -> None:
    assert (a.files, a.planner_data, a.save_id, a.version) == (b.files, b.planner_data, b.save_id, b.version)
    assert list(a.entries) == list(b.entries)
    for one, two in zip(a.entries.values(), b.entries.values(), strict=True):
        if isinstance(one, ObjectRow) or isinstance(two, ObjectRow):
            assert one == two
            continue
        assert (one.dtype, one.size, one.requires_grad, one.count) == (
            two.dtype, two.size, two.requires_grad, two.count,
        )  # fmt: skip
        assert all(np.array_equal(getattr(one, name), getattr(two, name)) for name in ROWS)
        for row in (0, one.count // 2, one.count - 1):
            assert (one.box(row), one.place(row)) == (two.box(row), two.place(row))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_index_of_runs_says_what_rows_say(layout: str) -> None:
    tensors = tensor_of(*LAYOUTS[layout]), tensor_of((4, 4), Rule(0, (2,), (0,)))
    plain, encoded = index_of(*tensors), encode_index(index_of(*map(shortest, tensors)))
    read = decode_index(encoded, url="u", key="k")
    assert isinstance(read.entries["layers.0.weight"], TensorRuns)
    assert msgspec.msgpack.decode(encoded)["version"] == 2
    check_columns(read)
    assert_equal(read, plain)
    assert encode_index(read) == encoded
    assert pickled_metadata(read) == pickled_metadata(plain)
    views = metadata_of(read), metadata_of(plain)
    assert views[0] == views[1]
    assert dict(views[0].storage_data) == dict(views[1].storage_data)
    assert stored_bytes(views[0]) == stored_bytes(views[1])
    assert abs(estimated_bytes(read) / estimated_bytes(plain) - 1) < 0.05
    table = views[0].storage_data
    for index, info in list(table.items())[::50]:
        assert table[index] == table[MetadataIndex(index.fqn, index.offset)] == info
    with pytest.raises(KeyError):
        table[MetadataIndex("layers.0.weight", torch.Size([1 << 40] * len(LAYOUTS[layout][0])), 3)]


KEPT = Path(__file__).parents[1] / "data" / "index-v2"


def kept_columns() -> Columns:
    return index_of(*(shortest(tensor_of(*LAYOUTS[layout])) for layout in ("fsdp", "fsdp and tp")))


def test_a_kept_index_of_version_2_is_read() -> None:
    """`PYTHONPATH=tests python tests/format/test_runs.py` wrote it."""
    kept = decode_index(KEPT.read_bytes(), url="u", key="k", manifest_bytes=lambda needed: 0)
    assert all(isinstance(kept.entries[f"layers.{number}.weight"], TensorRuns) for number in range(2))
    assert_equal(kept, kept_columns())


def test_few_chunks_and_irregular_ones_stay_rows() -> None:
    """Then older readers can read the index."""
    chance = random.Random(7)
    offset = np.array([chance.randrange(1 << 30) for _ in range(1000)])
    irregular = dataclasses.replace(tensor_of(*LAYOUTS["fsdp"]), requires_grad=False)
    irregular = dataclasses.replace(irregular, offset=offset[: irregular.count])
    tensors = irregular, tensor_of((64, 4), Rule(0, (64,), (0,)))
    encoded = encode_index(index_of(*map(shortest, tensors)))
    assert msgspec.msgpack.decode(encoded)["version"] == 1
    assert not msgspec.msgpack.decode(encoded).keys() & {"regular", "column_runs", "runs"}


def test_readers_of_version_1_ignore_runs() -> None:
    record = dict(msgspec.msgpack.decode(encode_index(index_of(shortest(tensor_of(*LAYOUTS["fsdp"]))))))
    record["version"] = 1
    with pytest.raises(FormatError, match="of another length than its entries"):
        decode_index(msgspec.msgpack.encode(record), url="u", key="k")


def test_columns_in_common_are_stored_once() -> None:
    one, many = (encode_index(index_of(*map(shortest, [tensor_of(*LAYOUTS["fsdp"])] * n))) for n in (1, 100))
    assert len(many) < len(one) + 100 * 60


def test_a_trillion_parameters_take_little_memory() -> None:
    """4,620 tensors of 16,384 chunks: 76 million rows, 4 GB of columns."""
    layout = lay_out((25600, 16), Rule(0, (16384,), (0,)))
    boxes = [find_runs(column, 4) for column in (*layout.offsets.T, *layout.sizes.T)]
    count = len(layout.offsets)
    file = Runs.of([(0, count, 1, 1, 0)])
    length = Runs.of([(256, count, 0, 1, 0)])
    entries = {
        f"w{number}": TensorRuns(
            "bfloat16", (25600, 16), True, (file, Runs.of([(320 * number, count, 0, 1, 0)]), length, *boxes),  # type: ignore[arg-type]
        )
        for number in range(4620)
    }  # fmt: skip
    columns = Columns([f"rank-{rank:05d}/{rank:016x}-0.distcp" for rank in range(count)], {**entries})
    tracemalloc.start()
    try:
        encoded = encode_index(columns)
        read = decode_index(encoded, url="u", key="k", manifest_bytes=lambda needed: 60 * MIB)
        assert (
            sum(entry.count for entry in read.entries.values() if isinstance(entry, TensorColumns))
            == 4620 * count
        )
        for entry in list(read.entries.values())[:100]:
            assert isinstance(entry, TensorRuns)
            assert int(entry.offset[-1]) == entry.place(count - 1)[1]
        assert tracemalloc.get_traced_memory()[1] < 64 * MIB
    finally:
        tracemalloc.stop()
    assert len(encoded) < 2_000_000


# -- hostile records -------------------------------------------------------------------------------------------

GOOD = dict(msgspec.msgpack.decode(encode_index(index_of(shortest(tensor_of(*LAYOUTS["fsdp"])), tensor_of((8,), Rule(0, (4,), (0,)))))))  # fmt: skip


def decoded(record: dict[str, Any], *, in_manifests: int = 0) -> Columns:
    data = msgspec.msgpack.encode(record)
    return decode_index(data, url="u", key="k", manifest_bytes=lambda needed: in_manifests)


def with_runs(tables: Sequence[Sequence[Sequence[int]]], **changes: Any) -> dict[str, Any]:
    """The record of a tensor of one dimension; its columns are file, offset, length, offsets, sizes."""
    table = np.array([run for column in tables for run in column], dtype=np.int64)
    made = {
        **GOOD,
        "entries": [["w", "float32", [512], False, 512]],
        "regular": [[0, 0, 1, 2, 3, 4]],
        "column_runs": [len(column) for column in tables],
        "runs": compressed(list(table.T)),
        **{name: zlib.compress(b"") for name in ROWS},
        "files": [f"f{number}" for number in range(512)],
    }
    return made | changes


FILE, OFFSET, LENGTH = [(0, 512, 1, 1, 0)], [(64, 512, 0, 1, 0)], [(8, 512, 0, 1, 0)]
BEGIN, SIZE = [(0, 512, 1, 1, 0)], [(1, 512, 0, 1, 0)]
SOUND = [FILE, OFFSET, LENGTH, BEGIN, SIZE]


def test_the_record_that_is_changed_is_sound() -> None:
    assert isinstance(decoded(with_runs(SOUND)).entries["w"], TensorRuns)
    assert isinstance(decoded(GOOD).entries["layers.0.weight"], TensorRuns)


@pytest.mark.parametrize(
    ("tables", "changes", "reason"),
    [
        ([[(1, 512, 1, 1, 0)], *SOUND[1:]], {}, "an item in no file"),
        ([[(0, 511, 1, 1, 0)], *SOUND[1:]], {}, "another length than its entry"),
        ([[(0, 256, 1, 2, 128)], *SOUND[1:4], [(2, 512, 0, 1, 0)]], {}, "outside of its tensor"),
        ([*SOUND[:3], [(1, 512, 1, 1, 0)], SIZE], {}, "outside of its tensor"),
        ([FILE, [(-1, 512, 0, 1, 0)], *SOUND[2:]], {}, "no size or offset"),
        ([FILE, [(100, 512, -1, 1, 0)], *SOUND[2:]], {}, "no size or offset"),
        ([FILE, [(0, 512, 1 << 60, 1, 0)], *SOUND[2:]], {}, "no size or offset"),
        ([FILE, [(0, 2, 1 << 61, 256, 1 << 61)], *SOUND[2:]], {}, "no size or offset"),
        ([FILE, [(1 << 62, 512, 0, 1, 0)], *SOUND[2:]], {}, "no size or offset"),
        ([FILE, [(0, 512, -(1 << 63), 1, 0)], *SOUND[2:]], {}, "no size or offset"),
        ([FILE, [(0, 512, 0, 0, 0)], *SOUND[2:]], {}, "absurd length"),
        ([FILE, [(0, -512, 0, -1, 0)], *SOUND[2:]], {}, "absurd length"),
        ([FILE, [(0, 1 << 24, 0, 1 << 24, 0)], *SOUND[2:]], {}, "absurd length"),
        ([FILE, [(0, 1 << 62, 0, 4, 0)], *SOUND[2:]], {}, "absurd length"),
        (SOUND, {"regular": [[0, 0, 1, 2, 3]]}, "without all of its columns"),
        (SOUND, {"regular": [[0, 0, 1, 2, 3, 5]]}, "without all of its columns"),
        (SOUND, {"regular": [[0, 0, 1, 2, 3, -1]]}, "without all of its columns"),
        (SOUND, {"regular": [[1, 0, 1, 2, 3, 4]]}, "runs of no entry"),
        (SOUND, {"regular": [[]]}, "runs of no entry"),
        (SOUND, {"regular": [[0, 0, 1, 2, 3, 4]] * 2}, "runs of no entry"),
        (SOUND, {"column_runs": [1, 1, 1, 1]}, "another length than its entries"),
        (SOUND, {"column_runs": [2, 0, 1, 1, 1]}, "a column without runs"),
        (SOUND, {"column_runs": [1 << 63, 1, 1, 1, 1]}, "more runs than any checkpoint"),
        (SOUND, {"column_runs": [1 << 26, 1, 1, 1, 1]}, "far more than the manifests"),
        (SOUND, {"column_runs": [], "runs": b""}, "runs of no column"),
        (SOUND, {"entries": [["w", None, [], False, 1]]}, "an object in parts"),
        (SOUND, {"entries": [["w", "float32", [512], False, 1 << 25]]}, "an absurd shape"),
        (SOUND, {"entries": [["w", "float31", [512], False, 512]]}, "unknown dtype"),
        (SOUND, {"entries": [["w", "float32", [511], False, 512]]}, "outside of its tensor"),
        (SOUND, {"runs": zlib.compress(b"x" * 9)}, "another length"),
        (SOUND, {"runs": b"\xff\xff"}, "not a valid index"),
    ],
)
def test_runs_that_contradict_are_refused(
    tables: Sequence[Any], changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(FormatError, match=reason):
        decoded(with_runs(tables, **changes))


def large_tensor(rows: int) -> dict[str, Any]:
    columns = [[(0, rows, 0, 1, 0)], [(0, rows, 64, 1, 0)], [(8, rows, 0, 1, 0)], [(0, rows, 1, 1, 0)]]
    return with_runs([*columns, [(1, rows, 0, 1, 0)]], entries=[["w", "float32", [rows], False, rows]])


def test_a_tensor_of_very_many_chunks_is_held_against_the_manifests() -> None:
    """16 million chunks in 500 bytes would take 670 MB when they are looked at."""
    record = large_tensor(1 << 24)
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match="far more than the manifests can list"):
            decoded(record)
        assert tracemalloc.get_traced_memory()[1] < 8 * MIB
    finally:
        tracemalloc.stop()
    assert decoded(large_tensor(1 << 18)).entries["w"].count == 1 << 18  # type: ignore[union-attr]


def test_very_many_tensors_of_many_chunks_are_refused_soon() -> None:
    """Each has boxes of its own, so each would be looked at."""
    rows = 1 << 18
    columns: list[Any] = [
        [(0, rows, 0, 1, 0)],
        [(0, rows, 64, 1, 0)],
        [(8, rows, 0, 1, 0)],
        [(1, rows, 0, 1, 0)],
    ]
    columns += [[(number, rows, 0, 1, 0)] for number in range(2000)]
    entries = [[f"w{number}", "float32", [1 << 40], False, rows] for number in range(2000)]
    regular = [[number, 0, 1, 2, 4 + number, 3] for number in range(2000)]
    with pytest.raises(FormatError, match="more different chunks than any checkpoint has"):
        decoded(with_runs(columns, entries=entries, regular=regular), in_manifests=1 << 40)


SIZES = st.sampled_from([-1, 0, 1, 2, 3, 511, 513, 1 << 24, (1 << 24) + 1, 1 << 31, 1 << 61, 1 << 62, (1 << 63) - 1, -(1 << 63)])  # fmt: skip


@settings(max_examples=examples(300), deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 10_000), SIZES | st.integers(-(1 << 63), (1 << 63) - 1)), max_size=3),
    st.lists(st.tuples(st.sampled_from(["regular", "column_runs", "entries"]), st.integers(0, 99), SIZES), max_size=2),
)  # fmt: skip
def test_any_change_is_refused_or_sound(
    numbers: list[tuple[int, int]], others: list[tuple[str, int, int]]
) -> None:
    record = msgspec.msgpack.decode(msgspec.msgpack.encode(GOOD))
    total = NUMBERS * sum(record["column_runs"])
    runs = expanded(record["runs"], total)
    for place, value in numbers:
        runs[place % total] = value
    record["runs"] = compressed([runs])
    for name, place, value in others:
        rows = record[name]
        if name == "column_runs":
            rows[place % len(rows)] = value
        elif name == "regular":
            rows[0][place % len(rows[0])] = value
        else:
            rows[0][4] = value
    tracemalloc.start()
    try:
        try:
            columns = decoded(record)
        except FormatError:
            return
        finally:
            assert tracemalloc.get_traced_memory()[1] < 64 * MIB
    finally:
        tracemalloc.stop()
    check_columns(columns)
    for entry in columns.entries.values():
        if isinstance(entry, TensorColumns):
            assert (entry.offsets + entry.sizes <= np.array(entry.size)).all()
            assert entry.file.max() < len(columns.files)
            assert min(column.min() for column in (entry.offset, entry.length, entry.file)) >= 0


def test_what_was_rows_becomes_runs_only_if_all_columns_do() -> None:
    plain = tensor_of(*LAYOUTS["fsdp"])
    runs = shortest(plain)
    assert isinstance(runs, TensorRuns)
    assert shortest(runs) is runs
    irregular = dataclasses.replace(plain, length=np.arange(plain.count) ** 2)
    assert shortest(irregular) is irregular
    numbers = np.arange(1000) * 3
    assert np.array_equal(runs.renumbered(numbers, False).file, plain.renumbered(numbers, False).file)


if __name__ == "__main__":
    KEPT.write_bytes(encode_index(kept_columns()))
