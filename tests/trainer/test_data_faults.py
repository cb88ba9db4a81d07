"""The loader where data, ranks or loops are not as they should be: each is named, and nothing is silently wrong."""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from support.ranks import run_ranks
from support.rooms import ROOT

import ckpt
from ckpt.errors import ConfigurationError, FormatError
from ckpt.options import DataOptions
from ckpt.trainer_integration.dataloader import RescalableLoader
from ckpt.trainer_integration.dataset import ShardedDataset
from ckpt.trainer_integration.sources import MapSource
from ckpt.trainer_integration.token_files import TokenFiles, write_token_file


class Rows:
    """Rows of which some cannot be read."""

    def __init__(self, bad: set[int], count: int = 40) -> None:
        self.bad, self.count = bad, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, row: int) -> Any:
        if row in self.bad:
            raise ValueError("invalid continuation byte")
        return [row + 1] * 8


def loader_of(source: Any, *, batch_size: int = 2, **options: Any) -> RescalableLoader:
    given = {"sequence_length": 8, "shards": 4, "epochs": 1, "pad_token": 0, **options}
    return RescalableLoader(ShardedDataset(source, **given), batch_size=batch_size)


def same(row: Any) -> Any:
    return row


def as_dict(text: Any) -> Any:
    return {"input_ids": [1]}


def as_batch(text: Any) -> Any:
    return SimpleNamespace(input_ids=[1])


# -- documents that cannot be read ---------------------------------------------------------------------------


def test_an_error_names_the_document_and_is_raised_again() -> None:
    """An iteration that has raised does not end as if the data had."""
    batches = iter(loader_of(MapSource(Rows({17}))))
    with pytest.raises(
        FormatError, match=r"source 'data', document 17 \(shard \d\): ValueError: invalid cont"
    ):
        list(batches)
    with pytest.raises(FormatError, match="document 17"):
        next(batches)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.long)])
def test_bad_documents_are_skipped_up_to_a_number(workers: int, caplog: pytest.LogCaptureFixture) -> None:
    options = DataOptions(skip_bad_documents=2)
    dataset = ShardedDataset(
        MapSource(Rows({5, 17})), sequence_length=8, shards=4, epochs=1, pad_token=0, options=options
    )
    with caplog.at_level(logging.WARNING):
        read = {
            int(row[0])
            for batch in RescalableLoader(dataset, batch_size=2, num_workers=workers)
            for row in batch
        }
    assert read - {0} == {row + 1 for row in range(40)} - {6, 18}
    assert workers or "document 5" in caplog.text
    with pytest.raises(FormatError, match="document"):
        list(loader_of(MapSource(Rows({1, 2, 3})), options=options))


def test_a_bad_document_of_known_length_is_skipped() -> None:
    """The sequences that it is part of are left out."""
    source = MapSource([[row + 1] * 12 for row in range(20)])
    source.lengths(np.arange(20))
    source._rows = _Breaking([[row + 1] * 12 for row in range(20)], {7})
    source._cache = type(source._cache)(0)
    options = DataOptions(skip_bad_documents=4)
    read = {int(token) for batch in loader_of(source, options=options) for token in batch.flatten()}
    assert read - {0} == {row + 1 for row in range(20)} - {7 + 1}
    with pytest.raises(FormatError, match="document 7: ValueError"):
        list(loader_of(source))


def test_a_skipped_document_costs_one_and_no_step() -> None:
    """However many sequences it has: each rank has as many batches as the others, and each batch as many rows."""
    batches = []
    for rank in range(2):
        source = MapSource([[row + 1] * 40 for row in range(6)])
        source.lengths(np.arange(6))
        source._rows = _Breaking([[row + 1] * 40 for row in range(6)], {3})
        options = DataOptions(skip_bad_documents=1, positions=True)
        loader = loader_of(source, rank=rank, world_size=2, batch_size=1, options=options)
        for batch in loader:
            loader.record(batch)
            batches.append(batch["tokens"])
        assert loader.epoch == 1
    assert [batch.shape for batch in batches] == [(1, 8)] * 30
    read = [int(token) for batch in batches for token in batch.flatten() if token]
    assert sorted(read) == sorted([row + 1 for row in range(6) if row != 3] * 40)
    with pytest.raises(ConfigurationError, match="skip_bad_documents= needs pad_token="):
        loader_of(source, options=options, epochs=None, pad_token=None)


class _Breaking(list[Any]):
    def __init__(self, rows: list[Any], bad: set[int]) -> None:
        super().__init__(rows)
        self._bad = bad

    def __getitem__(self, row: Any) -> Any:
        if row in self._bad:
            raise ValueError("invalid continuation byte")
        return super().__getitem__(row)


