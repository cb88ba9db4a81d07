"""A checkpoint may be hostile: reading one runs no code, leaves its place alone, and takes bounded memory."""

from __future__ import annotations

import datetime
import io
import pickle
import struct
import tracemalloc
import types
import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.states import digest, emptied, random_tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

import ckpt
from ckpt.errors import (
    CheckpointError,
    ConfigurationError,
    FormatError,
    LoadFailed,
    SaveFailed,
    UnsafeContent,
)
from ckpt.stock.metadata_reader import decode_metadata
from ckpt.torch_private import StorageInfo, archive_reader

RAN: list[str] = []


class Bomb:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> Any:
        return RAN.append, ("boom",)


@pytest.fixture(autouse=True)
def _nothing_ran() -> Any:
    RAN.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    assert RAN == []


def stock(place: Path, state: dict[str, Any] | None = None) -> Path:
    dcp.save(state or {"t": random_tensor(100, 100)}, storage_writer=dcp.FileSystemWriter(place))
    return place


def load_tensor(place: Path) -> None:
    ckpt.load({"t": torch.zeros(100, 100)}, place)


# -- objects -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("writer", ["ours", "stock"])
def test_pickled_objects_do_not_run(tmp_path: Path, writer: str) -> None:
    state = {"object": Bomb(), "harmless": {"a": [1, "x"], "when": 3}}
    if writer == "ours":
        ckpt.save(state, tmp_path)
    else:
        stock(tmp_path, state)
    for load in (
        lambda loaded: ckpt.load(loaded, tmp_path),
        lambda loaded: dcp.load(loaded, storage_reader=ckpt.CheckpointReader(tmp_path)),
    ):
        with pytest.raises(
            BaseException, match=r"'object' is a pickled object that could run code"
        ) as caught:
            load({"object": None})
        assert "trusted_objects=['object']" in str(caught.value)
    loaded: dict[str, Any] = {"harmless": {"a": [], "when": 0}}
    ckpt.load(loaded, tmp_path)
    assert loaded["harmless"] == state["harmless"]


def test_objects_can_be_trusted_by_name(tmp_path: Path) -> None:
    state = {"when": {"start": types.SimpleNamespace(day=21)}, "bomb": Bomb()}
    ckpt.save(state, tmp_path)
    with pytest.raises(UnsafeContent):
        ckpt.load({"when": {"start": None}}, tmp_path)
    for pattern in ("when.start", "when.*"):
        loaded: dict[str, Any] = {"when": {"start": None}}
        ckpt.load(loaded, tmp_path, trusted_objects=[pattern])
        assert loaded == {"when": {"start": types.SimpleNamespace(day=21)}}
    with pytest.raises(UnsafeContent, match="bomb"):
        ckpt.load({"when": {"start": None}, "bomb": None}, tmp_path, trusted_objects=["when.*"])
    with pytest.raises(ConfigurationError, match="not a single str"):
        ckpt.CheckpointReader(tmp_path, trusted_objects="when.start")


def test_declared_classes_are_safe(tmp_path: Path) -> None:
    ckpt.save({"when": types.SimpleNamespace(day=21)}, tmp_path)
    loaded: dict[str, Any] = {"when": None}
    with torch.serialization.safe_globals([types.SimpleNamespace]):
        ckpt.load(loaded, tmp_path)
    assert loaded["when"] == types.SimpleNamespace(day=21)


