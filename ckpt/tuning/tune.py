"""Find the fastest settings for a place, compare them with the defaults, write them down: `ckpt.tune`."""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ckpt.backends.base import MIB, transfer_size_bytes
from ckpt.backends.options import options_dict, redact_url
from ckpt.backends.registry import default_threads, normal_url, open_store
from ckpt.errors import ConfigurationError, short_traceback
from ckpt.settings import FILE_NAME, VARIABLE, Settings, override
from ckpt.transfer.buffer_pool import DEFAULT_MEMORY_BUDGET_BYTES, MIN_MEMORY_BUDGET_BYTES
from ckpt.tuning.config_file import check_writable, write_section
from ckpt.tuning.search import FAILURES, CutShort, Point, Range, Trial, best_of, require_optuna, search
from ckpt.tuning.trial import Hopeless, Times, Trials
from ckpt.writing.layout import MIN_FILE_BYTES

NOTEWORTHY = 0.03
"""A gain below it is none: the next run may show the opposite."""

_CUT_AT = 1.25
"""A trial that has cost so many times the best is given up."""
_MEMORY_PRICE = 0.01
"""What twice the memory must gain to be worth it."""
_TRIALS_WANTED = 40
_MIN_MIB, _MAX_MIB = 64, 1024
_WARM_UP_BYTES = 8 * MIB
_FINALISTS = 2
_ROUNDS = 3
_MAX_ROUNDS = 7
_MAX_THREADS = 128
_MAX_PART_MIB = 256

Report = Callable[[str, float, float], None]
"""Called with what is being done, the seconds gone and those in all."""


@dataclass(frozen=True)
class Measured:
    """Settings, and the medians of their saves and loads in the final comparison.

    Attributes:
        settings: all that was tuned; for the defaults the values that they stand for. Without
            `files_per_rank` there are as many as by default.
        rounds: how often each was measured, in turns.
    """

    settings: Settings
    save_s: float
    load_s: float
    rounds: int


@dataclass(frozen=True)
class Tuned:
    """The result of `ckpt.tune`.

    Attributes:
        state_bytes: size of what was saved and loaded.
        defaults: measured in turns with `best`, which may be the same.
        gain: the share of time that the best saves; a save and a load count the same.
        trials: the defaults, then those of the search.
        path: the file that was written; None if none was.
    """

    url: str
    state_bytes: int
    defaults: Measured
    best: Measured
    gain: float
    trials: list[Trial] = field(repr=False)
    path: str | None = None

    @property
    def is_noteworthy(self) -> bool:
        """Tell whether the best is clearly faster than the defaults."""
        return self.gain >= NOTEWORTHY


@short_traceback
def tune(
    url: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    seconds: float = 300.0,
    max_trials: int | None = None,
    megabytes: float | None = None,
    memory_budget_bytes: int = DEFAULT_MEMORY_BUDGET_BYTES,
    path: str | None = None,
    write: bool | None = None,
    seed: int = 0,
    progress: Report | None = None,
) -> Tuned:
    """Find threads, part size, files and memory with which saves and loads at `url` are fastest.

    Saves and loads a state again and again with this library's own writer and reader, in a folder below
    `url` that is removed at the end, also after an error or Ctrl-C. What a save may do is enough.

    Args:
        storage_options: of the place, by name, as for a save there.
        seconds: about how long it may take.
        max_trials: ends the search before that; the defaults are a trial too.
        megabytes: size of the state, in MiB; by default so that a few dozen trials fit into the time.
            A rank's own share of a checkpoint, and more time, tell more.
        memory_budget_bytes: the most that may be chosen.
        path: the file to write; by default that of `CKPT_CONFIG`, or `ckpt.toml` in the working directory.
        write: True writes in any case, False never; by default a gain of 3 % or more is written.
        seed: of the search.
        progress: called with what is being done, the seconds gone and those in all.

    Raises:
        ConfigurationError: an argument is wrong, Optuna is not installed, or the time is too short.
        CheckpointError: a save or load with the defaults failed.
    """
    require_optuna()
    if not (isinstance(seconds, int | float) and 0 < seconds < math.inf):
        raise ConfigurationError(f"seconds must be a positive number, not {seconds!r:.100}")
    if megabytes is not None and not (isinstance(megabytes, int | float) and 1 <= megabytes < 1 << 20):
        raise ConfigurationError(f"megabytes must be a number from 1 on, not {megabytes!r:.100}")
    if max_trials is not None and not (isinstance(max_trials, int) and max_trials >= 1):
        raise ConfigurationError(f"max_trials must be a whole number from 1 on, not {max_trials!r:.100}")
    if not isinstance(memory_budget_bytes, int) or memory_budget_bytes < MIN_MEMORY_BUDGET_BYTES:
        raise ConfigurationError(f"memory_budget_bytes must be at least {MIN_MEMORY_BUDGET_BYTES} (128 MiB)")
    options = options_dict(storage_options)
    if "part_size_bytes" in options:
        raise ConfigurationError("the storage option part_size_bytes would win over all trials; leave it out")
    place = normal_url(url)
    path = path or os.environ.get(VARIABLE) or FILE_NAME
    if write is not False:
        check_writable(path, place)
    limits = _Limits(float(seconds), math.inf if max_trials is None else max_trials, memory_budget_bytes)
    run = _Tuning(place, options, limits, seed, progress)
    result = run.tune(None if megabytes is None else int(megabytes * MIB))
    if write or (write is None and result.is_noteworthy):
        write_section(path, place, result.best.settings, _comments(result))
        return replace(result, path=path)
    return result


