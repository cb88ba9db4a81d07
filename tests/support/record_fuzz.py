"""Checkpoints of which one record at a time is hostile, drawn from a seed, for the decoders and all commands."""

from __future__ import annotations

import copy
import json
import pickle
import random
import shutil
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed.checkpoint as dcp

import ckpt
from ckpt.backends.posix import PosixStore
from ckpt.consistency.checksums import crc64nvme
from ckpt.consistency.seal import is_sealed_json, seal_json, unseal_json
from ckpt.errors import CheckpointError
from ckpt.format.columns import Columns
from ckpt.format.dcp_view import columns_of
from ckpt.format.index import decode_index, encode_index
from ckpt.format.model_index import parse_model_index
from ckpt.format.pin_record import decode_pin
from ckpt.format.records import decode_commit, decode_manifest
from ckpt.format.run_record import RunCheckpoint, RunRecord, RunStart, read_run, write_run
from ckpt.format.runs import Runs, TensorRuns
from ckpt.scrubbing.scrub_record import read_scrub
from ckpt.stock.metadata_reader import decode_metadata
from support.commands import edit_commit
from support.hostile import VALUES, cut_bytes, fields_of, leaves
from support.signing import keys
from support.states import random_tensor

COUNTS = [1 << 10, 1 << 16, 1 << 18, 1 << 20, 1 << 24, 1 << 27, 1 << 31]
LARGE = [10**30, 10**400, -(10**400), "\0", "a\x1b[31mb\x07", "\x9b2J", "x" * (1 << 16)]
"""Values of JSON, which msgpack does not have, or does not need."""

_ROWS = 512

Decode = Callable[[bytes, Path], object]


def _by(decoder: Callable[..., object]) -> Decode:
    return lambda data, path: decoder(data, url="memory://root", key=path.name)


def _read_by(reader: Callable[[PosixStore], object]) -> Decode:
    return lambda _, path: reader(PosixStore(str(path.parent)))


@dataclass(frozen=True)
class Kind:
    """A kind of record: where one is below the root, and its decoder."""

    pattern: str
    decode: Decode


KINDS = {
    "commit": Kind("run/step-?/commit.json", _by(decode_commit)),
    "manifest": Kind("run/step-?/rank-00000/*.json", _by(decode_manifest)),
    "index": Kind("run/step-?/rank-00000/*.index", _by(decode_index)),
    "runs": Kind("run/step-1/rank-00000/*.index", _by(decode_index)),
    "pin": Kind("run/step-1/rank-00000/*.pin", _by(decode_pin)),
    "run": Kind("run/ckpt-run.json", _read_by(read_run)),
    "scrub": Kind("run/ckpt-scrub.json", _read_by(read_scrub)),
    "signature": Kind("signed/step-1/rank-00000/*.sig", lambda data, path: None),
    "signed commit": Kind("signed/step-1/commit.json", _by(decode_commit)),
    "own metadata": Kind("run/step-?/.metadata", _by(decode_metadata)),
    "metadata": Kind("stock/step-1/.metadata", lambda data, path: _decode_metadata(data)),
    "model index": Kind("model/step-1/model.safetensors.index.json", _by(parse_model_index)),
    "model commit": Kind("model/step-1/commit.json", _by(decode_commit)),
}


def _decode_metadata(data: bytes) -> Columns:
    return columns_of(decode_metadata(data, url="memory://root", key=".metadata"), url="memory://root")


@dataclass(frozen=True)
class Hostile:
    """A record that was changed: its kind, its path, and the checkpoint that it belongs to."""

    kind: str
    path: Path
    place: Path

    def decode(self) -> bool:
        """Decode it; return whether that works. Raises whatever is no error of the library."""
        try:
            KINDS[self.kind].decode(self.path.read_bytes(), self.path)
        except CheckpointError:
            return False
        return True


