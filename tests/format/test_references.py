"""Check records of version 4: what refers to other checkpoints, and what they must not name."""

from __future__ import annotations

import copy
from typing import Any

import msgspec
import pytest

from ckpt.consistency.seal import seal_json, unseal_json
from ckpt.errors import FormatError
from ckpt.format.columns import Columns
from ckpt.format.index import check_columns, decode_index, encode_index
from ckpt.format.names import is_path, is_sibling, owned_path, split_path
from ckpt.format.records import (
    BaseRef,
    CommitRecord,
    FileRecord,
    ItemRecord,
    ManifestRef,
    ObjectRef,
    RankManifest,
    decode_commit,
    decode_manifest,
    encode,
)

_CRC = "0" * 16
_BASE: dict[str, Any] = {"path": "../step-100", "id": "a" * 16, "data_bytes": 100, "carried_bytes": 60}


def _manifest(path: str, rank: int = 0) -> dict[str, Any]:
    totals = {"size_bytes": 10, "crc64nvme": _CRC, "files": 1, "items": 1, "data_bytes": 10}
    return {"path": path, "rank": rank, **totals}


def _commit(**changes: Any) -> dict[str, Any]:
    record: dict[str, Any] = {
        "format": "ckpt-storage", "version": 4, "id": "b" * 16, "created_at": "", "library": "", "torch": "",
        "world_size": 2, "data_bytes": 10, "index": {"path": "rank-00000/x.index", "size_bytes": 1, "crc64nvme": _CRC},
        "manifests": [
            _manifest(f"rank-00000/{'b' * 16}.json"),
            _manifest(f"../step-100/rank-00000/{'a' * 16}.json"),
            _manifest(f"../step-100/rank-00007/{'c' * 16}.json", 7),
        ],
        "tags": {}, "referable": True, "bases": [copy.deepcopy(_BASE)],
    }  # fmt: skip
    return {name: value for name, value in (record | changes).items() if value is not None}


def _decoded(record: dict[str, Any]) -> CommitRecord:
    return decode_commit(seal_json(msgspec.json.encode(record)), url="memory://place", key="commit.json")


def test_a_record_that_refers() -> None:
    """A base may have been saved by more ranks than there are now."""
    record = _decoded(_commit())
    assert record.is_referable
    assert record.owners == {"step-100": BaseRef(**_BASE)}
    assert record.carried_bytes == 60
    assert [ref.owner for ref in record.manifests] == ["", "step-100", "step-100"]
    assert [ref.rank for ref in record.own_manifests] == [0]
    assert _decoded(msgspec.json.decode(unseal_json(encode(record), url="", key=""))) == record


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 2},  # its readers would delete what others refer to
        {"version": 2, "bases": None},
        {"referable": None, "bases": None, "manifests": []},  # of version 4 without reason
        {"bases": None},
        {"bases": []},
        {"manifests": [_manifest(f"rank-00000/{'b' * 16}.json")]},
        {"bases": [_BASE, _BASE]},
        {"bases": [_BASE, _BASE | {"path": "../step-200"}]},
        {"bases": [_BASE | {"id": "x"}]},
        {"bases": [_BASE | {"carried_bytes": 101}]},
        {"bases": [_BASE | {"carried_bytes": -1}]},
        {"bases": [_BASE | {"path": f"../step-{n}"} for n in range(2000)]},
        {"index": {"path": f"../step-100/rank-00000/{'a' * 16}.index", "size_bytes": 1, "crc64nvme": _CRC}},
        {"layout": "safetensors"},
        {"version": 5},
    ],
)
def test_a_record_that_contradicts_itself(changes: dict[str, Any]) -> None:
    with pytest.raises(FormatError):
        _decoded(_commit(**changes))


_KEY = f"rank-00000/{'a' * 16}.json"
_HOSTILE_NAMES = ["", ".", "..", "../..", "a/b", "a\\b", "a\0b", "a\nb", "x::file", "s3:", "a?b=c", "a#b", "%2e%2e",
                  "a*", "a[b]", "x" * 256, "~root\u202e", "\ud800"]  # fmt: skip


