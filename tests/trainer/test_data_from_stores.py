"""Token and Parquet files in stores: the same batches as from local files, a bounded and checked cache, and outages."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from support.proxy import FaultProxy

from ckpt.backends.base import ObjectStat, put_bytes
from ckpt.backends.memory import MemoryStore
from ckpt.backends.registry import open_store
from ckpt.errors import AccessDenied, ConfigurationError, NotFound, StorageError, StorageUnavailable
from ckpt.options import DataOptions
from ckpt.trainer_integration.data_store.disk_cache import BLOCK_BYTES, DiskCache
from ckpt.trainer_integration.dataloader import RescalableLoader
from ckpt.trainer_integration.dataset import ShardedDataset
from ckpt.trainer_integration.parquet_files import ParquetFiles
from ckpt.trainer_integration.sources import Source
from ckpt.trainer_integration.token_files import TokenFiles, write_token_file

LIMIT_BYTES = 400_000


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """400 documents, one of them in several blocks, as token files, `.npy` and Parquet."""
    folder = tmp_path_factory.mktemp("data")
    random = np.random.default_rng(0)
    lengths = [*random.integers(1, 600, 399).tolist(), 100_000]
    documents = [random.integers(1, 50_000, length).astype(np.uint16) for length in lengths]
    write_token_file(folder / "a.bin", documents[:150])
    write_token_file(folder / "b.bin", documents[150:])
    np.save(folder / "c.npy", np.arange(1, 20_001, dtype=np.int32))
    table = pyarrow.table(
        {"other": [0] * 400, "tokens": pyarrow.array(documents, pyarrow.list_(pyarrow.uint16()))}
    )
    pyarrow.parquet.write_table(table, folder / "p.parquet", row_group_size=25)
    return folder


@pytest.fixture
def stored(files: Path) -> Iterator[str]:
    store = open_store("memory://data")
    for path in files.iterdir():
        put_bytes(store, path.name, path.read_bytes())
    yield "memory://data"
    store.close()


def token_files(folder: Any, **options: Any) -> Source:
    return TokenFiles([f"{folder}/a.bin", f"{folder}/b.bin"], **options)


def npy_files(folder: Any, **options: Any) -> Source:
    return TokenFiles([f"{folder}/c.npy"], document_tokens=333, **options)


def parquet_files(folder: Any, **options: Any) -> Source:
    return ParquetFiles([f"{folder}/p.parquet"], "tokens", dtype=np.uint16, **options)


SOURCES = [token_files, npy_files, parquet_files]


def loader_of(source: Any, **options: Any) -> RescalableLoader:
    given = {"sequence_length": 200, "shards": 12, "epochs": 1, "pad_token": 0, "eos_token": 0, **options}
    workers = given.pop("num_workers", 0)
    return RescalableLoader(ShardedDataset(source, **given), batch_size=4, num_workers=workers)


def batches_of(source: Any, **options: Any) -> list[Any]:
    return [batch.tolist() for batch in loader_of(source, **options)]


def used_bytes(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.glob("*"))


@pytest.mark.parametrize("make", SOURCES)
@pytest.mark.parametrize("caches", ["memory", "disk", pytest.param("too small", marks=pytest.mark.slow)])
def test_batches_are_those_of_local_files(
    files: Path, stored: str, tmp_path: Path, make: Callable[..., Source], caches: str
) -> None:
    options: dict[str, Any] = {} if caches == "memory" else {"disk_cache": tmp_path / "cache"}
    if caches == "too small":
        options |= {"disk_cache_bytes": LIMIT_BYTES, "cache_bytes": 150_000}
    local = batches_of(make(files))
    source = make(stored, **options)
    assert batches_of(source) == local
    assert batches_of(pickle.loads(pickle.dumps(source))) == local
    if caches != "memory":
        assert used_bytes(tmp_path / "cache") <= LIMIT_BYTES or caches == "disk"


def test_a_mix_of_sources_is_that_of_local_files(files: Path, stored: str) -> None:
    """One has unknown lengths, so all are read by shards."""
    local = batches_of({"tokens": token_files(files), "rows": parquet_files(files)})
    assert batches_of({"tokens": token_files(stored), "rows": parquet_files(stored)}) == local


@pytest.mark.parametrize("make", [token_files, parquet_files])
def test_a_run_resumes_from_local_files_in_a_store(
    files: Path, stored: str, make: Callable[..., Source]
) -> None:
    """The data are recognised by their contents."""
    first = loader_of(make(files))
    batches = iter(first)
    read = [next(batches).tolist() for _ in range(20)]
    second = loader_of(make(stored))
    second.load_state_dict(first.state_dict())
    assert [*read, *(batch.tolist() for batch in second)] == batches_of(make(files))


@pytest.mark.parametrize("make", [token_files, parquet_files])
def test_a_damaged_disk_cache_is_read_again(
    files: Path, stored: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, make: Callable[..., Source]
) -> None:
    local = batches_of(make(files))
    assert batches_of(make(stored, disk_cache=tmp_path)) == local
    for number, path in enumerate(sorted(tmp_path.iterdir())):
        data = bytearray(path.read_bytes())
        data[5] ^= 1
        path.write_bytes(data if number % 2 else data[: len(data) // 2])
    assert batches_of(make(stored, disk_cache=tmp_path)) == local
    assert "is damaged; it is read again from its store" in caplog.text


def test_a_warm_disk_cache_needs_no_reads_of_the_store(
    files: Path, stored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = batches_of(token_files(stored, disk_cache=tmp_path))
    source = token_files(stored, disk_cache=tmp_path)
    monkeypatch.setattr("ckpt.backends.memory.MemoryStore.read_into", _refuse)
    assert batches_of(source) == local


def _refuse(*_: Any) -> None:
    raise AssertionError("the store is read")


def test_the_disk_cache_keeps_its_bound_after_kills(tmp_path: Path) -> None:
    """Processes that write at the same time are killed at any moment; what they leave counts, and is removed."""
    context = multiprocessing.get_context("fork")
    for turn in range(3):
        writers = [context.Process(target=_write, args=(str(tmp_path), turn, number)) for number in range(3)]
        for writer in writers:
            writer.start()
        deadline_s = time.monotonic() + 0.3
        while time.monotonic() < deadline_s:
            assert _bytes_now(tmp_path) <= 10 * BLOCK_BYTES
        for writer in writers:
            os.kill(writer.pid or 0, signal.SIGKILL)
            writer.join()
    cache = DiskCache(str(tmp_path), 10 * BLOCK_BYTES)
    data = bytes(BLOCK_BYTES)
    assert all(cache.write(f"last-{number}", memoryview(data)) for number in range(20))
    assert bytes(cache.read("last-19", 0, BLOCK_BYTES) or b"") == data
    assert not [*tmp_path.glob(".*.tmp")]


def _bytes_now(folder: Path) -> int:
    total = 0
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


def _write(folder: str, turn: int, number: int) -> None:
    cache = DiskCache(folder, 10 * BLOCK_BYTES)
    count = 0
    while True:
        cache.write(f"{turn}-{number}-{count}", memoryview(os.urandom(BLOCK_BYTES)))
        count += 1


def test_a_full_disk_cache_stops_nothing(files: Path, stored: str, tmp_path: Path) -> None:
    """A file is in the place of its folder: nothing can be kept."""
    (tmp_path / "file").write_text("")
    assert batches_of(token_files(stored, disk_cache=tmp_path / "file")) == batches_of(token_files(files))


def test_blocks_that_the_disk_cannot_keep_are_fetched_once(
    files: Path, stored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many of them come at a time."""
    (tmp_path / "file").write_text("")
    reads: list[str] = []
    read_into = MemoryStore.read_into

    def noted(store: MemoryStore, key: str, *where: Any) -> None:
        reads.append(key)
        read_into(store, key, *where)

    monkeypatch.setattr(MemoryStore, "read_into", noted)
    batches_of(token_files(stored, disk_cache=tmp_path / "file"))
    assert sorted(reads) == ["a.bin", "a.bin.offsets.npy", "b.bin", "b.bin.offsets.npy"]


