"""Run every command on checkpoints made to do harm: one line, an exit code, bounded memory."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import io
import json
import os
import pickle
import random
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import tracemalloc
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from support.commands import (
    Ran,
    edit_commit,
    edit_index,
    edit_listed,
    edit_manifest,
    run,
    run_json,
    run_measured,
    run_process,
)
from support.hostile import HOSTILE, change_places, fields_of
from support.record_fuzz import HostileRoot
from support.states import random_tensor
from support.tiers import examples

import ckpt
from ckpt.consistency.seal import seal_json, seal_pickle, unseal_json
from ckpt.errors import NotFound, SaveFailed
from ckpt.format.columns import Columns, ObjectRow, TensorColumns
from ckpt.format.records import CommitRecord, ManifestRef, ObjectRef, encode
from ckpt.format.runs import Runs, TensorRuns

STATE: dict[str, Any] = {
    "model": {"w": random_tensor(20, 30), "b": torch.arange(5.0)},
    "objects": [1, {"x": "y"}],
}
_MAX_PEAK_BYTES = 192 << 20
_MAX_PROCESS_BYTES = 1 << 30

# `make test-fuzz` draws more records, and other ones.
_RECORDS = int(os.environ.get("FUZZ_RECORDS", "1200"))
_PROCESSES = int(os.environ.get("FUZZ_PROCESSES", "24"))
_SEED = os.environ.get("FUZZ_SEED", "0")
_RECORDS_A_TEST = 200
_PROCESSES_A_TEST = 12
_RAW_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("ours") / "step-1"
    ckpt.save(STATE, place)
    return place


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("stock") / "step-1"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(dict(STATE), storage_writer=dcp.FileSystemWriter(place))
    return place


@pytest.fixture(scope="module", autouse=True)
def _missing_objects_are_not_waited_for() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ckpt.reading.checkpoint.ReadSettings.timeout_s", lambda *_: 0.0)
        yield


def every_command(place: Path, good: Path) -> dict[str, Ran]:
    """Run all commands on one place; each ends with a documented code and at most one line of error."""
    copy = place.parent / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    commands: dict[str, tuple[object, ...]] = {
        "ls": ("ls", place.parent),
        "inspect": ("inspect", place),
        "slices": ("inspect", place, "--json", "--tensor", "*"),
        "report": ("report", place, "-o", "-"),
        "quick": ("verify", place, "--quick"),
        "verify": ("verify", place, "--json"),
        "cat": ("cat", place, "model.w[3:7, :2]"),
        "object": ("cat", place, "objects"),
        "diff": ("diff", place, good),
        "cp": ("cp", place, copy),
        "rm": ("rm", place, "--dry-run"),
        "gc": ("gc", place.parent, "--dry-run", "--grace", "0"),
    }
    results = {}
    for name, arguments in commands.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ran = results[name] = run(*arguments)
        assert ran.code in (0, 1, 2, 3), (name, ran)
        assert not re.search(r"unexpected \w+:", ran.err), (name, ran.err)
        assert len(ran.err.splitlines()) <= 1, (name, ran.err)
        assert "\x1b" not in ran.out + ran.err
    return results


def every_command_traced(place: Path, good: Path) -> dict[str, Ran]:
    """Watch the memory of `every_command`, which makes it slow."""
    tracemalloc.start()
    try:
        results = every_command(place, good)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < _MAX_PEAK_BYTES
    return results


class Scratch:
    """A fresh copy of a checkpoint for each example."""

    def __init__(self, original: Path) -> None:
        self._original = original

    def __enter__(self) -> Path:
        self._folder = tempfile.TemporaryDirectory()
        return Path(shutil.copytree(self._original, Path(self._folder.name) / "step-1"))

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()


# Shrinking would take long: an example runs every command. tests/format/test_hostile_records.py draws thousands.
FUZZ = settings(
    max_examples=examples(20),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.function_scoped_fixture,
        HealthCheck.data_too_large,
    ],
)


@given(data=st.data())
@FUZZ
def test_commit_records(ours: Path, data: st.DataObject) -> None:
    with Scratch(ours) as place:
        edit_commit(place, lambda record: change_places(record, data, json_only=True))
        every_command(place, ours)


@given(data=st.data())
@FUZZ
def test_manifests(ours: Path, data: st.DataObject) -> None:
    with Scratch(ours) as place:
        edit_manifest(place, lambda manifest: change_places(manifest, data, json_only=True))
        every_command(place, ours)


@given(data=st.data())
@FUZZ
def test_indices(ours: Path, data: st.DataObject) -> None:
    with Scratch(ours) as place:
        edit_encoded_index(place, lambda index: change_places(index, data, json_only=False))
        every_command(place, ours)


def edit_encoded_index(place: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Change the index as msgpack has it, and let the commit vouch for it."""

    def change(record: dict[str, Any]) -> None:
        ref = record["index"]
        index = msgspec.msgpack.decode((place / ref["path"]).read_bytes())
        edit(index)
        edit_listed(place, ref, msgspec.msgpack.encode(index))

    edit_commit(place, change)


