"""Hold what a checkpoint names in others: pins, and the order in which they are put and looked at.

A save puts a pin into the folder of every checkpoint that it refers to, and then looks whether the
commit record there still stands. Who removes or replaces a checkpoint deletes or replaces its commit
record, and then looks for pins. So one of the two sees the other: the save gives up, or the objects
stay that the pin names.

A pin counts while its referrer is committed. Before, it counts while it is young: its save may be on
its way. A save that has stalled after its pins, until they may not count any more, puts new ones,
and looks again, before it commits. (A look after the commit would come too late: readers may have
found the checkpoint.)
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from ckpt.backends.base import Store, put_bytes, read_bytes
from ckpt.backends.wrapper import PrefixStore
from ckpt.consistency import environment
from ckpt.consistency.commit import COMMIT_KEY
from ckpt.consistency.storage_clock import storage_now
from ckpt.consistency.visibility import when_visible
from ckpt.errors import (
    AccessDenied,
    BaseGone,
    CheckpointError,
    CommitError,
    FormatError,
    IntegrityError,
    NotVisible,
    StillReferred,
    UnsafeContent,
)
from ckpt.format.names import ObjectName, last_segment, pin_key, probe_key, rank_directory, split_path
from ckpt.format.pin_record import MAX_PIN_BYTES, PinRecord, decode_pin, encode_pin
from ckpt.format.records import BaseRef, CommitRecord, StoredCommit, read_commit
from ckpt.transfer.threads import in_order, run_all, workers

_logger = logging.getLogger(__name__)

GRACE_S = 24 * 3600.0
"""For how long a pin counts whose referrer is not committed."""
FRESH_S = 600.0
"""How old pins may be when the commit record is put. What is left until `GRACE_S` that put may take."""
LAG_S = 60.0
"""How long others may not see what was written or deleted, where storage shows it late."""
_MAX_THREADS = 8
_MAX_NAMED = 5
_MAX_HOLDS = 3

T = TypeVar("T")


@dataclass(frozen=True)
class Pin:
    """A pin as it was found; without `record` it cannot be read, and counts for all there is."""

    key: str
    modified_at_s: float | None
    record: PinRecord | None

    @property
    def referrer(self) -> str:
        return f"a checkpoint of which {self.key} tells" if self.record is None else self.record.referrer


@dataclass
class Referrers:
    """Who refers to the objects of a folder.

    Attributes:
        pins: those that count.
        dead: keys of those that do not: their referrers are gone, or never came to be.
    """

    pins: list[Pin] = field(default_factory=list)
    dead: list[str] = field(default_factory=list)

    def hold(self, key: str) -> bool:
        """Tell whether an object must stay."""
        name = ObjectName.parse(key)
        return name is not None and any(
            pin.record is None or name.stem in pin.record.stems for pin in self.pins
        )

    def names(self) -> list[str]:
        """List the folders of the referrers, relative to this one."""
        return sorted({pin.referrer for pin in self.pins})


class PinReader:
    """Find out which pins count.

    Args:
        grace_s: a pin that is older counts only if its referrer is committed.
        now: returns the storage's time; by default the storage is asked, which writes an object.
    """

    def __init__(
        self,
        store: Store,
        *,
        grace_s: float = GRACE_S,
        now: Callable[[], float] | None = None,
    ) -> None:
        self._store, self._grace_s = store, grace_s
        self._now, self._now_s = now or self._storage_now, math.nan
        self._commits: dict[str, StoredCommit | None] = {}

    def look(self, record: CommitRecord | None = None, *, at_most: int | None = None) -> Referrers:
        """Look for pins; those that hold anything of `record`, if one is given.

        Args:
            at_most: stop when so many have been found that count.
        """
        referrers = Referrers()
        keys = None if record is None else {ref.path for ref in record.manifests}
        for pin in self._pins():
            if keys is not None and pin.record is not None and keys.isdisjoint(pin.record.manifests):
                continue
            if not self._counts(pin):
                referrers.dead.append(pin.key)
                continue
            referrers.pins.append(pin)
            if len(referrers.pins) == at_most:
                break
        return referrers

    def refuse(self, record: CommitRecord, text: str) -> None:
        """Raise StillReferred if other checkpoints name bytes of the one that `record` commits."""
        names = self.look(record, at_most=_MAX_NAMED + 1).names() if record.is_referable else []
        if not names:
            return
        shown = " and ".join([", ".join(names[:_MAX_NAMED]), *["others"][: len(names) - _MAX_NAMED]])
        raise StillReferred(
            f"{shown} {'refers' if len(names) == 1 else 'refer'} to its bytes: {text}. Remove those first, or "
            "copy them with `ckpt cp --materialise` (a save that was killed counts for a day)",
            referrers=names,
            url=self._store.url,
            key=COMMIT_KEY,
        )

    def _pins(self) -> Iterator[Pin]:
        stats = [stat for stat in self._store.list(f"{rank_directory(0)}/") if is_pin(stat.key)]
        with workers(self._store.threads, "ckpt-pins") as threads:
            records = in_order(threads, lambda stat: self._read(stat.key), stats, ahead=self._store.threads)
            for stat, record in zip(stats, records, strict=True):
                if record is not _GONE:
                    yield Pin(stat.key, stat.modified_at_s, record)

    def _read(self, key: str) -> PinRecord | None:
        """Read a pin that was listed; None if it cannot be read."""
        lag_s = 0.0 if self._store.capabilities.cross_client_visibility else LAG_S
        try:
            return when_visible(lambda: _read_pin(self._store, key), timeout_s=lag_s)
        except NotVisible:
            return _GONE
        except (IntegrityError, FormatError) as error:
            _logger.warning(
                "a pin cannot be read, so all objects beside it stay; delete it if nothing refers to them: %s",
                error,
            )
            return None

    def _counts(self, pin: Pin) -> bool:
        if pin.record is None or self._is_committed(pin.record.name, pin.record.id):
            return True
        if math.isnan(self._now_s):
            self._now_s = self._now()
        if pin.modified_at_s is None or pin.modified_at_s >= self._now_s - self._grace_s:
            return True
        with contextlib.closing(self._store.parent()) as root:
            names = sorted(root.folders())
        return any(self._is_renamed(name, pin.record.id) for name in names)

    def _is_committed(self, name: str, commit_id: str) -> bool:
        try:
            commit = self._commit(name)
            return commit is not None and commit.record.id == commit_id
        except (IntegrityError, FormatError):
            return True  # it may be

    def _is_renamed(self, name: str, commit_id: str) -> bool:
        """Tell whether a referrer was given the name `name` by somebody."""
        try:
            commit = self._commit(name)
            return commit is not None and commit.record.id == commit_id
        except (AccessDenied, UnsafeContent):
            return False
        except (IntegrityError, FormatError):
            assert commit is not None
            return commit_id.encode() in commit.raw

    def _commit(self, name: str) -> StoredCommit | None:
        if name not in self._commits:
            with contextlib.closing(self._store.parent()) as root:
                self._commits[name] = read_commit(PrefixStore(root, name))
        return self._commits[name]

    def _storage_now(self) -> float:
        now_s = storage_now(self._store, probe_key(0, environment.token()))
        return environment.now() if now_s is None else now_s


_GONE = PinRecord(referrer="", id="", manifests=[])


def is_referred(store: Store, commit: StoredCommit) -> bool:
    """Return whether other checkpoints name bytes of the one that is committed in `store`.

    A damaged record has no referrers: it names no objects that would be deleted.
    """
    try:
        record = commit.record
    except CheckpointError:
        return False
    return record.is_referable and bool(PinReader(store).look(record, at_most=1).pins)


def is_pin(key: str) -> bool:
    """Tell whether an object's name is that of a pin."""
    name = ObjectName.parse(key)
    return name is not None and name.kind == "pin"