def test_files_of_others_in_the_folder_of_the_cache_are_left_alone(
    files: Path, stored: str, tmp_path: Path
) -> None:
    """A user gives a folder with other things in it."""
    others = {
        name: name.encode() * 30_000 for name in ("count", "notes.txt", "a.tmp", ".b.0123456789abcdef.tmp")
    }
    for name, data in others.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "folder").mkdir()
    options = {"disk_cache": tmp_path, "disk_cache_bytes": LIMIT_BYTES, "cache_bytes": 150_000}
    assert batches_of(token_files(stored, **options)) == batches_of(token_files(files))
    assert {name: (tmp_path / name).read_bytes() for name in others} == others
    own = sorted(path.name for path in tmp_path.iterdir() if path.name not in {*others, "folder"})
    assert len(own) > 1
    assert all(name.startswith("ckpt-data-") for name in own)


def test_what_cannot_be_removed_counts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Folders of such names cannot be unlinked, as files of another user cannot."""
    limit_bytes = 2 * BLOCK_BYTES
    for number in range(16):
        (tmp_path / f"ckpt-data-{number}.blocks").mkdir()
    assert not DiskCache(str(tmp_path), limit_bytes).write("x", memoryview(bytes(BLOCK_BYTES)))
    assert "cannot be removed to make room" in caplog.text


def test_objects_that_show_no_version_are_read_again_by_the_next_run(
    files: Path, stored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stat = MemoryStore.stat

    def bare(store: MemoryStore, key: str) -> ObjectStat:
        return dataclasses.replace(stat(store, key), version=None, modified_at_s=None)

    monkeypatch.setattr(MemoryStore, "stat", bare)
    first = batches_of(npy_files(stored, disk_cache=tmp_path))
    np.save(files / "d.npy", np.arange(2, 20_002, dtype=np.int32))
    store = open_store(stored)
    put_bytes(store, "c.npy", (files / "d.npy").read_bytes())
    store.close()
    second = batches_of(npy_files(stored, disk_cache=tmp_path))
    assert second != first
    assert second == batches_of(npy_files(stored))


@pytest.mark.parametrize(
    ("url", "error", "message"),
    [
        ("memory://data/x.bin", NotFound, r"memory://data/x\.bin: the store has no such object"),
        ("memory://data/c.npy", NotFound, r"c\.npy\.offsets\.npy is missing; write it with"),
        ("memory://x.bin", ConfigurationError, "does not name a file in a bucket or folder"),
        ("s3:/bucket/a.bin", ConfigurationError, "looks like a URL that went through pathlib"),
    ],
)
def test_what_cannot_be_read_is_named(stored: str, url: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        TokenFiles([url])


# -- over a network ----------------------------------------------------------------------------------------


@pytest.fixture
def remote(files: Path, proxy: FaultProxy) -> tuple[str, dict[str, Any]]:
    store = open_store("s3://bucket/data", proxy.server.options)
    for path in files.iterdir():
        put_bytes(store, path.name, path.read_bytes())
    store.close()
    return "s3://bucket/data", {"storage_options": proxy.options}


@pytest.mark.parametrize(
    ("fault", "workers"), [("reset", 0), ("stall", 0), pytest.param("reset", 2, marks=pytest.mark.long)]
)
def test_a_store_that_stops_costs_no_batch(
    files: Path, remote: tuple[str, dict[str, Any]], proxy: FaultProxy, fault: str, workers: int
) -> None:
    """Requests get no answer for a while; the data come when it is back."""
    url, options = remote
    options["storage_options"]["read_timeout_s"] = 0.3
    source = token_files(url, **options)
    local = batches_of(token_files(files))
    begin = len(proxy.calls)
    proxy.rule = lambda call: fault if begin < call.number <= begin + 3 else "pass"
    assert batches_of(source, num_workers=workers) == local


def test_a_store_that_stays_away_is_an_error_of_the_store(
    remote: tuple[str, dict[str, Any]], proxy: FaultProxy
) -> None:
    """It is no document that cannot be read, and none is skipped; the iteration continues when the store is back."""
    url, options = remote
    source = token_files(url, **options)
    loader = loader_of(source)
    proxy.rule = lambda call: 500
    with pytest.raises(StorageUnavailable, match="s3://bucket/data"):
        list(loader)
    proxy.rule = lambda call: "pass"
    assert len(list(loader)) > 100


FAULTS = {
    "same size": "was replaced after it was opened",
    "smaller": "was replaced after it was opened",
    "larger": "was replaced after it was opened",
    "gone": "there is no such object",
    "denied": "credentials",
}


@pytest.mark.parametrize(
    ("make", "name", "cache_bytes", "begun"),
    [(token_files, "b.bin", 100_000, 1), (parquet_files, "p.parquet", 1 << 20, 0)],
)
@pytest.mark.parametrize("fault", FAULTS)
def test_an_object_that_changes_in_a_run_is_an_error(
    files: Path, remote: tuple[str, dict[str, Any]], proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch,
    make: Any, name: str, cache_bytes: int, begun: int, fault: str,
) -> None:  # fmt: skip
    """It names the object, is raised again, and never counts as a bad document; then the data go on where they were."""
    monkeypatch.setattr("ckpt.trainer_integration.data_store.block_reader._LARGE_SPAN", 1)
    url, options = remote
    data = (files / name).read_bytes()
    given = {"options": DataOptions(skip_bad_documents=9)}
    local = batches_of(make(files), **given)
    loader = loader_of(make(url, **options, cache_bytes=cache_bytes), **given)
    first = iter(loader)
    read = [next(first).tolist() for _ in range(begun)]
    store = open_store(url, proxy.server.options)
    later = {"same size": bytes(len(data)), "smaller": data[:2000], "larger": data + data}.get(fault)
    if later is not None:
        put_bytes(store, name, later)
    elif fault == "gone":
        store.delete([name])
    else:
        proxy.rule = lambda call: 403 if call.key.endswith(name) else "pass"
    with pytest.raises(StorageError, match=rf"s3://bucket/data/{name}.*{FAULTS[fault]}"):
        read.extend(batch.tolist() for batch in first)
    with pytest.raises(StorageError, match=FAULTS[fault]):
        next(first)
    assert read == local[: len(read)]
    put_bytes(store, name, data)
    store.close()
    proxy.rule = lambda call: "pass"
    rest = [batch.tolist() for batch in itertools.islice(loader, 5)]
    assert rest == local[len(read) : len(read) + 5]


def test_an_object_that_is_denied_is_named_when_it_is_opened(
    remote: tuple[str, dict[str, Any]], proxy: FaultProxy
) -> None:
    proxy.rule = lambda call: 403 if call.key.endswith("b.bin") else "pass"
    with pytest.raises(AccessDenied, match=r"s3://bucket/data/b\.bin: .*credentials"):
        token_files(remote[0], **remote[1])


def test_folders_of_a_bucket_share_one_store(
    files: Path, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client of an SDK takes a twentieth of a second to make, and memory."""
    made: list[str] = []

    def noted(url: str, *given: Any, **options: Any) -> Any:
        made.append(url)
        return open_store(url, *given, **options)

    monkeypatch.setattr("ckpt.trainer_integration.data_store.block_reader.open_store", noted)
    store = open_store("s3://bucket", proxy.server.options)
    for path in files.glob("[ab].bin*"):
        for folder in ("one", "two"):
            put_bytes(store, f"{folder}/{path.name}", path.read_bytes())
    store.close()
    given = {"storage_options": {**proxy.options, "max_attempts": 3}}
    sources = {folder: token_files(f"s3://bucket/{folder}", **given) for folder in ("one", "two")}
    assert batches_of(sources) == batches_of({"one": token_files(files), "two": token_files(files)})
    assert made == ["s3://bucket"]
