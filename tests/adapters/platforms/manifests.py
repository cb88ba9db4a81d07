"""The manifests of examples/kubernetes against the published models of Kubernetes and Kubeflow Trainer."""

from __future__ import annotations

import copy
import inspect
import re
import typing
from collections.abc import Callable
from typing import Any

import kubeflow_trainer_api.models as trainer_models
import kubernetes.client.models as kubernetes_models
import pydantic
import pytest
from support.manifests import (
    FOLDER,
    LOCAL_FIRST,
    documents,
    environment,
    job_with_disk,
    pod_of_acceptance,
    pod_of_job,
    pod_of_trainjob,
)
from support.status_server import status_server

from ckpt.backends.cos import _CR_TOKENS
from ckpt.trainer_integration import saving
from ckpt.trainer_integration.events import Event
from ckpt.trainer_integration.sinks.trainjob import TrainJobStatus

FILES = sorted(path.name for path in FOLDER.glob("*.yaml") if path.name != "kustomization.yaml")
TRAINER = {"TrainJob", "TrainingRuntime"}
TRAININGS = {"Job": pod_of_job, "TrainJob": pod_of_trainjob}
PODS = {**TRAININGS, "acceptance": pod_of_acceptance}
EXAMPLE = (FOLDER.parent / "train_with_manager.py").read_text()


# -- fields and types -------------------------------------------------------------------------------------


def check(document: dict[str, Any]) -> None:
    """Raise if an object has a field that its model does not know, or a value of another type."""
    kind = document["kind"]
    if kind in TRAINER:
        assert document["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
        model = getattr(trainer_models, f"TrainerV1alpha1{kind}")
        check_pydantic(model, document, kind)
        model.from_dict(document)
        return
    group, _, version = document["apiVersion"].rpartition("/")
    assert (group, version) in (("", "v1"), ("batch", "v1"))
    check_kubernetes(f"V1{kind}", document, kind)


def check_pydantic(annotation: Any, value: Any, where: str) -> None:
    arguments = [one for one in typing.get_args(annotation) if one is not type(None)]
    origin = typing.get_origin(annotation)
    if origin is typing.Union:
        return check_pydantic(arguments[0], value, where)
    if origin is list:
        for at, member in enumerate(value):
            check_pydantic(arguments[0], member, f"{where}[{at}]")
    elif origin is dict:
        for key, member in value.items():
            check_pydantic(arguments[1], member, f"{where}.{key}")
    elif inspect.isclass(annotation) and issubclass(annotation, pydantic.BaseModel):
        if not isinstance(value, dict):
            return None  # a quantity, or an integer or string: the model itself checks it
        fields = {field.alias or name: field for name, field in annotation.model_fields.items()}
        for key, member in value.items():
            assert key in fields, f"{where} has no field {key}"
            check_pydantic(fields[key].annotation, member, f"{where}.{key}")
    return None


SCALARS: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "bool": (bool,),
    "object": (object,),
    "float": (int, float),
}


def check_kubernetes(type_name: str, value: Any, where: str) -> None:
    if match := re.fullmatch(r"List\[(.*)\]", type_name):
        assert isinstance(value, list), where
        for at, member in enumerate(value):
            check_kubernetes(match[1], member, f"{where}[{at}]")
    elif match := re.fullmatch(r"Dict\[str, (.*)\]", type_name):
        assert isinstance(value, dict), where
        for key, member in value.items():
            check_kubernetes(match[1], member, f"{where}.{key}")
    elif type_name in SCALARS:
        assert isinstance(value, SCALARS[type_name]), f"{where} must be {type_name}, not {value!r}"
        assert type_name != "int" or not isinstance(value, bool), where
    else:
        model = getattr(kubernetes_models, type_name)
        assert isinstance(value, dict), where
        names = {alias: name for name, alias in model.attribute_map.items()}
        for key, member in value.items():
            assert key in names, f"{where} has no field {key}"
            check_kubernetes(model.openapi_types[names[key]], member, f"{where}.{key}")
        model(**{names[key]: member for key, member in value.items()})  # what is required


@pytest.mark.parametrize("name", FILES)
def test_manifests_have_the_fields_of_the_published_models(name: str) -> None:
    for document in documents(name).values():
        check(document)


@pytest.mark.parametrize("name", LOCAL_FIRST)
def test_a_job_with_a_disk_of_the_node(name: str) -> None:
    check(job_with_disk(name))


