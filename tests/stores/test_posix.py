"""The POSIX store where the file system has links, pipes and closed directories, or fails."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.ranks import run_ranks

from ckpt.backends.base import MIB, PutMode, Store, put_bytes, read_bytes
from ckpt.backends.bodies import BytesBody
from ckpt.backends.posix import PosixStore
from ckpt.errors import (
    AccessDenied,
    AlreadyExists,
    ConfigurationError,
    NotFound,
    StorageError,
    StorageFull,
    StorageUnavailable,
    Truncated,
    UnsafeContent,
)


@pytest.fixture
def store(tmp_path: Path) -> PosixStore:
    (tmp_path / "root").mkdir()
    return PosixStore(str(tmp_path / "root"))


def read(store: Store, key: str, size: int = 1) -> bytearray:
    data = bytearray(size)
    store.read_into(key, 0, [memoryview(data)])
    return data


def test_links_that_lead_out(store: PosixStore, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (outside / "d").mkdir(parents=True)
    (outside / "f").write_bytes(b"x")
    root = Path(store.url)
    (root / "f").symlink_to(outside / "f")
    (root / "d").symlink_to("../outside")
    before = sorted(outside.rglob("*"))
    actions: list[Callable[[], object]] = [
        lambda: read(store, "f"),
        lambda: read(store, "d/f"),
        lambda: store.stat("f"),
        lambda: store.stat("d/f"),
        lambda: put_bytes(store, "d/new", b"x"),
        lambda: put_bytes(store, "d/new", b"x", mode=PutMode.CREATE),
        lambda: put_bytes(store, "d/new/deep", b"x"),
        lambda: store.delete(["d/f"]),
        lambda: store.prepare("d/new"),
    ]
    for action in actions:
        with pytest.raises(UnsafeContent, match="leads out of the checkpoint"):
            action()
    assert sorted(outside.rglob("*")) == before
    store.delete(["f", "d"])  # the links themselves
    assert list(root.iterdir()) == []
    assert (outside / "f").read_bytes() == b"x"


def test_links_of_a_hugging_face_cache(tmp_path: Path) -> None:
    repository = tmp_path / "models--x"
    for folder in ("blobs/deep", "snapshots/abc", "other/abc", "refs"):
        (repository / folder).mkdir(parents=True)
    for file in ("blobs/0f", "blobs/deep/f", "refs/main"):
        (repository / file).write_bytes(b"x")
    snapshot = PosixStore(str(repository / "snapshots" / "abc"))
    for name, target in (("f", "blobs/0f"), ("deep", "blobs/deep/f"), ("refs", "refs/main")):
        (repository / "snapshots" / "abc" / name).symlink_to(f"../../{target}")
    assert read(snapshot, "f") == b"x"
    assert snapshot.stat("f").size_bytes == 1
    (repository / "other" / "abc" / "f").symlink_to("../../blobs/0f")
    for store, key in (
        (snapshot, "deep"),
        (snapshot, "refs"),
        (PosixStore(str(repository / "other" / "abc")), "f"),
    ):
        with pytest.raises(UnsafeContent, match="leads out"):
            read(store, key)
    put_bytes(snapshot, "f", b"new")
    assert (repository / "blobs" / "0f").read_bytes() == b"x"


def test_links_that_stay_inside(store: PosixStore, tmp_path: Path) -> None:
    put_bytes(store, "a/f", b"x")
    (Path(store.url) / "b").symlink_to("a")
    put_bytes(store, "b/g", b"y")
    assert read(store, "a/g") == read(store, "b/g") == b"y"
    # A root that is a link, and is turned while a store is open.
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "f").write_bytes(b"o")
    latest = tmp_path / "latest"
    latest.symlink_to("root")
    through = PosixStore(str(latest))
    assert read(through, "a/f") == b"x"
    latest.unlink()
    latest.symlink_to("other")
    assert read(through, "f") == b"o"
    # A root whose name another's begins with.
    (tmp_path / "root2").mkdir()
    (tmp_path / "root2" / "f").write_bytes(b"x")
    (Path(store.url) / "sibling").symlink_to("../root2/f")
    with pytest.raises(UnsafeContent):
        read(store, "sibling")


@pytest.mark.timeout(20)
def test_pipes_and_folders_are_not_found(store: PosixStore) -> None:
    os.mkfifo(os.path.join(store.url, "pipe"))
    os.mkdir(os.path.join(store.url, "folder"))
    for key in ("pipe", "folder"):
        with pytest.raises(NotFound, match="not a file"):
            read(store, key)
        with pytest.raises(NotFound, match="not a file"):
            store.stat(key)


def test_names_that_are_not_keys_are_not_listed(store: PosixStore) -> None:
    put_bytes(store, "good", b"x")
    for name in (b"not-utf8-\xff", b"back\\slash"):
        Path(os.fsdecode(os.path.join(os.fsencode(store.url), name))).write_bytes(b"x")
    assert [stat.key for stat in store.list()] == ["good"]


def test_truncated_says_where_the_file_ends(store: PosixStore) -> None:
    put_bytes(store, "k", b"0123456789")
    with pytest.raises(Truncated, match="ends at byte 10"):
        store.read_into("k", 1000, [memoryview(bytearray(5))])


@pytest.mark.parametrize("mode", list(PutMode))
def test_a_failed_clean_up_does_not_fail_a_put(
    store: PosixStore, monkeypatch: pytest.MonkeyPatch, mode: PutMode
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EPERM, "not now")

    monkeypatch.setattr(os, "unlink", refuse)
    put_bytes(store, "k", b"x", mode=mode)
    assert read_bytes(store, "k") == b"x"


@pytest.mark.parametrize(
    ("function", "number", "mode", "kind", "settled"),
    [
        ("writev", errno.ENOSPC, PutMode.OVERWRITE, StorageFull, True),
        ("writev", errno.EIO, PutMode.OVERWRITE, StorageUnavailable, True),
        ("fsync", errno.EIO, PutMode.OVERWRITE, StorageUnavailable, True),
        ("replace", errno.EACCES, PutMode.OVERWRITE, AccessDenied, True),
        ("replace", errno.ESTALE, PutMode.OVERWRITE, StorageUnavailable, False),
        ("replace", errno.ENOENT, PutMode.OVERWRITE, NotFound, False),
    ],
)
def test_errors_say_whether_the_put_is_settled(
    store: PosixStore,
    monkeypatch: pytest.MonkeyPatch,
    function: str,
    number: int,
    mode: PutMode,
    kind: type[StorageError],
    settled: bool,
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, function, fail)
    with pytest.raises(kind) as caught:
        store.put("k", BytesBody(bytes(MIB)), mode=mode)
    assert caught.value.settled is settled
    monkeypatch.undo()
    assert os.listdir(store.url) == []


def test_a_name_that_may_not_be_durable(store: PosixStore, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync, calls = os.fsync, []

    def fail_second(fd: int) -> None:
        calls.append(fd)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(fd)

    monkeypatch.setattr(os, "fsync", fail_second)
    with pytest.raises(StorageFull) as caught:
        put_bytes(store, "k", b"x")
    assert not caught.value.settled
    assert read_bytes(store, "k") == b"x"


@pytest.mark.parametrize("key", ["k", "rank-00000/k"])
def test_folders_that_others_have_made_are_made_durable_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    """Who made them, a launcher or a save that was killed, may not have done it."""
    fsync, synced = os.fsync, list[str]()

    def note(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    root = tmp_path / "run" / "step-1"
    (root / "rank-00000").mkdir(parents=True)
    store = PosixStore(str(root))
    monkeypatch.setattr(os, "fsync", note)
    put_bytes(store, key, b"x")
    above = [*root.parents] if key == "k" else [root]
    device = root.stat().st_dev
    wanted = [str(path) for path in above if path.stat().st_dev == device]
    _, directory, *rest = synced
    assert (directory, rest) == (str((root / key).parent), wanted)
    synced.clear()
    put_bytes(store, key, b"y")
    assert len(synced) == 2


@pytest.mark.parametrize(
    "number", [errno.EPERM, errno.EIO, errno.EACCES, errno.EXDEV, errno.EINVAL, errno.EDQUOT, 524]
)
def test_a_mount_without_hard_links(store: PosixStore, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    link = os.link
    lstat = os.lstat

    def refuse(*_: Any) -> None:
        raise OSError(number, "no links")

    def lose_reply(source: str, target: str) -> None:
        link(source, target)
        refuse()

    def refuse_look(path: Any) -> Any:
        return refuse() if str(path).endswith("/other") else lstat(path)

    monkeypatch.setattr(os, "link", refuse)
    put_bytes(store, "k", b"x", mode=PutMode.CREATE)
    with pytest.raises(AlreadyExists) as caught:
        put_bytes(store, "k", b"y", mode=PutMode.CREATE)
    assert caught.value.settled
    assert read_bytes(store, "k") == b"x"
    monkeypatch.setattr(os, "link", lose_reply)
    put_bytes(store, "other", b"z", mode=PutMode.CREATE)
    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(os, "lstat", refuse_look)
    with pytest.raises(
        StorageError, match=r"no links|Input"
    ):  # it does not replace a file that it cannot see
        put_bytes(store, "other", b"w", mode=PutMode.CREATE)
    monkeypatch.undo()
    assert read_bytes(store, "other") == b"z"
    assert sorted(os.listdir(store.url)) == ["k", "other"]


def test_a_refused_create_is_settled(store: PosixStore) -> None:
    put_bytes(store, "k", b"x")
    with pytest.raises(AlreadyExists) as caught:
        put_bytes(store, "k", b"y", mode=PutMode.CREATE)
    assert caught.value.settled


def test_closed_directories() -> None:
    with tempfile.TemporaryDirectory() as place:  # `tmp_path` is below one that only its owner may enter
        os.chmod(place, 0o777)
        root = os.path.join(place, "root")
        os.makedirs(os.path.join(root, "closed"))
        os.mkdir(os.path.join(root, "drop"))
        (message,) = run_ranks(1, _use_as_nobody, root)
    assert message == "done"


def _use_as_nobody(rank: int, root: str) -> str:
    os.chmod(root, 0o777)
    if os.geteuid() == 0:
        for name in ("closed", "drop"):
            os.chown(os.path.join(root, name), 65534, 65534)
        os.seteuid(65534)
    os.chmod(os.path.join(root, "closed"), 0)
    os.chmod(os.path.join(root, "drop"), 0o300)
    store = PosixStore(root)
    put_bytes(store, "drop/k", b"x")  # may be written to, though not looked at or synced
    assert read_bytes(store, "drop/k") == b"x"
    for action in (lambda: list(store.list("closed/")), lambda: store.abandon("closed/")):
        with pytest.raises(AccessDenied):
            action()
    for name in ("closed", "drop"):
        os.chmod(os.path.join(root, name), 0o700)
    return "done"


@pytest.mark.parametrize("fsync", [True, False])
def test_write_back_begins_early_where_files_are_synced(
    fsync: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    advised: list[tuple[int, int]] = []

    def refuse(fd: int, start: int, nbytes: int, advice: int) -> None:
        advised.append((start, nbytes))
        raise OSError(errno.ENOSYS, "not here")

    monkeypatch.setattr(os, "posix_fadvise", refuse)
    data = os.urandom(20 << 20)
    put_bytes(PosixStore(str(tmp_path), {"fsync": fsync}), "a", data)
    assert (tmp_path / "a").read_bytes() == data
    assert advised == ([(0, 8 << 20), (8 << 20, 8 << 20), (16 << 20, 8 << 20)] if fsync else [])


# -- file systems that lie, imitated (tests/integration has the real ones) ---------------------------------


def test_names_that_a_client_remembers_as_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As s3fs does with enable_noobj_cache: missing is missing, until the directory is listed."""
    monkeypatch.setattr("ckpt.backends.paths.filesystem_type", lambda path: "fuse.s3fs")
    store = PosixStore(str(tmp_path / "run" / "step-1"))
    missing: set[str] = set()
    _remember_missing(missing, monkeypatch)
    for key in ("k", "rank-00000/k"):
        with pytest.raises(NotFound):
            store.stat(key)
        missing |= {str(tmp_path / "run"), store.url, f"{store.url}/rank-00000", f"{store.url}/{key}"}
        (Path(store.url) / key).parent.mkdir(parents=True, exist_ok=True)
        (Path(store.url) / key).write_bytes(b"x")
        assert read(store, key) == b"x"
        assert store.stat(key).size_bytes == 1


