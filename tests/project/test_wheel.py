"""The wheel and the sdist: every folder is in them, and both work elsewhere."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from support.rooms import FOLDERS, ROOT, modules


def test_the_wheel_lists_every_folder() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    for folder, package in FOLDERS.items():
        assert f'"{package}"' in text
        assert f'= "{folder}"' in text
        if folder != "ckpt":
            link = ROOT / "ckpt" / folder
            assert link.is_symlink()
            assert link.readlink() == Path("..") / folder
    for module, path in modules().items():
        if path.stem == "__init__":
            assert f'"{module}"' in text, f"{module} would be missing in the wheel"


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the wheel and the sdist: DIST, or built from a copy without the links."""
    if "DIST" in os.environ:
        return Path(os.environ["DIST"]).absolute()
    folder = tmp_path_factory.mktemp("built")
    skipped = shutil.ignore_patterns(
        ".git", ".venv*", ".scratch", "results", "build", "dist", "*.egg-info", "__pycache__", ".*_cache"
    )
    shutil.copytree(ROOT, folder / "source", symlinks=True, ignore=skipped)
    for link in (folder / "source" / "ckpt").iterdir():
        if link.is_symlink():
            link.unlink()
    _run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", folder / "source")
    return folder / "dist"


@pytest.mark.long
def test_the_wheel_holds_every_module(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = {
        module.replace(".", "/") + (".py" if path.stem != "__init__" else "/__init__.py")
        for module, path in modules().items()
    }
    assert names == expected | {"ckpt/py.typed"}


@pytest.mark.long
@pytest.mark.parametrize("kind", ["*.whl", "*.tar.gz"])
def test_it_works_in_a_clean_environment(dist: Path, kind: str, tmp_path: Path) -> None:
    """Installed by pip beside the base dependencies alone, in a folder that has a `backends/` of its own."""
    (artifact,) = dist.glob(kind)
    python, home = environment(tmp_path / "environment"), tmp_path / "home"
    pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check"]
    _run(*pip, "install", "--no-index", "--no-build-isolation", artifact)
    (home / "backends").mkdir(parents=True)
    (home / "backends" / "__init__.py").write_text("raise ImportError('the wrong backends')")
    (home / "smoke.py").write_text(_SMOKE)
    _run(python, "smoke.py", cwd=home)
    checked = json.loads(_run(python.parent / "ckpt", "verify", "--json", "run/step-1", cwd=home))
    assert checked["ok"], checked


_SMOKE = """
import pathlib, sys
import torch
import ckpt
from ckpt.errors import ConfigurationError

assert pathlib.Path(ckpt.__file__).is_relative_to(sys.prefix), ckpt.__file__
assert "boto3" not in sys.modules
ckpt.save({"t": torch.arange(3), "step": 5}, "run/step-1")
loaded = {"t": torch.zeros(3, dtype=torch.int64), "step": 0}
ckpt.load(loaded, "run/step-1")
assert loaded["t"].tolist() == [0, 1, 2] and loaded["step"] == 5, loaded
assert ckpt.verify("run/step-1").ok
for url, extra in (("s3://bucket/c", "s3"), ("cos://bucket/c", "cos")):
    try:
        ckpt.load(loaded, url, storage_options={"endpoint_url": "http://127.0.0.1:1"})
    except ConfigurationError as error:
        assert f"pip install 'ckpt-storage[{extra}]'" in str(error), error
    else:
        raise AssertionError(f"{url} needs the extra {extra}")
"""


def environment(folder: Path) -> Path:
    """Make a virtual environment with links to the base dependencies of this one, and return its Python."""
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    todo = [*(importlib.metadata.requires("ckpt-storage") or ()), "setuptools"]
    linked: set[str] = set()
    while todo:
        requirement = Requirement(todo.pop())
        if requirement.name in linked or not (
            requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        ):
            continue
        linked.add(requirement.name)
        distribution = importlib.metadata.distribution(requirement.name)
        todo += distribution.requires or []
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(distribution.locate_file(top))))
    return folder / "bin" / "python"


def _run(*command: object, cwd: Path | None = None) -> str:
    """Run a program without this one's environment variables for Python; return what it wrote."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout
