"""Stock PyTorch stores the path that its writer was given: of any class, which no reader needs to have."""

from __future__ import annotations

import os
import pathlib
import pickle
import shutil
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta

import ckpt
from ckpt.errors import CommitConflict, FormatError, UnsafeContent
from ckpt.stock.metadata_reader import decode_metadata
from ckpt.torch_private import StorageInfo

pytestmark = pytest.mark.filterwarnings("ignore")

KEPT = Path(__file__).parents[1] / "data" / "multi-storage-client-1.3.1"
"""Saved by `MultiStorageFileSystemWriter` of multi-storage-client 1.3.1, with torch 2.13.0."""


class RunPath(type(pathlib.Path())):  # type: ignore[misc]
    """A path class of a program, as universal_pathlib's `PosixUPath`."""


class ClientPath:
    """A path that is no `pathlib` path and has a state, as that of multi-storage-client."""

    def __init__(self, path: Any) -> None:
        self.path, self.inner = str(path), pathlib.PurePosixPath(path)

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "inner": self.inner}


class KeywordPath(pathlib.PurePosixPath):
    """A path that a function makes again, as universal_pathlib's `S3Path`."""

    def __reduce__(self) -> Any:
        return _made, (type(self), (str(self),), {"protocol": "s3"})


def _made(kind: Any, arguments: Any, options: Any) -> Any:
    return kind(*arguments)


PATHS = [RunPath, ClientPath, KeywordPath, pathlib.Path]


def _with_path(place: Path, path: Any, value: float) -> None:
    """Save as stock does, with any object for the path that its `.metadata` names."""

    class Writer(dcp.FileSystemWriter):
        def storage_meta(self) -> StorageMeta:
            return StorageMeta(checkpoint_id=path, save_id="1")

    state = {"w": torch.full((2,), value)}
    dcp.save(state, storage_writer=Writer(place), no_dist=True)


@pytest.mark.parametrize("kind", PATHS)
def test_a_path_of_any_class(tmp_path: Path, kind: Any) -> None:
    _with_path(tmp_path, kind(tmp_path), 2.0)
    assert kind.__name__.encode() in (tmp_path / ".metadata").read_bytes() or kind is pathlib.Path
    loaded = {"w": torch.zeros(2)}
    ckpt.load(loaded, tmp_path)
    assert loaded["w"].tolist() == [2.0, 2.0]
    assert ckpt.verify(tmp_path).ok


@pytest.mark.parametrize("kind", PATHS)
def test_saved_over_one_of_ours(tmp_path: Path, kind: Any) -> None:
    """The older state is not loaded as if it were the newest."""
    ckpt.save({"w": torch.ones(2)}, tmp_path)
    _with_path(tmp_path, kind(tmp_path), 2.0)
    loaded = {"w": torch.zeros(2)}
    with pytest.raises(CommitConflict, match="saved over the checkpoint"):
        ckpt.load(loaded, tmp_path)
    assert loaded["w"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    "command", [["inspect"], ["verify"], ["ls"], ["cp", "copy"], ["convert", "model", "--to", "safetensors"]]
)
def test_commands_on_one_of_multi_storage_client(tmp_path: Path, command: list[str]) -> None:
    name, *more = command
    place = tmp_path / "c"
    shutil.copytree(KEPT, place)
    if name == "cp":
        more = [str(tmp_path / "copy")]
    if name == "convert":  # complex numbers and objects have no place in such a file that is chosen here
        more = [str(tmp_path / "model"), "--to", "safetensors", "--include", "model.*"]
    code = "from ckpt.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, name, str(place), *more], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_multi_storage_client_saved_over_one_of_ours(tmp_path: Path) -> None:
    ckpt.save({"scalar": torch.tensor(1.0)}, tmp_path)
    for path in KEPT.iterdir():
        shutil.copy(path, tmp_path)
    loaded = {"scalar": torch.tensor(0.0)}
    with pytest.raises(CommitConflict):
        ckpt.load(loaded, tmp_path)
    (tmp_path / "commit.json").unlink()  # as the message says
    ckpt.load(loaded, tmp_path)
    assert loaded["scalar"] == 2.5


def test_metadata_of_others_that_is_refused_over_one_of_ours(tmp_path: Path) -> None:
    """A whole pickle is another program's, though this reader takes none of it."""
    ckpt.save({"w": torch.ones(2)}, tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps({"another": RunPath("/a")}))
    with pytest.raises(CommitConflict):
        ckpt.load({"w": torch.zeros(2)}, tmp_path)


