"""Measure the data loader: tokens per second of one worker on one core, and a soak that watches
memory.

python -m benchmarks.studies.data_loader
python -m benchmarks.studies.data_loader --soak-s 600
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

SEQUENCE_LENGTH, BATCH_SIZE, SHARDS = 4096, 8, 96
MEAN_DOCUMENT_TOKENS = 600
WORLD_SIZES = (4, 6, 3, 1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="per measurement")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--soak-s", type=float, default=0.0, help="soak this long instead of measuring")
    parser.add_argument("--soak-tokens-per-s", type=float, default=300_000)
    parser.add_argument("--output", type=Path, help="write the figures here (JSON)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.soak_s:
            # Too small a cache, emptied and filled all the time, and few documents, read many times.
            sources = make_sources(Path(folder), documents=10_000, cache_bytes=4 << 20)
            figures: Any = soak(sources, folder, options.soak_s, options.soak_tokens_per_s)
        else:
            sources = make_sources(Path(folder), documents=40_000, cache_bytes=256 << 20)
            figures = throughput(sources, options.seconds, options.rounds)
    if options.output:
        options.output.write_text(json.dumps(figures, indent=1) + "\n")


def make_sources(folder: Path, *, documents: int, cache_bytes: int) -> dict[str, Any]:
    """Write the same documents to a token file and a Parquet file."""
    import pyarrow
    import pyarrow.parquet

    from ckpt.trainer_integration.parquet_files import ParquetFiles
    from ckpt.trainer_integration.token_files import TokenFiles, write_token_file

    random = np.random.default_rng(0)
    lengths = random.exponential(MEAN_DOCUMENT_TOKENS, documents).astype(int) + 1
    written = [random.integers(1, 50_000, length).astype(np.uint16) for length in lengths]
    write_token_file(folder / "tokens.bin", written)
    table = pyarrow.table({"tokens": pyarrow.array(written, pyarrow.list_(pyarrow.uint16()))})
    pyarrow.parquet.write_table(table, folder / "tokens.parquet", row_group_size=documents // SHARDS)
    return {
        "token file": TokenFiles([folder / "tokens.bin"]),
        "parquet": ParquetFiles(
            [folder / "tokens.parquet"], "tokens", dtype=np.uint16, cache_bytes=cache_bytes
        ),
    }


def throughput(sources: dict[str, Any], seconds: float, rounds: int) -> list[dict[str, Any]]:
    """Measure loader and worker on one core, so that the training process's share of a batch is
    paid for too.
    """
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    figures = []
    for (name, source), workers in itertools.product(sources.items(), (0, 1)):
        rates = [rate(source, workers, seconds) for _ in range(rounds)]
        figures.append({"source": name, "workers": workers, "tokens_per_s": rates})
        print(
            f"{name:>10}, {workers} worker(s): median {statistics.median(rates) / 1e6:.2f} M tokens/s on one core "
            f"({min(rates) / 1e6:.2f} to {max(rates) / 1e6:.2f} in {rounds} rounds)"
        )
    return figures


def rate(source: Any, workers: int, seconds: float) -> float:
    batches = iter(loader_of(source, workers))
    next(batches)
    tokens, started_s = 0, time.monotonic()
    while time.monotonic() < started_s + seconds:
        tokens += next(batches).numel()
    return tokens / (time.monotonic() - started_s)


def loader_of(source: Any, workers: int, *, rank: int = 0, world_size: int = 1) -> Any:
    from ckpt.trainer_integration.dataloader import RescalableLoader
    from ckpt.trainer_integration.dataset import ShardedDataset

    dataset = ShardedDataset(
        source,
        sequence_length=SEQUENCE_LENGTH,
        shards=SHARDS,
        eos_token=0,
        rank=rank,
        world_size=world_size,
    )
    return RescalableLoader(dataset, batch_size=BATCH_SIZE, num_workers=workers)


def soak(sources: dict[str, Any], folder: str, seconds: float, tokens_per_s: float) -> dict[str, Any]:
    """Iterate over both sources with two workers that live throughout; every few seconds the state
    is saved, and loaded on another number of ranks, which read on from there.
    """
    import ckpt

    loader = loader_of(sources, 2)
    sizes = itertools.cycle(WORLD_SIZES)
    started_s = reported_s = time.monotonic()
    tokens, saves, notes = 0, 0, []
    for batch in loader:
        tokens += batch.numel()
        now_s = time.monotonic()
        if now_s - reported_s >= 10:
            reported_s = now_s
            ckpt.save({"loader": loader}, f"{folder}/state", no_dist=True)
            rescale(sources, folder, next(sizes))
            saves += 1
            notes.append({"at_s": round(now_s - started_s), "epoch": loader.epoch, "processes": memory()})
            print(json.dumps(notes[-1]), flush=True)
        if now_s - started_s >= seconds:
            break
        time.sleep(max(0.0, started_s + tokens / tokens_per_s - time.monotonic()))
    figures = {"tokens": tokens, "epochs": loader.epoch, "saves": saves, **growth(notes), "notes": notes}
    print(json.dumps({name: value for name, value in figures.items() if name != "notes"}))
    return figures


def rescale(sources: dict[str, Any], folder: str, world_size: int) -> None:
    import ckpt

    for rank in range(world_size):
        loader = loader_of(sources, 0, rank=rank, world_size=world_size)
        ckpt.load({"loader": loader}, f"{folder}/state", no_dist=True)
        next(iter(loader))


def memory() -> dict[str, dict[str, float]]:
    """Measure private memory in MiB, without mapped files, and open files of this process and its
    workers.
    """
    processes = {"main": status(os.getpid())}
    for number, pid in enumerate(children(os.getpid())):
        processes[f"worker {number}"] = status(pid)
    return processes


def status(pid: int) -> dict[str, float]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return {
        "private_mib": int(fields["RssAnon"].split()[0]) / 1024,
        "files": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": int(fields["Threads"]),
    }


def children(pid: int) -> Iterator[int]:
    for task in sorted(Path(f"/proc/{pid}/task").iterdir()):
        yield from map(int, (task / "children").read_text().split())


def growth(notes: list[dict[str, Any]]) -> dict[str, Any]:
    """Compare the middle fifth of the soak, when caches are long full, with its last: a leak shows
    there.
    """
    fifth = max(1, len(notes) // 5)
    grown = {}
    for name in notes[-1]["processes"]:
        for figure in ("private_mib", "files", "threads"):
            middle, end = (
                statistics.median(note["processes"][name][figure] for note in part)
                for part in (notes[2 * fifth : 3 * fifth] or notes, notes[-fifth:])
            )
            grown[f"{name}, {figure}"] = [round(middle, 1), round(end, 1)]
    return {"middle_and_end": grown}


if __name__ == "__main__":
    main()
