"""Kill a run again and again, and check by the ledger that each checkpoint it goes on from is one cut.

    python -m examples.recommender.campaign --kills 200 --seed 1

Each life has other numbers of servers and trainers. SIGKILL meets any process, all of them, or the one that started
them, most often while they save. After each: no process is left, nothing that was reported as durable is gone, and
every row of the last checkpoint tells exactly the updates up to its step.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from examples.recommender.board import Board
from examples.recommender.checkpoints import committed
from examples.recommender.children import ChildFailed, in_child
from examples.recommender.digest import digest
from examples.recommender.kills import ALL, LAUNCHER, Kill, Killer, drawn_kill, kind_of
from examples.recommender.launch import FAILED, WRONG, launch
from examples.recommender.ledger import Ledger
from examples.recommender.options import Options

_MOST = 3
"""Trainers, and servers."""
_LIFE_S, _CHECK_S, _LAST_GASP_S = 300.0, 300.0, 90.0
_FOREVER = 1 << 30


class CampaignFailed(Exception):
    """The run has lost something, or has ended by itself."""


class Campaign:
    """A run that is killed until the campaign is over."""

    def __init__(self, options: Options, seed: int, log: Path) -> None:
        self._options, self._random, self._log = options, random.Random(seed), log
        self._ledger = Ledger(options)
        self.step, self.kinds = 0, Counter[str]()

    def life(self) -> str:
        """Let the run go on until it is killed, and check what it leaves. Raises CampaignFailed."""
        options = self._drawn_options()
        kill = drawn_kill(self._random, options.processes)
        board = Board(options.processes)
        begun_s = time.monotonic()
        codes = in_child(lambda: self._live(options, kill, board), _LIFE_S + _LAST_GASP_S, dies=True)
        lived_s = time.monotonic() - begun_s
        if codes is not None and WRONG in codes:
            raise CampaignFailed(f"a server has found wrong rows: {self._last_words()}")
        if not board.note[0]:
            raise CampaignFailed(f"the run ended by itself, with {codes}: {self._last_words()}")
        step, rows = self.check(at_least=int(board.durable[0]))
        kind = kind_of(board, step)
        self.kinds[kind] += 1
        victim = {LAUNCHER: "the launcher", ALL: "all"}.get(kill.victim, f"rank {kill.victim}")
        text = (
            f"{options.trainers} trainers, {options.servers} servers, staleness {options.staleness}: "
            f"{victim} killed after {lived_s:.1f} s {kind}; step {self.step} -> {step}, {rows:,} rows are right"
        )
        self._options, self.step = options, step
        return text

    def check(self, at_least: int = 0) -> tuple[int, int]:
        """Check the last checkpoint; return its step and the number of its rows. Raises CampaignFailed."""
        options, ledger = self._options, self._ledger

        def look() -> tuple[int, int]:
            step = max(committed(options), default=0)
            return step, sum(ledger.check_checkpoint(step).values()) if step else 0

        step, rows = in_child(look, _CHECK_S)
        if step < max(self.step, at_least):
            raise CampaignFailed(
                f"step {max(self.step, at_least)} was durable, and the last checkpoint is {step}"
            )
        ledger.advance(step)
        return step, rows

    def finish(self) -> int:
        """Let the run come to an end, and check all checkpoints that it has kept; return its last step."""
        last = self.step + 2 * self._options.save_every
        options = replace(self._drawn_options(), steps=last)
        codes = in_child(lambda: launch(options, ledger=self._ledger, deadline_s=_LIFE_S), 2 * _LIFE_S)
        if any(codes):
            raise CampaignFailed(f"the last life ended with {codes}: {self._last_words()}")
        steps = in_child(lambda: committed(options), _CHECK_S)
        if steps[-1] != last:
            raise CampaignFailed(f"the run ended at step {last}, and the last checkpoint is {steps[-1]}")
        for step in steps:
            in_child(lambda step=step: Ledger(options).check_checkpoint(step), _CHECK_S)  # type: ignore[misc]
        return last

    def compare(self, step: int) -> None:
        """Compare the last checkpoint with that of a run that nobody killed. Raises CampaignFailed."""
        options = replace(self._options, trainers=2, servers=2, steps=step)
        with tempfile.TemporaryDirectory(prefix="recommender-") as root:
            whole = replace(options, root=root)
            codes = in_child(lambda: launch(whole), 60 + step / 2)
            if any(codes):
                raise CampaignFailed(f"the run without kills ended with {codes}: {self._last_words()}")
            expected = in_child(lambda: digest(whole, step), _CHECK_S)
        actual = in_child(lambda: digest(options, step), _CHECK_S)
        if wrong := sorted(name for name in expected if actual.get(name) != expected[name]):
            raise CampaignFailed(f"{', '.join(wrong)} differ from those of a run that nobody killed")

    def _drawn_options(self) -> Options:
        draw = self._random.randint
        if self.step and draw(1, 3) == 1:
            return replace(self._options, steps=_FOREVER)  # the same shards: deltas go on
        staleness = draw(1, 4) if self._options.staleness else 0
        return replace(
            self._options,
            trainers=draw(1, _MOST),
            servers=draw(1, _MOST),
            staleness=staleness,
            steps=_FOREVER,
        )

    def _live(self, options: Options, kill: Kill, board: Board) -> list[int | None]:
        with open(self._log, "w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        killer = Killer(kill, board, options)
        return launch(
            options,
            board=board,
            ledger=self._ledger,
            watch=killer,
            patience_s=kill.patience_s,
            deadline_s=_LIFE_S,
        )

    def _last_words(self) -> str:
        return self._log.read_text()[-4000:] if self._log.exists() else ""


@contextlib.contextmanager
def _root(given: str | None) -> Iterator[str]:
    if given is not None:
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="recommender-") as root:
        yield root


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m examples.recommender.campaign",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--root", help="an empty folder; a temporary one by default")
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument(
        "--deterministic", action="store_true", help="no staleness; compare with a run that nobody kills"
    )
    given = parser.parse_args(arguments)
    with _root(given.root) as root, tempfile.TemporaryDirectory(prefix="recommender-") as logs:
        options = Options(
            root=f"{root}/run",
            save_every=given.save_every,
            staleness=0 if given.deterministic else 2,
            seed=given.seed,
            evict_after=5 * given.save_every,
            timeout_s=60.0,
        )
        campaign = Campaign(options, given.seed, Path(logs) / "life.log")
        begun_s = time.monotonic()
        try:
            for number in range(1, given.kills + 1):
                print(f"{number:4d}  {campaign.life()}", flush=True)
            last = campaign.finish()
            if given.deterministic:
                campaign.compare(last)
        except (CampaignFailed, ChildFailed) as error:
            print(f"FAILED: {error}", file=sys.stderr)
            return FAILED
    print(f"\n{given.kills} kills, {last} steps, {time.monotonic() - begun_s:.0f} s; every resume was right")
    for kind, count in campaign.kinds.most_common():
        print(f"{count:5d}  {kind}")
    if given.deterministic:
        print("The last checkpoint equals, bit for bit, that of a run that nobody killed.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
