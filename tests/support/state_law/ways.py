"""Ways to save a training state and to restore it: the manager's modes, `ckpt.save`, DCP after `install`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import nn
from torch.optim import Optimizer

import ckpt
from ckpt.state import training_state

_FAST = {"fsync": False}  # no machine fails here
_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Trained:
    """The objects that a trainer hands over."""

    model: nn.Module
    optimizers: Sequence[Optimizer]
    parts: Mapping[str, Any]

    @property
    def by_name(self) -> dict[str, Any]:
        one = len(self.optimizers) == 1
        optimizer = self.optimizers[0] if one else list(self.optimizers)
        return {"model": self.model, "optimizer": optimizer, **self.parts}

    @property
    def raw(self) -> dict[str, Any]:
        """The objects as they are, as people give them to `dcp.save`."""
        names = ["optimizer", *(f"optimizer_{number}" for number in range(1, len(self.optimizers)))]
        return {"model": self.model, **dict(zip(names, self.optimizers, strict=True)), **self.parts}


class Saver:
    """Save a state in one way. A save is acknowledged when `finish` has returned."""

    saves_random_states = True

    def save(self, step: int, trained: Trained) -> None:
        raise NotImplementedError

    def finish(self) -> None:
        """Wait until all is durable."""

    def load(self, step: int, trained: Trained) -> Mapping[str, Any]:
        """Restore in place; return the loaded state, for plain values."""
        raise NotImplementedError


class ManagerSaver(Saver):
    def __init__(self, root: str, **options: Any) -> None:
        self._manager = ckpt.CheckpointManager(
            f"{root}/run", save=1, preflight=False, storage_options=_FAST, **options
        )

    def save(self, step: int, trained: Trained) -> None:
        assert self._manager.save(step, **trained.by_name)

    def finish(self) -> None:
        self._manager.wait_durable(_TIMEOUT_S)

    def load(self, step: int, trained: Trained) -> Mapping[str, Any]:
        restored = self._manager.restore(**trained.by_name)
        assert restored is not None
        assert restored.step == step
        assert not restored.missing
        return restored.state

    def close(self) -> None:
        self._manager.close()


class StateSaver(Saver):
    """`ckpt.save` and `ckpt.load` of `training_state`."""

    def __init__(self, root: str) -> None:
        self._root = root

    def _url(self, step: int) -> str:
        return f"{self._root}/step-{step}"

    def save(self, step: int, trained: Trained) -> None:
        ckpt.save(training_state(**trained.by_name), self._url(step), storage_options=_FAST)

    def load(self, step: int, trained: Trained) -> Mapping[str, Any]:
        state = training_state(**trained.by_name)
        ckpt.load(state, self._url(step))
        return state


class RawSaver(StateSaver):
    """`ckpt.save` and `ckpt.load` of the objects as they are."""

    saves_random_states = False

    def save(self, step: int, trained: Trained) -> None:
        ckpt.save(trained.raw, self._url(step), storage_options=_FAST)

    def load(self, step: int, trained: Trained) -> Mapping[str, Any]:
        state = trained.raw
        ckpt.load(state, self._url(step))
        return state


class InstalledSaver(StateSaver):
    """`dcp.save` and `dcp.load` of `training_state`, after `ckpt.install()`."""

    def save(self, step: int, trained: Trained) -> None:
        with _installed():
            dcp.save(training_state(**trained.by_name), checkpoint_id=self._url(step))

    def load(self, step: int, trained: Trained) -> Mapping[str, Any]:
        state = training_state(**trained.by_name)
        with _installed():
            dcp.load(state, checkpoint_id=self._url(step))
        return state


@contextlib.contextmanager
def _installed() -> Iterator[None]:
    ckpt.install()
    try:
        yield
    finally:
        ckpt.uninstall()


_OTHERS = {"state": StateSaver, "raw": RawSaver, "installed": InstalledSaver}


@contextlib.contextmanager
def opened(way: str, root: str) -> Iterator[Saver]:
    """Open a way to save below `root`, and to restore."""
    if way in _OTHERS:
        yield _OTHERS[way](root)
        return
    options: dict[str, Any] = {"async_mode": way if way in ("off", "process") else "thread"}
    if way == "references":
        options["references"] = True
    elif way == "local":
        options["local"] = ckpt.LocalTier(f"{root}/local")
    manager = ManagerSaver(root, **options)
    with contextlib.closing(manager):
        yield manager
