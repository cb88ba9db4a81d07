"""Feed hostile bytes to the decoders: only this library's errors come out, and memory stays bounded."""

from __future__ import annotations

import pickle
import tracemalloc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.hostile import HOSTILE, change_places, cut_bytes, fields_of
from support.states import random_tensor
from support.tiers import examples

import ckpt
from ckpt.consistency.seal import seal_json, unseal_json
from ckpt.errors import FormatError, IntegrityError, UnsafeContent
from ckpt.format.dcp_view import columns_of
from ckpt.format.index import decode_index
from ckpt.format.records import decode_commit, decode_manifest
from ckpt.stock.metadata_reader import decode_metadata

Decoder = Callable[..., Any]

_MAX_PEAK_BYTES = 8 << 20
"""Far more than any of these records, of a few kilobytes, may ever take."""

FUZZ = settings(
    max_examples=examples(3000), suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Every kind of record, of a small checkpoint: two tensors and an object."""
    place = tmp_path_factory.mktemp("records")
    state = {"model": {"w": random_tensor(20, 30), "b": torch.arange(5.0)}, "objects": [1, {"x": "y"}]}
    ckpt.save(state, place / "ours")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=dcp.FileSystemWriter(place / "stock"))
    (manifest,) = (path for path in place.glob("ours/rank-00000/*.json"))
    (index,) = place.glob("ours/rank-00000/*.index")
    paths = {
        "commit": Path("ours/commit.json"),
        "manifest": manifest,
        "index": index,
        "metadata": Path("stock/.metadata"),
    }
    return {name: (place / path).read_bytes() for name, path in paths.items()}


def _decode_metadata(data: bytes, *, url: str, key: str) -> None:
    columns_of(decode_metadata(data, url=url, key=key), url=url)


DECODERS: dict[str, Decoder] = {
    "commit": decode_commit,
    "manifest": decode_manifest,
    "index": decode_index,
    "metadata": _decode_metadata,
}


def check(kind: str, data: bytes) -> None:
    """Decode a record, which may be refused, in bounded memory."""
    refusal = ""
    tracemalloc.start()
    try:
        DECODERS[kind](data, url="memory://place", key="record")
    except (IntegrityError, FormatError, UnsafeContent) as error:
        refusal = str(error)
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert not refusal or ("memory://place" in refusal and len(refusal) < 1000)
    assert peak < _MAX_PEAK_BYTES


def sealed(raw: bytes) -> bytes:
    """Put a seal under `raw`, if it can have one."""
    try:
        return seal_json(raw)
    except ValueError:
        return raw


def test_valid_records_are_decoded(records: dict[str, bytes]) -> None:
    for kind, data in records.items():
        DECODERS[kind](data, url="u", key="k")


@pytest.mark.parametrize("kind", ["commit", "manifest"])
def test_values_in_sealed_records(records: dict[str, bytes], kind: str) -> None:
    original = unseal_json(records[kind], url="u", key="k")

    @given(data=st.data())
    @FUZZ
    def change(data: st.DataObject) -> None:
        record = msgspec.json.decode(original)
        change_places(record, data, json_only=True)
        check(kind, seal_json(msgspec.json.encode(record)))

    change()


@given(data=st.data())
@FUZZ
def test_values_in_an_index(records: dict[str, bytes], data: st.DataObject) -> None:
    index = msgspec.msgpack.decode(records["index"])
    change_places(index, data, json_only=False)
    check("index", msgspec.msgpack.encode(index))


@given(data=st.data())
@settings(FUZZ, max_examples=examples(1000))
def test_values_in_metadata(records: dict[str, bytes], data: st.DataObject) -> None:
    metadata = pickle.loads(records["metadata"])
    for _ in range(data.draw(st.integers(1, 3))):
        owner, name = data.draw(st.sampled_from(fields_of(metadata)))
        setattr(
            owner, name, data.draw(HOSTILE | st.tuples(HOSTILE, HOSTILE) | st.lists(st.text(), max_size=3))
        )
        if name in ("chunks", "storage_meta"):
            break
    check("metadata", pickle.dumps(metadata))


@pytest.mark.parametrize("kind", DECODERS)
def test_bytes(records: dict[str, bytes], kind: str) -> None:
    """Flipped, cut and doubled bytes; under a valid seal, where a record has one."""
    is_sealed = kind in ("commit", "manifest")
    original = unseal_json(records[kind], url="u", key="k") if is_sealed else records[kind]

    @given(data=st.data(), seal=st.booleans())
    @FUZZ
    def change(data: st.DataObject, seal: bool) -> None:
        raw = bytearray(original)
        for _ in range(data.draw(st.integers(1, 4))):
            raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
        start, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(raw))] * 2)))
        cut = data.draw(st.sampled_from(["nothing", "end", "middle", "double"]))
        cut_bytes(raw, cut, start, stop)
        check(kind, sealed(bytes(raw)) if seal and is_sealed else bytes(raw))

    change()


@pytest.mark.parametrize("kind", DECODERS)
def test_any_bytes(kind: str) -> None:
    @given(raw=st.binary(max_size=300))
    @FUZZ
    def decode(raw: bytes) -> None:
        check(kind, raw)
        check(kind, sealed(raw + b"}"))

    decode()
