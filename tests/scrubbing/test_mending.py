"""`ckpt scrub --from`: damaged objects are put again, with what is damaged of them from a second place."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import file_names, options_of, run, run_json
from support.damage import BLOCK_BYTES, blocks_of, flip_blocks, save_small_blocks
from support.ranks import exit_code_of
from support.servers import S3Server
from support.strict_s3 import StrictS3

import ckpt
from ckpt.backends import posix
from ckpt.backends.posix import PosixStore
from ckpt.backends.registry import open_store
from ckpt.errors import ConfigurationError, StorageUnavailable
from ckpt.scrubbing import ledger
from ckpt.scrubbing.scrub import Scrubbed

RECORD = "ckpt-scrub.json"


@pytest.fixture(params=[pytest.param("mirrored", marks=pytest.mark.long), "copied"])
def second(request: pytest.FixtureRequest, place: Path, tmp_path: Path) -> Path:
    """The same checkpoint in another place: file by file, or by `ckpt cp`, with names of its own."""
    other = tmp_path / "second"
    if request.param == "mirrored":
        shutil.copytree(place, other)
    else:
        ckpt.copy(place, other)
    return other


@pytest.fixture
def place(tmp_path: Path) -> Path:
    save_small_blocks(tmp_path / "run" / "step-1", 40, tags={"step": "1"})
    return tmp_path / "run" / "step-1"


@pytest.fixture(autouse=True)
def _noted_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if each step took long."""
    monkeypatch.setattr(ledger, "_WRITE_EVERY_S", 0.0)


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in file_names(folder) if name != RECORD}


def outcome(result: Scrubbed) -> list[tuple[str, int]]:
    return [(each.state, each.blocks) for done in result.checkpoints for each in done.mended]


def data_file(place: Path) -> Path:
    return blocks_of(place)[0][0]


def _flip_three(place: Path) -> int:
    blocks = blocks_of(place)
    flip_blocks([blocks[0], blocks[7], blocks[-1]])
    return 3


def _cut_short(place: Path) -> int:
    path, size = data_file(place), data_file(place).stat().st_size
    os.truncate(path, size - 3 * BLOCK_BYTES - 5)
    return 4 if size % BLOCK_BYTES > 5 or size % BLOCK_BYTES == 0 else 5


def _make_long(place: Path) -> int:
    with data_file(place).open("ab") as file:
        file.write(b"more")
    return 0


def _remove(place: Path) -> int:
    blocks = len([path for path, _ in blocks_of(place) if path == data_file(place)])
    data_file(place).unlink()
    return blocks


def _empty_the_rank(place: Path) -> int:
    blocks = len(blocks_of(place))
    shutil.rmtree(data_file(place).parent)
    return blocks


@pytest.mark.parametrize("damage", [_flip_three, _cut_short, _make_long, _remove, _empty_the_rank])
def test_what_is_damaged_is_mended(place: Path, second: Path, damage: Callable[[Path], int]) -> None:
    """To the bit what was saved, from damaged blocks alone; first `--dry-run` says so."""
    before = contents(place)
    blocks = damage(place)
    after = contents(place)
    assert run("scrub", place).code == 1
    ran = run_json("scrub", place, "--from", second, "--dry-run", code=1)
    assert contents(place) == after
    states = {each["state"] for each in ran["checkpoints"][0]["mended"]}
    assert states == {"would be mended"}
    result = ckpt.scrub(place, repair_from=second)
    assert (result.ok, result.finished) == (True, True)
    assert contents(place) == before
    assert sum(number for _, number in outcome(result)) == blocks
    assert {state for state, _ in outcome(result)} == {"mended"}
    flip_blocks(blocks_of(place)[:1])  # found and mended in the same pass once more, as it is known
    assert run("scrub", place).code == 1
    assert ckpt.scrub(place, repair_from=second).ok
    assert ckpt.scrub(place, status_only=True).ok
    again = run_json("scrub", place, "--from", second)
    assert (again["damaged"], again["checkpoints"][0]["mended"]) == ([], [])
    assert ckpt.verify(place).ok


