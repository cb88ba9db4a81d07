"""`ckpt.toml`: found, read by everything that opens a store, weaker than what a caller says, clear about mistakes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import options_of, run

import ckpt
from benchmarks.run.servers import ACCESS_KEY, BUCKET, REGION, SECRET_KEY, Endpoint, sink
from ckpt.backends import registry
from ckpt.backends.memory import MemoryStore
from ckpt.backends.registry import open_store
from ckpt.errors import ConfigurationError
from ckpt.settings import LIMITS, Settings, override, settings_for
from ckpt.trainer_integration.manager import CheckpointManager
from ckpt.transfer.buffer_pool import DEFAULT_MEMORY_BUDGET_BYTES, MIN_MEMORY_BUDGET_BYTES

MIB = 1 << 20


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of settings of a working directory of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CKPT_CONFIG", raising=False)
    return tmp_path / "ckpt.toml"


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The threads of each store that was opened at `noted://`."""
    noted: list[int] = []

    def make(url: str, options: Mapping[str, Any], *, threads: int) -> MemoryStore:
        noted.append(threads)
        return MemoryStore(url.replace("noted", "memory"), options, threads=threads)

    monkeypatch.setitem(registry._factories, "noted", make)
    return noted


@pytest.fixture(scope="module")
def endpoint() -> Iterator[Endpoint]:
    with sink(keep=True) as endpoint:
        yield endpoint


def test_every_save_load_and_command_reads_it(file: Path, opened: list[int]) -> None:
    file.write_text('["noted://settings"]\nthreads = 3\n')
    state = {"w": torch.arange(9.0)}
    uses: dict[str, Callable[[], object]] = {
        "save": lambda: ckpt.save(state, "noted://settings/run/step-1"),
        "async_save": lambda: ckpt.async_save(state, "noted://settings/run/step-2").result(),
        "load": lambda: ckpt.load(state, "noted://settings/run/step-1"),
        "manager": lambda: manage("noted://settings/managed", state),
        "verify": lambda: run("verify", "noted://settings/run/step-1"),
        "inspect": lambda: run("inspect", "noted://settings/run/step-1"),
        "cp": lambda: run("cp", "noted://settings/run/step-1", "noted://settings/copy"),
        "diff": lambda: run("diff", "noted://settings/run/step-1", "noted://settings/copy"),
        "ls": lambda: run("ls", "noted://settings/run"),
        "cat": lambda: run("cat", "noted://settings/run/step-1", "w"),
        "rm": lambda: run("rm", "noted://settings/copy"),
    }
    for name, use in uses.items():
        opened.clear()
        done = use()
        assert getattr(done, "code", 0) == 0, (name, done)
        assert opened, name
        assert set(opened) == {3}, name


def manage(root: str, state: dict[str, Any]) -> None:
    with CheckpointManager(root, save=1) as manager:
        manager.step(1, state)
    assert torch.equal(state["w"], torch.arange(9.0))


def test_what_a_caller_says_wins(file: Path, opened: list[int]) -> None:
    file.write_text(
        f'["noted://settings"]\nthreads = 3\nmemory_budget_bytes = {300 * MIB}\n["s3://bucket"]\npart_size_bytes = {9 * MIB}\n'
    )
    state = {"w": torch.arange(9.0)}
    ckpt.save(state, "noted://settings/said", threads=5)
    ckpt.load(state, "noted://settings/said", threads=6)
    assert set(opened) == {5, 6}
    writer = ckpt.CheckpointWriter("noted://settings/said")
    assert writer._pool.budget_bytes == 300 * MIB
    writer = ckpt.CheckpointWriter("noted://settings/said", memory_budget_bytes=200 * MIB)
    assert writer._pool.budget_bytes == 200 * MIB
    assert ckpt.CheckpointReader("noted://other")._pool.budget_bytes == DEFAULT_MEMORY_BUDGET_BYTES
    given = {"part_size_bytes": 7 * MIB}
    assert part_size_of(open_store("s3://bucket/a")) == 9 * MIB
    assert part_size_of(open_store("s3://bucket/a", given)) == 7 * MIB
    assert given == {"part_size_bytes": 7 * MIB}


def part_size_of(store: Any) -> int:
    size: int = store._s3.options["part_size_bytes"]
    return size


def test_the_size_of_parts_is_that_of_uploads_and_of_reads(file: Path, endpoint: Endpoint) -> None:
    options = {"endpoint_url": endpoint.url, "key": ACCESS_KEY, "secret": SECRET_KEY, "region": REGION}
    state = {"w": torch.randn(6, MIB)}  # 24 MiB
    requests = {}
    for size_mib in (6, 12):
        file.write_text(f'["s3://{BUCKET}"]\npart_size_bytes = {size_mib * MIB}\n')
        url = f"s3://{BUCKET}/parts/step-{size_mib}"
        endpoint.reset()
        ckpt.save(state, url, storage_options=options)
        parts = endpoint.report()["requests"]["UploadPart"]
        endpoint.reset()
        ckpt.load({"w": torch.empty(6, MIB)}, url, storage_options=options)
        requests[size_mib] = parts, endpoint.report()["requests"]["GetObject"]
    (parts, gets), (large_parts, large_gets) = requests[6], requests[12]
    assert (parts, large_parts) == (5, 3)  # of 24 MiB and what stands around a tensor
    assert gets - large_gets == 2
    assert run("verify", url, *options_of(options)).code == 0


