"""The wheel and the sdist: every folder is in them, and both work elsewhere."""

from __future__ import annotations

import email
import importlib.metadata
import json
import os
import re
import shlex
import shutil
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from support.environments import brought_by, environment, run
from support.rooms import FOLDERS, ROOT, modules

_IN_SDIST = (ROOT / "PKG-INFO").exists()  # it cannot hold the links, and needs none
_EXTRAS = ("s3", "cos", "fsspec", "data", "tune", "all", "testing", "bench", "dev")
_PROJECT = "https://github.com/ckpt-storage/ckpt-storage"


def test_the_wheel_lists_every_folder() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    for folder, package in FOLDERS.items():
        assert f'"{package}"' in text
        assert f'= "{folder}"' in text
        if folder != "ckpt" and not _IN_SDIST:
            link = ROOT / "ckpt" / folder
            assert link.is_symlink()
            assert link.readlink() == Path("..") / folder
    for module, path in modules().items():
        if path.stem == "__init__":
            assert f'"{module}"' in text, f"{module} would be missing in the wheel"


@pytest.mark.parametrize("extra", _EXTRAS)
def test_no_extra_brings_two_that_pin_botocore(extra: str) -> None:
    """boto3 and aiobotocore (s3fs) each take the botocore of a week; pip tries releases of both for minutes."""
    names = brought_by(f"ckpt-storage[{extra}]")
    assert not {"boto3", "aiobotocore"} <= names
    assert extra != "all" or {"boto3", "ibm-cos-sdk", "fsspec", "pyarrow"} <= names


@pytest.mark.parametrize("extra", _EXTRAS)
def test_no_extra_takes_pip_long(extra: str) -> None:
    """It compiles a megabyte or two of sources in a second: those of transformers would double any extra."""
    files = [
        Path(str(file.locate()))
        for name in brought_by(f"ckpt-storage[{extra}]") - brought_by("torch")
        for file in importlib.metadata.files(name) or ()
        if file.suffix == ".py"
    ]
    assert sum(file.stat().st_size for file in files) < 40_000_000


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the wheel and the sdist: DIST, or built from a copy without the links."""
    if "DIST" in os.environ:
        return Path(os.environ["DIST"]).absolute()
    folder = tmp_path_factory.mktemp("built")
    skipped = shutil.ignore_patterns(
        ".git",
        ".venv*",
        ".scratch",
        "results",
        "build",
        "dist",
        "*.egg-info",
        "__pycache__",
        ".*_cache",
        "node_modules",
    )
    shutil.copytree(ROOT, folder / "source", symlinks=True, ignore=skipped)
    for link in (folder / "source" / "ckpt").iterdir():
        if link.is_symlink():
            link.unlink()
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", folder / "source")
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
    pages = {f"ckpt/report/{path.name}" for path in (ROOT / "ckpt/report").iterdir() if path.suffix != ".py"}
    pages.discard("ckpt/report/__pycache__")
    assert {"ckpt/report/page.html", "ckpt/report/page.css", "ckpt/report/treemap.js"} <= pages
    assert names == expected | pages | {"ckpt/py.typed", "ckpt/planning/prices.toml"}


@pytest.mark.long
def test_the_index_shows_links_that_lead_somewhere(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    shown = str(metadata.get_payload())
    links = re.findall(r"\]\(([^)]*)\)|src(?:set)?=\"([^\"]*)\"", shown)
    targets = [link or image for link, image in links]
    assert len(targets) > 10
    for target in targets:
        assert target.startswith("https://"), target
        for ours in (f"{_PROJECT}/blob/main/", f"{_PROJECT}/raw/main/"):
            if target.startswith(ours):
                assert (ROOT / target.removeprefix(ours)).exists(), target
    urls = dict(line.split(", ") for line in metadata.get_all("Project-URL") or ())
    assert {"Homepage", "Source", "Documentation", "Changelog", "Issues"} <= urls.keys()
    assert urls["Source"] == _PROJECT


@pytest.mark.long
def test_the_first_commands_of_the_readme_work(tmp_path: Path) -> None:
    """As printed: what is cloned is the project's own URL, and the clone installs."""
    (tmp_path / "ckpt-storage").symlink_to(ROOT)
    block = re.search(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert block is not None
    clone, install = (shlex.split(line, comments=True) for line in block[1].splitlines())
    assert clone == ["git", "clone", _PROJECT]
    assert install[:2] == ["pip", "install"]
    # Its dependencies are another test's matter (tests/integration/test_extras.py).
    offline = ["--dry-run", "--no-deps", "--no-index", "--no-build-isolation"]
    shown = run(sys.executable, "-m", *install, *offline, cwd=tmp_path)
    assert "Would install ckpt-storage" in shown


@pytest.fixture(scope="module")
def unpacked(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an unpacked sdist."""
    (sdist,) = dist.glob("*.tar.gz")
    folder = tmp_path_factory.mktemp("sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
        return folder / archive.getnames()[0]


@pytest.mark.long
def test_the_sdist_holds_what_the_project_needs(unpacked: Path) -> None:
    listed = (
        ROOT.rglob("*") if _IN_SDIST else map(ROOT.joinpath, run("git", "ls-files", cwd=ROOT).split("\n"))
    )
    left_out = (".ci", ".github", ".gitattributes", ".gitignore")
    for path in listed:
        name = path.relative_to(ROOT)
        if path.is_file() and not path.parent.is_symlink() and name.parts[0] not in left_out:
            assert (unpacked / name).is_file(), name


@pytest.mark.long
def test_tests_run_from_the_sdist(unpacked: Path, tmp_path: Path) -> None:
    python = environment(tmp_path / "environment", "dev")
    pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check"]
    run(*pip, "install", "--no-index", "--no-build-isolation", "--no-deps", "--editable", unpacked)
    tests = ["tests/project/test_docs.py", "tests/format/test_index.py", "-k", "policy or small or dtypes"]
    shown = run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, cwd=unpacked)
    assert " passed" in shown


@pytest.mark.long
@pytest.mark.parametrize("kind", ["*.whl", "*.tar.gz"])
def test_it_works_in_a_clean_environment(dist: Path, kind: str, tmp_path: Path) -> None:
    """Installed by pip beside the base dependencies alone, in a folder that has a `backends/` of its own."""
    (artifact,) = dist.glob(kind)
    python, home = environment(tmp_path / "environment"), tmp_path / "home"
    pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check"]
    run(*pip, "install", "--no-index", "--no-build-isolation", artifact)
    (home / "backends").mkdir(parents=True)
    (home / "backends" / "__init__.py").write_text("raise ImportError('the wrong backends')")
    (home / "smoke.py").write_text(_SMOKE)
    run(python, "smoke.py", cwd=home)
    checked = json.loads(run(python.parent / "ckpt", "verify", "--json", "run/step-1", cwd=home))
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
        assert f"pip install './ckpt-storage[{extra}]'" in str(error), error
    else:
        raise AssertionError(f"{url} needs the extra {extra}")
"""
