"""`ckpt convert`: bounded memory, interrupts, failures on the way, and many ranks."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import flip, run
from support.conversions import ENDINGS, FORMATS, convert, read
from support.files import any_file
from support.servers import S3Server
from support.states import random_tensor

import ckpt
from ckpt.backends import posix
from ckpt.backends.posix import PosixStore
from ckpt.consistency import environment
from ckpt.conversion import source as sources
from ckpt.conversion.torch_source import TorchFileSource
from ckpt.errors import CommitConflict, StorageUnavailable
from ckpt.stock.safetensors_format import DescribedTensor, encode_header

MIB = 1 << 20


# -- memory --------------------------------------------------------------------------------------------


def sparse_model(place: Path, gib: int) -> None:
    """One tensor of that size and a few small ones; holes of zeros that take no disk."""
    rows = gib << 18
    tensors = {
        "huge": (torch.float32, (rows, 1024)),
        **{f"small.{n}": (torch.bfloat16, (n,)) for n in range(40)},
    }
    header = encode_header({name: DescribedTensor.of(*kind) for name, kind in tensors.items()})
    with open(place, "wb") as file:
        file.write(header)
        file.truncate(len(header) + (gib << 30) + 2 * sum(range(40)))


_CONVERT = "ckpt.convert(sys.argv[1], sys.argv[2], **json.loads(sys.argv[3]))\n"
_IMPORTS = """
import json, sys, ckpt, ckpt.api, ckpt.conversion, torch.distributed.checkpoint
from pathlib import Path
def peak():
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1])
before = peak()
"""
_PEAK = "print(peak() - before)\n"


def peak_bytes(source: Path, target: Path | str, *, code: str = _CONVERT, **options: Any) -> int:
    """The peak resident memory of a process that converts, beyond that after its imports."""
    command = [
        sys.executable,
        "-c",
        _IMPORTS + code + _PEAK,
        str(source),
        str(target),
        json.dumps(options),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1]) * 1024


@pytest.mark.long
@pytest.mark.parametrize("form", FORMATS)
def test_one_tensor_larger_than_the_limit(form: str, tmp_path: Path) -> None:
    """2 GiB in one tensor, through every format; a quarter of it after the first step, to spare the disk."""
    sparse_model(tmp_path / "huge.safetensors", 2)
    first = tmp_path / f"first{ENDINGS[form]}"
    assert peak_bytes(tmp_path / "huge.safetensors", first, to=form, dtype="float8_e4m3fn") < 220 * MIB
    (tmp_path / "huge.safetensors").unlink()
    assert peak_bytes(first, tmp_path / "second.pt", to="torch") < 220 * MIB
    assert torch.load(tmp_path / "second.pt", weights_only=True, mmap=True)["huge"].shape == (2 << 18, 1024)
    shutil.rmtree(tmp_path)  # pytest would keep it


def test_parts_in_parallel_stay_in_the_limit(s3: S3Server, tmp_path: Path) -> None:
    sparse_model(tmp_path / "huge.safetensors", 1)
    options: dict[str, Any] = {
        "destination_options": s3.options,
        "dtype": "float8_e4m3fn",
        "to": "safetensors",
    }
    assert peak_bytes(tmp_path / "huge.safetensors", f"s3://{s3.new_bucket()}/a", **options) < 620 * MIB


@pytest.mark.parametrize("form", FORMATS)
def test_very_many_small_tensors_are_read_some_at_a_time(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = {f"t{n}": torch.tensor([n], dtype=torch.int16) for n in range(400)}
    torch.save(saved, tmp_path / "a.pt")
    read_at_once: list[int] = []
    original = TorchFileSource.read

    def noted(self: TorchFileSource, regions: Any) -> None:
        read_at_once.append(len(regions))
        original(self, regions)

    monkeypatch.setattr(TorchFileSource, "read", noted)
    monkeypatch.setattr(sources, "_REGIONS_AT_ONCE", 150)
    target = tmp_path / f"out{ENDINGS[form]}"
    convert(tmp_path / "a.pt", target, "--to", form)
    assert max(read_at_once) == 150
    assert sum(read_at_once) == len(saved)
    found = read(target, form)
    assert all(int(found[f"t{n}"]) == n for n in range(0, 400, 7))


# -- interrupts and failures ---------------------------------------------------------------------------


def state() -> dict[str, Any]:
    return {"w": random_tensor(3_000_000), "v": random_tensor(700_000, dtype=torch.bfloat16), "step": 3}


@pytest.mark.parametrize("form", FORMATS)
def test_ctrl_c(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a file: nothing is left, and the same command works again."""
    torch.save({"w": random_tensor(3000), "v": random_tensor(500)}, tmp_path / "a.pt")
    (tmp_path / "sub").mkdir()
    command = ("convert", tmp_path / "a.pt", tmp_path / "sub" / f"out{ENDINGS[form]}", "--to", form)
    writing, interrupted = threading.Event(), threading.Event()
    write, wait = posix._write_all, environment.wait

    def write_when_interrupted(*arguments: Any) -> None:
        writing.set()
        assert interrupted.wait(60)
        write(*arguments)

    def wait_interrupted(event: threading.Event, timeout_s: float) -> bool:
        if writing.wait(0.01) and not interrupted.is_set():
            interrupted.set()
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        return wait(event, timeout_s if interrupted.is_set() else 0.01)

    with monkeypatch.context() as patch:
        patch.setattr(posix, "_write_all", write_when_interrupted)
        patch.setattr(environment, "wait", wait_interrupted)
        ran = run(*command)
    assert (ran.code, ran.out) == (130, "")
    assert "the same command starts over" in ran.err
    assert not [path for path in (tmp_path / "sub").rglob("*") if path.is_file()]
    assert run(*command).code == 0


