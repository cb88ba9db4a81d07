"""Save and load the position in each logical shard, on any number of ranks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ckpt.errors import ConfigurationError, FormatError
from ckpt.trainer_integration.data_order.shards import Position, Shard


class Positions:
    """Hold the positions of this rank's shards, given by index: a `Stateful` that reshards.

    In a checkpoint every shard has a name of its own, `shards.<source>.<number>`, and holds the
    four int64 of `Position`. Ranks that read the same data have the same names, which DCP saves
    once. Loading under other `settings`, on which the meaning of a position depends, is refused.

    Attributes:
        generation: grows with each load and each iteration, which end those begun before.
    """

    unites_ranks = True  # each rank's state has its own shards, a checkpoint those of all

    def __init__(self, shards: Mapping[int, Shard], settings: Mapping[str, Any]) -> None:
        self._shards, self._settings = dict(shards), dict(settings)
        self._positions = dict.fromkeys(self._shards, Position())
        self.generation = 0

    def of(self, shards: Iterable[int]) -> dict[int, Position]:
        return {index: self._positions[index] for index in shards}

    @property
    def epoch(self) -> int:
        """Count the epochs that all of this rank's shards have completed."""
        return min(position.epoch for position in self._positions.values())

    def record(self, batch: Mapping[str, Any]) -> None:
        """Advance past the samples of a batch of `ShardedDataset`, as torch's collation makes it.

        It has `shard` (an integer per sample) and `position` (four per sample).
        """
        shards, positions = torch.as_tensor(batch["shard"]), torch.as_tensor(batch["position"])
        self.advance(zip(shards.reshape(-1).tolist(), positions.reshape(-1, 4).tolist(), strict=True))

    def advance(self, moves: Iterable[tuple[int, Iterable[int]]]) -> None:
        """Set the positions of shards, given by index; the last one of a shard counts."""
        for index, position in moves:
            self._positions[index] = Position(*position)

    def state_dict(self) -> dict[str, Any]:
        shards: dict[str, dict[str, torch.Tensor]] = {}
        for index, shard in self._shards.items():
            of_source = shards.setdefault(shard.source_name, {})
            of_source[_number(shard)] = torch.tensor(self._positions[index], dtype=torch.int64)
        return {"settings": json.dumps(self._settings, sort_keys=True), "shards": shards}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`, which holds at least this rank's shards.

        Raises ConfigurationError if it is of other data, FormatError if it is none of `state_dict`.
        """
        self._check(state["settings"])
        self._positions = {index: self._loaded(shard, state) for index, shard in self._shards.items()}
        self.generation += 1

    def _loaded(self, shard: Shard, state: Mapping[str, Any]) -> Position:
        where = f"loader state of source {shard.source_name!r}, shard {shard.number}"
        try:
            values = torch.as_tensor(state["shards"][shard.source_name][_number(shard)], dtype=torch.int64)
            position = Position(*values.reshape(4).tolist())
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise FormatError(f"{where}: not a position ({type(error).__name__}: {error})") from error
        if min(position) < 0 or position.document >= shard.documents:
            raise FormatError(f"{where}: impossible {position}")
        return position

    def _check(self, saved_settings: Any) -> None:
        try:
            saved = json.loads(saved_settings)
        except (TypeError, ValueError) as error:
            raise FormatError(f"the settings in the loader's state are not valid JSON: {error}") from error
        saved = saved if isinstance(saved, dict) else {}
        own = json.loads(json.dumps(self._settings))
        if saved != own:
            names = sorted(name for name in {*saved, *own} if saved.get(name) != own.get(name))
            texts = [f"{name}: saved {saved.get(name)!r}, here {own.get(name)!r}" for name in names]
            raise ConfigurationError(
                f"the loader's state was saved for other data or settings; {'; '.join(texts)}"
            )


def _number(shard: Shard) -> str:
    return f"{shard.number:06d}"
