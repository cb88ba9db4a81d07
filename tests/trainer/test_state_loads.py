"""What a load changes on its way: casts, shapes, names, and which keys it takes."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from support.parts import Part
from support.ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import Shard, distribute_tensor

import ckpt
from ckpt.errors import CheckpointError, ConfigurationError, LoadFailed
from ckpt.options import LoadOptions, ManagerOptions, SaveOptions
from ckpt.state import training_state

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
    ckpt.load({"p": part}, tmp_path, options=LoadOptions(strict=True))
    assert part.value == {"a": 1, "b": 2}
    for target in ({"d": {"a": 0}}, {"d": {"a": 0, "b": 0, "z": 0}}):
        with pytest.raises(LoadFailed, match=r"d\.[bz]"):
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


# -- names that only one side has ---------------------------------------------------------------------------


def test_missing_and_left_over_names_are_named_together_with_a_prefix(tmp_path: Path) -> None:
    ckpt.save({"model": nn.ModuleDict({"a": nn.Linear(2, 2)})}, tmp_path)
    wanted = nn.ModuleDict({"b": nn.Linear(2, 2)})
    with pytest.raises(LoadFailed, match=r"lacks 2 .*model.b.bias.* no place for 2 .*model.a.bias") as seen:
        ckpt.load({"model": wanted}, tmp_path)
    assert "LoadOptions(rename={'model.a.': 'model.b.'})" in str(seen.value)
    ckpt.load({"model": wanted}, tmp_path, options=LoadOptions(rename={"model.a.": "model.b."}))


def test_a_whole_prefix_can_be_taken_off_and_put_on(tmp_path: Path) -> None:
    """As the error proposes: the module's parts are then parts of the program."""
    saved = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    ckpt.save({"model": saved.state_dict()}, tmp_path / "nested")
    flat = {name: torch.full_like(value, 7) for name, value in saved.state_dict().items()}
    with pytest.raises(LoadFailed, match=r"LoadOptions\(rename=\{'model\.': ''\}\)"):
        ckpt.load(flat, tmp_path / "nested")
    ckpt.load(flat, tmp_path / "nested", options=LoadOptions(rename={"model.": ""}))
    assert all(torch.equal(flat[name], value) for name, value in saved.state_dict().items())
    ckpt.save(flat, tmp_path / "flat")
    loaded = {"model": {name: torch.full_like(value, 7) for name, value in flat.items()}}
    ckpt.load(loaded, tmp_path / "flat", options=LoadOptions(rename={"": "model."}))
    assert all(torch.equal(loaded["model"][name], value) for name, value in flat.items())


def test_names_in_errors_have_no_control_characters(tmp_path: Path) -> None:
    ckpt.save({"t": {"a\x1b[2J\nFAKE": torch.ones(1), "b": torch.ones(1)}}, tmp_path, checks="off")
    with pytest.raises(LoadFailed, match=r"t\.a\\x1b\[2J\\nFAKE") as seen:
        ckpt.load({"t": {"b": torch.zeros(1)}}, tmp_path)
    assert str(seen.value).isprintable()


# -- models on the meta device ------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 2)
        self.head = nn.Linear(2, 4, bias=False)
        self.head.weight = self.embedding.weight


def test_tied_parameters_on_meta_stay_tied(tmp_path: Path) -> None:
    model = Tied()
    ckpt.save({"model": model}, tmp_path)
    with torch.device("meta"):
        again = Tied()
    ckpt.load({"model": again}, tmp_path)
    assert again.head.weight is again.embedding.weight
    assert torch.equal(again.head.weight, model.head.weight)


@pytest.mark.parametrize("layers", [1, 3])
def test_a_refused_load_leaves_a_model_on_meta(tmp_path: Path, layers: int) -> None:
    ckpt.save({"model": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))}, tmp_path)
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(layers)))
    with pytest.raises(LoadFailed):
        ckpt.load({"model": model}, tmp_path)
    assert all(parameter.is_meta for parameter in model.parameters())


# -- parts that an optimizer comes with ----------------------------------------------------------------------------


