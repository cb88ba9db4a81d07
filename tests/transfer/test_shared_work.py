"""Work that the calling thread shares with others."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from ckpt.transfer import threads
from ckpt.transfer.threads import share

NAME = "ckpt-test"


@pytest.fixture(params=[1, 2, 5], autouse=True)
def cores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(threads, "usable_cores", lambda: request.param)
    return int(request.param)


def test_results_come_in_order() -> None:
    assert share(lambda number: 2 * number, range(1000), NAME) == [*range(0, 2000, 2)]
    assert share(lambda number: number, [], NAME) == []


@pytest.mark.parametrize("most", [1, 3, 8])
def test_as_many_take_part_as_there_are_cores(cores: int, most: int) -> None:
    expected = min(cores, most)
    all_there = threading.Barrier(expected)

    def work(_: int) -> str:
        all_there.wait(60)
        return threading.current_thread().name

    names = share(work, range(expected), NAME, most=most)
    assert len({*names}) == expected
    assert threading.current_thread().name in names


def test_the_caller_does_not_wait_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    class Late(ThreadPoolExecutor):
        """Its threads come to nothing while there is work."""

        def submit(self, function: Any, /, *arguments: Any, **more: Any) -> Future[Any]:
            return super().submit(lambda: (done.wait(60), function(*arguments, **more)))

    done = threading.Event()
    monkeypatch.setattr(threads, "thread_pool", lambda number, name: Late(number))

    def work(number: int) -> int:
        if number == 99:
            done.set()
        return number

    assert share(work, range(100), NAME) == [*range(100)]


def test_it_is_done_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert share(lambda number: number, range(50), NAME) == [*range(50)]


@pytest.mark.parametrize("who", ["caller", "other"])
def test_after_an_error_nothing_more_is_begun(who: str, cores: int) -> None:
    if who == "other" and cores == 1:
        pytest.skip("there is no other")
    begun: list[int] = []
    ended: list[int] = []

    def work(number: int) -> None:
        begun.append(number)
        time.sleep(0.002)
        ended.append(number)
        if (threading.current_thread() is threading.main_thread()) == (who == "caller"):
            raise ValueError(number)

    with pytest.raises(ValueError, match=r"\d"):
        share(work, range(10_000), NAME)
    assert sorted(ended) == sorted(begun)
    assert len(begun) < 5000


def test_an_interrupt_while_threads_start_begins_nothing_more(
    cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []

    class Interrupted(ThreadPoolExecutor):
        def submit(self, *_: Any, **__: Any) -> Future[Any]:
            raise KeyboardInterrupt

    monkeypatch.setattr(threads, "thread_pool", lambda number, name: Interrupted(number))
    if cores == 1:
        pytest.skip("no thread starts")
    with pytest.raises(KeyboardInterrupt):
        share(begun.append, range(10), NAME)
    assert not begun
