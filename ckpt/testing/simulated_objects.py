"""Hold the objects of a simulated storage system, and decide what each of its nodes sees of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ckpt.backends.base import ObjectStat
from ckpt.testing.choices import Choices

__all__ = ["EPOCH_S", "Actor", "Model", "Objects", "Upload", "Version"]

EPOCH_S = 1_700_000_000.0
"""When simulated time begins, in seconds since 1970."""


@dataclass(frozen=True)
class Model:
    """Bound what a storage system may do to its clients.

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
        """The time after which every node sees a change, whatever it looked at before."""
        lag_s = max(self.create_lag_s, self.overwrite_lag_s, self.delete_lag_s)
        return lag_s + self.negative_cache_s + self.attribute_cache_s

    def weights(self, faults: Iterable[str]) -> list[float]:
        return [1.0 if fault == "none" else self.faults.get(fault, 0.0) for fault in faults]


class Actor(Protocol):
    """A program that changes objects: a process of the simulator."""

    name: str
    node: str
    requests: int
    read: dict[str, Version]
    looked: dict[str, tuple[int, bool]]


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
    process: Actor | None
    seen_at_s: dict[str, float] = field(default_factory=dict)

    def stat(self, key: str) -> ObjectStat:
        """Describe it, unless it is deleted."""
        return ObjectStat(key, len(self.data or b""), str(self.number), EPOCH_S + self.at_s)


@dataclass
class Upload:
    name: str
    begun_at_s: float
    parts: dict[int, bytes] = field(default_factory=dict)


class Objects:
    """Keep the versions of all names and the unfinished uploads, and decide who sees them, and when.

    Attributes:
        now_s: the time, which somebody else counts.
        versions: those of every name, oldest first.
        uploads: those begun and neither completed nor aborted, by number.
    """

    now_s: float

    def __init__(self, choices: Choices, model: Model) -> None:
        self.choices, self.model = choices, model
        self.versions: dict[str, list[Version]] = {}
        self.uploads: dict[int, Upload] = {}
        self._changes = self._uploads_begun = 0
        self._missing_until_s: dict[tuple[str, str], float] = {}
        self._attributes: dict[tuple[str, str], tuple[float, ObjectStat | None]] = {}

    def truth(self, name: str) -> bytes | None:
        """Return what `name` holds."""
        versions = self.versions.get(name)
        return versions[-1].data if versions else None

    def add(self, node: str, name: str, data: bytes | None, process: Actor | None) -> Version | None:
        """Have `name` hold `data` from now on (None: delete it); return None if that changes nothing."""
        versions = self.versions.setdefault(name, [])
        if data is None and self.truth(name) is None:
            return None
        self._changes += 1
        after = Version(data, self._changes, self.now_s, node, process)
        versions.append(after)
        self._missing_until_s.pop((node, name), None)
        self._attributes.pop((node, name), None)
        return after

    def seen(self, node: str, name: str) -> Version | None:
        """Return the version of `name` that `node` sees; None if it sees none."""
        if self._missing_until_s.get((node, name), -1.0) > self.now_s:
            return None
        version = self._newest_seen(node, name)
        if version is not None and version.data is not None:
            return version
        if self.model.negative_cache_s:
            believed_s = self.model.negative_cache_s * self.choices.fraction("negative cache")
            self._missing_until_s[node, name] = self.now_s + believed_s
        return None

    def seen_in_listing(self, node: str, name: str) -> Version | None:
        version = self._newest_seen(node, name, in_listing=True)
        return version if version is not None and version.data is not None else None

    def attributes(self, node: str, name: str, key: str) -> ObjectStat | None:
        """Return what `node` is told about `name`."""
        until_s, known = self._attributes.get((node, name), (-1.0, None))
        if until_s > self.now_s:
            return known
        version = self.seen(node, name)
        if version is None or version.data is None:
            return None
        stat = version.stat(key)
        if self.model.attribute_cache_s:
            kept_s = self.model.attribute_cache_s * self.choices.fraction("attributes")
            self._attributes[node, name] = (self.now_s + kept_s, stat)
        return stat

    def _newest_seen(self, node: str, name: str, *, in_listing: bool = False) -> Version | None:
        versions = self.versions.get(name, ())
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
        seen_at_s = version.seen_at_s.get(view)
        if seen_at_s is None:
            seen_at_s = version.seen_at_s[view] = version.at_s + bound_s * self.choices.fraction("lag")
        return seen_at_s

    def begin_upload(self, number: int, name: str) -> None:
        self.uploads[number] = Upload(name, EPOCH_S + self.now_s)

    def abort_uploads(self, chosen: Callable[[Upload], bool]) -> int:
        numbers = [number for number, upload in self.uploads.items() if chosen(upload)]
        for number in numbers:
            del self.uploads[number]
        return len(numbers)

    def new_upload(self) -> int:
        self._uploads_begun += 1
        return self._uploads_begun
