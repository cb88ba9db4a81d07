"""Rules for saving and keeping, and the events that tell of them."""

from __future__ import annotations

import json
import logging
import math
import pickle
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import ConfigurationError
from ckpt.format.run_record import RunCheckpoint
from ckpt.trainer_integration import keeping, saving
from ckpt.trainer_integration.events import Event, Events, JsonLines, OpenTelemetry
from ckpt.trainer_integration.saving import Moment, SaveRule


def steps_saved(rule: SaveRule, steps: range, **moment: Any) -> list[int]:
    return [step for step in steps if rule.due(Moment(step, **moment))]


def test_rules_of_the_step_alone() -> None:
    assert steps_saved(saving.every_steps(4), range(13)) == [4, 8, 12]  # step 0 has nothing to save
    assert steps_saved(saving.at_steps({3, 5}), range(9)) == [3, 5]
    assert steps_saved(saving.first_step(), range(1, 4), is_first=True) == [1, 2, 3]
    assert not steps_saved(saving.first_step(), range(1, 4))
    assert steps_saved(saving.last_step(), range(1, 3), is_last=True) == [1, 2]
    union = saving.every_steps(4) | saving.at_steps([5]) | saving.last_step()
    assert steps_saved(union, range(10)) == [4, 5, 8]
    assert union.due(Moment(4)) == "every 4 steps"
    assert not any(rule.needs_clock for rule in union.rules())


def test_rules_travel_to_other_processes_and_say_what_they_are() -> None:
    for rule in (
        saving.every_steps(4) | saving.at_steps([5]) | saving.first_step() | saving.last_step(),
        saving.every_seconds(60) | saving.overhead_budget(0.01) | saving.young_daly(),
        saving.on_preemption(),
        keeping.last(3) | keeping.every_steps(10) | keeping.within(60) | keeping.best(2, "loss"),
    ):
        assert pickle.loads(pickle.dumps(rule)) == rule
    assert "steps=4" in repr(saving.every_steps(4))


def test_rules_of_the_clock() -> None:
    assert saving.every_seconds(60).due(Moment(1, since_save_s=60))
    assert not saving.every_seconds(60).due(Moment(1, since_save_s=59))
    # 2 % of the time for a stall of 1 s: every 50 s, but never before the last upload can have ended.
    budget = saving.overhead_budget(0.02)
    assert budget.due(Moment(1, since_save_s=0)), "the first save measures"
    assert not budget.due(Moment(1, since_save_s=49, stall_s=1, upload_s=5))
    assert budget.due(Moment(1, since_save_s=51, stall_s=1, upload_s=5))
    assert not budget.due(Moment(1, since_save_s=51, stall_s=1, upload_s=99))
    # sqrt(2 x 0.5 s x 10,000 s) = 100 s
    optimum = saving.young_daly(mtbf_s=10_000)
    assert not optimum.due(Moment(1, since_save_s=99, stall_s=0.5, upload_s=5))
    assert optimum.due(Moment(1, since_save_s=101, stall_s=0.5, upload_s=5))
    observed = saving.young_daly()
    assert not observed.due(Moment(1, since_save_s=101, stall_s=0.5, upload_s=5, mtbf_s=40_000))
    assert observed.due(Moment(1, since_save_s=101, stall_s=0.5, upload_s=5, mtbf_s=10_000))
    assert all(
        rule.needs_clock
        for rule in (budget | optimum | saving.every_seconds(1) | saving.on_preemption()).rules()
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda: saving.every_steps(0),
        lambda: saving.every_seconds(0),
        lambda: saving.overhead_budget(1.5),
        lambda: saving.young_daly(-1),
        lambda: saving.on_preemption(0),
        lambda: keeping.last(0),
        lambda: keeping.every_steps(0),
        lambda: keeping.best(1, "loss", "least"),  # type: ignore[arg-type]
        lambda: keeping.within(0),
    ],
)
def test_rules_refuse_what_makes_no_sense(make: Any) -> None:
    with pytest.raises(ConfigurationError):
        make()


def saved(step: int, **fields: Any) -> RunCheckpoint:
    return RunCheckpoint(
        step=step, path=f"step-{step:08d}", saved_at_s=fields.pop("saved_at_s", 0.0), **fields
    )


def kept(rule: keeping.KeepRule, checkpoints: Sequence[RunCheckpoint], now_s: float = 0.0) -> list[int]:
    return sorted(rule.keeps(checkpoints, now_s))


def test_rules_for_keeping() -> None:
    all_of_them = [saved(step, saved_at_s=10.0 * step) for step in range(1, 8)]
    assert kept(keeping.last(1), all_of_them) == [7]
    assert kept(keeping.last(9), all_of_them) == [1, 2, 3, 4, 5, 6, 7]
    assert kept(keeping.every_steps(3), all_of_them) == [3, 6]
    assert kept(keeping.within(15), all_of_them, now_s=70) == [6, 7]
    assert kept(keeping.last(2) | keeping.every_steps(3), all_of_them) == [3, 6, 7]
    assert kept(keeping.last(2), []) == []


