"""Draw what trainers with a local tier, and the processes that carry, do on nodes that fail; run and judge it.

What is ours runs as it ships: `NearSaves`, `Tier`, `save_to_first`, copies on partners, the process that
carries with `drain` and `Carrier`, retention and room, `restore` with `Nearest` and `load_near`. In the place of
DCP's save, of torch's process group, of `subprocess` and of the operating system's files stand simulated ones.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future as DoneFuture
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import msgspec
import torch
from greenlet import getcurrent

import ckpt.api
from ckpt.backends import registry
from ckpt.backends.base import Store
from ckpt.consistency import environment
from ckpt.consistency.checksums import crc64nvme, crc_text
from ckpt.consistency.commit import COMMIT_KEY
from ckpt.consistency.seal import unseal_json
from ckpt.draining import drain, marker
from ckpt.draining.carry import Share
from ckpt.draining.marker import MARKER
from ckpt.errors import CheckpointError, ConfigurationError
from ckpt.format.names import ObjectName
from ckpt.format.records import (
    CommitRecord,
    ManifestRef,
    ObjectRef,
    RankManifest,
    decode_commit,
    decode_manifest,
)
from ckpt.format.run_record import RUN_KEY, RunCheckpoint, RunRecord
from ckpt.local_first import (
    answers,
    drain_process,
    folder,
    loading,
    near_store,
    neighbours,
    node_tier,
    partners,
    room,
    saving,
    watch,
)
from ckpt.local_first.folder import RunFolder, run_key
from ckpt.local_first.options import LocalTier
from ckpt.options import LoadOptions
from ckpt.testing.choices import Choices, Exhaustive, Seeded
from ckpt.testing.simulated_objects import Version
from ckpt.testing.simulator import World
from ckpt.testing.virtual_time import Process
from ckpt.trainer_integration import events, keeping
from ckpt.trainer_integration.run import (
    held_errors,
    history,
    in_flight,
    near_saves,
    restore,
    shared_record,
    tier,
)
from ckpt.trainer_integration.run.history import History
from ckpt.trainer_integration.run.in_flight import Flight
from ckpt.trainer_integration.run.near_saves import NearSaves
from ckpt.transfer.threads import workers
from ckpt.writing import column_save
from simulation import simulated_jobs
from simulation.simulated_history import Violation
from simulation.simulated_jobs import Group, this_process
from simulation.simulated_nodes import (
    FAR,
    FAR_NAME,
    FATES,
    Clock,
    Event,
    Files,
    Future,
    Messages,
    Nodes,
    NodeStore,
    Ranks,
    Threading,
    disk_of,
    next_ranks,
)

OPTIONS: Mapping[str, Any] = {
    "storage_options": None, "threads": 1, "max_bandwidth_bytes_per_s": None, "timeout_s": None,
}  # fmt: skip
OTHER_RUN = "other-0123456789ab/"
RUN = run_key(FAR)
OUTAGE_S = 600.0


# -- the library in this world -----------------------------------------------------------------------------


@contextlib.contextmanager
def simulated_nodes(world: Nodes, simulation: Simulation) -> Iterator[None]:
    """Put the library into `world`: its clocks, threads, files, stores and ranks."""

    def open_simulated(url: str, options: object, *, threads: int) -> Store:
        process = getcurrent()
        return NodeStore(world, process.node if isinstance(process, Process) else "outside", url)

    files, one_thread = Files(world), lambda count, name: workers(1, name)
    put = mock.patch.object
    before = dict(registry._factories)
    registry._factories.update(simulated=open_simulated, file=open_simulated)
    try:
        with contextlib.ExitStack() as stack:
            for where, name, other in (
                (column_save, "save_columns", lambda *_, **__: None),
                (column_save, "save_state_dict", _save_state_dict),
                (saving, "Ranks", next_ranks),
                (loading, "Ranks", next_ranks),
                (ckpt.api, "Ranks", next_ranks),
                (neighbours, "Messages", Messages),
                (answers, "workers", one_thread),
                (partners, "workers", one_thread),
                (near_store, "Future", Future),
                (shared_record, "threading", Threading()),
                (watch, "threading", Threading()),
                (in_flight, "threading", Threading()),
                (in_flight, "Flight", _flight),
                (tier, "os", files),
                (room, "os", files),
                (room, "shutil", files),
                (folder, "os", files),
                (folder, "make_own", files.makedirs),
                (marker, "os", files),
                (drain_process, "os", files),
                (watch, "_LOOK_S", 30.0),
                (watch, "_FIRST_LOOK_S", 0.0),  # what a restore needs of the cores is nothing here
                (near_saves, "_LOOK_S", 30.0),
                (near_saves, "_ASK_S", 120.0),
                (drain_process, "_POLL_S", 40.0),
                (node_tier, "RunFolder", _Folder),
                *((module, "held", functools.partial(_held, world)) for module in (drain, saving)),
                (node_tier, "DrainProcess", functools.partial(_DrainProcess, simulation)),
                *(
                    (module, "time", Clock)
                    for module in (
                        held_errors,
                        history,
                        shared_record,
                        in_flight,
                        near_saves,
                        tier,
                        watch,
                        restore,
                    )
                ),
                *((module, "time", Clock) for module in (partners, events, drain_process)),
            ):
                stack.enter_context(put(where, name, other))
            for module in (marker, drain_process):
                stack.enter_context(put(module, "open", files.open, create=True))
                stack.enter_context(put(module, "write_whole", files.write_whole))
            stack.enter_context(environment.replaced(world))
            yield
    finally:
        registry._factories.clear()
        registry._factories.update(before)


def _save_state_dict(state_dict: dict[str, torch.Tensor], *, process_group: Any, **more: Any) -> Any:
    rank = process_group.rank
    own = {rank: int(state_dict[f"rank{rank}"].item())}
    return simulated_jobs._save_state_dict(own, process_group=process_group, **more)  # type: ignore[arg-type]


@contextlib.contextmanager
def _held(world: Nodes, folder: str, patience_s: float = 0.0) -> Iterator[bool]:
    """Stands for `folder_lock.held`: the end of a process lets go."""
    process = this_process()

    def is_free() -> bool:
        holder = world.holders.get(folder)
        return holder is None or holder.done or holder.crashed

    if not world.wait_for(is_free, patience_s):
        yield False
        return
    world.holders[folder] = process
    try:
        yield True
    finally:
        if world.holders.get(folder) is process:
            del world.holders[folder]


def _flight(checkpoint: RunCheckpoint, began_s: float) -> Flight:
    events: Any = {"durable": Event(), "booked": Event()}
    return Flight(checkpoint, began_s, **events)


class _Folder(RunFolder):
    """The folder of a run, on a node that one rank has for itself."""

    def hold(self, job: str, *, patience_s: float | None = None) -> None:
        self.is_leader, self.holder = True, f"{job} on {this_process().node}"


@dataclass(eq=False)
class _Carrier:
    """The process of a node that carries."""

    share: Share | None = None
    process: Process | None = None
    finish: Event = field(default_factory=Event)
    stop: Event = field(default_factory=Event)

    @property
    def is_over(self) -> bool:
        return self.process is not None and (self.process.done or self.process.crashed)


class _DrainProcess:
    """Stands for `DrainProcess`, which starts a process and talks to it through a pipe."""

    log = "ckpt-drain.log"

    def __init__(self, simulation: Simulation, path: str, config: Mapping[str, Any]) -> None:
        self._simulation, self._path, self._config = simulation, path, dict(config)
        self._own: _Carrier | None = None

    def carry_only(self, share: Any) -> None:
        self._config["share"] = share

    def look(self) -> str | None:
        if self._own is not None and not self._own.is_over:
            return None
        news = None if self._own is None else "it has ended"
        self._own = self._simulation.start_carrier(this_process().node, self._path, self._config)
        return news

    def wake(self) -> None:
        """It is not ended for want of work."""

    def finish(self) -> None:
        if self._own is not None:
            self._own.finish.set()

    def ended(self) -> bool:
        return self._own is None or self._own.is_over


class _Uploads:
    """Stands for `Uploads`: saves are not copied, but waited for."""

    mode, tables, frozen, options = "off", None, None, OPTIONS

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def begin_at(self, state: dict[str, Any], places: list[Any], tags: Mapping[str, str]) -> DoneFuture[Any]:
        tagged = [replace(place, options={**place.options, "tags": tags}) for place in places]
        return saving.save_to_first(state, lambda _: tagged, process_group=self.ranks, is_async=False)

    def provide(self) -> None:
        """Nothing is copied."""

    def close(self) -> None:
        """Nothing is open."""


# -- what is known of the saves ----------------------------------------------------------------------------


@dataclass(eq=False)
class Save:
    """A save, as who called for it knows it.

    Attributes:
        number: counts the saves of the world.
        restored: the number of the save from which its job had gone on; 0 is none.
        commit: its record once it is committed anywhere.
        told: the states that were reported.
        was_durable: it has been committed in the durable place.
    """

    number: int
    step: int
    content: tuple[int, ...]
    restored: int
    path: str = ""
    commit: bytes | None = None
    told: set[str] = field(default_factory=set)
    was_durable: bool = False

    @property
    def record(self) -> CommitRecord:
        assert self.commit is not None
        return commit_of(self.commit)

    def __repr__(self) -> str:
        return f"save {self.number} of step {self.step} after {self.restored}"


@functools.lru_cache(maxsize=512)
def commit_of(data: bytes) -> CommitRecord:
    return decode_commit(data, url="", key=COMMIT_KEY)


@functools.lru_cache(maxsize=512)
def manifest_of(data: bytes) -> RankManifest:
    return decode_manifest(data, url="", key="")


@functools.lru_cache(maxsize=2048)
def _sum(data: bytes) -> int:
    return crc64nvme(data)


class Guard:
    """Watch every change: no record before what it lists, nothing lost that is durable, nothing of others touched."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self.commits: Counter[str] = Counter()
        self.order: list[Save] = []
        self.hollow: dict[str, Save] = {}
        self._manifests: set[str] = set()
        """The checksums of those that were written after their data; their node may be lost before the commit."""

    def changed(self, world: World, name: str, before: Version | None, after: Version) -> None:
        if name.startswith("far/other/") or f"/{OTHER_RUN}" in name:
            if after.process is not None:
                raise Violation(f"{after.process} changed {name}, which is of another run")
            return
        place, _, key = name.rpartition("/")
        if after.process is None and not world.is_late:  # damage
            return
        is_far = name.startswith(FAR_NAME)
        old = before.data if before is not None else None
        if key == COMMIT_KEY:
            self._commit_changed(place, old, after, is_far)
        elif not is_far and after.data is not None and key.endswith(".json") and "/rank-" in name:
            self._manifest(place.rpartition("/")[0], after)
            self._manifests.add(crc_text(_sum(after.data)))
        if is_far and key != COMMIT_KEY:
            self._far_changed(name, after)

    def _commit_changed(self, place: str, old: bytes | None, after: Version, is_far: bool) -> None:
        simulation = self._simulation
        if after.data is not None and after.data != old:
            save = simulation.save_of(after.data, place)
            if is_far:
                self._durable(save, place, after)
            else:
                self.commits["near"] += 1
                for number in range(len(save.content)):
                    if save.record.manifests[number].crc64nvme not in self._manifests:
                        raise Violation(
                            f"{after.process} committed {save}, of which rank {number} wrote nothing"
                        )
        if old is not None and old != after.data and (gone := simulation.by_commit(old)) is not None:
            self._gone(gone, after, is_far)

    def _durable(self, save: Save, place: str, after: Version) -> None:
        simulation = self._simulation
        is_late = simulation.world.is_late
        if is_late and save.was_durable and place not in self.hollow and not simulation.is_whole(place, save):
            self.hollow[place] = save  # it was removed before its put was carried out
            self.commits["came back alone"] += 1
            return
        if not simulation.is_whole(place, save):
            raise Violation(f"{after.process} made {save} durable, of which objects are missing or others")
        self.commits["durable"] += 1
        save.was_durable = True
        if after.process is not None and after.process.name.startswith(
            "carrier"
        ):  # a full disk sends a save there
            for earlier in simulation.saves:
                if earlier.step < save.step and simulation.should_be_first(earlier, save, after.process):
                    raise Violation(f"{after.process} made {save} durable before {earlier}")
        self.order.append(save)

    def _gone(self, save: Save, after: Version, is_far: bool) -> None:
        simulation = self._simulation
        if is_far:
            if self.hollow.pop(f"{FAR_NAME}{save.path}", None) is save:
                return
            if after.data is not None:
                by = simulation.by_commit(after.data)
                if by is None or by.number < save.number:
                    raise Violation(f"{after.process} replaced {save} in the durable place by {by}")
            elif not simulation.may_be_removed(save):
                raise Violation(f"{after.process} removed {save}, the last that is durable")
        elif after.data is None and not (save.was_durable or simulation.may_be_dropped(save, after)):
            raise Violation(f"{after.process} removed {save} from its node, which is not durable")

    def _manifest(self, place: str, after: Version) -> None:
        assert after.data is not None
        world = self._simulation.world
        for file in manifest_of(after.data).files:
            data = world.truth(f"{place}/{file.path}")
            if data is None or len(data) != file.size_bytes:
                raise Violation(f"{after.process} put a manifest at {place} before its data")

    def _far_changed(self, name: str, after: Version) -> None:
        """What is committed there stays as it is."""
        simulation = self._simulation
        place = "/".join(name.split("/")[:3])
        commit = simulation.world.truth(f"{place}/{COMMIT_KEY}")
        if commit is None or (save := simulation.by_commit(commit)) is None:
            return
        if name.endswith(".metadata"):
            return
        key = name.removeprefix(place + "/")
        parsed = ObjectName.parse(key)
        names = {ref.path for ref in save.record.manifests} | {save.record.described_by.path}
        stems = {ref.path.removesuffix(".json") for ref in save.record.manifests}
        is_listed = key in names or (parsed is not None and parsed.is_data and parsed.stem in stems)
        if is_listed and not simulation.is_whole(place, save):
            raise Violation(f"{after.process} changed {name} of {save}, which is durable")


