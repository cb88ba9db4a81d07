"""Write the Markdown report: the bars, those that are missed first, a table per case, the machine and the versions."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.cases import Case, Column, Entry
from benchmarks.report.limits import LIMITS
from benchmarks.report.results import Results
from benchmarks.report.targets import Verdict, judge

__all__ = ["bars_table", "report"]

_HEAD = """# Benchmark results

Medians, with the least and the most of all rounds in brackets. CPU seconds are those of the client process, all
threads; "extra peak" is resident memory beyond what the process held, tensors included, when the clock started.
How to read this is explained in [the suite's README]({readme}).
"""


def report(
    results: Results, cases: Sequence[Case], readme: str = "../README.md", docs: str = "../../docs/"
) -> str:
    """Write the whole report, with links to the suite's README and to the documentation's folder."""
    parts = [
        _HEAD.format(readme=readme),
        _about(results),
        "## Bars\n",
        bars_table(judge(results)),
        _limits(results, docs),
    ]
    for case in cases:
        if case.name in results.outcomes:
            parts += [f"## {case.title}\n", _case_table(case, results), _notes(case, results)]
    return "\n".join(parts)


def bars_table(verdicts: Sequence[Verdict]) -> str:
    rows = []
    for verdict in sorted(verdicts, key=lambda verdict: (verdict.met is not False, verdict.met is None)):
        bar = verdict.bar
        measured = "not measured" if verdict.value is None else f"{verdict.value:.2f} {bar.unit}"
        bound = f"{'at most' if bar.at_most else 'at least'} {bar.bound:g} {bar.unit}"
        met = {None: "", True: "met", False: "**not met**"}[verdict.met]
        rows.append([bar.what, measured, bound, met])
    return _table(["what", "measured", "bar", ""], rows)


def _limits(results: Results, docs: str) -> str:
    """Say what is known of the limits of the bars that are missed."""
    missed = [
        verdict.bar.what for verdict in judge(results) if verdict.met is False and verdict.bar.what in LIMITS
    ]
    lines = [f"- **{what}.** {LIMITS[what].replace('](', f']({docs}')}" for what in missed]
    return "\n".join(["What is known of the limits of those that are missed:\n", *lines, ""]) if lines else ""


def _case_table(case: Case, results: Results) -> str:
    rows = []
    for entry in case.entries:
        failed = results.error(case.name, entry.name)
        cells = [_cell(case, entry, column, results) for column in case.columns]
        if not any(cells):
            cells[0] = "failed" if failed else "full run only"
        rows.append([entry.name, *cells])
    return _table(["", *(column.heading for column in case.columns)], rows)


def _cell(case: Case, entry: Entry, column: Column, results: Results) -> str:
    spread = results.spread(case.name, entry.name, column.key)
    if spread is None:
        return ""
    text = f"{spread.median:,.{column.digits}f}"
    if spread.rounds > 1 and spread.most > spread.least:
        text += f" ({spread.least:,.{column.digits}f}-{spread.most:,.{column.digits}f})"
    return text


def _notes(case: Case, results: Results) -> str:
    lines = []
    for entry in case.entries:
        line = f"- {entry.name}: {entry.note}"
        if failed := results.error(case.name, entry.name):
            line += f". **Failed**: `{_short(failed)}`"
        lines.append(line)
    return "\n".join([*lines, ""])


def _short(error: str) -> str:
    line = " ".join(error.split()).replace("`", "'").replace("|", "/")
    return line if len(line) <= 300 else f"{line[:297]}..."


def _about(results: Results) -> str:
    facts = [*results.machine.items(), *results.settings.items()]
    versions = ", ".join(f"{name} {version}" for name, version in results.versions().items())
    lines = [f"- {name.replace('_', ' ')}: {value}" for name, value in facts]
    return "\n".join([*lines, f"- versions: {versions}", ""])


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join([*(f"| {' | '.join(cells)} |" for cells in lines), ""])
