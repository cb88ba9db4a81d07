"""Each kind of tensor, saved in each way: it comes back bit for bit, or the save refuses it by its name."""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import run_ranks

import ckpt
from ckpt.errors import CheckpointError, ConfigurationError, SaveFailed, UnsafeContent
from ckpt.stock.safe_load import fault_for_torch
from ckpt.writing import refused_objects

pytestmark = pytest.mark.filterwarnings("ignore")


class Quantized(torch.Tensor):
    """Values and scales of blocks, as torchao's MXFP8 and NVFP4 tensors are."""

    qdata: torch.Tensor
    scale: torch.Tensor
    block: int

    @staticmethod
    def __new__(cls, qdata: torch.Tensor, scale: torch.Tensor, block: int) -> Any:
        columns = qdata.shape[1] * (2 if qdata.dtype == torch.float4_e2m1fn_x2 else 1)
        return torch.Tensor._make_wrapper_subclass(cls, (qdata.shape[0], columns), dtype=torch.bfloat16)

    def __init__(self, qdata: torch.Tensor, scale: torch.Tensor, block: int) -> None:
        self.qdata, self.scale, self.block = qdata, scale, block

    def __tensor_flatten__(self) -> tuple[list[str], int]:
        return ["qdata", "scale"], self.block

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], context: int, *_: Any) -> Any:
        return cls(inner["qdata"], inner["scale"], context)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        first = args[0]
        if func is torch.ops.aten.detach.default:
            return cls(first.qdata, first.scale, first.block)
        if func is torch.ops.aten.is_pinned.default:
            return False
        if func is torch.ops.aten.copy_.default:
            for name in ("qdata", "scale"):
                getattr(first, name).view(torch.uint8).copy_(getattr(args[1], name).view(torch.uint8))
            return first
        raise NotImplementedError(f"unimplemented operator {func}")


class Unplannable(Quantized):
    """A subclass that lacks an operator which DCP's planner calls."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.is_pinned.default:
            raise NotImplementedError("no such operator")
        return super().__torch_dispatch__(func, types, args, kwargs)


torch.serialization.add_safe_globals([Quantized, Unplannable])


def _bytes(*shape: int, dtype: torch.dtype, value: int) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return ((torch.arange(count) * 7 + value) % 251).to(torch.uint8).view(dtype).reshape(shape)


def _quantized(kind: Any, dtype: torch.dtype, value: int) -> Any:
    return kind(
        _bytes(4, 16, dtype=dtype, value=value), _bytes(4, 1, dtype=torch.float8_e8m0fnu, value=value), 32
    )


def _rows(value: int) -> list[torch.Tensor]:
    return [torch.full((2, 3), float(value)), torch.full((4, 3), value + 0.5)]


def _jagged_view(value: int) -> torch.Tensor:
    """A jagged tensor with holes between its rows, of which DCP's planner cannot ask all that it asks."""
    starts, lengths = torch.tensor([0, 2, 5]), torch.tensor([1, 3])
    return torch.nested.nested_tensor_from_jagged(torch.full((9, 3), float(value)), starts, lengths)


Make = Callable[[int], Any]
UINT4: torch.dtype = vars(torch)["uint4"]

DENSE: dict[str, Make] = {
    "float4": lambda value: _bytes(4, 8, dtype=torch.float4_e2m1fn_x2, value=value),
    "scales": lambda value: _bytes(4, 8, dtype=torch.float8_e8m0fnu, value=value),
    "float8": lambda value: _bytes(4, 8, dtype=torch.float8_e4m3fn, value=value),
    "bits8": lambda value: _bytes(4, 8, dtype=torch.bits8, value=value),
}
PICKLED: dict[str, Make] = {
    "MXFP8": lambda value: _quantized(Quantized, torch.float8_e4m3fn, value),
    "NVFP4": lambda value: _quantized(Quantized, torch.float4_e2m1fn_x2, value),
    "qint8": lambda value: torch.quantize_per_tensor(torch.full((4, 4), value / 10), 0.1, 3, torch.qint8),
}
REFUSED: dict[str, tuple[Make, str]] = {
    "COO": (lambda value: torch.eye(4).mul(value).to_sparse(), "layout torch.sparse_coo"),
    "CSR": (lambda value: torch.eye(4).mul(value).to_sparse_csr(), "layout torch.sparse_csr"),
    "CSC": (lambda value: torch.eye(4).mul(value).to_sparse_csc(), "layout torch.sparse_csc"),
    "BSR": (lambda value: torch.eye(4).mul(value).to_sparse_bsr((2, 2)), "layout torch.sparse_bsr"),
    "BSC": (lambda value: torch.eye(4).mul(value).to_sparse_bsc((2, 2)), "layout torch.sparse_bsc"),
    "nested": (lambda value: torch.nested.nested_tensor(_rows(value)), "is a nested tensor"),
    "jagged": (lambda value: torch.nested.nested_tensor(_rows(value), layout=torch.jagged), "layout torch.jagged"),
    "jagged view": (_jagged_view, "layout torch.jagged"),
    "mkldnn": (lambda value: torch.full((3, 3), float(value)).to_mkldnn(), "layout torch._mkldnn"),
    "unplannable": (
        lambda value: _quantized(Unplannable, torch.float8_e4m3fn, value),
        "Unplannable that does not support",
    ),
    "uint4": (lambda value: _bytes(4, 8, dtype=UINT4, value=value), "torch cannot save tensors of torch.uint4"),
}  # fmt: skip
UNPICKLABLE = {"mkldnn", "uint4"}
"""Kinds that torch cannot save in an object either."""
RAGGED = {"nested", "jagged", "jagged view"}
"""Kinds that `torch.load` took for safe until torch 2.14."""


