"""Hold the findings of a check, and find objects that do not belong to a checkpoint."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from ckpt.backends.base import ObjectStat, Store
from ckpt.errors import CheckpointError, StorageError
from ckpt.format.names import is_our_name

_MAX_DAMAGES = 10_000
_MAX_STRAYS = 10_000
_MAX_FQNS = 20


@dataclass(frozen=True)
class Damage:
    """One damage of a checkpoint.

    Attributes:
        kind: `record` (commit, index, manifest), `missing`, `size`, `checksum`, `disagreement`
            (between records), `coverage`, `stock_metadata` or `archive`.
        key: the object.
        start, stop: affected bytes, half open.
        fqns: affected tensors and objects, at most 20 of them; `fqn_count` counts all.
    """

    kind: str
    message: str
    key: str | None = None
    start: int | None = None
    stop: int | None = None
    fqns: tuple[str, ...] = ()
    fqn_count: int = 0

    @staticmethod
    def of(kind: str, error: CheckpointError, fqns: Sequence[str] = ()) -> Damage:
        """Describe an error that a check met."""
        return Damage(kind, error.message, error.key, error.start, error.stop, *affected(fqns))


@dataclass(frozen=True)
class Stray:
    """An object in the checkpoint's folder that does not belong to the checkpoint.

    Attributes:
        ours: its name is one that this library gives: an interrupted save left it.
        unfinished: it is an upload or a temporary file, of unknown size.
    """

    key: str
    size_bytes: int
    modified_at_s: float | None
    ours: bool
    unfinished: bool = False


@dataclass
class Verification:
    """The result of `ckpt.verify`.

    Attributes:
        format: `ckpt-storage` or `stock`.
        quick: no data was read.
        damages: at most 10,000; `damages_omitted` counts the others.
        strays: objects that do not belong to the checkpoint, and do no harm; None if the storage
            did not list them.
        checked_files, checked_bytes: data files checked, and bytes of them read and compared.
        unchecked_items: items of a stock checkpoint without CRCs (saved so, or transformed).
    """

    url: str
    format: str
    quick: bool
    id: str | None = None
    damages: list[Damage] = field(default_factory=list)
    damages_omitted: int = 0
    strays: list[Stray] | None = None
    checked_files: int = 0
    checked_bytes: int = 0
    unchecked_items: int = 0

    @property
    def ok(self) -> bool:
        """True if no damage was found."""
        return not self.damages

    def add(self, damage: Damage) -> None:
        """Add a damage, or only count it if there are very many."""
        if len(self.damages) < _MAX_DAMAGES:
            self.damages.append(damage)
        else:
            self.damages_omitted += 1


def affected(fqns: Sequence[str]) -> tuple[tuple[str, ...], int]:
    """Take the first 20 of some names, and count them all."""
    distinct = list(dict.fromkeys(fqns))
    return tuple(distinct[:_MAX_FQNS]), len(distinct)


def find_strays(store: Store, known: Collection[str]) -> list[Stray] | None:
    """Find objects and uploads that are not `known`; None if the storage does not list them."""
    try:
        unknown = (stat for stat in store.list() if stat.key not in known)
        strays = [
            Stray(stat.key, stat.size_bytes, stat.modified_at_s, is_our_name(stat.key))
            for stat in itertools.islice(unknown, _MAX_STRAYS)
        ]

        def note(stat: ObjectStat) -> bool:
            ours = is_our_name(stat.key)
            if len(strays) < 2 * _MAX_STRAYS:
                strays.append(Stray(stat.key, stat.size_bytes, stat.modified_at_s, ours, unfinished=True))
            return False

        store.abandon(choose=note)
        return strays
    except StorageError:
        return None
