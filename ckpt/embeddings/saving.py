"""Save tables beside the rest of a training state, and restore both: `ckpt.embeddings.Tables`."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta

from ckpt.arguments import check_arguments
from ckpt.backends.registry import normal_url, options_dict
from ckpt.collective import (
    background,
    place_of,
    prepare_save,
    save_copy,
    stager,
    writer_for,
)
from ckpt.embeddings.chain import first_to_merge
from ckpt.embeddings.cut import Cut
from ckpt.embeddings.gate import UpdateGate
from ckpt.embeddings.ownership import Offer, check_offers, check_samples
from ckpt.embeddings.restored import Unjudged, judge, judge_own, missing_of, selected, unjudged
from ckpt.embeddings.restoring import restore_tables, stored_tables
from ckpt.embeddings.shard import Due, TableShard, entries_of
from ckpt.errors import BaseGone, ConfigurationError, SaveFailed
from ckpt.format.table_names import TABLES_PREFIX as PREFIX
from ckpt.options import SaveOptions, check_options
from ckpt.ranks.failures import same_failure
from ckpt.ranks.group import DEFAULT_TIMEOUT_S, Ranks, check_group
from ckpt.reading.slices import OpenCheckpoint
from ckpt.references.base import UNFIT, base_name
from ckpt.references.frozen import Patterns
from ckpt.references.request import References
from ckpt.state.resume_check import check_resumable
from ckpt.state.state_parts import Description, values_to_save

_logger = logging.getLogger(__name__)

_Place = str | os.PathLike[str]


class Tables:
    """The shards of tables that this process keeps, saved with everything else in one checkpoint.

    Every rank of the job makes one, with no shards where it keeps none. The first save writes all rows, later
    ones, to other places in the same folder, what changed since; any of them restores everything.

    Attributes:
        missing: tables, and columns as `user.adagrad`, that the checkpoint lacks which was last restored.

    Raises:
        ConfigurationError: two shards of one table.
    """

    def __init__(self, *shards: TableShard) -> None:
        names = [shard.name for shard in shards]
        if len(set(names)) != len(names):
            raise ConfigurationError(f"a process keeps one shard of each table, not several: {sorted(names)}")
        self.shards = shards
        self._base: _Place | None = None
        self._running: Future[Metadata] | None = None
        self._unjudged: Unjudged | None = None
        self.missing: tuple[str, ...] = ()

    def save(
        self,
        state_dict: dict[str, Any],
        url: str | os.PathLike[str],
        *,
        frozen: Collection[str] = (),
        gate: UpdateGate | None = None,
        **options: Any,
    ) -> Metadata:
        """Save the tables and `state_dict`, from all ranks; options are those of `ckpt.save`.

        Rows may change meanwhile, inside `TableShard.writing`: the checkpoint holds them as they were at the call.

        Args:
            gate: of a rank whose rows are updated asynchronously: this waits for the updates of the gate's epoch,
                and takes the rows as they are then. All ranks fail if they do not come, and all gates must be in
                the same epoch.

        Raises:
            SaveFailed, ConfigurationError: as `ckpt.save`; what has changed is saved with the next one.
        """
        self._wait()
        return self._begin(state_dict, url, frozen, gate, options, is_async=False)()

    def async_save(
        self,
        state_dict: dict[str, Any],
        url: str | os.PathLike[str],
        *,
        frozen: Collection[str] = (),
        gate: UpdateGate | None = None,
        **options: Any,
    ) -> Future[Metadata]:
        """Do the same in the background: copy `state_dict`, and of the tables only rows that change meanwhile.

        Ranks do not wait for each other here, but in the first save: the future raises whatever fails. One save
        runs at a time: a call during an earlier one waits for that first. A program that ends waits for it.
        """
        self._wait()
        future = self._running = background.start(
            lambda: self._begin(state_dict, url, frozen, gate, options, is_async=True)
        )
        for shard in self.shards:
            shard.may_change.wait()
        return future

    def restore(
        self,
        url: str | os.PathLike[str],
        *,
        parts: Collection[str] = (),
        strict: bool | None = None,
        on_shape: Literal["error", "resize"] = "error",
        storage_options: Mapping[str, Any] | None = None,
    ) -> dict[str, int]:
        """Put the rows that this process keeps into its shards; return how many were read, by table.

        The rest of the state is loaded by `ckpt.load`. The next save writes what changed since this checkpoint
        where the shards are those that saved it, and all rows where they are others.

        Args:
            parts: names of tables (`user`) and of columns (`user.values`), `*` allowed, to restore these alone; all
                others stay as they are. In rows of a table that is not dense, other columns begin with zeros.
            strict: False restores the tables and columns that both have, and warns of the others, as in
                `ckpt.options.LoadOptions`.
            on_shape: stored rows that no rank keeps are an `error`; `resize` leaves them out. Ranks that restore by
                themselves learn of rows of the others with their next save.

        Raises:
            LoadFailed, NotFound, NotCommitted, IntegrityError, ...: as `ckpt.load`.
            ConfigurationError: a table has other columns; or rows belong to no rank, or to two.
        """
        selection = selected(parts, strict, on_shape)
        self._wait()
        for shard in self.shards:
            shard.check_idle()
        self._base = None
        place = normal_url(url)
        with OpenCheckpoint(place, storage_options) as checkpoint:
            restored = restore_tables(checkpoint, self.shards, selection)
            shown = checkpoint.store.url
            stored = stored_tables(checkpoint)
            commit = checkpoint.parts[0].commit
        if commit is not None and commit.is_referable:
            self._base = place
        self.missing = missing_of(shown, self.shards, restored, stored, selection)
        own = unjudged(shown, restored, stored, selection, self._unjudged)
        self._unjudged = judge_own(own, [shard.name for shard in self.shards])
        return {table: each.taken.taken.rows for table, each in restored.items()}

    def agree(self, ranks: Ranks) -> None:
        """Check, on all ranks that have restored a checkpoint, that each row of its tables was taken once.

        Raises:
            ConfigurationError: on all ranks, if a row belongs to no rank, or to two.
        """
        own = self._unjudged, [shard.name for shard in self.shards]
        judge(ranks.gather(own), ranks.rank)
        self._unjudged = None

    def size_bytes(self) -> int:
        """Return what all rows of this process's shards are together."""
        return sum(map(_size_bytes, self.shards))

    def _wait(self) -> None:
        """Wait for the save in the background, which has deadlines of its own, and needs the rows for that."""
        for shard in self.shards:
            shard.check_not_writing()
        if self._running is not None:
            self._running.exception()

    # -- saves ---------------------------------------------------------------------------------------------

    def _begin(
        self,
        state_dict: dict[str, Any],
        url: _Place,
        frozen: Collection[str],
        gate: UpdateGate | None,
        options: Mapping[str, Any],
        *,
        is_async: bool,
    ) -> Callable[[], Metadata]:
        """Cut all shards, copy the state, and return what remains to be done, together with the other ranks.

        What fails here alone is told to them there.
        """
        more = dict(options)
        ranks = Ranks(
            more.pop("process_group", None),
            no_dist=more.pop("no_dist", False),
            purpose="background" if is_async else "foreground",
            timeout_s=more.get("timeout_s", DEFAULT_TIMEOUT_S),
        )
        begun = _Begun()
        try:
            with same_failure(SaveFailed, place_of(url), ranks):
                ranks.connect()
            try:
                if wrong := sorted({"planner", "base", "digests"} & more.keys()):
                    raise ConfigurationError(f"Tables chooses {wrong[0]} itself: leave it out")
                check_group(ranks.is_meant_alone)
                check_arguments(state_dict, url, None)
                url = normal_url(url)  # the background saves there, wherever the program goes
                more["storage_options"] = options_dict(more.get("storage_options"))
                with contextlib.nullcontext() if gate is None else _cut(gate, ranks) as begun.epoch:
                    for shard in self.shards:
                        shard.begin()
                        begun.shards.append(shard)
                    chosen = more.pop("options", None) or SaveOptions()
                    check_options("options", chosen, SaveOptions)
                    values, begun.described = values_to_save(state_dict, chosen.per_rank)
                    if chosen.resume_check:
                        check_resumable(begun.described.parts, values, chosen.trusted_objects)
                    begun.described.parts.clear()
                    begun.values = stager.stage(values) if is_async else values
            except Exception as error:
                begun.error = error
        except BaseException:
            begun.settle(durable=False)
            ranks.close()
            raise
        return lambda: self._finish(begun, url, frozen, ranks, more)

    def _finish(
        self, begun: _Begun, url: _Place, frozen: Collection[str], ranks: Ranks, options: Mapping[str, Any]
    ) -> Metadata:
        """Save what `_begin` has cut, and tell the shards how that ended."""
        options = dict(options)
        format = options.pop("format", "ckpt")
        size = options.pop("max_shard_size", None)
        configuration = options.pop("config_from", None)
        is_planned = False
        try:
            with contextlib.closing(ranks):
                with same_failure(SaveFailed, place_of(url), ranks):
                    base, first = self._plan(url, begun, ranks)
                is_planned = True
                planner = TablePlanner()

                def make_writer() -> Any:
                    check_samples(ranks.rank, begun.shards, begun.offers)
                    cuts = [shard.choose(first) for shard in begun.shards]
                    planner.take(cuts)
                    prefixes = frozenset(prefix for cut in cuts for prefix in _carried(cut))
                    references = References(base, Patterns(frozen), prefixes, undigested=PREFIX)
                    return writer_for(
                        format, size, configuration, planner, (references, (), False), url, **options
                    )

                writer, values = prepare_save(
                    begun.values, url, None, base, make_writer, ranks, described=begun.described
                )
                metadata = save_copy(values, writer, planner, ranks)
        except BaseException as error:
            begun.settle(durable=False)
            if is_planned and _blames_base(error):
                self._base = None  # what this save could not refer to, the next one cannot either
            raise
        begun.settle(durable=True)
        self._base = url
        return metadata

    def _plan(self, url: _Place, begun: _Begun, ranks: Ranks) -> tuple[_Place | None, int | None]:
        """Agree with all ranks on the base, and on what all tables write (`first_to_merge`).

        All do the same, so that their chains lie in the same few checkpoints.
        """
        reports = ranks.gather(ranks.together("save of tables", lambda: self._offer(url, begun)))
        _check_epochs([each.epoch for each in reports])
        begun.offers = [each.shards for each in reports]
        check_offers(begun.offers)
        kept = [[offer.table for offer in each.shards] for each in reports]
        judge(list(zip([each.unjudged for each in reports], kept, strict=True)), ranks.rank)
        self._unjudged = None
        base = reports[ranks.rank].base
        if len({str(each.base) for each in reports}) > 1 or base is None:
            return None, None
        return base, first_to_merge([offer.costs for offers in begun.offers for offer in offers])

    def _offer(self, url: _Place, begun: _Begun) -> _RankOffer:
        """Describe the cut of this rank: what it can refer to, and what it would write."""
        if begun.error is not None:
            raise begun.error
        base = _base_beside(self._base, url)
        offers = [shard.offer() for shard in self.shards]
        return _RankOffer(begun.epoch, base, offers, self._unjudged)


