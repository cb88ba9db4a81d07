"""Tell which tier a test belongs to from what it uses, and how many examples Hypothesis draws there."""

from __future__ import annotations

import functools
import inspect
import os
import subprocess
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

import ckpt
from support import ranks
from support.servers import moto_server

_TESTS = Path(__file__).parents[1]
_TESTS_PATH = f"{_TESTS}/"
_RANKS = frozenset({ranks.run_ranks, ranks.Job, ranks.start})
_SERVERS = frozenset({moto_server})
_PROGRAMS = frozenset({subprocess.run, subprocess.Popen, subprocess.check_output, ckpt.LocalTier})
"""A local tier starts a process that drains it."""

# Their max_examples is a percentage of what `examples` is asked for.
# How long it takes to draw them says more about the machine than about the test.
_ANY_PACE: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("fast", max_examples=5, **_ANY_PACE)
settings.register_profile("full", max_examples=100, **_ANY_PACE)


def load_profile() -> None:
    """Choose the profile that the environment variable HYPOTHESIS_PROFILE names, or `fast`."""
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast"))


def examples(count: int) -> int:
    """Scale the number of examples to the profile: all in `full`, a twentieth (at least 5) in `fast`."""
    return min(count, max(5, count * settings().max_examples // 100))


def in_shard(items: Iterable[pytest.Item], shard: str) -> list[pytest.Item]:
    """Return the tests of a shard: "2/3" is the second third, by the checksum of a test's name.

    Raises ValueError for any other text.
    """
    number, _, count = shard.partition("/")
    if not 1 <= int(number) <= int(count):
        raise ValueError(f"SHARD is {shard!r}; write it as NUMBER/COUNT, from 1/COUNT to COUNT/COUNT")
    return [item for item in items if zlib.crc32(item.nodeid.encode()) % int(count) == int(number) - 1]


def mark_tiers(items: list[pytest.Item]) -> None:
    """Mark the tests with `ranks`, `server`, `slow`, `integration` and `adapters` by what they use.

    A fixture of the whole session (a checkpoint that two ranks saved) does not make a test one with ranks.
    """
    for item in items:
        if not isinstance(item, pytest.Function):
            continue
        fixtures = [found for named in item._fixtureinfo.name2fixturedefs.values() for found in named[-1:]]
        if _TESTS / "integration" in item.path.parents:
            item.add_marker("integration")
        if _TESTS / "adapters" in item.path.parents:
            item.add_marker("adapters")
        if uses(item.obj, _RANKS) or any(
            uses(each.func, _RANKS) for each in fixtures if each.scope != "session"
        ):
            item.add_marker("ranks")
        if uses(item.obj, _SERVERS) or any(uses(each.func, _SERVERS) for each in fixtures):
            item.add_marker("server")
        if uses(item.obj, _PROGRAMS) or any(uses(each.func, _PROGRAMS) for each in fixtures):
            item.add_marker("slow")


@functools.cache
def uses(function: Callable[..., Any], targets: frozenset[Any]) -> bool:
    """Tell whether a function names one of `targets`, itself or through functions of the tests."""
    return not targets.isdisjoint(_reached(_plain(function)))


@functools.cache
def _reached(function: Any) -> frozenset[Any]:
    """Collect the functions and classes that a function names, itself or through functions of the tests."""
    seen: set[Any] = set()
    todo = [function]
    while todo:
        for value in _named(todo.pop()):
            if isinstance(value, FunctionType | type) and value not in seen:
                seen.add(value)
                if isinstance(value, FunctionType) and value.__code__.co_filename.startswith(_TESTS_PATH):
                    todo.append(_plain(value))
    return frozenset(seen)


def _plain(function: Any) -> Any:
    """Unwrap a function from fixtures, methods and Hypothesis."""
    unwrapped = inspect.unwrap(function)
    inner = getattr(getattr(unwrapped, "hypothesis", None), "inner_test", unwrapped)
    return getattr(inner, "__func__", inner)


def _named(function: Any) -> Iterator[Any]:
    """Yield the module-level values that the code of a function names, with those it takes out of modules."""
    if not isinstance(function, FunctionType):
        return
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
