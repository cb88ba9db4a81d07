"""Have real ranks save or load on a real network or file system, while something goes wrong.

    PYTHONPATH=tests python -m faults.campaign --rounds 20 --seed 1  # 20 times each class of faults
    PYTHONPATH=tests python -m faults.campaign --replay 745          # one trial, in words

`docs/consistency.md` says what must hold after each fault.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import json
import logging
import os
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.proxy import fault_proxy
from support.ranks import Job, RankDied, is_stopped
from support.servers import S3Server, moto_server
from support.states import digest, emptied, random_tensor

import ckpt
from ckpt.backends.base import MIB, ObjectStat
from ckpt.backends.registry import open_store
from ckpt.errors import (
    CheckpointError,
    CommitUnknown,
    FormatError,
    IntegrityError,
    NotCommitted,
    NotFound,
    SaveFailed,
)
from faults.campaign_faults import (
    FAULTS,
    UNSEEN,
    CannotMount,
    Trial,
    draw,
    file_system,
    install,
    network_rule,
    note_time,
)

DEADLINE_S = 10.0

OLD, NEW = 1, 2
"""The contents of checkpoints, by the seed of their values."""


@functools.cache
def state_of(ranks: range, content: int) -> dict[str, Any]:
    """Make what these ranks save: each 6 MiB and more, in two parts, beside smaller things."""
    return {
        f"rank{rank}.{name}": value
        for rank in ranks
        for name, value in {
            "large": random_tensor(3 * MIB // 2, seed=content + rank),
            "small": random_tensor(999, seed=content + rank + 10),
            "object": {"content": content},
        }.items()
    }


@functools.cache
def digest_of(ranks: int, content: int) -> Any:
    return digest(state_of(range(ranks), content))


# -- a trial ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Attempt:
    """The end of a save or load on a rank: acknowledged, or with an error."""

    ended_at_s: float
    failure: str | None = None
    may_be_committed: bool = False
    is_exact: bool = True


@dataclass
class Outcome:
    """The outcome of a trial.

    Attributes:
        happened_at_s: when the fault began; None if the save was over before.
        attempts: of each rank; None where it died, or was stopped and stayed so.
        slowest_s: from the fault to the last rank's error.
        loaded: the content of the place afterwards: NEW, OLD, None for nothing.
        damage: the error of a load that found the checkpoint damaged.
        problems: all that must not be.
    """

    trial: Trial
    happened_at_s: float | None = None
    attempts: list[Attempt | None] = field(default_factory=list)
    slowest_s: float = 0.0
    loaded: int | None = None
    damage: str | None = None
    problems: list[str] = field(default_factory=list)

    @property
    def acknowledged(self) -> bool:
        return any(attempt is not None and attempt.failure is None for attempt in self.attempts)

    @property
    def may_be_committed(self) -> bool:
        return any(attempt is None or attempt.may_be_committed for attempt in self.attempts)


def attempt(rank: int, trial: Trial, url: str, options: dict[str, Any], note: str, breakage: Any) -> Attempt:
    """Save or load on a rank of the job."""
    logging.disable()  # what is logged is also raised, or of no account
    if breakage is not None:
        breakage()
    install(trial, rank, url, lambda: note_time(Path(note)))
    return (_load_all if trial.loads else _save_own)(rank, trial, url, options)


def _save_own(rank: int, trial: Trial, url: str, options: dict[str, Any]) -> Attempt:
    state = dict(state_of(range(rank, rank + 1), NEW))
    try:
        if trial.in_background:
            ckpt.async_save(state, url, **options).result()
        else:
            ckpt.save(state, url, **options)
    except SaveFailed as error:
        unknown = any(isinstance(failure, CommitUnknown) for failure in error.failures.values())
        return Attempt(time.monotonic(), str(error), unknown or not error.failures)
    return Attempt(time.monotonic())


def _load_all(rank: int, trial: Trial, url: str, options: dict[str, Any]) -> Attempt:
    state = emptied(state_of(range(trial.ranks), OLD))
    try:
        ckpt.load(state, url, **options)
    except CheckpointError as error:
        return Attempt(time.monotonic(), str(error))
    return Attempt(time.monotonic(), is_exact=digest(state) == digest_of(trial.ranks, OLD))


def run(
    trial: Trial, server: S3Server, breakage: Callable[[], None] | None = None, *, verify: bool = True
) -> Outcome:
    """Carry out a trial.

    Args:
        breakage: breaks the library in the ranks, to see that this is noticed.
        verify: as for `ckpt.load`.

    Raises:
        CannotMount: this trial needs a file system of its own.
    """
    outcome = Outcome(trial)
    with tempfile.TemporaryDirectory(prefix="ckpt-campaign-") as name, contextlib.ExitStack() as stack:
        note = Path(name) / "happened"
        if trial.on_s3:
            proxy = stack.enter_context(fault_proxy(server))
            bucket = server.new_bucket()
            stack.callback(server.drop_bucket, bucket)
            url = plain_url = f"s3://{bucket}/c"
            small_parts = {"part_size_bytes": 5 * MIB}
            plain, faulty = {**server.options, **small_parts}, {**proxy.options, **small_parts}
        else:
            old = state_of(range(trial.ranks), OLD)
            checkpoint_bytes = sum(getattr(value, "nbytes", 4096) for value in old.values())
            place = stack.enter_context(file_system(trial, Path(name), checkpoint_bytes, note))
            url, plain_url, plain, faulty = str(place.path / "c"), str(place.plain / "c"), {}, {}
        if not trial.first:
            _save_old(trial, plain_url, plain, breakage)
        options = {"storage_options": faulty, "threads": 2 if trial.on_s3 else 1, "timeout_s": DEADLINE_S}
        if trial.loads:
            options["verify"] = verify
        if not trial.on_s3:
            place.begin()
        job = Job(trial.ranks, attempt, trial, url, options, str(note), breakage)
        try:
            if trial.on_s3:
                pids = [process.pid for process in job.processes]
                proxy.rule = network_rule(trial, pids, lambda: note_time(note))
            outcome.attempts = _attempts(trial, job)
        finally:
            if not trial.on_s3:
                place.mend()  # else who is held in the kernel cannot even be killed
            job.kill()
        if trial.on_s3:
            proxy.rule = lambda call: "pass"
            proxy.settle()
            time.sleep(1.5 * proxy.late_s if trial.fault == "late request" else 0.0)
        outcome.happened_at_s = float(note.read_text()) if note.exists() else None
        _judge(outcome, plain_url, plain, verify)
    return outcome


def _save_old(trial: Trial, url: str, options: dict[str, Any], breakage: Callable[[], None] | None) -> None:
    if breakage is None:
        ckpt.save(dict(state_of(range(trial.ranks), OLD)), url, storage_options=options, no_dist=True)
        return
    job = Job(1, _save_broken, trial.ranks, url, options, breakage)
    try:
        job.result(0, 60)
    finally:
        job.kill()


def _save_broken(
    rank: int, ranks: int, url: str, options: dict[str, Any], breakage: Callable[[], None]
) -> None:
    breakage()
    ckpt.save(dict(state_of(range(ranks), OLD)), url, storage_options=options, no_dist=True)


def _attempts(trial: Trial, job: Job) -> list[Attempt | None]:
    """Return the end on each rank. Stopped ones go on once all others have ended, or stay so."""
    attempts: list[Attempt | None] = [None] * trial.ranks
    waiting, deadline = set(range(trial.ranks)), time.monotonic() + 6 * DEADLINE_S
    resumed = False
    while waiting:
        for rank in sorted(waiting):
            with contextlib.suppress(TimeoutError):
                with contextlib.suppress(RankDied):
                    attempts[rank] = job.result(rank, 0.05)
                waiting.discard(rank)
        stopped = {rank for rank in waiting if is_stopped(job.processes[rank].pid)}
        if waiting and waiting == stopped and not resumed:
            if not trial.resumes:
                break
            resumed = True
            for rank in stopped:
                os.kill(job.processes[rank].pid, signal.SIGCONT)
        if time.monotonic() > deadline:
            raise TimeoutError(f"ranks {sorted(waiting)} still hang after {6 * DEADLINE_S:.0f} s")
    return attempts


# -- what must hold --------------------------------------------------------------------------------


def _judge(outcome: Outcome, url: str, options: dict[str, Any], verify: bool) -> None:
    trial, problems = outcome.trial, outcome.problems
    before = None if trial.first else OLD
    expected = OLD if trial.loads else NEW
    for when in ("", "after garbage collection: "):
        try:
            outcome.loaded = _load(trial.ranks, url, options, verify)
        except (IntegrityError, FormatError) as error:
            outcome.damage = str(error)
            if trial.fault != UNSEEN:
                problems.append(f"{when}damaged: {error}")
            continue
        except (CheckpointError, AssertionError) as error:
            problems.append(f"{when}cannot be loaded: {error}")
            continue
        if outcome.acknowledged and outcome.loaded != expected:
            problems.append(f"{when}acknowledged, but what loads is {outcome.loaded}")
        if not outcome.acknowledged and not outcome.may_be_committed and outcome.loaded != before:
            problems.append(f"{when}failed, but what loads is {outcome.loaded}")
        if outcome.loaded not in (NEW, before):
            problems.append(f"{when}what was committed before is lost")
        if not when:
            problems += _collect_garbage(url, options, outcome.loaded)
    attempts = {rank: attempt for rank, attempt in enumerate(outcome.attempts) if attempt is not None}
    killed = trial.victims if trial.signal else ()
    problems += [f"rank {rank} died" for rank in range(trial.ranks) if rank not in {*attempts, *killed}]
    if not all(attempt.is_exact for attempt in attempts.values()):
        problems.append("a load that worked gave other values than were saved")
    failures = {rank: attempt.failure for rank, attempt in attempts.items() if attempt.failure is not None}
    if not failures:
        return
    first, *_ = failures.values()
    if trial.ranks > 1:  # a job of one rank names none
        problems += [f"names no rank: {failure}" for failure in failures.values() if "rank" not in failure]
    if not trial.signal and not any(_OBJECT.search(failure) for failure in failures.values()):
        problems.append(f"names no object: {first}")
    if outcome.happened_at_s is None:
        problems.append(f"failed without a fault: {first}")
        return
    # A stopped rank has all the time until it goes on.
    timed = [rank for rank in failures if not (trial.signal and rank in trial.victims)]
    ended_at_s = max((attempts[rank].ended_at_s for rank in timed), default=outcome.happened_at_s)
    outcome.slowest_s = ended_at_s - outcome.happened_at_s


_OBJECT = re.compile(r"rank-\d{5}|commit\.json|\.metadata")


def _load(ranks: int, url: str, options: dict[str, Any], verify: bool) -> int | None:
    """Return the content of a checkpoint. Raises AssertionError if it is neither, bit for bit."""
    state = emptied(state_of(range(ranks), NEW))
    try:
        ckpt.load(state, url, storage_options=options, no_dist=True, verify=verify)
    except (NotFound, NotCommitted):
        return None
    loaded = digest(state)
    contents = [content for content in (OLD, NEW) if loaded == digest_of(ranks, content)]
    assert contents, "the values that were loaded were never saved"
    return contents[0]


def _collect_garbage(url: str, options: dict[str, Any], loaded: int | None) -> Iterator[str]:
    # Clocks of server and client differ, and times of objects are whole seconds.
    with contextlib.suppress(NotFound):
        ckpt.collect_garbage(url, storage_options=options, grace_s=-60)
    wanted = set()
    if loaded is not None:
        wanted = set(ckpt.remove(url, storage_options=options, dry_run=True).keys) | {".metadata"}
    unfinished: list[str] = []

    def note(stat: ObjectStat) -> bool:
        unfinished.append(stat.key)
        return False

    with contextlib.closing(open_store(url, options)) as store:
        unwanted = {stat.key for stat in store.list()} - wanted
        store.abandon(choose=note)
    if unwanted:
        yield f"garbage collection left {sorted(unwanted)}"
    if unfinished:
        yield f"garbage collection left unfinished {unfinished}"


# -- a campaign ------------------------------------------------------------------------------------


@dataclass
class Row:
    """One class of faults, summed up; `loads_verified` counts the looks afterwards too."""

    fault: str
    injected: int = 0
    saves: int = 0
    committed: int = 0
    loads: int = 0
    failed: int = 0
    loads_verified: int = 0
    damage_reported: int = 0
    losses: int = 0
    slowest_s: float = 0.0

    def add(self, outcome: Outcome) -> None:
        self.saves += not outcome.trial.loads
        self.loads += outcome.trial.loads
        self.injected += outcome.happened_at_s is not None
        self.committed += outcome.loaded == NEW
        self.failed += not outcome.acknowledged
        worked = sum(attempt is not None and attempt.failure is None for attempt in outcome.attempts)
        self.loads_verified += (0 if outcome.damage else 2) + (worked if outcome.trial.loads else 0)
        self.damage_reported += outcome.damage is not None
        self.losses += bool(outcome.problems)
        self.slowest_s = max(self.slowest_s, outcome.slowest_s)


def table(rows: Iterable[Row]) -> str:
    """Write the rows as Markdown."""
    lines = [
        "| fault | injected | saves | committed | loads | failed | loads verified | damage reported | losses | slowest error, s |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        *values, slowest_s = vars(row).values()
        lines.append(f"| {' | '.join(map(str, values))} | {slowest_s:.1f} |")
    return "\n".join(lines)


def campaign(
    seeds: Iterable[int],
    server: S3Server,
    *,
    at_once: int = 2,
    say: Callable[[str], None] = lambda text: None,
    **broken: Any,
) -> tuple[list[Row], list[Outcome]]:
    """Run the trials of these seeds; return a row per class of faults, and the wrong outcomes."""
    rows, total = {fault: Row(fault) for fault in FAULTS}, Row("all")
    wrong, skipped = [], Counter[str]()

    def run_seed(seed: int) -> Outcome | None:
        trial = draw(seed)
        try:
            return run(trial, server, **broken)
        except CannotMount as error:
            skipped[f"{trial.fault}: {error}"] += 1
        except Exception as error:
            return Outcome(trial, problems=[f"{type(error).__name__}: {error}"])
        return None

    with ThreadPoolExecutor(at_once) as pool:
        for outcome in pool.map(run_seed, seeds):
            if outcome is None:
                continue
            for row in (rows[outcome.trial.fault], total):
                row.add(outcome)
            if outcome.problems:
                wrong.append(outcome)
                say(f"seed {outcome.trial.seed}: {outcome.trial}\n  " + "\n  ".join(outcome.problems))
    for reason, count in skipped.items():
        say(f"skipped {count} of {reason}")
    return [*(row for row in rows.values() if row.saves + row.loads), total], wrong


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="trials of each class of faults")
    parser.add_argument("--seed", type=int, default=0, help="of the first round")
    parser.add_argument("--at-once", type=int, default=2, help="trials that run at the same time")
    parser.add_argument("--json", type=Path, help="write the table there too")
    parser.add_argument("--replay", type=int, help="the seed of one trial")
    arguments = parser.parse_args()
    with moto_server() as server:
        if arguments.replay is not None:
            outcome = run(draw(arguments.replay), server)
            print(outcome)
            return 1 if outcome.problems else 0
        first = arguments.seed * len(FAULTS)
        seeds = range(first, first + arguments.rounds * len(FAULTS))
        rows, wrong = campaign(seeds, server, at_once=arguments.at_once, say=print)
    print(f"{table(rows)}\n\nseeds {seeds.start} to {seeds.stop - 1}, deadline {DEADLINE_S:.0f} s")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([vars(row) for row in rows], indent=1))
    late = [row.fault for row in rows if row.slowest_s > DEADLINE_S]
    if late:
        print(f"over the deadline: {', '.join(late)}")
    return 1 if wrong or late else 0


if __name__ == "__main__":
    # Under its own name, which the ranks import.
    sys.exit(importlib.import_module("faults.campaign").main())
