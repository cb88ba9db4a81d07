"""A storage system that lies, and the clients that use it, in virtual time: one seed, one history.

A `World` holds objects and the processes that work on them. Each process is ordinary code over a
`SimulatedStore`; whenever it sends a request, the world may let any other process go first, and then decides
what becomes of the request. Nothing sleeps: when all processes wait, the clock jumps.

What a world does to its clients is its `Model`:

- **Visibility.** What a node did, it sees at once. Others see it after a lag of their own, drawn for each
  version and node, up to the model's bound for creates, overwrites, deletes, and listings.
- **Negative caching.** A name that was looked up too early stays missing on that node for a while.
- **Stale attributes.** The answer to `stat` may be the one of a while ago, while a read gets newer bytes.
- **Requests** (`FAULTS`) get lost; are carried out, but their reply is lost; are carried out long after their
  client gave up, in another order; are sent twice, the first reply having been lost; are refused.
- **Uploads** in parts, of which a crash or failure leaves some behind.
- **Processes** crash between any two requests, for good, or stall and wake when others have gone on (zombies).
- **Clocks** of nodes differ.

Every decision is made by a `Choices`. A `Watcher` is told of every change the moment it takes effect.

Assumed of any storage, in every model: a name shows the whole of one version or none; a version that a node has
seen does not give way to an older one; a lag ends within its bound; a request that was answered is not
carried out again later (`echo_s` lifts that).

Processes are greenlets (package `greenlet`, in the extra `test`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from greenlet import getcurrent, greenlet

from ckpt.backends.base import (
    Body,
    Capabilities,
    ObjectStat,
    PutMode,
    Store,
    check_key,
    is_key,
    part_size_bytes,
)
from ckpt.consistency.choices import Choices
from ckpt.consistency.environment import Environment
from ckpt.errors import (
    AccessDenied,
    AlreadyExists,
    CheckpointError,
    NotFound,
    StorageError,
    StorageUnavailable,
    Truncated,
)

__all__ = ["FAULTS", "Crashed", "Model", "Process", "SimulatedStore", "Stuck", "Version", "Watcher", "World"]

FAULTS = ("none", "crash", "stall", "lost request", "lost reply", "late", "sent twice", "refused")
"""What can become of a request; the first is that it works."""

_READ_FAULTS = ("crash", "stall", "lost request", "refused")
_PART_SIZE_BYTES = 8 << 20

T = TypeVar("T")


@dataclass(frozen=True)
class Model:
    """What a storage system may do to its clients.

    Attributes:
        create_lag_s, overwrite_lag_s, delete_lag_s, list_lag_s: until other nodes see it, at most.
        negative_cache_s: for how long a node believes that a name it missed is missing, at most.
        attribute_cache_s: for how long `stat` may repeat an old answer.
        clock_skew_s: by how much a node's clock may be wrong, either way.
        conditional_create: "only if absent" is one step; else it is looked for first, in the node's view.
        directories: a name can be used only where its directory is seen.
        multipart: puts may go in parts.
        request_s: how long a request takes, at most.
        stall_s: for how long a stalled process does nothing.
        late_s: how long after its client gave it up a request may be carried out.
        echo_s: how long after its answer a request may be carried out once more; 0 is never.
        faults: weight of each of `FAULTS` (that of "none" is 1).
        echo: probability of an echo.
    """

    create_lag_s: float = 0.0
    overwrite_lag_s: float = 0.0
    delete_lag_s: float = 0.0
    list_lag_s: float = 0.0
    negative_cache_s: float = 0.0
    attribute_cache_s: float = 0.0
    clock_skew_s: float = 0.0
    conditional_create: bool = True
    directories: bool = False
    multipart: bool = False
    request_s: float = 0.05
    stall_s: float = 100.0
    late_s: float = 0.0
    echo_s: float = 0.0
    faults: Mapping[str, float] = field(default_factory=dict)

    @property
    def visibility_s(self) -> float:
        """After how long every node sees what was done, whatever it looked at before."""
        lag_s = max(self.create_lag_s, self.overwrite_lag_s, self.delete_lag_s)
        return lag_s + self.negative_cache_s + self.attribute_cache_s

    def weights(self, faults: Iterable[str]) -> list[float]:
        return [1.0 if fault == "none" else self.faults.get(fault, 0.0) for fault in faults]


@dataclass(eq=False)
class Version:
    """One state of one name.

    Attributes:
        data: None where it was deleted.
        number: counts all changes of the world.
        at_s: when it took effect.
        node, process: who did it; process None: somebody outside.
    """

    data: bytes | None
    number: int
    at_s: float
    node: str
    process: Process | None
    seen_at_s: dict[str, float] = field(default_factory=dict)


class Watcher(Protocol):
    """Sees the truth, which no client does."""

    def changed(self, world: World, name: str, before: Version | None, after: Version) -> None:
        """Called right after a change took effect; what it raises ends the run, whatever the process catches."""


class Crashed(BaseException):
    """The process is gone: nothing it does any more has an effect."""


class Stuck(Exception):
    """All processes wait for each other."""


class Process(greenlet):  # type: ignore[misc]
    """A program that runs on a node of a world.

    Attributes:
        result, error: what it returned, or raised, once it is `done`.
        crashed: it was killed.
        faults: how many of its requests did not simply work.
        requests: how many it has sent.
        read: what it last read, by name.
        looked: at which request it last asked for a name, and whether it was told that there is one.
    """

    def __init__(self, world: World, name: str, node: str, program: Callable[[], Any]) -> None:
        super().__init__(self._go, world.main)
        self.world, self.name, self.node, self._program = world, name, node, program
        self.result: Any = None
        self.error: BaseException | None = None
        self.done = self.crashed = self.stalled = False
        self.faults = 0
        self.wakes_at_s = 0.0
        self.until: Callable[[], bool] | None = None
        self.requests = 0
        self.read: dict[str, Version] = {}
        self.looked: dict[str, tuple[int, bool]] = {}

    def _go(self) -> None:
        try:
            self.result = self._program()
        except Crashed:
            pass
        except Exception as error:
            self.error = error
        self.done = True

    def ready(self, now_s: float) -> bool:
        return self.wakes_at_s <= now_s or (self.until is not None and self.until())

    def __repr__(self) -> str:
        return f"{self.name} on {self.node}"


@dataclass
class _Upload:
    name: str
    parts: dict[int, bytes] = field(default_factory=dict)


class World(Environment):
    """One storage system, its clients, and their time. `environment.replaced(world)` puts code into it.

    Attributes:
        now_s: the time.
        objects: the versions of every name, oldest first.
        uploads: those begun and neither completed nor aborted.
        counts: how often each fault came up.
        trace: what happened, if it is a list.
        objection: the watcher's first.
        is_late: the request that is being carried out was given up by its client.
    """

    def __init__(self, choices: Choices, model: Model | None = None, watcher: Watcher | None = None) -> None:
        self.choices, self.model, self.watcher = choices, model or Model(), watcher
        self.main = getcurrent()
        self.now_s = 0.0
        self.objects: dict[str, list[Version]] = {}
        self.uploads: dict[int, _Upload] = {}
        self.processes: list[Process] = []
        self._alive: list[Process] = []
        self.counts: dict[str, int] = {}
        self.trace: list[str] | None = None
        self.objection: Exception | None = None
        self.is_late = False
        self._lock = threading.RLock()
        self._late: list[tuple[float, int, Callable[[], object]]] = []
        self._changes = self._tokens = self._delayed = self._uploads_begun = 0
        self._missing_until_s: dict[tuple[str, str], float] = {}
        self._attributes: dict[tuple[str, str], tuple[float, ObjectStat | None]] = {}
        self._skew_s: dict[str, float] = {}
        self._last: Process | None = None
        self._acting: Process | None = None
        self.adopt(self.model)

    def adopt(self, model: Model) -> None:
        """Be like `model` from now on."""
        self.model = model
        self.capabilities = Capabilities(
            conditional_create=model.conditional_create,
            atomic_replace=True,
            list_after_write=not model.list_lag_s,
            cross_client_visibility=not model.visibility_s,
        )
        self._weights = model.weights(FAULTS)
        self._read_weights = [
            w if f == "none" or f in _READ_FAULTS else 0.0 for f, w in zip(FAULTS, self._weights, strict=True)
        ]

    # -- time and chance (Environment) ---------------------------------------------------------------------

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, duration_s: float) -> None:
        process = getcurrent()
        if isinstance(process, Process):
            self._wait(process, self.now_s + duration_s)
        else:
            self.settle(duration_s)

    def now(self) -> float:
        process = getcurrent()
        node = process.node if isinstance(process, Process) else ""
        if node not in self._skew_s:
            skew_s = self.model.clock_skew_s
            self._skew_s[node] = skew_s * (2 * self.choices.fraction("clock") - 1) if skew_s else 0.0
        return 1_700_000_000 + self.now_s + self._skew_s[node]

    def token(self) -> str:
        self._tokens += 1
        return f"{self._tokens:016x}"

    def jitter(self) -> float:
        return 0.5

    # -- processes -----------------------------------------------------------------------------------------

    def start(self, name: str, node: str, program: Callable[[], Any]) -> Process:
        process = Process(self, name, node, program)
        process.wakes_at_s = self.now_s
        self.processes.append(process)
        self._alive.append(process)
        return process

    def wait_for(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Let the others go on until `condition` holds; returns whether it did in time. For processes."""
        process = getcurrent()
        assert isinstance(process, Process)
        if not condition():
            self._wait(process, self.now_s + timeout_s, condition)
        return condition()

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Let processes run until all are done, or `until` holds.

        Raises:
            Stuck: none can ever go on.
        """
        while not until():
            if self.objection is not None:
                raise self.objection
            if not self._alive:
                return
            if self._late:
                self._carry_out_late()
            ready = [process for process in self._alive if process.ready(self.now_s)]
            if ready:
                self._resume(self._choose(ready))
            else:
                self._jump(self._alive)

    def step(self, process: Process) -> None:
        """Let `process` go on to its next request, whatever it waits for."""
        self._carry_out_late()
        self._resume(process)

    def crash(self, process: Process) -> None:
        """Kill it between two requests."""
        process.crashed = True
        if process in self._alive:
            if process:
                process.switch()
            process.done = True
            self._alive.remove(process)

    def settle(self, duration_s: float) -> None:
        """Let time pass, and what is on its way arrive."""
        end_s = self.now_s + duration_s
        while self._late and min(self._late)[0] <= end_s:
            self.now_s = max(self.now_s, min(self._late)[0])
            self._carry_out_late()
        self.now_s = end_s

    def _choose(self, ready: list[Process]) -> Process:
        if len(ready) == 1:
            return ready[0]
        if self._last in ready:  # going on is the uneventful choice
            ready.remove(self._last)
            ready.insert(0, self._last)
        return ready[self.choices.pick("run", [1.0] * len(ready))]

    def _resume(self, process: Process) -> None:
        self._last = process
        process.stalled = False
        process.wakes_at_s, process.until = self.now_s, None
        process.switch()
        if process.done:
            self._alive.remove(process)

    def _jump(self, alive: Sequence[Process]) -> None:
        times = [process.wakes_at_s for process in alive] + [at_s for at_s, _, _ in self._late]
        self.now_s = max(self.now_s, min(times))
        if self.now_s == float("inf"):
            raise Stuck(f"all wait: {', '.join(map(str, alive))}")

    def _wait(self, process: Process, until_s: float, condition: Callable[[], bool] | None = None) -> None:
        process.wakes_at_s, process.until = until_s, condition
        process.parent.switch()
        if process.crashed:
            raise Crashed

    # -- requests ------------------------------------------------------------------------------------------

    def request(
        self, node: str, text: str, effect: Callable[[], T], *, writes: bool, url: str, key: str
    ) -> T:
        """Carry out a request of `node`, or not, or later, or twice."""
        process = getcurrent()
        if not isinstance(process, Process):
            with self._lock:
                return effect()
        if process.crashed:
            raise Crashed
        process.parent.switch()
        if process.crashed:
            raise Crashed
        process.requests += 1
        self.now_s += self.model.request_s * self.choices.duration()
        fault = FAULTS[self.choices.pick(text, self._weights if writes else self._read_weights)]
        self._note(f"{process}: {text} {key} {'' if fault == 'none' else fault.upper()}")
        if fault == "none":
            return self._answered(process, effect, writes)
        process.faults += 1
        self.counts[fault] = self.counts.get(fault, 0) + 1
        return self._misfortune(process, fault, effect, url, key)

    def _misfortune(self, process: Process, fault: str, effect: Callable[[], T], url: str, key: str) -> T:
        if fault == "crash":
            process.crashed = True
            raise Crashed
        if fault == "stall":
            process.stalled = True
            self._wait(process, self.now_s + self.model.stall_s)
            return self._carry_out(process, effect)
        if fault == "refused":
            refused = AccessDenied("refused", url=url, key=key)
            refused.settled = True
            raise refused
        if fault == "sent twice":
            with contextlib.suppress(NotFound, AlreadyExists):
                self._carry_out(process, effect)
            process.parent.switch()
            if process.crashed:
                raise Crashed
            return _second_try(lambda: self._carry_out(process, effect))
        if fault == "lost reply":
            with contextlib.suppress(CheckpointError):
                self._carry_out(process, effect)
        elif fault == "late":
            self._carry_out_in(self.model.late_s * self.choices.fraction("late"), process, effect)
        raise StorageUnavailable(f"no answer ({fault})", url=url, key=key)

    def _answered(self, process: Process, effect: Callable[[], T], writes: bool) -> T:
        result = self._carry_out(process, effect)
        if writes and self.model.echo_s and self.choices.pick("echo", (0.8, 0.2)):
            self.counts["echo"] = self.counts.get("echo", 0) + 1
            self._carry_out_in(self.model.echo_s * self.choices.fraction("late"), process, effect)
        return result

    def _carry_out(self, process: Process, effect: Callable[[], T]) -> T:
        self._acting = process
        try:
            return effect()
        finally:
            self._acting = None

    def _carry_out_in(self, delay_s: float, process: Process, effect: Callable[[], object]) -> None:
        self._delayed += 1
        self._late.append((self.now_s + delay_s, self._delayed, lambda: self._carry_out(process, effect)))

    def _carry_out_late(self) -> None:
        while self._late and min(self._late)[0] <= self.now_s:
            due = min(self._late)
            self._late.remove(due)
            self._note("a late request is carried out")
            self.is_late = True
            with contextlib.suppress(CheckpointError):
                due[2]()
            self.is_late = False

    def begin_upload(self, number: int, name: str) -> None:
        self.uploads[number] = _Upload(name)

    def abort_uploads(self, chosen: Callable[[str], bool]) -> int:
        found = [number for number, upload in self.uploads.items() if chosen(upload.name)]
        for number in found:
            del self.uploads[number]
        return len(found)

    def new_upload(self) -> int:
        self._uploads_begun += 1
        return self._uploads_begun

    def _note(self, text: str) -> None:
        if self.trace is not None:
            self.trace.append(f"{self.now_s:9.3f} {text}")

    # -- the truth, and what nodes see of it ---------------------------------------------------------------

    def truth(self, name: str) -> bytes | None:
        """What `name` holds."""
        versions = self.objects.get(name)
        return versions[-1].data if versions else None

    def change(self, node: str, name: str, data: bytes | None) -> None:
        """`name` holds `data` from now on (None: is deleted), by the process that acts, if any."""
        versions = self.objects.setdefault(name, [])
        before = versions[-1] if versions else None
        if data is None and (before is None or before.data is None):
            return
        self._changes += 1
        after = Version(data, self._changes, self.now_s, node, self._acting)
        versions.append(after)
        self._missing_until_s.pop((node, name), None)
        self._attributes.pop((node, name), None)
        if self.watcher is not None and self.objection is None:
            try:
                self.watcher.changed(self, name, before, after)
            except Exception as error:
                self.objection = error

    def seen(self, node: str, name: str) -> Version | None:
        """The version of `name` that `node` finds when it looks; None if it finds nothing."""
        if self._missing_until_s.get((node, name), -1.0) > self.now_s:
            return None
        found = self._newest_seen(node, name)
        if found is not None and found.data is not None:
            return found
        if self.model.negative_cache_s:
            believed_s = self.model.negative_cache_s * self.choices.fraction("negative cache")
            self._missing_until_s[node, name] = self.now_s + believed_s
        return None

    def seen_in_listing(self, node: str, name: str) -> Version | None:
        found = self._newest_seen(node, name, in_listing=True)
        return found if found is not None and found.data is not None else None

    def attributes(self, node: str, name: str, key: str) -> ObjectStat | None:
        """What `node` is told about `name`."""
        until_s, known = self._attributes.get((node, name), (-1.0, None))
        if until_s > self.now_s:
            return known
        version = self.seen(node, name)
        if version is None or version.data is None:
            return None
        found = ObjectStat(key, len(version.data), str(version.number))
        if self.model.attribute_cache_s:
            kept_s = self.model.attribute_cache_s * self.choices.fraction("attributes")
            self._attributes[node, name] = (self.now_s + kept_s, found)
        return found

    def _newest_seen(self, node: str, name: str, *, in_listing: bool = False) -> Version | None:
        versions = self.objects.get(name, ())
        view = f"{node} lists" if in_listing else node
        for number in range(len(versions) - 1, -1, -1):
            version = versions[number]
            if version.node == node and not in_listing:
                return version
            bound_s = self.model.list_lag_s if in_listing else self._lag_s(versions, number)
            if not bound_s or self._visible_at_s(version, view, bound_s) <= self.now_s:
                return version
        return None

    def _lag_s(self, versions: Sequence[Version], number: int) -> float:
        if versions[number].data is None:
            return self.model.delete_lag_s
        first = number == 0 or versions[number - 1].data is None
        return self.model.create_lag_s if first else self.model.overwrite_lag_s

    def _visible_at_s(self, version: Version, view: str, bound_s: float) -> float:
        found = version.seen_at_s.get(view)
        if found is None:
            found = version.seen_at_s[view] = version.at_s + bound_s * self.choices.fraction("lag")
        return found


def _second_try(effect: Callable[[], T]) -> T:
    """The same request again; it does not know that what it finds may be its own work."""
    try:
        return effect()
    except AlreadyExists as error:
        error.settled = False
        raise


class SimulatedStore(Store):
    """What one node sees of a place in a world. Processes on the same node share its view and its caches."""

    def __init__(self, world: World, node: str, url: str = "simulated://place") -> None:
        self.url = url.rstrip("/")
        self.threads = 1
        self._world, self._node = world, node
        self._prefix = self.url.partition("://")[2] + "/"

    @property
    def capabilities(self) -> Capabilities:
        return self._world.capabilities

    def put(self, key: str, body: Body, *, mode: PutMode = PutMode.OVERWRITE) -> None:
        name = self._name(key)
        if self._world.model.directories:
            self._make_directory(name.rpartition("/")[0])
        if mode is PutMode.CREATE and not self._world.model.conditional_create:
            self._request("look", key, lambda: self._refuse_existing(key, self._world.seen(self._node, name)))
            mode = PutMode.OVERWRITE
        if self._world.model.multipart and self._world.choices.pick("in parts", (0.7, 0.3)):
            self._put_in_parts(key, name, body, mode)
        else:
            data = b"".join(self._parts(body))
            self._request("put", key, lambda: self._store(key, name, data, mode), writes=True)

    def _put_in_parts(self, key: str, name: str, body: Body, mode: PutMode) -> None:
        number = self._world.new_upload()

        def upload() -> _Upload:
            if number not in self._world.uploads:
                raise NotFound("no such upload", url=self.url, key=key)
            return self._world.uploads[number]

        def complete() -> None:
            self._store(key, name, b"".join(data for _, data in sorted(upload().parts.items())), mode)
            del self._world.uploads[number]

        self._request("begin", key, lambda: self._world.begin_upload(number, name), writes=True)
        sent: list[bytes] = []
        try:
            for data in self._parts(body):
                part = (len(sent), data)
                self._request("part", key, lambda part=part: upload().parts.__setitem__(*part), writes=True)  # type: ignore[misc]
                sent.append(data)
            try:
                self._request("complete", key, complete, writes=True)
            except StorageError as error:
                if error.settled or not self._is_ours(key, name, b"".join(sent)):
                    raise
        except Exception:
            with contextlib.suppress(StorageError):
                self._request("abort", key, lambda: self._world.uploads.pop(number, None), writes=True)
            raise

    def _is_ours(self, key: str, name: str, data: bytes) -> bool:
        """Whether a completion without answer worked, as the stores of this library find out."""
        try:
            found = self._request("stat", key, lambda: self._world.seen(self._node, name))
        except StorageError:
            return False
        return found is not None and found.data == data

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        name = self._name(key)
        data = self._request("read", key, lambda: self._read(key, name))
        for buffer in buffers:
            stop = offset + buffer.nbytes
            if stop > len(data):
                raise Truncated(f"ends at byte {len(data)}", url=self.url, key=key, start=offset, stop=stop)
            buffer[:] = data[offset:stop]
            offset = stop

    def stat(self, key: str) -> ObjectStat:
        name = self._name(key)
        found = self._request("stat", key, lambda: self._world.attributes(self._node, name, key))
        process = getcurrent()
        if isinstance(process, Process):
            process.looked[name] = process.requests, found is not None
        if found is None:
            raise NotFound("no such object", url=self.url, key=key)
        return found

    def list(self, prefix: str = "") -> Iterator[ObjectStat]:
        found = self._request("list", prefix, lambda: list(self._listed(prefix)))
        yield from found

    def _listed(self, prefix: str) -> Iterator[ObjectStat]:
        for name in sorted(self._world.objects):
            if name.startswith(self._prefix + prefix) and is_key(key := name[len(self._prefix) :]):
                version = self._world.seen_in_listing(self._node, name)
                if version is not None and version.data is not None:
                    yield ObjectStat(key, len(version.data), str(version.number))

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            name = self._name(key)
            self._request("delete", key, lambda name=name: self._change(name, None), writes=True)  # type: ignore[misc]

    def prepare(self, prefix: str) -> None:
        if self._world.model.directories:
            self._make_directory(self._prefix + prefix)

    def abandon(self, prefix: str = "", *, choose: Callable[[ObjectStat], bool] | None = None) -> int:
        def chosen(name: str) -> bool:
            if not name.startswith(self._prefix + prefix):
                return False
            return choose is None or choose(ObjectStat(name.removeprefix(self._prefix), 0))

        return self._request("abandon", prefix, lambda: self._world.abort_uploads(chosen), writes=True)

    # -- for protocols that are not ours -------------------------------------------------------------------

    def put_into(self, key: str, data: bytes) -> None:
        """Store `data` where the directory is there already, as this node sees it. Raises NotFound."""
        name = self._name(key)

        def write() -> None:
            directory = name.rpartition("/")[0] + "/"
            if self._world.model.directories and self._world.seen(self._node, directory) is None:
                raise NotFound("no such directory", url=self.url, key=key)
            self._change(name, data)

        self._request("put", key, write, writes=True)

    def _make_directory(self, directory: str) -> None:
        marker = f"{directory}/"
        if self._world.seen(self._node, marker) is None:
            self._request("mkdir", directory, lambda: self._change(marker, b""), writes=True)

    # -- effects -------------------------------------------------------------------------------------------

    def _request(self, text: str, key: str, effect: Callable[[], T], *, writes: bool = False) -> T:
        return self._world.request(self._node, text, effect, writes=writes, url=self.url, key=key)

    def _parts(self, body: Body) -> Iterator[bytes]:
        size = part_size_bytes(body.nbytes, _PART_SIZE_BYTES, self.capabilities)
        for start in range(0, body.nbytes, size):
            with body.part(start, min(start + size, body.nbytes)) as part:
                if part.pace is not None:
                    part.pace(part.nbytes)
                yield b"".join(part.buffers)

    def _store(self, key: str, name: str, data: bytes, mode: PutMode) -> None:
        if mode is PutMode.CREATE and self._world.truth(name) is not None:
            self._refuse(key)
        self._change(name, data)

    def _change(self, name: str, data: bytes | None) -> None:
        self._world.change(self._node, name, data)

    def _refuse_existing(self, key: str, found: Version | None) -> None:
        if found is not None:
            self._refuse(key)

    def _refuse(self, key: str) -> None:
        error = AlreadyExists("exists already", url=self.url, key=key)
        error.settled = True
        raise error

    def _read(self, key: str, name: str) -> bytes:
        version = self._world.seen(self._node, name)
        process = getcurrent()
        if isinstance(process, Process):
            process.looked[name] = process.requests, version is not None and version.data is not None
            if version is not None:
                process.read[name] = version
        if version is None or version.data is None:
            raise NotFound("no such object", url=self.url, key=key)
        return version.data

    def _name(self, key: str) -> str:
        return self._prefix + check_key(key)
