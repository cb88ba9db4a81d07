"""Random schedules of ranks, workers, kills, weights and sources: token for token as the oracle says."""

from __future__ import annotations

import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.data_oracle import Corpus, Known, Mix, Row, Unknown
from support.loaders import Merged, Numbered, merged_states
from support.ranks import Job

import ckpt
from ckpt.options import DataOptions
from ckpt.trainer_integration.dataloader import RescalableLoader
from ckpt.trainer_integration.dataset import ShardedDataset

PAD = -1
BOS = 10**7
EOS = 10**7 + 1
NAMES = "abc"


@dataclass(frozen=True)
class Stint:
    """A run between its start and its end by a kill.

    Attributes:
        batches: that each rank reads before the kill.
        saved: of them, before the checkpoint that the next stint resumes from.
        records: the state follows `loader.record`, and batches are fetched ahead of it.
        again: batches after which an iteration is left and another one begun.
    """

    mix: Mix
    world_size: int
    batch_size: int
    workers: int
    batches: Sequence[int]
    saved: Sequence[int]
    records: bool
    again: int | None


class Schedule:
    """Random documents, and stints over them; all follows from the seed."""

    def __init__(self, seed: int, *, workers: bool = False, processes: bool = False) -> None:
        self.random = draw = random.Random(seed)
        self.kind = draw.choice(["global", "global", "shards"])
        self.is_known = self.kind == "global"
        self.workers = workers
        sizes = [0, 1, 2, 3, 7, 20, 60, 150] if self.is_known else [1, 2, 3, 7, 20, 60, 150]
        counts = {name: draw.randint(12, 40) for name in NAMES}
        self.lengths = {name: [*draw.choices(sizes, k=count), 3] for name, count in counts.items()}
        self.cut_every = draw.choice([None, None, 3])
        self.epochs = draw.choice([None, 1, 2]) if self.is_known or not processes else None
        self.on_exhausted = draw.choice(["drop", "drop", "stop", "repeat"]) if self.is_known else "drop"
        self.shards = draw.choice([1, 5, 12, 1920]) if self.is_known else draw.choice([6, 12])
        self.fixed: dict[str, Any] = {
            "shards": self.shards,
            "seed": draw.choice([None, 0, 7, 7]),
            "bos_token": draw.choice([None, BOS]),
            "eos_token": draw.choice([None, EOS]),
        }
        self.names = NAMES[: draw.randint(1, 3)]
        self.kept = {*self.names}  # sources that were always read
        self.mix = self._mix(None)

    def source(self, name: str) -> Numbered:
        first = 10**6 * NAMES.index(name)
        return Numbered(self.lengths[name], first=first, kind=self.kind, cut_every=self.cut_every or 10**9)

    @property
    def corpus(self) -> Corpus:
        sources = {name: self.source(name) for name in NAMES}
        rows = {
            name: [source.tokens(number).tolist() for number in range(source.documents)]
            for name, source in sources.items()
        }
        bos, eos = (
            [token] if (token := self.fixed[key]) is not None else [] for key in ("bos_token", "eos_token")
        )
        return Corpus(rows, self.fixed["seed"], self.shards, bos, eos, self.cut_every)

    def _mix(self, before: Mix | None) -> Mix:
        """Draw weights and a length; often only one of them changes."""
        draw = self.random
        change = draw.choice(["none", "none", "weights", "length", "sources"]) if before else "all"
        weights = before.weights if before else {}
        if change in ("all", "weights", "sources"):
            if change == "sources":
                self.names = "".join(sorted(draw.sample(NAMES, draw.randint(1, 3))))
            weights = {name: draw.choice([0.01, 0.1, 0.3, 0.7, 1, 1, 3, 7, 49]) for name in self.names}
            if len(weights) > 1 and draw.random() < 0.2:
                weights[draw.choice(self.names)] = 0
        self.kept -= {name for name in NAMES if name not in weights}
        length = before.sequence_length if before else 0
        if change in ("all", "length"):
            length = draw.choice([3, 4, 7, 16, 64])
        return Mix(weights, length, self.epochs, self.on_exhausted)

    def stint(self, *, may_change: bool) -> Stint:
        draw = self.random
        if may_change:
            self.mix = self._mix(self.mix)
        world_size = draw.randint(1, 6)
        in_step = draw.random() < 0.7
        # How far each rank gets, and where its last checkpoint is.
        batches = [draw.randint(0, 25) for _ in range(world_size)]
        if in_step:
            batches = batches[:1] * world_size
        saved = [draw.randint(0, count) for count in batches]
        if in_step:
            saved = saved[:1] * world_size
        records = draw.random() < 0.3
        return Stint(
            mix=self.mix,
            world_size=world_size,
            batch_size=draw.randint(1, 4),
            workers=draw.randint(0, 2) if self.workers else 0,
            batches=batches,
            saved=saved,
            records=records,
            # An iteration begins at the state, and the state follows what is recorded.
            again=None if records else draw.choice([None, None, 2]),
        )

    def last(self) -> Stint:
        """Read to the end, or on for some batches, with nothing lost."""
        count = 40 if self.epochs is None or self.on_exhausted == "repeat" else 10**6
        self.kept -= {name for name, weight in self.mix.weights.items() if not weight}
        return Stint(self.mix, 2, 3, 0, [count] * 2, [count] * 2, records=False, again=None)

    def loader(self, stint: Stint, rank: int) -> RescalableLoader:
        names = sorted(stint.mix.weights, reverse=rank % 2 > 0)  # their order means nothing
        dataset = ShardedDataset(
            {name: self.source(name) for name in names},
            weights={name: stint.mix.weights[name] for name in names},
            sequence_length=stint.mix.sequence_length,
            epochs=stint.mix.epochs,
            pad_token=PAD,
            rank=rank,
            world_size=stint.world_size,
            options=DataOptions(positions=stint.records, on_exhausted=stint.mix.on_exhausted),  # type: ignore[arg-type]
            **self.fixed,
        )
        return RescalableLoader(
            dataset,
            batch_size=stint.batch_size,
            num_workers=stint.workers,
            multiprocessing_context="fork" if stint.workers else None,
        )


