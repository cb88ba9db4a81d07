"""The rescalable loader: on any schedule of ranks and workers, every token of an epoch once and in
order.
"""

from __future__ import annotations

import itertools
import json
import pickle
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.loaders import Merged, Numbered, merged
from support.rooms import ROOT
from support.tiers import examples

from ckpt.errors import CheckpointError, ConfigurationError, FormatError
from ckpt.options import DataOptions
from ckpt.trainer_integration.data_order.permutation import Permutation
from ckpt.trainer_integration.data_order.schedule import Schedule
from ckpt.trainer_integration.dataloader import RescalableLoader
from ckpt.trainer_integration.dataset import ShardedDataset
from ckpt.trainer_integration.sources import MapSource

PAD = -1
KINDS = ("global", "shards")


def loaders_of(
    source: Any,
    world_size: int,
    state: Merged | None,
    *,
    batch_size: int = 1,
    workers: int = 0,
    **options: Any,
) -> list[RescalableLoader]:
    loaders = []
    for rank in range(world_size):
        dataset = ShardedDataset(source, rank=rank, world_size=world_size, **options)
        loaders.append(RescalableLoader(dataset, batch_size=batch_size, num_workers=workers))
        if state is not None:
            loaders[-1].load_state_dict(state)
    return loaders


def tokens_of(batch: torch.Tensor) -> list[int]:
    return [token for token in batch.flatten().tolist() if token != PAD]


# -- rescaling -------------------------------------------------------------------------------------------


@st.composite
def journeys(draw: st.DrawFn) -> dict[str, Any]:
    shards = draw(st.integers(1, 12))
    lengths = draw(st.lists(st.sampled_from([0, 1, 2, 3, 7, 20, 60]), min_size=shards, max_size=40))
    stops = st.tuples(
        st.integers(1, shards), st.integers(1, 4), st.lists(st.integers(0, 9), min_size=12, max_size=12)
    )
    return {
        "kind": draw(st.sampled_from(KINDS)),
        "changes_length": draw(st.booleans()),
        "lengths": [*lengths, 3],
        "shards": shards,
        "seed": draw(st.sampled_from([None, 0, 7])),
        "cut_every": draw(st.sampled_from([3, 10**9])),
        "epochs": draw(st.integers(1, 3)),
        "stops": draw(st.lists(stops, min_size=1, max_size=5)),
        "sequence_lengths": draw(st.lists(st.sampled_from([1, 4, 7, 16]), min_size=6, max_size=6)),
    }


@settings(max_examples=examples(300))
@given(journeys())
def test_every_token_of_every_epoch_once(journey: dict[str, Any]) -> None:
    """World and batch sizes change at any moment, and ranks need not be in step; the sequence length, where they are."""
    source = Numbered(journey["lengths"], cut_every=journey["cut_every"], kind=journey["kind"])
    options = {name: journey[name] for name in ("shards", "seed", "epochs")} | {"pad_token": PAD}
    read: list[int] = []
    state: Merged | None = None
    changes = journey["changes_length"] or journey["kind"] == "shards"
    lengths = iter(journey["sequence_lengths"] if changes else journey["sequence_lengths"][:1] * 6)
    for world_size, batch_size, batches in journey["stops"]:
        loaders = loaders_of(
            source, world_size, state, batch_size=batch_size, sequence_length=next(lengths), **options
        )
        in_step = journey["kind"] == "global" and journey["changes_length"]
        for loader, count in zip(loaders, batches[:1] * 12 if in_step else batches, strict=False):
            for batch in itertools.islice(loader, count):
                read += tokens_of(batch)
        state = merged(loaders)
    (last,) = loaders_of(source, 1, state, sequence_length=next(lengths), **options)
    for batch in last:
        read += tokens_of(batch)

    counted = Counter(read)
    assert [token for token in source.all_tokens if counted[token] < journey["epochs"]] == [], "skipped"
    assert [token for token in counted if counted[token] > journey["epochs"]] == [], "revisited"
    assert last.epoch == journey["epochs"]


