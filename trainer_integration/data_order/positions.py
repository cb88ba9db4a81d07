"""Save and load where a data set is read, on any number of ranks."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ckpt.errors import ConfigurationError, FormatError
from ckpt.trainer_integration.data_order.global_order import GlobalOrder
from ckpt.trainer_integration.data_order.plan import Plan
from ckpt.trainer_integration.data_order.shard_order import ContiguousOrder, ShardOrder

_logger = logging.getLogger(__name__)
_VERSION = 2


class Positions:
    """Hold where this rank reads, as a `Stateful` that reshards.

    A state names the order in which it was read, and a load continues in that order. Loading the state of other data or
    settings, on which the meaning of a position depends, is refused.

    Attributes:
        order: in which sequences are read.
        generation: grows with each load and each iteration, which end those begun before.
    """

    unites_ranks = True  # each rank's state can have its own shards, a checkpoint those of all

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.order: GlobalOrder | ShardOrder = (
            GlobalOrder(plan) if plan.are_lengths_known else ShardOrder(plan)
        )
        self.generation = 0

    @property
    def epoch(self) -> int:
        """Count the epochs that are complete: of all sources that are read, of all of this rank's shards."""
        return self.order.epoch

    def restart(self) -> None:
        """Begin an iteration, which ends those begun before."""
        self.generation += 1
        self.order.restart()

    def record(self, batch: Mapping[str, Any]) -> None:
        """Advance past the samples of a batch of `ShardedDataset`, as torch's collation makes it.

        It has `shard` (an integer per sample) and `position` (some integers per sample).

        Raises ConfigurationError if it has none.
        """
        if not isinstance(batch, Mapping) or not {"shard", "position"} <= batch.keys():
            raise ConfigurationError(
                "a batch without `shard` and `position` cannot be recorded: make the data set with "
                "options=DataOptions(positions=True), and pass the batch as the loader returned it"
            )
        shards = torch.as_tensor(batch["shard"]).reshape(-1)
        positions = torch.as_tensor(batch["position"]).reshape(len(shards), -1)
        self.advance(zip(shards.tolist(), positions.tolist(), strict=True))

    def advance(self, moves: Iterable[tuple[int, Sequence[int]]]) -> None:
        """Note samples that were used, by their shard and position."""
        self.order.record(moves)

    def state_dict(self) -> dict[str, Any]:
        return {"settings": json.dumps(self.settings(), sort_keys=True), **self.order.state()}

    def settings(self) -> dict[str, Any]:
        """Return what positions depend on."""
        plan = self._plan
        if isinstance(self.order, ContiguousOrder):
            return {
                "version": 1,
                "sources": {name: plan.documents(name) for name in plan.sources},
                **self._fixed(),
            }
        sources = {name: f"{plan.documents(name)}, {plan.content(name)}" for name in plan.sources}
        return {
            "version": _VERSION, "order": self.order.kind, "sources": sources,
            "weights": plan.weights, "sequence_length": plan.sequence_length, **self._fixed(),
        }  # fmt: skip

    def ends(self) -> dict[str, Any]:
        """Return what may change from run to run, and has to be the same on all ranks of one."""
        options = self._plan.options
        return {"epochs": self._plan.epochs, "on_exhausted": options.on_exhausted, "turns": options.turns}

    def _fixed(self) -> dict[str, Any]:
        plan = self._plan
        return {
            "shards": plan.shards,
            "seed": plan.seed,
            "bos_token": plan.bos_token,
            "eos_token": plan.eos_token,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`, of this rank or of all.

        Sources that are new begin at their begin, those that are gone are left out, and other weights hold from here on.

        Raises ConfigurationError if it is of other data, FormatError if it is none of `state_dict`.
        """
        saved = self._saved_settings(state)
        kinds: dict[Any, type[GlobalOrder | ShardOrder]] = {
            "global": GlobalOrder,
            "shards": ShardOrder,
            "ranges": ContiguousOrder,
        }
        kind = "ranges" if saved.get("version") == 1 else saved.get("order")
        if kind not in kinds:
            raise FormatError(
                f"the loader's state is of an order that this library does not know: {kind!r:.100}"
            )
        if kind == "global" and not self._plan.are_lengths_known:
            raise ConfigurationError(
                "the loader's state was saved where the lengths of all documents were known, and here they are not: give "
                "each source `lengths`"
            )
        order = self.order if self.order.kind == kind else kinds[kind](self._plan)
        self._check(saved, order)
        is_same_mix = saved.get("weights") == json.loads(json.dumps(self._plan.weights))
        order.load(state, saved=saved, is_same_mix=is_same_mix)
        self.order = order
        self.generation += 1

    def _saved_settings(self, state: Mapping[str, Any]) -> dict[str, Any]:
        try:
            saved = json.loads(state["settings"])
        except (TypeError, ValueError) as error:
            raise FormatError(f"the settings in the loader's state are not valid JSON: {error}") from error
        if not isinstance(saved, dict) or not isinstance(saved.get("sources", {}), dict):
            raise FormatError("the settings in the loader's state are none of this library")
        return saved

    def _check(self, saved: Mapping[str, Any], order: Any) -> None:
        """Refuse a state of other data or settings. Other sources and weights are taken."""
        plan = self._plan
        is_old = isinstance(order, ContiguousOrder)
        texts = [
            f"{name}: saved {saved.get(name)!r}, here {value!r}"
            for name, value in self._fixed().items()
            if saved.get(name) != value
        ]
        sources = saved.get("sources", {})
        other = []
        for name in plan.sources:
            here = plan.documents(name) if is_old else f"{plan.documents(name)}, {plan.content(name)}"
            there = (
                str(sources[name]).partition(",")[0]
                if is_old and name in sources
                else sources.get(name, here)
            )
            if there != here:
                other.append(f"source {name!r}: saved {there!r}, here {here!r}")
        if is_old and set(sources) != set(plan.sources):
            texts.append(f"sources: saved {', '.join(sources)}, here {', '.join(plan.sources)}")
        if other and plan.options.allow_other_data:
            _logger.warning(
                "the run continues with other data, as allow_other_data=True says: %s", "; ".join(other)
            )
            other = []
        if texts or other:
            raise ConfigurationError(
                f"the loader's state was saved for other data or settings; {'; '.join([*texts, *other])}"
                + (
                    ". DataOptions(allow_other_data=True) takes these data for those"
                    if other and not texts
                    else ""
                )
            )
        if left_out := set(sources) - set(plan.sources):
            _logger.info(
                "the data set has no source %s any more; its position is left out",
                ", ".join(sorted(left_out)),
            )
