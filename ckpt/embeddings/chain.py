"""Describe the stored rows of a shard: a base, and deltas that change it, in order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from ckpt.embeddings.rows import Order
from ckpt.errors import FormatError
from ckpt.format.bounds import Amount, Number
from ckpt.format.table_names import shard_name

VERSION = 2
"""Ids may be negative; a shard that has none is written in version 1."""
_MAX_CHAIN = 1024
_MAX_SHARDS = 1 << 20
_NUMBERS = range(1 << 32)
MAX_FIRST_ID = (1 << 62) - 1


class StoredColumn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A column as it is stored.

    Attributes:
        dtype: by torch's name.
        bits: 8 or 4 where the deltas of this column are quantized, else 0.
    """

    name: str
    width: Amount
    dtype: str
    bits: Amount = 0


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """What one save wrote of a shard.

    Attributes:
        number: never used again in this chain; part of the names of its entries.
        rows: rows that it inserts or replaces.
        evicted: rows that it removes, before it inserts. Of a base: those that were removed since the save before it.
        block_rows: rows in each of the entries among which a column is spread, but the last.
        first_id: where the ids are this and the following ones, and are not stored.
    """

    number: Amount
    kind: Literal["base", "delta"]
    rows: Amount
    evicted: Amount
    block_rows: Amount
    first_id: Number | None = None

    @property
    def blocks(self) -> int:
        return -(-self.rows // self.block_rows)


class Chain(msgspec.Struct, frozen=True, kw_only=True):
    """All that is stored of one shard of a table.

    Attributes:
        shard, shards: which shard of how many.
        order: how the rows of a generation are sorted.
        generations: a base, then deltas, the later ones after the earlier.
    """

    version: Number = VERSION
    table: str
    shard: Amount
    shards: Amount
    order: Order
    columns: list[StoredColumn]
    generations: list[Generation]

    def prefix(self, generation: Generation) -> str:
        """Begin the names of a generation's entries."""
        return f"{shard_name(self.table, self.shard, self.shards)}.{generation.number:06d}"

    def encode(self) -> bytes:
        return msgspec.json.encode(self)


_CHAIN = msgspec.json.Decoder(Chain)


def decode_chain(text: str | bytes, *, url: str, name: str) -> Chain:
    """Decode a chain that may be hostile. Raises FormatError."""
    try:
        chain = _CHAIN.decode(text)
        _check(chain)
    except ValueError as error:
        raise FormatError(f"{name!r} does not describe a table's shard: {error}", url=url) from None
    if chain.version > VERSION:
        raise FormatError(
            f"the table {chain.table!r} was written in version {chain.version}; this library reads up to {VERSION}, "
            "update it",
            url=url,
        )
    if name != f"{shard_name(chain.table, chain.shard, chain.shards)}.chain":
        raise FormatError(f"{name!r} describes another shard than its own", url=url)
    return chain


def _check(chain: Chain) -> None:
    if not chain.shard < chain.shards <= _MAX_SHARDS:
        raise ValueError(f"shard {chain.shard} of {chain.shards}")
    numbers = [generation.number for generation in chain.generations]
    if (
        numbers != sorted(set(numbers))
        or len(numbers) > _MAX_CHAIN
        or any(n not in _NUMBERS for n in numbers)
    ):
        raise ValueError("its generations are out of order")
    kinds = [generation.kind for generation in chain.generations]
    if kinds[:1] != ["base"] or "base" in kinds[1:]:
        raise ValueError("its first generation, and no other, must be a base")
    if any(g.block_rows < 1 for g in chain.generations):
        raise ValueError("entries without rows")
    if any(g.first_id is not None and not 0 <= g.first_id <= MAX_FIRST_ID for g in chain.generations):
        raise ValueError("ids that cannot be")
    if len({column.name for column in chain.columns}) != len(chain.columns) or not chain.columns:
        raise ValueError("no columns, or two of the same name")
    if any(column.width < 1 or column.bits not in (0, 4, 8) for column in chain.columns):
        raise ValueError("a column of no width")


class Costs(msgspec.Struct, frozen=True):
    """What a save could write of a shard, or of all shards of a table, in bytes.

    Attributes:
        base: all rows.
        deltas: the deltas of the chain as they are stored, and the next one, after one another.
        merged: for each of them, the rows that changed since before it, each once.
        max_deltas, max_delta_ratio: the bounds of the chain.
    """

    base: int
    deltas: Sequence[int]
    merged: Sequence[int]
    max_deltas: int
    max_delta_ratio: float


def first_to_merge(shards: Sequence[Costs | None]) -> int | None:
    """Choose what the next save writes of all shards: a delta in the place of those from this index on; None: a base.

    A delta alone (the index of the last one) while the chain stays within its bounds; else the shortest merge
    that brings the chain to half of them, so that merges stay rare; else a base. All shards do the same, so that
    their chains lie in few checkpoints.
    """
    if not shards or len({-1 if costs is None else len(costs.deltas) for costs in shards}) > 1:
        return None
    known = [costs for costs in shards if costs is not None]
    if not known:
        return None
    deltas = [sum(sizes) for sizes in zip(*(costs.deltas for costs in known), strict=True)]
    merged = [sum(sizes) for sizes in zip(*(costs.merged for costs in known), strict=True)]
    limit = sum(costs.max_delta_ratio * costs.base for costs in known)
    max_deltas = min(costs.max_deltas for costs in known)
    if len(deltas) <= max_deltas and sum(deltas) <= limit:
        return len(deltas) - 1
    for first in reversed(range(len(deltas) - 1)):
        if first + 1 <= max(1, max_deltas // 2) and sum(deltas[:first]) + merged[first] <= limit / 2:
            return first
    return None