# -- the world -----------------------------------------------------------------------------------------------


@dataclass
class Plan:
    """What a job does: restore, then save at these steps.

    Attributes:
        step: to restore; None is the newest.
        pauses_s: before each save.
        waits_s: at the end for what is not durable; None ends at once.
        nodes: of the ranks, in order.
    """

    nodes: Sequence[str]
    pauses_s: Sequence[float]
    step: int | None = None
    waits_s: float | None = 3600.0


class Simulation:
    """One run, its nodes, and the judgement on it.

    Attributes:
        keep: so many durable checkpoints stay.
        outcomes: how often what happened.
    """

    def __init__(
        self,
        choices: Choices,
        fates: Mapping[str, float],
        *,
        keep: int = 2,
        keep_local: int = 1,
        copies: int = 0,
    ) -> None:
        self.guard = Guard(self)
        self.world = Nodes(choices, fates, self.guard)
        self.world.when_killed, self.world.when_lost = self._killed, self.lose
        self.keep, self.keep_local, self.copies = keep, keep_local, copies
        self.saves: list[Save] = []
        self.outcomes: Counter[str] = Counter()
        self.is_disturbed = True
        self._by_id: dict[str, Save] = {}
        self._carriers: dict[str, list[_Carrier]] = {}
        self._jobs = 0
        self._given_up: set[int] = set()
        self.first_number = 0
        self._damaged: set[int] = set()

    def lose(self) -> None:
        """Note that something happened to a disk: what is there now need not become durable in order."""
        self._damaged |= {save.number for save in self.saves}

    def counted(self) -> Counter[str]:
        """Sum up what has happened."""
        total = self.outcomes.copy()
        total["schedules"] += 1
        for name, count in self.guard.commits.items():
            total[f"commits: {name}"] += count
        for name, count in self.world.counts.items():
            total[f"fate: {name}"] += count
        return total

    # -- what is where --------------------------------------------------------------------------------------

    def save_of(self, commit: bytes, place: str) -> Save:
        record = commit_of(commit)
        save = self._by_id.get(record.id)
        if save is None:
            number = int(float(record.tags["metric.number"])) - self.first_number
            if not 0 < number <= len(self.saves):
                raise Violation(f"{place}: a checkpoint of another job was committed")
            save = self._by_id[record.id] = self.saves[number - 1]
            save.commit, save.path = commit, place.rpartition("/")[2]
        return save

    def by_commit(self, commit: bytes) -> Save | None:
        try:
            return self._by_id.get(commit_of(commit).id)
        except CheckpointError:  # damaged
            return None

    def all_nodes(self) -> list[str]:
        return ["n0", "n1", "n2"]

    def _object(self, place: str, ref: ObjectRef) -> bytes | None:
        data = self.world.truth(f"{place}/{ref.path}")
        if data is None or len(data) != ref.size_bytes or crc_text(_sum(data)) != ref.crc64nvme:
            return None
        return data

    def _has(self, place: str, ref: ManifestRef) -> bool:
        """Tell whether a manifest and its data are at a place, undamaged."""
        manifest = self._object(place, ref)
        if manifest is None:
            return False
        for file in manifest_of(manifest).files:
            data = self.world.truth(f"{place}/{file.path}")
            if data is None or [_sum(data)] != list(file.block_crcs()):
                return False
        return True

    def _has_names(self, place: str, ref: ManifestRef) -> bool:
        return self.world.truth(f"{place}/{ref.path}") is not None

    def is_whole(self, place: str, save: Save) -> bool:
        record = save.record
        return self._object(place, record.described_by) is not None and all(
            self._has(place, ref) for ref in record.manifests
        )

    def is_durable(self, save: Save) -> bool:
        if save.commit is None:
            return False
        place = f"{FAR_NAME}{save.path}"
        return self.world.truth(f"{place}/{COMMIT_KEY}") == save.commit and self.is_whole(place, save)

    def is_near(
        self, save: Save, nodes: Sequence[str], *, completed: bool = False, mended: bool = False
    ) -> bool:
        """Tell whether these nodes have all of a save, with the durable place if `completed`.

        No file is damaged; if it may be `mended`, each file is undamaged on one of them.
        """
        if save.commit is None:
            return False
        record, far = save.record, f"{FAR_NAME}{save.path}"
        places = [f"{node}/{RUN}/{save.path}" for node in nodes]
        having = [place for place in places if self.world.truth(f"{place}/{COMMIT_KEY}") == save.commit]
        if not any(self._object(place, record.described_by) is not None for place in having):
            return False
        for ref in record.manifests:
            if mended:
                named = [place for place in having if self._has(place, ref)]
            else:
                named = [place for place in having if self._has_names(place, ref)]
                if any(self._has_names(place, ref) and not self._has(place, ref) for place in places):
                    return False
            if not named and not (completed and self._has(far, ref)):
                return False
        return True

    def given_up(self, save: Save) -> bool:
        """Tell whether the run's record says so, in the durable place or on a node."""
        if save.number in self._given_up:
            return True
        for prefix in (FAR_NAME, *(f"{node}/{RUN}/" for node in self.all_nodes())):
            record = self.run_record(prefix)
            if any(old.superseded and old.path == save.path for old in record.checkpoints):
                self._given_up.add(save.number)
                return True
        return False

    def run_record(self, prefix: str) -> RunRecord:
        data = self.world.truth(prefix + RUN_KEY)
        if data is None:
            return RunRecord()
        try:
            return _run_record(data)
        except CheckpointError:
            return RunRecord()

    # -- what may happen -------------------------------------------------------------------------------------

    def _newer(self, save: Save) -> list[Save]:
        """List what may take the place of a save: of later steps, or made later."""
        return [
            other
            for other in self.saves
            if other is not save and other.commit is not None and other.step > save.step
        ]

    def may_be_removed(self, save: Save) -> bool:
        """Tell whether so many newer ones are durable that a save may go from there; or it was given up."""
        newer = [other for other in self._newer(save) if self.is_durable(other)]
        return len(newer) >= self.keep or self.given_up(save)

    def may_be_dropped(self, save: Save, after: Version) -> bool:
        """Tell whether a node may remove a save that was never durable."""
        later = [other for other in self.saves if other.commit is not None and other.number > save.number]
        if any(other.path == save.path for other in later):
            return True
        return self.given_up(save) and bool(later)

    def should_be_first(self, save: Save, than: Save, by: Process) -> bool:
        """Tell whether a save should have become durable before another one, which the carrier `by` has committed.

        It does not wait for what other nodes are to carry.
        """
        if save.commit is None or save.was_durable or save.number in self._damaged or self.given_up(save):
            return False
        if not (self._leads_to(than, save) and self.is_near(save, self.all_nodes())):
            return False
        carrier = next(each for each in self._carriers[by.node] if each.process is by)
        near, far = f"{by.node}/{RUN}/{save.path}", f"{FAR_NAME}{save.path}"
        own = (
            ref
            for ref in save.record.manifests
            if carrier.share is None or carrier.share.has(save.record, ref)
        )
        return any(self._has_names(near, ref) and not self._has(far, ref) for ref in own)

    def _leads_to(self, save: Save, ancestor: Save) -> bool:
        """Tell whether a save was made by a job that went on from another, or made that itself."""
        seen: Save | None = save
        while seen is not None:
            if seen is ancestor:
                return True
            seen = self.saves[seen.restored - 1] if seen.restored else None
        return False

    def available(self, nodes: Sequence[str]) -> tuple[set[int], set[int]]:
        """List the saves that a restore on these nodes can find: all, and those that need no durable place."""
        found, near = set[int](), set[int]()
        for save in self.saves:
            was_removed = save.was_durable and not self.is_durable(save)  # it does not come back
            if save.commit is None or was_removed or self.given_up(save):
                continue
            if self.is_near(save, nodes, mended=True):
                near.add(save.number)
            elif self.is_durable(save) or self.is_near(save, nodes, completed=True):
                found.add(save.number)
        return found | near, near

    # -- processes -------------------------------------------------------------------------------------------

    def start_carrier(self, node: str, path: str, config: Mapping[str, Any]) -> _Carrier:
        """Start the process that carries from a node; one that runs there gives way."""
        carriers = self._carriers.setdefault(node, [])
        before, carrier = [*carriers], _Carrier(config.get("share"))

        def run() -> None:
            for earlier in before:
                earlier.stop.set()
            self.world.wait_for(lambda: all(earlier.is_over for earlier in before), 1e9)
            self.outcomes["carriers"] += 1
            status = drain_process._File(f"{path}/{drain_process.STATUS}")
            drain_process._carry(path, config, carrier.finish, carrier.stop, status)  # type: ignore[arg-type]

        carrier.process = self.world.start(f"carrier{len(self.world.processes)}", node, run)
        carriers.append(carrier)
        return carrier

    def _killed(self, process: Process) -> None:
        """A trainer that dies closes the pipe to its carrier."""
        for carrier in self._carriers.get(process.node, ()):
            if carrier.process is not process:
                carrier.finish.set()

    def run_job(self, plan: Plan) -> None:
        """Run a job to its end, or until it loses a rank; in a process of its own."""
        self._jobs += 1
        group = Group(self.world, len(plan.nodes))
        rows = [_Row() for _ in plan.pauses_s]
        for rank, node in enumerate(plan.nodes):
            program = functools.partial(self._train, plan, group, rank, rows)
            group.members.append(self.world.start(f"job{self._jobs} rank {rank}", node, program))

        def is_over() -> bool:
            return group.is_done() or any(
                member.crashed or member.error is not None for member in group.members
            )

        self.world.wait_for(is_over, 1e6)
        for member in group.members:
            self.world.kill(member)  # or its threads
            self._killed(member)
        self.world.wait_for(group.is_done, 1e6)
        for member in group.members:
            if member.error is not None and not isinstance(
                member.error, CheckpointError | simulated_jobs.LostContact
            ):
                raise member.error

    def _train(self, plan: Plan, group: Group, rank: int, rows: list[_Row]) -> None:
        world, node = self.world, plan.nodes[rank]
        ranks = Ranks(group, rank)
        state = {f"rank{other}": torch.zeros(1) for other in range(group.size)}
        with contextlib.ExitStack() as stack:
            saves = self._manager(ranks, node, f"job{self._jobs}")
            stack.callback(saves.history.close)
            saves.start()
            found = self._restore(plan, saves, ranks, state)
            origin = 0 if found is None else found.number
            self.check_durable(saves.durable_step, origin)
            step = 0 if found is None else found.step
            for row, pause_s in zip(rows, plan.pauses_s, strict=True):
                step += 1
                environment.sleep(pause_s)
                if row.save is None:
                    row.save = self._new_save(step, group.size, origin)
                self._save(saves, row.save, rank)
                origin = row.save.number if row.save.commit is not None else origin
                self.check_durable(saves.durable_step, origin)
                ranks.join(0, max)
            if plan.waits_s is not None:
                self._end(saves, plan.waits_s, rank)
                self.check_durable(saves.durable_step, origin)
        if world.objection is not None:
            raise world.objection

    def check_durable(self, step: int | None, last: int) -> None:
        """Check that the save of a step which led to the save `last`, and was called durable, is or was."""
        while step is not None and last:
            save = self.saves[last - 1]
            if save.step == step and save.commit is not None:
                if not save.was_durable:
                    raise Violation(f"{save} was told durable, and never was")
                return
            last = save.restored
        if step is not None:
            raise Violation(f"step {step} was told durable, and never saved")

    def _new_save(self, step: int, size: int, origin: int) -> Save:
        number = len(self.saves) + 1
        values = tuple(100 * (self.first_number + number) + rank for rank in range(size))
        save = Save(number, step, values, origin)
        self.saves.append(save)
        return save

    def _manager(self, ranks: Ranks, node: str, job: str) -> NearSaves:
        options = LocalTier(disk_of(node), keep=self.keep_local, copies=self.copies)
        uploads: Any = _Uploads(ranks)
        far = History(FAR, None)
        config = {key: OPTIONS[key] for key in ("storage_options", "threads", "max_bandwidth_bytes_per_s")}
        near = tier.Tier(options, FAR, job, ranks.rank, is_local=True, config=config)
        told: Any = _Told(self)
        return NearSaves(ranks, uploads, far, keeping.last(self.keep), told, near)

    def _save(self, saves: NearSaves, save: Save, rank: int) -> None:
        state = {f"rank{rank}": torch.tensor([float(save.content[rank])])}
        saves.begin(save.step, state, "due", {"number": float(self.first_number + save.number)})
        if saves.settle() is not None:
            self.outcomes["save failed"] += rank == 0
            return
        self.outcomes["saved"] += rank == 0

    def _end(self, saves: NearSaves, waits_s: float, rank: int) -> None:
        failure = saves.wait_durable(waits_s)
        if failure is None and rank == 0:
            self.outcomes["waited until durable"] += 1
        saves._tier.drain_timeout_s = 0.0
        saves.close()

    # -- restore ------------------------------------------------------------------------------------------

    def _restore(self, plan: Plan, saves: NearSaves, ranks: Ranks, state: dict[str, Any]) -> Save | None:
        before = ranks.from_first(lambda: self.available(plan.nodes))
        faults, silent = sum(self.world.counts.values()), self.world.is_silent
        step = "latest-valid" if plan.step is None else plan.step
        options: dict[str, Any] = {
            "storage_options": None, "threads": 1, "timeout_s": None, "process_group": ranks, "read_once": False,
        }  # fmt: skip
        error: CheckpointError | None = None
        restored = None
        try:
            restored = restore.restore(
                state, step, None, ranks, saves, options=LoadOptions(), load_options=options
            )
        except CheckpointError as raised:
            error = raised
        values = tuple(int(value.item()) for value in state.values())
        save = None
        if restored is not None:
            save = next((each for each in self.saves if each.content == values), None)
            if save is None or save.step != restored.step:
                raise Violation(f"restored {values} as step {restored.step}, which is no save's state")
        numbers = ranks.gather(0 if save is None else save.number)
        if len({*numbers}) > 1:
            raise Violation(f"ranks restored different saves: {numbers}")
        if ranks.rank == 0:
            is_calm = faults == sum(self.world.counts.values()) and not (silent or self.world.is_silent)
            self._judge_restore(plan, save, before, error, is_calm)
        if error is not None:
            raise error
        return save

    def _judge_restore(
        self, plan: Plan, save: Save | None, before: tuple[set[int], set[int]], error: object, is_calm: bool
    ) -> None:
        after = self.available(plan.nodes)
        possible = (before[0] & after[0]) if is_calm else (before[1] & after[1])
        wanted = [self.saves[number - 1] for number in possible]
        wanted = [each for each in wanted if plan.step is None or each.step == plan.step]
        self.outcomes["restored nothing" if save is None else "restored"] += 1
        if plan.step is None and save in self.guard.hollow.values():
            raise Violation(f"restored {save}, of which the durable place has a record that came back alone")
        if error is not None:
            if wanted and is_calm:
                raise Violation(f"nothing was restored ({error}), though {wanted} are there")
            return
        newest = max((self._order(each) for each in wanted), default=None)
        if newest is None:
            return
        if save is None or self._order(save) < newest:
            raise Violation(f"restored {save}, though {wanted} are there")

    def _order(self, save: Save) -> tuple[int, int]:
        """Of one step, clocks that are wrong decide."""
        return save.step, 0 if self.world.skew_s else save.number

    # -- the end -----------------------------------------------------------------------------------------

    def run(self, program: Callable[[], None]) -> None:
        """Run a program of jobs and damages to its end, then see that all that is there becomes durable."""
        world = self.world
        with simulated_nodes(world, self):
            try:
                agent = world.start("agent", "", program)
                world.run(until=lambda: agent.done)
                if agent.error is not None:
                    raise agent.error
                world.run()
                self._check_processes()
            finally:
                world.end()

    def _check_processes(self) -> None:
        for process in self.world.processes:
            if process.error is not None and not isinstance(
                process.error, CheckpointError | simulated_jobs.LostContact
            ):
                raise process.error

    def calm(self) -> None:
        """Nothing goes wrong any more."""
        self.world.fate({})
        self.world.silences.clear()
        self.world.room_bytes.clear()

    def last_job(self, nodes: Sequence[str]) -> None:
        """Run a job in which nothing goes wrong; all that is there becomes durable; then all nodes are lost."""
        self.calm()
        self.world.sleep(200.0)
        made = len(self.saves)
        self.run_job(Plan(nodes, [1.0]))
        if len(self.saves) == made:  # all that was saved is lost or damaged: a person has to decide
            self.outcomes["nothing can be restored"] += 1
            return
        newest = self.saves[-1]
        if hollow := self.guard.hollow:  # the retention after that save has looked for them
            raise Violation(f"{hollow} have come back without their objects, and stay")
        if not self.is_durable(newest):
            raise Violation(f"{newest} did not become durable, though nothing went wrong any more")
        for save in self.saves:
            if save.commit is None or save.was_durable or self.given_up(save) or "failed" in save.told:
                continue
            if save.step < newest.step and self._leads_to(newest, save) and self.is_near(save, nodes):
                raise Violation(f"{save} is whole on the nodes, and did not become durable")
        self.world.sleep(100.0)
        for node in self.all_nodes():
            self.world.wipe(f"{node}/{RUN}/")
        self.run_job(Plan(nodes, []))


