"""Keep figures of a save in its commit record: what the next one is compared with, how long it took, its digests."""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence

import msgspec

from ckpt.consistency.block_digests import tree_root
from ckpt.errors import FormatError
from ckpt.format.bounds import Amount, RankNumber
from ckpt.format.table_names import TableRows

_DIGEST = re.compile("[0-9a-f]{64}")
_MAX_MS = (1 << 32) - 1


class PartContent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is known of one part of a state: of all tensors below one key of it (`model`, `optimizer`).

    Attributes:
        tensors, elements: how many it has, those of other checkpoints that it names included; without those of tables.
        names: a digest of the names, shapes and dtypes.
        values: a digest of the bytes that were written; of two saves with the same plan, equal if these are. Empty if
            nothing was.
        looked_at: chunks of tensors that were written and looked at.
        zero: those in which only zeros were seen.
        not_finite: those in which a NaN was seen, or an infinity in an optimizer, in this save or in those before it.
        infinite: those in which any other infinity was seen; older versions count it in `not_finite`.
        counters: how far the training was by its own count, the highest of each name.
        tables: rows of tables, by name.
    """

    tensors: Amount
    elements: Amount
    names: str
    values: str = ""
    looked_at: Amount = 0
    zero: Amount = 0
    not_finite: Amount = 0
    infinite: Amount = 0
    counters: dict[str, float] = {}
    tables: dict[str, TableRows] = {}


class BlockDigests(msgspec.Struct, frozen=True):
    """Says that manifests have a digest of each block, and the commit record those of all objects that it names.

    Attributes:
        algorithm: of all of them, `blake3` or `sha256`; readers may meet one that they do not know.
        root: of the tree over the digests of the index and of the manifests, in hexadecimal digits.
    """

    algorithm: str
    root: str = ""

    def root_of(self, digests: Sequence[str | msgspec.UnsetType]) -> str:
        """Compute the root over the digests of the objects. Raises FormatError if one has none, and as `hasher_of`."""
        known = [digest for digest in digests if digest and _DIGEST.fullmatch(digest)]
        if len(known) != len(digests):
            raise FormatError("not a valid record: not all that it names has a digest")
        return tree_root(self.algorithm, [bytes.fromhex(digest) for digest in known]).hex()


class Timings(msgspec.Struct, frozen=True, array_like=True):
    """How long a save took, for people; no reader needs it. An array: the record grows by 40 bytes, and 5.3 a rank.

    Attributes:
        packed_ms: milliseconds as unsigned integers of 4 bytes, little endian, so that the record's size does not depend
            on them: `plan_ms`, `write_ms`, `index_ms`, and `ranks_ms`.
        retries: rank, and the number of its requests that were sent again; only ranks that sent any.
    """

    packed_ms: bytes
    retries: list[tuple[RankNumber, Amount]] = []

    @staticmethod
    def of(
        plan_ms: int,
        write_ms: int,
        index_ms: int,
        ranks_ms: Sequence[int],
        retries: list[tuple[int, int]] | None = None,
    ) -> Timings:
        """Pack milliseconds.

        Args:
            plan_ms, write_ms, index_ms: of the coordinator, one after the other: until the ranks began to write, until
                all had written, and until the index was stored and `commit.json` is to be put.
            ranks_ms: of each rank, from its plan to the end of its last put.
        """
        return Timings(pack_ms(plan_ms, write_ms, index_ms, *ranks_ms), retries or [])

    @property
    def coordinator_ms(self) -> tuple[int, int, int]:
        """`plan_ms`, `write_ms` and `index_ms`; zeros if the record has fewer."""
        plan_ms, write_ms, index_ms, *_ = (*unpack_ms(self.packed_ms), 0, 0, 0)
        return plan_ms, write_ms, index_ms

    @property
    def ranks_ms(self) -> tuple[int, ...]:
        return unpack_ms(self.packed_ms)[3:]


def pack_ms(*durations_ms: int) -> bytes:
    """Pack milliseconds, in 4 bytes each."""
    return struct.pack(f"<{len(durations_ms)}I", *(min(each, _MAX_MS) for each in durations_ms))


def unpack_ms(packed: bytes) -> tuple[int, ...]:
    """Unpack milliseconds; what is left over is ignored."""
    count = len(packed) // 4
    return struct.unpack(f"<{count}I", packed[: 4 * count])
