"""Keep account of a pass: which checkpoints are there, what of them was checked when, and what is next."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import msgspec

from ckpt.backends.base import Store
from ckpt.backends.wrapper import folder_of
from ckpt.consistency import environment
from ckpt.consistency.commit import COMMIT_KEY
from ckpt.errors import CheckpointError, IntegrityError, StorageError, UnsafeContent
from ckpt.format.names import SCRUB_KEY
from ckpt.format.records import read_commit
from ckpt.scrubbing.scrub_record import (
    CheckedCheckpoint,
    Name,
    ScrubRecord,
    joined,
    read_scrub,
    write_scrub,
)

_WRITE_EVERY_S = 10.0
_FUTURE_S = 86400.0
"""How far the clock of another machine may be ahead of this one's."""
_MAX_LOOKS = 1000
"""After so many checkpoints that the record names, and that were not found, a scrub looks."""


@dataclass(frozen=True)
class PassFigures:
    """How far the pass is; see `ckpt.scrubbing.scrub.Scrubbed`."""

    number: int
    finished: bool
    total_bytes: int
    passed_bytes: int
    oldest_check_at_s: float | None
    never_checked: int


def is_gone(root: Store, name: Name) -> bool:
    """Tell whether a checkpoint is surely not there any more: it has no commit record, or that of another one."""
    path, id = name
    folder = folder_of(root, path)
    try:
        commit = read_commit(folder)
        if commit is not None:
            return commit.record.id != id
        return COMMIT_KEY not in folder.folders()  # which no reader can read, but nobody has removed it
    except CheckpointError:
        return False  # it cannot be read now