def _size_bytes(shard: TableShard) -> int:
    with shard.lock:
        row_bytes = sum(column.width * column.dtype.itemsize for column in shard.rows.columns.values())
        return row_bytes * len(shard.rows.ids())


def _base_beside(base: _Place | None, url: _Place) -> _Place | None:
    """Return the base if a checkpoint at `url` can refer to it."""
    try:
        if base is not None:
            base_name(base, url)
        return base
    except ConfigurationError as error:
        _logger.warning("all rows are saved: %s", error)
        return None


@dataclass(frozen=True)
class _RankOffer:
    """A rank that saves: its epoch, the base that it can refer to, and its shards."""

    epoch: int | None
    base: _Place | None
    shards: list[Offer]
    unjudged: Unjudged | None


class _Begun:
    """What one rank has cut and copied for a save.

    Attributes:
        shards: those that must be told how it ends.
        described: what the values are.
        offers: the shards of all ranks.
        epoch: of the gate; None without one.
        error: why this rank could not; the others hear of it.
    """

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.described = Description()
        self.shards: list[TableShard] = []
        self.offers: list[list[Offer]] = []
        self.epoch: int | None = None
        self.error: Exception | None = None

    def settle(self, *, durable: bool) -> None:
        self.values = {}
        for shard in self.shards:
            shard.settle(durable=durable)


