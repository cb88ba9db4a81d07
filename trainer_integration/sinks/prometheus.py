"""Offer figures of checkpoints to Prometheus, in a text file or through `prometheus_client`."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckpt.errors import ConfigurationError
from ckpt.trainer_integration.events import Event
from ckpt.whole_files import write_whole

_KINDS = (
    "preflight", "restored", "passed_over", "due", "not_due", "staged", "durable", "failed", "kept", "removed",
    "not_removed", "unmeasured", "local", "fallback", "not_local", "not_copied", "not_durable", "drain_failed",
)  # fmt: skip
_SECONDS = {
    "stall_s": "training waited for the last save",
    "upload_s": "until the last save was durable",
    "plan_s": "planning of the last save",
    "write_s": "until all ranks had written the last save",
    "commit_s": "commit of the last save",
    "load_s": "the last restore",
}


@dataclass
class _Family:
    """Values of one metric, by the value of its label `kind` ('' if it has none)."""

    name: str
    about: str
    is_counter: bool = False
    values: dict[str, float] = field(default_factory=dict)


class _Figures:
    """Turn events into metrics. Times are absolute, so that ages grow while nothing happens."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._families = {
            family.name: family
            for family in (
                _Family("ckpt_events", "Events by kind", is_counter=True),
                _Family("ckpt_durable_bytes", "Bytes made durable", is_counter=True),
                _Family("ckpt_retries", "Requests sent again", is_counter=True),
                _Family("ckpt_durable_step", "The last durable step"),
                _Family("ckpt_durable_timestamp_seconds", "When the last checkpoint became durable"),
                _Family("ckpt_size_bytes", "Size of the last durable checkpoint"),
                *(
                    _Family(f"ckpt_{name[:-2]}_seconds", f"Seconds: {text}")
                    for name, text in _SECONDS.items()
                ),
            )
        }

    def __call__(self, event: Event) -> None:
        figures = event.values
        with self._lock:
            is_durable = event.kind == "durable"
            # All are there, at 0, from the first event on: `increase()` does not count what a new series begins with.
            for kind in {*_KINDS, event.kind}:
                self._add("ckpt_events", kind == event.kind, kind)
            self._add("ckpt_durable_bytes", figures.get("size_bytes", 0) if is_durable else 0)
            self._add("ckpt_retries", figures.get("retries", 0) if is_durable else 0)
            if is_durable:
                self._set("ckpt_size_bytes", figures.get("size_bytes"))
            if event.kind in ("durable", "restored"):
                self._set("ckpt_durable_step", event.step)
            if "durable_age_s" in figures:
                self._set("ckpt_durable_timestamp_seconds", event.at_s - figures["durable_age_s"])
            for name in _SECONDS:
                self._set(f"ckpt_{name[:-2]}_seconds", figures.get(name))

    def families(self) -> list[_Family]:
        """Copy the metrics that have a value."""
        with self._lock:
            known = [family for family in self._families.values() if family.values]
            return [_Family(one.name, one.about, one.is_counter, {**one.values}) for one in known]

    def _add(self, name: str, value: float, kind: str = "") -> None:
        values = self._families[name].values
        values[kind] = values.get(kind, 0) + value

    def _set(self, name: str, value: float | None) -> None:
        if value is not None:
            self._families[name].values[""] = value


class PrometheusTextfile:
    """Write the figures to a file for node_exporter's textfile collector, after each event.

    Readers never see a half-written file.

    Args:
        path: its name must end in `.prom`; the folder is that of `--collector.textfile.directory`.
        labels: added to every metric, as `{"run": "granite-7b"}`.

    Raises:
        ConfigurationError: the name ends otherwise (the collector would not read the file), the
            folder does not exist, or a label's name is none of Prometheus's.
    """

    def __init__(self, path: str | os.PathLike[str], labels: Mapping[str, str] | None = None) -> None:
        self._path = os.path.abspath(path)
        self._figures = _Figures()
        self._lock = threading.Lock()
        if not self._path.endswith(".prom"):
            raise ConfigurationError(f"{self._path}: the textfile collector reads files named *.prom alone")
        folder = os.path.dirname(self._path)
        if not os.path.isdir(folder):
            raise ConfigurationError(f"{folder}: there is no such folder for the textfile collector")
        for name in labels or {}:
            if not (name.isascii() and name.isidentifier()) or name == "kind" or name.startswith("__"):
                raise ConfigurationError(f"no metric can have the label {name!r}")
        self._labels = {name: str(value) for name, value in (labels or {}).items()}

    def __call__(self, event: Event) -> None:
        self._figures(event)
        with self._lock:
            write_whole(self._path, "".join(self._lines()).encode())

    def _lines(self) -> Iterator[str]:
        for family in self._figures.families():
            name = f"{family.name}_total" if family.is_counter else family.name
            yield f"# HELP {name} {family.about}.\n"
            yield f"# TYPE {name} {'counter' if family.is_counter else 'gauge'}\n"
            for kind, value in family.values.items():
                labels = self._labels | ({"kind": kind} if kind else {})
                shown = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
                yield f"{name}{{{shown}}} {float(value)!r}\n" if shown else f"{name} {float(value)!r}\n"


class Prometheus:
    """Offer the figures in a registry of `prometheus_client`, for its endpoint or push gateway.

    prometheus_client.start_http_server(9400)
    manager = CheckpointManager(root, events=[Prometheus()])

    Args:
        registry: by default `prometheus_client.REGISTRY`.

    Raises:
        ConfigurationError: `prometheus_client` is not installed, or the registry has these metrics
            already.
    """

    def __init__(self, registry: Any = None) -> None:
        try:
            from prometheus_client import REGISTRY
            from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
        except ImportError as error:
            raise ConfigurationError(
                "Prometheus() needs prometheus_client: pip install prometheus-client; PrometheusTextfile needs nothing"
            ) from error
        self._figures, self._types = _Figures(), (GaugeMetricFamily, CounterMetricFamily)
        try:
            (REGISTRY if registry is None else registry).register(self)
        except ValueError as error:
            raise ConfigurationError(f"each Prometheus() needs a registry of its own: {error}") from error

    def __call__(self, event: Event) -> None:
        self._figures(event)

    def describe(self) -> list[Any]:
        """Name the metrics, so that a registry notices a second sink."""
        return [self._types[0](name, "") for name in ("ckpt_durable_step", "ckpt_size_bytes")]

    def collect(self) -> Iterator[Any]:
        """Yield the metrics, as a registry asks for them."""
        for family in self._figures.families():
            has_kinds = "" not in family.values
            metric = self._types[family.is_counter](
                family.name, family.about, labels=["kind"] if has_kinds else []
            )
            for kind, value in family.values.items():
                metric.add_metric([kind] if has_kinds else [], value)
            yield metric


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
