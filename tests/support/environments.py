"""Make virtual environments with links to what is installed here, and run programs in them."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import venv
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from support.rooms import ROOT

_PROJECT = "ckpt-storage"


def environment(folder: Path, *extras: str) -> Path:
    """Make an environment with this project's dependencies, not the project, and return its Python."""
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for name in brought_by("setuptools", _PROJECT, *(f"{_PROJECT}[{extra}]" for extra in extras)):
        distribution = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(distribution.locate_file(top))))
    return folder / "bin" / "python"


def brought_by(*wanted: str) -> set[str]:
    """Name the distributions that pip brings for these requirements here, this project left out."""
    todo, seen = [*wanted], set[str]()
    names = set[str]()
    while todo:
        text = todo.pop()
        if text not in seen:
            seen.add(text)
            requirement = Requirement(text)
            names.add(canonicalize_name(requirement.name))
            for extra in ("", *requirement.extras):
                todo += _requires(requirement.name, extra)
    return names - {_PROJECT}


def _requires(name: str, extra: str) -> list[str]:
    """List the requirements of an installed distribution, or of one of its extras, that apply here."""
    texts = importlib.metadata.requires(name) or []
    if name == _PROJECT and sys.version_info >= (3, 11):  # what was installed may be older
        import tomllib

        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        texts = project["optional-dependencies"][extra] if extra else project["dependencies"]
    parsed = map(Requirement, texts)
    return [str(each) for each in parsed if each.marker is None or each.marker.evaluate({"extra": extra})]


def run(*command: object, cwd: Path | None = None) -> str:
    """Run a program without this one's environment variables for Python; return what it wrote."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout
