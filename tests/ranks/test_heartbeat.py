"""Heartbeats in virtual time: who is missed, when, and who is not. `test_deadlines.py` has real ranks and clocks."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from ckpt.consistency import environment
from ckpt.ranks.heartbeat import Limits, Watch, judges_of
from ckpt.ranks.progress import Progress
from ckpt.ranks.rendezvous import Connection
from ckpt.ranks.roll_call import Answer, Cause, RollCall
from ckpt.testing.choices import Seeded
from ckpt.testing.virtual_time import Process, VirtualTime

HOUR_S = 3600.0


class Rendezvous:
    """A rendezvous store: requests take a moment, or for ever, or fail."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.requests: Counter[str] = Counter()
        self.read_keys = 0
        self.hangs = self.is_gone = False

    def clone(self) -> Rendezvous:
        return self

    def set_timeout(self, timeout: object) -> None:
        pass

    def set(self, key: str, value: str) -> None:
        self._request("set")
        self.values[key] = value.encode()

    def check(self, keys: Sequence[str]) -> bool:
        self._request("check")
        return all(key in self.values for key in keys)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        self._request("multi_get")
        self.read_keys += len(keys)
        return [self.values[key] for key in keys]

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self._request("compare_set")
        self.read_keys += 1
        value = self.values.get(key, expected.encode())
        if value == expected.encode() and key in self.values:
            self.values[key] = value = desired.encode()
        return value

    def _request(self, name: str) -> None:
        self.requests[name] += 1
        environment.sleep(0.001)
        if self.hangs:
            environment.sleep(50 * HOUR_S)
        if self.hangs or self.is_gone:
            raise ConnectionError("reset by peer")


class Rank:
    """A rank: its node has the program and the watch's threads."""

    def __init__(self, job: Job, number: int, call: int = 1) -> None:
        self.job, self.number = job, number
        self.progress, self.broken = Progress(), threading.Event()
        self.gave_up_at_s: float | None = None
        self.answers: dict[int, Answer] | None = None
        self.roll_call: RollCall | None = None
        self.watch = Watch(
            job.store, "test", rank=number, size=job.size, call=call, limits=job.limits,
            progress=self.progress, break_off=self._break_off,
        )  # fmt: skip

    def _break_off(self) -> None:
        self.gave_up_at_s = environment.monotonic()
        self.broken.set()

    def start(self, work: Callable[[Rank], None]) -> None:
        def run() -> None:
            self.watch.start()
            work(self)
            self.watch.close()

        self.job.time.start("main", str(self.number), run)

    def sleep(self, duration_s: float) -> bool:
        """As in a collective: until that time has passed, or the watch breaks it off."""
        return not environment.wait(self.broken, duration_s)

    def call_roll(self) -> None:
        self.fail("Connection closed", "connection")

    def fail(self, text: str, cause: Cause = "own") -> None:
        self.roll_call = self.watch.roll_call(text, cause)
        self.answers = None if self.roll_call is None else self.roll_call.answers


class Job:
    def __init__(self, size: int, timeout_s: float = 100.0, seed: int = 0, *, beats_of: int = 1) -> None:
        self.time, self.store = VirtualTime(Seeded(seed)), Rendezvous()
        self.size, self.limits = size, Limits(timeout_s, beats_of)
        with environment.replaced(self.time):
            self.ranks = [Rank(self, number) for number in range(size)]

    def run(self, *programs: Callable[[Rank], None]) -> None:
        with environment.replaced(self.time):
            for rank, program in zip(self.ranks, programs, strict=True):
                rank.start(program)
            self.time.run()

    def threads_of(self, rank: int) -> Iterator[Process]:
        return (process for process in self.time.processes if process.node == str(rank) and not process.done)

    def stop(self, *ranks: int, until_s: float = 50 * HOUR_S) -> None:
        """As SIGSTOP does: no thread of theirs runs before that time."""
        for rank in ranks:
            for process in self.threads_of(rank):
                process.wakes_at_s, process.until = until_s, None


def works(duration_s: float, step_s: float = 1.0) -> Callable[[Rank], None]:
    """Get on for so long, a step at a time, unless this rank is given up; then wait for the others."""

    def program(rank: Rank) -> None:
        for number in range(int(duration_s / step_s)):
            rank.progress.begin(f"step {number}")
            if not rank.sleep(step_s):
                break
        waits(rank)

    return program


