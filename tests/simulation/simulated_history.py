"""Check the invariants of checkpoints on simulated storage, at every change and at the end."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from ckpt.consistency.checksums import crc64nvme, crc_text
from ckpt.consistency.commit import COMMIT_KEY, STOCK_METADATA_KEY
from ckpt.errors import AlreadyExists, FormatError, IntegrityError, SaveFailed
from ckpt.format.records import CommitRecord, decode_commit, decode_manifest
from ckpt.testing.simulated_objects import Version
from ckpt.testing.simulator import World
from ckpt.testing.virtual_time import Process
from simulation.simulated_jobs import Content, Group, Protocol, SurelyFailed, Uncommitted, this_process

_NAMED_BY_TOKEN = re.compile(r"rank-\d{5}/[0-9a-f]{16}\b.*")
_DATA = (".distcp", ".json", ".index")
_INF = float("inf")


class Violation(AssertionError):
    """An invariant does not hold."""


@dataclass(eq=False)
class Write:
    """A save, or a delete (`content` is None), as its ranks saw it.

    Attributes:
        ends_s: when each rank was done with it; a crash is an end too.
        outcomes: of each rank: "acknowledged", "failed" (surely did not happen), "unknown".
        members: the processes, by rank.
    """

    url: str
    content: Content | None
    size: int
    begin_s: float
    begun: set[int] = field(default_factory=set)
    ends_s: dict[int, float] = field(default_factory=dict)
    outcomes: dict[int, str] = field(default_factory=dict)
    errors: dict[int, BaseException] = field(default_factory=dict)
    members: Sequence[Process] = ()
    faults: int = 0

    @property
    def outcome(self) -> str:
        outcomes = self.outcomes.values()
        return next((each for each in ("acknowledged", "failed") if each in outcomes), "unknown")

    def end_s(self, late_s: float) -> float:
        """Return from when on it can change nothing that is found at the place."""
        ends_s = [self.ends_s[rank] for rank, outcome in self.outcomes.items() if outcome == "acknowledged"]
        if ends_s:
            return min(ends_s)
        if len(self.ends_s) < len(self.begun):
            return _INF
        return max(self.ends_s.values(), default=_INF) + (late_s if self.outcome == "unknown" else 0.0)


@dataclass(eq=False)
class Load:
    """A load: the content that it returned (None: there is no checkpoint), or its error."""

    url: str
    begin_s: float
    end_s: float = _INF
    content: Content | None = None
    error: Exception | None = None
    faults: int = 0


class History:
    """Everything that processes did and found; `judge` tells whether it is as promised.

    Attributes:
        spoilt: places that hold something of another program, where nothing of ours may come to be.
        abandoned: places where somebody aborted all uploads, also those of a running save.
    """

    def __init__(self, world: World, protocol: Protocol) -> None:
        self.world, self.protocol = world, protocol
        self.writes: list[Write] = []
        self.loads: list[Load] = []
        self.spoilt: set[str] = set()
        self.abandoned: set[str] = set()
        self._shared: dict[tuple[Group, int], Write] = {}

    # -- what processes do -------------------------------------------------------------------------

    def save(self, url: str, group: Group, rank: int, number: int, content: Content) -> bool:
        """Take part in the `number`-th save of a job; return whether it was acknowledged."""
        write = self._shared.get((group, number))
        if write is None:
            write = Write(url, content, group.size, self.world.now_s, members=group.members)
            self._shared[group, number] = write
            self.writes.append(write)
        return self._write(write, rank, lambda: self.protocol.save(url, group, rank, content))

    def delete(self, url: str) -> bool:
        write = Write(url, None, 1, self.world.now_s)
        self.writes.append(write)
        return self._write(write, 0, lambda: self.protocol.delete(url))

    def _write(self, write: Write, rank: int, work: Callable[[], None]) -> bool:
        process = this_process()
        faults = process.faults
        write.begun.add(rank)
        try:
            work()
            write.outcomes[rank] = "acknowledged"
        except SurelyFailed as error:
            write.outcomes[rank], write.errors[rank] = "failed", error
        except Exception as error:
            write.outcomes[rank], write.errors[rank] = "unknown", error
        finally:  # also when the process was killed
            write.ends_s[rank] = self.world.now_s
            write.faults += process.faults - faults + process.crashed
        return write.outcomes[rank] == "acknowledged"

    def load(self, url: str) -> None:
        process = this_process()
        load = Load(url, self.world.now_s, faults=-process.faults)
        self.loads.append(load)
        try:
            load.content = self.protocol.load(url)
        except Uncommitted:
            pass
        except Exception as error:
            load.error = error
        finally:
            load.end_s = _INF if process.crashed else self.world.now_s
            load.faults += process.faults

    # -- what is promised --------------------------------------------------------------------------

    def judge(self) -> None:
        """Raise Violation if a promise was broken."""
        for write in self.writes:
            self._judge_write(write)
        for load in self.loads:
            if load.end_s != _INF:
                self._judge_load(load)

    def _judge_write(self, write: Write) -> None:
        outcomes = set(write.outcomes.values())
        if {"acknowledged", "failed"} <= outcomes:
            raise Violation(f"ranks disagree whether a save failed: {write}")
        if write.url in self.spoilt:
            if write.content is not None and write.outcome == "acknowledged":
                raise Violation(f"saved over another program's checkpoint: {write}")
            return
        if write.content is None or any(member.faults or member.crashed for member in write.members):
            return
        for error in write.errors.values():
            if isinstance(error.__cause__, SaveFailed) and _blames_others(error.__cause__):
                raise Violation(f"a save took this library's checkpoint for another program's: {write}")
        if (
            write.faults
            or write.url in self.abandoned
            or self._disturbed(write.url, write.begin_s, write.end_s(0.0), but=write)
        ):
            return
        if outcomes != {"acknowledged"} or len(write.outcomes) < write.size:
            raise Violation(f"a save failed although nothing went wrong: {write}")

    def _judge_load(self, load: Load) -> None:
        if load.url in self.spoilt or (load.faults and load.error is not None):
            return
        # Who sees no checkpoint looks again, until the bound is over.
        waited = load.content is None and load.error is None and self.protocol.keeps_records
        lag_s = 0.0 if waited else self.world.model.visibility_s
        possible = self.possible(load.url, load.begin_s, load.end_s, lag_s)
        if load.error is None:
            if load.content not in [write.content if write else None for write in possible]:
                raise Violation(f"a load found {load.content}, which is not one of {possible}")
        elif isinstance(load.error, IntegrityError | FormatError) and not load.faults:
            raise Violation(f"a load called a sound checkpoint damaged: {load}") from load.error
        elif not self._disturbed(load.url, load.begin_s, load.end_s):
            raise Violation(f"a load failed although a checkpoint is committed: {load}") from load.error

    def possible(self, url: str, begin_s: float, end_s: float, lag_s: float) -> list[Write | None]:
        """Return every write whose result may be found then; None: nothing was ever written."""
        late_s = self.world.model.late_s
        writes = [write for write in self.writes if write.url == url and write.begin_s <= end_s]
        settled = [
            write
            for write in writes
            if write.outcome == "acknowledged" and write.end_s(0.0) + lag_s <= begin_s
        ]
        possible: list[Write | None] = [
            write
            for write in writes
            if write.outcome != "failed"
            and not any(write.end_s(late_s) <= later.begin_s for later in settled if later is not write)
        ]
        return possible if settled else [None, *possible]

    def _disturbed(self, url: str, begin_s: float, end_s: float, but: Write | None = None) -> bool:
        """Tell whether another write at the place may have had, or shown, an effect then."""
        lag_s = self.world.model.visibility_s
        return any(
            write.url == url
            and write is not but
            and write.begin_s <= end_s
            and write.end_s(self.world.model.late_s) + lag_s >= begin_s
            for write in self.writes
        )


class Guard:
    """Watch every change as it takes effect: no torn checkpoint, nothing of others touched."""

    def __init__(self) -> None:
        self.commits = 0
        self._listed: dict[str, dict[str, bytes]] = {}  # by place: the objects of its checkpoint
        self._once_listed: set[str] = set()
        self._committed: WeakKeyDictionary[Process, set[str]] = WeakKeyDictionary()  # at which places
        # Weak: a dict with a running greenlet as its key is not tracked, so never freed.
        self._wrote_data: WeakKeyDictionary[Process, int] = WeakKeyDictionary()

    def changed(self, world: World, name: str, before: Version | None, after: Version) -> None:
        place, _, key = name.partition("/")
        if before is not None and before.data is not None:
            self._check_permission(name, key, before, after)
        if after.process is not None and not world.is_late:
            self._check_order(world, after.process, place, key, after.data is None)
        if key == COMMIT_KEY:
            if after.data is not None and not world.is_late and after.process is not None:
                self._check_looked(world, after.process, name, before)
            self._listed[place] = _objects(world, place, after.data)
            self._once_listed |= self._listed[place].keys()
            self.commits += after.data is not None
        elif after.process is not None and key.endswith(_DATA) and not world.is_late:
            self._wrote_data[after.process] = after.process.requests
        listed = self._listed.get(place, {})
        if key != COMMIT_KEY and name in listed and after.data != listed[name]:
            raise Violation(f"{after.process} took {name} away from the checkpoint that is committed there")

    def _check_order(self, world: World, process: Process, place: str, key: str, is_delete: bool) -> None:
        """Check that `.metadata` never stands without a commit, for programs that look for it alone."""
        commit, metadata = f"{place}/{COMMIT_KEY}", f"{place}/{STOCK_METADATA_KEY}"
        committed = self._committed.setdefault(process, set())
        if key == COMMIT_KEY and is_delete and world.truth(metadata) is not None:
            looked_s = process.looked.get(commit, (-1, False, _INF))[-1]
            if world.versions[metadata][-1].at_s < looked_s:  # not put by another save meanwhile
                raise Violation(f"{process} deleted {commit}, and .metadata stays")
        elif key == COMMIT_KEY and not is_delete:
            committed.add(place)
        elif key == STOCK_METADATA_KEY and not (is_delete or place in committed or world.truth(commit)):
            raise Violation(f"{process} put {metadata}, where nothing is committed")

    def _check_looked(self, world: World, process: Process, name: str, before: Version | None) -> None:
        """Check that who commits looked at the place after its data were durable."""
        request, was_there, _ = process.looked.get(name, (-1, False, 0.0))
        if request < self._wrote_data.get(process, 0):
            raise Violation(f"{process} committed {name} without another look after writing its data")
        replaced = before is not None and before.data is not None
        if replaced and not was_there and world.model.conditional_create:
            raise Violation(f"{process} put {name} over a commit where it had seen none")

    def _check_permission(self, name: str, key: str, before: Version, after: Version) -> None:
        """Check that a process changes only what it wrote itself, or what a commit replaced."""
        if before.process is None:
            raise Violation(f"{after.process} changed {name}, which another program wrote")
        if key in (COMMIT_KEY, STOCK_METADATA_KEY):
            is_delete = after.process is not None and "delete" in after.process.name
            if after.data is None and not is_delete and not _took_for_own(name, before, after):
                raise Violation(f"{after.process} deleted {name} of {before.process}")
            return
        if name.endswith("/"):  # a directory, which is made again where it was not seen
            return
        own = _job(before) == _job(after)
        if after.data is not None and not (own and after.data == before.data):
            raise Violation(f"{after.process} wrote {name} again, which {before.process} wrote")
        if after.data is None and not own and name not in self._once_listed:
            raise Violation(f"{after.process} deleted {name} of {before.process}")


def _took_for_own(name: str, before: Version, after: Version) -> bool:
    """Tell whether what is deleted is the process's own, or was when it last looked."""
    last_read = after.process.read.get(name) if after.process is not None else None
    return _job(after) in (_job(before), _job(last_read) if last_read is not None else "")


