"""`ckpt watch --exec`: a command for each checkpoint, that fails, hangs, is killed, loses its checkpoint."""

from __future__ import annotations

import errno
import gc
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.clock import SkippingClock
from support.commands import Ran, run
from support.commits import commit

from ckpt.consistency import environment


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "run"
    for step in (1, 2, 3):
        commit(root, f"step-{step}", step, at_s=step)
    return root


@pytest.fixture
def clock() -> Iterator[SkippingClock]:
    clock = SkippingClock()
    with environment.replaced(clock):
        yield clock


def script(tmp_path: Path, text: str) -> str:
    """Write a program of the shell; return the command that runs it."""
    path = tmp_path / "program.sh"
    path.write_text(text)
    return f"sh {path}"


def watched(root: Path, command: str, *more: object) -> Ran:
    return run("watch", root, "--once", "--exec", command, *more)


def test_without_a_command_it_prints(root: Path) -> None:
    ran = run("watch", root, "--once")
    assert (ran.code, ran.err) == (0, f"watching {root}\n")
    assert [line.split(",")[0] for line in ran.out.splitlines()] == [
        "step-1 (step 1)", "step-2 (step 2)", "step-3 (step 3)",
    ]  # fmt: skip
    lines = run("watch", root, "--once", "--json", "--after", 1).out.splitlines()
    facts = [json.loads(line) for line in lines]
    assert [each["step"] for each in facts] == [2, 3]
    assert facts[0]["url"] == str(root / "step-2")


def test_what_a_command_is_told(tmp_path: Path) -> None:
    checkpoint_id = commit(tmp_path / "run", "x; touch {id} $(touch y)", 7)
    out = tmp_path / "out"
    program = script(
        tmp_path, f'printf "%s\\n" "$@" "$CKPT_URL" "$CKPT_PATH" "$CKPT_STEP" "$CKPT_ID" > {out}'
    )
    ran = watched(tmp_path / "run", f"{program} {{url}} --step={{step}} '{{\"a\": {{id}}}}' {{other}}")
    assert (ran.code, ran.out.partition(" after ")[0]) == (0, "x; touch {id} $(touch y) (step 7): done")
    url = f"{tmp_path}/run/x; touch {{id}} $(touch y)"
    assert out.read_text().splitlines() == [
        url, "--step=7", f'{{"a": {checkpoint_id}}}', "{other}", url, "x; touch {id} $(touch y)", "7", checkpoint_id,
    ]  # fmt: skip


def test_it_is_tried_again(root: Path, tmp_path: Path, clock: SkippingClock) -> None:
    program = script(tmp_path, 'test "$CKPT_STEP" != 2 || test "$CKPT_ATTEMPT" = 3')
    ran = watched(root, program, "--json", "--retries", 2)
    assert ran.code == 0
    ends = [json.loads(line) for line in ran.out.splitlines()]
    assert [(each["step"], each["outcome"], each["attempts"]) for each in ends] == [
        (1, "done", 1), (2, "done", 3), (3, "done", 1),
    ]  # fmt: skip
    assert clock.skipped_s == 1 + 2
    assert "step-2 (step 2): attempt 2 failed: exit code 1; again in 2 s" in ran.err


def test_when_the_last_try_fails(root: Path, tmp_path: Path, clock: SkippingClock) -> None:
    done, cursor = tmp_path / "done", tmp_path / "cursor"
    program = script(tmp_path, f'test "$CKPT_STEP" != 2 && echo $CKPT_STEP >> {done}')
    ran = watched(root, program, "--cursor", cursor, "--retries", 1)
    assert ran.code == 1
    assert ran.out.splitlines()[1].endswith("2 attempts: exit code 1")
    assert len(ran.out.splitlines()) == 2
    ran = watched(root, program, "--cursor", cursor, "--retries", 0, "--on-failure", "continue", "--json")
    ends = [json.loads(line) for line in ran.out.splitlines()]
    assert [(each["step"], each["outcome"]) for each in ends] == [(2, "failed"), (3, "done")]
    assert ran.code == 1
    ran = watched(root, program, "--cursor", cursor)
    assert (ran.code, ran.out) == (0, "")
    assert done.read_text().split() == ["1", "3"]


def test_one_that_is_removed_while_its_command_runs(root: Path, tmp_path: Path) -> None:
    program = script(tmp_path, 'case $CKPT_STEP in 2) rm -r "$CKPT_URL"; exit 5;; esac')
    ran = watched(root, program, "--json")
    ends = [json.loads(line) for line in ran.out.splitlines()]
    assert [(each["outcome"], each["exit_code"]) for each in ends] == [
        ("done", 0),
        ("removed", 5),
        ("done", 0),
    ]
    assert ran.code == 0


def test_one_that_takes_too_long_is_ended_with_all_it_started(root: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    ours = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)  # so that the command need not wait for a reader
    os.set_blocking(ours, True)
    program = script(tmp_path, f"exec 3> {pipe}; sleep 1000 & wait")
    ran = watched(root, program, "--exec-timeout", "0.3s", "--retries", 0)
    assert ran.code == 1
    assert "it did not end within 0.3 s" in ran.out
    assert os.read(ours, 1) == b"", "nobody has the other end any more"
    os.close(ours)


@pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")
def test_one_that_cannot_be_ended(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As one of another user, whom `sudo` made it."""
    processes: list[int] = []

    def refuse(process: int, _: int) -> None:
        processes.append(process)
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "killpg", refuse)
    monkeypatch.setattr("ckpt.watching.command._GRACE_S", 0.01)
    try:
        ran = watched(root, "sleep 1000", "--exec-timeout", "0.1s", "--retries", 1)
    finally:
        for process in set(processes):
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
    assert ran.code == 2
    assert f"(process {processes[0]}) did not end within 0.1 s, and cannot be ended" in ran.err
    assert "could not be ended, and goes on" in caplog.text
    assert len(set(processes)) == 1, "no second attempt beside it"
    gc.collect()


def test_a_command_that_dies(root: Path) -> None:
    ran = watched(root, "sh -c 'kill -9 $$'", "--retries", 0, "--json")
    assert json.loads(ran.out)["problem"] == "it was ended by SIGKILL"


@pytest.mark.long
def test_its_output_is_not_mixed_with_json(root: Path) -> None:
    out = process_of(root, "--once", "--json", "--exec", "echo {step}")
    with out as process:
        stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 0
    assert [json.loads(line)["outcome"] for line in stdout.splitlines()] == ["done"] * 3
    assert stderr.splitlines()[1:] == ["1", "2", "3"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--exec", "no-such-program {url}"], "'no-such-program' is not there"),
        (["--exec", "sh 'x"], "cannot be read: No closing quotation"),
        (["--exec", ""], "the command is empty"),
        (["--once", "--timeout", "1h"], "exclude each other"),
        (["--poll", "soon"], "write 10s, 5m or 1h"),
        (["--poll", "0"], "poll_s"),
        (["--cursor", "s3://x"], "names no file"),
    ],
)
def test_wrong_usage(root: Path, arguments: list[str], text: str) -> None:
    ran = run("watch", root, *arguments)
    assert ran.code == 2
    assert text in ran.err


@contextmanager
def process_of(root: Path, *more: object) -> Iterator[subprocess.Popen[str]]:
    """Run the command in a process of its own, and end it in any case."""
    program = "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL); from ckpt.cli import main; main()"
    words = [sys.executable, "-c", program, "watch", str(root), *map(str, more)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        *(pytest.param(each, marks=pytest.mark.long) for each in (signal.SIGINT, signal.SIGHUP)),
    ],
)
def test_a_signal_reaches_the_command_and_nothing_is_done(
    root: Path, tmp_path: Path, number: signal.Signals
) -> None:
    name, cursor = number.name.removeprefix("SIG"), tmp_path / "cursor"
    program = script(
        tmp_path, f"trap 'echo got {name}; exit 0' {name}\necho begun\nwhile :; do sleep 0.01; done"
    )
    with process_of(root, "--exec", program, "--cursor", cursor) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=120)
    assert (process.returncode, stdout) == (130, f"got {name}\n")
    assert "Checkpoints whose command has not ended are not done" in stderr
    ran = watched(root, "true", "--cursor", cursor, "--json")
    assert [json.loads(line)["step"] for line in ran.out.splitlines()] == [1, 2, 3]


def test_a_signal_while_a_late_command_is_ended(root: Path, tmp_path: Path) -> None:
    program = script(tmp_path, "trap 'echo ending' TERM\nwhile :; do sleep 0.01; done")
    with process_of(root, "--exec", program, "--exec-timeout", "0.5s", "--retries", 9) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ending\n"
        process.send_signal(signal.SIGTERM)
        stdout, _ = process.communicate(timeout=120)
    assert (process.returncode, stdout) == (130, "")


@pytest.mark.long
def test_killed_again_and_again(tmp_path: Path) -> None:
    """Each one is done, in order; only the one during which it was killed is done twice."""
    root, cursor, log = tmp_path / "run", tmp_path / "cursor", tmp_path / "log"
    program = script(tmp_path, f"echo $CKPT_STEP $CKPT_ID >> {log}; sleep 0.02")
    chance, ids, kills = random.Random(1), {}, 0
    for step in range(40):
        ids[step] = commit(root, f"step-{step:03d}", step, at_s=step)
        if step > 20 and step % 7 == 0:
            shutil.rmtree(root / f"step-{step - 20:03d}")
        if step % 3 == 0:
            with process_of(root, "--exec", program, "--cursor", cursor, "--poll", "0.05s") as process:
                assert process.stdout is not None
                for _ in range(chance.randint(0, 2)):
                    process.stdout.readline()
                time.sleep(chance.random() * 0.1)
                kills += 1
    ran = watched(root, program, "--cursor", cursor)
    assert ran.code == 0, ran.err
    lines = [line.split() for line in log.read_text().splitlines()]
    executed: list[tuple[int, str]] = [(int(step), checkpoint_id) for step, checkpoint_id in lines]
    once = list(dict.fromkeys(executed))
    assert [step for step, _ in once] == sorted(step for step, _ in once)
    assert executed == sorted(executed), "again only before the next one"
    assert len(executed) - len(once) <= kills
    there = {int(path.name[5:]) for path in root.iterdir()}
    assert there <= {step for step, _ in once}
    assert all(ids[step] == checkpoint_id for step, checkpoint_id in once)
