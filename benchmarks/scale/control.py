"""Count what heartbeats and roll calls ask of the rendezvous store: `python -m benchmarks.scale.control`.

Real watches of 128 to 1,024 ranks, in one process, over a real TCPStore in another; each watch has a
connection of its own. The store's CPU seconds are those of its process. From the requests per rank
and what one costs, measured in the same run, the table goes on to 16,384 ranks; the cost of a roll
call is that of the judge's rounds and of the others' questions.

One machine does the work of 1,024 clients here: wall times are those of its cores, not of a store.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import statistics
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from ckpt.ranks.heartbeat import Limits, Watch
from ckpt.ranks.progress import Progress
from ckpt.ranks.roll_call import RollCall

_SIZES = (128, 512, 1024)
_TIMEOUT_S = 600.0
_CLIENTS = 128


class _Store:
    """The store in a process of its own, whose CPU seconds can be asked for."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        self.port = self._pipe.recv()

    def cpu_s(self) -> float:
        self._pipe.send(None)
        return float(self._pipe.recv())

    def connect(self) -> dist.TCPStore:
        return dist.TCPStore("127.0.0.1", self.port, is_master=False)

    def close(self) -> None:
        self._process.kill()
        self._process.join()


def _serve(pipe: Any) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    while True:
        pipe.recv()
        pipe.send(time.process_time())


@dataclass(eq=False)
class _Counting:
    """A connection that counts requests and the keys that they read."""

    inner: Any
    counts: Counter[str]

    def clone(self) -> _Counting:
        return self

    def set_timeout(self, timeout: object) -> None:
        self.inner.set_timeout(timeout)

    def set(self, key: str, value: str) -> None:
        self.counts["set"] += 1
        self.inner.set(key, value)

    def check(self, keys: Sequence[str]) -> bool:
        self.counts["check"] += 1
        return bool(self.inner.check(keys))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        self.counts["multi_get"] += 1
        self.counts["keys"] += len(keys)
        return list(self.inner.multi_get(keys))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self.counts["compare_set"] += 1
        self.counts["keys"] += 1
        return bytes(self.inner.compare_set(key, expected, desired))


@dataclass(frozen=True)
class Costs:
    """Microseconds of the store's CPU.

    Attributes:
        set_us, question_us, key_us: for a beat, for a question after one key, for each key of a long list,
            of clients that send one after the other.
        spread_us: for a beat and a question that come as seldom as those of 16,384 ranks: each wakes the store.
    """

    set_us: float
    question_us: float
    key_us: float
    spread_us: float


def measure_costs(store: _Store, count: int = 4096) -> Costs:
    """Measure one client's requests, one after the other."""
    client = store.connect()
    beat = json.dumps([1, 17, 0.3, True, "waiting for all ranks to have written", None, "own", None])
    keys = [f"ckpt/beat/foreground/0/{rank}" for rank in range(count)]

    def cost(work: Callable[[], object], requests: int) -> float:
        began_s = store.cpu_s()
        work()
        client.get(keys[0])
        return 1e6 * (store.cpu_s() - began_s) / requests

    client.set(keys[0], beat)

    def say() -> None:
        for key in keys:
            client.set(key, beat)

    set_us = cost(say, count)
    question_us = cost(lambda: [client.compare_set(keys[0], "?", "?") for _ in range(count)], count)
    rounds = [keys[start : start + 64] for start in range(0, count, 64)]
    key_us = cost(lambda: [client.multi_get(some) for _ in range(4) for some in rounds], 4 * count)
    clients = [store.connect() for _ in range(_CLIENTS)]
    return Costs(
        set_us, question_us, key_us, statistics.median(_spread_us(store, clients, beat) for _ in range(5))
    )


def _spread_us(store: _Store, clients: Sequence[dist.TCPStore], beat: str, spread_s: float = 4.0) -> float:
    """Measure beats, each with its question, that come one by one."""
    beats_per_s = 16384 / Limits(_TIMEOUT_S, 16384).period_s
    count = int(spread_s * beats_per_s)
    began_cpu_s, began_s = store.cpu_s(), time.perf_counter()
    for number in range(count):
        time.sleep(max(0.0, began_s + number / beats_per_s - time.perf_counter()))
        client = clients[number % len(clients)]
        client.set(f"ckpt/beat/foreground/0/{number % len(clients)}", beat)
        client.compare_set("ckpt/beat/foreground/0/0", "?", "?")
    return 1e6 * (store.cpu_s() - began_cpu_s) / count


