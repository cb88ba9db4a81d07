"""Certificates of jobs of ranks: loads on other meshes are exact, and a fault of one rank is known on all."""

from __future__ import annotations

import itertools
import random
import socket
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.certificates import flat, kinds, load_recorded, sharded
from support.ranks import run_ranks
from support.states import emptied, random_tensor
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import ckpt
from ckpt.errors import LoadFailed
from ckpt.local_first.loading import NearReader
from ckpt.ranks.group import Ranks
from ckpt.reading.delivered import DeliveredDigests
from ckpt.reading.parcels import TensorParcel
from ckpt.tools.certificate import Certificate, certificate
from ckpt.tools.certify import certify

PATCH = pytest.MonkeyPatch()
"""Of one rank, whose process ends with its function."""

SHAPES = {"embed": (1001, 64), "wide": (7, 30_000), "cube": (6, 50, 40), "norm": (257,), "tiny": (3, 2)}


def whole_state(seed: int) -> dict[str, Any]:
    dtypes = itertools.cycle([torch.float32, torch.bfloat16, torch.int64])
    tensors = {
        name: random_tensor(*shape, dtype=dtype, seed=seed)
        for (name, shape), dtype in zip(SHAPES.items(), dtypes, strict=False)
    }
    return {"model": tensors, "step": seed}


def on_a_mesh(state: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """The same state, each tensor on a mesh and with placements of its own, the same on all ranks."""
    size = dist.get_world_size()
    meshes = [init_device_mesh("cpu", (size,))]
    if size == 4:
        meshes.append(init_device_mesh("cpu", (2, 2)))
    placed = {}
    for name, whole in state["model"].items():
        mesh = draw.choice(meshes)
        dims = [draw.choice([None, *range(whole.dim())]) for _ in range(mesh.ndim)]
        placed[name] = draw.choice([sharded(whole, mesh, *dims), sharded(whole, mesh, *dims), whole.clone()])
    return {"model": placed, "step": state["step"]}


def joined(state: dict[str, Any], delivered: DeliveredDigests) -> Certificate:
    with closing(Ranks(None, no_dist=False)) as ranks:
        return certificate(flat(state), delivered).of_all(ranks)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 4), (4, 1), (4, 2)])
def test_loads_on_other_meshes_are_exact(before: int, after: int, tmp_path: Path) -> None:
    run_ranks(before, _save_states, str(tmp_path))
    checked = run_ranks(after, _load_states, str(tmp_path))
    assert checked == [list(range(8))] * after


def _save_states(rank: int, root: str) -> None:
    for seed in range(8):
        ckpt.save(on_a_mesh(whole_state(seed), random.Random(seed)), f"{root}/{seed}")


def _load_states(rank: int, root: str) -> list[int]:
    exact = []
    for seed in range(8):
        saved = on_a_mesh(whole_state(seed), random.Random(seed + 100))
        live = emptied(saved)
        delivered = load_recorded(live, f"{root}/{seed}", no_dist=False)
        found = joined(live, delivered)
        assert found.is_exact, str(found)
        assert found.ranks == dist.get_world_size()
        again = certify(live, f"{root}/{seed}")
        assert again.is_exact, str(again)
        exact.append(seed)
    return exact


def test_replicas_that_were_passed_bytes_have_their_digests(tmp_path: Path) -> None:
    assert all(run_ranks(4, _read_once, str(tmp_path / "c")))


