"""Measure the fast checksums that S3 knows, on bytes in the cache and in memory: `python -m benchmarks.studies.checksums`.

Which one blocks have is told in docs/decisions/070-one-checksum.md.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable

import numpy as np
from awscrt import checksums
from rich.console import Console
from rich.table import Table

_TOTAL_BYTES = 1 << 30
_BLOCKS = {"in the cache, 256 KiB": (256 << 10, True), "in memory, 256 KiB": (256 << 10, False), "in memory, 4 MiB": (4 << 20, False)}  # fmt: skip
_KINDS: dict[str, Callable[[memoryview], int]] = {
    "CRC64NVME": checksums.crc64nvme,
    "CRC32C": checksums.crc32c,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.studies.checksums", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    memory = memoryview(np.random.default_rng(0).integers(0, 256, _TOTAL_BYTES, dtype=np.uint8).data)
    found: dict[tuple[str, int, str], list[float]] = {}
    for _ in range(rounds):
        for where, (block_bytes, is_cached) in _BLOCKS.items():
            for threads in (1, 2):
                for kind, function in _KINDS.items():
                    rate = _gb_per_s(function, memory, block_bytes, threads, is_cached=is_cached)
                    found.setdefault((where, threads, kind), []).append(rate)
    table = Table("GB/s, medians", "threads", *_KINDS)
    for where in _BLOCKS:
        for threads in (1, 2):
            rates = (statistics.median(found[where, threads, kind]) for kind in _KINDS)
            table.add_row(where, str(threads), *(f"{rate:.1f}" for rate in rates))
    Console().print(table)


def _gb_per_s(
    function: Callable[[memoryview], int],
    memory: memoryview,
    block_bytes: int,
    threads: int,
    *,
    is_cached: bool,
) -> float:
    """Check as many bytes as `memory` has; with `is_cached` each thread one block again and again."""
    share = memory.nbytes // threads

    def work(number: int) -> None:
        for position in range(number * share, (number + 1) * share, block_bytes):
            start = number * share if is_cached else position
            function(memory[start : start + block_bytes])

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    began_s = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return memory.nbytes / 1e9 / (time.perf_counter() - began_s)


if __name__ == "__main__":
    main()
