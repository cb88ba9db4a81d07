"""Tensors that few programs have: saved as they are, at once and from a copy, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.errors import SaveFailed
from ckpt.transfer import file_body

SAVES = {
    "save": lambda state, url: ckpt.save(state, url),
    "async_save": lambda state, url: ckpt.async_save(state, url).result(60),
}
saved_both_ways = pytest.mark.parametrize("how", SAVES)


class EightBit(torch.Tensor):
    """A tensor made of two others, as the states of torchao's optimizers are; it cannot be cloned."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], *_: Any) -> Any:
        return cls(**inner)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale)
        if func is torch.ops.aten.is_pinned.default:
            return False
        if func is torch.ops.aten.copy_.default:
            target, source = args[:2]
            target.codes.copy_(source.codes)
            target.scale.copy_(source.scale)
            return target
        raise NotImplementedError(f"unimplemented operator {func}")


def eight_bit(value: int) -> Any:
    # Views of larger storages, as a shard is.
    return EightBit(torch.full((900, 8), value, dtype=torch.uint8)[:4], torch.full((900,), value / 2)[:4])


torch.serialization.add_safe_globals([EightBit])


@saved_both_ways
def test_subclasses_that_cannot_be_cloned(how: str, tmp_path: Path) -> None:
    metadata = SAVES[how]({"t": eight_bit(7)}, tmp_path)
    target = eight_bit(1)
    ckpt.load({"t": target}, tmp_path)
    assert target.codes.tolist() == [[7] * 8] * 4
    assert target.scale.tolist() == [3.5] * 4
    (stored,) = metadata.storage_data.values()
    assert stored.length < 4000, "no more than the bytes of the tensor"


@pytest.mark.filterwarnings("ignore:torch.quantize:UserWarning")
@saved_both_ways
def test_quantized_tensors_that_cannot_be_cloned(how: str, tmp_path: Path) -> None:
    """Per channel, with zero points that are no integers, as embeddings have them."""

    def quantized(seed: int) -> torch.Tensor:
        values = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))
        return torch.quantize_per_channel(values, torch.full((4,), 0.1), torch.zeros(4), 0, torch.quint8)

    SAVES[how]({"q": quantized(1)}, tmp_path)
    loaded = quantized(2)
    ckpt.load({"q": loaded}, tmp_path)
    assert torch.equal(loaded.int_repr(), quantized(1).int_repr())


EMPTY = {
    "conjugated": lambda: torch.empty(0, dtype=torch.complex64).conj(),
    "negated": lambda: torch.empty(0, 3, dtype=torch.complex64).conj().imag,
    "float32": lambda: torch.empty(0, 5),
    "int16": lambda: torch.empty(3, 0, dtype=torch.int16),
}


@saved_both_ways
@pytest.mark.parametrize("kind", EMPTY)
@pytest.mark.parametrize("place", ["CPU", "as on a GPU"])
def test_tensors_without_elements(
    how: str, kind: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if place != "CPU":
        monkeypatch.setattr(file_body, "has_memory_view", lambda tensor: False)
    state = {"a": torch.arange(7.0), "empty": EMPTY[kind](), "z": torch.arange(3)}
    SAVES[how](state, tmp_path)
    loaded = {"a": torch.zeros(7), "empty": EMPTY[kind](), "z": torch.zeros(3, dtype=torch.int64)}
    ckpt.load(loaded, tmp_path)
    assert torch.equal(loaded["a"], state["a"])
    assert torch.equal(loaded["z"], state["z"])


def freed() -> torch.Tensor:
    tensor = torch.ones(100)
    tensor.untyped_storage().resize_(0)
    return tensor


@saved_both_ways
def test_freed_tensors_are_named(how: str, tmp_path: Path) -> None:
    with pytest.raises(SaveFailed, match=r"'layers\.0\.weight' cannot be .*: its storage holds fewer bytes"):
        SAVES[how]({"layers": [{"weight": freed()}]}, tmp_path)


@saved_both_ways
def test_names_that_are_not_unicode_are_named(how: str, tmp_path: Path) -> None:
    with pytest.raises(SaveFailed, match=r"the name 'm\.a\\udc80b' cannot be stored"):
        SAVES[how]({"m": {"a\udc80b": torch.ones(2)}}, tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
