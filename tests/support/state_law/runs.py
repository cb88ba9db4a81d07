"""Training runs of a combination: one that never saves, one that saves, and one that resumes."""

from __future__ import annotations

import hashlib
import random
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    StateDictType,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ckpt.errors import CheckpointError
from support.state_law import models, optimizers, parts
from support.state_law.combinations import FLAT, SCHEDULERS, Combination
from support.state_law.ways import Trained, opened
from support.states import bits

STEPS_BEFORE, STEPS_AFTER = 2, 3


class Run:
    """One program that trains: everything in it is made from `seed`, its data from the steps alone."""

    def __init__(self, combination: Combination, *, seed: int, fresh: bool, noisy: bool) -> None:
        self.combination, self._noisy = combination, noisy
        for generator in (torch.manual_seed, random.seed, np.random.seed):
            generator(seed)
        is_sparse = combination.optimizer == "sparse_adam"
        self.model = models.built(combination.wrapper, sparse=is_sparse, seed=seed, fresh=fresh)
        is_frozen = combination.phase == "frozen"
        if fresh and is_frozen:
            self.model = models.freeze(self.model)
        self.optimizers = optimizers.made(
            combination.optimizer,
            self._trainable(fresh and is_frozen),
            combination.groups,
            factor=self._factor(),
        )
        self._reader = models.reader(combination.wrapper, combination.optimizer)
        self.part = parts.made(
            combination.part, self.optimizers[0], rank=dist.get_rank(), reader=self._reader
        )
        # Noise is the same on all ranks that have to read the same data.
        torch.manual_seed(seed * 100 + self._reader[0])
        self.losses: list[str] = []
        self.steps = 0

    def _trainable(self, is_frozen: bool) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters for the optimizer: a frozen layer was trained before, and stays in it."""
        adapters = self.combination.wrapper == "adapters"
        named = models.named_parameters(self.model)
        return [
            (name, each)
            for name, each in named
            if each.requires_grad or (is_frozen and not (adapters and "lora" not in name))
        ]

    def _factor(self) -> float:
        """Return the factor of this rank's learning rates: stages have their own, where that can be kept."""
        combination = self.combination
        can_differ = combination.wrapper == "pipeline" and not combination.moves
        return 1.0 + dist.get_rank() if can_differ and combination.part not in SCHEDULERS else 1.0

    @property
    def trained(self) -> Trained:
        return Trained(self.model, self.optimizers, self.part.given())

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.begin_step()
            self.end_step()

    def begin_step(self) -> None:
        """Compute the first half of the gradients in a window of accumulation."""
        if self.combination.phase == "window":
            self._backward(0)

    def end_step(self) -> None:
        if self.combination.optimizer == "lbfgs":
            self.optimizers[0].step(self._closure)
            self._zero_grad()
        else:
            self._backward(1)
            for optimizer in self.optimizers:
                optimizer.step()
            self._zero_grad()
        self.steps += 1
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                if models.canonical(name) == "seen":
                    buffer.add_(self.steps)
                else:
                    buffer.mul_(0.9)
        self.part.advance(self.steps, self.model)

    def _closure(self) -> float:
        self._zero_grad()
        return self._backward(1)

    def _zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.model.zero_grad()

    def _backward(self, micro: int) -> float:
        for optimizer in self.optimizers:
            if isinstance(optimizer, optimizers.Wrapping):
                optimizer.has_scale = True
        loss = self._loss(torch.Generator().manual_seed(1000 * self.steps + 100 * micro + self._reader[0]))
        loss.backward()  # type: ignore[no-untyped-call]
        value = float(loss.item())
        self.losses.append(value.hex())
        return value

    def _loss(self, generator: torch.Generator) -> torch.Tensor:
        noise = torch.rand(()) + random.random() + float(np.random.rand()) if self._noisy else torch.ones(())
        if isinstance(self.model, models.Stage):
            hidden = torch.randn(3, models.WIDTH, generator=generator)
            squared: torch.Tensor = (1 + 0.01 * noise) * self.model(hidden).pow(2).mean()
            return squared
        if isinstance(self.part, parts.LoaderPart):
            tokens = self.part.tokens()
        else:
            tokens = torch.randint(0, models.TOKENS, (2, 4), generator=generator)
        # The test is about wrapping. Compilation would take seconds and change nothing.
        with torch.compiler.set_stance("force_eager"):
            logits = self.model(tokens)
        return (1 + 0.01 * noise) * nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())

    def freeze(self) -> None:
        self.model = models.freeze(self.model)