@settings(max_examples=examples(100))
@given(journeys())
def test_a_run_without_end_goes_on_into_the_next_epoch(journey: dict[str, Any]) -> None:
    """What all ranks read in one order is whole epochs, one after the other."""
    source = Numbered([length + 1 for length in journey["lengths"]])
    options = {name: journey[name] for name in ("shards", "seed")}
    read: list[int] = []
    state: Merged | None = None
    for world_size, batch_size, batches in journey["stops"]:
        loaders = loaders_of(source, world_size, state, batch_size=batch_size, sequence_length=16, **options)
        for of_ranks in itertools.islice(zip(*loaders, strict=True), batches[0]):
            rows = [batch.tolist() for batch in of_ranks]
            # Row n of all ranks is row n // W of rank n % W.
            for row in itertools.chain.from_iterable(zip(*rows, strict=True)):
                read += row
        state = merged(loaders)
    own = [*source.all_tokens]
    for epoch in range(0, len(read), len(own)):
        part = read[epoch : epoch + len(own)]
        assert len(set(part)) == len(part), "revisited within an epoch"
        assert len(part) < len(own) or sorted(part) == own, "skipped"


@pytest.mark.parametrize("kind", KINDS)
def test_four_six_three_one_four(kind: str) -> None:
    """The documents are longer than what is read between two changes."""
    source = Numbered([400] * 24, kind=kind)
    state, read = None, []
    for world_size in (4, 6, 3, 1, 4):
        loaders = loaders_of(
            source, world_size, state, shards=12, sequence_length=32, epochs=1, pad_token=PAD
        )
        for batch in itertools.chain.from_iterable(itertools.islice(loader, 3) for loader in loaders):
            read += tokens_of(batch)
        state = merged(loaders)
    for loader in loaders:
        for batch in loader:
            read += tokens_of(batch)
    assert sorted(read) == [*source.all_tokens]


@pytest.mark.parametrize(
    ("kinds", "options"),
    [(["global", "global"], DataOptions()), (["shards"], DataOptions(turns="count"))],
    ids=["lengths known, two sources", "turns by count"],
)
def test_ranks_in_step_read_the_same_global_batches_on_any_world_size(
    kinds: list[str], options: DataOptions
) -> None:
    sources = {
        str(number): Numbered([5, 90, 17, 33, 2, 140, 60, 8] * 9, first=10**6 * number, kind=kind)
        for number, kind in enumerate(kinds)
    }

    def steps(sizes: Sequence[int]) -> list[set[tuple[int, ...]]]:
        state: Merged | None = None
        global_batches: list[set[tuple[int, ...]]] = []
        for world_size in sizes:
            loaders = loaders_of(
                sources, world_size, state, batch_size=12 // world_size, shards=24, sequence_length=16, seed=3,
                options=options,
            )  # fmt: skip
            for batches in itertools.islice(zip(*loaders, strict=True), 3):
                global_batches.append({tuple(row) for batch in batches for row in batch.tolist()})
            state = merged(loaders)
        return global_batches

    assert steps([1] * 5) == steps([4, 6, 3, 1, 4]) == steps([12, 2, 12, 6, 3])


@settings(max_examples=examples(60))
@given(
    st.lists(
        st.tuples(st.sampled_from([1, 2, 3, 7, 0.1, 0.3, 0.7, 1 / 3, 1000, 0.001]), st.integers(0, 200)),
        min_size=1,
        max_size=4,
    ),
    st.booleans(),
    st.sampled_from(["drop", "stop", "repeat"]),
    st.integers(1, 90),
    st.integers(0, 300),
)
def test_a_schedule_is_the_same_however_it_is_gone_through(
    sources: list[tuple[float, int]], ends: bool, on_exhausted: Any, at_once: int, skipped: int
) -> None:
    """Whatever number of sequences is planned at a time; and what a state says of it is what was read."""

    def made() -> Schedule:
        weights, limits = ([*each] for each in zip(*sources, strict=True))
        return Schedule(weights, [0] * len(weights), limits if ends else None, on_exhausted)

    whole = made().take(400)[0].tolist()
    schedule = made()
    parts: list[int] = []
    while len(parts) < 400 and (part := schedule.take(at_once)[0].tolist()):
        parts += part
    assert parts[:400] == whole
    schedule = made()
    schedule.skip(skipped)
    assert schedule.read == [whole[:skipped].count(source) for source in range(len(sources))]


