"""A world of nodes with a disk each and one durable place: who is killed, what is lost, and when, is a choice.

Disks and place show every write at once; what a storage that lags does is tried elsewhere. A node's
disk is found under a path, so that all of the library's code for folders of a node runs on it.
"""

from __future__ import annotations

import bisect
import functools
import io
import os
import posixpath
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from greenlet import getcurrent
from typing_extensions import Self

from ckpt.backends.base import ObjectStat, PutMode
from ckpt.backends.bodies import Body
from ckpt.consistency import environment
from ckpt.errors import CheckpointError, NotFound, StorageFull, StorageUnavailable
from ckpt.ranks import group as product_group
from ckpt.testing.choices import Choices, Seeded
from ckpt.testing.simulated_objects import Model, Version
from ckpt.testing.simulated_store import SimulatedStore
from ckpt.testing.simulator import Escaped, Watcher, World
from ckpt.testing.virtual_time import Crashed, Process, Stuck
from simulation import simulated_jobs
from simulation.simulated_jobs import Group, this_process

FAR = "simulated://far/run"
FAR_NAME = "far/run/"
LONG_S = 1e9
LONGEST_S, MOST_STEPS = 100_000.0, 200_000

FATES = (
    "none",
    "killed before",
    "killed after",
    "node killed before",
    "node killed after",
    "all killed before",
    "all killed after",
    "node lost",
    "lost request",
    "lost reply",
    "late",
)
"""What can become of a request; the last three only on the way to the durable place."""

_NEAR, _READS = (
    FATES[:8],
    ("none", "killed before", "node killed before", "all killed before", "lost request"),
)
_NO_ANSWER_S = 20.0

T = TypeVar("T")


def disk_of(node: str) -> str:
    """Return the path of a node's disk."""
    return f"/{node}"


