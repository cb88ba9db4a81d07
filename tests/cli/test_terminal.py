"""What a person sees: real processes on a real terminal, of 80 columns and fewer; and what a pipe gets."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import file_names, options_of, run_on_terminal, with_files
from support.servers import ACCESS_KEY, SECRET_KEY
from support.strict_s3 import Request, StrictS3
from support.terminal import CKPT, Terminal, run_on_screen
from typer.main import get_command

import ckpt
from ckpt.cli.app import app

_COLOUR = re.compile(rb"\x1b\[[0-9;]*3[0-9]")
_BAR = "[━╸╺]+"
_LONG = "a-project-with-a-long-name/llama-2-7b-continued-on-more-text"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints in a run with a long name."""
    root = tmp_path_factory.mktemp("runs")
    for step in (100, 200):
        model = torch.nn.Linear(8, 8).state_dict()
        ckpt.save({"model": model, "step": step}, root / _LONG / f"step-{step}", tags={"note": "x" * 40})
    return root


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("large")
    ckpt.save({f"w{number}": torch.zeros(1 << 20) for number in range(6)}, root / "step-1")
    return root


@pytest.fixture
def slow_server(server: StrictS3) -> Iterator[list[str]]:
    """Options of a server that takes its time over every request, one at a time."""

    def rule(request: Request) -> str:
        time.sleep(0.5 if request.operation == "DeleteObjects" else 0.12)
        return "pass"

    server.rule = rule
    yield options_of({**server.options, "key": ACCESS_KEY, "secret": SECRET_KEY})
    server.rule = lambda request: "pass"


def upload(server: StrictS3, folder: Path, prefix: str) -> None:
    """Put a folder's files on the server, old ones."""
    for name in file_names(folder):
        server.objects[f"{prefix}/{name}"] = (folder / name).read_bytes()
        server.dates_s[f"{prefix}/{name}"] = 0.0


# -- progress ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("columns", [80, 50])
def test_bytes_rate_and_time_left_are_drawn_and_taken_away(large: Path, tmp_path: Path, columns: int) -> None:
    drain = (CKPT, "drain", large, tmp_path / "durable", "--max-bandwidth", "8MB/s", "--threads", "1")
    with Terminal(*drain, columns=columns) as terminal:
        shown = terminal.wait_until(lambda text: " left" in text)
        assert terminal.wait() == 0
    (line,) = shown.splitlines()
    rate = r", \d+\.\d\d [KM]iB/s" if columns == 80 else ""
    assert re.search(rf"^draining .*\d+\.\d\d (KiB |MiB )?of 24\.0\d MiB{rate}, \d+ s left$", line), line
    assert ("━" in line) == (columns == 80)
    assert re.fullmatch(r"durable  step-1, 24\.0\d MiB sent in [\d.]+ s", terminal.text)


def test_progress_is_on_standard_error(large: Path, tmp_path: Path) -> None:
    drain = (
        CKPT,
        "drain",
        large,
        tmp_path / "durable",
        "--max-bandwidth",
        "8MB/s",
        "--threads",
        "1",
        "--json",
    )
    with open(tmp_path / "out", "w") as out, Terminal(*drain, stdout=out.fileno()) as terminal:
        terminal.wait_until(lambda text: " left" in text)
        assert terminal.wait() == 0
        assert terminal.text == ""
    assert (tmp_path / "out").read_text().startswith('{"path": "step-1"')


def test_a_pipe_gets_none(large: Path, tmp_path: Path) -> None:
    drain = (CKPT, "drain", large, tmp_path / "durable", "--max-bandwidth", "8MB/s", "--threads", "1")
    done = subprocess.run(list(map(str, drain)), capture_output=True, text=True, check=True)
    assert re.fullmatch(r"durable  step-1, 24\.0\d MiB sent in [\d.]+ s\n", done.stdout)
    assert done.stderr == ""


@pytest.mark.long
def test_removals_count_objects_and_bytes(server: StrictS3, slow_server: list[str], tmp_path: Path) -> None:
    ckpt.save({"w": torch.zeros(8)}, tmp_path / "step-1")
    with_files(tmp_path / "step-1", 600, 1 << 10)
    upload(server, tmp_path / "step-1", "run/step-1")

    batches = itertools.count()

    def rule(request: Request) -> str:
        if request.operation == "DeleteObjects":
            time.sleep(0.6 * (1 + next(batches) % 4))  # sent at once, answered one after the other
        return "pass"

    server.rule = rule
    rate = r"of 60[23] objects, \d+\.\d\d of \d\d\d\.\d\d KiB, [\d.]+/s, \d+ s left"
    for command in ("rm", "gc"):
        url = "s3://bucket/run/step-1" if command == "rm" else "s3://bucket/run"
        with Terminal(
            CKPT, command, url, "--yes" if command == "rm" else "--grace=1h", *slow_server
        ) as terminal:
            terminal.wait_until(lambda text: re.search(rf"^(removing|collecting) {_BAR} \d+ {rate}$", text))
            assert terminal.wait() == 0
            assert terminal.text.splitlines()[-1].startswith("removed ")
        upload(server, tmp_path / "step-1", "run/step-1")
        del server.objects["run/step-1/commit.json"]


