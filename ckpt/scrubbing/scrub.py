"""Check what is stored at a root again and again, the longest unchecked first, and mend it: `ckpt.scrub`.

A pass reads every block once. What of it is done is written down at the root every few seconds, so a scrub that is
killed, or has used up its budget, is continued by the next one. Checkpoints may come and go meanwhile.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

from ckpt.backends.base import Store, exists
from ckpt.backends.registry import normal_url, open_store
from ckpt.consistency import environment
from ckpt.consistency.commit import COMMIT_KEY
from ckpt.draining.marker import durable_of
from ckpt.errors import (
    CheckpointError,
    CommitConflict,
    ConfigurationError,
    NotCommitted,
    NotFound,
    StorageError,
    short_traceback,
)
from ckpt.format.names import is_data_key
from ckpt.scrubbing.budget import Budget, Position
from ckpt.scrubbing.ledger import Ledger, is_gone
from ckpt.scrubbing.mending import MENDABLE, Gone, Mended, Mender
from ckpt.scrubbing.scrub_record import Name
from ckpt.tools.findings import Damage, Verification
from ckpt.tools.ls import ListedCheckpoint, find_folders
from ckpt.tools.record_checks import Choice
from ckpt.tools.verify import verify_store
from ckpt.transfer.buffer_pool import StagingPool
from ckpt.transfer.reports import ReportBytes, no_report
from ckpt.transfer.threads import workers

_MAX_DAMAGES = 100
_MAX_LOOKS = 16
"""At so many checkpoints in a second place that shows nothing."""


@dataclass
class ScrubbedCheckpoint:
    """What a scrub has found out about a checkpoint.

    Attributes:
        path: relative to the root; empty for the root itself.
        state: `checked`; `partly`, as the budget was used up; `gone`: removed or replaced meanwhile; `damaged`: its
            commit record cannot be read; `unreadable`: the storage refused something of it, for a `reason`; or
            `skipped`, for a `reason`: another program's, for one.
        checked_bytes: bytes that were read and compared.
        damages: at most 100; `damages_omitted` counts the others.
        mended: what became of the damaged objects, if there is a second place.
        unchecked_digests: the algorithm of its blocks' digests, if those could not be checked here.
    """

    path: str
    state: str
    checked_bytes: int = 0
    damages: list[Damage] = field(default_factory=list)
    damages_omitted: int = 0
    mended: list[Mended] = field(default_factory=list)
    reason: str = ""
    unchecked_digests: str | None = None


@dataclass
class Scrubbed:
    """The result of `ckpt.scrub`.

    Attributes:
        number: that of the pass, from 1; `finished`: every block that is there was read in it, but those of what
            is `unreadable`.
        total_bytes, passed_bytes: data of the committed checkpoints, and how much of it this pass has read. Data that
            they name of checkpoints that are not checked themselves is part of it.
        checked_bytes: data that this scrub has read and compared.
        oldest_check_at_s: when the check began of the data that was not checked for longest, in seconds since 1970;
            None if some of it never was: `never_checked` counts those checkpoints.
        checkpoints: what was looked at, without those that the record alone tells of.
        damaged: folders of checkpoints that are damaged by their last check, and were not mended.
        unreadable: folders of those of which something could not be read at the last look; the next pass tries again.
        problem: why the record of earlier scrubs could not be used or written, if so.
    """

    url: str
    number: int = 0
    finished: bool = False
    total_bytes: int = 0
    passed_bytes: int = 0
    checked_bytes: int = 0
    oldest_check_at_s: float | None = None
    never_checked: int = 0
    checkpoints: list[ScrubbedCheckpoint] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    problem: str = ""

    @property
    def ok(self) -> bool:
        """True if no damage is left that was found, and all could be read."""
        return not self.damaged and not self.unreadable


@short_traceback
def scrub(
    root: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    max_bytes: float | None = None,
    max_s: float | None = None,
    max_bandwidth_bytes_per_s: float | None = None,
    repair_from: str | os.PathLike[str] | None = None,
    repair_options: Mapping[str, Any] | None = None,
    depth: int = 3,
    dry_run: bool = False,
    status_only: bool = False,
    threads: int | None = None,
    progress: ReportBytes | None = None,
) -> Scrubbed:
    """Check every block at and below `root` once a pass, those first that were not checked for longest.

    `ckpt-scrub.json` at the root remembers what was checked when: the next scrub goes on there, also after a kill.
    When a pass is over, the next scrub begins another one. A block that others refer to is read once, where it lies.
    Takes 256 MiB of memory beside the records. Damages are in the result; they raise no error.

    Args:
        storage_options: of the root, by name, as for a save there.
        max_bytes, max_s: read no more data than this (but at least a run of blocks, 8 MiB), and begin no reads after
            so many seconds; default: the pass.
        max_bandwidth_bytes_per_s: read no faster.
        repair_from: a second place that holds the same checkpoints in the same folders, as they are or copied by
            `ckpt.copy`: damaged objects are put again, with the blocks from there that are damaged here. What is
            known to be damaged goes first, once a pass.
        repair_options: storage options of that place; by default the same.
        depth: levels of folders below the root to search.
        dry_run: check, say what would be mended, and write nothing.
        status_only: read no data, and say what the record tells.
        threads: parallel reads.
        progress: called with the data bytes checked so far and those to check; at first with the folders looked at.

    Raises:
        NotFound: the root, or the second place, is empty, or does not exist.
        NotCommitted: no checkpoint of this library was found; nothing is written.
        ConfigurationError: something is to be mended in a node's own folder of a run, or from the root itself; or
            arguments do not go together.
        FormatError: a newer version of this library wrote the record.
        StorageError: the root could not be reached, or refused.
    """
    budget = Budget(max_bytes, max_s, max_bandwidth_bytes_per_s)
    limits = (max_bytes, max_s, max_bandwidth_bytes_per_s)
    if status_only and (repair_from is not None or dry_run or any(limit is not None for limit in limits)):
        text = "a status reads no data and writes none: it takes no limits, no second place and no dry run"
        raise ConfigurationError(text)
    if repair_options is not None and repair_from is None:
        raise ConfigurationError("these are options of a second place to mend from, and none is given")
    with contextlib.closing(open_store(root, storage_options, threads=threads)) as store:
        report = progress or no_report
        found = _find(store, depth, report)
        options = storage_options if repair_options is None else repair_options
        second = None if repair_from is None else normal_url(repair_from)
        places = _Places(normal_url(root), storage_options, second, options, threads)
        if repair_from is not None:
            _refuse_node(store, found)
            _refuse_second(store, places, found)
        job = _Scrub(store, places, found, budget, dry_run=dry_run, progress=report)
        if not status_only:
            with workers(store.threads, "ckpt-scrub") as pool:
                job.run(pool)
        return job.summary()


def _find(store: Store, depth: int, report: ReportBytes) -> list[ListedCheckpoint]:
    """List what is at and below the root. Raises NotFound, and NotCommitted if no checkpoint of ours is there."""
    found = [listed for _, listed in find_folders(store, depth=depth, report=report)]
    if any(listed.state in ("committed", "damaged", "unreadable") for listed in found):
        return found
    if not found and next(iter(store.list()), None) is None:
        raise NotFound("there is nothing here", url=store.url)
    text = f"no checkpoint of this library was found here or {depth} levels of folders below"
    if any(listed.state == "foreign" for listed in found):
        text += "; `ckpt verify` checks those of other programs"
    raise NotCommitted(text, url=store.url)


def _refuse_node(store: Store, found: Iterable[ListedCheckpoint]) -> None:
    """Raise ConfigurationError if any is of a node's own folder: it has the files of its ranks, and no room for others."""
    if store.directory is None:
        return
    places = {os.path.join(store.directory, listed.path).rstrip("/") for listed in found}
    for folder in sorted({os.path.abspath(store.directory)} | places | {os.path.dirname(p) for p in places}):
        if (durable := durable_of(folder)) is not None:
            text = f"{folder} is a node's own folder of the run {durable}, and need not hold all files: scrub that place"
            raise ConfigurationError(text, url=store.url)