class HostileRoot:
    """Roots with a base and a checkpoint that refers to it, a signed one, a model, and one of stock PyTorch."""

    def __init__(self, top: Path) -> None:
        self._good = top / "good"
        self.scratch = top / "scratch"
        self._good.mkdir(parents=True)
        self.private, self.public = keys(top)
        run = self._good / "run"
        state = {"model": {"w": random_tensor(20, 30), "b": torch.arange(5.0)}, "objects": [1, {"x": "y"}]}
        ckpt.save(state, run / "step-1", no_dist=True, digests=True)
        ckpt.save({**state, "objects": [2]}, run / "step-2", no_dist=True, base=run / "step-1")
        signed = self._good / "signed" / "step-1"
        ckpt.save(state, signed, no_dist=True, block_digests="sha256")
        model = self._good / "model" / "step-1"
        tensors = {"w": random_tensor(20, 30), "b": torch.arange(5.0)}
        ckpt.save(tensors, model, no_dist=True, format="safetensors", max_shard_size=1500)
        # Of young ones `watch` awaits what is missing.
        for place in (run / "step-1", run / "step-2", signed, model):
            edit_commit(place, lambda record: record.update(created_at="2026-01-01T00:00:00+00:00"))
        ckpt.sign(signed, self.private)
        ckpt.scrub(run)
        starts = [RunStart(at_s=1.7e9, durable_at_s=1.7e9)]
        made = [
            RunCheckpoint(step=n, path=f"step-{n}", saved_at_s=1.7e9, metrics={"loss": 1.0}) for n in (1, 2)
        ]
        write_run(PosixStore(str(run)), RunRecord(checkpoints=made, starts=starts))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            writer = dcp.FileSystemWriter(self._good / "stock" / "step-1")
            dcp.save(dict(state), storage_writer=writer, no_dist=True)

    def draw(self, seed: str, kind: str | None = None) -> Hostile:
        """Copy all to `scratch`, and change a record there; whatever lists it is made to fit."""
        rng = random.Random(seed)
        kind = kind or rng.choice(list(KINDS))
        shutil.rmtree(self.scratch, ignore_errors=True)
        part = KINDS[kind].pattern.partition("/")[0]
        shutil.copytree(self._good / part, self.scratch / part)
        path = rng.choice(sorted(self.scratch.glob(KINDS[kind].pattern)))
        data = path.read_bytes()
        try:
            path.write_bytes(_changed(kind, data, rng))
        except (ValueError, TypeError, RecursionError):  # no longer to be encoded
            path.write_bytes(_bytes_changed(data, rng))
        place = next(
            (above for above in path.parents if above.name.startswith("step-")), path.parent / "step-1"
        )
        if kind in ("manifest", "index", "runs"):
            _let_commit_fit(place, path)
        return Hostile(kind, path, place)

    def commands(self, hostile: Hostile) -> dict[str, list[str]]:
        """Return the arguments of every command, for the checkpoint that is hostile, or its root."""
        place = str(hostile.place)
        root = str(hostile.place.parent)
        out = str(self.scratch / "out")
        good = str(self._good / "run" / "step-1")
        is_model = hostile.kind.startswith("model")
        tensor = "w" if is_model else "model.w"
        public = str(self.public)
        return {
            "ls": ["ls", root],
            "inspect": ["inspect", place],
            "inspect all": ["inspect", place, "--all"],
            "slices": ["inspect", place, "--json", "--tensor", "*"],
            "report": ["report", place, "-o", "-"],
            "report of a run": ["report", root, "-o", "-"],
            "verify": ["verify", place],
            "quick": ["verify", place, "--quick", "--json"],
            "verify signed": ["verify", root, "--signed", "--key", public],
            "cat": ["cat", place, f"{tensor}[3:7, :2]"],
            "cat all": ["cat", place, "*"],
            "cat object": ["cat", place, "objects"],
            "diff": ["diff", place, good],
            "diff full": ["diff", place, good, "--full"],
            "watch": ["watch", "--once", "--retries", "0", "--on-failure", "continue", "--exec", "true {path} {id}", root],
            "scrub": ["scrub", root],
            "scrub from": ["scrub", root, "--from", str(self._good / "run")],
            "sign": ["sign", place, "--key", str(self.private)],
            "cp": ["cp", place, out],
            "cp of a reference": ["cp", place, out, "--materialise"],
            "convert": ["convert", place, f"{out}.safetensors"],
            "convert to stock": ["convert", place, out, "--to", "dcp"],
            "drain": ["drain", root, out],
            "rm listed": ["rm", place, "--dry-run"],
            "rm": ["rm", place, "--yes"],
            "gc": ["gc", root, "--grace", "0"],
        }  # fmt: skip


