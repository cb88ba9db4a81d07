"""A training whose batches come from worker processes, for tests that send signals to all its processes.

`python -m support.preempted_run ROOT LOADER RANKS [--early]`; LOADER is `ours`, `torch`, `torch-spawn` or `torchdata`. With
`--early` the workers run before the manager is made. It prints READY after some steps, and PREEMPTED when it has left
its loop for a signal.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import ckpt
from ckpt.trainer_integration import saving
from ckpt.trainer_integration.dataloader import RescalableLoader
from ckpt.trainer_integration.dataset import ShardedDataset
from ckpt.trainer_integration.sources import MapSource

_READ_S, _STEP_S = 0.01, 0.01
"""Workers are as slow as steps: the trainer is in either when a signal comes."""

_EARLY_S = 0.3
_PATIENCE_S = 60.0
"""Time for workers to die in a step, after a signal: those that ran before the manager hand out no batch after it."""


class _Rows(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(_READ_S)
        return torch.full((4,), float(index))


class _SlowSource(MapSource):
    def tokens(self, document: int) -> Any:
        time.sleep(_READ_S)
        return super().tokens(document)


def _loader(kind: str) -> Any:
    if kind == "ours":
        rows = [[(i * 7 + j) % 50 + 1 for j in range(40)] for i in range(4000)]
        shards = ShardedDataset(_SlowSource(rows), sequence_length=9, eos_token=0, seed=0, shards=8)
        # Short: Python's `Condition.notify` can swallow the RuntimeError by which torch reports a dead worker.
        return RescalableLoader(shards, batch_size=2, num_workers=2, timeout_s=30.0)
    if kind == "torchdata":
        from torchdata.stateful_dataloader import StatefulDataLoader

        return StatefulDataLoader(_Rows(), batch_size=2, num_workers=2)
    context = "spawn" if kind == "torch-spawn" else "fork"
    return DataLoader(_Rows(), batch_size=2, num_workers=2, multiprocessing_context=context)


def _train(root: str, kind: str, *, is_early: bool) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)  # the same on all ranks, whatever each reads
    batches: Iterator[torch.Tensor] | None = iter(_loader(kind)) if is_early else None
    rule = saving.every_steps(10**6) | saving.on_preemption(grace_s=60)
    with ckpt.CheckpointManager(root, save=rule) as manager:
        manager.restore(model=model, optimizer=optimizer)
        for step, batch in enumerate(batches or _loader(kind), 1):
            optimizer.zero_grad()
            model(batch[:, :4].float()).mean().backward()
            optimizer.step()
            time.sleep(_STEP_S)
            if step == 5:
                os.write(1, b"READY\n")
                if is_early:
                    _await_signal(manager)
            manager.step(step, model=model, optimizer=optimizer)
            if manager.preempted:
                os.write(1, b"PREEMPTED %d\n" % step)  # in one piece: other ranks write there too
                break


def _await_signal(manager: ckpt.CheckpointManager) -> None:
    deadline_s = time.monotonic() + _PATIENCE_S
    while manager._decisions._signals.received is None and time.monotonic() < deadline_s:
        time.sleep(_STEP_S)
    time.sleep(_EARLY_S)


def _launch(ranks: int) -> int:
    """Start the ranks in this process group, which outlives the signals itself; return the worst exit status."""
    signal.signal(signal.SIGTERM, lambda *_: None)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = []
    for rank in range(ranks):
        place = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_PORT": str(store.port)}
        command = [sys.executable, "-m", "support.preempted_run", *sys.argv[1:]]
        processes.append(subprocess.Popen(command, env={**os.environ, **place}))
    return max(abs(process.wait()) for process in processes)


def main() -> int:
    torch.set_num_threads(1)
    root, kind, ranks, *more = sys.argv[1:]
    if "RANK" not in os.environ and int(ranks) > 1:
        return _launch(int(ranks))
    if int(ranks) > 1:
        rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=int(ranks))
    _train(root, kind, is_early="--early" in more)
    if int(ranks) > 1:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
