"""Sizes of records before torch 2.13, which did not tell them: Python's parser says what torch's own says, or nothing."""

from __future__ import annotations

import io
import random
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
