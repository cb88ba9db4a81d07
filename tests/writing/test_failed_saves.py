"""A save that fails on a rank: the old checkpoint loads, nothing short is left, every rank learns why."""

from __future__ import annotations

import logging
import pickle
import re
import resource
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.ranks import run_ranks
from support.saves import (
    FailingPlanner,
    Place,
    boom,
    load_is,
    objects_at,
    state_of,
)
from support.strict_s3 import StrictS3
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import ckpt
import ckpt.ranks.group
from ckpt.backends import memory
from ckpt.backends.base import MIB, read_bytes
from ckpt.backends.posix import PosixStore
from ckpt.backends.registry import open_store
from ckpt.errors import (
    CheckpointError,
    CommitError,
    CommitUnknown,
    ConfigurationError,
    SaveFailed,
    StorageFull,
)


@pytest.fixture(params=["posix", "strict"])
def place(request: pytest.FixtureRequest, tmp_path: Path, server: StrictS3) -> Place:
    return (str(tmp_path / "c"), {}) if request.param == "posix" else ("s3://bucket/c", server.options)


# -- the planner fails -----------------------------------------------------------------------------------


@pytest.mark.parametrize("function", ["ckpt", "dcp"])
def test_planner_raises_on_one_rank(place: Place, function: str, server: StrictS3) -> None:
    """At any of its tensors and objects: each in a place of its own."""
    url, options = place
    results = zip(*run_ranks(2, _planner_raises, place, function), strict=True)
    for at, of_ranks in enumerate(results):
        for before, after, message in of_ranks:
            assert "rank 1" in message
            assert "'rank1." in message
            assert "ValueError: boom" in message
            assert before
            assert after
        if function == "ckpt":  # with dcp.save the other rank does not learn of it in time to clean up
            keys = objects_at((f"{url}-{at}", options))
            assert {key.split("/")[0] for key in keys} <= {
                "commit.json",
                ".metadata",
                "rank-00000",
                "rank-00001",
            }
            assert len([key for key in keys if key.endswith(".json")]) == 3
    assert at == 4
    assert not server.uploads


def _planner_raises(rank: int, place: Place, function: str) -> list[tuple[bool, bool, str]]:
    return [_planner_raises_at(rank, f"{place[0]}-{at}", place[1], at, function) for at in range(5)]


def _planner_raises_at(
    rank: int, url: str, options: dict[str, Any], at: int, function: str
) -> tuple[bool, bool, str]:
    ckpt.save(state_of(rank, 1), url, storage_options=options)
    before = load_is(1, rank, url, options)
    planner = FailingPlanner(at if rank == 1 else 100, boom)
    if function == "ckpt":
        with pytest.raises(SaveFailed) as caught:
            ckpt.save(state_of(rank, 2), url, storage_options=options, planner=planner)
        assert list(caught.value.failures) == [1]
    else:
        writer = ckpt.CheckpointWriter(url, storage_options=options)
        with pytest.raises(CheckpointException) as raised:
            dcp.save(state_of(rank, 2), storage_writer=writer, planner=planner)
    message = str(caught.value if function == "ckpt" else raised.value)
    return before, load_is(1, rank, url, options), message


def test_a_rank_reports_its_failure_before_it_cleans_up(tmp_path: Path) -> None:
    """Storage that hangs holds up the cleaning too, and the others must not wait for that, nor take it for the cause."""
    cleaned_late = run_ranks(2, _cleans_up_late, tmp_path)
    assert cleaned_late == [None, True]


def _cleans_up_late(rank: int, folder: Path) -> bool | None:
    heard = folder / "rank 0 has the error"
    seen: list[bool] = []
    remove_empty = PosixStore.remove_empty

    def remove_late(store: PosixStore, prefix: str = "") -> None:
        until_s = time.monotonic() + 20
        while not heard.exists() and time.monotonic() < until_s:
            time.sleep(0.01)
        seen.append(heard.exists())
        remove_empty(store, prefix)

    if rank == 1:
        PosixStore.remove_empty = remove_late  # type: ignore[method-assign, assignment]
    planner = FailingPlanner(1 if rank == 1 else 100, boom)
    with pytest.raises(SaveFailed, match=r"rank 1: .*ValueError: boom"):
        ckpt.save(state_of(rank, 2), folder / "c", planner=planner)
    if rank == 0:
        heard.touch()
        return None
    return seen == [True]


