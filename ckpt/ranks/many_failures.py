"""Keep few of the failures of thousands of ranks: mostly they say the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from ckpt.errors import CheckpointError, ConfigurationError

MAX_FAILURES = 16

E = TypeVar("E", bound=BaseException)


def some_of(failures: Mapping[int, E]) -> dict[int, E]:
    """Choose at most `MAX_FAILURES` failures, by rank: the first ranks, and those that say something new."""
    if len(failures) <= MAX_FAILURES:
        return dict(failures)
    first: dict[object, int] = {}
    for rank in sorted(failures):
        first.setdefault(_said(failures[rank]), rank)
    chosen = [*first.values(), *sorted(failures.keys() - first.values())][:MAX_FAILURES]
    return {rank: failures[rank] for rank in sorted(chosen)}


def _said(error: BaseException) -> tuple[type, str]:
    return type(error), error.message if isinstance(error, CheckpointError) else str(error)


@dataclass(frozen=True)
class Outcome:
    """How a step went on some of the ranks.

    Attributes:
        calls: the calls that the ranks are in, and a rank of each; few, as one too many is an error.
        failed, refused: how many ranks failed, and how many of these with ConfigurationError.
        failures: some of them.
    """

    calls: Mapping[str, int]
    failed: int = 0
    refused: int = 0
    failures: Mapping[int, CheckpointError] = field(default_factory=dict)

    @classmethod
    def of(cls, rank: int, call: str, failure: CheckpointError | None) -> Outcome:
        outcome = cls({call: rank})
        if failure is None:
            return outcome
        return replace(
            outcome, failed=1, refused=int(isinstance(failure, ConfigurationError)), failures={rank: failure}
        )

    def join(self, other: Outcome) -> Outcome:
        calls = {**other.calls, **self.calls}
        for call in self.calls.keys() & other.calls.keys():
            calls[call] = min(self.calls[call], other.calls[call])
        few = sorted(calls.items(), key=lambda item: item[1])[:3]
        return Outcome(
            dict(few),
            self.failed + other.failed,
            self.refused + other.refused,
            some_of({**self.failures, **other.failures}),
        )
