"""Compute the parameters of well-known models: names, shapes, tensor-parallel dimensions.

They follow from published hyper-parameters; no weights are needed or read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ckpt.errors import ConfigurationError


@dataclass(frozen=True)
class Parameter:
    """One entry of a state dict; tensor parallelism cuts dimension `tp_dim`, if it is not None."""

    fqn: str
    shape: tuple[int, ...]
    tp_dim: int | None = None

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def t5(vocab: int, d_model: int, d_kv: int, d_ff: int, heads: int, layers: int) -> Iterator[Parameter]:
    """Compute the parameters of T5 1.0 as `transformers` names them; embeddings are tied.

    Source: Raffel et al. 2020 (arXiv:1910.10683), section 3.7; config.json of t5-small and t5-11b.
    """
    inner = heads * d_kv
    yield Parameter("shared.weight", (vocab, d_model), 0)
    for stack in ("encoder", "decoder"):
        attentions = ["SelfAttention"] if stack == "encoder" else ["SelfAttention", "EncDecAttention"]
        for layer in range(layers):
            block = f"{stack}.block.{layer}.layer"
            for number, attention in enumerate(attentions):
                for name in "qkv":
                    yield Parameter(f"{block}.{number}.{attention}.{name}.weight", (inner, d_model), 0)
                yield Parameter(f"{block}.{number}.{attention}.o.weight", (d_model, inner), 1)
                if layer == number == 0:
                    bias = f"{block}.0.SelfAttention.relative_attention_bias.weight"
                    yield Parameter(bias, (32, heads), 1)
                yield Parameter(f"{block}.{number}.layer_norm.weight", (d_model,))
            last = len(attentions)
            yield Parameter(f"{block}.{last}.DenseReluDense.wi.weight", (d_ff, d_model), 0)
            yield Parameter(f"{block}.{last}.DenseReluDense.wo.weight", (d_model, d_ff), 1)
            yield Parameter(f"{block}.{last}.layer_norm.weight", (d_model,))
        yield Parameter(f"{stack}.final_layer_norm.weight", (d_model,))


def llama(vocab: int, hidden: int, inner: int, layers: int) -> Iterator[Parameter]:
    """Compute the parameters of Llama 2 without grouped queries, as `transformers` names them.

    Source: Touvron et al. 2023 (arXiv:2307.09288); config.json of Llama-2-7b and Llama-2-13b.
    Granite 7B has the architecture of Llama 2 7B (model card of ibm-granite/granite-7b-base).
    """
    yield Parameter("model.embed_tokens.weight", (vocab, hidden), 0)
    for layer in range(layers):
        block = f"model.layers.{layer}"
        for name in "qkv":
            yield Parameter(f"{block}.self_attn.{name}_proj.weight", (hidden, hidden), 0)
        yield Parameter(f"{block}.self_attn.o_proj.weight", (hidden, hidden), 1)
        yield Parameter(f"{block}.mlp.gate_proj.weight", (inner, hidden), 0)
        yield Parameter(f"{block}.mlp.up_proj.weight", (inner, hidden), 0)
        yield Parameter(f"{block}.mlp.down_proj.weight", (hidden, inner), 1)
        yield Parameter(f"{block}.input_layernorm.weight", (hidden,))
        yield Parameter(f"{block}.post_attention_layernorm.weight", (hidden,))
    yield Parameter("model.norm.weight", (hidden,))
    yield Parameter("lm_head.weight", (vocab, hidden), 0)


def gpt(hidden: int, layers: int, vocab: int = 51200, positions: int = 2048) -> Iterator[Parameter]:
    """Compute the parameters of Megatron-LM's GPT; the output layer is tied to the embedding.

    Source: Korthikanti et al. 2022 (arXiv:2205.05198), table 3: 22B, 175B (GPT-3) and 1T;
    vocabulary 51,200, sequences of 2,048.
    """
    yield Parameter("embedding.word_embeddings.weight", (vocab, hidden), 0)
    yield Parameter("embedding.position_embeddings.weight", (positions, hidden))
    for layer in range(layers):
        block = f"decoder.layers.{layer}"
        for norm in ("input_layernorm", "pre_mlp_layernorm"):
            yield Parameter(f"{block}.{norm}.weight", (hidden,))
            yield Parameter(f"{block}.{norm}.bias", (hidden,))
        yield Parameter(f"{block}.self_attention.linear_qkv.weight", (3 * hidden, hidden), 0)
        yield Parameter(f"{block}.self_attention.linear_qkv.bias", (3 * hidden,), 0)
        yield Parameter(f"{block}.self_attention.linear_proj.weight", (hidden, hidden), 1)
        yield Parameter(f"{block}.self_attention.linear_proj.bias", (hidden,))
        yield Parameter(f"{block}.mlp.linear_fc1.weight", (4 * hidden, hidden), 0)
        yield Parameter(f"{block}.mlp.linear_fc1.bias", (4 * hidden,), 0)
        yield Parameter(f"{block}.mlp.linear_fc2.weight", (hidden, 4 * hidden), 1)
        yield Parameter(f"{block}.mlp.linear_fc2.bias", (hidden,))
    yield Parameter("decoder.final_layernorm.weight", (hidden,))
    yield Parameter("decoder.final_layernorm.bias", (hidden,))


MODELS: dict[str, Callable[[], Iterator[Parameter]]] = {
    "t5-small": lambda: t5(32128, 512, 64, 2048, 8, 6),
    "t5-11b": lambda: t5(32128, 1024, 128, 65536, 128, 24),
    "llama-2-7b": lambda: llama(32000, 4096, 11008, 32),
    "llama-2-13b": lambda: llama(32000, 5120, 13824, 40),
    "granite-7b": lambda: llama(32000, 4096, 11008, 32),
    "gpt-22b": lambda: gpt(6144, 48),
    "gpt-175b": lambda: gpt(12288, 96),
    "gpt-1t": lambda: gpt(25600, 128),
}
"""Presets by name. `t5-small` is for trying things out."""

_OPTIMIZERS = {"none": (), "adamw": ("exp_avg", "exp_avg_sq")}


def parameters_of(model: str, optimizer: str = "none") -> list[Parameter]:
    """Compute the entries of a model's state dict: weights, then optimizer states."""
    if model not in MODELS:
        raise ConfigurationError(f"model must be one of {', '.join(MODELS)}, not {model[:80]!r}")
    if optimizer not in _OPTIMIZERS:
        raise ConfigurationError(f"optimizer must be one of {', '.join(_OPTIMIZERS)}, not {optimizer[:80]!r}")
    weights = list(MODELS[model]())
    states = [
        Parameter(f"optimizer.state.{weight.fqn}.{name}", weight.shape, weight.tp_dim)
        for weight in weights
        for name in _OPTIMIZERS[optimizer]
    ]
    return [Parameter(f"model.{weight.fqn}", weight.shape, weight.tp_dim) for weight in weights] + states
