"""Lend scratch memory under one budget, for bytes that must be copied on their way."""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from ckpt.errors import ConfigurationError, StorageUnavailable

DEFAULT_MEMORY_BUDGET_BYTES = 256 << 20
MIN_MEMORY_BUDGET_BYTES = 128 << 20
"""Room for what is copied at once: two parts, or four reads."""

_UNIT_BYTES = 1 << 20
_ALIGNMENT_BYTES = 64
_WAIT_TIMEOUT_S = 600.0


def fresh_memory(nbytes: int) -> npt.NDArray[np.uint8]:
    """Make an array of bytes, aligned for any element, its contents arbitrary.

    numpy asks the system for huge pages: a copy into such memory takes 1.5 times one into memory that was used
    before; into small pages five times.
    """
    array = np.empty(nbytes + _ALIGNMENT_BYTES, dtype=np.uint8)
    begin = -array.ctypes.data % _ALIGNMENT_BYTES
    return array[begin : begin + nbytes]


class StagingPool:
    """Hands out buffers and takes them back; all of them together never exceed the budget.

    Buffers are kept for reuse: fresh memory costs more in page faults than the copy into it. Whoever
    takes a buffer must not take a second before giving it back, or takers could wait for each other.
    """

    def __init__(self, budget_bytes: int = DEFAULT_MEMORY_BUDGET_BYTES, *, for_device: bool = False) -> None:
        """`for_device`: a GPU that this process uses can copy to and from the buffers by itself."""
        is_number = isinstance(budget_bytes, int | float) and not isinstance(budget_bytes, bool)
        if not is_number or not MIN_MEMORY_BUDGET_BYTES <= budget_bytes < math.inf:
            raise ConfigurationError(
                f"memory_budget_bytes must be at least {MIN_MEMORY_BUDGET_BYTES} (128 MiB), not {budget_bytes!r:.100}"
            )
        self.budget_bytes = int(budget_bytes)
        self._for_device = for_device
        self._free: list[memoryview] = []
        self._allocated_bytes = 0
        self._changed = threading.Condition()

    def __reduce__(self) -> tuple[Callable[[int], StagingPool], tuple[int]]:
        return functools.partial(StagingPool, for_device=self._for_device), (self.budget_bytes,)

    @contextlib.contextmanager
    def take(self, nbytes: int) -> Iterator[memoryview]:
        """Lend `nbytes` of memory, aligned for any element, its contents arbitrary.

        Raises ConfigurationError for more than the whole budget, StorageUnavailable if nothing was
        given back for ten minutes: the transfers that hold it are stuck.
        """
        if nbytes == 0:
            yield memoryview(bytearray())
            return
        buffer = self._acquire(-(-nbytes // _UNIT_BYTES) * _UNIT_BYTES)
        try:
            yield buffer[:nbytes]
        finally:
            with self._changed:
                self._free.append(buffer)
                self._changed.notify()

    def _acquire(self, nbytes: int) -> memoryview:
        if nbytes > self.budget_bytes:
            raise ConfigurationError(
                f"{nbytes} bytes have to be copied at once, over memory_budget_bytes={self.budget_bytes}; raise it"
            )
        deadline = time.monotonic() + _WAIT_TIMEOUT_S
        with self._changed:
            while True:
                fitting = [buffer for buffer in self._free if buffer.nbytes >= nbytes]
                if fitting:
                    best = min(fitting, key=len)
                    self._free = [buffer for buffer in self._free if buffer is not best]
                    return best
                # Too small ones make room for one that fits.
                while self._free and self._allocated_bytes + nbytes > self.budget_bytes:
                    self._allocated_bytes -= self._free.pop().nbytes
                if self._allocated_bytes + nbytes <= self.budget_bytes:
                    self._allocated_bytes += nbytes
                    break
                if not self._changed.wait(deadline - time.monotonic()):
                    raise StorageUnavailable(
                        f"waited {_WAIT_TIMEOUT_S:g} s for {nbytes} bytes of staging memory; "
                        "the transfers that hold it make no progress"
                    )
        try:
            return self._allocate(nbytes)
        except BaseException:
            with self._changed:
                self._allocated_bytes -= nbytes
                self._changed.notify()
            raise

    def _allocate(self, nbytes: int) -> memoryview:
        if self._for_device:
            import torch

            from ckpt.transfer.tensor_memory import memory_of

            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                return memory_of(torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True))
        return fresh_memory(nbytes).data
