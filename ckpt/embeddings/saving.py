"""Save tables beside the rest of a training state, and restore both: `ckpt.embeddings.Tables`."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta

from ckpt.api import async_save, place_of, save
from ckpt.embeddings.chain import Costs, first_to_merge
from ckpt.embeddings.cut import Cut
from ckpt.embeddings.restoring import PREFIX, restore_shard
from ckpt.embeddings.shard import Due, TableShard, entries_of
from ckpt.errors import BaseGone, ConfigurationError, SaveFailed
from ckpt.ranks.failures import same_failure
from ckpt.ranks.group import Ranks
from ckpt.reading.slices import OpenCheckpoint
from ckpt.references.base import UNFIT, base_name
from ckpt.references.frozen import Patterns
from ckpt.references.request import References

_logger = logging.getLogger(__name__)

_OF_RANKS = ("process_group", "no_dist", "timeout_s")
_Place = str | os.PathLike[str]


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
        self._base: _Place | None = None
        self._ended = threading.Event()  # the save in the background
        self._ended.set()

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
        with self._settled(url, frozen, options) as more:
            return save(state_dict, url, **more, **options)

    def async_save(
        self,
        state_dict: dict[str, Any],
        url: str | os.PathLike[str],
        *,
        frozen: Collection[str] = (),
        **options: Any,
    ) -> Future[Metadata]:
        """Do the same in the background, as `ckpt.async_save`; no table is copied, but rows that change.

        One save runs at a time: a call during an earlier one waits for that first.
        """
        with contextlib.ExitStack() as stack:
            more = stack.enter_context(self._settled(url, frozen, options))
            future = async_save(state_dict, url, **more, **options)
            rest = stack.pop_all()

        ended = self._ended = threading.Event()

        def settle(done: Future[Metadata]) -> None:
            error = done.exception()
            try:
                with contextlib.suppress(BaseException):
                    rest.__exit__(type(error) if error else None, error, None)
            finally:
                ended.set()

        future.add_done_callback(settle)
        return future

    def restore(
        self, url: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None
    ) -> dict[str, int]:
        """Put the rows that this process keeps into its shards; return how many were read, by table.

        The rest of the state is loaded by `ckpt.load`. The next save writes what changed since this checkpoint
        where the shards are those that saved it, and all rows where they are others.

        Raises:
            LoadFailed, NotFound, NotCommitted, IntegrityError, ...: as `ckpt.load`.
            ConfigurationError: a table has other columns.
        """
        self._wait()
        for shard in self.shards:
            shard.check_idle()
        self._base = None
        with OpenCheckpoint(url, storage_options) as checkpoint:
            counts = {shard.name: restore_shard(checkpoint, shard) for shard in self.shards}
            commit = checkpoint.parts[0].commit
        if commit is not None and commit.is_referable:
            self._base = url
        return counts

    def _wait(self) -> None:
        """Wait for the save in the background, which has deadlines of its own, and needs the rows for that."""
        if not any(shard.is_writing for shard in self.shards):
            self._ended.wait()

    @contextlib.contextmanager
    def _settled(
        self, url: str | os.PathLike[str], frozen: Collection[str], options: Mapping[str, Any]
    ) -> Iterator[dict[str, Any]]:
        """Cut all shards, yield what is to be saved of them, and tell them afterwards how the save has ended."""
        cuts: list[Cut] = []
        is_begun = False
        self._wait()
        try:
            if wrong := sorted({"planner", "base", "digests"} & options.keys()):
                raise ConfigurationError(f"Tables chooses {wrong[0]} itself: leave it out")
            base, first = self._plan(url, **{name: options[name] for name in _OF_RANKS if name in options})
            for shard in self.shards:
                cuts.append(shard.cut(first))
            prefixes = frozenset(
                f"{PREFIX}{cut.chain.prefix(generation)}."
                for cut in cuts
                for generation in cut.chain.generations[:-1]
                if generation.rows or generation.evicted
            )
            references = References(base, Patterns(frozen), prefixes, undigested=PREFIX)
            more = {"planner": TablePlanner(cuts), "base": references}
            is_begun = True
            yield more
        except BaseException as error:
            for shard, _ in zip(self.shards, cuts, strict=False):
                shard.settle(durable=False)
            if is_begun and _blames_base(error):
                self._base = None  # what this save could not refer to, the next one cannot either
            raise
        for shard in self.shards:
            shard.settle(durable=True)
        self._base = url

    def _plan(self, url: _Place, **of_ranks: Any) -> tuple[_Place | None, int | None]:
        """Agree with all ranks on the base, and on what all tables write (`first_to_merge`).

        All do the same, so that their chains lie in the same few checkpoints.
        """
        group, no_dist = of_ranks.pop("process_group", None), of_ranks.pop("no_dist", False)
        with (
            contextlib.closing(Ranks(group, no_dist=no_dist, **of_ranks)) as ranks,
            same_failure(SaveFailed, place_of(url), ranks),
        ):
            told = ranks.gather(ranks.together("save of tables", lambda: self._offer(url)))
            offers = [offer for _, of_rank in told for offer in of_rank]
            _check_complete(offers)
        if len({str(base) for base, _ in told}) > 1 or told[ranks.rank][0] is None:
            return None, None
        return told[ranks.rank][0], first_to_merge([costs for *_, costs in offers])

    def _offer(self, url: _Place) -> tuple[_Place | None, list[_Offer]]:
        """Say what this rank can refer to, and what it would write."""
        offers = [(shard.name, shard.shards, shard.shard, shard.costs()) for shard in self.shards]
        if self._base is None:
            return None, offers
        try:
            base_name(self._base, url)
        except ConfigurationError as error:
            _logger.warning("all rows are saved: %s", error)
            return None, offers
        return self._base, offers


_Offer = tuple[str, int, int, Costs | None]
"""A table, the number of its shards, a shard, and its costs."""


def _check_complete(offers: Sequence[_Offer]) -> None:
    """Raise ConfigurationError if a shard of a table is missing, or there twice: that could not be restored."""
    by_table: dict[str, list[tuple[int, int]]] = {}
    for name, shards, shard, _ in offers:
        by_table.setdefault(name, []).append((shard, shards))
    for name, each in sorted(by_table.items()):
        shards = each[0][1]
        if len(each) != shards or set(each) != {(number, shards) for number in range(shards)}:
            have = ", ".join(f"{shard} of {shards}" for shard, shards in sorted(each)[:20])
            raise ConfigurationError(
                f"the ranks together must keep each shard of {name!r} once, and keep {have}: give TableShard shard= "
                "and shards="
            )


def _blames_base(error: BaseException) -> bool:
    """Tell whether the next save could fail as this one did, for what it refers to."""
    errors = [error, *(error.failures.values() if isinstance(error, SaveFailed) else ())]
    return any(isinstance(each, (*UNFIT, BaseGone)) for each in errors)


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
