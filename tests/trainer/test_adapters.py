"""Adapters of frameworks that are not installed, or not in a version that they know."""

from __future__ import annotations

import importlib

import pytest

from ckpt.errors import ConfigurationError
from ckpt.trainer_integration.adapters.host import require_host


def test_a_host_in_a_known_version() -> None:
    import torch

    version = require_host("torch", oldest="2.11", before="3")
    assert version.partition("+")[0] == torch.__version__.partition("+")[0]


@pytest.mark.parametrize(
    ("distribution", "oldest", "before", "text"),
    [
        ("no-such-trainer", "1.0", "2", r"no-such-trainer is not installed: pip install 'no-such-trainer>=1\.0,<2'"),
        ("torch", "1.0", "2.0", r"torch .* is newer than this adapter knows \(1\.0 to below 2\.0\): pip install"),
        ("torch", "99", "100", r"torch .* is older than this adapter knows \(99 to below 100\): pip install"),
    ],
)  # fmt: skip
def test_a_host_that_cannot_be_used(distribution: str, oldest: str, before: str, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        require_host(distribution, oldest=oldest, before=before)


@pytest.mark.parametrize(
    ("adapter", "distribution"),
    [
        ("lightning", "lightning"),
        ("pytorch_lightning", "pytorch-lightning"),
        ("ray", "ray"),
        ("huggingface", "accelerate"),
        ("accelerate", "accelerate"),
        ("megatron", "megatron-core"),
    ],
)
def test_an_adapter_without_its_host(adapter: str, distribution: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{distribution} is not installed: pip install"):
        importlib.import_module(f"ckpt.trainer_integration.adapters.{adapter}")
