"""Report progress to a Kubeflow TrainJob: its `status.trainerStatus`."""

from __future__ import annotations

import http.client
import json
import logging
import os
import ssl
from datetime import datetime, timezone
from typing import Any
from urllib.parse import urlsplit

from ckpt.errors import ConfigurationError
from ckpt.trainer_integration.events import Event
from ckpt.trainer_integration.sinks.background import Background

_logger = logging.getLogger("ckpt.manager")

_URL, _CA, _TOKEN = (f"KUBEFLOW_TRAINER_SERVER_{name}" for name in ("URL", "CA_CERT", "TOKEN"))
_SHOWN = ("durable_age_s", "upload_s", "stall_s", "size_bytes")
_MAX_REPLY_BYTES = 1 << 16


class TrainJobStatus(Background):
    """Post progress, and figures of the last durable checkpoint, when a checkpoint is restored, durable or failed.

    Kubeflow Trainer 2.2 and later gives pods of a TrainJob an address and a token for this where
    its feature gate `TrainJobStatus` is on. Elsewhere this does nothing, and says so in the log.
    A post replaces the one before, whoever made it: use no second reporter in the same job, such
    as the callback of transformers.

    Args:
        total_steps: for the percentage and the remaining time; without it there are none.
        timeout_s: for each request.
    """

    def __init__(self, total_steps: int | None = None, *, timeout_s: float = 5.0) -> None:
        super().__init__(flush_s=2 * timeout_s)
        if total_steps is not None and total_steps < 1:
            raise ConfigurationError(f"total_steps must be positive, not {total_steps}")
        self._total_steps, self._timeout_s = total_steps, timeout_s
        self._url = os.environ.get(_URL)
        self._first: tuple[int, float] | None = None
        self._metrics: dict[str, str] = {}
        self._failures = 0
        if not self._url:
            _logger.info("no %s here: the TrainJob's status is not reported", _URL)
        elif missing := [name for name in (_CA, _TOKEN) if not os.environ.get(name)]:
            raise ConfigurationError(f"{_URL} is set, but not {' and '.join(missing)}")
        elif urlsplit(self._url).scheme != "https" or not urlsplit(self._url).hostname:
            raise ConfigurationError(f"{_URL} must be an https:// URL, not {self._url!r}")

    def __call__(self, event: Event) -> None:
        if self._url and event.kind in ("restored", "durable", "failed"):
            super().__call__(event)

    def send(self, event: Event) -> None:
        body = json.dumps({"trainerStatus": self._status(event)})
        address = urlsplit(self._url or "")
        # The token is read each time: the kubelet renews it.
        with open(os.environ[_TOKEN], encoding="utf-8") as file:
            token = file.read().strip()
        connection = http.client.HTTPSConnection(
            address.hostname or "",
            address.port,
            timeout=self._timeout_s,
            context=ssl.create_default_context(cafile=os.environ[_CA]),
        )
        try:
            headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
            connection.request("POST", address.path, body, headers)
            reply = connection.getresponse()
            text = reply.read(_MAX_REPLY_BYTES).decode(errors="replace")
        finally:
            connection.close()
        if reply.status != 200:
            raise OSError(f"{self._url} answered {reply.status} {reply.reason}: {_message(text):.200}")

    def _status(self, event: Event) -> dict[str, Any]:
        """Make the whole status: what a post leaves out is removed."""
        if event.kind == "failed":
            self._failures += 1
        elif event.step is not None:
            self._metrics |= {name: f"{event.values[name]:.6g}" for name in _SHOWN if name in event.values}
            self._metrics["durable_step"] = str(event.step)
        self._metrics["failed_saves"] = str(self._failures)
        metrics = [{"name": f"ckpt_{name}", "value": value} for name, value in sorted(self._metrics.items())]
        at = datetime.fromtimestamp(event.at_s, timezone.utc)
        status: dict[str, Any] = {"lastUpdatedTime": f"{at:%Y-%m-%dT%H:%M:%SZ}", "metrics": metrics}
        step = event.step or 0
        self._first = self._first or (step, event.at_s)
        if self._total_steps is not None:
            status["progressPercentage"] = max(0, min(100, 100 * step // self._total_steps))
            done, took_s = step - self._first[0], event.at_s - self._first[1]
            if done > 0 and took_s > 0:
                left = max(0, self._total_steps - step)
                status["estimatedRemainingSeconds"] = min(round(left * took_s / done), 2**31 - 1)
        return status


def _message(text: str) -> str:
    """Return the message of Kubernetes's `Status`, if that is what the server sent."""
    try:
        return str(json.loads(text)["message"])
    except (ValueError, KeyError, TypeError):
        return text
