"""What is said when ranks lose each other, and which errors mean that they did."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch.distributed as dist

from ckpt.errors import CheckpointError, StorageUnavailable
from ckpt.ranks.collective_errors import is_connection_error, is_gloo_timeout
from ckpt.ranks.lost_ranks import lost, summary
from ckpt.ranks.progress import Progress
from ckpt.ranks.roll_call import Answer, RollCall

GLOO = "[../third_party/gloo/gloo/transport/tcp/"
CLOSED = RuntimeError(f"{GLOO}pair.cc:537] Connection closed by peer [127.0.0.1]:3322")
TIMED_OUT = RuntimeError(f"{GLOO}unbound_buffer.cc:81] Timed out waiting 1ms for recv operation to complete")


@pytest.mark.parametrize(
    "error",
    [CLOSED, TIMED_OUT, dist.DistBackendError("NCCL"), dist.DistNetworkError("x"), ConnectionResetError(), TimeoutError()],
)  # fmt: skip
def test_errors_that_mean_another_rank(error: Exception) -> None:
    assert is_connection_error(error)
    assert is_gloo_timeout(error) is (error is TIMED_OUT)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("the connection"),
        RuntimeError("CUDA out of memory"),
        OSError("disk"),
        StorageUnavailable("the server's connection timed out"),
    ],
)
def test_errors_of_ones_own(error: Exception) -> None:
    assert not is_connection_error(error)
    assert not is_gloo_timeout(error)


class Asked:
    """In the place of the ranks, with what they answer."""

    def __init__(self, roll_call: RollCall | None, given_up: str | None, *, later: str | None = None) -> None:
        self.answer, self.progress = roll_call, Progress()
        self.rank = 0
        self.size = 2
        self.progress.given_up = given_up
        self._later = given_up if later is None else later

    def roll_call(self, error: Exception) -> RollCall | None:
        self.progress.given_up = self._later
        return self.answer


def said(
    answers: dict[int, Answer] | None, given_up: str | None = None, *, is_complete: bool = True
) -> tuple[str, dict[int, str]]:
    ranks: Any = Asked(None if answers is None else RollCall(answers, is_complete), given_up)
    message, failures = lost("save", ranks, CLOSED)
    return message, {rank: str(error) for rank, error in failures.items()}


ME = Answer(True, failure="RuntimeError: Connection closed", cause="connection")


def test_a_silent_rank_is_named() -> None:
    message, failures = said({0: ME, 2: Answer(False, "saving c"), 1: ME})
    assert message.startswith("the save failed: rank 2 does not answer: killed, crashed, or stuck; ")
    assert "when last heard of, rank 2 was saving c (RuntimeError: " in message
    assert failures == {
        2: "rank 2: does not answer: killed, crashed, or stuck; when last heard of, it was saving c"
    }


def test_a_roll_call_that_is_not_complete_accuses_nobody() -> None:
    answers = {0: ME, **dict.fromkeys(range(1, 43), Answer(False)), 43: ME}
    message, failures = said(answers, is_complete=False)
    assert message.startswith(
        "the save failed: 42 of 44 ranks had not answered in time (rank 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, ...), and "
        "others were late: the roll call is not complete (RuntimeError: "
    )
    assert not failures
    message, failures = said({**answers, 43: Answer(True, failure="disk full")}, is_complete=False)
    assert message.endswith("; the save failed: rank 43: disk full")
    assert list(failures) == [43]


def test_the_error_of_a_rank_is_named_and_not_what_follows_from_it() -> None:
    own = Answer(True, failure="rank 1: s3://b/k: the server's connection timed out")
    message, failures = said({0: ME, 1: own, 2: ME})
    assert list(failures) == [1]
    assert "the server's connection timed out" in message


def test_a_rank_without_progress_is_named() -> None:
    message, failures = said({0: ME, 1: Answer(True, "writing c", stuck_s=71.0)})
    assert message == "the save failed: rank 1: no progress for 71 s: writing c"
    assert list(failures) == [1]


def test_a_rank_that_the_others_gave_up_hears_why() -> None:
    gave_up = Answer(True, failure="lost contact: rank 0 has not been heard of for 60 s", cause="watch")
    message, failures = said({0: ME, 1: gave_up})
    assert message == f"the save failed: rank 1 says: {gave_up.failure}"
    assert not failures


def test_a_rank_names_who_is_blamed_also_if_its_watch_ends_during_the_roll_call() -> None:
    """Its watch hears the same reason then, from the rank that answers with it."""
    gave_up = Answer(True, failure="lost contact: rank 0 has made no progress for 7 s", cause="watch")
    ranks = Asked(RollCall({0: ME, 1: gave_up}, is_complete=True), given_up=None, later="rank 1 says: it")
    message, _ = lost("save", cast(Any, ranks), CLOSED)
    assert message == f"the save failed: rank 1 says: {gave_up.failure}"


def test_a_rank_that_gave_another_up_says_why() -> None:
    """Also if the other one goes on after all, and a third one repeats it."""
    reason = "rank 2 has made no progress for 7 s: reading c/rank-00000/x.distcp"
    repeats = Answer(True, failure="lost contact: rank 0 says: Connection closed", cause="watch")
    message, failures = said({0: ME, 1: repeats, 2: Answer(True)}, given_up=reason)
    assert message == f"the save failed: {reason}"
    assert not failures


def test_without_a_rendezvous_store_nobody_is_named() -> None:
    message, failures = said(None, given_up="rank 1 has never been heard of")
    assert message.endswith("does not answer (rank 1 has never been heard of)")
    assert not failures


def test_a_summary_is_one_line() -> None:
    failures = {rank: CheckpointError("no", rank=rank) for rank in range(20)}
    text = summary("load", failures)
    assert (
        text
        == "the load failed: rank 0: no (also failed: rank 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, ...; 20 ranks in all)"
    )
    assert summary("load", {3: KeyError("x")}) == "the load failed: rank 3: KeyError: 'x'"
