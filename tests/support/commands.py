"""The `ckpt` command for the tests: run in this process, or as a user would; and real checkpoints to run it on."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import pty
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
import typer
from torch.distributed.checkpoint.state_dict import get_state_dict

import ckpt
from ckpt.backends import posix
from ckpt.backends.base import ObjectStat
from ckpt.cli.app import app
from ckpt.consistency.checksums import crc64nvme
from ckpt.consistency.seal import seal_json, unseal_json
from ckpt.format.columns import Columns
from ckpt.format.index import decode_index, encode_index
from support.ranks import run_ranks
from support.states import fsdp_model, random_tensor, sharded_state


@dataclasses.dataclass
class Ran:
    """What a command did."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.out)
        return found


_command = typer.main.get_command(app)  # once: to build it takes longer than most commands


def run(*arguments: object) -> Ran:
    """Run the command in this process."""
    code: str | int | None = 0
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8") for _ in range(2))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            _command.main([str(argument) for argument in arguments], prog_name="ckpt")
        except SystemExit as ended:
            code = ended.code
    assert isinstance(code, int)
    for stream in (out, err):
        stream.seek(0)
    ran = Ran(code, out.read(), err.read())
    assert "Traceback" not in ran.err
    return ran


def run_json(*arguments: object, code: int = 0) -> dict[str, Any]:
    """Run the command in this process with `--json`, expect this exit code, and return what it printed."""
    ran = run(*arguments, "--json")
    assert ran.code == code, (ran.out, ran.err)
    return ran.json


def run_on_terminal(*arguments: object, columns: int = 80, answer: str = "") -> Ran:
    """Run the command in this process on a terminal of its own, and type `answer`."""
    ours, theirs = pty.openpty()
    os.write(ours, answer.encode())
    shown = bytearray()

    def collect() -> None:
        with contextlib.suppress(OSError):  # the other end is closed
            while part := os.read(ours, 1 << 16):
                shown.extend(part)

    reader = threading.Thread(target=collect)
    reader.start()
    code: str | int | None = 0
    with (
        open(theirs, "w", closefd=False) as out,
        open(theirs, closefd=False) as typed,
        mock.patch.dict(os.environ, {"COLUMNS": str(columns), "TERM": "xterm"}),
        mock.patch.object(sys, "stdin", typed),
        mock.patch("ckpt.cli.printing.progress._AFTER_S", 3600.0),  # no line comes and goes
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(out),
    ):
        try:
            _command.main([str(argument) for argument in arguments], prog_name="ckpt")
        except SystemExit as ended:
            code = ended.code
    os.close(theirs)
    reader.join()
    os.close(ours)
    assert isinstance(code, int)
    return Ran(code, shown.decode().replace("\r\n", "\n"), "")


def run_process(
    *arguments: object, environment: Mapping[str, str] | None = None, timeout_s: float = 120
) -> Ran:
    """The command as a user runs it: its own process, its output in pipes."""
    script = Path(sys.executable).parent / "ckpt"
    done = subprocess.run(
        [str(script), *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, **(environment or {})},
        timeout=timeout_s,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return Ran(done.returncode, done.stdout, done.stderr)


def run_measured(*arguments: object, timeout_s: int = 100) -> tuple[Ran, int]:
    """Run the command as a user does; return what it did, and the most memory that it had, in bytes."""
    script = Path(sys.executable).parent / "ckpt"
    words = ["timeout", "-s", "KILL", str(timeout_s), str(script), *map(str, arguments)]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(words, stdout=out, stderr=err, stdin=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
    return Ran(process.returncode, *texts), usage.ru_maxrss << 10


def options_of(options: Mapping[str, Any]) -> list[str]:
    """Storage options as arguments."""
    return ["--storage-options", json.dumps(options)]


# -- checkpoints ---------------------------------------------------------------------------------------


def sharded_checkpoint(url: str | Path, options: Mapping[str, Any] | None = None, seed: int = 0) -> None:
    """A checkpoint of two ranks: a model and optimizer under FSDP, tensors sharded every way, objects."""
    run_ranks(2, _save, str(url), dict(options or {}), seed, False)


def stock_checkpoint(place: Path, seed: int = 0) -> None:
    """The same by stock PyTorch."""
    run_ranks(2, _save, str(place), {}, seed, True)


def _save(rank: int, url: str, options: dict[str, Any], seed: int, stock: bool) -> None:
    torch.manual_seed(seed)
    model, optimizer = fsdp_model(seed=seed)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {
        "model": model_state,
        "optim": optimizer_state,
        "sharded": sharded_state(seed),
        "large": random_tensor(900, 1000, seed=seed),
        "step": 100,
    }
    if stock:
        dcp.save(state, storage_writer=dcp.FileSystemWriter(url))
    else:
        ckpt.save(state, url, storage_options=options, tags={"step": "100"})


def file_names(place: Path) -> set[str]:
    """The names of all files below a folder, relative to it."""
    return {path.relative_to(place).as_posix() for path in place.rglob("*") if not path.is_dir()}


def judge_age_by_mtime(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `os.utime` make files old for PosixStore, which also asks when their entry was changed."""
    stat = posix._stat

    def by_mtime(key: str, facts: os.stat_result) -> ObjectStat:
        return dataclasses.replace(stat(key, facts), modified_at_s=facts.st_mtime)

    monkeypatch.setattr(posix, "_stat", by_mtime)


# -- damage --------------------------------------------------------------------------------------------


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0x10
    path.write_bytes(data)


def edit_commit(place: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Change the commit record and seal it again."""
    path = place / "commit.json"
    record = json.loads(unseal_json(path.read_bytes(), url="", key=""))
    edit(record)
    path.write_bytes(seal_json(json.dumps(record, separators=(",", ":")).encode()))


def edit_listed(place: Path, ref: dict[str, Any], data: bytes) -> None:
    """Replace an object that the commit lists, and what it says about it (`ref`, which is changed in place)."""
    (place / ref["path"]).write_bytes(data)
    ref |= {"size_bytes": len(data), "crc64nvme": f"{crc64nvme(data):016x}"}


def edit_manifest(place: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Change the first manifest, seal it again, and let the commit vouch for it."""

    def change(record: dict[str, Any]) -> None:
        ref = record["manifests"][0]
        manifest = json.loads(unseal_json((place / ref["path"]).read_bytes(), url="", key=""))
        edit(manifest)
        edit_listed(place, ref, seal_json(json.dumps(manifest, separators=(",", ":")).encode()))

    edit_commit(place, change)


def with_files(place: Path, files: int, file_bytes: int) -> None:
    """Let a checkpoint of one rank have so many files: a removal goes by the commit record, and opens no manifest."""

    def change(record: dict[str, Any]) -> None:
        (ref,) = record["manifests"]
        ref |= {"files": files, "data_bytes": files * file_bytes}
        record["data_bytes"] = files * file_bytes
        stem = ref["path"].removesuffix(".json")
        for number in range(files):
            (place / f"{stem}-{number}.distcp").write_bytes(bytes(file_bytes))

    edit_commit(place, change)


def edit_index(place: Path, edit: Callable[[Columns], None]) -> None:
    """Change the index, and let the commit vouch for it."""

    def change(record: dict[str, Any]) -> None:
        path = place / record["index"]["path"]
        columns = decode_index(path.read_bytes(), url="", key="")
        edit(columns)
        edit_listed(place, record["index"], encode_index(columns))

    edit_commit(place, change)
