"""Carry the checkpoints of a local folder to the durable place, in the order of their steps: `ckpt.drain`."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ckpt.backends.base import Store
from ckpt.backends.registry import open_store
from ckpt.backends.wrapper import PrefixStore
from ckpt.consistency import environment
from ckpt.consistency.patience import patiently
from ckpt.draining.carry import NO_BASE, Carried, Carrier, Share
from ckpt.draining.folder_lock import held
from ckpt.draining.marker import check_owner, marker_of, runs_of
from ckpt.draining.unfinished import Unfinished
from ckpt.errors import (
    AccessDenied,
    AlreadyExists,
    BaseGone,
    CheckpointError,
    CommitConflict,
    CommitError,
    ConfigurationError,
    FormatError,
    IntegrityError,
    NotFound,
    StillReferred,
    StorageError,
    StorageFull,
    short_traceback,
)
from ckpt.format.records import read_commit
from ckpt.format.run_record import RunRecord, read_run
from ckpt.tools.remove import remove
from ckpt.transfer.bandwidth import Pacer
from ckpt.transfer.reports import ReportBytes, no_report
from ckpt.writing.pins import GRACE_S

_logger = logging.getLogger(__name__)

_PASSING = (StorageError, CommitError)
_FINAL = (AccessDenied, AlreadyExists, BaseGone, CommitConflict, NotFound, StorageFull)
"""Of those, the ones that do not pass by themselves."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 30.0

_MARK_S = GRACE_S / 8
"""How often to mark what waits for other nodes, so that `ckpt gc` passes over it."""

STOPPED = "stopped before it was durable"

State = Literal["durable", "waiting", "failed", "left out"]


@dataclass(frozen=True)
class Drained:
    """What became of a checkpoint of the local folder.

    Attributes:
        path: its folder, below both roots.
        url: where it is durable, or is to be, without credentials.
        state: `durable`: committed there. `waiting`: objects are still missing there, which other nodes
            have. `failed`: it is not tried again. `left out`: newer ones are waiting.
        reason: why it is not durable.
        sent_bytes: of data files, by this process.
        took_s: to send them and to commit; 0 if it was durable before.
        id: of its commit.
    """

    path: str
    step: int | None
    url: str
    state: State
    reason: str = ""
    sent_bytes: int = 0
    took_s: float = 0.0
    id: str = ""


@short_traceback
def drain(
    local: str | os.PathLike[str],
    durable: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    newest: int | None = None,
    keep_local: int | None = None,
    max_bandwidth_bytes_per_s: float | None = None,
    follow: bool = False,
    poll_s: float = 2.0,
    outage_s: float = 3600.0,
    threads: int | None = None,
    finish: threading.Event | None = None,
    stop: threading.Event | None = None,
    progress: ReportBytes | None = None,
    any_root: bool = False,
    settled: Mapping[str, tuple[str, State]] | None = None,
    share: Share | None = None,
) -> Generator[Drained, None, None]:
    """Carry what is committed in `local` to `durable`, and yield each checkpoint when its state is known.

    A checkpoint becomes durable in one step, when all of its objects are there. After a crash call it
    again: what was sent stays, and is not sent again. On several nodes, each of which has its own
    ranks' files and all of which have the commit record, each calls it; the last one commits.

    Args:
        local: a run's folder on this node. Its checkpoints are the folders directly below it.
        durable: the run's folder in the durable place. Checkpoints have the same names there.
        storage_options: of the durable place, by name, as for a save there.
        threads: parallel transfers.
        max_bandwidth_bytes_per_s: the most that is sent; default: no limit.
        newest: of those that are not durable yet, carry only the newest so many; default all.
        keep_local: remove from `local` what is durable, but for the newest so many; default: remove nothing.
        follow: look for more every `poll_s` seconds; else carry what is there.
        finish: set it to have it look once more, carry what is there, and end.
        stop: set it to have it end soon, whatever is left.
        outage_s: how long the durable place may give no answer before that is an error.
        progress: called with the data bytes of a checkpoint that are there, and those of all that are here.
        any_root: carry also what is of another run than `durable`, by the marker of its folder and the ids of the runs.
        settled: the id and state of checkpoints that an earlier call has settled, by their folders.
        share: of the files that are here, those to carry, where other nodes have copies of the others; default all.

    Raises:
        ConfigurationError: an argument is wrong, or `local` is the folder of a run with another root.
        AccessDenied, StorageFull: at once; other errors of storage once they last longer than `outage_s`.
    """
    for name, number in (("newest", newest), ("keep_local", keep_local)):
        if number is not None and number < 1:
            raise ConfigurationError(f"{name} must be at least 1, not {number}")
    if not poll_s > 0 or not outage_s >= 0:
        raise ConfigurationError("poll_s must be more than 0, and outage_s not less")
    pacer = None if max_bandwidth_bytes_per_s is None else Pacer(max_bandwidth_bytes_per_s)
    from_store = open_store(local)
    to_store = open_store(durable, storage_options, threads=threads)
    if from_store.url == to_store.url:
        raise ConfigurationError("local and durable are the same place", url=to_store.url)
    check_owner(None if any_root else from_store.directory, durable)
    event = stop or threading.Event()
    drainer = _Drainer(
        from_store,
        to_store,
        Carrier(pacer, event, progress or no_report, share, Unfinished(from_store.directory)),
        event,
        newest,
        keep_local,
        outage_s,
        any_root,
        settled=dict(settled or {}),
    )
    return drainer.run(follow, finish or threading.Event(), poll_s)


