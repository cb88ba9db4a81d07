"""Elements of four and six bits: safetensors packs them; torch has `float4_e2m1fn_x2`, of which a byte is two."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from support.states import bits, random_tensor
from torch.distributed.checkpoint.api import CheckpointException

import ckpt
from ckpt.errors import ConfigurationError, FormatError

F4 = torch.float4_e2m1fn_x2
E8M0 = torch.float8_e8m0fnu

pytestmark = pytest.mark.filterwarnings("ignore")


def state() -> dict[str, torch.Tensor]:
    """A quantized model by parts: packed values, and a scale for each of their blocks."""
    return {
        "a.qdata": random_tensor(6, 8, dtype=F4),
        "a.scale": random_tensor(6, 1, dtype=E8M0),
        "b.qdata": random_tensor(2, 3, 5, dtype=F4),
        "c.empty": torch.empty(4, 0, dtype=F4),
        "d.weight": random_tensor(3, 3, dtype=torch.bfloat16),
        "e.line": random_tensor(7, dtype=F4),
    }


def emptied() -> dict[str, torch.Tensor]:
    return {
        name: torch.full_like(tensor.view(torch.uint8), 0x5A).view(tensor.dtype)
        for name, tensor in state().items()
    }


def same(found: dict[str, torch.Tensor]) -> bool:
    expected = state()
    return found.keys() == expected.keys() and all(
        (found[name].dtype, found[name].shape, bits(found[name]))
        == (tensor.dtype, tensor.shape, bits(tensor))
        for name, tensor in expected.items()
    )


def header_of(place: Path) -> dict[str, Any]:
    raw = place.read_bytes()
    header: dict[str, Any] = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    return header


def run(*arguments: object) -> str:
    code = "from ckpt.cli import main; main()"
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# -- files of safetensors ------------------------------------------------------------------------------


def test_a_folder_of_others_loads(tmp_path: Path) -> None:
    save_file(state(), tmp_path / "model.safetensors")
    assert header_of(tmp_path / "model.safetensors")["a.qdata"]["shape"] == [6, 16]
    loaded = emptied()
    ckpt.load(loaded, tmp_path)
    assert same(loaded)
    again = emptied()
    dcp.load(again, storage_reader=ckpt.CheckpointReader(tmp_path), no_dist=True)
    assert same(again)
    assert "float4_e2m1fn_x2" in run("inspect", tmp_path)
    assert ckpt.verify(tmp_path).ok


def test_a_model_that_others_read(tmp_path: Path) -> None:
    """Shapes in the header count elements, as safetensors counts them."""
    ckpt.save(state(), tmp_path, format="safetensors")
    (file,) = tmp_path.glob("*.safetensors")
    assert same(load_file(file))
    with safetensors.safe_open(file, "pt") as opened:
        assert opened.get_slice("b.qdata").get_shape() == [2, 3, 10]
    loaded = emptied()
    ckpt.load(loaded, tmp_path)
    assert same(loaded)
    assert ckpt.verify(tmp_path).ok


def test_a_single_packed_element_has_no_place_in_safetensors(tmp_path: Path) -> None:
    single = {"s": torch.tensor(3, dtype=torch.uint8).view(F4)}
    with pytest.raises(ConfigurationError, match="'s' is a single float4_e2m1fn_x2"):
        ckpt.save(single, tmp_path / "model", format="safetensors")
    ckpt.save(single, tmp_path / "c")
    with pytest.raises(ConfigurationError, match=r"'s' is a single float4_e2m1fn_x2.*--exclude"):
        ckpt.convert(tmp_path / "c", tmp_path / "converted", to="safetensors")
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("way", ["ckpt", "dcp", "torch", "safetensors"])
def test_conversions_both_ways(tmp_path: Path, way: str) -> None:
    save_file(state(), tmp_path / "model.safetensors")
    middle = tmp_path / ("middle.pt" if way == "torch" else "middle")
    ckpt.convert(tmp_path / "model.safetensors", middle, to=way)  # type: ignore[arg-type]
    if way in ("ckpt", "dcp"):
        loaded = emptied()
        ckpt.load(loaded, middle)
        assert same(loaded)
    if way == "torch":
        assert same(torch.load(middle, weights_only=True))
    ckpt.convert(middle, tmp_path / "back.safetensors", to="safetensors", dtype="float32")
    back = load_file(tmp_path / "back.safetensors")
    assert back["d.weight"].dtype == torch.float32  # and nothing else is cast
    assert same({**back, "d.weight": back["d.weight"].bfloat16()})


@pytest.mark.parametrize("save", [ckpt.save, ckpt.async_save])
def test_our_own_format(tmp_path: Path, save: Any) -> None:
    saved = save(state(), tmp_path)
    if save is ckpt.async_save:
        saved.result()
    loaded = emptied()
    ckpt.load(loaded, tmp_path)
    assert same(loaded)
    stock = emptied()
    dcp.load(stock, checkpoint_id=tmp_path, no_dist=True)
    assert same(stock)


@pytest.mark.parametrize("format", ["ckpt", "safetensors"])
def test_a_load_into_another_dtype_is_refused(tmp_path: Path, format: Any) -> None:
    """torch has no values of packed elements."""
    kept = {"a": state()["a.qdata"], "w": torch.ones(2, 8)}
    ckpt.save(kept, tmp_path, format=format)
    for target in ({"a": torch.zeros(6, 8)}, {"w": torch.zeros(2, 8, dtype=torch.uint8).view(F4)}):
        (name,) = target
        with pytest.raises(ckpt.errors.CheckpointError, match=f"'{name}'.*float4_e2m1fn_x2"):
            ckpt.load(target, tmp_path)


# -- tensors that torch cannot hold --------------------------------------------------------------------

UNREADABLE: dict[str, Any] = {
    "q6": {"dtype": "F6_E2M3", "shape": [2, 4], "data_offsets": [0, 6]},
    "odd": {"dtype": "F4", "shape": [4, 3], "data_offsets": [6, 12]},
    "six": {"dtype": "F6_E3M2", "shape": [8], "data_offsets": [20, 26]},
}


def write_unreadable(place: Path) -> bytes:
    header = {**UNREADABLE, "w": {"dtype": "F32", "shape": [2], "data_offsets": [12, 20]}}
    raw = json.dumps(header).encode()
    data = bytes(range(12)) + bytes(bytearray(torch.ones(2).numpy().tobytes())) + bytes(range(50, 56))
    place.write_bytes(len(raw).to_bytes(8, "little") + raw + data)
    return data


def test_bytes_of_what_torch_cannot_hold(tmp_path: Path) -> None:
    data = write_unreadable(tmp_path / "model.safetensors")
    assert ckpt.verify(tmp_path).ok
    shown = run("inspect", tmp_path)
    assert all(name in shown for name in UNREADABLE)
    ckpt.convert(
        tmp_path, tmp_path / "copy.safetensors", to="safetensors", rename=[("^", "m.")], dtype="bfloat16"
    )
    raw = (tmp_path / "copy.safetensors").read_bytes()
    start, copied = 8 + int.from_bytes(raw[:8], "little"), header_of(tmp_path / "copy.safetensors")
    for name, described in UNREADABLE.items():
        found = copied[f"m.{name}"]
        assert (found["dtype"], found["shape"]) == (described["dtype"], described["shape"])
        begin, end = described["data_offsets"]
        first, last = (start + offset for offset in found["data_offsets"])
        assert raw[first:last] == data[begin:end]
    with safetensors.safe_open(tmp_path / "copy.safetensors", "pt") as opened:
        assert opened.get_slice("m.q6").get_shape() == [2, 4]


@pytest.mark.parametrize("name", list(UNREADABLE))
def test_loads_and_conversions_refuse_them_by_name(tmp_path: Path, name: str) -> None:
    write_unreadable(tmp_path / "model.safetensors")
    message = rf"'{name}' has the dtype '{UNREADABLE[name]['dtype']}'"
    loaded = {"w": torch.zeros(2)}
    ckpt.load(loaded, tmp_path)
    assert loaded["w"].tolist() == [1.0, 1.0]
    with pytest.raises(FormatError, match=message):
        ckpt.load({name: torch.zeros(4)}, tmp_path)
    with pytest.raises(CheckpointException, match=message):
        dcp.load({name: torch.zeros(4)}, storage_reader=ckpt.CheckpointReader(tmp_path))
    others = [other for other in UNREADABLE if other != name]
    for to in ("ckpt", "dcp", "torch"):
        place = tmp_path / f"{to}.pt"
        with pytest.raises(FormatError, match=f"{message}.*--exclude it"):
            ckpt.convert(tmp_path, place, to=to, exclude=others)
        assert not place.exists()
    ckpt.convert(tmp_path, tmp_path / "rest", to="ckpt", exclude=[*UNREADABLE])
    ckpt.load(loaded, tmp_path / "rest")
