"""Plans of columns store what DCP's own plan stores, and all that ranks disagree about is an error on all."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.simulated_plans import (
    Rendezvous,
    Tensor,
    ThreadRanks,
    on_ranks,
    placements_for,
    structure_of,
)
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from ckpt.errors import CheckpointError, CommitError, ConfigurationError
from ckpt.format import index
from ckpt.format.columns import TensorColumns
from ckpt.format.runs import TensorRuns
from ckpt.ranks.group import RanksFailed
from ckpt.ranks.many_failures import MAX_FAILURES
from ckpt.save_plans.central import CentralPlan
from ckpt.save_plans.exchange import Agreed, Local, Plans, agree
from ckpt.save_plans.file_layouts import pack_placed
from ckpt.save_plans.local import Structure
from ckpt.save_plans.placing import columns_of
from ckpt.save_plans.sections import decode_section

Stored = dict[str, Any]


def planned(structures: Sequence[Structure]) -> CentralPlan:
    sections = {d: decode_section(c) for each in structures for d, c in each.contents.items()}
    return CentralPlan([each.message for each in structures], sections)


def written(plan: CentralPlan, structures: Sequence[Structure]) -> list[list[Any]]:
    from ckpt.save_plans.exchange import _chosen

    return [_chosen(each, answer) for each, answer in zip(structures, plan.answers, strict=True)]


def by_dcp(structures: Sequence[Structure]) -> tuple[Stored, list[int]]:
    """What DCP's planner stores, and how much of it each rank."""
    planner = DefaultSavePlanner(flatten_state_dict=False)
    plans, metadata = planner.create_global_plan([SavePlan(each.items) for each in structures])
    stored = {
        fqn: (
            each.size,
            each.properties.dtype,
            sorted((tuple(c.offsets), tuple(c.sizes)) for c in each.chunks),
        )
        if isinstance(each, TensorStorageMetadata)
        else None
        for fqn, each in metadata.state_dict_metadata.items()
    }
    return stored, [sum(map(nbytes_of, plan.items)) for plan in plans]


def nbytes_of(item: WriteItem) -> int:
    data = item.tensor_data
    return 1 if data is None else data.chunk.sizes.numel() * data.properties.dtype.itemsize


def by_columns(plan: CentralPlan, structures: Sequence[Structure]) -> Stored:
    """What our plan stores, as the columns say it after every rank has reported what it wrote."""
    items = written(plan, structures)
    packed = [pack_placed([(i.index.index, 0, i.index.index, 7) for i in each]) for each in items]
    columns = columns_of(plan, packed, [[f"r{rank}"] for rank in range(len(items))])
    stored: Stored = {}
    for fqn, entry in columns.entries.items():
        stored[fqn] = None
        if isinstance(entry, TensorColumns):
            boxes = zip(entry.offsets.tolist(), entry.sizes.tolist(), strict=True)
            chunks = [(tuple(offsets), tuple(sizes)) for offsets, sizes in boxes]
            stored[fqn] = torch.Size(entry.size), getattr(torch, entry.dtype), sorted(chunks)
            for chunk, file, offset in zip(chunks, entry.file.tolist(), entry.offset.tolist(), strict=True):
                held = next(item for item in items[file] if item.index.index == offset)
                assert (held.index.fqn, tuple(held.tensor_data.chunk.offsets)) == (fqn, chunk[0])
    assert sum(map(len, items)) == plan.rows
    return stored