def _cut(gate: UpdateGate, ranks: Ranks) -> contextlib.AbstractContextManager[int]:
    """Begin a cut; if it cannot be taken, there is time left to tell the other ranks."""
    ranks.progress.begin(f"waiting for the updates of epoch {gate.epoch}")
    return gate.cut(ranks.stall_s)


def _carried(cut: Cut) -> list[str]:
    """List the beginnings of the names of what the chain holds already."""
    earlier = cut.chain.generations[:-1]
    return [f"{PREFIX}{cut.chain.prefix(g)}." for g in earlier if g.rows or g.evicted]


def _check_epochs(epochs: Sequence[int | None]) -> None:
    """Raise ConfigurationError if the gates have not taken the same cut."""
    by_epoch = {epoch: rank for rank, epoch in reversed(list(enumerate(epochs))) if epoch is not None}
    if len(by_epoch) > 1:
        text = ", ".join(f"rank {rank} that of epoch {epoch}" for epoch, rank in sorted(by_epoch.items())[:3])
        raise ConfigurationError(
            f"the ranks save different cuts, {text}: every gate must take part in every save"
        )


def _blames_base(error: BaseException) -> bool:
    """Tell whether the next save could fail as this one did, for what it refers to."""
    errors = [error, *(error.failures.values() if isinstance(error, SaveFailed) else ())]
    return any(isinstance(each, (*UNFIT, BaseGone)) for each in errors)


class TablePlanner(DefaultSavePlanner):
    """Plan a state and the rows of some cuts, which are read when they are due."""

    def __init__(self) -> None:
        super().__init__()
        self._due: dict[str, Due] = {}
        self._plain: dict[str, Any] = {}

    def take(self, cuts: Collection[Cut]) -> None:
        """Take over what cuts write."""
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
