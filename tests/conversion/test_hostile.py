"""`ckpt convert` on files that nobody should trust: one line of error, no code run, no path left, bounded memory."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pickle
import sys
import types
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.commands import run
from support.conversions import convert
from support.states import random_tensor
from support.tiers import examples
from test_streaming import peak_bytes

import ckpt
from ckpt.format.model_index import parse_model_index
from ckpt.stock.safetensors_format import DescribedTensor, encode_header, header_bytes, parse_header

MIB = 1 << 20


def entry(dtype: Any = "F32", shape: Any = (2,), places: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": places}


def file_of(header: Any, data: bytes = bytes(8), length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw + data


HEADERS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is an empty file"),
    "short": (b"\x08\0\0", "is not a valid safetensors file: it has only 3 bytes"),
    "huge header": (file_of({"a": entry()}, length=1 << 62), "a header of"),
    "header over all": (file_of({"a": entry()}, length=900), "a header of"),
    "no JSON": (file_of(b"{nothing"), "not valid JSON"),
    "no object": (file_of(b"[1,2]"), "not a JSON object"),
    "no UTF-8": (file_of(b'{"\xff": 1}'), "not UTF-8 text"),
    "deep": (file_of(b'{"a":' + b"[" * 90_000 + b"]" * 90_000 + b"}"), "nested"),
    "brackets": (file_of(b'{"a":[' + b"[]," * 2_000_000 + b"[]]}"), "far more lists"),
    "not described": (file_of({"a": [1]}), "not described"),
    "extra field": (file_of({"a": {**entry(), "more": 1}}), "not described"),
    "dtype": (file_of({"a": entry("F31")}), "the dtype 'F31'"),
    "dtype of a list": (file_of({"a": entry(["F32"])}), "dtype"),
    "shape": (
        file_of({"a": entry(shape=[1 << 61, 1 << 61])}),
        "data_offsets that do not fit its shape and dtype",
    ),
    "shape beyond": (file_of({"a": entry(shape=[1 << 70])}), "impossible shape"),
    "shape of nothing": (
        file_of({"a": entry(shape=[0, 1 << 61, 1 << 61], places=[0, 0])}, b""),
        "impossible shape",
    ),
    "negative shape": (file_of({"a": entry(shape=[-2])}), "impossible shape"),
    "bool shape": (file_of({"a": entry(shape=[True])}), "impossible shape"),
    "float shape": (file_of({"a": entry(shape=[2.0])}), "impossible shape"),
    "many dimensions": (file_of({"a": entry(shape=[1] * 99 + [2])}), "impossible shape"),
    "one offset": (file_of({"a": entry(places=[0])}), "impossible data_offsets"),
    "backwards": (file_of({"a": entry(places=[8, 0])}), "impossible data_offsets"),
    "too large": (file_of({"a": entry(shape=[3])}), "data_offsets that do not fit its shape and dtype"),
    "beyond": (file_of({"a": entry(shape=[4], places=[0, 16])}), "take 16 bytes"),
    "gap": (file_of({"a": entry(places=[8, 16])}, bytes(16)), "leaves a gap"),
    "tail": (file_of({"a": entry()}, bytes(9)), "but the data 9"),
    "overlap": (file_of({"a": entry(), "b": entry(places=[4, 12])}, bytes(12)), "overlaps"),
    "same place": (file_of({"a": entry(), "b": entry()}), "overlaps"),
    "twice": (file_of(b'{"a":%s,"a":%s}' % ((json.dumps(entry()).encode(),) * 2)), "comes twice"),
    "metadata": (
        file_of({"__metadata__": {"a": 1}, "a": entry()}),
        "__metadata__ in the header does not map to texts",
    ),
    "digits": (
        file_of(b'{"a":{"dtype":"F32","shape":[' + b"9" * 10_000 + b'],"data_offsets":[0,8]}}'),
        "safetensors",
    ),
}


@pytest.mark.parametrize("name", HEADERS)
def test_headers(name: str, tmp_path: Path) -> None:
    data, text = HEADERS[name]
    (tmp_path / "a.safetensors").write_bytes(data)
    error = convert(tmp_path / "a.safetensors", tmp_path / "b.pt", code=1)["error"]
    assert (error["type"], error["key"]) == ("FormatError", "a.safetensors")
    assert text in error["message"]
    assert len(error["message"]) < 500
    assert not (tmp_path / "b.pt").exists()


@pytest.mark.parametrize(
    "path", ["../secret.safetensors", "/etc/passwd", "a/../../b", "", "..", "sub/a.safetensors", 7, None]
)
def test_paths_of_an_index(path: Any, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    safetensors.torch.save_file({"w": torch.ones(2)}, tmp_path / "secret.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": path}}))
    error = convert(folder, tmp_path / "b.pt", code=1)["error"]
    assert (error["type"], error["key"]) == ("FormatError", "model.safetensors.index.json")
    assert "is not a name in this folder" in error["message"]


def test_an_index_and_its_files_disagree(tmp_path: Path) -> None:
    safetensors.torch.save_file({"w": torch.ones(2)}, tmp_path / "x.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    for files, code, text in [
        ({"w": "x.safetensors", "v": "x.safetensors"}, 1, "'v', which this file does not hold"),
        ({"w": "gone.safetensors"}, 3, "gone.safetensors"),
        ({}, 1, "no weight_map"),
    ]:
        index.write_text(json.dumps({"weight_map": files}))
        assert text in convert(tmp_path, tmp_path / "b.pt", code=code)["error"]["message"]
    index.write_text('{"weight_map": {"w": "x.safetensors", "w": "y.safetensors"}}')
    assert "comes twice" in convert(tmp_path, tmp_path / "b.pt", code=1)["error"]["message"]


@pytest.mark.long
def test_hostile_headers_take_little_memory(tmp_path: Path) -> None:
    for number, header in enumerate(
        (b"[]," * (10 << 20), b'"data_offsets",' * (1 << 20) + b"{}," * (3 << 20))
    ):
        (tmp_path / "a.safetensors").write_bytes(file_of(b'{"a":[' + header + b"0]}"))
        target = tmp_path / f"{number}.pt"
        code = (
            "try: ckpt.convert(sys.argv[1], sys.argv[2])\n"
            "except ckpt.errors.FormatError: pass\nelse: raise SystemExit('it worked')\n"
        )
        assert peak_bytes(tmp_path / "a.safetensors", target, code=code) < 620 * MIB


def test_more_names_than_any_model_has(tmp_path: Path) -> None:
    """A name and a text take five bytes, and two hundred in memory."""
    from ckpt.errors import FormatError

    names = b",".join(b'"%x":"a"' % n for n in range(800_000))
    with pytest.raises(FormatError, match="more names and values"):
        parse_model_index(b'{"weight_map":{%s}}' % names, url="u", key="k")
    with pytest.raises(ValueError, match="more names and values"):
        parse_header(b'{"__metadata__":{%s}}' % names, 8, 8)
    numbers = b",".join([b"1"] * (5 << 20))
    with pytest.raises(ValueError, match="more names and values"):
        parse_header(b'{"a":{"dtype":"F32","data_offsets":[0,0],"shape":[%s]}}' % numbers, 8, 8)


# -- fuzzing the header --------------------------------------------------------------------------------

_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 1 << 66)
    | st.floats()
    | st.sampled_from(["F32", "U8", "x", ""]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", "a"]), inner)
    ),
    max_leaves=8,
)
_places = st.lists(st.integers(0, 24), min_size=2, max_size=2)
_entries = st.builds(
    entry,
    st.sampled_from(["F32", "U8", "F64", "C64", "I4", "F4", "F6_E2M3"]),
    st.lists(st.integers(0, 4), max_size=3),
    _places,
)
_headers = st.dictionaries(st.sampled_from(["a", "b", "c", "__metadata__"]), _entries | _values, max_size=4)


@settings(max_examples=examples(600))
@given(_headers.map(lambda header: json.dumps(header).encode()) | st.binary(max_size=60), st.integers(0, 32))
@example(b"{}", 0)
@example(b'{"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}', 0)
@example(b"1", 0)
def test_headers_are_valid_or_refused(raw: bytes, data_bytes: int) -> None:
    """Nothing else than ValueError; and whatever is accepted, the library of the format reads in the same way."""
    try:
        header = parse_header(raw, 0, data_bytes)
    except ValueError:
        return
    found = header.tensors
    everything = [(t.first_byte, t.payload_bytes) for t in found.values()]
    everything += [(t.first_byte, t.payload_bytes) for t in header.unreadable.values()]
    end = 0
    for first_byte, payload_bytes in sorted(everything):
        assert first_byte == end
        end += payload_bytes
    assert end == data_bytes
    dtypes = {name: t.get("dtype") for name, t in json.loads(raw).items()}
    assert set(header.unreadable) == {name for name, dtype in dtypes.items() if dtype in {"I4", "F6_E2M3"}}
    if header.unreadable or "F4" in dtypes.values():  # the library has no such entry for torch
        return
    theirs = safetensors.torch.load(len(raw).to_bytes(8, "little") + raw + bytes(data_bytes))
    assert {name: (t.dtype, tuple(t.shape)) for name, t in theirs.items()} == {
        name: (stored.dtype, stored.shape) for name, stored in found.items()
    }


@settings(max_examples=examples(200))
@given(
    st.dictionaries(
        st.text(max_size=8).filter(lambda name: name != "__metadata__"),
        st.tuples(
            st.sampled_from([torch.float32, torch.uint8, torch.bfloat16, torch.float4_e2m1fn_x2]),
            st.lists(st.integers(0, 3), min_size=1, max_size=3),
        ),
        max_size=5,
    )
)
def test_headers_that_are_written_can_be_read(tensors: dict[str, Any]) -> None:
    try:
        raw = encode_header({name: DescribedTensor.of(*kind) for name, kind in tensors.items()})
    except UnicodeEncodeError:
        return
    length = header_bytes(raw, len(raw))
    assert length == len(raw) - 8
    size = sum(torch.empty(shape, dtype=dtype).nbytes for dtype, shape in tensors.values())
    found = parse_header(raw[8:], 8, 8 + size).tensors
    assert {name: (stored.dtype, list(stored.shape)) for name, stored in found.items()} == {
        name: (dtype, shape) for name, (dtype, shape) in tensors.items()
    }


@settings(max_examples=examples(200))
@given(st.binary(max_size=80) | _values.map(lambda value: json.dumps({"weight_map": value}).encode()))
def test_indexes_are_valid_or_refused(raw: bytes) -> None:
    from ckpt.errors import FormatError

    try:
        found = parse_model_index(raw, url="u", key="k")
    except FormatError:
        return
    assert all(
        isinstance(file, str) and "/" not in file and file not in ("", ".", "..") for file in found.values()
    )


# -- torch.save files ----------------------------------------------------------------------------------


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch exploded",)


def with_pickle(place: Path, edit: Callable[[bytes], bytes]) -> None:
    """A torch.save file whose pickle is another."""
    torch.save({"w": random_tensor(20)}, place)
    with zipfile.ZipFile(place) as archive:
        held = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(place, "w", zipfile.ZIP_STORED) as archive:
        for name, data in held.items():
            archive.writestr(name, edit(data) if name.endswith("data.pkl") else data)


def test_pickle_bombs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    place = tmp_path / "a.pt"
    torch.save({"w": random_tensor(3), "bomb": Bomb()}, place)
    assert convert(place, tmp_path / "b.pt", code=1)["error"]["type"] == "UnsafeContent"
    with_pickle(place, lambda data: pickle.dumps(Bomb(), 2))
    assert convert(place, tmp_path / "b.pt", code=1)["error"]["type"] == "UnsafeContent"
    place.write_bytes(pickle.dumps(Bomb()))
    assert convert(place, tmp_path / "b.pt", code=1)["error"]["type"] == "FormatError"
    assert not (tmp_path / "exploded").exists()


class Config(dict):  # type: ignore[type-arg]
    """As Lightning's hyper-parameters are, and those of many config libraries."""


