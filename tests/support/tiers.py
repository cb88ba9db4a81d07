"""Tell which tier a test belongs to from what it uses, and how many examples Hypothesis draws there."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest
from hypothesis import settings

from support import ranks
from support.servers import moto_server

_TESTS = Path(__file__).parents[1]
_RANKS = frozenset({ranks.run_ranks, ranks.Job, ranks.start})
_SERVERS = frozenset({moto_server})

# Their max_examples is a percentage of what `examples` is asked for.
settings.register_profile("fast", max_examples=10, deadline=None)
settings.register_profile("full", max_examples=100, deadline=None)


def load_profile() -> None:
    """Choose the profile that the environment variable HYPOTHESIS_PROFILE names, or `fast`."""
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast"))


def examples(count: int) -> int:
    """Scale the number of examples to the profile: all of them in `full`, a tenth (at least 5) in `fast`."""
    return min(count, max(5, count * settings().max_examples // 100))


def mark_tiers(items: list[pytest.Item]) -> None:
    """Mark the tests with `ranks`, `server` and `integration` by what they use.

    A fixture of the whole session (a checkpoint that two ranks saved) does not make a test one with ranks.
    """
    for item in items:
        if not isinstance(item, pytest.Function):
            continue
        fixtures = [found for named in item._fixtureinfo.name2fixturedefs.values() for found in named[-1:]]
        if _TESTS / "integration" in item.path.parents:
            item.add_marker("integration")
        if uses(item.obj, _RANKS) or any(
            uses(each.func, _RANKS) for each in fixtures if each.scope != "session"
        ):
            item.add_marker("ranks")
        if uses(item.obj, _SERVERS) or any(uses(each.func, _SERVERS) for each in fixtures):
            item.add_marker("server")


def uses(function: Callable[..., Any], targets: frozenset[Any]) -> bool:
    """Tell whether a function names one of `targets`, itself or through functions of the tests."""
    todo, seen = [function], set()
    while todo:
        unwrapped = inspect.unwrap(todo.pop())
        inner = getattr(getattr(unwrapped, "hypothesis", None), "inner_test", unwrapped)
        plain = getattr(inner, "__func__", inner)
        if not isinstance(plain, FunctionType) or plain in seen:
            continue
        seen.add(plain)
        for value in _named(plain):
            if isinstance(value, FunctionType | type) and value in targets:
                return True
            if isinstance(value, FunctionType) and _is_of_the_tests(value):
                todo.append(value)
    return False


def _named(function: FunctionType) -> Iterator[Any]:
    """Yield the module-level values that the code of a function names, with those it takes out of modules."""
    names = set(_names(function.__code__))
    for name in names & function.__globals__.keys():
        value = function.__globals__[name]
        if isinstance(value, ModuleType):
            yield from (vars(value)[each] for each in names & vars(value).keys())
        else:
            yield value


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _is_of_the_tests(function: FunctionType) -> bool:
    return _TESTS in Path(function.__code__.co_filename).parents
