"""The rescalable loader: on any schedule of ranks and workers, every token of an epoch once and in
order.
"""

from __future__ import annotations

import itertools
import pickle
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiers import examples

from ckpt.errors import ConfigurationError, FormatError
from ckpt.trainer_integration.data_order.permutation import Permutation
from ckpt.trainer_integration.data_order.shards import Cursor, Position, Shard
from ckpt.trainer_integration.dataloader import RescalableLoader
from ckpt.trainer_integration.dataset import Sample, ShardedDataset
from ckpt.trainer_integration.sources import MapSource

PAD = -1


class Numbered(MapSource):
    """Documents in which no token appears twice, so that a token tells where it comes from."""

    def __init__(self, lengths: Sequence[int], *, first: int = 0, cut_every: int = 10**9) -> None:
        ends = [first, *(first + end for end in itertools.accumulate(lengths))]
        super().__init__([np.arange(*pair) for pair in itertools.pairwise(ends)], dtype=np.int64)
        self.all_tokens = range(first, ends[-1])
        self._cut_every = cut_every

    def cuts(self, start: int, stop: int) -> Sequence[int]:
        return [cut for cut in range(0, stop, self._cut_every) if start < cut < stop]


Merged = dict[str, Any]


def merged(loaders: Sequence[RescalableLoader]) -> Merged:
    """What a checkpoint holds when all ranks have saved."""
    shards: dict[str, dict[str, torch.Tensor]] = {}
    states = [loader.state_dict() for loader in loaders]
    for state in states:
        for name, of_source in state["shards"].items():
            assert not shards.setdefault(name, {}).keys() & of_source.keys(), "a shard has two owners"
            shards[name] |= of_source
    assert len({state["settings"] for state in states}) == 1
    return {"settings": states[0]["settings"], "shards": shards}


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


def by_shard(read: Sequence[int], source: Numbered, shards: int) -> dict[int, list[int]]:
    """What was read of each shard, in order."""
    owner: dict[int, int] = {}
    for shard in Shard.all_of("data", source.documents, shards):
        for document in range(shard.start, shard.stop):
            owner |= dict.fromkeys(source.tokens(document).tolist(), shard.number)
    tokens: dict[int, list[int]] = {number: [] for number in range(shards)}
    for token in read:
        tokens[owner[token]].append(token)
    return tokens


# -- rescaling -------------------------------------------------------------------------------------------