@dataclass
class _Row:
    """The save that the ranks of a job make together."""

    save: Save | None = None


@functools.lru_cache(maxsize=256)
def _run_record(data: bytes) -> RunRecord:
    return msgspec.json.decode(unseal_json(data, url="", key=RUN_KEY), type=RunRecord)


class _Told:
    """Stands for `Events`: what is told as durable is, or was removed since."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    def tell(self, event: Any) -> None:
        simulation = self._simulation
        simulation.outcomes[f"told: {event.kind}"] += 1
        if event.kind == "durable":
            simulation.check_durable(event.step, len(simulation.saves))
        elif event.kind == "not_durable":
            for save in simulation.saves:
                if save.step == event.step:
                    save.told.add("failed")

    def flush(self) -> None:
        """Nothing is kept back."""


# -- what happens to nodes -----------------------------------------------------------------------------------


@functools.cache
def _of_another_job() -> Mapping[str, bytes]:
    """Make what the first node of another job has on its disk, by names below the run's folder."""
    other = Simulation(Seeded(0), {}, copies=1)
    other.first_number = 1 << 14
    tokens = itertools.count(1 << 40)  # nobody draws what another has drawn
    other.world.token = lambda: f"{next(tokens):016x}"  # type: ignore[method-assign]
    other.keep_local = other.keep = 9
    other.run(lambda: other.run_job(Plan(["n0", "n1"], [1.0] * 4)))
    prefix = f"n0/{RUN}/"
    files = {name.removeprefix(prefix): other.world.truth(name) for name in other.world.names(prefix)}
    return {name: data for name, data in files.items() if data is not None and name.startswith("step-")}