def _remember_missing(missing: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    open_file, isdir, listdir = os.open, os.path.isdir, os.listdir

    def is_hidden(path: str) -> bool:
        return any((path + "/").startswith(name + "/") for name in missing)

    def open_unless_hidden(path: str, *args: Any, **kwargs: Any) -> int:
        if is_hidden(path):
            raise FileNotFoundError(errno.ENOENT, "remembered as missing", path)
        return open_file(path, *args, **kwargs)

    def list_and_forget(path: str) -> Any:
        if is_hidden(path):
            raise FileNotFoundError(errno.ENOENT, "remembered as missing", path)
        missing.difference_update([name for name in missing if os.path.dirname(name) == path])
        return listdir(path)

    monkeypatch.setattr(os, "open", open_unless_hidden)
    monkeypatch.setattr(os.path, "isdir", lambda path: not is_hidden(path) and isdir(path))
    monkeypatch.setattr(os, "listdir", list_and_forget)


def test_local_disks_are_not_listed_for_what_is_missing(
    store: PosixStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: str) -> Any:
        raise AssertionError("listed")

    for name in ("listdir", "scandir"):
        monkeypatch.setattr(os, name, refuse)
    with pytest.raises(NotFound):
        store.stat("k")


def test_rclone_mounts_that_cache_writes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt.backends.paths.filesystem_type", lambda path: "fuse.rclone")
    with pytest.raises(ConfigurationError, match="cannot promise that a save is durable"):
        put_bytes(PosixStore(str(tmp_path)), "k", b"x")
    assert os.listdir(tmp_path) == []
    put_bytes(PosixStore(str(tmp_path), {"fsync": False}), "accepted", b"x")

    def refuse(fd: int, size: int) -> None:
        raise PermissionError(errno.EPERM, "can't change size without --vfs-cache-mode >= writes")

    monkeypatch.setattr(os, "ftruncate", refuse)
    put_bytes(PosixStore(str(tmp_path)), "k", b"x")
    assert (tmp_path / "k").read_bytes() == b"x"
