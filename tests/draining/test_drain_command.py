"""`ckpt drain`: what it prints, its exit codes, and what a signal ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from support.commands import options_of, run
from support.strict_s3 import Request, StrictS3

import ckpt
from ckpt.draining.ending import Grace


@pytest.fixture
def local(tmp_path: Path) -> Path:
    for step in (1, 2):
        ckpt.save({"t": torch.ones(9)}, tmp_path / "local" / f"step-{step}", no_dist=True)
    return tmp_path / "local"


def test_it_prints_what_became_of_each(local: Path, tmp_path: Path) -> None:
    ran = run("drain", local, tmp_path / "durable", "--newest", 1)
    assert (ran.code, ran.err) == (0, "")
    first, second = ran.out.splitlines()
    assert first == "left out  step-1: newer checkpoints are not durable yet"
    assert second.startswith("durable  step-2, ")
    lines = run("drain", local, tmp_path / "durable", "--json").out.splitlines()
    assert [(each["path"], each["state"]) for each in map(json.loads, lines)] == [
        ("step-1", "durable"),
        ("step-2", "durable"),
    ]
    assert run("drain", tmp_path, tmp_path / "other").out.startswith("no checkpoints directly below ")


def test_what_is_not_durable_is_exit_code_1(local: Path, tmp_path: Path) -> None:
    (local / "step-1" / "commit.json").write_text("{}")
    ran = run("drain", local, tmp_path / "durable")
    assert (ran.code, ran.out.count("\n")) == (1, 2)
    assert ran.out.startswith("failed  step-1: ")


@pytest.mark.parametrize("wrong", [("--max-bandwidth", "fast"), ("--grace", "soon"), ("--newest", "0")])
def test_wrong_options(local: Path, tmp_path: Path, wrong: tuple[str, str]) -> None:
    assert run("drain", local, tmp_path / "durable", *wrong).code == 2


@pytest.mark.parametrize(
    ("in_time", "blocked"), [(True, (503, "SlowDown")), (False, (503, "SlowDown")), (False, "stall")]
)
def test_sigterm_carries_what_fits(
    local: Path, server: StrictS3, in_time: bool, blocked: str | tuple[int, str]
) -> None:
    """After the signal what is committed is carried, for as long as the grace lasts; then it says what is left."""
    is_blocked = [True]

    def rule(request: Request) -> str | tuple[int, str]:
        return blocked if is_blocked[0] and request.method == "PUT" else "pass"

    server.rule = rule
    script = Path(sys.executable).parent / "ckpt"
    options = options_of(server.options)[1]
    command = [
        str(script),
        "drain",
        str(local),
        "s3://bucket/run",
        "--follow",
        "--poll",
        "0.1s",
        "--storage-options",
    ]
    grace = "60s" if in_time else "0.5s"
    with subprocess.Popen(
        [*command, options, "--grace", grace], stdout=subprocess.PIPE, text=True
    ) as drainer:
        while not server.sent("PutObject"):
            assert drainer.poll() is None
            time.sleep(0.01)
        drainer.send_signal(signal.SIGTERM)
        is_blocked[0] = not in_time
        out, _ = drainer.communicate(timeout=60)
    if in_time:
        assert (drainer.returncode, [line.split(",")[0] for line in out.splitlines()]) == (
            0,
            ["durable  step-1", "durable  step-2"],
        )
        listed = ckpt.list_checkpoints("s3://bucket/run", storage_options=server.options)
        assert [(each.path, each.state) for each in listed] == [
            ("step-1", "committed"),
            ("step-2", "committed"),
        ]
    else:
        assert (drainer.returncode, out.splitlines()) == (
            1,
            [f"waiting  step-{step}: stopped before it was durable" for step in (1, 2)],
        )


def test_a_signal_ends_a_process_that_finishes_already() -> None:
    """The end of the trainer has set `finish` before."""
    grace = Grace(0.01, lambda: None)
    grace.finish.set()
    grace.begin()
    assert grace.stop.wait(60)
    grace.end()