@pytest.mark.parametrize("is_named", [True, False])
@pytest.mark.parametrize("steps", [0, 1])
def test_an_optimizer_as_it_is_loads_what_has_names_or_numbers(
    tmp_path: Path, *, is_named: bool, steps: int
) -> None:
    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(4, 4)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    model, optimizer = made()
    for _ in range(steps):
        model(torch.ones(4)).sum().backward()
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.7
    raw: dict[str, Any] = {"model": model, "optimizer": optimizer}
    by_name = training_state(model=model, optimizer=optimizer, rng=False)
    ckpt.save(by_name if is_named else raw, tmp_path)
    other, own = made()
    state: dict[str, Any] = {"model": other, "optimizer": own}
    if not is_named:
        state = training_state(model=other, optimizer=own, rng=False)
    ckpt.load(state, tmp_path)
    assert own.param_groups[0]["lr"] == 0.7
    assert len(own.state) == 2 * steps
    for mine, theirs in zip(own.state.values(), optimizer.state.values(), strict=True):
        assert all(torch.equal(mine[key], theirs[key]) for key in theirs)


class Drawing:
    def state_dict(self) -> dict[str, int]:
        torch.rand(3)
        return {"n": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        torch.rand(3)


def test_random_states_are_asked_and_set_last(tmp_path: Path) -> None:
    with ckpt.CheckpointManager(tmp_path, **OPTIONS) as manager:
        manager.save(1, sampler=Drawing())
    wanted = torch.rand(1)
    with ckpt.CheckpointManager(tmp_path, **OPTIONS) as manager:
        manager.restore(sampler=Drawing())
    assert torch.equal(torch.rand(1), wanted)


def _one_part_fails(rank: int, root: str) -> list[str]:
    """A part fails on one rank, in a save and in both halves of a load; FSDP1 talks to all ranks in the others."""
    model = FullyShardedDataParallel(nn.Linear(4, 4), use_orig_params=True, device_id=torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()

    class Failing(Part):
        method = ""

        def state_dict(self) -> Any:
            if rank == 1 and self.method == "save":
                raise ValueError("no state here")
            return {}

        def load_state_dict(self, state: Any) -> None:
            if rank == 1 and self.method == "load":
                raise ValueError("no state here")

    part = Failing({})
    state: dict[str, Any] = {**training_state(model=model, optimizer=optimizer), "a_part": part}
    ckpt.save(state, f"{root}/c", timeout_s=60)
    seen = []
    calls: dict[str, Any] = {
        "save": lambda: ckpt.save(state, f"{root}/d", timeout_s=60, options=SaveOptions(resume_check=True)),
        "load": lambda: ckpt.load(state, f"{root}/c", timeout_s=60),
    }
    for method, call in [("save", "save"), ("save", "load"), ("load", "load")]:
        part.method = method
        with pytest.raises(CheckpointError) as error:
            calls[call]()
        seen.append(str(error.value))
    return seen


def test_a_part_that_fails_on_one_rank_holds_up_none(tmp_path: Path) -> None:
    for texts in run_ranks(2, _one_part_fails, str(tmp_path), timeout_s=100):
        assert all("rank 1" in text and "no state here" in text for text in texts)


# -- what is kept -------------------------------------------------------------------------------------------


class Averages:
    def __init__(self) -> None:
        self.value: dict[str, torch.Tensor] = {}

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.value

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.value = state


def test_a_restore_keeps_no_tensors_that_the_program_replaced(tmp_path: Path) -> None:
    saved = Averages()
    saved.value = {"a": torch.ones(100)}
    model = nn.Linear(4, 4)
    with ckpt.CheckpointManager(tmp_path, **OPTIONS) as manager:
        manager.save(1, model=model, averages=saved)
    own = Averages()
    half = nn.Linear(4, 4).half()
    own.value = {"a": torch.zeros(7)}
    before = weakref.ref(own.value["a"])
    with ckpt.CheckpointManager(tmp_path, **OPTIONS) as manager:
        restored = manager.restore(model=half, averages=own)
    assert restored is not None
    loaded = weakref.ref(own.value["a"])
    own.value = {"a": own.value["a"] * 2}
    gc.collect()
    assert before() is None
    assert loaded() is None
    copied = copy.copy(restored)
    with pytest.raises(ConfigurationError, match="before it is copied"):
        _ = copied.certificate
    assert restored.certificate.different == ("averages.a",)
    assert copy.copy(restored).certificate == restored.certificate
