"""The outcome of a roll call, and its short form, in which one rank tells it to all others."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Cause = Literal["own", "connection", "watch"]
"""Why a rank failed: by an error of its own, as a connection closed, or as its watch gave up others."""

MAX_DETAILED = 16
"""Of so many ranks of a kind more is told than their numbers."""

_MAX_TEXT = 2000


@dataclass(frozen=True)
class Answer:
    """A rank's answer in a roll call.

    Attributes:
        is_alive: it said something after it was asked.
        doing: its step when last heard; None if it was never heard.
        stuck_s: time without progress in work of its own; 0 while it waits for others.
        failure, cause: its error, if it has one, and where that comes from.
    """

    is_alive: bool
    doing: str | None = None
    stuck_s: float = 0.0
    failure: str | None = None
    cause: Cause = "own"


@dataclass(frozen=True)
class RollCall:
    """The answers of a roll call, by rank.

    Attributes:
        answers: of thousands that are silent or have failed, the first ones say more than that.
        is_complete: who has not answered would have: the others did long before its end.
    """

    answers: dict[int, Answer]
    is_complete: bool


def short_form(answers: Mapping[int, Answer], *, is_complete: bool) -> list[Any]:
    """Return a roll call as plain values: some hundred bytes, at any number of ranks."""
    silent = [rank for rank, answer in answers.items() if not answer.is_alive]
    alive = {rank: answer for rank, answer in answers.items() if answer.is_alive}
    chosen = sorted(silent)[:MAX_DETAILED]
    chosen += _unlike(alive, (r for r, a in alive.items() if a.failure is not None and a.cause == "own"))
    chosen += _unlike(alive, (rank for rank, answer in alive.items() if answer.stuck_s))
    chosen += [rank for rank, answer in sorted(alive.items()) if answer.cause == "watch"][:1]
    details = [
        [rank, a.is_alive, _cut(a.doing), a.stuck_s, _cut(a.failure), a.cause]
        for rank, a in ((rank, answers[rank]) for rank in dict.fromkeys(chosen))
    ]
    return [is_complete, _bits(silent), details]


def long_form(short: list[Any], size: int) -> RollCall:
    """Return the roll call of `size` ranks of which `short` is the short form."""
    is_complete, bits, details = short
    silent = int.from_bytes(zlib.decompress(base64.b64decode(bits)), "little")
    answers = {rank: Answer(not silent >> rank & 1) for rank in range(size)}
    answers |= {rank: Answer(*rest) for rank, *rest in details}
    return RollCall(answers, is_complete)


def _unlike(answers: Mapping[int, Answer], ranks: Iterable[int]) -> list[int]:
    """Choose the first ranks, those that say something new before those that do not."""
    first: dict[object, int] = {}
    again: list[int] = []
    for rank in sorted(ranks):
        said = (answers[rank].failure, answers[rank].doing)
        again += [rank] if first.setdefault(said, rank) != rank else []
    return [*first.values(), *again][:MAX_DETAILED]


def _bits(ranks: Iterable[int]) -> str:
    bits = bytearray()
    for rank in ranks:
        bits.extend(bytes(max(0, rank // 8 + 1 - len(bits))))
        bits[rank // 8] |= 1 << rank % 8
    return base64.b64encode(zlib.compress(bytes(bits))).decode()


def _cut(text: str | None) -> str | None:
    return text if text is None or len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..."
