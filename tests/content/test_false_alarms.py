"""Honest saves that a check by samples and counts could take for wrong ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.ranks import run_ranks
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ckpt
from ckpt.content import memory, parts
from ckpt.content.replicas import _sample_digest
from ckpt.errors import SaveFailed
from ckpt.options import LoadOptions

INFINITY = float("inf")


def warnings_of(state: dict[str, Any], url: Path | str, **options: Any) -> list[str]:
    meta: Any = ckpt.save(state, url, **options).storage_meta
    return list(meta.warnings)


def weights(**others: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"w": torch.randn(100), **others}


def test_a_job_of_another_size_writes_other_chunks(tmp_path: Path) -> None:
    run_ranks(2, _train_on, str(tmp_path), 1)
    assert run_ranks(4, _train_on, str(tmp_path), 2) == [[]] * 4


def _train_on(rank: int, root: str, step: int) -> list[str]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {"model": {"bias": distribute_tensor(torch.zeros(64), mesh, [Shard(0)])}}
    if step > 1:
        ckpt.load(state, f"{root}/step-{step - 1}", options=LoadOptions(strict=False))
    torch.manual_seed(step)
    state["model"]["w"] = distribute_tensor(torch.randn(64, 8), mesh, [Shard(0)])
    return warnings_of(state, f"{root}/step-{step}", checks="refuse")


def test_what_a_base_holds_is_known_when_all_is_written_again(tmp_path: Path) -> None:
    fixed = {
        "mask": torch.full((600, 600), -INFINITY).triu(1).nan_to_num(0, neginf=-INFINITY),
        "bias": torch.zeros(200_000),
    }
    ckpt.save({"model": weights(**fixed)}, tmp_path / "step-1", digests=True, checks="refuse")
    ckpt.save({"model": weights(**fixed)}, tmp_path / "step-2", base=tmp_path / "step-1", checks="refuse")
    ckpt.save({"model": weights(**fixed)}, tmp_path / "step-3", digests=True, checks="refuse")


def test_an_infinity_that_was_always_there_is_not_new(tmp_path: Path) -> None:
    """A sample meets it in one save out of 32; a bias that forbids a token is such a one."""
    bias = torch.zeros(128_000)
    bias[5000] = -INFINITY
    for step in range(1, 40):
        ckpt.save({"model": weights(bias=bias)}, tmp_path / f"step-{step}", checks="refuse")


def test_a_few_values_in_a_large_tensor_are_seen_in_each_save(tmp_path: Path) -> None:
    counts = torch.zeros(3_000_000)
    counts[torch.arange(7, 3_000_000, 400_000)] = 1.0
    many = {str(number): torch.zeros(2000) for number in range(50)}
    for number, tensor in enumerate(many.values()):
        tensor[number * 7] = 1.0
    for step in range(1, 12):
        for tensor in many.values():
            tensor.copy_(tensor.roll(1))
        state = {"model": weights(counts=counts, **many)}
        assert not warnings_of(state, tmp_path / f"step-{step}", checks="refuse")


def test_series_in_one_folder_are_compared_each_with_itself(tmp_path: Path) -> None:
    for step in (100, 200):
        for name in ("model", "optimizer"):
            assert not warnings_of({name: weights()}, tmp_path / f"{name}-{step}")
    with pytest.raises(SaveFailed, match="NaN"):
        ckpt.save({"model": {"w": torch.full((100,), float("nan"))}}, tmp_path / "model-300")


def test_the_best_loss_may_become_infinite(tmp_path: Path) -> None:
    state = {"model": weights(), "callbacks": {"best": torch.tensor(1.0)}}
    ckpt.save(state, tmp_path / "step-1")
    state = {"model": weights(), "callbacks": {"best": torch.tensor(INFINITY)}}
    assert not warnings_of(state, tmp_path / "step-2")
    state["model"]["scale"] = torch.tensor(1.0)
    ckpt.save(state, tmp_path / "step-3")
    state["model"]["scale"] = torch.tensor(INFINITY)
    warning, *_ = warnings_of(state, tmp_path / "step-4")
    assert "infinity in 1 tensor of 'model', none before: model.scale" in warning


HONEST: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "metric after its reset": (
        {"metrics": {"min_value": torch.tensor(0.3)}},
        {"metrics": {"min_value": torch.tensor(INFINITY)}},
    ),
    "mask made at the first long batch": (
        {"model": weights(mask=torch.zeros(8, 8))},
        {"model": weights(mask=torch.full((64, 64), -INFINITY).triu(1))},
    ),
    "bias of padding": (
        {"model": weights(bias=torch.zeros(64))},
        {"model": weights(bias=torch.cat([torch.zeros(60), torch.full((4,), -INFINITY)]))},
    ),
    "flat state": (weights(best=torch.tensor(1.0)), weights(best=torch.tensor(-INFINITY))),
    "bounds of a callback": (
        {"callback": {"best": torch.zeros(4)}},
        {"callback": {"best": torch.full((4,), INFINITY)}},
    ),
    "bound of clipping in an optimizer's groups": (
        {"optimizer": {"param_groups": [{"clip": torch.tensor([1.0, 1.0])}]}},
        {"optimizer": {"param_groups": [{"clip": torch.tensor([1.0, INFINITY])}]}},
    ),
}


@pytest.mark.parametrize("case", HONEST)
@pytest.mark.parametrize("look_at", ["sample", "all"])
def test_infinities_that_are_meant_are_saved(case: str, look_at: Any, tmp_path: Path) -> None:
    for step, state in enumerate(HONEST[case], 1):
        warnings_of(dict(state), tmp_path / f"step-{step}", checks=ckpt.Checks(look_at=look_at))


def test_an_infinity_hides_no_nan(tmp_path: Path) -> None:
    for step, worst in enumerate([0.0, INFINITY, INFINITY], 1):
        found = warnings_of({"model": weights(mask=torch.full((9,), worst))}, tmp_path / f"step-{step}")
        assert [text for text in found if "infinity" in text] == (found if step == 2 else [])
    with pytest.raises(SaveFailed, match=r"NaN in 1 tensor of 'model', none before: model\.mask"):
        ckpt.save({"model": weights(mask=torch.tensor([INFINITY] * 8 + [float("nan")]))}, tmp_path / "step-4")


def test_an_infinity_among_moments_is_refused(tmp_path: Path) -> None:
    states = [
        {"optimizer": {"state": {"w": {"exp_avg_sq": torch.full((9,), worst)}}}} for worst in (1.0, INFINITY)
    ]
    ckpt.save(states[0], tmp_path / "step-1")
    with pytest.raises(SaveFailed, match=r"infinity in 1 tensor of 'optimizer', none before: .*exp_avg_sq"):
        ckpt.save(states[1], tmp_path / "step-2")


def test_an_older_step_is_compared_with_that_which_it_replaces(tmp_path: Path) -> None:
    for step in (2, 3):
        ckpt.save({"model": weights()}, tmp_path / f"step-{step}")
    with pytest.raises(SaveFailed, match="NaN"):
        ckpt.save({"model": {"w": torch.full((100,), float("nan"))}}, tmp_path / "step-2")


def test_a_state_of_very_many_parts_has_a_small_record(tmp_path: Path) -> None:
    state = {f"p{number}": {"exp_avg": torch.randn(3)} for number in range(5 * parts.MAX_PARTS)}
    ckpt.save(state, tmp_path / "step-1")
    assert (tmp_path / "step-1" / "commit.json").stat().st_size < 2000
    assert "no tensor has changed" in warnings_of(state, tmp_path / "step-2")[0]
    state["p7"]["exp_avg"].fill_(float("nan"))
    with pytest.raises(SaveFailed, match=r"p7\.exp_avg"):
        ckpt.save(state, tmp_path / "step-3")


def test_what_is_remembered_is_bounded(tmp_path: Path) -> None:
    for name in "abcdefghijklmnopqrstuvw":
        ckpt.save({"w": torch.zeros(2)}, tmp_path / name)
    assert len(memory._last) <= 16
    assert len(memory._seen) <= 16


@pytest.mark.parametrize("count", [0, 1, 3000, 3072, 3073, 50_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex128, torch.uint8], ids=str)
def test_a_replica_may_lie_otherwise_in_memory(count: int, dtype: torch.dtype) -> None:
    tensor = torch.randn(count).to(dtype)
    spread = torch.zeros(count, 2, dtype=dtype)
    spread[:, 0] = tensor
    assert _sample_digest(spread[:, 0]) == _sample_digest(tensor)


def counted(**parts: dict[str, Any]) -> dict[str, Any]:
    return {"model": weights(), **parts}


def steps(tmp_path: Path, *states: dict[str, Any], checks: Any = "refuse") -> None:
    for step, state in enumerate(states, 1):
        ckpt.save(counted(**state), tmp_path / f"step-{step}", checks=checks)


def test_a_loader_begins_again_with_each_epoch(tmp_path: Path) -> None:
    """The trainer counts the epoch already when the loader has not begun it; one loader may be shorter than others."""
    steps(
        tmp_path,
        *(
            {
                "epoch": epoch,
                "loader": {"_num_yielded": samples, "step": samples, "_steps_since_snapshot": samples % 3},
            }
            for epoch, samples in [(0, 6), (0, 10), (1, 10), (1, 5), (1, 2)]
        ),
    )


def test_a_loader_that_counts_epochs_is_another_in_the_next_stage(tmp_path: Path) -> None:
    states = [(0, 0, 50), (0, 1, 10), (1, 0, 20)]
    steps(
        tmp_path,
        *({"epoch": epoch, "loader": {"epoch": own, "sample_in_epoch": at}} for epoch, own, at in states),
    )


def test_steps_within_an_epoch_begin_again(tmp_path: Path) -> None:
    steps(
        tmp_path, *({"trainer": {"epoch": epoch, "step": step}} for epoch, step in [(0, 9), (1, 10), (1, 5)])
    )


def test_an_epoch_counts_wherever_it_stands(tmp_path: Path) -> None:
    """Here in a part that has another tensor in each save."""
    states = [(0, 9), (1, 3)]
    steps(
        tmp_path,
        *(
            {"trainer": {"epoch": epoch, f"losses{epoch}": torch.randn(2)}, "loop": {"step": at}}
            for epoch, at in states
        ),
        checks=ckpt.Checks(went_back="refuse"),
    )


def test_fewer_ranks_are_further_in_the_same_epoch(tmp_path: Path) -> None:
    run_ranks(2, _at, str(tmp_path / "step-1"), 1000)
    ckpt.load(state := counted(loader={"epoch": 0, "sample_in_epoch": 0}), tmp_path / "step-1")
    state["loader"]["sample_in_epoch"] = 510
    ckpt.save(state, tmp_path / "step-2", checks=ckpt.Checks(went_back="refuse"))
    state["loader"]["sample_in_epoch"] = 500
    with pytest.raises(SaveFailed, match="from 510 to 500"):
        ckpt.save(state, tmp_path / "step-3", checks=ckpt.Checks(went_back="refuse"))


def _at(rank: int, url: str, position: int) -> None:
    torch.manual_seed(1)
    ckpt.save(counted(loader={"epoch": 0, "sample_in_epoch": position}), url)


def test_settings_and_weights_are_no_counters(tmp_path: Path) -> None:
    steps(
        tmp_path,
        *(
            {
                "config": {"epoch": value, "global_step": value},
                "trainer": {"args": {"step": value}, "num_epochs": value},
                "module": {
                    "upsampler.offset": torch.tensor(float(value)),
                    "gate.step": torch.tensor(float(value)),
                },
            }
            for value in (5, 4, 3)
        ),
    )


def test_a_planner_that_names_objects_otherwise_can_save(tmp_path: Path) -> None:
    class Renamed(DefaultSavePlanner):
        def lookup_object(self, index: Any) -> Any:
            raise KeyError(index.fqn)

        def resolve_data(self, write_item: Any) -> Any:
            return self.transform_object(write_item, self.state_dict[write_item.index.fqn])

    state = counted(trainer={"step": 3})
    ckpt.save(state, tmp_path / "step-1", planner=Renamed())
    dcp.save(state, storage_writer=ckpt.CheckpointWriter(tmp_path / "step-2"), planner=Renamed())


def test_counters_start_where_a_loaded_checkpoint_is(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        ckpt.save(counted(trainer={"global_step": step}), tmp_path / f"step-{step}", checks="refuse")
    state = counted(trainer={"global_step": 0})
    ckpt.load(state, tmp_path / "step-1")
    ckpt.save(counted(trainer={"global_step": 2}), tmp_path / "step-4", checks="refuse")


def test_an_optimizer_of_other_parameters_counts_anew(tmp_path: Path) -> None:
    for step, (name, count) in enumerate([("a", 5.0), ("a", 6.0), ("b", 1.0), ("b", 2.0)], 1):
        optimizer = {"state": {name: {"step": torch.tensor(count), "exp_avg": torch.randn(4)}}}
        ckpt.save(
            counted(optimizer=optimizer), tmp_path / f"step-{step}", checks=ckpt.Checks(went_back="refuse")
        )


def test_a_base_holds_the_counters_that_stand(tmp_path: Path) -> None:
    """What was frozen counts no further; what counts lower is not the highest of all."""
    frozen, url = torch.tensor(100.0), str(tmp_path / "step-")
    for step in (1, 2, 3, 4):
        optimizer = {
            "frozen": {"step": frozen},
            "trained": {"step": torch.tensor(step * 2.0), "m": torch.randn(4)},
        }
        base: dict[str, Any] = {"base": f"{url}{step - 1}"} if step in (2, 3) else {"digests": True}
        ckpt.save(counted(optimizer=optimizer), f"{url}{step}", checks="refuse", **base)


def test_no_number_is_no_counter(tmp_path: Path) -> None:
    for step, value in enumerate([True, "9", [3], float("inf"), float("nan"), 10**30, 5, None], 1):
        ckpt.save(counted(trainer={"step": value}), tmp_path / f"step-{step}", checks="refuse")
    record = msgspec.json.decode((tmp_path / "step-7" / "commit.json").read_bytes())
    assert record["content"]["trainer"]["counters"] == {"step": 5.0}
