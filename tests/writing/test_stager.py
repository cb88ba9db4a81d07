"""Staging: a copy that later changes cannot reach, of no more than the bytes that are saved, in reused memory."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.ranks import exit_code_of, run_ranks
from support.states import digest, emptied, plain_state, sharded_state
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import ckpt
from ckpt.backends import memory
from ckpt.errors import CheckpointError
from ckpt.writing import staging_memory
from ckpt.writing.stager import Space, space_for
from ckpt.writing.staging_memory import _fresh, _shared_block


def overwritten(state: Any) -> None:
    """Change every tensor in place."""
    if isinstance(state, dict):
        for value in state.values():
            overwritten(value)
    elif isinstance(state, list):
        state.append("changed")
        for value in state:
            overwritten(value)
    elif isinstance(state, torch.Tensor):
        state.untyped_storage().fill_(7)  # type: ignore[attr-defined]


def test_copies_everything_and_nothing_reaches_the_copy() -> None:
    state = plain_state()
    before = digest(state)
    staged = ckpt.Stager().stage(state)
    assert digest(staged) == before
    overwritten(state)
    assert digest(state) != before
    assert digest(staged) == before


def test_copies_only_the_bytes_of_views() -> None:
    stager = ckpt.Stager()
    large = torch.zeros(4_000_000)
    staged = stager.stage({"a": large[5:15], "tied": large[5:15], "b": large[::1_000_000]})
    assert staged["a"].untyped_storage().nbytes() == 40
    assert staged["a"].data_ptr() == staged["tied"].data_ptr()


def test_memory_is_reused_and_given_back_by_itself() -> None:
    stager = ckpt.Stager()
    state = {"t": torch.ones(1_000_000)}
    addresses = set()
    for _ in range(5):
        staged = stager.stage(state)
        addresses.add(staged["t"].data_ptr())
        del staged
    assert len(addresses) == 1
    part_of_it = stager.stage(state)["t"][3:5]
    state["t"].zero_()
    assert stager.stage(state)["t"].data_ptr() not in addresses
    assert part_of_it.tolist() == [1, 1]


def space_of(state: dict[str, Any]) -> Space:
    space = space_for(state)
    assert space is not None
    return space


@pytest.mark.parametrize("shared_memory", [False, True])
def test_memory_is_made_ready_ahead(shared_memory: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made_by = []

    def make(nbytes: int, real: Any = _shared_block if shared_memory else _fresh) -> torch.Tensor:
        made_by.append(threading.current_thread().name)
        block: torch.Tensor = real(nbytes)
        return block

    monkeypatch.setattr(staging_memory, "_shared_block" if shared_memory else "_fresh", make)
    stager = ckpt.Stager(shared_memory=shared_memory)
    state = {"odd": torch.ones(3, dtype=torch.uint8), "t": torch.arange(100_000), "step": torch.tensor(7.0)}
    stager.provide(space_of(state))
    stager.provide(Space(5, for_device=False))  # one is enough
    small = {"t": torch.ones(9)}
    assert torch.equal(stager.stage(small)["t"], small["t"])  # it leaves alone what is not for it
    for _ in range(2):
        assert torch.equal(stager.stage(dict(reversed(state.items())))["t"], state["t"])
    stager.provide(space_of(state))  # not the first any more
    assert sorted(made_by) == ["MainThread", "ckpt-memory"]
    larger = {"t": torch.arange(1_000_000)}  # than what was announced
    assert torch.equal(stager.stage(larger)["t"], larger["t"])
    assert sorted(made_by) == ["MainThread", "MainThread", "ckpt-memory"]


@pytest.mark.parametrize("shared_memory", [False, True])
def test_without_memory_ahead_a_copy_gets_its_own(
    shared_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "_shared_block" if shared_memory else "_fresh"
    real = getattr(staging_memory, name)

    def make(nbytes: int) -> torch.Tensor:
        if threading.current_thread() is not threading.main_thread():
            raise MemoryError
        block: torch.Tensor = real(nbytes)
        return block

    monkeypatch.setattr(staging_memory, name, make)
    stager = ckpt.Stager(shared_memory=shared_memory)
    stager.provide(Space(400, for_device=False))
    assert stager.stage({"t": torch.ones(100)})["t"].sum() == 100
    stager.close()


def test_the_space_for_a_state() -> None:
    """Enough for all copies in any order, and little more; nothing for what cannot be copied, which the save will tell."""
    shared = torch.ones(64, 64)
    values = [torch.tensor(1.0), 7, torch.ones(4, 4)[:, 1], torch.ones(2).to_sparse(), shared, shared[:]]
    least = 64 + 64 + shared.nbytes
    assert least <= space_of(dict(zip("abcdef", values, strict=True))).nbytes <= least * 1.02
    assert space_for({}) == space_for({"t": torch.empty(5, device="meta")}) == Space(0, for_device=False)

    class Odd(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *_: Any, **__: Any) -> Any:
            raise RuntimeError("not so")

    assert space_for({"t": torch.ones(3).as_subclass(Odd)}) is None


def test_memory_that_is_too_small_is_let_go() -> None:
    """The optimizer got its state meanwhile."""
    stager = ckpt.Stager()
    stager.provide(Space(400, for_device=False))
    assert torch.equal(stager.stage({"t": torch.ones(300)})["t"], torch.ones(300))
    assert stager._memory.ahead._making is None


@pytest.mark.smoke
def test_a_forked_child_waits_for_no_thread_of_its_parent() -> None:
    assert exit_code_of(_fork_while_memory_is_made) == 0


def _fork_while_memory_is_made() -> None:
    warnings.simplefilter("ignore")
    go_on, inside = threading.Event(), threading.Event()
    real = staging_memory._fresh

    def make(nbytes: int) -> torch.Tensor:
        if threading.current_thread() is not threading.main_thread():
            inside.set()
            assert go_on.wait(60)
        return real(nbytes)

    staging_memory._fresh = make
    stager = ckpt.Stager()
    stager.provide(Space(400, for_device=False))
    assert inside.wait(60)
    child = os.fork()
    if not child:
        sys.exit(int(stager.stage({"t": torch.ones(100)})["t"].sum()) == 100)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    go_on.set()
    assert stager.stage({"t": torch.ones(100)})["t"].sum() == 100


@pytest.mark.smoke
def test_a_forked_child_lends_no_locked_memory() -> None:
    """It does not have it: the system would copy locked pages at each fork."""
    assert exit_code_of(_fork_with_locked_memory) == 0


def _fork_with_locked_memory() -> None:
    warnings.simplefilter("ignore")
    vars(staging_memory)["lock_pages"] = lambda block: None
    setattr(torch.Tensor, "is_pinned", lambda self: True)  # noqa: B010 (as a GPU would say)
    stager: Any = ckpt.Stager()
    address = ctypes.addressof(stager._memory.take(8 << 20, for_device=True))
    child = os.fork()
    if not child:
        lease = stager._memory.take(8 << 20, for_device=True)
        ctypes.memset(ctypes.addressof(lease), 1, 8 << 20)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert (
        ctypes.addressof(stager._memory.take(8 << 20, for_device=True)) == address
    )  # it is free again, and whole


def test_memory_that_nobody_wants_is_let_go() -> None:
    stager = ckpt.Stager()
    stager.provide(Space(64 << 20, for_device=False))
    making = stager._memory.ahead._making
    assert making is not None
    block = weakref.ref(making.block.result(60))
    del making
    stager.forget_provided()
    assert block() is None
    stager.provide(Space(400, for_device=False))
    stager.close()
    assert stager._memory.ahead._making is None


def test_a_third_copy_is_refused() -> None:
    stager = ckpt.Stager()
    state = {"t": torch.ones(100)}
    first, second = stager.stage(state), stager.stage(state)
    assert first["t"].data_ptr() != second["t"].data_ptr()
    with pytest.raises(CheckpointError, match="wait for the saves"):
        stager.stage(state)
    del first
    stager.stage(state)
    stager.close()
    stager.close()


def test_failed_saves_give_the_memory_back(tmp_path: Path) -> None:
    """Whoever keeps their futures, or not; an error's traceback must not hold the copied state."""
    from ckpt.errors import StorageUnavailable

    url = f"memory://{tmp_path.name}/c"

    failing = [True]

    def fault(operation: str, key: str, when: str) -> None:
        if operation == "put" and failing:
            raise StorageUnavailable("not now", url=url, key=key)

    state = {"t": torch.ones(1000)}
    memory.inject(url, fault)
    futures = [ckpt.async_save(state, url) for _ in range(4)]
    assert [type(future.exception(60)).__name__ for future in futures] == ["SaveFailed"] * 4
    failing.clear()
    ckpt.async_save(state, url).result(60)