@given(data=st.data())
@FUZZ
def test_stock_metadata(stock: Path, data: st.DataObject) -> None:
    with Scratch(stock) as place:
        path = place / ".metadata"
        metadata = pickle.loads(path.read_bytes())
        for _ in range(data.draw(st.integers(1, 3))):
            owner, name = data.draw(st.sampled_from(fields_of(metadata)))
            value = data.draw(HOSTILE | st.tuples(HOSTILE, HOSTILE) | st.lists(st.text(), max_size=3))
            setattr(owner, name, value)
            if name in ("chunks", "storage_meta"):
                break
        path.write_bytes(pickle.dumps(metadata))
        every_command(place, stock)


@given(data=st.data())
@settings(FUZZ, max_examples=examples(30))
def test_flipped_and_cut_bytes(ours: Path, stock: Path, data: st.DataObject) -> None:
    """Anywhere: records and data, of ours and of stock."""
    original = data.draw(st.sampled_from([ours, stock]))
    with Scratch(original) as place:
        files = sorted(path for path in place.rglob("*") if path.is_file())
        path = data.draw(st.sampled_from(files))
        raw = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(1, 4))):
            raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        if data.draw(st.booleans()):
            raw = raw[: data.draw(st.integers(0, len(raw)))]
        damaged = bytes(raw) != path.read_bytes()
        path.write_bytes(raw)
        results = every_command(place, original)
        if damaged and original == ours:
            assert results["verify"].code != 0, path


@pytest.mark.slow
@given(raw=st.binary(max_size=300))
@example(raw=b"\x80\x05\x96" + (1 << 60).to_bytes(8, "little") + b".")
@example(raw=b"(" * 100_000)
@example(raw=b"[" * 100_000)
@example(raw=b'{"a":' * 100_000)
@settings(FUZZ, max_examples=examples(8))
def test_any_bytes_as_a_record(ours: Path, raw: bytes) -> None:
    with Scratch(ours) as place:
        (place / ".metadata").write_bytes(seal_pickle(raw))
        assert every_command(place, ours)["verify"].code == 1
        (place / "commit.json").write_bytes(seal_json(b'{"a":' + (json.dumps(raw.hex()).encode()) + b"}"))
        every_command(place, ours)
        (place / "commit.json").write_bytes(raw)
        every_command(place, ours)
        (place / "commit.json").unlink()
        (place / ".metadata").write_bytes(raw)
        every_command(place, ours)


# -- one record at a time, of every kind, through its decoder and a command ------------------------------


def check_ended_well(name: str, ran: Ran) -> None:
    assert ran.code in range(5), (name, ran.code, ran.err)
    assert not re.search(r"unexpected \w+:|Traceback", ran.err), (name, ran.err)
    assert not _RAW_CONTROLS.search(ran.out + ran.err), name


def drawn_command(root: HostileRoot, number: int) -> tuple[str, list[str]]:
    """Make a record hostile, decode it, and choose a command."""
    hostile = root.draw(f"{_SEED}-{number}")
    hostile.decode()
    commands = root.commands(hostile)
    name = random.Random(f"{_SEED}-{number}-command").choice(list(commands))
    return f"FUZZ_SEED={_SEED}, record {number} ({hostile.kind}): {name}", commands[name]


@pytest.fixture(scope="module")
def hostile_root(tmp_path_factory: pytest.TempPathFactory) -> HostileRoot:
    return HostileRoot(tmp_path_factory.mktemp("hostile"))


