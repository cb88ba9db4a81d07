"""The shape of the code: who imports whom, and how long things are."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Mapping

import pytest
from support.rooms import ROOMS, ROOT, imports, may_use, mermaid, modules, room_of

MODULES = modules()
BENCHMARKS = sorted((ROOT / "benchmarks").rglob("*.py"))
BENCHMARKS = [
    path
    for path in BENCHMARKS
    if not {".venv-peers", ".venv-data-peers", ".venv-mlperf"}.intersection(path.parts)
]
SDKS = {
    "boto3": "ckpt.backends.s3",
    "botocore": "ckpt.backends.s3",
    "ibm_boto3": "ckpt.backends.cos",
    "ibm_botocore": "ckpt.backends.cos",
    "fsspec": "ckpt.backends.fsspec_connection",
}
PUBLIC_FOLDERS = ("ckpt.trainer_integration", "ckpt.trainer_integration.adapters", "ckpt.testing")
PUBLIC_MODULES = (
    "ckpt.errors",
    "ckpt.api",
    "ckpt.options",
    "ckpt.ops",
    *(f"ckpt.backends.{name}" for name in ("base", "registry", "posix", "s3", "cos", "memory")),
)
MAX_CLASS_LINES = 250
MAX_FUNCTION_LINES = 70


def is_public(module: str) -> bool:
    return module.rpartition(".")[0] in PUBLIC_FOLDERS or module in PUBLIC_MODULES


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_rooms_use_only_what_the_table_allows(room: str) -> None:
    for module, path in MODULES.items():
        if room_of(module, MODULES) == room:
            for imported, _ in imports(path, MODULES):
                if imported in MODULES:
                    assert may_use(module, imported, MODULES), f"{module} must not import {imported}"


def test_the_table_can_be_broken() -> None:
    for module, imported in [
        ("ckpt.backends.posix", "ckpt.consistency.checksums"),
        ("ckpt.backends.s3_protocol.store", "ckpt.backends.s3"),
        ("ckpt.consistency.commit", "ckpt.format.records"),
        ("ckpt.writing.writer", "ckpt.backends.s3"),
        ("ckpt.writing.writer", "ckpt.reading.reader"),
        ("ckpt.writing.writer", "ckpt.trainer_integration.manager"),
        ("ckpt.tools.copy", "ckpt.conversion.convert"),
        ("ckpt.errors", "ckpt.writing.writer"),
    ]:
        assert not may_use(module, imported, MODULES)


def test_every_module_stands_in_a_room() -> None:
    assert {room_of(module, MODULES) for module in MODULES} == set(ROOMS)


def test_no_file_imports_itself_through_others() -> None:
    arrows = {
        module: {name for name, _ in imports(path, MODULES) if name in MODULES and name != module}
        for module, path in MODULES.items()
        if module != "ckpt"
    }
    assert circle(arrows) is None
    assert circle({**arrows, "ckpt.errors": {"ckpt.writing.writer"}}) is not None


def circle(arrows: Mapping[str, set[str]]) -> list[str] | None:
    """Find a way from a module to itself."""
    done: set[str] = set()
    for start in arrows:
        path: list[str] = []

        def walk(module: str, path: list[str] = path) -> list[str] | None:
            if module in path:
                return path[path.index(module) :]
            if module in done:
                return None
            path.append(module)
            for other in sorted(arrows.get(module, ())):
                found = walk(other)
                if found is not None:
                    return found
            done.add(path.pop())
            return None

        found = walk(start)
        if found is not None:
            return found
    return None


def test_classes_have_one_job() -> None:
    for path in MODULES.values():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                assert length <= MAX_CLASS_LINES, f"{path.name}: {node.name} has {length} lines"


def test_functions_fit_a_screen() -> None:
    for path in [*MODULES.values(), *(ROOT / "examples").glob("*.py"), *BENCHMARKS]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                assert length <= MAX_FUNCTION_LINES, f"{path.name}: {node.name} has {length} lines"


def test_the_picture_shows_the_table() -> None:
    assert mermaid() in (ROOT / "docs/design.md").read_text(), "run `python tests/support/rooms.py`"


@pytest.mark.parametrize("module", sorted(MODULES))
def test_sdks_are_imported_in_one_place_and_lazily(module: str) -> None:
    for imported, at_top in imports(MODULES[module], MODULES):
        home = SDKS.get(imported.split(".")[0])
        if home is not None:
            assert module == home, f"{module} imports {imported}"
            assert not at_top, f"{module} imports {imported} before it is needed"


def test_modules_explain_themselves_and_public_ones_declare_their_names() -> None:
    """Elsewhere an underscore says enough: a list beside it would be a second truth."""
    for module, path in MODULES.items():
        tree = ast.parse(path.read_text())
        assert ast.get_docstring(tree), module
        names = {
            t.id for n in tree.body if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name)
        }
        if path.stem != "__init__":
            assert ("__all__" in names) == is_public(module), f"{module}: only public modules have __all__"


def test_benchmarks_explain_themselves_and_keep_peers_apart() -> None:
    """A process that measures a peer runs in an environment without this library; studies measure this one alone."""
    with_ours = {
        "__main__.py",
        "contenders/ckpt_storage.py",
        "contenders/ckpt_manager.py",
        "contenders/floors/checksums.py",
        "mlperf_storage/back_end.py",
    }
    for path in BENCHMARKS:
        name = path.relative_to(ROOT / "benchmarks").as_posix()
        assert ast.get_docstring(ast.parse(path.read_text())), name
        for imported, at_top in imports(path, MODULES):
            if imported.split(".")[0] == "ckpt" and at_top:
                assert name in with_ours or name.startswith(("studies/", "scale/")), (
                    f"{name} imports {imported}"
                )


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
