"""Select the tensors and objects to convert, their new names and their dtypes."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

import torch

from ckpt.conversion.source import TensorFacts, TensorSource
from ckpt.errors import ConfigurationError
from ckpt.format.fqns import Path, has_model, part_of


@dataclass(frozen=True)
class Rules:
    """The caller's rules for a selection.

    Attributes:
        include, exclude: globs over the source's names; without `include`, all are.
        rename: regular expressions and replacements for their matches, one after the other.
        weights_only: leave out objects, and tensors whose names look like optimizer state.
        dtype: of all weights that are signed floating-point numbers. (Others are scales, or
            packed.)
    """

    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    rename: Sequence[tuple[str, str]] = ()
    weights_only: bool = False
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class ChosenTensor:
    """A tensor to convert: its new name, dtype and path, and its name in the source."""

    name: str
    source: str
    facts: TensorFacts
    path: Path

    @property
    def nbytes(self) -> int:
        return self.facts.dtype.itemsize * self.elements

    @property
    def elements(self) -> int:
        return math.prod(self.facts.shape)


@dataclass(frozen=True)
class ChosenObject:
    """A value to convert that is not a tensor."""

    name: str
    source: str
    path: Path


@dataclass
class Selection:
    """The tensors and objects to convert, in the order of the source.

    Attributes:
        dropped: names that a caller might miss, and the reason for each.
        renamed: some name is not that of the source.
    """

    tensors: list[ChosenTensor] = field(default_factory=list)
    objects: list[ChosenObject] = field(default_factory=list)
    dropped: dict[str, str] = field(default_factory=dict)
    renamed: bool = False

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def paths(self) -> dict[str, Path]:
        """Map new names to paths in the nested state."""
        return {chosen.name: chosen.path for chosen in self._everything}

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

    @property
    def sources(self) -> set[str]:
        """Collect the source's names of everything selected."""
        return {chosen.source for chosen in self._everything}

    @property
    def _everything(self) -> list[ChosenTensor | ChosenObject]:
        return [*self.tensors, *self.objects]


def select(source: TensorSource, rules: Rules) -> Selection:
    """Apply the rules.

    Raises:
        ConfigurationError: nothing is left, two names become one, a pattern is not valid, or
            `dtype` is not one for weights.
    """
    if rules.dtype is not None and not _is_weight_dtype(rules.dtype):
        raise _no_dtype(str(rules.dtype))
    renaming = _Renaming(rules.rename)
    with_model = has_model(source.paths.values())
    selection = Selection()
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
        new = renaming.apply(name)
        selection.tensors.append(ChosenTensor(new, name, facts, _path(source, name, new)))
    for name in source.objects:
        if _is_wanted(name, rules) and not rules.weights_only:
            new = renaming.apply(name)
            selection.objects.append(ChosenObject(new, name, _path(source, name, new)))
    if not selection.tensors and not selection.objects:
        raise ConfigurationError(
            "no tensor or object is left to convert; check --include, --exclude and --weights-only"
        )
    selection.renamed = renaming.changed
    return selection


def _is_wanted(name: str, rules: Rules) -> bool:
    if rules.include and not any(fnmatchcase(name, glob) for glob in rules.include):
        return False
    return not any(fnmatchcase(name, glob) for glob in rules.exclude)


class _Renaming:
    def __init__(self, rules: Sequence[tuple[str, str]]) -> None:
        self._rules = []
        for pattern, new in rules:
            try:
                self._rules.append((re.compile(pattern), new))
            except re.error as error:
                raise ConfigurationError(
                    f"--rename: {pattern!r} is not a valid regular expression: {error}"
                ) from None
        self._taken: dict[str, str] = {}
        self.changed = False

    def apply(self, name: str) -> str:
        new = name
        for pattern, replacement in self._rules:
            try:
                new = pattern.sub(replacement, new)
            except (re.error, IndexError) as error:
                raise ConfigurationError(
                    f"--rename: {replacement!r} does not fit {pattern.pattern!r}: {error}"
                ) from None
        if not new:
            raise ConfigurationError(f"--rename leaves no name for {name[:200]!r}")
        try:
            new.encode()
        except UnicodeEncodeError:
            raise ConfigurationError(
                f"{new[:200]!r} cannot be written as UTF-8; --exclude or --rename it"
            ) from None
        if self._taken.setdefault(new, name) != name:
            raise ConfigurationError(
                f"{self._taken[new][:200]!r} and {name[:200]!r} would both be named {new[:200]!r}; change --rename"
            )
        self.changed |= new != name
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


def parse_dtype(text: str) -> torch.dtype:
    """Parse a floating-point dtype by torch's name or a short one. Raises ConfigurationError."""
    name = text.removeprefix("torch.").lower()
    name = {"bf16": "bfloat16", "fp16": "float16", "f16": "float16", "half": "float16", "fp32": "float32",
            "f32": "float32", "float": "float32", "fp64": "float64", "f64": "float64", "double": "float64"}.get(name, name)  # fmt: skip
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not _is_weight_dtype(dtype):
        raise _no_dtype(text)
    return dtype


def _is_weight_dtype(dtype: torch.dtype) -> bool:
    """Tell whether elements are signed values, not scales or packed halves."""
    return dtype.is_floating_point and dtype not in (torch.float8_e8m0fnu, torch.float4_e2m1fn_x2)


def _no_dtype(text: str) -> ConfigurationError:
    return ConfigurationError(
        f"{text!r} is not a floating-point dtype for weights; use bfloat16, float16, float32 or another of torch's"
    )