def wait_for_pins(store: Store) -> None:
    """Wait, where storage lags, until every pin is seen whose save has seen the commit record before it went.

    That save may not see the deletion for `LAG_S`, and its pin is seen at most as long after it was put.
    """
    if not store.capabilities.cross_client_visibility:
        environment.sleep(2 * LAG_S)


class HeldBases:
    """What one save refers to, held by its pins until it is committed, and as long as it stands."""

    def __init__(self, store: Store, record: CommitRecord) -> None:
        """`record` is what will be committed in `store`."""
        self._store, self._record = store, record
        self._bases = record.bases or []
        self._holds = 0
        self._since_s = (0.0, 0.0)

    def while_held(self, commit: Callable[[Callable[[], None]], T]) -> T:
        """Return the result of `commit`, which calls its argument last before the commit record is put; after `hold`.

        Raises as `hold`; CommitError if it stalls again and again.
        """
        while True:
            try:
                return commit(self._check)
            except _Stalled as error:
                if self._holds == _MAX_HOLDS:
                    raise CommitError(error.message, url=self._store.url) from error
                _logger.warning(
                    "this save has stalled before its commit; it looks again for what it refers to"
                )
            self.hold()

    def release(self) -> None:
        """Delete the pins, as well as it goes: this save was surely not committed."""
        if self._holds:
            keys = [pin_key(self._record.id, number) for number in range(self._holds)]
            _delete(self._store, self._bases, lambda _: keys)

    def hold(self) -> None:
        """Put pins, then look. Raises BaseGone if what they hold is not there any more."""
        # The two clocks go on differently while a machine is suspended, or its time is set.
        self._since_s = environment.monotonic(), environment.now()
        number, self._holds = self._holds, self._holds + 1
        with (
            contextlib.closing(self._store.parent()) as root,
            workers(min(self._store.threads, _MAX_THREADS), "ckpt-pins") as threads,
        ):
            run_all(
                threads, lambda base: self._hold_one(PrefixStore(root, base.owner), base, number), self._bases
            )

    def _check(self) -> None:
        """Raise if the pins may not count any more when a commit record is put now."""
        if not self._bases:
            return
        elapsed_s = (environment.monotonic() - self._since_s[0], environment.now() - self._since_s[1])
        if max(elapsed_s) >= FRESH_S:
            raise _Stalled(f"nothing was committed: this save stalled for {max(elapsed_s):.0f} s; save again")

    def _hold_one(self, owner: Store, base: BaseRef, number: int) -> None:
        put_bytes(owner, pin_key(self._record.id, number), self._pin(base.owner))
        commit = read_commit(owner)
        if commit is None or not commit.is_ours or commit.record.id != base.id:
            text = (
                "this save refers to the checkpoint here, which was removed or replaced meanwhile; nothing was "
                "committed: save again, with another base or none"
            )
            raise BaseGone(text, url=owner.url, key=COMMIT_KEY)

    def _pin(self, owner: str) -> bytes:
        manifests = [split_path(ref.path)[1] for ref in self._record.manifests if ref.owner == owner]
        referrer = f"../{_folder_name(self._store)}"
        return encode_pin(PinRecord(referrer=referrer, id=self._record.id, manifests=manifests))


