"""States on a GPU: saved, copied and loaded bit for bit, without memory of the GPU, and while it goes on computing."""

from __future__ import annotations

import ctypes
import gc
import os
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.states import bits, digest, plain_state

import ckpt
from ckpt.transfer import tensor_memory
from ckpt.transfer.tensor_memory import lock_pages, memory_of
from ckpt.writing.stager import space_for

cuda: Any = torch.cuda  # much of it has no types
pytestmark = pytest.mark.skipif(torch.cuda.device_count() == 0, reason="there is no GPU here")


def on_device(value: Any) -> Any:
    """Move a state to the GPU, with its strides."""
    if isinstance(value, dict):
        return {key: on_device(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(on_device, value))
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.is_quantized:
        return value
    return value.cuda()


def emptied_on_device(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: emptied_on_device(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(emptied_on_device, value))
    if not isinstance(value, torch.Tensor):
        return None
    return (
        torch.full((value.numel() * value.element_size(),), 0x5A, dtype=torch.uint8)
        .cuda()
        .view(value.dtype)
        .view(value.shape)
    )


def many(count: int = 40, mib: int = 8) -> dict[str, Any]:
    generator = torch.Generator("cuda").manual_seed(3)
    return {f"t{n}": torch.rand(mib << 18, device="cuda", generator=generator) for n in range(count)}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_all_that_dcp_saves(asynchronous: bool, tmp_path: Path) -> None:
    """All dtypes, views, strides and objects, also into the CPU's memory, and by stock PyTorch in both directions."""
    state = on_device(plain_state())
    if asynchronous:
        ckpt.async_save(state, tmp_path / "ours").result()
    else:
        ckpt.save(state, tmp_path / "ours")
    expected = digest(state)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=tmp_path / "stock")
        loaded = emptied_on_device(state)
        dcp.load(loaded, checkpoint_id=tmp_path / "ours")
        assert digest(loaded) == expected
    for place in ("ours", "stock"):
        loaded = emptied_on_device(state)
        ckpt.load(loaded, tmp_path / place)
        assert digest(loaded) == expected
        on_cpu = {"large": torch.zeros(state["large"].shape)}
        ckpt.load(on_cpu, tmp_path / place)
        assert bits(on_cpu["large"]) == bits(state["large"])


def test_a_copy_is_of_the_moment_of_the_call(tmp_path: Path) -> None:
    """Kernels that were queued before it are waited for; those after it change nothing of it."""
    state, saves = many(), []
    for step in range(3):
        for tensor in state.values():
            cuda._sleep(1_000_000)
            tensor.add_(1)
        expected = {name: tensor.clone() for name, tensor in state.items()}
        saves.append((ckpt.async_save(state, tmp_path / f"step-{step}"), expected))
        for tensor in state.values():
            tensor.mul_(-3)
        saves[-1][0].result()
    for step, (_, expected) in enumerate(saves):
        loaded = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        ckpt.load(loaded, tmp_path / f"step-{step}")
        assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())


def test_a_copy_waits_for_the_stream_of_the_caller(tmp_path: Path) -> None:
    state = many(10)
    stream = cuda.Stream()
    with torch.cuda.stream(stream):
        stream.wait_stream(torch.cuda.default_stream())
        for tensor in state.values():
            cuda._sleep(3_000_000)
            tensor.fill_(7)
        future = ckpt.async_save(state, tmp_path)
        for tensor in state.values():
            tensor.fill_(8)
    future.result()
    stream.synchronize()
    loaded = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    ckpt.load(loaded, tmp_path)
    assert all(bool((tensor == 7).all()) for tensor in loaded.values())


@pytest.mark.parametrize("has_gaps", [False, True])
@pytest.mark.parametrize("way", ["save", "async_save", "load"])
def test_no_memory_of_the_gpu_beyond_the_state(way: str, has_gaps: bool, tmp_path: Path) -> None:
    """But for a little where a tensor has gaps."""
    state = many()
    if has_gaps:
        state["turned"] = torch.rand(16_000, 16_000, device="cuda").t()
    ckpt.save(state, tmp_path / "first")
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    if way == "save":
        ckpt.save(state, tmp_path / "second")
    elif way == "async_save":
        ckpt.async_save(state, tmp_path / "second").result()
    else:
        ckpt.load(state, tmp_path / "first")
    used = torch.cuda.max_memory_allocated() - before
    assert used <= (256 << 20 if has_gaps else 0)  # of the gigabyte of the tensor that has gaps


def test_pages_are_locked_as_long_as_they_are_lent(tmp_path: Path) -> None:
    cuda.init()
    stager: Any = ckpt.Stager()
    state = many(4)
    stager.provide(space_for(state))
    stager._memory.ahead._making.block.result(60)
    stager.lock_provided()
    assert stager._memory.ahead._making.block.result().is_pinned()
    staged = stager.stage(state)
    assert all(tensor.is_pinned() for tensor in staged.values())
    address = staged["t0"].data_ptr()
    stager.close()
    del staged
    gc.collect()
    assert stager._memory._in_use == 1  # until it is taken back
    stager.close()
    assert not _is_locked(address)


def _is_locked(address: int) -> bool:
    try:
        return torch.frombuffer((ctypes.c_char * 64).from_address(address), dtype=torch.uint8).is_pinned()
    except RuntimeError:
        return False


def test_memory_that_cannot_be_locked_is_used_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of it is locked already: CUDA refuses to lock it once more. The next call of torch raises nothing."""
    monkeypatch.setattr(tensor_memory, "_is_refused", False)  # and as it was before, after the test
    source = torch.full((64 << 20,), 5, dtype=torch.uint8, device="cuda")
    block = torch.zeros(64 << 20, dtype=torch.uint8)
    inner = block[16 << 20 : 32 << 20]
    lock_pages(inner)
    assert _is_locked(inner.data_ptr())
    lock_pages(block[1 << 20 :])
    torch.cuda.synchronize()
    memory_of(block)[:16] = bytes(16)
    block[: 1 << 20].copy_(source[: 1 << 20])
    torch.cuda.synchronize()
    assert block[0] == 5


def test_small_tensors_by_the_thousand(tmp_path: Path) -> None:
    state = {f"t{n}": torch.full((1000,), float(n), device="cuda") for n in range(5000)}
    ckpt.async_save(state, tmp_path / "async").result()
    ckpt.save(state, tmp_path / "sync")
    for place in ("async", "sync"):
        loaded = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        ckpt.load(loaded, tmp_path / place)
        assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())


def test_a_forked_child_gets_none_of_the_locked_memory(tmp_path: Path) -> None:
    """Each fork would copy it. The parent goes on with it, and the child makes copies in memory of its own."""
    stager, state = ckpt.Stager(), many(64, mib=16)
    stager.stage(state)
    began_s = time.monotonic()
    child = os.fork()
    if not child:
        os._exit(int(not torch.equal(stager.stage({"t": torch.ones(100)})["t"], torch.ones(100))))
    assert time.monotonic() - began_s < 5
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    staged = stager.stage(state)
    assert all(torch.equal(staged[name].cuda(), tensor) for name, tensor in state.items())
