"""Read the manifests of examples/kubernetes as a cluster would."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parents[2] / "examples" / "kubernetes"
RESTART_LABEL = "batch.kubernetes.io/job-completion-index"


def documents(name: str) -> dict[str, dict[str, Any]]:
    """Return the objects of a file, by kind."""
    loaded = list(yaml.safe_load_all((FOLDER / name).read_text()))
    by_kind = {document["kind"]: document for document in loaded}
    assert len(by_kind) == len(loaded), "two objects of one kind"
    return by_kind


def pod_of_job() -> dict[str, Any]:
    """Return the pod template's spec of the plain Job."""
    spec: dict[str, Any] = documents("job.yaml")["Job"]["spec"]["template"]["spec"]
    return spec


LOCAL_FIRST = ("emptydir", "hostpath", "claim")


def job_with_disk(name: str) -> dict[str, Any]:
    """Return the plain Job with a disk of the node, as kustomize patches it."""
    job = copy.deepcopy(documents("job.yaml")["Job"])
    for change in yaml.safe_load((FOLDER / "local-first" / f"{name}.yaml").read_text()):
        assert change["op"] == "add"
        *path, last = change["path"].removeprefix("/").split("/")
        place: Any = job
        for step in path:
            place = place[int(step)] if isinstance(place, list) else place[step]
        assert isinstance(place, list)
        assert last == "-"
        place.append(change["value"])
    return job


def pod_of_acceptance() -> dict[str, Any]:
    """Return the pod template's spec of the Job that tries new storage."""
    spec: dict[str, Any] = documents("acceptance.yaml")["Job"]["spec"]["template"]["spec"]
    return spec


def pod_of_trainjob() -> dict[str, Any]:
    """Return the spec of a TrainJob's pods: the runtime's, patched, with what Trainer's torch plugin adds."""
    objects = documents("trainjob.yaml")
    job = objects["TrainJob"]["spec"]
    (replicated,) = objects["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"]
    pod: dict[str, Any] = copy.deepcopy(replicated["template"]["spec"]["template"]["spec"])
    for patch in job["runtimePatches"]:
        (patched,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
        assert patched["name"] == replicated["name"]
        changes = patched["template"]["spec"]["template"]["spec"]
        assert not {"containers", "initContainers", "volumes"} & set(changes), "these would have to be merged"
        pod |= changes
    (node,) = pod["containers"]
    trainer = job["trainer"]
    node |= {name: trainer[name] for name in ("image", "command")} | {
        "resources": trainer["resourcesPerNode"]
    }
    index = {"fieldRef": {"fieldPath": f"metadata.annotations['{RESTART_LABEL}']"}}
    name = objects["TrainJob"]["metadata"]["name"]
    node["env"] = [
        *trainer["env"],
        {"name": "PET_NNODES", "value": str(trainer["numNodes"])},
        {"name": "PET_NPROC_PER_NODE", "value": str(trainer["numProcPerNode"])},
        {"name": "PET_NODE_RANK", "valueFrom": index},
        {"name": "PET_MASTER_ADDR", "value": f"{name}-node-0-0.{name}"},
        {"name": "PET_MASTER_PORT", "value": "29500"},
    ]
    return pod


def environment(
    container: Mapping[str, Any], storage: Mapping[str, Mapping[str, Any]], index: int
) -> dict[str, str]:
    """Return the variables of a container in the pod of an index, as the kubelet sets them."""
    variables: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        for reference, kind, data in (
            ("configMapRef", "ConfigMap", "data"),
            ("secretRef", "Secret", "stringData"),
        ):
            wanted = source.get(reference)
            if wanted is None:
                continue
            if kind not in storage:
                assert wanted.get("optional"), f"there is no {kind} {wanted['name']}"
                continue
            assert storage[kind]["metadata"]["name"] == wanted["name"]
            variables |= storage[kind][data]
    for variable in container.get("env", ()):
        if "value" in variable:
            variables[variable["name"]] = variable["value"]
        else:
            assert (
                variable["valueFrom"]["fieldRef"]["fieldPath"] == f"metadata.annotations['{RESTART_LABEL}']"
            )
            variables[variable["name"]] = str(index)
    return variables | {"JOB_COMPLETION_INDEX": str(index)}


def command(container: Mapping[str, Any], variables: Mapping[str, str]) -> list[str]:
    """Return the command with `$(NAME)` replaced, as the kubelet does it."""
    words = [*container["command"], *container.get("args", ())]
    return [re.sub(r"\$\((\w+)\)", lambda match: variables[match[1]], word) for word in words]
