"""Load a checkpoint from the nearest places: this node's disk, the other nodes', the durable place."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch.distributed.checkpoint.planner import LoadPlanner

from ckpt.api import load_by, place_of
from ckpt.backends.base import Store
from ckpt.backends.registry import open_store
from ckpt.format.records import StoredCommit
from ckpt.local_first.holdings import Holding, shared
from ckpt.local_first.near_store import NearStore
from ckpt.local_first.neighbours import Neighbours, NeighbourStore
from ckpt.ranks.group import DEFAULT_TIMEOUT_S, Ranks
from ckpt.reading.checkpoint import Checkpoint, ReadSettings
from ckpt.reading.reader import CheckpointReader

_SETTINGS = ReadSettings(visibility_timeout_s=0.0)


class NearReader(CheckpointReader):
    """Reads a checkpoint of which each node has a part in its folder `near`, from there and from `far`."""

    def __init__(
        self,
        near: str,
        far: str | None,
        ranks: Ranks,
        *,
        storage_options: Mapping[str, Any] | None,
        **options: Any,
    ) -> None:
        self._far, self._far_options, self._ranks = far, storage_options, ranks
        super().__init__(near, visibility_timeout_s=0.0, **options)
        self.use(ranks.progress)
        self._replicas = self._neighbours

    @property
    def read_bytes(self) -> Counter[str]:
        """What was read, by where it lay: `node`, `neighbours`, `durable`."""
        read = self.near_store.read_bytes.copy()
        for_all = self._neighbours.far_bytes
        read.update({"durable": for_all, "neighbours": -for_all})
        return read

    def _open(self, url: str | os.PathLike[str]) -> None:
        near = open_store(url, threads=self._threads)
        far = None if self._far is None else open_store(self._far, self._far_options, threads=self._threads)
        self._neighbours = Neighbours(self._ranks, near, far)
        layers: list[tuple[str, Store]] = [
            ("node", near),
            ("neighbours", NeighbourStore(self._neighbours, near)),
        ]
        if far is not None:
            layers.append(("durable", far))
        self._bare = self.near_store = NearStore(layers)
        self._url, self._store = os.fspath(url), self._guarded(self._bare)
        self._files_per_rank = None


def load_near(
    state_dict: dict[str, Any],
    holding: Holding,
    root: str,
    far: str | None,
    *,
    planner: LoadPlanner,
    process_group: Any = None,
    read_once: bool = True,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    **options: Any,
) -> Mapping[str, int]:
    """Load a checkpoint as `ckpt.load` does, from wherever it is nearest; return the bytes read, by place.

    What one place lacks, or has damaged, is read from the next. A node that has no records of the
    checkpoint is given them first.

    Args:
        holding: what the nodes have of it, the same on all ranks.
        root: the run's folder on this node.
        far: the checkpoint in the durable place, if it is there too.

    Raises as `ckpt.load`.
    """
    near = os.path.join(root, holding.path)

    def make_reader(ranks: Ranks) -> NearReader:
        return NearReader(near, far, ranks, timeout_s=timeout_s, **options)

    def open_together(reader: NearReader, ranks: Ranks) -> bytes:
        ranks.progress.wait_for("a rank to read the records of the checkpoint")
        with contextlib.closing(open_store(near)) as store:
            records = shared(ranks, holding.owner or 0, reader.near_store, holding.id)
            with contextlib.suppress(Exception):  # a disk that takes no more can still be read
                records.keep(store)
            commit = StoredCommit(records.commit, store.url)
            key = commit.record.described_by.path
            return Checkpoint(store, _SETTINGS, commit, key, records.described, is_shared=True).share()

    with contextlib.closing(Ranks(process_group, no_dist=False, timeout_s=timeout_s)) as ranks:
        reader = load_by(state_dict, place_of(near), planner, make_reader, ranks, open_together)
    return reader.read_bytes
