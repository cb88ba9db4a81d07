"""A save that fails, wherever: the old checkpoint loads, nothing short is left, every rank learns why."""

from __future__ import annotations

import functools
import logging
import os
import pickle
import resource
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.proxy import Call, FaultProxy, fault_proxy
from support.ranks import run_ranks, start
from support.servers import S3Server
from support.states import digest, emptied, random_tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import ckpt
import ckpt.ranks.group
from ckpt.backends import memory
from ckpt.backends.base import MIB, read_bytes
from ckpt.backends.registry import open_store
from ckpt.errors import (
    CheckpointError,
    CommitConflict,
    CommitError,
    CommitUnknown,
    ConfigurationError,
    LoadFailed,
    SaveFailed,
    StorageFull,
)


def state_of(rank: int, seed: int) -> dict[str, Any]:
    """Different on each rank, so that every rank writes: 26 MiB in all for two ranks, several parts each."""
    return {
        f"rank{rank}.large": random_tensor(3 * MIB, seed=seed + rank),
        f"rank{rank}.small": random_tensor(MIB // 4, seed=seed + rank + 10),
        f"rank{rank}.object": {"seed": seed},
    }


@functools.lru_cache(maxsize=8)
def digest_of(rank: int, seed: int) -> Any:
    return digest(state_of(rank, seed))


def loaded_from(rank: int, url: str, options: dict[str, Any]) -> Any:
    """The digest of what is at a place."""
    loaded = {key: emptied(value) for key, value in _template(rank).items()}
    ckpt.load(loaded, url, storage_options=options, no_dist=not dist.is_initialized())
    return digest(loaded)


@functools.lru_cache(maxsize=1)
def _template(rank: int) -> dict[str, Any]:
    return state_of(rank, 0)


def load_is(seed: int, rank: int, url: str, options: dict[str, Any]) -> bool:
    return bool(loaded_from(rank, url, options) == digest_of(rank, seed))


class FailingPlanner(DefaultSavePlanner):
    """Raises at the n-th time that data are asked for."""

    def __init__(self, at: int, failure: Callable[[], Any]) -> None:
        super().__init__()
        self.left, self.failure = at, failure

    def resolve_data(self, write_item: Any) -> Any:
        self.left -= 1
        if self.left < 0:
            self.failure()
        return super().resolve_data(write_item)


def boom() -> None:
    raise ValueError("boom")


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def s3_leftovers(server: S3Server, bucket: str) -> list[str]:
    return [
        upload["Key"] for upload in server.client().list_multipart_uploads(Bucket=bucket).get("Uploads", ())
    ]


@pytest.fixture(params=["posix", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path, s3: S3Server) -> tuple[str, dict[str, Any]]:
    if request.param == "posix":
        return str(tmp_path / "c"), {}
    return f"s3://{s3.new_bucket()}/c", {**s3.options, "part_size_bytes": 5 * MIB}


def objects_at(place: tuple[str, dict[str, Any]]) -> dict[str, int]:
    return {found.key: found.size_bytes for found in open_store(*place).list()}


# -- the planner fails -----------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("function", ["ckpt", "dcp"])
def test_planner_raises_on_one_rank(
    place: tuple[str, dict[str, Any]], at: int, function: str, s3: S3Server
) -> None:
    before, after, messages = zip(*run_ranks(2, _planner_raises, place, at, function), strict=True)
    for message in messages:
        assert "rank 1" in message
        assert "'rank1." in message
        assert "ValueError: boom" in message
    assert all(before)
    assert all(after)
    if function == "ckpt":  # with dcp.save the other rank does not learn of it in time to clean up
        assert {key.split("/")[0] for key in objects_at(place)} <= {
            "commit.json",
            ".metadata",
            "rank-00000",
            "rank-00001",
        }
        assert len([key for key in objects_at(place) if key.endswith(".json")]) == 3
    if place[0].startswith("s3"):
        assert s3_leftovers(s3, place[0].split("/")[2]) == []


def _planner_raises(rank: int, place: tuple[str, dict[str, Any]], at: int, function: str) -> Any:
    url, options = place
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
    with pytest.raises(CheckpointError, match="rank 1: ValueError: boom") as caught:
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


def test_stock_metadata_that_cannot_be_put_back_keep_their_data(tmp_path: Path) -> None:
    """A disk that is full from the commit on: ours loads the old, and what stock readers find is whole."""
    url = f"memory://{tmp_path.name}/c"
    ckpt.save(state_of(0, 1), url)
    full: list[bool] = []

    def fault(operation: str, key: str, when: str) -> None:
        full.extend([True] if operation == "put" and key == "commit.json" and when == "before" else [])
        if operation == "put" and full:
            raise StorageFull("disk full", url=url, key=key, settled=True)

    memory.inject(url, fault)
    with pytest.raises(SaveFailed) as caught:
        ckpt.save(state_of(0, 2), url)
    full.clear()
    assert load_is(1, 0, url, {})
    store = open_store(url)
    stock = pickle.loads(bytes(read_bytes(store, ".metadata")))
    for info in stock.storage_data.values():
        assert store.stat(info.relative_path).size_bytes >= info.offset + info.length
    assert isinstance(caught.value.failures[0], CommitError)


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
        assert ".distcp" in message
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


# -- the network or the server fails ---------------------------------------------------------------------


@pytest.fixture
def proxy(s3: S3Server) -> Iterator[FaultProxy]:
    with fault_proxy(s3) as proxy:
        yield proxy


@pytest.fixture
def proxied(proxy: FaultProxy) -> tuple[str, dict[str, Any]]:
    return f"s3://{proxy.server.new_bucket()}/c", {**proxy.options, "part_size_bytes": 5 * MIB}


@pytest.mark.parametrize("action", ["reset", 503, 403])
def test_uploads_of_one_rank_fail(
    proxy: FaultProxy, proxied: tuple[str, dict[str, Any]], action: str | int
) -> None:
    def rule(call: Call) -> str | int:
        # Only in the second save, and only from the second part on.
        second_save = len({c.key for c in proxy.calls if c.is_complete and "rank-00001" in c.key}) >= 1
        return (
            action
            if second_save
            and call.is_part
            and "rank-00001" in call.key
            and "partNumber=1&" not in call.target
            else "pass"
        )

    proxy.rule = rule
    results = run_ranks(2, _second_save_fails, proxied)
    proxy.rule = lambda call: "pass"
    for failures, message in results:
        assert failures == [1]
        assert "rank 1" in message
        assert "rank-00001/" in message
        assert "cannot upload part" in message
    for rank in (0, 1):
        assert load_is(1, rank, *proxied)
    assert s3_leftovers(proxy.server, proxied[0].split("/")[2]) == []
    assert len([key for key in objects_at(proxied) if key.endswith(".json")]) == 3


def _second_save_fails(rank: int, place: tuple[str, dict[str, Any]]) -> Any:
    url, options = place
    ckpt.save(state_of(rank, 1), url, storage_options=options)
    with pytest.raises(SaveFailed) as caught:
        ckpt.save(state_of(rank, 2), url, storage_options=options)
    return sorted(caught.value.failures), str(caught.value)


@pytest.mark.parametrize(
    ("name", "action"),
    [
        (".metadata", 500),
        (".metadata", 403),
        (".metadata", "lose"),
        ("commit.json", 403),
        pytest.param("commit.json", "reset", marks=pytest.mark.long),
    ],
)
def test_commit_fails(
    proxy: FaultProxy, proxied: tuple[str, dict[str, Any]], name: str, action: str | int
) -> None:
    url, options = proxied
    ckpt.save(state_of(0, 1), url, storage_options=options)
    stock_before = _raw(proxy, url, ".metadata")
    proxy.rule = lambda call: action if call.method == "PUT" and call.key.endswith(f"c/{name}") else "pass"
    with pytest.raises(SaveFailed) as caught:
        ckpt.save(state_of(0, 2), url, storage_options=options)
    assert name in str(caught.value)
    proxy.rule = lambda call: "pass"
    assert load_is(1, 0, *proxied)
    if isinstance(caught.value.failures[0], CommitUnknown):
        assert (name, action) == ("commit.json", "reset")
    elif action != "lose":  # every attempt to put the old one back was lost too, after it was carried out
        assert _raw(proxy, url, ".metadata") == stock_before


@pytest.mark.parametrize("first", [True, False])
def test_every_reply_to_the_commit_is_lost(
    proxy: FaultProxy, proxied: tuple[str, dict[str, Any]], first: bool
) -> None:
    """The record is there, and looking for it tells: the save has succeeded."""
    url, options = proxied
    if not first:
        ckpt.save(state_of(0, 1), url, storage_options=options)
    proxy.rule = lambda call: "lose" if call.method == "PUT" and call.key.endswith("commit.json") else "pass"
    ckpt.save(state_of(0, 2), url, storage_options=options)
    assert load_is(2, 0, *proxied)


@pytest.mark.parametrize("first", [True, False])
def test_the_commit_arrives_late(
    proxy: FaultProxy, proxied: tuple[str, dict[str, Any]], first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The network keeps the request and delivers it after everybody has given up: it finds all it lists."""
    url, options = proxied
    if not first:
        ckpt.save(state_of(0, 1), url, storage_options=options)
    monkeypatch.setattr(ckpt.consistency.commit, "_CONFIRM_TIMEOUT_S", 0.5)
    proxy.late_s = 3.0
    proxy.rule = lambda call: "late" if call.method == "PUT" and call.key.endswith("commit.json") else "pass"
    with pytest.raises(SaveFailed) as caught:
        ckpt.save(state_of(0, 2), url, storage_options={**options, "max_attempts": 1})
    assert isinstance(caught.value.failures[0], CommitUnknown)
    proxy.rule = lambda call: "pass"
    if not first:
        assert load_is(1, 0, *proxied)
    deadline = time.monotonic() + 30
    while "commit.json" not in objects_at(proxied) or _raw(proxy, url, "commit.json").count(b"\n") != 1:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    time.sleep(proxy.late_s)
    assert load_is(2, 0, *proxied)


def _raw(proxy: FaultProxy, url: str, key: str) -> bytes:
    bucket, prefix = url.removeprefix("s3://").split("/", 1)
    return bytes(proxy.server.client().get_object(Bucket=bucket, Key=f"{prefix}/{key}")["Body"].read())


def test_someone_else_commits_meanwhile(tmp_path: Path) -> None:
    class Intruding(DefaultSavePlanner):
        def finish_plan(self, new_plan: Any) -> Any:
            ckpt.save(state_of(0, 7), tmp_path)
            return super().finish_plan(new_plan)

    ckpt.save(state_of(0, 1), tmp_path)
    with pytest.raises(SaveFailed) as caught:
        ckpt.save(state_of(0, 2), tmp_path, planner=Intruding())
    assert isinstance(caught.value.failures[0], CommitConflict)
    assert load_is(7, 0, str(tmp_path), {})


def test_nothing_after_the_commit_fails_the_save() -> None:
    """What the replaced checkpoint leaves behind may be undeletable; the new one is committed all the same."""
    url = "memory://undeletable/c"
    ckpt.save(state_of(0, 1), url)

    def fault(operation: str, key: str, when: str) -> None:
        if operation == "delete":
            raise RuntimeError("not today")

    memory.inject(url, fault)
    ckpt.save(state_of(0, 2), url)
    assert load_is(2, 0, url, {})


# -- processes are killed --------------------------------------------------------------------------------


def test_one_rank_is_killed(place: tuple[str, dict[str, Any]]) -> None:
    """The others are told which, and do not wait for it."""
    results = run_ranks(3, _one_is_killed, place, killed=[1])
    for rank in (0, 2):
        failures, message = results[rank]
        assert failures == {1: "CheckpointError", rank: "CommitUnknown"}
        assert "rank 1 does not answer" in message
    for rank in range(3):
        assert load_is(1, rank, *place)


def _one_is_killed(rank: int, place: tuple[str, dict[str, Any]]) -> Any:
    url, options = place
    ckpt.save(state_of(rank, 1), url, storage_options=options)
    with pytest.raises(SaveFailed) as caught:
        ckpt.save(
            state_of(rank, 2),
            url,
            storage_options=options,
            planner=FailingPlanner(4 if rank == 1 else 100, kill_self),
            timeout_s=20.0,
        )
    return _kinds(caught.value), str(caught.value)


def _kinds(error: SaveFailed) -> dict[int, str]:
    return {rank: type(failure).__name__ for rank, failure in error.failures.items()}


def test_the_coordinator_is_killed(place: tuple[str, dict[str, Any]]) -> None:
    results = run_ranks(2, _coordinator_is_killed, place, killed=[0])
    assert results[1][0] == {0: "CheckpointError", 1: "CommitUnknown"}
    assert "rank 0 does not answer" in results[1][1]
    for rank in range(2):
        assert load_is(1, rank, *place)


def _coordinator_is_killed(rank: int, place: tuple[str, dict[str, Any]]) -> Any:
    url, options = place
    ckpt.save(state_of(rank, 1), url, storage_options=options)
    with pytest.raises(SaveFailed) as caught:
        ckpt.save(
            state_of(rank, 2),
            url,
            storage_options=options,
            planner=FailingPlanner(4 if rank == 0 else 100, kill_self),
            timeout_s=20.0,
        )
    return _kinds(caught.value), str(caught.value)


@pytest.mark.parametrize(
    "call",
    ["save", *(pytest.param(call, marks=pytest.mark.long) for call in ("async_save", "load"))],
)
def test_a_rank_is_killed_before_the_first_call(call: str, tmp_path: Path) -> None:
    url = str(tmp_path / "c")
    ckpt.save({"t": torch.ones(3)}, url)
    for message, failed in run_ranks(3, _killed_before, url, call, killed=[1])[::2]:
        assert "rank 1 does not answer" in message
        assert failed == [1]


def _killed_before(rank: int, url: str, call: str) -> Any:
    dist.barrier()
    if rank == 1:
        kill_self()
    with pytest.raises(SaveFailed if "save" in call else LoadFailed) as caught:
        getattr(ckpt, call)({"t": torch.ones(3)}, url, timeout_s=20.0)
    return str(caught.value), sorted(caught.value.failures)


def test_a_rank_of_a_subgroup_is_killed(tmp_path: Path) -> None:
    results = run_ranks(4, _one_of_a_subgroup_is_killed, str(tmp_path), killed=[2])
    for rank in (1, 3):
        failures, message = results[rank]
        assert 1 in failures  # the second of the three
        assert "rank 1 does not answer" in message


def _one_of_a_subgroup_is_killed(rank: int, url: str) -> Any:
    group = dist.new_group([1, 2, 3])
    if rank == 0:
        return None
    planner = FailingPlanner(1, kill_self) if rank == 2 else None
    with pytest.raises(SaveFailed) as caught:
        ckpt.save(state_of(rank, 1), url, process_group=group, planner=planner, timeout_s=20.0)
    return sorted(caught.value.failures), str(caught.value)


def test_a_rank_is_killed_in_a_load(tmp_path: Path) -> None:
    results = run_ranks(3, _killed_in_load, str(tmp_path), killed=[2])
    for rank in (0, 1):
        assert results[rank][0] == [2]
        assert "rank 2 does not answer" in results[rank][1]


def _killed_in_load(rank: int, url: str) -> Any:
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    class Killing(DefaultLoadPlanner):
        def resolve_tensor(self, read_item: Any) -> Any:
            if rank == 2:
                kill_self()
            return super().resolve_tensor(read_item)

    ckpt.save(state_of(rank, 1), url)
    with pytest.raises(LoadFailed) as caught:
        ckpt.load(emptied(state_of(rank, 1)), url, planner=Killing(), timeout_s=20.0)
    return sorted(caught.value.failures), str(caught.value)


def _save(place: tuple[str, dict[str, Any]], seed: int) -> None:
    ckpt.save(state_of(0, seed), place[0], storage_options=place[1])


@pytest.mark.long
def test_killed_at_every_request(proxy: FaultProxy, proxied: tuple[str, dict[str, Any]]) -> None:
    """SIGKILL of the whole job before and after each request of a save that overwrites a checkpoint.

    The old values load until the commit's request has gone through, the new ones from then on.
    """
    _save(proxied, 1)
    old, new, at, outcomes = 1, 2, 0, []
    while True:
        at += 1
        for carried_out in (False, True):  # the request at which it dies
            died_at = _kill_at_request(proxy, at, carried_out, proxied, new)
            is_new = load_is_one_of(proxied, old, new)
            if is_new:
                old, new = new, new + 1
            if died_at is None:
                break
            outcomes.append((died_at.method, died_at.key.split("/")[-1], carried_out, is_new))
        if died_at is None:
            break
    assert len(outcomes) >= 2 * 14, outcomes
    commit = next(i for i, outcome in enumerate(outcomes) if outcome[:3] == ("PUT", "commit.json", True))
    assert [outcome[3] for outcome in outcomes] == [i >= commit for i in range(len(outcomes))], "\n".join(
        map(str, outcomes)
    )


def _kill_at_request(
    proxy: FaultProxy, at: int, carried_out: bool, place: tuple[str, dict[str, Any]], seed: int
) -> Call | None:
    """Start a save and kill it at its n-th request; None if it made fewer."""
    before, died_at = len(proxy.calls), []
    saver = start(_save, place, seed)

    def rule(call: Call) -> str:
        if call.number - before != at:
            return "pass"
        died_at.append(call)
        if carried_out:
            return "lose"
        saver.kill()
        return "reset"

    proxy.rule = rule
    while saver.exitcode is None and not died_at:
        saver.join(0.01)
    if died_at:
        # A lost reply reaches nobody: the process dies before it could ask again.
        saver.kill()
    saver.join()
    proxy.settle()
    proxy.rule = lambda call: "pass"
    return died_at[0] if died_at else None


_SYSTEM_CALLS = ("mkdir", "open", "writev", "fsync", "close", "replace", "link", "unlink")


def _save_and_die(url: str, seed: int, at: int) -> None:
    """Save, and die of SIGKILL right before the n-th call that changes the file system."""
    count = 0

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == at:
                kill_self()
            return call(*args, **kwargs)

        return wrapper

    for name in _SYSTEM_CALLS:
        setattr(os, name, counted(getattr(os, name)))
    ckpt.save(state_of(0, seed), url, threads=1)


@pytest.mark.long
def test_killed_at_every_system_call(tmp_path: Path) -> None:
    """SIGKILL between any two calls that change the file system, in a save that overwrites a checkpoint.

    To the file system, right before a call is right after the one before it: one thread makes them all.
    """
    place: tuple[str, dict[str, Any]] = (str(tmp_path / "c"), {})
    _save(place, 1)
    old, new, at, outcomes = 1, 2, 0, []
    exit_code = -signal.SIGKILL
    while exit_code == -signal.SIGKILL:
        at += 1
        saver = start(_save_and_die, place[0], new, at)
        saver.join()
        exit_code = saver.exitcode
        is_new = load_is_one_of(place, old, new)
        if is_new:
            old, new = new, new + 1
        outcomes.append(is_new)
    assert exit_code == 0
    assert len(outcomes) > 30
    assert outcomes == sorted(outcomes), "once committed, always committed"
    assert 0 < outcomes.count(False) < len(outcomes) - 2


def load_is_one_of(place: tuple[str, dict[str, Any]], old: int, new: int) -> bool:
    """Whether the new values load; if not, the old ones must."""
    found = loaded_from(0, place[0], place[1])
    if found == digest_of(0, new):
        return True
    assert found == digest_of(0, old)
    return False
