"""Stock PyTorch stores the path that its writer was given: of any class, which no reader needs to have."""

from __future__ import annotations

import importlib
import os
import pathlib
import pickle
import shutil
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta

import ckpt
from ckpt.errors import CommitConflict, FormatError, SaveFailed, UnsafeContent
from ckpt.format.saved_over import SAVED_OVER
from ckpt.reading.slices import OpenCheckpoint
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


_LOAD = """
import sys, torch, ckpt
loaded = {"w": torch.zeros(2)}
ckpt.load(loaded, sys.argv[1])
assert loaded["w"].tolist() == [2.0, 2.0]
assert "paths_of_a_program" not in sys.modules
"""


def test_a_path_class_that_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its module is neither needed nor run: here it ends the program."""
    module = tmp_path / "modules" / "paths_of_a_program.py"
    module.parent.mkdir()
    module.write_text("import pathlib\nclass RunPath(type(pathlib.Path())): pass\n")
    monkeypatch.syspath_prepend(module.parent)
    place = tmp_path / "c"
    _with_path(place, importlib.import_module("paths_of_a_program").RunPath(place), 2.0)
    for text in ("raise SystemExit('imported')", None):
        module.unlink()
        if text is not None:
            module.write_text(text)
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(module.parent), *sys.path])}
        command = [sys.executable, "-W", "ignore", "-c", _LOAD, str(place)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
        assert done.returncode == 0, done.stderr


def test_multi_storage_client_itself(tmp_path: Path) -> None:
    """Alone, and over a checkpoint of ours; as it is installed."""
    torch_part = pytest.importorskip(
        "multistorageclient.contrib.torch", reason="multi-storage-client is not installed"
    )
    ckpt.save({"w": torch.ones(2)}, tmp_path / "over")
    for name in ("alone", "over"):
        writer = torch_part.MultiStorageFileSystemWriter(str(tmp_path / name))
        dcp.save({"w": torch.full((2,), 2.0)}, storage_writer=writer, no_dist=True)
    loaded = {"w": torch.zeros(2)}
    ckpt.load(loaded, tmp_path / "alone")
    assert loaded["w"].tolist() == [2.0, 2.0]
    assert ckpt.verify(tmp_path / "alone").ok
    with pytest.raises(CommitConflict):
        ckpt.load(loaded, tmp_path / "over")
    listed = {each.path: each.state for each in ckpt.list_checkpoints(tmp_path)}
    assert listed == {"alone": "foreign", "over": "damaged"}


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


def _flipped(whole: bytes) -> bytes:
    middle = len(whole) // 2
    return whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]


@pytest.mark.parametrize(
    "damage",
    [lambda _: b"", lambda _: b"\0" * 1000, _flipped, lambda whole: whole[:-1], lambda whole: whole[:-100]],
    ids=["empty", "zeros", "flipped", "cut in the seal", "cut before it"],
)
def test_own_metadata_that_is_damaged(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    """Only stock readers need it: reader and writer pass over it, `verify` reports it, `gc` writes it again."""
    ckpt.save({"w": torch.ones(2)}, tmp_path / "c")
    metadata = tmp_path / "c" / ".metadata"
    whole = metadata.read_bytes()
    metadata.write_bytes(damage(whole))
    loaded = {"w": torch.zeros(2)}
    ckpt.load(loaded, tmp_path / "c")
    assert loaded["w"].tolist() == [1.0, 1.0]
    assert [listed.state for listed in ckpt.list_checkpoints(tmp_path)] == ["committed"]
    assert [damage.kind for damage in ckpt.verify(tmp_path / "c").damages] == ["stock_metadata"]
    os.utime(metadata, (0, metadata.stat().st_mtime + 60))  # long after the commit
    ckpt.collect_garbage(tmp_path, grace_s=-120)
    assert metadata.read_bytes() == whole
    metadata.write_bytes(damage(whole))
    ckpt.save({"w": torch.ones(3)}, tmp_path / "c", overwrite=True)
    assert ckpt.verify(tmp_path / "c").ok


def _of_stock(kind: Any) -> Callable[[Path], None]:
    return lambda place: _with_path(place, kind(place), 2.0)


def _of_stock_cut(place: Path) -> None:
    _with_path(place, place, 2.0)
    metadata = place / ".metadata"
    metadata.write_bytes(metadata.read_bytes()[:-5])


def _of_bytes(data: bytes) -> Callable[[Path], object]:
    return lambda place: (place / ".metadata").write_bytes(data)


@pytest.mark.parametrize(
    "save_over",
    [
        *map(_of_stock, [pathlib.Path, RunPath, ClientPath]),
        _of_stock_cut,
        _of_bytes(pickle.dumps({"another": RunPath("/a")})),
        _of_bytes(pickle.dumps({"a": [1] * 100})[:-5]),
        _of_bytes(pickle.dumps({"a": 1}, protocol=0)),
        _of_bytes(b'{"version": 9}'),
        _of_bytes(b"this is not a pickle."),
    ],
    ids=["path", "subclass", "client", "cut", "refused", "a part", "protocol 0", "json", "text"],
)
def test_all_agree_on_one_that_another_program_saved_over(
    tmp_path: Path, save_over: Callable[[Path], object]
) -> None:
    """Which of the two is wanted only its owner knows: none is chosen, replaced or collected."""
    place = tmp_path / "step-00000002"
    ckpt.save({"w": torch.zeros(2)}, tmp_path / "step-00000001")
    ckpt.save({"w": torch.ones(2)}, place)
    save_over(place)
    before = sorted(place.rglob("*"))
    loaded = {"w": torch.full((2,), 9.0)}
    copied = tmp_path / "copied"
    calls: list[Callable[[], object]] = [
        lambda: ckpt.load(loaded, place),
        lambda: ckpt.inspect(place),
        lambda: OpenCheckpoint(place).__enter__(),
        lambda: ckpt.copy(place, copied),
    ]
    for call in calls:
        with pytest.raises(CommitConflict, match="saved over the checkpoint"):
            call()
    assert loaded["w"].tolist() == [9.0, 9.0]
    with pytest.raises(SaveFailed, match="another program wrote this"):
        ckpt.save({"w": torch.ones(2)}, place, overwrite=True)
    found = ckpt.verify(place)
    assert [damage.message for damage in found.damages] == [SAVED_OVER]
    assert found.strays == []
    listed = {each.path: (each.state, each.latest) for each in ckpt.list_checkpoints(tmp_path)}
    assert listed == {"step-00000001": ("committed", True), "step-00000002": ("damaged", False)}
    assert ckpt.collect_garbage(tmp_path, grace_s=-1).skipped == {place.name: SAVED_OVER}
    with ckpt.CheckpointManager(tmp_path, save=1, preflight=False) as manager:
        restored = manager.restore(loaded, rng=False)
    assert restored is not None
    assert restored.step == 1
    assert SAVED_OVER in restored.passed_over[0].reason
    assert sorted(place.rglob("*")) == before


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
