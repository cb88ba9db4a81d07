"""Models as trainers have them: versions, loaders of their own, hooks, names that hold None, lazy layers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn, optim
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import ckpt
from ckpt.errors import ConfigurationError, LoadFailed
from ckpt.options import LoadOptions
from ckpt.state.structure import decode, encode, structure_of

OPTIONS: dict[str, Any] = {"save": 1, "preflight": False, "storage_options": {"fsync": False}}


def save(root: Path, **parts: Any) -> None:
    with ckpt.CheckpointManager(root, **OPTIONS) as manager:
        assert manager.save(1, **parts)


def restore(root: Path, **parts: Any) -> bool:
    """Restore, and tell whether all is bit for bit."""
    with ckpt.CheckpointManager(root, **OPTIONS) as manager:
        restored = manager.restore(**parts)
    assert restored is not None
    return restored.certificate.is_exact


def assert_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    assert [*one] == [*other]
    for name, value in one.items():
        assert value.dtype == other[name].dtype, name
        assert torch.equal(value, other[name]), name


# Versions


class Scaled(nn.Module):
    """A module whose states of version 1 were in other units."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        if metadata.get("version", 1) < 2:
            state[f"{prefix}w"] = state[f"{prefix}w"] * 100
        super()._load_from_state_dict(state, prefix, metadata, *rest)


class Moved(nn.Module):
    """A module whose states without a version had other names, as heads of MaskFormer have."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.other = nn.Linear(2, 2)

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        if metadata.get("version") is None:
            for key in [key for key in state if key.startswith(f"{prefix}other")]:
                state[f"{prefix}inner.{key.removeprefix(prefix)}"] = state.pop(key)
        super()._load_from_state_dict(state, prefix, metadata, *rest)


class Holder:
    """A plain object that holds a module."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def state_dict(self) -> dict[str, Any]:
        return {"module": self.module.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.module.load_state_dict(state["module"])


@pytest.mark.parametrize("make", [Scaled, lambda: nn.ModuleDict({"head": Moved(), "scaled": Scaled()})])
@pytest.mark.parametrize("way", ["model", "part", "object", "ckpt.load", "one rank's compiled"])
def test_a_state_of_the_program_s_version_is_not_upgraded(
    tmp_path: Path, make: Callable[[], nn.Module], way: str
) -> None:
    torch.manual_seed(0)
    saved = make()
    torch.manual_seed(1)
    fresh = make()
    if way == "ckpt.load":
        ckpt.save({"m": saved}, tmp_path / "s")
        ckpt.load({"m": fresh}, tmp_path / "s")
    elif way == "one rank's compiled":
        save(tmp_path, model=torch.compile(saved, backend="eager"))
        assert restore(tmp_path, model=fresh)
    else:
        name, held = (
            ("model", saved) if way == "model" else ("x", Holder(saved) if way == "object" else saved)
        )
        own: Any = Holder(fresh) if way == "object" else fresh
        save(tmp_path, **{name: held})
        assert restore(tmp_path, **{name: own})
    assert_same(saved.state_dict(), fresh.state_dict())


@pytest.mark.parametrize("rename", [None, {"x.": "net."}, {"x.": "x.net."}])
@pytest.mark.parametrize("way", ["model", "object"])
def test_a_state_of_an_older_version_is_upgraded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, rename: Any
) -> None:
    monkeypatch.setattr(Scaled, "_version", 1)
    saved = nn.ModuleList([Scaled(), nn.BatchNorm1d(2)])  # of which torch has version 2
    ckpt.save({"x": Holder(saved) if way == "object" else saved}, tmp_path / "s")
    monkeypatch.setattr(Scaled, "_version", 2)
    fresh = nn.ModuleList([Scaled(), nn.BatchNorm1d(2)])
    whole: Any = nn.ModuleDict({"net": fresh}) if rename and rename["x."] == "x.net." else fresh
    if way == "object":
        ckpt.load({"x": Holder(fresh)}, tmp_path / "s")
    else:
        name = "net" if rename and rename["x."] == "net." else "x"
        ckpt.load({name: whole}, tmp_path / "s", options=LoadOptions(rename=rename))
    assert fresh[0].get_parameter("w").tolist() == [100.0, 100.0]


