"""Pins: who counts as a referrer, and what removal, replacement and gc leave to it."""

from __future__ import annotations

import logging
import os
import pickle
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest
from support import references
from support.clock import SkippingClock
from support.commands import judge_age_by_mtime

import ckpt
from ckpt.backends.base import Store
from ckpt.backends.posix import PosixStore
from ckpt.consistency import environment
from ckpt.errors import BaseGone, FormatError, IntegrityError, StillReferred
from ckpt.format.pin_record import PinRecord, decode_pin, encode_pin
from ckpt.format.records import StoredCommit, read_commit
from ckpt.writing.pins import FRESH_S, GRACE_S, PinReader


@pytest.fixture(autouse=True)
def _ages_by_mtime(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that `make_old` can make files old."""
    judge_age_by_mtime(monkeypatch)


def save(root: Path, name: str, *bases: str) -> str:
    return references.save(str(root / name), bases)


def pins_of(root: Path, name: str) -> list[Path]:
    return sorted((root / name).rglob("*.pin"))


def make_old(root: Path, name: str) -> None:
    for path in (root / name).rglob("*"):
        stat = path.stat()
        os.utime(path, (stat.st_atime, stat.st_mtime - 2 * GRACE_S))


def assert_whole(root: Path, *names: str) -> None:
    def truth(name: str) -> bytes | None:
        path = root / name
        return path.read_bytes() if path.exists() else None

    for name in names:
        commit = truth(f"{name}/commit.json")
        assert commit is not None
        assert len(dict(references.named_objects(name, commit, truth))) >= 3


def test_a_base_stays_until_nobody_refers_to_it(tmp_path: Path) -> None:
    save(tmp_path, "a")
    save(tmp_path, "b", "a")
    save(tmp_path, "c", "b")
    for name, referrers in (("a", ("../b", "../c")), ("b", ("../c",))):
        for refused in (lambda: ckpt.remove(tmp_path / name), lambda: save(tmp_path, name)):  # noqa: B023
            with pytest.raises(StillReferred, match=r"\.\./c refers?|\.\./b, \.\./c refer") as caught:
                refused()
            assert caught.value.referrers == referrers
            assert pickle.loads(pickle.dumps(caught.value)).referrers == referrers
    assert_whole(tmp_path, "a", "b", "c")
    ckpt.remove(tmp_path / "c")
    ckpt.remove(tmp_path / "b")
    assert pins_of(tmp_path, "a") == []
    ckpt.remove(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_a_replaced_referrer_lets_go(tmp_path: Path) -> None:
    save(tmp_path, "a")
    save(tmp_path, "b", "a")
    save(tmp_path, "b")
    assert pins_of(tmp_path, "a") == []
    ckpt.remove(tmp_path / "a")
    assert_whole(tmp_path, "b")


def test_a_base_that_is_removed_meanwhile(tmp_path: Path) -> None:
    save(tmp_path, "a")
    with pytest.raises(BaseGone, match="with another base or none"):
        references.save(str(tmp_path / "b"), ["a"], between=lambda: ckpt.remove(tmp_path / "a"))
    assert not (tmp_path / "a").exists()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_base_that_is_removed_and_saved_anew(tmp_path: Path) -> None:
    save(tmp_path, "a")

    def again() -> None:
        ckpt.remove(tmp_path / "a")
        save(tmp_path, "a")

    with pytest.raises(BaseGone):
        references.save(str(tmp_path / "b"), ["a"], between=again)
    ckpt.remove(tmp_path / "a")


def test_objects_that_are_referred_to_during_a_removal_stay(tmp_path: Path) -> None:
    save(tmp_path, "a")
    delete = PosixStore.delete

    def saving_first(store: PosixStore, keys: Iterable[str]) -> None:
        if list(keys) == [".metadata"]:
            patch.undo()
            save(tmp_path, "b", "a")
        delete(store, keys)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PosixStore, "delete", saving_first)
        removed = ckpt.remove(tmp_path / "a")
    assert removed.referrers == ("../b",)
    assert len(removed.kept) == 3
    assert_whole(tmp_path, "b")
    for place in ("a", "b"):
        make_old(tmp_path, place)
    garbage = ckpt.collect_garbage(tmp_path)
    assert garbage.items == []
    assert garbage.referred == {"a": ["../b"]}
    ckpt.remove(tmp_path / "b")
    assert len(ckpt.collect_garbage(tmp_path).items) == 3
    assert list(tmp_path.iterdir()) == []


def test_a_pin_of_a_save_that_was_killed_counts_for_a_day(tmp_path: Path) -> None:
    save(tmp_path, "a")
    save(tmp_path, "b", "a")
    shutil.rmtree(tmp_path / "b")
    with pytest.raises(StillReferred):
        ckpt.remove(tmp_path / "a")
    make_old(tmp_path, "a")
    assert [item.key for item in ckpt.collect_garbage(tmp_path, dry_run=True).items] == [
        str(path.relative_to(tmp_path / "a")) for path in pins_of(tmp_path, "a")
    ]
    ckpt.remove(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_a_renamed_referrer_and_a_renamed_root(tmp_path: Path) -> None:
    root = tmp_path / "run"
    save(root, "a")
    save(root, "b", "a")
    make_old(root, "a")
    (root / "b").rename(root / "best")
    with pytest.raises(StillReferred):
        ckpt.remove(root / "a")
    root.rename(tmp_path / "moved")
    with pytest.raises(StillReferred):
        ckpt.remove(tmp_path / "moved" / "a")
    assert_whole(tmp_path / "moved", "a", "best")


@pytest.mark.parametrize("damage", ["flip", "newer"])
def test_all_stays_beside_a_pin_that_cannot_be_read(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, "a")
    save(tmp_path, "b", "a")
    (pin,) = pins_of(tmp_path, "a")
    record = decode_pin(pin.read_bytes(), url="", key="")
    pin.write_bytes(
        b"?" + pin.read_bytes() if damage == "flip"
        else encode_pin(PinRecord(version=2, referrer="../b", id=record.id, manifests=[]))
    )  # fmt: skip
    make_old(tmp_path, "a")
    with caplog.at_level(logging.WARNING), pytest.raises(StillReferred, match="of which rank-00000"):
        ckpt.remove(tmp_path / "a")
    assert "cannot be read" in caplog.text
    assert ckpt.collect_garbage(tmp_path).items == []


def test_a_damaged_referrer_counts(tmp_path: Path) -> None:
    save(tmp_path, "a")
    save(tmp_path, "b", "a")
    make_old(tmp_path, "a")
    commit = tmp_path / "b" / "commit.json"
    commit.write_bytes(commit.read_bytes().replace(b'"world_size":1', b'"world_size":2'))
    with pytest.raises(StillReferred):
        ckpt.remove(tmp_path / "a")


def test_a_copy_of_a_referrer_lets_go_of_nothing(tmp_path: Path) -> None:
    """A forged checkpoint could have the id of another one too."""
    save(tmp_path, "a")
    save(tmp_path, "b", "a")
    shutil.copytree(tmp_path / "b", tmp_path / "copy")
    ckpt.remove(tmp_path / "copy")
    assert len(pins_of(tmp_path, "a")) == 1
    with pytest.raises(StillReferred):
        ckpt.remove(tmp_path / "a")
    assert_whole(tmp_path, "b")


def test_pins_of_what_was_here_before_do_not_count(tmp_path: Path) -> None:
    save(tmp_path, "a")
    save(tmp_path, "b", "a")
    kept = tmp_path / "kept"
    shutil.copytree(tmp_path / "a" / "rank-00000", kept)
    shutil.rmtree(tmp_path / "a")
    save(tmp_path, "a")
    shutil.copytree(kept, tmp_path / "a" / "rank-00000", dirs_exist_ok=True)
    shutil.rmtree(kept)
    ckpt.remove(tmp_path / "a")  # which b does not name
    assert_whole(tmp_path, "b")


def test_a_save_that_stalls_pins_and_looks_again(tmp_path: Path) -> None:
    clock = SkippingClock()
    save(tmp_path, "a")
    stalls = [FRESH_S + 1]

    def stalling(store: Store) -> StoredCommit | None:
        commit = read_commit(store)
        if stalls:
            clock.sleep(stalls.pop())
        return commit

    with environment.replaced(clock), pytest.MonkeyPatch.context() as patch:
        patch.setattr("ckpt.writing.pins.read_commit", stalling)
        save(tmp_path, "b", "a")
    assert len(pins_of(tmp_path, "a")) == 2
    assert_whole(tmp_path, "b")
    ckpt.remove(tmp_path / "b")
    assert pins_of(tmp_path, "a") == []


@pytest.mark.parametrize(
    "fields",
    [{"referrer": "../../x"}, {"referrer": "b"}, {"referrer": "../.."}, {"id": "x"}, {"manifests": ["../a/commit.json"]}],
)  # fmt: skip
def test_a_hostile_pin_is_refused(fields: dict[str, object]) -> None:
    plain = {"referrer": "../b", "id": "0" * 16, "manifests": [], **fields}
    with pytest.raises(FormatError, match=r"impossible|matching regex"):
        decode_pin(encode_pin(PinRecord(**plain)), url="", key="")  # type: ignore[arg-type]
    with pytest.raises(IntegrityError):
        decode_pin(b"{}", url="", key="")


def test_a_folder_that_is_named_by_a_link(tmp_path: Path) -> None:
    save(tmp_path / "run", "a")
    save(tmp_path / "run", "b")
    (tmp_path / "best").symlink_to(tmp_path / "run" / "b")
    references.save(str(tmp_path / "best"), ["a"])
    (pin,) = pins_of(tmp_path / "run", "a")
    assert decode_pin(pin.read_bytes(), url="", key="").referrer == "../b"
    assert PinReader(PosixStore(str(tmp_path / "run" / "b"))).look().pins == []