class Nodes(World):
    """The nodes, their disks, the durable place, and all who live there.

    Attributes:
        alive: what is stored now, by name, in order of names.
        silences: when the durable place gives no answer, as pairs of begin and end.
        skew_s: by how much the clock of a node is wrong.
        room_bytes: of a disk, by node; default enough.
        holders: who holds a folder of a disk, by its path.
        when_killed: called with each process that is killed.
        when_lost: called when a node is lost with its disk.
    """

    def __init__(self, choices: Choices, fates: Mapping[str, float], watcher: Watcher | None = None) -> None:
        super().__init__(choices, Model(late_s=100.0), watcher)
        self._alive_names: list[str] = []
        self.silences: list[tuple[float, float]] = []
        self.skew_s: dict[str, float] = {}
        self.room_bytes: dict[str, int] = {}
        self.holders: dict[str, Process] = {}
        self.used_bytes: defaultdict[str, int] = defaultdict(int)
        self._steps = 0
        self.when_lost: Callable[[], None] = lambda: None
        self.when_killed: Callable[[Process], None] = lambda process: None
        self.fate(fates)

    def fate(self, fates: Mapping[str, float]) -> None:
        """Let these fates come up from now on, as weights beside 1 for none."""
        all_fates = {**dict.fromkeys(FATES, 0.0), **fates, "none": 1.0}
        self._fates = [
            [
                weight if (is_far or fate in _NEAR) and (writes or fate in _READS) else 0.0
                for fate, weight in all_fates.items()
            ]
            for is_far in (False, True)
            for writes in (False, True)
        ]
        self._is_calm = not any(fates.values())
        self._no_fate = [1.0 / sum(weights) for weights in self._fates]

    def _fate(self, text: str, kind: int) -> str:
        choices = self.choices
        if isinstance(choices, Seeded) and choices.random.random() < self._no_fate[kind]:
            return "none"
        weights = self._fates[kind]
        if isinstance(choices, Seeded):
            weights = [0.0, *weights[1:]] if any(weights[1:]) else weights
        return FATES[choices.pick(text, weights)]

    # -- time ----------------------------------------------------------------------------------------------

    def now(self) -> float:
        node = getattr(getcurrent(), "node", "")
        return 1_700_000_000.0 + self.now_s + self.skew_s.get(node, 0.0)

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        super().run(lambda: self._bury() or until())

    def _bury(self) -> bool:
        """End those that were killed. Raises Stuck if this goes on for ever."""
        self._steps += 1
        if self.now_s > LONGEST_S or self._steps > MOST_STEPS:
            raise Stuck(f"after {self.now_s:.0f} s, {self._steps} steps: {', '.join(map(str, self._alive))}")
        for process in [process for process in self._alive if process.crashed]:
            self._resume(process)
        return False

    def wait_for(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        if not isinstance(getcurrent(), Process):  # at the end of a world
            return condition()
        return super().wait_for(condition, timeout_s)

    def start(self, name: str, node: str, program: Callable[[], Any]) -> Process:
        current = getcurrent()
        if isinstance(current, Process) and current.crashed:
            raise Crashed
        return super().start(name, node, program)

    def start_thread(self, work: Callable[[], object], name: str) -> None:
        process = this_process()
        thread = self.start(f"{process.name} {name}", process.node, work)
        thread.owner = owner_of(process)

    @property
    def is_silent(self) -> bool:
        """Tell whether the durable place gives no answer now."""
        return any(begin_s <= self.now_s < end_s for begin_s, end_s in self.silences)

    # -- what is stored ------------------------------------------------------------------------------------

    def change(self, node: str, name: str, data: bytes | None) -> None:
        before = self.truth(name)
        super().change(node, name, data)
        disk = name.partition("/")[0]
        self.used_bytes[disk] += len(data or b"") - len(before or b"")
        if (before is None) != (data is None):
            if data is None:
                del self._alive_names[bisect.bisect_left(self._alive_names, name)]
            else:
                bisect.insort(self._alive_names, name)

    def names(self, prefix: str) -> list[str]:
        """List the names of what is stored now."""
        first = bisect.bisect_left(self._alive_names, prefix)
        last = bisect.bisect_left(self._alive_names, prefix + "\U0010ffff")
        return self._alive_names[first:last]

    def wipe(self, prefix: str) -> None:
        """Have a disk, or a part of it, be empty."""
        for name in self.names(prefix):
            self.change("outside", name, None)

    # -- requests ------------------------------------------------------------------------------------------

    def request(
        self, node: str, text: str, effect: Callable[[], T], *, writes: bool, url: str, key: str
    ) -> T:
        process = getcurrent()
        if not isinstance(process, Process):
            if self.running is not None:
                raise Escaped(f"{self.running}: {text} {key}")
            return effect()
        if process.crashed:
            raise Crashed
        process.pause()
        process.requests += 1
        self.now_s += 0.05
        is_far = "://" in url
        if is_far and self.silences and self.is_silent:
            self._note(f"{process}: {text} {key} SILENCE")
            self.counts["silence"] += 1
            self._wait(process, self.now_s + _NO_ANSWER_S)
            raise StorageUnavailable("no answer", url=url, key=key)
        fate = "none"
        if not self._is_calm:
            fate = self._fate(text, 2 * is_far + writes)
        if self.trace is not None:
            self._note(f"{process}: {text} {url} {key} {'' if fate == 'none' else fate.upper()}")
        if fate == "none":
            return self._carry_out(process, effect)
        self.counts[fate] += 1
        return self._befall(process, fate, effect, url, key)

    def _befall(self, process: Process, fate: str, effect: Callable[[], T], url: str, key: str) -> T:
        process.faults += 1
        if fate == "late":
            self._carry_out_in(self.model.late_s * self.choices.fraction("late"), process, effect)
        elif fate.endswith(("after", "reply", "node lost")):
            try:
                self._carry_out(process, effect)
            except CheckpointError:
                if fate == "lost reply":
                    pass
        if fate.startswith(("lost", "late")):
            raise StorageUnavailable(f"no answer ({fate})", url=url, key=key)
        victims = [owner_of(process)]
        if fate.startswith("node"):
            victims = [each for each in self._alive if each.node == process.node]
        elif fate.startswith("all"):
            victims = [each for each in self._alive if each.node]
        for victim in victims:
            self.kill(victim)
        if fate == "node lost":
            self.wipe(process.node + "/")
            self.when_lost()
        raise Crashed

    def kill(self, victim: Process) -> None:
        """Have a process, and its threads, do nothing more."""
        for process in [*self._alive]:
            if owner_of(process) is victim and not process.crashed:
                process.crashed = True
                process.until = lambda: True
        if not victim.done:
            self.when_killed(victim)


def owner_of(process: Process) -> Process:
    """Return the process of which this one is a thread, or itself."""
    owner = getattr(process, "owner", process)
    assert isinstance(owner, Process)
    return owner


class NodeStore(SimulatedStore):
    """The durable place, or the disk of a node, as a process of that node sees it."""

    _world: Nodes

    def __init__(self, world: Nodes, node: str, url: str) -> None:
        super().__init__(world, node, url)
        if "://" not in url:
            self.url = url.rstrip("/")
            self._prefix = self.url.lstrip("/") + "/"
            self.directory = self.url

    def put(self, key: str, body: Body, *, mode: PutMode = PutMode.OVERWRITE) -> None:
        room_bytes = self._world.room_bytes.get(self._prefix.partition("/")[0])
        name = self._name(key)
        with_part = b"".join(self._parts(body))
        disk = name.partition("/")[0]

        def store() -> None:
            if room_bytes is not None and self._world.used_bytes[disk] + len(with_part) > room_bytes:
                self._world.counts["disk full"] += 1
                raise StorageFull("the disk is full", url=self.url, key=key, settled=True)
            self._store(key, name, with_part, mode)

        self._request("put", key, store, writes=True)

    def root_is_object(self) -> bool:
        return False

    def _listed(self, prefix: str) -> Iterator[ObjectStat]:
        for name in self._world.names(self._prefix + prefix):
            yield self._world.versions[name][-1].stat(name[len(self._prefix) :])

    def stat(self, key: str) -> ObjectStat:
        name = self._name(key)

        def look() -> ObjectStat:
            version = self._version(name)
            if version is None:
                raise NotFound("no such object", url=self.url, key=key)
            return version.stat(key)

        return self._request("stat", key, look)

    def _version(self, name: str) -> Version | None:
        versions = self._world.versions.get(name)
        return None if not versions or versions[-1].data is None else versions[-1]

    def _read(self, key: str, name: str) -> bytes:
        version = self._version(name)
        if version is None or version.data is None:
            raise NotFound("no such object", url=self.url, key=key)
        return version.data


# -- in the place of what the operating system offers ----------------------------------------------------------


class Files:
    """Stands where a module of the library has `open`, `os` and `shutil`: files of the nodes' disks."""

    def __init__(self, world: Nodes) -> None:
        self._world = world
        self.path = _Paths(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def open(self, path: str, mode: str = "r", **_: Any) -> Any:
        data = self._world.truth(path.lstrip("/"))
        if data is None:
            raise FileNotFoundError(path)
        return io.BytesIO(data) if "b" in mode else io.StringIO(data.decode(errors="replace"))

    def write_whole(self, path: str, data: bytes) -> None:
        """Stands for `ckpt.whole_files.write_whole`: a kill can leave the file beside."""
        world, name = self._world, path.lstrip("/")
        beside = f"{os.path.dirname(name)}/.{os.path.basename(name)}.tmp"
        world.change("", beside, data)

        def effect() -> None:
            world.change(name.partition("/")[0], name, data)
            world.change("", beside, None)

        world.request("", "replace", effect, writes=True, url=path, key="")

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Directories are there."""

    def exists(self, path: str) -> bool:
        return self._world.truth(path.lstrip("/")) is not None or self.isdir(path)

    def isdir(self, path: str) -> bool:
        return bool(self._world.names(path.lstrip("/") + "/"))

    def scandir(self, path: str) -> _Entries:
        prefix = path.strip("/") + "/"
        names = [name.removeprefix(prefix) for name in self._world.names(prefix)]
        return _Entries(
            _Entry(name, is_folder)
            for name, is_folder in dict.fromkeys((name.partition("/")[0], "/" in name) for name in names)
        )

    def walk(self, path: str) -> Iterator[tuple[str, list[str], list[str]]]:
        prefix = path.strip("/") + "/"
        yield path, [], [name.removeprefix(prefix) for name in self._world.names(prefix)]

    def lstat(self, path: str) -> _Facts:
        return _Facts(len(self._world.truth(path.lstrip("/")) or b""))

    def disk_usage(self, path: str) -> _Usage:
        disk = path.lstrip("/").partition("/")[0]
        room_bytes = self._world.room_bytes.get(disk, 1 << 40)
        return _Usage(max(0, room_bytes - self._world.used_bytes[disk]))


@dataclass(frozen=True)
class _Usage:
    free: int


@dataclass(frozen=True)
class _Facts:
    st_size: int


@dataclass(frozen=True)
class _Entry:
    name: str
    is_folder: bool

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return self.is_folder


class _Entries(list[_Entry]):
    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class _Paths:
    def __init__(self, files: Files) -> None:
        self.isdir, self.exists = files.isdir, files.exists

    def __getattr__(self, name: str) -> Any:
        return getattr(posixpath, name)


# -- in the place of threads and clocks --------------------------------------------------------------------


class Event:
    """Stands for `threading.Event`."""

    def __init__(self) -> None:
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        return _wait_for(self.is_set, LONG_S if timeout is None else timeout)


class Lock:
    """Stands for `threading.Lock` and `RLock`."""

    def __init__(self) -> None:
        self._owner: Any = None
        self._depth = 0

    def __enter__(self) -> None:
        me = getcurrent()
        if self._owner is not me:
            _wait_for(lambda: self._owner is None or self._owner.dead, LONG_S)
            self._owner, self._depth = me, 0
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._owner = None


class Thread:
    """Stands for `threading.Thread`."""

    def __init__(self, target: Callable[..., object], args: Any = (), name: str = "", **_: Any) -> None:
        self._work: Callable[[], object] = functools.partial(target, *args)
        self._name, self._done = name, Event()

    def start(self) -> None:
        def run() -> None:
            try:
                self._work()
            finally:
                self._done.set()

        environment.start_thread(run, self._name)

    def join(self, timeout: float | None = None) -> None:
        self._done.wait(timeout)


class Threading:
    """Stands for the module `threading`."""

    Event, Lock, RLock, Thread = Event, Lock, Lock, Thread
    get_ident = staticmethod(lambda: id(getcurrent()))
    _register_atexit = staticmethod(lambda work: None)

    def __getattr__(self, name: str) -> Any:
        return getattr(threading, name)


class Clock:
    """Stands for the module `time`: the clocks of the nodes."""

    monotonic = staticmethod(environment.monotonic)
    time = staticmethod(environment.now)
    sleep = staticmethod(environment.sleep)


class Future:
    """Stands for a `concurrent.futures.Future` that another process of this world ends."""

    def __init__(self) -> None:
        self._result: Any = None
        self._error: BaseException | None = None
        self._done = Event()

    def done(self) -> bool:
        return self._done.is_set()

    def set_result(self, result: Any) -> None:
        self._result = result
        self._done.set()

    def set_exception(self, error: BaseException) -> None:
        self._error = error
        self._done.set()

    def result(self) -> Any:
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._result


def _wait_for(condition: Callable[[], bool], timeout_s: float) -> bool:
    current = environment._current
    assert isinstance(current, Nodes)
    return current.wait_for(condition, timeout_s)


# -- in the place of torch's process group -----------------------------------------------------------------


class Ranks(product_group.Ranks):
    """`ckpt.ranks.group.Ranks` over simulated ranks; each save and load takes one with a number of its own."""

    def __init__(self, group: Group, rank: int, call: int = 0) -> None:
        self.no_dist, self.is_own_group, self.purpose, self.call = False, True, "foreground", call
        self.is_meant_alone = False
        self.rank, self._global_rank, self.members = rank, rank, [*range(group.size)]
        self.group = simulated_jobs.Ranks(group, rank)
        self.progress = self.group.progress
        self._timeout_s, self.tree, self._watch, self._connected = 600.0, None, None, True
        self._job = group

    def renewed(self) -> Ranks:
        """Make the ranks of the next save or load."""
        self.call += 1
        return Ranks(self._job, self.rank, self.call)

    def gather(self, value: T) -> list[T]:
        return self.broadcast(self._job.gather(self.rank, value))  # type: ignore[no-any-return]

    def broadcast(self, value: Any) -> Any:
        return self._job.broadcast(self.rank, value)

    def roll_call(self, error: BaseException) -> Any:
        if isinstance(error, Crashed):
            raise error
        return self.group.roll_call(error)

    def close(self) -> None:
        """It has no heartbeat."""


def next_ranks(process_group: Any, **_: Any) -> Ranks:
    """Stand where the library makes `Ranks` of a process group."""
    assert isinstance(process_group, Ranks)
    return process_group.renewed()


class Messages:
    """Stands for `ckpt.ranks.messages.Messages`."""

    def __init__(self, ranks: Ranks) -> None:
        self.rank, self.size, self._job, self._call = ranks.rank, ranks.size, ranks._job, ranks.call
        boxes: Any = vars(ranks._job).setdefault("boxes", defaultdict(list))
        self._boxes: defaultdict[tuple[int, int, int], list[tuple[int, torch.Tensor]]] = boxes

    def send(self, memory: torch.Tensor, rank: int, tag: int) -> None:
        self.begin_send(memory, rank, tag)()

    def begin_send(self, memory: torch.Tensor, rank: int, tag: int) -> Callable[[], None]:
        self._boxes[self._call, rank, tag].append((self.rank, memory.clone()))
        return lambda: None

    def receive(self, memory: torch.Tensor, rank: int, tag: int) -> Callable[[], None]:
        return lambda: self._take(memory, tag, rank)

    def receive_any(self, memory: torch.Tensor, tag: int) -> None:
        self._take(memory, tag, None)

    def _take(self, memory: torch.Tensor, tag: int, sender: int | None) -> None:
        box = self._boxes[self._call, self.rank, tag]

        def first() -> int | None:
            return next((n for n, (rank, _) in enumerate(box) if sender in (None, rank)), None)

        self._job._wait(lambda: first() is not None)
        number = first()
        assert number is not None
        memory.copy_(box.pop(number)[1])
