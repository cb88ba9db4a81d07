"""Save or load one state, as a trainer with one rank does."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks.contenders import Contender
from benchmarks.run.meter import Reading, metered
from benchmarks.run.servers import Endpoint
from benchmarks.run.states import WARM_UP
from benchmarks.run.task import Task

__all__ = ["counted", "figures_of", "load", "load_cold", "load_damaged", "prepare", "save"]


def save(task: Task) -> dict[str, float]:
    """Measure a save, after a small one that pays for imports and first connections."""
    contender = _warm(task)
    state = task.state.filled()
    return _measure(task, lambda: contender.save(state, task.place))


def load(task: Task) -> dict[str, float]:
    """Measure a load of `prepare`'s checkpoint, compared bit for bit once the clock has stopped."""
    contender = _warm(task)
    state = task.state.blank()
    figures = _measure(task, lambda: contender.load(state, task.place))
    task.state.verify(state)
    return figures


def load_cold(task: Task) -> dict[str, float]:
    """Measure a load of files of which the page cache has nothing, as after a restart."""
    contender = _warm(task)
    state = task.state.blank()
    _drop_caches(task.place)
    figures = _measure(task, lambda: contender.load(state, task.place))
    task.state.verify(state)
    return figures


def load_damaged(task: Task) -> dict[str, float]:
    """Flip one byte inside the largest object of a checkpoint; tell whether the load is refused."""
    contender = task.make_contender()
    contender.save(task.state.filled(), task.place)
    _flip(task)
    state = task.state.blank()
    try:
        contender.load(state, task.place)
    except Exception:
        return {"refused": 1.0}
    try:
        task.state.verify(state)
    except ValueError:
        return {"refused": 0.0}
    raise AssertionError("the byte that was flipped is none of a tensor's")


def prepare(task: Task) -> dict[str, float]:
    """Save a checkpoint that later processes load."""
    task.make_contender().save(task.state.filled(), task.place)
    return {}


def figures_of(reading: Reading, nbytes: int) -> dict[str, float]:
    """Return the figures that every measurement has; those per GB where there is data."""
    figures = {
        "wall_s": reading.wall_s,
        "cpu_s": reading.cpu_s,
        "peak_mb": reading.peak_bytes / 1e6,
    }
    if nbytes:
        figures["cpu_s_per_gb"] = reading.cpu_s / (nbytes / 1e9)
        figures["gb_per_s"] = nbytes / 1e9 / reading.wall_s
    return figures


@contextmanager
def counted(endpoint: Endpoint | None) -> Iterator[dict[str, float]]:
    """Yield the server's counts of the block, filled in at its end."""
    figures: dict[str, float] = {}
    if endpoint is None or not endpoint.counts:
        yield figures
        return
    endpoint.reset()
    yield figures
    report = endpoint.report()
    figures["requests"] = sum(report["requests"].values())
    figures["sent_mb"] = report["received_bytes"] / 1e6
    figures["read_bytes"] = report["sent_bytes"]
    data = (nbytes for key, nbytes in report["sent_by_key"].items() if key.endswith(".distcp"))
    figures["read_data_bytes"] = sum(data)
    figures["server_cpu_s"] = report["cpu_s"]


def _warm(task: Task) -> Contender:
    contender = task.make_contender()
    place = f"{task.place}-warm-{secrets.token_hex(4)}"
    state: dict[str, torch.Tensor] = WARM_UP.filled()
    contender.save(state, place)
    if task.options.get("checksums", True):  # without them a load would find its metadata damaged
        contender.load(state, place)
        WARM_UP.verify(state)
    if task.endpoint is None:
        os.sync()  # what others left to be written is not what is measured
    return contender


def _measure(task: Task, work: Callable[[], None]) -> dict[str, float]:
    with counted(task.endpoint) as counts, metered() as reading:
        work()
    return {**figures_of(reading, task.state.nbytes), **counts}


def _drop_caches(place: str) -> None:
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:  # only root may; the files at least
        for path in Path(place).rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _inside(size_bytes: int) -> int:
    """Choose a byte of a tensor: in the middle one may end, and another begin."""
    return size_bytes * 5 // 11


def _flip(task: Task) -> None:
    if task.endpoint is None:
        largest = max(
            (path for path in Path(task.place).rglob("*") if path.is_file()),
            key=lambda path: path.stat().st_size,
        )
        with largest.open("r+b") as file:
            file.seek(_inside(largest.stat().st_size))
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 1]))
        return
    bucket, _, prefix = task.place.removeprefix("s3://").partition("/")
    connection = task.endpoint.connect()
    try:

        def ask(method: str, path: str, body: bytes | None = None) -> bytes:
            connection.request(method, path, body)
            return connection.getresponse().read()

        listing = ask("GET", f"/{bucket}?prefix={prefix}/").decode()
        found = re.findall(r"<Key>(.*?)</Key>.*?<Size>(\d+)</Size>", listing)
        key = max(found, key=lambda each: int(each[1]))[0]
        data = bytearray(ask("GET", f"/{bucket}/{key}"))
        data[_inside(len(data))] ^= 1
        ask("PUT", f"/{bucket}/{key}", bytes(data))
    finally:
        connection.close()
