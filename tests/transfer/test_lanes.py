"""Transfers that run in few threads, or in all, by how much of their time they use."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from greenlet import getcurrent, greenlet

from ckpt import lanes
from ckpt.lanes import on_behalf, run_in_lanes
from ckpt.transfer.threads import workers

MOST = 6
_DATA = bytes(4 << 20)


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadPoolExecutor]:
    monkeypatch.setattr(lanes, "usable_cores", lambda: 1)
    with ThreadPoolExecutor(MOST) as pool:
        yield pool


class Counter:
    """Counts how many run at once, at most."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self.now -= 1


def test_what_uses_the_processor_runs_in_few_threads(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "wanted_s", lambda thread: time.monotonic())  # as if no other program ran
    running = Counter()

    def work(number: int) -> int:
        with running:
            time.sleep(0.003)
            return number

    assert run_in_lanes(pool.submit, work, range(60), most=MOST) == [*range(60)]
    assert running.most == 1


def test_what_waits_runs_in_all(pool: ThreadPoolExecutor) -> None:
    all_there = threading.Barrier(MOST)
    assert run_in_lanes(pool.submit, lambda _: all_there.wait(60), range(MOST), most=MOST)


def test_also_while_more_items_come(pool: ThreadPoolExecutor) -> None:
    all_there = threading.Event()
    running = Counter()

    def work(_: int) -> bool:
        with running:
            if running.now == MOST:
                all_there.set()
            return all_there.wait(60)

    def items() -> Iterator[int]:
        for number in range(1000):
            yield number
            time.sleep(0.01)
            if all_there.is_set():
                return

    assert all(run_in_lanes(pool.submit, work, items(), most=MOST))
    assert all_there.is_set()


def test_all_run_where_nobody_tells_how_long(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "wanted_s", lambda thread: float("nan"))
    all_there = threading.Barrier(MOST)

    def work(_: int) -> int:
        until_s = time.monotonic() + 0.05
        while time.monotonic() < until_s:
            hashlib.sha256(_DATA).digest()
        return all_there.wait(60)

    assert sorted(run_in_lanes(pool.submit, work, range(MOST), most=MOST)) == [*range(MOST)]


