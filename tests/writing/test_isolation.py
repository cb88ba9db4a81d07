"""No rank depends on what another rank wrote being visible, on listings, or on a directory of rank 0's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from support.ranks import run_ranks
from support.states import digest, emptied, sharded_state

import ckpt
from ckpt.backends.base import ObjectStat, PutMode
from ckpt.backends.bodies import Body
from ckpt.backends.posix import PosixStore
from ckpt.backends.registry import register
from ckpt.backends.wrapper import WrappedStore

LOG: list[tuple[str, str]] = []


class WatchedStore(WrappedStore):
    """A directory whose every use is noted, and whose listing fails."""

    def __init__(self, url: str, options: Mapping[str, Any] | None = None, *, threads: int = 2) -> None:
        super().__init__(PosixStore(url.removeprefix("watched://"), options, threads=threads))
        self.url, self.directory = url, None

    def put(self, key: str, body: Body, *, mode: PutMode = PutMode.OVERWRITE) -> None:
        LOG.append(("put", key))
        self._inner.put(key, body, mode=mode)

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        LOG.append(("read", key))
        self._inner.read_into(key, offset, buffers)

    def read_whole(self, key: str, check: Callable[[int], None]) -> bytearray:
        LOG.append(("read", key))
        return self._inner.read_whole(key, check)

    def stat(self, key: str) -> ObjectStat:
        LOG.append(("stat", key))
        return self._inner.stat(key)

    def list(self, prefix: str = "") -> Iterator[ObjectStat]:
        raise AssertionError("nothing may depend on a listing")

    def delete(self, keys: Iterable[str]) -> None:
        keys = [*keys]
        LOG.extend(("delete", key) for key in keys)
        self._inner.delete(keys)

    def prepare(self, prefix: str) -> None:
        LOG.append(("prepare", prefix))
        self._inner.prepare(prefix)

    def abandon(self, prefix: str = "", *, choose: Any = None) -> int:
        raise AssertionError("a save that works abandons nothing")


def test_who_touches_what(tmp_path: Path) -> None:
    for saves, loads in run_ranks(3, _watched, f"watched://{tmp_path}"):
        for rank, log in enumerate(saves):
            for operation, key in log:
                own = key == f"rank-{rank:05d}" or key.startswith(f"rank-{rank:05d}/")
                commit = rank == 0 and key in ("commit.json", ".metadata")
                # The coordinator also clears away what the save replaced, after its commit.
                retired = rank == 0 and operation in ("delete", "read", "stat") and key.startswith("rank-")
                assert own or commit or retired, f"rank {rank}: {operation} {key}"
            puts = [key for operation, key in log if operation == "put"]
            assert len([key for key in puts if key.startswith("rank-")]) == len(
                {key for key in puts if key.startswith("rank-")}
            ), "no name is written twice"
        for rank, log in enumerate(loads):
            if rank != 0:  # the first rank opens the checkpoint for all
                assert {key for _, key in log} & {"commit.json", ".metadata"} == set()


def _watched(rank: int, url: str) -> Any:
    import torch.distributed as dist

    register("watched", WatchedStore)
    state = sharded_state()
    for _ in range(2):
        ckpt.save(state, url)
    saves = [None] * 3
    dist.all_gather_object(saves, LOG[:])
    LOG.clear()
    loaded = emptied(state)
    ckpt.load(loaded, url)
    assert digest(loaded) == digest(state)
    loads = [None] * 3
    dist.all_gather_object(loads, LOG[:])
    return saves, loads


def test_a_store_that_shows_nothing_of_others(tmp_path: Path) -> None:
    """Each rank saves into a directory of its own, as if no mount showed anything of another's.

    The union of what they wrote is a whole checkpoint.
    """
    expected = run_ranks(3, _separate_views, str(tmp_path))[0]
    union = tmp_path / "union"
    for rank in range(3):
        view = tmp_path / str(rank) / "c"
        for path in view.rglob("*"):
            target = union / path.relative_to(view)
            if path.is_dir():
                target.mkdir(parents=True, exist_ok=True)
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(path.read_bytes())
    assert run_ranks(2, _load, str(union)) == [expected] * 2


def _separate_views(rank: int, root: str) -> Any:
    state = sharded_state()
    ckpt.save(state, f"{root}/{rank}/c")
    return digest(state)


def _load(rank: int, url: str) -> Any:
    loaded = emptied(sharded_state(seed=4))
    ckpt.load(loaded, url)
    return digest(loaded)
