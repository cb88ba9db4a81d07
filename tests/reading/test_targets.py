"""Loading into anything a planner may hand out: lazy views, wrappers without memory, shared and freed memory."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.utils._pytree as pytree
from hypothesis import given, settings
from hypothesis import strategies as st
from support.states import bits, random_tensor
from support.tiers import examples
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import ReadItem

import ckpt
import ckpt.reading.windows
import ckpt.transfer.pieces
from ckpt.backends.posix import PosixStore
from ckpt.errors import CheckpointError, LoadFailed
from ckpt.reading.loader import _copy
from ckpt.reading.windows import TargetMemory, Window

COMPLEX = torch.complex64


def _lazy_targets() -> dict[str, torch.Tensor]:
    def complex_zeros(*shape: int) -> torch.Tensor:
        return torch.full(shape, 7 + 3j, dtype=COMPLEX)

    return {
        "conjugated": complex_zeros(40, 30).conj(),
        "transposed": complex_zeros(30, 40).conj().t(),
        "columns": complex_zeros(40, 77).conj()[:, 5:65:2],
        "one row": complex_zeros(1, 30, 40).conj().permute(2, 0, 1)[:, 0],
        "twice": complex_zeros(40, 30).t().conj().t().conj(),
    }


@pytest.mark.parametrize("name", list(_lazy_targets()))
@pytest.mark.parametrize("order", ["row-major", "column-major"])
@pytest.mark.parametrize("writer", ["ours", "stock"])
@pytest.mark.parametrize("run_bytes", [1 << 10, 4 << 20])
@pytest.mark.filterwarnings("ignore")
def test_conjugated_targets(
    tmp_path: Path, name: str, order: str, writer: str, run_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ckpt.transfer.pieces, "_STRIDED_BYTES", run_bytes)
    monkeypatch.setattr("ckpt.reading.loader._SMALL_ITEM_BYTES", 1 << 10)
    saved = random_tensor(40, 30, dtype=COMPLEX)
    if order == "column-major":
        saved = saved.t().contiguous().t()
    if writer == "ours":
        ckpt.save({"t": saved}, tmp_path)
    else:
        dcp.save({"t": saved}, storage_writer=dcp.FileSystemWriter(tmp_path))
    target = _lazy_targets()[name]
    ckpt.load({"t": target}, tmp_path)
    assert bits(target) == bits(saved)


def test_negated_targets_and_their_other_half(tmp_path: Path) -> None:
    saved = random_tensor(50, 20).nan_to_num()
    ckpt.save({"t": saved}, tmp_path)
    whole = torch.full((50, 20), 2 + 5j, dtype=COMPLEX)
    target = whole.conj().imag
    assert target.is_neg()
    ckpt.load({"t": target}, tmp_path)
    assert bits(target) == bits(saved)
    assert torch.equal(whole.imag, -saved)
    assert bool((whole.real == 2).all())


def test_a_conjugated_target_of_another_dtype(tmp_path: Path) -> None:
    saved = torch.complex(torch.arange(60.0), -torch.arange(60.0)).reshape(6, 10)
    ckpt.save({"t": saved}, tmp_path)
    target = torch.zeros(10, 6, dtype=torch.complex128).t().conj()
    ckpt.load({"t": target}, tmp_path)
    assert torch.equal(target, saved.to(torch.complex128))


class Wrapped(torch.Tensor):
    """A tensor whose elements are those of another one: it has no memory of its own."""

    held: torch.Tensor

    @staticmethod
    def wrap(inner: torch.Tensor) -> Wrapped:
        made: Wrapped = torch.Tensor._make_wrapper_subclass(Wrapped, inner.shape, dtype=inner.dtype)
        made.held = inner
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        plain = pytree.tree_map_only(Wrapped, lambda wrapped: wrapped.held, (args, kwargs or {}))
        found = func(*plain[0], **plain[1])
        return pytree.tree_map_only(torch.Tensor, Wrapped.wrap, found)


@pytest.mark.parametrize("writer", ["ours", "stock"])
@pytest.mark.filterwarnings("ignore")
def test_targets_without_memory(tmp_path: Path, writer: str) -> None:
    saved = {"t": random_tensor(700, 500), "small": random_tensor(3, dtype=torch.bfloat16)}
    if writer == "ours":
        ckpt.save(saved, tmp_path)
    else:
        dcp.save(saved, storage_writer=dcp.FileSystemWriter(tmp_path))
    inner = {name: torch.zeros_like(value) for name, value in saved.items()}
    ckpt.load({name: Wrapped.wrap(value) for name, value in inner.items()}, tmp_path)
    assert {name: bits(value) for name, value in inner.items()} == {
        name: bits(value) for name, value in saved.items()
    }


def test_freed_targets_are_named(tmp_path: Path) -> None:
    ckpt.save({"model": {"weight": random_tensor(10, 10)}}, tmp_path)
    target = torch.zeros(10, 10)
    target.untyped_storage().resize_(0)
    with pytest.raises(CheckpointError, match=r"'model\.weight' cannot be loaded into: .* was freed"):
        ckpt.load({"model": {"weight": target}}, tmp_path)


# -- shared memory -------------------------------------------------------------------------------------


class Staged(dcp.DefaultLoadPlanner):
    """Hands out one and the same buffer for every item, and copies it to its place on commit."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self.buffer = torch.zeros(nbytes, dtype=torch.uint8)
        self.commits = 0

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        place = super().resolve_tensor(read_item)
        raw = self.buffer[: place.numel() * place.element_size()]
        return raw.view(place.dtype).view(place.shape)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        super().resolve_tensor(read_item).copy_(tensor)
        self.buffer.fill_(0x5A)
        self.commits += 1