@dataclass(eq=False)
class Trial:
    """Watches of `size` ranks that beat until `dead` of them stop, and a roll call of the others."""

    store: _Store
    size: int
    dead: Sequence[int]
    limits: Limits
    counts: Counter[str] = field(default_factory=Counter)

    def run(self, steady_s: float) -> dict[str, float]:
        watches = [self._watch(rank) for rank in range(self.size)]
        for watch in watches:
            watch.start()
        time.sleep(2 * self.limits.period_s + 1.0)  # until all have begun to talk
        steady = self._during(lambda: time.sleep(steady_s))
        for rank in self.dead:
            watches[rank].close()
        time.sleep(2 * self.limits.period_s)  # its last beat is known to all: it must not count
        answers: dict[int, RollCall | None] = {}

        def call(rank: int) -> None:
            answers[rank] = watches[rank].roll_call("RuntimeError: Connection closed by peer", "connection")

        living = [rank for rank in range(self.size) if rank not in self.dead]
        threads = [threading.Thread(target=call, args=(rank,)) for rank in living]

        def call_all() -> None:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        roll_call = self._during(call_all)
        for watch in watches:
            watch.close()
        named = [self._silent(answers.get(rank)) for rank in living]
        return {
            "steady_requests": steady["requests"] / self.size / steady["wall_s"] * self.limits.period_s,
            "steady_cpu": steady["cpu_s"] / steady["wall_s"],
            "roll_call_requests": roll_call["requests"] / self.size,
            "roll_call_keys": roll_call["keys"] / self.size,
            "roll_call_cpu_s": roll_call["cpu_s"],
            "roll_call_s": roll_call["wall_s"],
            "right": sum(silent == [*self.dead] for silent in named),
            "nobody": sum(silent is None for silent in named),
            "wrong": sum(silent not in (None, [*self.dead]) for silent in named),
        }

    def _silent(self, roll_call: RollCall | None) -> list[int] | None:
        """List the ranks that were missed; None if nobody was named."""
        if roll_call is None or not roll_call.is_complete:
            return None
        return [rank for rank, answer in roll_call.answers.items() if not answer.is_alive]

    def _watch(self, rank: int) -> Watch:
        progress = Progress()
        progress.wait_for("all ranks to have written")
        connection: Any = _Counting(self.store.connect(), self.counts)
        name = f"study/{self.size}"
        return Watch(connection, name, rank, self.size, 1, self.limits, progress, lambda: None)

    def _during(self, work: Callable[[], object]) -> dict[str, float]:
        counts, cpu_s, began_s = self.counts.copy(), self.store.cpu_s(), time.perf_counter()
        work()
        wall_s = time.perf_counter() - began_s
        used = self.counts - counts
        keys = used.pop("keys", 0)
        requests = used.total()
        return {"requests": requests, "keys": keys, "cpu_s": self.store.cpu_s() - cpu_s, "wall_s": wall_s}


def share_of_a_core(size: int, costs: Costs, limits: Limits) -> float:
    """Return what heartbeats take of a core of the store: a beat and a question of each, and the first rank's rounds."""
    return size * 1e-6 * (costs.spread_us / limits.period_s + costs.key_us / limits.first_period_s)


def cost_of_a_roll_call_s(size: int, costs: Costs, limits: Limits) -> float:
    """Return the store's CPU seconds of a whole roll call: each period all speak and ask, and one asks all."""
    rounds = limits.roll_call_s / limits.roll_call_period_s
    return rounds * size * (costs.set_us + costs.question_us + 4 * costs.key_us) * 1e-6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="*", default=[*_SIZES])
    parser.add_argument("--steady-s", type=float, default=12.0)
    arguments = parser.parse_args()
    logging.disable(logging.ERROR)  # that a watch gave up, which nobody waits for here
    store, status = _Store(), 0
    try:
        costs = measure_costs(store)
        print(
            f"store: {costs.set_us:.1f} us a beat, {costs.question_us:.1f} a question, {costs.key_us:.1f} a key; "
            f"{costs.spread_us:.1f} a beat and a question that come one by one"
        )
        for size in arguments.sizes:
            limits = Limits(_TIMEOUT_S, size)
            trial = Trial(store, size, [size - 3], limits)
            measured = trial.run(arguments.steady_s)
            print(
                f"{size:>6,} measured", json.dumps({key: round(value, 4) for key, value in measured.items()})
            )
        for size in (*arguments.sizes, 4096, 16384):
            limits = Limits(_TIMEOUT_S, size)
            print(
                f"{size:>6,} by formula: period {limits.period_s:.1f} s, {share_of_a_core(size, costs, limits):.2%} of a "
                f"core; roll call of {limits.roll_call_s:.0f} s: {cost_of_a_roll_call_s(size, costs, limits):.2f} CPU s"
            )
    except BaseException:
        traceback.print_exc()
        status = 1
    finally:
        store.close()
        sys.stdout.flush()
        os._exit(status)  # beats of watches that end may still wait


if __name__ == "__main__":
    main()
