"""The shape of the code: who imports whom, what is public, what the package contains, how long things are."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import ckpt

ROOT = Path(__file__).parents[2]
FOLDERS = {
    "ckpt": "ckpt",
    "backends": "ckpt.backends",
    "consistency": "ckpt.consistency",
    "trainer_integration": "ckpt.trainer_integration",
}
NESTED = {
    "ckpt/cli": "ckpt.cli",
    "ckpt/acceptance": "ckpt.acceptance",
}  # installed with the folder that it is in
BENCHMARKS = sorted((ROOT / "benchmarks").rglob("*.py"))
BENCHMARKS = [path for path in BENCHMARKS if ".venv-peers" not in path.parts]
SDKS = {"boto3": "s3", "botocore": "s3", "ibm_boto3": "cos", "ibm_botocore": "cos", "fsspec": "fsspec_store"}


def modules() -> dict[str, Path]:
    found = {}
    for folder, package in {**FOLDERS, **NESTED}.items():
        for path in sorted((ROOT / folder).glob("*.py")):
            found[package if path.stem == "__init__" else f"{package}.{path.stem}"] = path
    return found


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Modules imported, and whether at the top of the file."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            names = [node.module or ""]
        for name in names:
            yield name, node in tree.body


def may_import(module: str, imported: str) -> bool:
    """The directions of the design."""
    if module == "ckpt":
        return True  # its imports are lazy; test_importing_is_light sees to that
    if module == "ckpt.errors":
        return False
    area, target = module.split(".")[1], imported.split(".")[1] if "." in imported else ""
    if imported == "ckpt.errors":
        return True
    if area == "backends":
        inside = {"ckpt.backends.base"}
        if module == "ckpt.backends.base":
            inside |= {"ckpt.backends.cancellable_reads", "ckpt.backends.raw_requests"}
        if module == "ckpt.backends.posix":
            inside.add("ckpt.backends.paths")
        if module in ("ckpt.backends.s3", "ckpt.backends.cos"):
            inside |= {"ckpt.backends.s3_protocol.store", "ckpt.backends.s3_protocol.options"}
        shared = ("s3io", "s3errors", "s3options", "s3trials")
        if module in (f"ckpt.backends.{name}" for name in ("s3io", "s3connection", "s3api", "s3trials")):
            inside |= {f"ckpt.backends.{name}" for name in shared}
        if module == "ckpt.backends.s3_protocol.raw_requests":
            inside.add("ckpt.backends.s3_protocol.store")  # of which it is a part
        if module == "ckpt.backends.s3_protocol.store":
            inside.add("ckpt.backends.s3_protocol.connection")
        return imported in inside or (module == "ckpt.backends.registry" and target == "backends")
    if area == "consistency":
        return imported == "ckpt.backends.base" or target == "consistency"
    allowed_backends = imported in ("ckpt.backends.base", "ckpt.backends.registry")
    if area == "trainer_integration":
        return target not in ("backends", "cli", "testing") or imported == "ckpt.backends.registry"
    if area == "cli":
        return True
    return target not in ("backends", "trainer_integration", "cli", "testing") or allowed_backends


@pytest.mark.parametrize("module", sorted(modules()))
def test_import_directions(module: str) -> None:
    for imported, _ in imports(modules()[module]):
        if imported == "ckpt" or imported.startswith("ckpt."):
            assert may_import(module, imported), f"{module} must not import {imported}"


@pytest.mark.parametrize("module", sorted(modules()))
def test_sdks_are_imported_in_one_place_and_lazily(module: str) -> None:
    for imported, at_top in imports(modules()[module]):
        home = SDKS.get(imported.split(".")[0])
        if home is not None:
            assert module == f"ckpt.backends.{home}", f"{module} imports {imported}"
            assert not at_top, f"{module} imports {imported} before it is needed"


def test_the_rules_can_be_broken() -> None:
    for module, imported in [
        ("ckpt.backends.posix", "ckpt.consistency.checksums"),
        ("ckpt.backends.posix", "ckpt.backends.s3"),
        ("ckpt.consistency.commit", "ckpt.format.records"),
        ("ckpt.consistency.commit", "ckpt.backends.s3"),
        ("ckpt.writing.writer", "ckpt.backends.s3"),
        ("ckpt.writing.writer", "ckpt.trainer_integration.manager"),
        ("ckpt.errors", "ckpt.writing.writer"),
    ]:
        assert not may_import(module, imported)


def test_importing_is_light() -> None:
    code = "import sys, ckpt; heavy = {'torch', 'boto3', 'fsspec', 'msgspec', 'numpy'} & set(sys.modules); assert not heavy, heavy"
    subprocess.run([sys.executable, "-c", code], check=True)
    code = "import sys, ckpt.api; heavy = {'boto3', 'ibm_boto3', 's3fs'} & set(sys.modules); assert not heavy, heavy"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_public_surface() -> None:
    assert ckpt.__all__ == [
        "CheckpointManager", "CheckpointReader", "CheckpointWriter", "Stager", "async_save", "collect_garbage", "convert", "copy", "diff", "doctor",
        "errors", "inspect", "install", "list_checkpoints", "load", "remove", "roundtrip", "save", "uninstall", "verify",
    ]  # fmt: skip
    assert dir(ckpt) == sorted(ckpt.__all__)
    for name in ckpt.__all__:
        assert getattr(ckpt, name).__doc__
    with pytest.raises(AttributeError):
        ckpt.nothing  # noqa: B018


def test_signatures() -> None:
    import inspect

    def parameters(function: object) -> str:
        return ", ".join(inspect.signature(function).parameters)  # type: ignore[arg-type]

    storage = "state_dict, url, storage_options"
    assert (
        parameters(ckpt.CheckpointWriter)
        == "url, storage_options, overwrite, threads, memory_budget_bytes, max_bandwidth_bytes_per_s, tags, timeout_s"
    )
    assert (
        parameters(ckpt.CheckpointReader)
        == "url, storage_options, verify, visibility_timeout_s, threads, memory_budget_bytes, trusted_objects, timeout_s"
    )
    for save in (ckpt.save, ckpt.async_save):
        assert (
            parameters(save)
            == f"{storage}, overwrite, planner, process_group, no_dist, threads, memory_budget_bytes, "
            "max_bandwidth_bytes_per_s, tags, timeout_s"
        )
    assert (
        parameters(ckpt.load) == f"{storage}, verify, visibility_timeout_s, planner, process_group, no_dist, "
        "threads, memory_budget_bytes, trusted_objects, timeout_s"
    )


def test_errors_are_listed_and_drawn() -> None:
    from ckpt import errors

    classes = [
        v for v in vars(errors).values() if isinstance(v, type) and issubclass(v, errors.CheckpointError)
    ]
    public = {c.__name__ for c in classes if not c.__name__.startswith("_")}
    assert public == set(errors.__all__)
    for name in public:
        assert f"{name} " in (errors.__doc__ or "") or f"{name}\n" in (errors.__doc__ or ""), name


def test_every_error_pickles_with_its_context() -> None:
    import pickle

    from ckpt import errors

    for name in errors.__all__:
        kind = getattr(errors, name)
        if issubclass(kind, errors._RankFailures):
            error = kind("text", url="u", failures={3: errors.NotFound("gone", key="k", rank=3)})
            copy = pickle.loads(pickle.dumps(error))
            assert str(copy.failures[3]) == "rank 3: k: gone"
        else:
            error = kind("text", url="u", key="k", rank=2, start=0, stop=9)
            copy = pickle.loads(pickle.dumps(error))
            assert str(copy) == "rank 2: u/k: bytes 0-9: text"
        assert (type(copy), copy.args, copy.url) == (kind, ("text",), "u")


def test_public_modules_declare_and_explain_themselves() -> None:
    for module, path in modules().items():
        tree = ast.parse(path.read_text())
        assert ast.get_docstring(tree), module
        names = {
            t.id for n in tree.body if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name)
        }
        is_package = path.stem == "__init__" and module != "ckpt"
        assert is_package or "__all__" in names, f"{module} has no __all__"


def test_benchmarks_explain_themselves_and_keep_peers_apart() -> None:
    """A process that measures a peer runs in an environment without this library."""
    with_ours = {"__main__.py", "contenders/ours.py", "contenders/managed.py", "contenders/checksums.py"}
    for path in BENCHMARKS:
        name = path.relative_to(ROOT / "benchmarks").as_posix()
        assert ast.get_docstring(ast.parse(path.read_text())), name
        for imported, at_top in imports(path):
            if imported.split(".")[0] == "ckpt" and at_top:
                assert name in with_ours, f"{name} imports {imported}"


def test_functions_fit_a_screen() -> None:
    for path in [*modules().values(), *(ROOT / "examples").glob("*.py"), *BENCHMARKS]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                assert length <= 70, f"{path.name}: {node.name} has {length} lines"


def test_the_wheel_lists_every_folder() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    for folder, package in FOLDERS.items():
        assert f'"{package}"' in text
        assert f'= "{folder}"' in text
        nested = {p.parent for p in (ROOT / folder).rglob("*.py") if not p.parent.is_symlink()} - {
            ROOT / folder
        }
        if folder != "ckpt":
            assert not nested
            link = ROOT / "ckpt" / folder
            assert link.is_symlink()
            assert link.readlink() == Path("..") / folder
    for package in NESTED.values():
        assert f'"{package}"' in text


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


def test_the_project_names_no_machine() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        if path.is_symlink() or not path.is_file():
            continue
        text = path.read_text(errors="replace")
        for word in ("/wo" + "rk/", "/opt/wh" + "eels", "/opt/py" + "pi"):
            assert word not in text, f"{name} names a path of one machine"