class Part:
    """A part with a state of its own, as a trainer's."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "count": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


PLACES: dict[str, tuple[Callable[[Any], dict[str, Any]], Callable[[dict[str, Any]], Any], str]] = {
    "top": (lambda value: {"t": value}, lambda state: state["t"], "t"),
    "nested": (lambda value: {"a": [{"b": value}]}, lambda state: state["a"][0]["b"], "a.0.b"),
    "part": (lambda value: {"part": Part(value)}, lambda state: state["part"].value, "part.value"),
    "optimizer": (
        lambda value: {"optimizer": {"state": {"w": {"exp_avg": value}}, "param_groups": [{"lr": 0.1}]}},
        lambda state: state["optimizer"]["state"]["w"]["exp_avg"],
        "optimizer.state.w.exp_avg",
    ),
}


def _referenced(state: dict[str, Any], url: Path) -> None:
    """Save twice: the second checkpoint takes all from the first."""
    ckpt.save(state, url.with_name("base"), digests=True)
    ckpt.save(state, url, base=url.with_name("base"))


def _by_manager(state: dict[str, Any], url: Path) -> None:
    with ckpt.CheckpointManager(url, save=1) as manager:
        manager.step(1, state)


def _load_by_manager(state: dict[str, Any], url: Path) -> None:
    with ckpt.CheckpointManager(url, save=1) as manager:
        assert manager.restore(state) is not None


WAYS: dict[str, Callable[[dict[str, Any], Path], Any]] = {
    "save": ckpt.save,
    "async_save": lambda state, url: ckpt.async_save(state, url).result(100),
    "references": _referenced,
    "manager": _by_manager,
}


def parts_of(tensor: Any) -> Any:
    """All bytes and facts of a tensor of any kind."""
    if isinstance(tensor, Quantized):
        names, context = tensor.__tensor_flatten__()
        return type(tensor), context, [parts_of(getattr(tensor, name)) for name in names]
    inner: tuple[Any, ...]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        inner = tensor.crow_indices(), tensor.col_indices(), tensor.values()
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        inner = tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    elif tensor.layout is torch.sparse_coo:
        inner = tensor._indices(), tensor._values()
    elif tensor.layout is torch.jagged:
        inner = tensor._values, tensor._offsets, tensor._lengths
    elif tensor.is_nested:
        inner = tuple(tensor.unbind())
    else:
        file = io.BytesIO()
        torch.save(tensor.detach().clone() if not tensor.is_quantized else tensor, file)
        return file.getvalue()
    return tensor.layout, [None if part is None else parts_of(part) for part in inner]


@pytest.fixture(autouse=True)
def _nothing_warned_before() -> Iterator[None]:
    refused_objects._looked_at.clear()
    yield
    refused_objects._looked_at.clear()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [*DENSE, *PICKLED])
def test_kinds_that_come_back(tmp_path: Path, kind: str, way: str) -> None:
    make = {**DENSE, **PICKLED}[kind]
    for place, (put, get, _) in PLACES.items():
        url, saved, target = tmp_path / place / "c", put(make(5)), put(make(9))
        WAYS[way](saved, url)
        assert parts_of(get(saved)) == parts_of(make(5))  # a save changes nothing
        if way == "manager":
            _load_by_manager(target, url)
        else:
            ckpt.load(target, url)
        assert parts_of(get(target)) == parts_of(make(5)), place


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", REFUSED)
def test_kinds_that_a_save_refuses_by_name(tmp_path: Path, kind: str, way: str) -> None:
    make, text = REFUSED[kind]
    for place, (put, _, name) in PLACES.items():
        url = tmp_path / place / "c"
        with pytest.raises(SaveFailed) as caught:
            WAYS[way](put(make(5)), url)
        assert f"'{name}'" in str(caught.value), place
        assert text in str(caught.value), place
        assert not [*url.rglob("commit.json")]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("kind", [*DENSE, *PICKLED, *REFUSED])
def test_kinds_in_an_object(
    tmp_path: Path, kind: str, is_async: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A tuple is pickled with all that is in it; the save names the kinds that torch does not load safely."""
    make = ({**DENSE, **PICKLED} | {name: make for name, (make, _) in REFUSED.items()})[kind]
    save = WAYS["async_save"] if is_async else ckpt.save
    state = {"pair": (make(5), 1)}
    if kind in UNPICKLABLE:
        with pytest.raises(SaveFailed, match="'pair"):
            save(state, tmp_path)
        return
    save(state, tmp_path)
    loaded: dict[str, Any] = {"pair": None}
    trusted: list[str] = []
    if kind in RAGGED and fault_for_torch(state["pair"]) is not None:  # from torch 2.15 on
        assert "will refuse 'pair'" in caplog.text
        with pytest.raises(UnsafeContent, match="'pair'"):
            ckpt.load(loaded, tmp_path)
        trusted = ["pair"]
    ckpt.load(loaded, tmp_path, trusted_objects=trusted)
    assert parts_of(loaded["pair"][0]) == parts_of(make(5))


