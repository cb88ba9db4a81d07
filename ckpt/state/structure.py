"""Flatten nested values as DCP does, note what that loses, and build them again as they were.

DCP turns keys into texts, forgets containers that hold nothing, and knows dicts and lists alone. What is lost is
written down as text, beside the values, and only where something is lost: most states have nothing of the kind.
"""

from __future__ import annotations

import base64
import json
import operator
import re
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ckpt.errors import ConfigurationError, FormatError
from ckpt.format.fqns import Path
from ckpt.state.rank_keys import RANKS, ranks_named

_MAX_TEXT_BYTES = 64 << 20
_MAX_DEPTH = 100
MAX_PATH = 128
"""Keys of a path that is read: the deepest container that is saved, and the names above it."""
_FACTORIES: Mapping[str, Callable[[], Any] | None] = {
    "int": int, "float": float, "list": list, "dict": dict, "set": set, "str": str, "bool": bool, "tuple": tuple, "": None,
}  # fmt: skip
_ABSENT = object()
_NOT_TEXT = re.compile(
    r"[-+]?\d[\d_.]*(e[-+]?\d+)?|[-+]?inf|nan|True|False|None|\(.*\)|b['\"].*|frozenset\(.*", re.DOTALL
)
"""Texts that read as a key of another type may: in a dict that has one of these, it is noted that all are texts."""

MODULES = "modules"
"""The kind of a node that is no container: it notes of modules what no tensor tells."""


def is_flattened(value: Any) -> bool:
    """Tell whether DCP takes a value apart, and does not store it as one object or tensor."""
    # Most values are tensors, and to ask for a protocol takes ten times as long as to ask for a class.
    if isinstance(value, dict):
        return True
    if isinstance(value, torch.Tensor):
        return False
    if isinstance(value, Mapping):
        return True
    return isinstance(value, list) and any(
        isinstance(item, torch.Tensor) or (isinstance(item, Mapping | list) and is_flattened(item))
        for item in value
    )


