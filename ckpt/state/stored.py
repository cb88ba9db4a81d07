"""Show what a checkpoint holds, by parts: the names, paths, shapes and dtypes that a load plans from."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from ckpt.errors import FormatError
from ckpt.format.fqns import STRUCTURE, Path, paths_of
from ckpt.state.structure import MAX_PATH, MODULES, Structure, decode

_INDEXED = 2

Rename = Callable[[str], str]


@dataclass(frozen=True)
class StoredValue:
    """A stored tensor or object.

    Attributes:
        name: under which it is stored.
        shape, dtype: of the whole tensor; None of an object.
    """

    name: str
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None


@dataclass
class StoredPart:
    """What is stored under one first key: the values by their path below it, and what flattening lost of them."""

    name: str
    values: dict[Path, StoredValue] = field(default_factory=dict)
    nodes: Structure = field(default_factory=dict)

    def structure(self, below: Path = ()) -> Structure:
        """Return what flattening lost at a path and below it, by paths from there."""
        return {path[len(below) :]: self.nodes[path] for path in self._under(self._node_paths, below)}

    def has_below(self, path: Path) -> bool:
        """Tell whether anything is stored at a path or below it."""
        return path in self._prefixes

    @functools.cached_property
    def _prefixes(self) -> set[Path]:
        return {path[:at] for path in [*self.values, *self.nodes] for at in range(len(path) + 1)}

    def below(self, path: Path) -> dict[Path, StoredValue]:
        """Return the values at a path and below it, by paths from there."""
        return {at[len(path) :]: self.values[at] for at in self._under(self._value_paths, path)}

    def _under(self, paths: Mapping[Path, list[Path]], below: Path) -> list[Path]:
        return [path for path in paths.get(below[:_INDEXED], ()) if path[: len(below)] == below]

    @functools.cached_property
    def _value_paths(self) -> dict[Path, list[Path]]:
        return _by_beginning(self.values)

    @functools.cached_property
    def _node_paths(self) -> dict[Path, list[Path]]:
        return _by_beginning(self.nodes)


class StoredState:
    """The parts of a checkpoint.

    Args:
        values: all that is stored, by name.
        paths: where each value is in the nested state.
        texts: the texts of `structure_names`, by name.
        rename: from stored names to those of the program.
    """

    def __init__(
        self,
        values: Iterable[StoredValue],
        paths: Mapping[str, Path],
        texts: Mapping[str, Any] | None = None,
        rename: Rename | None = None,
    ) -> None:
        self._rename = rename
        self.names: dict[str, StoredValue] = {}
        self.parts: dict[str, StoredPart] = {}
        self._modules: dict[str, Any] = {}
        self._noted: dict[str, StoredPart] = {}
        for value in values:
            path = paths.get(value.name) or (value.name,)
            if len(path) > MAX_PATH:
                raise FormatError(f"{value.name!r:.200} is nested {len(path)} deep, more than {MAX_PATH}")
            self.names[value.name] = value
            if rename is not None and path[0] != STRUCTURE:
                path = _renamed(path, rename)
            parts = self.parts if path[0] != STRUCTURE else self._noted
            part = parts.get(str(path[0]))
            if part is None:
                part = parts[str(path[0])] = StoredPart(str(path[0]))
            below = path[1:]
            if part.values.setdefault(below, value) is not value:
                shown = ".".join(map(str, path))
                raise FormatError(f"two stored names are {shown!r} in the program, one is {value.name!r}")
        for name, text in (texts or {}).items():
            path = paths.get(name, ())[1:]
            if path:
                for at, node in decode(text, name).items():
                    at = () if (is_note := node.kind == MODULES) else at
                    above = ".".join(map(str, (path[0], *at)))
                    self._modules |= {
                        self.renamed(f"{above}.{key}"): noted for key, noted in node.modules.items()
                    }
                    if is_note:
                        continue
                    whole = (path[0], *at) if rename is None else _renamed((path[0], *at, "_"), rename)[:-1]
                    if whole:  # else its members are parts of their own in the program
                        renamed = self.parts.setdefault(str(whole[0]), StoredPart(str(whole[0])))
                        renamed.nodes[whole[1:]] = node

    @classmethod
    def of(
        cls, metadata: Metadata, texts: Mapping[str, Any] | None = None, rename: Rename | None = None
    ) -> StoredState:
        """Return the parts of a checkpoint by its metadata, as DCP's planners see it."""
        paths = paths_of(metadata.planner_data)
        stored = metadata.state_dict_metadata
        # In the order of the state: what is stored may be in that of the ranks which wrote it.
        ordered = {**{name: stored[name] for name in paths if name in stored}, **stored}
        values = (
            StoredValue(name, tuple(described.size), described.properties.dtype)
            if isinstance(described, TensorStorageMetadata)
            else StoredValue(name)
            for name, described in ordered.items()
        )
        return cls(values, paths, texts, rename)

    def part(self, name: str) -> StoredPart:
        """Return what is stored at a name and below it; an empty part if there is nothing.

        As for DCP's planners, a name may reach into a part, and a part may be stored under flat names.
        """
        own = self.parts.get(name) or self._noted.get(name)
        is_top = own is not None and "." not in name and name not in self._heads
        below = () if is_top else self._below.get(name, ())
        if own is not None and (not below or own.values):
            return own  # what has flat names that begin like it is a part of its own
        found = StoredPart(name, {}, {} if own is None else {**own.nodes})
        seen: set[tuple[str, Path]] = set()
        for part, path, rest in below:
            found.values[rest] = part.values[path]
            is_flat = len(rest) > len(path)
            at = rest[:1] if is_flat else path[: len(path) - len(rest)]
            if own is None and (part.name, at) not in seen:
                seen.add((part.name, at))
                nodes = part.nodes if is_flat else part.structure(at)
                found.nodes |= {(*at, *each): node for each, node in nodes.items()} if is_flat else nodes
        return found

    def modules(self, name: str) -> dict[str, Any] | None:
        """Return what is noted of the modules of a part: versions by prefix, None for buffers; None without a note."""
        prefix = f"{name}."
        found = {key[len(prefix) :]: each for key, each in self._modules.items() if key.startswith(prefix)}
        return found or None

    @functools.cached_property
    def _heads(self) -> set[str]:
        """Return the first names of parts that are stored under flat names."""
        return {top.partition(".")[0] for top in (*self.parts, *self._noted) if "." in top}

    @functools.cached_property
    def _below(self) -> dict[str, list[tuple[StoredPart, Path, Path]]]:
        """Map other names to what is at them and below: of a part, its path in it, and the path from the name on."""
        found: dict[str, list[tuple[StoredPart, Path, Path]]] = {}
        for top, part in [*self.parts.items(), *self._noted.items()]:
            for path in part.values:
                name = top
                for number, key in enumerate(path, 1):  # into a part
                    name = f"{name}.{key}"
                    found.setdefault(name, []).append((part, path, path[number:]))
                head, dot, rest = top.partition(".")
                if dot:  # a flat name
                    found.setdefault(head, []).append((part, path, (rest, *path)))
        return found

    def renamed(self, name: str) -> str:
        return name if self._rename is None else self._rename(name)


