"""Every version reads what earlier ones wrote: checkpoints kept in `tests/data/`.

Run as a script, this file writes those of the present version: `PYTHONPATH=tests python tests/format/test_old_versions.py`.
A format change bumps the version, keeps the old folders, and adds a new one.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.states import bits, digest

import ckpt
from ckpt.consistency.seal import seal_json
from ckpt.errors import FormatError
from ckpt.format.records import (
    FORMAT_VERSION,
    MODEL_VERSION,
    REFERENCE_VERSION,
    decode_commit,
    decode_manifest,
)

DATA = Path(__file__).parents[1] / "data"


def kept_state() -> dict[str, Any]:
    """Made without random numbers, whose generators may change."""
    dtypes = [
        torch.float32,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.complex64,
        torch.int64,
        torch.uint8,
        torch.bool,
    ]
    return {
        "model": {
            str(dtype).removeprefix("torch."): torch.arange(12).reshape(3, 4).to(dtype) for dtype in dtypes
        },
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "transposed": torch.arange(20.0).reshape(4, 5).t(),
        "objects": {"step": 7, "name": "kept", "list": [1, 2.5, None, True], "nested": {"a": {"b": "c"}}},
    }


_KEPT = sorted(path.name for path in DATA.iterdir() if path.is_dir()) if DATA.is_dir() else []


@pytest.mark.parametrize("name", [name for name in _KEPT if name not in ("ckpt-v3", "ckpt-v4-base")])
def test_kept_checkpoints_load(name: str) -> None:
    expected = kept_state()
    loaded: dict[str, Any] = {
        "model": {key: torch.zeros(3, 4, dtype=value.dtype) for key, value in expected["model"].items()},
        "scalar": torch.tensor(0.0),
        "empty": torch.empty(0, 3),
        "transposed": torch.zeros(5, 4),
        "objects": {"step": 0, "name": "", "list": [], "nested": {"a": {"b": ""}}},
    }
    ckpt.load(loaded, DATA / name)
    assert loaded["objects"] == expected["objects"]
    for key, value in expected["model"].items():
        assert bits(loaded["model"][key]) == bits(value), key
    for key in ("scalar", "empty", "transposed"):
        assert bits(loaded[key]) == bits(expected[key])


def test_a_kept_checkpoint_refers_to_another() -> None:
    """Version 4 is that of those that refer, or may be referred to."""
    for name, owners in (("ckpt-v4", {"ckpt-v4-base"}), ("ckpt-v4-base", set[str]())):
        record = decode_commit((DATA / name / "commit.json").read_bytes(), url="", key="")
        assert record.version == REFERENCE_VERSION
        assert record.is_referable
        assert record.owners.keys() == owners
    manifests = [
        decode_manifest(path.read_bytes(), url="", key="")
        for path in (DATA / "ckpt-v4-base").glob("*/*.json")
    ]
    digests = [manifest.digest(number) for manifest in manifests for number in range(len(manifest.items))]
    assert sum(map(bool, digests)) == 10
    stored = {
        "scalar": torch.tensor(0.0),
        "objects": {"step": 0, "name": "", "list": [], "nested": {"a": {"b": ""}}},
    }
    ckpt.load(stored, DATA / "ckpt-v4-base")
    assert stored["scalar"] == 3.5


def test_a_kept_signature_is_still_right() -> None:
    """Digests and signatures are no version of their own: who does not know them ignores them."""
    name, public = f"ckpt-v{FORMAT_VERSION}-signed", DATA / f"ckpt-v{FORMAT_VERSION}-signed.pub.pem"
    result = ckpt.verify_signed(DATA / name, public)
    assert (result.ok, result.checkpoints[0].checked_bytes > 0) == (True, True)
    digest = "sha256:d6403c5c8ece4008c83fa504daf2a171b08cdee2cf55978de231000f7f955b4f"
    assert ckpt.verify(DATA / name, expect=digest).block_digests == "sha256"
    record = decode_commit((DATA / name / "commit.json").read_bytes(), url="", key="")
    assert record.version == FORMAT_VERSION


def kept_model() -> dict[str, torch.Tensor]:
    state = kept_state()
    model: dict[str, torch.Tensor] = state["model"]
    return model | {name: state[name] for name in ("scalar", "empty", "transposed")}


def test_a_kept_model_loads() -> None:
    """Version 3 is that of models alone."""
    expected = kept_model()
    loaded = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    ckpt.load(loaded, DATA / "ckpt-v3")
    assert digest(loaded) == digest(expected)
    assert ckpt.verify(DATA / "ckpt-v3").damages == []
    manifests = [*(DATA / "ckpt-v3").glob("rank-00000/*.json")]
    for record in (DATA / "ckpt-v3" / "commit.json", *manifests):
        # A reader of version 2 looks at this member first, and refuses.
        assert json.loads(record.read_text())["version"] == MODEL_VERSION


@pytest.mark.parametrize("change", [{"layout": "other"}, {"layout": 3}, {"version": 2}, {"version": 4}])
def test_a_layout_that_is_not_known_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    shutil.copytree(DATA / "ckpt-v3", tmp_path / "c")
    record = json.loads((tmp_path / "c" / "commit.json").read_text())
    del record["crc64nvme"]
    (tmp_path / "c" / "commit.json").write_bytes(seal_json(json.dumps(record | change).encode()))
    with pytest.raises(FormatError):
        ckpt.load({"scalar": torch.tensor(0.0)}, tmp_path / "c")


def test_the_records_of_a_model_are_what_the_specification_shows(tmp_path: Path) -> None:
    ckpt.save({"t": torch.arange(6.0), "e": torch.empty(0)}, tmp_path, format="safetensors")
    commit = json.loads((tmp_path / "commit.json").read_text())
    assert (commit["version"], commit["layout"]) == (3, "safetensors")
    token = commit["id"]
    (ref,) = commit["manifests"]
    assert ref["path"] == f"rank-00000/{token}.json"
    manifest = json.loads((tmp_path / ref["path"]).read_text())
    (file,) = manifest["files"]
    assert file["path"] == f"model-{token}-00001-of-00001.safetensors"
    header = 8 + int.from_bytes((tmp_path / file["path"]).read_bytes()[:8], "little")
    assert header % 64 == 0
    by_name = {item[0]: item[1:] for item in manifest["items"]}
    assert by_name == {"t": [[0], 0, header, 24, header, 24], "e": [[0], 0, 0, 0, 0, 0]}
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == dict.fromkeys(("e", "t"), file["path"])
    assert index["metadata"] == {"total_parameters": 6, "total_size": 24}


def test_there_is_one_of_the_present_version() -> None:
    names = {path.name for path in DATA.iterdir()}
    assert {f"ckpt-v{version}" for version in (FORMAT_VERSION, MODEL_VERSION, REFERENCE_VERSION)} <= names
    assert any(name.startswith("torch-") for name in names)


def test_the_records_are_what_the_specification_shows(tmp_path: Path) -> None:
    """Field by field: whoever changes one of these changes the format."""
    ckpt.save({"t": torch.arange(6.0).reshape(2, 3), "o": 1}, tmp_path, tags={"a": "b"})
    commit = json.loads((tmp_path / "commit.json").read_text())
    assert list(commit) == [
        "format", "version", "id", "created_at", "library", "torch", "world_size", "data_bytes",
        "index", "manifests", "tags", "timings", "content", "crc64nvme",
    ]  # fmt: skip
    packed_ms, retries = commit["timings"]
    assert (len(base64.b64decode(packed_ms)), retries) == (4 * (3 + 1), [])
    assert (commit["format"], commit["version"], commit["world_size"]) == ("ckpt-storage", 2, 1)
    assert {name: [*part] for name, part in commit["content"].items()} == {
        "": ["tensors", "elements", "names", "values", "looked_at"]
    }
    (ref,) = commit["manifests"]
    assert list(ref) == ["path", "size_bytes", "crc64nvme", "rank", "files", "items", "data_bytes"]
    assert list(commit["index"]) == ["path", "size_bytes", "crc64nvme"]
    token = commit["id"]
    assert ref["path"] == f"rank-00000/{token}.json"
    assert commit["index"]["path"] == f"rank-00000/{token}.index"
    manifest = json.loads((tmp_path / ref["path"]).read_text())
    assert list(manifest) == [
        "format", "version", "rank", "token", "block_size_bytes", "files", "items", "crc64nvme",
    ]  # fmt: skip
    assert manifest["block_size_bytes"] == 1 << 19
    (file,) = manifest["files"]
    assert list(file) == ["path", "size_bytes", "blocks"]
    assert file["path"] == f"rank-00000/{token}-0.distcp"
    by_name = {item[0]: item for item in manifest["items"]}
    assert by_name["o"][1:4] == [None, 0, 0]
    assert by_name["o"][5:] == [-1, 0]
    fqn, offsets, number, offset, length, payload_offset, payload_bytes = by_name["t"]
    assert (fqn, offsets, number, payload_bytes) == ("t", [0, 0], 0, 24)
    assert offset % 64 == payload_offset % 64 == 0
    data = (tmp_path / file["path"]).read_bytes()
    assert data[payload_offset : payload_offset + 24] == bits(torch.arange(6.0))
    assert offset + length <= len(data) == file["size_bytes"]
    assert str(tmp_path).encode() not in (tmp_path / ".metadata").read_bytes()
    decode_manifest((tmp_path / ref["path"]).read_bytes(), url="", key="")


def test_records_are_first_read_by_many_threads() -> None:
    """As in a load, where msgspec once met a class in two threads at a time, and crashed."""
    code = """if True:
        import pathlib, sys, threading
        from ckpt.format.records import decode_commit, decode_manifest
        sys.setswitchinterval(1e-6)
        place = pathlib.Path(sys.argv[1])
        commit, (manifest, *_) = (place / "commit.json").read_bytes(), sorted(place.glob("rank-*/*.json"))
        data = manifest.read_bytes()
        barrier = threading.Barrier(16)
        def read():
            barrier.wait()
            decode_manifest(data, url="", key="")
            decode_commit(commit, url="", key="")
        threads = [threading.Thread(target=read) for _ in range(16)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
    """
    for _ in range(5):
        subprocess.run([sys.executable, "-c", code, str(DATA / "ckpt-v1")], check=True)


def test_a_damaged_kept_checkpoint_does_not_load(tmp_path: Path) -> None:
    place = tmp_path / "c"
    shutil.copytree(DATA / "ckpt-v1", place)
    (path,) = place.rglob("*.distcp")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ckpt.errors.IntegrityError):
        ckpt.load({"scalar": torch.tensor(0.0), "transposed": torch.zeros(5, 4)}, place)


def _write_signed() -> None:
    from support.signing import keys

    name = f"ckpt-v{FORMAT_VERSION}-signed"
    ckpt.save(kept_state(), name, block_digests="sha256", overwrite=False, no_dist=True)
    private, public = keys(Path("."), name)  # which nobody keeps
    print("wrote", name, ckpt.sign(name, private).digest)
    private.unlink()
    assert public.exists()


def _write() -> None:
    warnings.simplefilter("ignore")
    DATA.mkdir(exist_ok=True)
    os.chdir(DATA)  # stock PyTorch stores the path it was given
    _write_signed()
    base = f"ckpt-v{REFERENCE_VERSION}-base"
    ckpt.save({**kept_state(), "scalar": torch.tensor(3.5)}, base, digests=True, overwrite=False)
    ckpt.save(kept_state(), f"ckpt-v{REFERENCE_VERSION}", base=base, overwrite=False)
    for name, writer in (
        (f"ckpt-v{FORMAT_VERSION}", ckpt.CheckpointWriter),
        (f"torch-{torch.__version__.split('+')[0]}", dcp.FileSystemWriter),
    ):
        if Path(name).exists():
            sys.exit(f"{name} exists; kept checkpoints are never rewritten")
        dcp.save(kept_state(), storage_writer=writer(name))
        print("wrote", name)
    ckpt.save(
        kept_model(), f"ckpt-v{MODEL_VERSION}", format="safetensors", max_shard_size="200", overwrite=False
    )


if __name__ == "__main__":
    _write()