def test_the_planner_gets_our_pickle_not_the_stored_one(tmp_path: Path) -> None:
    """What two parsers could understand in two ways is not handed on."""
    ckpt.save({"object": [1, 2, 3]}, tmp_path)
    (path,) = tmp_path.rglob("*.distcp")
    stored = path.read_bytes()
    seen: list[bytes] = []

    class Looking(dcp.DefaultLoadPlanner):
        def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
            seen.append(value.getvalue())
            super().load_bytes(read_item, value)

    ckpt.load({"object": None}, tmp_path, planner=Looking())
    assert len(seen) == 1
    assert torch.load(io.BytesIO(seen[0]), weights_only=True) == [1, 2, 3]
    # The stored item plus trailing bytes is still one to torch.load; the planner never sees them.
    from ckpt.stock.item_files import MemoryFile
    from ckpt.stock.safe_load import safe_object

    longer = MemoryFile(stored + b"cos\nsystem\n")
    try:
        assert safe_object(longer, fqn="o", url="u", key="k").getvalue() == seen[0]
    except FormatError:
        assert not hasattr(archive_reader, "get_record_size")  # before torch 2.13 it is refused


# -- metadata ------------------------------------------------------------------------------------------


def _raw_pickles() -> dict[str, bytes]:
    return {
        "reduce": pickle.dumps(Bomb()),
        "reduce in metadata": pickle.dumps(
            Metadata({"t": Bomb()}, storage_data={})  # type: ignore[dict-item]
        ),
        "protocol 0": b"cos\nsystem\n(S'true'\ntR.",
        "old global": b"\x80\x02cos\nsystem\nq\x00X\x04\x00\x00\x00trueq\x01\x85q\x02Rq\x03.",
        "dotted name": b"\x80\x04\x8c\x05torch\x8c\x0fos.system.__call_\x93.",
        "dtype by another name": b"\x80\x04\x8c\x05torch\x8c\x04load\x93.",
        "memo": b"\x80\x04r\xff\xff\xff\xff" + b"N.",
        "bytearray": b"\x80\x05\x96" + struct.pack("<Q", 1 << 60) + b".",
        "long bytes": b"\x80\x04B\xff\xff\xff\xff" + b".",
        "setattr on a class": b"\x80\x04\x8c'torch.distributed.checkpoint.metadata\x8c\x08Metadata\x93"
        b"N}\x8c\x08__init__N s\x86b.",
        "no end": b"\x80\x04N",
        "empty": b"",
        "text": b"this is not a pickle",
        "another object": pickle.dumps({"a": 1}),
        "deep": b"\x80\x04" + b"(" * 200_000 + b"N" + b"t" * 200_000 + b".",
        "huge number": pickle.dumps(_metadata(size=(1 << 4000,))),
        "negative": pickle.dumps(_metadata(size=(-1,))),
        "wrong dimensions": pickle.dumps(_metadata(size=(3, 3))),
    }


def _metadata(size: tuple[int, ...]) -> Metadata:
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        TensorProperties,
        TensorStorageMetadata,
    )

    chunk = ChunkStorageMetadata(offsets=(0,), sizes=(3,))  # type: ignore[arg-type]
    stored = TensorStorageMetadata(TensorProperties(torch.float32), size, [chunk])  # type: ignore[arg-type]
    return Metadata({"t": stored}, storage_data={})


def _named(module: str, name: str) -> bytes:
    """The opcodes that push a class or function."""
    return b"".join(b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name)) + b"\x93"


def _doubled(call: bytes) -> bytes:
    """A call of an argument that doubles in size with each of 60 short steps."""
    return b"\x80\x04" + call + b"\x8c\x01x\x94" + b"".join(b"h%c\x86\x94" % n for n in range(60)) + b"\x85R."


def _many_keys(keys: bytes) -> bytes:
    return b"\x80\x04}(" + keys + b"u."