@pytest.mark.long
@pytest.mark.parametrize("form", FORMATS)
def test_ctrl_c_as_a_user(form: str, tmp_path: Path) -> None:
    """A process, in the middle of a large file."""
    sparse_model(tmp_path / "huge.safetensors", 3)
    folder = tmp_path / "out"
    folder.mkdir()
    target = folder / f"result{ENDINGS[form]}"
    script = Path(sys.executable).parent / "ckpt"
    command = [str(script), "convert", str(tmp_path / "huge.safetensors"), str(target), "--to", form]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            deadline = time.monotonic() + 120
            while not any_file(folder, "*ckpt-tmp", at_least_bytes=1):
                assert process.poll() is None, process.communicate()
                assert time.monotonic() < deadline
                time.sleep(0.01)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=120)
        finally:
            process.kill()
    assert (process.returncode, out) == (130, "")
    assert "the same command starts over" in err
    assert not [path for path in folder.rglob("*") if path.is_file()]


def failing_put(monkeypatch: pytest.MonkeyPatch, name: str, error: BaseException) -> None:
    original = PosixStore.put

    def put(self: PosixStore, key: str, *rest: Any, **more: Any) -> None:
        if key.endswith(name):
            raise error
        original(self, key, *rest, **more)

    monkeypatch.setattr(PosixStore, "put", put)


@pytest.mark.parametrize(
    ("form", "last"),
    [("ckpt", "commit.json"), ("dcp", ".metadata"), ("safetensors", ".index.json"), ("torch", "out.pt")],
)
def test_the_last_step_fails(form: str, last: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"w": random_tensor(3000), "v": random_tensor(500)}, tmp_path / "a.pt")
    (tmp_path / "sub").mkdir()
    target = tmp_path / "sub" / f"out{ENDINGS[form]}"
    failing_put(monkeypatch, last, StorageUnavailable("no answer", settled=True))
    ran = run("convert", tmp_path / "a.pt", target, "--to", form, "--max-shard-size", "3KB")
    assert ran.code in (1, 4)
    assert not [path for path in (tmp_path / "sub").rglob("*") if path.is_file()]
    monkeypatch.undo()
    convert(tmp_path / "a.pt", target, "--to", form, "--max-shard-size", "3KB")


def test_damage_is_found_on_the_way(tmp_path: Path) -> None:
    ckpt.save(state(), tmp_path / "ours")
    data = max((tmp_path / "ours").rglob("*.distcp"), key=lambda path: path.stat().st_size)
    flip(data, data.stat().st_size // 2)
    for form in ("dcp", "torch", "safetensors", "ckpt"):
        target = tmp_path / f"{form}-out{ENDINGS[form]}"
        error = convert(tmp_path / "ours", target, "--to", form, code=1)["error"]
        assert (error["type"], error["key"]) == (
            "IntegrityError",
            data.relative_to(tmp_path / "ours").as_posix(),
        )
        assert error["start"] is not None
        assert not [path for path in tmp_path.glob(f"{form}-out*") if path.is_file() or any(path.glob("*.*"))]


def replaced_on_the_way(monkeypatch: pytest.MonkeyPatch, source: Path) -> None:
    """Replace a file right after some of its data were read for a put."""
    put, read_into = PosixStore.put, PosixStore.read_into
    putting = threading.Event()

    def noted(self: PosixStore, *rest: Any, **more: Any) -> None:
        putting.set()
        put(self, *rest, **more)

    def replacing(self: PosixStore, key: str, *rest: Any) -> None:
        read_into(self, key, *rest)
        if putting.is_set() and key == source.name:
            putting.clear()
            torch.save({**state(), "step": 4}, source)

    monkeypatch.setattr(PosixStore, "put", noted)
    monkeypatch.setattr(PosixStore, "read_into", replacing)


@pytest.mark.parametrize("form", FORMATS)
def test_a_source_that_is_replaced_meanwhile(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save(state(), tmp_path / "a.pt")
    replaced_on_the_way(monkeypatch, tmp_path / "a.pt")
    target = tmp_path / f"out{ENDINGS[form]}"
    error = convert(tmp_path / "a.pt", target, "--to", form, code=1)["error"]
    assert error["type"] == "CommitConflict"
    assert not target.is_file()
    assert not target.is_dir() or not [p for p in target.rglob("*") if p.is_file()]


@pytest.mark.parametrize("name", ["b.pt", "b.safetensors"])
def test_a_file_that_would_be_replaced_stays_until_the_source_is_vouched_for(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save(state(), tmp_path / "a.pt")
    (tmp_path / name).write_text("of value")
    seen: list[str] = []

    def tell(self: Any) -> None:
        seen.append((tmp_path / name).read_text())
        raise CommitConflict("was replaced")

    monkeypatch.setattr(TorchFileSource, "check_unchanged", tell)
    convert(tmp_path / "a.pt", tmp_path / name, "--overwrite", code=1)
    assert seen == ["of value"]
    assert (tmp_path / name).read_text() == "of value"


def test_a_put_of_which_nobody_knows_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    torch.save(state(), tmp_path / "a.pt")
    original = PosixStore.put

    def put(self: PosixStore, key: str, *rest: Any, **more: Any) -> None:
        original(self, key, *rest, **more)
        if key.startswith("model-00002"):
            raise StorageUnavailable("no reply", url=self.url, key=key)

    monkeypatch.setattr(PosixStore, "put", put)
    convert(tmp_path / "a.pt", tmp_path / "hf", "--to", "safetensors", "--max-shard-size", "3MB", code=4)
    assert [path.name for path in (tmp_path / "hf").iterdir()] == ["model-00002-of-00002.safetensors"]
    assert "delete them if they are there: model-00002-of-00002.safetensors" in caplog.text
