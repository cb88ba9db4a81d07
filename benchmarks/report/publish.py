"""Write a run's results to the documentation: `docs/results.md`, and the README's chart.

    python -m benchmarks.report.publish benchmarks/results/results.json docs
    python -m benchmarks.report.publish results.json more-rounds.json docs

Cases that disagree can be run again (`--only`, `--output`): their rounds are added to those of the run, and the page says so.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

from benchmarks.cases import CASES
from benchmarks.report.chart import draw_chart
from benchmarks.report.results import Results
from benchmarks.report.tables import report

__all__ = ["main", "publish"]


def publish(results: Results, docs: Path) -> list[Path]:
    """Write the page and the chart of a run into `docs`; return the files."""
    page = docs / "results.md"
    page.write_text(report(results, CASES, readme="../benchmarks/README.md", docs="").rstrip() + "\n")
    return [page, *draw_chart(results, docs)]


def main() -> int:
    *sources, docs = map(Path, sys.argv[1:])
    for path in publish(functools.reduce(Results.with_rounds_of, map(Results.read, sources)), docs):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
