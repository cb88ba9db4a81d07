"""Save and load parts that are neither models nor optimizers, with the structure that they have in the checkpoint."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ckpt.errors import CheckpointError, LoadFailed
from ckpt.format.fqns import Path
from ckpt.state.stored import StoredPart, StoredValue
from ckpt.state.structure import Structure, build, children, is_flattened, leaves, name_of, structure_of
from ckpt.state.targets import Targets

_logger = logging.getLogger(__name__)

_LOADER = re.compile(r"(loader|sampler|dataset|data_iter)", re.IGNORECASE)


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
        structure = structure_of(value, name)
        return {(): structure} if structure else {}

    def plan(self, part: StoredPart, targets: Targets) -> None:
        live = self._part.state_dict()
        self._values = _PartValues(self._name)
        self._values.plan(part, live, targets)

    def take(self, values: Mapping[str, Any]) -> None:
        if self._values.is_asked:
            self.load_state_dict(self._values.built(values))

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
            flag = (
                self._structure[path[:-1]].tensors.get(str(path[-1]))
                if path[:-1] in self._structure
                else None
            )
            like = like_of(path, value, own, flag, targets)
            targets.as_stored(value, like=like, live=own, device=_device(own, flag))
        changed = [name_of((self._name, *path)) for path in known if path not in stored]
        if stored and changed:
            targets.notes.append(f"the program has, and the checkpoint lacks, {', '.join(changed[:5])}")

    @property
    def is_asked(self) -> bool:
        return bool(self._asked or self._structure)

    def built(self, values: Mapping[str, Any]) -> Any:
        found = {path: values[value.name] for path, value in self._asked.items()}
        return build(found, self._structure, self._live, self._name)


def like_of(path: Path, value: StoredValue, live: Any, flag: str | None, targets: Targets) -> Any:
    """Return the tensor whose sharding a value has: the program's own, or the parameter of the same name."""
    if isinstance(live, torch.Tensor) and tuple(live.size()) == value.shape:
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
    if flag in (None, "dtensor", "cpu") or not torch.accelerator.is_available():
        return None
    kind = torch.accelerator.current_accelerator()
    return (
        None
        if kind is None or kind.type != flag
        else torch.device(kind.type, torch.accelerator.current_device_index())
    )


class PlainValue:
    """A value of the caller's own state dict: a tensor, a number, a dict of them. Its containers are filled in place."""

    kind = "value"

    def __init__(self, name: str, value: Any, holder: dict[str, Any]) -> None:
        self._name, self._live, self._holder = name, value, holder
        self._asked: dict[Path, StoredValue] = {}
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
        for path, value in part.values.items():
            own = known.get(path)
            if path not in known and not self._has_place(path, strict):
                continue  # left over
            self._asked[path] = value
            if isinstance(own, torch.Tensor) and value.shape is not None:
                targets.in_place(value, own)
            elif value.shape is None:
                if isinstance(own, torch.Tensor) and not self._has_place(path, strict):
                    targets.faults.append(
                        f"{value.name!r} is an object in the checkpoint, and a tensor in the program"
                    )
                targets.object(value)
            else:
                flag = (
                    self._structure[path[:-1]].tensors.get(str(path[-1]))
                    if path[:-1] in self._structure
                    else None
                )
                like = like_of(path, value, own, flag, targets)
                targets.as_stored(value, like=like, device=_device(own, flag))
        if not part.values and not self._structure and not known and is_flattened(self._live):
            return  # a container that holds nothing: as before, on both sides
        is_lost = not part.values and not self._structure
        for path, own in known.items():
            if path in self._asked or not (is_lost or self._is_strict_at(path[:-1], strict)):
                continue
            if not (isinstance(own, torch.Tensor) and own.numel() == 0 and not part.values):
                targets.missing.append(name_of((self._name, *path)))

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

    def load_state_dict(self, state: Any) -> None:
        self._holder[self._name] = state

    def take(self, values: Mapping[str, Any]) -> None:
        found = {path: values[value.name] for path, value in self._asked.items()}
        if not found and not self._structure:
            return
        if self._asked.keys() != dict(leaves(self._live)).keys():
            for path, own in leaves(self._live):  # what only the program has stays
                if path not in found and self._is_strict_at(path[:-1], None):
                    found[path] = own
        self._holder[self._name] = filled(self._live, build(found, self._structure, self._live, self._name))


def filled(live: Any, loaded: Any) -> Any:
    """Put what was loaded into the containers that the program has; return the value that stands for it then."""
    if isinstance(live, dict) and isinstance(loaded, Mapping) and type(live) in (dict, type(loaded)):
        members = {key: filled(live.get(key), value) for key, value in loaded.items()}
        live.clear()
        live.update(members)
        return live
    if type(live) is list and type(loaded) is list and is_flattened(live):
        own = [*live, *[None] * max(0, len(loaded) - len(live))]
        live[:] = [filled(before, value) for before, value in zip(own, loaded, strict=False)]
        return live
    return loaded
