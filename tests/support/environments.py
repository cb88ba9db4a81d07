"""Make virtual environments with links to what is installed here, and run programs in them."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import venv
from pathlib import Path

from packaging.requirements import Requirement

_PROJECT = "ckpt-storage"


def environment(folder: Path, *extras: str) -> Path:
    """Make an environment with this project's dependencies, not the project, and return its Python."""
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    todo = [("setuptools", ""), *((_PROJECT, extra) for extra in ("", *extras))]
    linked: set[tuple[str, str]] = set()
    while todo:
        name, extra = todo.pop()
        if (name, extra) in linked:
            continue
        linked.add((name, extra))
        for text in requires(name, extra):
            requirement = Requirement(text)
            todo += [(requirement.name, each) for each in ("", *requirement.extras)]
        distribution = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if name != _PROJECT and not (site / top).exists():
                (site / top).symlink_to(Path(str(distribution.locate_file(top))))
    return folder / "bin" / "python"


def requires(name: str, extra: str = "") -> list[str]:
    """List the requirements of an installed distribution, or of one of its extras, that apply here."""
    parsed = [Requirement(text) for text in importlib.metadata.requires(name) or ()]
    applying = (each for each in parsed if each.marker is None or each.marker.evaluate({"extra": extra}))
    return [str(each) for each in applying]


def run(*command: object, cwd: Path | None = None) -> str:
    """Run a program without this one's environment variables for Python; return what it wrote."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout
