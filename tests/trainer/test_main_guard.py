"""`async_mode="process"` in scripts with and without a main guard, as programs of their own."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from support.ranks import run_ranks

import ckpt

TRAINING = """
if not dist.is_initialized():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
with ckpt.CheckpointManager(root, save=1, async_mode="process", preflight=False) as manager:
    manager.step(1, {"weight": torch.ones(3)})
    print("durable", manager.wait_durable())
"""


def script(folder: Path, guard: str, *, in_thread: bool = False) -> Path:
    """Write a script that trains in `main`, which a guard calls, or nothing guards."""
    call = "ThreadPoolExecutor(1).submit(main).result()" if in_thread else "main()"
    path = folder / "train.py"
    path.write_text(
        f"import torch, ckpt\n"
        f"from concurrent.futures import ThreadPoolExecutor\n"
        f"import torch.distributed as dist\nroot = {str(folder / 'run')!r}\n"
        f"def main():\n{textwrap.indent(TRAINING, '    ')}\n{guard}\n    {call}\n"
    )
    return path


def _run_script(rank: int, path: str) -> str:
    """Run a script as `python path` would, without the time that a new interpreter takes."""
    os.environ["PYTHONWARNINGS"] = "ignore"
    try:
        runpy.run_path(path, run_name="__main__")
    except ckpt.errors.ConfigurationError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("in_thread", [False, True])
def test_a_script_without_guard_is_refused_at_once(tmp_path: Path, in_thread: bool) -> None:
    path = script(tmp_path, "if True:", in_thread=in_thread)
    (text,) = run_ranks(1, _run_script, str(path))
    assert f"{path}:" in text
    assert 'if __name__ == "__main__":\n        main()' in text
    assert not (tmp_path / "run").exists()


def run_program(path: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    return subprocess.run(
        [sys.executable, str(path)], check=False, capture_output=True, text=True, timeout=300, env=environment
    )


@pytest.mark.long
def test_a_program_without_guard(tmp_path: Path) -> None:
    ended = run_program(script(tmp_path, "if True:"))
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.count("Traceback") == 1, "it ended before there was another process"
    assert 'if __name__ == "__main__":' in ended.stderr


@pytest.mark.long
def test_a_program_with_a_guard(tmp_path: Path) -> None:
    ended = run_program(script(tmp_path, 'if __name__ == "__main__":'))
    assert (ended.returncode, ended.stdout) == (0, "durable 1\n"), ended.stderr


@pytest.mark.long
def test_a_process_that_runs_the_script_again_ends_at_once(tmp_path: Path) -> None:
    """A guard that lets it through: the process says so, and the save fails."""
    ended = run_program(script(tmp_path, 'if __name__ in ("__main__", "__mp_main__"):'))
    assert ended.returncode == 1
    first, _, second = ended.stderr.partition("SaveFailed")
    assert "this is that process, in the script that it must not run" in first
    assert "standard error" in second
    assert not list((tmp_path / "run").glob("*/commit.json"))
