"""Tensors that carry their own geometry, by hooks or fields: saved and loaded as they say, in every way."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.geometries import COLUMNS, KINDS, ROWS, carried_by, chunks_of, whole
from support.ranks import run_ranks
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import ckpt
from ckpt.geometry import with_chunks_of

SAVES = ["save", "async_save", "references", "references off", "local", "install", "writer", "thread", "off"]
MODELS = ["safetensors", "async safetensors"]
LONG_SAVES = ["process", "install process"]


def _manager(mode: Any) -> Callable[[dict[str, Any], str, Callable[[], None]], None]:
    def save(state: dict[str, Any], url: str, spoil: Callable[[], None]) -> None:
        with ckpt.CheckpointManager(Path(url).parent, save=1, async_mode=mode, preflight=False) as manager:
            manager.step(1, state)
            spoil()
            manager.wait_durable()

    return save


def _save(state: dict[str, Any], url: str, spoil: Callable[[], None]) -> None:
    ckpt.save(state, url)


def _model(state: dict[str, Any], url: str, spoil: Callable[[], None]) -> None:
    ckpt.save(state, url, format="safetensors")


def _async_save(state: dict[str, Any], url: str, spoil: Callable[[], None], **options: Any) -> None:
    future = ckpt.async_save(state, url, **options)
    spoil()
    future.result()


def _references(state: dict[str, Any], url: str, spoil: Callable[[], None], *, is_async: bool) -> None:
    """Save what is carried in the base too, of which one of two tensors has changed meanwhile."""
    base = f"{Path(url).parent}/step-00000000"
    ckpt.save({**state, "other": torch.ones(2)}, base, digests=True)
    if is_async:
        _async_save(state, url, spoil, base=base)
    else:
        ckpt.save(state, url, base=base)


def _install(state: dict[str, Any], url: str, spoil: Callable[[], None], **options: Any) -> None:
    ckpt.install()
    try:
        future: Any = dcp.async_save(state, checkpoint_id=url, **options)
        spoil()
        future.result()
    finally:
        ckpt.uninstall()


def _writer(state: dict[str, Any], url: str, spoil: Callable[[], None]) -> None:
    future: Any = dcp.async_save(state, storage_writer=ckpt.CheckpointWriter(url))
    spoil()
    future.result()


def _install_process(state: dict[str, Any], url: str, spoil: Callable[[], None]) -> None:
    _install(state, url, spoil, async_checkpointer_type=AsyncCheckpointerType.PROCESS)


WAYS: dict[str, Callable[[dict[str, Any], str, Callable[[], None]], None]] = {
    "save": _save,
    "async_save": _async_save,
    "references": lambda state, url, spoil: _references(state, url, spoil, is_async=True),
    "references off": lambda state, url, spoil: _references(state, url, spoil, is_async=False),
    "local": lambda state, url, spoil: _async_save(state, url, spoil, local=f"{Path(url).parent}-near"),
    "install": _install,
    "writer": _writer,
    "install process": _install_process,
    "thread": _manager("thread"),
    "process": _manager("process"),
    "off": _manager("off"),
    "safetensors": _model,
    "async safetensors": lambda state, url, spoil: _async_save(state, url, spoil, format="safetensors"),
}


def _chunks(url: str) -> list[tuple[int, int]]:
    described: Any = ckpt.CheckpointReader(url).read_metadata().state_dict_metadata["w"]
    assert described.size == (ROWS, COLUMNS)
    return sorted((chunk.offsets[0], chunk.sizes[0]) for chunk in described.chunks)


def _loaded_in_place(kind: str, way: str, load: Callable[[dict[str, Any]], object]) -> bool:
    target = carried_by(kind, way)
    load({"w": target.value})
    return target.holds(whole())


def _check(kind: str, url: str, *, loads_by_stock: bool) -> list[str]:
    """Load in all ways, each cut as it was saved and otherwise; return those that failed."""
    with ckpt.CheckpointManager(Path(url).parent, save=1, preflight=False) as manager:
        loads: dict[str, Callable[[dict[str, Any]], object]] = {
            "ckpt.load": lambda state: ckpt.load(state, url),
            "restore": manager.restore,
        }
        if loads_by_stock:
            loads["dcp.load"] = lambda state: dcp.load(state, storage_reader=ckpt.CheckpointReader(url))
        failed = [
            f"{name} cut by {way}"
            for name, load in loads.items()
            for way in ("a", "b")
            if not _loaded_in_place(kind, way, load)
        ]
    plain = torch.zeros(ROWS, COLUMNS)
    dcp.load({"w": plain}, storage_reader=ckpt.CheckpointReader(url))
    return failed if torch.equal(plain, whole()) else [*failed, "dcp.load of the whole tensor"]


def _matrix(rank: int, kind: str, saves: list[str], root: str) -> dict[str, list[str]]:
    outcomes: dict[str, list[str]] = {}
    for save in saves:
        url = f"{root}/{save.replace(' ', '-')}/step-00000001"
        carried = carried_by(kind, "a")
        carried.fill(whole())
        WAYS[save]({"w": carried.value}, url, carried.spoil)
        # DCP's own planner, by itself, refuses hooked tensors whose size is not that of the stored one.
        outcomes[save] = _check(kind, url, loads_by_stock=kind != "hooks")
        one = [(0, ROWS)] if "safetensors" in save else chunks_of(kind, "a", dist.get_world_size())
        if rank == 0 and _chunks(url) != one:
            outcomes[save].append(f"chunks {_chunks(url)}")
    return outcomes


@pytest.mark.smoke
@pytest.mark.parametrize("kind", KINDS)
def test_every_way_on_two_ranks(tmp_path: Path, kind: str) -> None:
    for outcomes in run_ranks(2, _matrix, kind, [*SAVES, *MODELS], str(tmp_path)):
        assert outcomes == {save: [] for save in [*SAVES, *MODELS]}


def test_one_rank_alone_writes_the_chunks_that_hooks_give(tmp_path: Path) -> None:
    saves = ["save", "async_save", "install"]
    assert run_ranks(1, _matrix, "hooks", saves, str(tmp_path)) == [{save: [] for save in saves}]


@pytest.mark.long
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_every_way_on_more_ranks_and_by_a_process(tmp_path: Path, kind: str, size: int) -> None:
    saves = [*SAVES, *MODELS, *LONG_SAVES] if size == 4 else LONG_SAVES
    for outcomes in run_ranks(size, _matrix, kind, saves, str(tmp_path), timeout_s=240):
        assert outcomes == {save: [] for save in saves}


def test_a_tensor_with_the_chunks_of_another_does_not_keep_itself_alive() -> None:
    own: Any = carried_by("hooks", "a").value
    made = torch.zeros_like(own)
    with_chunks_of(own, made)
    kept = weakref.ref(made)
    gc.disable()
    try:
        del made
        assert kept() is None
    finally:
        gc.enable()
