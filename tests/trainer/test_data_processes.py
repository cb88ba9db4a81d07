"""Processes that read data of a store: they share a folder of the disk, are killed, and end while requests are in flight."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.proxy import FaultProxy
from support.ranks import is_alive
from support.rooms import ROOT

from ckpt.backends.base import put_bytes
from ckpt.backends.registry import open_store
from ckpt.trainer_integration.dataloader import RescalableLoader
from ckpt.trainer_integration.dataset import ShardedDataset
from ckpt.trainer_integration.token_files import TokenFiles, write_token_file

FORK = multiprocessing.get_context("fork")
URLS = ["s3://bucket/data/0.bin", "s3://bucket/data/1.bin"]
DOCUMENTS = [np.arange(number, number + 2000, dtype=np.uint16) for number in range(200)]
LIMIT_BYTES = 400_000
DEADLINE_S = 60.0


@pytest.fixture
def remote(proxy: FaultProxy, tmp_path: Path) -> dict[str, Any]:
    """Two files of 400 KB each in a store, and its options."""
    store = open_store("s3://bucket/data", proxy.server.options)
    for number in range(2):
        write_token_file(tmp_path / f"{number}.bin", DOCUMENTS[number * 100 : (number + 1) * 100])
        for path in tmp_path.glob(f"{number}.bin*"):
            put_bytes(store, path.name, path.read_bytes())
    store.close()
    return proxy.options


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


# -- one folder of the disk ----------------------------------------------------------------------------------


def test_ranks_share_a_disk_cache_and_are_killed(remote: dict[str, Any], tmp_path: Path) -> None:
    """Whatever the others remove, and whenever they die: the tokens are right, and the bytes of all stay below the bound."""
    folder = tmp_path / "cache"
    read = FORK.Array("q", 4)
    ranks = {rank: _start_rank(rank, remote, folder, read) for rank in range(3)}
    for killed in range(3):
        begin = [read[rank] for rank in ranks]
        wait_until(partial(_have_read, ranks, begin, read, folder))
        assert [rank.exitcode for rank in ranks.values()] == [None] * len(ranks)
        os.kill(ranks[killed].pid or 0, signal.SIGKILL)
        ranks[killed].join()
        ranks[killed] = _start_rank(killed, remote, folder, read)
        ranks[3] = ranks.get(3) or _start_rank(3, remote, folder, read)  # this one begins later
    for rank in ranks.values():
        rank.kill()
        rank.join()
    assert len(list(folder.iterdir())) <= LIMIT_BYTES // 4096


def _have_read(ranks: dict[int, Any], begin: list[int], read: Any, folder: Path) -> bool:
    """Tell whether each rank has read some more, or has ended."""
    assert used_bytes(folder) <= LIMIT_BYTES
    return all(
        read[rank] > before + 20 or not ranks[rank].is_alive()
        for rank, before in zip(ranks, begin, strict=True)
    )


def _start_rank(rank: int, options: dict[str, Any], folder: Path, read: Any) -> Any:
    process = FORK.Process(target=_read_at_random, args=(rank, options, folder, read))
    process.start()
    return process


def _read_at_random(rank: int, options: dict[str, Any], folder: Path, read: Any) -> None:
    """Read documents of both files, or of one, and end with an error at a wrong token."""
    source = TokenFiles(
        URLS[rank % 2 :], storage_options=options, disk_cache=folder, disk_cache_bytes=LIMIT_BYTES, cache_bytes=70_000
    )  # fmt: skip
    expected = DOCUMENTS[-source.documents :]
    while True:
        first = random.randrange(source.documents - 4)
        for document in range(first, first + 4):
            source.ahead(document)
        for document in range(first, first + 4):
            assert np.array_equal(np.asarray(source.sliced(document)[:]), expected[document])
            read[rank] += 1


def used_bytes(folder: Path) -> int:
    """Count the bytes of all files. One that is renamed at the same time can be missed, and is never counted twice."""
    sizes: dict[int, int] = {}
    for path in folder.glob("*"):
        try:
            stat = path.lstat()
        except FileNotFoundError:
            continue
        sizes[stat.st_ino] = stat.st_blocks * 512
    return sum(sizes.values())


# -- the end of a process -------------------------------------------------------------------------------------

PROGRAM = """
import json, os, sys
from ckpt.trainer_integration.token_files import TokenFiles

url, options, folder, how = sys.argv[1:]
source = TokenFiles([url], storage_options=json.loads(options), cache_bytes=70_000)
for document in range(5):
    source.tokens(document)
if how.startswith("fork") and (child := os.fork()):
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
open(f"{folder}/ready", "w").close()
while not os.path.exists(f"{folder}/stopped"):
    pass
for document in range(50, 100):
    source.ahead(document)
if how.endswith("exit"):
    sys.exit(7)
if how.endswith("error"):
    raise ValueError("of the program")
source.tokens(60)
"""


@pytest.mark.parametrize(
    ("how", "code", "last"),
    [
        ("exit", 7, ""),
        ("fork and exit", 7, ""),
        ("error", 1, "ValueError: of the program"),
        ("SIGINT", -signal.SIGINT, "KeyboardInterrupt"),
        ("SIGTERM", -signal.SIGTERM, ""),
    ],
)
def test_a_program_ends_with_requests_in_flight(
    remote: dict[str, Any], proxy: FaultProxy, tmp_path: Path, how: str, code: int, last: str
) -> None:
    """It has a status of its own, prints nothing of ours and waits for no request, of which none is answered."""
    options = json.dumps({**remote, "read_timeout_s": 600.0})
    command = [sys.executable, "-c", PROGRAM, URLS[0], options, str(tmp_path), how]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True) as process:
        wait_until(lambda: (tmp_path / "ready").exists() or process.poll() is not None)
        begun = len(proxy.calls)
        proxy.rule = lambda call: "stall"
        (tmp_path / "stopped").touch()
        if how.startswith("SIG"):
            wait_until(lambda: len(proxy.calls) > begun)
            process.send_signal(getattr(signal, how))
        try:
            _, printed = process.communicate(timeout=DEADLINE_S)
        finally:
            process.kill()
    assert process.returncode == code, printed
    assert printed.strip().rpartition("\n")[2] == last
    assert "Exception ignored" not in printed
    assert "Fatal" not in printed


def test_workers_end_with_a_trainer_that_is_killed(remote: dict[str, Any], proxy: FaultProxy) -> None:
    """Though each of them waits for a store that does not answer."""
    source = TokenFiles(URLS, storage_options={**remote, "read_timeout_s": 600.0}, cache_bytes=70_000)
    dataset = ShardedDataset(source, sequence_length=100, shards=4, eos_token=0)
    receiver, sender = FORK.Pipe(duplex=False)
    trainer = FORK.Process(target=_train, args=(dataset, sender))
    trainer.start()
    wait_until(receiver.poll)
    workers = receiver.recv()
    assert len(workers) == 2
    begun = len(proxy.calls)
    proxy.rule = lambda call: "stall"
    wait_until(lambda: len(proxy.calls) > begun + 1)
    trainer.kill()
    trainer.join()
    try:
        wait_until(lambda: not any(map(is_alive, workers)))
    finally:
        for worker in filter(is_alive, workers):
            os.kill(worker, signal.SIGKILL)


def _train(dataset: ShardedDataset, sender: Any) -> None:
    loader = RescalableLoader(dataset, batch_size=1, num_workers=2, multiprocessing_context="fork")
    batches = iter(loader)
    next(batches)
    sender.send([child.pid for child in multiprocessing.active_children()])
    list(batches)
