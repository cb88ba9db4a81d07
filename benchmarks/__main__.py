"""Run the suite: `python -m benchmarks [--full]`; see benchmarks/README.md."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.cases import CASES, Case
from benchmarks.report.results import Results, machine
from benchmarks.report.tables import bars_table, report
from benchmarks.report.targets import judge
from benchmarks.run.runner import Runner
from benchmarks.run.servers import ROOT
from benchmarks.run.suite import run_case, steps_of
from ckpt.backends.registry import default_threads

_QUICK_ROUNDS, _FULL_ROUNDS = 3, 7
console = Console()


def main() -> int:
    arguments = _arguments()
    if arguments.only:
        cases = [case for case in CASES if case.name in arguments.only]
    else:
        cases = [case for case in CASES if arguments.full or not case.full_only]
    if not arguments.full:
        cases = [case.quick() for case in cases]
    rounds = arguments.rounds or (_FULL_ROUNDS if arguments.full else _QUICK_ROUNDS)
    scratch, output = arguments.scratch.resolve(), arguments.output.resolve()
    for folder in (scratch, output):
        folder.mkdir(parents=True, exist_ok=True)
    started_s = time.monotonic()
    settings = {
        "run": "full" if arguments.full else "quick",
        "rounds": rounds,
        "began": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="minutes"),
    }
    results = Results(machine(), settings)
    try:
        # A folder of its own: what else is in the one that was named is not this program's to remove.
        with (
            tempfile.TemporaryDirectory(
                dir=scratch, prefix="ckpt-benchmarks-", ignore_cleanup_errors=True
            ) as own,
            contextlib.closing(Runner(Path(own), default_threads())) as runner,
        ):
            _run(cases, rounds, runner, results, output)
    finally:
        settings["seconds"] = round(time.monotonic() - started_s)
        _write(results, cases, output)
        _draw(results, cases, output)
    if arguments.docs is not None:
        from benchmarks.report.publish import publish  # with matplotlib, an extra

        publish(results, arguments.docs)
    console.print(Markdown(bars_table(judge(results))))
    console.print(f"{settings['seconds']} s; results are in {output}")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--full", action="store_true", help="more rounds and more cases")
    parser.add_argument("--rounds", type=int, default=0, help="rounds per case (default 3, with --full 7)")
    parser.add_argument(
        "--only", nargs="+", metavar="CASE", choices=[case.name for case in CASES], help="these cases alone"
    )
    parser.add_argument(
        "--scratch", type=Path, default=ROOT / "benchmarks" / ".scratch",
        help="folder below which checkpoints on files are written: the file system that is measured",
    )  # fmt: skip
    parser.add_argument(
        "--docs", type=Path, metavar="DIR", help="write results.md and the README's chart here too"
    )
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    return parser.parse_args()


def _run(cases: Sequence[Case], rounds: int, runner: Runner, results: Results, output: Path) -> None:
    columns = (
        TextColumn("{task.description:<52}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("starting", total=sum(steps_of(case, rounds) for case in cases))
        for case in cases:
            run_case(
                case,
                rounds,
                runner,
                results,
                lambda done: progress.update(bar, advance=1, description=done[:52]),
            )
            _write(results, cases, output)  # what is known if the run is stopped
            for entry in case.entries:
                if error := results.error(case.name, entry.name):
                    progress.console.print(f"{case.name}: {entry.name} failed: {error[:200]}", style="red")


def _write(results: Results, cases: Sequence[Case], output: Path) -> None:
    results.write(output / "results.json")
    (output / "results.md").write_text(report(results, cases))


def _draw(results: Results, cases: Sequence[Case], output: Path) -> None:
    try:
        from benchmarks.report.chart import draw_chart
        from benchmarks.report.plots import draw
    except ImportError as error:
        console.print(f"no plots: {error}; pip install './ckpt-storage[bench]'", style="yellow")
        return
    draw(results, cases, output)
    draw_chart(results, output)


if __name__ == "__main__":
    sys.exit(main())