class Ledger:
    """What is known of the committed checkpoints of a root, here and in its record.

    Of those that this scrub looks at, its own knowledge counts, and damage that others have found; of all else
    theirs. No clock decides anything.
    """

    def __init__(self, store: Store, sizes: dict[Name, int], *, read_only: bool) -> None:
        """`sizes`: what a check reads of the checkpoints that are there. Raises FormatError as `read_scrub`."""
        self._store, self._sizes, self._read_only = store, sizes, read_only
        self._ours: set[Name] = set()
        self._gone: set[Name] = set()
        self._anew = self._unwritten = ""
        self._written_s = environment.monotonic()
        record = None
        try:
            record = read_scrub(store)
        except (IntegrityError, UnsafeContent, StorageError) as error:
            self._anew = f"the record of earlier scrubs is damaged, and begun anew: {error.message}"
        record = record or ScrubRecord()
        self.number, self._known = record.number, record.by_name()
        """As the record was read or written last, with what was not found at the root."""
        self._entries = {name: self._possible(name, self._known.get(name)) for name in sizes}

    @property
    def problem(self) -> str:
        """Say why the record could not be used or written; empty if it could."""
        return self._unwritten or self._anew

    def _possible(self, name: Name, entry: CheckedCheckpoint | None) -> CheckedCheckpoint:
        """Take what a record says of a checkpoint that is there, but nothing that cannot be true."""
        new = CheckedCheckpoint(path=name[0], id=name[1], size_bytes=self._sizes[name])
        if entry is None:
            return new
        if max(entry.checked_at_s or 0.0, entry.began_at_s or 0.0) > environment.now() + _FUTURE_S:
            return msgspec.structs.replace(new, damage=entry.damage)
        goes_on = entry.passed < self.number and entry.size_bytes == new.size_bytes
        position = entry.position if goes_on else 0
        return msgspec.structs.replace(entry, size_bytes=new.size_bytes, position=position)

    def __getitem__(self, name: Name) -> CheckedCheckpoint:
        return self._entries[name]

    def set(self, name: Name, **facts: Any) -> None:
        """Change what is known of a checkpoint; it is written down within seconds."""
        self._ours.add(name)
        self._entries[name] = msgspec.structs.replace(self._entries[name], **facts)
        if environment.monotonic() - self._written_s >= _WRITE_EVERY_S:
            self.write()

    def forget(self, name: Name) -> None:
        """Leave out a checkpoint that is not there any more."""
        self._gone.add(name)
        del self._sizes[name], self._entries[name]

    def knows_path(self, path: str) -> bool:
        """Tell whether the record names a checkpoint there."""
        return any(path == known for known, _ in self._known)

    def begin(self, *, damaged_first: bool) -> list[Name]:
        """List what is to check, what was not checked for longest first; begin another pass if one is over.

        With `damaged_first`, what is known to be damaged goes before all else, from its start, also if it was checked;
        but once in a pass only, as perhaps it cannot be mended.
        """
        absent = (name for name in self._known if name not in self._sizes)
        self._gone.update(name for name in islice(absent, _MAX_LOOKS) if is_gone(self._store, name))
        if self._entries and self._is_finished:
            self.number += 1
        first: list[Name] = []
        if damaged_first:
            first = [e.name for e in self._entries.values() if e.damage and e.tried < self.number]
            for name in first:
                passed = min(self[name].passed, self.number - 1)
                self.set(name, position=0, tried=self.number, passed=passed)
        todo = [each for each in self._entries.values() if not self.is_checked(each.name)]
        # A check that was begun goes on: what is left of it is the oldest.
        todo.sort(key=lambda each: (each.passed, not each.position, each.checked_at_s or 0.0))
        return [*first, *(each.name for each in todo if each.name not in set(first))]

    def is_checked(self, name: Name) -> bool:
        """Tell whether this pass is done with a checkpoint: this scrub, or another one."""
        return self[name].passed >= self.number

    def left_bytes(self, names: Iterable[Name]) -> int:
        """Sum what is to read of checkpoints."""
        return sum(max(0, self._sizes[name] - self[name].position) for name in names)

    def damaged(self) -> Iterator[str]:
        """Yield the folders of checkpoints that are damaged by their last check, and not mended."""
        return (each.path for each in self._entries.values() if each.damage)

    def unreadable(self) -> Iterator[str]:
        """Yield the folders of checkpoints that could not be read at the last look."""
        return (each.path for each in self._entries.values() if each.unreadable)

    def figures(self) -> PassFigures:
        """Say how far the pass is."""
        entries = self._entries.values()
        times = [each.checked_at_s for each in entries if each.checked_at_s is not None]
        never = len(entries) - len(times)
        return PassFigures(
            self.number,
            self._is_finished,
            sum(self._sizes.values()),
            sum(map(self._passed_bytes, entries)),
            min(times, default=None) if never == 0 else None,
            never,
        )

    def _passed_bytes(self, entry: CheckedCheckpoint) -> int:
        if self.is_checked(entry.name):
            return 0 if entry.unreadable else entry.size_bytes
        return min(entry.position, entry.size_bytes)

    @property
    def _is_finished(self) -> bool:
        return all(map(self.is_checked, self._entries))

    def write(self) -> None:
        """Write down what is known, joined with what another scrub has written meanwhile.

        If that fails, `problem` says so.
        """
        self._written_s = environment.monotonic()
        if self._read_only:
            return
        try:
            self._write()
        except CheckpointError as error:
            self._unwritten = f"what was checked could not be written down: {error.message}"
        else:
            self._unwritten = ""

    def _write(self) -> None:
        theirs = None
        with contextlib.suppress(IntegrityError, UnsafeContent):  # it is written anew
            theirs = read_scrub(self._store)
        known = self._known
        if theirs is not None:
            known, self.number = theirs.by_name(), max(self.number, theirs.number)
        for name, ours in self._entries.items():
            entry = known.get(name)
            if name not in self._ours:
                self._entries[name] = self._possible(name, entry or ours)
            elif entry is not None and entry != self._known.get(name):
                self._entries[name] = joined(ours, entry)
        others = [
            entry for name, entry in known.items() if name not in self._entries and name not in self._gone
        ]
        if self._entries or others:
            write_scrub(self._store, self.number, [*self._entries.values()], others)
        elif theirs is not None:  # of a checkpoint that was removed no folder comes back for it
            self._store.delete([SCRUB_KEY])
            if any(not path for path, _ in self._gone):
                self._store.remove_empty()
        self._known = {entry.name: entry for entry in (*self._entries.values(), *others)}