@pytest.mark.parametrize("writer", ["ours", "stock"])
@pytest.mark.filterwarnings("ignore")
def test_a_planner_with_one_buffer_for_everything(
    tmp_path: Path, writer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckpt.reading.loader._SMALL_ITEM_BYTES", 16 << 10)  # some read in ranges, some whole
    saved = {f"t{i}": random_tensor(i + 1, 4000, seed=i) for i in range(20)}
    saved["odd"] = random_tensor(5, 3, dtype=torch.complex64).conj()  # read as a whole
    if writer == "ours":
        ckpt.save(saved, tmp_path)
    else:
        dcp.save(saved, storage_writer=dcp.FileSystemWriter(tmp_path))
    loaded = {name: torch.zeros_like(value) for name, value in saved.items()}
    planner = Staged(20 * 4000 * 4)
    ckpt.load(loaded, tmp_path, planner=planner)
    assert planner.commits == len(saved)
    for name, value in saved.items():
        assert bits(loaded[name]) == bits(value), name


def test_tied_weights(tmp_path: Path) -> None:
    weight = random_tensor(300, 200)
    ckpt.save({"embed": weight, "head": weight.clone(), "other": random_tensor(9)}, tmp_path)
    tied = torch.zeros(300, 200)
    ckpt.load({"embed": tied, "head": tied, "other": torch.zeros(9)}, tmp_path)
    assert bits(tied) == bits(weight)


def test_what_shares_no_element_is_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row views of one storage; the reads of one destination interleave in memory too."""
    windows: list[Window] = []

    def noted() -> Window:
        windows.append(Window())
        return windows[-1]

    monkeypatch.setattr("ckpt.reading.loader.Window", noted)
    flat = random_tensor(100, 60)
    ckpt.save({f"row{i}": flat[i] for i in range(100)}, tmp_path)
    other = torch.zeros(100, 60)
    ckpt.load({f"row{i}": other[i] for i in range(100)}, tmp_path)
    assert bits(other) == bits(flat)
    assert len(windows) == 1


@settings(max_examples=examples(200))
@given(st.integers(0, 2**32))
def test_target_memory_finds_every_overlap(seed: int) -> None:
    chance = random.Random(seed)
    buffer = torch.zeros(200, dtype=torch.uint8)
    memory, taken = TargetMemory(), set[int]()
    for owner in range(30):
        start = chance.randrange(200)
        stop = chance.randrange(start, min(200, start + 40))
        free = not taken & set(range(start, stop))
        assert memory.add(buffer[start:stop], owner) == free
        if free:
            taken |= set(range(start, stop))


def test_targets_of_one_owner_may_interleave() -> None:
    buffer = torch.zeros(10, 10)
    memory = TargetMemory()
    assert memory.add(buffer[:, :5], "a")
    assert memory.add(buffer[:, 5:], "a")
    assert not memory.add(buffer[3, 3:4], "b")
    assert not memory.add(buffer[3, 3:4], None)
    assert memory.add(torch.zeros(10), None)


class _OneAtATime(dcp.DefaultLoadPlanner):
    """Plans no tensor of a third file before a read has ended."""

    def __init__(self, read: threading.Event) -> None:
        super().__init__()
        self._read, self.files = read, set[str]()
        self.fault: Exception | None = None

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        assert self.metadata is not None
        self.files.add(self.metadata.storage_data[index].relative_path)
        if len(self.files) == 3:
            assert self._read.wait(60), "nothing is read while the third file's items are planned"
            if self.fault is not None:
                raise self.fault
        target: torch.Tensor = super().lookup_tensor(index)
        return target


def test_reads_begin_while_later_files_are_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt.writing.layout.MIN_FILE_BYTES", 1 << 18)
    saved = {f"{number}": random_tensor(64, 1024) for number in range(4)}
    ckpt.save(saved, tmp_path)
    has_read, read_into = threading.Event(), PosixStore.read_into

    def tell(store: PosixStore, key: str, offset: int, buffers: Any) -> None:
        read_into(store, key, offset, buffers)
        if key.endswith(".distcp"):
            has_read.set()

    monkeypatch.setattr(PosixStore, "read_into", tell)
    planner, loaded = _OneAtATime(has_read), {name: torch.zeros_like(t) for name, t in saved.items()}
    ckpt.load(loaded, tmp_path, planner=planner)
    assert len(planner.files) >= 3, planner.files
    planner = _OneAtATime(has_read)
    planner.fault = ValueError("no such tensor")
    with pytest.raises(LoadFailed, match="no such tensor"):
        ckpt.load({**loaded}, tmp_path, planner=planner)
    assert all(bits(loaded[name]) == bits(saved[name]) for name in saved)


@pytest.mark.slow
def test_a_window_for_each_of_many_items(tmp_path: Path) -> None:
    saved = {f"{number}": torch.tensor([float(number)]) for number in range(3000)}
    ckpt.save(saved, tmp_path)
    loaded = {name: torch.zeros(1) for name in saved}
    ckpt.load(loaded, tmp_path, planner=Staged(4))
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)


class Uncopied(torch.Tensor):
    """A tensor of a class that does not copy itself into dense ones."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError("no copy")


def test_a_class_that_cannot_be_cut_otherwise_is_named() -> None:
    tensor = torch.ones(2).as_subclass(Uncopied)
    with pytest.raises(
        CheckpointError, match=r"'w' was saved in shards of Uncopied, which cannot be cut otherwise"
    ):
        _copy(tensor, torch.zeros(2), "w")
    with pytest.raises(RuntimeError, match="size"):
        _copy(torch.ones(3), torch.zeros(2), "w")