def _growing_pickles() -> dict[str, Callable[[], bytes]]:
    """How to make small ones that would take all memory, all time, or all of the stack."""
    path = _named("pathlib", "PosixPath")
    ordered = _named("collections", "OrderedDict")
    large = b"]\x94(" + b"K\x01K\x02\x86" * 50_000 + b"e"

    def collide() -> bytes:
        return b"".join(
            b"\x8a\x14" + (7 + n * ((1 << 61) - 1)).to_bytes(20, "little") + b"N" for n in range(200_000)
        )

    def tuples() -> bytes:
        return b"".join(b"J" + struct.pack("<i", n) + b"K\x01\x86N" for n in range(200_000))

    return {
        "text of a layout": lambda: _doubled(_named("torch.serialization", "_get_layout")),
        "text of a size": lambda: _doubled(_named("torch", "Size")),
        "path of a path": lambda: b"\x80\x04" + path + b"\x94\x8c\x01x\x94" + b"".join(b"h\x00h%ch%c\x86R\x94" % (n, n) for n in range(1, 60)) + b".",
        "copies of a dict": lambda: b"\x80\x04(" + large + (ordered + b"h\x00\x85R") * 1000 + b"t.",
        "numbers of one hash": lambda: _many_keys(collide()),
        "tuples as keys": lambda: _many_keys(tuples()),
        "one tuple as a key": lambda: b"\x80\x04}K\x01\x85Ns.",
        "a tuple from the memo as a key": lambda: b"\x80\x04}K\x01\x85\x94h\x00Ns.",
        "a tuple where the memo has a text": lambda: b"\x80\x02}X\x01\x00\x00\x00xr\x02\x00\x00\x00X\x01\x00\x00\x00x\x94K\x01\x85\x94h\x02Ns.",
        "deep key": lambda: b"\x80\x04}" + b"N" + b"\x85" * 300_000 + b"Ns.",
        "deep key of pairs": lambda: b"\x80\x04}(" + b"N" + b"N\x86" * 300_000 + b"Nu.",
        "set": lambda: b"\x80\x04\x8f.",
        "frozenset": lambda: b"\x80\x04(K\x01\x91.",
        "changed function": lambda: b"\x80\x04" + path + b"N}\x8c\x09_function" + path + b"s\x86b.",
        "LONG4": lambda: b"\x80\x04\x8b\xff\xff\x00\x00" + b"\x01" * 0xFFFF + b".",
    }  # fmt: skip


@pytest.mark.parametrize("name", _growing_pickles())
def test_metadata_that_grow(name: str) -> None:
    pickled = _growing_pickles()[name]()
    with pytest.raises((UnsafeContent, FormatError)) as caught:
        decode_metadata(pickled, url="u", key="k")
    assert ("a number of more than 255 bytes" in str(caught.value)) == (name == "LONG4")
    assert len(str(caught.value)) < 700


def _chunk_listed_often(dimensions: int, times: int) -> Metadata:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    metadata = _metadata((3,))
    stored = metadata.state_dict_metadata["t"]
    zeros: Any = (0,) * dimensions
    stored.size = zeros  # type: ignore[union-attr]
    stored.chunks = [ChunkStorageMetadata(zeros, zeros)] * times  # type: ignore[union-attr]
    return metadata


def _descriptors_shared() -> Metadata:
    metadata, names = _metadata((3,)), ["zstd"] * 20_000
    metadata.storage_data = {MetadataIndex(f"t{n}"): StorageInfo("f", 0, 1, names) for n in range(1000)}
    return metadata


def _paths_shared(paths: int, parts: int) -> Metadata:
    metadata, text = _metadata((3,)), "S" * ((1 << 20) // paths)
    metadata.planner_data = {f"p{n}": (text, n, *[0] * parts) for n in range(paths)}
    return metadata


_SHARING: dict[str, tuple[Callable[[], Metadata], str]] = {
    "a chunk of 20,000 dimensions": (lambda: _chunk_listed_often(20_000, 500), "20000 dimensions"),
    "a chunk of 64 dimensions": (lambda: _chunk_listed_often(64, 100_000), "far more chunks"),
    "a chunk of no dimensions": (lambda: _chunk_listed_often(0, 200_000), "far more chunks"),
    "transforms": (_descriptors_shared, "transformed 20000 times"),
    "a path": (lambda: _paths_shared(1, 126), "far longer than their names"),
    "paths": (lambda: _paths_shared(40, 126), "far longer than their names"),
}


@pytest.mark.parametrize("name", _SHARING)
def test_parts_that_a_pickle_shares_are_not_multiplied(name: str) -> None:
    make, message = _SHARING[name]
    pickled = pickle.dumps(make())
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match=message):
            decode_metadata(pickled, url="u", key="k")
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 40 << 20