def _by_beginning(paths: Iterable[Path]) -> dict[Path, list[Path]]:
    """Group paths by all they begin with, up to two keys: those of a parameter are found without a look at all."""
    found: dict[Path, list[Path]] = {}
    for path in paths:
        for count in range(min(len(path), _INDEXED) + 1):
            found.setdefault(path[:count], []).append(path)
    return found


def structure_names(metadata: Metadata) -> list[str]:
    """List the names of the texts that say what flattening lost."""
    paths = paths_of(metadata.planner_data)
    return sorted(
        name
        for name in metadata.state_dict_metadata
        if name.startswith(f"{STRUCTURE}.") and paths.get(name, ("",))[0] == STRUCTURE
    )


def rename_by(rename: Rename | Mapping[str, str] | None) -> Rename | None:
    """Return the function that an option stands for: a mapping replaces the longest prefix that it has."""
    if rename is None or callable(rename):
        return rename
    prefixes = sorted(rename, key=len, reverse=True)
    return functools.partial(_with_prefix, prefixes, rename)


def _with_prefix(prefixes: Iterable[str], rename: Mapping[str, str], name: str) -> str:
    for prefix in prefixes:
        if name.startswith(prefix):
            return rename[prefix] + name[len(prefix) :]
    return name


def _renamed(path: Path, rename: Rename) -> Path:
    """Rename a path: the keys that stay at its two ends are kept apart."""
    name = ".".join(map(str, path))
    renamed = rename(name)
    if renamed == name:
        return path
    begin: list[str | int] = []
    end: list[str | int] = []
    rest = [*path]
    while len(rest) > 1 and renamed.startswith(f"{rest[0]}."):
        renamed = renamed[len(str(rest[0])) + 1 :]
        begin.append(rest.pop(0))
    while rest and renamed.endswith(f".{rest[-1]}"):
        renamed = renamed[: -len(str(rest[-1])) - 1]
        end.insert(0, rest.pop())
    if not rest and end and begin:  # a longer prefix: one key, of dots, as the names of models have them
        return (*begin, f"{renamed}.{end[0]}", *end[1:])
    if rest and str(rest[-1]) == renamed and len(rest) == 1:
        return (*begin, rest[0], *end)
    if not begin and "." in renamed:  # the part's name comes first
        top, _, renamed = renamed.partition(".")
        begin.append(top)
    return (*begin, renamed, *end)