def _read_once(rank: int, url: str) -> bool:
    PATCH.setattr(socket, "gethostname", lambda: f"node-{rank}")
    mesh = init_device_mesh("cpu", (2, 2))
    shapes = {"a": (3000, 513), "b": (64, 20_000), "c": (257,)}
    model = {n: sharded(random_tensor(*s, seed=1), mesh, None, len(s) - 1) for n, s in shapes.items()}
    saved: dict[str, Any] = {"model": model, "plain": random_tensor(400_000, seed=2), "o": [1, 2]}
    ckpt.save(saved, url)
    taken: list[int] = []
    take = TensorParcel.take

    def counting(self: TensorParcel, start: int, data: memoryview) -> None:
        taken.append(data.nbytes)
        take(self, start, data)

    PATCH.setattr(TensorParcel, "take", counting)
    live = emptied(saved)
    found = joined(live, load_recorded(live, url, no_dist=False))
    assert found.is_exact, str(found)
    assert sum(taken) > 1 << 20
    if rank == 2:
        live["plain"].view(torch.int32)[300_000] ^= 1
    assert kinds(certify(live, url)) == ({"different": ("plain",)})
    wide = {**emptied(saved), "plain": torch.zeros(400_000, dtype=torch.float64)}
    found = joined(wide, load_recorded(wide, url, no_dist=False))
    return kinds(found) == {"cast": ("plain",)}


# -- faults ------------------------------------------------------------------------------------------------


def _local(tensor: DTensor) -> torch.Tensor:
    return tensor.to_local()


def _wrong_shard(live: dict[str, Any], rank: int, mesh: DeviceMesh) -> None:
    """Rank 1 holds the shard of rank 0."""
    other = [torch.empty_like(_local(live["rows"])) for _ in range(2)]
    dist.all_gather(other, _local(live["rows"]))
    if rank == 1:
        _local(live["rows"]).copy_(other[0])


def _shards_swapped(live: dict[str, Any], rank: int, mesh: DeviceMesh) -> None:
    other = [torch.empty_like(_local(live["rows"])) for _ in range(2)]
    dist.all_gather(other, _local(live["rows"]))
    _local(live["rows"]).copy_(other[1 - rank])


def _stale_local(live: dict[str, Any], rank: int, mesh: DeviceMesh) -> None:
    """The DTensor of one rank still shows the memory that it had before the load."""
    if rank == 0:
        live["rows"] = DTensor.from_local(
            torch.zeros_like(_local(live["rows"])), mesh, live["rows"].placements, run_check=False
        )


def _replica_drifts(live: dict[str, Any], rank: int, mesh: DeviceMesh) -> None:
    if rank == 1:
        _local(live["replica"]).view(torch.int32)[5] ^= 1


def _plain_replica_drifts(live: dict[str, Any], rank: int, mesh: DeviceMesh) -> None:
    if rank == 1:
        live["plain"].view(torch.int32)[-1] ^= 1


def _sharded_along_another_dimension(live: dict[str, Any], rank: int, mesh: DeviceMesh) -> None:
    """Its local shards are taken for columns; here they have that size too."""
    live["rows"] = DTensor.from_local(
        _local(live["rows"]).reshape(64, 32), mesh, sharded(torch.zeros(64, 64), mesh, 1).placements
    )


def _object_of_one_rank(live: dict[str, Any], rank: int, mesh: DeviceMesh) -> None:
    live["step"] += rank


FAULTS: list[tuple[Callable[[dict[str, Any], int, DeviceMesh], None], dict[str, tuple[str, ...]]]] = [
    (_wrong_shard, {"different": ("rows",)}),
    (_shards_swapped, {"different": ("rows",)}),
    (_stale_local, {"different": ("rows",)}),
    (_replica_drifts, {"different": ("replica",)}),
    (_plain_replica_drifts, {"different": ("plain",)}),
    (_object_of_one_rank, {"different": ("step",)}),
]


def test_a_fault_of_one_rank_is_known_on_all(tmp_path: Path) -> None:
    assert run_ranks(2, _find_faults, str(tmp_path / "c")) == [len(FAULTS) + 1] * 2