def _blames_others(error: SaveFailed) -> bool:
    return any(isinstance(failure, AlreadyExists) for failure in error.failures.values())


def _job(version: Version) -> str:
    return version.process.name.partition(" ")[0] if version.process is not None else "outside"


def _objects(world: World, place: str, commit: bytes | None) -> dict[str, bytes]:
    """Return all that a commit lists. Raises Violation where it is not as the commit says."""
    if commit is None:
        return {}
    record = _record(commit)
    objects: dict[str, bytes] = {}
    for ref in (record.described_by, *record.manifests):
        data = world.truth(f"{place}/{ref.path}")
        if data is None or len(data) != ref.size_bytes or crc_text(crc64nvme(data)) != ref.crc64nvme:
            raise Violation(f"a commit at {place} lists {ref.path}, which is not there or another one")
        objects[f"{place}/{ref.path}"] = data
    for ref in record.manifests:
        for file in decode_manifest(objects[f"{place}/{ref.path}"], url=place, key=ref.path).files:
            data = world.truth(f"{place}/{file.path}")
            if data is None or [crc64nvme(data)] != list(file.block_crcs()):
                raise Violation(f"a commit at {place} lists {file.path}, which is not there or another one")
            objects[f"{place}/{file.path}"] = data
    return objects


@functools.lru_cache(maxsize=64)
def _record(commit: bytes) -> CommitRecord:
    return decode_commit(commit, url="", key=COMMIT_KEY)