def _changed(kind: str, data: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.25:
        return _bytes_changed(data, rng)
    if kind in ("metadata", "own metadata"):
        return _metadata_changed(data, rng)
    if kind in ("index", "runs"):
        record = msgspec.msgpack.decode(_regular_index() if kind == "runs" else data)
        if kind == "runs" and rng.random() < 0.5:
            record["runs"] = _numbers_changed(record["runs"], rng)
        _change(record, rng, [*VALUES, *COUNTS])
        return msgspec.msgpack.encode(record)
    is_sealed = is_sealed_json(data)
    record = json.loads(unseal_json(data, url="", key="") if is_sealed else data)
    values = [each for each in [*VALUES, *COUNTS, *LARGE] if not isinstance(each, bytes)]
    _change(record, rng, values)
    made = json.dumps(record, separators=(",", ":")).encode()
    return seal_json(made) if is_sealed else made


def _change(record: Any, rng: random.Random, values: list[Any]) -> None:
    """Change, remove or double a few places of a record."""
    for _ in range(rng.choice([1, 1, 2, 3])):
        *path, last = rng.choice([found for found in leaves(record) if found] or [()])
        parent = record
        for step in path:
            parent = parent[step]
        action = rng.choice(["set", "set", "set", "delete", "double"])
        if action == "delete":
            del parent[last]
        elif action == "double" and isinstance(parent, list):
            parent.append(parent[last])
        else:
            alike = [value for value in values if type(value) is type(parent[last])]
            parent[last] = copy.deepcopy(rng.choice(alike if alike and rng.random() < 0.6 else values))


def _bytes_changed(data: bytes, rng: random.Random) -> bytes:
    """Flip, cut or double bytes; under a valid seal, if it had one, in half of all cases."""
    is_sealed = is_sealed_json(data) and rng.random() < 0.5
    raw = bytearray(unseal_json(data, url="", key="") if is_sealed else data)
    for _ in range(rng.randint(1, 4)):
        raw[rng.randrange(len(raw))] = rng.randrange(256)
    start, stop = sorted(rng.randrange(len(raw)) for _ in range(2))
    cut = rng.choice(["nothing", "nothing", "end", "middle", "double"])
    cut_bytes(raw, cut, start, stop)
    try:
        return seal_json(bytes(raw)) if is_sealed else bytes(raw)
    except ValueError:
        return bytes(raw)


def _metadata_changed(data: bytes, rng: random.Random) -> bytes:
    metadata = pickle.loads(data)
    for _ in range(rng.randint(1, 3)):
        owner, name = rng.choice(fields_of(metadata))
        value = copy.deepcopy(rng.choice([*VALUES, *COUNTS]))
        setattr(owner, name, rng.choice([value, (value, value), [value]]))
        if name in ("chunks", "storage_meta"):
            break
    return pickle.dumps(metadata)


def _regular_index() -> bytes:
    """Encode an index with a tensor whose chunks are runs."""
    file = [(0, _ROWS, 0, 1, 0)]
    offset = [(0, _ROWS, 64, 1, 0)]
    length = [(64, _ROWS, 0, 1, 0)]
    begin = [(0, _ROWS, 1, 1, 0)]
    size = [(1, _ROWS, 0, 1, 0)]
    columns = tuple(map(Runs.of, (file, offset, length, begin, size)))
    made = Columns(files=[f"rank-00000/{'c' * 16}-0.distcp"])
    made.entries |= {name: TensorRuns("uint8", (_ROWS,), False, columns) for name in ("a", "b")}
    return encode_index(made)


def _numbers_changed(packed: bytes, rng: random.Random) -> bytes:
    raw = bytearray(zlib.decompress(packed))
    raw[rng.randrange(len(raw))] = rng.randrange(256)
    return zlib.compress(bytes(raw))


def _let_commit_fit(place: Path, path: Path) -> None:
    """Let the commit list the new size and checksum of a record."""
    commit = place / "commit.json"
    record = json.loads(unseal_json(commit.read_bytes(), url="", key=""))
    data = path.read_bytes()
    key = path.relative_to(place).as_posix()
    for ref in (record["index"], *record["manifests"]):
        if ref["path"] == key:
            ref |= {"size_bytes": len(data), "crc64nvme": f"{crc64nvme(data):016x}"}
    commit.write_bytes(seal_json(json.dumps(record, separators=(",", ":")).encode()))