def test_a_stock_checkpoint_is_taken_as_one_of_the_program_s_version(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved, fresh = Scaled(), Scaled()
    dcp.save({"model": saved.state_dict()}, checkpoint_id=tmp_path / "s", no_dist=True)
    with caplog.at_level(logging.WARNING, "ckpt"):
        ckpt.load({"model": fresh}, tmp_path / "s")
    assert_same(saved.state_dict(), fresh.state_dict())
    assert "which versions of Scaled" in caplog.text


def test_versions_of_a_state_dict_are_written_down() -> None:
    state = nn.ModuleDict({"a": nn.BatchNorm1d(2), "b": nn.Linear(2, 2)}).state_dict()
    structure = structure_of(state, "x")
    assert structure[()].modules == {"a.": 2}
    assert decode(encode(structure), "x") == structure
    assert not structure_of(nn.Linear(2, 2).state_dict(), "x")[()].modules


# Loaders of models


class ReturnsNothing(nn.Linear):
    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        super().load_state_dict(state, strict)


class OneArgument(nn.Linear):
    def load_state_dict(self, state: Any) -> Any:  # type: ignore[override]
        return super().load_state_dict(state)


@pytest.mark.parametrize("kind", [ReturnsNothing, OneArgument])
def test_a_model_that_loads_in_its_own_way(tmp_path: Path, kind: Callable[..., nn.Module]) -> None:
    saved, fresh = kind(2, 2), kind(2, 2)
    save(tmp_path, model=saved)
    assert restore(tmp_path, model=fresh)
    assert_same(saved.state_dict(), fresh.state_dict())


class WithTeacher(nn.Module):
    """A model that does not save its frozen teacher."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.student = nn.Linear(2, 2)
        self.teacher = nn.Linear(2, 2).requires_grad_(False)
        self.way = way
        if way == "hook":
            self._register_state_dict_hook(lambda module, state, prefix, _: _without_teacher(state))  # type: ignore[no-untyped-call]

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        state = super().state_dict(*arguments, **options)
        return _without_teacher(dict(state)) if self.way == "own" else state

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict(state, strict=False)


def _without_teacher(state: dict[str, Any]) -> dict[str, Any]:
    for key in [key for key in state if key.startswith("teacher")]:
        del state[key]
    return state


@pytest.mark.parametrize("way", ["own", "hook"])
def test_a_teacher_that_is_not_saved_stays(tmp_path: Path, way: str) -> None:
    saved, fresh = WithTeacher(way), WithTeacher(way)
    kept = fresh.teacher.weight.clone()
    save(tmp_path, model=saved)
    assert restore(tmp_path, model=fresh)
    assert torch.equal(fresh.student.weight, saved.student.weight)
    assert torch.equal(fresh.teacher.weight, kept)


def counting(*, takes: bool, adds: Any = 3) -> nn.Module:
    """Make a model whose hook adds a key; `takes`: there is a hook for loading, which leaves it."""
    model = nn.Linear(2, 2)
    model._register_state_dict_hook(lambda m, state, prefix, _: state.update(count=adds))  # type: ignore[no-untyped-call]
    if takes:
        model.register_load_state_dict_pre_hook(lambda *_: None)  # type: ignore[no-untyped-call]
    return model


def test_a_key_that_nothing_takes_is_refused_by_the_save(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"does not take back .*count"):
        save(tmp_path, model=counting(takes=False))
    assert not [*tmp_path.glob("step-*/ckpt*")]


@pytest.mark.parametrize("adds", [3, torch.ones(2)])
def test_a_key_that_a_hook_leaves_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, adds: Any
) -> None:
    saved, fresh = counting(takes=True, adds=adds), counting(takes=True, adds=adds)
    save(tmp_path, model=saved)
    with caplog.at_level(logging.WARNING, "ckpt"):
        restore(tmp_path, model=fresh)
    assert torch.equal(saved.get_parameter("weight"), fresh.get_parameter("weight"))
    assert "does not take back" in caplog.text


# Names that hold None


class Grows(nn.Module):
    """A model with a code book, which the first batch makes, and a parameter that may be added."""

    def __init__(self, code: torch.Tensor | None = None) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.register_buffer("code", code)
        self.register_parameter("scale", None)


@pytest.mark.parametrize("value", [torch.arange(3.0), torch.tensor(5)])
def test_a_buffer_that_is_none_at_first(tmp_path: Path, value: torch.Tensor) -> None:
    saved = Grows(value)
    fresh = Grows()
    optimizers = [optim.AdamW(model.parameters()) for model in (saved, fresh)]
    save(tmp_path, model=saved, optimizer=optimizers[0])
    assert restore(tmp_path, model=fresh, optimizer=optimizers[1])
    assert_same(saved.state_dict(), fresh.state_dict())


def test_a_buffer_that_became_none(tmp_path: Path) -> None:
    saved, fresh = Grows(torch.ones(3)), Grows(torch.ones(3))
    saved._buffers["code"] = None
    save(tmp_path, model=saved)
    assert restore(tmp_path, model=fresh)
    assert fresh._buffers["code"] is None


def test_a_buffer_that_is_not_in_the_checkpoint_is_lacking(tmp_path: Path) -> None:
    ckpt.save({"model": dict(Grows().state_dict())}, tmp_path / "s")  # a dict, which notes nothing of buffers
    with pytest.raises(LoadFailed, match=r"lacks 1 key\(s\): model.code"):
        ckpt.load({"model": Grows(torch.ones(3))}, tmp_path / "s")


def test_a_parameter_that_is_none_at_first(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved, fresh = Grows(), Grows()
    saved.scale = nn.Parameter(torch.ones(3) * 2)
    save(tmp_path, model=saved)
    with caplog.at_level(logging.WARNING, "ckpt"):
        assert restore(tmp_path, model=fresh)
    assert isinstance(fresh.scale, nn.Parameter)
    assert_same(saved.state_dict(), fresh.state_dict())
    assert "'model.scale' is None in the program" in caplog.text


def test_batch_normalisation_that_counts_no_batches(tmp_path: Path) -> None:
    saved, fresh = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    saved.num_batches_tracked = fresh.num_batches_tracked = None
    save(tmp_path, model=nn.Sequential(saved))
    assert restore(tmp_path, model=nn.Sequential(fresh))


# Buffers that changed


BUFFERS = {
    "a number added to an integer": (torch.tensor(0), torch.tensor(0) + 0.7),
    "large integers in place of floats": (torch.zeros(2), torch.full((2,), 2**40 + 1)),
    "complex": (torch.zeros(2), torch.ones(2) * 1j),
    "double": (torch.zeros(2), torch.full((2,), 0.1, dtype=torch.float64)),
    "bool": (torch.zeros(2), torch.ones(2, dtype=torch.bool)),
    "another shape and dtype": (torch.zeros(2), torch.ones(2, 3, dtype=torch.bfloat16)),
}


@pytest.mark.parametrize("kind", BUFFERS)
def test_a_buffer_is_as_it_was_saved(tmp_path: Path, kind: str) -> None:
    before, after = BUFFERS[kind]
    saved = Grows(after)
    fresh = Grows(before.clone())
    save(tmp_path, model=saved)
    assert restore(tmp_path, model=fresh)
    assert_same(saved.state_dict(), fresh.state_dict())


def test_a_buffer_inside_of_a_wrapper_is_as_it_was_saved(tmp_path: Path) -> None:
    saved = Grows(torch.ones(3, dtype=torch.int64))
    fresh = Grows(torch.ones(2))
    save(tmp_path, model=nn.Sequential(saved))
    assert restore(tmp_path, model=nn.Sequential(checkpoint_wrapper(fresh)))
    assert_same(saved.state_dict(), fresh.state_dict())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_model_of_another_dtype_keeps_it(tmp_path: Path, dtype: torch.dtype) -> None:
    saved = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    fresh = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).to(dtype)
    save(tmp_path, model=saved)
    assert not restore(tmp_path, model=fresh)
    assert {value.dtype for value in fresh.state_dict().values()} == {dtype, torch.int64}


# Lazy layers


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())


def test_lazy_layers_get_the_stored_shapes(tmp_path: Path) -> None:
    saved, fresh = lazy(), lazy()
    saved(torch.ones(2, 5))
    optimizers = [optim.AdamW(model.parameters(), lr=0.1) for model in (saved, fresh)]
    saved(torch.randn(2, 5)).pow(2).sum().backward()
    optimizers[0].step()
    save(tmp_path, model=saved, optimizer=optimizers[0])
    assert restore(tmp_path, model=fresh, optimizer=optimizers[1])
    assert_same(saved.state_dict(), fresh.state_dict())
    batch = torch.randn(4, 5)
    for model, optimizer in zip((saved, fresh), optimizers, strict=True):
        optimizer.zero_grad()
        model(batch).pow(2).sum().backward()
        optimizer.step()
    assert_same(saved.state_dict(), fresh.state_dict())


def test_lazy_layers_without_shapes_are_refused_by_the_save(tmp_path: Path) -> None:
    with pytest.raises(ckpt.errors.CheckpointError, match=r"0\.weight"):
        save(tmp_path, model=lazy())
