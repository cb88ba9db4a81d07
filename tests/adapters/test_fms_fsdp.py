"""The adapter of fms-fsdp, beyond the law: retention, its own checkpoints, loaders, single files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.servers import S3Server

from adapters.environments import python_of
from adapters.test_law import Host, life_of, run_life, s3_environment

_CHECKS = Host("fms_fsdp_checks", environment="fms_fsdp")


@pytest.mark.xdist_group("fms_fsdp")
@pytest.mark.parametrize("store", ["local", "s3"])
def test_fms_fsdp_checks(store: str, tmp_path: Path, s3: S3Server) -> None:
    life, environ = life_of(_CHECKS, tmp_path), {}
    if store == "s3":
        life, environ = replace(life, root=f"s3://{s3.new_bucket()}/run"), s3_environment(s3)
    python = python_of(_CHECKS.environment or _CHECKS.name)
    assert run_life(_CHECKS, python, life, world_size=2, environ=environ) == {"checks": 9}
