"""Other parts of a trainer than model and optimizer, and how a training step changes them."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.optim import Optimizer, lr_scheduler

import ckpt
from ckpt.trainer_integration.dataloader import RescalableLoader
from ckpt.trainer_integration.dataset import ShardedDataset
from ckpt.trainer_integration.sources import MapSource
from support.state_law.models import TOKENS, named_parameters


class Part:
    """One or several parts of a trainer, by the names under which they are saved.

    Everything that a step changes depends on the step alone: ranks agree, unless it is `per_rank`.
    """

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def given(self) -> dict[str, Any]:
        """Return the parts to save, or to restore into."""
        return self.values

    def take(self, loaded: Mapping[str, Any]) -> None:
        """Take plain values out of the restored state, as a trainer does; objects were restored in place."""

    def advance(self, step: int, model: nn.Module) -> None:
        """Change, as a training step does."""

    def state(self) -> Any:
        """Return all state, to be compared."""
        return {name: value.state_dict() for name, value in self.values.items()}

    def whole(self) -> Any:
        """Return all state as other numbers of ranks get it; every rank has to call this."""
        return self.state()


class SchedulerPart(Part):
    def __init__(self, scheduler: Any) -> None:
        super().__init__()
        self.values = {"scheduler": scheduler}

    def advance(self, step: int, model: nn.Module) -> None:
        # A loss that stops falling, for the one that looks at it; others know the step.
        scheduler = self.values["scheduler"]
        scheduler.step(*([1.0] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))


class Ema:
    """Average parameters. The state is an empty dict before the first update."""

    def __init__(self) -> None:
        self.shadow: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for name, parameter in named_parameters(model):
            kept = self.shadow.get(name)
            now = parameter.detach().clone()
            self.shadow[name] = now if kept is None else kept * 0.9 + now * 0.1

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.shadow = state["shadow"]


class EmaPart(Part):
    def __init__(self) -> None:
        super().__init__()
        self.values = {"ema": Ema()}

    def advance(self, step: int, model: nn.Module) -> None:
        self.values["ema"].update(model)


class PlainPart(Part):
    """Plain values, that come back in the restored state alone."""

    def __init__(self, values: dict[str, Any], change: Callable[[dict[str, Any], int], None]) -> None:
        super().__init__()
        self.values, self._change = values, change

    def take(self, loaded: Mapping[str, Any]) -> None:
        self.values = {name: loaded[name] for name in self.values}

    def advance(self, step: int, model: nn.Module) -> None:
        self._change(self.values, step)

    def state(self) -> Any:
        return self.values


class Holder:
    """An object that keeps the very values that a load hands to it."""

    def __init__(self, **values: Any) -> None:
        self.values = values

    def state_dict(self) -> dict[str, Any]:
        return dict(self.values)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.values = dict(state)


class HolderPart(Part):
    def __init__(self, values: dict[str, Any], change: Callable[[dict[str, Any], int], None]) -> None:
        super().__init__()
        self._holder, self._change = Holder(**values), change
        self.values = {"progress": self._holder}

    def advance(self, step: int, model: nn.Module) -> None:
        self._change(self._holder.values, step)


class PerRankPart(HolderPart):
    """An object that is each rank's own: each gets its own back, or on other ranks that of all."""

    def __init__(self, rank: int) -> None:
        def change(values: dict[str, Any], step: int) -> None:
            values["position"] += 1 + rank
            values["buffer"].append([rank, step])
            values["rows"] = torch.full((rank + 1,), float(step))

        super().__init__({"position": 0, "buffer": [], "rows": torch.zeros(rank + 1)}, change)
        self.values = {"progress": ckpt.per_rank(self._holder, _of_all)}
        self._is_restored = False

    def take(self, loaded: Mapping[str, Any]) -> None:
        self._is_restored = True

    def state(self) -> Any:
        return {"progress": self._holder.state_dict()}

    def whole(self) -> Any:
        if self._is_restored:
            return self.state()
        states: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(states, self._holder.state_dict())
        return {"progress": _of_all(states, 0, 0)}


