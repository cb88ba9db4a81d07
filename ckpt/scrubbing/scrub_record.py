"""Read and write `ckpt-scrub.json` at a root: what of it was checked when.

It only orders the work. Whatever it says, a pass that is over is followed by one that reads all blocks again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from ckpt.backends.base import Store, is_key, put_bytes
from ckpt.consistency.commit import read_record_bytes
from ckpt.consistency.seal import seal_json, unseal_json
from ckpt.errors import ConfigurationError, FormatError, IntegrityError
from ckpt.format.bounds import Amount, Number, Seconds
from ckpt.format.names import SCRUB_KEY

_FORMAT = "ckpt-storage-scrub"
_MAX_BYTES = 8 << 20
_MAX_NUMBER = 1 << 53

Name = tuple[str, str]
"""Path and id of a checkpoint."""

Damaged = Literal["", "earlier", "found"]
"""No damage is known; an earlier check has found it; the check that is under way, or the last one of all, has."""

_WORST: Sequence[Damaged] = ("", "earlier", "found")


class CheckedCheckpoint(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is known of a checkpoint.

    Attributes:
        path, id: its folder, relative to the root; that of its commit.
        size_bytes: what a check of it reads, its own data and what it names of checkpoints that are not checked
            themselves. A position counts only while that is the same.
        passed: the number of the last pass that has checked all of it, or found it unreadable; 0: none has.
        tried: the number of the last pass in which it went first, to be mended.
        checked_at_s: when the last check of all of it began, in seconds since 1970.
        began_at_s: when the last check began, which may be under way.
        position: how many of its bytes that has checked, in the order of its manifests.
        damage: whether damage is known that was not mended.
        unreadable: the storage refused to show something of it at the last look.
    """

    path: str
    id: str
    size_bytes: Amount = 0
    passed: Amount = 0
    tried: Amount = 0
    checked_at_s: Seconds | None = None
    began_at_s: Seconds | None = None
    position: Amount = 0
    damage: Damaged = ""
    unreadable: bool = False

    @property
    def name(self) -> Name:
        return self.path, self.id


class ScrubRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `ckpt-scrub.json`: the number of the pass that is under way, and the checkpoints."""

    format: str = _FORMAT
    version: Number = 1
    number: Amount = 1
    checkpoints: list[CheckedCheckpoint] = []

    def by_name(self) -> dict[Name, CheckedCheckpoint]:
        """Return the checkpoints whose paths lead nowhere but below the root."""
        return {each.name: each for each in self.checkpoints if not each.path or is_key(each.path)}


_decoder = msgspec.json.Decoder(ScrubRecord)  # made once, before there are threads


def read_scrub(store: Store) -> ScrubRecord | None:
    """Read the record at the store's root; None if there is none.

    Raises IntegrityError (damaged), UnsafeContent (a link that leads out), FormatError (of a newer version),
    StorageError.
    """
    data = read_record_bytes(store, SCRUB_KEY, max_bytes=_MAX_BYTES)
    if data is None:
        return None
    text = unseal_json(data, url=store.url, key=SCRUB_KEY)
    try:
        record = _decoder.decode(text)
    except (ValueError, RecursionError) as error:  # as all of msgspec's are
        raise IntegrityError(f"not a record of scrubs: {error}", url=store.url, key=SCRUB_KEY) from error
    if record.format != _FORMAT:
        raise IntegrityError("not a record of scrubs", url=store.url, key=SCRUB_KEY)
    if record.version != 1:
        advice = "a newer version of this library wrote it; upgrade this one, or remove it to begin anew"
        raise FormatError(advice, url=store.url, key=SCRUB_KEY)
    for each in record.checkpoints:
        if max(each.passed, each.tried) > record.number:
            raise IntegrityError("names an impossible check", url=store.url, key=SCRUB_KEY)
    if not 1 <= record.number < _MAX_NUMBER:
        raise IntegrityError("names an impossible pass", url=store.url, key=SCRUB_KEY)
    return record


def joined(ours: CheckedCheckpoint, theirs: CheckedCheckpoint) -> CheckedCheckpoint:
    """Add the damage that another scrub knows of to what this one knows of a checkpoint."""
    worst = max(ours.damage, theirs.damage, key=_WORST.index)
    return msgspec.structs.replace(ours, damage=worst)


def write_scrub(
    store: Store, number: int, ours: Sequence[CheckedCheckpoint], others: Sequence[CheckedCheckpoint]
) -> None:
    """Replace the record at the store's root; leave out the `others` if there is no room for them.

    Raises ConfigurationError if there is none for ours.
    """
    for checkpoints in [*ours, *others], [*ours]:
        data = seal_json(msgspec.json.encode(ScrubRecord(number=number, checkpoints=checkpoints)))
        if len(data) <= _MAX_BYTES:
            put_bytes(store, SCRUB_KEY, data)
            return
    text = f"a record holds {_MAX_BYTES >> 20} MiB, and this would be {len(data):,} bytes: scrub folder by folder"
    raise ConfigurationError(text, url=store.url, key=SCRUB_KEY)
