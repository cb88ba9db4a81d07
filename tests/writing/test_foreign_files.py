"""Files of another program, stored as tensors of bytes: streamed, committed, checked, never mixed."""

from __future__ import annotations

import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import ckpt
from ckpt.backends.posix import PosixStore
from ckpt.backends.registry import open_store
from ckpt.errors import AlreadyExists, CheckpointError, CommitError, IntegrityError, StorageError
from ckpt.reading.foreign_files import ForeignFiles
from ckpt.writing import foreign_files
from ckpt.writing.foreign_files import FilesSave, FileStream, WrittenFiles, commit_files


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign_files, "CHUNK_BYTES", 4096)


def save_to(place: Path, rank: int = 0) -> FilesSave:
    return FilesSave(open_store(place), rank)


def put(place: Path, name: str, data: bytes, *, rank: int = 0) -> WrittenFiles:
    save = save_to(place, rank)
    with save.open(name) as stream:
        stream.write(data)
    return save.finish()


def commit(place: Path, *ranks: WrittenFiles) -> None:
    commit_files(open_store(place), ranks, {"step": "7"})


def files_at(place: Path) -> list[Path]:
    return [path for path in place.rglob("*") if path.is_file()]


def content(place: Path, name: str) -> bytes:
    files = ForeignFiles(place)
    try:
        return files.open(name).read()
    finally:
        files.close()


def pattern(nbytes: int) -> bytes:
    return bytes(number * 7 % 251 for number in range(nbytes))


def state_of(place: Path) -> str:
    return ckpt.list_checkpoints(place)[0].state


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 4097, 50_000])
def test_a_file_comes_back_as_it_was_written(tmp_path: Path, nbytes: int) -> None:
    data, save = pattern(nbytes), save_to(tmp_path)
    with save.open("folder/model_0.pt") as stream:
        for start in range(0, nbytes, 1000):
            assert stream.write(memoryview(data)[start : start + 1000]) == len(data[start : start + 1000])
    commit(tmp_path, save.finish())
    assert content(tmp_path, "folder/model_0.pt") == data


def test_files_that_are_written_at_the_same_time(tmp_path: Path) -> None:
    save, expected = save_to(tmp_path), {f"file-{number}": pattern(3000 * number) for number in range(9)}

    def write(name: str, data: bytes) -> None:
        with save.open(name) as stream:
            for start in range(0, len(data), 700):
                stream.write(data[start : start + 700])

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(write, expected, expected.values()))
    commit(tmp_path, save.finish())
    assert {name: content(tmp_path, name) for name in expected} == expected
    assert not ckpt.verify(tmp_path).damages


def test_short_files_share_an_object(tmp_path: Path) -> None:
    save = save_to(tmp_path)
    for name in "abcd":
        with save.open(name) as stream:
            stream.write(b"data")
    commit(tmp_path, save.finish())
    assert [content(tmp_path, name) for name in "abcd"] == [b"data"] * 4
    assert len(list(tmp_path.rglob("*.distcp"))) == 3  # the first alone, at once


def test_ranges_are_read_in_any_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign_files, "CHUNK_BYTES", 1 << 20)
    commit(tmp_path, put(tmp_path, "a", data := pattern(3 << 20)))
    files = ForeignFiles(tmp_path)
    reader = files.open("a")
    assert reader.seek(-5, 2) == len(data) - 5
    assert reader.read() == data[-5:]
    for start, length in [(70_000, 10), (5, 20), (1 << 20, 2 << 20), (0, 5000), (len(data) + 9, 3)]:
        reader.seek(start)
        assert reader.read(length) == data[start : start + length]
        assert reader.tell() == min(start + length, max(start, len(data)))
    files.close()


def test_every_tool_knows_such_a_checkpoint(tmp_path: Path) -> None:
    place = tmp_path / "step-7"
    first = put(place, "model_0.pt", pattern(9000))
    commit(place, first, put(place, "model_1.pt", pattern(9001), rank=1))
    (listed,) = ckpt.list_checkpoints(tmp_path)
    assert (listed.state, listed.step, listed.latest) == ("committed", 7, True)
    verified = ckpt.verify(place)
    assert not verified.damages
    assert verified.checked_bytes >= 18_001
    copy = tmp_path / "copy"
    ckpt.copy(place, copy)
    assert content(copy, "model_1.pt") == pattern(9001)
    removed = ckpt.remove(place)
    assert removed.keys[:2] == (".metadata", "commit.json")
    assert not place.exists()


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    commit(tmp_path, put(tmp_path, "a", pattern(9000)))
    file = next(tmp_path.rglob("*-1.distcp"))
    data = bytearray(file.read_bytes())
    data[2000] ^= 1
    file.write_bytes(data)
    assert ckpt.verify(tmp_path).damages
    with pytest.raises(IntegrityError):
        content(tmp_path, "a")