def test_tied_tensors_may_share_their_description() -> None:
    """And as many chunks as there are places for them."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    metadata, count = _metadata((3,)), 1000
    stored = metadata.state_dict_metadata["t"]
    stored.size, sizes = (count, 1, 1), torch.Size([1, 1, 1])  # type: ignore[union-attr]
    offsets = [torch.Size([n, 0, 0]) for n in range(count)]
    stored.chunks = [ChunkStorageMetadata(offset, sizes) for offset in offsets]  # type: ignore[union-attr]
    metadata.state_dict_metadata["tied"] = stored
    info = StorageInfo("f", 0, 10)
    metadata.storage_data = {
        MetadataIndex(name, offset): info for name in ("t", "tied") for offset in offsets
    }
    read = decode_metadata(pickle.dumps(metadata), url="u", key="k")
    assert read.state_dict_metadata == metadata.state_dict_metadata
    assert read.storage_data == metadata.storage_data


def test_negative_indices_in_paths() -> None:
    """Numbers so far below zero have hashes that can be chosen."""
    metadata = _metadata((3,))
    metadata.planner_data = {"a": ("a", -5)}
    with pytest.raises(FormatError, match="negative index"):
        decode_metadata(pickle.dumps(metadata), url="u", key="k")


def test_a_layout_that_is_a_deep_tuple() -> None:
    """Hashing it would overrun the stack."""
    layout = b"N" + b"\x85" * 300_000
    properties = _instance("TensorProperties", b"(" + _named("torch", "float32") + layout + b"\x89t")
    tensor = _instance("TensorStorageMetadata", _state(properties=properties, size=b")", chunks=b"]"))
    tensors = b"}\x8c\x01t" + tensor + b"s"
    metadata = _instance("Metadata", _state(state_dict_metadata=tensors, storage_data=b"}"))
    with pytest.raises(FormatError, match="tuple in place of str"):
        decode_metadata(b"\x80\x04" + metadata + b".", url="u", key="k")


def _instance(name: str, state: bytes) -> bytes:
    """The opcodes that push an instance of one of DCP's classes."""
    return _named("torch.distributed.checkpoint.metadata", name) + b")\x81" + state + b"b"


def _state(**fields: bytes) -> bytes:
    """The opcodes that push a dict of `fields`."""
    pairs = (b"\x8c" + bytes([len(name)]) + name.encode() + value for name, value in fields.items())
    return b"}(" + b"".join(pairs) + b"u"


def test_offsets_of_one_hash() -> None:
    """Numbers up to 2**61 have themselves for a hash, so offsets with equal hashes can be looked for."""
    metadata = _metadata((3,))
    infos = {MetadataIndex("t", (n,)): StorageInfo("f", 0, 10) for n in range(100)}
    metadata.storage_data = infos
    assert decode_metadata(pickle.dumps(metadata), url="u", key="k").storage_data == infos
    metadata.storage_data = _Twice(infos)
    with pytest.raises(FormatError, match="listed twice"):
        decode_metadata(pickle.dumps(metadata), url="u", key="k")


class _Twice(dict):  # type: ignore[type-arg]
    """Pickles as a dict that holds equal keys."""

    def __reduce__(self) -> Any:
        again = [(MetadataIndex(key.fqn, key.offset), value) for key, value in self.items()]
        return OrderedDict, (), None, None, iter([*self.items(), *again])


@pytest.mark.parametrize(
    "paths",
    [
        {"a": ("a", 1 << 40)},
        {f"a{n}": (f"a{n}", 5000) for n in range(5000)},
        {"a": tuple(["a"] * 5000)},
    ],
    ids=["index", "indices", "depth"],
)
def test_paths_into_lists_that_would_be_padded(paths: dict[str, Any]) -> None:
    metadata = _metadata((3,))
    metadata.planner_data = paths
    with pytest.raises(FormatError, match=r"paths? (into|of)"):
        decode_metadata(pickle.dumps(metadata), url="u", key="k")