def waits(rank: Rank) -> None:
    """Wait for the others, as in a collective; call the roll when it breaks."""
    rank.progress.wait_for("all ranks to have written")
    if not rank.sleep(HOUR_S):
        rank.call_roll()


def does_not_get_on(rank: Rank) -> None:
    """Live, and do nothing, until the others have given this rank up and long after."""
    rank.progress.begin("writing c")
    rank.sleep(HOUR_S)
    rank.call_roll()


# -- who is missed -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("timeout_s", [1.0, 10.0, 600.0])
@pytest.mark.parametrize(("size", "stopped"), [(2, 0), (2, 1), (3, 2), (8, 0), (8, 5)])
@pytest.mark.parametrize("seed", range(3))
def test_a_stopped_rank_is_named_in_time(size: int, stopped: int, timeout_s: float, seed: int) -> None:
    job = Job(size, timeout_s, seed)
    began_s = 2.5 * job.limits.period_s

    def stop(rank: Rank) -> None:
        rank.progress.begin("writing c")
        rank.sleep(began_s)
        job.stop(stopped)
        environment.sleep(40 * HOUR_S)

    job.run(*(stop if number == stopped else waits for number in range(size)))
    for rank in job.ranks:
        if rank.number == stopped:
            continue
        assert rank.gave_up_at_s is not None
        assert rank.gave_up_at_s - began_s <= timeout_s
        assert rank.answers is not None
        assert rank.roll_call is not None
        assert rank.roll_call.is_complete
        assert not rank.answers[stopped].is_alive
        assert rank.answers[stopped].doing == "writing c"
        assert all(rank.answers[other].is_alive for other in range(size) if other != stopped)


def test_a_rank_that_never_came_is_named() -> None:
    job = Job(3)
    job.run(waits, lambda rank: rank.watch.close(), waits)
    assert job.ranks[0].progress.given_up == "rank 1 has never been heard of"
    assert str(job.ranks[2].progress.given_up).startswith("rank 0 says: ")


def test_a_rank_that_does_not_get_on_is_named() -> None:
    job = Job(3)
    job.run(waits, does_not_get_on, waits)
    assert str(job.ranks[0].progress.given_up).startswith("rank 1 has made no progress for 7")
    for rank in (job.ranks[0], job.ranks[2]):
        assert rank.answers is not None
        assert rank.answers[1].is_alive
        assert rank.answers[1].stuck_s > job.limits.stall_s
        assert rank.answers[1].doing == "writing c"
        # Why it gave up, and not that the connections closed, which was its own doing.
        assert (rank.answers[0].cause, rank.answers[0].failure) == (
            "watch",
            f"lost contact: {job.ranks[0].progress.given_up}",
        )


def test_ranks_that_wait_for_each_other_are_noticed() -> None:
    job = Job(4)
    job.run(*[waits] * 4)
    assert str(job.ranks[0].progress.given_up).startswith("all ranks have been waiting for each other for 7")
    assert all(rank.gave_up_at_s is not None and rank.gave_up_at_s < 80 for rank in job.ranks)


def test_the_failure_of_one_reaches_all() -> None:
    job = Job(4)

    def fails(rank: Rank) -> None:
        rank.sleep(10)
        rank.fail("ValueError: no")

    job.run(waits, waits, fails, waits)
    assert job.ranks[0].progress.given_up == "rank 2 says: ValueError: no"
    assert all(rank.gave_up_at_s is not None for rank in job.ranks if rank.number != 2)
    for rank in job.ranks:
        assert rank.answers is not None
        assert {number: answer.cause for number, answer in rank.answers.items()}[2] == "own"


def test_a_store_that_hangs_is_noticed() -> None:
    job = Job(3)

    def hang(rank: Rank) -> None:
        rank.sleep(10)
        job.store.hangs = True
        waits(rank)

    job.run(waits, hang, waits)
    for rank in job.ranks:
        assert str(rank.progress.given_up).startswith("the rendezvous store has not answered for 6")
        assert rank.answers is None


def test_a_store_that_is_gone_is_no_reason_by_itself(caplog: pytest.LogCaptureFixture) -> None:
    """The rank that holds it may have ended well; a collective that needs it breaks by its connections."""
    job = Job(2)

    def lose(rank: Rank) -> None:
        rank.sleep(10)
        job.store.is_gone = True
        rank.progress.wait_for("nothing")
        rank.sleep(HOUR_S)
        rank.call_roll()

    job.run(lose, lose)
    for rank in job.ranks:
        assert rank.gave_up_at_s is None
        assert rank.answers is None
    assert "the rendezvous store does not answer: reset by peer" in caplog.text


# -- who is not --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step_s", [1.0, 30.0, 60.0])
def test_slow_is_not_stopped(step_s: float) -> None:
    """However long it takes, and while the others wait."""
    job = Job(3)

    def works_long(rank: Rank) -> None:
        works(1200, step_s)(rank)

    def patient(rank: Rank) -> None:
        rank.progress.wait_for("rank 1")
        rank.sleep(1200)

    job.run(patient, works_long, patient)
    assert job.ranks[0].gave_up_at_s is None
    assert job.ranks[2].gave_up_at_s is None


@pytest.mark.parametrize("pause_s", [50.0, 5 * HOUR_S])
def test_a_pause_of_the_whole_machine_is_no_silence(pause_s: float) -> None:
    job = Job(3)

    def program(rank: Rank) -> None:
        for number in range(40):
            rank.progress.begin(f"step {number}")
            if number == 20 and rank.number == 0:
                job.stop(0, 1, 2, until_s=environment.monotonic() + pause_s)
            environment.sleep(1.0)

    job.run(program, program, program)
    assert [rank.gave_up_at_s for rank in job.ranks] == [None] * 3


def test_who_was_stopped_and_goes_on_hears_of_it() -> None:
    job = Job(3)

    def stop(rank: Rank) -> None:
        rank.sleep(10)
        job.stop(1, until_s=200.0)
        environment.sleep(1.0)
        waits(rank)

    def long_wait(rank: Rank) -> None:
        waits(rank)
        environment.sleep(400.0)  # its program lives on

    job.run(long_wait, stop, long_wait)
    assert str(job.ranks[1].progress.given_up).startswith("rank 0 says: ")
    assert job.ranks[1].answers is not None
    says = job.ranks[1].answers[0]
    assert (says.cause, says.failure) == ("watch", f"lost contact: {job.ranks[0].progress.given_up}")


def test_the_last_words_of_a_dead_rank_are_no_sign_of_life() -> None:
    """Said before anybody asked, heard only after."""
    job = Job(2)

    def dies(rank: Rank) -> None:
        rank.progress.begin("writing c")
        rank.sleep(3.9 * job.limits.period_s)
        rank.watch.close()

    def asks(rank: Rank) -> None:
        rank.sleep(4.01 * job.limits.period_s)
        rank.call_roll()

    job.run(asks, dies)
    assert job.ranks[0].answers is not None
    assert not job.ranks[0].answers[1].is_alive


@pytest.mark.parametrize(("late_s", "is_heard"), [(1.5, True), (3.0, False)])
def test_a_roll_call_that_was_too_short_accuses_nobody(late_s: float, is_heard: bool) -> None:
    """Some ranks wait for a core, or for a store that too many ask; one after the other they answer."""
    size = 20
    job = Job(size)

    def asks(rank: Rank) -> None:
        rank.sleep(20)
        if rank.number >= 10:
            job.stop(rank.number, until_s=20 + late_s * (rank.number - 9))
            environment.sleep(late_s * (rank.number - 9))
        rank.call_roll()

    job.run(*[asks] * size)
    for rank in job.ranks:
        assert rank.roll_call is not None
        assert rank.answers is not None
        assert all(answer.is_alive for answer in rank.answers.values()) is is_heard
        assert rank.roll_call.is_complete is is_heard
        assert rank.answers[rank.number].is_alive


@pytest.mark.parametrize("how", ["killed", "stopped"])
@pytest.mark.parametrize(("size", "gone"), [(8, [0, 2]), (8, [0, 2, 4, 5]), (20, [0, 5, 7, 10])])
def test_a_deputy_calls_the_roll_if_the_first_rank_is_gone(how: str, size: int, gone: list[int]) -> None:
    job = Job(size)

    def goes(rank: Rank) -> None:
        rank.progress.begin("writing c")
        rank.sleep(2.5 * job.limits.period_s)
        job.stop(rank.number)
        environment.sleep(40 * HOUR_S)

    def loses(rank: Rank) -> None:
        """Notice a killed rank by its connections, a stopped one by its silence."""
        rank.progress.wait_for("all ranks to have written")
        if how == "killed":
            rank.sleep(3 * job.limits.period_s + 0.01 * rank.number)
            rank.call_roll()
        else:
            waits(rank)
        rank.gave_up_at_s = environment.monotonic()

    job.run(*(goes if number in gone else loses for number in range(size)))
    for rank in job.ranks:
        if rank.number not in gone:
            assert rank.gave_up_at_s is not None
            assert rank.gave_up_at_s <= 2.5 * job.limits.period_s + job.limits.timeout_s
            assert rank.roll_call is not None
            assert rank.roll_call.is_complete
            silent = [number for number, answer in rank.roll_call.answers.items() if not answer.is_alive]
            assert silent == gone
            assert rank.roll_call.answers[gone[-1]].doing == "writing c"


