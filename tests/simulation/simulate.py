"""Run simulated schedules and sum up their outcomes.

    PYTHONPATH=tests python -m simulation.simulate --schedules 100000 --seed 1

`--references` has checkpoints refer to each other (`simulated_references.py`), `--local-first` has nodes with a disk
each (`simulated_local_first.py`). `--seed N --trace` prints every request of one schedule. `--deviations N` runs every schedule of two
ranks and two saves in which at most N things are out of the ordinary (3 takes hours).
"""

from __future__ import annotations

import argparse
import gc
import logging
import multiprocessing
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable

import torch

from ckpt.testing.simulator import FAULTS
from simulation import simulated_local_first, simulated_references
from simulation.simulated_history import Violation
from simulation.simulated_nodes import FATES as FATES_OF_NODES
from simulation.simulated_schedules import MOUNT, PROMPT, Plan, Tally, draw, explore, simulate, with_faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--schedules", type=int, default=1, help="how many, from the seed on (default 1)")
    parser.add_argument("--seed", type=int, default=0, help="the first one's seed (default 0)")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--trace", action="store_true", help="print every request of the one schedule")
    parser.add_argument(
        "--deviations", type=int, default=0, help="instead of seeds, every schedule up to this bound"
    )
    parser.add_argument("--references", action="store_true", help="saves that name bytes of others")
    parser.add_argument("--local-first", action="store_true", help="trainers and carriers on nodes")
    arguments = parser.parse_args()
    if arguments.trace:
        return _trace_nodes(arguments.seed) if arguments.local_first else _trace(arguments.seed)
    if arguments.deviations:
        explore_all = _explore_references if arguments.references else _explore
        explore_all = _explore_local_first if arguments.local_first else explore_all
        return explore_all(arguments.deviations)
    started_s = time.monotonic()
    last = arguments.seed + arguments.schedules
    size = 50 if arguments.local_first else 500
    chunks = [(first, min(first + size, last)) for first in range(arguments.seed, last, size)]
    if arguments.references or arguments.local_first:
        run = _run_local_first if arguments.local_first else _run_references
        return _counted(run, chunks, arguments.processes, started_s)
    total, failed = Tally(), []
    with multiprocessing.Pool(arguments.processes, _start) as pool:
        for tally, failures in pool.imap_unordered(_run, chunks):
            total.add(tally)
            failed += failures
            for text in failures:
                print(text, file=sys.stderr, flush=True)
    _report(total, arguments.seed, time.monotonic() - started_s)
    return 1 if failed else 0


def _counted(
    run: Callable[[tuple[int, int]], tuple[Counter[str], list[str]]],
    chunks: list[tuple[int, int]],
    processes: int,
    started_s: float,
) -> int:
    total, failed = Counter[str](), 0
    with multiprocessing.Pool(processes, _start) as pool:
        for counts, failures in pool.imap_unordered(run, chunks):
            total += counts
            failed += len(failures)
            for text in failures:
                print(text, file=sys.stderr, flush=True)
            passed_s = time.monotonic() - started_s
            print(
                f"{total['schedules']} schedules, {failed} failed, {passed_s:.0f} s",
                file=sys.stderr,
                flush=True,
            )
    rows = [
        ("seconds", round(time.monotonic() - started_s)), *sorted(total.items()), ("losses and leaks", failed)
    ]  # fmt: skip
    for name, value in rows:
        print(f"{name:<30} {value:>10}")
    return 1 if failed else 0


def _start() -> None:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    gc.collect()
    gc.freeze()  # what lives on need not be visited in every collection


def _run(seeds: tuple[int, int]) -> tuple[Tally, list[str]]:
    total, failures = Tally(), []
    for seed in range(*seeds):
        try:
            total.add(simulate(seed))
        except Violation as error:
            total.losses += 1
            failures.append(str(error))
        except Exception as error:
            total.losses += 1
            failures.append(f"seed {seed}: {type(error).__name__}: {error}")
    return total, failures


def _run_references(seeds: tuple[int, int]) -> tuple[Counter[str], list[str]]:
    total, failures = Counter[str](), []
    for seed in range(*seeds):
        try:
            total += simulated_references.run(seed)
        except Exception as error:
            failures.append(f"seed {seed}: {type(error).__name__}: {error}")
    return total, failures