def test_sources_are_read_in_one_order_whatever_that_of_their_names() -> None:
    sources = {"a": Numbered([8] * 50), "b": Numbered([8] * 50, first=10_000)}
    options: dict[str, Any] = {"world_size": 2, "sequence_length": 8, "epochs": 1, "pad_token": PAD}
    read: list[int] = []
    for rank, names in enumerate(("ab", "ba")):
        dataset = ShardedDataset({name: sources[name] for name in names}, rank=rank, **options)
        read += [token for batch in RescalableLoader(dataset, batch_size=1) for token in tokens_of(batch)]
    assert sorted(read) == [*range(400), *range(10_000, 10_400)]


@pytest.mark.parametrize("kind", KINDS)
def test_sources_are_mixed_by_weight_on_every_rank(kind: str) -> None:
    sources = {"a": Numbered([50] * 40, kind=kind), "b": Numbered([50] * 40, first=100_000, kind=kind)}
    state = None
    total: Counter[bool] = Counter()
    for world_size in (2, 5, 3):
        loaders = loaders_of(
            sources, world_size, state, shards=20, sequence_length=10, weights={"a": 3, "b": 1}, batch_size=4
        )
        at_once = [[*itertools.islice(loader, 10)] for loader in loaders]
        for step in zip(*at_once, strict=True):
            mixed = [row[0] >= 100_000 for batch in step for row in batch.tolist()]
            assert world_size - 1 <= sum(mixed) <= world_size + 1, "not at each moment"
            total.update(mixed)
        state = merged(loaders)
    assert total[False] == pytest.approx(3 * total[True], rel=0.05)


# -- determinism -----------------------------------------------------------------------------------------


def rows(loader: RescalableLoader, count: int) -> list[Any]:
    return [batch.tolist() for batch in itertools.islice(loader, count)]


def test_same_seed_same_order() -> None:
    source = Numbered([9] * 60)

    def run(seed: int | None) -> list[Any]:
        (loader,) = loaders_of(source, 1, None, shards=5, sequence_length=8, seed=seed, batch_size=3)
        return rows(loader, 15)

    assert run(1) == run(1)
    assert run(1) != run(2)
    assert sorted(token for batch in run(None)[:1] for row in batch for token in row)[:8] == [*range(8)]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_without_a_seed_documents_come_as_they_are_stored(kind: str, world_size: int) -> None:
    """As a whole, however many shards they are dealt to."""
    source = Numbered([8] * 200, kind=kind)
    options: dict[str, Any] = {
        "shards": 40,
        "seed": None,
        "sequence_length": 8,
        "epochs": 1,
        "pad_token": PAD,
    }
    steps = zip(*loaders_of(source, world_size, None, **options), strict=True)
    assert [token for step in steps for batch in step for token in tokens_of(batch)] == [*source.all_tokens]


def test_another_epoch_has_another_order() -> None:
    (loader,) = loaders_of(Numbered([1] * 50), 1, None, shards=1, sequence_length=50)
    first, second = (batch[0] for batch in rows(loader, 2))
    assert sorted(first) == sorted(second) == [*range(50)]
    assert first != second != sorted(second)


@given(st.integers(1, 3000), st.integers(0, 5))
def test_permutations_permute(size: int, seed: int) -> None:
    order = Permutation(size, seed, "x")
    assert sorted(order) == [*range(size)]  # type: ignore[call-overload]
    assert len(order) == size
    with pytest.raises(IndexError):
        order[size]