def _refuse_second(store: Store, places: _Places, found: Sequence[ListedCheckpoint]) -> None:
    """Raise ConfigurationError, NotFound for a second place that cannot help: a mistake shows now, not hours later."""
    with contextlib.closing(places.open_second("")) as second:
        if second.url == store.url:
            raise ConfigurationError("the second place is this one", url=store.url)
        is_empty = False
        with contextlib.suppress(CheckpointError):  # what is wrong is said of each object that is damaged
            # Some places, web servers above all, cannot be listed.
            some = (f"{listed.path}/{COMMIT_KEY}".lstrip("/") for listed in found[:_MAX_LOOKS])
            is_empty = next(iter(second.list()), None) is None and not any(
                exists(second, key) for key in some
            )
        if is_empty:
            raise NotFound("there is nothing to mend from: is that the second place?", url=second.url)


@dataclass(frozen=True)
class _Places:
    """Opens the folders of checkpoints as stores of their own, which refuse links that lead out of them."""

    root: str = field(repr=False)  # it may carry a password
    options: Mapping[str, Any] | None = field(repr=False)
    second: str | None = field(repr=False)
    second_options: Mapping[str, Any] | None = field(repr=False)
    threads: int | None

    def open(self, path: str) -> Store:
        return open_store(_below(self.root, path), self.options, threads=self.threads)

    def open_second(self, path: str) -> Store:
        assert self.second is not None
        return open_store(_below(self.second, path), self.second_options, threads=self.threads)


