"""Describe a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Options:
    """What a run needs to know; only `trainers`, `servers`, `steps` and `staleness` may change between two lives.

    Attributes:
        root: folder or URL of the checkpoints.
        steps: the last step.
        save_every: steps between two checkpoints.
        staleness: a lookup for batch b sees all updates of batches before b - staleness. 0: the run is deterministic.
        keep: how many checkpoints stay.
        evict_after: a row that no batch has used for so many steps is removed, at the next checkpoint.
        width: elements of a row of embeddings.
        timeout_s: for each wait.
        print_every: steps between two lines; 0: nothing is printed.
    """

    root: str
    trainers: int = 2
    servers: int = 2
    steps: int = 300
    save_every: int = 25
    staleness: int = 3
    seed: int = 0
    keep: int = 3
    evict_after: int = 100
    width: int = 8
    timeout_s: float = 60.0
    print_every: int = 0
    storage_options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def processes(self) -> int:
        return self.trainers + self.servers

    def is_cut(self, step: int) -> bool:
        """Tell whether a checkpoint is taken after this step."""
        return self.is_eviction(step) or step == self.steps

    def is_eviction(self, step: int) -> bool:
        """Tell whether rows are evicted after this step, and before its checkpoint.

        At steps that do not depend on when the run is killed, or ends.
        """
        return step % self.save_every == 0
