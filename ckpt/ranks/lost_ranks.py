"""When ranks lose each other in a save, a load or a conversion: who is gone, and what to say about it."""

from __future__ import annotations

from collections.abc import Mapping

from ckpt.errors import CheckpointError
from ckpt.ranks.group import Ranks
from ckpt.ranks.heartbeat import LOST_CONTACT, Answer

__all__ = ["lost", "summary"]


def summary(what: str, failures: Mapping[int, BaseException]) -> str:
    """What failed, in one line: the first rank's error, and who failed too."""
    first = min(failures)
    cause = failures[first]
    text = (
        str(cause) if isinstance(cause, CheckpointError) else f"rank {first}: {type(cause).__name__}: {cause}"
    )
    others = [rank for rank in sorted(failures) if rank != first]
    more = f" (also failed: rank {', '.join(map(str, others[:10]))}{', ...' if len(others) > 10 else ''})"
    return f"the {what} failed: {text}{more if others else ''}"


def lost(what: str, ranks: Ranks, error: Exception) -> tuple[str, dict[int, BaseException]]:
    """A collective broke: find out who is gone, or whose error it was. Returns the message, and errors by rank."""
    first_line = str(error).splitlines()[0] if str(error) else ""
    cause = ranks.progress.given_up or f"{type(error).__name__}: {first_line}"
    answers = ranks.roll_call(error)
    if answers is None:
        where = "the rendezvous store, or the rank that holds it, does not answer"
        return f"the {what} failed: {where} ({cause})", {}
    failures: dict[int, BaseException] = {}
    for rank, answer in sorted(answers.items()):
        text = _blame(answer)
        if text is not None:
            failures[rank] = CheckpointError(text, rank=rank)
    silent = [rank for rank, answer in sorted(answers.items()) if not answer.is_alive]
    if not silent:
        said = [f"rank {rank} says: {answer.failure}" for rank, answer in sorted(answers.items())
                if rank != ranks.rank and (answer.failure or "").startswith(LOST_CONTACT)]  # fmt: skip
        # It was this rank that the others gave up.
        return summary(what, failures) if failures else f"the {what} failed: {[*said, cause][0]}", failures
    names = ", ".join(map(str, silent))
    doing = answers[silent[0]].doing
    last = f"; when last heard of, rank {silent[0]} was {doing}" if doing else ""
    return f"the {what} failed: rank {names} {_SILENT}{last} ({cause})", failures


_SILENT = "does not answer: killed, crashed, or stuck"


def _blame(answer: Answer) -> str | None:
    """What a rank has to do with the loss of contact; None if nothing."""
    if not answer.is_alive:
        return _SILENT + (f"; when last heard of, it was {answer.doing}" if answer.doing else "")
    if answer.failure is not None and not _is_lost_contact(answer.failure):
        return answer.failure
    return f"no progress for {answer.stuck_s:.0f} s: {answer.doing}" if answer.stuck_s else None


_LOST_CONTACT = (
    LOST_CONTACT,
    "onnection",
    "gloo",
    "imed out",
    "imeout",
    "DistBackendError",
    "DistNetworkError",
)


def _is_lost_contact(text: str) -> bool:
    """Whether an error tells of another rank's end, rather than of something of its own."""
    return any(word in text for word in _LOST_CONTACT)