def test_without_any_judge_those_are_named() -> None:
    job = Job(12)
    judges = judges_of(12)
    assert judges == [0, 3, 6, 9]

    def goes(rank: Rank) -> None:
        rank.sleep(2.5 * job.limits.period_s)
        job.stop(rank.number)
        environment.sleep(40 * HOUR_S)

    job.run(*(goes if number in judges else waits for number in range(12)))
    for rank in job.ranks:
        if rank.number not in judges:
            assert rank.roll_call is not None
            assert rank.roll_call.is_complete
            answers = rank.roll_call.answers
            assert sorted(number for number, answer in answers.items() if not answer.is_alive) == judges


def test_what_was_said_in_another_call_does_not_count() -> None:
    job = Job(2)
    with environment.replaced(job.time):
        job.ranks[1] = Rank(job, 1, call=2)
    job.run(waits, waits)
    assert job.ranks[0].progress.given_up == "rank 1 has never been heard of"


def test_a_roll_call_of_the_living_ends_at_once() -> None:
    job = Job(8)

    def asks(rank: Rank) -> None:
        rank.sleep(20 + 0.01 * rank.number)
        rank.call_roll()
        rank.gave_up_at_s = environment.monotonic()

    job.run(*[asks] * 8)
    for rank in job.ranks:
        assert rank.answers is not None
        assert all(answer.is_alive for answer in rank.answers.values())
        assert rank.gave_up_at_s is not None
        assert rank.gave_up_at_s < 20 + job.limits.roll_call_s


# -- what it costs -----------------------------------------------------------------------------------------


def test_a_short_call_says_nothing() -> None:
    job = Job(4)
    job.run(*[lambda rank: environment.sleep(0.9 * job.limits.period_s)] * 4)
    assert not job.store.requests


@pytest.mark.parametrize("size", [2, 8, 24])
def test_the_store_has_two_requests_per_rank_and_period(size: int) -> None:
    job = Job(size)
    periods = 20

    def ends(rank: Rank) -> None:
        for number in range(periods):
            rank.progress.begin(f"step {number}")
            environment.sleep(job.limits.period_s)

    job.run(*[ends] * size)
    assert job.store.requests["set"] <= size * periods
    # At first a rank may look for the beats of the others one by one.
    assert job.store.requests.total() <= 2 * size * periods + 3 * size


@pytest.mark.parametrize("size", [8, 24])
def test_in_a_roll_call_one_rank_asks_all_and_the_others_ask_few(size: int) -> None:
    job = Job(size)

    def asks(rank: Rank) -> None:
        rank.sleep(20.0)
        if rank.number == 5:
            job.stop(5)
            environment.sleep(40 * HOUR_S)
        job.store.read_keys = 0
        rank.call_roll()

    job.run(*[asks] * size)
    rounds = 2 * job.limits.roll_call_s / job.limits.roll_call_period_s
    assert job.store.read_keys <= (1 + 4) * size * rounds  # of all by all it would be the square


@pytest.mark.parametrize("kind", ["tcp", "file", "prefix"])
def test_a_question_neither_waits_nor_changes_anything(kind: str, tmp_path: Path) -> None:
    store: dist.Store
    if kind == "file":
        store = dist.FileStore(str(tmp_path / "store"), 1)
    else:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        store = dist.PrefixStore("job", store) if kind == "prefix" else store
    store.set_timeout(timedelta(seconds=5))
    connection = Connection(store)
    assert connection.read(["beat/7"]) == {}
    assert not store.check(["beat/7"])
    store.set("beat/7", "alive")
    assert connection.read(["beat/7"]) == {"beat/7": b"alive"}
    assert connection.read(["beat/6", "beat/7"]) == {"beat/7": b"alive"}
    assert store.get("beat/7") == b"alive"