class Operator:
    """What happens between the jobs of a run, and to what is on the disks of its nodes."""

    def __init__(self, simulation: Simulation, chance: random.Random) -> None:
        self._simulation, self._chance = simulation, chance
        self._world = simulation.world
        self._snapshots: list[tuple[str, dict[str, bytes]]] = []

    def snapshot(self, node: str) -> None:
        """Remember what a node's disk has."""
        prefix = f"{node}/{RUN}/"
        files = {name: self._world.truth(name) for name in self._world.names(prefix)}
        self._snapshots.append((node, {name: data for name, data in files.items() if data is not None}))

    def act(self, deed: str, node: str) -> None:
        """Do one of `DEEDS` to a node."""
        self._simulation.outcomes[f"operator: {deed}"] += 1
        if deed not in ("clock", "marker"):
            self._simulation.lose()
        getattr(self, f"_{deed}")(node)

    def _kill_carriers(self, node: str) -> None:
        for carrier in self._simulation._carriers.get(node, ()):
            if carrier.process is not None and not carrier.process.done:
                self._world.kill(carrier.process)

    def _replace(self, node: str) -> None:
        """Another node takes the place of this one."""
        self._kill_carriers(node)
        self._world.wipe(node + "/")

    def _stale(self, node: str) -> None:
        """The node comes back with what it had before."""
        mine = [files for owner, files in self._snapshots if owner == node]
        if mine:
            self._kill_carriers(node)
            self._world.wipe(f"{node}/{RUN}/")
            for name, data in self._chance.choice(mine).items():
                self._world.change("outside", name, data)

    def _some_file(self, node: str) -> tuple[str, bytes] | None:
        names = [name for name in self._world.names(f"{node}/{RUN}/") if not name.endswith(MARKER)]
        if not names:
            return None
        name = self._chance.choice(names)
        data = self._world.truth(name)
        return None if not data else (name, data)

    def _flip(self, node: str) -> None:
        if (chosen := self._some_file(node)) is not None:
            name, data = chosen
            at = self._chance.randrange(len(data))
            self._world.change("outside", name, data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])

    def _cut(self, node: str) -> None:
        if (chosen := self._some_file(node)) is not None:
            name, data = chosen
            self._world.change("outside", name, data[: self._chance.randrange(len(data))])

    def _remove(self, node: str) -> None:
        if (chosen := self._some_file(node)) is not None:
            self._world.change("outside", chosen[0], None)

    def _other_job(self, node: str) -> None:
        """A checkpoint of another job lies in the folder of a step."""
        files = _of_another_job()
        step = self._chance.choice(sorted({name.partition("/")[0] for name in files}))
        for name, data in files.items():
            if name.startswith(step + "/"):
                self._world.change("outside", f"{node}/{RUN}/{name}", data)

    def _clock(self, node: str) -> None:
        self._world.skew_s[node] = self._chance.choice((-7200.0, -60.0, -3.0, 3.0, 60.0, 7200.0))

    def _marker(self, node: str) -> None:
        """The folder is another run's: a job on it is refused, until it is moved away."""
        name = f"{node}/{RUN}/{MARKER}"
        before = self._world.truth(name)
        self._world.change(
            "outside", name, b'{"format": "ckpt-storage-local", "version": 1, "durable": "s3://other/run"}'
        )
        names = self._world.names(f"{node}/{RUN}/")
        self._kill_carriers(node)
        refused = self._world.start("refused", node, lambda: RunFolder(disk_of(node), FAR))
        self._world.wait_for(lambda: refused.done, 1e6)
        if not isinstance(refused.error, ConfigurationError):
            raise Violation(f"a folder of another run was taken: {refused.error}")
        refused.error = None
        if names != self._world.names(f"{node}/{RUN}/"):
            raise Violation("a folder of another run was changed")
        self._world.change("outside", name, before)


