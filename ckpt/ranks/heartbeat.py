"""Signs of life: each rank tells what it is doing, so that one that stopped is missed, and can be named.

Nothing is sent in the first seconds of a save or load. From then on a rank posts a beat to the rendezvous
store once per period. The first rank listens to all, the others to the first; so the store carries two
requests per rank and period, however many ranks there are.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from ckpt.ranks.progress import Progress

__all__ = ["LOST_CONTACT", "Answer", "Limits", "Watch"]

LOST_CONTACT = "lost contact"
"""So begins the failure of a rank that failed because of another."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """How the time until every rank has failed, `timeout_s`, is used.

    Attributes:
        stall_s: an operation of the storage without progress is given up; a rank without a beat is missed.
        stuck_s: a rank that is alive, but makes no progress and gives nothing up, is given up by the others.
        roll_call_s: how long to wait for the ranks' answers when contact is lost; on a machine that does more
            than it can, twice as long.
        period_s: between two beats.
    """

    timeout_s: float

    @property
    def stall_s(self) -> float:
        return 0.6 * self.timeout_s

    @property
    def stuck_s(self) -> float:
        return 0.7 * self.timeout_s

    @property
    def roll_call_s(self) -> float:
        return min(10.0, 0.15 * self.timeout_s)

    @property
    def period_s(self) -> float:
        return min(3.0, self.timeout_s / 30)


@dataclass(frozen=True)
class _Beat:
    call: int
    number: int
    idle_s: float
    is_waiting: bool
    doing: str
    failure: str | None


@dataclass(frozen=True)
class Answer:
    """What a rank is heard to say.

    Attributes:
        is_alive: it has said anything since it was asked.
        doing: what it was doing when last heard, if it ever was.
        stuck_s: for how long it has made no progress with what it does itself; 0 while it waits for others.
        failure: its error, if it knows of one.
    """

    is_alive: bool
    doing: str | None = None
    stuck_s: float = 0.0
    failure: str | None = None


@dataclass
class _Heard:
    beat: _Beat
    changed_at_s: float


class Watch:
    """The beats of one rank in one save or load, and what it hears of the others.

    Args:
        store: the rendezvous store.
        name: of the group, and of the kind of call; the same on all ranks.
        rank, size: in the group.
        call: the number of this call, the same on all ranks; what was said in others is not listened to.
        progress: what this rank is doing now.
        break_off: ends the collective in which this rank waits, with an error.
    """

    def __init__(
        self,
        store: Any,
        name: str,
        *,
        rank: int,
        size: int,
        call: int,
        limits: Limits,
        progress: Progress,
        break_off: Callable[[], None],
    ) -> None:
        self._store, self._name, self._rank, self._size, self._call = store, name, rank, size, call
        self._limits, self._progress, self._break_off = limits, progress, break_off
        self._heard: dict[int, _Heard] = {}
        self._failure: str | None = None
        self._asked_at_s: float | None = None
        self._first_since_asked: dict[int, _Beat] = {}
        self._signed_in = False
        self._talking = False
        self._gone = False
        self._clock = _Clock(2 * limits.period_s)
        self._begun_at_s = self._answered_at_s = self._clock.now_s()
        self._closed, self._wake = threading.Event(), threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._watch, name="ckpt-watch", daemon=True).start()

    def close(self) -> None:
        self._closed.set()
        self._wake.set()

    def roll_call(self, failure: str) -> dict[int, Answer] | None:
        """Tell the others that this rank has lost contact, and hear what they say; None if the store is gone."""
        self._clock.tick()
        self._failure, asked_at_s = failure, self._clock.now_s()
        self._asked_at_s = asked_at_s
        self._talk()
        self._wake.set()
        limit_s, slept_s = self._limits.roll_call_s, 0.0
        deadline = time.monotonic() + 2 * limit_s
        # Only time in which this process was run counts, up to the deadline: nobody would be heard otherwise.
        while slept_s < limit_s and time.monotonic() < deadline and not self._gone:
            if (
                self._signed_in
                and self._answered_at_s >= asked_at_s
                and all(self._answer(rank).is_alive for rank in self._others())
            ):
                break
            tick_s = min(0.05, self._limits.period_s)
            time.sleep(tick_s)
            slept_s += tick_s
            self._clock.tick()
        if self._gone or self._answered_at_s < asked_at_s:
            return None
        answers = {rank: self._answer(rank) for rank in self._others()}
        return {**answers, self._rank: Answer(True, failure=failure)}

    # -- judging: a thread that nothing can hold up ---------------------------------------------------------

    def _watch(self) -> None:
        while not self._closed.wait(self._limits.period_s):
            self._clock.tick()
            self._talk()
            reason = self._reason()
            if reason is not None:
                self._failure = self._failure or f"{LOST_CONTACT}: {reason}"
                self._progress.given_up = reason
                self._wake.set()
                self._break_off()
                break
        # gloo does not wake a rank that sends to ranks that have gone; nothing can be done but to say so.
        if not self._closed.wait(3 * self._limits.roll_call_s):
            _logger.error(
                "%s; rank %d was told to give up, and is still %s. If it does not end, end this process",
                self._failure,
                self._rank,
                self._progress,
            )

    def _reason(self) -> str | None:
        """Why this rank must not wait any longer, if so."""
        limits, now_s = self._limits, self._clock.now_s()
        if self._gone:
            return None  # there is nobody to ask any more; lost connections still tell
        if now_s - self._answered_at_s > limits.stall_s:
            return f"the rendezvous store has not answered for {now_s - self._answered_at_s:.0f} s"
        for rank, heard in sorted(self._heard.items()):
            beat, silent_s = heard.beat, now_s - heard.changed_at_s
            if beat.failure is not None:
                return f"rank {rank} says: {beat.failure}"
            if silent_s > limits.stall_s:
                return f"rank {rank} has not been heard of for {silent_s:.0f} s"
            if not beat.is_waiting and beat.idle_s > limits.stuck_s:
                return f"rank {rank} has made no progress for {beat.idle_s:.0f} s: {beat.doing}"
        return self._reason_of_all(now_s)

    def _reason_of_all(self, now_s: float) -> str | None:
        limits, beats = self._limits, [heard.beat for heard in self._heard.values()]
        missing = [rank for rank in self._listened() if rank not in self._heard]
        if missing and now_s - self._begun_at_s > limits.stall_s:
            return f"rank {missing[0]} has never been heard of"
        progress = self._progress
        everywhere = not missing and self._rank == 0 and progress.is_waiting
        idle_s = min([progress.idle_s, *(beat.idle_s for beat in beats)])
        if everywhere and idle_s > limits.stuck_s and all(beat.is_waiting for beat in beats):
            return f"all ranks have been waiting for each other for {idle_s:.0f} s"
        return None

    def _answer(self, rank: int) -> Answer:
        heard = self._heard.get(rank)
        if heard is None:
            return Answer(False)
        beat = heard.beat
        # What is heard first after the question may have been said before; who says something else then is alive.
        is_alive = beat.failure is not None or beat != self._first_since_asked.get(rank, beat)
        stuck_s = 0.0 if beat.is_waiting else beat.idle_s
        return Answer(is_alive, beat.doing, stuck_s if stuck_s > self._limits.stall_s else 0.0, beat.failure)

    def _others(self) -> list[int]:
        return [rank for rank in range(self._size) if rank != self._rank]

    def _listened(self) -> list[int]:
        """The ranks to listen to."""
        everyone = self._rank == 0 or self._asked_at_s is not None
        return self._others() if everyone else [0]

    # -- talking: a thread that a store can hold up ---------------------------------------------------------

    def _talk(self) -> None:
        if not self._talking:
            self._talking = True
            self._answered_at_s = self._clock.now_s()
            threading.Thread(target=self._beats, name="ckpt-beat", daemon=True).start()

    def _beats(self) -> None:
        try:
            # A connection of its own: on the shared one a long wait of someone else holds up everybody.
            store = self._store.clone()
            store.set_timeout(timedelta(seconds=self._limits.timeout_s))
            number = 0
            while not self._closed.is_set():
                self._clock.tick()
                number += 1
                failure = self._failure
                self._say(store, number, failure)
                self._listen(store)
                self._answered_at_s = self._clock.now_s()
                self._signed_in = failure is not None
                self._wake.wait(self._limits.period_s / (4 if self._asked_at_s is not None else 1))
                self._wake.clear()
        except Exception as error:
            self._gone = True
            _logger.warning("the rendezvous store does not answer any more: %s", error)

    def _say(self, store: Any, number: int, failure: str | None) -> None:
        progress = self._progress
        said = [self._call, number, progress.idle_s, progress.is_waiting, str(progress), failure]
        store.set(self._key(self._rank), json.dumps(said))

    def _listen(self, store: Any) -> None:
        asked, ranks = self._asked_at_s is not None, self._listened()
        if not store.check([self._key(rank) for rank in ranks]):
            ranks = [rank for rank in ranks if store.check([self._key(rank)])]
        if not ranks:
            return
        now_s = self._clock.now_s()
        for rank, said in zip(ranks, store.multi_get([self._key(rank) for rank in ranks]), strict=True):
            beat, heard = _Beat(*json.loads(said)), self._heard.get(rank)
            if beat.call != self._call:
                continue
            if asked:
                self._first_since_asked.setdefault(rank, beat)
            if heard is None or beat != heard.beat:
                self._heard[rank] = _Heard(beat, now_s)

    def _key(self, rank: int) -> str:
        # The same for every save: a store that runs for months does not fill up.
        return f"ckpt/beat/{self._name}/{rank}"


class _Clock:
    """Time in which this process was run: while it is stopped, or kept from running, no silence of others grows.

    Args:
        longest_s: more between two ticks does not count.
    """

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._lock = threading.Lock()
        self._counted_s, self._ticked_at_s = 0.0, time.monotonic()

    def tick(self) -> None:
        with self._lock:
            self._counted_s, self._ticked_at_s = self.now_s(), time.monotonic()

    def now_s(self) -> float:
        return self._counted_s + min(time.monotonic() - self._ticked_at_s, self._longest_s)