@pytest.mark.long
@pytest.mark.parametrize("first", range(0, _RECORDS, _RECORDS_A_TEST))
def test_mutated_records(hostile_root: HostileRoot, first: int) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(first, min(first + _RECORDS_A_TEST, _RECORDS)):
        name, arguments = drawn_command(hostile_root, number)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            check_ended_well(name, run(*arguments))
        grown_bytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
        assert grown_bytes < _MAX_PROCESS_BYTES, name


@pytest.mark.long
@pytest.mark.parametrize("first", range(0, _PROCESSES, _PROCESSES_A_TEST))
def test_mutated_records_in_processes(hostile_root: HostileRoot, first: int) -> None:
    for number in range(first, min(first + _PROCESSES_A_TEST, _PROCESSES)):
        name, arguments = drawn_command(hostile_root, number)
        ran, peak_bytes = run_measured(*arguments)
        check_ended_well(name, ran)
        assert peak_bytes < _MAX_PROCESS_BYTES, name


# -- earlier finds, and cases thought of beforehand ----------------------------------------------------


def _zeros(count: int) -> bytes:
    packer = zlib.compressobj(9)
    return b"".join(packer.compress(bytes(1 << 20)) for _ in range(count >> 20)) + packer.flush()


INDICES: dict[str, Callable[[dict[str, Any]], None]] = {
    "a tensor of 2**60 elements": lambda index: index.update(entries=[["t", "float32", [1 << 30, 1 << 30], False, 0]]),
    "chunks of 2**20": lambda index: index.update(
        entries=[["t", "float32", [1], False, 1 << 20]],
        **dict.fromkeys(("offsets", "sizes", "file", "offset", "length"), _zeros(8 << 20)),
    ),
    "chunks of 64 dimensions": lambda index: index.update(
        entries=[["t", "float32", [1] * 64, False, 1 << 19]],
        **dict.fromkeys(("offsets", "sizes"), _zeros(8 * 64 << 19)),
        **dict.fromkeys(("file", "offset", "length"), _zeros(8 << 19)),
    ),
    "chunks beyond counting": lambda index: index.update(entries=[["t", "float32", [1], False, 1 << 40]]),
    "dimensions": lambda index: index.update(entries=[["t", "float32", [1] * 65, False, 1]]),
    "sizes that overflow": lambda index: index.update(entries=[["t", "float32", [(1 << 62) - 1] * 60, False, 0]]),
    "a column that expands": lambda index: index.update(offset=_zeros(256 << 20)),
    "names twice": lambda index: index.update(entries=index["entries"] + index["entries"]),
    "a name of dots": lambda index: index.update(
        entries=[["." * 5000, *index["entries"][0][1:]], *index["entries"][1:]]
    ),
    "a dtype that is a function": lambda index: index.update(entries=[["t", "load", [1], False, 0]]),
    "nested planner data": lambda index: index.update(planner_data=msgspec.Raw(b"\x92\xa1l\x91" * 50_000 + b"\xc0")),
}  # fmt: skip


