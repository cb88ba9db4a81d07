"""A network, server or other writer that spoils a save: the old checkpoint loads, or the new one is whole."""

from __future__ import annotations

import errno
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from support.clock import skip_pauses_of_s3
from support.proxy import Call, FaultProxy
from support.ranks import run_ranks
from support.saves import (
    Place,
    load_is,
    objects_at,
    state_of,
)
from support.strict_s3 import StrictS3
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import ckpt
import ckpt.consistency.commit
import ckpt.ranks.group
from ckpt.backends import memory
from ckpt.backends.base import read_bytes
from ckpt.backends.registry import open_store
from ckpt.errors import (
    AlreadyExists,
    CommitConflict,
    CommitUnknown,
    NotFound,
    SaveFailed,
)
from ckpt.format.records import read_commit
from ckpt.writing.stock_metadata import put_stock_metadata


@pytest.mark.parametrize("action", ["reset", 503, 403])
def test_uploads_of_one_rank_fail(
    proxy: FaultProxy, server: StrictS3, proxied: Place, action: str | int
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
    assert not server.uploads
    assert len([key for key in objects_at(proxied) if key.endswith(".json")]) == 3


def _second_save_fails(rank: int, place: Place) -> Any:
    url, options = place
    ckpt.save(state_of(rank, 1), url, storage_options=options)
    with pytest.raises(SaveFailed) as caught:
        ckpt.save(state_of(rank, 2), url, storage_options=options)
    return sorted(caught.value.failures), str(caught.value)


@pytest.mark.slow
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
    proxy: FaultProxy,
    server: StrictS3,
    proxied: Place,
    name: str,
    action: str | int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    skip_pauses_of_s3(monkeypatch)
    url, options = proxied
    ckpt.save(state_of(0, 1), url, storage_options=options)
    stock_before = server.objects["c/.metadata"]
    proxy.rule = lambda call: action if call.method == "PUT" and call.key.endswith(f"c/{name}") else "pass"
    with pytest.raises(SaveFailed) as caught:
        ckpt.save(state_of(0, 2), url, storage_options=options)
    assert name in str(caught.value)
    proxy.rule = lambda call: "pass"
    is_committed = name == ".metadata"  # which comes last, and without which nothing is acknowledged
    assert load_is(2 if is_committed else 1, 0, *proxied)
    if is_committed or action == "reset":
        assert isinstance(caught.value.failures[0], CommitUnknown)
    if action != "lose":
        assert server.objects["c/.metadata"] == stock_before
    assert {"c/" + info.relative_path for info in pickle.loads(stock_before).storage_data.values()} <= set(
        server.objects
    )


@pytest.mark.parametrize("first", [True, False])
def test_every_reply_to_the_commit_is_lost(
    proxy: FaultProxy, proxied: Place, first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record is there, and looking for it tells: the save has succeeded."""
    skip_pauses_of_s3(monkeypatch)
    url, options = proxied
    if not first:
        ckpt.save(state_of(0, 1), url, storage_options=options)
    proxy.rule = lambda call: "lose" if call.method == "PUT" and call.key.endswith("commit.json") else "pass"
    ckpt.save(state_of(0, 2), url, storage_options=options)
    assert load_is(2, 0, *proxied)


@pytest.mark.long
@pytest.mark.parametrize("first", [True, False])
def test_nothing_is_acknowledged_that_a_disk_has_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    """At each fsync in turn, EIO. After the last ones the record can be read, which proves nothing."""
    fsync, calls = os.fsync, 0
    outcomes: list[type[BaseException] | None] = []

    def fail_once(fd: int) -> None:
        nonlocal calls
        calls += 1
        if calls == len(outcomes) + 1:
            raise OSError(errno.EIO, "Input/output error")
        fsync(fd)

    while not outcomes or outcomes[-1] is not None:
        place = tmp_path / str(len(outcomes))
        if not first:
            ckpt.save(state_of(0, 1), place)
        calls = 0
        monkeypatch.setattr(os, "fsync", fail_once)
        try:
            ckpt.save(state_of(0, 2), place)
            outcomes.append(None)
        except SaveFailed as error:
            outcomes.append(type(error.failures[0]))
        monkeypatch.undo()
        if outcomes[-1] is CommitUnknown or outcomes[-1] is None:
            assert load_is(2, 0, str(place), {})
        elif not first:
            assert load_is(1, 0, str(place), {})
    assert calls == len(outcomes) - 1 > 5  # no fsync is left that may fail unheard
    assert CommitUnknown in outcomes


@pytest.mark.parametrize("first", [True, pytest.param(False, marks=pytest.mark.long)])
def test_the_commit_arrives_late(
    proxy: FaultProxy, server: StrictS3, proxied: Place, first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The network keeps the request and delivers it after everybody has given up: it finds all it lists."""
    url, options = proxied
    if not first:
        ckpt.save(state_of(0, 1), url, storage_options=options)
    monkeypatch.setattr(ckpt.consistency.commit, "_CONFIRM_TIMEOUT_S", 0.5)
    proxy.rule = lambda call: (
        "held back" if call.method == "PUT" and call.key.endswith("commit.json") else "pass"
    )
    with pytest.raises(SaveFailed) as caught:
        ckpt.save(state_of(0, 2), url, storage_options={**options, "max_attempts": 1})
    assert isinstance(caught.value.failures[0], CommitUnknown)
    proxy.rule = lambda call: "pass"
    if not first:
        assert load_is(1, 0, *proxied)
    assert proxy.held_back
    for carry_out in proxy.held_back:
        carry_out()
    assert "commit.json" in objects_at(proxied)
    assert server.objects["c/commit.json"].count(b"\n") == 1
    assert load_is(2, 0, *proxied)


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


def test_a_commit_refused_by_its_own_work_and_then_replaced_may_have_happened() -> None:
    """The network sends the put twice; before the second one is refused, another save has replaced the first's work."""
    url, saves = "memory://refused/c", [2]

    def fault(operation: str, key: str, when: str) -> None:
        if (operation, key, when) == ("put", "commit.json", "after") and saves:
            ckpt.save(state_of(0, saves.pop()), url)
            raise AlreadyExists("exists already", key=key)

    memory.inject(url, fault)
    with pytest.raises(SaveFailed) as caught:
        ckpt.save(state_of(0, 1), url)
    assert isinstance(caught.value.failures[0], CommitUnknown)
    assert load_is(2, 0, url, {})


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


def test_metadata_stays_where_the_commit_is_only_out_of_sight() -> None:
    """Storage that does not show a client what it has just written itself, against its promise."""
    url, puts = "memory://out-of-sight/c", []

    def fault(operation: str, key: str, when: str) -> None:
        if operation == "put":
            puts.append(key)
        elif key == "commit.json" and ".metadata" in puts:
            raise NotFound("no such object", key=key)

    memory.inject(url, fault)
    ckpt.save(state_of(0, 1), url)
    assert ".metadata" in objects_at((url, {}))


@pytest.mark.parametrize("looks", [1, 1000], ids=["seen late", "never seen"])
def test_metadata_of_a_replaced_checkpoint_does_not_stay_in_silence(
    looks: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A save goes on before its `.metadata` when it is replaced already, but by what is not yet to be seen."""
    url = f"memory://replaced-{looks}/c"
    store, hidden = open_store(url), [True] * looks
    ckpt.save(state_of(0, 1), url)
    replaced, old = read_commit(store), bytes(read_bytes(store, ".metadata"))
    ckpt.save(state_of(0, 2), url)
    commit, new = read_commit(store), bytes(read_bytes(store, ".metadata"))
    assert replaced is not None
    assert commit is not None
    assert old != new
    index = commit.record.described_by.path

    def fault(operation: str, key: str, when: str) -> None:
        if key == index and hidden and hidden.pop():
            raise NotFound("no such object", key=key)

    memory.inject(url, fault)
    put_stock_metadata(store, replaced, old)
    if looks == 1:
        assert bytes(read_bytes(store, ".metadata")) == new
        assert not caplog.records
    else:
        assert "`ckpt gc`" in caplog.text
