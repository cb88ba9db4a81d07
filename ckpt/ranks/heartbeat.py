"""Exchange heartbeats, so that a rank that stopped is missed, and named with what it was doing.

After the first seconds of a save or load, a rank posts a beat to the rendezvous store once per
period. The first rank listens to all, the others to the first: three requests per rank and period.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

from ckpt.consistency import environment
from ckpt.ranks.progress import Progress

Cause = Literal["own", "connection", "watch"]
"""Why a rank failed: by an error of its own, as a connection closed, or as its watch gave up others."""

_GROUP = 64
"""How many beats are asked for at a time: who has sent none yet is found without asking for each."""

_logger = logging.getLogger(__name__)


class Limits:
    """Divide `timeout_s`, the time until every rank has failed.

    Attributes:
        stall_s: after so long a storage operation without progress, or a silent rank, is given up.
        stuck_s: after so long without progress, the others give up a rank that is alive.
        roll_call_s: for the ranks to answer when contact is lost; twice that on a busy machine.
        period_s: between two beats.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.stall_s = 0.6 * timeout_s
        self.stuck_s = 0.7 * timeout_s
        self.roll_call_s = min(10.0, 0.15 * timeout_s)
        self.period_s = min(3.0, timeout_s / 30)


@dataclass(frozen=True)
class _Beat:
    call: int
    number: int
    idle_s: float
    is_waiting: bool
    doing: str
    failure: str | None
    cause: Cause = "own"


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
        is_complete: who has not answered would have: the others did long before its end.
    """

    answers: dict[int, Answer]
    is_complete: bool


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
        self._first_since_asked: dict[int, _Beat] = {}
        self._signed_in = self._talking = self._gone = False
        self._listened_at_s = self._newest_at_s = -1.0
        self._clock = _Clock(2 * self.limits.period_s)
        self._begun_at_s = self._answered_at_s = self._clock.now_s()
        self._closed, self._wake = threading.Event(), threading.Event()

    def start(self) -> None:
        environment.start_thread(self._watch, "ckpt-watch")

    def close(self) -> None:
        self._closed.set()
        self._wake.set()

    def roll_call(self, failure: str, cause: Cause = "own") -> RollCall | None:
        """Tell the others of this rank's failure, and return their answers; None if the store is gone.

        With many ranks on a store or on cores that cannot serve them in time, those who live are
        late too. So nobody is missed before a whole round of questions, begun in the second half of
        the time, has brought nobody new.
        """
        self._clock.tick()
        asked_at_s = self._clock.now_s()
        self._cause, self._failure, self._asked_at_s = cause, failure, asked_at_s
        self._talk()
        self._wake.set()
        limit_s, slept_s = self.limits.roll_call_s, 0.0
        deadline = environment.monotonic() + 2 * limit_s
        # Up to the deadline, only time in which this process ran counts: a starved one would hear nobody.
        while slept_s < limit_s and environment.monotonic() < deadline and not self._gone:
            is_settled = self._signed_in and self._answered_at_s >= asked_at_s
            if is_settled and all(self._answer(rank).is_alive for rank in self._others()):
                break
            tick_s = min(0.05, self.limits.period_s)
            environment.sleep(tick_s)
            slept_s += tick_s
            self._clock.tick()
        answers = {rank: self._answer(rank) for rank in self._others()}
        if self._gone or self._answered_at_s < asked_at_s:
            return None
        half_s = asked_at_s + limit_s / 2
        is_complete = all(answer.is_alive for answer in answers.values()) or (
            self._newest_at_s < half_s <= self._listened_at_s
        )
        answers[self.rank] = Answer(True, failure=failure, cause=cause)
        return RollCall(answers, is_complete)

    # -- judge: in a thread that nothing can hold up --------------------------------------------------------

    def _watch(self) -> None:
        while not environment.wait(self._closed, self.limits.period_s):
            self._clock.tick()
            self._talk()
            reason = self._reason()
            if reason is not None:
                if self._failure is None:
                    self._cause, self._failure = "watch", f"lost contact: {reason}"
                self.progress.given_up = reason
                self._wake.set()
                self.break_off()
                break
        # gloo does not wake a rank that sends to ranks that are gone; all that is left is to say so.
        if not environment.wait(self._closed, 3 * self.limits.roll_call_s):
            _logger.error(
                "%s; rank %d was told to give up, but is still %s. If it does not end soon, kill this process",
                self._failure,
                self.rank,
                self.progress,
            )

    def _reason(self) -> str | None:
        """Return why this rank must not wait any longer, or None."""
        limits, now_s = self.limits, self._clock.now_s()
        if self._gone:
            return None  # no beat can arrive any more; closed connections still end a collective
        if now_s - self._answered_at_s > limits.stall_s:
            return f"the rendezvous store has not answered for {now_s - self._answered_at_s:.0f} s"
        for rank in sorted(self._heard):
            beat, changed_at_s = self._heard[rank]
            silent_s = now_s - changed_at_s
            if beat.failure is not None:
                return f"rank {rank} says: {beat.failure}"
            if silent_s > limits.stall_s:
                return f"rank {rank} has not been heard of for {silent_s:.0f} s"
            if not beat.is_waiting and beat.idle_s > limits.stuck_s:
                return f"rank {rank} has made no progress for {beat.idle_s:.0f} s: {beat.doing}"
        return self._reason_of_all(now_s)

    def _reason_of_all(self, now_s: float) -> str | None:
        limits, beats = self.limits, [beat for beat, _ in self._heard.values()]
        missing = [rank for rank in self._listened() if rank not in self._heard]
        if missing and now_s - self._begun_at_s > limits.stall_s:
            return f"rank {missing[0]} has never been heard of"
        progress = self.progress
        everywhere = not missing and self.rank == 0 and progress.is_waiting
        idle_s = min([progress.idle_s, *(beat.idle_s for beat in beats)])
        if everywhere and idle_s > limits.stuck_s and all(beat.is_waiting for beat in beats):
            return f"all ranks have been waiting for each other for {idle_s:.0f} s"
        return None

    def _answer(self, rank: int) -> Answer:
        if rank not in self._heard:
            return Answer(False)
        beat, _ = self._heard[rank]
        # The first beat heard after the question may be older than it; a second, different one is not.
        is_alive = beat.failure is not None or beat != self._first_since_asked.get(rank, beat)
        is_stuck = not beat.is_waiting and beat.idle_s > self.limits.stall_s
        return Answer(is_alive, beat.doing, beat.idle_s if is_stuck else 0.0, beat.failure, beat.cause)

    def _others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def _listened(self) -> list[int]:
        listens_to_all = self.rank == 0 or self._asked_at_s is not None
        return self._others() if listens_to_all else [0]

    # -- talk: in a thread that the rendezvous store can hold up --------------------------------------------

    def _talk(self) -> None:
        if not self._talking:
            self._talking = True
            self._answered_at_s = self._clock.now_s()
            environment.start_thread(self._beats, "ckpt-beat")

    def _beats(self) -> None:
        try:
            # Not on the shared connection, where a long wait of another user holds up all requests.
            store = self.store.clone()
            store.set_timeout(timedelta(seconds=self.limits.timeout_s))
            number = 0
            while not self._closed.is_set():
                self._clock.tick()
                number += 1
                progress, failure = self.progress, self._failure
                state = [progress.idle_s, progress.is_waiting, str(progress)]
                beat = [self.call, number, *state, failure, self._cause]
                store.set(self._key(self.rank), json.dumps(beat))
                self._listen(store)
                self._answered_at_s = self._clock.now_s()
                self._signed_in = failure is not None
                period_s = self.limits.period_s / (4 if self._asked_at_s is not None else 1)
                environment.wait(self._wake, period_s)
                self._wake.clear()
        except Exception as error:
            self._gone = True
            _logger.warning("heartbeats end, as the rendezvous store does not answer: %s", error)

    def _listen(self, store: Any) -> None:
        is_asking, began_at_s = self._asked_at_s is not None, self._clock.now_s()
        ranks = self._listened()
        for start in range(0, len(ranks), _GROUP):
            self._listen_to(store, ranks[start : start + _GROUP], is_asking)
            self._answered_at_s = self._clock.now_s()
        if is_asking:
            self._listened_at_s = began_at_s

    def _listen_to(self, store: Any, ranks: list[int], is_asking: bool) -> None:
        if not store.check([self._key(rank) for rank in ranks]):
            ranks = [rank for rank in ranks if store.check([self._key(rank)])]
        if not ranks:
            return
        now_s = self._clock.now_s()
        for rank, text in zip(ranks, store.multi_get([self._key(rank) for rank in ranks]), strict=True):
            beat = _Beat(*json.loads(text))
            if beat.call != self.call:
                continue
            was_alive = self._answer(rank).is_alive
            if is_asking:
                self._first_since_asked.setdefault(rank, beat)
            if rank not in self._heard or beat != self._heard[rank][0]:
                self._heard[rank] = (beat, now_s)
            if is_asking and not was_alive and self._answer(rank).is_alive:
                self._newest_at_s = now_s

    def _key(self, rank: int) -> str:
        # The same for every save: a store that runs for months does not fill up.
        return f"ckpt/beat/{self.name}/{rank}"


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
