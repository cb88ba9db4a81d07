"""Measure what a certificate costs a load: `python -m benchmarks.studies.certificate /tmp/place --mib 1024`.

Loads of one checkpoint take turns in one process: alone, recorded, and with a certificate, into memory that was used before
and into fresh memory; and the state is certified by reading again. Printed are medians, in wall and in CPU time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

import ckpt
from ckpt.reading.delivered import DeliveredDigests
from ckpt.reading.reader import CheckpointReader
from ckpt.tools.certificate import certificate
from ckpt.tools.certify import certify

State = dict[str, torch.Tensor]


class Study:
    """The calls that are measured, on one checkpoint."""

    def __init__(self, place: str, mib: int, tensors: int, threads: int) -> None:
        elements = (mib << 20) // tensors // 4
        self._state = {f"w{number}": torch.randn(elements) for number in range(tensors)}
        self._used = {name: torch.zeros_like(tensor) for name, tensor in self._state.items()}
        self._place, self._threads = place, threads
        ckpt.save(self._state, place, no_dist=True)

    def calls(self) -> dict[str, Callable[[], None]]:
        """Return the calls by name."""
        return {
            "load": lambda: self._load(self._used),
            "recorded": lambda: self._load(self._used, DeliveredDigests()),
            "certified": lambda: self._certified(self._used),
            "fresh load": lambda: self._load(self._fresh()),
            "fresh certified": lambda: self._certified(self._fresh()),
            "certify": self._certify,
        }

    def drop_pages(self) -> None:
        """Let the system forget the files, so that they come from the disk."""
        for path in Path(self._place).rglob("*"):
            if path.is_file():
                file = os.open(path, os.O_RDONLY)
                os.fsync(file)
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(file)

    def _fresh(self) -> State:
        return {name: torch.empty_like(tensor) for name, tensor in self._state.items()}

    def _load(self, state: State, delivered: DeliveredDigests | None = None) -> None:
        reader = CheckpointReader(self._place, threads=self._threads)
        if delivered is not None:
            reader.record_delivered(delivered)
        dcp.load(state, storage_reader=reader, no_dist=True)
        reader.close()

    def _certified(self, state: State) -> None:
        delivered = DeliveredDigests()
        self._load(state, delivered)
        assert certificate(state, delivered).is_exact

    def _certify(self) -> None:
        assert certify(self._used, self._place, threads=self._threads, no_dist=True).is_exact


def main() -> None:
    """Print the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("place")
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--tensors", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--cold", action="store_true", help="drop the files from the page cache before each call"
    )
    arguments = parser.parse_args()
    study = Study(arguments.place, arguments.mib, arguments.tensors, arguments.threads)
    calls = list(study.calls().items())
    times: dict[str, list[tuple[float, float]]] = {name: [] for name, _ in calls}
    for turn in range(arguments.rounds + 1):
        begin = turn % len(calls)
        for name, call in calls[begin:] + calls[:begin]:
            if arguments.cold:
                study.drop_pages()
            wall_s, cpu_s = time.perf_counter(), time.process_time()
            call()
            if turn:  # the first warms up
                times[name].append((time.perf_counter() - wall_s, time.process_time() - cpu_s))
    for name, measured in times.items():
        wall_s, cpu_s = (statistics.median(each) for each in zip(*measured, strict=True))
        print(f"{name:16} {wall_s * 1000:8.1f} ms, CPU {cpu_s * 1000:8.1f} ms")


if __name__ == "__main__":
    main()