def test_memory_is_free_when_a_save_has_ended(tmp_path: Path) -> None:
    import gc

    from ckpt.collective import stager
    from ckpt.writing.staging_memory import Blocks

    blocks = stager._memory
    assert isinstance(blocks, Blocks)
    gc.collect()
    gc.disable()  # nothing may depend on it
    try:
        for step in range(5):
            ckpt.async_save({"m": {"t": torch.ones(9), "o": [step]}}, tmp_path / str(step)).result(60)
            blocks._take_back()
            assert blocks._in_use == 0
    finally:
        gc.enable()


def test_planners_that_are_kept_do_not_keep_the_memory(tmp_path: Path) -> None:
    planners = [DefaultSavePlanner() for _ in range(3)]
    for step in range(6):
        ckpt.async_save({"t": torch.ones(9)}, tmp_path / str(step), planner=planners[step % 3]).result(60)


def test_the_collector_may_give_memory_back_at_any_time() -> None:
    import gc

    stager = ckpt.Stager()
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()  # what other tests left takes a second to walk, here and in all tests that follow
    try:
        for threshold in range(20, 200, 3):
            gc.set_threshold(threshold)
            staged: dict[str, Any] = stager.stage({"t": torch.ones(10), "l": [torch.ones(3)] * 5})
            staged["cycle"] = staged
            del staged
            gc.collect()
    finally:
        gc.set_threshold(*before)


