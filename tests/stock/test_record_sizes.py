"""Sizes of records before torch 2.13, which did not tell them: Python's parser says what torch's own says, or nothing."""

from __future__ import annotations

import io
import random
import struct
import zipfile
import zlib
from typing import Any

import pytest
import torch
from support.tiers import examples

from ckpt.errors import FormatError
from ckpt.stock.item_archive import sizes_of
from ckpt.stock.item_files import MemoryFile
from ckpt.torch_private import archive_reader


class Before213:
    """Torch's reader as it was."""

    def __init__(self, reader: Any) -> None:
        self.get_record_header_offset = reader.get_record_header_offset
        self.get_all_records = reader.get_all_records


@pytest.fixture(scope="module")
def archive() -> bytes:
    data = io.BytesIO()
    torch.save({"a": torch.randn(100), "b": [1, 2]}, data)
    return data.getvalue()


def sizes(data: bytes) -> tuple[dict[str, int], dict[str, int]]:
    """Return the sizes by Python's parser, and by torch's own."""
    file = MemoryFile(data)
    reader = archive_reader(file)
    names = reader.get_all_records()
    size_of = sizes_of(Before213(reader), file)
    told = getattr(reader, "get_record_size", lambda name: len(reader.get_record(name)))
    return {name: size_of(name) for name in names}, {name: told(name) for name in names}


def test_sizes_are_those_that_torch_tells(archive: bytes) -> None:
    ours, torchs = sizes(archive)
    assert ours == torchs
    assert ours["data/0"] == 400


def test_no_damage_is_understood_in_two_ways(archive: bytes) -> None:
    """Damage in the directory, where sizes and places are: refused by one of both, or the same to both."""
    draw, same = random.Random(0), 0
    for _ in range(examples(6000)):
        damaged = bytearray(archive)
        for _ in range(draw.choice([1, 1, 2, 3])):
            reach = draw.choice([98, 700])
            damaged[-draw.randrange(1, reach)] = draw.choice([0, 5, 6, 7, 75, 80, 255, draw.randrange(256)])
        try:
            ours, torchs = sizes(bytes(damaged))
        except (FormatError, RuntimeError, UnicodeDecodeError):
            continue
        assert ours == torchs
        same += 1
    assert same > 50


@pytest.mark.parametrize("tail", [b"cos\nsystem\n", b"PK\5\6" + bytes(18), b"\0"])
def test_what_does_not_end_with_its_directory_is_refused(archive: bytes, tail: bytes) -> None:
    with pytest.raises((FormatError, RuntimeError)):
        sizes(archive + tail)


def test_a_second_directory_is_refused(archive: bytes) -> None:
    """The locator names another one than that before it, which a parser could take."""
    damaged = bytearray(archive)
    damaged[-34:-26] = (int.from_bytes(damaged[-34:-26], "little") - 1).to_bytes(8, "little")
    with pytest.raises((FormatError, RuntimeError)):
        sizes(bytes(damaged))


LARGE_BYTES = 64 << 20


def zipped(extra_entry: bool = False, second_field: bool = False) -> bytes:
    """Write an archive of a compressed record whose directory shows Python another size than torch."""
    packing = zlib.compressobj(wbits=-15)
    packed = packing.compress(bytes(LARGE_BYTES)) + packing.flush()
    records = {"archive/version": (b"3\n", b"3\n", 0), "archive/data/0": (packed, bytes(LARGE_BYTES), 8)}
    data, directory, count = bytearray(), bytearray(), 0
    for name, (stored, plain, method) in records.items():
        fixed = struct.pack("<HHHHI", 0, method, 0, 33, zlib.crc32(plain))
        entries = [(len(stored), len(plain), b"", method)]
        if method and second_field:
            field = struct.pack("<HHQ", 1, 8, 0xFFFFFFFF) + struct.pack("<HHQ", 1, 8, 400)
            entries = [(len(stored), 0xFFFFFFFF, field, method)]
        if method and extra_entry:
            entries.append((400, 400, b"", 0))
        for nbytes, size, extra, how in entries:
            own = struct.pack("<HHHHI", 0, how, 0, 33, zlib.crc32(plain))
            directory += struct.pack("<IHH", 0x02014B50, 45, 45) + own
            directory += struct.pack("<IIHHHHHII", nbytes, size, len(name), len(extra), 0, 0, 0, 0, len(data))
            directory += name.encode() + extra
        count += 1
        data += struct.pack("<IH", 0x04034B50, 45) + fixed
        data += struct.pack("<IIHH", len(stored), len(plain), len(name), 0) + name.encode() + stored
    begin = len(data)
    end = struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, count, count, len(directory), begin, 0)
    return bytes(data + directory + end)


@pytest.mark.parametrize("lie", [{}, {"extra_entry": True}, {"second_field": True}])
def test_two_parsers_that_are_shown_two_sizes(lie: dict[str, bool]) -> None:
    data = zipped(**lie)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        shown = {each.header_offset: each.file_size for each in archive.infolist()}
    assert (400 in shown.values()) == bool(lie)
    with pytest.raises((FormatError, RuntimeError)) as refused:
        sizes(data)
    assert isinstance(refused.value, FormatError) or "second_field" in lie