@pytest.mark.slow
def test_looks_count_what_they_look_at(
    server: StrictS3, slow_server: list[str], sharded_place: Path, tmp_path: Path
) -> None:
    for step in (1, 2, 3, 4):
        upload(server, sharded_place, f"run/step-{step}")
    with Terminal(CKPT, "ls", "s3://bucket/run", *slow_server) as terminal:
        terminal.wait_until(lambda text: re.fullmatch(rf"listing {_BAR} 0 of 1 folder, 1 s so far", text))
        terminal.wait_until(
            lambda text: re.fullmatch(rf"listing {_BAR} [1-5] of 5 folders, [\d.]+/s, \d+ s left", text)
        )
        terminal.wait_until(lambda text: re.fullmatch(rf"listing {_BAR} [01] of 1 run, .*", text))
        assert terminal.wait() == 0
    with Terminal(CKPT, "inspect", "s3://bucket/run/step-1", *slow_server, lines=60) as terminal:
        read = rf"^reading records {_BAR} [\d.]+ (B |KiB )?of [\d.]+ KiB, .*(left|so far)$"
        terminal.wait_until(lambda text: re.search(read, text))
        assert terminal.wait() == 0
        assert "left" not in terminal.text


def test_a_dumb_terminal_gets_plain_text(large: Path, tmp_path: Path) -> None:
    drain = (CKPT, "drain", large, tmp_path / "durable", "--max-bandwidth", "20MB/s", "--threads", "1")
    with Terminal(*drain, environment={"TERM": "dumb"}) as terminal:
        assert terminal.wait() == 0
        assert terminal.raw.count(b"\n") == 1
        assert b"\x1b" not in terminal.raw