@pytest.mark.smoke
def test_a_forked_child_ends() -> None:
    """As a data loader's worker does, started while a save is running."""
    assert exit_code_of(_fork_while_saving) == 0


def _fork_while_saving() -> None:
    warnings.simplefilter("ignore")
    inside, go_on = threading.Event(), threading.Event()

    def fault(operation: str, key: str, when: str) -> None:
        if operation == "put":
            inside.set()
            go_on.wait(60)

    memory.inject("memory://fork/c", fault)
    future = ckpt.async_save({"t": torch.ones(5)}, "memory://fork/c")
    assert inside.wait(60)
    child = os.fork()
    if not child:
        sys.exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    go_on.set()
    future.result(60)


@pytest.mark.long
def test_a_forked_child_ends_its_interpreter() -> None:
    """With all that Python does at the end of a program."""
    code = "from writing.test_stager import _fork_while_saving as run; run()"
    paths = os.pathsep.join(map(str, (Path(__file__).parents[2], Path(__file__).parents[1])))
    subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=120, env={**os.environ, "PYTHONPATH": paths}
    )


def test_memory_goes_with_the_stager() -> None:
    """README has one made for each call of `dcp.async_save`."""
    stager = ckpt.Stager()
    stager.stage({"t": torch.ones(1000)})
    memory_of_it = weakref.ref(stager._memory)
    del stager
    assert memory_of_it() is None


class Pair(NamedTuple):
    weight: torch.Tensor
    name: str


