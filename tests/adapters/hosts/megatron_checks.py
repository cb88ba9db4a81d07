"""What users of `dist_checkpointing` rely on, tried on two ranks; the report names every check that held."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from adapters.life import Life, read_life
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing import save as save_by_name
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedTensorFactory
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.base import AsyncSaveShardedStrategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

import ckpt
from ckpt.errors import (
    CheckpointError,
    ConfigurationError,
    LoadFailed,
    NotCommitted,
    NotFound,
    SaveFailed,
    UnsafeContent,
)
from ckpt.trainer_integration.adapters import megatron

_marker: str = ""


class Hostile:
    def __reduce__(self) -> Any:
        return os.mkdir, (_marker,)


def rows(value: float | None, key: str = "rows", dtype: torch.dtype = torch.float32) -> ShardedTensor:
    """Cut a tensor of 8 x 4 into rows for the ranks."""
    ranks = dist.get_world_size()
    data = torch.full((8 // ranks, 4), value or 0.0, dtype=dtype)
    return ShardedTensor.from_rank_offsets(key, data, (0, dist.get_rank(), ranks))


def state_of(value: float | None) -> dict[str, Any]:
    return {"rows": rows(value), "random": ShardedObject("random", value, (1,), (0,), dist.get_rank())}


def saved(place: str, **options: Any) -> Any:
    if "://" not in place:
        os.makedirs(place, exist_ok=True)
    return dist_checkpointing.save({**state_of(3.0), "step": 7, "args": {"lr": 0.1}}, place, **options)


def common_state(place: str) -> None:
    saved(place, content_metadata={"version": 2})
    assert dist_checkpointing.check_is_distributed_checkpoint(place)
    assert dist_checkpointing.load_common_state_dict(place)["args"] == {"lr": 0.1}
    assert dist_checkpointing.load_content_metadata(place) == {"version": 2}
    assert dist_checkpointing.load_tensors_metadata(place).keys() == {"rows"}
    loaded = dist_checkpointing.load(state_of(None), place)
    assert (loaded["step"], loaded["random"]) == (7, 3.0)
    assert torch.equal(loaded["rows"], rows(3.0).data)
    if "://" not in place:
        assert not {"common.pt", "metadata.json"} & {*os.listdir(place)}


def nothing_committed(place: str) -> None:
    assert not dist_checkpointing.check_is_distributed_checkpoint(place)
    with pytest.raises((CheckpointError, CheckpointingException), match="check"):
        dist_checkpointing.load(state_of(None), place)
    saved(place)
    dist.barrier()
    if dist.get_rank() == 0:
        ckpt.remove(place)
    dist.barrier()
    assert not dist_checkpointing.check_is_distributed_checkpoint(place)
    with pytest.raises((NotFound, NotCommitted, CheckpointingException), match="check"):
        dist_checkpointing.load(state_of(None), place)


def strictness(place: str) -> None:
    saved(place)
    unexpected = {**state_of(None), "other": rows(None, "other")}
    for kind in (LoadFailed, CheckpointingException):  # what callers of either library catch
        with pytest.raises(kind, match="other"):
            dist_checkpointing.load({**unexpected}, place)
    with pytest.raises(CheckpointingException, match="other"):
        dist_checkpointing.load({**unexpected}, place, strict="raise_unexpected")
    for mode in ("log_unexpected", "log_all", "ignore_all"):
        assert "other" not in dist_checkpointing.load({**unexpected}, place, strict=mode)
    _, missing, others = dist_checkpointing.load({**unexpected}, place, strict="return_all")
    assert (missing, others) == (set(), {"other"})
    with pytest.raises(CheckpointingException, match="random"):
        dist_checkpointing.load({"rows": rows(None)}, place, strict="raise_all")
    dist_checkpointing.load(state_of(None), place, strict="raise_all")
    wrong = ShardedTensor.from_rank_offsets("rows", torch.zeros(4, 5), (0, dist.get_rank(), 2))
    for kind in (LoadFailed, CheckpointingException):
        with pytest.raises(kind, match="shape") as caught:
            dist_checkpointing.load({"rows": wrong}, place)
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def kinds_of_shards(place: str) -> None:
    rank = dist.get_rank()

    def halves(key: str, data: torch.Tensor, replica: Any, _: Any) -> dict[str, Any]:
        return {
            name: ShardedTensor.from_rank_offsets(f"{key}.{name}", part, (0, rank, 2), replica_id=replica)
            for name, part in zip(("w", "v"), data.chunk(2), strict=True)
        }

    def state(fill: Callable[[int], torch.Tensor], padded: int) -> dict[str, Any]:
        joined = fill(48).reshape(8, 6)
        return {
            "factory": ShardedTensorFactory("gate", joined, halves, lambda parts: torch.cat([*parts.values()])),
            "layers": ShardedTensor.from_rank_offsets("layers", fill(6), (0, rank, 2), prepend_axis_num=1),
            "pair": [
                ShardedTensor.from_rank_offsets("pair", fill(4), (0, 2 * rank + number, 4)) for number in (0, 1)
            ],
            "columns": ShardedTensor.from_rank_offsets("columns", fill(12).reshape(4, 3).t(), (1, rank, 2)),
            "half": rows(float(fill(1)[0]), "half", torch.bfloat16),
            "replicated": ShardedTensor.from_rank_offsets("replicated", fill(5), replica_id=rank),
            "padded": ShardedTensor.from_rank_offsets(
                "padded", fill(padded // 2), (0, rank, 2), allow_shape_mismatch=True
            ),
        }  # fmt: skip

    if "://" not in place:
        os.makedirs(place, exist_ok=True)
    wanted = state(lambda count: torch.arange(count) + 100.0 * rank, 8)
    expected = {
        "layers": wanted["layers"].data.clone(),
        "columns": wanted["columns"].data.clone(),
        "half": wanted["half"].data.clone(),
        "pair": [shard.data.clone() for shard in wanted["pair"]],
        "factory": wanted["factory"].data.clone(),
    }
    request = dist_checkpointing.save(wanted, place, async_sharded_save=True)
    request.execute_sync()
    loaded = dist_checkpointing.load(state(lambda count: torch.full((count,), -1.0), 12), place)
    for name in ("layers", "columns", "half", "factory"):
        assert torch.equal(loaded[name], expected[name]), (name, loaded[name])
    assert all(map(torch.equal, loaded["pair"], expected["pair"]))
    assert torch.equal(loaded["replicated"], torch.arange(5.0))
    whole = torch.cat([torch.arange(4.0), torch.arange(4.0) + 100, torch.zeros(4)])
    assert torch.equal(loaded["padded"], whole.chunk(2)[rank]), loaded["padded"]


def asynchronous(place: str) -> None:
    """The queue of Megatron-Core itself, which needs a CUDA device in two places that are not the adapter's."""
    if "://" not in place:
        os.makedirs(place, exist_ok=True)
    state = {**state_of(3.0), "step": 7}
    tensor = state["rows"].data
    request = dist_checkpointing.save(state, place, async_sharded_save=True)
    pickle.loads(pickle.dumps(request._replace(finalize_fns=[])))  # as to a persistent worker
    tensor.zero_()  # the steps go on
    device, synchronize = torch.cuda.current_device, torch.cuda.synchronize
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *_: None
    try:
        queue = AsyncCallsQueue()
        number = queue.schedule_async_request(request)
        assert queue.maybe_finalize_async_calls(blocking=True) == [number]
    finally:
        torch.cuda.current_device, torch.cuda.synchronize = device, synchronize
    assert dist_checkpointing.check_is_distributed_checkpoint(place)
    assert torch.equal(dist_checkpointing.load(state_of(None), place)["rows"], rows(3.0).data)