@pytest.mark.parametrize(
    "damaged",
    [b"", b"\0" * 1000, b"this is not a pickle.", pickle.dumps({"a": [1] * 100})[:-5]],
    ids=["empty", "zeros", "text", "cut"],
)
def test_damaged_metadata_over_one_of_ours(tmp_path: Path, damaged: bytes) -> None:
    """Only stock readers need it."""
    ckpt.save({"w": torch.ones(2)}, tmp_path)
    (tmp_path / ".metadata").write_bytes(damaged)
    loaded = {"w": torch.zeros(2)}
    ckpt.load(loaded, tmp_path)
    assert loaded["w"].tolist() == [1.0, 1.0]


# -- where a path may be ---------------------------------------------------------------------------------


def _read(metadata: Metadata) -> Metadata:
    return decode_metadata(pickle.dumps(metadata), url="u", key="k")


def _meta(**fields: Any) -> StorageMeta:
    return StorageMeta(**fields)


def _info(path: Any) -> StorageInfo:
    return StorageInfo(path, 0, 1)


def _stored(path: Any) -> Metadata:
    return Metadata({}, storage_data={MetadataIndex("t"): _info(path)})


@pytest.mark.parametrize("kind", [RunPath, pathlib.PurePosixPath])
def test_a_path_as_the_name_of_a_file(kind: Any) -> None:
    (info,) = _read(_stored(kind("a/b"))).storage_data.values()
    assert info.relative_path == "a/b"


@pytest.mark.parametrize(
    ("metadata", "name"),
    [
        (Metadata({"t": RunPath("/a")}, storage_data={}), "RunPath"),
        (Metadata({}, storage_data=RunPath("/a")), "RunPath"),
        (Metadata({}, planner_data=RunPath("/a"), storage_data={}), "RunPath"),
        (Metadata({}, planner_data={"a": [ClientPath("/a")]}, storage_data={}), "ClientPath"),
        (Metadata({}, storage_data={}, version=RunPath("/a")), "RunPath"),
        (Metadata({}, storage_data={}, storage_meta=RunPath("/a")), "RunPath"),
        (Metadata({}, storage_data={}, storage_meta=_meta(save_id=ClientPath("/a"))), "ClientPath"),
        (_stored(ClientPath("/a")), "ClientPath"),
        (RunPath("/a"), "RunPath"),
    ],
)
def test_a_class_where_no_path_belongs(metadata: Any, name: str) -> None:
    with pytest.raises(UnsafeContent, match=rf"asks for \S*{name}"):
        _read(metadata)


class Calls:
    """A path that calls any function, as only hostile ones do."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize(
    "function", [eval, exec, getattr, os.system, subprocess.Popen, torch.load, ckpt.load]
)
def test_functions_of_python_and_torch_are_no_path_classes(function: Any) -> None:
    metadata = Metadata({}, storage_data={}, storage_meta=_meta(checkpoint_id=Calls(function, "x")))
    with pytest.raises(UnsafeContent, match=function.__name__):
        _read(metadata)


def _text(text: str) -> bytes:
    return b"\x8c" + bytes([len(text)]) + text.encode()


def test_very_many_path_classes() -> None:
    """Each stand-in takes far more memory than its name."""
    named = b"".join(_text("package") + _text(f"Path{number}") + b"\x93" for number in range(9))
    with pytest.raises(UnsafeContent, match=r"package\.Path8"):
        decode_metadata(b"\x80\x04(" + named + b"t.", url="u", key="k")


def test_paths_are_not_multiplied() -> None:
    """A pickle repeats the parts of a path in two bytes each."""
    part = "x" * (1 << 20)
    many = {MetadataIndex(f"t{n}"): _info(Calls(_made, part, part)) for n in range(1000)}
    pickled = pickle.dumps(Metadata({}, storage_data=many))
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match="far longer than"):
            decode_metadata(pickled, url="u", key="k")
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 40 << 20


def test_a_path_of_very_many_parts() -> None:
    """Python copies arguments for each call that the pickle repeats in five bytes."""
    parts = Calls(_made, *["a"] * 100_000)
    shared = [parts, *[Calls(_made, *["a"] * 9)] * 3]
    metadata = Metadata({}, storage_data={}, storage_meta=_meta(checkpoint_id=shared[0]))
    assert _read(metadata).storage_meta == StorageMeta()
    with pytest.raises(UnsafeContent):  # no text is left of one with 9
        _read(_stored(shared[1]))
