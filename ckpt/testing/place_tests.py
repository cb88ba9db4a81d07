"""Test how a store lists, deletes and names objects, and how it travels to another process."""

from __future__ import annotations

import contextlib
import os
import pickle

import pytest

from ckpt.backends.base import Store, put_bytes, read_bytes
from ckpt.errors import CheckpointError, ConfigurationError, NotFound
from ckpt.testing.store_contract import StoreUnderTest, run_all

__all__ = ["PlaceTests"]


class PlaceTests(StoreUnderTest):
    """List, delete, prepare, keys; and the store itself."""

    # -- list and delete ---------------------------------------------------------------------------

    def test_list_by_prefix(self, store: Store) -> None:
        sizes = {"a/1": 1, "a/2": 2, "ab/3": 3, "b/c/4": 4, "5": 5}
        for key, size in sizes.items():
            self.raw_put(store, key, b"x" * size)
        self.eventually(lambda: _listed(store) == sizes)
        assert _listed(store, "a/") == {"a/1": 1, "a/2": 2}
        assert _listed(store, "a") == {"a/1": 1, "a/2": 2, "ab/3": 3}
        assert _listed(store, "b/c/") == {"b/c/4": 4}
        assert _listed(store, "none/") == {}

    def test_delete(self, store: Store) -> None:
        for key in ("a/1", "a/2", "b"):
            self.raw_put(store, key, b"x")
        store.delete(["a/1", "b", "never/was"])
        store.delete(["a/1"])
        store.delete([])
        self.eventually(lambda: self.raw_get(store, "a/1") is None)
        self.eventually(lambda: self.raw_get(store, "b") is None)
        assert self.raw_get(store, "a/2") == b"x"

    def test_delete_many(self, store: Store) -> None:
        keys = [f"many/{i}" for i in range(30)]
        for key in keys:
            self.raw_put(store, key, b"x")
        store.delete(iter(keys))
        self.eventually(lambda: _listed(store) == {})

    # -- places ------------------------------------------------------------------------------------

    def test_parent(self, store: Store) -> None:
        if store.open_parent is None and type(store).parent is Store.parent:
            pytest.skip("opened without its URL")
        put_bytes(store, "k", b"x")
        parent = store.parent()
        key = f"{store.url.rpartition('/')[2]}/k"
        self.eventually(lambda: bytes(read_bytes(parent, key)) == b"x")
        put_bytes(parent, key, b"y")
        self.eventually(lambda: self.raw_get(store, "k") == b"y")
        parent.close()
        assert store.stat("k").size_bytes == 1

    def test_prepare_tolerates_races(self, store: Store) -> None:
        run_all(lambda i: store.prepare(f"place/rank-{i % 2}"), list(range(16)))
        put_bytes(store, "place/rank-1/k", b"x")
        assert self.raw_get(store, "place/rank-1/k") == b"x"

    def test_put_needs_no_prepare(self, store: Store) -> None:
        put_bytes(store, "no/one/prepared/this", b"x")
        assert self.raw_get(store, "no/one/prepared/this") == b"x"

    def test_abandon_spares_what_is_finished(self, store: Store) -> None:
        put_bytes(store, "p/k", b"x")
        assert store.abandon("p/") == 0
        assert store.abandon(choose=lambda _: True) == 0
        assert store.abandon() == 0
        assert self.raw_get(store, "p/k") == b"x"

    def test_folders_are_those_directly_below(self, store: Store) -> None:
        for key in ("a/k", "a/b/k", "c/d/e/k", "k", "ab/k"):
            put_bytes(store, key, b"x")
        self.eventually(lambda: sorted(set(store.folders())) == ["a", "ab", "c"])
        assert list(store.folders("a/")) == ["b"]
        assert list(store.folders("c/d/e/")) == []
        assert list(store.folders("nothing/")) == []

    def test_only_empty_directories_are_removed(self, store: Store) -> None:
        store.prepare("p/empty/deep")
        put_bytes(store, "p/full/k", b"x")
        for prefix in ("p", "p/empty", "p/full", "nothing", ""):
            store.remove_empty(prefix)
        if store.directory is not None:
            assert os.path.isdir(os.path.join(store.directory, "p", "empty", "deep"))
        store.remove_empty("p/empty/deep")
        if store.directory is not None:
            assert os.listdir(os.path.join(store.directory, "p", "empty")) == []
        assert self.raw_get(store, "p/full/k") == b"x"
        put_bytes(store, "p/empty/deep/k", b"x")
        assert self.raw_get(store, "p/empty/deep/k") == b"x"

    @pytest.mark.parametrize(
        "key",
        [
            *("", "/abs", "a//b", "../up", "a/../../up", "a/.", "a\\b", "a/", "nul\0", "lone\ud800"),
            pytest.param("\u00e9" * 128, id="name of 256 bytes"),
            pytest.param("a/" * 512 + "a", id="1025 bytes"),
        ],
    )
    def test_keys_cannot_leave_the_root(self, store: Store, key: str) -> None:
        for action in (
            lambda: put_bytes(store, key, b"x"),
            lambda: store.read_into(key, 0, [memoryview(bytearray(1))]),
            lambda: store.stat(key),
            lambda: store.delete([key]),
        ):
            with pytest.raises(ConfigurationError):
                action()

    @pytest.mark.parametrize(
        "key", ["with space", "uml\u00e4ut/\u65e5\u672c", "per%cent+plus", "a.b-c_d~e", "q?m#h&x=1"]
    )
    def test_odd_keys(self, store: Store, key: str) -> None:
        put_bytes(store, key, b"odd")
        assert self.raw_get(store, key) == b"odd"
        assert read_bytes(store, key) == b"odd"
        self.eventually(lambda: _listed(store) == {key: 3})
        store.delete([key])
        self.eventually(lambda: self.raw_get(store, key) is None)

    # -- the store itself --------------------------------------------------------------------------

    def test_pickles(self, store: Store) -> None:
        put_bytes(store, "k", b"x")
        with contextlib.closing(pickle.loads(pickle.dumps(store))) as copy:
            assert copy.url == store.url
            assert copy.threads == store.threads
            put_bytes(copy, "from/the/copy", b"y")
            assert self.raw_get(store, "from/the/copy") == b"y"

    def test_errors_pickle(self, store: Store) -> None:
        with pytest.raises(NotFound) as caught:
            store.stat("missing")
        copy = pickle.loads(pickle.dumps(caught.value))
        assert (type(copy), str(copy), copy.key) == (NotFound, str(caught.value), "missing")
        assert isinstance(copy, CheckpointError)

    def test_secrets_stay_secret(self, store: Store) -> None:
        with pytest.raises(NotFound) as caught:
            store.stat("missing")
        for text in (repr(store), store.url, str(caught.value), repr(caught.value)):
            assert not [value for value in self.secret_values if value in text]

    def test_close_twice(self, store: Store) -> None:
        put_bytes(store, "k", b"x")
        store.close()
        store.close()


def _listed(store: Store, prefix: str = "") -> dict[str, int]:
    return {stat.key: stat.size_bytes for stat in store.list(prefix)}
