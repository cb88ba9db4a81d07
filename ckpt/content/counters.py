"""Read how far a training has come by its own count: steps, epochs, samples, the position of a data loader.

A counter is a tensor of one element, or a number among the objects, whose name is one of those below. Many programs
count what begins again, or keep how far they want to go: only what can be judged is read.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterable, Mapping
from typing import Any

from ckpt.content.parts import MODELS, OPTIMIZER_PREFIX

Seen = tuple[float, str]
"""The highest value that was seen of a counter, and the FQN that has it."""

_TOTALS = {
    "global_step", "global_steps", "num_updates", "last_epoch", "step_count", "global_samples",
    "consumed_samples", "consumed_train_samples", "consumed_tokens", "ntokens_seen", "tokens_seen", "samples_seen",
}  # fmt: skip
"""Never begin again."""
_EPOCHS = {"epoch", "current_epoch"}
_STEPS = {"step", "current_step", "train_step", "iteration"}
"""Count on, unless the state counts epochs: then they may begin again with each."""
_POSITIONS = {
    "samples_yielded", "num_yielded", "sampler_iter_yielded", "num_batches_fetched", "sample_in_epoch", "batch_in_epoch",
    "iterations_in_epoch", "batch_idx", "sample_idx", "sample_index", "position", "offset", "cursor",
} | _STEPS  # fmt: skip
_ALL = _TOTALS | _EPOCHS | _STEPS | _POSITIONS

_LOADER = re.compile(r"(?:^|[._])(?:data)?(?:loader|sampler|dataset|iterator)s?(?:[._]|$)", re.IGNORECASE)
_SETTINGS = re.compile(
    r"(?:^|\.)(?:config|cfg|args|hparams|hyper_parameters|settings)(?:\.|$)", re.IGNORECASE
)
_OF_LOADER = "loader:"
_LOADER_EPOCHS = {f"{_OF_LOADER}{name}" for name in _EPOCHS}

_FORMATS = {"float32": "<f", "float64": "<d", "int32": "<i", "int64": "<q"}


def counter_of(fqn: str, part: str) -> str | None:
    """Return the name of the counter that an entry of a part is; None if it is none."""
    path, _, last = fqn.rpartition(".")
    name = last.lstrip("_")
    if name not in _ALL or part in MODELS or (path and not part):
        return None
    if part.startswith(OPTIMIZER_PREFIX):
        return name if name == "step" or name in _TOTALS else None
    if _SETTINGS.search(path):
        return None
    if _LOADER.search(path) and name not in _TOTALS:
        return f"{_OF_LOADER}{name}"
    return name if name not in _POSITIONS or name in _STEPS else None


def known(counters: Mapping[str, float]) -> dict[str, float]:
    """Keep those that a save of this library may have noted."""
    return {name: value for name, value in counters.items() if name.removeprefix(_OF_LOADER) in _ALL}


def format_of(dtype: str) -> str | None:
    """Return how `struct` reads an element; None of dtypes in which nobody counts."""
    return _FORMATS.get(dtype)


def read_number(data: memoryview, format: str, offset: int) -> float:
    return float(struct.unpack_from(format, data, offset)[0])


def number_of(value: Any) -> float | None:
    """Return an object as a number; None if it is none, or one that a float does not hold exactly."""
    if type(value) not in (int, float):
        return None
    return float(value) if abs(value) <= 1 << 53 else None


def keep_highest(counters: dict[str, Seen], found: Iterable[tuple[str, Seen]]) -> None:
    """Add what was found. Of many counters of one name, such as one for each parameter, the highest counts."""
    for name, seen in found:
        if math.isfinite(seen[0]) and (name not in counters or seen[0] > counters[name][0]):
            counters[name] = seen


def gone_back(
    now: Mapping[tuple[str, str], float], before: Mapping[tuple[str, str], float], *, same_ranks: bool
) -> list[tuple[str, str]]:
    """List the counters, by part and name, that are lower than before without a reason.

    A loader begins again when it likes: its position counts while its own epoch is the same, and among as many ranks.
    """
    both = {key: now[key] - before[key] for key in now.keys() & before.keys()}
    epochs = [key for key in now.keys() | before.keys() if key[1] in _EPOCHS]

    def is_wrong(part: str, counter: str) -> bool:
        name = counter.removeprefix(_OF_LOADER)
        if name != counter and name in _EPOCHS:  # another loader, in a later epoch
            return not any(both.get(epoch, 0) > 0 for epoch in epochs)
        if name != counter:
            own = [change for (of, each), change in both.items() if of == part and each in _LOADER_EPOCHS]
            return same_ranks and bool(own) and not any(own)
        return name not in _STEPS or part.startswith(OPTIMIZER_PREFIX) or not epochs

    return sorted(key for key, change in both.items() if change < 0 and is_wrong(*key))