@dataclass(frozen=True)
class _Limits:
    seconds: float
    trials: float
    memory_bytes: int


class _Tuning:
    def __init__(
        self, url: str, options: Mapping[str, Any], limits: _Limits, seed: int, progress: Report | None
    ) -> None:
        self._url, self._options, self._limits, self._seed = url, options, limits, seed
        self._progress = progress
        self._began_at_s = time.monotonic()
        self._doing = "trying the storage"
        self._base = Times(1.0, 1.0)
        with override(Settings()), contextlib.closing(open_store(url, options)) as store:
            self._has_parts = store.capabilities.parallel_parts
        self.defaults = default_settings()

    def tune(self, nbytes: int | None) -> Tuned:
        with contextlib.closing(self._trials(_WARM_UP_BYTES)) as trials:
            trials.run(Settings())  # imports, connections, the first look at a bucket
        nbytes = self._fitting_bytes() if nbytes is None else nbytes
        with contextlib.closing(self._trials(nbytes)) as trials:
            began_s = self._gone_s
            self._base = trials.run(Settings())
            trial_s = self._gone_s - began_s
            space = space_of(nbytes, self._limits.memory_bytes, has_parts=self._has_parts)
            points = self._search(trials, space, trial_s)
            finalists = self._finalists(points, space)
            measured = self._compare(trials, finalists, trial_s)
        best = min(measured, key=lambda each: self._cost(_times(each), each.settings))
        return Tuned(redact_url(self._url), nbytes, measured[0], best, self._gain(measured[0], best), points)

    @property
    def _gone_s(self) -> float:
        return time.monotonic() - self._began_at_s

    def _trials(self, nbytes: int) -> Trials:
        return Trials(self._url, self._options, nbytes, self._report)

    def _report(self, _nbytes: int = 0) -> None:
        if self._progress is not None:
            self._progress(self._doing, min(self._gone_s, self._limits.seconds), self._limits.seconds)

    def _fitting_bytes(self) -> int:
        """Choose the size of the state so that some dozens of trials fit into the time."""
        nbytes = _MIN_MIB * MIB
        with contextlib.closing(self._trials(nbytes)) as trials:
            began_s = self._gone_s
            trials.run(Settings())
            took_s = self._gone_s - began_s
        fitting = nbytes * self._limits.seconds / _TRIALS_WANTED / took_s
        return min(max(int(fitting) // (_MIN_MIB * MIB), 1), _MAX_MIB // _MIN_MIB) * _MIN_MIB * MIB

    def _search(self, trials: Trials, space: Mapping[str, Range], trial_s: float) -> list[Trial]:
        final_s = _ROUNDS * (1 + _FINALISTS) * trial_s
        if self._gone_s + trial_s + final_s > self._limits.seconds:
            needed_s = self._gone_s + 10 * trial_s + final_s
            raise ConfigurationError(
                f"a save and a load take {trial_s:.1f} s here, too long for {self._limits.seconds:g} s: "
                f"give at least --seconds {math.ceil(needed_s)}, or fewer --megabytes",
                url=redact_url(self._url),
            )

        def measure(point: Point, best: float) -> float:
            settings = settings_of(point, space)
            limit = _CUT_AT * best
            try:
                times = trials.run(settings, lambda times: self._cost(times, settings) > limit)
            except Hopeless as hopeless:
                raise CutShort(self._cost(hopeless.times, settings)) from None
            return self._cost(times, settings)

        def go_on(done: Sequence[Trial]) -> bool:
            gain = 100 * (1 - best_of(done).cost / done[0].cost)
            self._doing = f"trial {len(done)}, best so far {gain:.0f} % less time"
            self._report()
            has_time = self._gone_s + _CUT_AT * trial_s + final_s <= self._limits.seconds
            return has_time and len(done) < self._limits.trials

        start, *others = first_points(self.defaults, space)
        first = Trial(start, self._cost(self._base, self.defaults))
        return search(space, first, others, measure, go_on, seed=self._seed)

    def _finalists(self, points: Sequence[Trial], space: Mapping[str, Range]) -> list[Settings]:
        others = sorted(
            (trial for trial in points[1:] if trial.state == "complete"), key=lambda each: each.cost
        )
        settings = [settings_of(trial.point, space) for trial in others]
        return [*dict.fromkeys(each for each in settings if each != self.defaults)][:_FINALISTS]

    def _compare(self, trials: Trials, finalists: Sequence[Settings], trial_s: float) -> list[Measured]:
        """Measure the defaults and the finalists in turns, the defaults first."""
        runners = [self.defaults, *finalists]
        times: list[list[Times]] = [[] for _ in runners]
        out: set[int] = set()
        for number in range(_MAX_ROUNDS):
            if number >= _ROUNDS and self._gone_s + len(runners) * trial_s > self._limits.seconds:
                break
            self._doing = f"comparing with the defaults, round {number + 1}"
            self._report()
            for turn in range(len(runners)):
                runner = (turn + number) % len(runners)
                # The defaults as they are, not as values: parts of files differ from parts of reads.
                settings = runners[runner] if runner else Settings()
                if runner not in out:
                    try:
                        times[runner].append(trials.run(settings))
                    except FAILURES:
                        if not runner:
                            raise
                        out.add(runner)
        return [
            Measured(
                runner,
                statistics.median(t.save_s for t in its),
                statistics.median(t.load_s for t in its),
                len(its),
            )
            for number, (runner, its) in enumerate(zip(runners, times, strict=True))
            if number not in out
        ]

    def _cost(self, times: Times, settings: Settings) -> float:
        """Weigh a save and a load alike, in the time of the defaults; memory has a small price."""
        relative = (times.save_s / self._base.save_s + times.load_s / self._base.load_s) / 2
        budget_bytes = settings.memory_budget_bytes or DEFAULT_MEMORY_BUDGET_BYTES
        return relative * (1 + _MEMORY_PRICE * math.log2(budget_bytes / DEFAULT_MEMORY_BUDGET_BYTES))

    @staticmethod
    def _gain(defaults: Measured, best: Measured) -> float:
        return 1 - (best.save_s / defaults.save_s + best.load_s / defaults.load_s) / 2


def default_settings() -> Settings:
    """Return the values that the defaults stand for on this machine."""
    threads = default_threads()
    return Settings(threads, transfer_size_bytes(threads), None, DEFAULT_MEMORY_BUDGET_BYTES)


def space_of(nbytes: int, memory_bytes: int, *, has_parts: bool) -> dict[str, Range]:
    """Return what is searched: parts fit twice into the memory; a store that has parts gets one file a rank."""
    space = {
        "threads": Range(1, _MAX_THREADS),
        "part_size_bytes": Range(5 * MIB, min(_MAX_PART_MIB * MIB, memory_bytes // 2)),
        "memory_budget_bytes": Range(min(DEFAULT_MEMORY_BUDGET_BYTES, memory_bytes), memory_bytes),
    }
    if not has_parts and nbytes >= 2 * MIN_FILE_BYTES:
        space["files_per_rank"] = Range(1, min(nbytes // MIN_FILE_BYTES, _MAX_THREADS))
    return space


def settings_of(point: Point, space: Mapping[str, Range]) -> Settings:
    """Return the settings of a point, sizes in whole MiB.

    The most files that this state can have say nothing of larger ones: they stay with the default.
    """
    values = {name: value // MIB * MIB if name.endswith("_bytes") else value for name, value in point.items()}
    if "files_per_rank" in values and values["files_per_rank"] >= space["files_per_rank"].most:
        del values["files_per_rank"]
    return Settings(**values)


def first_points(defaults: Settings, space: Mapping[str, Range]) -> list[Point]:
    """Return what is tried first: the defaults, more threads for long ways, small parts for few bytes, fewer threads."""
    values = defaults.given()
    if "files_per_rank" in space:
        values["files_per_rank"] = space["files_per_rank"].most
    points: list[Point] = []
    for threads, part in [(1, 1), (4, 0.25), (1, 0.25), (2, 0.5), (0.5, 1), (8, 0.125)]:
        factors = {"threads": threads, "part_size_bytes": part}
        points.append({name: max(1, int(value * factors.get(name, 1))) for name, value in values.items()})
    return points


def _times(measured: Measured) -> Times:
    return Times(measured.save_s, measured.load_s)


def _comments(result: Tuned) -> list[str]:
    day = time.strftime("%Y-%m-%d")
    before, after = result.defaults, result.best
    return [
        f"Found by `ckpt tune` on {day} with {result.state_bytes / MIB:.0f} MiB in {len(result.trials)} trials:",
        f"save {before.save_s:.2f} s -> {after.save_s:.2f} s, load {before.load_s:.2f} s -> {after.load_s:.2f} s.",
    ]
