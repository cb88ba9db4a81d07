"""The sinks for Prometheus, MLflow and Weights & Biases, with the real packages: `sinks.txt`."""

from __future__ import annotations

import json
import struct
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.errors import ConfigurationError
from ckpt.trainer_integration import keeping
from ckpt.trainer_integration.events import Event
from ckpt.trainer_integration.sinks.mlflow import MLflow
from ckpt.trainer_integration.sinks.prometheus import Prometheus, PrometheusTextfile
from ckpt.trainer_integration.sinks.wandb import WeightsAndBiases

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of MLflow, by SQLAlchemy

FIGURES = {"upload_s": 1.5, "stall_s": 0.25, "size_bytes": 80.0, "retries": 3.0, "durable_age_s": 0.5}


def train(root: Path, *sinks: Any) -> None:
    """Save three steps and keep the last two."""
    state = {"w": torch.ones(2)}
    with ckpt.CheckpointManager(str(root), save=1, keep=keeping.last(2), events=[*sinks]) as manager:
        manager.restore(state)
        for step in (1, 2, 3):
            manager.step(step, state)


# -- Prometheus -------------------------------------------------------------------------------------------


def samples(families: Any) -> dict[tuple[str, str], float]:
    return {
        (sample.name, sample.labels.get("kind", "")): sample.value
        for family in families
        for sample in family.samples
    }


def test_prometheus_parses_the_text_file_and_the_endpoint_alike(tmp_path: Path) -> None:
    from prometheus_client import CollectorRegistry, start_http_server
    from prometheus_client.parser import text_string_to_metric_families

    registry = CollectorRegistry()
    sinks = [PrometheusTextfile(tmp_path / "ckpt.prom", {"run": 'a "b"\\'}), Prometheus(registry)]
    train(tmp_path / "run", *sinks)
    families = list(text_string_to_metric_families((tmp_path / "ckpt.prom").read_text()))
    written = samples(families)
    assert {sample.labels["run"] for family in families for sample in family.samples} == {'a "b"\\'}
    server, thread = start_http_server(0, "127.0.0.1", registry)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics", timeout=30) as reply:
            scraped = samples(text_string_to_metric_families(reply.read().decode()))
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert scraped == written
    assert written["ckpt_events_total", "durable"] == 3
    assert written["ckpt_events_total", "removed"] == 1
    assert written["ckpt_durable_step", ""] == 3
    assert written["ckpt_durable_bytes_total", ""] == 3 * written["ckpt_size_bytes", ""] > 0
    types = {family.name: family.type for family in families}
    assert (types["ckpt_events"], types["ckpt_durable_step"]) == ("counter", "gauge")
    with pytest.raises(ConfigurationError, match="a registry of its own"):
        Prometheus(registry)


# -- MLflow -----------------------------------------------------------------------------------------------


@pytest.fixture
def mlflow(tmp_path: Path) -> Any:
    """MLflow with a store in SQLite."""
    import mlflow

    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    mlflow.set_experiment("training")
    yield mlflow
    mlflow.end_run()


def test_mlflow_has_a_model_of_each_checkpoint(tmp_path: Path, mlflow: Any) -> None:
    sink = MLflow()
    with mlflow.start_run() as run:
        train(tmp_path / "run", sink)
        assert sink.flush()
        assert mlflow.active_run().info.run_id == run.info.run_id
    models = mlflow.search_logged_models(
        experiment_ids=[run.info.experiment_id],
        filter_string=f"source_run_id = '{run.info.run_id}'",
        output_format="list",
    )
    by_step = {int(model.tags["ckpt.step"]): model for model in models}
    assert sorted(by_step) == [1, 2, 3]
    assert [by_step[step].tags["ckpt.state"] for step in (1, 2, 3)] == ["removed", "durable", "durable"]
    newest = by_step[3]
    assert newest.tags["ckpt.url"] == str(tmp_path / "run" / "step-00000003")
    assert (newest.name, newest.model_type) == ("step-00000003", "checkpoint")
    assert (newest.status.name, newest.tags["mlflow.model.isExternal"]) == ("READY", "true")
    client = mlflow.MlflowClient()
    again = client.get_run(run.info.run_id)
    assert again.data.tags["ckpt.latest"] == newest.tags["ckpt.url"]
    history = client.get_metric_history(run.info.run_id, "ckpt/upload_s")
    assert [metric.step for metric in history] == [1, 2, 3]
    outputs = {output.model_id: output.step for output in again.outputs.model_outputs}
    assert outputs[newest.model_id] == 3


