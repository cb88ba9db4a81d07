"""Processes that the library starts run no code of the working directory, such as a downloaded checkpoint's folder."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

MODULES = (
    "secrets",
    "pickle",
    "logging",
    "socket",
    "subprocess",
    "signal",
    "fcntl",
    "msgspec",
    "json",
    "struct",
)

PROGRAMS = {
    "drain": """
        with ckpt.CheckpointManager(root, save=1, preflight=False, local=local) as manager:
            manager.step(1, {"w": torch.ones(3)})
            assert manager.wait_durable(240) == 1
        """,
    "process": """
        import torch.distributed as dist
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        with ckpt.CheckpointManager(root, save=1, preflight=False, async_mode="process") as manager:
            manager.step(1, {"w": torch.ones(3)})
            assert manager.wait_durable(240) == 1
        """,
    "roundtrip": """
        ckpt.roundtrip(root, model="t5-small", world_size=2, mesh="fsdp", processes=1)
        """,
    "doctor": """
        os.mkdir(root)
        assert ckpt.doctor(root, second_client=True).second == "another process"
        """,
}
PROGRAMS |= {
    method: f"""
        child_processes.isolate_children()
        process = multiprocessing.get_context({method!r}).Process(target=time.sleep, args=[0])
        process.start()
        process.join()
        assert process.exitcode == 0
        """
    for method in ("spawn", "forkserver")
}


@pytest.mark.parametrize("program", [*PROGRAMS])
def test_nothing_of_the_working_directory_is_run(tmp_path: Path, program: str) -> None:
    evil = tmp_path / "evil"
    elsewhere = tmp_path / "elsewhere"
    evil.mkdir()
    elsewhere.mkdir()
    for name in MODULES:
        (evil / f"{name}.py").write_text(
            f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r})\nraise ImportError\n"
        )
    script = elsewhere / "train.py"
    script.write_text(
        "import multiprocessing, os, sys, time, torch, ckpt\n"
        "from ckpt import child_processes\n"
        f"root, local = {str(tmp_path / 'root')!r}, {str(tmp_path / 'local')!r}\n"
        "def main():\n"
        f"{textwrap.indent(textwrap.dedent(PROGRAMS[program]), '    ')}\n"
        "if __name__ == '__main__':\n    main()\n    print('done')\n"
    )
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    ran = subprocess.run(
        [sys.executable, script],
        cwd=evil,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert not (tmp_path / "ran").exists(), (tmp_path / "ran").read_text()
    assert (ran.returncode, ran.stdout.splitlines()[-1:]) == (0, ["done"]), ran.stderr