def asynchronous_failure(place: str) -> None:
    state = {**state_of(3.0), "step": 7}
    state["rows"].data = state["rows"].data.to("meta")
    with pytest.raises(CheckpointError):
        dist_checkpointing.save(state, place, async_sharded_save=True).execute_sync()
    dist.barrier()
    assert not dist_checkpointing.check_is_distributed_checkpoint(place)


def fully_parallel(place: str) -> None:
    strategy = FullyParallelSaveStrategyWrapper(
        dist_checkpointing.serialization.get_default_save_sharded_strategy()
    )
    saved(place, sharded_strategy=strategy)
    assert dist_checkpointing.load(state_of(None), place)["step"] == 7


def hostile(place: str, marker: str) -> None:
    global _marker
    _marker = f"{marker}-{dist.get_rank()}"
    if "://" not in place:
        os.makedirs(place, exist_ok=True)
    for number, state in enumerate(
        ({"args": Hostile()}, {"object": ShardedObject("object", Hostile(), (1,), (0,), dist.get_rank())})
    ):
        target = f"{place}{number}"
        os.makedirs(target, exist_ok=True) if "://" not in place else None
        dist_checkpointing.save({**state_of(3.0), **state}, target, validate_access_integrity=False)
        asked = {**state_of(None), "object": ShardedObject("object", None, (1,), (0,), dist.get_rank())}
        with pytest.raises(UnsafeContent, match="could run code"):
            dist_checkpointing.load(asked if number else state_of(None), target)
    assert not Path(_marker).exists()


