"""What a load changes on its way: casts, shapes, names, and which keys it takes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ckpt
from ckpt.errors import ConfigurationError, LoadFailed
from ckpt.options import LoadOptions, ManagerOptions, SaveOptions

OPTIONS: dict[str, Any] = {"save": 1, "preflight": False, "storage_options": {"fsync": False}}


@pytest.mark.parametrize(
    ("stored", "dtype"),
    [
        (torch.tensor([1.5, -2.0]), torch.float16),
        (torch.tensor([1.5, float("inf")]), torch.float16),
        (torch.tensor([1.5], dtype=torch.float64), torch.float32),
        (torch.tensor([5, -6]), torch.int32),
        (torch.tensor([0, 1]), torch.bool),
        (torch.tensor([2.0, 3.0]), torch.int64),
        (torch.tensor([1.5, float("nan")]), torch.bfloat16),
    ],
)
def test_casts_that_round_at_most_are_made(tmp_path: Path, stored: torch.Tensor, dtype: torch.dtype) -> None:
    ckpt.save({"t": stored}, tmp_path, checks="off")
    target = torch.zeros(stored.shape, dtype=dtype)
    ckpt.load({"t": target}, tmp_path)
    assert torch.equal(target.nan_to_num(), stored.to(dtype).nan_to_num())


@pytest.mark.parametrize(
    ("stored", "dtype"),
    [
        (torch.tensor([5_000_000_000]), torch.int32),
        (torch.tensor([-1]), torch.uint8),
        (torch.tensor([1e30]), torch.float16),
        (torch.tensor([3.4e38]), torch.bfloat16),
        (torch.tensor([float("nan")]), torch.int64),
        (torch.tensor([2]), torch.bool),
        (torch.tensor([1 + 1j]), torch.float32),
    ],
)
def test_casts_beyond_rounding_are_refused(tmp_path: Path, stored: torch.Tensor, dtype: torch.dtype) -> None:
    ckpt.save({"t": stored}, tmp_path, checks="off")
    target = torch.zeros(stored.shape, dtype=dtype)
    with pytest.raises(LoadFailed, match=r"'t' .*allow_casts=True"):
        ckpt.load({"t": target}, tmp_path)
    if not stored.is_complex():
        ckpt.load({"t": target}, tmp_path, options=LoadOptions(allow_casts=True))


@pytest.mark.parametrize("rows", [3, 9])
def test_another_vocabulary_is_cut_or_padded(tmp_path: Path, rows: int) -> None:
    def made(vocabulary: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(vocabulary)
        model = nn.Sequential(nn.Embedding(vocabulary, 4), nn.Linear(4, 2))
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.arange(3)).sum().backward()
        optimizer.step()
        return model, optimizer

    model, optimizer = made(5)
    with ckpt.CheckpointManager(tmp_path, **OPTIONS) as manager:
        manager.save(1, model=model, optimizer=optimizer)
    other, own = made(rows)
    before = other[0].weight.detach().clone()  # type: ignore[index]
    with ckpt.CheckpointManager(tmp_path, **OPTIONS) as manager:
        with pytest.raises(LoadFailed, match=rf"\(5, 4\) in the checkpoint, and \({rows}, 4\)"):
            manager.restore(model=other, optimizer=own)
        restored = manager.restore(model=other, optimizer=own, options=LoadOptions(on_shape="resize"))
    assert restored is not None
    common = min(5, rows)
    weight = other.get_parameter("0.weight")
    assert torch.equal(weight[:common], model.get_parameter("0.weight")[:common])
    assert torch.equal(weight[common:], before[common:])
    assert own.state[weight]["exp_avg"].shape == weight.shape
    assert "model.0.weight" in restored.certificate.resized
    own.step()


def test_a_resize_in_shards(tmp_path: Path) -> None:
    run_ranks(2, _resized_in_shards, str(tmp_path))


def _resized_in_shards(rank: int, root: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(30.0).reshape(10, 3)
    ckpt.save({"t": distribute_tensor(whole, mesh, [Shard(0)])}, root)
    for rows in (4, 14):
        target = distribute_tensor(torch.full((rows, 3), -1.0), mesh, [Shard(0)])
        ckpt.load({"t": target}, root, options=LoadOptions(on_shape="resize"))
        expected = torch.full((rows, 3), -1.0)
        expected[: min(rows, 10)] = whole[: min(rows, 10)]
        assert torch.equal(target.full_tensor(), expected)


def test_names_reach_groups_and_structure(tmp_path: Path) -> None:
    inner = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(inner.parameters(), lr=0.3)
    inner(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with ckpt.CheckpointManager(tmp_path / "old", **OPTIONS) as manager:
        manager.save(1, model=inner, optimizer=optimizer, counts=Counter("aab"))
    outer = nn.ModuleDict({"net": nn.Linear(2, 2)})
    own = torch.optim.AdamW(outer.parameters())
    names = {"model.": "model.net.", "optimizer.state.": "optimizer.state.net.", "counts.": "seen."}
    for _ in range(2):  # the second time from the run's own checkpoint, whose names are the program's
        with ckpt.CheckpointManager(tmp_path / "new", **OPTIONS) as manager:
            restored = manager.restore(
                initial=tmp_path / "old" / "step-00000001",
                options=LoadOptions(rename=names),
                model=outer,
                optimizer=own,
                seen=Counter(),
            )
            assert restored is not None
            assert restored.certificate.is_exact, str(restored.certificate)
            assert restored.state["seen"] == Counter("aab")
            assert type(restored.state["seen"]) is Counter
            manager.save(2, model=outer, optimizer=own, seen=restored.state["seen"])
    weight = outer.get_parameter("net.weight")
    assert torch.equal(weight, inner.weight)
    assert torch.equal(own.state[weight]["exp_avg"], optimizer.state[inner.weight]["exp_avg"])
    assert own.param_groups[0]["lr"] == 0.3


class Part:
    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, state: Any) -> None:
        self.value = state


def test_what_is_taken_of_a_part_and_of_a_dict(tmp_path: Path) -> None:
    ckpt.save(
        {"p": Part({"a": 1, "b": 2}), "d": {"a": 1, "b": 2}, "t": {"x": torch.ones(2), "y": torch.ones(3)}},
        tmp_path,
    )
    part = Part({"a": 0, "z": 3})
    ckpt.load({"p": part}, tmp_path)
    assert part.value == {"a": 1, "b": 2}
    with pytest.raises(LoadFailed, match=r"the checkpoint lacks 1 key\(s\): d\.z;"):
        ckpt.load({"d": {"a": 0, "z": 3}}, tmp_path)
    with pytest.raises(LoadFailed, match=r"no place for 1 key\(s\): t\.y, which the checkpoint has"):
        ckpt.load({"t": {"x": torch.zeros(2)}}, tmp_path)
    loose: dict[str, Any] = {"d": {"a": 0, "z": 3}, "t": {"x": torch.zeros(2)}}
    ckpt.load(loose, tmp_path, options=LoadOptions(strict=False))
    assert loose["d"] == {"a": 1, "z": 3}
    assert loose["t"]["x"].tolist() == [1.0, 1.0]
    for target in ({"p": Part({"a": 0})}, {"p": Part({"a": 0, "b": 0, "z": 0})}):
        with pytest.raises(LoadFailed, match=r"p\.[bz]"):
            ckpt.load(target, tmp_path, options=LoadOptions(strict=True))


def test_options_are_checked() -> None:
    for make in (
        lambda: LoadOptions(strict="yes"),  # type: ignore[arg-type]
        lambda: LoadOptions(on_shape="cut"),  # type: ignore[arg-type]
        lambda: LoadOptions(rename=["a"]),  # type: ignore[arg-type]
        lambda: SaveOptions(per_rank="loader"),
        lambda: ManagerOptions(resume_check="never"),  # type: ignore[arg-type]
        lambda: ManagerOptions(on_existing="go on"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ConfigurationError):
            make()
