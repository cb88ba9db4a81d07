"""Messages that stay small with thousands of ranks: the tree, few of many failures, the short form of a roll call."""

from __future__ import annotations

import json
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import reduce
from unittest import mock

import pytest
from support.ranks import run_ranks

from ckpt.errors import CheckpointError, ConfigurationError, StorageError
from ckpt.ranks import tree
from ckpt.ranks.many_failures import MAX_FAILURES, Outcome, some_of
from ckpt.ranks.progress import Progress
from ckpt.ranks.roll_call import MAX_DETAILED, Answer, RollCall, long_form, short_form
from ckpt.ranks.tree import FAN, Tree
from ckpt.torch_private import default_store

LONGEST_WAIT = timedelta(seconds=30)


# -- the tree ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, FAN + 1, FAN + 2, 4096, 16384])
def test_every_rank_has_a_way_to_the_first(size: int) -> None:
    trees = [Tree(None, rank, size, LONGEST_WAIT, Progress()) for rank in range(size)]
    steps = {0: 0}
    for rank in range(size):
        for other in trees[rank].neighbours:
            assert rank in trees[other].neighbours
            steps.setdefault(other, steps[rank] + 1)
        assert len(trees[rank].neighbours) <= FAN + 1
    assert sorted(steps) == list(range(size))
    assert max(steps.values()) <= (3 if size <= 4096 else 4)


def test_joins_the_values_of_all_ranks() -> None:
    """Also long ones, and with two tags at a time; a rank has two children here, so four have three levels."""
    assert run_ranks(4, _joins) == [None] * 4


def _joins(rank: int) -> None:
    with mock.patch.object(tree, "FAN", 2):
        trees = [Tree(None, rank, 4, LONGEST_WAIT, Progress()) for _ in range(2)]
    assert trees[0].join(1 << rank, lambda a, b: a + b) == 15
    for nbytes in (1, 1000, 1015, 1016, 1017, 1 << 20):  # around the first message
        texts = trees[0].join({rank: chr(97 + rank) * nbytes}, lambda a, b: a | b)
        assert texts == {each: chr(97 + each) * nbytes for each in range(4)}
    for numbers in ([5, 5, 5, 5], [-(1 << 62), 1 << 62, 0, -1]):
        decided = trees[0].decide(numbers[rank], lambda a, b: a + b, lambda total: 3 * total - rank)
        assert decided == 3 * sum(numbers)  # of the first rank
    for nbytes in (1, 1 << 20):
        assert trees[0].broadcast(chr(97 + rank) * nbytes) == "a" * nbytes
    assert trees[0].gather(chr(97 + rank)) == ["a", "b", "c", "d"]
    with ThreadPoolExecutor(2) as threads:
        joined = threads.map(
            lambda tag: [trees[tag].join({(tag, n, rank)}, set.union, tag) for n in range(20)], (0, 1)
        )
        for tag, sets in enumerate(joined):
            assert sets == [{(tag, n, each) for each in range(4)} for n in range(20)]


def test_a_message_that_no_rank_receives_ends_with_the_save() -> None:
    """gloo alone would wait for 30 s: the other rank lives, and its connection stays open."""
    assert run_ranks(2, _sends_to_a_rank_that_does_not_receive, timeout_s=60) == [None] * 2


def _sends_to_a_rank_that_does_not_receive(rank: int) -> None:
    store = default_store()
    if rank == 0:
        store.wait(["ended"], LONGEST_WAIT)
        return
    progress = Progress()
    own = Tree(None, rank, 2, LONGEST_WAIT, progress)
    threading.Timer(0.7, setattr, (progress, "given_up", "rank 0 says: the store is full")).start()
    began_s = time.monotonic()
    with pytest.raises(ConnectionError, match="did not arrive: rank 0 says: the store is full"):
        own.join(1, max)
    assert time.monotonic() - began_s < LONGEST_WAIT.total_seconds() / 2
    store.set("ended", "")


