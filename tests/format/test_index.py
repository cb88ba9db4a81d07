"""The index: the same facts as DCP's metadata, from the ranks' reports to what planners and stock readers see."""

from __future__ import annotations

import dataclasses
import pickle
import random
from typing import Any

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from support.states import SAVABLE_DTYPES
from support.tiers import examples
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

import ckpt.format.dtypes as dtypes_by_name
from ckpt.errors import CommitError, ConfigurationError, FormatError
from ckpt.format.columns import Columns, TensorColumns
from ckpt.format.dcp_view import metadata_of
from ckpt.format.dtypes import dtype_name, item_bytes, torch_dtype
from ckpt.format.elements import has_values, stored_dtype, values_of
from ckpt.format.index import check_columns, decode_index, encode_index
from ckpt.save_plans.receipt_messages import RankReceipt
from ckpt.stock.metadata_reader import decode_metadata
from ckpt.stock.metadata_writer import pickled_metadata
from ckpt.torch_private import StorageInfo
from ckpt.writing.receipts import PlacedItem, collect, pack_items

plain_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 80), 1 << 80) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text() | st.integers(-1000, 1000) | st.binary(max_size=5), inner, max_size=4)
    ),
    max_leaves=20,
)  # fmt: skip


def has_short_paths(planner_data: Any) -> bool:
    """Tell whether no tuple would be a path before a list or far into one, which is refused."""
    values = planner_data.values() if isinstance(planner_data, dict) else ()
    paths = [value for value in values if isinstance(value, tuple)]
    # Lists may have 1024 entries that nothing fills, and there are at most 20 leaves.
    return all(type(part) is not int or 0 <= part < 50 for path in paths for part in path)


@st.composite
def metadatas(draw: Any) -> Metadata:
    """What a planner describes and ranks have placed: any dtypes, any dimensions, any number of chunks."""
    described: dict[str, Any] = {}
    placed: dict[MetadataIndex, StorageInfo] = {}
    files = [f"rank-{rank:05d}/{rank:016x}-0.distcp" for rank in range(draw(st.integers(1, 4)))]
    info = st.builds(
        StorageInfo, st.sampled_from(files), st.integers(0, 1 << 41), st.integers(0, 1 << 33), st.none()
    )
    for fqn in draw(st.lists(st.text(min_size=1, max_size=20), unique=True, max_size=6)):
        if draw(st.booleans()):
            described[fqn] = BytesStorageMetadata()
            placed[MetadataIndex(fqn)] = draw(info)
            continue
        chunk = draw(st.lists(st.sampled_from([0, 1, 3, 300, 70_000, 1 << 33]), max_size=5))
        count = draw(st.integers(1, 5)) if chunk and chunk[0] else 1
        size = [chunk[0] * count, *chunk[1:]] if chunk else []
        chunks = [
            ChunkStorageMetadata(
                torch.Size([chunk[0] * number, *([0] * (len(chunk) - 1))] if chunk else []), torch.Size(chunk)
            )
            for number in range(count)
        ]
        properties = TensorProperties(
            draw(st.sampled_from(SAVABLE_DTYPES)), requires_grad=draw(st.booleans())
        )
        described[fqn] = TensorStorageMetadata(properties, torch.Size(size), chunks)
        for number, part in enumerate(chunks):
            placed[MetadataIndex(fqn, part.offsets, number)] = draw(info)
    return Metadata(
        described,
        draw(plain_values.filter(has_short_paths)),
        placed,
        StorageMeta(save_id="0123456789abcdef"),
        "1.0.0",
    )


def receipts_of(metadata: Metadata) -> list[RankReceipt]:
    """The reports of the ranks whose files are named."""
    names = sorted({info.relative_path for info in metadata.storage_data.values()})
    receipts = []
    for rank, name in enumerate(names):
        items = [
            PlacedItem(
                index.fqn, None if index.offset is None else tuple(index.offset), index.index, 0, info.offset, info.length
            )
            for index, info in metadata.storage_data.items()
            if info.relative_path == name
        ]  # fmt: skip
        receipts.append(RankReceipt(rank, "c", None, [name], pack_items(items)))
    return receipts


