"""torchrun without `init_process_group`: its processes would all save to one place, so saves are errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from support.rooms import ROOT

PROGRAM = """
import json, os, sys, torch, ckpt
import torch.distributed.checkpoint as dcp
from ckpt.embeddings import Tables

root, rank = sys.argv[1], os.environ["RANK"]
state = {"w": torch.ones(3)}

def managed(**options):
    run = f"{root}/run-{options.get('async_mode')}-{rank}"
    with ckpt.CheckpointManager(run, save=1, preflight=False, **options) as manager:
        manager.step(1, dict(state))
        manager.wait_durable()
        return manager.restore(dict(state), step=1).step

def installed(**options):
    ckpt.install()
    try:
        dcp.save(dict(state), checkpoint_id=f"{root}/dcp-{rank}", **options)
    finally:
        ckpt.uninstall()

calls = {
    "save": lambda **o: ckpt.save(dict(state), f"{root}/save-{rank}", **o),
    "async_save": lambda **o: ckpt.async_save(dict(state), f"{root}/async-{rank}", **o).result(),
    "local": lambda **o: ckpt.async_save(
        dict(state), f"{root}/tier-{rank}/step-1", local=f"{root}/near-{rank}", **o
    ).result(),
    "tables": lambda **o: Tables().save(dict(state), f"{root}/tables-{rank}", **o),
    "manager": managed,
    "off": lambda **o: managed(async_mode="off", **o),
    "installed": installed,
}
outcomes = {}
for name, call in calls.items():
    try:
        call()
        outcomes[name] = "saved"
    except Exception as error:
        outcomes[name] = f"{type(error).__name__}: {error}"
outcomes["left"] = sorted(each for each in os.listdir(root) if each.endswith(f"-{rank}"))
for name, call in calls.items():
    call(no_dist=True)
dcp.save(dict(state), storage_writer=ckpt.CheckpointWriter(f"{root}/written-{rank}"))  # DCP may mean no_dist: a warning
loaded = {"w": torch.zeros(3)}
ckpt.load(loaded, f"{root}/save-{rank}")  # loads need no group
outcomes["loaded"] = loaded["w"].tolist()
with open(f"{root}/{rank}.json", "w") as file:
    json.dump(outcomes, file)
"""


def test_saves_of_torchrun_without_a_process_group(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    root = tmp_path / "root"
    program.write_text(PROGRAM)
    root.mkdir()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*torchrun, str(program), str(root)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    for rank in range(2):
        assert f"written-{rank}: WORLD_SIZE is 2, but this process has no process group" in done.stderr
    for rank in range(2):
        outcomes = json.loads((root / f"{rank}.json").read_text())
        assert outcomes.pop("loaded") == [1.0, 1.0, 1.0]
        assert outcomes.pop("left") == []
        for name, outcome in outcomes.items():
            assert outcome.startswith("ConfigurationError"), (name, outcome)
            assert "WORLD_SIZE is 2" in outcome
            assert "init_process_group" in outcome
            assert "no_dist=True" in outcome
