"""`ckpt scrub`: passes in parts, what is noted of them, and checkpoints that come and go meanwhile."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import flip, run, run_json
from support.damage import blocks_of, flip_blocks, flipped, save_small_blocks
from support.ranks import exit_code_of

import ckpt
from ckpt.backends.posix import PosixStore
from ckpt.consistency.seal import seal_json
from ckpt.draining.marker import mark
from ckpt.errors import ConfigurationError, NotFound, StorageUnavailable
from ckpt.scrubbing import ledger
from ckpt.scrubbing.scrub import Scrubbed
from ckpt.trainer_integration import keeping, saving

RECORD = "ckpt-scrub.json"


class Reads:
    """Which bytes of data files were read, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ranges: list[tuple[str, int, int]] = []
        original = PosixStore.read_into

        def read_into(store: PosixStore, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
            original(store, key, offset, buffers)
            if key.endswith(".distcp"):
                nbytes = sum(buffer.nbytes for buffer in buffers)
                self.ranges.append((os.path.join(store.url, key), offset, offset + nbytes))

        monkeypatch.setattr(PosixStore, "read_into", read_into)

    def take(self) -> list[tuple[str, int, int]]:
        """Return them, sorted, and forget them."""
        taken, self.ranges = sorted(self.ranges), []
        return taken


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    return Reads(monkeypatch)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three checkpoints of 3 MiB; reads of 1 MiB at most are small beside them."""
    for step in (1, 2, 3):
        save_small_blocks(tmp_path / "run" / f"step-{step}", 48, seed=step)
    return tmp_path / "run"


@pytest.fixture(autouse=True)
def _small_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt.transfer.relay_bodies.RUN_BYTES", 1 << 20)


def data_bytes(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob("*.distcp"))


def stored(root: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((root / RECORD).read_bytes())
    return record


def rewrite(root: Path, **facts: Any) -> None:
    """Forge the record, with a valid seal."""
    record = {**stored(root), **facts}
    del record["crc64nvme"]
    (root / RECORD).write_bytes(seal_json(json.dumps(record).encode()))


def states(result: Scrubbed) -> dict[str, str]:
    return {each.path: each.state for each in result.checkpoints}


def test_a_pass_in_parts(root: Path, reads: Reads) -> None:
    """Every byte is read once a pass, however it is cut; the next pass begins with the oldest."""
    total = data_bytes(root)
    with pytest.raises(NotFound):
        ckpt.scrub(root / "nothing")
    with pytest.raises(ConfigurationError):
        ckpt.scrub(root, max_bytes=0)
    first = ckpt.scrub(root, max_bytes=2e6)
    assert (first.number, first.finished, first.never_checked) == (1, False, 3)
    assert 0 < first.passed_bytes == first.checked_bytes <= 2e6
    assert list(states(first).values()) == ["partly"]
    seen = reads.take()
    for _ in range(20):
        result = ckpt.scrub(root, max_bytes=2e6)
        more = reads.take()
        assert not set(seen) & set(more)
        seen += more
        if result.finished:
            break
    assert sum(stop - start for _, start, stop in seen) == total
    assert (result.passed_bytes, result.total_bytes, result.never_checked) == (total, total, 0)
    assert result.oldest_check_at_s is not None
    assert abs(result.oldest_check_at_s - time.time()) < 60

    reads.take()
    status = run_json("scrub", root, "--status")
    assert (status["ok"], status["finished"], status["number"]) == (True, True, 1)
    assert reads.take() == []
    again = ckpt.scrub(root, max_bytes=2e6)  # the one that was checked first is the oldest
    assert (again.number, states(again)) == (2, states(first))
    save_small_blocks(root / "step-4", 16, seed=4)
    whole = ckpt.scrub(root)
    assert (whole.finished, states(whole)["step-4"]) == (True, "checked")
    assert sum(stop - start for _, start, stop in reads.take()) == data_bytes(root)
    assert "100 %" in run("scrub", root, "--for", "1h", "--max-bandwidth", "1GB/s").out
    assert ckpt.scrub(root, max_s=1e-9, dry_run=True).number == 4
    assert stored(root)["number"] == 3


def test_damage_is_told_until_it_is_gone(root: Path, reads: Reads) -> None:
    damaged = blocks_of(root / "step-2")[40]
    with flipped([damaged]):
        ran = run_json("scrub", root, "--bytes", "5MB", code=0)  # not that far yet
        assert not ran["damaged"]
        ran = run_json("scrub", root, code=1)
        assert ran["damaged"] == ["step-2"]
        (found,) = [each for each in ran["checkpoints"] if each["damages"]]
        assert found["damages"][0]["kind"] == "checksum"
        assert found["damages"][0]["start"] == damaged[1]
    for arguments in ["scrub", root, "--status"], ["scrub", root, "--bytes", "1MB"]:
        told = run(*arguments)
        assert (told.code, "damaged: step-2" in told.out.replace("\x1b", "")) == (1, True), told.out
    assert run("scrub", root).code == 0
    # Found in a part that was checked before a kill, or by a scrub that was cut off: it is not forgotten.
    first = blocks_of(root / "step-1")[0]
    with flipped([first]):
        assert run("scrub", root, "--bytes", "1MB").code == 1
    assert run("scrub", root).code == 1
    assert run("scrub", root).code == 0
    # What cannot be read, though the storage answers, is damage.
    original = PosixStore.read_into

    def bad_sector(store: PosixStore, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        if key.endswith(damaged[0].name) and offset <= damaged[1] < offset + sum(b.nbytes for b in buffers):
            raise StorageUnavailable("Input/output error", url=store.url, key=key)
        original(store, key, offset, buffers)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(PosixStore, "read_into", bad_sector)
        patched.setattr("ckpt.tools.verify._MAX_UNREADABLE", 0)
        told = run("scrub", root)  # so many that its storage may be out of order; the others are checked
        assert (told.code, "unreadable: step-2" in told.out) == (1, True), told.out
        assert (ckpt.scrub(root, status_only=True).unreadable, run("scrub", root, "--status").code) == (
            ["step-2"],
            1,
        )
        assert states(ckpt.scrub(root)) == {"step-1": "checked", "step-2": "unreadable", "step-3": "checked"}
        listing = PosixStore.folders
        failed: list[str] = []

        def fail(store: PosixStore, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
            if key.endswith(".distcp"):
                failed.append(key)
                raise StorageUnavailable("no answer", url=store.url, key=key)
            original(store, key, offset, buffers)

        def folders(store: PosixStore, prefix: str = "") -> Iterator[str]:
            if failed:
                raise StorageUnavailable("no answer", url=store.url)
            return listing(store, prefix)

        patched.setattr(PosixStore, "read_into", fail)
        patched.setattr(PosixStore, "folders", folders)
        with pytest.raises(StorageUnavailable):  # as the root is out of reach too, no other is tried
            ckpt.scrub(root)
        assert len(set(failed)) == 1
        patched.setattr(PosixStore, "read_into", bad_sector)
        patched.setattr(PosixStore, "folders", listing)
        patched.setattr("ckpt.tools.verify._MAX_UNREADABLE", 64)
        (found,) = [each for each in ckpt.scrub(root).checkpoints if each.damages]
    assert [(each.kind, each.start) for each in found.damages] == [("missing", damaged[1])]
    assert "Input/output error" in found.damages[0].message


def test_the_record_is_only_a_memory(root: Path, reads: Reads) -> None:
    """Damaged, forged or of another time: at worst a pass begins anew; nothing is passed over for ever."""
    total = data_bytes(root)
    ckpt.scrub(root)
    flip(root / RECORD, 60)
    anew = ckpt.scrub(root)
    assert "begun anew" in anew.problem
    assert (anew.number, anew.checked_bytes) == (1, total)
    entries = stored(root)["checkpoints"]
    forged: list[dict[str, Any]] = [
        {"checkpoints": [{**each, "checked_at_s": 9e9, "passed": 1} for each in entries]},
        {"checkpoints": [{**each, "passed": 5, "position": 1 << 60} for each in entries], "number": 5},
        {"checkpoints": [{**each, "path": "../../etc", "id": "x"} for each in entries] * 100},
        {"checkpoints": [{**each, "passed": 7} for each in entries]},
        {"number": 1 << 60},
        {"number": "many"},
        {"format": "another"},
    ]
    for facts in forged:
        rewrite(root, **facts)
        result = ckpt.scrub(root)
        assert (result.finished, result.checked_bytes) == (True, total), facts
    rewrite(root, checkpoints=[{**each, "passed": 0, "position": 1 << 60} for each in entries], number=1)
    assert ckpt.scrub(root).checked_bytes < total / 10  # one pass, and no more
    assert ckpt.scrub(root).checked_bytes == total
    rewrite(root, version=2)
    assert run_json("scrub", root, code=1)["error"]["type"] == "FormatError"
    (root / RECORD).write_bytes(b"\0" * 100)
    assert ckpt.scrub(root).problem


def test_checkpoints_come_and_go(root: Path, stock_place: Path) -> None:
    """Retention removes one while it is read; others are not this library's, or cannot be read."""
    shutil.copytree(stock_place, root / "stock")
    shutil.copytree(root / "step-3", root / "broken")
    flip(root / "broken" / "commit.json", 50)

    def remove(done: int, total: int) -> None:
        if done > 4e6 and (root / "step-2" / "commit.json").exists():  # while it is read
            ckpt.remove(root / "step-2")

    result = ckpt.scrub(root, progress=remove)
    assert states(result) == {
        "step-1": "checked", "step-2": "gone", "step-3": "checked", "stock": "skipped", "broken": "damaged",
    }  # fmt: skip
    assert (result.damaged, len(stored(root)["checkpoints"])) == (["broken"], 2)
    shutil.rmtree(root / "broken")
    result = ckpt.scrub(root)
    assert (result.ok, result.finished, len(stored(root)["checkpoints"])) == (True, True, 2)

    def save_again(done: int, total: int) -> None:
        save_small_blocks(root / "step-1", 8, seed=9) if done < 2e6 else None

    assert states(ckpt.scrub(root, progress=save_again))["step-1"] == "gone"


def test_the_record_is_foreign_to_nobody(root: Path, tmp_path: Path) -> None:
    """Beside checkpoints, and in the folder of one that is scrubbed alone."""
    ckpt.scrub(root)
    one = root / "step-3"
    assert ckpt.scrub(one).finished
    assert (one / RECORD).exists()
    assert ckpt.verify(one).strays == []
    assert [each.path for each in ckpt.list_checkpoints(root)] == ["step-1", "step-2", "step-3"]
    ckpt.copy(one, tmp_path / "copy")
    assert not (tmp_path / "copy" / RECORD).exists()
    ckpt.save({"w": torch.zeros(3)}, one, no_dist=True, checks="off")
    assert ckpt.scrub(one).checked_bytes < 10_000  # another checkpoint is there
    for step in (1, 2, 3):
        ckpt.remove(root / f"step-{step}")
    assert [path.name for path in root.iterdir()] == [RECORD]
    assert ckpt.collect_garbage(root, grace_s=3600).young == 1
    garbage = ckpt.collect_garbage(root, grace_s=-10)
    assert [item.key for item in garbage.items] == [RECORD]
    assert not root.exists()


def test_a_manager_does_not_mind(tmp_path: Path) -> None:
    """Nor do the commands that look at a run; what `keep=` removes is not scrubbed, nor remembered."""
    root, model = tmp_path / "run", torch.nn.Linear(4, 4)
    with ckpt.CheckpointManager(
        root, save=saving.every_steps(1), keep=keeping.last(2), checks="off"
    ) as manager:
        for step in range(1, 5):
            manager.step(step, model=model)
            manager.wait_durable()
            assert ckpt.scrub(root).ok
    with ckpt.CheckpointManager(root, save=saving.every_steps(1)) as manager:
        restored = manager.restore(model=model)
        assert restored is not None
        assert restored.step == 4
    assert ckpt.scrub(root).ok
    assert [each["path"][-1] for each in stored(root)["checkpoints"]] == ["3", "4"]
    for arguments in ["ls"], ["watch", "--once"], ["report", "-o", tmp_path / "page.html"], ["gc"]:
        ran = run(arguments[0], root, *arguments[1:])
        assert (ran.code, "scrub" in ran.out) == (0, False), ran
    mark(str(root), "s3://bucket/run")
    assert run("scrub", root).code == 0
    assert run("scrub", root, "--from", "s3://bucket/run").code == 2


def test_what_others_refer_to_is_read_once(tmp_path: Path, reads: Reads) -> None:
    state = {f"w{n}": torch.arange(20_000.0) + n for n in range(4)}
    ckpt.save(state, tmp_path / "a", digests=True, no_dist=True)
    ckpt.save({**state, "w0": torch.zeros(20_000)}, tmp_path / "b", base=tmp_path / "a", no_dist=True)
    reads.take()  # of the save, which checks its base
    result = ckpt.scrub(tmp_path)
    assert result.checked_bytes == result.total_bytes == data_bytes(tmp_path)
    once = reads.take()
    assert len(once) == len(set(once))
    assert ckpt.scrub(tmp_path / "b").checked_bytes > data_bytes(
        tmp_path / "b"
    )  # alone, it is read with its base


def test_two_at_once(root: Path) -> None:
    results: list[Scrubbed] = []
    threads = [
        threading.Thread(target=lambda: results.append(ckpt.scrub(root, max_bytes=6e6))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [(each.ok, each.problem) for each in results] == [(True, "")] * 3
    assert ckpt.scrub(root).finished


def test_killed_at_any_point(root: Path, reads: Reads) -> None:
    """What was noted is not read again; nothing else is lost, and the root stays as it was."""
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    total = data_bytes(root)
    for operation, number in ("read", 1), ("read", 5), ("put", 1), ("put", 11), ("publish", 14):
        (root / RECORD).unlink(missing_ok=True)
        assert exit_code_of(_killed_scrub, str(root), operation, number) == -signal.SIGKILL
        noted = (
            sum(each.get("position", 0) for each in stored(root)["checkpoints"])
            if (root / RECORD).exists()
            else 0
        )
        reads.take()
        result = ckpt.scrub(root)
        assert (result.finished, result.ok, result.problem) == (True, True, "")
        assert result.checked_bytes + noted <= total
        assert result.passed_bytes == total
        assert {path: path.read_bytes() for path in before} == before
    assert noted > 0


def _killed_scrub(root: str, operation: str, number: int) -> None:
    left = [number]

    def count() -> None:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    from ckpt.backends import posix
    from ckpt.transfer import relay_bodies

    relay_bodies.RUN_BYTES = 1 << 20
    reading, putting, publishing = PosixStore.read_into, PosixStore.put, posix._publish

    def read_into(store: PosixStore, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        reading(store, key, offset, buffers)
        if operation == "read" and key.endswith(".distcp"):
            count()

    def put(store: PosixStore, key: str, *arguments: Any, **more: Any) -> None:
        if operation == "put":
            count()
        putting(store, key, *arguments, **more)

    def publish(*arguments: Any) -> None:
        if operation == "publish":
            count()
        publishing(*arguments)

    ledger._WRITE_EVERY_S = 0.0
    store_class: Any = PosixStore
    module: Any = posix
    store_class.read_into, store_class.put, module._publish = read_into, put, publish
    ckpt.scrub(root, threads=1)


def test_interrupted(root: Path) -> None:
    """Ctrl-C, and a storage that goes away, note what was done."""

    def interrupt(done: int, total: int) -> None:
        if done > 4e6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ckpt.scrub(root, progress=interrupt)
    assert 0 < ckpt.scrub(root, status_only=True).passed_bytes < data_bytes(root)
    flip_blocks([])
