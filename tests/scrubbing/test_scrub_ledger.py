"""`ckpt-scrub.json`: what several scrubs know is joined, nothing that one of them found is lost, and nothing ends a scrub."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.commands import flip, run
from support.damage import blocks_of, flip_blocks, save_small_blocks

import ckpt
from ckpt.backends.registry import open_store
from ckpt.consistency import environment
from ckpt.consistency.seal import seal_json
from ckpt.scrubbing import ledger, scrub_record
from ckpt.scrubbing.ledger import Ledger
from ckpt.scrubbing.scrub_record import CheckedCheckpoint, Name, read_scrub, write_scrub

RECORD = "ckpt-scrub.json"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for step in (1, 2):
        save_small_blocks(tmp_path / "run" / f"step-{step}", 16, seed=step)
    return tmp_path / "run"


def names_of(root: Path) -> dict[Name, int]:
    return {(each.path, each.id or ""): 1000 for each in ckpt.list_checkpoints(root)}


def known(root: Path) -> dict[str, CheckedCheckpoint]:
    record = read_scrub(open_store(root))
    return {} if record is None else {each.path: each for each in record.checkpoints}


def test_what_two_scrubs_know_is_joined(root: Path) -> None:
    """Ours for what we look at, theirs for all else, and damage that either has found."""
    store, names = open_store(root), names_of(root)
    one, two = names
    a, b = (Ledger(store, dict(names), read_only=False) for _ in range(2))
    a.begin(damaged_first=False)
    b.begin(damaged_first=False)
    a.set(one, position=300)
    a.write()
    b.set(two, passed=1, damage="found", checked_at_s=5.0)
    b.write()
    assert (known(root)["step-1"].position, known(root)["step-2"].damage) == (300, "found")
    a.set(one, position=600)
    a.write()  # which knows nothing of step-2
    assert (known(root)["step-1"].position, known(root)["step-2"].damage) == (600, "found")
    b.set(one, passed=1, position=0, damage="found")
    b.write()
    a.set(one, position=900, damage="")
    a.write()
    assert (a[one].position, a[one].damage, known(root)["step-1"].damage) == (900, "found", "found")
    a.set(one, damage="")  # mended: nobody else has written since
    a.write()
    assert known(root)["step-1"].damage == ""
    # Two wrote at once, and the later one had read before: it is written once more.
    write_scrub(store, 1, [CheckedCheckpoint(path=path, id=id) for path, id in names], [])
    b.write()
    assert known(root)["step-2"].damage == "found"


def test_a_clock_that_was_ahead_hides_nothing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = environment.now
    monkeypatch.setattr(environment, "now", lambda: now() + 3600)
    assert ckpt.scrub(root).ok
    monkeypatch.undo()
    flip_blocks(blocks_of(root / "step-1")[:1])
    monkeypatch.setattr("ckpt.transfer.relay_bodies.RUN_BYTES", 1 << 18)
    assert any(ckpt.scrub(root, max_bytes=3e5).damaged for _ in range(9))
    assert ckpt.scrub(root, status_only=True).damaged == ["step-1"]
    assert [each.position > 0 for each in known(root).values()].count(True) == 1


def test_what_is_not_looked_at_is_not_forgotten(root: Path) -> None:
    """Below what is searched, saved meanwhile, or with a commit record that cannot be read for a while."""
    save_small_blocks(root, 4, seed=9)
    flip_blocks(blocks_of(root / "step-1")[:1])
    assert ckpt.scrub(root).damaged == ["step-1"]
    assert ckpt.scrub(root, depth=0).damaged == []
    assert ckpt.scrub(root, status_only=True).damaged == ["step-1"]

    commit = root / "step-1" / "commit.json"
    for is_folder in False, True:
        data = commit.read_bytes()
        if is_folder:
            commit.unlink()
            commit.mkdir()
        else:
            flip(commit, 40)
        ckpt.scrub(root)
        shutil.rmtree(commit) if commit.is_dir() else commit.unlink()
        commit.write_bytes(data)
        assert ckpt.scrub(root, status_only=True).damaged == ["step-1"]

    def save_and_scrub(done: int, total: int) -> None:
        if total > 1e6 and not (root / "step-3").exists():  # bytes, not folders
            save_small_blocks(root / "step-3", 16, seed=3)
            flip_blocks(blocks_of(root / "step-3")[:1])
            assert ckpt.scrub(root).damaged == ["step-1", "step-3"]

    ckpt.scrub(root, progress=save_and_scrub)
    assert ckpt.scrub(root, status_only=True).damaged == ["step-1", "step-3"]
    for step in (1, 3):
        ckpt.remove(root / f"step-{step}")
    assert ckpt.scrub(root).ok
    assert {*known(root)} == {"", "step-2"}


def _deep(record: Path) -> None:
    nested = b"[" * 5000 + b"]" * 5000
    record.write_bytes(seal_json(b'{"format":"ckpt-storage-scrub","x":%s,"number":1}' % nested))


def _link(record: Path) -> None:
    other = record.parent.parent / "precious"
    other.write_text("precious")
    record.symlink_to(other)


def _huge(record: Path) -> None:
    record.touch()
    os.truncate(record, 9 << 20)


@pytest.mark.parametrize("forge", [_deep, _link, Path.mkdir, _huge])
def test_no_record_ends_a_scrub(root: Path, forge: Callable[[Path], None]) -> None:
    flip_blocks(blocks_of(root / "step-1")[:1])
    forge(root / RECORD)
    ran = run("scrub", root)
    assert (ran.code, "warning: " in ran.out, "damaged: step-1" in ran.out) == (1, True, True), ran
    assert ran.out.count("read and compared") == 1
    if forge in (_deep, _huge):
        assert known(root)["step-1"].damage == "found"
    precious = root.parent / "precious"
    assert not precious.exists() or precious.read_text() == "precious"


def test_a_record_has_a_size(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was not found at the root goes first; if there is no room for what was, the scrub says so."""
    assert ckpt.scrub(root).ok
    store = open_store(root)
    two = [*known(root).values()]
    deeper = [CheckedCheckpoint(path="a/b/" + "c" * 200, id=str(n)) for n in range(9)]
    write_scrub(store, 1, two, deeper)
    assert len(known(root)) == 3  # by path
    monkeypatch.setattr(scrub_record, "_MAX_BYTES", 1500)
    write_scrub(store, 1, two, deeper)
    assert {*known(root)} == {"step-1", "step-2"}
    monkeypatch.setattr(scrub_record, "_MAX_BYTES", 300)
    result = ckpt.scrub(root)
    assert (result.finished, "scrub folder by folder" in result.problem) == (True, True)


