"""The sinks that need no package: Prometheus's text file, a TrainJob's status, and the thread behind sinks."""

from __future__ import annotations

import builtins
import importlib
import logging
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.rooms import ROOT
from support.status_server import status_server

import ckpt
from ckpt.errors import ConfigurationError
from ckpt.trainer_integration import keeping
from ckpt.trainer_integration.events import Event, Events
from ckpt.trainer_integration.sinks.background import Background
from ckpt.trainer_integration.sinks.prometheus import _KINDS, PrometheusTextfile
from ckpt.trainer_integration.sinks.trainjob import TrainJobStatus

FIGURES = {"upload_s": 1.5, "stall_s": 0.25, "size_bytes": 80.0, "retries": 3.0, "durable_age_s": 0.5}


def test_events_name_the_place_of_a_checkpoint(tmp_path: Path) -> None:
    events: list[Event] = []
    manager = ckpt.CheckpointManager(
        str(tmp_path), save=1, keep=keeping.last(1), async_mode="off", events=[events.append], preflight=False
    )
    with manager:
        for step in (1, 2):
            manager.step(step, {"w": torch.ones(2)})
    places = [(event.kind, event.url) for event in events if event.url]
    first, second = (str(tmp_path / f"step-0000000{step}") for step in (1, 2))
    assert places == [("durable", first), ("durable", second), ("removed", first)]


# -- Prometheus's text file -------------------------------------------------------------------------------


def test_a_text_file_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ckpt.prom"
    sink = PrometheusTextfile(path, {"run": 'a "b"\n'})
    sink(Event("durable", 7, "", FIGURES, at_s=1000.0))
    first = path.read_text()
    lines = first.splitlines()
    label = r'run="a \"b\"\n"'
    assert f'ckpt_events_total{{{label},kind="durable"}} 1.0' in lines
    assert f"ckpt_durable_timestamp_seconds{{{label}}} 999.5" in lines
    assert f"ckpt_durable_step{{{label}}} 7.0" in lines
    assert f"ckpt_retries_total{{{label}}} 3.0" in lines

    def broken(source: str, target: str) -> None:
        raise OSError("no space")

    with monkeypatch.context() as patched:
        patched.setattr("os.replace", broken)
        with pytest.raises(OSError, match="no space"):
            sink(Event("failed", 8, "", {"durable_age_s": 60.0}, at_s=1060.0))
    assert path.read_text() == first
    assert [file.name for file in tmp_path.iterdir()] == ["ckpt.prom"], "nothing half-written is left"


def test_counters_are_there_before_they_count(tmp_path: Path) -> None:
    """`increase(ckpt_events_total{kind="failed"}[1h])` sees no first failure in a series that begins with it."""
    path = tmp_path / "ckpt.prom"
    PrometheusTextfile(path, {"job": 7})(Event("preflight", None))  # type: ignore[dict-item]
    lines = path.read_text().splitlines()
    for kind in ("failed", "passed_over", "not_removed", "unmeasured"):
        assert f'ckpt_events_total{{job="7",kind="{kind}"}} 0.0' in lines
    assert {'ckpt_retries_total{job="7"} 0.0', 'ckpt_durable_bytes_total{job="7"} 0.0'} <= {*lines}


def test_every_kind_of_event_is_counted_from_the_start() -> None:
    source = "".join(path.read_text() for path in (ROOT / "trainer_integration").rglob("*.py"))
    assert {*re.findall(r'tell\(\s*"(\w+)"', source)} <= {*_KINDS}


