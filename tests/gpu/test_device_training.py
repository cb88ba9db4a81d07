"""Training on a GPU: FSDP2 with NCCL and gloo, float8 states, compiled models, saves by another process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ckpt

pytestmark = [
    pytest.mark.skipif(torch.cuda.device_count() == 0, reason="there is no GPU here"),
    pytest.mark.filterwarnings("ignore"),  # of torch.compile and torchao about themselves
]

STEPS = 6


def _model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(4))).cuda()


def _sharded() -> tuple[nn.Module, torch.optim.Optimizer]:
    model, mesh = _model(), init_device_mesh("cuda", (dist.get_world_size(),))
    for layer in model.children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    generator = torch.Generator("cuda").manual_seed(step)
    inputs = torch.randn(32, 256, device="cuda", generator=generator)
    loss = (model(inputs) - inputs).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss)


def _begin(backend: str, rank: int, world_size: int, store: str) -> None:
    """Replace the group of the test by one of the GPU."""
    torch.cuda.set_device(0)
    dist.destroy_process_group()
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world_size)


def _losses(rank: int, world_size: int, backend: str, root: str, mode: str, resume: bool) -> list[float]:
    _begin(backend, rank, world_size, f"{root}-store-{world_size}-{resume}")
    model, optimizer = _sharded()
    losses = []
    options: dict[str, Any] = {"save": 2, "async_mode": mode}
    with ckpt.CheckpointManager(root, **options) as manager:
        restored = manager.restore(model=model, optimizer=optimizer)
        assert (restored is not None) == resume
        first = 1 if restored is None else restored.step + 1
        for step in range(first, STEPS + 1):
            losses.append(_train(model, optimizer, step))
            manager.step(step, model=model, optimizer=optimizer)
            if not resume and step == STEPS // 2 + 1:
                break
    return losses


@pytest.mark.parametrize("mode", ["thread", "process", "off"])
@pytest.mark.parametrize(
    ("backend", "before", "after"),
    [("cpu:gloo,cuda:nccl", 1, 1), ("gloo", 2, 1), ("gloo", 1, 2), ("gloo", 2, 2)],
)
def test_fsdp_goes_on_from_a_checkpoint(
    mode: str, backend: str, before: int, after: int, tmp_path: Path
) -> None:
    """On one GPU, which several ranks share with gloo alone; also on another number of ranks."""
    expected = run_ranks(1, _losses_at_once, str(tmp_path / "store"))[0]
    root = str(tmp_path / "run")
    first = run_ranks(before, _losses, before, backend, root, mode, False)
    then = run_ranks(after, _losses, after, backend, root, mode, True)
    assert first[0] == pytest.approx(expected[: len(first[0])], rel=1e-3)
    assert then[0] == pytest.approx(expected[-len(then[0]) :], rel=1e-3)
    if before == after == 1:
        assert then[0] == expected[-len(then[0]) :]  # bit for bit


@pytest.mark.parametrize("mode", ["thread", "off"])
def test_nccl_alone(mode: str, tmp_path: Path) -> None:
    """What the ranks tell each other goes over a group of its own."""
    for resume in (False, True):
        run_ranks(1, _losses, 1, "nccl", str(tmp_path / "run"), mode, resume)


def test_saves_by_another_process_need_a_group_of_the_cpu(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="cpu:gloo,cuda:nccl"):
        run_ranks(1, _losses, 1, "nccl", str(tmp_path / "run"), "process", False)


def _losses_at_once(rank: int, store: str) -> list[float]:
    _begin("gloo", rank, 1, store)
    model, optimizer = _sharded()
    return [_train(model, optimizer, step) for step in range(1, STEPS + 1)]


def test_a_compiled_model_is_that_which_was_compiled(tmp_path: Path) -> None:
    """The names are those of the model, whichever of both is saved or loaded."""
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    plain = _model()
    compiled: Any = torch.compile(_model())
    optimizer = torch.optim.AdamW(compiled.parameters())
    _train(compiled, optimizer, 1)
    with ckpt.CheckpointManager(tmp_path, save=1) as manager:
        manager.step(1, model=compiled, optimizer=optimizer)
    with ckpt.CheckpointManager(tmp_path, save=1) as manager:
        assert manager.restore(model=plain, optimizer=torch.optim.AdamW(plain.parameters())) is not None
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, compiled.state_dict()[f"_orig_mod.{name}"]), name
    again: Any = torch.compile(_model())
    with ckpt.CheckpointManager(tmp_path, save=1) as manager:
        assert manager.restore(model=again, optimizer=torch.optim.AdamW(again.parameters())) is not None
    inputs = torch.randn(8, 256, device="cuda")
    assert torch.equal(again(inputs), compiled(inputs))


def test_float8_tensors_of_torch(tmp_path: Path) -> None:
    state = {
        f"{dtype}": torch.randn(500, 300, device="cuda").to(dtype)
        for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
    }
    ckpt.async_save(state, tmp_path).result()
    loaded = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    ckpt.load(loaded, tmp_path)
    assert all(
        torch.equal(loaded[name].view(torch.uint8), tensor.view(torch.uint8))
        for name, tensor in state.items()
    )


def _quantized(seed: int) -> nn.Module:
    from torchao.quantization import Float8WeightOnlyConfig, quantize_

    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(256, 128), nn.Linear(128, 64)).cuda().bfloat16()
    quantize_(model, Float8WeightOnlyConfig())
    return model


@pytest.mark.parametrize("asynchronous", [False, True])
def test_float8_states_of_torchao(asynchronous: bool, tmp_path: Path) -> None:
    pytest.importorskip("torchao", exc_type=ImportError)
    model, other = _quantized(1), _quantized(2)
    inputs = torch.randn(16, 256, device="cuda", dtype=torch.bfloat16)
    expected = model(inputs)
    state: dict[str, Any] = {"model": model.state_dict()}
    if asynchronous:
        ckpt.async_save(state, tmp_path).result()
    else:
        ckpt.save(state, tmp_path)
    loaded: dict[str, Any] = {"model": other.state_dict()}
    ckpt.load(loaded, tmp_path)
    other.load_state_dict(loaded["model"])
    assert torch.equal(other(inputs), expected)


@pytest.mark.long  # they are compiled
@pytest.mark.parametrize("bits", [8, 4, 0])
def test_low_bit_optimizers_of_torchao(bits: int, tmp_path: Path) -> None:
    """8 and 4 bits, and float8 (0)."""
    optim = pytest.importorskip("torchao.optim", exc_type=ImportError)
    kind = {8: optim.AdamW8bit, 4: optim.AdamW4bit, 0: optim.AdamWFp8}[bits]

    def trained(steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(4)
        model = nn.Linear(256, 256).cuda()
        optimizer = kind(model.parameters(), lr=1e-2)
        for step in range(steps):
            _train(model, optimizer, step)
        return model, optimizer

    model, optimizer = trained(2)
    with ckpt.CheckpointManager(tmp_path, save=1) as manager:
        manager.step(2, model=model, optimizer=optimizer)
    other, others = trained(1)
    with ckpt.CheckpointManager(tmp_path, save=1) as manager:
        assert manager.restore(model=other, optimizer=others) is not None
    assert _train(other, others, 9) == _train(model, optimizer, 9)
    assert _train(other, others, 10) == _train(model, optimizer, 10)
