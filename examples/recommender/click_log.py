"""Make up a log of clicks: each batch is a function of the seed and its number."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ckpt.embeddings.rows import Ids

TABLES = ("users", "items")
SLICES, SAMPLES = 6, 32
"""A batch consists of slices, each of which one trainer computes: so their sums do not depend on who does."""

_MOST_IDS = 1_000_000


class Clicks(NamedTuple):
    """Samples: who saw what, and whether they clicked.

    Attributes:
        ids: by table, int64 [samples].
        labels: float32 [samples].
    """

    ids: dict[str, Ids]
    labels: NDArray[np.float32]


class ClickLog:
    """Read the log; `step` is the number of the last batch that was trained, and part of the checkpoint."""

    def __init__(self, seed: int) -> None:
        self.seed, self.step = seed, 0

    def batch(self, step: int) -> Clicks:
        """Return the whole batch of a step: Zipf ids; what is popular changes slowly."""
        random = np.random.default_rng([self.seed, step])
        count = SLICES * SAMPLES
        users = (random.zipf(1.2, count) + step // 10) % _MOST_IDS
        items = (random.zipf(1.4, count) + 5 * (step // 20)) % _MOST_IDS
        # A user likes the items of one kind in four.
        chance = np.where((users * 7 + 3) % 4 == items % 4, 0.9, 0.1)
        labels = (random.random(count) < chance).astype(np.float32)
        return Clicks({"users": users, "items": items}, labels)

    def slices(self, step: int, trainer: int, trainers: int) -> list[Clicks]:
        """Return those slices of a batch that one of the trainers computes."""
        batch = self.batch(step)
        parts = [slice(at * SAMPLES, (at + 1) * SAMPLES) for at in range(SLICES)[trainer::trainers]]
        return [
            Clicks({table: ids[part] for table, ids in batch.ids.items()}, batch.labels[part])
            for part in parts
        ]

    def state_dict(self) -> dict[str, Any]:
        return {"seed": self.seed, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["seed"] != self.seed:
            raise ValueError(f"the checkpoint is that of another log: seed {state['seed']}, not {self.seed}")
        self.step = state["step"]