# -- tables --------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("columns", [80, 50])
def test_tables_fit_and_long_names_are_cut_in_the_middle(
    runs: Path, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(runs)

    def screen(*arguments: object) -> list[str]:
        written = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", run_on_terminal(*arguments, columns=columns).out)
        wide = [line for line in written.split("\n") if len(line) > columns]
        assert all(max(map(len, line.split())) > columns for line in wide), wide  # a path is not broken
        return [line.rstrip() for line in written.splitlines()]

    heading, *lines = screen("ls", ".")
    assert heading.split()[:3] == ["checkpoint", "step", "state"]
    *lines, hidden = lines
    assert len(lines) == 2
    assert re.fullmatch("no room for (age, ranks, |ranks, )?tags: --columns chooses", hidden)
    for line in lines:
        assert re.search(r"a-project.*….*step-[12]00 +[12]00  committed  .* KiB", line), line
    with Terminal(CKPT, "ls", ".", columns=columns, cwd=runs) as terminal:
        assert terminal.wait() == 0
    assert [line.split()[:4] for line in terminal.text.splitlines()] == [
        line.split()[:4] for line in (heading, *lines, hidden)
    ]
    step = Path(_LONG) / "step-100"
    assert screen("inspect", step)
    assert screen("inspect", step, "--tensor", "*")
    assert screen("verify", step)[0].startswith("ok: ")
    assert screen("diff", step, step.with_name("step-200"))
    assert screen("cat", step, "model.weight")
    assert screen("plan", "t5-11b", "gpt-1t")
    assert screen("rm", step, "--dry-run")
    assert screen("verify", step / "nothing")


# -- colours -------------------------------------------------------------------------------------------


def test_colours_obey_no_color_and_force_color(runs: Path) -> None:
    def written(**environment: str) -> bytes:
        with Terminal(CKPT, "ls", runs, environment=environment) as terminal:
            assert terminal.wait() == 0
            return bytes(terminal.raw)

    assert _COLOUR.search(written())
    assert not _COLOUR.search(written(NO_COLOR="1"))
    assert b"\x1b" not in written(TERM="dumb")
    piped = [
        subprocess.run([CKPT, "ls", runs], env={**os.environ, **more}, capture_output=True, check=True)
        for more in ({}, {"FORCE_COLOR": "1"})
    ]
    assert [bool(_COLOUR.search(each.stdout)) for each in piped] == [False, True]


# -- ends ----------------------------------------------------------------------------------------------


def test_ctrl_c_is_one_line(slow_server: list[str]) -> None:
    with Terminal(CKPT, "ls", "s3://bucket/run", *slow_server) as terminal:
        terminal.wait_until(lambda text: "listing" in text)
        terminal.press("\x03")
        assert terminal.wait() == 130
        assert terminal.text.removeprefix("^C") == "error: interrupted. Nothing was changed."


def test_ctrl_c_at_the_start_is_one_line(runs: Path) -> None:
    """While Python imports what the command needs."""
    code = "import ckpt.cli, os, signal, sys; sys.modules['ckpt.cli.app'] = None\ntry: ckpt.cli.main()\nexcept ImportError: os.kill(os.getpid(), signal.SIGINT)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


@pytest.mark.parametrize("arguments", ["ls {}", "--help", "ls --help", "rm --dry-run {}/step-1"])
def test_a_reader_that_has_seen_enough_is_no_error(large: Path, arguments: str) -> None:
    command = f"sleep 1 | {{ {shlex.quote(CKPT)} {arguments.format(large)}; echo $? >&3; }} | true"
    script = f"exec 3>&1; {command}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert done.stdout in ("0\n", "1\n")


# -- help ----------------------------------------------------------------------------------------------


def test_help_groups_commands_and_options() -> None:
    help_text = run_on_screen(CKPT, "--help")
    for title in ("Look", "Check", "Copy and convert", "Clean up", "Plan"):
        assert f"\n{title}:\n" in help_text
    for name in get_command(app).list_commands(None):  # type: ignore[attr-defined]
        assert re.search(rf"^  {name} +[A-Z]", help_text, re.MULTILINE), name
    assert help_text.count("...") == 1  # of the usage; no sentence is cut
    convert = run_on_screen(CKPT, "convert", "--help", lines=80)
    for title in ("Arguments", "Options", "What is converted", "Storage and output", "Examples"):
        assert f"\n{title}:\n" in convert


def test_without_arguments_it_says_what_to_try_first() -> None:
    with Terminal(CKPT) as terminal:
        assert terminal.wait() == 2
        assert "Try first" in terminal.text
        assert "ckpt ls " in terminal.text
        assert all(len(line) < 80 for line in terminal.written.splitlines())


def test_examples_are_right() -> None:
    """Each is parsed as it stands, and fits a terminal."""
    group: Any = get_command(app)
    for name in group.list_commands(None):
        command = group.get_command(None, name)
        examples = command.epilog.strip().replace("\\\n", " ").splitlines()
        assert len(examples) >= 2, name
        assert all(len(line) <= 78 for line in command.epilog.splitlines()), name
        for example in examples:
            words = shlex.split(example.partition(" | ")[0])
            words = words[words.index("ckpt") + 1 :]
            assert words[0] == name, example
            command.make_context(name, words[1:])


@pytest.mark.parametrize(
    ("typed", "meant"),
    [(("lss",), "'ls'"), (("verfy", "x"), "'verify'"), (("ls", ".", "--dept", "3"), "--depth")],
)
def test_a_slip_is_answered_with_what_was_meant(typed: tuple[str, ...], meant: str) -> None:
    done = subprocess.run([CKPT, *typed], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert meant in done.stderr


# -- completion ----------------------------------------------------------------------------------------

_SHELLS = {
    "bash": (("bash", "--norc", "--noprofile", "-i"), 'eval "$(ckpt --show-completion)"'),
    "zsh": (("zsh", "-f", "-i"), 'autoload -U compinit && compinit -u && eval "$(ckpt --show-completion)"'),
    "fish": (("fish", "--no-config", "-i"), "ckpt --show-completion | source"),
}


@pytest.mark.parametrize("shell", _SHELLS)
def test_shells_complete_commands_options_and_paths(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} here")
    command, setup = _SHELLS[shell]
    (tmp_path / "a-checkpoint").mkdir()
    home = {
        "HOME": str(tmp_path),
        "PS1": "> ",
        "PATH": f"{Path(CKPT).parent}{os.pathsep}{os.environ['PATH']}",
    }
    with Terminal(*command, environment=home, cwd=tmp_path) as terminal:
        terminal.press(f'{setup}; echo rea""dy\n')
        terminal.wait_until(lambda text: "\nready" in text)
        for typed, completed in (
            ("ckpt veri", "ckpt verify"),
            (" --qu", "--quick"),
            (" a-che", "a-checkpoint"),
        ):
            terminal.press(f"{typed}\t")
            terminal.wait_until(lambda text, word=completed: word in text)  # type: ignore[misc]
