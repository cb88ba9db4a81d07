"""Log checkpoints to Weights & Biases by reference: nothing is uploaded but figures and the URL."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ckpt.errors import ConfigurationError
from ckpt.trainer_integration.events import Event
from ckpt.trainer_integration.sinks.background import Background

_SUMMARY = ("stall_s", "upload_s", "size_bytes", "retries", "load_s", "durable_age_s")


class WeightsAndBiases(Background):
    """Make a version of an artifact of each durable checkpoint, with a reference to its place.

    The artifact is of the type `checkpoint`; its aliases are `latest` and `step-1000`. Figures go
    to the run's summary (`ckpt/upload_s`, ...), so that the steps of its history stay yours.
    W&B does not look at a URL, so it needs no credentials for it; of a local folder it lists names
    and sizes. Versions stay when retention removes their checkpoint.

    Args:
        run: by default the run of `wandb.init()` on the first rank.
        name: of the artifact; by default `checkpoint-<id of the run>`.

    Raises:
        ConfigurationError: wandb is not installed.
    """

    def __init__(self, run: Any = None, name: str | None = None) -> None:
        super().__init__()
        try:
            import wandb
        except ImportError as error:
            raise ConfigurationError("WeightsAndBiases() needs wandb: pip install wandb") from error
        self._wandb: Any = wandb
        self._run, self._name = run, name

    def __call__(self, event: Event) -> None:
        self._run = self._run or self._wandb.run
        if self._run is None:
            raise ConfigurationError(
                "WeightsAndBiases() found no run: call wandb.init() on the first rank, or give run"
            )
        super().__call__(event)

    def send(self, event: Event) -> None:
        run = self._run
        figures = {f"ckpt/{name}": event.values[name] for name in _SUMMARY if name in event.values}
        if event.kind in ("durable", "restored") and event.step is not None:
            figures["ckpt/durable_step"] = event.step
        if figures:
            run.summary.update(figures)
        is_gone = "://" not in event.url and not Path(event.url).is_dir()  # retention was faster
        if event.kind == "durable" and not is_gone:
            # This asks the server for the artifact's type, and waits for its answer.
            metadata = {"step": event.step, "url": event.url, **event.values}
            name = self._name or f"checkpoint-{run.id}"
            artifact = self._wandb.Artifact(name, type="checkpoint", metadata=metadata)
            artifact.add_reference(_uri(event.url), name="checkpoint", checksum=False)
            run.log_artifact(artifact, aliases=["latest", f"step-{event.step}"])


def _uri(url: str) -> str:
    """Make a URI of a local path; URLs stay."""
    return url if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", url) else Path(url).expanduser().absolute().as_uri()
