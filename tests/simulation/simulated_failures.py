"""Protocols as others have them, each in its smallest form: the checks of ours must catch them."""

from __future__ import annotations

from ckpt.backends.base import put_bytes, read_bytes
from ckpt.backends.registry import open_store
from ckpt.consistency import environment
from ckpt.errors import NotFound
from ckpt.testing.simulated_store import SimulatedStore
from simulation.simulated_jobs import Content, Group, Protocol, SurelyFailed, Uncommitted


class _Simple(Protocol):
    """Ranks write, all meet, the first rank finishes, all meet."""

    def save(self, url: str, group: Group, rank: int, content: Content) -> None:
        store = _open(url)
        token = group.broadcast(rank, environment.token() if rank == 0 else None)
        if rank == 0:
            self.begin(store)
        group.broadcast(rank, "begun")
        self.write(store, token, rank, content)
        group.gather(rank, "written")
        if rank == 0:
            self.finish(store, token, len(content))
        group.broadcast(rank, "finished")

    def begin(self, store: SimulatedStore) -> None:
        pass

    def write(self, store: SimulatedStore, token: str, rank: int, content: Content) -> None:
        raise NotImplementedError

    def finish(self, store: SimulatedStore, token: str, size: int) -> None:
        pass

    def delete(self, url: str) -> None:
        raise SurelyFailed("not offered")


def _open(url: str) -> SimulatedStore:
    store = open_store(url)
    assert isinstance(store, SimulatedStore)
    return store


def _read_marker(store: SimulatedStore, key: str) -> bytes:
    """Read the object without which there is no checkpoint."""
    try:
        return bytes(read_bytes(store, key))
    except NotFound as error:
        raise Uncommitted from error


class RankZeroMakesTheDirectory(_Simple):
    """The first rank makes the directory, as in 2023; all others take it to be there."""

    def begin(self, store: SimulatedStore) -> None:
        store.prepare("data")

    def write(self, store: SimulatedStore, token: str, rank: int, content: Content) -> None:
        store.put_into(f"data/{token}-{rank}", str(content[rank]).encode())

    def finish(self, store: SimulatedStore, token: str, size: int) -> None:
        put_bytes(store, "done", f"{token} {size}".encode())

    def load(self, url: str) -> Content:
        store = _open(url)
        token, size = _read_marker(store, "done").split()
        return tuple(int(read_bytes(store, f"data/{token.decode()}-{rank}")) for rank in range(int(size)))


class RenamesAtTheEnd(_Simple):
    """Writes beside and renames: an object store copies and deletes one object after the other."""

    def write(self, store: SimulatedStore, token: str, rank: int, content: Content) -> None:
        put_bytes(store, f"tmp-{token}/{rank}", f"{len(content)} {content[rank]}".encode())

    def finish(self, store: SimulatedStore, token: str, size: int) -> None:
        for rank in range(size):
            data = bytes(read_bytes(store, f"tmp-{token}/{rank}"))
            put_bytes(store, f"final/{rank}", data)
            store.delete([f"tmp-{token}/{rank}"])

    def load(self, url: str) -> Content:
        store = _open(url)
        size = int(_read_marker(store, "final/0").split()[0])
        return tuple(int(bytes(read_bytes(store, f"final/{rank}")).split()[1]) for rank in range(size))


class FindsByListing(_Simple):
    """Takes the newest save of which all files are listed for the checkpoint."""

    def write(self, store: SimulatedStore, token: str, rank: int, content: Content) -> None:
        put_bytes(store, f"{token}/{rank}-of-{len(content)}", str(content[rank]).encode())

    def load(self, url: str) -> Content:
        store = _open(url)
        keys = [stat.key for stat in store.list() if "-of-" in stat.key]
        for token in sorted({key.partition("/")[0] for key in keys}, reverse=True):
            names = sorted(key for key in keys if key.startswith(token))
            if len(names) == int(names[0].rpartition("-")[2]):
                return tuple(int(read_bytes(store, name)) for name in names)
        raise Uncommitted


class WritesInPlace(_Simple):
    """Uses the same names every time, and a marker at the end."""

    def write(self, store: SimulatedStore, token: str, rank: int, content: Content) -> None:
        put_bytes(store, f"data/{rank}", str(content[rank]).encode())

    def finish(self, store: SimulatedStore, token: str, size: int) -> None:
        put_bytes(store, "done", str(size).encode())

    def load(self, url: str) -> Content:
        store = _open(url)
        size = int(_read_marker(store, "done"))
        return tuple(int(read_bytes(store, f"data/{rank}")) for rank in range(size))
