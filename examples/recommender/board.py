"""Show what the processes of a run are doing, to the process that started them."""

from __future__ import annotations

import mmap

import numpy as np

_FIELDS, _NOTES = 4, 3


class Board:
    """Numbers in memory that forked processes share.

    Attributes:
        steps: by rank, the last step that is trained (trainers).
        saves: by rank, how many saves have begun.
        saving: by rank, the step that is being saved; 0: none.
        durable: in the first element, the last step that was reported as durable.
        note: whatever the watching process has to tell.
    """

    def __init__(self, processes: int) -> None:
        memory = mmap.mmap(-1, 8 * (_FIELDS * processes + _NOTES))
        numbers = np.frombuffer(memory, dtype=np.int64)
        self.steps, self.saves, self.saving, self.durable = numbers[_NOTES:].reshape(_FIELDS, processes)
        self.note = numbers[:_NOTES]

    def begin_save(self, rank: int, step: int) -> None:
        self.saving[rank] = step
        self.saves[rank] += 1

    def end_save(self, rank: int, step: int, *, durable: bool) -> None:
        if self.saving[rank] == step:
            self.saving[rank] = 0
        if durable and rank == 0:
            self.durable[0] = step
