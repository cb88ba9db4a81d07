"""Compare data in S3, 25 ms a request away on the loopback, with local files; then stop the server for 20 s.

PYTHONPATH=tests python -m benchmarks.studies.data_from_stores
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

DELAY_S = 0.025
BATCHES = 20


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--documents", type=int, default=40_000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--stop-s", type=float, default=20.0, help="how long the server is stopped; 0: not")
    parser.add_argument("--output", type=Path, help="write the figures here (JSON)")
    options = parser.parse_args()
    from support.proxy import fault_proxy
    from support.servers import moto_server

    with tempfile.TemporaryDirectory() as folder, moto_server() as server, fault_proxy(server) as proxy:
        proxy.rule = lambda call: "delay"
        proxy.delay_s = DELAY_S
        storage_options = {**server.options, "endpoint_url": proxy.options["endpoint_url"]}
        local, stored = sources(Path(folder), server, storage_options, options.documents)
        figures: dict[str, Any] = {
            name: compared(local[name], stored[name], options.workers, options.rounds, Path(folder) / name)
            for name in local
        }
        if options.stop_s:
            figures["stop"] = stopped(stored["token file"], server.process, options.stop_s)
        print(json.dumps(figures))
    if options.output:
        options.output.write_text(json.dumps(figures, indent=1) + "\n")


def sources(
    folder: Path, server: Any, storage_options: dict[str, Any], documents: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Write the data of the study of the loader, and upload them; return the local sources and how to make the others."""
    import functools

    import numpy as np

    from benchmarks.studies.data_loader import make_sources
    from ckpt.trainer_integration.parquet_files import ParquetFiles
    from ckpt.trainer_integration.token_files import TokenFiles

    local = make_sources(folder, documents=documents, cache_bytes=256 << 20)
    bucket = server.new_bucket()
    for path in folder.iterdir():
        server.client().upload_file(str(path), bucket, path.name)
    url = f"s3://{bucket}/tokens"
    token_files = functools.partial(TokenFiles, [f"{url}.bin"], storage_options=storage_options)
    parquet = functools.partial(
        ParquetFiles, [f"{url}.parquet"], "tokens", dtype=np.uint16, storage_options=storage_options
    )
    return local, {"token file": token_files, "parquet": parquet}


def compared(local: Any, make: Any, workers: int, rounds: int, cache: Path) -> dict[str, Any]:
    """Read in turns from the local file and from S3, after one epoch of each; the bound of the cache holds the data twice."""
    from benchmarks.studies.data_loader import loader_of

    limit_bytes = 256 << 20
    source = make(disk_cache=cache, disk_cache_bytes=limit_bytes)
    pair = [loader_of(each, workers) for each in (local, source)]
    first_s = []
    batches = []
    for loader in pair:
        started_s = time.monotonic()
        batches.append(iter(loader))
        next(batches[-1])
        first_s.append(time.monotonic() - started_s)
        while not loader.epoch:
            next(batches[-1])
    rates: list[list[float]] = [[], []]
    for _, number in itertools.product(range(rounds), range(2)):
        started_s = time.monotonic()
        tokens = sum(batch.numel() for batch in itertools.islice(batches[number], BATCHES))
        rates[number].append(tokens / (time.monotonic() - started_s))
    ratios = [remote / near for near, remote in zip(*rates, strict=True)]
    figures = {
        "first_batch_s": first_s[1],
        "local_tokens_per_s": statistics.median(rates[0]),
        "s3_tokens_per_s": statistics.median(rates[1]),
        "ratio": statistics.median(ratios),
        "disk_bytes": sum(path.stat().st_blocks * 512 for path in cache.iterdir()),
        "limit_bytes": limit_bytes,
    }
    print(cache.name, figures, flush=True)
    return figures


def stopped(make: Any, server: Any, seconds: float) -> dict[str, float]:
    """Read an epoch without a disk cache while the server is stopped once; return the longest wait for a batch."""
    from benchmarks.studies.data_loader import loader_of

    # Little memory: each document is a request, so that some are always in flight.
    loader = loader_of(make(cache_bytes=4 << 20), 0)
    waits = []
    batches = iter(loader)
    next(batches)
    os.kill(server.pid, signal.SIGSTOP)
    threading.Timer(seconds, os.kill, (server.pid, signal.SIGCONT)).start()
    for _ in range(BATCHES):
        started_s = time.monotonic()
        next(batches)
        waits.append(time.monotonic() - started_s)
    figures = {"stopped_s": seconds, "longest_wait_s": max(waits), "other_waits_s": statistics.median(waits)}
    print(figures, flush=True)
    return figures


if __name__ == "__main__":
    main()