def trained_run(combination: Combination, *, noisy: bool) -> Run:
    """Train a run up to the point of the save."""
    run = Run(combination, seed=1, fresh=False, noisy=noisy)
    if combination.phase != "start":
        run.train(STEPS_BEFORE)
    if combination.phase == "frozen":
        run.freeze()
        run.train(1)
    return run


def local_state(run: Run) -> dict[str, Any]:
    """Return the state of this rank, comparable and small."""
    names = {id(parameter): name for name, parameter in models.named_parameters(run.model)}
    kept = []
    for optimizer in run.optimizers:
        state = {names[id(parameter)]: plain(values) for parameter, values in optimizer.state.items()}
        groups = [
            {
                **{name: plain(value) for name, value in group.items() if name != "params"},
                "names": [names[id(parameter)] for parameter in group["params"]],
            }
            for group in optimizer.param_groups
        ]
        kept.append({"state": dict(sorted(state.items())), "groups": groups})
    return {
        "losses": list(run.losses),
        "parameters": {name: plain(value) for name, value in models.named_parameters(run.model)},
        "buffers": {models.canonical(name): plain(value) for name, value in run.model.named_buffers()},
        "optimizers": kept,
        "part": plain(run.part.state()),
    }


def whole_state(run: Run) -> dict[str, Any]:
    """Return the state by name, with whole tensors: the same on any number of ranks."""
    options: dict[str, Any] = {}
    state: dict[str, Any] = {}
    names = {id(parameter): name for name, parameter in models.named_parameters(run.model)}
    for optimizer in run.optimizers:
        if run.combination.wrapper == "fsdp1_flat":
            state |= _whole_of_flat(run.model, optimizer)
        elif run.combination.wrapper == "fsdp1_orig":
            state |= _whole_of_shards(run.model, names, optimizer)
        else:
            state |= {
                names[id(parameter)]: plain(values, whole=True)
                for parameter, values in optimizer.state.items()
            }
        for group in optimizer.param_groups:
            of_group = {name: plain(value) for name, value in group.items() if name != "params"}
            options |= {names[id(parameter)]: of_group for parameter in group["params"]}
    return {
        "parameters": dict(_whole_parameters(run)),
        "buffers": {models.canonical(name): plain(value) for name, value in run.model.named_buffers()},
        "state": state,
        "options": options,
        "part": plain(run.part.whole(), whole=True),
    }


def _whole_parameters(run: Run) -> Iterator[tuple[str, Any]]:
    if run.combination.wrapper in FLAT:
        with FullyShardedDataParallel.summon_full_params(run.model, writeback=False):
            yield from [(name, plain(value)) for name, value in models.named_parameters(run.model)]
    else:
        for name, parameter in models.named_parameters(run.model):
            yield name, plain(parameter, whole=True)


def _whole_of_flat(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Let torch gather the states of flat parameters: it alone knows how they are laid out."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        with FullyShardedDataParallel.state_dict_type(
            model,
            StateDictType.FULL_STATE_DICT,
            FullStateDictConfig(rank0_only=False),
            FullOptimStateDictConfig(rank0_only=False),
        ):
            whole = FullyShardedDataParallel.optim_state_dict(model, optimizer)
    return {models.canonical(name): plain(values) for name, values in whole["state"].items() if values}