@pytest.mark.parametrize("name", _HOSTILE_NAMES)
def test_only_folders_beside_it_are_named(name: str) -> None:
    assert not is_sibling(name)
    assert not is_path(f"../{name}/{_KEY}")
    for text in (f"../{name}", name) if "\ud800" not in name else ():
        with pytest.raises(FormatError):
            _decoded(_commit(bases=[_BASE | {"path": text}]))
        manifests = [_manifest(f"{text}/{_KEY}")]
        with pytest.raises(FormatError):
            _decoded(_commit(bases=[_BASE | {"path": text}], manifests=manifests))


@pytest.mark.parametrize(
    "path",
    [f"../step-100/../step-100/{_KEY}", f"../step-100//{_KEY}", f"../../{_KEY}", f"/step-100/{_KEY}", f"./{_KEY}",
     "../step-100/commit.json", "../step-100/.metadata", "../step-100/secret", "../step-100/", "../step-100", "..",
     f"../step-100/{_KEY}\n", f"x/../../step-100/{_KEY}"],
)  # fmt: skip
def test_only_objects_of_this_library_are_named(path: str) -> None:
    assert not is_path(path)
    with pytest.raises(FormatError):
        _decoded(_commit(manifests=[_manifest(path)]))
    columns = Columns(files=[path])
    with pytest.raises(FormatError):
        check_columns(columns)
    with pytest.raises(FormatError):
        decode_index(encode_index(columns), url="", key="")


@pytest.mark.parametrize(
    "path", [f"../step-100/rank-00001/{'a' * 16}.json", f"../step-100/rank-00000/{'a' * 16}.index"]
)
def test_a_manifest_of_another_rank_or_kind(path: str) -> None:
    with pytest.raises(FormatError):
        _decoded(_commit(manifests=[_manifest(path)]))


def test_paths_of_owners() -> None:
    for name in ("step-100", "step=3.ckpt", "Épreuve 3", "100", "a+b@c,d", "_x", "rank-00000"):
        path = owned_path(name, _KEY)
        assert is_path(path), name
        assert split_path(path) == (name, _KEY)
    assert owned_path("", _KEY) == _KEY
    assert split_path(_KEY) == ("", _KEY)
    columns = Columns(files=[f"../step-100/rank-00000/{'a' * 16}-0.distcp"])
    assert decode_index(encode_index(columns), url="", key="").files == columns.files


def _manifest_record(digests: bytes | msgspec.UnsetType = msgspec.UNSET) -> RankManifest:
    file = FileRecord(path="rank-00000/f", size_bytes=0, blocks=b"")
    items = [ItemRecord(fqn, [0], 0, 0, 0, 0, 0) for fqn in "ab"]
    return RankManifest(
        rank=0, token="t", block_size_bytes=1 << 19, files=[file], items=items, digests=digests
    )


def test_digests_of_items() -> None:
    record = _manifest_record(digests=bytes(16) + b"0123456789abcdef")
    read = decode_manifest(encode(record), url="", key="")
    assert [read.digest(number) for number in range(2)] == [b"", b"0123456789abcdef"]
    assert _manifest_record().digest(0) == b""
    assert b"digests" not in encode(_manifest_record())
    for digests in (b"", bytes(16), bytes(33)):
        with pytest.raises(FormatError):
            decode_manifest(encode(_manifest_record(digests=digests)), url="", key="")


def test_versions_before_have_neither() -> None:
    """Their bytes are as ever, for readers that know no other version."""
    ref = ObjectRef(path="rank-00000/x.index", size_bytes=1, crc64nvme=_CRC)
    own = ManifestRef(**_manifest(_KEY))
    record = CommitRecord(
        id="b" * 16,
        created_at="",
        library="",
        torch="",
        world_size=1,
        data_bytes=0,
        index=ref,
        manifests=[own],
    )
    text = encode(record)
    assert b"bases" not in text
    assert b"referable" not in text
    assert b'"version":2' in text
    assert not record.is_referable
    assert (record.owners, record.carried_bytes) == ({}, 0)
