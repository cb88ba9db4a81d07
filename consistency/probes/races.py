"""Probe whether exactly one of two clients wins that create the same name at the same moment."""

from __future__ import annotations

import contextlib
import pickle
import threading
from collections import Counter
from collections.abc import Iterator

from ckpt.consistency import environment
from ckpt.consistency.probes.clients import Client
from ckpt.consistency.probes.examine import Finding, Subject, Verdict
from ckpt.errors import AlreadyExists

_ROUNDS = 30
_TIME_S = 10.0


def exclusive_creates(subject: Subject) -> Iterator[Finding]:
    """Run rounds of two creates at once, as two jobs would commit to one place."""
    first, second = subject.first, subject.second
    winners: Counter[int] = Counter()  # rounds by their number of winners
    with contextlib.ExitStack() as stack:
        if second is None:
            second = Client(pickle.loads(pickle.dumps(first.store)), "a second connection")
            stack.callback(second.close)
        deadline = environment.monotonic() + _TIME_S
        for number in range(_ROUNDS):
            if number and environment.monotonic() > deadline:
                break
            winners[_race(first, second, f"races/{number}")] += 1
    yield _finding(winners, second, claimed=first.store.capabilities.conditional_create)


def _finding(winners: Counter[int], second: Client, *, claimed: bool) -> Finding:
    rounds, check = winners.total(), f"create races with {second.name}"
    measured = {
        "rounds": rounds,
        "one_winner": winners[1],
        "two_winners": winners[2],
        "no_winner": winners[0],
    }
    if winners[1] == rounds:
        return Finding(check, Verdict.FINE, f"one winner in each of {rounds} rounds", measured=measured)
    if winners[2]:
        verdict = Verdict.PROBLEM if claimed else Verdict.CAREFUL
        advice = (
            "two jobs that save a first checkpoint at one place at the same moment both report success, and one is "
            "lost: give every place one writer at a time"
        )
        return Finding(check, verdict, f"two winners in {winners[2]} of {rounds} rounds", advice, measured)
    result = f"no winner in {winners[0]} of {rounds} rounds"
    return Finding(check, Verdict.CAREFUL, result, "both jobs of such a race fail; nothing is lost", measured)


def _race(first: Client, second: Client, key: str) -> int:
    """Let both create `key` at once; return how many did."""
    start = threading.Barrier(2)
    winners: list[str] = []
    errors: list[BaseException] = []

    def create(client: Client) -> None:
        try:
            start.wait(_TIME_S)
            client.create(key, client.name.encode().ljust(32))  # of one size: the loser may look
            winners.append(client.name)
        except AlreadyExists:
            pass
        except BaseException as error:
            errors.append(error)

    # Daemons: what hangs in a system call must not keep the program from ending.
    racers = [threading.Thread(target=create, args=(client,), daemon=True) for client in (first, second)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
    if errors:
        raise errors[0]
    return len(winners)
