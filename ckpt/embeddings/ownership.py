"""Check that each row of a table belongs to one shard: of the ranks that save, and of those that have restored."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ckpt.embeddings.chain import Costs
from ckpt.embeddings.rows import DenseRows, Ids, RowStore, hash_of, home_of
from ckpt.errors import ConfigurationError
from ckpt.format.names import last_segment

_SAMPLE_IDS = 16
_MAX_NAMED = 4
_WORD = 1 << 64


@dataclass(frozen=True)
class Kept:
    """The ids of a dense shard, which are consecutive.

    Attributes:
        first, last: both are kept.
        allow_gaps: ids between this shard and the next ones may belong to no rank.
    """

    first: int
    last: int
    allow_gaps: bool = False

    @staticmethod
    def of(rows: RowStore, allow_gaps: bool = False) -> Kept | None:
        """Describe the rows of a store; None if it has none, or is not dense."""
        if not isinstance(rows, DenseRows) or not rows.count:
            return None
        return Kept(rows.first_id, rows.last_id, allow_gaps)


@dataclass(frozen=True)
class RowCount:
    """A number of rows, and the sum of their ids' hashes: it differs if one is taken twice and another one is not.

    Sums of powers of ids would not do: they are equal for the halves into which a CRC divides a range.
    """

    rows: int = 0
    hashes: int = 0

    @staticmethod
    def of(ids: Ids) -> RowCount:
        return RowCount(len(ids), int(hash_of(ids).sum()))

    def __add__(self, other: RowCount) -> RowCount:
        return RowCount(self.rows + other.rows, (self.hashes + other.hashes) % _WORD)


@dataclass(frozen=True)
class Taken:
    """What a shard has taken of a stored table.

    Attributes:
        url: of the checkpoint, for texts.
        shard, shards: which shard took it, of how many.
        rows: all rows of the table that were written, by bases and deltas.
        stored: those of them that this shard counts; all shards together count each once.
        taken: those of them that this shard owns.
        first, last: the lowest and the highest id that is stored.
        kept: the ids of a dense shard.
        may_drop: rows that no shard owns are left out by choice.
    """

    url: str
    table: str
    shard: int
    shards: int
    rows: int
    stored: RowCount
    taken: RowCount
    first: int
    last: int
    kept: Kept | None
    may_drop: bool


@dataclass(frozen=True)
class Offer:
    """A shard of a rank that saves.

    Attributes:
        kept: the ids of a dense shard.
        sample: ids of a shard that is neither dense nor sharded by a hash, in a save that writes all rows.
        costs: of what it would write.
    """

    table: str
    shard: int
    shards: int
    kept: Kept | None
    sample: tuple[int, ...]
    costs: Costs | None


class _Shard(Protocol):
    name: str
    shard: int
    shards: int
    rows: RowStore
    lock: threading.RLock


def sample_of(rows: RowStore) -> tuple[int, ...]:
    """Choose ids of a store that is neither dense nor sharded by a hash: the lowest, the highest, some between."""
    if isinstance(rows, DenseRows) or rows.order == "hash":
        return ()
    ids = rows.ids()
    if not len(ids):
        return ()
    step = -(-len(ids) // _SAMPLE_IDS)
    return int(ids.min()), *ids[::step].tolist(), int(ids.max())


def check_owned(shard: _Shard, ids: Ids) -> None:
    """Check that rows belong into a shard: by its store, and by the hash if that decides. Raises ConfigurationError."""
    with shard.lock:
        mask = shard.rows.owns(ids)
    by = "`owns`"
    if shard.rows.order == "hash":
        mask = mask & (home_of(ids, shard.shards) == shard.shard)
        by = "`owns` and `home_of`"
    if not mask.all():
        raise ConfigurationError(
            f"the id {int(ids[~mask][0])} does not belong into shard {shard.shard} of {shard.shards} of {shard.name!r}, "
            f"by {by}"
        )


def check_offers(by_rank: Sequence[Sequence[Offer]]) -> None:
    """Check the shards of all ranks that save.

    Raises:
        ConfigurationError: a shard of a table is missing or was given twice, or ranges of ids overlap or have gaps.
    """
    by_table: dict[str, list[tuple[int, Offer]]] = defaultdict(list)
    for rank, offers in enumerate(by_rank):
        for offer in offers:
            by_table[offer.table].append((rank, offer))
    for table, each in sorted(by_table.items()):
        shards = each[0][1].shards
        have = sorted((offer.shard, offer.shards) for _, offer in each)
        if have != [(number, shards) for number in range(shards)]:
            shown = ", ".join(f"{shard} of {count}" for shard, count in have[:20])
            raise ConfigurationError(
                f"the ranks together must keep each shard of {table!r} once, and keep {shown}: give TableShard shard= "
                "and shards="
            )
        kept = [(f"rank {rank}", offer.kept) for rank, offer in each if offer.kept is not None]
        if kept:
            _check_ranges(table, kept)


def _check_ranges(table: str, kept: Sequence[tuple[str, Kept]]) -> None:
    ranges = _Ranges(kept)
    if ranges.twice:
        raise ConfigurationError(
            f"{ranges.shown(ranges.twice)} of the table {table!r} belong to two ranks: {ranges}; give the DenseRows of "
            "each rank the id of its first row, first_id="
        )
    if ranges.gaps and not all(each.allow_gaps for _, each in kept):
        raise ConfigurationError(
            f"{ranges.shown(ranges.gaps)} of the table {table!r} belong to no rank: {ranges}; give the DenseRows of each "
            "rank the id of its first row, first_id=, or TableShard allow_gaps=True if these ids are not used"
        )


def check_samples(rank: int, shards: Iterable[_Shard], by_rank: Sequence[Sequence[Offer]]) -> None:
    """Check that a rank's stores own no row of other ranks. Raises ConfigurationError."""
    others = [(other, offer) for other, offers in enumerate(by_rank) if other != rank for offer in offers]
    for shard in shards:
        for other, offer in others:
            ids = np.array(offer.sample, dtype=np.int64)
            with shard.lock:
                both = ids[shard.rows.owns(ids)] if offer.table == shard.name and len(ids) else ids[:0]
            if len(both):
                raise ConfigurationError(
                    f"the row {both[0]} of the table {shard.name!r} belongs to rank {other} and to rank {rank}, by `owns` of "
                    "their stores: a row must belong to one shard"
                )


