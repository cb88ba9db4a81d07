"""The shards of the tests: each test is in exactly one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from support.tiers import in_shard


@pytest.mark.parametrize("count", [1, 3])
def test_each_test_is_in_one_shard(count: int) -> None:
    items: list[Any] = [SimpleNamespace(nodeid=f"tests/test_a.py::test_{number}") for number in range(100)]
    shards = [in_shard(items, f"{number}/{count}") for number in range(1, count + 1)]
    assert all(shards)
    assert sorted(item.nodeid for shard in shards for item in shard) == sorted(item.nodeid for item in items)


@pytest.mark.parametrize("text", ["0/3", "4/3", "3", "a/b"])
def test_another_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        in_shard([], text)
