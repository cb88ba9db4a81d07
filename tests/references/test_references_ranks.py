"""Several ranks save only what changed; any number of them loads it, whoever was killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks
from support.saves import FailingPlanner, Place, kill_self
from support.states import digest
from support.strict_s3 import StrictS3
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ckpt
from ckpt.errors import FormatError, SaveFailed
from ckpt.format.records import CommitRecord, decode_commit
from ckpt.reading.checkpoint import Checkpoint


class Adapted(nn.Module):
    """A linear layer that does not learn, and a small one beside it that does."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width)
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)
        self.base.requires_grad_(False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.base(values) + self.up(self.down(values))  # type: ignore[no-any-return]


def make(seed: int, *, sharded: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(*(Adapted(160) for _ in range(3)))
    if sharded:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return model, torch.optim.AdamW(trainable, lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """The same batch on all ranks; sums of its integers are exact."""
    batch = (torch.arange(4 * 160).reshape(4, 160) % (step + 2)).float()
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, "step": step}


def _save_run(rank: int, place: Place, sharded: bool, frozen: bool, steps: int) -> Any:
    root, options = place
    model, optimizer = make(0, sharded=sharded)
    found = []
    for step in range(steps):
        train(model, optimizer, step)
        state = state_of(model, optimizer, step)
        names = ckpt.frozen(model, "model.") if frozen and step else ()
        base = f"{root}/step-{step - 1}" if step else None
        save = ckpt.save if step % 2 == 0 else _async
        metadata = save(
            state, f"{root}/step-{step}", storage_options=options, base=base, frozen=names, digests=not step
        )
        found.append(digest(_whole(state)))
        assert metadata.storage_data
    return found


def _async(*args: Any, **kwargs: Any) -> Any:
    return ckpt.async_save(*args, **kwargs).result()


def _whole(state: Any) -> Any:
    """Every DTensor as the tensor it stands for: comparable between numbers of ranks."""
    if isinstance(state, dict):
        return {key: _whole(value) for key, value in state.items()}
    return state.full_tensor() if hasattr(state, "full_tensor") else state


def _load_run(rank: int, place: Place, sharded: bool, steps: list[int]) -> Any:
    root, options = place
    found = []
    for step in steps:
        model, optimizer = make(99, sharded=sharded)
        train(model, optimizer, 0)  # makes the optimizer's state
        state = state_of(model, optimizer, -1)
        ckpt.load(state, f"{root}/step-{step}", storage_options=options)
        found.append(digest(_whole(state)))
    return found


def record_of(place: Path) -> CommitRecord:
    return decode_commit((place / "commit.json").read_bytes(), url=str(place), key="commit.json")


@pytest.mark.parametrize(
    ("sharded", "frozen"),
    [
        (False, False),
        pytest.param(False, True, marks=pytest.mark.long),
        pytest.param(True, False, marks=pytest.mark.long),
        pytest.param(True, True, marks=pytest.mark.long),
    ],
)
def test_adapters_on_two_ranks(tmp_path: Path, sharded: bool, frozen: bool) -> None:
    """LoRA with FSDP2, and with replicas; the base is declared, or compared."""
    place: Place = (str(tmp_path), {})
    expected = run_ranks(2, _save_run, place, sharded, frozen, 3)[0]
    for step in (1, 2):
        record = record_of(tmp_path / f"step-{step}")
        assert record.owners["step-0"].carried_bytes > 3 * 160 * 160 * 4
        assert record.data_bytes < 0.3 * record_of(tmp_path / "step-0").data_bytes
    for world in (1, 3) if sharded else (1,):
        # Loading on one rank needs no wrappers.
        for found in run_ranks(world, _load_run, place, sharded, [0, 1, 2]):
            assert found == expected


@pytest.mark.long
@pytest.mark.parametrize("frozen", [True, False])
def test_adapters_on_four_ranks_and_s3(server: StrictS3, frozen: bool) -> None:
    place: Place = ("s3://bucket/run", server.options)
    expected = run_ranks(4, _save_run, place, True, frozen, 4)[0]
    for world in (1, 2, 3):
        for found in run_ranks(world, _load_run, place, True, [0, 3]):
            assert found == [expected[0], expected[3]]


def test_another_number_of_ranks_goes_on(tmp_path: Path) -> None:
    """What is declared is carried, though the ranks hold other chunks of it."""
    place: Place = (str(tmp_path), {})
    run_ranks(3, _save_run, place, True, True, 1)
    expected = run_ranks(2, _go_on, place)[0]
    record = record_of(tmp_path / "step-1")
    assert record.world_size == 2
    assert len([ref for ref in record.manifests if ref.owner == "step-0"]) == 3
    assert run_ranks(1, _load_run, place, True, [1])[0] == [expected]


def _go_on(rank: int, place: Place) -> Any:
    root, _ = place
    model, optimizer = make(99, sharded=True)
    train(model, optimizer, 0)
    state = state_of(model, optimizer, -1)
    ckpt.load(state, f"{root}/step-0")
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    train(model, optimizer, 1)
    state = state_of(model, optimizer, 1)
    ckpt.save(state, f"{root}/step-1", base=f"{root}/step-0", frozen=ckpt.frozen(model, "model."))
    return digest(_whole(state))


# -- ranks that are killed ----------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_is_killed_in_a_save_with_a_base(tmp_path: Path, victim: int) -> None:
    """The base still loads, the torn save does not; the next one, on other ranks, refers to it."""
    place: Place = (str(tmp_path), {})
    expected = run_ranks(2, _save_run, place, True, True, 1)[0]
    run_ranks(2, _is_killed, place, victim, killed=[victim])
    assert not (tmp_path / "step-1" / "commit.json").exists()
    assert run_ranks(1, _load_run, place, True, [0])[0] == expected
    later = run_ranks(3, _go_on, place)[0]
    assert run_ranks(2, _load_run, place, True, [0, 1])[0] == [expected[0], later]


def _is_killed(rank: int, place: Place, victim: int) -> None:
    root, _ = place
    model, optimizer = make(0, sharded=True)
    train(model, optimizer, 0)
    train(model, optimizer, 1)
    planner = FailingPlanner(3 if rank == victim else 1000, kill_self)
    with pytest.raises(ckpt.errors.SaveFailed):
        ckpt.save(
            state_of(model, optimizer, 1),
            f"{root}/step-1",
            base=f"{root}/step-0",
            planner=planner,
            frozen=ckpt.frozen(model, "model."),
            timeout_s=20.0,
        )


def _save_stage(rank: int, root: str) -> None:
    """Each rank has, and freezes, other parameters."""
    state = {f"{rank}.base": torch.full((20_000,), float(rank)), f"{rank}.adapter": torch.zeros(10)}
    ckpt.save(state, f"{root}/step-0", digests=True)
    state[f"{rank}.adapter"] += 1
    ckpt.async_save(state, f"{root}/step-1", base=f"{root}/step-0", frozen=[f"{rank}.base"]).result()


def test_stages_of_a_pipeline_declare_their_own(tmp_path: Path) -> None:
    run_ranks(2, _save_stage, str(tmp_path))
    assert record_of(tmp_path / "step-1").carried_bytes > 160_000


def _save_with_a_base_on_one_rank(rank: int, root: str) -> str:
    state = {"base": torch.zeros(100)}
    ckpt.save(state, f"{root}/step-0", digests=True)
    with pytest.raises(SaveFailed) as caught:
        ckpt.save(state, f"{root}/step-1", base=f"{root}/step-0" if rank == 1 else None)
    ckpt.save(state, f"{root}/step-2", base=f"{root}/step-0")
    return str(caught.value)


def test_a_base_on_one_rank_only_is_an_error_at_once(tmp_path: Path) -> None:
    for text in run_ranks(2, _save_with_a_base_on_one_rank, str(tmp_path)):
        assert "rank 0 in a save of step-1, rank 1 in a save of step-1 with base step-0" in text


def _cannot_adopt(rank: int, place: Place) -> str:
    root, _ = place
    state = {"weight": torch.ones(10)}
    ckpt.save(state, f"{root}/step-0", digests=True)
    if rank == 1:
        Checkpoint.adopt = _refuse  # type: ignore[method-assign, assignment]
    with pytest.raises(SaveFailed) as caught:
        ckpt.save(state, f"{root}/step-1", base=f"{root}/step-0", timeout_s=60.0)
    return str(caught.value.failures[1])


def _refuse(*args: object, **kwargs: object) -> None:
    raise FormatError("cannot be adopted here")


def test_one_rank_that_cannot_take_over_the_base_tells_the_others(tmp_path: Path) -> None:
    for told in run_ranks(2, _cannot_adopt, (str(tmp_path), {})):
        assert "cannot be adopted here" in told
    assert not (tmp_path / "step-1" / "commit.json").exists()
