"""Name tensors that do not change: by patterns, or as a model says it."""

from __future__ import annotations

import re
from collections.abc import Collection
from fnmatch import translate
from glob import escape
from typing import TYPE_CHECKING

from ckpt.errors import ConfigurationError

if TYPE_CHECKING:
    import torch

_WRAPPERS = (
    "_orig_mod",
    "_fsdp_wrapped_module",
    "_checkpoint_wrapped_module",
    "_forward_module",
    "_original_module",
)
"""Segments that torch.compile, FSDP1, activation checkpointing and Lightning Fabric put into names, and saves take out."""
_WILDCARD = re.compile(r"[*?\[]")


class Patterns:
    """Names, and patterns of names with `*`, `?` and `[...]`."""

    def __init__(self, patterns: Collection[str] = ()) -> None:
        """Raises ConfigurationError for anything but texts."""
        if isinstance(patterns, str) or not isinstance(patterns, Collection):
            raise ConfigurationError(f"frozen must be a list of names or patterns, not {patterns!r:.100}")
        if not all(isinstance(pattern, str) for pattern in patterns):
            raise ConfigurationError("frozen must be a list of names or patterns: texts")
        self._names = frozenset(patterns)
        wild = [translate(pattern) for pattern in sorted(self._names) if _WILDCARD.search(pattern)]
        self._wild = re.compile("|".join(wild)) if wild else None

    @property
    def names(self) -> frozenset[str]:
        """The names and patterns as they were given."""
        return self._names

    def __bool__(self) -> bool:
        return bool(self._names)

    def match(self, fqn: str) -> bool:
        """Tell whether a name is one of these, or fits one of them."""
        return fqn in self._names or (self._wild is not None and self._wild.match(fqn) is not None)


def frozen(model: torch.nn.Module, prefix: str = "") -> list[str]:
    """Name the parameters that do not require a gradient, for `frozen=` of a save.

    `prefix` is that under which the model stands in the state dict: `"model."` for `{"model": ...}`.
    Names are those of `get_model_state_dict`, and those of `model.state_dict()` where they differ; but none
    that is also one of a parameter that learns. They match nothing but themselves.
    """
    names, learning = [], set[str]()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            learning |= {name, _plain_name(name)}
        else:
            names.append(name)
    both = dict.fromkeys([*map(_plain_name, names), *names])
    return [escape(prefix + name) for name in both if name not in learning]


def _plain_name(name: str) -> str:
    segments = [segment for segment in name.split(".") if segment not in _WRAPPERS]
    return ".".join(segments).removeprefix("module.")
