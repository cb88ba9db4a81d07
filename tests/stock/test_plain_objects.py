"""Plain objects are read without torch, and are what torch reads; whatever else there is, torch decides."""

from __future__ import annotations

import collections
import io
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt.stock.plain_objects import plain_value

PLAIN: list[Any] = [
    5, -(1 << 40), 1 << 300, 0.1, float("inf"), True, None, "text ü", "", [], {}, (), (1,), [1, [2, (3, None)]],
    {"lr": 0.1, "betas": (0.9, 0.95), 7: ["a"] * 3, "deep": {"x": {"y": [False]}}}, list(range(5000)),
]  # fmt: skip
OTHERS: list[Any] = [
    b"bytes", {1}, 1j, 1 << 3000, torch.ones(2), [torch.float32], torch.Size((2,)), collections.OrderedDict(a=1),
    {(1, 2): 3}, {1 << 70: 1}, io.BytesIO(b"a"), torch.device("cpu"),
]  # fmt: skip


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


@pytest.mark.parametrize("checksums", [True, False])
def test_plain_values_are_what_torch_loads(checksums: bool) -> None:
    """Objects of a save are written without the checksums of zip."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(checksums)
    try:
        archives = [saved(value) for value in PLAIN]
    finally:
        torch.serialization.set_crc32_options(before)
    for value, data in zip(PLAIN, archives, strict=True):
        assert repr(plain_value(data)) == repr(torch.load(io.BytesIO(data))) == repr(value)


@pytest.mark.parametrize("value", OTHERS, ids=lambda value: type(value).__name__)
def test_other_values_are_left_to_torch(value: Any) -> None:
    with pytest.raises(Exception):  # noqa: B017
        plain_value(saved(value))


class _Harm:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._path),)


def archive(records: dict[str, bytes], **options: Any) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", **options) as made:
        for name, data in records.items():
            made.writestr(name, data)
    return file.getvalue()


def test_archives_that_torch_could_read_otherwise(tmp_path: Path) -> None:
    five, six = (pickle.dumps(number, protocol=2) for number in (5, 6))
    assert plain_value(archive({"a/data.pkl": five, "a/version": b"3"})) == 5
    for data in (
        archive({"a/data.pkl": five, "b/data.pkl": six}),
        archive({"a/data.pkl": five, "A/DATA.PKL": six}),
        archive({"a/data.pkl": five, "a/data/0": b"123"}),
        archive({"a/data.pkl": five} | {f"a/{number}": b"" for number in range(20)}),
        archive({"a/data.pkl": pickle.dumps("x" * 1000)}, compression=zipfile.ZIP_DEFLATED),
        archive({"a/data.pkl": pickle.dumps(_Harm(tmp_path / "made"), protocol=2)}),
        archive({"a/data.pkl": b"\x80\x02K\x01r\xff\xff\xff\x7f."}),  # a memo of 2**31 places
        *(archive({"a/data.pkl": pickle.dumps(5, protocol=protocol)}) for protocol in (0, 1, 3, 4, 5)),
        archive({"a/data.pkl": five[:-1]}),
        archive({"a/version": b"3"}),
        b"",
        saved(PLAIN)[:-30],
    ):
        with pytest.raises(Exception):  # noqa: B017
            plain_value(data)
    assert not (tmp_path / "made").exists()
