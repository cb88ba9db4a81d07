"""Trainers send updates by RPC to servers that keep the rows; all save one cut, and some do not survive it."""

from __future__ import annotations

import time
from collections.abc import Collection
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.ranks import run_ranks
from support.row_stores import DictRows
from support.saves import kill_self
from torch.distributed import rpc

import ckpt
from ckpt.embeddings import Column, Tables, TableShard, UpdateGate
from ckpt.embeddings.rows import Ids, Rows, home_of
from ckpt.errors import SaveFailed

TRAINERS, SERVERS, IDS = 2, 2, 300
COLUMNS = {"ledger": Column(3, torch.int64)}
"""Of the steps that have updated a row: their number, their sum, and the sum of their squares."""


def touched(trainer: int, step: int) -> Ids:
    """The ids that a trainer's batch updates; some of them twice by two trainers."""
    return np.unique(np.random.default_rng([trainer, step]).integers(0, IDS, 20))


def ledger_after(step: int) -> dict[int, list[int]]:
    rows: dict[int, list[int]] = {}
    for number in range(1, step + 1):
        for trainer in range(TRAINERS):
            for id in touched(trainer, number).tolist():
                row = rows.setdefault(id, [0, 0, 0])
                rows[id] = [row[0] + 1, row[1] + number, row[2] + number**2]
    return rows


class LedgerRows(DictRows):
    """Kills its process in a read that is `kill_in` reads away."""

    kill_in = 1 << 60

    def read(self, ids: Ids, columns: Collection[str]) -> Rows:
        self.kill_in -= 1
        if self.kill_in <= 0:
            kill_self()
        return super().read(ids, columns)


class Server:
    def __init__(self, number: int) -> None:
        self.rows = LedgerRows(COLUMNS, number, SERVERS)
        self.shard = TableShard("user", self.rows, shard=number, shards=SERVERS, max_delta_ratio=9.0)
        self.gate = UpdateGate(range(TRAINERS))

    def update(self, ids: Ids, step: int) -> None:
        time.sleep(0.001 * (step % 3))  # so that some are overtaken
        with self.shard.writing(ids):
            new = ids[~self.rows.holds(ids)]
            self.rows.write(new, {"ledger": torch.zeros(len(new), 3, dtype=torch.int64)})
            before = DictRows.read(self.rows, ids, COLUMNS)["ledger"]
            self.rows.write(ids, {"ledger": before + torch.tensor([1, step, step**2])})


server: Server


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def update(trainer: int, epoch: int, ids: Ids, step: int) -> torch.futures.Future[None]:
    later: torch.futures.Future[None] = torch.futures.Future()

    def answer(done: Future[None]) -> None:
        error = done.exception()
        later.set_result(None) if error is None else later.set_exception(error)  # type: ignore[arg-type]

    server.gate.submit(trainer, epoch, lambda: server.update(ids, step)).add_done_callback(answer)
    return later


def mark(trainer: int, epoch: int, updates: int) -> None:
    server.gate.mark(trainer, epoch, updates)


def _connect(rank: int, root: str) -> None:
    global server
    if rank >= TRAINERS:
        server = Server(rank - TRAINERS)
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{root}/rpc", rpc_timeout=60)
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=TRAINERS + SERVERS, rpc_backend_options=options)  # type: ignore[no-untyped-call]