def _find_faults(rank: int, url: str) -> int:
    mesh = init_device_mesh("cpu", (2,))

    def state() -> dict[str, Any]:
        rows, replica = random_tensor(64, 64, seed=1), random_tensor(1000, seed=2)
        plain = random_tensor(300_000, seed=3)
        return {
            "rows": sharded(rows, mesh, 0),
            "replica": sharded(replica, mesh, None),
            "plain": plain,
            "step": 4,
        }

    ckpt.save(state(), url)
    for fault, expected in FAULTS:
        live = emptied(state())
        delivered = load_recorded(live, url, no_dist=False)
        assert joined(live, delivered).is_exact
        fault(live, rank, mesh)
        assert kinds(joined(live, delivered)) == expected, fault
        assert kinds(certify(live, url)) == expected, fault
    _sharded_along_another_dimension(live, rank, mesh)
    found = kinds(joined(live, delivered))
    assert "rows" in found["untouched"]  # the load delivered other halves
    assert "rows" in kinds(certify(live, url))["different"]
    return len(FAULTS) + 1


def test_shards_of_fsdp1_are_compared(tmp_path: Path) -> None:
    assert all(run_ranks(2, _old_shards, str(tmp_path / "c")))


def _old_shards(rank: int, url: str) -> bool:
    spec = ChunkShardingSpec(dim=0, placements=["rank:0/cpu", "rank:1/cpu"])
    torch.manual_seed(rank)
    state: dict[str, Any] = {"w": sharded_tensor.rand(spec, 5, 40)}
    ckpt.save(state, url)
    live = {"w": sharded_tensor.zeros(spec, 5, 40)}
    delivered = load_recorded(live, url, no_dist=False)
    assert joined(live, delivered).is_exact
    assert certify(live, url).is_exact
    if rank == 1:
        live["w"].local_shards()[0].tensor[0, 0] = 5.0
    assert kinds(certify(live, url)) == {"different": ("w",)}
    return kinds(joined(live, delivered)) == {"different": ("w",)}


def test_ranks_with_other_names_leave_nothing_over(tmp_path: Path) -> None:
    """As stages of a pipeline: each rank has layers of its own, and only together have they all."""
    assert all(run_ranks(2, _stages, str(tmp_path / "c")))


def _stages(rank: int, url: str) -> bool:
    state = {f"layer{rank}": random_tensor(100, seed=rank), "shared": random_tensor(9, seed=5)}
    ckpt.save(state, url)
    live = emptied(state)
    delivered = load_recorded(live, url, no_dist=False)
    own = certificate(live, delivered)
    assert kinds(own) == {"left_over": (f"layer{1 - rank}",)}
    return joined(live, delivered).is_exact and certify(live, url).is_exact


def test_a_rank_that_fails_ends_the_certificate_on_all(tmp_path: Path) -> None:
    assert run_ranks(2, _one_fails, str(tmp_path / "c")) == ["rank 1: RuntimeError: no state"] * 2


def _one_fails(rank: int, url: str) -> str:
    class Part:
        def state_dict(self) -> dict[str, Any]:
            if rank == 1:
                raise RuntimeError("no state")
            return {"w": torch.zeros(3)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise AssertionError("nothing is loaded")

    ckpt.save({"part": {"w": torch.zeros(3)}}, url)
    with pytest.raises(LoadFailed) as raised:
        certify({"part": Part()}, url)
    return str(raised.value)[str(raised.value).index("rank 1") :]


# -- local tiers -------------------------------------------------------------------------------------------


def test_what_a_node_had_on_its_own_disk_is_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[DeliveredDigests] = []

    class Recording(NearReader):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            recorded.append(self.record_delivered())

    monkeypatch.setattr("ckpt.local_first.loading.NearReader", Recording)
    state = {"w": random_tensor(300_000, seed=1), "step": 3}
    url, local = str(tmp_path / "durable" / "step-3"), tmp_path / "local"
    ckpt.async_save(state, url, local=local, no_dist=True).result()
    live = emptied(state)
    ckpt.load(live, url, local=local, no_dist=True)
    assert certificate(live, recorded[0]).is_exact
    live["w"].view(torch.int32)[7] ^= 1
    assert kinds(certificate(live, recorded[0])) == {"different": ("w",)}
