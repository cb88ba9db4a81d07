"""Make one error of what went wrong on the ranks: the same kind on all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from traceback import StackSummary
from typing import Any, Protocol, TypeGuard, TypeVar

from torch.distributed.checkpoint.api import CheckpointException

from ckpt.errors import CheckpointError, LoadFailed, SaveFailed
from ckpt.ranks.group import Ranks, RanksFailed
from ckpt.ranks.lost_ranks import by_cause, forget_rank, lost, summary
from ckpt.ranks.many_failures import some_of

_TRACEBACKS = 2

T = TypeVar("T")


class StepFailed(CheckpointException):
    """A step of a save or load failed, on all ranks.

    Attributes:
        count: how many ranks failed; `failures` has some of them.
    """

    def __init__(
        self,
        step: str,
        failures: Mapping[int, BaseException],
        count: int,
        stacks: Mapping[int, StackSummary] | None = None,
    ) -> None:
        stacks = stacks or {}
        wrapped = {rank: (failures[rank], stacks.get(rank, StackSummary())) for rank in sorted(failures)}
        super().__init__(step, wrapped)
        self.count = count


class Interrupted(Protocol):
    """What notes the interrupt of this rank that ended a save or load."""

    interrupt: BaseException | None


def is_specific(error: BaseException) -> TypeGuard[CheckpointError]:
    """Tell whether the type of an error says what is wrong: an interrupt, say, travels as the base class."""
    return isinstance(error, CheckpointError) and type(error) is not CheckpointError


def load_error(error: CheckpointException, place: str, *, is_alone: bool = False) -> CheckpointError:
    """Return the first rank's error if its type says what is wrong, else one that names them all."""
    failures = failures_of(error)
    first = failures[by_cause(failures)[0]]
    if is_specific(first):
        return first
    return LoadFailed(**_details("load", error, place, is_alone))


def save_error(error: CheckpointException, place: str, *, is_alone: bool = False) -> SaveFailed:
    """Return an error that names all that failed."""
    return SaveFailed(**_details("save", error, place, is_alone))


def _details(call: str, error: CheckpointException, place: str, is_alone: bool) -> dict[str, Any]:
    failures = failures_of(error)
    count = error.count if isinstance(error, StepFailed) else len(failures)
    message = summary(call, failures, count=count, is_alone=is_alone)
    return {"message": message, "url": place, "failures": some_of(failures), "failed_ranks": count}


def failures_of(error: CheckpointException) -> dict[int, BaseException]:
    """Return what failed on which rank."""
    return {rank: wrapped[0] for rank, wrapped in error.failures.items()}


def cause_of(error: CheckpointException) -> CheckpointException | None:
    """Return what a traceback should show below an error that tells of the failures; None if no more.

    The text of DCP's own holds a traceback of every rank, on every rank.
    """
    strange = {
        rank: error.failures[rank]
        for rank, failure in some_of(failures_of(error)).items()
        if not isinstance(failure, CheckpointError)
    }
    few = dict([*strange.items()][:_TRACEBACKS])
    return CheckpointException(str(error.args[0]).splitlines()[0], few) if few else None


@contextmanager
def interrupts(storage: Interrupted, ranks: Ranks) -> Iterator[None]:
    """Raise an interrupt of this rank (Ctrl-C, SystemExit) as it is: DCP makes a failure of it, for all ranks."""
    try:
        yield
    except CheckpointException as error:
        failure, _ = error.failures.get(ranks.rank, (error, None))
        interrupt = storage.interrupt or failure
        if isinstance(interrupt, Exception | CheckpointException):
            raise
        raise interrupt from None
    except Exception:
        if storage.interrupt is not None:  # of this rank, while it waited for others
            raise storage.interrupt from None
        raise
    except BaseException as error:  # between two steps: the others wait for this rank
        ranks.roll_call(error)
        raise


@contextmanager
def same_failure(failed: type[SaveFailed | LoadFailed], place: str, ranks: Ranks) -> Iterator[None]:
    """Turn any failure into an error of this library, of the same kind on every rank."""
    call = "save" if failed is SaveFailed else "load"
    try:
        yield
    except RanksFailed as error:
        failures, count = error.failures, error.count
        if error.is_refusal and error.own is not None:
            error.own.rank = None  # the same argument is wrong everywhere: no rank is at fault
            raise error.own from None
        message = summary(call, failures, count=count, is_alone=ranks.size == 1)
        raise failed(message, url=place, failures=failures, failed_ranks=count) from None
    except CheckpointError as error:
        is_alone = ranks.size == 1
        if is_specific(error):
            if is_alone:
                forget_rank(error)
            raise
        failures = {error.rank or 0: error}
        raise failed(summary(call, failures, is_alone=is_alone), url=place, failures=failures) from None
    except Exception as error:
        message, lost_ranks = lost(call, ranks, error)
        raise failed(message, url=place, failures=lost_ranks) from error


def same_outcome(ranks: Ranks, call: str, work: Callable[[], T]) -> T:
    """Return `work()` if it works on all ranks; else raise this rank's error, or the first."""
    try:
        return ranks.together(call, work)
    except RanksFailed as failed:
        raise failed.own or failed.failures[min(failed.failures)] from None
