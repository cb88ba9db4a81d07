"""Compare the time of a save through each adapter with the framework's own, in turns: `make bench-adapters`.

    PYTHONPATH=tests python -m adapters.overhead [--rounds 3] [--saves 4] [--width 1728] [HOST ...]

Two ranks save the same state (72 bytes for each element of width * width; 215 MB) into local
folders, by the host's own means and by the adapter, life by life in turns. Prints medians of the
seconds for which the training waits, without each life's first save; CPU counts that of all
processes that a rank has started.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from adapters.environments import python_of
from adapters.test_law import HOSTS, Host, life_of, run_life


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
        print(line(host, options), flush=True)


def line(host: Host, options: argparse.Namespace) -> str:
    """Measure one host; return its line of the table."""
    saves: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    python = python_of(host.environment or host.name)
    for number in range(options.rounds):
        for native in (True, False) if number % 2 == 0 else (False, True):
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                life = life_of(host, Path(folder), native=native)
                life = replace(life, steps=options.saves, save_every=1, width=options.width)
                report: Any = run_life(host, python, life, world_size=2)
                shutil.rmtree(life.root, ignore_errors=True)
            saves[native] += [(wall_s, cpu_s) for wall_s, cpu_s in report["saves_s"][1:]]
    if not all(saves.values()):
        return f"{host.id:<24}{'measures no saves':>36}"
    (wall_s, cpu_s), (own_wall_s, own_cpu_s) = (
        [statistics.median(times) for times in zip(*saves[native], strict=True)] for native in (False, True)
    )
    figures = [f"{own_wall_s:.3f} / {own_cpu_s:.3f} s", f"{wall_s:.3f} / {cpu_s:.3f} s"]
    ratios = [f"{wall_s / own_wall_s:.2f}", f"{cpu_s / own_cpu_s:.2f}" if own_cpu_s else "-"]
    return f"{host.id:<24}" + "".join(f"{text:>18}" for text in figures) + "".join(f"{r:>8}" for r in ratios)


if __name__ == "__main__":
    main()
