"""How others have done it, each in its smallest form: protocols that the checks of ours must catch."""

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
        store = self.store(url)
        token = group.broadcast(rank, environment.token() if rank == 0 else None)
        if rank == 0:
            self.begin(store)
        group.broadcast(rank, "begun")
        self.write(store, token, rank, content)
        group.gather(rank, "written")
        if rank == 0:
            self.finish(store, token, len(content))
        group.broadcast(rank, "finished")

    def store(self, url: str) -> SimulatedStore:
        store = open_store(url)
        assert isinstance(store, SimulatedStore)
        return store

    def begin(self, store: SimulatedStore) -> None:
        pass

    def write(self, store: SimulatedStore, token: str, rank: int, content: Content) -> None:
        raise NotImplementedError

    def finish(self, store: SimulatedStore, token: str, size: int) -> None:
        raise NotImplementedError

    def delete(self, url: str) -> None:
        raise SurelyFailed("not offered")


class RankZeroMakesTheDirectory(_Simple):
    """As it was in 2023: the first rank makes the directory, all others take it to be there."""

    def begin(self, store: SimulatedStore) -> None:
        store.prepare("data")

    def write(self, store: SimulatedStore, token: str, rank: int, content: Content) -> None:
        store.put_into(f"data/{token}-{rank}", str(content[rank]).encode())

    def finish(self, store: SimulatedStore, token: str, size: int) -> None:
        put_bytes(store, "done", f"{token} {size}".encode())

    def load(self, url: str) -> Content:
        store = self.store(url)
        try:
            token, size = bytes(read_bytes(store, "done")).split()
        except NotFound as error:
            raise Uncommitted from error
        return tuple(int(read_bytes(store, f"data/{token.decode()}-{rank}")) for rank in range(int(size)))


class RenamesAtTheEnd(_Simple):
    """Writes beside and renames, which an object store does by copying and deleting one object after the other."""

    def write(self, store: SimulatedStore, token: str, rank: int, content: Content) -> None:
        put_bytes(store, f"tmp-{token}/{rank}", f"{len(content)} {content[rank]}".encode())

    def finish(self, store: SimulatedStore, token: str, size: int) -> None:
        for rank in range(size):
            data = bytes(read_bytes(store, f"tmp-{token}/{rank}"))
            put_bytes(store, f"final/{rank}", data)
            store.delete([f"tmp-{token}/{rank}"])

    def load(self, url: str) -> Content:
        store = self.store(url)
        try:
            size = int(bytes(read_bytes(store, "final/0")).split()[0])
        except NotFound as error:
            raise Uncommitted from error
        return tuple(int(bytes(read_bytes(store, f"final/{rank}")).split()[1]) for rank in range(size))


class FindsByListing(_Simple):
    """The newest save of which all files are listed is the checkpoint."""

    def write(self, store: SimulatedStore, token: str, rank: int, content: Content) -> None:
        put_bytes(store, f"{token}/{rank}-of-{len(content)}", str(content[rank]).encode())

    def finish(self, store: SimulatedStore, token: str, size: int) -> None:
        pass

    def load(self, url: str) -> Content:
        store = self.store(url)
        keys = [found.key for found in store.list() if "-of-" in found.key]
        for token in sorted({key.partition("/")[0] for key in keys}, reverse=True):
            names = sorted(key for key in keys if key.startswith(token))
            if len(names) == int(names[0].rpartition("-")[2]):
                return tuple(int(read_bytes(store, name)) for name in names)
        raise Uncommitted


class WritesInPlace(_Simple):
    """The same names every time, and a marker at the end."""

    def write(self, store: SimulatedStore, token: str, rank: int, content: Content) -> None:
        put_bytes(store, f"data/{rank}", str(content[rank]).encode())

    def finish(self, store: SimulatedStore, token: str, size: int) -> None:
        put_bytes(store, "done", str(size).encode())

    def load(self, url: str) -> Content:
        store = self.store(url)
        try:
            size = int(read_bytes(store, "done"))
        except NotFound as error:
            raise Uncommitted from error
        return tuple(int(read_bytes(store, f"data/{rank}")) for rank in range(size))
