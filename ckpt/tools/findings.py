"""Hold the results of checks and copies, and find objects that do not belong to a checkpoint."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from ckpt.backends.base import ObjectStat, Store, exists
from ckpt.consistency.sampling import Sampled
from ckpt.errors import CheckpointError, StorageError
from ckpt.format.names import ObjectName, is_our_name
from ckpt.format.records import CommitRecord
from ckpt.writing.pins import is_pin

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

    @classmethod
    def of(
        cls,
        kind: str,
        message: str,
        key: str | None = None,
        start: int | None = None,
        stop: int | None = None,
        *,
        fqns: Iterable[str],
    ) -> Damage:
        """Name the first 20 of the tensors and objects that are affected, and count them all."""
        distinct = tuple(dict.fromkeys(fqns))
        return cls(kind, message, key, start, stop, distinct[:_MAX_FQNS], len(distinct))

    @staticmethod
    def of_error(kind: str, error: CheckpointError, fqns: Iterable[str] = ()) -> Damage:
        """Describe an error that a check met."""
        return Damage.of(kind, error.message, error.key, error.start, error.stop, fqns=fqns)


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
        format: `ckpt-storage`, `stock`, or `safetensors` for a model of another program.
        quick: no data was read.
        damages: at most 10,000; `damages_omitted` counts the others.
        warnings: what only stock readers meet: a save is running, or was killed after its commit.
        strays: objects that do not belong to the checkpoint, and do no harm; None if the storage
            did not list them.
        checked_files, checked_bytes: data files checked, and bytes of them read and compared.
        digest: that of the commit record, which names the checkpoint: `sha256:...`.
        block_digests: the algorithm of the digests that were checked too; None where there are none.
        unchecked_digests: the algorithm of those that could not be: its package is not installed here, or this version
            does not know it.
        stock_readers: False if `.metadata` for stock PyTorch was left out on purpose, and not checked.
        unchecked_items: items without CRCs: of a stock checkpoint saved so, or transformed; all of a
            safetensors model.
        sample: what was drawn, and can have been missed, if not all blocks were to be read.
    """

    url: str
    format: str
    quick: bool
    id: str | None = None
    damages: list[Damage] = field(default_factory=list)
    damages_omitted: int = 0
    warnings: list[Damage] = field(default_factory=list)
    strays: list[Stray] | None = None
    checked_files: int = 0
    checked_bytes: int = 0
    unchecked_items: int = 0
    stock_readers: bool = True
    sample: Sampled | None = None
    digest: str | None = None
    block_digests: str | None = None
    unchecked_digests: str | None = None

    @property
    def ok(self) -> bool:
        """True if no damage was found."""
        return not self.damages

    def extend(self, damages: Iterable[Damage]) -> None:
        """Add damages; of very many only count the rest."""
        for damage in damages:
            if len(self.damages) < _MAX_DAMAGES:
                self.damages.append(damage)
            else:
                self.damages_omitted += 1


@dataclass
class Copied:
    """The result of `ckpt.copy`.

    Attributes:
        already_there: the destination already held the same checkpoint; nothing was sent.
        sent_files, sent_bytes: data files that were sent.
        kept_files, kept_bytes: data files that an interrupted copy had left, and that were right.
    """

    source: str
    destination: str
    format: str
    already_there: bool = False
    sent_files: int = 0
    sent_bytes: int = 0
    kept_files: int = 0
    kept_bytes: int = 0

    def count(self, nbytes: int, *, sent: bool) -> None:
        """Count a data file that was sent, or kept."""
        if sent:
            self.sent_files += 1
            self.sent_bytes += nbytes
        else:
            self.kept_files += 1
            self.kept_bytes += nbytes


def find_strays(store: Store, known: Collection[str]) -> list[Stray] | None:
    """Find objects and uploads that are not `known`; None if the storage does not list them."""
    try:
        unknown = (stat for stat in store.list() if stat.key not in known and not is_pin(stat.key))
        stats = list(itertools.islice(unknown, _MAX_STRAYS))
        uploads = find_uploads(store, 2 * _MAX_STRAYS - len(stats))
    except StorageError:
        return None
    return [
        Stray(stat.key, stat.size_bytes, stat.modified_at_s, is_our_name(stat.key), unfinished)
        for unfinished, listed in ((False, stats), (True, uploads))
        for stat in listed
    ]


def find_uploads(store: Store, limit: int) -> list[ObjectStat]:
    """Find unfinished uploads and temporary files, without aborting any."""
    uploads: list[ObjectStat] = []

    def note(stat: ObjectStat) -> bool:
        if len(uploads) < limit:
            uploads.append(stat)
        return False

    store.abandon(choose=note)
    return uploads


def stems_of(record: CommitRecord | None) -> set[str]:
    """List the stems of a commit's objects; any object with one of them belongs to it."""
    refs = [] if record is None else record.refs
    return {name.stem for ref in refs if (name := ObjectName.parse(ref.path)) is not None}


def is_hollow(store: Store, stats: Iterable[ObjectStat], record: CommitRecord) -> bool:
    """Tell whether nothing is there that a commit lists: a put that came late brought back a record that was removed.

    A listing may lag behind a save that replaced an older one, so the index is asked for as well.
    """
    stems, names = stems_of(record), filter(None, (ObjectName.parse(stat.key) for stat in stats))
    if any(name.stem in stems for name in names if name.kind not in ("probe", "sig")):
        return False
    return not exists(store, record.described_by.path)