def _folder_name(store: Store) -> str:
    """Name the folder at the root of a store, as those beside it see it."""
    if store.directory is not None:
        return os.path.basename(os.path.realpath(store.directory))
    return last_segment(store.url)


class _Stalled(CommitError):
    """The save has stalled between its pins and its commit."""


def release_bases(store: Store, record: CommitRecord) -> None:
    """Delete the pins of a checkpoint that was in `store`, and whose commit record is gone, as well as it goes.

    A copy of that folder, or a forged record, has the same id: only pins that name this folder go.
    """
    prefix, name = pin_key(record.id, 0).removesuffix("0.pin"), _folder_name(store)

    def keys(owner: Store) -> Sequence[str]:
        keys = [stat.key for stat in owner.list(prefix) if is_pin(stat.key)]
        return [key for key in keys if _read_pin(owner, key).name == name]

    _delete(store, record.bases or (), keys)


def _read_pin(store: Store, key: str) -> PinRecord:
    """Read a pin. Raises NotFound, IntegrityError, FormatError."""
    data = bytes(read_bytes(store, key, max_bytes=MAX_PIN_BYTES))
    return decode_pin(data, url=store.url, key=key)


def _delete(store: Store, bases: Sequence[BaseRef], keys_of: Callable[[Store], Sequence[str]]) -> None:
    if not bases:
        return
    with contextlib.closing(store.parent()) as root:
        for base in bases:
            owner = PrefixStore(root, base.owner)
            try:
                owner.delete(keys_of(owner))
                owner.remove_empty(rank_directory(0))  # which the pin has made if the base was gone
                owner.remove_empty()
            except CheckpointError as error:
                _logger.warning("a pin could not be deleted (`ckpt gc` can): %s", error)