def test_planner_data_of_all_kinds() -> None:
    metadata = _metadata((3,))
    metadata.planner_data = {
        **{f"list.{n}": ("list", n) for n in range(1000)},
        "sparse.9": ("sparse", 9, "x"),
        "seed": (1 << 70, 2.5, None, b"x", [True]),
        3: {"nested": {"x": ()}},
        "ordered": OrderedDict(a=1, b=2),
    }
    found = decode_metadata(pickle.dumps(metadata), url="u", key="k")
    assert found.planner_data == metadata.planner_data


def test_metadata_of_older_versions_of_torch() -> None:
    """They had the class elsewhere, and pickled it under that name."""
    from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as OlderProperties

    metadata = _metadata((3,))
    stored = metadata.state_dict_metadata["t"]
    stored.properties = OlderProperties(dtype=torch.bfloat16)  # type: ignore[union-attr]
    data = pickle.dumps(metadata)
    assert b"_shard.sharded_tensor.metadata" in data
    assert b"MEM_FORMAT_ENCODING" in data
    found = decode_metadata(data, url="u", key="k").state_dict_metadata["t"]
    assert found.properties.dtype is torch.bfloat16  # type: ignore[union-attr]


@pytest.mark.parametrize("name", list(_raw_pickles()))
def test_hostile_metadata(tmp_path: Path, name: str) -> None:
    data = _raw_pickles()[name]
    with pytest.raises((UnsafeContent, FormatError)):
        decode_metadata(data, url="u", key="k")
    (tmp_path / ".metadata").write_bytes(data)
    with pytest.raises((UnsafeContent, FormatError)) as caught:
        load_tensor(tmp_path)
    assert caught.value.key == ".metadata"
    assert "\n" not in str(caught.value)
    # The real classes are as they were.
    ckpt.save({"t": torch.ones(3)}, tmp_path / "other")
    ckpt.load({"t": torch.ones(3)}, tmp_path / "other")


def test_metadata_survive_the_way_through_safety() -> None:
    metadata = _metadata((3,))
    metadata.planner_data = {"a.0": ("a", 0), "b": ("b",)}
    metadata.storage_data = {MetadataIndex("t", (0,), 0): StorageInfo("f", 0, 10, ["x"])}
    found = decode_metadata(pickle.dumps(metadata), url="u", key="k")
    assert found.planner_data == metadata.planner_data
    assert found.storage_data == metadata.storage_data
    assert found.state_dict_metadata["t"].chunks[0].sizes == torch.Size([3])  # type: ignore[union-attr]


def test_planner_data_that_no_safe_reader_could_load(tmp_path: Path) -> None:
    class Odd(dcp.DefaultSavePlanner):
        def create_global_plan(self, all_plans: Any) -> Any:
            plans, metadata = super().create_global_plan(all_plans)
            metadata.planner_data = {"t": datetime.date(2026, 1, 1)}
            return plans, metadata

    with pytest.raises(SaveFailed, match=r"planner_data holds a datetime\.date"):
        ckpt.save({"t": torch.ones(3)}, tmp_path, planner=Odd())


# -- places and sizes ----------------------------------------------------------------------------------


def change(place: Path, edit: Callable[[StorageInfo], None]) -> None:
    """Edit every storage info in a stock `.metadata`."""
    path = place / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    for info in metadata.storage_data.values():
        edit(info)
    path.write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("path", ["/etc/passwd", "../outside", "a/../../outside", "", "./x", "a\\b"])
def test_paths_out_of_the_checkpoint(tmp_path: Path, path: str) -> None:
    (tmp_path / "outside").write_bytes(b"x" * 100_000)
    place = stock(tmp_path / "c")
    change(place, lambda info: setattr(info, "relative_path", path))
    with pytest.raises(UnsafeContent, match="outside of the checkpoint"):
        load_tensor(place)