def test_no_thread_stays() -> None:
    job = Job(3)
    job.run(*[lambda rank: environment.sleep(50.0)] * 3)
    assert all(process.done for process in job.time.processes)
    assert job.time.now_s < 50.0 + 2 * job.limits.timeout_s


def test_a_rank_that_cannot_give_up_says_so(caplog: pytest.LogCaptureFixture) -> None:
    job = Job(2)

    def holds(rank: Rank) -> None:
        rank.progress.wait_for("all ranks to have read")
        environment.sleep(HOUR_S)

    with caplog.at_level(logging.ERROR):
        job.run(holds, lambda rank: rank.watch.close())
    (record,) = caplog.records
    assert "rank 0 was told to give up, but is still waiting for all ranks to have read" in record.message
    assert "rank 1 has never been heard of" in record.message


@pytest.mark.parametrize("size", [1, 2, 1_000, 4_096, 16_384, 100_000])
@pytest.mark.parametrize("timeout_s", [1.0, 8.0, 600.0, 7 * 86400.0])
def test_limits_fit_into_the_timeout(timeout_s: float, size: int) -> None:
    limits = Limits(timeout_s, size)
    missed_s = max(limits.stall_s, limits.stuck_s) + limits.period_s + limits.first_period_s
    until_all_hear_s = limits.period_s + limits.roll_call_s / 2
    assert missed_s + max(limits.roll_call_s, until_all_hear_s) + limits.roll_call_period_s <= timeout_s
    assert limits.roll_call_s >= 1.25 * limits.period_s


def test_beats_are_rarer_with_many_ranks() -> None:
    assert Limits(600.0, 1_000).period_s == 3.0
    assert Limits(600.0, 16_384).period_s > 40.0
    assert Limits(1.0).period_s == pytest.approx(1 / 30)


# -- with the rare beats of thousands of ranks, of which a few are here ------------------------------------


@pytest.mark.parametrize("gone", [[0], [5], [0, 2], [0, 2, 4, 6], [1, 3, 5, 7]])
@pytest.mark.parametrize("how", ["stopped", "stuck"])
@pytest.mark.parametrize("seed", range(3))
def test_rare_beats_name_the_dead_in_time(gone: list[int], how: str, seed: int) -> None:
    _name_the_dead(8, gone, how, seed)


@pytest.mark.long
@pytest.mark.parametrize("gone", [[5], [0], [0, 16, 33], [*range(8, 16)]])
def test_rare_beats_name_the_dead_of_more_ranks_in_time(gone: list[int]) -> None:
    _name_the_dead(64, gone, "stopped", seed=1)


def _name_the_dead(size: int, gone: list[int], how: str, seed: int) -> None:
    job = Job(size, 600.0, seed, beats_of=16_384)
    began_s = 3.3 * job.limits.period_s
    named_at_s: dict[int, float] = {}

    def goes(rank: Rank) -> None:
        rank.progress.begin("writing c")
        rank.sleep(began_s)
        if how == "stopped":
            job.stop(rank.number)
            environment.sleep(40 * HOUR_S)
        else:
            rank.progress.begin("writing d")
            rank.sleep(HOUR_S)
            rank.call_roll()

    def loses(rank: Rank) -> None:
        waits(rank)
        named_at_s[rank.number] = environment.monotonic()

    job.run(*(goes if number in gone else loses for number in range(size)))
    assert len(named_at_s) == size - len(gone)
    assert max(named_at_s.values()) - began_s <= 600.0
    for number in named_at_s:
        roll_call = job.ranks[number].roll_call
        assert roll_call is not None
        assert roll_call.is_complete
        if how == "stopped":
            blamed = [rank for rank, answer in roll_call.answers.items() if not answer.is_alive]
        else:
            blamed = [rank for rank, answer in roll_call.answers.items() if answer.stuck_s]
        assert sorted(blamed) == gone


def test_rare_beats_call_the_roll_of_the_living_whenever_each_notices() -> None:
    """One rank notices at once, the others with their next questions."""
    job = Job(8, 600.0, beats_of=16_384)

    def notices(rank: Rank) -> None:
        rank.sleep(100.0)
        if rank.number == 3:
            rank.call_roll()
        else:
            waits(rank)

    job.run(*[notices] * 8)
    for rank in job.ranks:
        assert rank.roll_call is not None
        assert rank.roll_call.is_complete
        assert all(answer.is_alive for answer in rank.roll_call.answers.values())