def random_tensors(seed: int, mesh: tuple[int, ...], count: int) -> list[Tensor]:
    chance = random.Random(seed)
    tensors = [Tensor("step", (), dtype=torch.int64), Tensor("lr", (), is_object=True)]
    size = 1
    for each in mesh:
        size *= each
    for number in range(count):
        shape = tuple(chance.choice([1, 2, 3, 5, 8, 16, 64]) for _ in range(chance.randint(1, 3)))
        dims = [chance.choice([None, *range(len(shape))]) for _ in mesh]
        dtype = chance.choice([torch.float32, torch.bfloat16])
        placements = placements_for(mesh, dims) if chance.random() < 0.8 else ()
        as_rows = bool(placements) and chance.random() < 0.2
        tensors.append(Tensor(f"layers.{number}.weight", shape, placements, dtype, as_rows=as_rows))
    for rank in range(0, size, max(1, size // 5)):
        tensors.append(Tensor(f"rng.{rank}", (4,), ranks=range(rank, rank + 1)))
        tensors.append(Tensor(f"loader.{rank}", (), ranks=range(rank, rank + 2), is_object=True))
    chance.shuffle(tensors)
    return tensors


MESHES = [(1,), (2,), (7,), (4, 2), (2, 3, 2), (8, 4)]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_stores_what_dcp_stores(mesh: tuple[int, ...]) -> None:
    size = torch.Size(mesh).numel()
    for seed in range(4):
        tensors = random_tensors(seed, mesh, 12)
        structures = [structure_of(tensors, mesh, rank) for rank in range(size)]
        plan = planned(structures)
        stored, loads = by_dcp(structures)
        assert by_columns(plan, structures) == stored
        assert plan.loads.sum() == sum(loads)
        assert plan.loads.max() <= max(loads) * 4 / 3


@pytest.mark.long
@pytest.mark.parametrize("mesh", [(1024,), (128, 8), (16, 8, 4)], ids=str)
def test_stores_what_dcp_stores_on_many_ranks(mesh: tuple[int, ...]) -> None:
    size = torch.Size(mesh).numel()
    tensors = random_tensors(1, mesh, 25)
    structures = [structure_of(tensors, mesh, rank) for rank in range(size)]
    plan = planned(structures)
    stored, loads = by_dcp(structures)
    assert by_columns(plan, structures) == stored
    assert plan.loads.max() <= max(loads) * 4 / 3
    assert plan.loads.sum() == sum(loads)


def test_replicas_share_evenly() -> None:
    tensors = [Tensor(f"w{n}", (100 + n, 10)) for n in range(64)]
    structures = [structure_of(tensors, (8,), rank) for rank in range(8)]
    loads = planned(structures).loads
    assert loads.max() - loads.min() <= 4 * 163 * 10


# -- where the chunks are ----------------------------------------------------------------------------------

MANY = 300


def many_ranks(mesh: tuple[int, ...] = (MANY,)) -> tuple[CentralPlan, list[Structure]]:
    """Sharded evenly, with a rest, to fewer ranks than there are; replicated; of one rank; an object."""
    sharded = placements_for(mesh, [0] * len(mesh))
    tensors = [
        Tensor("even", (600, 2), sharded),
        Tensor("rest", (899, 2), sharded),
        Tensor("few", (520, 3), sharded),
        Tensor("columns", (4, 300), placements_for(mesh, [1] * len(mesh))),
        Tensor("whole", (5,)),
        Tensor("lr", (), is_object=True),
        Tensor("rng", (4,), ranks=range(7, 8)),
    ]
    structures = [structure_of(tensors, mesh, rank) for rank in range(MANY)]
    return planned(structures), structures


def laid_out(items: Sequence[Any], files: int) -> list[tuple[int, int, int, int]]:
    """Where a rank puts its items, one after another, in turns in its files."""
    rows, ends = [], [0] * files
    for turn, each in enumerate(items):
        file, nbytes = turn % files, 40 + nbytes_of(each)
        rows.append((each.index.index, file, ends[file], nbytes))
        ends[file] += -(-nbytes // 64) * 64
    return rows


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("mesh", [(MANY,), (30, 10)], ids=str)
def test_chunks_of_many_ranks_are_runs(mesh: tuple[int, ...], files: int) -> None:
    plan, structures = many_ranks(mesh)
    items = written(plan, structures)
    rows = [laid_out(each, files) for each in items]
    names = [[f"r{rank}-{number}" for number in range(files)] for rank in range(MANY)]
    columns = columns_of(plan, [pack_placed(each) for each in rows], names)
    regular = {fqn for fqn, entry in columns.entries.items() if isinstance(entry, TensorRuns)}
    assert regular == {"even", "rest", "few", "columns"}
    where = {}
    for rank, placed in enumerate(rows):
        by_number = {item.index.index: item for item in items[rank]}
        for number, file, offset, length in placed:
            index = by_number[number].index
            key = index.fqn, None if index.offset is None else tuple(index.offset)
            where[key] = files * rank + file, offset, length
    for fqn, entry in columns.entries.items():
        if not isinstance(entry, TensorColumns):
            assert (entry.file, entry.offset, entry.length) == where.pop((fqn, None))
            continue
        places = zip(entry.file.tolist(), entry.offset.tolist(), entry.length.tolist(), strict=True)
        for offsets, place in zip(entry.offsets.tolist(), places, strict=True):
            assert place == where.pop((fqn, tuple(offsets)))
    assert not where


@pytest.mark.parametrize("count", [4, MANY])
def test_what_was_not_written_as_planned_is_not_committed(count: int) -> None:
    tensors = [Tensor(f"w{n}", (count, 2), placements_for((count,), [0])) for n in range(3)]
    structures = [structure_of(tensors, (count,), rank) for rank in range(count)]
    plan, names = planned(structures), [[f"r{rank}"] for rank in range(count)]
    good = [pack_placed(laid_out(each, 1)) for each in written(plan, structures)]
    columns_of(plan, good, names)
    rank, rows = count - 2, laid_out(written(plan, structures)[count - 2], 1)
    for bad, reason in (
        (rows[:-1], f"rank {rank} was to write 3 items and has written 2"),
        ([*rows, (3, 0, 0, 1)], f"rank {rank} was to write 3 items and has written 4"),
        ([*rows[:-1], (7, 0, 0, 1)], f"planned but not written: 'w.' on rank {rank}"),
        ([(-1, 0, 0, 1), *rows[1:]], f"planned but not written: 'w.' on rank {rank}"),
    ):
        with pytest.raises(CommitError, match=reason):
            columns_of(plan, [*good[:rank], pack_placed(bad), *good[rank + 1 :]], names)


# -- ranks that do not fit together ------------------------------------------------------------------------


FSDP = placements_for((4,), [0])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (Tensor("w", (8, 4), FSDP, torch.float16), r"'w' is a tensor of float32 \(8, 4\) on rank 0, 1, 3, and a .*float16 .* on rank 2"),
        (Tensor("w", (8, 6), FSDP), r"'w' is .*\(8, 4\) on rank 0, 1, 3, and .*\(8, 6\) on rank 2"),
        (Tensor("w", (), is_object=True), "'w' is a tensor .* on rank 0, 1, 3, and an object on rank 2"),
        (Tensor("other", (8, 4)), r"'w' of size \(8, 4\), held by rank 0, 1, 3: \[4:6, 0:4\] is not stored"),
        (Tensor("w", (8, 4)), r"'w' has at \(0, 0\) a chunk of \(2, 4\) on rank 0, and one of \(8, 4\) on rank 2"),
    ],
)  # fmt: skip
def test_ranks_disagree(changed: Tensor, message: str) -> None:
    usual = [Tensor("w", (8, 4), FSDP), Tensor("b", (3,))]
    structures = [structure_of([changed, usual[1]] if rank == 2 else usual, (4,), rank) for rank in range(4)]
    with pytest.raises(CheckpointError, match=message):
        planned(structures)
    rendezvous, plans = Rendezvous(4), [Plans() for _ in range(4)]
    results = on_ranks(rendezvous, lambda ranks: exchange(ranks, plans, structures))
    texts = {str(result.failures[0]) for result in results if isinstance(result, RanksFailed)}
    assert len(texts) == 1
    assert sum(isinstance(result, RanksFailed) for result in results) == 4


def test_rank_that_plans_nothing() -> None:
    structures = [structure_of([Tensor("w", (8,))] if rank else [], (3,), rank) for rank in range(3)]
    plan = planned(structures)
    assert [len(items) for items in written(plan, structures)] == [0, 1, 0]


def test_more_chunks_than_an_index_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "_MAX_ROWS", 7)
    structures = [
        structure_of([Tensor("w", (8, 4), FSDP), Tensor("v", (8, 4), FSDP)], (4,), r) for r in range(4)
    ]
    with pytest.raises(ConfigurationError, match="8 chunks and objects"):
        planned(structures)


