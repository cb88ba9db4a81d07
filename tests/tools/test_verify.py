"""`ckpt verify`: find and name every kind of damage, and nothing else."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import pickle
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.commands import (
    Ran,
    edit_commit,
    edit_index,
    edit_manifest,
    flip,
    options_of,
    run,
    run_json,
    run_process,
    sharded_checkpoint,
)
from support.servers import ACCESS_KEY, SECRET_KEY, S3Server
from support.states import random_tensor

import ckpt
from ckpt.backends import memory
from ckpt.backends.posix import PosixStore
from ckpt.consistency.seal import seal_pickle
from ckpt.errors import CommitConflict, NotFound
from ckpt.format.columns import Columns, TensorColumns
from ckpt.format.records import decode_manifest


@pytest.fixture
def place(sharded_place: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sharded_place, tmp_path / "step-100"))


@pytest.fixture
def stock(stock_place: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stock_place, tmp_path / "stock"))


def verify(place: Path | str, *more: str, code: int = 1) -> dict[str, Any]:
    report = run_json("verify", place, *more, code=code)
    assert report["ok"] == (code == 0)
    return report


def only_damage(place: Path | str, *more: str) -> dict[str, Any]:
    damage: dict[str, Any]
    (damage,) = verify(place, *more)["damages"]
    return damage


def manifest_of(place: Path, rank: int = 0) -> Any:
    (path,) = (place / f"rank-{rank:05d}").glob("*.json")
    return decode_manifest(path.read_bytes(), url="", key=path.name)


def stored(place: Path, fqn: str) -> tuple[Any, Any]:
    """Return the manifest and the item of a tensor, whichever rank wrote it."""
    for folder in place.glob("rank-*"):
        manifest = manifest_of(place, int(folder.name[5:]))
        for item in manifest.items:
            if item.fqn == fqn:
                return manifest, item
    raise AssertionError(fqn)


# -- whole ones ----------------------------------------------------------------------------------------


def test_whole(place: Path) -> None:
    data_bytes = sum(path.stat().st_size for path in place.rglob("*.distcp"))
    for more, nbytes in ([], data_bytes), (["--quick"], 0):
        report = verify(place, *more, code=0)
        files = len(list(place.rglob("*.distcp")))
        assert (report["checked_files"], report["checked_bytes"]) == (files, nbytes)
        assert (report["damages"], report["strays"], report["format"]) == ([], [], "ckpt-storage")
        assert report["id"] == json.loads((place / "commit.json").read_text())["id"]


@pytest.mark.long
def test_verify_as_a_user(place: Path) -> None:
    ran = run_process("verify", place)
    assert ran.code == 0, ran.err
    assert ran.out.startswith("ok: ")
    assert ran.err == ""
    flip(next(place.rglob("*.distcp")), 5000)
    ran = run_process("verify", place, "--quick")
    assert ran.code == 0, ran.err
    ran = run_process("verify", place)
    assert ran.code == 1
    assert "do not match their checksum" in ran.out
    assert "\x1b" not in ran.out + ran.err


def test_verify_on_s3(s3: S3Server) -> None:
    url = f"s3://{s3.new_bucket()}/run/step-100"
    sharded_checkpoint(url, s3.options)
    assert verify(url, *options_of(s3.options), code=0)["checked_bytes"] > 1_000_000
    client, bucket = s3.client(), url.split("/")[2]
    keys = [stat["Key"] for stat in client.list_objects_v2(Bucket=bucket)["Contents"]]
    key = next(key for key in keys if "distcp" in key)
    data = bytearray(client.get_object(Bucket=bucket, Key=key)["Body"].read())
    data[-1] ^= 1
    client.put_object(Bucket=bucket, Key=key, Body=bytes(data))
    client.create_multipart_upload(Bucket=bucket, Key="run/step-100/rank-00000/0123456789abcdef-0.distcp")
    report = verify(url, *options_of(s3.options))
    assert [damage["kind"] for damage in report["damages"]] == ["checksum"]
    assert key.endswith(report["damages"][0]["key"])
    assert [(s["key"], s["ours"], s["unfinished"]) for s in report["strays"]] == [
        ("rank-00000/0123456789abcdef-0.distcp", True, True)
    ]


def test_the_function_behind_it(place: Path) -> None:
    seen: list[tuple[int, int]] = []
    report = ckpt.verify(place, progress=lambda done, total: seen.append((done, total)))
    assert report.ok
    assert seen[-1] == (report.checked_bytes, report.checked_bytes)


def test_replaced_while_it_is_verified(place: Path) -> None:
    """Files that are missing then are not damage."""

    def replace(done: int, total: int) -> None:
        ckpt.save({"t": torch.ones(3)}, place)

    with pytest.raises(CommitConflict, match="verify again"):
        ckpt.verify(place, progress=replace)


def test_a_read_damaged_on_its_way_is_repeated(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = PosixStore.read_into
    reads: dict[str, list[int]] = {}

    def read_into(self: PosixStore, key: str, offset: int, buffers: Any) -> None:
        before = reads.setdefault(key, [])
        before.append(offset)
        is_damaged = key.endswith(".distcp") and before == [0]
        if is_damaged:
            flip(place / key, 0)
        original(self, key, offset, buffers)
        if is_damaged:
            flip(place / key, 0)

    monkeypatch.setattr(PosixStore, "read_into", read_into)
    verify(place, "--threads", "1", code=0)
    files = [offsets for key, offsets in reads.items() if key.endswith(".distcp")]
    assert files
    assert all(offsets.count(0) == 2 for offsets in files)


# -- damaged data --------------------------------------------------------------------------------------


@pytest.mark.parametrize("flips", [10, pytest.param(40, marks=pytest.mark.long)])
def test_every_byte_is_checked(flips: int, tmp_path: Path) -> None:
    """One flipped bit anywhere in a small checkpoint, whatever it is part of."""
    place = tmp_path / "c"
    ckpt.save({"t": random_tensor(5, 7), "o": [1, 2]}, place)
    for path in [path for path in place.rglob("*") if path.is_file()]:
        data = path.read_bytes()
        for position in range(0, len(data), max(1, len(data) // flips)):
            flip(path, position)
            damages = verify(place)["damages"]
            key = path.relative_to(place).as_posix()
            assert key in {damage["key"] for damage in damages}, (key, position, damages)
            path.write_bytes(data)
    verify(place, code=0)


def test_a_flipped_bit_names_file_tensor_and_bytes(place: Path) -> None:
    manifest, item = stored(place, "large")
    path = manifest.files[item.file].path
    position = item.payload_offset + item.payload_bytes // 2
    flip(place / path, position)
    damage = only_damage(place)
    assert (damage["kind"], damage["key"]) == ("checksum", path)
    assert damage["start"] <= position < damage["stop"] <= damage["start"] + manifest.block_size_bytes
    assert "large" in damage["fqns"]


def test_damaged_neighbours_are_one_damage(place: Path) -> None:
    manifest, item = stored(place, "large")
    path = manifest.files[item.file].path
    data = bytearray((place / path).read_bytes())
    start, stop = item.payload_offset, item.payload_offset + item.payload_bytes
    data[start:stop] = bytes(stop - start)
    (place / path).write_bytes(data)
    damage = only_damage(place)
    assert damage["start"] <= start < stop <= damage["stop"]


def test_a_short_file(place: Path) -> None:
    manifest = manifest_of(place)
    record = manifest.files[0]
    data = (place / record.path).read_bytes()
    (place / record.path).write_bytes(data[:-1000])
    for more in [], ["--quick"]:
        damages = verify(place, *more)["damages"]
        assert damages[0]["kind"] == "size"
        assert (damages[0]["start"], damages[0]["stop"]) == (len(data) - 1000, len(data))
        last = max((i for i in manifest.items if i.file == 0), key=lambda i: i.offset)
        assert last.fqn in damages[0]["fqns"]


def test_a_long_file(place: Path) -> None:
    path = next(place.rglob("*.distcp"))
    path.write_bytes(path.read_bytes() + b"x")
    assert only_damage(place, "--quick")["kind"] == "size"


def test_a_missing_file(place: Path) -> None:
    manifest = manifest_of(place, 1)
    (place / manifest.files[0].path).unlink()
    damage = only_damage(place)
    assert (damage["kind"], damage["key"]) == ("missing", manifest.files[0].path)
    assert damage["fqn_count"] == len({item.fqn for item in manifest.items if item.file == 0})
    assert len(damage["fqns"]) == min(20, damage["fqn_count"])


def test_a_file_that_is_a_link_out(place: Path, tmp_path: Path) -> None:
    path = next(place.rglob("*.distcp"))
    path.rename(tmp_path / "outside")
    path.symlink_to(tmp_path / "outside")
    damage = only_damage(place)
    assert "leads out" in damage["message"]


# -- damaged records -----------------------------------------------------------------------------------


def test_a_missing_manifest(place: Path) -> None:
    (path,) = (place / "rank-00001").glob("*.json")
    fqns = {item.fqn for item in manifest_of(place, 1).items}
    path.unlink()
    damages = verify(place)["damages"]
    assert (damages[0]["kind"], damages[0]["key"]) == ("missing", path.relative_to(place).as_posix())
    assert damages[0]["fqn_count"] == len(fqns)


def test_a_damaged_index_does_not_hide_damaged_data(place: Path) -> None:
    (path,) = place.rglob("*.index")
    flip(path, 100)
    data = next(place.rglob("*.distcp"))
    flip(data, 100_000)
    keys = {damage["key"] for damage in verify(place)["damages"]}
    assert keys == {path.relative_to(place).as_posix(), data.relative_to(place).as_posix()}


def test_a_damaged_commit(place: Path) -> None:
    flip(place / "commit.json", 60)
    damage = only_damage(place)
    assert (damage["kind"], damage["key"]) == ("record", "commit.json")
    assert "the storage did not list" not in run("verify", place).out


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("gap", "[383:384, 0:300] is not stored"),
        ("overlap", "[384:385, 0:300] is stored 2 times"),
        ("outside", "[768:773, 0:300] is not stored"),
        ("nothing", "nothing of it is stored"),
    ],
)
def test_coverage(place: Path, fault: str, message: str) -> None:
    def edit(columns: Columns) -> None:
        rows = columns.entries["sharded.rows"]
        assert isinstance(rows, TensorColumns)
        sizes, size = rows.sizes.copy(), rows.size
        if fault == "gap":
            sizes[0, 0] -= 1
        elif fault == "overlap":
            sizes[0, 0] += 1
        elif fault == "outside":
            size = (rows.size[0] + 5, rows.size[1])
        else:
            sizes[:, 1] = 0
        columns.entries["sharded.rows"] = dataclasses.replace(rows, sizes=sizes, size=size)

    edit_index(place, edit)
    damages = verify(place, "--quick")["damages"]
    (damage,) = [damage for damage in damages if damage["kind"] == "coverage"]
    assert damage["fqns"] == ["sharded.rows"]
    assert message in damage["message"]


def test_index_and_manifests_that_disagree(place: Path) -> None:
    def edit(columns: Columns) -> None:
        large = columns.entries["large"]
        assert isinstance(large, TensorColumns)
        columns.entries["large"] = dataclasses.replace(large, offset=large.offset + 64)

    edit_index(place, edit)
    kinds = {damage["kind"] for damage in verify(place, "--quick")["damages"]}
    assert kinds == {"disagreement"}


def test_a_file_in_no_manifest(place: Path) -> None:
    (path,) = (place / "rank-00001").glob("*.json")

    def drop(record: dict[str, Any]) -> None:
        record["manifests"] = [ref for ref in record["manifests"] if ref["rank"] == 0]

    edit_commit(place, drop)
    assert {(damage["kind"], damage["key"]) for damage in verify(place)["damages"]} == {
        ("disagreement", path.relative_to(place).as_posix().replace(".json", "-0.distcp"))
    }


def test_a_manifest_that_names_what_it_must_not(place: Path) -> None:
    """Valid seals, hostile content: the files of another place."""

    def edit(manifest: dict[str, Any]) -> None:
        manifest["files"][0]["path"] = "../../outside"

    edit_manifest(place, edit)
    damages = verify(place)["damages"]
    assert damages[0]["kind"] == "record"
    assert "outside of the checkpoint" in damages[0]["message"]


@pytest.mark.parametrize("fault", ["missing", "flipped", "other", "unsealed"])
def test_the_metadata_of_stock_readers(place: Path, tmp_path: Path, fault: str) -> None:
    path = place / ".metadata"
    if fault == "missing":
        path.unlink()
    elif fault == "flipped":
        flip(path, 1000)
    elif fault == "unsealed":
        path.write_bytes(pickle.dumps(pickle.loads(path.read_bytes())))
    else:
        ckpt.save({"t": torch.ones(3)}, tmp_path / "other")
        path.write_bytes((tmp_path / "other" / ".metadata").read_bytes())
    # A save that was killed right after its commit leaves no `.metadata`, or that of the one before.
    is_late = fault in ("missing", "other")
    report = verify(place, code=0 if is_late else 1)
    (found,) = report["warnings" if is_late else "damages"]
    assert report["damages" if is_late else "warnings"] == []
    assert (found["kind"], found["key"]) == ("stock_metadata", ".metadata")
    assert ".metadata" not in found["message"]  # the key stands before it
    assert ("`ckpt gc` writes the right one" in found["message"]) == is_late
    assert ("warning: .metadata: " in run("verify", place).out) == is_late
    if fault == "other":
        assert {"t", "large"} & set(found["fqns"])


def test_equal_metadata_in_other_bytes_is_fine(place: Path) -> None:
    path = place / ".metadata"
    path.write_bytes(seal_pickle(pickle.dumps(pickle.loads(path.read_bytes()))))
    verify(place, code=0)


def test_strays(place: Path) -> None:
    (place / "rank-00000" / "0123456789abcdef-0.distcp").write_bytes(b"left")
    (place / "rank-00000" / ".0123456789abcdef-1.distcp.0123456789abcdef.ckpt-tmp").write_bytes(b"half")
    (place / "notes.txt").write_bytes(b"mine")
    strays = verify(place, code=0)["strays"]
    assert sorted((s["key"], s["ours"], s["unfinished"]) for s in strays) == [
        ("notes.txt", False, False),
        ("rank-00000/0123456789abcdef-0.distcp", True, False),
        ("rank-00000/0123456789abcdef-1.distcp", True, True),
    ]
    assert "harmless" in run("verify", place).out
    assert (place / "notes.txt").exists()


# -- stock checkpoints ---------------------------------------------------------------------------------


def test_stock(stock: Path) -> None:
    report = verify(stock, code=0)
    assert (report["format"], report["unchecked_items"], report["strays"]) == ("stock", 0, [])
    assert report["checked_bytes"] > 1_000_000


def test_stock_with_a_flipped_bit(stock: Path) -> None:
    metadata = pickle.loads((stock / ".metadata").read_bytes())
    (info,) = [info for index, info in metadata.storage_data.items() if index.fqn == "large"]
    path = stock / info.relative_path
    flip(path, info.offset + info.length // 2)
    damage = only_damage(stock)
    assert (damage["kind"], damage["fqns"]) == ("checksum", ["large"])
    assert damage["start"] <= info.offset + info.length // 2 < damage["stop"]
    flip(path, info.offset + info.length // 2)
    flip(path, info.offset)
    assert only_damage(stock)["fqns"] == ["large"]


def test_stock_with_a_short_and_a_missing_file(stock: Path) -> None:
    path = stock / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-100])
    assert {damage["kind"] for damage in verify(stock, "--quick")["damages"]} == {"size"}
    path.unlink()
    (damage,) = [d for d in verify(stock)["damages"] if d["key"] == path.name]
    assert damage["kind"] == "missing"
    assert damage["fqn_count"] > 0


def test_stock_without_crcs(tmp_path: Path) -> None:
    previous = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save({"t": random_tensor(9)}, storage_writer=dcp.FileSystemWriter(tmp_path))
    finally:
        torch.serialization.set_crc32_options(previous)
    assert verify(tmp_path, code=0)["unchecked_items"] == 1


def test_stock_with_a_gap(stock: Path) -> None:
    path = stock / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    index = next(index for index in metadata.storage_data if index.fqn == "sharded.rows" and index.offset[0])
    del metadata.storage_data[index]
    chunks = metadata.state_dict_metadata["sharded.rows"].chunks
    chunks[:] = [chunk for chunk in chunks if chunk.offsets != index.offset]
    path.write_bytes(pickle.dumps(metadata))
    damage = only_damage(stock)
    assert (damage["kind"], damage["message"]) == (
        "coverage",
        "'sharded.rows': [384:768, 0:300] is not stored",
    )


def rewrite_stock(stock: Path, edit: Callable[[Any], None]) -> None:
    path = stock / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    edit(metadata)
    path.write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("doubled", "float32 and shape (1800, 1000)"),
        ("huge", f"float32 and shape ({1 << 40}, {1 << 20})"),
        ("dtype", "float64 and shape (900, 1000)"),
    ],
)
def test_stock_metadata_that_contradict_the_data(stock: Path, change: str, said: str) -> None:
    def edit(metadata: Any) -> None:
        stored = metadata.state_dict_metadata["large"]
        if change == "dtype":
            stored.properties.dtype = torch.float64
        else:
            size = (1800, 1000) if change == "doubled" else (1 << 40, 1 << 20)
            stored.size = stored.chunks[0].sizes = torch.Size(size)

    rewrite_stock(stock, edit)
    damage = only_damage(stock)
    assert (damage["kind"], damage["fqns"]) == ("disagreement", ["large"])
    expected = f"holds a tensor of float32 and shape (900, 1000) where the metadata says a tensor of {said}"
    assert damage["message"] == expected
    quick = verify(stock, "--quick", code=int(change == "huge"))
    assert [damage["kind"] for damage in quick["damages"]] == ["disagreement"] * (change == "huge")


def test_stock_with_an_object_for_a_tensor(tmp_path: Path) -> None:
    stock_state(tmp_path, {"t": torch.ones(3), "o": [1, 2]})

    def swap(metadata: Any) -> None:
        tensor, thing = sorted(metadata.storage_data, key=lambda index: index.fqn == "o")
        metadata.storage_data[tensor] = metadata.storage_data[thing]

    rewrite_stock(tmp_path, swap)
    assert "holds a list where" in only_damage(tmp_path)["message"]


def stock_state(place: Path, state: dict[str, Any], **more: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=dcp.FileSystemWriter(place, **more), no_dist=True)


@pytest.mark.filterwarnings("ignore")
def test_stock_of_all_kinds(tmp_path: Path) -> None:
    pytest.importorskip("zstandard", reason="torch's zstd extension needs the zstandard package")
    from torch.distributed.checkpoint._extension import ZStandard

    scales, zeros = torch.rand(4) + 0.1, torch.zeros(4)
    state = {
        "scalar": torch.tensor(3.5), "empty": torch.empty(0, 4), "half": torch.ones(5, dtype=torch.bfloat16),
        "fp8": torch.ones(6).to(torch.float8_e4m3fn), "u16": torch.arange(7).to(torch.uint16),
        "turned": random_tensor(30, 40).t(), "lazy": torch.ones(3, dtype=torch.complex64).conj(),
        "view": random_tensor(50)[10:20], "parameter": torch.nn.Parameter(torch.ones(2)),
        "q": torch.quantize_per_tensor(random_tensor(9), 0.1, 0, torch.qint8),
        "channels": torch.quantize_per_channel(random_tensor(4, 4), scales, zeros, 0, torch.quint8),
        "object": [1, {"x": "y"}], "bytes": io.BytesIO(b"x"), "number": 7,
    }  # fmt: skip
    for place, more in (
        (tmp_path / "one", {}),
        (tmp_path / "several", {"thread_count": 3, "single_file_per_rank": False}),
        (tmp_path / "zstd", {"_extensions": [ZStandard()]}),
    ):
        stock_state(place, state, **more)
        report = verify(place, code=0)
        items = len(pickle.loads((place / ".metadata").read_bytes()).storage_data)
        assert report["unchecked_items"] == (items if place.name == "zstd" else 0)
        verify(place, "--quick", code=0)


def test_tied_tensors_of_stock_are_read_once(tmp_path: Path) -> None:
    stock_state(tmp_path, {"w": random_tensor(1000), "other": random_tensor(10)})

    def tie(metadata: Any) -> None:
        (index,) = [index for index in metadata.storage_data if index.fqn == "w"]
        for n in range(20):
            metadata.state_dict_metadata[f"w{n}"] = metadata.state_dict_metadata["w"]
            again = dataclasses.replace(index, fqn=f"w{n}")
            metadata.storage_data[again] = metadata.storage_data[index]

    rewrite_stock(tmp_path, tie)
    (file,) = tmp_path.glob("*.distcp")
    assert verify(tmp_path, code=0)["checked_bytes"] == file.stat().st_size
    flip(file, 3000)
    damage = only_damage(tmp_path)
    assert damage["fqn_count"] == 21


def test_stock_items_in_the_same_bytes(tmp_path: Path) -> None:
    stock_state(tmp_path, {f"t{n}": random_tensor(1000) for n in range(3)})

    def overlap(metadata: Any) -> None:
        first, second, _ = sorted(metadata.storage_data.values(), key=lambda info: info.offset)
        second.offset, second.length = first.offset + 1, first.length

    rewrite_stock(tmp_path, overlap)
    damage = only_damage(tmp_path, "--quick")
    assert (damage["kind"], "in the same bytes" in damage["message"]) == ("disagreement", True)


def test_progress_of_one_part_for_each_rank(tmp_path: Path) -> None:
    for rank in range(3):
        stock_state(tmp_path, {"t": random_tensor(1000 * (rank + 1)), "o": [rank]})
        os.replace(tmp_path / ".metadata", tmp_path / f"__{rank}.metadata")
        os.replace(tmp_path / "__0_0.distcp", tmp_path / f"__{rank}_1.distcp")
        metadata = pickle.loads((tmp_path / f"__{rank}.metadata").read_bytes())
        for info in metadata.storage_data.values():
            info.relative_path = f"__{rank}_1.distcp"
        (tmp_path / f"__{rank}.metadata").write_bytes(pickle.dumps(metadata))
    seen: list[tuple[int, int]] = []
    report = ckpt.verify(tmp_path, progress=lambda done, total: seen.append((done, total)))
    assert (report.ok, report.checked_files) == (True, 3)
    assert {total for _, total in seen} == {report.checked_bytes}
    assert seen[-1] == (report.checked_bytes, report.checked_bytes)


# -- no checkpoint -------------------------------------------------------------------------------------


def failed(*arguments: object) -> Ran:
    ran = run("verify", *arguments)
    lines = [line for line in ran.err.splitlines() if not line.startswith("retrying ")]
    assert ran.code == 2 or [line[:7] for line in lines] == ["error: "]
    return ran


def test_exit_codes(place: Path, tmp_path: Path) -> None:
    assert failed(tmp_path / "nothing").code == 3
    (place / "commit.json").unlink()
    assert failed(place).code == 3
    assert failed(place, "--nonsense").code == 2
    assert failed("s3:/through/pathlib").code == 2
    assert failed(place, "--storage-options", "nonsense").code == 2
    assert failed(place, "--storage-options", "nonsense=1").code == 2


def test_storage_that_cannot_be_reached() -> None:
    options = {
        "endpoint_url": "http://127.0.0.1:9",
        "key": ACCESS_KEY,
        "secret": SECRET_KEY,
        "config_kwargs": {"retries": {"total_max_attempts": 1}},
        "unreachable_timeout_s": 1,
    }
    ran = failed("s3://b/k", "--json", *options_of(options))
    assert ran.code == ran.json["exit_code"] == 4
    assert ran.json["error"]["type"] == "StorageUnavailable"
    assert SECRET_KEY not in ran.out + ran.err


def test_a_file_that_goes_away_while_it_is_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its size was right when it was looked at."""
    ckpt.save({"t": torch.ones(300_000)}, tmp_path)
    read = PosixStore.read_into

    def read_into(self: PosixStore, key: str, *rest: Any) -> None:
        if key.endswith(".distcp"):
            raise NotFound("gone", url=self.url, key=key)
        read(self, key, *rest)

    monkeypatch.setattr(PosixStore, "read_into", read_into)
    damage = only_damage(tmp_path)
    (file,) = tmp_path.rglob("*.distcp")
    assert (damage["kind"], damage["start"], damage["stop"]) == ("missing", 0, file.stat().st_size)
    assert damage["fqns"] == ["t"]


def test_a_file_that_becomes_visible_while_it_is_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Storage that lags: the file is waited for, and read."""
    url = "memory://lagging-verify/c"
    ckpt.save({"t": torch.ones(300_000)}, url)
    seen: dict[str, int] = {}

    def late(operation: str, key: str, when: str) -> None:
        seen[operation] = seen.get(operation, 0) + key.endswith(".distcp")
        if key.endswith(".distcp") and seen[operation] == 1 and when == "before":
            raise NotFound("not yet", url=url, key=key)

    memory.inject(url, late)
    report = ckpt.verify(url, storage_options={"visibility_lag_s": 0.01})
    memory.clear(url)
    assert report.ok
    assert report.checked_bytes > 1_200_000