def of_megatron_itself(place: str) -> None:
    """Checkpoints from before the adapter are loaded, and never saved over."""
    if "://" in place:
        return
    with native():
        saved(place)
    assert dist_checkpointing.check_is_distributed_checkpoint(place)
    loaded = dist_checkpointing.load(state_of(None), place, strict="raise_all")
    assert loaded["step"] == 7
    assert torch.equal(loaded["rows"], rows(3.0).data)
    with pytest.raises(SaveFailed):
        saved(place)


def names_imported_before(place: str) -> None:
    """What a program imported before `install` saves with this library, or is an error: never half a checkpoint."""
    own_strategy = TorchDistSaveShardedStrategy("torch_dist", 1)
    saved(place, sharded_strategy=own_strategy)
    assert dist_checkpointing.load(state_of(None), place)["step"] == 7
    if "://" in place:
        return
    os.makedirs(f"{place}-by-name", exist_ok=True)
    dist.barrier()
    with pytest.raises(ConfigurationError, match="call install"):
        save_by_name(state_of(3.0), f"{place}-by-name")
    dist.barrier()
    assert not dist_checkpointing.check_is_distributed_checkpoint(f"{place}-by-name")


def uninstalled(place: str) -> None:
    """After `uninstall` nothing of the adapter is left."""
    assert TorchDistSaveShardedStrategy.save is not AsyncSaveShardedStrategy.save
    assert dist_checkpointing.save is not save_by_name
    megatron.uninstall()
    assert dist_checkpointing.save is dist_checkpointing.serialization.save is save_by_name
    assert TorchDistSaveShardedStrategy.save is AsyncSaveShardedStrategy.save
    megatron.install()


def newest_of_a_migrated_run(place: str) -> None:
    """A run goes on from the newest whole checkpoint, whoever wrote it; torn ones of both kinds are passed over."""
    if "://" in place:
        return
    assert megatron.latest_checkpoint(place) is None
    saved(f"{place}/iter_0000002")
    dist.barrier()
    with native():
        for step in (4, 6):
            saved(f"{place}/iter_000000{step}")
            dist.barrier()
    if dist.get_rank() == 0:
        os.remove(f"{place}/iter_0000006/metadata.json")  # written last
    dist.barrier()
    assert megatron.latest_checkpoint(place) == f"{place}/iter_0000004"
    assert dist_checkpointing.load(state_of(None), f"{place}/iter_0000004")["step"] == 7
    saved(f"{place}/iter_0000008")
    assert megatron.latest_checkpoint(place) == f"{place}/iter_0000008"


def integrity(place: str) -> None:
    """Shards of which there are two or none are the first rank's error, and nothing is written."""
    first = dist.get_rank() == 0
    two = ShardedTensor.from_rank_offsets("rows", torch.zeros(4), replica_id=0)
    gap = ShardedTensor.from_rank_offsets("rows", torch.zeros(4), (0, 2 * dist.get_rank(), 4))
    for wrong in (two, gap):
        if first:
            with pytest.raises(CheckpointingException, match="access"):
                dist_checkpointing.save({"rows": wrong, "step": 7}, place)
        else:  # which would wait for the first one
            save_preprocess({"rows": wrong, "step": 7})
    assert "://" in place or not os.path.exists(place)
    kept = LocalNonpersistentObject("of this life")
    dist_checkpointing.save({**state_of(3.0), "local": kept}, place)
    loaded = dist_checkpointing.load({**state_of(None), "local": LocalNonpersistentObject("new")}, place)
    assert (loaded["local"], loaded["random"]) == ("new", 3.0)
    assert "of this life" not in str(dist_checkpointing.load_common_state_dict(place))


@contextlib.contextmanager
def native() -> Iterator[None]:
    """Have Megatron-Core save by itself; the CUDA device that it needs is the CPU."""
    megatron.uninstall()
    device, synchronize = torch.cuda.current_device, torch.cuda.synchronize
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *_: None
    try:
        yield
    finally:
        torch.cuda.current_device, torch.cuda.synchronize = device, synchronize
        megatron.install()


def main(life: Life) -> None:
    dist.init_process_group("gloo")
    megatron.install()
    checks: list[Callable[[str], None]] = [
        common_state,
        nothing_committed,
        strictness,
        kinds_of_shards,
        asynchronous,
        asynchronous_failure,
        fully_parallel,
        partial(hostile, marker=f"{life.scratch}/hostile"),
        of_megatron_itself,
        names_imported_before,
        uninstalled,
        newest_of_a_migrated_run,
        integrity,
    ]
    for number, check in enumerate(checks):
        print(number, check, flush=True)
        check(f"{life.root}/check-{number}")
        dist.barrier()
    if dist.get_rank() == 0:
        Path(life.report).write_text(json.dumps({"checks": len(checks)}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(read_life())
