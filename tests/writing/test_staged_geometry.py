"""Copies of tensors that carry their geometry: they answer as the tensor did, for memory of their own."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
from support.geometries import COLUMNS, HAS_PROTOCOL, ROWS, Carried, WithFields, hooked, whole
from support.ranks import run_ranks
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

import ckpt
from ckpt.errors import CheckpointError, SaveFailed
from ckpt.geometry import FIELDS, attached, loses_geometry
from ckpt.save_plans.local import Memory
from ckpt.transfer.tied_tensors import tied_names


def planned(state: dict[str, Any]) -> list[tuple[str, tuple[int, ...], torch.Tensor]]:
    """List name, offset and elements of all that DCP's planner would write."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, None, True)
    found = []
    for item in planner.create_local_plan().items:
        data = planner.resolve_data(item)
        assert isinstance(data, torch.Tensor)
        found.append((item.index.fqn, tuple(item.index.offset or ()), data))
    return found


def check_staged(state: dict[str, Any], spoil: Callable[[], object]) -> dict[str, Any]:
    """Stage a state, check that the copy is planned as it was, whatever changes, and return the copy."""
    before = [(name, offset, data.clone()) for name, offset, data in planned(state)]
    staged = ckpt.Stager().stage(state)
    spoil()
    after = planned(staged)
    assert [each[:2] for each in after] == [each[:2] for each in before]
    for (name, offset, data), (*_, copied) in zip(before, after, strict=True):
        assert torch.equal(data, copied), (name, offset)
    return staged


@pytest.fixture
def carried() -> Carried:
    made = hooked([(0, 2), (7, 3)])
    made.fill(whole())
    return made


def test_a_copy_answers_for_itself_whatever_becomes_of_the_tensor(carried: Carried) -> None:
    staged = check_staged({"model": {"w": carried.value}}, carried.spoil)["model"]["w"]
    chunks = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in staged.__create_chunk_list__()]
    assert chunks == [((0, 0), (2, COLUMNS)), ((7, 0), (3, COLUMNS))]
    shard = staged.__get_tensor_shard__(MetadataIndex("model.w", torch.Size([7, 0])))
    assert shard.untyped_storage().data_ptr() == staged.untyped_storage().data_ptr(), "copied once, not twice"
    with pytest.raises(ValueError, match=r"'model\.w' has no chunk at torch.Size\(\[1, 0\]\)"):
        staged.__get_tensor_shard__(MetadataIndex("model.w", torch.Size([1, 0])))


def test_the_items_of_a_copy_have_the_name_that_a_planner_gives_it(carried: Carried) -> None:
    staged = ckpt.Stager().stage({"w": carried.value})
    assert [name for name, *_ in planned({"elsewhere": staged["w"]})] == ["elsewhere", "elsewhere"]


def test_tensors_of_one_memory_each_keep_their_hooks(carried: Carried) -> None:
    other, bare = hooked([(1, 5)]), carried.local.detach()
    alias: Any = carried.local.detach()
    alias.__create_write_items__ = lambda fqn, value: other.items(fqn, value)
    alias.__get_tensor_shard__ = lambda index: alias
    staged = check_staged({"w": carried.value, "alias": alias, "bare": bare}, carried.spoil)
    assert len({value.data_ptr() for value in staged.values()}) == 1
    assert attached(staged["bare"]) is None


