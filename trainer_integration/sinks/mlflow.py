"""Log checkpoints to MLflow by reference: nothing is uploaded but figures and the URL."""

from __future__ import annotations

import re
from typing import Any

from ckpt.errors import ConfigurationError
from ckpt.trainer_integration.events import Event
from ckpt.trainer_integration.sinks.background import Background

_METRICS = ("stall_s", "upload_s", "size_bytes", "retries", "load_s")


class MLflow(Background):
    """Make an external model of each durable checkpoint, and metrics of the figures.

    The model `step-00001000` is an output of the run. Its tags are `ckpt.url`, `ckpt.step`,
    `ckpt.size_bytes` and `ckpt.state`: `durable`, then `removed` when no rule keeps the checkpoint.
    Metrics (`ckpt/upload_s`, ...) and the tag `ckpt.latest` are the run's.

    Args:
        run_id: by default the run that is active on the first rank when the first event comes.

    Raises:
        ConfigurationError: MLflow is not installed, or older than 3.
    """

    def __init__(self, run_id: str | None = None) -> None:
        super().__init__()
        try:
            import mlflow
        except ImportError as error:
            raise ConfigurationError("MLflow() needs MLflow: pip install mlflow-skinny") from error
        if not hasattr(mlflow.MlflowClient, "create_logged_model"):
            raise ConfigurationError(f"MLflow() needs MLflow 3 or later, not {mlflow.__version__}")
        self._mlflow: Any = mlflow
        self._client: Any = None
        self._run_id, self._experiment_id = run_id, ""

    def __call__(self, event: Event) -> None:
        if self._run_id is None:
            # Here, not in the thread: MLflow keeps the active run of each thread.
            run = self._mlflow.active_run()
            if run is None:
                raise ConfigurationError(
                    "MLflow() found no active run: call mlflow.start_run(), or give run_id"
                )
            self._run_id = run.info.run_id
        super().__call__(event)

    def send(self, event: Event) -> None:
        if self._client is None:
            client = self._mlflow.MlflowClient()
            self._experiment_id = client.get_run(self._run_id).info.experiment_id
            self._client = client
        step = event.step or 0
        if event.kind in ("durable", "restored"):
            self._log_metrics(event, step)
        if event.kind == "durable":
            self._log_model(event, step)
        elif event.kind == "removed":
            # By the step, as MLflow's filters have no escape for quotes in a URL.
            of_step = f"tags.`ckpt.step` = '{step}'"
            page = None
            while page is None or page.token:  # other runs of the experiment have that step too
                page = self._client.search_logged_models(
                    [self._experiment_id], of_step, page_token=page and page.token
                )
                for model in page:
                    if model.tags.get("ckpt.url") == event.url:
                        self._client.set_logged_model_tags(model.model_id, {"ckpt.state": "removed"})

    def _log_metrics(self, event: Event, step: int) -> None:
        from mlflow.entities import Metric

        at_ms = round(event.at_s * 1000)
        metrics = [
            Metric(f"ckpt/{name}", event.values[name], at_ms, step)
            for name in _METRICS
            if name in event.values
        ]
        self._client.log_batch(self._run_id, metrics=metrics)

    def _log_model(self, event: Event, step: int) -> None:
        from mlflow.entities import LoggedModelOutput

        tags = {"ckpt.url": event.url, "ckpt.step": str(step), "ckpt.state": "durable"}
        if "size_bytes" in event.values:
            tags["ckpt.size_bytes"] = str(int(event.values["size_bytes"]))
        # As mlflow.create_external_model does, which needs pandas and writes to the artifact store.
        model = self._client.create_logged_model(
            self._experiment_id,
            name=re.sub(r"[:.%\"']", "-", event.url.rstrip("/").rpartition("/")[2]),  # `step-00000500.again`
            source_run_id=self._run_id,
            tags=tags | {"mlflow.model.isExternal": "true"},
            model_type="checkpoint",
        )
        self._client.finalize_logged_model(model.model_id, "READY")
        self._client.log_outputs(self._run_id, [LoggedModelOutput(model.model_id, step)])
        self._client.set_tag(self._run_id, "ckpt.latest", event.url)