class Names(list[Any]):
    """A list of a class of its own."""


class Settings(dict[str, Any]):
    """A dict of a class of its own, which cannot be copied: only its items can."""

    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.lock = threading.Lock()


class Items(Mapping[str, Any]):
    """A mapping that is no dict, and makes its values when they are asked for."""

    def __getitem__(self, name: str) -> Any:
        return {"t": torch.full((3,), float(name))}

    def __iter__(self) -> Iterator[str]:
        return iter(["1", "2"])

    def __len__(self) -> int:
        return 2


def test_types_are_kept() -> None:
    state = {
        "size": torch.Size([1, 2]),
        "time": time.gmtime(0),
        "top": torch.topk(torch.arange(9.0), 2),
        "names": Names([torch.ones(2), "x"]),
        "ordered": OrderedDict(a=torch.ones(2)),
        "default": defaultdict(list, a=[torch.ones(2)]),
    }
    staged = ckpt.Stager().stage(state)
    for name, value in state.items():
        assert type(staged[name]) is type(value), name
    assert staged["time"] == state["time"]
    assert staged["size"] == state["size"]
    assert staged["top"].indices.tolist() == [8, 7]
    assert staged["top"].values.data_ptr() != state["top"].values.data_ptr()  # type: ignore[attr-defined]
    assert digest(staged["default"]) == digest(state["default"])
    assert staged["default"]["a"][0].data_ptr() != state["default"]["a"][0].data_ptr()  # type: ignore[index]


def test_mappings_that_cannot_be_copied_are_dicts() -> None:
    staged = ckpt.Stager().stage({"settings": Settings(t=torch.ones(2)), "items": Items()})
    assert {type(staged["settings"]), type(staged["items"])} == {dict}
    assert staged["settings"]["t"].tolist() == [1, 1]
    assert staged["items"]["2"]["t"].tolist() == [2, 2, 2]


def test_requires_grad_is_kept(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    state = {"weight": weight, "product": weight * 2, "value": weight.detach()}
    metadata = ckpt.async_save(state, tmp_path).result(60).state_dict_metadata
    kept = {name: stored.properties.requires_grad for name, stored in metadata.items()}  # type: ignore[union-attr]
    assert kept == {"weight": True, "product": True, "value": False}


def test_a_state_that_refers_to_itself() -> None:
    inner: dict[str, Any] = {"t": torch.ones(3)}
    inner["self"] = inner
    staged = ckpt.Stager().stage({"inner": inner})["inner"]
    assert staged["self"] is staged
    assert staged["t"].data_ptr() != inner["t"].data_ptr()


def test_what_cannot_be_copied_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"'loader' cannot be copied: TypeError: cannot pickle"):
        ckpt.Stager().stage({"t": torch.ones(3), "loader": [{"lock": threading.Lock()}]})


@pytest.mark.parametrize("flatten", [True, False])
def test_pickled_objects_bring_no_other_tensor_along(flatten: bool, tmp_path: Path) -> None:
    """Tensors of a tuple, or of a dict that is not flattened, are pickled by the planner."""
    pairs = {str(number): (torch.ones(2), torch.ones(2, dtype=torch.int64)) for number in range(3)}
    state = {"large": torch.zeros(1_000_000), "optimizer": {"pairs": pairs}}
    planner = DefaultSavePlanner(flatten_state_dict=flatten)
    metadata = ckpt.async_save(state, tmp_path, planner=planner).result(60)
    assert sum(stored.length for stored in metadata.storage_data.values()) < 4_020_000


