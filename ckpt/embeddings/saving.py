"""Save tables beside the rest of a training state, and restore both: `ckpt.embeddings.Tables`."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta

from ckpt.api import async_save, save
from ckpt.embeddings.cut import Cut
from ckpt.embeddings.restoring import PREFIX, restore_shard
from ckpt.embeddings.shard import Due, TableShard, entries_of
from ckpt.errors import ConfigurationError
from ckpt.reading.slices import OpenCheckpoint
from ckpt.references.frozen import Patterns
from ckpt.references.request import References

_logger = logging.getLogger(__name__)


class Tables:
    """The shards of tables that this process keeps, saved with everything else in one checkpoint.

    Every rank of the job makes one, with no shards where it keeps none. The first save writes all rows, later
    ones, to other places in the same folder, what changed since; any of them restores everything.

    Raises:
        ConfigurationError: two shards of one table.
    """

    def __init__(self, *shards: TableShard) -> None:
        names = [shard.name for shard in shards]
        if len(set(names)) != len(names):
            raise ConfigurationError(f"a process keeps one shard of each table, not several: {sorted(names)}")
        self.shards = shards
        self._base: str | os.PathLike[str] | None = None

    def save(
        self,
        state_dict: dict[str, Any],
        url: str | os.PathLike[str],
        *,
        frozen: Collection[str] = (),
        **options: Any,
    ) -> Metadata:
        """Save the tables and `state_dict`, from all ranks; options are those of `ckpt.save`.

        Rows may change meanwhile, inside `TableShard.writing`: the checkpoint holds them as they were at the call.

        Raises:
            SaveFailed, ConfigurationError: as `ckpt.save`; what has changed is saved with the next one.
        """
        with self._settled(url) as (planner, references):
            return save(state_dict, url, planner=planner, base=references(frozen), **options)

    def async_save(
        self,
        state_dict: dict[str, Any],
        url: str | os.PathLike[str],
        *,
        frozen: Collection[str] = (),
        **options: Any,
    ) -> Future[Metadata]:
        """Do the same in the background, as `ckpt.async_save`; no table is copied, but rows that change."""
        with contextlib.ExitStack() as stack:
            planner, references = stack.enter_context(self._settled(url))
            future = async_save(state_dict, url, planner=planner, base=references(frozen), **options)
            rest = stack.pop_all()

        def settle(done: Future[Metadata]) -> None:
            error = done.exception()
            with contextlib.suppress(BaseException):
                rest.__exit__(type(error) if error else None, error, None)

        future.add_done_callback(settle)
        return future

    def restore(
        self, url: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None
    ) -> dict[str, int]:
        """Put the rows that this process keeps into its shards; return their numbers, by table.

        The rest of the state is loaded by `ckpt.load`. The next save writes what changed since this checkpoint
        where the shards are those that saved it, and all rows where they are others.

        Raises:
            LoadFailed, NotFound, NotCommitted, IntegrityError, ...: as `ckpt.load`.
            ConfigurationError: a table has other columns.
        """
        with OpenCheckpoint(url, storage_options) as checkpoint:
            counts = {shard.name: restore_shard(checkpoint, shard) for shard in self.shards}
        self._base = url
        return counts

    @contextlib.contextmanager
    def _settled(self, url: str | os.PathLike[str]) -> Iterator[tuple[TablePlanner, Any]]:
        """Cut all shards, and tell them afterwards how the save has ended."""
        cuts: list[Cut] = []
        base = self._base
        try:
            for shard in self.shards:
                cuts.append(shard.cut(base=base is None))
            planner = TablePlanner(cuts)

            def references(frozen: Collection[str]) -> References:
                prefixes = frozenset(
                    f"{PREFIX}{cut.chain.prefix(generation)}."
                    for cut in cuts
                    for generation in cut.chain.generations[:-1]
                )
                return References(base, Patterns(frozen), prefixes, undigested=PREFIX)

            yield planner, references
        except BaseException:
            for shard, _ in zip(self.shards, cuts, strict=False):
                shard.settle(durable=False)
            raise
        for shard in self.shards:
            shard.settle(durable=True)
        self._base = url


class TablePlanner(DefaultSavePlanner):
    """Plan a state and the rows of some cuts, which are read when they are due."""

    def __init__(self, cuts: Collection[Cut]) -> None:
        super().__init__()
        self._due: dict[str, Due] = {}
        self._plain: dict[str, Any] = {}
        for cut in cuts:
            for name, value in entries_of(cut).items():
                (self._due if isinstance(value, Due) else self._plain)[name] = value

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Add the tables to the state, as tensors without values where rows are read later."""
        if PREFIX.rstrip(".") in state_dict:
            raise ConfigurationError(f"the key {PREFIX.rstrip('.')!r} of the state is that of the tables")
        tables = self._plain | {name: due.placeholder() for name, due in self._due.items()}
        both = state_dict | {PREFIX.rstrip("."): tables} if tables else state_dict
        super().set_up_planner(both, storage_meta, is_coordinator)

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return a value of the state, or read rows."""
        due = self._due.get(index.fqn.removeprefix(PREFIX)) if index.fqn.startswith(PREFIX) else None
        return super().lookup_object(index) if due is None else due.read()