def columns_of(metadata: Metadata) -> Columns:
    columns = collect(metadata, receipts_of(metadata))
    assert metadata.storage_meta is not None
    columns.save_id, columns.version = metadata.storage_meta.save_id, metadata.version
    return columns


@settings(max_examples=examples(150))
@given(metadatas())
def test_every_form_says_the_same(metadata: Metadata) -> None:
    columns = columns_of(metadata)
    read = decode_index(encode_index(columns), url="u", key="k")
    for found in (metadata_of(columns), metadata_of(read), pickle.loads(pickle.dumps(metadata_of(read)))):
        assert found.state_dict_metadata == metadata.state_dict_metadata
        assert found.planner_data == metadata.planner_data
        assert (found.storage_meta, found.version) == (metadata.storage_meta, metadata.version)
        assert dict(found.storage_data) == metadata.storage_data
        for index, info in metadata.storage_data.items():
            assert found.storage_data[index] == info
            assert found.storage_data[MetadataIndex(index.fqn, index.offset)] == info
    stock = pickled_metadata(read)
    for loads in (pickle.loads, pickle._loads):  # type: ignore[attr-defined]
        found = loads(stock)
        assert found == metadata
        assert [index.index for index in found.storage_data] == [
            index.index for index in metadata_of(read).storage_data
        ]
    assert decode_metadata(stock, url="u", key="k").storage_data == metadata.storage_data


def sharded(ranks: int, tensors: int) -> Metadata:
    described: dict[str, Any] = {}
    placed = {}
    for number in range(tensors):
        fqn = f"layers.{number}.weight"
        chunks = [ChunkStorageMetadata(torch.Size([8 * r, 0]), torch.Size([8, 64])) for r in range(ranks)]
        properties = TensorProperties(torch.bfloat16)
        described[fqn] = TensorStorageMetadata(properties, torch.Size([8 * ranks, 64]), chunks)
        for rank, chunk in enumerate(chunks):
            place = StorageInfo(f"rank-{rank:05d}/{rank:016x}-0.distcp", number * 4096, 3000)
            placed[MetadataIndex(fqn, chunk.offsets, rank)] = place
    return Metadata(described, None, placed, StorageMeta(save_id="s"), "1.0.0")


@pytest.mark.parametrize("ranks", [1, 31, 32, 33, 300])
def test_few_rows_and_many_say_the_same(ranks: int) -> None:
    metadata = sharded(ranks, 3)
    found = pickle.loads(pickled_metadata(columns_of(metadata)))
    assert found == metadata
    assert [index.index for index in found.storage_data] == list(range(ranks)) * 3


def test_it_is_small() -> None:
    columns = columns_of(sharded(64, 50))
    assert len(encode_index(columns)) < 3 * 64 * 50
    assert len(pickle.dumps(metadata_of(columns))) < 5 * 64 * 50


def test_dtypes_are_known_by_name() -> None:
    """Those of this torch, without asking it; one that only a newer torch has is asked for."""
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    for dtype in dtypes:
        assert dtypes_by_name._ITEM_BYTES[dtype_name(dtype)] == dtype.itemsize
        assert torch_dtype(dtype_name(dtype)) is dtype
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(dtypes_by_name._ITEM_BYTES, "bfloat16")
        assert item_bytes("bfloat16") == 2
    for name in ("half", "load", "torch.float32", "float33", ""):
        with pytest.raises(FormatError, match="unknown dtype"):
            item_bytes(name)


def test_values_of_a_dtype_that_only_a_newer_torch_has() -> None:
    """Two bfloat16 each, as numbers of NumPy: torch 2.15 has it, and a record that names it needs no torch."""
    values = torch.tensor([1.5, -2.0, float("inf"), 0.0], dtype=torch.bfloat16)
    raw = values.view(torch.uint8).numpy().view(stored_dtype("bcomplex32"))
    assert (item_bytes("bcomplex32"), has_values("bcomplex32")) == (4, True)
    assert values_of(raw, "bcomplex32").tolist() == [1.5 - 2j, complex(float("inf"), 0.0)]


