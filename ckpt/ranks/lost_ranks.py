"""Find out, when ranks lose each other, who is gone, and put it in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ckpt.errors import CheckpointError, StorageError
from ckpt.ranks.group import Ranks
from ckpt.ranks.many_failures import some_of
from ckpt.ranks.roll_call import Answer

_MAX_NAMES = 10
_SILENT = "does not answer: killed, crashed, or stuck"


class StoppedForAnother(StorageError):
    """This rank stopped because another one failed, whose error is the cause."""


def by_cause(failures: Mapping[int, BaseException]) -> list[int]:
    """List the ranks that failed, in order, those that stopped for another one last."""
    return sorted(failures, key=lambda rank: (isinstance(failures[rank], StoppedForAnother), rank))


def summary(
    call: str, failures: Mapping[int, BaseException], *, count: int | None = None, is_alone: bool = False
) -> str:
    """Describe a failed call in one line: the first rank's error, and which of `count` ranks failed too.

    `is_alone`: the job has one rank, and no error names it.
    """
    if is_alone:
        forget_rank(*failures.values())
    first, *others = by_cause(failures)
    others.sort()
    cause = failures[first]
    text = str(cause)
    if not isinstance(cause, CheckpointError):
        text = (
            f"{type(cause).__name__}: {cause}"
            if is_alone
            else f"rank {first}: {type(cause).__name__}: {cause}"
        )
    count = len(failures) if count is None else count
    in_all = f"; {count:,} ranks in all" if count > _MAX_NAMES + 1 else ""
    more = f" (also failed: rank {_names(others)}{in_all})" if others else ""
    return f"the {call} failed: {text}{more}"


def forget_rank(*errors: BaseException) -> None:
    """Let errors of a job of one rank not name it."""
    for error in errors:
        if isinstance(error, CheckpointError):
            error.rank = None


def lost(call: str, ranks: Ranks, error: Exception) -> tuple[str, dict[int, BaseException]]:
    """Find out, after a collective broke, who is gone or whose error it was: message, errors by rank."""
    first_line = str(error).splitlines()[0] if str(error) else ""
    given_up = ranks.progress.given_up  # asked once: the watch may set it during the roll call
    cause = given_up or f"{type(error).__name__}: {first_line}"
    roll_call = ranks.roll_call(error)
    if roll_call is None:
        reason = "the rendezvous store, or the rank that holds it, does not answer"
        return f"the {call} failed: {reason} ({cause})", {}
    answers = dict(sorted(roll_call.answers.items()))
    silent = [rank for rank, answer in answers.items() if not answer.is_alive]
    failures: dict[int, BaseException] = {
        rank: CheckpointError(text, rank=rank)
        for rank, answer in answers.items()
        if (answer.is_alive or roll_call.is_complete) and (text := _blame(answer)) is not None
    }
    if silent and not roll_call.is_complete:
        text = (
            f"{len(silent):,} of {len(answers):,} ranks had not answered in time (rank {_names(silent)}), and others "
            "were late: the roll call is not complete"
        )
        own = f"; {summary(call, failures)}" if failures else ""
        return f"the {call} failed: {text} ({cause}){own}", some_of(failures)
    if silent:
        doing = answers[silent[0]].doing
        last = f"; when last heard of, rank {silent[0]} was {doing}" if doing else ""
        count = f" ({len(silent):,} ranks in all)" if len(silent) > _MAX_NAMES else ""
        return f"the {call} failed: rank {_names(silent)}{count} {_SILENT}{last} ({cause})", some_of(failures)
    if failures:
        return summary(call, failures, is_alone=ranks.size == 1), some_of(failures)
    if given_up is None:  # it was this rank that the others gave up
        says = (
            f"rank {rank} says: {each.failure}" for rank, each in answers.items() if each.cause == "watch"
        )
        cause = next(says, cause)
    return f"the {call} failed: {cause}", failures


def _names(ranks: Sequence[int]) -> str:
    return f"{', '.join(map(str, ranks[:_MAX_NAMES]))}{', ...' if len(ranks) > _MAX_NAMES else ''}"


def _blame(answer: Answer) -> str | None:
    """Return what a rank has to do with the loss of contact; None if nothing."""
    if not answer.is_alive:
        return _SILENT + (f"; when last heard of, it was {answer.doing}" if answer.doing else "")
    if answer.failure is not None and answer.cause == "own":
        return answer.failure
    return f"no progress for {answer.stuck_s:.0f} s: {answer.doing}" if answer.stuck_s else None
