"""Saves that would succeed with wrong content: each is refused, with the tensor and the rank, and leaves the one before."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import ckpt
from ckpt.errors import SaveFailed, WrongContent

State = dict[str, Any]
Fault = Callable[[State, State, int], None]
"""Changes the state of a rank, which gets that of the save before too."""

NAMES = [f"layers.{number}.weight" for number in range(6)]


def local_of(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def tensors_of(part: Any) -> list[torch.Tensor]:
    """List the tensors of a part that hold values: not the counters of steps."""
    if isinstance(part, torch.Tensor):
        return [local_of(part)] if part.numel() > 1 else []
    values = part.values() if isinstance(part, dict) else []
    return [tensor for value in values for tensor in tensors_of(value)]


def training(layout: str, rank: int) -> State:
    """Make the state of a small job: weights, two averages for each, counters."""
    size = dist.get_world_size()
    mesh: Any = None
    placements: list[Any] = []
    if layout == "fsdp":
        mesh, placements = init_device_mesh("cpu", (size,)), [Shard(0)]
    elif layout == "hsdp":
        mesh, placements = init_device_mesh("cpu", (2, size // 2)), [Replicate(), Shard(0)]
    elif layout == "tp":
        mesh, placements = init_device_mesh("cpu", (size,)), [Shard(1)]
    generator = torch.Generator().manual_seed(7)

    def tensor(placed: list[Any] = placements) -> torch.Tensor:
        whole = torch.randn(64, 32, generator=generator)
        if mesh is None:
            return whole
        return DTensor.from_local(_shard(whole, mesh, placed), mesh, placed, run_check=False)

    weights = {name: tensor() for name in NAMES}
    state: State = {
        "model": weights,
        "optimizer": {
            name: {"step": torch.tensor(1.0), "exp_avg": tensor(), "exp_avg_sq": tensor()} for name in NAMES
        },
        "loader": {"_epoch": 2, "_samples_yielded": 0},
        "global_step": 0,
    }
    if layout == "tp":
        weights["norm.weight"] = tensor([Replicate()])
    if layout == "ep":
        experts = {f"experts.{rank}.{name}": tensor() for name in ("up", "down")}
        state["model"] = weights | experts
    weights = state["model"]
    weights["half"] = torch.randn(300, generator=generator).bfloat16()
    weights["scale"] = torch.rand(300, generator=generator).add(0.5).to(torch.float8_e4m3fn)
    return state


def _shard(whole: torch.Tensor, mesh: Any, placements: list[Any]) -> torch.Tensor:
    for dimension, placement in enumerate(placements):
        if isinstance(placement, Shard):
            parts = whole.chunk(mesh.size(dimension), placement.dim)
            whole = parts[mesh.get_coordinate()[dimension]].contiguous()
    return whole.clone()


def train(state: State, seed: int) -> None:
    """Change all values, on all replicas alike."""
    for part in ("model", "optimizer"):
        for tensor in tensors_of(state[part]):
            if tensor.dtype is torch.float8_e4m3fn:
                tensor.copy_(torch.roll(tensor.view(torch.uint8), seed).view(tensor.dtype))
            else:
                tensor.mul_(1.01).add_(1e-3 * seed)
    for entry in state["optimizer"].values():
        entry["step"] += 1
    state["loader"] = state["loader"] | {"_samples_yielded": state["loader"]["_samples_yielded"] + 64}
    state["global_step"] += 1


# -- the faults --------------------------------------------------------------------------------------------


def everything_stale(state: State, before: State, rank: int) -> None:
    for part in ("model", "optimizer"):
        state[part] = before[part]


def optimizer_stale(state: State, before: State, rank: int) -> None:
    for name, entry in state["optimizer"].items():
        entry.update(
            exp_avg=before["optimizer"][name]["exp_avg"], exp_avg_sq=before["optimizer"][name]["exp_avg_sq"]
        )


def model_stale(state: State, before: State, rank: int) -> None:
    state["model"] = before["model"]


def nan_in_a_moment(state: State, before: State, rank: int) -> None:
    if rank == 1:
        local_of(state["optimizer"][NAMES[3]]["exp_avg"]).fill_(float("nan"))


def infinity_in_half(state: State, before: State, rank: int) -> None:
    state["model"]["half"][100:] = float("inf")


def staging_full_of_nan(state: State, before: State, rank: int) -> None:
    state["model"]["scale"].view(torch.uint8).fill_(0x7F)


def overflow(state: State, before: State, rank: int) -> None:
    local_of(state["model"][NAMES[0]]).mul_(1e38).mul_(1e38)


def weights_zero(state: State, before: State, rank: int) -> None:
    for tensor in tensors_of(state["model"]):
        tensor.zero_()


def one_weight_zero(state: State, before: State, rank: int) -> None:
    local_of(state["model"][NAMES[2]]).zero_()


def optimizer_zero(state: State, before: State, rank: int) -> None:
    for tensor in tensors_of(state["optimizer"]):
        tensor.zero_()


def half_an_optimizer(state: State, before: State, rank: int) -> None:
    for name in NAMES[3:]:
        del state["optimizer"][name]


def no_optimizer(state: State, before: State, rank: int) -> None:
    del state["optimizer"]


def one_weight_gone(state: State, before: State, rank: int) -> None:
    del state["model"][NAMES[5]]


def smaller(state: State, before: State, rank: int) -> None:
    state["model"]["half"] = state["model"]["half"][:100].clone()


def optimizer_made_anew(state: State, before: State, rank: int) -> None:
    for entry in state["optimizer"].values():
        entry["step"] = torch.tensor(1.0)


def loader_begins_again(state: State, before: State, rank: int) -> None:
    state["loader"]["_samples_yielded"] = 64


def epoch_went_back(state: State, before: State, rank: int) -> None:
    state["loader"]["_epoch"] = 1


def trainer_counts_anew(state: State, before: State, rank: int) -> None:
    state["global_step"] = 1


def replica_drifted(state: State, before: State, rank: int) -> None:
    if rank == 2:
        for tensor in tensors_of(state["model"]):
            tensor.view(torch.uint8).flatten()[::7] ^= 1


def replica_differs_in_one(state: State, before: State, rank: int) -> None:
    if rank == 3:
        local_of(state["optimizer"][NAMES[4]]["exp_avg_sq"]).add_(1)


def replica_missed_a_step(state: State, before: State, rank: int) -> None:
    if rank == 2:
        state["model"] = before["model"]


def norm_drifted(state: State, before: State, rank: int) -> None:
    if rank == 1:
        local_of(state["model"]["norm.weight"]).add_(1e-6)


def experts_of_one_name(state: State, before: State, rank: int) -> None:
    state["model"]["experts.0.up"] = state["model"][f"experts.{rank}.up"] + rank


def one_name_for_all_generators(state: State, before: State, rank: int) -> None:
    state["rng"] = {"state": torch.arange(100 * (rank + 1), 100 * (rank + 1) + 64, dtype=torch.uint8)}


def plain_replica_drifted(state: State, before: State, rank: int) -> None:
    if rank == 1:
        state["model"][NAMES[1]].add_(1e-3)


FAULTS: list[tuple[str, Fault, str, str, int | None]] = [
    ("fsdp", everything_stale, "stale", "", None),
    ("fsdp", optimizer_stale, "stale", "", None),
    ("fsdp", model_stale, "stale", "", None),
    ("fsdp", nan_in_a_moment, "not_finite", f"optimizer.{NAMES[3]}.exp_avg", 1),
    ("fsdp", infinity_in_half, "not_finite", "model.half", None),
    ("fsdp", staging_full_of_nan, "not_finite", "model.scale", None),
    ("fsdp", overflow, "not_finite", f"model.{NAMES[0]}", 0),
    ("fsdp", weights_zero, "zeroed", f"model.{NAMES[0]}", 0),
    ("fsdp", one_weight_zero, "zeroed", f"model.{NAMES[2]}", 0),
    ("fsdp", optimizer_zero, "zeroed", f"optimizer.{NAMES[0]}.exp_avg", 0),
    ("fsdp", half_an_optimizer, "missing", "", None),
    ("fsdp", no_optimizer, "missing", "", None),
    ("fsdp", one_weight_gone, "missing", "", None),
    ("fsdp", smaller, "missing", "", None),
    ("fsdp", optimizer_made_anew, "went_back", f"optimizer.{NAMES[0]}.step", None),
    ("fsdp", loader_begins_again, "went_back", "loader._samples_yielded", None),
    ("fsdp", epoch_went_back, "went_back", "loader._epoch", None),
    ("fsdp", trainer_counts_anew, "went_back", "global_step", None),
    ("hsdp", replica_drifted, "diverged", f"model.{NAMES[0]}", 2),
    ("hsdp", replica_differs_in_one, "diverged", f"optimizer.{NAMES[4]}.exp_avg_sq", 3),
    ("hsdp", replica_missed_a_step, "diverged", f"model.{NAMES[0]}", 2),
    ("tp", norm_drifted, "diverged", "model.norm.weight", 1),
    ("tp", nan_in_a_moment, "not_finite", f"optimizer.{NAMES[3]}.exp_avg", 1),
    ("ep", experts_of_one_name, "collided", "model.experts.0.up", 1),
    ("ep", one_name_for_all_generators, "collided", "rng.state", 1),
]

OFTEN_MEANT = (infinity_in_half, overflow)
"""Found, but only warned of."""


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        pytest.param("fsdp", 2, marks=pytest.mark.smoke),
        ("hsdp", 4),
        ("tp", 2),
        ("ep", 2),
    ],
)
def test_wrong_content_is_refused(layout: str, ranks: int, tmp_path: Path) -> None:
    run_ranks(ranks, _meet_faults, layout, str(tmp_path))


def _meet_faults(rank: int, layout: str, root: str) -> None:
    for number, (of, fault, check, tensor, culprit) in enumerate(FAULTS):
        if of != layout:
            continue
        run = f"{root}/{number}"
        state = training(layout, rank)
        for step in (1, 2):
            train(state, step)
            ckpt.save(state, f"{run}/step-{step}", checks="refuse")
        before = copy.deepcopy(state)
        train(state, 3)
        fault(state, before, rank)
        if fault in OFTEN_MEANT:
            found: Any = ckpt.save(state, f"{run}/step-3", checks="refuse").storage_meta
            (warning,) = found.warnings
            assert "infinity in" in warning
            assert tensor in warning
            continue
        with pytest.raises(SaveFailed) as failed:
            ckpt.save(state, f"{run}/step-3", checks="refuse")
        (error,) = failed.value.failures.values()
        assert isinstance(error, WrongContent), (fault.__name__, failed.value)
        assert error.check == check, (fault.__name__, failed.value)
        assert tensor in error.tensors if tensor else not error.tensors, (fault.__name__, error.tensors)
        assert culprit is None or error.rank == culprit, (fault.__name__, failed.value)
        for name in error.tensors[:1]:
            assert name in str(failed.value)
        dist.barrier()
        if rank == 0:
            listed = {each.path: each.state for each in ckpt.list_checkpoints(run)}
            assert listed == {"step-1": "committed", "step-2": "committed"}
            assert not [*Path(run, "step-3").rglob("*.distcp")]
        # What is meant is saved, and the save after it is compared with that.
        ckpt.save(state, f"{run}/step-4", checks="off")


def test_a_plain_replica_that_drifted_is_refused(tmp_path: Path) -> None:
    run_ranks(2, _meet_drifted, str(tmp_path))


def _meet_drifted(rank: int, run: str) -> None:
    """Whatever checks are asked for: a dict by the name of a model is compared as one."""
    state = training("ddp", rank)
    for checks in ("refuse", "off"):
        ckpt.save(state, f"{run}/{checks}-1", checks=checks)
        plain_replica_drifted(state, state, rank)
        with pytest.raises(SaveFailed, match=f"model.{NAMES[1]}".replace(".", r"\.")):
            ckpt.save(state, f"{run}/{checks}-2", checks=checks)
        state = training("ddp", rank)


def test_parts_that_only_count_hide_nothing(tmp_path: Path) -> None:
    """Forty parts with tensors are told apart; with seventy in all they would be one."""
    counts = {f"schedule{number}": {"last_epoch": 1} for number in range(30)}
    state: State = {f"part{number}": {"w": torch.randn(50)} for number in range(40)} | counts
    ckpt.save(state, tmp_path / "step-1")
    state["part7"]["w"].fill_(float("nan"))
    with pytest.raises(SaveFailed, match=r"part7\.w"):
        ckpt.save(state, tmp_path / "step-2")


def test_steps_that_went_back_are_found_though_the_epoch_moved_on(tmp_path: Path) -> None:
    for number, (epoch, step) in enumerate([(1.1, 200), (2.3, 1)], 1):
        state: State = {"model": {"w": torch.randn(9)}, "trainer": {"epoch": epoch, "consumed_samples": step}}
        state["optimizer"] = {"upsampler": {"w": {"step": torch.tensor(float(step))}}}
        if number == 1:
            ckpt.save(state, tmp_path / "step-1", checks="refuse")
    with pytest.raises(SaveFailed) as failed:
        ckpt.save(state, tmp_path / "step-2", checks="refuse")
    for name in ("optimizer.upsampler.w.step", "trainer.consumed_samples"):
        assert f"{name!r} from 200 to 1" in str(failed.value)


def test_ranks_that_disagree_about_a_shape(tmp_path: Path) -> None:
    for error in run_ranks(2, _shapes, str(tmp_path)):
        assert "'model.w'" in error
        assert "do not fit together" in error


def _shapes(rank: int, url: str) -> str:
    with pytest.raises(SaveFailed) as failed:
        ckpt.save({"model": {"w": torch.ones(3 + rank)}}, url)
    return str(failed.value)
