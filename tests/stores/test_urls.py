"""A checkpoint at the root of a bucket is saved, with a warning: mostly the folder was forgotten."""

from __future__ import annotations

import logging

import pytest
import torch
from support.servers import S3Server

import ckpt
from ckpt.backends.registry import is_bucket


def test_a_save_at_the_root_of_a_bucket_warns(s3: S3Server, caplog: pytest.LogCaptureFixture) -> None:
    url = f"s3://{s3.new_bucket()}"
    with caplog.at_level(logging.WARNING, logger="ckpt"):
        ckpt.save({"w": torch.ones(2)}, url, storage_options=s3.options)
        assert f"{url} is a whole bucket: name a folder in it, such as {url}/step-1" in caplog.text
        caplog.clear()
        ckpt.save({"w": torch.ones(2)}, f"{url}/step-1", storage_options=s3.options)
        assert not caplog.text


@pytest.mark.parametrize(
    ("url", "expected"), [("s3://b", True), ("cos://b/", True), ("s3://b/c", False), ("/tmp", False)]
)
def test_is_bucket(url: str, expected: bool) -> None:
    assert is_bucket(url) is expected
