"""Plot CPU time and wall time of every case, as SVG and PNG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.cases import Case, Column
from benchmarks.report.results import Results

__all__ = ["draw"]

_OURS, _FLOOR, _PEER = "#0b6e4f", "#9aa5b1", "#c8553d"
_PLOTTED = 2


def draw(results: Results, cases: Sequence[Case], folder: Path) -> list[Path]:
    """Draw one picture per case, of its first two columns; return the files."""
    mpl.rcParams.update({"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "ckpt"})
    written = []
    for case in cases:
        if case.name not in results.outcomes:
            continue
        figure = Figure(figsize=(10, 0.9 + 0.42 * len(case.entries)), layout="constrained")
        axes = figure.subplots(1, _PLOTTED, sharey=True)
        for axis, column in zip(axes, case.columns, strict=False):
            _bars(axis, case, column, results)
        figure.suptitle(case.title, fontsize=11, fontweight="bold")
        for kind in ("svg", "png"):
            path = folder / f"{case.name}.{kind}"
            figure.savefig(path, dpi=150, metadata={"Date": None} if kind == "svg" else None)
            written.append(path)
    return written


def _bars(axis: Axes, case: Case, column: Column, results: Results) -> None:
    for position, entry in enumerate(case.entries):
        spread = results.spread(case.name, entry.name, column.key)
        if spread is None:
            failed = results.error(case.name, entry.name) is not None
            axis.text(0, position, " failed" if failed else " -", va="center", color=_PEER)
            continue
        floor = entry.note.startswith("floor") or entry.job == "copy"
        color = _OURS if entry.contender == "ours" else _FLOOR if floor else _PEER
        around = [[spread.median - spread.least], [spread.most - spread.median]]
        axis.barh(position, spread.median, 0.62, color=color, xerr=around, ecolor="#333333", capsize=2)
        axis.text(spread.most, position, f"  {spread.median:,.{column.digits}f}", va="center", fontsize=8)
    axis.set_yticks(range(len(case.entries)), [entry.name for entry in case.entries])
    if not axis.yaxis_inverted():
        axis.invert_yaxis()
    axis.set_xlabel(f"{column.heading} (median; least to most)")
    axis.margins(x=0.18)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
