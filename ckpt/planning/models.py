"""List the tensors that a checkpoint holds: of a well-known model, of a number of parameters, or a stored one's."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckpt.acceptance.models import MODELS, Parameter, gpt
from ckpt.errors import ConfigurationError
from ckpt.format.dtypes import item_bytes

DTYPES = {
    "bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64", "fp8": "float8_e4m3fn",
}  # fmt: skip
OPTIMIZERS: Mapping[str, Sequence[str]] = {
    "none": (),
    "sgd": ("momentum_buffer",),
    "adamw": ("exp_avg", "exp_avg_sq"),
}
"""The states that an optimizer keeps of each element of the weights."""

_SCALE = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_NUMBER = re.compile(r"(\d+(?:\.\d+)?(?:[eE]\d{1,2})?)([KMBT]?)")
_BLOCK = re.compile(r"^(.*?\.\d+)(?:\.|$)")
_LAYER_WIDTH = 128
"""Hidden size of a layer, by the number of layers, as in GPT-3's table 2.1 (96 to 128 for the larger ones)."""
_MIN_PARAMETERS, _MAX_PARAMETERS = 1e6, 1e15


@dataclass(frozen=True)
class Tensor:
    """A tensor of a checkpoint.

    Attributes:
        tp_dim: the dimension that tensor parallelism cuts; None if all its ranks hold it.
        block: the layer that it belongs to, counted through the model, for pipeline stages.
    """

    fqn: str
    shape: tuple[int, ...]
    item_bytes: int
    tp_dim: int | None
    block: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.elements * self.item_bytes


@dataclass(frozen=True)
class Model:
    """What a checkpoint holds.

    Attributes:
        about: what the shapes are taken from.
        parameters: elements of the weights; of a stored checkpoint, of all that is no optimizer state.
    """

    name: str
    about: str
    parameters: int
    tensors: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def blocks(self) -> int:
        return 1 + max((tensor.block for tensor in self.tensors), default=0)


def model_of(
    text: str,
    *,
    dtype: str = "bf16",
    optimizer: str = "adamw",
    optimizer_dtype: str = "fp32",
    master_weights: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> Model:
    """List the tensors of a preset (`gpt-22b`), a number of parameters (`70B`) or a checkpoint (its URL).

    Args:
        dtype, optimizer_dtype: `bf16`, `fp16`, `fp32`, `fp64` or `fp8`, of weights and of optimizer states. A
            stored checkpoint has its own.
        master_weights: the optimizer keeps a copy of the weights in `optimizer_dtype`.

    Raises:
        ConfigurationError: an argument is wrong.
        NotFound, NotCommitted, ...: the checkpoint cannot be read (`ckpt.inspect`).
    """
    for option, name in (("dtype", dtype), ("optimizer dtype", optimizer_dtype)):
        if name not in DTYPES:
            raise ConfigurationError(f"the {option} must be one of {', '.join(DTYPES)}, not {name[:40]!r}")
    if optimizer not in OPTIMIZERS:
        raise ConfigurationError(
            f"the optimizer must be one of {', '.join(OPTIMIZERS)}, not {optimizer[:40]!r}"
        )
    if text in MODELS:
        weights, about = list(MODELS[text]()), "published shapes"
    elif (number := _NUMBER.fullmatch(text)) is not None:
        weights, about = _gpt_of(float(number[1]) * _SCALE[number[2]], text)
    elif "/" in text or os.path.exists(text):
        return _stored_model(text, storage_options)
    else:
        raise ConfigurationError(
            f"{text[:80]!r} is no model: give one of {', '.join(MODELS)}, a number of parameters (70B), or the URL "
            "of a checkpoint"
        )
    states = [*OPTIMIZERS[optimizer], *(["master"] if master_weights else [])]
    sizes = item_bytes(DTYPES[dtype]), item_bytes(DTYPES[optimizer_dtype])
    blocks = _blocks([weight.fqn for weight in weights])
    tensors = [
        Tensor(f"model.{weight.fqn}", weight.shape, sizes[0], weight.tp_dim, block)
        for weight, block in zip(weights, blocks, strict=True)
    ]
    tensors += [
        Tensor(f"optimizer.state.{weight.fqn}.{state}", weight.shape, sizes[1], weight.tp_dim, block)
        for weight, block in zip(weights, blocks, strict=True)
        for state in states
    ]
    return Model(text, about, sum(weight.elements for weight in weights), tuple(tensors))


def _gpt_of(parameters: float, text: str) -> tuple[list[Parameter], str]:
    """Make the shapes of a GPT of about that many parameters: 12 x layers x hidden^2, and the embeddings."""
    if not _MIN_PARAMETERS <= parameters <= _MAX_PARAMETERS:
        raise ConfigurationError(f"a model has from 1M to 1000T parameters, not {text}")
    layers = max(1, round((parameters / (12 * _LAYER_WIDTH**2)) ** (1 / 3)))
    embedded = (51200 + 2048) / (24 * layers)
    hidden = math.sqrt(embedded**2 + parameters / (12 * layers)) - embedded
    hidden = max(16, 16 * round(hidden / 16))
    return list(gpt(hidden, layers)), f"a GPT of {layers} layers, hidden size {hidden:,}"


def _blocks(fqns: Sequence[str]) -> list[int]:
    """Number the layers in the order of the names; what is in none belongs to the one before."""
    numbers: dict[str, int] = {}
    blocks: list[int] = []
    for fqn in fqns:
        match = _BLOCK.match(fqn)
        if match is not None:
            numbers.setdefault(match[1], len(numbers))
        blocks.append(max(0, len(numbers) - 1) if match is None else numbers[match[1]])
    return blocks


def _stored_model(url: str, storage_options: Mapping[str, Any] | None) -> Model:
    from ckpt.tools.inspect import inspect

    inspection = inspect(url, storage_options=storage_options)
    infos = sorted(inspection.tensors.values(), key=lambda info: _in_order(info.fqn))
    tensors = [
        # What tensor parallelism cuts is not stored; columns or rows make the same bytes.
        Tensor(info.fqn, tuple(info.shape), item_bytes(info.dtype), 0 if len(info.shape) > 1 else None, block)
        for info, block in zip(infos, _blocks_of_weights([info.fqn for info in infos]), strict=True)
    ]
    if not tensors:
        raise ConfigurationError("this checkpoint holds no tensor", url=inspection.url)
    return Model(inspection.url, "the shapes of a checkpoint", inspection.parameters, tuple(tensors))


def _in_order(fqn: str) -> list[tuple[int, int | str]]:
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in fqn.split(".")]


def _blocks_of_weights(fqns: Sequence[str]) -> Iterator[int]:
    """Number layers by their last name and number, so that the optimizer's states are with their weights."""
    numbers: dict[str, int] = {}
    for fqn in fqns:
        match = re.search(r"([^.\d][^.]*\.\d+)(?:\.|$)", fqn)
        key = match[1] if match is not None else ""
        yield numbers.setdefault(key, len(numbers))