def test_records_are_mended(place: Path, second: Path) -> None:
    """Also from a copy, whose records have other names in them: their checksum tells whether they are the same."""
    before = contents(place)
    for path in sorted(place.rglob("*.json")) + sorted(place.rglob("*.index")):
        if path.name in (RECORD, "commit.json"):
            continue
        damaged = blocks_of(place)[3]
        path.write_bytes(path.read_bytes()[:-9])
        flip_blocks([damaged])  # which a damaged manifest hides
        result = ckpt.scrub(place, repair_from=second)
        assert (result.ok, contents(place)) == (True, before), result
    shutil.copy(place / "commit.json", place / "whole")
    (place / "commit.json").write_bytes(b"{}")
    ran = run_json("scrub", place, "--from", second, code=1)
    assert [(each["state"], each["mended"]) for each in ran["checkpoints"]] == [("damaged", [])]


def test_only_what_is_damaged_is_read_from_there(
    place: Path, second: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each place may have blocks that the other has lost; what both have lost stays as it is."""
    ours, theirs = blocks_of(place), blocks_of(second)
    flip_blocks([ours[5], ours[9]])
    flip_blocks([theirs[6]])
    counted: list[int] = []
    original = PosixStore.read_into

    def read_into(store: PosixStore, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        if store.url == str(second) and key.endswith(".distcp"):
            counted.append(sum(buffer.nbytes for buffer in buffers))
        original(store, key, offset, buffers)

    monkeypatch.setattr(PosixStore, "read_into", read_into)
    assert ckpt.scrub(place, repair_from=second).ok
    assert counted == [BLOCK_BYTES] * 2
    assert ckpt.scrub(second, repair_from=place).ok
    flip_blocks([ours[5], theirs[5]])
    before = contents(place)
    ran = run("scrub", place, "--from", second)
    assert (ran.code, "damaged in the second place too" in ran.out) == (1, True), ran.out
    assert contents(place) == before
    assert not list(place.rglob(".*tmp"))


def test_another_checkpoint_there_is_no_help(place: Path, tmp_path: Path, stock_place: Path) -> None:
    flip_blocks(blocks_of(place)[:1])
    before = contents(place)
    save_small_blocks(tmp_path / "other", 40, seed=1)
    for second, reason in [
        (tmp_path / "other", "does not hold the same checkpoint"),
        (stock_place, "no checkpoint is committed there"),
    ]:
        ran = run("scrub", place, "--from", second)
        assert (ran.code, reason in ran.out) == (1, True), ran.out
    assert contents(place) == before
    for nothing in tmp_path / "nothing", "memory://nothing/here":  # a mistake shows at the start
        ran = run("scrub", place, "--from", nothing)
        assert (ran.code, ran.out, "is that the second place?" in ran.err) == (3, "", True), ran
    for wrong in (
        f"--from {place}",
        f"--from {tmp_path / 'other'} --status",
        "--from-storage-options {}",
        "--status --bytes 1MB",
        "--status --for 1h",
        "--status --dry-run",
        "--status --max-bandwidth 1MB/s",
    ):
        assert run("scrub", place, *wrong.split(" ")).code == 2, wrong


def test_a_removed_checkpoint_is_not_brought_back(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = Path(shutil.copytree(place, tmp_path / "second"))
    flip_blocks(blocks_of(place)[:1])
    putting = PosixStore.put

    def put(store: PosixStore, key: str, *arguments: Any, **more: Any) -> None:
        if key.endswith(".distcp"):
            ckpt.remove(place)
        putting(store, key, *arguments, **more)

    monkeypatch.setattr(PosixStore, "put", put)
    result = ckpt.scrub(place.parent, repair_from=second.parent)
    assert [each.state for each in result.checkpoints] == ["checked"]  # `second` has no step-1
    second.rename(second.parent / "step-1")
    result = ckpt.scrub(place.parent, repair_from=tmp_path)
    assert [each.state for each in result.checkpoints] == ["gone"]
    garbage = ckpt.collect_garbage(place.parent, grace_s=-10)  # what was put too late is a leftover
    assert [item.key.rpartition(".")[2] for item in garbage.items] == ["distcp"]
    assert not (place.parent / RECORD).exists()  # nothing is left to remember


def test_what_others_refer_to_is_mended_where_it_lies(tmp_path: Path) -> None:
    root, mirror = tmp_path / "run", tmp_path / "mirror"
    state = {f"w{n}": torch.arange(20_000.0) + n for n in range(4)}
    ckpt.save(state, root / "a", digests=True, no_dist=True)
    ckpt.save({**state, "w0": torch.zeros(20_000)}, root / "b", base=root / "a", no_dist=True)
    shutil.copytree(root, mirror)
    before = contents(root)
    flip_blocks(blocks_of(root / "a")[:1])
    result = ckpt.scrub(root, repair_from=mirror)
    assert (result.ok, contents(root)) == (True, before)
    assert [(each.path, len(each.mended)) for each in result.checkpoints] == [("a", 1), ("b", 0)]


def test_killed_while_it_mends(place: Path, tmp_path: Path) -> None:
    """The object is the old one or the mended one; the next scrub ends the work."""
    second = Path(shutil.copytree(place, tmp_path / "second"))
    good = data_file(place).read_bytes()
    flip_blocks(blocks_of(place)[3:5])
    bad = data_file(place).read_bytes()
    seen = set()
    for point in ("read", "write", "publish", "published"):
        data_file(place).write_bytes(bad)
        assert exit_code_of(_killed_mender, str(place), str(second), point) == -signal.SIGKILL
        seen.add(data_file(place).read_bytes() == good)
        assert data_file(place).read_bytes() in (good, bad)
        assert ckpt.scrub(place, repair_from=second).ok
        assert data_file(place).read_bytes() == good
    assert seen == {True, False}
    garbage = ckpt.collect_garbage(place, grace_s=-10)
    assert all(item.unfinished for item in garbage.items)
    assert ckpt.verify(place).strays == []


@pytest.mark.long
def test_killed_while_it_mends_a_bucket(place: Path, tmp_path: Path, server: StrictS3) -> None:
    """Between two parts of an upload: the object is the old one, and the upload is what `ckpt gc` aborts."""
    shutil.rmtree(place)
    save_small_blocks(place, 600)
    options = {**server.options, "part_size_bytes": 5 << 20}
    url = "s3://bucket/run/step-1"
    ckpt.copy(place, url, destination_options=options)
    name, good = max(server.objects.items(), key=lambda each: len(each[1]))
    bad = good[:9] + b"!" + good[10:-9] + b"!" + good[-8:]
    for count in (1, 2):
        server.objects[name] = bad
        killed = exit_code_of(_killed_mender, url, str(place), "read", options, count)
        assert killed == -signal.SIGKILL
        assert server.objects[name] == bad
        assert ckpt.scrub(url, storage_options=options, repair_from=place, repair_options={}).ok
        assert server.objects[name] == good
    ckpt.collect_garbage("s3://bucket/run", storage_options=options, grace_s=-10)
    assert not server.uploads
    assert ckpt.verify(url, storage_options=options).strays == []


def _killed_mender(
    place: str, second: str, point: str, options: dict[str, Any] | None = None, count: int = 1
) -> None:
    left = [count]

    def die(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    reading, writing, publishing = PosixStore.read_into, PosixStore._write, posix._publish

    def read_into(store: PosixStore, key: str, *arguments: Any) -> None:
        reading(store, key, *arguments)
        if point == "read" and store.url == second and key.endswith(".distcp"):
            left[0] -= 1
            if left[0] == 0:
                die()

    def write(store: PosixStore, temporary: str, body: Any, key: str) -> None:
        writing(store, temporary, body, key)
        if point == "write" and key.endswith(".distcp"):
            die()

    def publish(temporary: str, path: str, mode: Any) -> None:
        is_data = path.endswith(".distcp")
        if point == "publish" and is_data:
            die()
        publishing(temporary, path, mode)
        if point == "published" and is_data:
            die()

    store_class: Any = PosixStore
    module: Any = posix
    store_class.read_into, store_class._write, module._publish = read_into, write, publish
    ckpt.scrub(place, storage_options=options, repair_from=second, repair_options={})


def test_mended_in_a_bucket(place: Path, server: StrictS3) -> None:
    """From a folder here, and back; a server out of reach is no reason to call anything mended."""
    url = "s3://bucket/run/step-1"
    ckpt.copy(place, url, destination_options=server.options)
    store = open_store(url, server.options)
    key = next(stat.key for stat in store.list() if stat.key.endswith(".distcp"))
    name = next(name for name in server.objects if name.endswith(key))
    good = server.objects[name]
    server.objects[name] = good[:70_000] + b"!" + good[70_001:]
    options = options_of(server.options)
    assert run("scrub", "s3://bucket/run", *options).code == 1
    empty = ["--from-storage-options", "{}"]
    ran = run_json("scrub", "s3://bucket/run", *options, "--from", place.parent, *empty)
    assert [each["blocks"] for each in ran["checkpoints"][0]["mended"]] == [1]
    assert server.objects[name] == good
    store.close()

    flip_blocks(blocks_of(place)[:2])
    ran = run_json(
        "scrub", place.parent, "--from", "s3://bucket/run", *["--from-storage-options", options[1]]
    )
    assert [each["blocks"] for each in ran["checkpoints"][0]["mended"]] == [2]
    flip_blocks(blocks_of(place)[:2])
    closed = {
        **server.options,
        "endpoint_url": "http://127.0.0.1:9",
        "unreachable_timeout_s": 0.1,
        "max_attempts": 1,
    }
    result = ckpt.scrub(place.parent, repair_from="s3://bucket/run", repair_options=closed)
    assert [state for state, _ in outcome(result)] == ["not mended"]
    assert result.damaged == ["step-1"]


def test_scrubbed_on_s3(place: Path, s3: S3Server) -> None:
    """The same on moto: the record, damage, and an object of several parts."""
    bucket = s3.new_bucket()
    root, url = f"s3://{bucket}/run", f"s3://{bucket}/run/step-1"
    options = {**s3.options, "part_size_bytes": 5 << 20}
    save_small_blocks(url, 200, storage_options=options)
    shutil.rmtree(place)
    ckpt.copy(url, place, storage_options=options, destination_options={})
    client = s3.client()
    key = next(
        stat["Key"] for stat in client.list_objects_v2(Bucket=bucket)["Contents"] if "distcp" in stat["Key"]
    )
    good = client.get_object(Bucket=bucket, Key=key)["Body"].read()
    client.put_object(Bucket=bucket, Key=key, Body=good[:100] + b"\0\1" + good[102:-9])
    with pytest.raises(ConfigurationError):  # those of a bucket, for a folder
        ckpt.scrub(root, storage_options=options, repair_from=place.parent)
    damaged = ckpt.scrub(root, storage_options=options, max_bytes=1e9)
    assert damaged.damaged == ["step-1"]
    result = ckpt.scrub(root, storage_options=options, repair_from=place.parent, repair_options={})
    assert result.ok, result
    assert client.get_object(Bucket=bucket, Key=key)["Body"].read() == good
    assert ckpt.verify(url, storage_options=options).strays == []
    s3.drop_bucket(bucket)


def test_bad_sectors_are_mended(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    second = Path(shutil.copytree(place, tmp_path / "second"))
    (path, bad), original = blocks_of(place)[4], PosixStore.read_into
    inode = path.stat().st_ino

    def read_into(store: PosixStore, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        file = Path(store.url, key)
        stop = offset + sum(buffer.nbytes for buffer in buffers)
        if file.name == path.name and file.stat().st_ino == inode and offset <= bad < stop:
            raise StorageUnavailable("Input/output error", url=store.url, key=key)
        original(store, key, offset, buffers)

    monkeypatch.setattr(PosixStore, "read_into", read_into)
    assert ckpt.scrub(place).damaged == [""]
    assert outcome(ckpt.scrub(place, repair_from=second)) == [("mended", 1)]
