"""Select the tensors and objects to convert, their new names and their dtypes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

import torch

from ckpt.conversion.source import TensorFacts, TensorSource
from ckpt.errors import ConfigurationError
from ckpt.format.fqns import STRUCTURE, Path, has_model, part_of

_SHORT_DTYPES = {
    "bf16": "bfloat16", "fp16": "float16", "f16": "float16", "fp32": "float32", "f32": "float32",
    "fp64": "float64", "f64": "float64",
}  # fmt: skip


@dataclass(frozen=True)
class Rules:
    """The caller's rules for a selection, as `ckpt.convert` describes them."""

    include: Sequence[str]
    exclude: Sequence[str]
    rename: Sequence[tuple[str, str]]
    weights_only: bool
    dtype: torch.dtype | None


@dataclass(frozen=True)
class Chosen:
    """A value to convert: its new name, its name in the source, and its new path."""

    name: str
    source: str
    path: Path


@dataclass(frozen=True)
class ChosenTensor(Chosen):
    """A tensor to convert, with its new dtype."""

    facts: TensorFacts

    @property
    def nbytes(self) -> int:
        return self.facts.dtype.itemsize * self.elements

    @property
    def elements(self) -> int:
        return math.prod(self.facts.shape)


@dataclass
class Selection:
    """The tensors and other objects to convert, in the order of the source.

    Attributes:
        dropped: names that a caller might miss, and the reason for each.
        structures: objects that say what flattening lost of parts that are chosen whole.
    """

    rules: Rules
    tensors: list[ChosenTensor] = field(default_factory=list)
    objects: list[Chosen] = field(default_factory=list)
    dropped: dict[str, str] = field(default_factory=dict)
    structures: list[Chosen] = field(default_factory=list)

    @property
    def everything(self) -> list[Chosen]:
        return [*self.tensors, *self.objects]

    @property
    def is_renamed(self) -> bool:
        return any(chosen.name != chosen.source for chosen in self.everything)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def paths(self) -> dict[str, Path]:
        """Map new names to paths in the nested state."""
        return {chosen.name: chosen.path for chosen in self.everything}

    def check_paths(self) -> None:
        """Raise ConfigurationError if two values cannot both be in one nested state."""
        paths = self.paths
        names = {path: name for name, path in paths.items()}
        for name, path in paths.items():
            above = next((path[:n] for n in range(1, len(path)) if path[:n] in names), None)
            if above is not None or names[path] != name:
                other = names[path if above is None else above]
                raise ConfigurationError(
                    f"{other[:200]!r} and {name[:200]!r} cannot both be in one nested state; "
                    "--rename or --exclude one of them"
                )


def select(source: TensorSource, rules: Rules) -> Selection:
    """Apply the rules. Raises ConfigurationError if they are not valid, or leave nothing."""
    selection = Selection(rules)
    tensors: dict[str, TensorFacts] = {}
    with_model = has_model(source.paths.values())
    for name, facts in source.tensors.items():
        part = part_of(name, is_tensor=True, has_model=with_model)
        if not _is_wanted(name, rules):
            continue
        if rules.weights_only and part != "weights":
            if part == "other":
                selection.dropped[name] = "--weights-only: the name does not look like a model weight"
            continue
        if rules.dtype is not None and part == "weights" and _is_weight_dtype(facts.dtype):
            facts = replace(facts, dtype=rules.dtype)
        tensors[name] = facts
    noted = {name for name in source.objects if source.paths.get(name, ("",))[0] == STRUCTURE}
    objects = [
        name
        for name in source.objects
        if name not in noted and _is_wanted(name, rules) and not rules.weights_only
    ]
    if rules.weights_only:
        unmade = {name: kind for name, kind in source.unmade.items() if _is_wanted(name, rules)}
        selection.dropped |= {
            name: f"--weights-only: an object of the class {kind}" for name, kind in unmade.items()
        }
    new_names = _new_names([*tensors, *objects], rules.rename)
    if not new_names:
        raise ConfigurationError(
            "no tensor or object is left to convert; check --include, --exclude and --weights-only"
        )
    paths = {name: _path(source, name, new) for name, new in new_names.items()}
    selection.tensors = [ChosenTensor(new_names[n], n, paths[n], facts) for n, facts in tensors.items()]
    selection.objects = [Chosen(new_names[n], n, paths[n]) for n in objects]
    if noted and not selection.is_renamed:
        values = {*source.tensors, *source.objects} - noted
        left_out = {_top(source, name) for name in values if name not in new_names}
        whole = [name for name in sorted(noted) if source.paths[name][1] not in left_out]
        selection.structures = [Chosen(name, name, source.paths[name]) for name in whole]
    return selection