def test_mlflow_without_a_run_says_so(mlflow: Any) -> None:
    sink = MLflow()
    with pytest.raises(ConfigurationError, match=r"mlflow\.start_run"):
        sink(Event("restored", 1))


def test_mlflow_takes_a_run_by_its_id_in_any_thread(mlflow: Any) -> None:
    run = mlflow.MlflowClient().create_run(mlflow.get_experiment_by_name("training").experiment_id)
    sink = MLflow(run.info.run_id)
    event = Event("durable", 5, "", FIGURES, url="s3://bucket/run's/step-00000005")
    thread = threading.Thread(target=sink, args=(event,))
    thread.start()
    thread.join()
    sink(Event("removed", 5, "", url=event.url))
    assert sink.flush()
    (model,) = mlflow.search_logged_models(experiment_ids=[run.info.experiment_id], output_format="list")
    assert (model.tags["ckpt.url"], model.tags["ckpt.state"]) == (event.url, "removed")


def test_mlflow_marks_a_removed_model_among_many(mlflow: Any) -> None:
    """A page has 100 models; a name must not have a dot."""
    client = mlflow.MlflowClient()
    experiment = mlflow.get_experiment_by_name("training").experiment_id
    sink = MLflow(client.create_run(experiment).info.run_id)
    url = "s3://bucket/run/step-00000005.again"
    sink(Event("durable", 5, "", FIGURES, url=url))
    assert sink.flush()
    for number in range(100):
        client.create_logged_model(experiment, tags={"ckpt.step": "5", "ckpt.url": f"s3://other/{number}"})
    sink(Event("removed", 5, "", url=url))
    assert sink.flush()
    (model,) = client.search_logged_models([experiment], f"tags.`ckpt.url` = '{url}'")
    assert (model.name, model.tags["ckpt.state"]) == ("step-00000005-again", "removed")


# -- Weights & Biases -------------------------------------------------------------------------------------


BLOCK, FULL, LAST = 1 << 15, 1, 4


def records(folder: Path) -> list[Any]:
    """Read what an offline run would send: LevelDB's log format, behind a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    (path,) = folder.rglob("run-*.wandb")
    data, at, parts, read = path.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if BLOCK - at % BLOCK < 7:  # no header fits: padding
            at += BLOCK - at % BLOCK
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (FULL, LAST):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            read.append(record)
            parts = b""
    return read


def test_wandb_has_a_reference_to_each_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    monkeypatch.setenv("WANDB_SILENT", "true")
    sink = WeightsAndBiases()
    with pytest.raises(ConfigurationError, match=r"wandb\.init"):
        sink(Event("restored", 1))
    with wandb.init(mode="offline", dir=str(tmp_path), project="training") as run:
        run.log({"loss": 1.0})
        train(tmp_path / "run", sink)
        answers = threading.Event()
        with monkeypatch.context() as slow:  # where wandb asks its server, and waits
            slow.setattr(run, "_assert_can_log_artifact", lambda _: answers.wait(60))
            sink(Event("durable", 4, "", FIGURES, url="s3://bucket/run/step-00000004"))
            assert not answers.is_set(), "training goes on"
            answers.set()
            assert sink.flush()
        assert run.step == 1, "the history is the user's"
        assert run.summary["ckpt/durable_step"] == 4
    artifacts = [record.artifact for record in records(tmp_path) if record.HasField("artifact")]
    refs = [{entry.ref for entry in one.manifest.contents} for one in artifacts]
    for step, local in zip((2, 3), refs[-3:-1], strict=True):  # the first may have been removed before
        assert f"{(tmp_path / 'run').as_uri()}/step-0000000{step}/commit.json" in local
    assert refs[-1:] == [{"s3://bucket/run/step-00000004"}]
    assert {(one.type, one.name) for one in artifacts} == {("checkpoint", f"checkpoint-{run.id}")}
    assert {*artifacts[-1].aliases} == {"latest", "step-4"}
    assert json.loads(artifacts[-1].metadata)["size_bytes"] == 80.0
