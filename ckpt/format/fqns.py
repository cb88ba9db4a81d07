"""Tell weights, optimizer state and the rest apart by their FQNs, and find names in nested state."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

Path = tuple[str | int, ...]
"""Where a value is in nested dicts (texts) and lists (numbers)."""

STRUCTURE = "ckpt_structure"
"""Part of a checkpoint that holds what flattening loses of the others, a text for each."""

OWN_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
"""By their last names: buffers of batch normalisation, which each rank of DDP keeps for itself."""

_OPTIMIZER = re.compile(
    r"(^|\.)(optim|optims|opt|optimizer|optimizers|optim_state|optimizer_state|optimizer_states)\."
    r"|\.(exp_avg|exp_avg_sq|max_exp_avg_sq|exp_inf|momentum_buffer|square_avg|acc_delta|grad_avg)$"
)
_MODEL = re.compile(
    r"(app\.)?(model|models|module|modules|network|net|weights|params|parameters|state_dict)\."
)
_OTHER = re.compile(
    r"(lr_scheduler|lr_schedulers|scheduler|schedulers|rng|rng_state|random|dataloader|data_loader|loader|dataset"
    r"|sampler|train_state|trainer|progress|metrics|extra|extra_state|app|step|epoch|iteration|ema)(\.|$)"
)


def part_of(fqn: str, *, is_tensor: bool, has_model: bool) -> str:
    """Guess by its name whether an entry is part of the `weights`, the `optimizer`, or `other`.

    With `has_model`, a tensor beside those that are named like a model's is no weight.
    """
    if _OPTIMIZER.search(fqn):
        return "optimizer"
    if is_tensor and _MODEL.match(fqn):
        return "weights"
    return "other" if not is_tensor or has_model or _OTHER.match(fqn) else "weights"


def has_model(paths: Iterable[Path]) -> bool:
    """Tell whether a dict that is named like a model holds other values.

    Names alone do not tell: in a model's flat state, `lm_head.weight` is a weight beside
    `model.norm.weight`.
    """
    return any(len(path) > 1 and _MODEL.match(".".join([*map(str, path[:-1]), ""])) for path in paths)


def paths_of(planner_data: Any) -> dict[str, Path]:
    """Return where each name is in the nested state, from DCP's planner; other planners keep other data."""
    if not isinstance(planner_data, dict):
        return {}
    return {
        name: path
        for name, path in planner_data.items()
        if isinstance(name, str)
        and isinstance(path, tuple)
        and path
        and all(type(part) in (str, int) for part in path)
    }


def natural(name: str) -> list[tuple[int, int | str]]:
    """Make a key that sorts `layers.2` before `layers.10`."""
    return [(0, int(part)) if part.isdecimal() and len(part) < 19 else (1, part) for part in name.split(".")]
