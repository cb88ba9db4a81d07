"""accelerate's own saves to a URL after `ckpt.install()`: an error, and no local folder of that name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from adapters.environments import run

PROGRAM = """
import os, sys
before = sys.argv[1] == "installed first"
import ckpt
if before:
    ckpt.install()
import torch
from accelerate import Accelerator
if not before:
    ckpt.install()

accelerator = Accelerator(cpu=True)
model = accelerator.prepare(torch.nn.Linear(2, 2))
for call in (accelerator.save_state, accelerator.load_state):
    for place in ("s3://bucket/run/step-1", "memory://run/step-1"):
        try:
            call(place)
        except ckpt.errors.ConfigurationError as error:
            assert f"{call.__name__}(accelerator, url)" in str(error), error
        else:
            raise AssertionError(f"{call.__name__} took {place}")
assert os.listdir(".") == [], os.listdir(".")
accelerator.save_state("step-1")
accelerator.load_state("step-1")
ckpt.uninstall()
accelerator.save_state("s3://bucket/run/step-1")  # as accelerate has it
assert os.path.isdir("s3:")
"""


@pytest.mark.timeout(1000)
@pytest.mark.xdist_group("huggingface")
@pytest.mark.parametrize("order", ["installed first", "imported first"])
def test_urls_are_refused_after_install(order: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    folder = tmp_path / "folder"
    program.write_text(PROGRAM)
    folder.mkdir()
    run("huggingface", str(program), order, folder=folder)
    assert sorted(os.listdir(folder)) == ["s3:", "step-1"]