class Model(torch.nn.Linear):
    """A module that is saved whole."""


def rebuilt(tensor: torch.Tensor) -> torch.Tensor:
    raise AssertionError("never called")


class Script:
    def __reduce__(self) -> Any:
        return eval, ("open('exploded', 'w')",)


class OwnTensor:
    def __reduce__(self) -> Any:
        return rebuilt, (torch.ones(2),)


def test_objects_of_unknown_classes_are_left_out_and_run_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    place = tmp_path / "a.pt"
    args = argparse.Namespace(lr=1e-3, out=Path("x"), inner=[Script()])
    weights = {"w": torch.arange(6.0)}
    torch.save({"model": weights, "args": args, "net": Model(2, 2), "list": [args, 3], "epoch": 7}, place)
    for options in (
        ["--weights-only"],
        ["--include", "model.*"],
        ["--exclude", "args*", "--exclude", "net", "--exclude", "list"],
    ):
        convert(place, tmp_path / f"{options[0]}.safetensors", *options)
        assert safetensors.torch.load_file(tmp_path / f"{options[0]}.safetensors")["model.w"].equal(
            weights["w"]
        )
    error = convert(place, tmp_path / "b.pt", code=1)["error"]
    assert (
        error["type"],
        "'args' is or holds an object of the class argparse.Namespace" in error["message"],
    ) == ("UnsafeContent", True)
    assert "--exclude 'args'" in error["message"]
    error = convert(place, tmp_path / "b.pt", "--include", "list", code=1)["error"]
    assert "argparse.Namespace" in error["message"]
    torch.save(Model(2, 2), place)
    error = convert(place, tmp_path / "b.pt", code=1)["error"]
    assert "Model, whose code is not run" in error["message"]
    torch.save(
        {"model": {"w": OwnTensor(), "v": torch.ones(2)}}, place
    )  # it may be a weight, so no option drops it
    error = convert(place, tmp_path / "b.pt", "--weights-only", code=1)["error"]
    assert (error["type"], "rebuilt" in error["message"]) == ("UnsafeContent", True)
    assert not (tmp_path / "exploded").exists()


