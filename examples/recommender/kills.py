"""Choose whom to kill, and when, and do it."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkProcess
from pathlib import Path

from examples.recommender.board import Board
from examples.recommender.checkpoints import url_of
from examples.recommender.options import Options

LAUNCHER, ALL = -1, -2
_PATIENCE_S = 10.0
_LONGEST_WAIT_S = 100.0
"""For a save to begin."""


@dataclass(frozen=True)
class Kill:
    """Whom to kill, and when.

    Attributes:
        victim: a rank, LAUNCHER or ALL.
        save: in which of the victim's saves; 0: at any time.
        delay_s: after that save has begun, or the life has.
        at_commit: wait for the commit of that save before.
        patience_s: how long the others may take to notice.
    """

    victim: int
    save: int
    delay_s: float
    at_commit: bool
    patience_s: float


def drawn_kill(random: random.Random, processes: int) -> Kill:
    """Choose a kill; four of five are at a save."""
    victim = random.choice([*range(processes)] * 3 + [LAUNCHER, ALL] * 2)
    patience_s = _PATIENCE_S if random.random() < 0.1 else 0.0
    if random.random() < 0.2:
        return Kill(victim, 0, random.uniform(0.0, 3.0), False, patience_s)
    save = random.choice([1, 1, 1, 2, 2, 3, 4])
    if random.random() < 0.3:
        return Kill(victim, save, random.choice([0.0, random.uniform(0, 0.02)]), True, patience_s)
    return Kill(victim, save, random.uniform(0.0, 0.25), False, patience_s)


class Killer:
    """Carry out a kill in the process that started the others; notes it on the board."""

    def __init__(self, kill: Kill, board: Board, options: Options) -> None:
        self._kill, self._board, self._options = kill, board, options
        self._due_s = time.monotonic() + (_LONGEST_WAIT_S if kill.save else kill.delay_s)
        self._is_seen = False
        self._campaign = os.getppid()

    def __call__(self, processes: Sequence[ForkProcess]) -> None:
        kill, board = self._kill, self._board
        if os.getppid() != self._campaign:
            raise SystemExit("the campaign is gone")
        if board.note[0]:
            return
        rank = max(kill.victim, 0)
        if kill.save and not self._is_seen and board.saves[rank] >= kill.save:
            step = int(board.saving[rank]) or 0
            path = Path(url_of(self._options, step)) / "commit.json"
            if not kill.at_commit or path.exists() or not step:
                self._is_seen, self._due_s = True, time.monotonic() + kill.delay_s
        if time.monotonic() < self._due_s:
            return
        board.note[:3] = 1, int(board.saving.max()), int(board.steps.max())
        if kill.victim == LAUNCHER:
            os.kill(os.getpid(), signal.SIGKILL)
        for process in processes if kill.victim == ALL else [processes[rank]]:
            process.kill()


def kind_of(board: Board, last: int) -> str:
    """Say in which moment a kill was."""
    saving, trained = int(board.note[1]), int(board.note[2])
    if saving:
        return "in a save, after its commit" if last >= saving else "in a save, before its commit"
    return "between saves" if trained else "at its start"
