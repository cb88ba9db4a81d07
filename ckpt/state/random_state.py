"""Save and load random states: each rank's own."""

from __future__ import annotations

import base64
import json
import logging
import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

from ckpt.format.fqns import Path
from ckpt.state.per_rank import rank_and_world_size, ranks_of
from ckpt.state.rank_keys import rank_key
from ckpt.state.stored import StoredPart
from ckpt.state.structure import Structure
from ckpt.state.targets import Targets

_logger = logging.getLogger(__name__)


class RandomState:
    """Save and load this rank's random states of Python, NumPy, torch and the current device."""

    kind = "per rank"

    def __init__(self) -> None:
        self._name = ""

    def state_dict(self) -> dict[str, Any]:
        rank, ranks = rank_and_world_size()
        version, numbers, gauss = random.getstate()
        own = {"python": [version, list(numbers), gauss], "torch": _text(torch.get_rng_state())}
        if torch.accelerator.is_available():
            own["device"] = _text(torch.get_device_module().get_rng_state())
        if "numpy" in sys.modules:
            kind, keys, *rest = sys.modules["numpy"].random.get_state(legacy=True)
            own["numpy"] = [kind, keys.tolist(), *rest]
        # As text they are one item, which loads without unpickling.
        return {"ranks": ranks, rank_key(rank): json.dumps(own)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        rank, ranks = rank_and_world_size()
        if state["ranks"] != ranks:
            _note_not_restored(state["ranks"], ranks)
            return
        own = json.loads(state[rank_key(rank)])
        version, numbers, gauss = own["python"]
        random.setstate((version, tuple(numbers), gauss))
        torch.set_rng_state(_tensor(own["torch"]))
        if "device" in own and torch.accelerator.is_available():
            torch.get_device_module().set_rng_state(_tensor(own["device"]))
        if "numpy" in own and "numpy" in sys.modules:
            sys.modules["numpy"].random.set_state(tuple(own["numpy"]))

    def structures(self, value: Any, name: str) -> dict[Path, Structure]:
        return {}

    def live(self) -> dict[str, Any]:
        """Return nothing: random states move with each number that is drawn."""
        return {}

    def plan(self, part: StoredPart, targets: Targets) -> None:
        """Ask for this rank's own, if as many ranks saved theirs: they may be missing, or left."""
        rank, ranks = rank_and_world_size()
        self._name = ""
        targets.asked.update(value.name for value in part.values.values())
        own = part.values.get((rank_key(rank),))
        saved = len(ranks_of(part) or ())
        if saved and saved != ranks and not targets.is_dry:
            _note_not_restored(saved, ranks)
        elif own is not None:
            self._name = own.name
            targets.object(own)

    def take(self, values: Mapping[str, Any]) -> None:
        if self._name:
            rank, ranks = rank_and_world_size()
            self.load_state_dict({"ranks": ranks, rank_key(rank): values[self._name]})


def _note_not_restored(saved: int, ranks: int) -> None:
    _logger.info("random states are not restored: %s ranks saved them, %d ranks load", saved, ranks)


def _text(tensor: torch.Tensor) -> str:
    return base64.b64encode(bytes(tensor.cpu().tolist())).decode()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