def test_files_of_a_rank(file: Path, tmp_path: Path) -> None:
    state = {f"w{number}": torch.zeros(4 * MIB) for number in range(4)}  # 64 MiB: two files are worth it
    written = {}
    for files in (1, 2):
        file.write_text(f'["{tmp_path}"]\nfiles_per_rank = {files}\n')
        place = tmp_path / f"step-{files}"
        ckpt.save(state, place)
        written[files] = len([*place.rglob("*.distcp")])
    assert written == {1: 1, 2: 2}


def test_the_longer_prefix_wins_key_by_key(file: Path, tmp_path: Path) -> None:
    file.write_text(
        '["s3://b/run"]\nthreads = 2\n\n["s3://"]\nthreads = 1\nfiles_per_rank = 7\n\n'
        '["S3://b/run/a/"]\nthreads = 3\n\n["~/data"]\nthreads = 4\n\n["file:///mnt/x"]\nthreads = 5\n'
    )
    assert settings_for("s3://b/runner") == Settings(threads=1, files_per_rank=7)
    assert settings_for("s3://b/run/step-1") == Settings(threads=2, files_per_rank=7)
    assert settings_for("s3://b/run/a") == Settings(threads=3, files_per_rank=7)
    assert settings_for(Path.home() / "data" / "run").threads == 4
    assert settings_for("/mnt/x/../x/step").threads == 5
    assert settings_for("/mnt/xy") == settings_for("cos://b") == Settings()
    with override(Settings(threads=9)):
        assert settings_for("s3://b/run") == Settings(threads=9)
    assert settings_for("s3://b/run").threads == 2


def test_the_variable_names_the_file(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text('["s3://b"]\nthreads = 2\n')
    other = tmp_path / "other.toml"
    other.write_text('["s3://b"]\nthreads = 8\n')
    assert settings_for("s3://b").threads == 2
    monkeypatch.setenv("CKPT_CONFIG", str(other))
    assert settings_for("s3://b").threads == 8
    other.write_text('["s3://b"]\nthreads = 16\n')
    assert settings_for("s3://b").threads == 16
    monkeypatch.setenv("CKPT_CONFIG", "")
    assert settings_for("s3://b") == Settings()
    monkeypatch.setenv("CKPT_CONFIG", str(tmp_path / "gone.toml"))
    with pytest.raises(
        ConfigurationError, match=r"gone\.toml \(CKPT_CONFIG names it\) cannot be read: No such file"
    ):
        settings_for("s3://b")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('["s3://b"]\nthread = 2\n', r"ckpt\.toml: \['s3://b'\]: unknown key 'thread'; known are threads"),
        ('["s3://b"]\nthreads = 0\n', "threads must be a whole number from 1 to 4,096, not 0"),
        ('["s3://b"]\nthreads = true\n', "threads must be a whole number"),
        ('["s3://b"]\nthreads = "8"\n', "threads must be a whole number from 1 to 4,096, not '8'"),
        (f'["s3://b"]\nthreads = 0x{"f" * 9000}\n', "not one of so many digits"),
        ('["s3://b"]\nmemory_budget_bytes = 1000\n', "memory_budget_bytes must be"),
        ('["s3://b"]\npart_size_bytes = 5e9\n', "part_size_bytes must be"),
        ("threads = 2\n", "'threads'.* stands in no section"),
        ("[runs]\nthreads = 2\n", "a section is named by a URL or an absolute path"),
        ('["s3://b"]\n["s3://b/"]\n', "two sections for this place"),
        ('["s3://b"\n', "not valid TOML"),
        ('["s3://b"]\nthreads = 2\nthreads = 3\n', "not valid TOML"),
        ("#" * (MIB + 1), "larger than 1 MiB"),
        ("\udcff", "not valid TOML"),
    ],
)
def test_mistakes_name_file_and_key(file: Path, text: str, complaint: str) -> None:
    file.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigurationError, match=complaint) as raised:
        ckpt.save({"w": torch.zeros(1)}, file.parent / "step-1")
    assert "ckpt.toml" in str(raised.value)
    assert not (file.parent / "step-1").exists()
    ran = run("ls", file.parent)
    assert ran.code == 2
    assert "ckpt.toml" in ran.err


def test_a_folder_is_no_file_of_settings(file: Path) -> None:
    file.mkdir()
    with pytest.raises(ConfigurationError, match="not a file of settings"):
        settings_for("s3://b")


def test_the_limits_are_those_of_the_arguments() -> None:
    assert LIMITS["threads"] == (1, registry._MAX_THREADS)
    assert LIMITS["memory_budget_bytes"][0] == MIN_MEMORY_BUDGET_BYTES