def _below(root: str, path: str) -> str:
    return f"{root.rstrip('/')}/{path}" if path else root


class _Scrub:
    def __init__(
        self,
        store: Store,
        places: _Places,
        found: Sequence[ListedCheckpoint],
        budget: Budget,
        *,
        dry_run: bool,
        progress: ReportBytes,
    ) -> None:
        self._places, self._budget, self._dry_run, self._progress = places, budget, dry_run, progress
        self._pool = StagingPool()
        self._result = Scrubbed(store.url)
        self._total_bytes = 0
        self._store = store
        committed = {
            listed.path: listed for listed in found if listed.state == "committed" and listed.id is not None
        }
        self._paths = committed.keys()
        sizes = {(path, listed.id or ""): self._size_bytes(listed) for path, listed in committed.items()}
        self._ledger = Ledger(store, sizes, read_only=dry_run)
        for listed in found:
            self._pass_over(listed)

    def _size_bytes(self, listed: ListedCheckpoint) -> int:
        """Sum what a check of a checkpoint reads: its own data, and all that it names if some of it is not checked itself."""
        is_covered = all(self._is_checked_itself(listed.path, owner) for owner in listed.bases)
        return max(0, listed.size_bytes or 0) + (0 if is_covered else max(0, listed.referred_bytes or 0))

    def _pass_over(self, listed: ListedCheckpoint) -> None:
        """Note why something is not checked."""
        state, reason = "skipped", listed.problem or "another program wrote it: `ckpt verify` checks it"
        if listed.state == "damaged":
            damage = Damage("record", listed.problem or "its commit record cannot be read", COMMIT_KEY)
            self._result.checkpoints.append(ScrubbedCheckpoint(listed.path, "damaged", damages=[damage]))
            self._result.damaged.append(listed.path)
        elif listed.state not in ("committed", "incomplete"):
            if listed.state == "unreadable" and self._ledger.knows_path(listed.path):
                state = "unreadable"  # others may be no checkpoints at all, such as lost+found
                self._result.unreadable.append(listed.path)
            self._result.checkpoints.append(ScrubbedCheckpoint(listed.path, state, reason=reason))

    def run(self, threads: Executor) -> None:
        """Check until the pass or the budget is over."""
        todo = self._ledger.begin(damaged_first=self._places.second is not None)
        self._total_bytes = self._budget.bound(self._ledger.left_bytes(todo))
        try:
            for name in todo:
                if self._budget.is_over:
                    break
                if not self._ledger.is_checked(name):
                    done = self._scrub(name, threads)
                    if done.state != "partly" or done.checked_bytes or done.damages:
                        self._result.checkpoints.append(done)
        finally:
            self._ledger.write()

    def summary(self) -> Scrubbed:
        """Return the result."""
        for name, value in vars(self._ledger.figures()).items():
            setattr(self._result, name, value)
        self._result.damaged += self._ledger.damaged()
        self._result.unreadable += self._ledger.unreadable()
        self._result.problem = self._ledger.problem
        return self._result

    # -- one checkpoint --------------------------------------------------------------------------------

    def _scrub(self, name: Name, threads: Executor) -> ScrubbedCheckpoint:
        before = self._ledger[name]
        goes_on = before.position > 0
        began_at_s = before.began_at_s if goes_on and before.began_at_s else environment.now()
        known = before.damage if goes_on or not before.damage else "earlier"
        self._ledger.set(name, began_at_s=began_at_s, damage=known)
        done = ScrubbedCheckpoint(name[0], "checked")
        try:
            with contextlib.closing(self._places.open(name[0])) as store:
                left = self._check_and_mend(store, name, done, threads)
        except (CheckpointError, Gone) as error:
            return self._failed(name, done, error)
        facts: dict[str, Any] = {"damage": "found" if left else known, "unreadable": False}
        if left and self._places.second is not None:
            facts["tried"] = self._ledger.number
        if done.state == "checked":
            facts |= {"passed": self._ledger.number, "checked_at_s": began_at_s, "position": 0}
            facts["damage"] = "found" if left or known == "found" else ""
        self._ledger.set(name, **facts)
        return done

    def _failed(
        self, name: Name, done: ScrubbedCheckpoint, error: CheckpointError | Gone
    ) -> ScrubbedCheckpoint:
        """Note why a checkpoint was not checked to its end. Raises StorageError if the root cannot be reached."""
        replaced = (NotFound, NotCommitted, CommitConflict, ConfigurationError)
        if isinstance(error, Gone) or (isinstance(error, replaced) and is_gone(self._store, name)):
            self._ledger.forget(name)  # with what was missing of it
            return ScrubbedCheckpoint(name[0], "gone")
        # In this pass it would fail again, and keep others from being checked.
        facts = {"passed": self._ledger.number, "position": 0}
        if isinstance(error, (StorageError, *replaced)):
            if isinstance(error, StorageError):
                next(iter(self._store.folders()), None)
            self._ledger.set(name, **facts, unreadable=True)
            done.state, done.reason = "unreadable", f"{error.message} ({error.key or 'its records'})"
            return done
        self._ledger.set(name, **facts, damage="found")  # a record that is damaged now
        return ScrubbedCheckpoint(name[0], "damaged", damages=[Damage.of_error("record", error)])

    def _check_and_mend(
        self, store: Store, name: Name, done: ScrubbedCheckpoint, threads: Executor, *, again: bool = False
    ) -> bool:
        """Check a checkpoint from where the last check was cut off; return whether damage is left."""
        found = self._check(store, name, done, threads)
        named = found.damages[: _MAX_DAMAGES - len(done.damages)]
        done.damages += named
        done.damages_omitted += len(found.damages) - len(named) + found.damages_omitted
        if not found.damages or self._places.second is None:
            return not found.ok
        with contextlib.closing(self._places.open_second(name[0])) as second:
            mender = Mender(store, second, self._pool, threads, dry_run=self._dry_run)
            mended = mender.mend(found.damages, name[1])
        done.mended += mended
        sound = {each.key for each in mended if each.state == "mended"}
        left = [each for each in found.damages if each.key not in sound or each.kind not in MENDABLE]
        is_left = bool(left or found.damages_omitted)
        if again or all(map(is_data_key, sound)):
            return is_left
        # Now that its records are sound, the files can be checked that they list.
        self._ledger.set(name, position=0)
        is_left_now = self._check_and_mend(store, name, done, threads, again=True)
        return is_left_now or (is_left and done.state == "partly")

    def _check(self, store: Store, name: Name, done: ScrubbedCheckpoint, threads: Executor) -> Verification:
        def is_covered(owner: str) -> bool:
            return self._is_checked_itself(name[0], owner)

        position = Position(self._ledger[name].position, self._budget, is_covered)
        counted = self._result.checked_bytes

        def passed(nbytes: int, is_damaged: bool) -> None:
            position.passed(nbytes)
            facts = {"damage": "found"} if is_damaged else {}
            self._ledger.set(name, position=position.at, **facts)

        def report(done_bytes: int, total_bytes: int) -> None:
            self._result.checked_bytes = counted + done_bytes
            self._progress(min(counted + done_bytes, self._total_bytes), self._total_bytes)

        choice = Choice(position.ranges, only_blocks=True, strays=False, passed=passed, progress=report)
        found = verify_store(store, threads, choice)
        if found.id not in (None, name[1]):
            raise Gone
        done.checked_bytes += found.checked_bytes
        done.unchecked_digests = found.unchecked_digests
        done.state = "partly" if position.is_cut else "checked"
        return found

    def _is_checked_itself(self, path: str, owner: str) -> bool:
        """Tell whether a checkpoint beside `path`, whose bytes that names, is among those that are checked."""
        parent = path.rpartition("/")[0]
        return bool(path) and (f"{parent}/{owner}" if parent else owner) in self._paths