def _whole_of_shards(model: nn.Module, names: Mapping[int, str], optimizer: Optimizer) -> dict[str, Any]:
    """Join the shards of all ranks, which FSDP1 cuts in the order of ranks; torch's own gathering asserts."""
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        shapes = {name: value.shape for name, value in models.named_parameters(model)}
    own = {names[id(parameter)]: dict(values) for parameter, values in optimizer.state.items()}
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    whole: dict[str, dict[str, Any]] = {}
    for states in every:
        for name, values in states.items():
            joined = whole.setdefault(name, {})
            for key, value in values.items():
                if isinstance(value, torch.Tensor) and value.ndim:
                    joined[key] = torch.cat([joined.get(key, value.new_empty(0)), value.flatten()])
                else:
                    joined.setdefault(key, value)
    for name, values in whole.items():
        for key, value in values.items():
            if isinstance(value, torch.Tensor) and value.numel() == shapes[name].numel() and value.ndim:
                values[key] = value.view(shapes[name])
    return {name: plain(values) for name, values in whole.items()}


def _gathered(value: DTensor) -> torch.Tensor:
    local = value.to_local()
    if isinstance(local, optimizers.LowBitTensor):  # each shard has a scale of its own
        layout = value.device_mesh, value.placements
        value = DTensor.from_local(
            local.unpacked(), *layout, run_check=False, shape=value.shape, stride=value.stride()
        )
    return value.full_tensor()


def plain(value: Any, *, whole: bool = False) -> Any:
    """Replace tensors by their hashes, and other values by texts; `whole` gathers tensors first."""
    if isinstance(value, DTensor):
        return plain(_gathered(value) if whole else value.to_local())
    if isinstance(value, optimizers.LowBitTensor):
        return ["LowBitTensor", plain(value.codes), plain(value.scale)]
    if isinstance(value, torch.Tensor):
        if value.is_meta:
            return f"meta tensor {tuple(value.shape)}"
        return f"tensor {tuple(value.shape)} {value.dtype} {hashlib.sha256(bits(value)).hexdigest()[:16]}"
    if isinstance(value, Mapping):
        kind = type(value).__name__ if type(value).__name__ in ("Counter", "OrderedDict") else "dict"
        items = [(repr(key), plain(each, whole=whole)) for key, each in value.items()]
        return {"<kind>": kind, **dict(items if kind == "OrderedDict" else sorted(items))}
    if isinstance(value, list | tuple):
        return [type(value).__name__, *(plain(each, whole=whole) for each in value)]
    return value.hex() if isinstance(value, float) else f"{type(value).__name__} {value!r}"


def never_saved(combination: Combination, noisy: bool) -> dict[str, Any]:
    """Train without a save; return the state of this rank after the last step."""
    run = trained_run(combination, noisy=noisy)
    run.begin_step()
    run.end_step()
    run.train(STEPS_AFTER - 1)
    return local_state(run)


def saved(combination: Combination, root: str, noisy: bool) -> dict[str, Any]:
    """Save, and train on; return the states of this rank at the save, and after the last step.

    If the save was refused, return the error's text.
    """
    run = trained_run(combination, noisy=noisy)
    run.begin_step()
    before = {"local": local_state(run)}
    if combination.moves:
        before["whole"] = whole_state(run)
    try:
        with opened(combination.way, root) as saver:
            if combination.way == "references":
                saver.save(run.steps, run.trained)
                saver.finish()
            saver.save(run.steps + 1, run.trained)
            at_once = local_state(run)
            run.end_step()
            run.train(STEPS_AFTER - 1)
            saver.finish()
    except CheckpointError as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    return {**before, "after the save": at_once, "after": local_state(run)}


def resumed(combination: Combination, root: str, noisy: bool) -> dict[str, Any]:
    """Restore in a fresh program; return the state right then, and after the last step on as many ranks."""
    run = Run(combination, seed=2, fresh=True, noisy=noisy)
    run.steps = {"start": 0, "frozen": STEPS_BEFORE + 1}.get(combination.phase, STEPS_BEFORE)
    with opened(combination.way, root) as saver:
        run.part.take(saver.load(run.steps + 1, run.trained))
    if combination.moves:
        return {"whole": whole_state(run)}
    restored = local_state(run)
    run.train(STEPS_AFTER)
    return {"local": restored, "after": local_state(run)}