def test_a_document_shorter_than_its_source_says() -> None:
    source = MapSource([[1] * 8 for _ in range(4)])
    loader = loader_of(source)
    source.lengths(np.arange(4))
    source._rows = [[1] * 5 for _ in range(4)]
    source._cache.drop(0)
    source._cache = type(source._cache)(0)
    with pytest.raises(FormatError, match=r"document \d has 5 tokens, fewer than its source says"):
        list(loader)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MapSource(iter([[1]])), "needs a length and rows by number, and a list_iterator has not both"),  # type: ignore[arg-type]
        (lambda: list(loader_of(MapSource(["a b"] * 8, tokenize=as_dict))), r'tokens are \["input_ids"\]'),
        (lambda: list(loader_of(MapSource(["a b"] * 8, tokenize=as_batch))), r'tokens are \["input_ids"\]'),
    ],
)  # fmt: skip
def test_what_people_give_is_answered_with_what_to_give(make: Any, message: str) -> None:
    with pytest.raises((ConfigurationError, FormatError), match=message):
        make()


def test_raw_files_of_wider_tokens(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    np.arange(128_000, 128_040, dtype=np.uint32).tofile(path)
    with pytest.raises(
        ConfigurationError, match=r"looks as if it held uint32, not uint16.* dtype=np\.uint32"
    ):
        TokenFiles([path], document_tokens=10)
    assert TokenFiles([path], document_tokens=10, dtype=np.uint32).tokens(0)[0] == 128_000
    assert TokenFiles([path], document_tokens=10, dtype=np.uint16).documents == 8
    np.arange(100, 140, dtype=np.uint16).tofile(path)
    assert TokenFiles([path], document_tokens=10).tokens(0)[0] == 100


def test_a_small_source_for_its_shards_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """With the number that the log says each document is read once before any is read twice, nearly."""

    def repeated(shards: int) -> float:
        source = MapSource([range(row * 50, row * 50 + 50) for row in range(400)], tokenize=list)
        loader = loader_of(source, sequence_length=128, shards=shards, epochs=None, batch_size=1)
        read = [int(token) for batch in itertools.islice(loader, 20_000 // 128) for token in batch.flatten()]
        return 1 - len(set(read)) / len(read)

    with caplog.at_level(logging.WARNING):
        assert repeated(1920) > 0.2
    (number,) = re.findall(r"source 'data' has about 15\d sequences.* With shards=(\d+) they", caplog.text)
    caplog.clear()
    assert repeated(int(number)) < 0.05
    assert not caplog.text


def test_documents_that_were_read_leave_the_cache() -> None:
    source = MapSource([[row] * 10 for row in range(64)], tokenize=same)
    loader = loader_of(source, sequence_length=16, shards=8, epochs=None)
    for _ in itertools.islice(loader, 200):
        assert len(source._cache._values) <= 8 + source.samples


def test_row_groups_that_are_read_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    pyarrow = pytest.importorskip("pyarrow")
    from ckpt.trainer_integration.parquet_files import ParquetFiles

    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"t": [[row] * 100 for row in range(640)]}), path, row_group_size=10)
    for cache_bytes, said in ((1 << 20, 0), (20_000, 1)):
        source = ParquetFiles([path], "t", cache_bytes=cache_bytes)
        with caplog.at_level(logging.WARNING):
            rows = list(itertools.islice(loader_of(source, sequence_length=64, shards=64, epochs=None), 300))
        assert len(rows) == 300
        assert caplog.text.count("is read again, as cache_bytes is too small") == said
    assert "cache_bytes=" in caplog.text