def test_plain_values_of_known_classes_are_converted(tmp_path: Path) -> None:
    place = tmp_path / "a.pt"
    day = datetime.date(2026, 11, 28)
    config = Config(lr=np.float64(0.5), day=day, path=Path("x"), rows=(np.arange(3), torch.ones(2)))
    torch.save({"model": {"w": torch.arange(6.0)}, "config": config}, place)
    convert(place, tmp_path / "b")
    found: dict[str, Any] = {
        "model": {"w": torch.zeros(6)},
        "config": dict.fromkeys(("lr", "day", "path", "rows")),
    }
    ckpt.load(found, tmp_path / "b")
    assert found["model"]["w"].tolist() == [0, 1, 2, 3, 4, 5]
    lr, read_day, path, rows = found["config"].values()
    assert (type(lr), lr, read_day, path) == (np.float64, 0.5, day, Path("x"))
    assert (rows[0].tolist(), rows[1].tolist()) == ([0, 1, 2], [1, 1])


def test_many_unknown_names_and_shared_values_are_refused(tmp_path: Path) -> None:
    place = tmp_path / "a.pt"
    classes = [type(f"C{number}", (), {"__module__": "nowhere"}) for number in range(100)]
    module = types.ModuleType("nowhere")
    vars(module).update({kind.__name__: kind for kind in classes})
    with mock.patch.dict(sys.modules, {"nowhere": module}):
        torch.save({"w": torch.ones(2), **{kind.__name__: kind() for kind in classes}}, place)
    assert (
        "names 100 classes" in convert(place, tmp_path / "b.pt", "--weights-only", code=1)["error"]["message"]
    )
    shared = [None] * 20_000
    torch.save({"w": torch.ones(2), **{str(number): (shared,) for number in range(2_000)}}, place)
    assert (
        "very many times" in convert(place, tmp_path / "b.pt", "--weights-only", code=1)["error"]["message"]
    )


