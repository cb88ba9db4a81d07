"""What of a source is converted, under which names, and as which dtypes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

import torch

from ckpt.conversion.source import Source, TensorFacts
from ckpt.errors import ConfigurationError
from ckpt.format.fqns import Path, has_model, part_of

__all__ = ["Choice", "ChosenObject", "ChosenTensor", "Rules", "choose", "parse_dtype"]


@dataclass(frozen=True)
class Rules:
    """What the caller wants.

    Attributes:
        include, exclude: globs over the source's names; without `include`, all are.
        rename: regular expressions and what their matches are replaced by, one after the other.
        weights_only: leave out what looks like optimizer state, or is no tensor.
        dtype: of all weights that are signed floating-point numbers. (Others are scales, or packed.)
    """

    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    rename: Sequence[tuple[str, str]] = ()
    weights_only: bool = False
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class ChosenTensor:
    """A tensor: its new name, dtype and place in the nested state, and its name in the source."""

    name: str
    source: str
    facts: TensorFacts
    path: Path

    @property
    def nbytes(self) -> int:
        return self.facts.dtype.itemsize * self.elements

    @property
    def elements(self) -> int:
        count = 1
        for size in self.facts.shape:
            count *= size
        return count


@dataclass(frozen=True)
class ChosenObject:
    """A value that is no tensor."""

    name: str
    source: str
    path: Path


@dataclass
class Choice:
    """What is converted, in the order of the source; `dropped` says of the rest that would surprise why it is not."""

    tensors: list[ChosenTensor] = field(default_factory=list)
    objects: list[ChosenObject] = field(default_factory=list)
    dropped: dict[str, str] = field(default_factory=dict)
    renamed: bool = False

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def paths(self) -> dict[str, Path]:
        """Where each is in the nested state, by its new name."""
        everything: list[ChosenTensor | ChosenObject] = [*self.tensors, *self.objects]
        return {found.name: found.path for found in everything}

    def check_paths(self) -> None:
        """Raise ConfigurationError where a value would be in the place of a dict, or of another value."""
        paths = self.paths
        names = {path: name for name, path in paths.items()}
        for name, path in paths.items():
            above = next((path[:n] for n in range(1, len(path)) if path[:n] in names), None)
            if above is not None or names[path] != name:
                other = names[path if above is None else above]
                raise ConfigurationError(
                    f"{other[:200]!r} and {name[:200]!r} cannot both be in one nested state; --rename or --exclude one"
                )

    @property
    def sources(self) -> set[str]:
        """All their names in the source."""
        return {tensor.source for tensor in self.tensors} | {found.source for found in self.objects}


def choose(source: Source, rules: Rules) -> Choice:
    """Apply the rules.

    Raises:
        ConfigurationError: nothing is left, two names become one, a rule is no valid pattern, or a dtype not one of weights.
    """
    if rules.dtype is not None and not _is_weight_dtype(rules.dtype):
        raise _no_dtype(str(rules.dtype))
    renaming = _Renaming(rules.rename)
    with_model = has_model(source.paths.values())
    found = Choice()
    for name, facts in source.tensors.items():
        part = part_of(name, is_tensor=True, has_model=with_model)
        if not _is_wanted(name, rules):
            continue
        if rules.weights_only and part != "weights":
            if part == "other":
                found.dropped[name] = "by its name no weight, but beside the model"
            continue
        if rules.dtype is not None and part == "weights" and _is_weight_dtype(facts.dtype):
            facts = replace(facts, dtype=rules.dtype)
        new = renaming.apply(name)
        found.tensors.append(ChosenTensor(new, name, facts, _path(source, name, new)))
    for name in source.objects:
        if _is_wanted(name, rules) and not rules.weights_only:
            new = renaming.apply(name)
            found.objects.append(ChosenObject(new, name, _path(source, name, new)))
    if not found.tensors and not found.objects:
        raise ConfigurationError("nothing is left to convert; see --include, --exclude and --weights-only")
    found.renamed = renaming.changed
    return found


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
                raise ConfigurationError(f"{pattern!r} is no regular expression: {error}") from None
        self._taken: dict[str, str] = {}
        self.changed = False

    def apply(self, name: str) -> str:
        new = name
        for pattern, replacement in self._rules:
            try:
                new = pattern.sub(replacement, new)
            except (re.error, IndexError) as error:
                raise ConfigurationError(
                    f"{replacement!r} does not fit {pattern.pattern!r}: {error}"
                ) from None
        if not new:
            raise ConfigurationError(f"{name[:200]!r} would have no name left")
        try:
            new.encode()
        except UnicodeEncodeError:
            raise ConfigurationError(
                f"{new[:200]!r} cannot be written as UTF-8; --exclude or --rename it"
            ) from None
        if self._taken.setdefault(new, name) != name:
            raise ConfigurationError(
                f"{self._taken[new][:200]!r} and {name[:200]!r} would both be {new[:200]!r}"
            )
        self.changed |= new != name
        return new


def _path(source: Source, name: str, new: str) -> Path:
    """Where the value goes in a nested state: into the same dicts as far as the new name begins with theirs."""
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
    """A floating-point dtype by torch's name, or a usual short one.

    Raises:
        ConfigurationError: there is none of that name.
    """
    name = text.removeprefix("torch.").lower()
    name = {"bf16": "bfloat16", "fp16": "float16", "f16": "float16", "half": "float16", "fp32": "float32",
            "f32": "float32", "float": "float32", "fp64": "float64", "f64": "float64", "double": "float64"}.get(name, name)  # fmt: skip
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or not _is_weight_dtype(found):
        raise _no_dtype(text)
    return found


def _is_weight_dtype(dtype: torch.dtype) -> bool:
    """Whether it has values of both signs, one in each element: not the scales and packed halves of quantized weights."""
    return dtype.is_floating_point and dtype not in (torch.float8_e8m0fnu, torch.float4_e2m1fn_x2)


def _no_dtype(text: str) -> ConfigurationError:
    return ConfigurationError(
        f"{text!r} is no floating-point dtype for weights; write bfloat16, float16, float32 or another of torch's"
    )