@st.composite
def journeys(draw: st.DrawFn) -> dict[str, Any]:
    shards = draw(st.integers(1, 12))
    lengths = draw(st.lists(st.sampled_from([0, 1, 2, 3, 7, 20, 60]), min_size=shards, max_size=40))
    stops = st.tuples(
        st.integers(1, shards), st.integers(1, 4), st.lists(st.integers(0, 9), min_size=12, max_size=12)
    )
    return {
        "lengths": lengths,
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
    """World and batch sizes and sequence length change at any moment, and ranks need not be in
    step.
    """
    source = Numbered(journey["lengths"], cut_every=journey["cut_every"])
    options = {name: journey[name] for name in ("shards", "seed", "epochs")} | {"pad_token": PAD}
    read: list[int] = []
    state: Merged | None = None
    lengths = iter(journey["sequence_lengths"])
    for world_size, batch_size, batches in journey["stops"]:
        loaders = loaders_of(
            source, world_size, state, batch_size=batch_size, sequence_length=next(lengths), **options
        )
        for loader, count in zip(loaders, batches, strict=False):
            for batch in itertools.islice(loader, count):
                read += tokens_of(batch)
        state = merged(loaders)
    (last,) = loaders_of(source, 1, state, sequence_length=next(lengths), **options)
    for batch in last:
        read += tokens_of(batch)

    counted = Counter(read)
    assert [token for token in source.all_tokens if counted[token] < journey["epochs"]] == [], "skipped"
    assert [token for token in counted if counted[token] > journey["epochs"]] == [], "revisited"
    (whole,) = loaders_of(source, 1, None, sequence_length=5, **options)
    uninterrupted = [token for batch in whole for token in tokens_of(batch)]
    assert by_shard(read, source, journey["shards"]) == by_shard(uninterrupted, source, journey["shards"])
    assert last.epoch == journey["epochs"]


@settings(max_examples=examples(100))
@given(journeys())
def test_a_run_without_end_goes_on_into_the_next_epoch(journey: dict[str, Any]) -> None:
    """What is read of a shard is the beginning of its stream: whole epochs, one after the other."""
    source = Numbered([length + 1 for length in journey["lengths"]], cut_every=journey["cut_every"])
    options = {name: journey[name] for name in ("shards", "seed")}
    read: list[int] = []
    state: Merged | None = None
    for world_size, batch_size, batches in journey["stops"]:
        loaders = loaders_of(source, world_size, state, batch_size=batch_size, sequence_length=16, **options)
        for loader, count in zip(loaders, batches, strict=False):
            for batch in itertools.islice(loader, count):
                read += batch.flatten().tolist()
        state = merged(loaders)
    for number, tokens in by_shard(read, source, journey["shards"]).items():
        (shard,) = [
            s for s in Shard.all_of("data", source.documents, journey["shards"]) if s.number == number
        ]
        own = sorted(token for at in range(shard.start, shard.stop) for token in source.tokens(at).tolist())
        for epoch in range(0, len(tokens), len(own)):
            part = tokens[epoch : epoch + len(own)]
            assert len(set(part)) == len(part), "revisited within an epoch"
            assert set(part) <= set(own)
            assert len(part) < len(own) or sorted(part) == own, "skipped"


def test_four_six_three_one_four() -> None:
    """The documents are longer than what is read between two changes."""
    source = Numbered([400] * 24)
    state, read = None, []
    for world_size in (4, 6, 3, 1, 4):
        loaders = loaders_of(
            source, world_size, state, shards=12, sequence_length=32, epochs=1, pad_token=PAD
        )
        for batch in itertools.chain.from_iterable(itertools.islice(loader, 3) for loader in loaders):
            read += tokens_of(batch)
        state = merged(loaders)
        offsets = [positions[2].item() for positions in state["shards"]["data"].values()]
        assert any(0 < offset < 400 for offset in offsets), "this is to happen in the middle of documents"
    for loader in loaders:
        for batch in loader:
            read += tokens_of(batch)
    assert sorted(read) == [*source.all_tokens]


def test_ranks_in_step_read_the_same_global_batches_on_any_world_size() -> None:
    source = Numbered([5, 90, 17, 33, 2, 140, 60, 8] * 9)
    options = {"shards": 24, "sequence_length": 16, "seed": 3}

    def steps(sizes: Sequence[int]) -> list[set[tuple[int, ...]]]:
        state: Merged | None = None
        global_batches: list[set[tuple[int, ...]]] = []
        for world_size in sizes:
            loaders = loaders_of(source, world_size, state, batch_size=12 // world_size, **options)
            for batches in itertools.islice(zip(*loaders, strict=True), 3):
                global_batches.append({tuple(row) for batch in batches for row in batch.tolist()})
            state = merged(loaders)
        return global_batches

    assert steps([1] * 5) == steps([4, 6, 3, 1, 4]) == steps([12, 2, 12, 6, 3])


@settings(max_examples=examples(50))
@given(
    counts=st.lists(st.integers(0, 3), min_size=2, max_size=40),
    weights=st.lists(st.sampled_from([0.1, 1.0, 2.5]), min_size=20, max_size=20),
    parts=st.integers(1, 5),
)
def test_any_part_of_the_shards_is_read_in_the_order_of_the_whole(
    counts: list[int], weights: list[float], parts: int
) -> None:
    """So workers can read on their own, and the order does not depend on their number."""
    sources = {str(number): Numbered([1] * 4) for number in range(len(counts) // 2)}
    mixed = dict(zip(sources, weights, strict=False))
    dataset = ShardedDataset(sources, weights=mixed, shards=4, sequence_length=1, rank=1, world_size=2)

    begun = dict(zip(dataset.own_shards, counts, strict=False))

    def order(indices: Sequence[int], length: int) -> list[int]:
        taken = {index: begun[index] for index in indices}

        def read(index: int) -> Sample:
            taken[index] += 1
            return Sample(index, Position(sequences=taken[index]), np.empty(0, np.int64))

        positions = {index: Position(sequences=taken[index]) for index in indices}
        return [sample.shard for sample in itertools.islice(dataset.in_turn(positions, read), length)]

    everything = dataset.own_shards
    whole = order(everything, 200)
    for part in range(parts):
        mine = everything[part::parts]
        expected = [index for index in whole if index in mine]
        assert order(mine, len(expected)) == expected


def test_sources_are_mixed_by_weight_on_every_rank() -> None:
    sources = {"a": Numbered([50] * 40), "b": Numbered([50] * 40, first=100_000)}
    state = None
    total: Counter[bool] = Counter()
    for world_size in (2, 5, 3):
        loaders = loaders_of(
            sources, world_size, state, shards=20, sequence_length=10, weights={"a": 3, "b": 1}, batch_size=4
        )
        for loader in loaders:
            mixed = [row[0] >= 100_000 for batch in itertools.islice(loader, 10) for row in batch.tolist()]
            assert all(1 <= sum(mixed[at : at + 8]) <= 3 for at in range(0, 40, 8)), "not at each moment"
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
    (loader,) = loaders_of(Numbered([1] * 60, cut_every=10), 1, None, shards=2, sequence_length=10, seed=0)
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


@pytest.mark.parametrize("at", range(13))
def test_a_cursor_goes_on_at_any_token(at: int) -> None:
    def cursor(position: Position) -> Cursor:
        shard = Shard("data", 0, 1, 0, 3)
        return Cursor(shard, source, position, seed=5, epochs=1, bos_token=1, eos_token=2)

    source = Numbered([3, 0, 4], first=10)
    whole = cursor(Position()).take(100).tolist()
    first = cursor(Position())
    before = first.take(at).tolist()
    assert before + cursor(first.position).take(100).tolist() == whole
    assert len(whole) == 13


def test_documents_without_tokens_at_the_very_end() -> None:
    """A shard that looks as if there were more; whole batches of nothing are not handed out."""
    source = Numbered([4, 0, 0, 4, 0, 0])
    (loader,) = loaders_of(
        source, 1, None, shards=2, seed=None, sequence_length=4, epochs=1, pad_token=PAD, batch_size=2
    )
    assert rows(loader, 9) == [[[0, 1, 2, 3], [4, 5, 6, 7]]]
    assert loader.epoch == 1
    assert rows(loader, 9) == []


def test_a_shard_without_tokens() -> None:
    (loader,) = loaders_of(Numbered([4, 4, 0, 0]), 1, None, shards=2, seed=None, sequence_length=4)
    with pytest.raises(ConfigurationError, match=r"shard 1.*no document of the shard has tokens"):
        rows(loader, 9)


# -- the state -------------------------------------------------------------------------------------------


def test_an_iteration_begins_where_the_last_ended() -> None:
    source = Numbered([9] * 60)
    (whole,) = loaders_of(source, 1, None, shards=5, sequence_length=8)
    (parts,) = loaders_of(source, 1, None, shards=5, sequence_length=8)
    assert rows(parts, 4) + rows(parts, 1) + rows(parts, 5) == rows(whole, 10)


def test_a_stale_iteration_stops() -> None:
    (loader,) = loaders_of(Numbered([9] * 60), 1, None, shards=5, sequence_length=8)
    state = loader.state_dict()
    stale = iter(loader)
    next(stale)
    loader.load_state_dict(state)
    with pytest.raises(Exception, match="iterate anew"):
        next(stale)
    again = loader.state_dict()
    assert all(bool((again["shards"]["data"][n] == p).all()) for n, p in state["shards"]["data"].items())


def test_positions_are_a_row_of_integers_per_shard() -> None:
    loaders = loaders_of(Numbered([9] * 60), 3, None, shards=5, sequence_length=8)
    states = [loader.state_dict()["shards"]["data"] for loader in loaders]
    assert [[*state] for state in states] == [["000000", "000003"], ["000001", "000004"], ["000002"]]
    assert {(p.dtype, tuple(p.shape)) for state in states for p in state.values()} == {(torch.int64, (4,))}


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"shards": 6}, "shards: saved 5, here 6"),
        ({"seed": 1}, "seed: saved 0, here 1"),
        ({"eos_token": 7}, "eos_token: saved None, here 7"),
        ({"source": Numbered([9] * 61)}, "sources: saved .*60 documents.*here .*61 documents"),
    ],
)
def test_positions_in_other_data_are_refused(changed: dict[str, Any], named: str) -> None:
    options: dict[str, Any] = {"source": Numbered([9] * 60), "shards": 5, "seed": 0, "sequence_length": 8}
    (loader,) = loaders_of(options.pop("source"), 1, None, **options)
    other = {"source": Numbered([9] * 60), **options, **changed}
    with pytest.raises(ConfigurationError, match=named):
        loaders_of(other.pop("source"), 1, loader.state_dict(), **other)