def test_of_what_is_removed_nothing_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the record was written after the removal."""
    monkeypatch.setattr("ckpt.transfer.relay_bodies.RUN_BYTES", 1 << 18)
    for every_s in (10.0, 0.0):
        monkeypatch.setattr(ledger, "_WRITE_EVERY_S", every_s)
        place = tmp_path / f"every-{every_s}"
        save_small_blocks(place, 48)

        def remove(done: int, total: int, place: Path = place) -> None:
            if total > 1e6 and (place / "commit.json").exists():
                ckpt.remove(place)

        assert [each.state for each in ckpt.scrub(place, progress=remove).checkpoints] == ["gone"]
        assert not place.exists()


def test_a_root_without_checkpoints_is_left_alone(tmp_path: Path, stock_place: Path) -> None:
    save_small_blocks(tmp_path / "deep" / "a" / "b" / "step-1", 4)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "notes.txt").write_text("x")
    for root, depth in (tmp_path / "deep", 1), (tmp_path / "notes", 3), (stock_place, 3):
        before = sorted(path for path in root.rglob("*"))
        for more in [], ["--status"]:
            ran = run("scrub", root, "--depth", depth, *more)
            assert (ran.code, "no checkpoint of this library was found" in ran.err) == (3, True), ran
        assert sorted(path for path in root.rglob("*")) == before
    assert "`ckpt verify` checks" in ran.err