def test_permutations_are_random_enough() -> None:
    """Where the first of eight things lands, and what follows what, over many seeds."""
    places = Counter(Permutation(8, seed)[0] for seed in range(4000))
    assert all(400 < places[place] < 600 for place in range(8))
    order = Permutation(10_000, 1)
    values = np.array([order[place] for place in range(10_000)], float)
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.05
    assert abs(np.corrcoef(values, np.arange(10_000))[0, 1]) < 0.05


def test_blocks_stay_together() -> None:
    source = Numbered([1] * 60, cut_every=10, kind="shards")
    (loader,) = loaders_of(source, 1, None, shards=2, sequence_length=10, seed=0)
    for (batch,) in rows(loader, 12):
        assert len({token // 10 for token in batch}) == 1
        assert batch != sorted(batch)


# -- sequences -------------------------------------------------------------------------------------------


def test_documents_with_their_delimiters() -> None:
    source = Numbered([3, 0, 2], first=10)
    (loader,) = loaders_of(
        source,
        1,
        None,
        shards=1,
        seed=None,
        bos_token=1,
        eos_token=2,
        sequence_length=4,
        epochs=1,
        pad_token=9,
    )
    assert rows(loader, 9) == [[[1, 10, 11, 12]], [[2, 1, 2, 1]], [[13, 14, 2, 9]]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("at", range(1, 13))
def test_reading_goes_on_at_any_token(kind: str, at: int) -> None:
    """Sequences of one token, then of all that are left."""
    options = {"shards": 1, "seed": 5, "epochs": 1, "bos_token": 1, "eos_token": 2, "pad_token": PAD}
    source = Numbered([3, 0, 4], first=10, kind=kind)
    (whole,) = loaders_of(source, 1, None, sequence_length=1, **options)
    tokens = [token for batch in whole for token in tokens_of(batch)]
    assert len(tokens) == 13
    (first,) = loaders_of(source, 1, None, sequence_length=1, **options)
    before = [token for batch in itertools.islice(first, at) for token in tokens_of(batch)]
    (second,) = loaders_of(source, 1, first.state_dict(), sequence_length=100, **options)
    after = [token for batch in second for token in tokens_of(batch)]
    assert before + after == tokens


@pytest.mark.parametrize("kind", KINDS)
def test_documents_without_tokens_at_the_very_end(kind: str) -> None:
    """A shard that looks as if there were more; whole batches of nothing are not handed out."""
    source = Numbered([4, 4, 0, 0, 0, 0], kind=kind)
    (loader,) = loaders_of(
        source, 1, None, shards=2, seed=None, sequence_length=4, epochs=1, pad_token=PAD, batch_size=2
    )
    assert rows(loader, 9) == [[[0, 1, 2, 3], [4, 5, 6, 7]]]
    assert loader.epoch == 1
    assert rows(loader, 9) == []


def test_one_document_without_tokens() -> None:
    """It can be all that a shard has in an epoch."""
    (loader,) = loaders_of(Numbered([8] * 19 + [0], kind="shards"), 1, None, sequence_length=8)
    assert len(rows(loader, 100)) == 100


def test_uneven_blocks_give_each_shard_documents() -> None:
    class Uneven(Numbered):
        def cuts(self, start: int, stop: int) -> Sequence[int]:
            return [cut for cut in range(1, 10) if start < cut < stop]

    source = Uneven([8] * 100, kind="shards")
    (loader,) = loaders_of(source, 1, None, sequence_length=8, epochs=1, pad_token=PAD)
    assert sorted(token for batch in loader for token in tokens_of(batch)) == [*source.all_tokens]


def test_no_tokens_at_all() -> None:
    (loader,) = loaders_of(
        Numbered([4, 0, 4, 0], kind="shards"), 1, None, shards=2, seed=None, sequence_length=4
    )
    with pytest.raises(ConfigurationError, match=r"shard 1.*no document of the shard has tokens"):
        rows(loader, 9)
    (loader,) = loaders_of(Numbered([0, 0, 0]), 1, None, sequence_length=4)
    with pytest.raises(ConfigurationError, match="no document of source 'data' has tokens"):
        rows(loader, 9)


def test_ranks_make_the_same_number_of_steps() -> None:
    """The last sequences are shared, and a rank that lacks one gets a row of padding."""
    loaders = loaders_of(
        Numbered([10] * 9), 4, None, shards=3, sequence_length=8, epochs=1, pad_token=PAD, batch_size=2
    )
    batches = [[*loader] for loader in loaders]
    assert [[len(batch) for batch in of_rank] for of_rank in batches] == [[2, 1]] * 4
    read = [token for of_rank in batches for batch in of_rank for token in tokens_of(batch)]
    assert sorted(read) == [*range(90)]
    assert merged(loaders)["ranks"]["00003-of-00004"].tolist() == [3, 0, 1, 0, 6, 8, 12]


@pytest.mark.parametrize(
    ("on_exhausted", "small", "large"), [("drop", 1, 1), ("stop", 1, 0.25), ("repeat", 4, 1)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_sources_that_end(kind: str, on_exhausted: Any, small: float, large: float) -> None:
    sources = {"small": Numbered([8] * 20, kind=kind), "large": Numbered([8] * 80, first=10_000, kind=kind)}
    options = DataOptions(on_exhausted=on_exhausted)
    (loader,) = loaders_of(
        sources, 1, None, shards=4, sequence_length=8, epochs=1, pad_token=PAD, options=options
    )
    read = Counter(batch[0, 0].item() >= 10_000 for batch in loader)
    assert read[False] == pytest.approx(20 * small, abs=2)
    assert read[True] == pytest.approx(80 * large, abs=2)


# -- the state -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_an_iteration_begins_where_the_last_ended(kind: str) -> None:
    source = Numbered([9] * 60, kind=kind)
    (whole,) = loaders_of(source, 1, None, shards=5, sequence_length=8)
    (parts,) = loaders_of(source, 1, None, shards=5, sequence_length=8)
    assert rows(parts, 4) + rows(parts, 1) + rows(parts, 5) == rows(whole, 10)


def test_fewer_epochs_than_were_read() -> None:
    """A run that has none left to read keeps its place."""
    source = Numbered([8] * 10)
    (first,) = loaders_of(source, 1, None, sequence_length=8)
    rows(first, 25)
    (ended,) = loaders_of(source, 1, first.state_dict(), sequence_length=8, epochs=1, pad_token=PAD)
    assert rows(ended, 9) == []
    (third,) = loaders_of(source, 1, ended.state_dict(), sequence_length=8)
    assert third.epoch == 2
    assert rows(third, 5) == rows(first, 5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_source_without_weight_does_not_count_for_the_epoch(kind: str) -> None:
    sources = {"a": Numbered([8] * 10, kind=kind), "b": Numbered([8] * 10, first=1000, kind=kind)}
    (loader,) = loaders_of(sources, 1, None, shards=2, sequence_length=8, weights={"a": 1, "b": 0})
    rows(loader, 20)
    assert loader.epoch == 2


def test_a_batch_is_noted_once_and_in_its_iteration() -> None:
    """Also if it is recorded twice, or when the next iteration has begun."""

    def made() -> RescalableLoader:
        return loaders_of(
            Numbered([8] * 40), 1, None, sequence_length=8, options=DataOptions(positions=True)
        )[0]

    loader = made()
    batches = [*itertools.islice(loader, 4)]
    for batch in (batches[0], batches[0], batches[1]):
        loader.record(batch)
    iter(loader)
    loader.record(batches[2])
    loader.record(batches[0])
    state = loader.state_dict()
    assert state["ranks"]["00000-of-00001"].tolist()[:2] == [3, 0]
    again = made()
    again.load_state_dict(state)
    assert torch.equal(next(iter(again))["tokens"], batches[3]["tokens"])


@pytest.mark.parametrize("lengths", [[4] * 10, [8] * 50], ids=["fewer and shorter", "more"])
def test_other_data_with_other_documents_go_on(lengths: list[int]) -> None:
    options: dict[str, Any] = {"shards": 1920, "sequence_length": 5}
    (first,) = loaders_of(Numbered([8] * 40, kind="shards"), 1, None, **options)
    rows(first, 30)
    allowed = DataOptions(allow_other_data=True)
    (other,) = loaders_of(Numbered(lengths, kind="shards"), 1, first.state_dict(), options=allowed, **options)
    assert len(rows(other, 40)) == 40


@pytest.mark.parametrize("kind", KINDS)
def test_a_stale_iteration_stops(kind: str) -> None:
    (loader,) = loaders_of(Numbered([9] * 60, kind=kind), 1, None, shards=5, sequence_length=8)
    state = loader.state_dict()
    stale = iter(loader)
    first = next(stale)
    loader.load_state_dict(state)
    with pytest.raises(CheckpointError, match="begin a new iteration"):
        next(stale)
    assert torch.equal(next(iter(loader)), first)
    (ending,) = loaders_of(
        Numbered([9], kind=kind), 1, None, shards=1, sequence_length=9, epochs=1, pad_token=PAD
    )
    state = ending.state_dict()
    stale = iter(ending)
    next(stale)
    ending.load_state_dict(state)
    with pytest.raises(CheckpointError, match="begin a new iteration"):
        next(stale)


def test_the_state_is_a_few_numbers_where_lengths_are_known() -> None:
    loaders = loaders_of(Numbered([9] * 60), 3, None, shards=5, sequence_length=8)
    state = merged(loaders)
    assert {name: len(value) for name, value in state["ranks"].items()} == {
        f"0000{rank}-of-00003": 7 for rank in range(3)
    }


def test_the_state_is_a_row_of_integers_per_shard_where_they_are_not() -> None:
    loaders = loaders_of(Numbered([9] * 60, kind="shards"), 3, None, shards=5, sequence_length=8)
    states = [loader.state_dict()["positions"]["data"] for loader in loaders]
    assert [[*state] for state in states] == [[f"{rank:05d}-of-00003"] for rank in range(3)]
    assert [next(iter(state.values()))[:, 0].tolist() for state in states] == [[0, 3], [1, 4], [2]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"shards": 6}, "shards: saved 5, here 6"),
        ({"seed": 1}, "seed: saved 0, here 1"),
        ({"eos_token": 7}, "eos_token: saved None, here 7"),
        (
            {"lengths": [9] * 61},
            "source 'data': saved '60 documents.*here '61 documents.*allow_other_data=True",
        ),
        ({"lengths": [9] * 59 + [10]}, "source 'data': saved '60 documents, .*here '60 documents, "),
    ],
)
def test_positions_in_other_data_are_refused(kind: str, changed: dict[str, Any], named: str) -> None:
    given: dict[str, Any] = {"lengths": [9] * 60, "shards": 5, "seed": 0, "sequence_length": 8}

    def made(state: Merged | None, **options: Any) -> RescalableLoader:
        return loaders_of(Numbered(options.pop("lengths"), kind=kind), 1, state, **options)[0]

    state = made(None, **given).state_dict()
    with pytest.raises(ConfigurationError, match=named):
        made(state, **{**given, **changed})
    if "lengths" in changed:
        made(state, **{**given, **changed}, options=DataOptions(allow_other_data=True))


@pytest.mark.parametrize("kind", KINDS)
def test_sources_come_and_go_and_weights_change(kind: str) -> None:
    """Each source continues where it was; the new weights hold from here on."""
    sources = {name: Numbered([8] * 100, first=10_000 * at, kind=kind) for at, name in enumerate("abc")}
    options: dict[str, Any] = {"shards": 4, "sequence_length": 8}
    (first,) = loaders_of({name: sources[name] for name in "ab"}, 1, None, **options)
    read = [row for batch in rows(first, 40) for row in batch]
    (second,) = loaders_of(sources, 1, first.state_dict(), weights={"a": 9, "b": 0, "c": 1}, **options)
    more = [row for batch in rows(second, 60) for row in batch]
    assert Counter(row[0] // 10_000 for row in more) == {0: 54, 2: 6}
    (third,) = loaders_of({"a": sources["a"]}, 1, second.state_dict(), **options)
    more += [row for batch in rows(third, 10) for row in batch]
    of_a = [token for row in read + more for token in row if token < 10_000]
    assert len(of_a) == len(set(of_a)) == 8 * (20 + 54 + 10)


def test_a_run_in_the_order_before_goes_on_in_it() -> None:
    """Its shards are ranges of documents; the state names no order."""
    source = Numbered([9] * 60)
    settings = {"version": 1, "sources": {"data": "60 documents, 0badcafe"}, "shards": 5, "seed": 0}
    positions = {f"{shard:06d}": torch.tensor([0, 1, 3, 1]) for shard in range(5)}
    state: Merged = {
        "settings": json.dumps({**settings, "bos_token": None, "eos_token": None}), "shards": {"data": positions},
    }  # fmt: skip
    (loader,) = loaders_of(source, 1, state, shards=5, sequence_length=6)
    first = rows(loader, 1)[0][0]
    assert {token // 9 for token in first} <= set(range(12)), "of the first of five shards"
    again = loader.state_dict()
    assert json.loads(again["settings"])["version"] == 1
    assert again["shards"]["data"]["000000"].tolist() == [0, 2, 0, 2]
    (more,) = loaders_of(source, 1, again, shards=5, sequence_length=6)
    assert rows(more, 3) == rows(loader, 3)
    with pytest.raises(ConfigurationError, match="60 documents, fewer than shards=61"):
        loaders_of(
            source,
            1,
            {**state, "settings": state["settings"].replace(": 5", ": 61")},
            shards=61,
            sequence_length=6,
        )


def test_a_state_saved_before_documents_were_dealt() -> None:
    """Sequence by sequence as the library read on that saved it."""
    saved = json.loads((ROOT / "tests" / "data" / "loader-v1.json").read_text())
    ends = [0, *itertools.accumulate([5, 90, 17, 33, 2, 14, 60, 8] * 9)]
    documents = [list(range(*pair)) for pair in itertools.pairwise(ends)]
    sources = {"a": MapSource(documents), "b": MapSource(documents[::-1])}
    (loader,) = loaders_of(
        sources,
        1,
        saved,
        batch_size=2,
        weights={"a": 3, "b": 1},
        sequence_length=16,
        shards=6,
        eos_token=0,
        seed=4,
    )
    assert rows(loader, 6) == saved["batches"]


@pytest.mark.parametrize("position", [[-1, 0, 0, 0, 0], [0, 0, -5, 0, 0]])
def test_positions_that_cannot_be_are_refused(position: list[int]) -> None:
    (loader,) = loaders_of(Numbered([9] * 60), 1, None, shards=5, sequence_length=8)
    state = loader.state_dict()
    state["ranks"]["00000-of-00001"][2:] = torch.tensor(position)
    with pytest.raises(FormatError, match="'data': impossible"):
        loader.load_state_dict(state)
    state["ranks"]["00000-of-00001"] = torch.tensor([0, 0, 0])
    with pytest.raises(FormatError, match="rank 0: 1 numbers for 1 sources"):
        loader.load_state_dict(state)
    own = torch.zeros(7, dtype=torch.int64)
    late = torch.tensor([1 << 62, 0, 0, 0, 0, 0, 0])
    for ranks in (
        {},
        {"00000-of-2147483647": own},
        {"00002-of-00002": own, "00003-of-00002": own, "00004-of-00002": own},
    ):
        with pytest.raises(FormatError, match="not of ranks"):
            loader.load_state_dict({**state, "ranks": ranks})
    with pytest.raises(FormatError, match="4611686018427387904 sequences ahead"):
        loader.load_state_dict({**state, "ranks": {"00000-of-00002": own, "00001-of-00002": late}})
    (loader,) = loaders_of(Numbered([9] * 60, kind="shards"), 1, None, shards=5, sequence_length=8)
    state = loader.state_dict()
    (rows_of,) = state["positions"]["data"].values()
    rows_of[3, 1:] = torch.tensor(position)
    with pytest.raises(FormatError, match="'data', shard 3: impossible"):
        loader.load_state_dict(state)
    state["positions"]["data"] = {"00000-of-00001": rows_of[:3]}
    with pytest.raises(FormatError, match="'data', shard 3: missing"):
        loader.load_state_dict(state)
    with pytest.raises(FormatError, match="settings"):
        loader.load_state_dict({**loader.state_dict(), "settings": "{"})


def test_a_state_that_cannot_be_loaded_changes_nothing() -> None:
    (loader,) = loaders_of(Numbered([9] * 60, kind="shards"), 1, None, shards=5, sequence_length=8)
    state = loader.state_dict()
    rows(loader, 12)
    before = loader.state_dict()
    own = state["positions"]["data"]
    with pytest.raises(FormatError, match="shard 4: missing"):
        loader.load_state_dict(
            {**state, "positions": {"data": {name: rows_[:-1] for name, rows_ in own.items()}}}
        )
    after = loader.state_dict()
    assert all(
        torch.equal(after["positions"]["data"][name], before["positions"]["data"][name]) for name in own
    )


def test_an_offset_beyond_its_document() -> None:
    (loader,) = loaders_of(Numbered([9] * 60, kind="shards"), 1, None, shards=5, sequence_length=8)
    state = loader.state_dict()
    (rows_of,) = state["positions"]["data"].values()
    rows_of[0, 1:] = torch.tensor([0, 0, 10, 1, 10])
    loader.load_state_dict(state)
    with pytest.raises(
        ConfigurationError,
        match="shard 0, document 0 has 9 tokens, but 10 were read before: the data changed",
    ):
        rows(loader, 9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shards": 0}, "shards must be positive"),
        ({"options": {}}, r"options must be ckpt\.options\.DataOptions"),
        ({"sequence_length": 0}, "sequence_length must be positive"),
        ({"epochs": 1}, "epochs= needs pad_token="),
        ({"rank": 3, "world_size": 3}, "rank must be from 0 to 2 .*, not 3"),
        ({"rank": 1}, "both, or neither"),
        ({"weights": {"other": 1.0}}, "weights must be a number for each of data"),
        ({"weights": {"data": 0.0}}, "not all of them 0"),
        ({"eos_token": 2**70}, "do not fit int64|must be one list of integer tokens"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ShardedDataset(Numbered([9] * 60), **{"shards": 5, "sequence_length": 8, **options})


def test_wrong_arguments_of_the_loader() -> None:
    dataset = ShardedDataset(Numbered([9] * 60), shards=5, sequence_length=8)
    with pytest.raises(ConfigurationError, match="must be positive"):
        RescalableLoader(dataset, batch_size=0)
    unknown = Numbered([9] * 60, kind="shards")
    with pytest.raises(ConfigurationError, match="2 shards are too few for 3 ranks"):
        ShardedDataset(unknown, shards=2, sequence_length=8, rank=0, world_size=3)
    dataset = ShardedDataset(unknown, shards=5, sequence_length=8)
    with pytest.raises(ConfigurationError, match="5 shards, too few for 6 workers"):
        RescalableLoader(dataset, batch_size=1, num_workers=6)


def test_a_dataset_pickles() -> None:
    dataset = ShardedDataset(Numbered([9] * 60), shards=5, sequence_length=8)
    copy = pickle.loads(pickle.dumps(dataset))
    assert _first(copy) == _first(dataset)


def _first(dataset: ShardedDataset) -> Mapping[str, Any]:
    rows: Iterator[Mapping[str, Any]] = iter(dataset)
    return {name: np.asarray(value).tolist() for name, value in next(rows).items()}
