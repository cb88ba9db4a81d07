"""Hold the objects of a simulated storage system, and decide what its nodes see of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ckpt.backends.base import ObjectStat
from ckpt.testing.choices import Choices
from ckpt.testing.virtual_time import EPOCH_S, Process

__all__ = ["Model", "Objects", "Upload", "Version"]


@dataclass(frozen=True)
class Model:
    """Bound what a storage system may do to its clients.

    Attributes:
        create_lag_s, overwrite_lag_s, delete_lag_s, list_lag_s: until other nodes see it, at most.
        negative_cache_s: for how long a node believes that a name it missed is missing, at most.
        attribute_cache_s: for how long `stat` may repeat an old answer.
        clock_skew_s: by how much a node's clock may be wrong, either way.
        conditional_create: "only if absent" is one step; else the node looks first.
        directories: a name can be used only where its directory is seen.
        multipart: puts may go in parts.
        request_s: how long a request takes, at most.
        stall_s: for how long a stalled process does nothing.
        late_s: how long after its client gave it up a request may be carried out.
        echo_s: how long after its answer a request may be carried out once more; 0 is never.
        faults: weight of each of `FAULTS` (that of "none" is 1).
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


@dataclass(eq=False)
class Version:
    """One state of one name, by a process (None: somebody outside).

    Attributes:
        data: None where it was deleted.
        number: counts all changes of the world.
        replaces: there was something before it.
        seen_at_s: when it comes to be seen, by node.
    """

    data: bytes | None
    number: int
    at_s: float
    node: str
    process: Process | None
    replaces: bool
    seen_at_s: dict[str, float] = field(default_factory=dict)

    def stat(self, key: str) -> ObjectStat:
        """Describe it, unless it is deleted."""
        return ObjectStat(key, len(self.data or b""), str(self.number), EPOCH_S + self.at_s)


@dataclass(eq=False)
class Upload:
    """An unfinished upload in parts."""

    name: str
    parts: dict[int, bytes] = field(default_factory=dict)


class Objects:
    """Keep the versions of all names and the unfinished uploads, and decide who sees them when.

    Attributes:
        versions: those of every name, oldest first.
        uploads: when each of the unfinished ones was begun, in seconds since 1970.
    """

    now_s: float  # somebody else counts it

    def __init__(self, choices: Choices, model: Model) -> None:
        self.choices, self.model = choices, model
        self.versions: dict[str, list[Version]] = {}
        self.uploads: dict[Upload, float] = {}
        self._changes = 0
        self._missing_until_s: dict[tuple[str, str], float] = {}
        self._attributes: dict[tuple[str, str], tuple[float, ObjectStat]] = {}

    def truth(self, name: str) -> bytes | None:
        """Return what `name` holds."""
        versions = self.versions.get(name)
        return versions[-1].data if versions else None

    def add(self, node: str, name: str, data: bytes | None, process: Process | None) -> Version | None:
        """Have `name` hold `data` from now on (None: delete it); return None if nothing changes."""
        exists = self.truth(name) is not None
        if data is None and not exists:
            return None
        self._changes += 1
        version = Version(data, self._changes, self.now_s, node, process, exists)
        self.versions.setdefault(name, []).append(version)
        self._missing_until_s.pop((node, name), None)
        self._attributes.pop((node, name), None)
        return version

    def seen(self, node: str, name: str) -> Version | None:
        """Return the version of `name` that `node` sees; None if it sees none, or a deletion."""
        if self._missing_until_s.get((node, name), -1.0) > self.now_s:
            return None
        for version in reversed(self.versions.get(name, ())):
            if version.node == node or self._is_visible(version, node, self._lag_s(version)):
                if version.data is not None:
                    return version
                break
        if self.model.negative_cache_s:
            believed_s = self.model.negative_cache_s * self.choices.fraction("negative cache")
            self._missing_until_s[node, name] = self.now_s + believed_s
        return None

    def seen_in_listing(self, node: str, name: str) -> Version | None:
        for version in reversed(self.versions[name]):
            if self._is_visible(version, f"{node} lists", self.model.list_lag_s):
                return version if version.data is not None else None
        return None

    def attributes(self, node: str, name: str, key: str) -> ObjectStat | None:
        """Return what `node` is told about `name`."""
        until_s, stat = self._attributes.get((node, name), (-1.0, None))
        if until_s > self.now_s:
            return stat
        version = self.seen(node, name)
        if version is None:
            return None
        stat = version.stat(key)
        if self.model.attribute_cache_s:
            kept_s = self.model.attribute_cache_s * self.choices.fraction("attributes")
            self._attributes[node, name] = (self.now_s + kept_s, stat)
        return stat

    def _lag_s(self, version: Version) -> float:
        if version.data is None:
            return self.model.delete_lag_s
        return self.model.overwrite_lag_s if version.replaces else self.model.create_lag_s

    def _is_visible(self, version: Version, view: str, bound_s: float) -> bool:
        if not bound_s:
            return True
        if view not in version.seen_at_s:
            version.seen_at_s[view] = version.at_s + bound_s * self.choices.fraction("lag")
        return version.seen_at_s[view] <= self.now_s
