"""The loader with real worker processes, real ranks, real checkpoints, and torchdata's loader."""

from __future__ import annotations

import importlib
import itertools
import multiprocessing
import os
import pickle
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.ranks import exit_code_of, run_ranks
from support.servers import S3Server
from torch.utils.data import get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

import ckpt
from ckpt.errors import CheckpointError, ConfigurationError, FormatError
from ckpt.trainer_integration.dataloader import RescalableLoader, _WorkerPart
from ckpt.trainer_integration.dataset import ShardedDataset
from ckpt.trainer_integration.sources import MapSource
from ckpt.trainer_integration.token_files import TokenFiles, write_token_file

PAD = -1
FORK = "fork"  # in ranks that a fork server started, the default would be a server of their own
LENGTHS = [5, 90, 17, 33, 2, 140, 60, 8] * 9
TOKENS = sum(LENGTHS)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Documents in which no token appears twice."""
    path = tmp_path / "tokens.bin"
    ends = [0, *itertools.accumulate(LENGTHS)]
    write_token_file(path, [np.arange(*pair) for pair in itertools.pairwise(ends)])
    return path


def dataset_of(file: Path, **options: Any) -> ShardedDataset:
    return ShardedDataset(TokenFiles([file]), **{"shards": 24, "sequence_length": 16, **options})


def loader_of(
    file: Path, workers: int, *, batch_size: int = 3, context: str = FORK, **options: Any
) -> RescalableLoader:
    return RescalableLoader(
        dataset_of(file, **options),
        batch_size=batch_size,
        num_workers=workers,
        multiprocessing_context=context,
    )


def rows(loader: Any, count: int) -> list[Any]:
    return [batch.tolist() for batch in itertools.islice(loader, count)]


# -- workers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "workers", [1, *(pytest.param(workers, marks=pytest.mark.long) for workers in (2, 3, 5))]
)
def test_the_order_does_not_depend_on_workers(file: Path, workers: int) -> None:
    """Also when a run is stopped, its workers having read ahead, and goes on with another number of
    them.
    """
    whole = rows(loader_of(file, 0), 20)
    first = loader_of(file, workers)
    second = loader_of(file, 6 - workers)
    begun = rows(first, 7)
    second.load_state_dict(first.state_dict())
    assert begun + rows(second, 13) == whole


@pytest.mark.parametrize("workers", [1, pytest.param(3, marks=pytest.mark.long)])
def test_several_sources_of_unknown_lengths_have_one_order(workers: int) -> None:
    """Though what a worker reads of each source is not what the other workers read."""
    rng = np.random.default_rng(0)
    lengths = [rng.lognormal(3, 1, 60).astype(int) for _ in range(3)]
    sources = {
        str(at): MapSource([[at] * n for n in each], tokenize=_same) for at, each in enumerate(lengths)
    }

    def loader(count: int) -> RescalableLoader:
        weights = {"0": 5, "1": 1, "2": 0.2}
        dataset = ShardedDataset(sources, weights=weights, shards=12, sequence_length=16)
        return RescalableLoader(dataset, batch_size=4, num_workers=count, multiprocessing_context=FORK)

    whole = rows(loader(0), 60)
    first = loader(workers)
    begun = rows(first, 20)
    second = loader(2)
    second.load_state_dict(first.state_dict())
    assert begun + rows(second, 40) == whole


def _same(tokens: Any) -> Any:
    return tokens


def test_what_a_worker_gets_can_be_sent_to_it(file: Path) -> None:
    dataset = dataset_of(file)
    worker = _WorkerPart(dataset, 0, 1)
    first, same = next(iter(worker)), next(iter(pickle.loads(pickle.dumps(worker))))
    assert first.shard == same.shard
    assert first.tokens.tolist() == same.tokens.tolist()


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
def test_an_epoch_with_workers(file: Path, context: str) -> None:
    loader = loader_of(file, 2, epochs=1, pad_token=PAD, context=context)
    read = [token for batch in loader for token in batch.flatten().tolist() if token != PAD]
    assert sorted(read) == [*range(TOKENS)]
    assert loader.epoch == 1


def test_reading_draws_none_of_the_trainer_s_random_numbers(file: Path) -> None:
    """A run that goes on begins an iteration where the run that was not killed is in the middle of
    one.
    """
    torch.manual_seed(5)
    before = torch.get_rng_state()
    rows(loader_of(file, 2), 3)
    assert torch.equal(torch.get_rng_state(), before)


def test_workers_end_with_their_iteration(file: Path) -> None:
    batches: Any = iter(loader_of(file, 2))
    next(batches)
    children = multiprocessing.active_children()
    assert len(children) == 2
    batches.close()
    for child in children:
        child.join(30)
        assert child.exitcode is not None


def test_a_worker_that_dies(file: Path) -> None:
    """torch's signal handler raises wherever the program is, so it can be torch's error or ours.

    Or it is lost, where Python ignores errors (in `__del__`): then the next wait finds the worker
    dead when its time is over.
    """
    loader = RescalableLoader(
        dataset_of(file), batch_size=3, num_workers=2, multiprocessing_context=FORK, timeout_s=20
    )
    batches = iter(loader)
    next(batches)
    before = loader.state_dict()["ranks"]["00000-of-00001"]
    process = multiprocessing.active_children()[0]
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)

    def read_on() -> None:
        nonlocal before
        for _ in range(10_000):
            next(batches)
            before = loader.state_dict()["ranks"]["00000-of-00001"]

    with pytest.raises((CheckpointError, RuntimeError), match=r"exited unexpectedly|killed by signal"):
        read_on()
    after = loader.state_dict()["ranks"]["00000-of-00001"]
    assert (
        0 <= after[0] - before[0] <= loader.batch_size
    )  # a batch that was on its way out when the signal came
    assert rows(loader, 1)  # a new iteration goes on


def test_a_worker_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.2)  # to be ended after
    dataset = ShardedDataset(_Hanging(), shards=2, sequence_length=2)
    loader = RescalableLoader(dataset, batch_size=1, num_workers=1, timeout_s=1)
    with pytest.raises(
        CheckpointError, match=r"the worker 0 that reads data failed: .*timed out after 1 sec"
    ):
        next(iter(loader))


class _Hanging(MapSource):
    def __init__(self) -> None:
        super().__init__([[1, 2]] * 4)

    def tokens(self, document: int) -> Any:
        return super().tokens(document) if get_worker_info() is None else signal.pause()


def test_an_error_of_a_worker_is_raised_as_it_is() -> None:
    dataset = ShardedDataset(MapSource([["no", "tokens"]] * 4), shards=2, sequence_length=2)
    with pytest.raises(FormatError, match=r"source 'data', document \d .*must be one list of integer tokens"):
        next(iter(RescalableLoader(dataset, batch_size=1, num_workers=1)))


# -- ranks and checkpoints -------------------------------------------------------------------------------


@pytest.fixture(params=["posix", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path, s3: S3Server) -> tuple[str, dict[str, Any]]:
    if request.param == "posix":
        return str(tmp_path / "run"), {}
    return f"s3://{s3.new_bucket()}/run", s3.options


def test_an_epoch_over_changing_ranks(place: tuple[str, dict[str, Any]], file: Path) -> None:
    """4 -> 6 -> 3 -> 1 -> 4 ranks, most with workers, each with its own batch size."""
    read: list[int] = []
    journey = [(4, 1, 2), (6, 0, 1), (3, 2, 3), (1, 2, 1), (4, 0, 2)]
    for number, (world_size, workers, batch_size) in enumerate(journey):
        last = number == len(journey) - 1
        results = run_ranks(world_size, _travel, place, str(file), number, workers, batch_size, last)
        read += itertools.chain.from_iterable(results)
        assert len(set(read)) == len(read), "revisited"
        assert last or len(read) < TOKENS
    assert sorted(read) == [*range(TOKENS)], "skipped"


def _travel(
    rank: int,
    place: tuple[str, dict[str, Any]],
    file: str,
    number: int,
    workers: int,
    batch_size: int,
    last: bool,
) -> list[int]:
    url, options = place
    loader = loader_of(Path(file), workers, batch_size=batch_size, epochs=1, pad_token=PAD)
    model = torch.zeros(3)
    if number:
        ckpt.load({"model": model, "loader": loader}, f"{url}/{number - 1}", storage_options=options)
        assert model.tolist() == [number - 1.0] * 3
    batches = rows(loader, 1_000_000 if last else 5 + rank % 2)
    ckpt.save(
        {"model": torch.full((3,), float(number)), "loader": loader},
        f"{url}/{number}",
        storage_options=options,
    )
    return [token for batch in batches for row in batch for token in row if token != PAD]


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path, file: Path) -> None:
    """On the same ranks, bit for bit; a background save holds the position of the moment it was
    called.
    """
    for whole, resumed in run_ranks(2, _resume, str(tmp_path / "c"), str(file)):
        assert whole == resumed


def _resume(rank: int, url: str, file: str) -> Any:
    whole = rows(loader_of(Path(file), 0), 12)
    first = loader_of(Path(file), 2)
    batches = iter(first)
    begun = [next(batches).tolist() for _ in range(5)]
    future = ckpt.async_save({"loader": first}, url)
    next(batches)  # after the save was called: not part of it
    future.result()
    second = loader_of(Path(file), 1)
    ckpt.load({"loader": second}, url)
    return whole, begun + rows(second, 7)


def test_ranks_of_one_tensor_parallel_group_save_a_shard_once(tmp_path: Path, file: Path) -> None:
    saved = run_ranks(4, _tensor_parallel, str(tmp_path / "c"), str(file))
    assert saved[0] == saved[1] != saved[2] == saved[3]
    names = list(dcp.FileSystemReader(tmp_path / "c").read_metadata().state_dict_metadata)
    assert sorted(names) == [*(f"loader.ranks.0000{rank}-of-00002" for rank in range(2)), "loader.settings"]
    loader = loader_of(file, 0)
    ckpt.load({"loader": loader}, tmp_path / "c")
    assert loader.state_dict()["ranks"]["00000-of-00001"][-1] == 2 * 4 * 3


def _tensor_parallel(rank: int, url: str, file: str) -> Any:
    loader = loader_of(Path(file), 0, rank=rank // 2, world_size=2)
    read = rows(loader, 4)
    ckpt.save({"loader": loader}, url)
    return read


def test_stock_dcp_saves_and_loads_positions(tmp_path: Path, file: Path) -> None:
    first, second = loader_of(file, 0), loader_of(file, 0)
    begun = rows(first, 4)
    dcp.save({"loader": first}, checkpoint_id=tmp_path / "stock", no_dist=True)
    dcp.load({"loader": second}, checkpoint_id=tmp_path / "stock", no_dist=True)
    assert begun + rows(second, 4) == rows(loader_of(file, 0), 8)


@pytest.mark.slow
def test_more_shards_than_were_saved(tmp_path: Path, file: Path) -> None:
    ckpt.save({"loader": loader_of(file, 0, shards=4)}, tmp_path)
    with pytest.raises(ConfigurationError, match="shards: saved 4, here 6"):
        ckpt.load({"loader": loader_of(file, 0, shards=6)}, tmp_path)


# -- torchdata -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_torchdata_resumes_by_itself(file: Path, workers: int) -> None:
    """On the same ranks and workers, with torchdata's own state."""

    def loader() -> Any:
        return StatefulDataLoader(dataset_of(file), batch_size=3, num_workers=workers)

    whole = [batch["tokens"].tolist() for batch in itertools.islice(loader(), 12)]
    first, second = loader(), loader()
    begun = [batch["tokens"].tolist() for batch in itertools.islice(first, 5)]
    second.load_state_dict(first.state_dict())
    assert begun + [batch["tokens"].tolist() for batch in itertools.islice(second, 7)] == whole


@pytest.mark.parametrize("journey", [[(2, 2), (3, 1), (1, 0)], [(1, 3), (4, 0), (2, 2)]])
def test_torchdata_rescales_through_positions(
    file: Path, tmp_path: Path, journey: Sequence[tuple[int, int]]
) -> None:
    read: list[int] = []
    for number, (world_size, workers) in enumerate(journey):
        last = number == len(journey) - 1
        url = str(tmp_path / str(number))
        results = run_ranks(
            world_size, _torchdata, url, str(tmp_path / str(number - 1)), str(file), workers, last
        )
        read += itertools.chain.from_iterable(results)
    assert sorted(read) == [*range(TOKENS)]


def _torchdata(rank: int, url: str, previous: str, file: str, workers: int, last: bool) -> list[int]:
    dataset = dataset_of(Path(file), epochs=1, pad_token=PAD)
    if not previous.endswith("-1"):
        ckpt.load({"loader": dataset.positions}, previous)
    read: list[int] = []
    context = FORK if workers else None
    loader = StatefulDataLoader(dataset, batch_size=2, num_workers=workers, multiprocessing_context=context)
    for batch in itertools.islice(loader, 1_000_000 if last else 4 + rank):
        read += [token for token in batch["tokens"].flatten().tolist() if token != PAD]
        dataset.positions.record(batch)
    ckpt.save({"loader": dataset.positions}, url)
    dist.barrier()
    return read


# -- import ----------------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_pyarrow_and_torchdata_are_not_needed() -> None:
    assert exit_code_of(_import_without_them) == 0


def _import_without_them() -> None:
    missing = ("pyarrow", "torchdata", "datasets")
    for name in list(sys.modules):
        if name.partition(".")[0] in (*missing, "ckpt"):
            del sys.modules[name]
    for name in missing:
        sys.modules[name] = None  # type: ignore[assignment]
    for name in ("dataloader", "token_files", "parquet_files"):
        importlib.import_module(f"ckpt.trainer_integration.{name}")
