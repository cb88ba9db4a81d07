"""The Jobs of examples/kubernetes with a disk of the node: kustomize's files, and the command that they run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from support.manifests import FOLDER, LOCAL_FIRST, job_with_disk

EXAMPLE = FOLDER.parent / "train_with_manager.py"


@pytest.mark.parametrize("name", LOCAL_FIRST)
def test_the_command_saves_to_the_volume(name: str) -> None:
    pod = job_with_disk(name)["spec"]["template"]["spec"]
    (train,) = pod["containers"]
    (local,) = (word.partition("=")[2] for word in train["command"] if word.startswith("--local-folder="))
    (mount,) = (mount for mount in train["volumeMounts"] if mount["mountPath"] == local)
    (volume,) = (volume for volume in pod["volumes"] if volume["name"] == mount["name"])
    assert set(volume) == {
        "name",
        {"emptydir": "emptyDir", "hostpath": "hostPath", "claim": "ephemeral"}[name],
    }
    assert {mount["name"] for mount in train["volumeMounts"]} <= {volume["name"] for volume in pod["volumes"]}


def test_the_patches_are_of_this_job() -> None:
    overlay = yaml.safe_load((FOLDER / "local-first" / "kustomization.yaml").read_text())
    base = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
    assert [(FOLDER / "local-first" / name).resolve() for name in overlay["resources"]] == [FOLDER]
    assert all((FOLDER / name).is_file() for name in base["resources"])
    (patch,) = overlay["patches"]
    assert patch["path"].removesuffix(".yaml") in LOCAL_FIRST
    job = job_with_disk(LOCAL_FIRST[0])
    assert patch["target"] == {"kind": job["kind"], "name": job["metadata"]["name"]}


@pytest.mark.ranks
def test_the_example_trains_with_a_disk_of_the_node(tmp_path: Path) -> None:
    """As the patched Job runs it, on one rank."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    places = [f"--root={tmp_path / 'durable'}", f"--local-folder={tmp_path / 'local'}"]
    small = ["--steps=4", "--save-every=2", "--width=16", "--layers=1", "--length=8"]
    command = [*torchrun, str(EXAMPLE), *places, *small]
    subprocess.run(command, check=True, timeout=200, stdout=subprocess.DEVNULL)
    (run,) = (tmp_path / "local").iterdir()
    for place in (run, tmp_path / "durable"):
        assert (place / "step-00000004" / "commit.json").is_file()