def test_planner_that_gives_something_else(tmp_path: Path) -> None:
    class Other(DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            return torch.zeros(3, dtype=torch.float64)

    with pytest.raises(SaveFailed, match=r"planned as torch.float32 \(10,\) but is torch.float64 \(3,\)"):
        ckpt.save({"t": torch.zeros(10)}, tmp_path, planner=Other())
    assert objects_at((str(tmp_path), {})) == {}


def test_dtype_changed_behind_a_cached_plan(tmp_path: Path) -> None:
    """DCP's plan cache does not look at dtypes: its metadata would say float32 about bfloat16 bytes."""
    planner = DefaultSavePlanner(enable_plan_caching=True)
    ckpt.save({"t": torch.ones(10)}, tmp_path, planner=planner)
    with pytest.raises(SaveFailed, match="enable_plan_caching"):
        ckpt.save({"t": torch.ones(10, dtype=torch.bfloat16)}, tmp_path, planner=planner)
    for cache in (
        "_cached_save_plan",
        "_cached_final_save_plan",
        "_cached_all_plans",
        "_cached_global_plan",
        "_cached_metadata",
    ):
        getattr(DefaultSavePlanner, cache).clear()


def test_unpicklable_exception_reaches_every_rank(tmp_path: Path) -> None:
    for message in run_ranks(2, _unpicklable, str(tmp_path)):
        assert "rank 1" in message
        assert "Unpicklable" in message


def _unpicklable(rank: int, url: str) -> str:
    class UnpicklableError(Exception):
        pass

    def fail() -> None:
        raise UnpicklableError(lambda: None)

    with pytest.raises(SaveFailed) as caught:
        ckpt.save(state_of(rank, 2), url, planner=FailingPlanner(1 if rank == 1 else 100, fail))
    return str(caught.value)


def test_unpicklable_exception_before_the_plan_is_made(tmp_path: Path) -> None:
    """DCP cannot send it to the others: the collective breaks, and the roll call tells them why."""
    for message in run_ranks(2, _unpicklable_plan, str(tmp_path)):
        assert "rank 1" in message
        assert "Unpicklable" in message or "ickle" in message


def _unpicklable_plan(rank: int, url: str) -> str:
    class UnpicklableError(Exception):
        pass

    class Failing(DefaultSavePlanner):
        def create_local_plan(self) -> Any:
            if rank == 1:
                raise UnpicklableError(lambda: None)
            return super().create_local_plan()

    with pytest.raises(SaveFailed) as caught:
        ckpt.save(state_of(rank, 2), url, planner=Failing())
    return str(caught.value)


@pytest.mark.smoke
def test_state_dict_raises_on_one_rank(tmp_path: Path) -> None:
    """Before DCP is entered, where the others would wait for this rank for ever."""
    for kinds in run_ranks(2, _state_dict_raises, str(tmp_path)):
        assert kinds == ["SaveFailed", "SaveFailed", "LoadFailed", "LoadFailed"]


def _state_dict_raises(rank: int, url: str) -> list[str]:
    class Part:
        broken = ""

        def state_dict(self) -> dict[str, Any]:
            if rank == 1 and self.broken == "state_dict":
                raise ValueError("boom")
            return {"t": torch.ones(3)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            if rank == 1 and self.broken == "load_state_dict":
                raise ValueError("boom")

    part, kinds = Part(), []
    ckpt.save({"part": part}, url)
    part.broken = "state_dict"
    for call in (ckpt.save, ckpt.async_save, ckpt.load):
        with pytest.raises(CheckpointError, match="rank 1: ValueError: boom") as caught:
            call({"part": part}, url)
        kinds.append(type(caught.value).__name__)
    part.broken = "load_state_dict"
    with pytest.raises(CheckpointError, match=r"rank 1: .*ValueError: boom") as caught:
        ckpt.load({"part": part}, url)
    return [*kinds, type(caught.value).__name__]


def test_argument_wrong_on_one_rank(tmp_path: Path) -> None:
    for failures in run_ranks(2, _wrong_argument, str(tmp_path)):
        assert failures == {1: "ConfigurationError"}


def _wrong_argument(rank: int, url: str) -> dict[int, str]:
    with pytest.raises(ConfigurationError, match="threads"):  # on all ranks: the call is wrong
        ckpt.save({}, url, threads=0)
    with pytest.raises(SaveFailed, match="threads must be at least 1") as caught:
        ckpt.save({}, url, threads=0 if rank == 1 else 2)
    return {number: type(failure).__name__ for number, failure in caught.value.failures.items()}


@pytest.mark.parametrize("function", ["ckpt", "dcp"])
def test_ranks_in_different_saves(tmp_path: Path, function: str) -> None:
    """A rank that skipped a save must not lend its tensors to the next one of the others."""
    for message in run_ranks(2, _different_saves, str(tmp_path), function):
        assert "step-1" in message
        assert "step-2" in message
    assert not list(tmp_path.rglob("commit.json"))


def _different_saves(rank: int, root: str, function: str) -> str:
    url = f"{root}/step-{rank + 1}"
    if function == "ckpt":
        with pytest.raises(SaveFailed) as caught:
            ckpt.save(state_of(rank, 1), url)
        return str(caught.value)
    with pytest.raises(CheckpointException) as raised:
        dcp.save(state_of(rank, 1), storage_writer=ckpt.CheckpointWriter(url))
    (failure,) = raised.value.failures.values()
    assert isinstance(failure[0], CommitError)
    return str(failure[0])


@pytest.mark.parametrize(
    "tensor", [torch.ones([1] * 65), torch.empty(0, 1 << 62)], ids=["65 dimensions", "absurd size"]
)
def test_what_no_reader_would_accept_is_not_committed(tmp_path: Path, tensor: torch.Tensor) -> None:
    with pytest.raises(SaveFailed, match="this state cannot be stored") as caught:
        ckpt.save({"t": tensor}, tmp_path)
    assert isinstance(caught.value.failures[0], ConfigurationError)
    assert objects_at((str(tmp_path), {})) == {}


@pytest.mark.parametrize("commits", [False, True])
def test_a_disk_that_is_full_at_the_commit(tmp_path: Path, commits: bool) -> None:
    """From commit.json on, or only after it: what stock readers find is whole."""
    url = f"memory://{tmp_path.name}/c"
    ckpt.save(state_of(0, 1), url)
    full: list[bool] = []

    def fault(operation: str, key: str, when: str) -> None:
        at = "after" if commits else "before"
        full.extend([True] if operation == "put" and key == "commit.json" and when == at else [])
        if operation == "put" and full and key != "commit.json" * commits:
            raise StorageFull("disk full", url=url, key=key, settled=True)

    memory.inject(url, fault)
    with pytest.raises(SaveFailed) as caught:
        ckpt.save(state_of(0, 2), url)
    full.clear()
    assert load_is(2 if commits else 1, 0, url, {})
    assert isinstance(caught.value.failures[0], CommitUnknown) == commits
    store = open_store(url)
    stock = pickle.loads(bytes(read_bytes(store, ".metadata")))
    for info in stock.storage_data.values():
        assert store.stat(info.relative_path).size_bytes >= info.offset + info.length


@pytest.mark.smoke
def test_tags_that_no_reader_would_take(tmp_path: Path) -> None:
    """The limit of the commit record is known before anything is committed or replaced."""
    ckpt.save(state_of(0, 1), tmp_path)
    before = objects_at((str(tmp_path), {}))
    with pytest.raises(SaveFailed, match="make the tags smaller") as caught:
        ckpt.save(state_of(0, 2), tmp_path, tags={"note": "x" * (65 << 20)})
    assert isinstance(caught.value.failures[0], ConfigurationError)
    assert objects_at((str(tmp_path), {})) == before
    assert load_is(1, 0, str(tmp_path), {})


def test_a_log_filter_that_raises_after_the_commit(tmp_path: Path) -> None:
    """Whatever happens once the record stands, no rank may take the save for failed and delete its data."""

    def fail(record: logging.LogRecord) -> bool:
        if "committed" in record.getMessage():
            raise RuntimeError("not today")
        return True

    logger = logging.getLogger("ckpt.writing.coordinator")
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addFilter(fail)
    try:
        ckpt.save(state_of(0, 1), tmp_path)
    finally:
        logger.removeFilter(fail)
        logger.setLevel(level)
    assert load_is(1, 0, str(tmp_path), {})


def test_an_interrupt_on_one_rank_frees_the_others(tmp_path: Path) -> None:
    assert run_ranks(2, _interrupted, str(tmp_path)) == ["SaveFailed", "KeyboardInterrupt"]


def _interrupted(rank: int, url: str) -> str:
    class Part:
        def state_dict(self) -> dict[str, Any]:
            if rank == 1:
                raise KeyboardInterrupt
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    try:
        ckpt.save({"part": Part()}, url)
    except BaseException as error:
        return type(error).__name__
    return "nothing"


def test_layouts_that_dcp_cannot_load_are_refused(tmp_path: Path) -> None:
    sparse = torch.eye(4).to_sparse()
    with pytest.raises(SaveFailed, match=r"'t' has the layout torch.sparse_coo.*save it dense"):
        ckpt.save({"t": sparse}, tmp_path)
    assert objects_at((str(tmp_path), {})) == {}


@pytest.mark.long
def test_a_refused_save_leaves_no_folders(tmp_path: Path) -> None:
    """Where a model of another program lies, they would make it look like the start of a save."""
    dcp.save({"t": torch.ones(2)}, checkpoint_id=str(tmp_path / "stock"), no_dist=True)
    before = sorted(path.name for path in (tmp_path / "stock").iterdir())
    run_ranks(2, _refused, str(tmp_path))
    assert sorted(path.name for path in (tmp_path / "stock").iterdir()) == before
    assert list((tmp_path / "failed").iterdir()) == []


def _refused(rank: int, root: str) -> None:
    with pytest.raises(SaveFailed, match="another program"):
        ckpt.save({f"t{rank}": torch.ones(2)}, f"{root}/stock")
    with pytest.raises(CheckpointException, match="another program"):
        dcp.save({f"t{rank}": torch.ones(2)}, storage_writer=ckpt.CheckpointWriter(f"{root}/stock"))
    planner = FailingPlanner(0, boom) if rank == 1 else None
    with pytest.raises(SaveFailed, match="boom"):  # when the folders are there already
        ckpt.save({f"t{rank}": torch.ones(2)}, f"{root}/failed", planner=planner)


def test_freed_storage_is_refused(tmp_path: Path) -> None:
    tensor = torch.ones(1000)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(SaveFailed, match=r"'t' cannot be saved: .*freed"):
        ckpt.save({"t": tensor}, tmp_path)


def test_reset_to_a_wrong_place_keeps_the_old(tmp_path: Path) -> None:
    writer, reader = ckpt.CheckpointWriter(tmp_path / "a"), ckpt.CheckpointReader(tmp_path / "a")
    for each in (writer, reader):
        with pytest.raises(ConfigurationError):
            each.reset("s3:/mangled/url")
    dcp.save({"t": torch.ones(3)}, storage_writer=writer, no_dist=True)
    loaded = {"t": torch.zeros(3)}
    dcp.load(loaded, storage_reader=reader, no_dist=True)
    assert loaded["t"].sum() == 3


def test_failure_in_the_background_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    future = ckpt.async_save({"t": torch.ones(10)}, tmp_path, planner=FailingPlanner(0, boom))
    assert isinstance(future.exception(60), SaveFailed)
    assert "a save in the background failed" in caplog.text
    assert "boom" in caplog.text
    ckpt.async_save({"t": torch.ones(10)}, tmp_path).result(60)


# -- the disk is full ------------------------------------------------------------------------------------


def test_disk_full(small_disk: Path) -> None:
    results = run_ranks(2, _disk_full, str(small_disk / "c"))
    for before, after, kinds, message in results:
        assert before
        assert after
        assert kinds == ["StorageFull"] * len(kinds)
        assert "No space left on device" in message
        # Either rank may be the first, with its data, its index or its manifest.
        assert re.search(r"/disk/c/rank-0000[01]/[0-9a-f]{16}(-\d+\.distcp|\.index|\.json): ", message)
    keys = objects_at((str(small_disk / "c"), {}))
    assert len([key for key in keys if key.endswith(".json")]) == 3
    assert not list(small_disk.rglob("*.ckpt-tmp"))


def _disk_full(rank: int, url: str) -> Any:
    ckpt.save(state_of(rank, 1), url)
    before = load_is(1, rank, url, {})
    with pytest.raises(SaveFailed) as caught:
        ckpt.save(state_of(rank, 2), url)
    kinds = [type(failure).__name__ for failure in caught.value.failures.values()]
    return before, load_is(1, rank, url, {}), kinds, str(caught.value)


def test_file_size_limit(tmp_path: Path) -> None:
    ckpt.save(state_of(0, 1), tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5 * MIB, hard))
    try:
        with pytest.raises(SaveFailed, match="File too large") as caught:
            ckpt.save(state_of(0, 2), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert isinstance(caught.value.failures[0], StorageFull)
    assert load_is(1, 0, str(tmp_path), {})