def children(value: Any) -> Iterator[tuple[str | int, Any]]:
    """List the members of a value that is flattened, by the names that DCP gives them."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key), item
    else:
        yield from enumerate(value)


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """List the values that DCP stores of a nested one, and where they are in it."""
    if not is_flattened(value):
        yield path, value
        return
    for name, item in children(value):
        if isinstance(item, torch.Tensor):  # first of all, as nearly all are
            yield (*path, name), item
        else:
            yield from leaves(item, (*path, name))


def empties(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """List the containers of a nested value that hold nothing, which DCP does not store, and where they are in it."""
    if is_flattened(value):
        if not value:
            yield path, value
        for name, item in children(value):
            if not isinstance(item, torch.Tensor):
                yield from empties(item, (*path, name))


def name_of(path: Path) -> str:
    """Return the name under which DCP stores the value at a path."""
    return ".".join(map(str, path))


@dataclass
class Node:
    """A container that flattening loses something of.

    Attributes:
        kind: its type, `dict` and `list` apart; empty if that is lost neither.
        keys: those that are no texts, by the text that stands for them; or `int` if all are numbers. All others are
            texts: of a container without a node, as in older checkpoints, the program's keys say what they are.
        length: of a list, or of a container that holds nothing.
        tensors: members that are no plain CPU tensors: `dtensor`, or the type of their device; `*` stands for all.
        modules: if these are states of modules, versions that are not 1, by prefix, and None for buffers that are.
    """

    kind: str = ""
    keys: Any = field(default_factory=dict)
    length: int | None = None
    tensors: dict[str, str] = field(default_factory=dict)
    modules: dict[str, Any] = field(default_factory=dict)

    def is_needed(self) -> bool:
        return bool(self.kind or self.keys or self.tensors or self.modules) or self.length is not None


Structure = dict[Path, Node]
"""What flattening loses of a nested value, by the path of the container."""


def structure_of(value: Any, name: str, *, with_tensors: bool = False) -> Structure:
    """Return what flattening loses of a value; `with_tensors` also where its tensors were.

    Raises ConfigurationError, which names the value, for keys that cannot be written down.
    """
    found: Structure = {}
    _look(value, (), found, name, with_tensors)
    return found


def _look(value: Any, path: Path, found: Structure, name: str, with_tensors: bool) -> None:
    if not is_flattened(value):
        return
    if len(path) > _MAX_DEPTH:
        raise ConfigurationError(f"{name!r} is nested more than {_MAX_DEPTH} deep")
    node = Node()
    node.kind = _kind_of(value)
    reads_otherwise = False
    if isinstance(value, Mapping):
        node.modules = _versions_of(value)
        for key in value:
            if type(key) is not str:
                node.keys[str(key)] = _encoded_key(key, name, path)
            elif _NOT_TEXT.fullmatch(key):
                reads_otherwise = True
        if len({str(key) for key in value}) < len(value):
            raise ConfigurationError(
                f"{name_of((name, *path))!r} has keys that read alike, such as 1 and '1': use keys of one type"
            )
        if ranks_named(value):
            raise ConfigurationError(
                f"{name_of((name, *path))!r} has the keys of values that ckpt.per_rank saves, {RANKS!r} and a key for each "
                "rank: use others"
            )
        if len(node.keys) == len(value):  # among others, a number and the text of one are told apart by name
            node.keys = _short(node.keys)
        if not value:
            node.length = 0
    for member, item in children(value):
        if isinstance(item, torch.Tensor):
            if with_tensors:
                node.tensors[str(member)] = "dtensor" if isinstance(item, DTensor) else item.device.type
        elif isinstance(item, Mapping | list):
            _look(item, (*path, member), found, name, with_tensors)
    kinds = {*node.tensors.values()}
    if len(kinds) == 1:
        node.tensors = {"*": kinds.pop()}
    node.tensors = {member: kind for member, kind in node.tensors.items() if kind not in ("cpu", "meta")}
    if not isinstance(value, Mapping) and not any(True for _ in leaves(value)):
        node.length = len(value)
    if reads_otherwise or node.is_needed():
        found[path] = node


def _versions_of(state: Any) -> dict[str, Any]:
    """Return the versions that are not 1 of the modules of which this is the `state_dict`, by prefix."""
    metadata = getattr(state, "_metadata", None)
    versions = {
        f"{path}." if path else "": known.get("version")
        for path, known in (metadata.items() if isinstance(metadata, dict) else ())
    }
    return {
        prefix: version
        for prefix, version in versions.items()
        if version != 1 and isinstance(version, int | float | str)
    }


def _with_versions(state: Any, versions: Mapping[str, Any]) -> Any:
    """Return a state dict of modules with the versions that `load_state_dict` asks for."""
    prefixes = {"", *versions}
    for key in state:
        parts = str(key).split(".")
        prefixes |= {".".join(parts[:end]) + "." for end in range(1, len(parts))}
    state._metadata = OrderedDict(
        (prefix[:-1], {"version": versions.get(prefix, 1)}) for prefix in sorted(prefixes)
    )
    return state


def _kind_of(value: Any) -> str:
    kind = type(value)
    if kind in (dict, list):
        return ""
    if isinstance(value, defaultdict):
        factory = value.default_factory
        known = next((text for text, made in _FACTORIES.items() if made is factory), None)
        return f"defaultdict:{known}" if known is not None else "defaultdict:?"
    if kind in (OrderedDict, Counter):
        return kind.__name__
    return f"{kind.__module__}.{kind.__qualname__}"


def _encoded_key(key: Any, name: str, path: Path) -> Any:
    """Write a key as plain JSON values, with its type."""
    if key is None or type(key) in (bool, int, float):
        return [type(key).__name__, repr(key)]
    if isinstance(key, Enum):
        kind = type(key)
        return ["enum", f"{kind.__module__}:{kind.__qualname__}", _encoded_key(key.value, name, path)]
    if isinstance(key, str):
        return ["str", str(key)]
    if type(key) is bytes:
        return ["bytes", base64.b64encode(key).decode()]
    if type(key) is tuple:
        return ["tuple", [_encoded_key(item, name, path) for item in key]]
    if isinstance(key, frozenset):
        return ["frozenset", [_encoded_key(item, name, path) for item in key]]
    if not isinstance(key, torch.Tensor) and hasattr(key, "__index__"):  # NumPy's integers
        return ["int", repr(operator.index(key))]
    raise ConfigurationError(
        f"{name_of((name, *path))!r} has a key of {type(key).__module__}.{type(key).__qualname__}, which cannot be "
        "saved: use texts, numbers, tuples or enums of these"
    )


def decoded_key(encoded: Any, like: Callable[[str], Any] = lambda kind: None) -> Any:
    """Return the key that was written; an enum is looked up in the modules that are loaded, which imports nothing."""
    kind, *rest = encoded if isinstance(encoded, list) else ("no list",)
    if kind in ("NoneType", "bool"):
        return {"None": None, "True": True, "False": False}[rest[0]]
    if kind == "int":
        return int(rest[0])
    if kind == "float":
        return float(rest[0])
    if kind == "str":
        return str(rest[0])
    if kind == "bytes":
        return base64.b64decode(rest[0])
    if kind in ("tuple", "frozenset"):
        return {"tuple": tuple, "frozenset": frozenset}[kind](decoded_key(item, like) for item in rest[0])
    if kind == "enum" and isinstance(rest[0], str):
        made = like(rest[0]) or _loaded_enum(rest[0])
        return made(decoded_key(rest[1], like))
    raise ValueError(f"a key of {kind!r:.50}")


def _loaded_enum(name: str) -> Any:
    module, _, qualified = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualified.split("."):
        # No `getattr`: a module, or a class of a class, may run code of its own for a name.
        found = vars(found).get(part) if isinstance(found, ModuleType | type) else None
    if isinstance(found, type) and issubclass(found, Enum):
        return found
    raise ValueError(f"a key of the enum {name:.100}, which this program has not imported")


# -- as text -----------------------------------------------------------------------------------------------


def encode(structure: Structure) -> str:
    """Write a structure as text."""
    nodes = []
    for path, node in structure.items():
        values = {
            "kind": node.kind,
            "keys": node.keys,
            "length": node.length,
            "tensors": node.tensors,
            "modules": node.modules,
        }
        nodes.append(
            [list(path), {name: value for name, value in values.items() if value not in ("", {}, None)}]
        )
    return json.dumps(nodes, separators=(",", ":"))


def decode(text: Any, name: str) -> Structure:
    """Read what `encode` wrote. Raises FormatError for anything else."""
    try:
        if not isinstance(text, str) or len(text) > _MAX_TEXT_BYTES:
            raise ValueError("not a text, or too long")
        structure: Structure = {}
        for path, values in json.loads(text):
            if len(path) > MAX_PATH or not all(type(part) in (str, int) for part in path):
                raise ValueError("a path that is none")
            length = values.get("length")
            if length is not None and not (type(length) is int and 0 <= length <= 1 << 20):
                raise ValueError("a length that is none")
            keys, tensors, modules = (values.get(member, {}) for member in ("keys", "tensors", "modules"))
            is_dict = isinstance(tensors, dict) and isinstance(modules, dict)
            if not (keys == "int" or isinstance(keys, dict)) or not is_dict:
                raise ValueError("keys that are none")
            if keys != "int":
                _check_keys(keys)
            structure[tuple(path)] = Node(str(values.get("kind", "")), keys, length, tensors, modules)
        return structure
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise FormatError(f"the structure of {name!r} cannot be read: {error}") from None


def _check_keys(keys: Mapping[str, Any]) -> None:
    """Check keys before anything is loaded; that an enum is known, `build` finds out."""
    made = {decoded_key(encoded, lambda name: lambda value: (name, value)) for encoded in keys.values()}
    if len(made) < len(keys):
        raise ValueError("two texts that stand for one key")


def _short(keys: Mapping[str, Any]) -> Any:
    """Say `int` of keys that all are: the state of an optimizer has one for each parameter."""
    is_number = all(encoded == ["int", text] for text, encoded in keys.items())
    return "int" if keys and is_number else keys


# -- built again -------------------------------------------------------------------------------------------


def build(values: Mapping[Path, Any], structure: Structure, live: Any, name: str) -> Any:
    """Build the nested value of which these are the leaves.

    Args:
        values: the leaves, by path; that of the value itself is empty.
        structure: what flattening lost.
        live: the program's value. Where nothing is noted, as in older checkpoints, keys and types are its.

    Raises FormatError if this contradicts itself.
    """
    tree = _Tree()
    for path, value in values.items():
        tree.add(path, value)
    for path in structure:
        tree.at(path)
    try:
        return _built(tree, (), structure, live)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise FormatError(f"{name!r} cannot be built as it was saved: {error}") from None


class _Tree:
    """Members by name; a leaf has a value."""

    def __init__(self) -> None:
        self.members: dict[str | int, _Tree] = {}
        self.value: Any = _ABSENT

    def at(self, path: Path) -> _Tree:
        node = self
        for part in path:
            node = node.members.setdefault(part, _Tree())
        return node

    def add(self, path: Path, value: Any) -> None:
        self.at(path).value = value


def _built(tree: _Tree, path: Path, structure: Structure, live: Any) -> Any:
    if tree.value is not _ABSENT:
        if tree.members:
            raise ValueError(f"{name_of(path)!r} is a value and a container")
        return tree.value
    node = structure.get(path)
    is_list = bool(tree.members) and all(isinstance(part, int) for part in tree.members)
    if is_list or (node is not None and node.length):
        length = max([*(int(part) + 1 for part in tree.members), 0 if node is None else node.length or 0])
        if length > 16 * len(tree.members) + 1024:
            raise ValueError(f"a list of {length} with {len(tree.members)} members")
        items = [tree.members.get(number) for number in range(length)]
        made_items = [
            {} if item is None else _built(item, (*path, number), structure, _member(live, number))
            for number, item in enumerate(items)
        ]
        return _typed(made_items, node, live)
    live_keys = {str(key): key for key in live} if isinstance(live, Mapping) else {}
    made: dict[Any, Any] = {}
    for part, member in tree.members.items():
        key = _key(str(part), node, live_keys)
        if key in made:
            raise ValueError(f"two members of {name_of(path)!r} have the key {key!r:.100}")
        made[key] = _built(member, (*path, part), structure, live.get(key) if live_keys else None)
    return _typed(made, node, live)


def _key(text: str, node: Node | None, live_keys: Mapping[str, Any]) -> Any:
    if node is None:
        return live_keys.get(text, text)
    if node.keys == "int":
        return int(text)
    if text not in node.keys:
        return text
    enums = {
        f"{type(k).__module__}:{type(k).__qualname__}": type(k)
        for k in live_keys.values()
        if isinstance(k, Enum)
    }
    return decoded_key(node.keys[text], enums.get)


def _member(live: Any, number: int) -> Any:
    return live[number] if isinstance(live, list | tuple) and number < len(live) else None


def _typed(made: Any, node: Node | None, live: Any) -> Any:
    """Return a dict or a list as the type that it had."""
    kind = _kind_of(live) if node is None and isinstance(live, dict | list) else node.kind if node else ""
    if not kind:
        return made
    if type(live) not in (OrderedDict, Counter) and isinstance(live, type(made)) and _kind_of(live) == kind:
        return made_like(live, made)
    if isinstance(made, list):
        return made
    if kind.startswith("defaultdict:"):
        text = kind.partition(":")[2]
        if isinstance(live, defaultdict) and text not in _FACTORIES:
            return defaultdict(live.default_factory, made)
        return defaultdict(_FACTORIES.get(text), made)
    if kind == "OrderedDict":
        ordered = OrderedDict(made)
        return _with_versions(ordered, node.modules) if node is not None and node.modules else ordered
    if kind == "Counter":
        return Counter(made)
    return made  # a class of the program's own, which has none of it here: its members as a dict


def made_like(live: Any, members: Any) -> Any:
    """Return a dict or list of the class of another one, with its attributes: a constructor may want more, or count."""
    base: Any = next(each for each in (OrderedDict, defaultdict, dict, list) if isinstance(live, each))
    made = base.__new__(type(live))
    if hasattr(live, "__dict__"):
        vars(made).update(vars(live))
    if isinstance(live, defaultdict):
        made.default_factory = live.default_factory
    base.extend(made, members) if base is list else base.update(made, members)
    return made