def test_nothing_counts_before_the_commit(tmp_path: Path) -> None:
    put(tmp_path, "a", pattern(9000))
    assert state_of(tmp_path) == "incomplete"


def test_other_files_at_the_place_are_left_out(tmp_path: Path) -> None:
    put(tmp_path, "a", b"old")
    put(tmp_path, "b", b"old", rank=1)
    commit(tmp_path, put(tmp_path, "a", b"new"))
    files = ForeignFiles(tmp_path)
    assert files.names == ["a"]
    files.close()
    assert content(tmp_path, "a") == b"new"
    assert len(ckpt.collect_garbage(tmp_path, grace_s=0).items) == 4


def test_a_commit_needs_to_see_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [put(tmp_path, name, b"data", rank=number) for number, name in enumerate("abcd")]
    with monkeypatch.context() as patch:
        patch.setattr(PosixStore, "list", lambda self, prefix="": iter(()))
        patch.setattr(PosixStore, "folders", lambda self: [])
        commit(tmp_path, *files)
    files_there = ForeignFiles(tmp_path)
    assert files_there.names == ["a", "b", "c", "d"]
    files_there.close()


def test_a_write_that_failed_is_not_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_whole = PosixStore.put

    def put_or_fail(self: PosixStore, key: str, *args: object, **options: object) -> object:
        if key.endswith("-4.distcp"):
            raise StorageError("no space, just now")
        return put_whole(self, key, *args, **options)  # type: ignore[arg-type]

    def write_all(stream: FileStream) -> None:
        for _ in range(14):
            stream.write(pattern(4096))

    monkeypatch.setattr(PosixStore, "put", put_or_fail)
    save = save_to(tmp_path)
    stream = save.open("a")
    with pytest.raises(StorageError, match="no space"):
        write_all(stream)
    with pytest.raises(StorageError, match="no space"):
        stream.close()
    with pytest.raises(StorageError, match="no space"):
        save.finish()
    assert not files_at(tmp_path)


def test_a_failure_in_the_block_leaves_nothing(tmp_path: Path) -> None:
    save = save_to(tmp_path)

    def write_and_fail() -> None:
        with save.open("a") as stream:
            stream.write(pattern(50_000))
            raise ValueError("the state cannot be pickled")

    with pytest.raises(ValueError, match="cannot be pickled"):
        write_and_fail()
    assert not files_at(tmp_path)
    with pytest.raises(ValueError, match="cannot be pickled"):
        save.finish()


def test_a_stream_that_nobody_closed_ends_the_save(tmp_path: Path) -> None:
    save = save_to(tmp_path)
    save.open("a").write(pattern(50_000))
    with pytest.raises(CheckpointError, match="was not closed: 'a'"):
        save.finish()
    assert not files_at(tmp_path)


def test_a_file_that_is_written_twice(tmp_path: Path) -> None:
    save = save_to(tmp_path)
    save.open("a").close()
    with pytest.raises(CheckpointError, match="written before in this save: 'a'"):
        save.open("a")


def test_a_file_after_the_end(tmp_path: Path) -> None:
    save = save_to(tmp_path)
    with save.open("a") as stream:
        stream.write(pattern(9000))
    commit(tmp_path, save.finish())
    with pytest.raises(CheckpointError, match="the save has ended"):
        save.open("b")
    with pytest.raises(CheckpointError, match="the save has ended"):
        FileStream(save, "b").write(pattern(50_000))
    save.fail(ValueError("too late to delete anything"))
    assert content(tmp_path, "a") == pattern(9000)


def test_a_committed_checkpoint_is_not_replaced(tmp_path: Path) -> None:
    late = put(tmp_path, "a", b"late")
    commit(tmp_path, put(tmp_path, "a", b"old"))
    with pytest.raises(AlreadyExists):
        put(tmp_path, "a", b"new")
    with pytest.raises(AlreadyExists):
        commit(tmp_path, late)
    assert content(tmp_path, "a") == b"old"


def test_two_ranks_with_one_name(tmp_path: Path) -> None:
    files = [put(tmp_path, "model.pt", b"data", rank=rank) for rank in (0, 1)]
    with pytest.raises(CommitError, match=r"two ranks wrote the same file: 'model\.pt'"):
        commit(tmp_path, *files)
    assert state_of(tmp_path) == "incomplete"


def test_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chunk = 256 << 10
    monkeypatch.setattr(foreign_files, "CHUNK_BYTES", chunk)
    data, save = bytes(chunk), save_to(tmp_path)
    tracemalloc.start()
    try:
        with save.open("a") as stream:
            for _ in range(150):
                stream.write(data)
        save.finish()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 32 * chunk
