"""Compare the time of a save through each adapter with the framework's own, in turns: `make bench-adapters`.

    PYTHONPATH=tests python -m adapters.overhead [--rounds 3] [--saves 4] [--width 1728] [HOST ...]

Two ranks save the same state (72 bytes for each element of width * width; 215 MB) into local
folders, by the host's own means and by the adapter, life by life in turns. Prints medians of the
seconds for which the training waits, without each life's first save; CPU counts that of all
processes that a rank has started. Where the host's own saves are not durable when they end, there is
a line with the host's own and an fsync of its files too; where the adapter saves in the background
and the host does not, one with an adapter that waits.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from adapters.environments import python_of
from adapters.test_law import HOSTS, Host, life_of, run_life

_NOT_DURABLE = {"torch_checkpointing-sync"}
"""Hosts that never call fsync; of an asynchronous save nobody waits for it."""

_DOES_NOT_WAIT = {"huggingface", "huggingface-ddp"}
"""Adapters that save in the background unless they are told not to."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "hosts", nargs="*", metavar="HOST", help="its name, or that of its environment; default: all"
    )
    parser.add_argument("--rounds", type=int, default=3, help="lives of each kind")
    parser.add_argument("--saves", type=int, default=4, help="in each life; the first one does not count")
    parser.add_argument("--width", type=int, default=1728, help="of the model, a multiple of 64")
    parser.add_argument(
        "--folder", type=Path, help="on the file system to measure; default: the temporary one"
    )
    options = parser.parse_args()
    names = {host.id: {host.id, host.name, host.environment or host.name} for host in HOSTS}
    chosen = [host for host in HOSTS if not options.hosts or names[host.id] & {*options.hosts}]
    if unknown := {*options.hosts}.difference(*names.values()):
        parser.error(f"no such host: {', '.join(sorted(unknown))}")
    print(f"{'host':<24}{'native':>18}{'adapter':>18}{'wall':>8}{'CPU':>8}", flush=True)
    for host in chosen:
        for line in lines(host, options):
            print(line, flush=True)


def lines(host: Host, options: argparse.Namespace) -> Iterator[str]:
    """Measure one host; yield its lines of the table."""
    runs: dict[str, dict[str, Any]] = {"native": {}}
    runs |= {"with fsync": {"fsync": True}} if host.id in _NOT_DURABLE else {}
    runs |= {"waiting": {"checkpoints": {"async_mode": "off"}}} if host.id in _DOES_NOT_WAIT else {}
    runs["adapter"] = {}
    saves: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    python = python_of(host.environment or host.name)
    for number in range(options.rounds):
        for name in runs if number % 2 == 0 else reversed(runs):
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                life = life_of(host, Path(folder), native=name in ("native", "with fsync"))
                more = {**host.options, **runs[name]}
                life = replace(life, steps=options.saves, save_every=1, width=options.width, options=more)
                report: Any = run_life(host, python, life, world_size=2)
                shutil.rmtree(life.root, ignore_errors=True)
            saves[name] += [(wall_s, cpu_s) for wall_s, cpu_s in report["saves_s"][1:]]
    if not all(saves.values()):
        yield f"{host.id:<24}{'measures no saves':>36}"
        return
    medians = {
        name: [statistics.median(each) for each in zip(*times, strict=True)] for name, times in saves.items()
    }
    for name in runs:
        if name != "adapter":
            native, adapter = ("native", name) if name == "waiting" else (name, "adapter")
            title = host.id if name == "native" else f"  {name}"
            yield f"{title:<24}{_compared(medians[native], medians[adapter])}"


def _compared(native: list[float], adapter: list[float]) -> str:
    figures = [f"{wall_s:.3f} / {cpu_s:.3f} s" for wall_s, cpu_s in (native, adapter)]
    ratios = [f"{ours / theirs:.2f}" if theirs else "-" for theirs, ours in zip(native, adapter, strict=True)]
    return "".join(f"{text:>18}" for text in figures) + "".join(f"{text:>8}" for text in ratios)


if __name__ == "__main__":
    main()
