"""What all commands print alike: notices of retries, tags."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from support.clock import skip_pauses_of_s3
from support.commands import run
from support.servers import refusing_port

import ckpt
from ckpt.words import tags_text


def test_a_server_out_of_reach_is_named_soon_and_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = skip_pauses_of_s3(monkeypatch)
    monkeypatch.setattr("ckpt.backends.s3_protocol.retries.time", clock)
    with refusing_port() as port:
        options = ["key=k", "secret=s", f"endpoint_url=http://127.0.0.1:{port}"]
        arguments = [argument for option in options for argument in ("--storage-options", option)]
        ran = run("ls", "s3://bucket/run", *arguments)
    assert ran.code == 4
    first, *notices, error = ran.err.splitlines()
    assert re.match(r"retrying s3://bucket/run since [2-4] s: .*127\.0\.0\.1", first)
    assert 1 <= len(notices) <= 2
    assert error.startswith("error: s3://bucket/run: cannot ")
    assert 10 < clock.skipped_s < 15


def test_no_name_becomes_a_picture(tmp_path: Path) -> None:
    place = tmp_path / "run:100:" / "step:a:1"
    ckpt.save({"w": torch.ones(2)}, place)
    assert "step:a:1" in run("ls", place.parent).out
    assert "/run:100:/step:a:1" in run("verify", place).out


def test_tags() -> None:
    tags = {"step": "100", "loss": "9.122579574584961", "id": "123456789012", "tiny": "1.2345678e-11"}
    assert tags_text(tags) == "step=100, loss=9.123, id=123456789012, tiny=1.235e-11"
    texts = {"day": "2026_11_22", "commit": "73e1234567", "version": "1.2.3+cu130"}
    assert tags_text(texts) == "day=2026_11_22, commit=73e1234567, version=1.2.3+cu130"
    assert tags_text({str(n): "x" for n in range(1000)}).endswith("7=x, and 992 more")


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("cp", "--dst-storage-options"),
        ("convert", "--dst-storage-options"),
        ("diff", "--b-storage-options"),
        ("doctor", "--second-storage-options"),
    ],
)
def test_an_error_in_storage_options_names_the_option(command: str, option: str, tmp_path: Path) -> None:
    ran = run(command, tmp_path / "a", tmp_path / "b", option, "nonsense")
    assert (ran.code, f"{option}: write KEY=VALUE" in ran.err) == (2, True), ran.err
