"""What a loader reads: token files, Parquet files, anything with rows."""

from __future__ import annotations

import itertools
import pickle
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import ConfigurationError, FormatError, NotFound
from ckpt.trainer_integration.dataloader import RescalableLoader
from ckpt.trainer_integration.dataset import ShardedDataset
from ckpt.trainer_integration.parquet_files import ParquetFiles
from ckpt.trainer_integration.sources import Cache, MapSource, Source
from ckpt.trainer_integration.token_files import TokenFiles, write_token_file

DOCUMENTS = [[1, 2, 3], [], [4], [5, 6, 7, 8, 9], [10, 11]]


def documents_of(source: Source) -> list[list[int]]:
    return [source.tokens(number).tolist() for number in range(source.documents)]


# -- token files -----------------------------------------------------------------------------------------


def test_token_files_with_offsets(tmp_path: Path) -> None:
    write_token_file(tmp_path / "a.bin", DOCUMENTS)
    write_token_file(tmp_path / "b.bin", [])
    write_token_file(tmp_path / "c.bin", [[60_000]])
    source = TokenFiles([tmp_path / name for name in ("a.bin", "b.bin", "c.bin")])
    assert documents_of(source) == [*DOCUMENTS, [60_000]]
    assert source.dtype == np.uint16


def test_token_files_cut_evenly(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(10, dtype=np.int32))
    np.save(tmp_path / "b.npy", np.arange(10, 14, dtype=np.int32))
    source = TokenFiles([tmp_path / "a.npy", tmp_path / "b.npy"], document_tokens=4)
    assert documents_of(source) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [10, 11, 12, 13]]


def test_token_files_are_mapped_not_read(tmp_path: Path) -> None:
    """Neither in memory nor in what a worker is sent."""
    path = tmp_path / "large.npy"
    np.lib.format.open_memmap(path, "w+", np.uint16, (500_000_000,)).flush()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    source = TokenFiles([path], document_tokens=1000)
    assert source.tokens(499_999).tolist() == [0] * 1000
    assert len(pickle.dumps(source)) < 2000
    assert pickle.loads(pickle.dumps(source)).tokens(3).shape == (1000,)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


