"""Judge what ranks have restored of tables together, and name what only one side has."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch.distributed as dist

from ckpt.embeddings.ownership import Taken, check_taken
from ckpt.embeddings.restoring import Restored, Selection
from ckpt.embeddings.shard import TableShard
from ckpt.errors import ConfigurationError
from ckpt.options import check_choice
from ckpt.ranks.group import lacks_group

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Unjudged:
    """A restore of this rank, until it was compared with those of the others.

    Attributes:
        url: for texts.
        tables: those of the checkpoint that were to be restored, on this rank or on others.
    """

    url: str
    taken: Sequence[Taken]
    tables: Sequence[str]


Reports = Sequence[tuple[Unjudged | None, Sequence[str]]]
"""Of each rank: its restore, and the tables that it keeps."""


def unjudged(
    url: str,
    restored: Mapping[str, Restored],
    stored: Collection[str],
    selection: Selection,
    earlier: Unjudged | None,
) -> Unjudged:
    """Note a restore to be judged, with what an `earlier` one, of other `parts`, took of other tables."""
    before = () if earlier is None else earlier.taken
    taken = [each for each in before if each.table not in restored]
    taken += [each.taken for each in restored.values()]
    return Unjudged(url, taken, [table for table in stored if selection.takes_table(table, ["*"])])


def judge(reports: Reports, rank: int) -> None:
    """Judge what all ranks have restored; rank 0 warns.

    Raises:
        ConfigurationError: on all ranks, if a row belongs to no rank, or to two.
    """
    warnings = check_taken([[] if each is None else each.taken for each, _ in reports])
    kept = {table for _, tables in reports for table in tables}
    left = {(each.url, table) for each, _ in reports if each is not None for table in each.tables}
    for url in sorted({url for url, table in left if table not in kept}):
        names = ", ".join(sorted(table for other, table in left if other == url and table not in kept))
        warnings.append(f"no rank keeps these tables of {url}, and the next save lacks them: {names}")
    for text in warnings if rank == 0 else ():
        _logger.warning("%s", text)


def judge_own(own: Unjudged, kept: Sequence[str]) -> Unjudged:
    """Judge what other ranks have no part in, which are tables of one shard; return the rest.

    A process that has no process group yet may still get one.
    """
    has_group = dist.is_available() and dist.is_initialized()
    is_alone = dist.get_world_size() == 1 if has_group else not lacks_group()
    single = [taken for taken in own.taken if taken.shards == 1]
    judge([(replace(own, taken=single, tables=own.tables if is_alone else []), kept)], 0)
    rest = [taken for taken in own.taken if taken.shards > 1]
    return replace(own, taken=rest, tables=[] if is_alone else own.tables)


def missing_of(
    url: str,
    shards: Sequence[TableShard],
    restored: Mapping[str, Restored],
    stored: Collection[str],
    selection: Selection,
) -> tuple[str, ...]:
    """Warn of tables and columns that only one side has; return those that the checkpoint lacks."""
    missing = [
        shard.name
        for shard in shards
        if shard.name not in stored and selection.takes_table(shard.name, shard.rows.columns)
    ]
    missing += [f"{table}.{name}" for table, each in restored.items() for name in each.missing]
    left = [f"{table}.{name}" for table, each in restored.items() for name in each.left]
    if missing:
        _logger.warning("%s lacks these parts of tables, which stay as they are: %s", url, ", ".join(missing))
    if left:
        _logger.warning("%s has columns that were not restored: %s", url, ", ".join(left))
    return tuple(missing)


def selected(parts: Collection[str], strict: bool | None, on_shape: str) -> Selection:
    """Make the selection of a call. Raises ConfigurationError."""
    check_choice("strict", strict, None, True, False)
    check_choice("on_shape", on_shape, "error", "resize")
    names = () if isinstance(parts, str | bytes | Mapping) else tuple(parts)
    if (parts and not names) or not all(isinstance(name, str) for name in names):
        raise ConfigurationError(f"parts must be a list of tables or columns, not {parts!r:.100}")
    return Selection(names, strict is not False, on_shape == "resize")
