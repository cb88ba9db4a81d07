"""State dicts of every kind that DCP knows, and how to tell whether one came back bit for bit."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ckpt.transfer.tensor_memory import memory_of

SAVABLE_DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
    torch.complex32, torch.complex64, torch.complex128,
    torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool,
    *([torch.bcomplex32] if hasattr(torch, "bcomplex32") else []),  # from torch 2.15 on
]  # fmt: skip


def random_tensor(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Random bits (NaNs of all kinds included), the same everywhere for the same arguments."""
    generator = torch.Generator().manual_seed(seed + 1000003 * len(shape) + sum(shape))
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).to(torch.bool)
    tensor = torch.empty(shape, dtype=dtype)
    nbytes = tensor.numel() * tensor.element_size()
    raw = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape) if nbytes else tensor


def transformer_state(layers: int = 30, step: int = 1000, lr: float = 0.00085) -> dict[str, Any]:
    """The names of a transformer, its AdamW, and the shards of a loader, with few elements."""
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (64, 8), "lm_head.weight": (64, 8)}
    for layer in range(layers):
        block = f"layers.{layer}"
        shapes |= {f"{block}.self_attn.{name}_proj.weight": (8, 8) for name in "qkvo"}
        shapes |= {f"{block}.mlp.{name}_proj.weight": (16, 8) for name in ("gate", "up")}
        shapes |= {f"{block}.mlp.down_proj.weight": (8, 16)}
        shapes |= {f"{block}.{name}_layernorm.weight": (8,) for name in ("input", "post_attention")}
    state = {
        fqn: {
            "exp_avg": torch.zeros(shape),
            "exp_avg_sq": torch.zeros(shape),
            "step": torch.tensor(float(step)),
        }
        for fqn, shape in shapes.items()
    }
    group = {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
    return {
        "model": {fqn: torch.zeros(shape, dtype=torch.bfloat16) for fqn, shape in shapes.items()},
        "optim": {"state": state, "param_groups": {"0": group, "1": {**group, "weight_decay": 0.0}}},
        "loader": {"shards": {f"{number:06}": [number] for number in range(48)}},
        "step": step,
    }


def bits(tensor: torch.Tensor) -> bytes:
    """The values of a tensor, whatever its dtype, strides or sharding."""
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return bytes(memory_of(tensor))


def digest(state: Any) -> Any:
    """The state with every tensor replaced by shape, dtype and hash: comparable, and small."""
    if isinstance(state, dict):
        return {key: digest(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [digest(value) for value in state]
    if isinstance(state, torch.Tensor):
        return (tuple(state.shape), str(state.dtype), hashlib.sha256(bits(state)).hexdigest())
    return state


def emptied(state: Any) -> Any:
    """The same structure with other values, for loading into."""
    if isinstance(state, dict):
        return {key: emptied(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(emptied(value) for value in state)
    if isinstance(state, DTensor):
        local = emptied(state.to_local())
        return DTensor.from_local(
            local,
            state.device_mesh,
            state.placements,
            shape=state.shape,
            stride=state.stride(),
            run_check=False,
        )
    if isinstance(state, torch.Tensor):
        # Dense: a target never needs the odd strides or the large storage of what was saved.
        other = torch.empty(state.shape, dtype=state.dtype)
        memory = memory_of(other)
        memory[:] = b"\x5a" * memory.nbytes
        return other
    return None


def plain_state(seed: int = 0) -> dict[str, Any]:
    """Plain tensors of all dtypes and shapes, views, shared storage, and objects."""
    large = random_tensor(700, 1000, seed=seed)
    shared = random_tensor(64, 64, seed=seed + 1)
    column_major = random_tensor(300, 500, seed=seed + 2).t()
    return {
        "dtypes": {str(d): random_tensor(7, 13, dtype=d, seed=seed) for d in SAVABLE_DTYPES},
        "scalar": torch.tensor(3.25 + seed),
        "empty": torch.empty(0),
        "empty_3d": torch.empty(4, 0, 3, dtype=torch.int64),
        "one": random_tensor(1, 1, 1, seed=seed),
        "large": large,
        "row_view": large[3:5],
        "column_view": large[:, 7:11],
        "strided_view": large[::3, ::2],
        "transposed": column_major,
        "channels_last": random_tensor(2, 3, 8, 8, seed=seed).to(memory_format=torch.channels_last),
        "expanded": random_tensor(1, 50, seed=seed).expand(40, 50),
        "shared_a": shared,
        "shared_b": shared[10:20],
        "conjugated": random_tensor(5, 4, dtype=torch.complex64, seed=seed).conj(),
        "negated": torch.complex(torch.arange(6.0), torch.arange(6.0) + seed).conj().imag,
        "parameter": nn.Parameter(random_tensor(9, 9, seed=seed + 3).nan_to_num()),
        "objects": {
            "int": 5 + seed,
            "text": "ü",
            "none": None,
            "list": [1, 2.5, "x"],
            "nested": {"a": {"b": [seed]}},
        },
        "list_of_tensors": [random_tensor(3, seed=seed), random_tensor(4, 2, seed=seed)],
    }


def quantized(seed: int = 0) -> torch.Tensor:
    """A tensor that is more than its bytes, and has to be pickled."""
    return torch.quantize_per_tensor(
        random_tensor(40, 30, seed=seed).nan_to_num(0, 1, -1).clamp(-5, 5), 0.1, 3, torch.qint8
    )


def sharded_state(seed: int = 0) -> dict[str, Any]:
    """Tensors sharded over the default group: evenly, unevenly, with empty shards, on 1-D and 2-D meshes."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))

    def shard(
        mesh: DeviceMesh, placements: list[Any], *shape: int, dtype: torch.dtype = torch.float32
    ) -> DTensor:
        return distribute_tensor(random_tensor(*shape, dtype=dtype, seed=seed), mesh, placements)

    state: dict[str, Any] = {
        "rows": shard(mesh, [Shard(0)], 12 * 64, 300),
        "uneven_rows": shard(mesh, [Shard(0)], 601, 77, dtype=torch.bfloat16),
        "fewer_rows_than_ranks": shard(mesh, [Shard(0)], 2, 40),
        "columns": shard(mesh, [Shard(1)], 50, 12 * 33),
        "middle": shard(mesh, [Shard(1)], 6, 25, 11, dtype=torch.int64),
        "replicated": shard(mesh, [Replicate()], 31, 17),
        "local": random_tensor(5, 6, seed=seed),
        "step": 7 + seed,
    }
    # On 4 ranks over two dimensions, else over one: loading on another number of ranks crosses the two.
    if world == 4:
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        state["two_d"] = shard(grid, [Shard(0), Shard(1)], 66, 70)
        state["same_dim_twice"] = shard(grid, [Shard(0), Shard(0)], 64, 9)
        state["hsdp"] = shard(grid, [Replicate(), Shard(0)], 33, 44)
    else:
        state["two_d"] = shard(mesh, [Shard(1)], 66, 70)
        state["same_dim_twice"] = shard(mesh, [Shard(0)], 64, 9)
        state["hsdp"] = shard(mesh, [Shard(0)], 33, 44)
    return state


class Model(nn.Module):
    """A small network with parameters of odd sizes."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(61, 24)
        self.layers = nn.ModuleList(
            [nn.Sequential(nn.Linear(24, 37), nn.GELU(), nn.Linear(37, 24)) for _ in range(3)]
        )
        self.norm = nn.LayerNorm(24)
        self.head = nn.Linear(24, 61, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        output: torch.Tensor = self.head(self.norm(hidden))
        return output


def fsdp_model(
    mesh: DeviceMesh | None = None, seed: int = 0, steps: int = 2
) -> tuple[Model, torch.optim.Optimizer]:
    """A model under FSDP2 with an optimizer that has state."""
    model = Model(seed)
    mesh = mesh if mesh is not None else init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        tokens = torch.randint(0, 61, (2, 16), generator=generator)
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer
