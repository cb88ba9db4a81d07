"""Every global batch is like a draw from the whole corpus, however it is stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ckpt.trainer_integration.data_order.schedule import OnExhausted, Schedule
from ckpt.trainer_integration.dataloader import RescalableLoader
from ckpt.trainer_integration.dataset import ShardedDataset
from ckpt.trainer_integration.sources import Source

TENTHS = 10
SEQUENCE = 512
GLOBAL_BATCH = 60  # of 1, 2, 4 and 6 ranks
WINDOW = 20  # global batches

Lengths = npt.NDArray[np.int64]


class Corpus(Source):
    """Documents whose tokens say in which tenth of the corpus, as it is stored, they are."""

    def __init__(self, lengths: Lengths, *, known: bool, first: int = 0) -> None:
        self.documents, self.dtype = len(lengths), np.dtype(np.uint8)
        self.token_counts, self._known = lengths, known
        self.tenths = first + np.arange(len(lengths)) * TENTHS // len(lengths)

    def tokens(self, document: int) -> Any:
        return np.full(self.token_counts[document], self.tenths[document], np.uint8)

    def lengths(self, documents: Any, /) -> Any:
        return self.token_counts[documents] if self._known else None


def lognormal(count: int, sigma: float, seed: int = 0) -> Lengths:
    lengths = np.random.default_rng(seed).lognormal(6 - sigma**2 / 2, sigma, count)
    return lengths.clip(1, 100_000).astype(np.int64)


def parts(count: int) -> Lengths:
    """Books, then notes."""
    return np.concatenate([np.full(count // 10, 4000), np.full(count - count // 10, 40)])


def long_tail(count: int) -> Lengths:
    lengths = np.full(count, 300)
    lengths[:: count // 20] = 200_000
    return lengths


CORPORA: dict[str, list[Callable[[int], Lengths]]] = {
    "even lengths, by topic": [lambda count: np.full(count, 400)],
    "lognormal, by topic": [lambda count: lognormal(count, 1.0)],
    "very lognormal": [lambda count: lognormal(count, 1.6)],
    "by length, ascending": [lambda count: np.sort(lognormal(count, 1.0))],
    "by length, descending": [lambda count: np.sort(lognormal(count, 1.0))[::-1].copy()],
    "books, then notes": [parts],
    "a long tail": [long_tail],
    "very short": [lambda count: np.full(count, 30)],
    "two sources": [lambda count: np.sort(lognormal(count, 1.0)), lambda count: np.full(count, 250)],
    "five sources": [lambda count, seed=seed: lognormal(count // 2, 1.0, seed) for seed in range(5)],  # type: ignore[misc]
}
WEIGHTS = {1: [1.0], 2: [3.0, 1.0], 5: [5.0, 4.0, 3.0, 2.0, 1.0]}


def read(sources: list[Corpus], world_size: int, windows: int) -> Lengths:
    """Return how many tokens of each tenth of each source are in each window: windows x (sources x tenths)."""
    named = {str(number): source for number, source in enumerate(sources)}
    weights = dict(zip(named, WEIGHTS[len(sources)], strict=True))
    loaders = [
        RescalableLoader(
            ShardedDataset(
                named, weights=weights, sequence_length=SEQUENCE, rank=rank, world_size=world_size
            ),
            batch_size=GLOBAL_BATCH // world_size,
        )
        for rank in range(world_size)
    ]
    found = np.zeros((windows, TENTHS * len(sources)), np.int64)
    steps = zip(*loaders, strict=True)
    for window in range(windows):
        for _ in range(WINDOW):
            for batch in next(steps):
                found[window] += np.bincount(batch.numpy().ravel(), minlength=found.shape[1])
    return found


def outliers(found: Lengths, sources: list[Corpus]) -> tuple[int, int]:
    """Count shares that are over four standard deviations of random draws of documents away, and all shares."""
    wrong = 0
    for number, source in enumerate(sources):
        counts = source.token_counts.astype(float)
        here = found[:, number * TENTHS : (number + 1) * TENTHS]
        tokens = here.sum(1)
        tenths = source.tenths - number * TENTHS
        for tenth in range(TENTHS):
            of_tenth = tenths == tenth
            expected = counts[of_tenth].sum() / counts.sum()
            # Of n documents at random, whose lengths are n E[l] tokens: the delta method for a ratio of sums.
            variance = np.mean((counts * (of_tenth - expected)) ** 2) / (counts.mean() * tokens)
            # No draw is finer than a sequence.
            variance = np.maximum(variance, expected * (1 - expected) * SEQUENCE / tokens)
            wrong += int((np.abs(here[:, tenth] / tokens - expected) > 4 * np.sqrt(variance)).sum())
    return wrong, found.size


def drawn(found: Lengths, sources: list[Corpus]) -> Lengths:
    """Draw documents at random, as many tokens of each source in each window as were `found`."""
    counts = np.zeros_like(found)
    for number, source in enumerate(sources):
        columns = slice(number * TENTHS, (number + 1) * TENTHS)
        order = np.random.default_rng(number).permutation(source.documents)
        tokens = np.repeat((source.tenths - number * TENTHS)[order], source.token_counts[order])
        begin = 0
        for window, count in enumerate(found[:, columns].sum(1)):
            counts[window, columns] = np.bincount(tokens[begin : begin + count], minlength=TENTHS)
            begin += count
    return counts


@pytest.mark.parametrize("known", [True, False], ids=["lengths known", "lengths unknown"])
@pytest.mark.parametrize("name", CORPORA)
@pytest.mark.parametrize(
    ("world_size", "documents"),
    [
        pytest.param(1, 60_000, marks=pytest.mark.slow),
        *(pytest.param(n, 200_000, marks=pytest.mark.long) for n in (1, 2, 4, 6)),
    ],
)
def test_windows_are_draws_from_the_whole_corpus(
    name: str, known: bool, world_size: int, documents: int
) -> None:
    made = CORPORA[name]
    sources = [Corpus(make(documents), known=known, first=TENTHS * at) for at, make in enumerate(made)]
    total = sum(int(source.token_counts.sum()) for source in sources)
    windows = min(40, total // (SEQUENCE * GLOBAL_BATCH * WINDOW) // 2)
    found = read(sources, world_size, max(2, windows))
    wrong, shares = outliers(found, sources)
    # Of few and very long documents also random draws have more outliers than one in a hundred.
    assert wrong <= max(shares // 100, outliers(drawn(found, sources), sources)[0])
    of_sources = found.reshape(len(found), len(sources), TENTHS).sum(2) / found.sum(1, keepdims=True)
    expected = np.array(WEIGHTS[len(sources)]) / sum(WEIGHTS[len(sources)])
    assert np.abs(of_sources - expected).max() < 0.01


@pytest.mark.parametrize("known", [True, False], ids=["lengths known", "lengths unknown"])
@pytest.mark.parametrize("name", ["very lognormal", "books, then notes", "by length, ascending"])
@pytest.mark.parametrize(
    "documents", [pytest.param(20_000, marks=pytest.mark.slow), pytest.param(200_000, marks=pytest.mark.long)]
)
def test_each_document_is_read_once_before_any_is_read_twice(name: str, known: bool, documents: int) -> None:
    """Of the tokens of an epoch nearly all are read before one is read again."""
    (make,) = CORPORA[name]
    source = Corpus(make(documents), known=known)
    total = int(source.token_counts.sum())
    steps = total // (SEQUENCE * GLOBAL_BATCH)
    windows = max(1, steps // WINDOW)
    found = read([source], 1, windows).sum(0)
    whole = np.bincount(source.tenths, weights=source.token_counts.astype(float), minlength=TENTHS)
    twice = np.maximum(found - whole, 0).sum() / total
    assert twice < (0.01 if known else 0.05)


@pytest.mark.parametrize("on_exhausted", ["drop", "stop", "repeat"])
@pytest.mark.parametrize(
    ("weights", "limits"),
    [
        ([1, 1, 0.01], [10, 6000, 80]),
        ([0.7, 0.1, 0.3], [60, 90, 40]),
        ([49, 3], [400, 20]),
        ([0.1] * 3, [9, 50, 20]),
    ],
)
def test_sources_take_turns_by_when_they_are_due(
    weights: list[float], limits: list[int], on_exhausted: OnExhausted
) -> None:
    """However many turns are planned at a time, also when a source has ended, and also when turns are skipped."""
    due = sorted(
        ((at + 0.5) / weight, source, at)
        for source, weight in enumerate(weights)
        for at in range(10_000 if on_exhausted == "repeat" else limits[source])
    )
    last = [(limit - 0.5) / weight for limit, weight in zip(limits, weights, strict=True)]
    stop = {"drop": np.inf, "stop": min(last), "repeat": max(last)}[on_exhausted]
    turns = [(source, at) for moment, source, at in due if moment <= stop]

    def made() -> Schedule:
        return Schedule(weights, [0] * len(weights), limits, on_exhausted)

    for at_a_time in (97, 4096):
        schedule = made()
        planned: list[tuple[int, ...]] = []
        while len(taken := np.stack(schedule.take(at_a_time), 1)):
            planned += [tuple(turn) for turn in taken.tolist()]
        assert planned == turns
    for skipped in range(0, len(turns), 1 + len(turns) // 100):
        schedule = made()
        schedule.skip(skipped)
        read = [source for source, _ in turns[:skipped]]
        assert schedule.read == [read.count(source) for source in range(len(weights))]