@pytest.mark.parametrize(
    "shard_of",
    [
        lambda part: part.clone(),
        lambda part: part.double().t().contiguous().t(),
        lambda part: part.to(torch.bfloat16).float(),
    ],
    ids=["a clone", "another dtype", "made anew"],
)
def test_shards_that_are_no_part_of_the_tensor_are_copied(
    carried: Carried, shard_of: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    made: dict[int, torch.Tensor] = {}

    def shard(index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        first = index.offset[0]
        return made.setdefault(first, shard_of(carried.shard(index)))

    carried.value.__get_tensor_shard__ = shard

    def spoil() -> None:
        carried.spoil()
        for tensor in made.values():
            tensor.fill_(-1)

    check_staged({"w": carried.value}, spoil)


def test_views_with_gaps_keep_their_elements() -> None:
    wide = torch.arange(24.0).reshape(4, 6)
    for local in (wide[:, 1:4], wide.t(), wide[::2]):
        carried = Carried(local, [])
        value: Any = local.detach()
        one = Carried(local, [(0, len(local))])
        one.chunks = lambda local=local: [_chunk(local)]  # type: ignore[method-assign, misc]
        value.__create_write_items__ = lambda fqn, value, one=one: one.items(fqn, value)
        value.__get_tensor_shard__ = lambda index, local=local: local
        check_staged({"w": value}, lambda: None)
        value.__get_tensor_shard__ = lambda index, local=local: local[:1]
        check_staged({"w": value}, carried.local.zero_)


def _chunk(local: torch.Tensor) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size([0, 0]), local.shape)


class Subclass(torch.Tensor):
    """A tensor whose class has the hooks, and whose copy is an ordinary tensor."""

    def __create_write_items__(self, fqn: str, value: object) -> Any:
        return Carried(self.as_subclass(torch.Tensor), [(3, 2), (8, 1)]).items(fqn, value)

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return Carried(self.as_subclass(torch.Tensor), [(3, 2), (8, 1)]).shard(index)


def test_hooks_of_a_class_that_the_copy_does_not_have() -> None:
    value = torch.arange(9.0).reshape(3, COLUMNS).as_subclass(Subclass)
    check_staged({"w": value}, lambda: value.fill_(-1))


def test_a_class_that_copies_its_hooks_itself_is_not_asked() -> None:
    run_ranks(1, _wrapped_shards)


def _wrapped_shards(rank: int) -> None:
    shards = [torch.arange(6.0).reshape(2, 3), torch.arange(4.0).reshape(2, 2)]
    local: Any = LocalShardsWrapper(shards, [(0, 0), (0, 3)])
    mesh = init_device_mesh("cpu", (1,))
    value = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    assert not loses_geometry(value)
    check_staged({"w": value}, lambda: [shard.fill_(-1) for shard in shards])


def test_hooks_of_a_dtensor_itself() -> None:
    run_ranks(1, _hooked_dtensor)


def _hooked_dtensor(rank: int) -> None:
    made = hooked([(2, 4)])
    made.fill(whole())
    mesh = init_device_mesh("cpu", (1,))
    local = made.local.detach()
    value: Any = DTensor.from_local(
        local, mesh, [Shard(0)], run_check=False, shape=torch.Size([ROWS, COLUMNS]), stride=(COLUMNS, 1)
    )
    value.__create_write_items__ = lambda fqn, value: made.items(fqn, value)
    staged = check_staged({"w": value, "local": local}, made.spoil)
    assert attached(staged["local"]) is None, "only the DTensor has hooks"
    assert list(signatures([{"w": value}])) == [None], "its plan is made anew each time"


def test_a_copy_is_gone_with_its_last_reference(carried: Carried) -> None:
    stager = ckpt.Stager()
    gc.disable()
    try:
        for _ in range(5):  # of which at most two can exist
            staged = stager.stage({"w": carried.value})
            kept = weakref.ref(staged["w"])
            del staged
            assert kept() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("shared", [False, True])
def test_a_copy_sent_to_another_process_keeps_its_hooks(carried: Carried, shared: bool) -> None:
    stager = ckpt.Stager(shared_memory=shared)
    state = {"w": carried.value, "bare": torch.ones(3)}
    before = planned(state)
    before = [(name, offset, data.clone()) for name, offset, data in before]
    staged = stager.stage(state)
    carried.spoil()
    received = pickle.loads(ForkingPickler.dumps(staged))
    for sent in (received, copy.deepcopy(received)):
        for (name, offset, data), (*_, got) in zip(before, planned(sent), strict=True):
            assert torch.equal(data, got), (name, offset)
    shard = received["w"].__get_tensor_shard__(MetadataIndex("w", torch.Size([0, 0])))
    assert shard.data_ptr() == received["w"].data_ptr(), "the memory is sent once"


@pytest.mark.parametrize("more", [{}, {"bare": torch.ones(3)}], ids=["alone", "with others"])
def test_one_without_elements_keeps_its_hooks_too(more: dict[str, Any]) -> None:
    carried = hooked([])
    received = pickle.loads(ForkingPickler.dumps(ckpt.Stager().stage({"w": carried.value, **more})))
    assert [name for name, *_ in planned(received)] == [*more], "it plans no chunk"
    assert received["w"].shape == (0, COLUMNS)


def test_a_hook_that_fails_is_named(carried: Carried, tmp_path: Path) -> None:
    def fail(index: MetadataIndex) -> torch.Tensor:
        raise KeyError("no shard")

    carried.value.__get_tensor_shard__ = fail
    with pytest.raises(CheckpointError, match=r"'model\.w' gives by its own hooks.*KeyError"):
        ckpt.Stager().stage({"model": {"w": carried.value}})
    carried.value.__get_tensor_shard__ = lambda index: [1.0]
    with pytest.raises(SaveFailed, match=r"__get_tensor_shard__ of 'w' gave a list"):
        ckpt.async_save({"w": carried.value}, tmp_path / "a", no_dist=True)


# -- fields ------------------------------------------------------------------------------------------------


def test_fields_stay_on_the_copy_and_are_planned_as_torch_does() -> None:
    carried = WithFields([(0, 2), (7, 3)])
    carried.fill(whole())
    staged = check_staged({"w": carried.value}, carried.spoil)["w"]
    assert [getattr(staged, name) for name in FIELDS] == [
        (ROWS, COLUMNS),
        ((0, 0), (7, 0)),
        ((0, 0), (2, 0)),
        ((2, COLUMNS), (3, COLUMNS)),
    ]
    offsets = [offset for _, offset, _ in planned({"w": staged})]
    assert offsets == ([(0, 0), (7, 0)] if HAS_PROTOCOL else [(0, 0)])


def test_one_of_the_names_alone_means_something_else() -> None:
    value: Any = torch.arange(6.0)
    value.global_offsets = None
    staged = check_staged({"w": value}, lambda: value.fill_(-1))["w"]
    assert not hasattr(staged, "global_offsets")


def test_fields_are_saved_as_torch_saves_them(tmp_path: Path) -> None:
    """A torch that does not know them takes the tensor for a whole one."""
    carried = WithFields([(0, 7), (7, 5)])
    carried.fill(whole())
    ckpt.save({"w": carried.value}, tmp_path / "a", no_dist=True)
    future = ckpt.async_save({"w": carried.value}, tmp_path / "b", no_dist=True)
    carried.spoil()
    future.result()
    for name in "ab":
        described: Any = ckpt.CheckpointReader(tmp_path / name).read_metadata().state_dict_metadata["w"]
        assert len(described.chunks) == (2 if HAS_PROTOCOL else 1)
        loaded = torch.zeros(ROWS, COLUMNS)
        ckpt.load({"w": loaded}, tmp_path / name, no_dist=True)
        assert torch.equal(loaded, whole())


# -- plans -------------------------------------------------------------------------------------------------


def signatures(states: list[dict[str, Any]]) -> Iterator[list[Any] | None]:
    """Yield how each of some states looks to who remembers plans."""
    memory = Memory()
    for state in states:
        planner = DefaultSavePlanner()
        planner.set_up_planner(state, None, True)
        memory.structure(planner, lambda items: None)
        (known,) = memory._known.values()
        yield known.signature
        memory.clear()


@pytest.mark.parametrize("kind", ["hooks", "fields"])
def test_offsets_that_moved_never_meet_an_old_plan(tmp_path: Path, kind: str) -> None:
    carried: Carried = WithFields([(0, 7), (7, 5)]) if kind == "fields" else hooked([(0, 7), (7, 5)])
    carried.fill(whole())
    for number, is_async in enumerate([False, False, True, True, False, True]):
        if number % 2:  # the chunks change places
            carried.cut[:] = (
                [(carried.cut[1][0] - 7 or 5, 7), (0, 5)] if number % 4 == 1 else [(0, 7), (7, 5)]
            )
            if isinstance(carried, WithFields):
                carried.describe()
            carried.fill(whole())
        url = tmp_path / str(number)
        if is_async:
            ckpt.async_save({"w": carried.value}, url, no_dist=True).result()
        else:
            ckpt.save({"w": carried.value}, url, no_dist=True)
        loaded = torch.zeros(ROWS, COLUMNS)
        ckpt.load({"w": loaded}, url, no_dist=True)
        expected = whole()
        if kind == "fields" and not HAS_PROTOCOL:
            expected = carried.local
        assert torch.equal(loaded, expected), number


def test_copies_with_the_same_chunks_look_the_same(carried: Carried) -> None:
    stager = ckpt.Stager()
    first, same = (stager.stage({"w": carried.value}) for _ in range(2))
    looks = list(signatures([first, same]))
    assert looks[0] is not None
    assert looks[0] == looks[1]
    carried.cut[:] = [(0, 2), (6, 3)]
    del same
    moved = stager.stage({"w": carried.value})
    assert list(signatures([moved])) != looks[:1]


# -- models and references -----------------------------------------------------------------------------------


def test_one_memory_with_other_chunks_is_not_tied(carried: Carried) -> None:
    alias: Any = carried.local.detach()
    assert tied_names({"w": carried.local.detach(), "v": alias}) == {"v": "w"}
    assert tied_names({"w": carried.value, "v": alias}) == {}
    alias.__create_write_items__ = carried.items
    assert tied_names({"w": carried.value, "v": alias}) == {"v": "w"}
    alias.__create_write_items__ = hooked([(0, 5)]).items
    assert tied_names({"w": carried.value, "v": alias}) == {}


def test_a_model_whose_chunks_leave_a_gap_is_refused(carried: Carried, tmp_path: Path) -> None:
    with pytest.raises(SaveFailed, match="'w' cannot be put together"):
        ckpt.save({"w": carried.value}, tmp_path / "a", no_dist=True, format="safetensors")


def test_a_base_whose_chunks_were_elsewhere_is_not_taken_for_equal(tmp_path: Path) -> None:
    carried = hooked([(0, 6), (6, 6)])
    carried.fill(torch.ones(ROWS, COLUMNS))
    ckpt.save({"w": carried.value}, tmp_path / "base", no_dist=True, digests=True)
    carried.cut[:] = [(0, 4), (4, 8)]
    carried.fill(whole())
    carried.local[:6] = 1  # what was there before
    expected = torch.cat([carried.local[:4], carried.local[4:]])
    ckpt.async_save({"w": carried.value}, tmp_path / "next", no_dist=True, base=tmp_path / "base").result()
    loaded = torch.zeros(ROWS, COLUMNS)
    ckpt.load({"w": loaded}, tmp_path / "next", no_dist=True)
    assert torch.equal(loaded, expected)


# -- loads -------------------------------------------------------------------------------------------------


def test_a_part_of_another_tensor_is_not_loaded(tmp_path: Path) -> None:
    ckpt.save({"w": torch.ones(5, COLUMNS)}, tmp_path / "a", no_dist=True)
    carried = hooked([(0, 2), (4, 4)])
    with pytest.raises(ckpt.errors.LoadFailed, match=r"'w' is \(5, 3\) in the checkpoint, and \(12, 3\)"):
        ckpt.load({"w": carried.value}, tmp_path / "a", no_dist=True)


def test_many_chunks_are_loaded_by_hooks(tmp_path: Path) -> None:
    """Of a tensor of many chunks, reads are planned without DCP."""
    carried, target = Carried(torch.zeros(50, 1), []), Carried(torch.zeros(9, 1), [])
    rows = torch.arange(50.0).reshape(50, 1)
    _cut_by_ones(carried, 0).copy_(rows)
    ckpt.async_save({"w": carried.value}, tmp_path / "a", no_dist=True).result()
    _cut_by_ones(target, 30)
    ckpt.load({"w": target.value}, tmp_path / "a", no_dist=True)
    assert torch.equal(target.local, rows[30:39])


def _cut_by_ones(carried: Carried, first: int) -> torch.Tensor:
    """Give a tensor hooks by which each row is a chunk of one of 50 rows."""
    local: Any = carried.local
    one, size = torch.Size([1, 1]), torch.Size([50, 1])
    chunks = [ChunkStorageMetadata(torch.Size([first + row, 0]), one) for row in range(len(local))]
    properties = TensorProperties.create_from_tensor(local)
    local.__create_chunk_list__ = lambda: chunks
    local.__create_write_items__ = lambda fqn, _: [
        WriteItem(
            index=MetadataIndex(fqn, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk, properties, size),
        )
        for chunk in chunks
    ]
    local.__get_tensor_shard__ = lambda index: local[index.offset[0] - first :][:1]
    return carried.local