# -- data that are others ------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["order", "tokenizer", "one document"])
def test_other_data_of_the_same_size_are_refused(change: str) -> None:
    texts = [" ".join(map(str, range(row, row + 40))) for row in range(200)]
    others = {"order": texts[::-1], "one document": ["9 9", *texts[1:]], "tokenizer": texts}[change]

    def numbers(text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def letters(text: str) -> list[int]:
        return [ord(letter) for letter in text]

    first = loader_of(MapSource(texts, tokenize=numbers))
    next(iter(first))
    other = MapSource(others, tokenize=letters if change == "tokenizer" else numbers)
    with pytest.raises(ConfigurationError, match="saved for other data or settings; source 'data'"):
        loader_of(other).load_state_dict(first.state_dict())


def test_the_same_data_elsewhere_are_the_same(tmp_path: Path) -> None:
    """Whatever the names of the files, and when they were written."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_token_file(tmp_path / name / f"{name}.bin", [[row] * 8 for row in range(1, 30)])
    os.utime(tmp_path / "b" / "b.bin", (1, 1))
    first = loader_of(TokenFiles([tmp_path / "a" / "a.bin"]))
    next(iter(first))
    loader_of(TokenFiles([tmp_path / "b" / "b.bin"])).load_state_dict(first.state_dict())


# -- ranks that disagree -------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["order", "seed", "weights", "epochs"])
def test_ranks_that_read_other_data_are_refused(what: str) -> None:
    texts = run_ranks(2, _disagree, what)
    (text,) = filter(None, texts)  # of the rank that began later
    assert "the ranks do not read the same data by the same settings" in text
    assert "rank 0 " in text
    assert "rank 1 " in text


def _disagree(rank: int, what: str) -> str:
    rows = [[row + 1] * 8 for row in range(64)]
    sources = {"a": MapSource(rows[::-1] if rank and what == "order" else rows), "b": MapSource(rows)}
    weights = {"a": 2.0 if rank and what == "weights" else 1.0, "b": 1.0}
    if rank:  # one of this rank alone is not counted
        loader_of(sources["b"], rank=0, world_size=1)
    epochs = 2 if rank and what == "epochs" else 1
    seed = rank if what == "seed" else 0
    loader = loader_of(sources, weights=weights, seed=seed, epochs=epochs)
    text = ""
    try:
        next(iter(loader))
    except ConfigurationError as error:
        text = str(error)
    dist.barrier()
    return text


def test_ranks_whose_sources_have_other_names_are_refused_at_a_save(tmp_path: Path) -> None:
    """When they begin they are not compared: they can be groups of ranks that read different things."""
    for text in run_ranks(2, _other_names, str(tmp_path / "c")):
        assert "loader.settings" in text


def _other_names(rank: int, url: str) -> str:
    loader = loader_of({"ab"[rank]: MapSource(Rows(set()))})
    next(iter(loader))
    try:
        ckpt.save({"loader": loader}, url)
    except ckpt.errors.CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("on_exhausted", ["drop", "stop", "repeat"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_source_with_fewer_documents_than_ranks(on_exhausted: Any, workers: int) -> None:
    """A rank, or a worker, without documents of it reads the others, and the order is that of no workers."""
    sources = {
        name: MapSource([[n] * 8 for n in range(1, count)], tokenize=same)
        for name, count in (("a", 41), ("b", 4))
    }
    options = DataOptions(on_exhausted=on_exhausted)

    def read(rank: int, workers: int) -> list[Any]:
        dataset = ShardedDataset(
            sources, sequence_length=8, epochs=1, pad_token=0, rank=rank, world_size=4, options=options
        )
        loader = RescalableLoader(dataset, batch_size=1, num_workers=workers)
        return [batch.tolist() for batch in loader]

    of_last = read(3, 0)
    assert len(of_last) == 10
    if workers:
        assert read(3, workers) == of_last
        assert read(0, workers) == read(0, 0)
    with pytest.raises(ConfigurationError, match="3 documents are too few for 4 ranks"):
        loader_of(sources["b"], shards=8, rank=0, world_size=4)


def test_ranks_without_a_loader_are_not_waited_for() -> None:
    assert run_ranks(3, _of_some) == [True, False, True]


def _of_some(rank: int) -> bool:
    if rank == 1:
        return False
    loader = loader_of(MapSource(Rows(set())), rank=rank // 2, world_size=2)
    return len([*loader]) > 0


PROGRAM = """
import json, sys, torch.distributed as dist
from ckpt.trainer_integration.dataset import ShardedDataset
from ckpt.trainer_integration.sources import MapSource

rows = MapSource([[row] * 8 for row in range(64)])
try:
    ShardedDataset(rows, sequence_length=8)
except Exception as error:
    text = f"{type(error).__name__}: {error}"
ShardedDataset(rows, sequence_length=8, rank=0, world_size=1)
dist.init_process_group("gloo")
ShardedDataset(rows, sequence_length=8)
open(f"{sys.argv[1]}/{dist.get_rank()}", "w").write(text)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_data_set_made_before_the_process_group(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*torchrun, str(tmp_path / "program.py"), str(tmp_path)],
        env=environ, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in "01":
        text = (tmp_path / rank).read_text()
        assert text.startswith("ConfigurationError: WORLD_SIZE is 2 and there is no process group")
        assert "init_process_group" in text


# -- loops that fetch ahead ----------------------------------------------------------------------------------


@pytest.mark.parametrize("tokenize", [None, same], ids=["lengths known", "lengths unknown"])
def test_the_state_follows_what_was_trained(tokenize: Any, tmp_path: Path) -> None:
    """A loop that has fetched three batches ahead resumes at the first one that was not trained on."""

    def made() -> RescalableLoader:
        source = MapSource([[row + 1] * 8 for row in range(64)], tokenize=tokenize)
        return loader_of(source, options=DataOptions(positions=True))

    def ahead(loader: RescalableLoader) -> Iterator[Any]:
        fetched: list[Any] = []
        for batch in loader:
            fetched.append(batch)
            if len(fetched) > 3:
                yield fetched.pop(0)
        yield from fetched

    whole = [batch["tokens"][:, 0].tolist() for batch in made()]
    first = made()
    trained = []
    for batch in itertools.islice(ahead(first), 7):
        trained.append(batch["tokens"][:, 0].tolist())
        first.record(batch)
    ckpt.save({"loader": first}, tmp_path / "c")
    second = made()
    ckpt.load({"loader": second}, tmp_path / "c")
    assert trained + [batch["tokens"][:, 0].tolist() for batch in second] == whole


def test_a_batch_that_is_recorded_again_changes_nothing() -> None:
    """Two callbacks of one trainer may record it."""
    loader = loader_of(MapSource(Rows(set())), options=DataOptions(positions=True))
    for batch in itertools.islice(loader, 3):
        loader.record(batch)
        once = loader.state_dict()
        loader.record(batch)
        assert str(loader.state_dict()) == str(once)


def test_a_batch_without_positions_cannot_be_recorded() -> None:
    loader = loader_of(MapSource(Rows(set())))
    with pytest.raises(ConfigurationError, match=r"DataOptions\(positions=True\)"):
        loader.record(next(iter(loader)))


def test_a_loop_that_records_no_batch_is_warned_of_at_a_save(caplog: pytest.LogCaptureFixture) -> None:
    loader = loader_of(MapSource(Rows(set())), options=DataOptions(positions=True))
    batches = [*itertools.islice(loader, 2)]
    loader.state_dict()
    assert "2 batches were handed out and none was recorded" in caplog.text
    caplog.clear()
    loader.record(batches[0])
    loader.state_dict()
    assert not caplog.text


def test_skipped_sequences_are_recorded_with_the_next_batch() -> None:
    """Else the state would hold all that was read after one of them."""
    source = MapSource([[row + 1] * 8 for row in range(20)])
    source.lengths(np.arange(20))
    source._rows = _Breaking([[row + 1] * 8 for row in range(20)], {7})
    source._cache = type(source._cache)(0)
    loader = loader_of(source, batch_size=1, options=DataOptions(positions=True, skip_bad_documents=1))
    for batch in loader:
        loader.record(batch)
    (values,) = loader.state_dict()["ranks"].values()
    assert values[:2].tolist() == [20, 0]  # turns, and none read ahead of them


@pytest.mark.parametrize("tokenize", [None, same], ids=["lengths known", "lengths unknown"])
def test_the_state_of_all_ranks_goes_on_on_one(tokenize: Any) -> None:
    """A framework that saves the first rank's state has that of all."""
    first, second = run_ranks(2, _read_some, tokenize)
    assert first["state"] == second["state"]
    loader = loader_of(MapSource([[row + 1] * 8 for row in range(64)], tokenize=tokenize))
    loader.load_state_dict(first["state"])
    rest = [int(row[0]) for batch in loader for row in batch]
    assert sorted([*first["rows"], *second["rows"], *rest]) == [*range(1, 65)]


def _read_some(rank: int, tokenize: Any) -> dict[str, Any]:
    """Read on ranks that are not in step; return the state of both, and the rows of this one."""
    loader = loader_of(MapSource([[row + 1] * 8 for row in range(64)], tokenize=tokenize))
    rows = [int(row[0]) for batch in itertools.islice(loader, 3 + rank) for row in batch]
    state = loader.state_dict_of_all_ranks()
    return {"state": _as_lists(state), "rows": rows}


def _as_lists(state: Any) -> Any:
    if isinstance(state, dict):
        return {name: _as_lists(value) for name, value in state.items()}
    return state if isinstance(state, str) else state.tolist()


# -- the size of the state -----------------------------------------------------------------------------------


def test_the_state_of_many_sources_is_small(tmp_path: Path) -> None:
    sources = {f"s{number}": MapSource(range(2000), tokenize=lambda row: [row]) for number in range(20)}
    dataset = ShardedDataset(sources, sequence_length=8)
    ckpt.save({"loader": dataset.positions}, tmp_path / "c")
    nbytes = sum(path.stat().st_size for path in (tmp_path / "c").rglob("*") if path.is_file())
    assert nbytes <= 2_000_000
    assert len(json.loads(dataset.positions.state_dict()["settings"])["sources"]) == 20
