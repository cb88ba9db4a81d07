"""Places that hold no checkpoint: what the error says stands there, and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.strict_s3 import strict_s3

import ckpt
from ckpt.backends.base import Store, put_bytes
from ckpt.backends.registry import open_store
from ckpt.errors import CheckpointError, FormatError, NotCommitted, NotFound

_KINDS = ("file", "s3")


@pytest.fixture(params=_KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """An empty folder on a disk and in a bucket: its URL, and storage options."""
    if request.param == "file":
        yield str(tmp_path / "place"), {}
        return
    with strict_s3() as server:
        yield "s3://bucket/place", server.options


def _refusal(url: str, options: dict[str, Any]) -> CheckpointError:
    """Return the error that opening this place raises, whoever opens it."""
    errors: list[CheckpointError] = []
    for call in (
        lambda: ckpt.load({"t": torch.zeros(2)}, url, storage_options=options),
        lambda: ckpt.inspect(url, storage_options=options),
        lambda: ckpt.verify(url, storage_options=options),
    ):
        with pytest.raises(CheckpointError) as caught:
            call()
        errors.append(caught.value)
    first = errors[0]
    assert {(type(error), error.message) for error in errors} == {(type(first), first.message)}
    return first


def test_the_folder_of_a_run(place: tuple[str, dict[str, Any]]) -> None:
    url, options = place
    for name in ("step-9", "step-10"):
        ckpt.save({"t": torch.ones(2)}, f"{url}/{name}", storage_options=options)
    store = open_store(url, options)
    put_bytes(store, "step-11/rank-00000/0123456789abcdef-0.distcp", b"of a save that was killed")
    put_bytes(store, "logs/events", b"")
    error = _refusal(url, options)
    assert type(error) is NotCommitted
    assert error.message == (
        f"this is a folder of checkpoints, not one; its newest is step-10: "
        f"give {store.url}/step-10, or see in `ckpt ls` which is the latest that is whole"
    )
    assert "give the one above" in _refusal(f"{url}/step-10/rank-00000", options).message


def test_the_folder_of_a_run_of_stock_pytorch(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    for key in ("epoch-1/.metadata", "epoch-2/.metadata", "epoch-3/__0_0.distcp"):
        put_bytes(store, key, b"")
    assert "its newest is epoch-2" in _refusal(str(tmp_path), {}).message


@pytest.mark.parametrize("is_file_begun", [True, False])
def test_a_save_that_was_killed_before_its_first_file_was_whole(tmp_path: Path, is_file_begun: bool) -> None:
    begun = tmp_path / "rank-00000" / ".0123456789abcdef-0.distcp.fedcba9876543210.ckpt-tmp"
    begun.parent.mkdir()
    if is_file_begun:
        begun.write_bytes(b"half")
    error = _refusal(str(tmp_path), {})
    assert type(error) is NotCommitted
    assert error.message.startswith("a save or copy was begun here, but is not committed")


def test_the_folder_of_a_very_large_run() -> None:
    """The first page of its listing is all of its first checkpoint."""
    url = "memory://very-large-run/x"
    store = open_store(url)
    for number in range(1000):
        put_bytes(store, f"step-1/rank-00000/{number:016x}-0.distcp", b"")
    ckpt.save({"t": torch.ones(2)}, f"{url}/step-2")
    assert "its newest is step-2" in _refusal(url, {}).message


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", "other.safetensors"])
def test_a_model_that_is_damaged(place: tuple[str, dict[str, Any]], name: str) -> None:
    url, options = place
    put_bytes(open_store(url, options), name, b"{}")
    broken = r"is not a valid|not a valid index"
    with pytest.raises(FormatError, match=broken):
        ckpt.inspect(url, storage_options=options)
    with pytest.raises(FormatError, match=broken):
        ckpt.load({"t": torch.zeros(2)}, url, storage_options=options)
    (damage,) = ckpt.verify(url, storage_options=options).damages
    assert (damage.kind, damage.key) == ("record", name)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["config.json", "pytorch_model.bin"], "files of torch.save; `ckpt convert`"),
        (["config.json", "vocab.txt"], "the folder of a model, without weights"),
        (["a/b/c"], "`ckpt ls` lists those in the folders below"),
        (["notes.txt"], "only other files"),
        (["rank-00000/0123456789abcdef-0.distcp"], "the save or copy did not finish"),
        (["__0_0.distcp"], "the save or copy did not finish"),
    ],
)
def test_other_folders(place: tuple[str, dict[str, Any]], names: list[str], message: str) -> None:
    url, options = place
    store = open_store(url, options)
    for name in names:
        put_bytes(store, name, b"")
    error = _refusal(url, options)
    assert type(error) is NotCommitted
    assert message in error.message


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.safetensors", "a file of a safetensors model, not a checkpoint; `ckpt convert`"),
        ("weights.pt", "by its name one of torch.save, not a checkpoint; `ckpt convert`"),
        ("notes.txt", "this is a file; a checkpoint is a folder"),
        ("step-1/commit.json", "this is a file of a checkpoint; give its folder, {root}/step-1"),
        ("step-1/rank-00000/0123456789abcdef-0.distcp", "give its folder, {root}/step-1"),
    ],
)
def test_files(place: tuple[str, dict[str, Any]], name: str, message: str) -> None:
    url, options = place
    store = open_store(url, options)
    put_bytes(store, name, b"data")
    error = _refusal(f"{url}/{name}", options)
    assert type(error) is NotFound
    assert message.format(root=store.url) in error.message
    assert _refusal(f"{url}/{name}.missing", options).message == "there is nothing here"


def test_a_folder_that_may_not_be_looked_into(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with strict_s3() as server:
        store: Store = open_store("s3://bucket/run", server.options)
        for step in (1, 2):
            put_bytes(store, f"step-{step}/commit.json", b"")
        server.rule = lambda request: (403, "AccessDenied") if "step-2" in request.name else "pass"
        assert "its newest is step-1" in _refusal("s3://bucket/run", server.options).message