def test_links_out_of_the_checkpoint(tmp_path: Path) -> None:
    place = stock(tmp_path / "c")
    file = place / "__0_0.distcp"
    file.rename(tmp_path / "outside")
    file.symlink_to(tmp_path / "outside")
    with pytest.raises(UnsafeContent, match="link that leads out"):
        load_tensor(place)


def test_links_inside_and_a_link_to_the_checkpoint_are_fine(tmp_path: Path) -> None:
    place = stock(tmp_path / "c")
    (place / "__0_0.distcp").rename(place / "data")
    (place / "__0_0.distcp").symlink_to("data")
    (tmp_path / "latest").symlink_to(place)
    load_tensor(tmp_path / "latest")


@pytest.mark.parametrize(
    ("field", "value"), [("offset", 1 << 60), ("length", 1 << 60), ("length", 0), ("offset", 7)]
)
@pytest.mark.parametrize("kind", ["tensor", "object"])
def test_absurd_places_in_a_file(tmp_path: Path, field: str, value: int, kind: str) -> None:
    state: dict[str, Any] = {"t": random_tensor(600, 1000)} if kind == "tensor" else {"t": [1, 2, 3]}
    place = stock(tmp_path / "c", state)
    change(place, lambda info: setattr(info, field, value))
    with pytest.raises(CheckpointError):
        ckpt.load(emptied(state), place)


def test_a_tensor_said_to_be_larger_than_it_is(tmp_path: Path) -> None:
    place = stock(tmp_path / "c", {"t": random_tensor(600, 1000)})
    path = place / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    stored = metadata.state_dict_metadata["t"]
    stored.size = stored.chunks[0].sizes = torch.Size([1 << 30, 1 << 30])
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises((FormatError, LoadFailed)):
        ckpt.load({"t": torch.zeros(600, 1000)}, place)
    # Asked for as large as it is said to be, without a destination of that size.
    wanted = torch.zeros(1).expand(1 << 30, 1 << 30)
    with pytest.raises(FormatError, match="where the metadata says"):
        ckpt.load({"t": wanted}, place, planner=dcp.DefaultLoadPlanner())


def test_a_record_said_to_be_large(tmp_path: Path) -> None:
    """The commit promises 2**60 bytes of metadata; nobody sets them aside."""
    from ckpt.consistency.seal import seal_json, unseal_json

    ckpt.save({"t": torch.ones(3)}, tmp_path)
    path = tmp_path / "commit.json"
    record = unseal_json(path.read_bytes(), url="", key="")
    import re

    path.write_bytes(seal_json(re.sub(rb'"size_bytes":\d+', b'"size_bytes":%d' % (1 << 60), record)))
    with pytest.raises(CheckpointError, match="expected 1152921504606846976"):
        ckpt.load({"t": torch.ones(3)}, tmp_path)


def test_bombs_inside_tensor_items(tmp_path: Path) -> None:
    place = stock(tmp_path / "c", {"t": random_tensor(600, 1000)})
    buffer = io.BytesIO()
    torch.save({"t": Bomb(), "pad": bytes(300_000)}, buffer)
    (place / "__0_0.distcp").write_bytes(buffer.getvalue())
    change(place, lambda info: setattr(info, "length", len(buffer.getvalue())))
    with pytest.raises((UnsafeContent, FormatError)):
        ckpt.load({"t": torch.zeros(600, 1000)}, place)


def test_foreign_checkpoints_may_be_trusted_objects_and_all(tmp_path: Path) -> None:
    state = {"t": random_tensor(5), "when": datetime.date(2026, 1, 2)}
    place = stock(tmp_path / "c", state)
    loaded = emptied(state)
    ckpt.load(loaded, place, trusted_objects=["*"])
    assert digest(loaded) == digest(state)