@dataclass(frozen=True)
class _Local:
    """A checkpoint that is committed in the local folder, and the folders whose bytes it names.

    With a `problem`, its record cannot be read.
    """

    path: str
    id: str
    step: int | None
    created_at: str
    bases: frozenset[str] = frozenset()
    run: str = ""
    problem: str = ""

    @property
    def order(self) -> tuple[float, str]:
        return -math.inf if self.step is None else self.step, self.created_at


@dataclass
class _Again:
    """When to look for something again: in longer and longer pauses, as many nodes may wait for one."""

    at_s: float = -math.inf
    pause_s: float = 0.0
    marked_s: float = -math.inf

    def wait(self) -> None:
        self.pause_s = min(max(_FIRST_PAUSE_S, 2 * self.pause_s), _LONGEST_PAUSE_S)
        self.at_s = environment.monotonic() + self.pause_s


@dataclass
class _Drainer:
    local: Store
    durable: Store
    carrier: Carrier
    stop: threading.Event
    newest: int | None
    keep_local: int | None
    outage_s: float
    any_root: bool = False
    durable_run: str | None = None
    """The id of the run in the durable place, as it was at first."""

    settled: dict[str, tuple[str, State]] = field(default_factory=dict)
    """The commit that was seen in each folder, and what became of it."""

    again: defaultdict[str, _Again] = field(default_factory=lambda: defaultdict(_Again))
    """When to look again for what other nodes have, by the folder of a checkpoint."""

    sent_bytes: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    """Of data files, by the id of a commit."""

    told: dict[str, str] = field(default_factory=dict)
    """Why a checkpoint waits, by its folder, as it was last said."""

    def run(self, follow: bool, finish: threading.Event, poll_s: float) -> Generator[Drained, None, None]:
        with contextlib.closing(self.local), contextlib.closing(self.durable):
            while True:
                is_last = not follow or finish.is_set()
                yield from self._round(is_last)
                if is_last or self.stop.is_set():
                    return
                environment.wait(finish, poll_s)

    def _round(self, is_last: bool) -> Iterator[Drained]:
        there = sorted(self._committed(), key=lambda each: each.order)
        todo = [each for each in there if self._state(each) in (None, "waiting")]
        needed = {base for each in todo[-(self.newest or 0) :] for base in each.bases}
        left_out = [each for each in todo[: -self.newest] if each.path not in needed] if self.newest else []
        for each in todo:
            if self.stop.is_set():
                yield self._told(each, "waiting", STOPPED)
                continue
            if each.path in self._given_up():  # since this round began: each may take long
                continue
            if self._state(each) is None:
                self.again.pop(each.path, None)
            elif not is_last and environment.monotonic() < self.again[each.path].at_s:
                continue
            drained = self._left_out(each) if each in left_out else self._drain(each)
            if drained is not None:
                yield drained
        self._make_room(there)
        self.carrier.unfinished.forget_but([each.path for each in there])
        paths = {each.path for each in there}
        self.settled = {path: seen for path, seen in self.settled.items() if path in paths}
        self.again = defaultdict(_Again, {path: each for path, each in self.again.items() if path in paths})
        self.sent_bytes = defaultdict(int, {each.id: self.sent_bytes[each.id] for each in there})

    def _given_up(self) -> set[str]:
        """Find the folders of checkpoints that the run has given up."""
        try:
            record = read_run(self.local)
        except CheckpointError as error:
            _logger.warning("the run's record cannot be used, all checkpoints are carried: %s", error)
            record = None
        return {each.path for each in record.checkpoints if each.superseded} if record else set()

    def _committed(self) -> Iterator[_Local]:
        """List what is committed here and was not given up by the run."""
        given_up = self._given_up()
        for path in self.local.folders():
            if path in given_up:
                continue
            try:
                commit = read_commit(PrefixStore(self.local, path))
                if commit is not None:
                    made = commit.record
                    step = made.step(path)
                    yield _Local(path, made.id, step, made.created_at, frozenset(made.owners), made.run_id)
            except CheckpointError as error:
                yield _Local(path, "", None, "", problem=str(error))

    def _state(self, each: _Local) -> State | None:
        """Return what became of a checkpoint; None if that is not known of this save of it."""
        commit_id, state = self.settled.get(each.path, ("", None))
        return state if commit_id == each.id else None

    def _left_out(self, each: _Local) -> Drained:
        self.settled[each.path] = each.id, "left out"
        return self._told(each, "left out", "newer checkpoints are not durable yet")

    def _drain(self, each: _Local) -> Drained | None:
        """Carry a checkpoint; None if it is gone, or waits as before."""
        source, destination = PrefixStore(self.local, each.path), PrefixStore(self.durable, each.path)
        began_s = environment.monotonic()
        if each.problem:
            return self._failed(each, each.problem)
        marks = began_s - self.again[each.path].marked_s > _MARK_S
        try:
            carried = patiently(
                lambda: self._carry(each, source, destination, marks=marks),
                outage_s=self.outage_s,
                stop=self.stop,
                passing=_PASSING,
                final=_FINAL,
            )
        except CheckpointError as error:
            if read_commit(source) is None:  # removed meanwhile
                return None
            if self.stop.is_set():
                return self._told(each, "waiting", STOPPED)
            if isinstance(error, StorageError) and not self._is_its_own(error):
                raise
            return self._failed(each, str(error))
        self.sent_bytes[each.id] += carried.sent_bytes
        if carried.was_replaced:  # the next round sees it in its place
            return None
        if carried.is_gone:
            self.settled[each.path] = each.id, "left out"
            return self._told(each, "left out", "it was removed there")
        if carried.lacks is not None:
            if carried.lacks != NO_BASE:
                self.settled[each.path] = each.id, "waiting"
                self.again[each.path].wait()
                if marks:
                    self.again[each.path].marked_s = began_s
            if self.told.get(each.path) == carried.lacks:
                return None
            self.told[each.path] = carried.lacks
            return self._told(each, "waiting", carried.lacks)
        self.settled[each.path] = each.id, "durable"
        took_s = 0.0 if carried.was_there else environment.monotonic() - began_s
        return self._told(each, "durable", took_s=took_s)

    def _carry(self, each: _Local, source: Store, destination: Store, *, marks: bool) -> Carried:
        if each.run and not self.any_root:
            self._check_run(each)
        return self.carrier.carry(
            source,
            destination,
            commit_id=each.id,
            marks=marks,
            was_removed=lambda: each.id in _record_of(self.durable).removed,
        )

    def _check_run(self, each: _Local) -> None:
        """Raise CommitConflict if a checkpoint is not of the run of the durable place; if that has none, of this folder."""
        if self.durable_run is None:
            self.durable_run = _record_of(self.durable).run
        runs = frozenset({self.durable_run} - {""})
        if not runs and self.local.directory is not None and marker_of(self.local.directory) is not None:
            runs = runs_of(self.local) or frozenset({"none yet"})
        if runs and not runs & {"", each.run}:
            text = f"it is of another run ({each.run}) than {self.durable.url} ({', '.join(runs)}): it stays here"
            raise CommitConflict(text)

    def _failed(self, each: _Local, reason: str) -> Drained:
        self.settled[each.path] = each.id, "failed"
        return self._told(each, "failed", reason)

    def _is_its_own(self, error: StorageError) -> bool:
        """Tell whether an error concerns one checkpoint alone: its files here, or another program's there."""
        return isinstance(error, AlreadyExists) or (error.url or "").startswith(self.local.url)

    def _told(self, each: _Local, state: State, reason: str = "", *, took_s: float = 0.0) -> Drained:
        url = f"{self.durable.url.rstrip('/')}/{each.path}"
        sent_bytes = self.sent_bytes[each.id]
        return Drained(each.path, each.step, url, state, reason, sent_bytes, took_s, each.id)

    def _make_room(self, there: list[_Local]) -> None:
        """Remove from this node what is durable, but for the newest; and what was left out."""
        if self.keep_local is None:
            return
        seen = [self.settled.get(each.path, ("", "")) for each in there]
        states = [state if of == each.id else "" for each, (of, state) in zip(there, seen, strict=True)]
        newest_durable = max(
            (number for number, state in enumerate(states) if state == "durable"), default=-1
        )
        for number, each in enumerate(there[: -self.keep_local]):
            # What was left out may be needed until a newer one is durable.
            if states[number] != "durable" and not (states[number] == "left out" and number < newest_durable):
                continue
            try:
                remove_save(f"{self.local.directory or self.local.url}/{each.path}", each.id)
            except StillReferred:
                continue  # a later one names its bytes: it goes with that
            except CheckpointError as error:
                _logger.warning("%s could not be removed from this node: %s", each.path, error)


def remove_save(folder: str, commit_id: str) -> None:
    """Remove a checkpoint of this node if it is still the save with this id, and is not being saved again.

    Raises as `ckpt.remove`.
    """
    with held(folder) as is_free, contextlib.closing(open_store(folder)) as store:
        commit = read_commit(store) if is_free else None
        if commit is not None and commit.record.id == commit_id:
            remove(folder)


def _record_of(durable: Store) -> RunRecord:
    """Read what the durable place has of the run; nothing if its record is damaged. Raises StorageError."""
    try:
        return read_run(durable) or RunRecord()
    except (IntegrityError, FormatError):
        return RunRecord()
