"""The documentation site: the reference has every public name, every error has its entry, pictures are up to date.

Links, anchors and warnings are checked by `make docs`, which builds it.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator

import pytest
from support.rooms import ROOT, modules
from support.snippets import printed_texts, snippets

import ckpt
from ckpt import errors
from website.pictures import FOLDER, pictures
from website.reference import PAGES, PUBLIC_MODULES, names_on, public_names

_TORCH_DCP = {"planner", "process_group", "no_dist"}
"""Parameters that are those of `dcp.save` and `dcp.load`."""


def test_the_reference_has_every_public_name() -> None:
    described = set().union(*names_on().values())
    assert public_names("ckpt") == ckpt.__all__  # it is read without being imported
    for name in ckpt.__all__:
        full = f"ckpt.{name}"
        assert full in PUBLIC_MODULES or full in described, full
    for module in PUBLIC_MODULES:
        if module != "ckpt":
            assert {f"{module}.{name}" for name in public_names(module)} <= described


def test_the_reference_names_what_there_is() -> None:
    for page in PAGES.values():
        for name in page.names:
            if name in PUBLIC_MODULES or ".adapters." in name or ".sinks." in name:
                continue
            module, _, attribute = name.rpartition(".")
            assert getattr(importlib.import_module(module), attribute).__doc__, name


@pytest.mark.parametrize("name", [name for name in ckpt.__all__ if f"ckpt.{name}" not in PUBLIC_MODULES])
def test_every_parameter_is_explained(name: str) -> None:
    """In the docstring of the function, or of the writer or reader to which it points."""
    value = getattr(ckpt, name)
    text = inspect.getdoc(value) or ""
    if "CheckpointWriter" in text or "`save`" in text or "`ckpt.save`" in text:
        text += f"{ckpt.CheckpointWriter.__doc__} {ckpt.save.__doc__}"
    if "CheckpointReader" in text:
        text += str(ckpt.CheckpointReader.__doc__)
    unexplained = {
        parameter
        for parameter in inspect.signature(value).parameters
        if not re.search(rf"\b{parameter}\b", text) and parameter not in _TORCH_DCP
    }
    assert unexplained == set()


def test_every_error_has_its_entry() -> None:
    text = (ROOT / "docs/troubleshooting.md").read_text()
    headings = set(re.findall(r"(?m)^## (\w+)$", text))
    assert headings == set(errors.__all__)


@pytest.mark.slow
def test_the_texts_of_errors_are_those_that_are_printed() -> None:
    printed = "\n".join(_constants())
    for snippet in snippets("text"):
        if snippet.page == "docs/troubleshooting.md":
            for clause in printed_texts(snippet.text):
                assert clause in printed, f"{snippet}: no message has {clause!r}"


def _constants() -> Iterator[str]:
    """Yield every text in the source, with what a message puts in for `<>`."""
    for path in modules().values():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
            elif isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "<>" for part in node.values)
                yield "".join(map(str, parts))


def test_the_pictures_are_those_that_the_script_draws() -> None:
    for name, text in pictures():
        assert (FOLDER / name).read_text() == text, "run `python -m website.pictures`"