def _top(source: TensorSource, name: str) -> str | int:
    return source.paths.get(name, (name,))[0]


def globs_of(argument: str, given: Sequence[str]) -> tuple[str, ...]:
    """Return globs for keeping. Raises ConfigurationError for a str, whose letters would be globs."""
    if isinstance(given, str):
        raise ConfigurationError(f"{argument} must be a list of globs, not a single str")
    return tuple(given)


def _is_wanted(name: str, rules: Rules) -> bool:
    if rules.include and not any(fnmatchcase(name, glob) for glob in rules.include):
        return False
    return not any(fnmatchcase(name, glob) for glob in rules.exclude)


def _new_names(names: Iterable[str], rules: Sequence[tuple[str, str]]) -> dict[str, str]:
    for pattern, _ in rules:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ConfigurationError(
                f"--rename: {pattern!r} is not a valid regular expression: {error}"
            ) from None
    taken: dict[str, str] = {}
    for name in names:
        new = _renamed(name, rules)
        if taken.setdefault(new, name) != name:
            raise ConfigurationError(
                f"{taken[new][:200]!r} and {name[:200]!r} would both be named {new[:200]!r}; change --rename"
            )
    return {name: new for new, name in taken.items()}


def _renamed(name: str, rules: Sequence[tuple[str, str]]) -> str:
    new = name
    for pattern, replacement in rules:
        try:
            new = re.sub(pattern, replacement, new)
        except (re.error, IndexError) as error:
            raise ConfigurationError(f"--rename: {replacement!r} does not fit {pattern!r}: {error}") from None
    if not new:
        raise ConfigurationError(f"--rename leaves no name for {name[:200]!r}")
    try:
        new.encode()
    except UnicodeEncodeError:
        raise ConfigurationError(
            f"{new[:200]!r} cannot be written as UTF-8; --exclude or --rename it"
        ) from None
    return new


def _path(source: TensorSource, name: str, new: str) -> Path:
    """Make the new path: through the same dicts as far as the new name begins with theirs."""
    path = source.paths.get(name, (name,))
    if new == name:
        return path
    kept: list[str | int] = []
    rest = new
    for part in path[:-1]:
        if not isinstance(part, str) or not rest.startswith(f"{part}.") or len(rest) == len(part) + 1:
            break
        kept.append(part)
        rest = rest[len(part) + 1 :]
    return (*kept, rest)


def weight_dtype(wanted: str | torch.dtype) -> torch.dtype:
    """Return a dtype for weights, by torch's name or a short one. Raises ConfigurationError."""
    name = str(wanted).removeprefix("torch.").lower()
    dtype = getattr(torch, _SHORT_DTYPES.get(name, name), None)
    if isinstance(dtype, torch.dtype) and _is_weight_dtype(dtype):
        return dtype
    raise ConfigurationError(
        f"{str(wanted)!r} is not a floating-point dtype for weights; "
        "use bfloat16, float16, float32 or another of torch's"
    )


def _is_weight_dtype(dtype: torch.dtype) -> bool:
    """Tell whether elements are signed values, not scales or packed halves."""
    return dtype.is_floating_point and dtype not in (torch.float8_e8m0fnu, torch.float4_e2m1fn_x2)