def _train(rank: int, root: str, cuts: list[int], marks: bool, timeout_s: float) -> str:
    """Send updates without waiting for them, also during saves; return the error of the last one."""
    tables, dense = Tables(), torch.zeros(5)
    step = 0
    under_way: list[Any] = []
    saved: Future[Any] | None = None
    for epoch, cut in enumerate(cuts):
        sent = 0
        while step < cut:
            step += 1
            dense += 1
            ids = touched(rank, step)
            homes = home_of(ids, SERVERS)
            for number in range(SERVERS):
                arguments = rank, epoch, ids[homes == number], step
                under_way.append(rpc.rpc_async(f"rank{TRAINERS + number}", update, arguments))
            sent += 1
            if step == cut - 1 and saved is not None:
                saved.result(60)
        for number in range(SERVERS):
            if marks or cut != cuts[-1]:
                rpc.rpc_async(f"rank{TRAINERS + number}", mark, (rank, epoch, sent))
        if marks and cut != cuts[-1]:
            for _ in range(2):  # the same again, while the first is on its way
                rpc.rpc_async(f"rank{TRAINERS}", mark, (rank, epoch, sent))
        saved = tables.async_save(
            {"dense": dense, "step": step},
            f"{root}/step-{cut}",
            timeout_s=timeout_s if cut == cuts[-1] else 60.0,
        )
    assert saved is not None
    try:
        saved.result(90)
    except SaveFailed as error:
        return str(error)
    for reply in under_way:
        reply.wait()
    return ""


def _serve(root: str, cuts: list[int], kills: bool, timeout_s: float) -> str:
    tables = Tables(server.shard)
    for cut in cuts:
        if cut == cuts[-1]:
            server.rows.kill_in = 2 if kills else 1 << 60
        elif cut != cuts[0]:
            # The trainers go on before this save has begun here.
            deadline = time.monotonic() + 60
            while not server.gate.queued:
                assert time.monotonic() < deadline
                time.sleep(0.001)
        saved = tables.async_save(
            {}, f"{root}/step-{cut}", gate=server.gate, timeout_s=timeout_s if cut == cuts[-1] else 60.0
        )
        try:
            saved.result(90)
        except SaveFailed as error:
            return str(error)
    return ""


def _run(
    rank: int, root: str, cuts: list[int], unmarked: int | None, killed: int | None, timeout_s: float
) -> str:
    _connect(rank, root)
    if rank < TRAINERS:
        error = _train(rank, root, cuts, rank != unmarked, timeout_s)
    else:
        error = _serve(root, cuts, rank == killed, timeout_s)
    if not error:
        rpc.shutdown()
    return error


def assert_restored(root: Path, step: int, shards: int) -> None:
    rows = {}
    for number in range(shards):
        store = DictRows(COLUMNS, number, shards)
        Tables(TableShard("user", store, shard=number, shards=shards)).restore(root / f"step-{step}")
        rows.update({id: row["ledger"].tolist() for id, row in store.rows.items()})
    assert rows == ledger_after(step)
    state: dict[str, Any] = {"dense": torch.zeros(5), "step": 0}
    ckpt.load(state, root / f"step-{step}")
    assert (state["dense"].tolist(), state["step"]) == ([float(step)] * 5, step)


def test_a_cut_is_what_a_replay_of_its_steps_gives(tmp_path: Path) -> None:
    cuts = [10, 30, 45, 60]
    assert run_ranks(4, _run, str(tmp_path), cuts, None, None, 60.0) == [""] * 4
    for cut in cuts:
        assert_restored(tmp_path, cut, 1)
    assert_restored(tmp_path, 60, 3)
    assert ckpt.inspect(tmp_path / "step-60").commit.bases  # type: ignore[union-attr]


@pytest.mark.long
def test_a_server_is_killed_during_the_save_of_a_cut(tmp_path: Path) -> None:
    errors = run_ranks(4, _run, str(tmp_path), [10, 20, 30], None, 3, 20.0, killed=[3])
    assert all("rank 3 does not answer: killed" in error for error in errors[:3])
    assert not (tmp_path / "step-30" / "commit.json").exists()
    assert_restored(tmp_path, 20, 1)


@pytest.mark.long
def test_a_trainer_that_never_marks_is_named_on_all_ranks(tmp_path: Path) -> None:
    errors = run_ranks(4, _run, str(tmp_path), [10, 20], 1, None, 15.0)
    for error in errors:
        assert (
            "the cut of epoch 1 cannot be taken, after 9 s: source 1 has not marked it (10 updates" in error
        )
    assert_restored(tmp_path, 10, 2)
