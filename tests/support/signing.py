"""Make keys, and runs of signed checkpoints, for the tests of provenance."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from torch.distributed.checkpoint.metadata import Metadata

import ckpt
from ckpt.provenance.keys import pem_of
from ckpt.writing.writer import SaveMeta

STEPS = (5, 7, 9)


@functools.cache
def _private(name: str) -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def keys(folder: Path, name: str = "key") -> tuple[Path, Path]:
    """Write a key, the same for the same name, and return the paths of its private and its public part."""
    private, public = folder / f"{name}.pem", folder / f"{name}.pub.pem"
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    private.write_bytes(_private(name).private_bytes(encoding, form, serialization.NoEncryption()))
    public.write_bytes(pem_of(_private(name).public_key()))
    return private, public


def state(seed: int) -> dict[str, Any]:
    """Make a state of two and a half blocks."""
    generator = torch.Generator().manual_seed(seed)
    values = {name: torch.randn(400, 400, generator=generator) for name in ("a", "b")}
    return {"model": values, "counts": torch.arange(10) + seed, "lr": float(seed)}


def digest_in(saved: Metadata) -> str:
    """Return the digest of what was saved."""
    assert isinstance(saved.storage_meta, SaveMeta)
    return saved.storage_meta.digest


def signed_run(root: Path, key: Path, seed: int = 0, *, algorithm: str = "sha256") -> list[str]:
    """Save and sign a checkpoint for each of `STEPS`; return their digests."""
    digests = []
    for step in STEPS:
        url = root / f"step-{step}"
        saved = ckpt.save(
            state(seed + step), url, no_dist=True, tags={"step": str(step)}, block_digests=algorithm
        )
        digests.append(digest_in(saved))
        assert ckpt.sign(url, key, expect=digests[-1]).digest == digests[-1]
    return digests
