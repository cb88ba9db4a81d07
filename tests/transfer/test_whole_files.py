"""Files of our own appear whole, and leave nothing behind when they cannot be written."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from ckpt.whole_files import write_whole


def test_a_file_takes_the_place_of_an_older_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "figures.prom"
    write_whole(path, b"one")
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask
    os.link(path, tmp_path / "reader")  # who has opened the older one
    write_whole(path, b"two", durable=True)
    assert (path.read_bytes(), (tmp_path / "reader").read_bytes()) == (b"two", b"one")
    monkeypatch.chdir(tmp_path)
    long = "\N{ROCKET}" * 60
    write_whole(long, b"three", private=True)
    assert stat.S_IMODE(os.stat(long).st_mode) == 0o600
    assert sorted(os.listdir()) == ["figures.prom", "reader", long]


def test_what_fails_leaves_the_older_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "figures.prom"
    write_whole(path, b"one")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, b"two", durable=True)
    assert (path.read_bytes(), os.listdir(tmp_path)) == (b"one", ["figures.prom"])
    with pytest.raises(IsADirectoryError):
        write_whole(tmp_path, b"three")
    assert os.listdir(tmp_path) == ["figures.prom"]