def check_taken(by_rank: Sequence[Sequence[Taken]]) -> list[str]:
    """Check that ranks which have restored a table took each of its rows once; return warnings.

    Tables of which not all shards were restored are named in a warning.

    Raises:
        ConfigurationError: two ranks took a row, or no rank did and that is not a choice; or they took the rows of
            different checkpoints.
    """
    groups: dict[tuple[str, int], list[tuple[str, Taken]]] = defaultdict(list)
    for rank, each in enumerate(by_rank):
        name = f"rank {rank}" if len(by_rank) > 1 else "this process"
        for taken in each:
            groups[taken.table, taken.shards].append((name, taken))
    warnings: list[str] = []
    for (table, shards), group in sorted(groups.items()):
        numbers = [taken.shard for _, taken in group]
        others = sorted(set(range(shards)) - set(numbers))
        if others:
            shown = _some([str(number) for number in others])
            warnings.append(
                f"{group[0][0]} has restored its shard of {table!r}; no rank has restored shard {shown}"
            )
        elif len(numbers) == shards:
            _check_same(group)
            warnings += _check_group(group)
    return warnings


def _check_same(group: Sequence[tuple[str, Taken]]) -> None:
    """Check that all shards come from one checkpoint; each rank may have its own path to it."""
    if len({(last_segment(taken.url), taken.rows) for _, taken in group}) > 1:
        shown = _some([f"{name} {taken.url}" for name, taken in group])
        raise ConfigurationError(
            f"the ranks have restored the table {group[0][1].table!r} from different checkpoints: {shown}; restore the "
            "same one on all ranks"
        )


def _check_group(group: Sequence[tuple[str, Taken]]) -> Iterator[str]:
    first = group[0][1]
    total = sum((taken.taken for _, taken in group), RowCount())
    if total == sum((taken.stored for _, taken in group), RowCount()):
        return
    kept = [(name, taken.kept) for name, taken in group if taken.kept is not None]
    table = f"the table {first.table!r} in {first.url}"
    if len(kept) == len(group):
        ranges = _Ranges(kept, first.first, first.last)
        if ranges.twice:
            raise ConfigurationError(f"{ranges.shown(ranges.twice)} of {table} belong to two ranks: {ranges}")
        text = f"{ranges.shown(ranges.gaps)} of {table} belong to no rank: {ranges}"
    else:
        counts = _some([f"{name} took {taken.taken.rows}" for name, taken in group])
        text = f"{first.rows} rows of {table} were written, and {counts}"
        if total.rows >= first.rows:
            raise ConfigurationError(f"{text}: `owns` of their stores must give each row to one rank")
    if not all(taken.may_drop for _, taken in group):
        raise ConfigurationError(
            f'{text}; restore into shards that keep all rows, or pass on_shape="resize" to leave those rows out'
        )
    yield f'{text}; on_shape="resize" leaves those rows out'


class _Ranges:
    """Ranges of ids, lowest first; as a text, which rank keeps which rows.

    Attributes:
        gaps, twice: ids, first and last, that no rank keeps, and that two ranks keep.
    """

    def __init__(
        self, kept: Sequence[tuple[str, Kept]], first: int | None = None, last: int | None = None
    ) -> None:
        """`kept` has one or more, each with the name of its rank; `first` to `last`: ids that some rank must keep."""
        self._kept = sorted(kept, key=lambda each: each[1].first)
        self.gaps: list[tuple[int, int]] = []
        self.twice: list[tuple[int, int]] = []
        lowest = self._kept[0][1].first
        until = self._kept[0][1].last
        if first is not None and first < lowest:
            self.gaps.append((first, lowest - 1))
        for _, each in self._kept[1:]:
            if each.first > until + 1:
                self.gaps.append((until + 1, each.first - 1))
            elif each.first <= until:
                self.twice.append((each.first, min(until, each.last)))
            until = max(until, each.last)
        if last is not None and last > until:
            self.gaps.append((until + 1, last))

    @staticmethod
    def shown(ranges: Sequence[tuple[int, int]]) -> str:
        return _some([f"rows {first} to {last}" for first, last in ranges])

    def __str__(self) -> str:
        return _some([f"{name} keeps rows {each.first} to {each.last}" for name, each in self._kept])


def _some(texts: Sequence[str]) -> str:
    more = f" and {len(texts) - _MAX_NAMED} more" if len(texts) > _MAX_NAMED else ""
    return ", ".join(texts[:_MAX_NAMED]) + more
