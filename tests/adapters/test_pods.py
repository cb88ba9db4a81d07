"""The containers of examples/kubernetes run: doctor, two nodes of torchrun, one lost, one preempted, resumed."""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support.manifests import (
    command,
    documents,
    environment,
    pod_of_acceptance,
    pod_of_job,
    pod_of_trainjob,
)
from support.pods import Pod, build_image, pod, why_not
from support.servers import S3Server, free_port

import ckpt
from ckpt.errors import NotFound

SMALL = ["--width=16", "--layers=1", "--length=8"]


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if reason := why_not():
        pytest.skip(f"pods: {reason}")
    folder = tmp_path_factory.mktemp("image")
    for parent in (folder, *folder.parents[:2]):
        parent.chmod(0o755)  # pytest's are its user's alone
    return build_image(folder)


@dataclass
class Cluster:
    """The pods of one workload, on a bucket of moto."""

    image: Path
    spec: dict[str, Any]
    storage: dict[str, dict[str, Any]]
    folder: Path
    port: str = field(default_factory=lambda: str(free_port()))
    started: int = 0

    @contextlib.contextmanager
    def container(self, kind: str, index: int, *more: str) -> Iterator[Pod]:
        (container,) = self.spec[kind]
        variables = environment(container, self.storage, index)
        if "PET_MASTER_PORT" in variables:
            variables["PET_MASTER_PORT"] = self.port  # the pods share the machine's ports
        hosts = [variables[name] for name in ("PET_MASTER_ADDR",) if name in variables]
        self.started += 1
        output = self.folder / f"{kind}-{index}-{self.started}.out"
        with pod(self.image, [*command(container, variables), *more], variables, hosts, output) as running:
            yield running

    @contextlib.contextmanager
    def nodes(self, *more: str) -> Iterator[list[Pod]]:
        with contextlib.ExitStack() as stack:
            # The first node is the last to start: the others wait for it.
            last_first = [
                stack.enter_context(self.container("containers", index, *SMALL, *more)) for index in (1, 0)
            ]
            yield last_first[::-1]

    @property
    def root(self) -> str:
        root: str = self.storage["ConfigMap"]["data"]["CKPT_ROOT"]
        return root

    @property
    def grace_s(self) -> float:
        return float(self.spec["terminationGracePeriodSeconds"])


def storage_of(s3: S3Server) -> dict[str, dict[str, Any]]:
    storage = documents("storage-s3.yaml")
    storage["ConfigMap"]["data"] |= {
        "AWS_ENDPOINT_URL": s3.endpoint_url,
        "CKPT_ROOT": f"s3://{s3.new_bucket()}/run",
    }
    storage["Secret"]["stringData"] |= {
        "AWS_ACCESS_KEY_ID": s3.access_key,
        "AWS_SECRET_ACCESS_KEY": s3.secret_key,
    }
    return storage


def steps(pod: Pod) -> list[int]:
    return [int(number) for number in re.findall(r"^step +(\d+) ", pod.text, re.MULTILINE)]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("spec", [pod_of_job, pod_of_trainjob])
def test_nodes_that_are_lost_or_preempted_resume(
    image: Path, s3: S3Server, tmp_path: Path, spec: Callable[[], dict[str, Any]]
) -> None:
    cluster = Cluster(image, spec(), storage_of(s3), tmp_path)
    with cluster.container("initContainers", 1) as doctor:
        assert doctor.status(120) == 0, doctor.text
    assert "fit for checkpoints" in doctor.text

    with cluster.nodes("--save-every=2") as (first, second):
        first.wait_for("step     6 ")
        second.signal(signal.SIGKILL)  # the node is lost
        assert first.status(120) != 0, "it ends by itself, to be started again"
    # No pod has written its last words: what is durable is durable.
    durable = ckpt.list_checkpoints(cluster.root, storage_options=s3.options)
    kept = max(one.step for one in durable if one.state == "committed" and one.step is not None)
    assert kept >= 2

    with cluster.nodes("--save-every=1000000") as (first, second):
        first.wait_for(f"step {kept + 3:5d} ")
        second.signal(signal.SIGTERM)  # the node is drained
        statuses = [one.status(cluster.grace_s) for one in (first, second)]
    assert 0 not in statuses, "pods that succeed are not started again"
    assert steps(first)[0] == kept + 1
    (stopped_at,) = map(int, re.findall(r"preempted after step (\d+); it is durable", first.text))

    with cluster.nodes(f"--steps={stopped_at + 2}") as (first, second):
        assert [one.status(240) for one in (first, second)] == [0, 0], first.text + second.text
    assert steps(first) == [stopped_at + 1, stopped_at + 2]


@pytest.mark.timeout(900)
def test_storage_is_accepted(image: Path, s3: S3Server, tmp_path: Path) -> None:
    cluster = Cluster(image, pod_of_acceptance(), storage_of(s3), tmp_path)
    with cluster.container("initContainers", 0) as doctor:
        assert doctor.status(300) == 0, doctor.text
    small = ["--model=t5-small", "--world-size=2", "--processes=1"]
    with cluster.container("containers", 0, *small) as roundtrip:
        assert roundtrip.status(300) == 0, roundtrip.text
    with pytest.raises(NotFound, match="there is nothing here"):
        ckpt.list_checkpoints(f"{cluster.root}-acceptance", storage_options=s3.options)


def test_doctor_reaches_cos_with_the_keys_of_the_secret(image: Path, s3: S3Server, tmp_path: Path) -> None:
    storage = documents("storage-cos.yaml")
    storage["ConfigMap"]["data"] |= {
        "COS_ENDPOINT_URL": s3.endpoint_url,
        "CKPT_ROOT": f"cos://{s3.new_bucket()}/run",
    }
    storage["Secret"]["stringData"] = {
        "COS_HMAC_ACCESS_KEY_ID": s3.access_key,
        "COS_HMAC_SECRET_ACCESS_KEY": s3.secret_key,
    }
    with Cluster(image, pod_of_job(), storage, tmp_path).container("initContainers", 0) as doctor:
        assert doctor.status(120) == 0, doctor.text
    with Cluster(image, pod_of_job(), {"ConfigMap": storage["ConfigMap"]}, tmp_path).container(
        "initContainers", 0
    ) as doctor:
        assert doctor.status(120) not in (0, None)
    assert "credentials" in doctor.text