def _of_all(states: Sequence[Mapping[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
    return {
        "position": sum(state["position"] for state in states),
        "buffer": [entry for state in states for entry in state["buffer"]],
        "rows": torch.cat([state["rows"] for state in states]),
    }


class DiscriminatorPart(Part):
    """A second model, and its optimizer, as parts."""

    def __init__(self) -> None:
        super().__init__()
        self._model = nn.Linear(3, 2)
        self._optimizer = optim.SGD(self._model.parameters(), lr=0.1, momentum=0.9)
        self.values = {"disc": self._model, "disc_optimizer": self._optimizer}

    def advance(self, step: int, model: nn.Module) -> None:
        self._model(torch.full((1, 3), float(step))).pow(2).mean().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def state(self) -> Any:
        names = dict(self._model.named_parameters())
        state = {name: dict(self._optimizer.state[each]) for name, each in names.items()}
        groups = [
            {key: value for key, value in group.items() if key != "params"}
            for group in self._optimizer.param_groups
        ]
        return {"model": dict(names), "state": state, "groups": groups}


class ScalerPart(Part):
    """torch's GradScaler, whose scale grows."""

    def __init__(self) -> None:
        super().__init__()
        self._scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        self.values = {"scaler": self._scaler}

    def advance(self, step: int, model: nn.Module) -> None:
        self._scaler.scale(torch.ones(1))
        self._scaler.update(self._scaler.get_scale() * 2.0)


class LoaderPart(Part):
    """A loader that gives the tokens of each step."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        self._rank = rank
        self._ranks = ranks
        self._loader = self._made()
        self.values = {"loader": self._loader}
        self._batches: Any = None

    def _made(self) -> RescalableLoader:
        rows = [[(7 * row + column) % (TOKENS - 1) + 1 for column in range(9)] for row in range(64)]
        dataset = ShardedDataset(
            MapSource(rows),
            sequence_length=4,
            eos_token=0,
            seed=0,
            shards=4,
            rank=self._rank,
            world_size=self._ranks,
        )
        return RescalableLoader(dataset, batch_size=2)

    def whole(self) -> Any:
        """Return the next sequences of all ranks, by number: a state says it in other words on other ranks."""
        copy = self._made()
        copy.load_state_dict(self._loader.state_dict())
        rows = [row for _, batch in zip(range(4 // self._ranks), copy, strict=False) for row in batch]
        return {f"sequence {self._ranks * at + self._rank}": row for at, row in enumerate(rows)}

    def tokens(self) -> torch.Tensor:
        if self._batches is None:  # after the restore
            self._batches = iter(self._loader)
        batch: torch.Tensor = next(self._batches)
        return batch


def _metrics(values: dict[str, Any], step: int) -> None:
    values["best"][f"step-{step}"] = {"loss": 1.0 / step, "step": step}
    values["best"]["curve"] = torch.arange(float(step))


def _lists(values: dict[str, Any], step: int) -> None:
    values["records"].append({"step": step, "loss": 1.0 / step})
    values["snapshots"].append(torch.full((step,), float(step)))
    values["numbers"].append(step)
    values["window"] = torch.arange(3 * step)


def _none_becomes(values: dict[str, Any], step: int) -> None:
    if step > 1:
        values["best"] = {"loss": 1.0 / step, "nested": {"step": step, "none": None}}
    values["last"] = torch.full((2, 2), float(step))
    values["gone"] = None
    values["number"] = step


def _collections(values: dict[str, Any], step: int) -> None:
    values["seen"].update("ab" * step)
    values["order"][f"step-{step}"] = step
    values["order"].move_to_end(f"step-{step}", last=False)
    values["by_class"] = defaultdict(int, values["by_class"])
    values["by_class"][str(step % 2)] += step


def _keys(values: dict[str, Any], step: int) -> None:
    values["by_epoch"][step] = step * 10
    values["by_epoch"][0] += 1
    values["by_pair"][step, 1] = {"at": (step, 2 * step), "text": "ü", "flag": step > 1}
    values["by_pair"][0, 0] = torch.full((1,), float(step))


_SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "step_lr": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, gamma=0.5),
    "multi_step_lr": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [1, 4, 4, 30], gamma=0.5),
    "one_cycle": lambda optimizer: lr_scheduler.OneCycleLR(
        optimizer, max_lr=0.05, total_steps=20, cycle_momentum=False
    ),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, factor=0.5),
    "sequential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [
            lr_scheduler.LinearLR(optimizer, start_factor=0.5, total_iters=2),
            lr_scheduler.ExponentialLR(optimizer, gamma=0.8),
        ],
        milestones=[3],
    ),
}

_PLAIN: dict[str, Callable[[], Part]] = {
    "none": Part,
    "ema": EmaPart,
    "metrics": lambda: PlainPart({"best": {}}, _metrics),
    "lists": lambda: HolderPart(
        {"records": [], "snapshots": [], "numbers": [], "window": torch.arange(0)}, _lists
    ),
    "none_becomes": lambda: HolderPart(
        {"best": None, "last": None, "gone": {"loss": 1.0}, "number": None}, _none_becomes
    ),
    "collections": lambda: HolderPart(
        {"seen": Counter(), "order": OrderedDict(), "by_class": defaultdict(int)}, _collections
    ),
    "keys": lambda: PlainPart({"by_epoch": {0: 0}, "by_pair": {(0, 0): None}}, _keys),
    "grad_scaler": ScalerPart,
    "disc": DiscriminatorPart,
}


def made(kind: str, optimizer: Optimizer, *, rank: int, reader: tuple[int, int]) -> Part:
    """Make a part; `reader` is the rank and number of ranks that read different data."""
    if kind in _SCHEDULERS:
        return SchedulerPart(_SCHEDULERS[kind](optimizer))
    if kind == "loader":
        return LoaderPart(*reader)
    return PerRankPart(rank) if kind == "per_rank" else _PLAIN[kind]()
