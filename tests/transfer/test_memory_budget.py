"""Memory beyond the tensors stays under the budget, on save and on load, for a checkpoint of any size."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.ranks import run_ranks
from support.servers import S3Server

import ckpt
from ckpt.backends.base import MIB
from ckpt.errors import ConfigurationError, SaveFailed
from ckpt.transfer.buffer_pool import StagingPool

BUDGET = 128 * MIB
SLACK = 40 * MIB  # threads' stacks, connections, Python objects, the allocator's own


@contextlib.contextmanager
def peak_over_start() -> Iterator[list[int]]:
    """The peak resident bytes above those at the start, once the block has ended."""
    result: list[int] = []
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    start = _status("VmRSS")
    yield result
    result.append(_status("VmHWM") - start)


def _status(name: str) -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)]
    return int(line.split()[1]) * 1024


def state(kind: str) -> dict[str, Any]:
    """0.6 GB (small: 0.3 GB): as it lies in memory, or all of it to be copied on its way."""
    count = 3 if kind == "small" else 6
    if kind == "contiguous":
        return {f"t{i}": torch.full((25 * MIB,), float(i)) for i in range(6)}
    return {f"t{i}": torch.full((5 * MIB, 10), float(i))[:, ::2].t() for i in range(count)}


@pytest.mark.parametrize(
    ("where", "kind"),
    [
        ("posix", "small"),
        pytest.param("posix", "contiguous", marks=pytest.mark.long),
        pytest.param("posix", "strided", marks=pytest.mark.long),
        pytest.param("s3", "contiguous", marks=pytest.mark.long),
        pytest.param("s3", "strided", marks=pytest.mark.long),
    ],
)
def test_save_and_load(where: str, kind: str, tmp_path: Path, s3: S3Server) -> None:
    place = (str(tmp_path), {}) if where == "posix" else (f"s3://{s3.new_bucket()}/c", s3.options)
    for step, peak in run_ranks(1, _peaks, place, kind)[0].items():
        assert peak < BUDGET + SLACK, f"{step}: {peak / MIB:.0f} MiB"


@pytest.mark.long
def test_load_of_a_stock_checkpoint(tmp_path: Path) -> None:
    peaks = run_ranks(1, _stock_peaks, str(tmp_path))[0]
    assert peaks < BUDGET + SLACK, f"{peaks / MIB:.0f} MiB"


def _peaks(rank: int, place: tuple[str, dict[str, Any]], kind: str) -> dict[str, int]:
    url, options = place
    _warm_up(place)
    saved = state(kind)
    with peak_over_start() as save_peak:
        ckpt.save(saved, url, storage_options=options, memory_budget_bytes=BUDGET)
    for tensor in saved.values():
        tensor.zero_()
    with peak_over_start() as load_peak:
        ckpt.load(saved, url, storage_options=options, memory_budget_bytes=BUDGET)
    assert all(bool((tensor == float(name[1:])).all()) for name, tensor in saved.items())
    return {"save": save_peak[0], "load": load_peak[0]}


def _stock_peaks(rank: int, url: str) -> int:
    _warm_up((f"{url}/ours", {}))
    dcp.save({"t": torch.zeros(MIB)}, storage_writer=dcp.FileSystemWriter(f"{url}/warm"))
    ckpt.load({"t": torch.zeros(MIB)}, f"{url}/warm")
    saved = state("contiguous")
    dcp.save(saved, storage_writer=dcp.FileSystemWriter(f"{url}/c"))
    for tensor in saved.values():
        tensor.zero_()
    with peak_over_start() as peak:
        ckpt.load(saved, f"{url}/c", memory_budget_bytes=BUDGET)
    assert all(bool((tensor == float(name[1:])).all()) for name, tensor in saved.items())
    return peak[0]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # torch deprecates quantized tensors
def test_tensors_that_are_pickled_leave_in_batches(tmp_path: Path) -> None:
    peak = run_ranks(1, _quantized_peak, str(tmp_path))[0]
    assert peak < BUDGET + SLACK, f"{peak / MIB:.0f} MiB"


def _quantized_peak(rank: int, url: str) -> int:
    _warm_up((f"{url}/warm", {}))
    saved = {f"q{i}": torch.quantize_per_tensor(torch.ones(10 * MIB), 0.1, 0, torch.qint8) for i in range(20)}
    with peak_over_start() as peak:
        ckpt.save(saved, f"{url}/c", memory_budget_bytes=BUDGET)
    return peak[0]


def _warm_up(place: tuple[str, dict[str, Any]]) -> None:
    """Imports, connections and code pages are not what is measured."""
    small = {"t": torch.zeros(5, 8)[:, ::2], "large": torch.zeros(MIB)}
    ckpt.save(small, f"{place[0]}-warm", storage_options=place[1], memory_budget_bytes=BUDGET)
    ckpt.load(small, f"{place[0]}-warm", storage_options=place[1], memory_budget_bytes=BUDGET)


def test_many_large_objects_leave_in_batches(tmp_path: Path) -> None:
    state = {f"o{i}": bytes([i]) * (10 * MIB) for i in range(8)}
    ckpt.save(state, tmp_path)
    assert len(list(tmp_path.rglob("*.distcp"))) >= 3
    loaded: dict[str, Any] = dict.fromkeys(state, b"")
    ckpt.load(loaded, tmp_path)
    assert loaded == state


def test_pool_reuses_and_never_exceeds_its_budget() -> None:
    pool = StagingPool(BUDGET)
    held = 0
    peak = 0
    lock = threading.Lock()

    def work(number: int) -> None:
        nonlocal held, peak
        for i in range(50):
            size = ((number * 7 + i * 13) % 60 + 1) * MIB - 17
            with pool.take(size) as buffer:
                assert buffer.nbytes == size
                with lock:
                    held += size
                    peak = max(peak, held)
                buffer[0] = 1
                with lock:
                    held -= size

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert 0 < peak <= BUDGET
    assert pool._allocated_bytes <= BUDGET


def test_pool_gives_up_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt.transfer.buffer_pool._WAIT_TIMEOUT_S", 0.2)
    pool = StagingPool(BUDGET)
    with (
        pool.take(80 * MIB),
        pytest.raises(ckpt.errors.StorageUnavailable, match="make no progress"),
        pool.take(80 * MIB),
    ):
        pass
    with pytest.raises(ConfigurationError, match="raise it"), pool.take(129 * MIB):
        pass


@pytest.mark.parametrize("budget", [0, -1, 127 * MIB])
def test_budget_too_small(tmp_path: Path, budget: int) -> None:
    for kind in (ckpt.CheckpointWriter, ckpt.CheckpointReader):
        with pytest.raises(ConfigurationError, match="memory_budget_bytes must be at least"):
            kind(tmp_path, memory_budget_bytes=budget)


def test_parts_larger_than_the_budget(s3: S3Server) -> None:
    options = {**s3.options, "part_size_bytes": 160 * MIB}
    with pytest.raises(SaveFailed, match="over memory_budget_bytes=134217728; raise it"):
        ckpt.save(
            {"t": torch.zeros(50 * MIB, 2)[:, 0]},
            f"s3://{s3.new_bucket()}/c",
            storage_options=options,
            memory_budget_bytes=BUDGET,
        )
