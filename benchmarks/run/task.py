"""Send a measurement to a process of its own, and its outcome back."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.contenders import Contender, Settings, make
from benchmarks.run.servers import Endpoint
from benchmarks.run.states import EMPTY, StateSpec

__all__ = ["Outcome", "Task"]


@dataclass(frozen=True)
class Task:
    """A measurement to take.

    Attributes:
        job: what is done, a key of `benchmarks.run.worker.JOBS`.
        contender: by whom, as `benchmarks.contenders` names them.
        place: the checkpoint's place, a path or `s3://bucket/key`.
        state: what is saved or loaded.
        endpoint: the S3 endpoint, if there is one.
        threads: 0 leaves the number to the contender.
        options: the contender's settings.
        parameters: the job's own.
    """

    job: str
    contender: str
    place: str
    state: StateSpec = EMPTY
    endpoint: Endpoint | None = None
    threads: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    parameters: dict[str, int] = field(default_factory=dict)

    def make_contender(self) -> Contender:
        return make(self.contender, Settings(self.endpoint, self.threads, self.options))

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Task:
        values = json.loads(text)
        values["state"] = StateSpec(**values["state"])
        values["endpoint"] = Endpoint(**values["endpoint"]) if values["endpoint"] else None
        return Task(**values)


@dataclass
class Outcome:
    """The report of a process: figures by name, or the error that kept it from measuring."""

    figures: dict[str, float] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    error: str | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Outcome:
        return Outcome(**json.loads(text))
