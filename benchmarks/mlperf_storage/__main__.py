"""Run MLPerf Storage's llama3-8b checkpoint workload with DLIO's own mechanisms and with this library, in turns.

    git clone https://github.com/argonne-lcf/dlio_benchmark
    make bench-mlperf DLIO=dlio_benchmark

The model has the shapes of the public workload, divided: by default 2.4 GB for two ranks, ZeRO 3. As its rules ask, the
kernel's caches are dropped between the saves and the loads (by root). The figures are DLIO's own: how long rank 0 took
for a checkpoint, and gigabytes (2^30) per second. The S3 server is that of the benchmarks: it runs beside the ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.run.servers import ACCESS_KEY, BUCKET, REGION, SECRET_KEY, Endpoint, sink

__all__ = ["main"]

_ROOT = Path(__file__).parents[2]
_PYTHON = _ROOT / "benchmarks" / ".venv-mlperf" / "bin" / "python"
_SHAPES = {"hidden_size": 4096, "ffn_hidden_size": 14336, "vocab_size": 128256}
_LAYERS = 32
_DROP_CACHES = Path("/proc/sys/vm/drop_caches")
_TIMEOUT_S = 600
_FIGURES = {
    "save s": "save_checkpoint_duration_mean_seconds",
    "save GiB/s": "save_checkpoint_io_mean_GB_per_second",
    "load s": "load_checkpoint_duration_mean_seconds",
    "load GiB/s": "load_checkpoint_io_mean_GB_per_second",
}
Figures = dict[str, float]


@dataclass(frozen=True)
class Mechanism:
    """A way to keep checkpoints.

    Attributes:
        kind: the class that DLIO is told, in this folder; empty for that of its own.
    """

    name: str
    kind: str = ""
    fsync: bool = False
    s3: bool = False


_OURS = "back_end.CkptCheckpointing"
MECHANISMS = (
    Mechanism("files: DLIO's own (torch.save)"),
    Mechanism("files: ckpt-storage, no fsync", _OURS),
    Mechanism("files: DLIO's own, and fsync", "own_mechanisms.SyncedFiles", fsync=True),
    Mechanism("files: ckpt-storage", _OURS, fsync=True),
    Mechanism("S3: DLIO's own (s3torchconnector)", "own_mechanisms.ListedS3", s3=True),
    Mechanism("S3: ckpt-storage", _OURS, s3=True),
)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.mlperf_storage",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--dlio", type=Path, required=True, help="a clone of DLIO")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--divide", type=int, default=4, help="the widths and the number of layers by this")
    parser.add_argument("--checkpoints", type=int, default=3, help="saved, then loaded, by each run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="on the file system that is measured")
    parser.add_argument("--only", choices=("files", "S3"))
    options = parser.parse_args()
    if not (options.dlio / "dlio_benchmark" / "main.py").is_file():
        parser.error(f"{options.dlio} is no clone of DLIO: give the folder that git clone made")
    if options.only != "S3" and not os.access(_DROP_CACHES, os.W_OK):
        parser.error(
            "only root may drop the kernel's caches between saves and loads: run as root, or with --only S3"
        )
    figures: dict[str, list[Figures]] = defaultdict(list)
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        for number in range(options.rounds):
            for mechanism in _turn(MECHANISMS, number):
                if options.only in (None, mechanism.name.split(":")[0]):
                    figures[mechanism.name].append(_measure(mechanism, options, Path(scratch)))
                    print(
                        f"round {number + 1}: {mechanism.name}: {_line(figures[mechanism.name][-1])}",
                        flush=True,
                    )
    print(_table(figures))


def _turn(mechanisms: Sequence[Mechanism], number: int) -> Sequence[Mechanism]:
    first = number % len(mechanisms)
    return [*mechanisms[first:], *mechanisms[:first]]


def _measure(mechanism: Mechanism, options: argparse.Namespace, scratch: Path) -> Figures:
    """Save in one run of DLIO, drop the caches, load in another.

    To S3 it saves twice: to a server that drops what it gets, which is measured, and to one that keeps it.
    """
    place = str(scratch / "checkpoints")
    if mechanism.s3:
        with sink() as dropping:
            saved = _run(mechanism, options, scratch, place, dropping, write=True)
        with sink(keep=True) as keeping:
            _run(mechanism, options, scratch, place, keeping, write=True)
            loaded = _run(mechanism, options, scratch, place, keeping, write=False)
    else:
        try:
            saved = _run(mechanism, options, scratch, place, None, write=True)
            _drop_caches()
            loaded = _run(mechanism, options, scratch, place, None, write=False)
        finally:
            shutil.rmtree(place, ignore_errors=True)
    return {heading: (saved if key.startswith("save") else loaded)[key] for heading, key in _FIGURES.items()}


def _run(
    mechanism: Mechanism,
    options: argparse.Namespace,
    scratch: Path,
    place: str,
    endpoint: Endpoint | None,
    *,
    write: bool,
) -> dict[str, float]:
    """Run DLIO, to save or to load; return its summary's figures."""
    outputs = scratch / "outputs"
    shutil.rmtree(outputs, ignore_errors=True)
    checkpoint: dict[str, Any] = {
        "num_checkpoints_write": options.checkpoints if write else 0,
        "num_checkpoints_read": 0 if write else options.checkpoints,
        "time_between_checkpoints": 0,
        "checkpoint_folder": place if endpoint is None else f"s3://{BUCKET}/checkpoints",
    }
    if mechanism.kind:
        checkpoint["checkpoint_mechanism_classname"] = f"benchmarks.mlperf_storage.{mechanism.kind}"
    command = [
        str(_PYTHON.with_name("mpiexec")), "-n", str(options.ranks), str(_PYTHON), "-m", "dlio_benchmark.main",
        "workload=llama_8b_zero3",
        f"hydra.run.dir={outputs}",
        f"++workload.model.num_layers={_LAYERS // options.divide}",
        *(f"++workload.model.transformer.{name}={size // options.divide}" for name, size in _SHAPES.items()),
        *(f"++workload.checkpoint.{name}={value}" for name, value in checkpoint.items()),
        *(_storage(endpoint) if endpoint is not None else ()),
    ]  # fmt: skip
    environment = {
        **os.environ,
        "PYTHONPATH": f"{_ROOT}:{options.dlio.resolve()}",
        "CKPT_DLIO_FSYNC": str(int(mechanism.fsync)),
    }
    ended = subprocess.run(
        command, cwd=scratch, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )
    summary = outputs / "summary.json"
    if ended.returncode or not summary.is_file():
        sys.exit(f"DLIO failed with {mechanism.name}:\n{ended.stdout[-2000:]}\n{ended.stderr[-4000:]}")
    figures: dict[str, float] = json.loads(summary.read_text())["metric"]
    return figures


def _storage(endpoint: Endpoint) -> list[str]:
    storage = {
        "access_key_id": ACCESS_KEY, "secret_access_key": SECRET_KEY, "endpoint_url": endpoint.url,
        "region": REGION, "s3_force_path_style": "'true'",
    }  # fmt: skip
    return [
        "++workload.storage.storage_type=s3",
        f"++workload.storage.storage_root={BUCKET}",
        "++workload.dataset.format=npz",  # it asks for a format of data, of which there is none
        *(f"++workload.storage.storage_options.{name}={value}" for name, value in storage.items()),
    ]


def _drop_caches() -> None:
    os.sync()
    _DROP_CACHES.write_text("3")


def _line(figures: Figures) -> str:
    return ", ".join(f"{heading} {value:.2f}" for heading, value in figures.items())


def _table(figures: dict[str, list[Figures]]) -> str:
    lines = [f"| | {' | '.join(_FIGURES)} |", "| --- " * (len(_FIGURES) + 1) + "|"]
    for name, rounds in figures.items():
        cells = []
        for heading in _FIGURES:
            values = [each[heading] for each in rounds]
            cells.append(f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
