"""No lock-in: stock PyTorch reads what we write, and we read what stock PyTorch writes."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.ranks import run_ranks
from support.servers import S3Server
from support.states import bits, digest, emptied, plain_state, random_tensor, sharded_state
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp

import ckpt
from ckpt.torch_private import fsspec_storage

FsspecWriter, FsspecReader = fsspec_storage()


@pytest.fixture(autouse=True)
def _stock_warns() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _fsspec(options: dict[str, Any]) -> dict[str, Any]:
    return {name: options[name] for name in ("key", "secret", "endpoint_url")}


# -- ours, read by stock -------------------------------------------------------------------------------


def test_file_system_reader_reads_ours(tmp_path: Path) -> None:
    state = plain_state()
    ckpt.save(state, tmp_path)
    loaded = emptied(state)
    dcp.load(loaded, storage_reader=dcp.FileSystemReader(tmp_path))
    assert digest(loaded) == digest(state)


def test_stock_dcp_load_needs_only_the_path(tmp_path: Path) -> None:
    state = {"t": random_tensor(100, 100)}
    ckpt.save(state, tmp_path)
    loaded = emptied(state)
    dcp.load(loaded, checkpoint_id=tmp_path)
    assert digest(loaded) == digest(state)


def test_fsspec_reader_reads_ours_on_s3(s3: S3Server) -> None:
    state, url = plain_state(), f"s3://{s3.new_bucket()}/run/step-1"
    ckpt.save(state, url, storage_options=s3.options)
    loaded = emptied(state)
    dcp.load(loaded, storage_reader=FsspecReader(url, **_fsspec(s3.options)))
    assert digest(loaded) == digest(state)


def test_dcp_to_torch_save_converts_ours(tmp_path: Path) -> None:
    state = plain_state()
    ckpt.save(state, tmp_path / "c")
    dcp_to_torch_save(tmp_path / "c", tmp_path / "c.pt")
    assert digest(torch.load(tmp_path / "c.pt", weights_only=False)) == digest(state)


def test_stock_reads_ours_on_other_ranks(tmp_path: Path) -> None:
    expected = run_ranks(3, _save_ours, str(tmp_path))[0]
    for world in (1, 2, 4):
        assert run_ranks(world, _load_stock, str(tmp_path)) == [expected] * world


def _save_ours(rank: int, url: str) -> Any:
    state = sharded_state()
    ckpt.save(state, url)
    return digest(state)


def _load_stock(rank: int, url: str) -> Any:
    loaded = emptied(sharded_state(seed=8))
    dcp.load(loaded, storage_reader=dcp.FileSystemReader(url))
    return digest(loaded)


def test_stock_reads_ours_after_an_overwrite(tmp_path: Path) -> None:
    for seed in (1, 2):
        state = plain_state(seed)
        ckpt.save(state, tmp_path)
        loaded = emptied(state)
        dcp.load(loaded, storage_reader=dcp.FileSystemReader(tmp_path))
        assert digest(loaded) == digest(state)


# -- stock, read by ours -------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"thread_count": 3}, {"single_file_per_rank": False}], ids=str)
def test_ours_reads_file_system_writer(tmp_path: Path, settings: dict[str, Any]) -> None:
    state = plain_state()
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path, **settings))
    loaded = emptied(state)
    ckpt.load(loaded, tmp_path)
    assert digest(loaded) == digest(state)


@pytest.mark.parametrize("scheme", ["s3", "fsspec+s3"])
def test_ours_reads_fsspec_writer(s3: S3Server, scheme: str) -> None:
    state, bucket = plain_state(), s3.new_bucket()
    dcp.save(state, storage_writer=FsspecWriter(f"s3://{bucket}/c", **_fsspec(s3.options)))
    loaded = emptied(state)
    ckpt.load(loaded, f"{scheme}://{bucket}/c", storage_options=s3.options)
    assert digest(loaded) == digest(state)


def test_ours_reads_stock_on_other_ranks(tmp_path: Path) -> None:
    expected = run_ranks(3, _save_stock, str(tmp_path))[0]
    for world in (1, 2, 4):
        assert run_ranks(world, _load_ours, str(tmp_path)) == [expected] * world


def _save_stock(rank: int, url: str) -> Any:
    state = sharded_state()
    dcp.save(state, storage_writer=dcp.FileSystemWriter(url))
    return digest(state)


def _load_ours(rank: int, url: str) -> Any:
    loaded = emptied(sharded_state(seed=8))
    ckpt.load(loaded, url)
    return digest(loaded)


def test_ours_reads_what_was_saved_without_collectives(tmp_path: Path) -> None:
    for found, expected in run_ranks(2, _without_collectives, str(tmp_path)):
        assert found == [expected, expected]


def _without_collectives(rank: int, url: str) -> Any:
    state = sharded_state()
    dcp.save(state, storage_writer=dcp.FileSystemWriter(url), use_collectives=False)
    found = []
    for load in (
        lambda loaded: ckpt.load(loaded, url),
        lambda loaded: dcp.load(loaded, storage_reader=ckpt.CheckpointReader(url)),
    ):
        loaded = emptied(sharded_state(seed=8))
        load(loaded)
        found.append(digest(loaded))
    return found, digest(state)


def test_large_foreign_tensors_are_read_in_ranges(tmp_path: Path) -> None:
    """Only the frame and the rows that are wanted, whatever the order of the stored dimensions."""
    row_major = random_tensor(3000, 1000, dtype=torch.bfloat16)
    column_major = random_tensor(1000, 3000, dtype=torch.bfloat16, seed=1).t()
    conjugated = random_tensor(900, 700, dtype=torch.complex64, seed=2).conj()
    state = {"row_major": row_major, "column_major": column_major, "conjugated": conjugated}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path))
    loaded = emptied(state)
    ckpt.load(loaded, tmp_path)
    assert {name: bits(value) for name, value in loaded.items()} == {
        name: bits(value) for name, value in state.items()
    }


def test_ours_reads_compressed_stock_items(tmp_path: Path) -> None:
    pytest.importorskip("zstandard", reason="torch's zstd extension needs the zstandard package")
    from torch.distributed.checkpoint._extension import ZStandard

    state = plain_state()
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path, _extensions=[ZStandard()]))
    loaded = emptied(state)
    ckpt.load(loaded, tmp_path)
    assert digest(loaded) == digest(state)


def test_ours_reads_torch_save_to_dcp(tmp_path: Path) -> None:
    state = plain_state()
    torch.save(state, tmp_path / "c.pt")
    torch_save_to_dcp(tmp_path / "c.pt", tmp_path / "c")
    loaded = emptied(state)
    ckpt.load(loaded, tmp_path / "c")
    assert digest(loaded) == digest(state)


def test_a_foreign_checkpoint_is_never_replaced(tmp_path: Path) -> None:
    state = {"t": random_tensor(10)}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ckpt.errors.SaveFailed, match="another program wrote") as caught:
        ckpt.save({"t": torch.zeros(10)}, tmp_path)
    assert isinstance(caught.value.failures[0], ckpt.errors.AlreadyExists)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_foreign_checkpoint_over_ours_is_never_replaced(tmp_path: Path) -> None:
    ckpt.save({"t": random_tensor(10)}, tmp_path)
    theirs = {"t": random_tensor(10, seed=1)}
    dcp.save(theirs, storage_writer=dcp.FileSystemWriter(tmp_path))
    with pytest.raises(ckpt.errors.SaveFailed, match="another program wrote"):
        ckpt.save({"t": torch.zeros(10)}, tmp_path)
    loaded = emptied(theirs)
    dcp.load(loaded, storage_reader=dcp.FileSystemReader(tmp_path))
    assert digest(loaded) == digest(theirs)


def test_a_foreign_commit_json_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "commit.json").write_text('{"of": "somebody else"}')
    with pytest.raises(ckpt.errors.SaveFailed, match="another program wrote"):
        ckpt.save({"t": torch.zeros(10)}, tmp_path)
    assert (tmp_path / "commit.json").read_text() == '{"of": "somebody else"}'