def _run_local_first(seeds: tuple[int, int]) -> tuple[Counter[str], list[str]]:
    total, failures = Counter[str](), []
    gc.disable()  # a world is full of circles; they are collected together
    for seed in range(*seeds):
        if seed % 50 == 0:
            gc.collect()
        try:
            total += simulated_local_first.run(seed)
        except Exception as error:
            failures.append(f"seed {seed}: {type(error).__name__}: {error}")
    return total, failures


def _explore_local_first(deviations: int) -> int:
    """Try each kill at each request of trainers and carriers, and each order."""
    logging.disable(logging.CRITICAL)
    total = 0
    for copies in (0, 1):
        for fate in (*FATES_OF_NODES[1:], ""):
            fates = 1 if fate else 0
            counts = simulated_local_first.all_schedules(
                fate, fates=fates, orders=deviations - fates, copies=copies
            )
            total += counts["schedules"]
            print(
                f"copies={copies} {fate or 'orders alone':<20} {counts['schedules']:>10} schedules",
                flush=True,
            )
    print(f"{'together':<29} {total:>10} schedules, none lost")
    return 0


def _explore(deviations: int) -> int:
    """Try each fault on prompt storage; then every visibility, where lags are rare or the rule."""
    logging.disable(logging.WARNING)
    url = "simulated://step-1"
    twice, again = Plan(2, 1, [("save", url), ("save", url)]), Plan(2, 2, [("save", url)])
    cases = [
        (fault, with_faults(PROMPT, fault), plan, 0.0) for fault in FAULTS[1:] for plan in (twice, again)
    ]
    cases += [(f"lags, usually {lag:g}", MOUNT, twice, lag) for lag in (0.0, 1.0)]
    total = 0
    for name, model, plan, lag in cases:
        count = sum(1 for _ in explore(model, plan, deviations, lag=lag))
        total += count
        print(
            f"{name:<20} {'once' if plan is twice else 'twice'} attempted {count:>10} schedules", flush=True
        )
    print(f"{'together':<36} {total:>10} schedules, none lost")
    return 0


def _explore_references(deviations: int) -> int:
    """Try each race with each fault on prompt storage, then every visibility."""
    logging.disable(logging.WARNING)
    cases = [(fault, with_faults(PROMPT, fault), 0.0) for fault in FAULTS[1:]]
    cases += [(f"lags, usually {lag:g}", MOUNT, lag) for lag in (0.0, 1.0)]
    total = 0
    for race in simulated_references.RACES:
        for name, model, lag in cases:
            count = simulated_references.all_schedules(race, model, deviations, lag=lag)["schedules"]
            total += count
            print(f"{race:<32} {name:<20} {count:>10} schedules", flush=True)
    print(f"{'together':<53} {total:>10} schedules, none lost, no leak")
    return 0


def _trace(seed: int) -> int:
    simulation = draw(seed)
    simulation.world.trace = []
    print(simulation.world.model)
    try:
        simulation.run()
        return 0
    except Exception:
        traceback.print_exc()
        return 1
    finally:
        print("\n".join(simulation.world.trace))
        for operation in (*simulation.history.writes, *simulation.history.loads):
            print(operation)


def _trace_nodes(seed: int) -> int:
    simulation, program = simulated_local_first.draw(seed)
    simulation.world.trace = []
    try:
        simulation.run(program)
        return 0
    except Exception:
        traceback.print_exc()
        return 1
    finally:
        print("\n".join(simulation.world.trace))
        print(*simulation.saves, sep="\n")


def _report(total: Tally, seed: int, elapsed_s: float) -> None:
    rows = [
        ("schedules", f"{total.schedules} (seeds from {seed}, {elapsed_s:.0f} s)"),
        ("faults injected", sum(total.faults.values())),
        *((f"  {fault}", count) for fault, count in total.faults.most_common()),
        ("saves attempted", sum(total.saves.values())),
        *((f"  {outcome}", count) for outcome, count in total.saves.most_common()),
        ("deletes", total.deletes),
        ("commits", total.commits),
        ("loads", total.loads),
        ("loads verified", total.verified),
        ("losses", total.losses),
    ]
    for name, value in rows:
        print(f"{name:<20} {value}")


if __name__ == "__main__":
    sys.exit(main())
