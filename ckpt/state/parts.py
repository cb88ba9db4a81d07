"""Save and load parts that are neither models nor optimizers, with the structure that they have in the checkpoint."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ckpt.errors import CheckpointError, LoadFailed
from ckpt.format.fqns import Path, part_of
from ckpt.geometry import global_shape
from ckpt.state.stored import StoredPart, StoredValue
from ckpt.state.structure import (
    Structure,
    build,
    children,
    empties,
    is_flattened,
    leaves,
    name_of,
    structure_of,
)
from ckpt.state.targets import Targets, shortened

_logger = logging.getLogger(__name__)

_LOADER = re.compile(r"(loader|sampler|dataset|data_iter)", re.IGNORECASE)
VALUES_OF_MODEL = "model's values"
VALUES_OF_OPTIMIZER = "optimizer's values"
"""Kinds of plain values that are named like a model, or an optimizer: what they are in detail, names tell."""


class PartState:
    """A part with `state_dict` and `load_state_dict`, such as a scheduler.

    What was saved is what it gets back: the checkpoint's containers, keys and lengths, whatever a fresh object has.
    """

    def __init__(self, name: str, part: Any) -> None:
        self._name, self._part = name, part
        self.kind = "loader" if _LOADER.search(name) or _LOADER.search(type(part).__name__) else "part"
        self._values = _PartValues(name)

    def state_dict(self) -> Any:
        return self._part.state_dict()

    def structures(self, value: Any, name: str) -> dict[Path, Structure]:
        structure = structure_of(value, name, with_tensors=True)
        return {(): structure} if structure else {}

    def plan(self, part: StoredPart, targets: Targets) -> None:
        live = self._part.state_dict()
        self._values = _PartValues(self._name)
        self._values.plan(part, live, targets)

    def take(self, values: Mapping[str, Any]) -> None:
        if self._values.is_asked:
            loaded = self._values.built(values)
            self._values.forget()
            self.load_state_dict(loaded)

    def live(self) -> dict[str, Any]:
        return self._values.live(self._part.state_dict())

    def load_state_dict(self, state: Any) -> None:
        try:
            self._part.load_state_dict(state)
        except CheckpointError:
            raise
        except Exception as error:
            raise LoadFailed(
                f"{self._name!r} does not take back the state that was saved: {type(error).__name__}: {error}"
            ) from error


class _PartValues:
    """The values of a part: tensors that the program has are filled in place, all others are made."""

    def __init__(self, name: str) -> None:
        self._name, self._live = name, None
        self._asked: dict[Path, StoredValue] = {}
        self._structure: Structure = {}

    def plan(self, part: StoredPart, live: Any, targets: Targets, below: Path = ()) -> None:
        self._live, self._structure = live, part.structure(below)
        known = dict(leaves(live))
        stored = part.below(below)
        if not stored and not self._structure:
            targets.missing += [name_of((self._name, *path)) for path in known]
            if not known:
                targets.notes.append(f"the checkpoint has nothing of {self._name!r}")
        for path, value in stored.items():
            self._asked[path] = value
            if value.shape is None:
                targets.object(value)
                continue
            own = known.get(path)
            flag = _flag(self._structure, path)
            like = like_of(path, value, own, flag, targets)
            targets.as_stored(value, like=like, live=own, device=_device(own, flag))
        self.built(dict.fromkeys(value.name for value in self._asked.values()))  # before anything is loaded
        if stored:
            self._note_differences(known, targets)

    def _note_differences(self, known: Mapping[Path, Any], targets: Targets) -> None:
        for some, others, text in (
            (known, self._asked, "the program has, and the checkpoint lacks, "),
            (self._asked, known, "the checkpoint has, and the program lacked, "),
        ):
            if only := [name_of((self._name, *path)) for path in some if path not in others]:
                targets.notes.append(text + shortened(only))

    def live(self, value: Any) -> dict[str, Any]:
        """Return the members of a value by their stored names."""
        return _live(value, self._asked, self._name)

    @property
    def is_asked(self) -> bool:
        return bool(self._asked or self._structure)

    def built(self, values: Mapping[str, Any]) -> Any:
        found = {path: values[value.name] for path, value in self._asked.items()}
        return build(found, self._structure, self._live, self._name)

    def forget(self) -> None:
        """Do not keep what the program had."""
        self._live = None


def _live(value: Any, asked: Mapping[Path, StoredValue], name: str) -> dict[str, Any]:
    """Return the members of a value by their stored names, and those that are not stored by the names of a save."""
    own = dict(leaves(value))
    found = {stored.name: own.pop(path, None) for path, stored in asked.items()}
    return found | {name_of((name, *path)): member for path, member in own.items()}


def _kind_of_values(name: str) -> str:
    """Guess by its name what a value of the caller's own is: what may differ between ranks depends on it."""
    if _LOADER.search(name):
        return "loader"
    of_part = part_of(f"{name}.", is_tensor=True, has_model=True)
    return {"weights": VALUES_OF_MODEL, "optimizer": VALUES_OF_OPTIMIZER}.get(of_part, "value")


def _flag(structure: Structure, path: Path) -> str | None:
    """Return where a stored tensor was, if that is noted."""
    node = structure.get(path[:-1])
    return None if node is None else node.tensors.get(str(path[-1]), node.tensors.get("*"))


def like_of(path: Path, value: StoredValue, live: Any, flag: str | None, targets: Targets) -> Any:
    """Return the tensor whose sharding a value has: the program's own, or the parameter of the same name."""
    if isinstance(live, torch.Tensor) and global_shape(live) == value.shape:
        return live
    if flag != "dtensor":
        return None
    parts = name_of(path).split(".")
    for begin in range(len(parts)):
        like = targets.likes.get(".".join(parts[begin:]))
        if isinstance(like, DTensor) and tuple(like.shape) == value.shape:
            return like
    for like in targets.likes.values():
        if isinstance(like, DTensor) and tuple(like.shape) == value.shape:
            return like
    return None


