"""Compare saves of a table by its changes with full ones, in bytes and in time to restore.

    python -m benchmarks.studies.tables [--rows 10_000_000] [--saves 20] [--exponent 1.05]

One process keeps a table of 64 floats a row and a row-wise Adagrad state. A batch touches rows with a Zipf
distribution (the id of a rank is drawn at random); a save follows every 100 batches. Every checkpoint is then
restored and compared with the table. The restores of the last one and of a full save take turns. They come
from memory, where the files of a local folder are; with `--megabytes-per-s` from an S3 server that sends so much.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch

import ckpt
from benchmarks.run.servers import ACCESS_KEY, BUCKET, REGION, SECRET_KEY, sink
from ckpt.backends.registry import open_store
from ckpt.embeddings import DenseRows, Tables, TableShard

WIDTH = 64
BATCHES = 100


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--saves", type=int, default=20, help="after the first one, which writes all rows")
    parser.add_argument("--exponent", type=float, default=1.05, help="of the Zipf distribution")
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--max-delta-ratio", type=float, default=argparse.SUPPRESS, help="of the chains")
    parser.add_argument("--compare", action="store_true", help="find the changed rows by digests of blocks")
    parser.add_argument("--rounds", type=int, default=5, help="of restores")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--megabytes-per-s", type=float, help="that a server sends; default: a local folder")
    options = parser.parse_args()
    if options.megabytes_per_s is not None:
        with sink(keep=True, bytes_per_s=int(options.megabytes_per_s * 1e6)) as endpoint:
            keys = {"key": ACCESS_KEY, "secret": SECRET_KEY, "region": REGION}
            _run(f"s3://{BUCKET}/tables", {"endpoint_url": endpoint.url, **keys}, options)
        return
    folder = tempfile.mkdtemp(dir=options.folder)
    try:
        _run(folder, None, options)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run(root: str, storage_options: dict[str, Any] | None, options: argparse.Namespace) -> None:
    storage: dict[str, Any] = {"storage_options": storage_options}
    values, adagrad = torch.randn(options.rows, WIDTH), torch.zeros(options.rows)
    bounds = {name: value for name, value in vars(options).items() if name == "max_delta_ratio"}
    shard = TableShard(
        "table", DenseRows(0, values=values, adagrad=adagrad), compare=options.compare, **bounds
    )
    tables = Tables(shard)
    draw = zipf(options.rows, options.exponent, np.random.default_rng(0))
    full_bytes = values.nbytes + adagrad.nbytes
    print(f"{options.rows:,} rows, {full_bytes / 1e9:.2f} GB, Zipf {options.exponent}", flush=True)
    written = []
    for number in range(options.saves + 1):
        touched = set()
        for _ in range(BATCHES if number else 0):
            ids = np.unique(draw(options.batch))
            touched.update(ids.tolist())
            with contextlib.nullcontext() if options.compare else shard.writing(ids):
                values[ids] += 0.01
                adagrad[ids] += 1.0
        begun_s = time.perf_counter()
        tables.save({}, f"{root}/{number}", **storage)
        seconds = time.perf_counter() - begun_s
        (listed,) = ckpt.list_checkpoints(f"{root}/{number}", **storage)
        with closing(open_store(f"{root}/{number}", storage_options)) as store:
            own_bytes = sum(stat.size_bytes for stat in store.list())
        written.append(own_bytes)
        print(
            f"save {number:>3}: {100 * len(touched) / options.rows:5.2f} % of the rows changed, "
            f"{own_bytes / 1e6:9.1f} MB in {seconds:6.2f} s ({listed.state})",
            flush=True,
        )
    deltas = written[1:]
    print(
        f"{len(deltas)} saves after the first: {full_bytes * len(deltas) / sum(deltas):.1f} x less than full ones"
    )
    ckpt.save({"values": values, "adagrad": adagrad}, f"{root}/full", **storage)
    times: dict[str, list[float]] = {"full": [], "deltas": []}
    for _ in range(options.rounds):
        for kind, seconds_of in times.items():
            back = torch.empty_like(values), torch.empty_like(adagrad)
            for tensor in back:
                tensor.fill_(-1)  # its pages exist, as in a program that resumes
            begun_s = time.perf_counter()
            if kind == "full":
                ckpt.load({"values": back[0], "adagrad": back[1]}, f"{root}/full", **storage)
            else:
                rows = DenseRows(0, values=back[0], adagrad=back[1])
                Tables(TableShard("table", rows)).restore(f"{root}/{options.saves}", **storage)
            seconds_of.append(time.perf_counter() - begun_s)
            assert torch.equal(back[0], values)
            assert torch.equal(back[1], adagrad)
    full_s, deltas_s = (statistics.median(times[kind]) for kind in ("full", "deltas"))
    print(
        f"restore: {deltas_s:.2f} s, full {full_s:.2f} s, {deltas_s / full_s:.2f} x (medians of {options.rounds})"
    )


def zipf(rows: int, exponent: float, random: np.random.Generator) -> Callable[[int], Any]:
    """Return a function that draws ids, the ranks of which follow a bounded Zipf distribution."""
    weights = np.arange(1, rows + 1, dtype=np.float64) ** -exponent
    cumulated = np.cumsum(weights)
    cumulated /= cumulated[-1]
    ids = random.permutation(rows)

    def draw(count: int) -> np.ndarray[Any, Any]:
        return ids[np.searchsorted(cumulated, random.random(count))]

    return draw


if __name__ == "__main__":
    main()