def changed(name: str, kind: str, change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    document = copy.deepcopy(documents(name)[kind])
    change(document["spec"])
    return document


@pytest.mark.parametrize(
    ("name", "kind", "change"),
    [
        ("trainjob.yaml", "TrainJob", lambda spec: spec.update(podTemplateOverrides=[])),
        ("trainjob.yaml", "TrainJob", lambda spec: spec["trainer"].update(numNodes="2")),
        ("trainjob.yaml", "TrainJob", lambda spec: spec["runtimePatches"][0].pop("manager")),
        ("trainjob.yaml", "TrainJob", lambda spec: spec["trainer"]["env"][0].update(valu="1")),
        ("trainjob.yaml", "TrainingRuntime", lambda spec: spec["mlPolicy"]["torch"].update(numProcPerNode=1)),
        ("job.yaml", "Job", lambda spec: spec.update(completions="2")),
        ("job.yaml", "Job", lambda spec: spec["template"]["spec"].update(terminationGracePeriod=60)),
        ("job.yaml", "Job", lambda spec: spec["template"]["spec"]["containers"][0].pop("name")),
        ("job.yaml", "Job", lambda spec: spec.pop("template")),
        ("job.yaml", "Service", lambda spec: spec["ports"][0].update(port="x")),
    ],
)
def test_the_models_are_strict(name: str, kind: str, change: Callable[[dict[str, Any]], Any]) -> None:
    with pytest.raises((AssertionError, ValueError)):
        check(changed(name, kind, change))


def test_a_status_is_what_the_published_model_takes(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with status_server(tmp_path) as server:
        for name, value in server.variables.items():
            monkeypatch.setenv(name, value)
        sink = TrainJobStatus(total_steps=100)
        sink(Event("restored", 10, "", {"load_s": 1.0, "durable_age_s": 3.0}))
        sink(Event("durable", 20, "", {"upload_s": 1.0, "stall_s": 0.1, "size_bytes": 2.0**41}))
        assert sink.flush()
    assert len(server.posted) == 2
    for status in server.posted:
        check_pydantic(trainer_models.TrainerV1alpha1TrainerStatus, status, "trainerStatus")
        trainer_models.TrainerV1alpha1TrainerStatus.from_dict(status)
        assert all(
            0 < len(metric["name"]) <= 64 and 0 < len(metric["value"]) <= 64 for metric in status["metrics"]
        )


# -- what the fields mean ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", PODS)
def test_pods_run_under_restricted_v2(kind: str) -> None:
    pod = PODS[kind]()
    assert pod["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    assert pod["automountServiceAccountToken"] is False
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    (source,) = volumes.pop("pod-token")["projected"]["sources"]
    token = source["serviceAccountToken"]
    assert token["audience"] == "iam", "the cluster does not take it"
    assert all({"emptyDir"} == set(volume) - {"name"} for volume in volumes.values())
    for container in (*pod["initContainers"], *pod["containers"]):
        context = container["securityContext"]
        assert context == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        mounted = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        assert mounted["/tmp"] == "tmp"
        (place,) = (path for path, name in mounted.items() if name == "pod-token")
        assert f"{place}/{token['path']}" in _CR_TOKENS
        assert set(mounted.values()) <= {volume["name"] for volume in pod["volumes"]}
        assert "memory" in container["resources"]["limits"]


@pytest.mark.parametrize("kind", TRAININGS)
def test_the_grace_periods_contain_each_other(kind: str) -> None:
    pod = PODS[kind]()
    (train,) = pod["containers"]
    variables = {variable["name"]: variable.get("value") for variable in train["env"]}
    (given,) = re.findall(r"on_preemption\((.*?)\)", EXAMPLE)
    rule = eval(f"saving.on_preemption({given})", {"saving": saving})
    workers_s = int(variables["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])
    assert rule.grace_s + 10 < workers_s < pod["terminationGracePeriodSeconds"] - 10


@pytest.mark.parametrize("kind", TRAININGS)
def test_pods_that_fail_start_again_together(kind: str) -> None:
    pod = PODS[kind]()
    assert pod["restartPolicy"] == "Never"
    assert "--preempted-status=75" in pod["containers"][0]["command"], "a status of 0 would end the job"
    if kind == "TrainJob":
        runtime = documents("trainjob.yaml")["TrainingRuntime"]["spec"]["template"]["spec"]
        assert runtime["failurePolicy"]["maxRestarts"] > 0
        assert runtime["replicatedJobs"][0]["template"]["spec"]["backoffLimit"] == 0
    else:
        job = documents("job.yaml")["Job"]["spec"]
        assert job["backoffLimitPerIndex"] > 0
        assert job["maxFailedIndexes"] == 0


def test_an_acceptance_is_tried_once() -> None:
    spec = documents("acceptance.yaml")["Job"]["spec"]
    assert (spec["backoffLimit"], spec["template"]["spec"]["restartPolicy"]) == (0, "Never")


@pytest.mark.parametrize("path", sorted(FOLDER.iterdir()), ids=lambda path: str(path.name))
def test_images_have_versions(path: Any) -> None:
    for image in re.findall(r"(?:image: |FROM |ARG BASE=)(\S+)", path.read_text()):
        assert image == "${BASE}" or re.search(r":\d+\.\d+$", image), image


def test_the_trusted_profile_of_the_comment_is_used(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckpt.backends.registry import open_store

    text = (FOLDER / "storage-cos.yaml").read_text()
    (profile,) = re.findall(r"# (COS_IAM_PROFILE_ID): (\S+)", text)
    (tmp_path / "sa-token").touch()
    for name, value in {
        **documents("storage-cos.yaml")["ConfigMap"]["data"],
        **dict([profile]),
        "COS_CR_TOKEN_FILENAME": str(tmp_path / "sa-token"),
    }.items():
        monkeypatch.setenv(name, value)
    store: Any = open_store(documents("storage-cos.yaml")["ConfigMap"]["data"]["CKPT_ROOT"])
    assert store._s3.options["iam_profile_id"] == profile[1]
    assert store._s3.client.meta.config.signature_version == "oauth"
    store.close()


def test_the_job_and_its_service_agree() -> None:
    objects = documents("job.yaml")
    job, service = objects["Job"], objects["Service"]
    name, spec = job["metadata"]["name"], job["spec"]
    (train,) = spec["template"]["spec"]["containers"]
    variables = {variable["name"]: variable for variable in train["env"]}
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == int(variables["PET_NNODES"]["value"])
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert spec["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert variables["PET_MASTER_ADDR"]["value"] == f"{name}-0.{service['metadata']['name']}"
    ports = {train["ports"][0]["containerPort"], service["spec"]["ports"][0]["port"]}
    assert ports == {int(variables["PET_MASTER_PORT"]["value"])}
    assert (
        environment(train, {"ConfigMap": {"metadata": {"name": "ckpt-storage"}, "data": {}}}, 1)[
            "PET_NODE_RANK"
        ]
        == "1"
    )


def test_the_trainjob_is_what_trainers_webhooks_accept() -> None:
    """Their rules, as the source of Trainer 2.3.0 has them (pkg/webhooks, plugins/jobset and plugins/torch)."""
    objects = documents("trainjob.yaml")
    job, runtime = objects["TrainJob"]["spec"], objects["TrainingRuntime"]
    reference = job["runtimeRef"]
    assert (reference["kind"], reference["name"]) == ("TrainingRuntime", runtime["metadata"]["name"])
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert replicated["replicas"] == 1
    labels = replicated["template"]["metadata"]["labels"]
    assert labels["trainer.kubeflow.org/trainjob-ancestor-step"] == "trainer"
    pod = replicated["template"]["spec"]["template"]["spec"]
    assert [container["name"] for container in pod["containers"]] == ["node"]
    assert not {variable["name"] for variable in job["trainer"]["env"] if variable["name"].startswith("PET_")}
    for patch in job["runtimePatches"]:
        assert re.fullmatch(r"[a-z0-9.-]+\.[a-z]+/[\w.-]+", patch["manager"])


# -- the storage ------------------------------------------------------------------------------------------

READ = {
    "s3": {
        "AWS_REGION",
        "AWS_ENDPOINT_URL",
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
    },
    "cos": {
        "COS_ENDPOINT_URL",
        "COS_IAM_PROFILE_ID",
        "IBM_API_KEY_ID",
        "IBM_SERVICE_INSTANCE_ID",
        "IBM_AUTH_ENDPOINT",
        "COS_HMAC_ACCESS_KEY_ID",
        "COS_HMAC_SECRET_ACCESS_KEY",
    },
}


@pytest.mark.parametrize("scheme", READ)
@pytest.mark.parametrize("kind", PODS)
def test_the_keys_of_config_and_secret_are_read(
    kind: str, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each variable changes the client that the store makes: a misspelt one would not."""
    from ckpt.backends.registry import open_store

    storage = documents(f"storage-{scheme}.yaml")
    pod = PODS[kind]()
    assert storage["ServiceAccount"]["metadata"]["name"] == pod["serviceAccountName"]
    for container in (*pod["initContainers"], *pod["containers"]):
        variables = environment(container, storage, 0)
        given = {*storage["ConfigMap"]["data"], *storage["Secret"]["stringData"]}
        assert given <= set(variables)
        assert given - {"CKPT_ROOT"} <= READ[scheme]
        assert environment(container, {"ConfigMap": storage["ConfigMap"]}, 0), "the Secret may be missing"
    for name in READ["s3"] | READ["cos"]:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    root = variables["CKPT_ROOT"]
    assert root.startswith(f"{scheme}://")
    store: Any = open_store(root)
    client = store._s3.client
    if scheme == "s3":
        credentials = client._get_credentials()
        assert (credentials.access_key, credentials.secret_key) == ("KEY", "SECRET")
        assert client.meta.region_name == variables["AWS_REGION"]
    else:
        assert client.meta.endpoint_url == variables["COS_ENDPOINT_URL"]
        manager = client._request_signer._credentials.token_manager
        assert manager.api_key_id == "API_KEY"
        assert manager.service_instance_id == variables["IBM_SERVICE_INSTANCE_ID"]
        assert manager.auth_endpoint == variables["IBM_AUTH_ENDPOINT"]
    store.close()
