"""Objects that are the same have one digest, all others another."""

from __future__ import annotations

import collections
import io
from typing import Any

import numpy as np
import pytest
import torch

from ckpt.stock.value_digests import value_digest

SHARED = [1, 2]
DIFFERENT: list[Any] = [
    None, 0, 0.0, -0.0, False, "", b"", [], (), {}, set(), frozenset(), 1, True, 1.0, "1", b"1", [1], (1,), {1: 1},
    {"1": 1}, {True: 1}, {1}, [[1]], [1, [2]], [[1], 2], [1, 2], [2, 1], ["ab", "c"], ["a", "bc"], 1j, 1e300, 2**100,
    -(2**100), 255, -1, float("nan"), float("inf"), bytearray(b"1"), collections.OrderedDict({1: 1}),
    collections.Counter({1: 1}), torch.float32, torch.float16, torch.Size([1]), torch.tensor(1), torch.tensor([1]),
    torch.tensor(1.0), torch.tensor(True), torch.zeros(0), torch.zeros(0, 2), torch.zeros(2, 0), np.float64(1),
    np.float32(1), np.array([1]), np.array([1.0]), np.array([[1]]), io.BytesIO(b"1"), "\ud800", int, dict, range(3),
    slice(1), torch.zeros(2, 3), torch.zeros(3, 2),
]  # fmt: skip


def test_different_objects_have_different_digests() -> None:
    digests = [value_digest(value) for value in DIFFERENT]
    assert len({*digests}) == len(DIFFERENT)
    assert digests == [value_digest(value) for value in DIFFERENT]


def test_equal_objects_have_one_digest() -> None:
    word = "abc"[:2]
    for one, other in [
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({3, 1, 2}, {2, 3, 1}),
        ([SHARED, SHARED], [[1, 2], [1, 2]]),
        (["ab", "ab"], ["ab", word]),
        (torch.arange(6).reshape(2, 3).t(), torch.arange(6).reshape(2, 3).t().contiguous()),
        (torch.zeros(9)[3:5], torch.zeros(2)),
        (torch.tensor([1 + 2j]).conj(), torch.tensor([1 - 2j])),
    ]:
        assert value_digest(one) == value_digest(other)


def test_objects_that_hold_themselves_end() -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    other: list[Any] = [2]
    other.append(other)
    assert value_digest(loop) != value_digest(other)


def test_parts_that_are_shared_very_often_are_looked_at_once() -> None:
    value: list[Any] = []
    for _ in range(200):
        value = [value, value]
    assert value_digest(value) == value_digest([value[0], value[0]])


def test_what_has_no_digest_is_refused() -> None:
    for value in [(each for each in [1]), torch.eye(2).to_sparse(), [torch.eye(2).to_sparse()]]:
        with pytest.raises(TypeError):
            value_digest(value)
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(RecursionError):
        value_digest(deep)
    while deep:  # else Python may run out of stack when it frees it
        deep = deep.pop()