@pytest.mark.parametrize("position", [[0, -1, 0, 0], [0, 12, 0, 0], [0, 0, -5, 0], [-1, 0, 0, 0]])
def test_positions_that_cannot_be_are_refused(position: list[int]) -> None:
    (loader,) = loaders_of(Numbered([9] * 60), 1, None, shards=5, sequence_length=8)
    state = loader.state_dict()
    state["shards"]["data"]["000003"] = torch.tensor(position)
    with pytest.raises(FormatError, match="'data', shard 3: impossible"):
        loader.load_state_dict(state)
    state["shards"]["data"]["000003"] = torch.tensor([0, 0, 0])
    with pytest.raises(FormatError, match="'data', shard 3: not a position"):
        loader.load_state_dict(state)
    del state["shards"]["data"]["000003"]
    with pytest.raises(FormatError, match="'data', shard 3: not a position"):
        loader.load_state_dict(state)
    with pytest.raises(FormatError, match="settings"):
        loader.load_state_dict({**loader.state_dict(), "settings": "{"})


def test_an_offset_beyond_its_document() -> None:
    (loader,) = loaders_of(Numbered([9] * 60), 1, None, shards=5, sequence_length=8)
    state = loader.state_dict()
    state["shards"]["data"]["000000"] = torch.tensor([0, 0, 10, 1])
    state["shards"]["data"]["000001"] = torch.tensor([0, 0, 0, 1])
    loader.load_state_dict(state)
    with pytest.raises(
        ConfigurationError,
        match="shard 0, document 0 has 9 tokens, but 10 were read before: the data changed",
    ):
        rows(loader, 9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shards": 61}, "60 documents, fewer than shards=61"),
        ({"shards": 2, "rank": 0, "world_size": 3}, "2 shards are too few for 3 ranks"),
        ({"sequence_length": 0}, "sequence_length must be positive"),
        ({"epochs": 1}, "epochs= needs pad_token="),
        ({"rank": 3, "world_size": 3}, "rank must be from 0 to 2 .*, not 3"),
        ({"rank": 1}, "both, or neither"),
        ({"weights": {"other": 1.0}}, "weights must be a positive number for each of data"),
        ({"weights": {"data": 0.0}}, "weights must be a positive number"),
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
    with pytest.raises(ConfigurationError, match="5 shards, too few for 6 workers"):
        RescalableLoader(dataset, batch_size=1, num_workers=6)


def test_a_dataset_pickles() -> None:
    dataset = ShardedDataset(Numbered([9] * 60), shards=5, sequence_length=8)
    copy = pickle.loads(pickle.dumps(dataset))
    assert _first(copy) == _first(dataset)


def _first(dataset: ShardedDataset) -> Mapping[str, Any]:
    rows: Iterator[Mapping[str, Any]] = iter(dataset)
    return {name: np.asarray(value).tolist() for name, value in next(rows).items()}
