"""Optimizers of all kinds: those of torch, and some with states that torch's own have not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn, optim
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

Named = Sequence[tuple[str, nn.Parameter]]


class Counting(Optimizer):
    """Count steps in Python: in the state of each parameter, and in each group."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "steps": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["steps"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["steps"] = state.get("steps", 0) + 1
                    parameter.sub_(parameter.grad, alpha=group["lr"] / (state["steps"] + group["steps"]))


class Shampoo(Optimizer):
    """Keep factors and roots in lists and nested dicts, with keys and values of many kinds."""

    def __init__(self, params: Iterable[Any], lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr, "exponents": {0: -0.25, (0, 1): -0.5}})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        grad, state = parameter.grad, self.state[parameter]
        assert grad is not None
        whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
        rows = whole.reshape(whole.shape[0], -1)
        if not state:
            state["step"], state["kind"], state["history"] = 0, "kronecker", []
            state["factors"] = [torch.eye(len(rows)), None]
            state["roots"] = {0: {"scale": torch.ones(()), "age": 0}, (0, 1): None, "dims": (len(rows), 1)}
            state["momentum"] = torch.zeros_like(parameter)
        state["step"] += 1
        state["factors"][0] = 0.9 * state["factors"][0] + rows @ rows.T
        state["roots"][0]["scale"] = state["factors"][0].trace() ** group["exponents"][0]
        state["roots"][0]["age"] = state["step"]
        state["roots"][0, 1] = {"trace": state["factors"][0].trace()}
        state["history"].append({"step": state["step"], "norm": rows.norm()})
        state["momentum"].mul_(0.9).add_(grad)
        parameter.sub_(state["momentum"], alpha=group["lr"] * float(state["roots"][0]["scale"]))


class LowBitTensor(torch.Tensor):
    """Values in eight bits with one scale, as the states of torchao are."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> LowBitTensor:  # noqa: PYI034
        made: LowBitTensor = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)
        return made

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self.codes, self.scale = codes, scale

    @classmethod
    def of(cls, values: torch.Tensor) -> LowBitTensor:
        largest = values.abs().max() if values.numel() else torch.ones(())  # a shard may be empty
        scale = largest.clamp(min=1e-12) / 127
        return cls((values / scale).round().to(torch.int8), scale)

    def unpacked(self) -> torch.Tensor:
        return self.codes.float() * self.scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, torch.Tensor], context: None, size: Any, stride: Any
    ) -> LowBitTensor:
        return cls(inner["codes"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        name = func.overloadpacket.__name__
        if name in ("detach", "clone", "alias", "_to_copy") and not (kwargs or {}).get("dtype"):
            return cls(func(args[0].codes), func(args[0].scale))
        if name == "view" and tuple(args[1]) == tuple(args[0].shape):  # as `DTensor.from_local` does
            return cls(args[0].codes, args[0].scale)
        if name == "copy_" and isinstance(args[0], cls) and isinstance(args[1], cls):
            args[0].codes.copy_(args[1].codes)
            args[0].scale.copy_(args[1].scale)
            return args[0]
        plain = tree_map(
            lambda each: each.unpacked() if isinstance(each, cls) else each, (args, kwargs or {})
        )
        return func(*plain[0], **plain[1])

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"LowBitTensor({self.codes.tolist()}, {self.scale.item()})"


torch.serialization.add_safe_globals([LowBitTensor])  # as torchao declares its own


class LowBit(Optimizer):
    """Keep the first moment in eight bits."""

    def __init__(self, params: Iterable[Any], lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group["lr"])

    def _update(self, parameter: torch.Tensor, lr: Any) -> None:
        state = self.state[parameter]
        kept = _local(state.get("exp_avg"))
        moment = _local(parameter.grad)
        if kept is not None:
            moment = 0.9 * kept.unpacked() + moment
        _local(parameter).sub_(moment, alpha=lr)
        own: torch.Tensor = LowBitTensor.of(moment)
        if isinstance(parameter, DTensor):
            layout = parameter.device_mesh, parameter.placements
            own = DTensor.from_local(
                own, *layout, run_check=False, shape=parameter.shape, stride=parameter.stride()
            )
        state["exp_avg"] = own


def _local(tensor: Any) -> Any:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Wrapping(Optimizer):
    """Drive another optimizer, as those do that accelerate hands out."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.has_scale = False

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def defaults(self) -> Any:  # type: ignore[override]
        return self.optimizer.defaults

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.optimizer.load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        # A step that nothing has been scaled for is an error of its own kind, as with torch's GradScaler.
        assert self.has_scale, "Attempted step but _scale is None"
        return self.optimizer.step(closure)