DEEDS = {
    "replace": 4.0,
    "stale": 3.0,
    "flip": 2.0,
    "cut": 2.0,
    "remove": 2.0,
    "other_job": 2.0,
    "clock": 3.0,
    "marker": 0.5,
}


class _Chance(Seeded):
    def pick(self, question: str, weights: Sequence[float]) -> int:
        """Pick faster who goes on."""
        if question == "run":
            return int(self.random.random() * len(weights))
        return super().pick(question, weights)


def draw(seed: int) -> tuple[Simulation, Callable[[], None]]:
    """Draw a run from a seed: its nodes, its jobs, and what goes wrong."""
    choices = _Chance(seed)
    chance = choices.random
    kinds = chance.sample(FATES[1:], chance.randint(0, 4))
    fates = {fate: chance.choice((0.002, 0.008, 0.03)) for fate in kinds}
    keep, keep_local = chance.choice((1, 1, 2, 3)), chance.choice((1, 1, 2))
    simulation = Simulation(
        choices, fates, keep=keep, keep_local=keep_local, copies=int(chance.random() < 0.4)
    )
    world, operator = simulation.world, Operator(simulation, chance)
    nodes = ["n0", "n1", "n2"][: chance.choices((2, 3), (5, 1))[0]]
    if chance.random() < 0.25:
        begin_s = chance.uniform(0.0, 200.0)
        world.silences.append((begin_s, begin_s + OUTAGE_S))
    if chance.random() < 0.3:
        world.room_bytes[chance.choice(nodes)] = chance.choice((4_000, 6_000, 8_000, 11_000, 16_000))
    world.change("outside", f"n0/{OTHER_RUN}step-00000001/commit.json", b"of another run")
    world.change("outside", "far/other/step-00000001/commit.json", b"of another run")
    if chance.random() < 0.15:
        for _ in range(2):
            node = chance.choice(nodes)
            world.call_later(chance.uniform(0.0, 200.0), functools.partial(operator.act, "clock", node))

    def program() -> None:
        order = list(nodes)
        for _ in range(chance.choice((1, 1, 2, 2, 3))):
            simulation.run_job(_plan(chance, order, simulation))
            operator.snapshot(chance.choice(nodes))
            if chance.random() < 0.3:
                world.sleep(chance.choice((1.0, 100.0, 1000.0)))
            for _ in range(chance.choice((0, 0, 1, 1, 2))):
                deed = chance.choices([*DEEDS], [*DEEDS.values()])[0]
                operator.act(deed, chance.choice(nodes))
            if chance.random() < 0.2:
                chance.shuffle(order)
        simulation.last_job(order)

    return simulation, program