@pytest.mark.parametrize("hint", [None, 0, 99, -1])
def test_hints_are_only_hints(hint: int | None) -> None:
    metadata = sharded(5, 1)
    receipts = receipts_of(metadata)
    items = [PlacedItem("layers.0.weight", (8 * rank, 0), hint, 0, 7 * rank, 5) for rank in range(5)]
    receipts = [RankReceipt(0, "c", None, receipts[0].files, pack_items(items))]
    table = metadata_of(collect(metadata, receipts)).storage_data
    for rank in range(5):
        assert table[MetadataIndex("layers.0.weight", torch.Size([8 * rank, 0]), hint)].offset == 7 * rank
    for missing in (MetadataIndex("layers.0.weight"), MetadataIndex("layers.0.weight", torch.Size([1, 0])), MetadataIndex("x")):  # fmt: skip
        assert table.get(missing) is None


def test_what_is_missing_is_named() -> None:
    metadata = sharded(3, 2)
    first, *others = receipts_of(metadata)
    with pytest.raises(CommitError, match=r"planned but not written: layers\.0\.weight\[0, 0\], layers\.1\.weight\[0, 0\]"):  # fmt: skip
        collect(metadata, others)
    stranger = pack_items([PlacedItem("who", None, None, 0, 0, 1)])
    with pytest.raises(CommitError, match="written but not planned: who"):
        collect(metadata, [first, *others, RankReceipt(3, "c", None, ["f"], stranger)])


def test_a_chunk_that_is_planned_twice_is_written_once() -> None:
    metadata = sharded(2, 1)
    stored = metadata.state_dict_metadata["layers.0.weight"]
    assert isinstance(stored, TensorStorageMetadata)
    stored.chunks.append(stored.chunks[1])
    columns = collect(metadata, receipts_of(metadata))
    info = metadata_of(columns).storage_data[MetadataIndex("layers.0.weight", stored.chunks[1].offsets, 2)]
    assert info.relative_path.startswith("rank-00001")


def test_descriptions_that_do_not_fit_are_refused() -> None:
    metadata = sharded(1, 1)
    stored = metadata.state_dict_metadata["layers.0.weight"]
    assert isinstance(stored, TensorStorageMetadata)
    stored.properties.layout = torch.sparse_coo
    with pytest.raises(ConfigurationError, match="save it dense"):
        collect(metadata, receipts_of(metadata))


# -- hostile ---------------------------------------------------------------------------------------------


def records() -> dict[str, Any]:
    """The fields of an index, to be changed."""
    return dict(msgspec.msgpack.decode(encode_index(columns_of(sharded(4, 3)))))


def test_damage_is_an_error_or_harmless() -> None:
    """Any bytes at all: a clear error, never a crash, never more memory than they account for."""
    good = encode_index(columns_of(sharded(6, 4)))
    generator = random.Random(5)
    refused = 0
    for _ in range(3000):
        data = bytearray(good)
        for _ in range(generator.randint(1, 4)):
            data[generator.randrange(len(data))] = generator.randrange(256)
        try:
            decode_index(
                data[: generator.choice([len(data), generator.randrange(len(data))])], url="u", key="k"
            )
        except FormatError:
            refused += 1
    assert refused > 2000


