"""Small models under each wrapper, and the names of their parameters without those of the wrappers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

TOKENS, WIDTH, INNER, BLOCKS, STAGE_LAYERS = 12, 6, 8, 3, 4
_PREFIXES = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "module")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = hidden + self.down(torch.tanh(self.up(hidden)))
        return output


class Adapter(nn.Module):
    """A linear layer that stays, and two small matrices that are trained."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(2, base.in_features))
        self.lora_b = nn.Parameter(torch.randn(base.out_features, 2))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.base(hidden) + hidden @ self.lora_a.T @ self.lora_b.T
        return output


class Net(nn.Module):
    """A small network with buffers of two dtypes, that a training step advances."""

    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH, sparse=sparse)
        self.blocks = nn.ModuleList([Block() for _ in range(BLOCKS)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("decay", torch.ones(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        logits: torch.Tensor = self.head(self.norm(hidden))
        return logits


class Stage(nn.Module):
    """The layers of one stage of a pipeline, under the names that they have in the whole model."""

    def __init__(self, numbers: range) -> None:
        super().__init__()
        # Drawn for all stages: each layer begins with the same values on any number of ranks.
        layers = [Block() for _ in range(STAGE_LAYERS)]
        self.layers = nn.ModuleDict({str(number): layers[number] for number in numbers})

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            hidden = layer(hidden)
        return hidden


@functools.cache
def mesh(*shape: int) -> DeviceMesh:
    """Make a mesh, whose groups all later models of this process share."""
    names = ("dp",) if len(shape) == 1 else ("outer", "inner")
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def built(wrapper: str, *, sparse: bool, seed: int, fresh: bool) -> nn.Module:
    """Build the model of a wrapper, with values of `seed`; if it is `fresh`, that of `meta` has no values yet."""
    torch.manual_seed(seed)
    if wrapper == "pipeline":
        share = STAGE_LAYERS // dist.get_world_size()
        return Stage(range(dist.get_rank() * share, (dist.get_rank() + 1) * share))
    with torch.device("meta" if fresh and wrapper in ("meta", "meta_fsdp2") else "cpu"):
        net = Net(sparse=sparse)
    return _WRAPPERS[wrapper](net)


def _plain(net: nn.Module) -> nn.Module:
    return net


def ddp(net: nn.Module) -> nn.Module:
    """Wrap by DDP, on several ranks. Other wrappers are combined with it."""
    return DistributedDataParallel(net) if dist.get_world_size() > 1 else net


def _fsdp1(net: nn.Module, *, use_orig_params: bool) -> nn.Module:
    return FullyShardedDataParallel(
        net,
        device_id=torch.device("cpu"),
        use_orig_params=use_orig_params,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
    )


def _sharded(net: Any, device_mesh: DeviceMesh) -> Any:
    for block in net.blocks:
        fully_shard(block, mesh=device_mesh)
    return fully_shard(net, mesh=device_mesh)


def _fsdp2(net: nn.Module) -> Any:
    return _sharded(net, mesh(dist.get_world_size()))


def _grid() -> DeviceMesh:
    ranks = dist.get_world_size()
    return mesh(max(1, ranks // 2), min(2, ranks))


def _fsdp2_tp(net: Any) -> Any:
    for block in net.blocks:
        parallelize_module(block, _grid()["inner"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return _sharded(net, _grid()["outer"])


def _hsdp(net: nn.Module) -> Any:
    return _sharded(net, _grid())


def _compiled(net: nn.Module) -> nn.Module:
    return torch.compile(ddp(net), backend="eager")  # type: ignore[return-value]


def _each(net: Any, wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    for number, block in enumerate(net.blocks):
        net.blocks[number] = wrap(block)
    return ddp(net)


def _ac(net: nn.Module) -> nn.Module:
    return _each(net, checkpoint_wrapper)


def _ac_compiled(net: nn.Module) -> nn.Module:
    return _each(net, lambda block: checkpoint_wrapper(torch.compile(block, backend="eager")))  # type: ignore[arg-type]


def _shared(net: Any) -> nn.Module:
    """Register a block twice; DDP shows both names, as does torch.compile on one rank."""
    net.blocks[2] = net.blocks[0]
    return ddp(net) if dist.get_world_size() > 1 else _compiled(net)


def _tied(net: Any) -> nn.Module:
    net.head.weight = net.embed.weight
    return ddp(net)


def _adapters(net: Any) -> nn.Module:
    net.requires_grad_(False)
    for block in net.blocks:
        block.up = Adapter(block.up)
    return ddp(net)


_WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": _plain,
    "ddp": ddp,
    "fsdp1_flat": functools.partial(_fsdp1, use_orig_params=False),
    "fsdp1_orig": functools.partial(_fsdp1, use_orig_params=True),
    "fsdp2": _fsdp2,
    "fsdp2_tp": _fsdp2_tp,
    "hsdp": _hsdp,
    "compiled": _compiled,
    "ac": _ac,
    "ac_compiled": _ac_compiled,
    "shared": _shared,
    "tied": _tied,
    "adapters": _adapters,
    "meta": _plain,
    "meta_fsdp2": _fsdp2,
}


def canonical(name: str) -> str:
    """Drop the names of wrappers from the name of a parameter or buffer."""
    return ".".join(part for part in name.split(".") if part not in _PREFIXES)


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for name, parameter in model.named_parameters():
        yield canonical(name), parameter


def freeze(model: nn.Module) -> nn.Module:
    """Freeze a layer; return the model, wrapped again where DDP has to notice."""
    for name, parameter in named_parameters(model):
        if name.startswith(("blocks.1.", "layers.0.up.")):
            parameter.requires_grad_(False)
    if isinstance(model, DistributedDataParallel):
        return ddp(model.module)
    inner = getattr(model, "_orig_mod", None)
    if isinstance(inner, DistributedDataParallel):
        return _compiled(inner.module)
    return model


def reader(wrapper: str, optimizer: str) -> tuple[int, int]:
    """Return which data this rank reads, as rank and number of ranks.

    DDP on four ranks adds gradients in an order that changes after its first step: with equal gradients that
    makes no difference. Ranks without DDP or FSDP have to read the same data too, and so do those of LBFGS: it
    keeps the loss.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if wrapper == "fsdp2_tp":
        return rank // 2, max(1, ranks // 2)
    if wrapper in ("plain", "meta", "pipeline") or optimizer == "lbfgs":
        return 0, 1
    is_ddp = wrapper not in ("fsdp1_flat", "fsdp1_orig", "fsdp2", "hsdp", "meta_fsdp2")
    return (0, 1) if is_ddp and ranks > 2 else (rank, ranks)