def _plan(chance: random.Random, nodes: Sequence[str], simulation: Simulation) -> Plan:
    pauses_s = [chance.choice((0.0, 1.0, 20.0, 100.0)) for _ in range(chance.choice((0, 1, 1, 2, 2, 3)))]
    waits_s = chance.choice((None, None, 0.0, 60.0, 3600.0))
    step = None
    if chance.random() < 0.15 and simulation.saves:
        step = chance.choice(simulation.saves).step
    return Plan([*nodes], pauses_s, step, waits_s)


def run(seed: int) -> Counter[str]:
    """Run and judge the schedule of a seed. Raises Violation, naming it."""
    simulation, program = draw(seed)
    try:
        simulation.run(program)
    except Violation as error:
        raise Violation(f"seed {seed}: {error}") from error
    return simulation.counted()


def scenario(choices: Choices, fates: Mapping[str, float], *, copies: int) -> Simulation:
    """Save once, with a carrier on each of two nodes, and restore: what goes wrong, `choices` decide."""
    simulation = Simulation(choices, fates, copies=copies, keep=1)

    def program() -> None:
        simulation.run_job(Plan(["n0", "n1"], [1.0], waits_s=60.0))
        simulation.run_job(Plan(["n0", "n1"], [], waits_s=60.0))
        simulation.last_job(["n0", "n1"])

    simulation.run(program)
    return simulation


class _Bounded(Choices):
    """Decide in every way with so many fates and so many times another process than the last one going on."""

    def __init__(self, inner: Exhaustive, fates: int, orders: int) -> None:
        self._inner, self._fates, self._orders = inner, fates, orders

    def pick(self, question: str, weights: Sequence[float]) -> int:
        is_order = question == "run"
        if not (self._orders if is_order else self._fates):
            return 0
        picked = self._inner.pick(question, weights)
        if picked and is_order:
            self._orders -= 1
        elif picked:
            self._fates -= 1
        return picked

    def fraction(self, question: str) -> float:
        return 0.0


def all_schedules(fate: str, *, fates: int = 1, orders: int = 0, copies: int = 0) -> Counter[str]:
    """Run every schedule of one save with so many requests that have a fate, and so many changes of the order."""
    total: Counter[str] = Counter()
    for number, choices in enumerate(Exhaustive.all(fates + orders)):
        try:
            simulation = scenario(
                _Bounded(choices, fates, orders), {fate: 1.0} if fate else {}, copies=copies
            )
        except Violation as error:
            raise Violation(f"{fate}, copies={copies}, decisions {choices.path}: {error}") from error
        total += simulation.counted()
        if number % 50 == 0:
            gc.collect()
    return total
