"""The wheel: every folder is in it, and it works elsewhere."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

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


def test_the_wheel_works_elsewhere(tmp_path: Path) -> None:
    """Built from a copy without the links, unpacked, and used from a folder that has a `backends/` of its own."""
    source, wheel, home = tmp_path / "source", tmp_path / "wheel", tmp_path / "home"
    skipped = shutil.ignore_patterns(
        ".git", ".venv*", ".scratch", "results", "build", "*.egg-info", "__pycache__", ".*_cache"
    )
    shutil.copytree(ROOT, source, symlinks=True, ignore=skipped)
    for link in (source / "ckpt").iterdir():
        if link.is_symlink():
            link.unlink()
    command = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(wheel),
        str(source),
    ]
    subprocess.run(command, check=True, capture_output=True)
    (path,) = wheel.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        archive.extractall(wheel / "unpacked")
    expected = {
        module.replace(".", "/") + (".py" if path.stem != "__init__" else "/__init__.py")
        for module, path in modules().items()
    }
    assert names == expected | {"ckpt/py.typed"}
    (home / "backends").mkdir(parents=True)
    (home / "backends" / "__init__.py").write_text("raise ImportError('the wrong backends')")
    code = (
        f"import sys; sys.path[:0] = ['', {str(wheel / 'unpacked')!r}]; import ckpt, torch; "
        "assert 'unpacked' in ckpt.__file__; ckpt.save({'t': torch.ones(3)}, 'c'); ckpt.load({'t': torch.ones(3)}, 'c')"
    )
    subprocess.run([sys.executable, "-I", "-c", code], cwd=home, check=True)
