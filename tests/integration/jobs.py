"""What the ranks of a job do, on storage that each of them may know under a name of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from support.states import digest, emptied, random_tensor, sharded_state

import ckpt
from ckpt.backends.base import MIB, ObjectStat
from ckpt.backends.registry import open_store
from ckpt.errors import CheckpointError, SaveFailed

Options = Mapping[str, Any]


def state_of(rank: int, seed: int) -> dict[str, Any]:
    """Different on each rank, so that every rank writes: 13 MiB, several parts each."""
    return {
        f"rank{rank}.large": random_tensor(3 * MIB, seed=seed + rank),
        f"rank{rank}.small": random_tensor(MIB // 4, seed=seed + rank + 10),
        f"rank{rank}.object": {"seed": seed},
    }


def state_of_job(rank: int, seed: int) -> dict[str, Any]:
    """The same, and tensors that are sharded over the ranks."""
    return {**state_of(rank, seed), "sharded": sharded_state(seed)}


def save(rank: int, urls: Sequence[str], options: Options, seed: int) -> None:
    """Save on all ranks, each under its own name of the place."""
    ckpt.save(state_of_job(rank, seed), urls[rank], storage_options=options)


def loads(rank: int, urls: Sequence[str], options: Options, seed: int) -> bool:
    """Whether what loads on all ranks is, bit for bit, what was saved with `seed`."""
    loaded = emptied(state_of_job(rank, seed))
    ckpt.load(loaded, urls[rank], storage_options=options)
    return bool(digest(loaded) == digest(state_of_job(rank, seed)))


def failing_save(rank: int, urls: Sequence[str], options: Options, seed: int) -> tuple[list[str], str]:
    """The kinds of the failures of a save that has to fail, and what it says."""
    try:
        save(rank, urls, options, seed)
    except SaveFailed as error:
        return sorted(type(failure).__name__ for failure in error.failures.values()), str(error)
    raise AssertionError("the save succeeded")


def die_in_mid_save(rank: int, urls: Sequence[str], options: Options, seed: int) -> None:
    """Rank 1 dies of SIGKILL during its first upload, when rank 0 has written its part."""
    if rank == 1:
        threading.Thread(target=_die_in_mid_upload, args=(urls[1], options), daemon=True).start()
    with contextlib.suppress(SaveFailed):
        ckpt.save(
            state_of(rank, seed),
            urls[rank],
            storage_options=options,
            max_bandwidth_bytes_per_s=MIB if rank == 1 else None,
            timeout_s=60.0,
        )
        raise AssertionError("the save succeeded")


def _die_in_mid_upload(url: str, options: Options) -> None:
    store = open_store(url, options)
    began: list[ObjectStat] = []

    def note(stat: ObjectStat) -> bool:
        began.append(stat)
        return False

    while (
        not (store.abandon("rank-00001/", choose=note) or began) or len(list(store.list("rank-00000/"))) < 2
    ):
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)


def failing_save_when_killed(rank: int, urls: Sequence[str], pid: int, seed: int) -> tuple[list[str], str]:
    """`failing_save`, in which rank 1 kills the process `pid` when it has written its first file."""
    fsync = os.fsync

    def kill_first(fd: int) -> None:
        os.fsync = fsync
        os.kill(pid, signal.SIGKILL)
        time.sleep(0.5)
        fsync(fd)

    if rank == 1:
        os.fsync = kill_first  # type: ignore[assignment]
    return failing_save(rank, urls, {}, seed)


def small_save(rank: int, url: str, options: Options, seed: int) -> None:
    """A save whose objects are all small enough for one request."""
    ckpt.save({f"rank{rank}": random_tensor(1000, seed=seed + rank)}, url, storage_options=options)


def small_loads(rank: int, url: str, options: Options, seed: int) -> bool:
    state = {f"rank{rank}": random_tensor(1000, seed=seed + rank)}
    loaded = emptied(state)
    ckpt.load(loaded, url, storage_options=options)
    return bool(digest(loaded) == digest(state))


def compete(rank: int, url: str, options: Options, seeds: Sequence[int]) -> str:
    """Four ranks as two jobs of two that save at the same place at the same moment; how it ended for this rank."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    job, rank_in_job = divmod(rank, 2)
    dist.barrier()
    try:
        ckpt.save(state_of(rank_in_job, seeds[job]), url, storage_options=options, process_group=groups[job])
        return "saved"
    except SaveFailed as error:
        return " ".join(sorted({type(failure).__name__ for failure in error.failures.values()}))


def stored_seeds(url: str, options: Options, seeds: Sequence[int]) -> list[int]:
    """Which of the saves of two ranks it is that loads in this process; none, if it is a mixture."""
    stored = []
    for seed in seeds:
        wanted = {**state_of(0, seed), **state_of(1, seed)}
        loaded = emptied(wanted)
        with contextlib.suppress(CheckpointError):
            ckpt.load(loaded, url, storage_options=options, no_dist=True)
        if digest(loaded) == digest(wanted):
            stored.append(seed)
    return stored