def test_token_files_that_are_none(tmp_path: Path) -> None:
    write_token_file(tmp_path / "a.bin", DOCUMENTS)
    with pytest.raises(NotFound, match=r"x\.bin does not exist"):
        TokenFiles([tmp_path / "x.bin"])
    with pytest.raises(ConfigurationError, match="TokenFiles needs at least one path"):
        TokenFiles([])
    with pytest.raises(
        ConfigurationError, match=r"document 1: tokens from .* do not fit uint16; use a wider"
    ):
        write_token_file(tmp_path / "b.bin", [[1], [70_000]])
    with pytest.raises(ConfigurationError, match=r"document 0: .* integer tokens, not 1-dimensional float64"):
        write_token_file(tmp_path / "b.bin", [np.array([0.5])])
    (tmp_path / "odd.bin").write_bytes(b"123")
    with pytest.raises(FormatError, match=r"odd\.bin"):
        TokenFiles([tmp_path / "odd.bin"], document_tokens=4)
    (tmp_path / "text.npy").write_bytes(b"no array")
    with pytest.raises(FormatError, match=r"text\.npy"):
        TokenFiles([tmp_path / "text.npy"], document_tokens=4)
    np.save(tmp_path / "float.npy", np.zeros(4))
    with pytest.raises(FormatError, match="must be one list of integer tokens, not 1-dimensional float64"):
        TokenFiles([tmp_path / "float.npy"], document_tokens=4)
    np.save(tmp_path / "other.npy", np.zeros(4, np.int32))
    with pytest.raises(FormatError, match="holds int32, but the first file uint16"):
        TokenFiles([tmp_path / "a.bin", tmp_path / "other.npy"], document_tokens=4)
    with pytest.raises(NotFound, match=r"offsets\.npy is missing"):
        TokenFiles([tmp_path / "other.npy"])
    np.save(
        tmp_path / "a.bin.offsets.npy",
        np.array([0, 3, 1, (tmp_path / "a.bin").stat().st_size // 2], np.int64),
    )
    with pytest.raises(FormatError, match="document 1 is tokens 3 to 1 of "):
        TokenFiles([tmp_path / "a.bin"]).tokens(1)
    (tmp_path / "a.bin").write_bytes(b"12")
    with pytest.raises(FormatError, match=r"does not describe .*, which holds 1 tokens"):
        TokenFiles([tmp_path / "a.bin"])


def test_a_pickle_in_the_place_of_tokens_is_not_loaded(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([{}]), allow_pickle=True)
    with pytest.raises(FormatError):
        TokenFiles([tmp_path / "a.npy"], document_tokens=4)


# -- Parquet files ---------------------------------------------------------------------------------------


def write_parquet(path: Path, values: Any, kind: Any, rows: int = 2) -> Path:
    table = pyarrow.table({"other": [0] * len(values), "tokens": pyarrow.array(values, kind)})
    pyarrow.parquet.write_table(table, path, row_group_size=rows)
    return path


@pytest.mark.parametrize("kind", [pyarrow.list_(pyarrow.int64()), pyarrow.large_list(pyarrow.uint16())])
def test_parquet_files_of_tokens(tmp_path: Path, kind: Any) -> None:
    first = write_parquet(tmp_path / "a.parquet", DOCUMENTS, kind)
    second = write_parquet(tmp_path / "b.parquet", [None, [7]], kind)
    source = ParquetFiles([first, second], "tokens")
    assert documents_of(source) == [*DOCUMENTS, [], [7]]
    assert documents_of(pickle.loads(pickle.dumps(source))) == documents_of(source)
    assert source.tokens(0).dtype == source.dtype == np.int32
    assert [*source.cuts(0, 7)] == [2, 4, 5]
    assert [*source.cuts(1, 5)] == [2, 4]
    assert [*source.cuts(2, 4)] == []


def test_parquet_files_of_text(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", ["ab", "", None, "z"], pyarrow.string())
    source = ParquetFiles([path], "tokens", tokenize=_letters, dtype=np.uint8)
    assert documents_of(source) == [[97, 98], [], [], [122]]


def _letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def test_parquet_row_groups_are_read_once_if_the_cache_holds_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although shuffled: row groups are shuffled as blocks."""
    path = write_parquet(
        tmp_path / "a.parquet", [[n] * 50 for n in range(400)], pyarrow.list_(pyarrow.int64()), rows=20
    )
    read: list[int] = []
    original = ParquetFiles._row_group

    def watched(self: ParquetFiles, group: int) -> Any:
        read.append(group)
        return original(self, group)

    monkeypatch.setattr(ParquetFiles, "_row_group", watched)
    source = ParquetFiles([path], "tokens", cache_bytes=70_000)  # 8 row groups of 8 KB
    dataset = ShardedDataset(source, shards=4, sequence_length=30, epochs=1, pad_token=0)
    batches = [*RescalableLoader(dataset, batch_size=4)]
    assert sum(int((batch > 0).sum()) for batch in batches) == 399 * 50
    assert len(read) == 20
    assert read != sorted(read)


def test_parquet_files_that_are_none(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", ["text"], pyarrow.string())
    with pytest.raises(NotFound, match=r"x\.parquet does not exist"):
        ParquetFiles([tmp_path / "x.parquet"], "tokens")
    with pytest.raises(FormatError, match="has no column 'text'; it has other, tokens"):
        ParquetFiles([path], "text")
    with pytest.raises(ConfigurationError, match="holds string, not lists of tokens; pass tokenize="):
        ParquetFiles([path], "tokens")
    with pytest.raises(ConfigurationError, match="have no rows"):
        ParquetFiles(
            [write_parquet(tmp_path / "b.parquet", [], pyarrow.string())], "tokens", tokenize=_letters
        )
    (tmp_path / "c.parquet").write_bytes(b"no table")
    with pytest.raises(FormatError, match=r"c\.parquet"):
        ParquetFiles([tmp_path / "c.parquet"], "tokens")
    wide = write_parquet(tmp_path / "d.parquet", [[70_000]], pyarrow.list_(pyarrow.int64()))
    with pytest.raises(ConfigurationError, match="do not fit uint16"):
        ParquetFiles([wide], "tokens", dtype=np.uint16).tokens(0)


# -- rows ------------------------------------------------------------------------------------------------


def test_rows_of_anything() -> None:
    rows = [{"text": "ab"}, {"text": ""}]
    assert documents_of(MapSource(rows, "text", tokenize=_letters)) == [[97, 98], []]
    assert documents_of(MapSource(DOCUMENTS)) == DOCUMENTS
    for wrong in ([["a"]], [[[1]]], [[0.5]]):
        with pytest.raises(ConfigurationError, match="must be one list of integer tokens"):
            documents_of(MapSource(wrong))


def test_a_long_document_is_tokenized_once() -> None:
    tokenized = itertools.count()

    def tokenize(row: int) -> list[int]:
        next(tokenized)
        return [row] * 1000

    dataset = ShardedDataset(
        MapSource(range(4), tokenize=tokenize), shards=2, sequence_length=10, epochs=1, pad_token=0
    )
    assert sum(len(batch) for batch in RescalableLoader(dataset, batch_size=8)) == 400
    assert next(tokenized) == 4


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 60)), max_size=60))
def test_a_cache_holds_what_was_used_last_within_its_budget(uses: list[tuple[int, int]]) -> None:
    cache: Cache[int] = Cache(100)
    sizes = dict(uses)
    model: list[int] = []
    for key, _ in uses:
        made: list[int] = []

        def make(key: int = key, made: list[int] = made) -> int:
            made.append(key)
            return key

        assert cache.get(key, make, sizes.__getitem__) == key
        assert (made == []) == (key in model)
        model = [*(k for k in model if k != key), key]
        while sum(sizes[k] for k in model) > 100:
            model.pop(0)
        assert cache._size_bytes == sum(size for _, size in cache._values.values()) <= 100
    assert [*cache._values] == model
    cache.get("large", lambda: 0, lambda _: 101)
    assert [*cache._values] == model


def test_a_token_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    """Else a program that has it mapped would die of SIGBUS."""
    path = tmp_path / "a.bin"
    write_token_file(path, [[1] * 50_000, [2] * 50_000])
    source = TokenFiles([path])
    with pytest.raises(ConfigurationError, match="document 1"):
        write_token_file(path, [[3], [70_000]])
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.bin", "a.bin.offsets.npy"]
    write_token_file(path, [[3]])
    assert source.tokens(1).tolist() == [2] * 50_000
    assert TokenFiles([path]).tokens(0).tolist() == [3]