# -- the exchange ------------------------------------------------------------------------------------------


def exchange(ranks: ThreadRanks, plans: Sequence[Plans], structures: Sequence[Structure]) -> Agreed:
    """One rank's part; its memory knows the structure, as after `Memory.structure`."""
    plan, structure = plans[ranks.rank], structures[ranks.rank]
    known = plan.memory.keep(structure)
    agreed = agree(ranks, plan, Local(known, b""))  # type: ignore[arg-type]
    assert agreed is not None
    return agreed


def agreed_items(plans: Sequence[Plans], structures: Sequence[Structure]) -> tuple[list[Any], Rendezvous]:
    rendezvous = Rendezvous(len(plans))
    results = on_ranks(rendezvous, lambda ranks: exchange(ranks, plans, structures))
    items = []
    for result in results:
        assert isinstance(result, Agreed), result
        items.append([(item.index.fqn, item.index.offset) for item in result.items])
    return items, rendezvous


@pytest.mark.parametrize("size", [1, 2, 6, 20])
def test_one_number_a_rank_from_the_second_save_on(size: int) -> None:
    tensors = random_tensors(3, (size,), 30)
    structures = [structure_of(tensors, (size,), rank) for rank in range(size)]
    plans = [Plans() for _ in range(size)]
    first, begun = agreed_items(plans, structures)
    again, unchanged = agreed_items(plans, structures)
    assert first == again
    assert "gather_bytes" in begun.calls
    assert unchanged.calls == ["decide"]
    assert unchanged.sent_bytes == 8