_MAKERS: dict[str, Callable[[list[dict[str, Any]]], Optimizer]] = {
    "sgd": lambda groups: optim.SGD(groups, lr=0.1),
    "sgd_momentum": lambda groups: optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.1, dampening=0.5),
    "adam": lambda groups: optim.Adam(groups, lr=0.01, foreach=False),
    "adamw_foreach": lambda groups: optim.AdamW(groups, lr=0.01, foreach=True),
    "adamw_fused": lambda groups: optim.AdamW(groups, lr=0.01, fused=True),
    "adam_amsgrad": lambda groups: optim.Adam(groups, lr=0.01, amsgrad=True),
    "nadam": lambda groups: optim.NAdam(groups, lr=0.01),
    "radam": lambda groups: optim.RAdam(groups, lr=0.01),
    "asgd": lambda groups: optim.ASGD(groups, lr=0.05, t0=2),
    "rprop": lambda groups: optim.Rprop(groups, lr=0.01),
    "adagrad": lambda groups: optim.Adagrad(groups, lr=0.05, lr_decay=0.1, initial_accumulator_value=0.1),
    "adadelta": lambda groups: optim.Adadelta(groups, lr=1.0),
    "adamax": lambda groups: optim.Adamax(groups, lr=0.01),
    "rmsprop": lambda groups: optim.RMSprop(groups, lr=0.01, momentum=0.9, centered=True),
    "adafactor": lambda groups: optim.Adafactor(groups, lr=0.05),
    "muon": lambda groups: optim.Muon(groups, lr=0.02),
    "lbfgs": lambda groups: optim.LBFGS(groups, lr=0.1, max_iter=2, history_size=3),
    "sparse_adam": lambda groups: optim.SparseAdam(groups, lr=0.05),
    "shampoo": Shampoo,
    "counting": Counting,
    "low_bit": LowBit,
    "several": lambda groups: optim.AdamW(groups, lr=0.01),
    "wrapping": lambda groups: Wrapping(optim.AdamW(groups, lr=0.01)),
    "tensor_lr": lambda groups: optim.AdamW(groups, lr=0.01, foreach=False),
}


def made(kind: str, named: Named, groups: str, *, factor: float) -> list[Optimizer]:
    """Make the optimizers of a kind over the parameters that it trains; `factor` multiplies learning rates."""
    own = [(name, parameter) for name, parameter in named if _trains(kind, name, parameter)]
    if kind != "several":
        return [_one(kind, own, groups, factor)]
    first = [(name, each) for name, each in own if _is_of_first_optimizer(name)]
    rest = [(name, each) for name, each in own if not _is_of_first_optimizer(name)]
    return [_one("sgd_momentum", first, groups, factor), _one("several", rest, groups, factor)]


def _is_of_first_optimizer(name: str) -> bool:
    """Return which of several optimizers has a parameter: the same on any number of ranks."""
    return name.endswith(("embed.weight", ".up.weight", ".up.bias", "lora_a", "0._flat_param"))


def _trains(kind: str, name: str, parameter: nn.Parameter) -> bool:
    if kind == "sparse_adam":
        return name == "embed.weight"
    return parameter.ndim == 2 if kind == "muon" else True


def _one(kind: str, named: Named, groups: str, factor: float) -> Optimizer:
    split: list[list[nn.Parameter]] = [[], []] if groups == "two" else [[]]
    for name, parameter in named:
        split[_is_second(name) if groups == "two" else 0].append(parameter)
    layout: list[dict[str, Any]] = [{"params": parameters} for parameters in split]
    if groups == "two":
        layout[1]["lr"] = 0.003
    elif groups == "empty":
        layout.append({"params": [], "lr": 0.5})
    optimizer = _MAKERS[kind](layout)
    for group in optimizer.param_groups:
        lr = group["lr"] * factor
        # A tensor that two groups share would be changed for both.
        group["lr"] = torch.tensor(lr) if kind == "tensor_lr" else lr
    return optimizer


def _is_second(name: str) -> bool:
    """Return whether a parameter is in the second of two groups: biases, norms, B matrices, and one flat block."""
    return name.endswith(("bias", "lora_b", "1._flat_param")) or name in ("norm.weight", "head.weight")