_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 4976698672\n"
_MISTAKEN = {
    "pointer of Git LFS": _POINTER,
    "page of a web server": b"\n<!DOCTYPE html><html><body>404 Not Found</body></html>\n",
    "is an empty file": b"",
}


@pytest.mark.parametrize("fault", _MISTAKEN)
def test_files_that_are_not_what_their_names_say(fault: str, tmp_path: Path) -> None:
    folders = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", ".metadata")
    for number, name in enumerate(folders):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / name).write_bytes(_MISTAKEN[fault])
        assert fault in convert(tmp_path / str(number), tmp_path / "out", code=1)["error"]["message"], name
    for name in ("a.pt", "a.safetensors", "a.model"):
        (tmp_path / name).write_bytes(_MISTAKEN[fault])
        assert fault in convert(tmp_path / name, tmp_path / "out", code=1)["error"]["message"], name
    for command in (["inspect"], ["verify"], ["cat", "w"]):
        ran = run(command[0], tmp_path / "0", *command[1:])
        assert fault in ran.out + ran.err, command


def test_a_pickle_that_claims_more_than_is_stored(tmp_path: Path) -> None:
    place = tmp_path / "a.pt"
    with_pickle(place, lambda data: data.replace(b"K\x14", b"J\xff\xff\xff\x7f"))
    error = convert(place, tmp_path / "b.pt", code=1)["error"]
    assert error["type"] in ("UnsafeContent", "FormatError")


