"""Measure what digests of blocks cost a save in CPU time: `python -m benchmarks.studies.block_digests /dev/shm/place`.

Saves half a gigabyte again and again in one process, without digests and with each kind, in an order drawn anew
each round.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics

import torch

import ckpt

_KINDS = (None, "blake3", "sha256")
_WARM_UP = 2


def main() -> None:
    """Print the medians of user and system time, in seconds for a gigabyte."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("place")
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    state = {f"w{number}": torch.randn(1024, 1024, 8) for number in range(16)}
    gigabytes = sum(tensor.nbytes for tensor in state.values()) / 1e9
    order, times = list(_KINDS), {kind: list[tuple[float, float]]() for kind in _KINDS}
    for turn in range(arguments.rounds):
        random.shuffle(order)
        for number, kind in enumerate(order):
            for tensor in state.values():
                tensor.add_(1)
            before = os.times()
            ckpt.save(state, f"{arguments.place}/step-{number}", no_dist=True, block_digests=kind)
            after = os.times()
            if turn >= _WARM_UP:
                user_s, system_s = after.user - before.user, after.system - before.system
                times[kind].append((user_s / gigabytes, system_s / gigabytes))
    plain = statistics.median(map(sum, times[None]))
    for kind, used in times.items():
        total = statistics.median(map(sum, used))
        user, system = (statistics.median(each[n] for each in used) for n in (0, 1))
        print(
            f"{kind or 'none':8} {total:.3f} s/GB ({total / plain:.2f} x), user {user:.3f}, system {system:.3f}"
        )


if __name__ == "__main__":
    main()