# -- failures ----------------------------------------------------------------------------------------------


def test_few_failures_are_all_kept() -> None:
    failures = {rank: CheckpointError("full") for rank in range(MAX_FAILURES)}
    assert some_of(failures) == failures


def test_keeps_of_many_failures_those_that_say_something_new() -> None:
    failures: dict[int, CheckpointError] = {rank: CheckpointError("full") for rank in range(5000)}
    failures[4321] = CheckpointError("wrong key")
    failures[4000] = ConfigurationError("full")  # another kind of error
    kept = some_of(failures)
    assert list(kept) == [*range(MAX_FAILURES - 2), 4000, 4321]
    assert all(kept[rank] is failures[rank] for rank in kept)


def test_outcome_counts_all_and_keeps_few_in_any_order() -> None:
    outcomes = [
        Outcome.of(
            rank, "save", None if rank % 2 else (ConfigurationError if rank % 10 else StorageError)("no")
        )
        for rank in range(1000)
    ]
    random.Random(3).shuffle(outcomes)
    joined = reduce(Outcome.join, outcomes)
    assert (joined.failed, joined.refused) == (500, 400)
    assert len(joined.failures) == MAX_FAILURES
    assert {type(error) for error in joined.failures.values()} == {ConfigurationError, StorageError}
    assert dict(joined.calls) == {"save": 0}


def test_outcome_names_the_first_rank_of_each_call() -> None:
    outcomes = [Outcome.of(rank, "load" if rank == 7 else "save", None) for rank in range(9)]
    assert dict(reduce(Outcome.join, reversed(outcomes)).calls) == {"save": 0, "load": 7}
    every = [Outcome.of(rank, f"call {rank}", None) for rank in range(100)]
    assert len(reduce(Outcome.join, every).calls) == 3


# -- the roll call -----------------------------------------------------------------------------------------


def told(answers: dict[int, Answer], *, is_complete: bool = True) -> tuple[RollCall, int]:
    """What other ranks get of it, and its bytes on the way."""
    text = json.dumps(short_form(answers, is_complete=is_complete))
    return long_form(json.loads(text), len(answers)), len(text)


@pytest.mark.parametrize("is_complete", [True, False])
def test_tells_all_that_few_ranks_say(is_complete: bool) -> None:
    answers = {
        0: Answer(True, "waiting"),
        1: Answer(False, "writing 3 of 9 files"),
        2: Answer(True, "writing", stuck_s=70.0),
        3: Answer(True, "writing", failure="StorageError: full"),
        4: Answer(True, "waiting", failure="lost contact", cause="watch"),
        5: Answer(False),
    }
    roll_call, _ = told(answers, is_complete=is_complete)
    assert roll_call.is_complete == is_complete
    assert roll_call.answers == {**answers, 0: Answer(True)}


@pytest.mark.parametrize("share", [0.01, 1.0])
def test_tells_who_is_silent_among_thousands(share: float) -> None:
    chance, size = random.Random(5), 16384
    silent = {rank for rank in range(size) if chance.random() < share}
    answers = {
        rank: Answer(rank not in silent, "writing " * 500, failure="full " * 900) for rank in range(size)
    }
    roll_call, nbytes = told(answers)
    assert {rank for rank, answer in roll_call.answers.items() if not answer.is_alive} == silent
    assert len(roll_call.answers) == size
    assert nbytes < 2 * MAX_DETAILED * 2 * 2100 + 4096


def test_tells_an_error_that_one_rank_has_alone() -> None:
    answers = {rank: Answer(True, "waiting", failure="connection closed") for rank in range(5000)}
    answers[4999] = Answer(True, "writing", failure="disk full")
    roll_call, _ = told(answers)
    assert roll_call.answers[4999] == answers[4999]
    assert sum(answer.failure is not None for answer in roll_call.answers.values()) == MAX_DETAILED
