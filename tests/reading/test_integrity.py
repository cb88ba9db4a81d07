"""Never silently wrong: damage to any byte is found, and what is not committed does not load."""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.clock import SkippingClock
from support.proxy import Call, FaultProxy
from support.states import digest, emptied, random_tensor

import ckpt
from ckpt.backends import memory
from ckpt.backends.base import MIB
from ckpt.consistency.environment import replaced
from ckpt.errors import (
    CheckpointError,
    CommitConflict,
    FormatError,
    IntegrityError,
    NotCommitted,
    NotFound,
    NotVisible,
    Truncated,
)
from ckpt.format.index import _MANIFEST_GROWTH

STATE: dict[str, Any] = {
    "large": random_tensor(600, 1100),
    "tail": random_tensor(MIB // 4 - 100),  # with its frame, the file's last block holds no payload
    "small": random_tensor(7, dtype=torch.bfloat16),
    "object": {"a": [1, "two", None]},
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("saved") / "c"
    ckpt.save(STATE, place, threads=1)
    return place


@pytest.fixture
def place(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved, tmp_path / "c")
    return tmp_path / "c"


def load(place: Path, **options: Any) -> Any:
    loaded = emptied(STATE)
    ckpt.load(loaded, place, **options)
    return digest(loaded)


def flipped(path: Path, positions: Iterator[int] | range | list[int]) -> Iterator[int]:
    """For each position, flip one bit of the file there, and mend it afterwards."""
    data = path.read_bytes()
    for position in positions:
        damaged = bytearray(data)
        damaged[position] ^= 1 << random.Random(position).randrange(8)
        path.write_bytes(damaged)
        yield position
    path.write_bytes(data)


def test_any_flipped_bit_in_a_data_file(place: Path) -> None:
    (path,) = place.rglob("*.distcp")
    size = path.stat().st_size
    edges = [0, 1, MIB - 1, MIB, 2 * MIB - 1, size - MIB, size - 700, size - 1]
    sample = random.Random(1).sample(range(size), 40)
    for position in flipped(path, sorted({*edges, *sample})):
        with pytest.raises(IntegrityError) as caught:
            load(place)
        error = caught.value
        assert error.key == f"rank-00000/{path.name}"
        assert error.start is not None
        assert error.stop is not None
        assert error.start <= position < error.stop <= size
        assert str(error.key) in str(error)
        assert f"bytes {error.start}-{error.stop}" in str(error)


@pytest.mark.parametrize("step", [19, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", ["commit.json", "rank-00000/*.json", "rank-00000/*.index"])
def test_any_flipped_bit_in_a_record(place: Path, name: str, step: int) -> None:
    (path,) = place.glob(name)
    size, loaded = path.stat().st_size, emptied(STATE)
    for _ in flipped(path, sorted({*range(0, size, step), size - 1})):
        with pytest.raises(IntegrityError) as caught:
            ckpt.load(loaded, place)
        assert caught.value.key == str(path.relative_to(place))
        assert (caught.value.start, caught.value.stop) == (0, size)


def test_damage_to_the_stock_metadata_changes_nothing(place: Path) -> None:
    path = place / ".metadata"
    for _ in flipped(path, range(0, path.stat().st_size, 37)):
        assert load(place) == digest(STATE)
    path.unlink()
    assert load(place) == digest(STATE)


def test_damage_is_not_looked_for_when_told_so(place: Path) -> None:
    (path,) = place.rglob("*.distcp")
    for _ in flipped(path, [MIB + 5]):
        assert load(place, verify=False) != digest(STATE)


@pytest.mark.parametrize("size", [0, 1000, MIB, 2 * MIB + 5])
def test_truncated_data_file(place: Path, size: int) -> None:
    (path,) = place.rglob("*.distcp")
    with path.open("r+b") as file:
        file.truncate(size)
    with pytest.raises(Truncated) as caught:
        load(place)
    assert caught.value.key == f"rank-00000/{path.name}"


@pytest.mark.parametrize("name", ["commit.json", "rank-00000/*.json", "rank-00000/*.index"])
def test_truncated_or_longer_record(place: Path, name: str) -> None:
    (path,) = place.glob(name)
    data = path.read_bytes()
    for changed in (b"", data[:-1], data + b"\n", data[: len(data) // 2]):
        path.write_bytes(changed)
        with pytest.raises(IntegrityError):
            load(place)


def test_a_byte_damaged_on_its_way_is_read_again(proxy: FaultProxy) -> None:
    ckpt.save(STATE, "s3://bucket/c", storage_options=proxy.server.options)
    damaged: list[Call] = []

    def rule(call: Call) -> str:
        if call.method == "GET" and call.key.endswith(".distcp") and not damaged:
            damaged.append(call)
            return "flip"
        return "pass"

    proxy.rule = rule
    loaded = emptied(STATE)
    ckpt.load(loaded, "s3://bucket/c", storage_options=proxy.options)
    assert digest(loaded) == digest(STATE)
    assert damaged


# -- incomplete places -----------------------------------------------------------------------------------


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="there is nothing here"):
        load(tmp_path / "nowhere")


def test_uncommitted(place: Path) -> None:
    (place / "commit.json").unlink()
    with pytest.raises(NotCommitted, match="did not finish"):
        load(place)


def test_half_copied(saved: Path, tmp_path: Path) -> None:
    """Whichever single file a copy lacks, the load says so, and at the latest when its patience ends."""
    for number, missing in enumerate(path for path in saved.rglob("*") if path.is_file()):
        copy = tmp_path / str(number)
        shutil.copytree(
            saved, copy, ignore=lambda folder, names, m=missing: [m.name] if Path(folder) == m.parent else []
        )
        if missing.name == ".metadata":
            assert load(copy) == digest(STATE)
            continue
        with pytest.raises((NotCommitted, NotVisible)) as caught:
            load(copy, visibility_timeout_s=0.2)
        if isinstance(caught.value, NotVisible):
            assert caught.value.key == str(missing.relative_to(saved))


def test_lagging_storage_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SkippingClock()
    monkeypatch.setattr("ckpt.backends.memory.time", clock)
    url = "memory://lagging/c"
    ckpt.save(STATE, url)
    loaded = emptied(STATE)
    with replaced(clock):
        ckpt.load(loaded, url, storage_options={"visibility_lag_s": 10.0})
    assert clock.skipped_s > 5
    assert digest(loaded) == digest(STATE)


def test_lagging_storage_is_not_waited_for_too_long() -> None:
    url = "memory://lagging-more/c"
    ckpt.save(STATE, url)
    with pytest.raises(NotFound):
        ckpt.load(emptied(STATE), url, storage_options={"visibility_lag_s": 60}, visibility_timeout_s=0.3)


@pytest.fixture
def expanded(sharded_place: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A place whose index counts as so large that both its manifests must bear it out."""
    url = "memory://expanded/c"
    ckpt.copy(sharded_place, url)
    larger = max(path.stat().st_size for path in sharded_place.glob("rank-*/*.json"))
    monkeypatch.setattr("ckpt.format.index._MAX_EXPANSION", 0)
    monkeypatch.setattr("ckpt.format.index._SLACK_BYTES", -larger * _MANIFEST_GROWTH)
    return url


def test_manifests_that_an_index_needs_are_looked_up_at_the_same_time(expanded: str) -> None:
    both = threading.Barrier(2)

    def fault(operation: str, key: str, when: str) -> None:
        if (operation, when) == ("stat", "before") and key.startswith("rank-") and key.endswith(".json"):
            both.wait(timeout=30)

    memory.inject(expanded, fault)
    assert ckpt.inspect(expanded).tensors


def test_manifests_that_an_index_needs_may_appear_late(expanded: str) -> None:
    """An index that they do not bear out is forged; one whose manifests are not to be seen is not."""
    looks: list[str] = []
    visible_at = 1 << 30

    def fault(operation: str, key: str, when: str) -> None:
        if (
            (operation, when) == ("stat", "before")
            and key.startswith("rank-00001/")
            and key.endswith(".json")
        ):
            looks.append(key)
            if len(looks) < visible_at:
                raise NotFound("not there", url=expanded, key=key)

    memory.inject(expanded, fault)
    with pytest.raises(NotVisible) as caught:
        ckpt.load({}, expanded, visibility_timeout_s=0.0)
    assert caught.value.key == looks[0]
    visible_at = len(looks) + 2
    ckpt.load({}, expanded, visibility_timeout_s=30.0)
    assert len(looks) == visible_at


def test_replaced_while_it_is_loaded() -> None:
    """The reader has the old commit; a save replaces it and removes its files: an error at once, no mixture."""
    url = "memory://replaced/c"
    ckpt.save(STATE, url)
    replaced: list[bool] = []

    def fault(operation: str, key: str, when: str) -> None:
        if operation == "read" and key.endswith(".distcp") and not replaced:
            replaced.append(True)
            ckpt.save({name: torch.zeros(3) for name in STATE}, url)

    memory.inject(url, fault)
    with pytest.raises(CommitConflict, match="load again"):
        ckpt.load(emptied(STATE), url)


def test_replaced_while_it_is_opened() -> None:
    url = "memory://replaced-early/c"
    ckpt.save({"t": torch.zeros(5)}, url)
    replaced: list[bool] = []

    def fault(operation: str, key: str, when: str) -> None:
        if operation == "stat" and key.endswith(".index") and not replaced:
            replaced.append(True)
            ckpt.save({"t": torch.ones(5)}, url)

    memory.inject(url, fault)
    loaded = {"t": torch.zeros(5)}
    ckpt.load(loaded, url)
    assert torch.equal(loaded["t"], torch.ones(5))


# -- what the records say --------------------------------------------------------------------------------


def test_a_newer_format_is_refused(place: Path) -> None:
    from ckpt.consistency.seal import seal_json, unseal_json

    path = place / "commit.json"
    record = unseal_json(path.read_bytes(), url="", key="")
    path.write_bytes(seal_json(record.replace(b'"version":2', b'"version":5')))
    with pytest.raises(FormatError, match="format version 5; this library reads up to 4"):
        load(place)


def test_unknown_fields_are_ignored(place: Path) -> None:
    from ckpt.consistency.seal import seal_json, unseal_json

    path = place / "commit.json"
    record = unseal_json(path.read_bytes(), url="", key="")
    path.write_bytes(seal_json(record[:-1] + b',"a_later_field":[1,{"x":2}]}'))
    assert load(place) == digest(STATE)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"world_size":1', b'"world_size":"one"'),
        (b'"path":"rank', b'"path":"/rank'),
        (b'"path":"rank', b'"path":"../rank'),
        (b'"rank":0', b'"rank":5'),
        (b'"format":"ckpt-storage"', b'"format":"other"'),
    ],
)
def test_records_that_make_no_sense(place: Path, old: bytes, new: bytes) -> None:
    from ckpt.consistency.seal import seal_json, unseal_json

    path = place / "commit.json"
    record = unseal_json(path.read_bytes(), url="", key="")
    assert old in record
    path.write_bytes(seal_json(record.replace(old, new)))
    with pytest.raises(FormatError) as caught:
        load(place)
    assert caught.value.key == "commit.json"
    assert isinstance(caught.value, CheckpointError)
