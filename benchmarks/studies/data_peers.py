"""Compare the data loader with Grain, mosaicml-streaming and torchdata: the same tokens, each in its own format.

    make bench-data

The tokens are documents of random lengths. This library reads them from a token file, and cuts sequences as it goes. The
others read sequences that were cut before: Grain from ArrayRecord, mosaicml-streaming from MDS, and torchdata's
`StatefulDataLoader` from a mapped file of rows. All shuffle, and all hand out batches of int64 on one core, without
worker processes. Contenders take turns, each in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

SEQUENCE_LENGTH = 2048
BATCH_SIZE = 8
MEAN_DOCUMENT_TOKENS = 600
PEERS = ("grain", "mosaicml-streaming", "torchdata")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=50_000_000)
    parser.add_argument("--seconds", type=float, default=5.0, help="per measurement")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", default="benchmarks/.venv-data-peers/bin/python", help="their Python")
    parser.add_argument("--output", type=Path, help="write the figures here (JSON)")
    parser.add_argument("--measure", nargs=2, metavar=("NAME", "FOLDER"), help=argparse.SUPPRESS)
    parser.add_argument("--write", metavar="FOLDER", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write:
        for write in (write_grain, write_streaming):
            write(Path(options.write))
    elif options.measure:
        name, folder = options.measure
        print(json.dumps(rate(CONTENDERS[name](Path(folder)), options.seconds)))
    else:
        compare(options)


def compare(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_tokens(Path(folder), options.tokens)
        _run(options.peers, "--write", folder)
        found: dict[str, list[dict[str, float]]] = {name: [] for name in CONTENDERS}
        for _ in range(options.rounds):
            for name, figures in found.items():
                python = options.peers if name in PEERS else sys.executable
                seconds = f"--seconds={options.seconds}"
                figures.append(json.loads(_run(python, seconds, "--measure", name, folder)))
    for name, figures in found.items():
        tokens_per_s = [each["tokens_per_s"] for each in figures]
        cpu_s = statistics.median(each["cpu_s_per_million"] for each in figures)
        print(
            f"{name:>20}: median {statistics.median(tokens_per_s) / 1e6:.2f} M tokens/s ({min(tokens_per_s) / 1e6:.2f} to "
            f"{max(tokens_per_s) / 1e6:.2f}), {cpu_s * 1e3:.2f} ms of CPU for a million"
        )
    if options.output:
        options.output.write_text(json.dumps(found, indent=1) + "\n")


def _run(python: str, *arguments: str) -> str:
    command = [python, __file__, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=1800).stdout


def rate(batches: Iterator[Any], seconds: float) -> dict[str, float]:
    """Read on one core; the first batches are not counted."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    for _ in range(20):
        next(batches)
    tokens = 0
    started_s = time.monotonic()
    cpu_s = time.process_time()
    while time.monotonic() < started_s + seconds:
        batch = next(batches)
        assert str(batch.dtype).endswith("int64")
        assert tuple(batch.shape) == (BATCH_SIZE, SEQUENCE_LENGTH)
        tokens += BATCH_SIZE * SEQUENCE_LENGTH
    cpu_s = time.process_time() - cpu_s
    return {
        "tokens_per_s": tokens / (time.monotonic() - started_s),
        "cpu_s_per_million": cpu_s / tokens * 1e6,
        "load": os.getloadavg()[0],
    }


# -- the same tokens ---------------------------------------------------------------------------------------


def write_tokens(folder: Path, count: int) -> None:
    """Write documents as raw tokens, with their offsets."""
    random = np.random.default_rng(0)
    lengths = random.exponential(MEAN_DOCUMENT_TOKENS, count // MEAN_DOCUMENT_TOKENS).astype(np.int64) + 1
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    random.integers(1, 50_000, offsets[-1], dtype=np.uint16).tofile(folder / "tokens.bin")
    np.save(folder / "tokens.bin.offsets.npy", offsets)


def _rows(folder: Path) -> Any:
    """Map the tokens as sequences that are cut one after the other."""
    tokens = np.memmap(folder / "tokens.bin", np.uint16, "r")
    return tokens[: len(tokens) // SEQUENCE_LENGTH * SEQUENCE_LENGTH].reshape(-1, SEQUENCE_LENGTH)


def write_grain(folder: Path) -> None:
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter(str(folder / "rows.array_record"), "group_size:1,uncompressed")
    for row in _rows(folder):
        writer.write(row.tobytes())
    writer.close()


def write_streaming(folder: Path) -> None:
    from streaming import MDSWriter

    columns = {"tokens": f"ndarray:uint16:{SEQUENCE_LENGTH}"}
    with MDSWriter(out=str(folder / "mds"), columns=columns) as writer:
        for row in _rows(folder):
            writer.write({"tokens": np.asarray(row)})


# -- the contenders ----------------------------------------------------------------------------------------


def read_ckpt(folder: Path) -> Iterator[Any]:
    from ckpt.trainer_integration.dataloader import RescalableLoader
    from ckpt.trainer_integration.dataset import ShardedDataset
    from ckpt.trainer_integration.token_files import TokenFiles

    dataset = ShardedDataset(TokenFiles([folder / "tokens.bin"]), sequence_length=SEQUENCE_LENGTH)
    yield from RescalableLoader(dataset, batch_size=BATCH_SIZE)


def read_grain(folder: Path) -> Iterator[Any]:
    import grain

    def decoded(record: bytes) -> Any:
        return np.frombuffer(record, np.uint16).astype(np.int64)

    source = grain.sources.ArrayRecordDataSource([str(folder / "rows.array_record")])
    rows = grain.MapDataset.source(source).seed(0).shuffle().repeat().map(decoded)
    reading = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)  # as the others: no threads
    yield from rows.batch(BATCH_SIZE, drop_remainder=True).to_iter_dataset(reading)


def read_streaming(folder: Path) -> Iterator[Any]:
    import torch
    from streaming import StreamingDataLoader, StreamingDataset

    dataset = StreamingDataset(local=str(folder / "mds"), shuffle=True, batch_size=BATCH_SIZE)

    def collated(samples: list[Any]) -> Any:
        return torch.from_numpy(np.stack([sample["tokens"] for sample in samples]).astype(np.int64))

    while True:
        yield from StreamingDataLoader(dataset, batch_size=BATCH_SIZE, collate_fn=collated, drop_last=True)


def read_torchdata(folder: Path) -> Iterator[Any]:
    import torch
    from torchdata.stateful_dataloader import StatefulDataLoader

    rows = _rows(folder)

    def collated(samples: list[Any]) -> Any:
        return torch.from_numpy(np.stack(samples).astype(np.int64))

    while True:
        yield from StatefulDataLoader(
            rows, batch_size=BATCH_SIZE, shuffle=True, collate_fn=collated, drop_last=True
        )


CONTENDERS: dict[str, Callable[[Path], Iterator[Any]]] = {
    "ckpt-storage": read_ckpt,
    "grain": read_grain,
    "mosaicml-streaming": read_streaming,
    "torchdata": read_torchdata,
}

if __name__ == "__main__":
    main()
