"""Exchange heartbeats, so that a rank that stopped is missed, and named with what it was doing.

After the first seconds of a save or load, a rank posts a beat to the rendezvous store once per
period. The first rank listens to all, the others to the first: two requests per rank and period.

When contact is lost, the first rank calls the roll: it listens for who answers, and its beat tells
the outcome to all. If it is silent itself, one of three deputies does the same in its place.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ckpt.consistency import environment
from ckpt.ranks.progress import Progress
from ckpt.ranks.rendezvous import Connection, connect, forget
from ckpt.ranks.roll_call import Answer, Cause, RollCall, long_form, short_form

_GROUP = 64
"""How many beats are asked for at a time: who has sent none yet is found without asking for each."""

_BEAT_COST_S = 3e-3
"""Beats of so many ranks in so much longer periods take 1.5 % of a core of the store (measured)."""

_ROLL_CALL_COST_S = 1e-4
"""As long as a roll call lasts, they may take a third of it."""

_SPREAD = 0.6180339887498949
"""Multiples of it, without their integers, fill an interval evenly."""

_logger = logging.getLogger(__name__)


_STUCK = "%s; rank %d was told to give up, but is still %s. If it does not end soon, kill this process"


class Limits:
    """Divide `timeout_s`, the time until every rank has failed.

    Attributes:
        stall_s: after so long a storage operation without progress, or a silent rank, is given up.
        stuck_s: after so long without progress, the others give up a rank that is alive.
        roll_call_s: for the ranks to answer when contact is lost; twice that while some are late.
        period_s: between two beats; more than 3 s from 1,000 ranks on.
        first_period_s: the same for the first rank, which listens to all, and so misses one sooner.
        roll_call_period_s: the same during a roll call.
    """

    def __init__(self, timeout_s: float, size: int = 1) -> None:
        self.timeout_s = timeout_s
        self.stall_s = 0.6 * timeout_s
        self.stuck_s = 0.7 * timeout_s
        shortest_s = min(3.0, timeout_s / 30)
        self.period_s = max(shortest_s, min(_BEAT_COST_S * size, timeout_s / 12))
        self.first_period_s = max(shortest_s, self.period_s / 3)
        self.roll_call_period_s = max(shortest_s / 4, min(_ROLL_CALL_COST_S * size, self.period_s / 4))
        # Who has not noticed the loss hears of it within a period.
        self.roll_call_s = min(max(10.0, 1.25 * self.period_s), 0.15 * timeout_s)


@dataclass(frozen=True)
class _Beat:
    call: int
    number: int
    idle_s: float
    is_waiting: bool
    doing: str
    failure: str | None
    cause: Cause = "own"
    roll_call: list[Any] | None = None  # its outcome, in short form


def judges_of(size: int) -> list[int]:
    """List the ranks of which the first that lives calls the roll: not all of one node."""
    return sorted({0, *(max(1, size * part // 4) for part in (1, 2, 3) if size > 1)})


@dataclass(eq=False)
class Watch:
    """Post the beats of one rank in one save or load, and judge those of the others.

    Args:
        store: the rendezvous store.
        name: of the group and the kind of call; the same on all ranks.
        call: its number, the same on all ranks; beats of other calls do not count.
        break_off: ends the collective in which this rank waits, with an error.
    """

    store: Any
    name: str
    rank: int
    size: int
    call: int
    limits: Limits
    progress: Progress
    break_off: Callable[[], None]

    def __post_init__(self) -> None:
        self._heard: dict[int, tuple[_Beat, float]] = {}
        self._failure: str | None = None
        self._cause: Cause = "own"
        self._asked_at_s: float | None = None
        self._judging_since_s: float | None = None
        self._first_since_asked: dict[int, _Beat] = {}
        self._outcome: list[Any] | None = None
        self._roll_call: RollCall | None = None
        self._judges = judges_of(self.size)
        self._own_period_s = self.limits.period_s if self.rank else self.limits.first_period_s
        self._signed_in = self._talking = self._gone = False
        self._listened_at_s = self._newest_at_s = -1.0
        self._clock = _Clock(2 * self.limits.period_s)
        self._begun_at_s = self._answered_at_s = self._clock.now_s()
        self._closed, self._wake, self._news = threading.Event(), threading.Event(), threading.Event()

    def start(self) -> None:
        environment.start_thread(self._watch, "ckpt-watch")

    def close(self) -> None:
        self._closed.set()
        self._wake.set()
        self._news.set()

    def roll_call(self, failure: str, cause: Cause = "own") -> RollCall | None:
        """Tell the others of this rank's failure, and return their answers; None if the store is gone.

        The first rank that lives asks, in its thread that talks; its beat tells all others.
        With many ranks on a store or on cores that cannot serve them in time, those who live are late too. So nobody is
        missed before a whole round of questions, begun after half of the time without a new answer, brings none either.
        """
        self._clock.tick()
        asked_at_s = self._clock.now_s()
        if self._cause != "watch" or cause == "own":  # else the closed connections are this watch's own doing
            self._cause, self._failure = cause, failure
        self._ask()
        self._talk()
        limit_s, slept_s = self.limits.roll_call_s, 0.0
        deadline = environment.monotonic() + 4 * limit_s
        # Up to the deadline, only time in which this process ran counts: a starved one would hear nobody.
        while slept_s < 2.5 * limit_s and environment.monotonic() < deadline and not self._gone:
            if self._roll_call is not None and self._signed_in:
                break
            if slept_s > limit_s and self._answered_at_s < asked_at_s:
                break  # nor will the store answer
            is_alone = not any(self._answer(rank).is_alive for rank in self._judges)
            if is_alone and self._judging_since_s is None and slept_s > 1.5 * limit_s:
                break
            tick_s = min(0.05, self.limits.period_s)
            environment.sleep(tick_s)
            slept_s += tick_s
            self._clock.tick()
        return self._outcome_for(asked_at_s, Answer(True, failure=self._failure, cause=self._cause))

    def _outcome_for(self, asked_at_s: float, own: Answer) -> RollCall | None:
        roll_call = self._roll_call
        if roll_call is not None:
            if self._judging_since_s is not None:  # this process may hold the store, and end
                environment.sleep(self.limits.roll_call_period_s)
            return RollCall({**roll_call.answers, self.rank: own}, roll_call.is_complete)
        if self._gone or self._answered_at_s < asked_at_s:
            return None
        answers = {rank: self._answer(rank) for rank in self._judges if rank != self.rank}
        return RollCall({**answers, self.rank: own}, not any(each.is_alive for each in answers.values()))

    # -- judge: in a thread that nothing can hold up --------------------------------------------------------

    def _watch(self) -> None:
        # The ranks do not all begin to talk, and connect, at the same moment.
        period_s = self.limits.period_s
        environment.wait(self._closed, period_s * (1 + self.rank * _SPREAD % 1))
        while not self._closed.is_set():
            self._clock.tick()
            self._talk()
            self._news.clear()
            reason = self._reason()
            if reason is not None:
                if self._failure is None:
                    self._cause, self._failure = "watch", f"lost contact: {reason}"
                self.progress.given_up = reason
                self._ask()
                self.break_off()
                break
            environment.wait(self._news, period_s)
        # A collective of the caller's group may wait on: all that is left is to say so.
        if not environment.wait(self._closed, 3 * self.limits.roll_call_s):
            _logger.error(_STUCK, self._failure, self.rank, self.progress)

    def _reason(self) -> str | None:
        """Return why this rank must not wait any longer, or None."""
        limits, now_s = self.limits, self._clock.now_s()
        if self._gone:
            return None  # no beat can arrive any more; closed connections still end a collective
        if now_s - self._answered_at_s > limits.stall_s:
            return f"the rendezvous store has not answered for {now_s - self._answered_at_s:.0f} s"
        for rank in sorted(self._heard):
            beat, changed_at_s = self._heard[rank]
            # While the store does not answer, nobody is heard.
            fault = _fault(rank, beat, self._answered_at_s - changed_at_s, limits)
            if fault is not None:
                return fault
        return self._reason_of_all()

    def _reason_of_all(self) -> str | None:
        limits, beats = self.limits, [beat for beat, _ in self._heard.values()]
        missing = [rank for rank in self._listened() if rank not in self._heard]
        if missing and self._answered_at_s - self._begun_at_s > limits.stall_s:
            return f"rank {missing[0]} has never been heard of"
        everywhere = not missing and self.rank == 0 and self.progress.is_waiting
        idle_s = min([self.progress.idle_s, *(beat.idle_s for beat in beats)])
        if everywhere and idle_s > limits.stuck_s and all(beat.is_waiting for beat in beats):
            return f"all ranks have been waiting for each other for {idle_s:.0f} s"
        return None

    def _answer(self, rank: int) -> Answer:
        beat, _ = self._heard.get(rank, (None, 0.0))
        return _answer(beat, self._first_since_asked.get(rank), self.limits)

    def _others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def _listened(self) -> list[int]:
        if self.rank == 0 or self._judging_since_s is not None:
            return self._others()
        return [0] if self._asked_at_s is None else [rank for rank in self._judges if rank != self.rank]

    # -- call the roll: in the thread that talks ------------------------------------------------------------

    def _ask(self) -> None:
        if self._asked_at_s is None:
            self._asked_at_s = self._clock.now_s()
        self._wake.set()

    def _call_the_roll(self) -> None:
        """Become the judge if it is this rank's turn; note the outcome when it is clear."""
        now_s, limit_s = self._clock.now_s(), self.limits.roll_call_s
        if self._asked_at_s is None or self.rank not in self._judges or self._roll_call is not None:
            return
        if self._judging_since_s is None:
            before = [rank for rank in self._judges if rank < self.rank]
            is_known_silent = all(map(self._is_silent, before))
            is_late = now_s - self._asked_at_s >= limit_s / 2
            if is_known_silent or (is_late and not any(self._answer(rank).is_alive for rank in before)):
                self._judging_since_s = now_s
            return
        since_s = self._judging_since_s
        answers = {rank: self._answer(rank) for rank in self._others()}
        is_quiet = self._listened_at_s - max(since_s, self._newest_at_s) >= limit_s / 2
        is_heard = all(answer.is_alive for answer in answers.values())
        is_over = now_s - since_s >= (limit_s if is_quiet else 2 * limit_s)
        if not is_heard and not is_over:
            return
        own = Answer(
            True, str(self.progress), _stuck_s(self.progress, self.limits), self._failure, self._cause
        )
        self._outcome = short_form(answers | {self.rank: own}, is_complete=is_heard or is_quiet)

    def _is_silent(self, rank: int) -> bool:
        heard_at_s = self._heard[rank][1] if rank in self._heard else self._begun_at_s
        return self._answered_at_s - heard_at_s > self.limits.stall_s

    # -- talk: in a thread that the rendezvous store can hold up --------------------------------------------

    def _talk(self) -> None:
        if not self._talking:
            self._talking = True
            self._answered_at_s = self._clock.now_s()
            environment.start_thread(self._beats, "ckpt-beat")

    def _beats(self) -> None:
        try:
            connection = connect(self.store, self.limits.timeout_s)
            number = 0
            while not self._closed.is_set():
                self._clock.tick()
                number += 1
                failure = self._failure
                self._say(connection.store, number, failure)
                self._listen(connection)
                self._answered_at_s = self._clock.now_s()
                self._signed_in = failure is not None
                self._call_the_roll()
                self._news.set()
                if self._outcome is not None and self._roll_call is None:
                    continue  # to tell it
                calm = self._asked_at_s is None
                environment.wait(self._wake, self._own_period_s if calm else self.limits.roll_call_period_s)
                self._wake.clear()
        except Exception as error:
            self._gone = True
            forget(self.store)
            _logger.warning("heartbeats end, as the rendezvous store does not answer: %s", error)

    def _say(self, store: Any, number: int, failure: str | None) -> None:
        progress, outcome = self.progress, self._outcome
        state = progress.idle_s, progress.is_waiting, str(progress)
        beat = [self.call, number, *state, failure, self._cause, outcome]
        store.set(self._key(self.rank), json.dumps(beat))
        if outcome is not None and self._roll_call is None:
            self._roll_call = long_form(outcome, self.size)

    def _listen(self, connection: Connection) -> None:
        is_asking, began_at_s = self._asked_at_s is not None, self._clock.now_s()
        ranks = self._listened()
        for start in range(0, len(ranks), _GROUP):
            self._listen_to(connection, ranks[start : start + _GROUP], is_asking)
            self._answered_at_s = self._clock.now_s()
        if is_asking:
            self._listened_at_s = began_at_s

    def _listen_to(self, connection: Connection, ranks: Sequence[int], is_asking: bool) -> None:
        keys = {self._key(rank): rank for rank in ranks}
        texts, now_s = connection.read([*keys]), self._clock.now_s()
        for key, text in texts.items():
            rank, beat = keys[key], _Beat(*json.loads(text))
            if beat.call != self.call:
                continue
            was_alive = self._answer(rank).is_alive
            if is_asking:
                self._first_since_asked.setdefault(rank, beat)
                if beat.roll_call is not None and self._roll_call is None and rank in self._judges:
                    self._roll_call = _told(beat.roll_call, beat, rank, self.limits, self.size)
            if rank not in self._heard or beat != self._heard[rank][0]:
                self._heard[rank] = (beat, now_s)
            if is_asking and not was_alive and self._answer(rank).is_alive:
                self._newest_at_s = now_s

    def _key(self, rank: int) -> str:
        # The same for every save: a store that runs for months does not fill up.
        return f"ckpt/beat/{self.name}/{rank}"


