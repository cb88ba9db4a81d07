"""No output decides an exit code: streams of all commands that are closed, full, narrow-coded or that no program reads."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.terminal import CKPT

import ckpt
from ckpt.cli.app import _COMMANDS

_RUNS: dict[str, dict[str, int]] = {
    "ls": {"run": 0},
    "inspect": {"run/step-1 --json": 0},
    "report": {"run/step-1 -o page.html": 0},
    "cat": {"run/step-1 w": 0},
    "diff": {"run/step-1 run/step-2": 1},
    "watch": {"run --once --exec false --retries 0": 1},
    "verify": {"run/step-1": 0, "damaged/step-1": 1},
    "scrub": {"run": 0},
    "doctor": {"nowhere": 3},
    "roundtrip": {"--help": 0},
    "sign": {"run/step-1 --key missing.pem": 2},
    "cp": {"run/step-1 copied": 0},
    "convert": {"run/step-1 w.safetensors": 0},
    "drain": {"run durable": 0},
    "rm": {"run/step-1": 0},
    "gc": {"run": 0},
    "plan": {"--help": 0},
    "tune": {"nowhere --frobnicate": 2},
}
_CODES = {f"{command} {more}": code for command, each in _RUNS.items() for more, code in each.items()}
_CODES |= {"--help": 0, "--version": 0, "": 2}

# One process imports what the commands need, and forks for each: starts would take most of the time.
_HARNESS = """
import json, os, shutil, sys
import rich.console, rich.progress, rich.table, safetensors.torch, torch
import ckpt.cli.app

def run(line, number):
    shutil.copytree("given", number)
    os.chdir(number)
    sys.argv = ["ckpt", *line.split()]
    try:
        ckpt.cli.main()
    except SystemExit as ended:
        return ended.code or 0
    finally:
        os.chdir("..")

how, lines, codes = sys.argv[1], json.loads(sys.argv[2]), []
for number, line in enumerate(lines):
    child = os.fork()
    if child == 0:
        for fd in (0, 1, 2):
            if how == "full":
                os.dup2(os.open("/dev/full", os.O_RDWR), fd)
            else:
                os.close(fd)
                setattr(sys, ("stdin", "stdout", "stderr")[fd], None)
        os._exit(run(line, str(number)))
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(json.dumps(codes))
"""


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder `given`: a run of two checkpoints, and one with a damaged checkpoint."""
    folder = tmp_path_factory.mktemp("streams") / "given"
    for step in (1, 2):
        ckpt.save({"w": torch.full((100,), float(step))}, folder / "run" / f"step-{step}")
    shutil.copytree(folder / "run" / "step-1", folder / "damaged" / "step-1")
    (data,) = (folder / "damaged").rglob("*.distcp")
    data.write_bytes(bytes(data.stat().st_size))
    return folder


@pytest.mark.parametrize("how", ["closed", pytest.param("full", marks=pytest.mark.long)])
def test_no_stream_decides_the_exit_code_of_a_command(how: str, given: Path, tmp_path: Path) -> None:
    assert {module.rpartition(".")[2] for each in _COMMANDS.values() for module in each} == _RUNS.keys()
    shutil.copytree(given, tmp_path / "given")
    script = [sys.executable, "-c", _HARNESS, how, json.dumps([*_CODES])]
    ran = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=280)
    seen = dict(zip(_CODES, json.loads(ran.stdout), strict=True))
    lost = {line: 4 for line, code in _CODES.items() if code == 0} if how == "full" else {}
    assert seen == _CODES | lost
    numbers = {line: tmp_path / str(number) for number, line in enumerate(_CODES)}
    assert (numbers["cp run/step-1 copied"] / "copied" / "commit.json").exists()
    assert (numbers["drain run durable"] / "durable" / "step-2" / "commit.json").exists()
    assert not (numbers["rm run/step-1"] / "run" / "step-1").exists()
    assert (numbers["report run/step-1 -o page.html"] / "page.html").read_text().endswith("</html>\n")


def shell(line: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "CKPT": CKPT, **environment}
    words = ["bash", "-o", "pipefail", "-c", line]
    return subprocess.run(
        words, cwd=folder, env=variables, capture_output=True, text=True, check=False, timeout=60
    )


def test_lost_output_is_said_in_one_line_and_damage_comes_first(given: Path) -> None:
    ran = shell("$CKPT ls run --json >/dev/full", given)
    assert (ran.returncode, ran.stderr.count("\n")) == (4, 1)
    assert ran.stderr.startswith("error: standard output cannot be written: No space left on device")
    assert shell("$CKPT verify damaged/step-1 | true", given).returncode == 1
    assert shell("$CKPT verify run/step-1 2>&-", given).stdout.startswith("ok: ")


def test_a_watch_ends_when_no_program_reads_it(tmp_path: Path) -> None:
    ckpt.save({"w": torch.ones(2)}, tmp_path / "step-1")
    command = [CKPT, "watch", str(tmp_path), "--poll", "0.1s"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as watch:
        assert watch.stdout is not None
        assert b"step-1" in watch.stdout.readline()
        watch.stdout.close()
        ckpt.save({"w": torch.zeros(2)}, tmp_path / "step-2")
        assert watch.wait(60) == 0


@pytest.mark.parametrize("line", ["ls .", "report run-é -o -", "inspect run-é/step-1", "verify run-é/step-1"])
def test_narrow_encodings(line: str, given: Path, tmp_path: Path) -> None:
    shutil.copytree(given / "run", tmp_path / "run-é")
    ran = shell(f"$CKPT {line}", tmp_path, PYTHONIOENCODING="ascii:strict")
    assert (ran.returncode, ran.stderr) == (0, "")


def test_the_package_runs_as_the_command_does(given: Path) -> None:
    for arguments in ("verify run", "ls --nosuch"):
        script = shell(f"$CKPT {arguments}", given)
        package = shell(f"{sys.executable} -m ckpt {arguments}", given)
        assert (package.returncode, package.stdout, package.stderr) == (
            script.returncode,
            script.stdout,
            script.stderr,
        )