def rows_of(batch: Any) -> list[Row]:
    tokens = batch["tokens"] if isinstance(batch, dict) else batch
    return [[token for token in row if token != PAD] for row in tokens.tolist()]


@dataclass
class OfRank:
    """The rows of a rank until it is killed.

    Attributes:
        used: rows before its checkpoint.
        has_ended: it has asked for more batches than there were.
        state: in its checkpoint.
    """

    rows: list[Row]
    used: int
    has_ended: bool
    state: Merged


def read(loader: RescalableLoader, stint: Stint, rank: int) -> OfRank:
    found = OfRank([], 0, False, loader.state_dict())
    batches = stint.batches[rank]
    saved = stint.saved[rank]
    at = 0
    for at, batch in enumerate(batches_of(loader, stint, batches), 1):
        found.rows += rows_of(batch)
        if at <= saved:
            found.used = len(found.rows)
            if stint.records:
                loader.record(batch)
        if at == saved:
            found.state = loader.state_dict()
    found.has_ended = at < batches
    if at < saved or stint.records:
        found.state = loader.state_dict()
    return found


def batches_of(loader: RescalableLoader, stint: Stint, count: int) -> Iterator[Any]:
    first = min(count, stint.again or 0)
    yield from itertools.islice(loader, first)
    yield from itertools.islice(loader, count - first)


def run(schedule: Schedule) -> None:
    oracle = (Known if schedule.is_known else Unknown)(schedule.corpus)
    state: Merged | None = None
    trained: Counter[int] = Counter()
    lost: dict[Any, list[list[Row]]] = {}
    stints = schedule.random.randint(2, 6)
    for number in range(stints + 1):
        stint = schedule.last() if number == stints else schedule.stint(may_change=oracle.is_in_step)
        oracle.resume(stint.mix, stint.world_size)
        ranks = []
        for rank in range(stint.world_size):
            loader = schedule.loader(stint, rank)
            if state is not None:
                loader.load_state_dict(state)
            ranks.append(read(loader, stint, rank))
            oracle.check(rank, ranks[-1].rows)
            assert ranks[-1].has_ended <= oracle.ended(rank, len(ranks[-1].rows))
            trained.update(itertools.chain.from_iterable(ranks[-1].rows[: ranks[-1].used]))
        settings = str(stint.mix), stint.world_size
        if settings in lost:  # batches that were read before the kill are read again
            pairs = zip(ranks, lost[settings], strict=True)
            assert all(a == b for rank, before in pairs for a, b in zip(rank.rows, before, strict=False))
        lost = {settings: [rank.rows[rank.used :] for rank in ranks]}
        state = merged_states([rank.state for rank in ranks])
        oracle.save([rank.used for rank in ranks])
    if schedule.epochs is not None and schedule.on_exhausted == "drop":
        for name in schedule.kept:
            counted = {trained[token] for token in schedule.source(name).all_tokens}
            assert counted == {schedule.epochs}, f"source {name!r}: tokens were read {sorted(counted)} times"


@pytest.mark.parametrize(
    "seed", [*range(10), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(10, 100))]
)
def test_random_schedules_follow_the_oracle(seed: int) -> None:
    run(Schedule(seed, workers=seed % 10 == 9 and seed > 9))


# -- real ranks, real checkpoints, and kills ---------------------------------------------------------------

SAVE_EVERY = 3


@pytest.mark.long
@pytest.mark.parametrize("seed", range(200, 206))
def test_runs_that_are_killed_follow_the_oracle(seed: int, tmp_path: Path) -> None:
    """Processes with workers of their own, killed at any moment, also within a save."""
    schedule = Schedule(seed, workers=True, processes=True)
    oracle = (Known if schedule.is_known else Unknown)(schedule.corpus)
    resumed: Path | None = None
    for number in range(4):
        stint = schedule.stint(may_change=True)
        oracle.resume(stint.mix, stint.world_size)
        folder = tmp_path / str(number)
        folder.mkdir()
        job = Job(stint.world_size, _train, schedule, stint, folder, resumed)
        try:
            _wait(job, folder / "rank-0", lines=1 + max(stint.batches))
        finally:
            job.kill()
        batches = [_logged(folder / f"rank-{rank}") for rank in range(stint.world_size)]
        for rank, of_rank in enumerate(batches):
            oracle.check(rank, [*itertools.chain.from_iterable(of_rank)])
        steps = [int(path.parent.name) for path in folder.glob("*/commit.json")]
        resumed = folder / str(max(steps)) if steps else resumed
        oracle.save([sum(map(len, of_rank[: max(steps, default=0)])) for of_rank in batches])


def _train(rank: int, schedule: Schedule, stint: Stint, folder: Path, resumed: Path | None) -> None:
    loader = schedule.loader(stint, rank)
    if resumed is not None:
        ckpt.load({"loader": loader}, resumed)
    with open(folder / f"rank-{rank}", "w") as log:
        for step, batch in enumerate(loader, 1):
            print(json.dumps(rows_of(batch)), file=log, flush=True)
            if stint.records:
                loader.record(batch)
            if step % SAVE_EVERY == 0:
                ckpt.save({"loader": loader}, folder / str(step))


def _wait(job: Job, log: Path, *, lines: int) -> None:
    """Wait until a rank has read a number of batches, or all."""
    deadline_s = time.monotonic() + 120
    while not log.exists() or log.read_text().count("\n") < lines:
        if not any(process.is_alive() for process in job.processes):
            for rank in range(len(job.processes)):
                job.result(rank, 1)
            return
        assert time.monotonic() < deadline_s, f"{log} has not got {lines} lines"
        time.sleep(0.01)


def _logged(log: Path) -> list[list[Row]]:
    """Read the batches that a rank has noted; a line that was cut by the kill was not trained on."""
    text = log.read_text() if log.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
