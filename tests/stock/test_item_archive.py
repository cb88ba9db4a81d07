"""Stored items that are not quite what `torch.save` writes: loaded right or refused, never larger than stored."""

from __future__ import annotations

import contextlib
import io
import pickle
import struct
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.states import bits, emptied, random_tensor

import ckpt
from ckpt.errors import CheckpointError, FormatError, Truncated, UnsafeContent
from ckpt.format.records import RankManifest, decode_manifest, encode
from ckpt.stock.item_files import MemoryFile
from ckpt.stock.safe_load import load_tensor_item, safe_object

pytestmark = pytest.mark.filterwarnings("ignore")

TENSOR = random_tensor(700, 500)


def archived(value: Any) -> dict[str, bytes]:
    """The records of what `torch.save` writes."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    with zipfile.ZipFile(buffer) as archive:
        return {name.split("/", 1)[1]: archive.read(name) for name in archive.namelist()}


def packed(records: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, data in records.items():
            archive.writestr(f"archive/{name}", data)
    return buffer.getvalue()


def stock_with(place: Path, value: Any, item: bytes, descriptors: list[str] | None = None) -> Path:
    """A stock checkpoint of `value` under the name "t", whose item is `item`."""
    dcp.save({"t": value}, storage_writer=dcp.FileSystemWriter(place))
    (place / "__0_0.distcp").write_bytes(item)
    metadata = pickle.loads((place / ".metadata").read_bytes())
    (info,) = metadata.storage_data.values()
    info.offset, info.length, info.transform_descriptors = 0, len(item), descriptors
    (place / ".metadata").write_bytes(pickle.dumps(metadata))
    return place


def loaded(place: Path, value: Any = TENSOR) -> Any:
    state = emptied({"t": value})
    ckpt.load(state, place)
    return state["t"]


# -- tensors -------------------------------------------------------------------------------------------


def test_items_packed_by_another_program(tmp_path: Path) -> None:
    place = stock_with(tmp_path, TENSOR, packed(archived(TENSOR)))
    assert bits(loaded(place)) == bits(TENSOR)


def test_items_of_the_other_byte_order(tmp_path: Path) -> None:
    records = archived(TENSOR)
    other = {"little": "big", "big": "little"}[sys.byteorder]
    records["byteorder"] = other.encode()
    raw = torch.frombuffer(bytearray(records["data/0"]), dtype=torch.uint8).view(-1, 4).flip(1)
    records["data/0"] = bits(raw)
    assert bits(loaded(stock_with(tmp_path, TENSOR, packed(records)))) == bits(TENSOR)


def test_items_of_versions_without_a_byte_order(tmp_path: Path) -> None:
    records = archived(TENSOR)
    del records["byteorder"]
    assert bits(loaded(stock_with(tmp_path, TENSOR, packed(records)))) == bits(TENSOR)


def test_compressed_items(tmp_path: Path) -> None:
    """What compression made smaller could grow without bound; random bits it only wraps."""
    zeros = torch.zeros(700, 500)
    place = stock_with(tmp_path / "zeros", zeros, packed(archived(zeros), zipfile.ZIP_DEFLATED))
    with pytest.raises(FormatError, match="records are compressed, or overlap"):
        loaded(place, zeros)
    place = stock_with(tmp_path / "random", TENSOR, packed(archived(TENSOR), zipfile.ZIP_DEFLATED))
    with contextlib.suppress(FormatError):
        assert bits(loaded(place)) == bits(TENSOR)


def test_names_that_could_be_found_under_others() -> None:
    records = archived(TENSOR)
    records["data/a"] = b"x"
    with pytest.raises(FormatError, match="a record 'data/a'"):
        load_tensor_item(MemoryFile(packed(records)), fqn="t", url="u", key="k")


@pytest.mark.parametrize("shape", [(700 * 500,), (500, 700), (1, 700, 500), (699, 500)])
@pytest.mark.parametrize("small", [False, True])
def test_a_tensor_of_another_shape(tmp_path: Path, shape: tuple[int, ...], small: bool) -> None:
    divisor = 100 if small else 1  # small items are read as a whole
    value = TENSOR[:, : 500 // divisor].clone()
    other = torch.zeros(*(size // divisor if size in (500, 700 * 500) else size for size in shape))
    buffer = io.BytesIO()
    torch.save(other, buffer)
    with pytest.raises(FormatError, match="where the metadata says"):
        loaded(stock_with(tmp_path, value, buffer.getvalue()), value)


# -- objects -------------------------------------------------------------------------------------------


def _safe(records: dict[str, bytes]) -> Any:
    return torch.load(safe_object(MemoryFile(packed(records)), fqn="o", url="u", key="k"), weights_only=True)


def test_objects_come_through() -> None:
    for value in (
        [1, "x", b"y", None, 2.5],
        {"a": TENSOR[:3], "b": TENSOR[2:5]},
        bytes(5_000_000),
        set("ab"),
    ):
        found = _safe(archived(value))
        assert repr(found) == repr(value)


def test_an_object_that_asks_for_a_huge_tensor() -> None:
    """Memory nobody touches costs nothing, until somebody does."""
    records = archived([1])
    records["data.pkl"] = b"\x80\x02ctorch\nFloatTensor\nJ" + struct.pack("<i", (1 << 31) - 1) + b"\x85R."
    with pytest.raises((FormatError, UnsafeContent)) as caught:
        _safe(records)
    assert "calls torch.FloatTensor" in str(caught.value)


@pytest.mark.parametrize("hook", ["__reduce_ex__", "__reduce__", "__getstate__"])
def test_objects_with_hooks_of_pickling(hook: str) -> None:
    records = archived([1])
    name = b"X" + struct.pack("<I", len(hook)) + hook.encode()
    records["data.pkl"] = (
        b"\x80\x02ccollections\nOrderedDict\n)R}" + name + b"ctorch._utils\n_rebuild_tensor\nsb."
    )
    with pytest.raises(UnsafeContent, match="a hook of pickling"):
        _safe(records)


@pytest.mark.parametrize("data", [b"", b"x" * 1000, packed({"data.pkl": b"\x80\x02("}), packed({"x": b""})])
def test_objects_that_are_none(data: bytes) -> None:
    with pytest.raises((FormatError, UnsafeContent)) as caught:
        safe_object(MemoryFile(data), fqn="o", url="u", key="k")
    assert caught.value.key == "k"
    assert "\n" not in str(caught.value)


# -- stream extensions ---------------------------------------------------------------------------------


def _compressed(data: bytes) -> bytes:
    zstandard = pytest.importorskip("zstandard")
    compressor = zstandard.ZstdCompressor().compressobj()
    return bytes(compressor.compress(data) + compressor.flush())


def test_a_stream_that_expands_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = _compressed(bytes(64 << 20))
    assert len(bomb) < 10_000
    place = stock_with(tmp_path / "tensor", TENSOR, bomb, ["stream.zstd/1"])
    with pytest.raises(FormatError, match=r"'t' cannot be expanded: .* more than the \d+ bytes"):
        loaded(place)
    monkeypatch.setattr("ckpt.reading.loader._MAX_EXPANDED_BYTES", 32 << 20)
    place = stock_with(tmp_path / "object", [1], bomb, ["stream.zstd/1"])
    with pytest.raises(FormatError, match=r"'t' cannot be expanded: .* more than the 33554432 bytes"):
        loaded(place, [1])


@pytest.mark.parametrize("names", [["stream.other/1"], ["stream.zstd/9"], ["stream.zstd/1"] * 1000])
def test_extensions_that_cannot_be_had(tmp_path: Path, names: list[str]) -> None:
    item = io.BytesIO()
    torch.save(TENSOR, item)
    place = stock_with(tmp_path, TENSOR, item.getvalue(), names)
    with pytest.raises(FormatError, match=r"needs an extension .*stream|transformed 1000 times"):
        loaded(place)


def test_damaged_streams(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    torch.save(TENSOR, buffer)
    data = bytearray(_compressed(buffer.getvalue()))
    data[len(data) // 2 :] = b""
    with pytest.raises(CheckpointError, match="'t'"):
        loaded(stock_with(tmp_path, TENSOR, bytes(data), ["stream.zstd/1"]))


# -- what the records say ------------------------------------------------------------------------------


def _remanifest(place: Path, **changes: Any) -> None:
    """Change the manifest of a checkpoint of ours, and whatever vouches for it."""
    from ckpt.consistency.checksums import crc64nvme
    from ckpt.format.records import CommitRecord, decode_commit

    (path,) = place.glob("rank-00000/*.json")
    manifest = decode_manifest(path.read_bytes(), url="", key="")
    fields = {name: getattr(manifest, name) for name in manifest.__struct_fields__}
    data = encode(RankManifest(**(fields | changes)))
    path.write_bytes(data)
    commit = decode_commit((place / "commit.json").read_bytes(), url="", key="")
    fields = {name: getattr(commit, name) for name in commit.__struct_fields__}
    (ref,) = commit.manifests
    values = {name: getattr(ref, name) for name in ref.__struct_fields__}
    values |= {"size_bytes": len(data), "crc64nvme": f"{crc64nvme(data):016x}"}
    (place / "commit.json").write_bytes(
        encode(CommitRecord(**(fields | {"manifests": [type(ref)(**values)]})))
    )


def test_a_file_that_the_manifest_does_not_list(tmp_path: Path) -> None:
    ckpt.save({"t": TENSOR}, tmp_path)
    _remanifest(tmp_path, files=[], items=[])
    with pytest.raises(FormatError, match="does not list it") as caught:
        loaded(tmp_path)
    assert str(caught.value.key).endswith(".distcp")


def test_blocks_that_are_too_large(tmp_path: Path) -> None:
    ckpt.save({"t": TENSOR}, tmp_path)
    _remanifest(tmp_path, block_size_bytes=32 << 20)
    with pytest.raises(FormatError, match="a block size of 33554432 bytes"):
        loaded(tmp_path)


def test_a_file_that_got_shorter_names_the_range(tmp_path: Path) -> None:
    """An item that is read as a whole: its length is looked up before memory is set aside."""
    ckpt.save({"o": bytes(3_000_000)}, tmp_path)
    (path,) = tmp_path.rglob("*.distcp")
    with path.open("r+b") as file:
        file.truncate(1_000_000)
    with pytest.raises(Truncated) as caught:
        ckpt.load({"o": b""}, tmp_path)
    assert caught.value.start is not None
    assert caught.value.stop is not None
    assert caught.value.stop > 1_000_000