def test_deterministic_mode() -> None:
    """torch then fills new memory, which it cannot for some dtypes."""
    packed = torch.arange(8, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    torch.use_deterministic_algorithms(True)
    try:
        staged = ckpt.Stager().stage({"packed": packed})
    finally:
        torch.use_deterministic_algorithms(False)
    assert staged["packed"].view(torch.uint8).tolist() == [*range(8)]


def test_odd_containers() -> None:
    pair = Pair(torch.ones(3, requires_grad=True) * 2, "x")
    staged = ckpt.Stager().stage({"pair": pair, "zeros": torch._efficientzerotensor(3)})
    assert type(staged["pair"]) is Pair
    assert staged["pair"].weight.tolist() == [2, 2, 2]
    assert staged["zeros"].tolist() == [0, 0, 0]


def test_the_writer_stages_for_dcp(tmp_path: Path) -> None:
    """torch's own stager would lose what is conjugated or negated lazily, and cannot copy some kinds."""
    values = torch.tensor([1 + 2j, 3 - 4j])
    state = {"conjugated": values.conj(), "negated": values.conj().imag, "pair": (torch.ones(2), 1)}
    warnings.simplefilter("ignore")
    futures: list[Any] = []
    for step in range(3):  # more than one at a time
        writer = ckpt.CheckpointWriter(tmp_path / str(step))
        futures.append(dcp.async_save(state, storage_writer=writer, no_dist=True))
    values.zero_()
    for step, future in enumerate(futures):
        future.result(60)
        loaded: dict[str, Any] = {
            "conjugated": torch.zeros(2, dtype=torch.complex64),
            "negated": torch.zeros(2),
        }
        ckpt.load(loaded, tmp_path / str(step), no_dist=True)
        assert loaded["conjugated"].tolist() == [1 - 2j, 3 + 4j]
        assert loaded["negated"].tolist() == [-2, 4]
        writer.close()


def test_with_dcp_async_save(tmp_path: Path) -> None:
    run_ranks(2, _dcp_async_save, str(tmp_path))


def _dcp_async_save(rank: int, root: str) -> None:
    stager = ckpt.Stager()
    futures: list[Any] = []
    for step in range(2):
        state = sharded_state(seed=step)
        futures.append(
            dcp.async_save(
                state, storage_writer=ckpt.CheckpointWriter(f"{root}/step-{step}"), async_stager=stager
            )
        )
        for value in state.values():
            if isinstance(value, torch.Tensor):
                value.detach().zero_()
        futures[-1].result(60)
    for step in range(2):
        loaded = emptied(sharded_state(seed=9))
        ckpt.load(loaded, f"{root}/step-{step}")
        assert digest(loaded) == digest(sharded_state(seed=step))


def test_every_sharded_kind(tmp_path: Path) -> None:
    run_ranks(4, _sharded_kinds, str(tmp_path))


def _sharded_kinds(rank: int, url: str) -> None:
    import copy

    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec, ShardMetadata

    warnings.simplefilter("ignore")
    stager = ckpt.Stager()
    state = sharded_state()
    assert digest(stager.stage(state)) == digest(state)

    # FSDP over tensor parallel: its placements are of a kind that only DTensor itself makes.
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = torch.nn.Sequential(torch.nn.Linear(16, 12, bias=False))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    parameters = dict(model.state_dict())
    staged = stager.stage(parameters)
    assert [p.placements for p in staged.values()] == [p.placements for p in parameters.values()]
    assert digest(staged) == digest(parameters)

    spec = ChunkShardingSpec(dim=0, placements=[f"rank:{r}/cpu" for r in range(4)])
    sharded = sharded_tensor.rand(spec, 11, 6, requires_grad=True)
    staged_shard = stager.stage({"t": sharded})["t"].local_shards()[0].tensor
    assert torch.equal(staged_shard, sharded.local_shards()[0].tensor)
    assert staged_shard.data_ptr() != sharded.local_shards()[0].tensor.data_ptr()
    on_a_gpu = copy.copy(sharded)
    (shard,) = on_a_gpu._local_shards = [copy.copy(shard) for shard in sharded.local_shards()]
    place = shard.metadata
    shard.metadata = ShardMetadata(place.shard_offsets, place.shard_sizes, f"rank:{rank}/cuda:0")
    ckpt.Stager().stage({"t": on_a_gpu})
    ckpt.async_save({"t": sharded, **parameters}, url).result(60)
    loaded = sharded_tensor.zeros(spec, 11, 6)
    ckpt.load({"t": loaded}, url)
    assert torch.equal(loaded.local_shards()[0].tensor, sharded.local_shards()[0].tensor)


@pytest.mark.parametrize("shared_memory", [True, False])
def test_copies_are_sent_to_another_process_as_one_block(shared_memory: bool) -> None:
    """Sharded tensors too, each at an offset of its own; and the memory is used again."""
    run_ranks(1, _sent, shared_memory)


def _sent(rank: int, shared_memory: bool) -> None:
    stager = ckpt.Stager(shared_memory=shared_memory)
    mesh = init_device_mesh("cpu", (1,))
    places = set()
    for value in (1.0, 2.0):
        plain = {str(number): torch.full((50 + number,), value) for number in range(4)}
        sharded = {f"d{name}": DTensor.from_local(t, mesh, run_check=False) for name, t in plain.items()}
        pair = (torch.tensor([True]), torch.tensor([value], requires_grad=True))
        quantized = torch.quantize_per_channel(
            torch.full((2, 2), value), torch.full((2,), 0.5), torch.zeros(2), 0, torch.quint8
        )
        staged = stager.stage(
            {**plain, **sharded, "pair": pair, "empty": torch.ones(0, 3), "quantized": quantized}
        )
        places |= {tensor.untyped_storage().data_ptr() for name, tensor in staged.items() if name in plain}
        open_files = len(os.listdir("/proc/self/fd"))
        received = ForkingPickler.loads(ForkingPickler.dumps(staged))
        # One for each of the ten storages would be more; sending opens a few of its own.
        assert len(os.listdir("/proc/self/fd")) <= open_files + 8
        del staged
        assert received.pop("empty").shape == (0, 3)
        assert received.pop("quantized").dequantize().tolist() == [[value] * 2] * 2
        truth, number = received.pop("pair")
        assert (truth.tolist(), number.tolist(), number.requires_grad) == ([True], [value], True)
        assert number.untyped_storage().nbytes() == 4
        for name, tensor in received.items():
            local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
            assert local.tolist() == [value] * (50 + int(name.removeprefix("d")))
        assert received.keys() == {*plain, *sharded}
    assert len(places) == 4


class _HoldsALock:
    def __init__(self) -> None:
        self.value, self.lock = torch.ones(3, requires_grad=True) * 2, threading.Lock()


@pytest.mark.smoke
@pytest.mark.parametrize("kind", [dict, OrderedDict, lambda **items: defaultdict(list, items)])
def test_an_object_that_cannot_be_copied_is_not_saved_half(kind: Any, tmp_path: Path) -> None:
    """A copy of the dict fails in the middle of it: what that began must not pass for its copy."""
    with pytest.raises(CheckpointError, match=r"'scheduler.*' cannot be copied"):
        ckpt.async_save({"scheduler": kind(object=_HoldsALock())}, tmp_path).result()


def test_garbage_that_closes_a_stager() -> None:
    """All memory is in use, by a cycle of objects that the collector finds, and that need the lock."""

    class Closes:
        def __init__(self, stager: ckpt.Stager) -> None:
            self.stager, self.me = stager, self

        def __del__(self) -> None:
            self.stager.close()

    stager = ckpt.Stager()
    for _ in range(2):
        garbage = Closes(stager)
        garbage.state = stager.stage({"t": torch.ones(4)})  # type: ignore[attr-defined]
    del garbage
    staged: list[Any] = []
    thread = threading.Thread(target=lambda: staged.append(stager.stage({"t": torch.zeros(4)})), daemon=True)
    thread.start()
    thread.join(60)
    assert [torch.equal(state["t"], torch.zeros(4)) for state in staged] == [True]
