"""Keep a run's outcomes by case and entry, with the machine and the versions, as JSON."""

from __future__ import annotations

import json
import os
import platform
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.run.task import Outcome

__all__ = ["Results", "Spread", "machine"]


@dataclass(frozen=True)
class Spread:
    """The median of some rounds, and the extremes."""

    median: float
    least: float
    most: float
    rounds: int


@dataclass
class Results:
    """All outcomes of a run.

    Attributes:
        outcomes: by case, then entry, in the order in which they were measured.
    """

    machine: dict[str, Any]
    settings: dict[str, Any]
    outcomes: dict[str, dict[str, list[Outcome]]] = field(default_factory=dict)

    def add(self, case: str, entry: str, outcome: Outcome) -> None:
        self.outcomes.setdefault(case, {}).setdefault(entry, []).append(outcome)

    def error(self, case: str, entry: str) -> str | None:
        """Return the first error of an entry."""
        errors = (outcome.error for outcome in self.outcomes.get(case, {}).get(entry, []))
        return next((error for error in errors if error), None)

    def spread(self, case: str, entry: str, key: str) -> Spread | None:
        """Return a figure of an entry over its rounds; None if it was not measured."""
        outcomes = self.outcomes.get(case, {}).get(entry, [])
        values = [outcome.figures[key] for outcome in outcomes if key in outcome.figures]
        if not values:
            return None
        return Spread(statistics.median(values), min(values), max(values), len(values))

    def median(self, case: str, entry: str, key: str) -> float | None:
        spread = self.spread(case, entry, key)
        return None if spread is None else spread.median

    def versions(self) -> dict[str, str]:
        """List the versions of everything that was measured."""
        versions: dict[str, str] = {}
        for entries in self.outcomes.values():
            for outcomes in entries.values():
                for outcome in outcomes:
                    versions |= outcome.versions
        return dict(sorted(versions.items()))

    def with_rounds_of(self, again: Results) -> Results:
        """Add the rounds of another run, and note that. Raises ValueError if that was on another machine.

        None is replaced: whoever repeats what was missed would choose.
        """
        if any(self.machine[fact] != again.machine[fact] for fact in ("cpu", "cores")):
            raise ValueError("the runs are not of one machine")
        note = {f"more rounds at {again.settings['began']}": ", ".join(again.outcomes)}
        both = Results(self.machine, self.settings | note)
        for outcomes in (self.outcomes, again.outcomes):
            for case, entries in outcomes.items():
                for entry, rounds in entries.items():
                    for outcome in rounds:
                        both.add(case, entry, outcome)
        return both

    @staticmethod
    def read(path: Path) -> Results:
        """Read the results that `write` wrote."""
        data = json.loads(path.read_text())
        outcomes = {
            case: {
                entry: [Outcome(o["figures"], data["versions"], o["error"]) for o in rounds]
                for entry, rounds in entries.items()
            }
            for case, entries in data["cases"].items()
        }
        return Results(data["machine"], data["settings"], outcomes)

    def write(self, path: Path) -> None:
        cases = {
            case: {
                entry: [{"figures": o.figures, "error": o.error} for o in outcomes]
                for entry, outcomes in entries.items()
            }
            for case, entries in self.outcomes.items()
        }
        run = {
            "machine": self.machine,
            "settings": self.settings,
            "versions": self.versions(),
            "cases": cases,
        }
        path.write_text(json.dumps(run, indent=1) + "\n")


def machine() -> dict[str, Any]:
    """Describe the machine as far as it matters to the figures."""
    return {
        "cpu": _line("/proc/cpuinfo", "model name"),
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_at_start": round(os.getloadavg()[0], 2),
    }


def _line(path: str, name: str) -> str:
    for line in Path(path).read_text().splitlines():
        if line.startswith(name):
            return line.partition(":")[2].strip()
    return platform.machine()