def test_any_change_on_any_rank_is_planned_anew() -> None:
    chance = random.Random(7)
    mesh = (2, 3)
    tensors = [t for t in random_tensors(5, mesh, 10) if not t.is_object]
    plans = [Plans() for _ in range(6)]
    agreed_items(plans, [structure_of(tensors, mesh, rank) for rank in range(6)])
    for _ in range(12):
        at = chance.randrange(len(tensors))
        old = tensors[at]
        kinds = {
            "name": dataclasses.replace(old, name=f"{old.name}.x"),
            "dtype": dataclasses.replace(old, dtype=torch.float64),
            "shape": dataclasses.replace(old, shape=tuple(n + 1 for n in old.shape)),
            "placement": dataclasses.replace(old, placements=placements_for(mesh, [None, None])),
        }
        tensors[at] = kinds[chance.choice([kind for kind in sorted(kinds) if kinds[kind] != old])]
        structures = [structure_of(tensors, mesh, rank) for rank in range(6)]
        items, rendezvous = agreed_items(plans, structures)
        assert "gather_bytes" in rendezvous.calls
        expected = written(planned(structures), structures)
        assert items == [[(i.index.fqn, i.index.offset) for i in each] for each in expected]
    only_one = [structure_of(tensors, mesh, rank) for rank in range(5)]
    only_one.append(structure_of([*tensors, Tensor("new", (2,))], mesh, 5))
    items, _ = agreed_items(plans, only_one)
    assert ("new", torch.Size([0])) in items[5]


def test_failures_of_few_and_many_ranks_are_told_to_all() -> None:
    structure = structure_of([Tensor("w", (8,))], (40,), 0)
    for failing in ([7], list(range(3, 40))):
        plans = [Plans() for _ in range(40)]

        def run(ranks: ThreadRanks) -> Any:
            known = plans[ranks.rank].memory.keep(structure)  # noqa: B023
            local = CheckpointError(f"no {ranks.rank}", rank=ranks.rank) if ranks.rank in failing else None  # noqa: B023
            return agree(ranks, plans[ranks.rank], local or Local(known, b""))  # type: ignore[arg-type]  # noqa: B023

        for result in on_ranks(Rendezvous(40), run):
            assert isinstance(result, RanksFailed)
            assert result.count == len(failing)
            assert {rank: error.message for rank, error in result.failures.items()} == {
                rank: f"no {rank}" for rank in failing[:MAX_FAILURES]
            }


@pytest.mark.parametrize("knows", [None, "another"])
def test_one_rank_that_does_not_know_the_plan_has_all_plan_anew(knows: str | None) -> None:
    structures = [structure_of([Tensor("w", (8,)), Tensor("b", (2,))], (20,), rank) for rank in range(20)]
    for at in (0, 1, 19):
        plans = [Plans() for _ in range(20)]
        agreed_items(plans, structures)
        if knows is None:
            plans[at].memory.clear()
        else:
            known = plans[at].memory.keep(structures[at])
            plans[at].memory.remember(known, b"", 1, [])
        _, rendezvous = agreed_items(plans, structures)
        assert rendezvous.calls[:2] == ["decide", "gather_bytes"]


@pytest.mark.slow
def test_sections_that_are_known_are_not_sent_again() -> None:
    tensors = [Tensor(f"layers.{n}.{'w' * 40}", (64, 4), placements_for((20,), [0])) for n in range(600)]
    plans = [Plans() for _ in range(20)]
    _, first = agreed_items(plans, [structure_of(tensors, (20,), rank) for rank in range(20)])
    more = [*tensors, Tensor("one.more", (1,))]
    _, second = agreed_items(plans, [structure_of(more, (20,), rank) for rank in range(20)])
    assert first.calls.count("gather_bytes") == 1  # rank 0 has them all
    assert second.sent_bytes < 600


def test_sections_of_other_ranks_are_asked_for() -> None:
    tensors = [Tensor(f"stage.{n // 10}.{n}", (8,), ranks=range(n // 10, n // 10 + 1)) for n in range(200)]
    structures = [structure_of(tensors, (20,), rank) for rank in range(20)]
    items, rendezvous = agreed_items([Plans() for _ in range(20)], structures)
    assert [len(each) for each in items] == [10] * 20
    assert rendezvous.calls.count("gather_bytes") == 2