@pytest.mark.parametrize("edit", INDICES.values(), ids=INDICES)
def test_hostile_indices(ours: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    with Scratch(ours) as place:
        edit_encoded_index(place, edit)
        results = every_command_traced(place, ours)
        assert results["verify"].code == 1
        assert results["cp"].code == 1


def _archive(*records: tuple[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(file, "w", method) as archive:
        warnings.simplefilter("ignore")  # names twice
        for name, data in records:
            archive.writestr(name, data)
    return file.getvalue()


NONE = b"\x80\x02N."
ARCHIVES: dict[str, Callable[[], bytes]] = {
    "compressed": lambda: _archive(("a/data.pkl", NONE + bytes(1 << 22)), method=zipfile.ZIP_DEFLATED),
    "many records": lambda: _archive(*[(f"a/data/{n}", b"") for n in range(2_000)]),
    "twice": lambda: _archive(("a/data.pkl", NONE), ("a/data.pkl", NONE)),
    "paths": lambda: _archive(("../../outside", b"x")),
    "no archive": lambda: b"PK\x03\x04" + bytes(1000),
    "empty": lambda: b"",
}


@pytest.mark.parametrize("archive", ARCHIVES.values(), ids=ARCHIVES)
def test_hostile_archives(stock: Path, archive: Callable[[], bytes]) -> None:
    data = archive()
    with Scratch(stock) as place:
        path = place / ".metadata"
        metadata = pickle.loads(path.read_bytes())
        for index, info in metadata.storage_data.items():
            (place / f"{index.fqn}.distcp").write_bytes(data)
            info.relative_path, info.offset, info.length = f"{index.fqn}.distcp", 0, len(data)
        path.write_bytes(pickle.dumps(metadata))
        results = every_command_traced(place, stock)
        assert results["verify"].code == 1
        assert results["cat"].code == 1


def _one_item_many_chunks(columns: Columns) -> None:
    tensor = columns.entries["model.w"]
    assert isinstance(tensor, TensorColumns)
    rows = np.arange(1000)
    columns.entries["model.w"] = dataclasses.replace(
        tensor,
        size=(20 * len(rows), 30),
        offsets=np.stack([20 * rows, 0 * rows], axis=1),
        sizes=tensor.sizes.repeat(len(rows), axis=0),
        **{name: getattr(tensor, name).repeat(len(rows)) for name in ("file", "offset", "length")},
    )


def test_an_item_that_is_many_chunks(ours: Path, tmp_path: Path) -> None:
    """Each would be written out, gigabytes from a megabyte."""
    with Scratch(ours) as place:
        edit_index(place, _one_item_many_chunks)
        for command in (
            ("cat", place, "model.w", "--npy", tmp_path / "a.npy"),
            ("cat", place, "model.w", "--stats"),
            ("convert", place, tmp_path / "a.safetensors"),
            ("verify", place),
        ):
            ran = run(*command)
            assert ran.code == 1
            assert (
                "the index lists 1,003 items" if command[0] == "verify" else "disagree"
            ) in ran.out + ran.err
        assert not list(tmp_path.iterdir())


def test_a_tensor_far_larger_than_its_file(tmp_path: Path) -> None:
    """A piece is planned for each of its rows, which would take gigabytes before the first read fails."""
    ckpt.save({"t": torch.ones(4, 4)}, tmp_path)
    shape, nbytes, block_size_bytes = (100, 1 << 20), 100 << 22, 16 << 20

    def edit(manifest: dict[str, Any]) -> None:
        manifest["block_size_bytes"] = block_size_bytes
        (item,), (file,) = manifest["items"], manifest["files"]
        item[4], item[6] = item[4] - item[6] + nbytes, nbytes
        file["size_bytes"] = item[3] + item[4]
        file["blocks"] = base64.b64encode(bytes(8 * -(-file["size_bytes"] // block_size_bytes))).decode()

    def reshape(columns: Columns) -> None:
        tensor = columns.entries["t"]
        assert isinstance(tensor, TensorColumns)
        length = tensor.length - 64 + nbytes
        columns.entries["t"] = dataclasses.replace(tensor, size=shape, sizes=np.array([shape]), length=length)

    edit_manifest(tmp_path, edit)
    edit_index(tmp_path, reshape)
    ran = run("cat", tmp_path, "t[:, 0]")
    assert (ran.code, "bytes, fewer than the checkpoint's records say" in ran.err) == (1, True), ran


def test_an_object_under_many_names(ours: Path, tmp_path: Path) -> None:
    def edit(columns: Columns) -> None:
        row = next(row for row in columns.entries.values() if isinstance(row, ObjectRow))
        columns.entries |= {f"again{n}": row for n in range(3)}

    with Scratch(ours) as place:
        edit_index(place, edit)
        for command in (("cat", place, "again1"), ("convert", place, tmp_path / "stock", "--to", "dcp")):
            ran = run(*command)
            assert (ran.code, "disagree" in ran.err) == (1, True)


def test_items_of_a_manifest_in_the_same_bytes(ours: Path) -> None:
    def edit(manifest: dict[str, Any]) -> None:
        fqn, *rest = manifest["items"][0]
        manifest["items"].append([f"{fqn}2", *rest])

    with Scratch(ours) as place:
        edit_manifest(place, edit)
        assert "two items in the same bytes" in run("cat", place, "model.w").err


def test_files_of_another_manifest(ours: Path) -> None:
    def edit(manifest: dict[str, Any]) -> None:
        manifest["files"][0]["path"] = "rank-00000/0123456789abcdef-0.distcp"

    with Scratch(ours) as place:
        edit_manifest(place, edit)
        assert "a name that this library does not give it" in run("cat", place, "model.w").err


def test_many_names_for_one_stock_item(tmp_path: Path) -> None:
    """A few tied tensors are written under each name; not hundreds of megabytes of them."""
    state = {"w": torch.arange(50_000)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "stock"), no_dist=True)
    path = tmp_path / "stock" / ".metadata"
    for count, code in (3, 0), (250, 1):
        metadata = pickle.loads(path.read_bytes())
        ((index, info), *_) = metadata.storage_data.items()
        for n in range(count):
            metadata.state_dict_metadata[f"w{n}"] = metadata.state_dict_metadata["w"]
            metadata.storage_data[dataclasses.replace(index, fqn=f"w{n}")] = info
        path.write_bytes(pickle.dumps(metadata))
        ran = run("convert", tmp_path / "stock", tmp_path / f"{count}.safetensors")
        assert ran.code == code
        assert ("far more than is stored" in ran.err) == bool(code)


def test_duplicate_keys_in_a_record(ours: Path) -> None:
    """The last one counts, for all readers alike."""
    with Scratch(ours) as place:
        path = place / "commit.json"
        record = unseal_json(path.read_bytes(), url="", key="")
        path.write_bytes(seal_json(b'{"id":"' + b"f" * 16 + b'",' + record[1:]))
        assert every_command(place, ours)["verify"].code == 0


def _claiming(place: Path, manifests: int) -> None:
    """Write a commit record whose manifests claim 65,536 files each."""
    place.mkdir(parents=True)
    listed = [
        ManifestRef(
            path=f"rank-{rank:05d}/{'b' * 16}.json",
            size_bytes=10,
            crc64nvme="0" * 16,
            rank=rank,
            files=1 << 16,
            items=0,
            data_bytes=0,
        )
        for rank in range(manifests)
    ]
    commit = CommitRecord(
        id="a" * 16,
        created_at="2026-01-01T00:00:00+00:00",
        library="x",
        torch="x",
        world_size=manifests,
        data_bytes=0,
        index=ObjectRef(path=f"rank-00000/{'a' * 16}.index", size_bytes=10, crc64nvme="0" * 16),
        manifests=listed,
    )
    (place / "commit.json").write_bytes(encode(commit))


@contextlib.contextmanager
def little_memory() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 16 << 20


def test_files_that_are_only_claimed(ours: Path, tmp_path: Path) -> None:
    """11 kB of a record claim 5 million files: none of them is named, by `rm`, a save in its place, a look or `scrub`."""
    place = tmp_path / "run" / "step-1"
    _claiming(place, 80)
    with little_memory():
        assert run_json("rm", place, "--dry-run")["keys"][0] == "commit.json"
        run("ls", place.parent)
        run("scrub", place.parent, "--from", ours.parent)
        ckpt.save({"w": torch.ones(3)}, place, no_dist=True, checks="off")
        assert run("verify", place).code == 0


def test_a_removal_leaves_the_files_of_others(tmp_path: Path) -> None:
    """A listing has those of other saves too."""
    ckpt.save(STATE, tmp_path / "step-1", no_dist=True)
    other = tmp_path / "step-1" / "rank-00000" / f"{'e' * 16}-0.distcp"
    other.write_bytes(b"of a save that is running")
    assert run("rm", tmp_path / "step-1", "--yes").code == 0
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [other]


@pytest.mark.parametrize("command", [("verify", "--quick"), ("inspect",), ("cp",)])
def test_runs_that_expand_to_very_many_chunks(ours: Path, command: tuple[str, ...]) -> None:
    """60 tensors of 2**18 chunks, in some kilobytes."""
    rows = 1 << 18

    def edit(columns: Columns) -> None:
        numbers = [(0, rows, 0, 1, 0)], [(0, rows, 64, 1, 0)], [(64, rows, 0, 1, 0)]
        boxes = [(0, rows, 1, 1, 0)], [(1, rows, 0, 1, 0)]
        made = tuple(map(Runs.of, (*numbers, *boxes)))
        columns.entries |= {f"t{n}": TensorRuns("uint8", (rows,), False, made) for n in range(60)}

    with Scratch(ours) as place:
        edit_index(place, edit)
        name, *options = command
        with little_memory():
            ran = run(name, place, *([place.parent / "copy"] if name == "cp" else options))
        assert (ran.code, "far more than the manifests can list" in ran.out + ran.err) == (1, True)


@pytest.mark.parametrize("field", ["data_bytes", "world_size", "version"])
def test_numbers_of_hundreds_of_digits(ours: Path, tmp_path: Path, field: str) -> None:
    good = Path(shutil.copytree(ours, tmp_path / "run" / "step-1"))
    bad = Path(shutil.copytree(ours, tmp_path / "run" / "step-2"))
    edit_commit(bad, lambda record: record.update({field: 10**400}))
    every_command(bad, good)
    for command in (("ls", good.parent), ("scrub", good.parent), ("watch", "--once", good.parent)):
        ran = run(*command)
        assert "unexpected" not in ran.err, ran
        assert "step-1" in ran.out + ran.err or command[0] == "scrub"


@pytest.mark.parametrize("text", ["a\0b", "x" * (1 << 20), "", "F" * 16])
def test_ids_that_no_save_draws(ours: Path, tmp_path: Path, text: str) -> None:
    """They go into the environment of a command."""
    for number in (1, 2):
        shutil.copytree(ours, tmp_path / f"step-{number}")
    # Of a young one `watch` awaits what is missing.
    made = {"id": text, "created_at": "2026-01-01T00:00:00+00:00"}
    edit_commit(tmp_path / "step-1", lambda record: record.update(made))
    options = ("--once", "--retries", "0", "--on-failure", "continue", "--exec", "echo did {path}")
    ran = run_process("watch", *options, tmp_path)
    assert ("did step-2" in ran.out, "did step-1" in ran.out, "unexpected" in ran.err) == (True, False, False)


def test_log_lines_hold_no_control_characters(tmp_path: Path) -> None:
    place = tmp_path / "\x1b]0;owned\x07step-7"
    ckpt.save({"w": torch.ones(4)}, place, no_dist=True, digests=True)
    (place / "rank-00000" / f"{'d' * 16}-0.pin").write_bytes(b"{}")
    for command in (("rm", "--dry-run", place), ("gc", "--grace", "0s", tmp_path)):
        ran = run_process(*command)
        assert "a pin cannot be read" in ran.err
        assert not _RAW_CONTROLS.search(ran.out + ran.err)


def test_errors_hold_no_control_characters(tmp_path: Path) -> None:
    """A traceback shows them on a terminal."""
    with pytest.raises(NotFound) as caught:
        ckpt.verify(tmp_path / "\x1b[2Jstep-7")
    assert "\\x1b[2Jstep-7" in str(caught.value)
    assert not _RAW_CONTROLS.search(str(caught.value))
    assert str(SaveFailed("two\nlines \x9b2J")) == "two\nlines \\x9b2J"


def test_a_page_goes_into_a_pipe(ours: Path, tmp_path: Path) -> None:
    """No file takes the place of a device or pipe."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE) as reader:
        ran = run("report", ours, "-o", pipe)
        if not pipe.is_fifo():
            reader.kill()
        shown, _ = reader.communicate(timeout=60)
    assert ran.code == 0
    assert shown.startswith(b"<!")
    assert pipe.is_fifo()


@pytest.mark.long
def test_as_a_user_in_bounded_memory(ours: Path) -> None:
    """2**60 bytes promised in 1 KB of records; the process gets 4 GiB of address space."""
    with Scratch(ours) as place:

        def change(record: dict[str, Any]) -> None:
            record["index"]["size_bytes"] = 1 << 60
            record["manifests"][0]["size_bytes"] = 1 << 60

        edit_commit(place, change)
        script = Path(sys.executable).parent / "ckpt"
        for command in ("inspect", "verify", "ls"):
            done = subprocess.run(
                [str(script), command, str(place)],
                capture_output=True,
                text=True,
                check=False,
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30)),
            )
            assert done.returncode == (0 if command == "ls" else 1), done.stderr
            assert "Traceback" not in done.stderr
    assert run_process("verify", "/dev/null").code == 3