def test_tensors_that_are_one_element_many_times(tmp_path: Path) -> None:
    """A view without steps costs nothing in memory, and petabytes when it is written out."""
    torch.save({"w": torch.zeros(1).expand(1 << 45)}, tmp_path / "a.pt")
    error = convert(tmp_path / "a.pt", tmp_path / "b.safetensors", code=1)["error"]
    assert (error["type"], "far more than are stored" in error["message"]) == ("UnsafeContent", True)
    torch.save({"w": torch.arange(4.0).expand(3, 4)}, tmp_path / "c.pt")
    convert(tmp_path / "c.pt", tmp_path / "d.pt")
    assert torch.load(tmp_path / "d.pt")["w"].tolist() == [[0.0, 1.0, 2.0, 3.0]] * 3


def _one_tensor_again_and_again(calls: int) -> bytes:
    """Five bytes of the pickle make one more view of the same byte."""

    def named(module: str, name: str) -> bytes:
        return b"c%s\n%s\n" % (module.encode(), name.encode())

    storage = (
        b"(X\x07\x00\x00\x00storage"
        + named("torch", "ByteStorage")
        + b"X\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x01tQ"
    )
    rebuild = named("torch._utils", "_rebuild_tensor_v2") + b"q\x00(" + storage + b"K\x00))\x89}tq\x01R"
    return b"\x80\x02}X\x01\x00\x00\x00a](" + rebuild + b"h\x00h\x01R" * calls + b"es."


@pytest.mark.parametrize("calls", [100, 20_000])
def test_one_tensor_again_and_again(calls: int, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        archive.writestr("archive/data.pkl", _one_tensor_again_and_again(calls))
        archive.writestr("archive/byteorder", b"little")
        archive.writestr("archive/data/0", b"\0")
        archive.writestr("archive/version", b"3\n")
    done = convert(tmp_path / "a.pt", tmp_path / "b.pt", code=int(calls > 100))
    if calls > 100:
        assert "grows far beyond what is stored" in done["error"]["message"]
    else:
        assert done["tensors"] == calls + 1


def test_what_is_no_state(tmp_path: Path) -> None:
    place, target = tmp_path / "a.pt", tmp_path / "b.pt"
    for value, text in [
        (torch.ones(3), "not a dict"),
        ([1, 2], "not a dict"),
        ({"a": {"b": 1}, "a.b": 2}, "flattened"),
    ]:
        torch.save(value, place)
        assert text in convert(place, target, code=1)["error"]["message"]
    torch.save({"w": torch.ones(3).to_sparse(), "v": torch.ones(2)}, place)
    error = convert(place, target, code=2)["error"]
    assert "'w' is" in error["message"]
    convert(place, target, "--exclude", "w")
    torch.save({"w": torch.as_strided(torch.arange(9.0), (4, 4), (1, 1))}, place)
    assert "overlap" in convert(place, tmp_path / "c.pt", code=2)["error"]["message"]


def test_damaged_archives(tmp_path: Path) -> None:
    place = tmp_path / "a.pt"
    torch.save({"w": random_tensor(2000), "v": [random_tensor(30)]}, place)
    whole = place.read_bytes()
    for number in range(60):
        stop = len(whole) * number // 60
        place.write_bytes(whole[:stop])
        assert convert(place, tmp_path / "b.pt", code=1)["error"]["type"] in ("FormatError", "UnsafeContent")
    with zipfile.ZipFile(place, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"x" * 100)
    assert convert(place, tmp_path / "b.pt", code=1)["error"]["type"] == "FormatError"


@settings(max_examples=examples(150))
@given(st.data())
def test_flipped_bits_in_a_torch_file(data: st.DataObject) -> None:
    """Whatever they do, it is the same file's tensors or one of our errors."""
    import tempfile

    from ckpt.conversion.convert import convert as work
    from ckpt.errors import CheckpointError

    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "a.pt"
        torch.save({"w": random_tensor(3, 2), "n": {"v": random_tensor(5).t(), "x": 3}}, place)
        raw = bytearray(place.read_bytes())
        for position in data.draw(st.lists(st.integers(0, len(raw) - 1), min_size=1, max_size=3)):
            raw[position] ^= 1 << data.draw(st.integers(0, 7))
        place.write_bytes(raw)
        kind: type | None = None
        try:
            work(place, f"{folder}/b.safetensors", overwrite=True)
        except CheckpointError as error:
            kind = type(error)
        assert kind is not CheckpointError, "something that nobody thought of"