@pytest.mark.parametrize("kind", ["bits8", *PICKLED, *REFUSED])
def test_kinds_that_safetensors_cannot_hold(tmp_path: Path, kind: str) -> None:
    make = ({**DENSE, **PICKLED} | {name: make for name, (make, _) in REFUSED.items()})[kind]
    for save in (ckpt.save, ckpt.async_save):
        with pytest.raises(ConfigurationError, match=r"'t' is .*safetensors files cannot hold"):
            save({"t": make(5)}, tmp_path / "c", format="safetensors")
    assert not (tmp_path / "c").exists()


def test_a_large_tensor_of_an_undeclared_class_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its elements are not read for that; and the advice is one that a load of tensors takes."""
    caplog.set_level(logging.WARNING)
    declared = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        large = Quantized(
            torch.zeros(3000, 2000, dtype=torch.float8_e4m3fn),
            torch.ones(3000, 1).to(torch.float8_e8m0fnu),
            32,
        )
        for state in ({"large": large}, {"small": _quantized(Quantized, torch.float8_e4m3fn, 1)}):
            refused_objects._looked_at.clear()
            caplog.clear()
            (name,) = state
            ckpt.save(state, tmp_path / name)
            (text,) = caplog.messages
            assert f"refuse '{name}', as {__name__}.Quantized is none" in text
            assert "trusted_objects" not in text
            assert "add_safe_globals" in text
            with pytest.raises(UnsafeContent, match=r"Quantized.*add_safe_globals"):
                ckpt.load(state, tmp_path / name)
    finally:
        torch.serialization.add_safe_globals(declared)  # also those of other tests


# -- in a process of its own ---------------------------------------------------------------------------


@pytest.mark.ranks
def test_kinds_saved_by_a_process(tmp_path: Path) -> None:
    run_ranks(1, _by_process, str(tmp_path))


def _by_process(rank: int, root: str) -> None:
    refused = {
        **REFUSED,
        "bits8": (DENSE["bits8"], "DCP's planner cannot save"),
        "uint4": (REFUSED["uint4"][0], "DCP's planner cannot save"),
    }
    makes = {name: make for name, make in {**DENSE, **PICKLED}.items() if name not in refused}
    with ckpt.CheckpointManager(f"{root}/run", save=1, async_mode="process") as manager:
        manager.step(1, {**_parts(makes, 5)})
    targets = _parts(makes, 9)
    with ckpt.CheckpointManager(f"{root}/run", save=1) as manager:
        assert manager.restore(targets) is not None
    for name, make in makes.items():
        assert parts_of(targets[name].value) == parts_of(make(5)), name
    for number, (kind, (make, text)) in enumerate(refused.items()):
        message = ""
        try:
            with ckpt.CheckpointManager(f"{root}/{number}", save=1, async_mode="process") as manager:
                manager.step(1, {"part": Part(make(5))})
        except CheckpointError as error:
            message = str(error)
        assert "'part.value'" in message, (kind, message)
        assert text in message, (kind, message)
        assert not os.path.exists(f"{root}/{number}/step-1/commit.json")


def _parts(makes: dict[str, Make], value: int) -> dict[str, Part]:
    return {name: Part(make(value)) for name, make in makes.items()}