def test_best_by_a_metric() -> None:
    losses = {1: 0.5, 2: None, 3: 0.4, 4: 0.4, 5: 0.9}
    checkpoints = [saved(step, metrics={"loss": loss}) for step, loss in losses.items()]
    checkpoints.insert(2, saved(6, metrics={"other": 0.0}))
    assert kept(keeping.best(1, "loss"), checkpoints) == [4], "of equal ones the newer"
    assert kept(keeping.best(4, "loss"), checkpoints) == [1, 3, 4, 5], "what is not a number is worst"
    assert kept(keeping.best(9, "loss"), checkpoints) == [1, 2, 3, 4, 5], (
        "without the metric it is not one of them"
    )
    assert kept(keeping.best(1, "loss", "max"), checkpoints) == [5]


@given(
    st.lists(st.one_of(st.none(), st.floats(allow_nan=True)), min_size=1, max_size=8),
    st.integers(1, 9),
    st.sampled_from(["min", "max"]),
)
def test_best_is_never_worse_than_what_goes(values: list[float | None], count: int, mode: Any) -> None:
    checkpoints = [saved(step, metrics={"m": value}) for step, value in enumerate(values)]
    stay = set(kept(keeping.best(count, "m", mode), checkpoints))
    assert len(stay) == min(count, len(values))
    sign = 1 if mode == "min" else -1

    def badness(step: int) -> float:
        value = values[step]
        return math.inf if value is None or math.isnan(value) else sign * value

    for gone in set(range(len(values))) - stay:
        assert all(badness(step) <= badness(gone) for step in stay)


def test_events_reach_log_and_files_and_survive_a_sink_that_fails(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(event: Event) -> None:
        raise OSError("no space")

    events = Events([broken, JsonLines(tmp_path / "events.jsonl")])
    figures = {"upload_s": 1.5, "size_bytes": 3.2e7, "stall_s": 0.02, "retries": 3}
    with caplog.at_level(logging.INFO, logger="ckpt.manager"):
        events.tell(Event("durable", 7, "step-00000007", figures, at_s=3.0))
        events.tell(Event("not_due", 8, "the save before it is still in flight"))
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert lines[0] == {"at_s": 3.0, "kind": "durable", "step": 7, "reason": "step-00000007"} | figures
    assert lines[1]["kind"] == "not_due"
    assert "step 7 saved: 32 MB in 1.50 s, training waited 0.02 s, 3 requests were sent again" in caplog.text
    assert "no space" in caplog.text


class Instrument:
    """Any of a meter's instruments: it keeps its values."""

    def __init__(self) -> None:
        self.values: list[Any] = []

    def add(self, value: Any, attributes: Any = None) -> None:
        self.values.append((value, attributes))

    def record(self, value: Any) -> None:
        self.values.append(value)

    set = record


class Meter:
    """Has the methods of OpenTelemetry's `Meter` that are used."""

    def __init__(self) -> None:
        self.instruments: dict[str, Instrument] = {}

    def _create(self, name: str, unit: str = "", description: str = "") -> Instrument:
        return self.instruments.setdefault(name, Instrument())

    create_counter = create_histogram = create_gauge = _create


def test_events_feed_a_meter() -> None:
    meter = Meter()
    sink = OpenTelemetry(meter)
    figures = {"upload_s": 1.5, "stall_s": 0.1, "size_bytes": 80, "retries": 3}
    sink(Event("durable", 7, "", {**figures, "durable_age_s": 0.0}))
    sink(Event("failed", 8, "disk full", {"durable_age_s": 60.0}))
    values = {name: instrument.values for name, instrument in meter.instruments.items()}
    assert values["ckpt.events"] == [(1, {"kind": "durable"}), (1, {"kind": "failed"})]
    assert values["ckpt.durable.size"] == [(80, None)]
    assert values["ckpt.retries"] == [(3, None)]
    assert values["ckpt.upload"] == [1.5]
    assert values["ckpt.stall"] == [0.1]
    assert values["ckpt.durable.step"] == [7]
    assert values["ckpt.durable.age"] == [0.0, 60.0]


def test_signals_are_noted_and_handlers_come_back() -> None:
    from ckpt.trainer_integration.run.signals import Signals

    called: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: called.append(number))
    mine = signal.getsignal(signal.SIGUSR1)
    try:
        signals = Signals([signal.SIGUSR1, signal.SIGTERM])
        noted = [signals.received]
        signal.raise_signal(signal.SIGUSR1)
        noted.append(signals.received)
        assert called == [signal.SIGUSR1], "the program's own handler runs too"
        signal.raise_signal(signal.SIGTERM)  # would end this process
        assert [*noted, signals.received] == [None, "SIGUSR1", "SIGTERM"]
        signals.close()
        assert signal.getsignal(signal.SIGUSR1) is mine
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGUSR1, before)
