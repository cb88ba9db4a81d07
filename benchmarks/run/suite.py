"""Run every case, its entries interleaved round by round."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.cases import Case, Entry
from benchmarks.report.results import Results
from benchmarks.run.runner import Runner
from benchmarks.run.servers import Endpoint
from benchmarks.run.task import Outcome

__all__ = ["run_case", "steps_of"]

Report = Callable[[str], None]
"""Told what was just done, once per step."""


def steps_of(case: Case, rounds: int) -> int:
    """Count the processes that a case takes."""
    return len(_writers(case)) + sum(_rounds_of(case, entry, rounds) for entry in case.entries)


def run_case(case: Case, rounds: int, runner: Runner, results: Results, report: Report) -> None:
    """Measure a case.

    A failure is an outcome; a server that does not start is that of every entry.
    """
    try:
        with runner.server(case) as endpoint:
            failed = _prepare(case, runner, endpoint, report)
            for number in range(rounds):
                for entry in _rotated(
                    [e for e in case.entries if number < _rounds_of(case, e, rounds)], number
                ):
                    outcome = failed.get(entry.written_by or entry.name) or runner.measure(
                        case, entry, endpoint, number
                    )
                    results.add(case.name, entry.name, outcome)
                    report(f"{case.name}: {entry.name}")
    except Exception as error:
        for entry in case.entries:
            results.add(case.name, entry.name, Outcome(error=f"the case failed: {error}"))


def _prepare(case: Case, runner: Runner, endpoint: Endpoint | None, report: Report) -> dict[str, Outcome]:
    """Save the checkpoints to be loaded; return the outcomes of those that failed, by entry."""
    failed = {}
    for entry in _writers(case):
        outcome = runner.prepare(case, entry, endpoint)
        report(f"{case.name}: {entry.name} writes")
        if outcome.error:
            failed[entry.name] = Outcome(error=f"preparing: {outcome.error}", versions=outcome.versions)
    return failed


def _writers(case: Case) -> list[Entry]:
    if not case.prepare:
        return []
    return [entry for entry in case.entries if entry.written_by in ("", entry.name)]


def _rounds_of(case: Case, entry: Entry, rounds: int) -> int:
    return min(bound for bound in (rounds, case.rounds, case.peer_rounds if entry.peer else 0) if bound)


def _rotated(entries: Sequence[Entry], number: int) -> list[Entry]:
    """Begin each round with another entry: nobody always runs after the same one."""
    start = number % max(len(entries), 1)
    return [*entries[start:], *entries[:start]]
