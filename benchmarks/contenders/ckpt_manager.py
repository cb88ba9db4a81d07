"""Run this library as a trainer does: `CheckpointManager`, whose saves are waited for by
`wait_durable`.
"""

from __future__ import annotations

import os
import threading

import torch
import torch.distributed as dist

import ckpt
from benchmarks.contenders import Settings, as_trained
from benchmarks.contenders.ckpt_storage import storage_options_of
from ckpt.trainer_integration import saving
from ckpt.trainer_integration.events import Event

__all__ = ["Managed"]


class Managed:
    """One manager for all saves, the first of which begins its run.

    Options: `mode`, the manager's `async_mode`.
    """

    def __init__(self, settings: Settings) -> None:
        self._mode = settings.options.get("mode", "thread")
        self._storage_options = storage_options_of(settings)
        self._manager: ckpt.CheckpointManager | None = None
        self._joined = False
        self._steps: dict[str, int] = {}
        self._ended: dict[int, threading.Event] = {}

    def save(self, state: dict[str, torch.Tensor], place: str) -> None:
        self.async_save(state, place).result()

    def async_save(self, state: dict[str, torch.Tensor], place: str) -> Saving:
        if self._manager is None:
            self._manager = self._make_manager(place)
        step = self._steps[place] = len(self._steps) + 1
        self._ended[step] = threading.Event()
        self._manager.save(step, as_trained(state), rng=False)
        return Saving(self._manager, self._ended[step])

    def load(self, state: dict[str, torch.Tensor], place: str) -> None:
        assert self._manager is not None
        assert self._manager.restore(as_trained(state), step=self._steps[place], rng=False)

    def close(self) -> None:
        if self._manager is not None:
            self._manager.close()
        if self._joined:
            dist.destroy_process_group()

    def _make_manager(self, root: str) -> ckpt.CheckpointManager:
        if self._mode == "process":  # which wants a process group
            os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            self._joined = True
        return ckpt.CheckpointManager(
            root,
            save=saving.every_steps(1),
            async_mode=self._mode,
            storage_options=self._storage_options,
            events=[self._note],
        )

    def _note(self, event: Event) -> None:
        if event.kind in ("durable", "failed") and event.step is not None:
            self._ended[event.step].set()


class Saving:
    """A save in flight, with as much of a future as the jobs need."""

    def __init__(self, manager: ckpt.CheckpointManager, ended: threading.Event) -> None:
        self._manager, self._ended = manager, ended

    def done(self) -> bool:
        return self._ended.is_set()

    def result(self) -> None:
        self._manager.wait_durable()
