"""Load a checkpoint from the nearest places: this node's disk, the other nodes', the durable place."""

from __future__ import annotations

import contextlib
import logging
import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from torch.distributed.checkpoint.planner import LoadPlanner

from ckpt.backends.base import Capabilities, ObjectStat, Store
from ckpt.backends.registry import open_store
from ckpt.collective import load_by, place_of
from ckpt.errors import FormatError, IntegrityError, NotFound, NotVisible, StorageError, Truncated
from ckpt.format.names import ObjectName, split_path
from ckpt.format.records import StoredCommit
from ckpt.local_first.holdings import Holding, shared
from ckpt.local_first.near_store import NearStore, ReadOnlyStore
from ckpt.local_first.neighbours import Neighbours, NeighbourStore, stem_of
from ckpt.options import LoadOptions
from ckpt.ranks.group import DEFAULT_TIMEOUT_S, Ranks
from ckpt.reading.checkpoint import Checkpoint, ReadSettings
from ckpt.reading.reader import CheckpointReader

_logger = logging.getLogger(__name__)

_SETTINGS = ReadSettings(visibility_timeout_s=0.0)
_OF_A_PLACE = (IntegrityError, FormatError, StorageError, Truncated, NotVisible)
"""Errors of the bytes at a place, as all ranks see them: at another one they may be there."""


class _Without(ReadOnlyStore):
    """A store without some files, which are damaged in it."""

    def __init__(self, inner: Store, stems: Collection[str]) -> None:
        self.url, self.threads, self._inner, self._stems = inner.url, inner.threads, inner, stems

    @property
    def capabilities(self) -> Capabilities:
        return self._inner.capabilities

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        self._check(key)
        self._inner.read_into(key, offset, buffers)

    def stat(self, key: str) -> ObjectStat:
        self._check(key)
        return self._inner.stat(key)

    def list(self, prefix: str = "") -> Iterator[ObjectStat]:
        return self._inner.list(prefix)

    def parent(self) -> Store:
        return self._inner.parent()

    def close(self) -> None:
        self._inner.close()

    def _check(self, key: str) -> None:
        if self._stems and _is_of_rank(key) and stem_of(key) in self._stems:
            raise NotFound("it is damaged here", url=self.url, key=key)


def _is_of_rank(key: str) -> bool:
    """Tell whether an object is a rank's manifest or data; the records of a checkpoint are read on any node."""
    name = ObjectName.parse(split_path(key)[1])
    return name is not None and (name.is_data or name.kind == "json")


class NearReader(CheckpointReader):
    """Reads a checkpoint of which each node has a part in its folder `near`, from there and from `far`."""

    def __init__(
        self,
        near: str,
        far: str | None,
        ranks: Ranks,
        *,
        storage_options: Mapping[str, Any] | None,
        distrusted: Collection[tuple[int, str]] = (),
        **options: Any,
    ) -> None:
        self._far, self._far_options, self._ranks = far, storage_options, ranks
        self._distrusted = distrusted
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

    def failed_places(self) -> set[tuple[int, str]]:
        """List the ranks whose disks had files of this load damaged or not at all, and the stems of these files."""
        own, source_of = self._ranks.rank, self._neighbours.source_of
        damaged = {(layer, key) for key in self._neighbours.damaged for layer in ("node", "neighbours")}
        places = {
            (own if layer == "node" else source_of(key), stem_of(key))
            for layer, key in self.near_store.failed | damaged
            if layer != "durable" and _is_of_rank(key)
        }
        return {(rank, stem) for rank, stem in places if rank is not None}

    def _open(self, url: str | os.PathLike[str]) -> None:
        near = open_store(url, threads=self._threads)
        far = None if self._far is None else open_store(self._far, self._far_options, threads=self._threads)
        self._neighbours = Neighbours(self._ranks, near, far, distrusted=self._distrusted)
        layers: list[tuple[str, Store]] = [
            ("node", _Without(near, {stem for rank, stem in self._distrusted if rank == self._ranks.rank})),
            ("neighbours", NeighbourStore(self._neighbours, near)),
        ]
        if far is not None:
            layers.append(("durable", far))
        self.near_store = NearStore(layers)
        self._url, self._store = os.fspath(url), self._guarded(self.near_store)
        self._files_per_rank = None


def load_near(
    state_dict: dict[str, Any],
    holding: Holding,
    root: str,
    far: str | None,
    *,
    planner: LoadPlanner | None,
    process_group: Any = None,
    no_dist: bool = False,
    read_once: bool = True,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    options: LoadOptions | None = None,
    **settings: Any,
) -> Mapping[str, int]:
    """Load a checkpoint as `ckpt.load` does, from wherever it is nearest; return the bytes read, by place.

    What one place lacks, or has damaged, is read from the next. A node that has no records of the
    checkpoint is given them first. Where that is not enough, as the only other place is another node's copy, all ranks
    begin anew, and ask that.

    Args:
        holding: what the nodes have of it, the same on all ranks.
        root: the run's folder on this node.
        far: the checkpoint in the durable place, if it is there too.

    Raises as `ckpt.load`.
    """
    near, distrusted = os.path.join(root, holding.path), frozenset[tuple[int, str]]()
    readers: list[NearReader] = []

    def make_reader(ranks: Ranks) -> NearReader:
        readers[:] = [NearReader(near, far, ranks, timeout_s=timeout_s, distrusted=distrusted, **settings)]
        return readers[0]

    def open_together(reader: NearReader, ranks: Ranks) -> bytes:
        ranks.progress.wait_for("a rank to read the records of the checkpoint")
        with contextlib.closing(open_store(near)) as store:
            records = shared(ranks, holding.owner or 0, reader.near_store, holding.id)
            try:
                records.keep(store)
            except Exception as error:  # a disk that takes no more can still be read
                _logger.warning("%s: its records cannot be kept on this node: %s", holding.path, error)
            commit = StoredCommit(records.commit, store.url)
            key = commit.record.described_by.path
            return Checkpoint(store, _SETTINGS, commit, key, records.described, is_shared=True).share()

    while True:
        with contextlib.closing(Ranks(process_group, no_dist=no_dist, timeout_s=timeout_s)) as ranks:
            try:
                return load_by(
                    state_dict, place_of(near), planner, make_reader, ranks, open_together, options
                ).read_bytes
            except _OF_A_PLACE as error:  # the same on all ranks
                known = distrusted
                failed = readers[0].failed_places() if readers else set[tuple[int, str]]()
                distrusted |= ranks.join(failed, lambda some, others: some | others)
                if distrusted == known or ranks.size == 1:
                    raise
                _logger.warning("loading again, with other nodes' copies of what is damaged: %s", error)