def _column(*values: int) -> bytes:
    import zlib

    return zlib.compress(np.array(values, dtype="<i8").view(np.uint8).reshape(-1, 8).T.tobytes())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"format": "other"}, "not an index"),
        ({"version": 99}, "update it"),
        ({"files": ["../up"]}, "not a valid object key"),
        ({"files": []}, "in no file"),
        ({"entries": [["t", "float32", [4], False, 1 << 40]]}, "absurd"),
        ({"entries": [["t", "float32", [1 << 63], False, 1]]}, "absurd size"),
        ({"entries": [["t", "load", [32, 64], False, 12]]}, "unknown dtype"),
        ({"entries": [["t", "float32", [4], False, 12]] * 2}, "."),
        ({"entries": [["t", None, [4], False, 1]]}, "object in parts"),
        ({"entries": [["t", "float32", [1] * 65, False, 1]]}, "absurd shape"),
        ({"offset": _column(*[-1] * 12)}, "no size or offset"),
        ({"offset": _column(*[1 << 62] * 12)}, "no size or offset"),
        ({"offset": _column(*[0] * 13)}, "another length"),
        ({"offset": _column(*[0] * 11)}, "another length"),
        ({"sizes": _column(*[1 << 61] * 24)}, "outside of its tensor"),
        ({"planner_data": {"a": 1}}, "."),
        ({"planner_data": ["d", [5, 1 << 62], [None, None]]}, "unfit keys"),
        ({"planner_data": ["d", ["a"], []]}, "unfit keys"),
        ({"planner_data": ["d", ["a"], [["t", ["x", 1 << 40]]]]}, "far longer than their entries"),
        ({"planner_data": ["i", "f" * 10_000]}, "absurd number"),
    ],
)
def test_records_that_contradict_themselves(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(FormatError, match=reason) as caught:
        decode_index(msgspec.msgpack.encode({**records(), **changes}), url="u", key="k")
    assert len(str(caught.value)) < 700


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"size": (4, 4)}, "outside of its tensor"),
        ({"offsets": -1}, "outside of its tensor"),
        ({"sizes": -1}, "outside of its tensor"),
        ({"size": (1 << 62, 64)}, "absurd size"),
        ({"dtype": "torch.load"}, "unknown dtype"),
        ({"files": ["../up"]}, "not a valid object key"),
    ],
)
@pytest.mark.parametrize("chunks", [1, 12])
def test_what_no_reader_would_accept_is_not_written(
    chunks: int, changes: dict[str, Any], reason: str
) -> None:
    columns = columns_of(sharded(chunks, 1))
    check_columns(columns)
    (fqn, tensor) = next((f, e) for f, e in columns.entries.items() if isinstance(e, TensorColumns))
    for name, value in changes.items():
        if name == "files":
            columns.files = value
            continue
        if isinstance(value, int):
            value = getattr(tensor, name).copy()
            value[-1, 0] = -1
        columns.entries[fqn] = dataclasses.replace(tensor, **{name: value})
    with pytest.raises(FormatError, match=reason):
        check_columns(columns)
    with pytest.raises(FormatError):
        decode_index(encode_index(columns), url="u", key="k")


def test_deep_planner_data_is_not_written() -> None:
    columns = columns_of(sharded(1, 1))
    assert columns.planner_data is None
    for _ in range(128):
        columns.planner_data = (columns.planner_data,)
    assert decode_index(encode_index(columns), url="u", key="k").planner_data == columns.planner_data
    columns.planner_data = (columns.planner_data,)
    with pytest.raises(ValueError, match="nested more than 128 deep"):
        encode_index(columns)


def test_nesting_has_an_end() -> None:
    nested = b"\x92\xa1l\x91" * 100_000 + b"\xc0"
    good = msgspec.msgpack.encode({**records(), "planner_data": 1})
    where = good.index(b"planner_data") + len(b"planner_data")
    with pytest.raises(FormatError):
        decode_index(good[:where] + nested + good[where + 1 :], url="u", key="k")


def test_a_small_record_cannot_claim_much() -> None:
    """A zip bomb: compressed zeros for the largest number of rows that is allowed at all."""
    import tracemalloc
    import zlib

    bomb = zlib.compress(bytes(1 << 26), 9)
    changes = dict.fromkeys(("offsets", "sizes", "file", "offset", "length"), bomb)
    data = msgspec.msgpack.encode({**records(), **changes})
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match="another length"):
            decode_index(data, url="u", key="k")
        assert tracemalloc.get_traced_memory()[1] < 10 << 20
    finally:
        tracemalloc.stop()
