"""Memory that a GPU copies to by itself: what is asked of CUDA, by which a stand-in shows it (`tests/gpu` asks the real one)."""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import pytest
import torch

from ckpt.transfer import tensor_memory
from ckpt.transfer.tensor_memory import lock_pages


class Runtime:
    """Notes what is asked, and answers with error codes."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.refuses = self.keeps = 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.asked.append(("lock", address, nbytes))
        return self.refuses

    def cudaHostUnregister(self, address: int) -> int:
        self.asked.append(("unlock", address))
        return self.keeps


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    runtime = Runtime()
    monkeypatch.setattr(tensor_memory, "device_in_use", lambda: 3)
    monkeypatch.setattr(tensor_memory, "_is_refused", False)
    monkeypatch.setattr(tensor_memory, "_never_freed", [])

    def device(number: int) -> Any:
        runtime.asked.append(number)
        return contextlib.nullcontext()

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    return runtime


def test_pages_are_locked_until_the_block_is_gone(runtime: Runtime) -> None:
    """On the GPU that is in use, whichever thread lets go of them."""
    block = torch.empty(40 << 20, dtype=torch.uint8)
    address = block.data_ptr()
    lock_pages(block)
    assert runtime.asked == [3, ("lock", address, 40 << 20)]
    del block
    gc.collect()
    assert runtime.asked[2:] == [3, ("unlock", address)]


def test_a_refusal_is_told_once_and_is_no_error(
    runtime: Runtime, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime.refuses = 2
    for _ in range(3):
        lock_pages(torch.zeros(100, dtype=torch.uint8))
    assert [each[0] for each in runtime.asked if isinstance(each, tuple)] == ["lock"]
    assert [record.message for record in caplog.records] == [
        "copies from the GPU will be slower: CUDA does not lock 100 bytes (error 2)"
    ]


def test_an_error_while_memory_is_touched_is_none(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(tensor_memory, "share", refuse)
    lock_pages(torch.zeros(100, dtype=torch.uint8))
    assert runtime.asked == []


def test_memory_that_stays_locked_is_never_freed(runtime: Runtime) -> None:
    """Else CUDA would take new memory at its address for that which it knows."""
    runtime.keeps = 1
    block = torch.zeros(100, dtype=torch.uint8)
    address = block.data_ptr()
    lock_pages(block)
    del block
    gc.collect()
    assert [storage.data_ptr() for storage in tensor_memory._never_freed] == [address]


def test_without_a_gpu_in_use_nothing_is_asked(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_memory, "device_in_use", lambda: None)
    lock_pages(torch.zeros(100, dtype=torch.uint8))
    assert runtime.asked == []