def _device(live: Any, flag: str | None) -> torch.device | None:
    if isinstance(live, torch.Tensor) and not live.is_meta:
        return live.device
    if flag in (None, "dtensor", "cpu"):
        return None
    kind = torch.accelerator.current_accelerator(check_available=True)
    return (
        None
        if kind is None or kind.type != flag
        else torch.device(kind.type, torch.accelerator.current_device_index())
    )


class PlainValue:
    """A value of the caller's own state dict: a tensor, a number, a dict of them. Its containers are filled in place."""

    def __init__(self, name: str, value: Any, holder: dict[str, Any]) -> None:
        self._name, self._live, self._holder = name, value, holder
        self.kind = _kind_of_values(name)
        self._asked: dict[Path, StoredValue] = {}
        self._kept: dict[Path, Any] = {}
        self._structure: Structure = {}

    def state_dict(self) -> Any:
        return self._live

    def structures(self, value: Any, name: str) -> dict[Path, Structure]:
        structure = structure_of(value, name) if is_flattened(value) else {}
        return {(): structure} if structure else {}

    def plan(self, part: StoredPart, targets: Targets) -> None:
        known = dict(leaves(self._live))
        self._asked, self._structure = {}, part.structure()
        strict = targets.options.strict
        named = {name_of(path): path for path in known}
        for stored, value in part.values.items():
            path = stored if stored in known else named.get(name_of(stored), stored)
            own = known.get(path)
            if path not in known and not self._has_place(path, strict):
                continue  # left over
            self._asked[path] = value
            if isinstance(own, torch.Tensor) and value.shape is not None:
                targets.in_place(value, own, may_replace=True)
            elif value.shape is None:
                if isinstance(own, torch.Tensor) and not self._has_place(path, strict):
                    targets.faults.append(
                        f"{value.name!r} is an object in the checkpoint, and a tensor in the program"
                    )
                targets.object(value)
            else:
                flag = _flag(self._structure, path)
                like = like_of(path, value, own, flag, targets)
                targets.as_stored(value, like=like, device=_device(own, flag))
        if not part.values and not self._structure and not known and is_flattened(self._live):
            return  # a container that holds nothing: as before, on both sides
        kept = {
            path: own for path, own in known.items() if path not in self._asked and _is_lacking(path, part)
        }
        for path, own in kept.items():
            if not (isinstance(own, torch.Tensor) and own.numel() == 0 and not part.values):
                targets.lack(name_of((self._name, *path)), own)
        # Also dicts that hold nothing: older checkpoints have none, so these are not lacking.
        self._kept = kept | {path: own for path, own in empties(self._live) if _is_lacking(path, part)}
        self._built(dict.fromkeys(self._asked))  # before anything is loaded

    def _has_place(self, path: Path, strict: bool | None) -> bool:
        """Tell whether a value that the program lacks may be added to it."""
        return strict is None and not self._is_strict_at(path[:-1], strict)

    def _is_strict_at(self, path: Path, strict: bool | None) -> bool:
        """Tell whether a container's keys are asked for as they are: one that holds tensors, by the caller's choice."""
        if strict is not None:
            return True
        value = self._live
        for part in path:
            if not is_flattened(value):
                return False
            value = next((item for name, item in children(value) if name == part), None)
        return isinstance(value, Mapping) and any(isinstance(item, torch.Tensor) for item in value.values())

    def live(self) -> dict[str, Any]:
        return _live(self._holder.get(self._name, self._live), self._asked, self._name)

    def load_state_dict(self, state: Any) -> None:
        self._holder[self._name] = state

    def take(self, values: Mapping[str, Any]) -> None:
        found = {path: values[value.name] for path, value in self._asked.items()}
        if not found and not self._structure:
            return
        self._live = self._holder[self._name] = filled(self._live, self._built(found))

    def _built(self, found: Mapping[Path, Any]) -> Any:
        """Return the value with what was loaded, and with what only the program has."""
        return build({**found, **self._kept}, self._structure, self._live, self._name)


def _is_lacking(path: Path, part: StoredPart) -> bool:
    """Tell whether a dict in the checkpoint lacks a key; a value that was a container, or a shorter list, is as it was saved."""
    for at, key in enumerate(path):
        if path[:at] in part.values:
            return False
        if not part.has_below(path[: at + 1]):
            return isinstance(key, str)
    return not part.has_below(path)


def filled(live: Any, loaded: Any) -> Any:
    """Put what was loaded into the containers that the program has; return the value that stands for it then."""
    if isinstance(live, dict) and isinstance(loaded, Mapping) and type(live) in (dict, type(loaded)):
        members = {key: filled(live.get(key), value) for key, value in loaded.items()}
        live.clear()
        live.update(members)
        return live
    if isinstance(live, list) and type(live) is type(loaded) and is_flattened(live):
        own = [*live, *[None] * max(0, len(loaded) - len(live))]
        live[:] = [filled(before, value) for before, value in zip(own, loaded, strict=False)]
        return live
    return loaded


def text_of_wrong_object(argument: str, kind: str, value: object) -> str:
    """Describe the error of a value that is neither an object of `kind` nor a list of them, such as its state dict."""
    text = f"{argument}= takes a {kind}, or a list of them, not {type(value).__name__}"
    if isinstance(value, Mapping):
        are_objects = bool(value) and all(hasattr(each, "state_dict") for each in value.values())
        return f"{text}: give {'a list of its values' if are_objects else f'the {argument} itself, not its state_dict()'}"
    return f"{text}: give the one that it wraps" if hasattr(value, "state_dict") else text