@pytest.mark.parametrize(
    ("path", "labels", "message"),
    [
        ("ckpt.txt", {}, "files named"),
        ("missing/ckpt.prom", {}, "no such folder"),
        ("ckpt.prom", {"a-b": "x"}, "the label 'a-b'"),
        ("ckpt.prom", {"kind": "x"}, "the label 'kind'"),
        ("ckpt.prom", {"__name__": "x"}, "the label '__name__'"),
    ],
)
def test_a_text_file_that_nobody_would_read_is_refused(
    tmp_path: Path, path: str, labels: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        PrometheusTextfile(tmp_path / path, labels)


# -- a TrainJob's status ----------------------------------------------------------------------------------


def set_all(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_a_trainjob_gets_progress_and_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with status_server(tmp_path) as server:
        set_all(monkeypatch, server.variables)
        sink = TrainJobStatus(total_steps=200)
        sink(Event("restored", 20, "", {}, at_s=1000.0))
        sink(Event("kept", 20))
        sink(Event("durable", 70, "", FIGURES, at_s=1100.0))
        sink(Event("failed", 80, "disk full", {"durable_age_s": 20.0}, at_s=1120.0))
        assert sink.flush()
    first, second, third = server.posted
    assert first["progressPercentage"] == 10
    assert "estimatedRemainingSeconds" not in first
    assert (second["progressPercentage"], second["estimatedRemainingSeconds"]) == (35, 260)
    assert second["lastUpdatedTime"] == "1970-01-01T00:18:20Z"
    metrics = {metric["name"]: metric["value"] for metric in second["metrics"]}
    assert metrics["ckpt_durable_step"] == "70"
    assert metrics["ckpt_upload_s"] == "1.5"
    assert {"name": "ckpt_failed_saves", "value": "1"} in third["metrics"]
    assert {"name": "ckpt_durable_step", "value": "70"} in third["metrics"], "a post replaces the one before"


def test_a_renewed_token_is_used_and_a_refusal_is_worded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with status_server(tmp_path) as server:
        set_all(monkeypatch, server.variables)
        sink = TrainJobStatus()
        server.token.write_text("expired")
        for step in (1, 2):
            sink(Event("durable", step, "", FIGURES))
        assert sink.flush()
        server.token.write_text("a.b.c\n")
        sink(Event("durable", 3, "", FIGURES))
        assert sink.flush()
    assert server.refused == [403, 403]
    assert [len(server.posted), "progressPercentage" in server.posted[0]] == [1, False]
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1, "once for each message"
    assert "answered 403 Forbidden: Forbidden" in warnings[0]


def test_outside_a_trainjob_nothing_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBEFLOW_TRAINER_SERVER_URL", raising=False)
    threads = threading.enumerate()
    sink = TrainJobStatus()
    sink(Event("durable", 1, "", FIGURES))
    assert sink.flush()
    assert threading.enumerate() == threads


def test_half_a_configuration_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", "https://server/status")
    monkeypatch.delenv("KUBEFLOW_TRAINER_SERVER_TOKEN", raising=False)
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_CA_CERT", "/ca.crt")
    with pytest.raises(ConfigurationError, match="KUBEFLOW_TRAINER_SERVER_TOKEN"):
        TrainJobStatus()
    with pytest.raises(ConfigurationError, match="total_steps must be positive"):
        TrainJobStatus(total_steps=0)


# -- the thread behind sinks ------------------------------------------------------------------------------


class Slow(Background):
    """Waits for permission before it sends."""

    def __init__(self, flush_s: float) -> None:
        super().__init__(flush_s)
        self.may_go, self.begun, self.sent = threading.Event(), threading.Event(), list[int | None]()

    def send(self, event: Event) -> None:
        self.begun.set()
        assert self.may_go.wait(60)
        self.sent.append(event.step)
        if event.step == 0:
            raise OSError("the server is away")


def test_training_waits_neither_for_a_server_nor_for_memory(caplog: pytest.LogCaptureFixture) -> None:
    sink = Slow(flush_s=0.01)
    try:
        sink(Event("durable", 0))
        assert sink.begun.wait(60)
        for step in range(1, 1003):
            sink(Event("durable", step))
        assert not sink.flush()
        sink._flush_s = 1e9
        assert not sink.flush(), "it waits once"
        assert caplog.text.count("has not sent 1001 events within 0.01 s") == 1
        assert "1000 events behind; the oldest are dropped" in caplog.text
    finally:
        sink.may_go.set()
    sink._waiting.join()
    assert sink.flush()
    assert sink.sent == [0, *range(3, 1003)], "in order, without the oldest, and after a failure"
    assert "Slow failed on the event 'durable': the server is away" in caplog.text


class Refused(Background):
    """Has lost its server, of which the URL has a password."""

    def send(self, event: Event) -> None:
        if event.kind != "restored":
            raise OSError(f"no answer from http://me:sesame@host/api by {object()}")


def test_a_lost_server_is_told_of_once_and_without_its_password(caplog: pytest.LogCaptureFixture) -> None:
    sink = Refused()
    for kind in ("durable", "failed", "restored", "durable"):
        sink(Event(kind, 1))
        assert sink.flush()
    listener = Events([Refused().send])
    for _ in range(2):
        listener.tell(Event("staged", 1))
    lines = [record.getMessage() for record in caplog.records]
    assert [line.partition(" on the event ")[2].partition(":")[0] for line in lines] == [
        "'durable'", "'durable'", "'staged'",
    ], "again only after it worked"  # fmt: skip
    assert "http://***:***@host/api" in lines[0] or "http://me:***@host/api" in lines[0]
    assert "sesame" not in caplog.text


def test_what_waits_is_sent_when_the_manager_closes(tmp_path: Path) -> None:
    """Not when the program ends: a run of a tracking server may have ended before."""
    sink = Slow(flush_s=60)
    threading.Timer(0.05, sink.may_go.set).start()
    with ckpt.CheckpointManager(str(tmp_path), save=1, events=[sink], preflight=False) as manager:
        manager.step(1, {"w": torch.ones(2)})
    assert sink.sent == [1] * len(sink.sent)
    assert len(sink.sent) >= 3


# -- packages that are not there --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "name", "package", "advice"),
    [
        ("mlflow", "MLflow", "mlflow", "pip install mlflow-skinny"),
        ("wandb", "WeightsAndBiases", "wandb", "pip install wandb"),
        ("prometheus", "Prometheus", "prometheus_client", "pip install prometheus-client"),
    ],
)
def test_a_missing_package_is_one_clear_error(
    monkeypatch: pytest.MonkeyPatch, module: str, name: str, package: str, advice: str
) -> None:
    real: Callable[..., Any] = builtins.__import__

    def without(wanted: str, *rest: Any, **named: Any) -> Any:
        if wanted.partition(".")[0] == package:
            raise ModuleNotFoundError(f"No module named {wanted!r}")
        return real(wanted, *rest, **named)

    sink = getattr(importlib.import_module(f"ckpt.trainer_integration.sinks.{module}"), name)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigurationError, match=advice):
        sink()


@pytest.fixture(autouse=True)
def _log_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="ckpt.manager")