def test_twice_as_many_run_where_they_may_be_needed(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[int] = []
    start = lanes._Lanes._start

    def noted(self: Any) -> None:
        limits.append(self._limit)
        start(self)

    monkeypatch.setattr(lanes._Lanes, "_start", noted)
    monkeypatch.setattr(lanes, "wanted_s", lambda thread: time.monotonic() / 2)
    all_there = threading.Barrier(MOST)
    assert run_in_lanes(pool.submit, lambda _: all_there.wait(60), range(MOST), most=MOST)
    assert sorted({*limits}) == [1, 2, 4, MOST]


def test_what_another_thread_does_for_one_counts_as_its_own(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    helpers: set[int] = set()
    began_s = time.monotonic()

    def wanted_s(thread: int) -> float:
        return time.monotonic() - began_s if thread in helpers else 0.0

    monkeypatch.setattr(lanes, "wanted_s", wanted_s)
    running = Counter()

    def work(number: int) -> int:
        with running:

            def help_out() -> None:
                helpers.add(threading.get_native_id())
                time.sleep(0.003)

            helper = threading.Thread(target=on_behalf(help_out))
            helper.start()
            helper.join()
            return number

    assert run_in_lanes(pool.submit, work, range(60), most=MOST) == [*range(60)]
    assert running.most == 1


def do_nothing() -> None:
    pass


def test_a_call_for_no_lane_stays_as_it_is() -> None:
    assert on_behalf(do_nothing) is do_nothing


def test_lanes_that_take_turns_in_one_thread_leave_none_behind() -> None:
    """As processes of the simulator do."""
    main = getcurrent()

    def run() -> None:
        def work(_: int) -> bool:
            main.switch()
            return on_behalf(do_nothing) is not do_nothing

        assert run_in_lanes(workers(1, "x").submit, work, range(1), most=1) == [True]

    first, second = greenlet(run), greenlet(run)
    for each in (first, second, first, second):  # the first ends before the second
        each.switch()
    assert first.dead
    assert second.dead
    assert on_behalf(do_nothing) is do_nothing


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this system does not tell it")
def test_time_that_a_thread_wanted_is_told() -> None:
    me, before_s = threading.get_native_id(), time.thread_time()
    wanted_s = lanes.wanted_s(me)
    while time.thread_time() - before_s < 0.2:
        hashlib.sha256(_DATA).digest()
    assert lanes.wanted_s(me) - wanted_s > 0.15
    assert lanes.wanted_s(0) != lanes.wanted_s(0)


@pytest.mark.parametrize("most", [1, 2, MOST])
def test_the_first_error_ends_it(most: int, pool: ThreadPoolExecutor) -> None:
    begun: list[int] = []
    running = Counter()

    def work(number: int) -> None:
        with running:
            begun.append(number)
            if number == 3:
                raise OSError("the third")
            time.sleep(0.01)

    with pytest.raises(OSError, match="the third"):
        run_in_lanes(pool.submit, work, iter(range(1000)), most=most)
    assert running.now == 0
    assert len(begun) < 100


def test_items_that_cannot_be_told_end_it(pool: ThreadPoolExecutor) -> None:
    running = Counter()

    def items() -> Iterator[int]:
        yield from range(5)
        raise ValueError("no sixth")

    def work(_: int) -> None:
        with running:
            time.sleep(0.05)

    with pytest.raises(ValueError, match="no sixth"):
        run_in_lanes(pool.submit, work, items(), most=MOST)
    assert running.now == 0


def test_a_long_run_keeps_no_other_that_uses_its_threads(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that it was promised comes only after the long one: it is not waited for."""
    monkeypatch.setattr(lanes, "usable_cores", lambda: MOST)
    is_over, others_there = threading.Event(), threading.Barrier(MOST)

    def hold(_: int) -> bool:
        others_there.wait(60)
        return is_over.wait(60)

    with ThreadPoolExecutor(1) as beside:
        long = beside.submit(run_in_lanes, pool.submit, hold, range(MOST - 1), most=MOST - 1)
        others_there.wait(60)  # one thread is left
        assert run_in_lanes(pool.submit, lambda number: number, range(20), most=MOST) == [*range(20)]
        assert not long.done()
        is_over.set()
        assert all(long.result(60))


def test_threads_that_were_promised_begin_nothing_after_the_end() -> None:
    asked: list[Any] = []

    def submit(call: Any) -> Future[None]:
        asked.append(call)
        if len(asked) == 1:
            call()
        return Future()

    begun: list[int] = []
    with pytest.raises(RuntimeError, match="no more items"):
        run_in_lanes(submit, begun.append, _then_fail(range(1)), most=2)
    asked[-1]()
    assert begun == [0]


def _then_fail(items: range) -> Iterator[int]:
    yield from items
    raise RuntimeError("no more items")


def test_the_threads_that_are_there_are_enough(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None can be started any more once Python begins to end."""
    monkeypatch.setattr(lanes, "wanted_s", lambda thread: 0.0)
    left = [None, None]

    def submit(call: Any) -> Future[None]:
        if not left:
            raise RuntimeError("cannot schedule new futures after interpreter shutdown")
        left.pop()
        return pool.submit(call)

    def work(number: int) -> int:
        time.sleep(0.01)
        return number

    assert run_in_lanes(submit, work, range(40), most=MOST) == [*range(40)]
    assert not left


def test_the_caller_does_it_where_all_threads_have_ended(pool: ThreadPoolExecutor) -> None:
    """They end when there is nothing to do for them, though more may come."""
    first: list[Future[None]] = []

    def submit(call: Any) -> Future[None]:
        if first:
            raise RuntimeError("cannot schedule new futures after interpreter shutdown")
        first.append(pool.submit(call))
        return first[0]

    def items() -> Iterator[int]:
        yield 0
        first[0].result(60)
        yield from (1, 2)

    def work(number: int) -> tuple[int, bool]:
        if number == 2:
            raise ValueError("the third")
        return number, threading.current_thread() is threading.main_thread()

    found: list[tuple[int, bool]] = []
    with pytest.raises(ValueError, match="the third"):
        run_in_lanes(submit, lambda number: found.append(work(number)), items(), most=2)
    assert found == [(0, False), (1, True)]


def test_items_that_nobody_takes_are_an_error(pool: ThreadPoolExecutor) -> None:
    caller = workers(1, "x")
    caller.submit(int, "no number")  # then it takes nothing more
    with pytest.raises(RuntimeError, match="take nothing more"):
        run_in_lanes(caller.submit, lambda item: item, range(3), most=1)


def test_what_a_pool_that_is_closed_has_cancelled_is_an_error(pool: ThreadPoolExecutor) -> None:
    def work(number: int) -> None:
        pool.shutdown(wait=False, cancel_futures=True)
        raise SystemExit

    with pytest.raises((SystemExit, RuntimeError)):
        run_in_lanes(pool.submit, work, range(9), most=MOST)


def test_threads_that_cannot_be_had_are_an_error(pool: ThreadPoolExecutor) -> None:
    def submit(_: object) -> Future[None]:
        raise RuntimeError("cannot schedule new futures after shutdown")

    with pytest.raises(RuntimeError, match="new futures"):
        run_in_lanes(submit, lambda item: item, range(3), most=MOST)


def test_one_thread_is_the_callers_own() -> None:
    me, began = threading.get_ident(), list[int]()

    def work(number: int) -> int:
        began.append(number)
        if number == 2:
            raise OSError("no")
        return threading.get_ident()

    assert run_in_lanes(workers(1, "x").submit, work, range(2), most=1) == [me, me]
    with pytest.raises(OSError, match="no"):
        run_in_lanes(workers(1, "x").submit, work, range(9), most=1)
    assert began == [0, 1, 0, 1, 2]


def test_no_item_is_left_by_threads_that_end(pool: ThreadPoolExecutor) -> None:
    """Items that come as fast as they are done: a thread may just have seen that there is none."""
    for _ in range(300):
        assert run_in_lanes(pool.submit, lambda number: number, iter(range(20)), most=2) == [*range(20)]


def test_a_pool_in_use_elsewhere_is_enough() -> None:
    """A generator of items may use the same threads."""
    with ThreadPoolExecutor(2) as pool:
        items = (pool.submit(abs, number).result(60) for number in range(200))
        assert run_in_lanes(pool.submit, lambda number: number + 1, items, most=8) == [*range(1, 201)]