def _fault(rank: int, beat: _Beat, silent_s: float, limits: Limits) -> str | None:
    """Return why the others must not wait for a rank, or None."""
    if beat.failure is not None:
        return f"rank {rank} says: {beat.failure}"
    if silent_s > limits.stall_s:
        return f"rank {rank} has not been heard of for {silent_s:.0f} s"
    if not beat.is_waiting and beat.idle_s > limits.stuck_s:
        return f"rank {rank} has made no progress for {beat.idle_s:.0f} s: {beat.doing}"
    return None


def _answer(beat: _Beat | None, first: _Beat | None, limits: Limits) -> Answer:
    """Return what a rank says; `first` is the first beat that was heard after the question, if any."""
    if beat is None:
        return Answer(False)
    # The first may be older than the question; a second, different one is not.
    is_alive = beat.failure is not None or (first is not None and beat != first)
    return Answer(is_alive, beat.doing, _stuck_s(beat, limits), beat.failure, beat.cause)


def _stuck_s(rank: _Beat | Progress, limits: Limits) -> float:
    """Return the time without progress in work of its own, if that is long."""
    return rank.idle_s if not rank.is_waiting and rank.idle_s > limits.stall_s else 0.0


def _told(outcome: list[Any], beat: _Beat, rank: int, limits: Limits, size: int) -> RollCall:
    """Return the outcome of the roll call of another rank, who also speaks for itself."""
    roll_call = long_form(outcome, size)
    own_words = Answer(True, beat.doing, _stuck_s(beat, limits), beat.failure, beat.cause)
    return RollCall({**roll_call.answers, rank: own_words}, roll_call.is_complete)


class _Clock:
    """Count the time in which this process ran: more than `longest_s` between two ticks does not count.

    So the silence of others does not grow while this process is stopped.
    """

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._lock = threading.Lock()
        self._counted_s, self._ticked_at_s = 0.0, environment.monotonic()

    def tick(self) -> None:
        with self._lock:
            self._counted_s, self._ticked_at_s = self.now_s(), environment.monotonic()

    def now_s(self) -> float:
        return self._counted_s + min(environment.monotonic() - self._ticked_at_s, self._longest_s)
