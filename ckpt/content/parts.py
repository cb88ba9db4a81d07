"""Name the part of the state that a tensor is of, by the first key of its path: `model`, `optimizer`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

MAX_PARTS = 64
"""A state with more of them, such as one with a dict for each parameter, is seen as one part without a name."""

OPTIMIZER_PREFIX = "opt"
"""How the names of optimizers' parts begin. Their tensors may become zero one by one: averages of gradients that are zero."""

MODELS = ("model", "module", "state_dict")


def parts_of(fqns: Sequence[str], paths: Mapping[str, Sequence[object]] | None) -> list[str]:
    """Name the part of the state that each entry is of: the first key of its path; empty if there is no other."""
    known = paths or {}
    return [str(path[0]) if len(path := known.get(fqn, ())) > 1 else "" for fqn in fqns]


def is_moment(part: str, name: str) -> bool:
    """Return whether a tensor is an optimizer's state, and no option of its groups, such as a bound."""
    return part.startswith(OPTIMIZER_PREFIX) and ".param_groups." not in name


def is_trained(part: str) -> bool:
    """Tell whether a part is of weights or of an optimizer, or may be; elsewhere a single number may be infinite: the best loss."""
    return not part or part in MODELS or part.startswith(OPTIMIZER_PREFIX)
