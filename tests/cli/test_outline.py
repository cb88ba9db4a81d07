"""Outlines of names: what repeats is one row, in the order of the names, in bounded time."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterable

import pytest

from ckpt.cli.printing.outline import Row, natural, outline


def lines(
    names: Iterable[str], *, max_rows: int | None = 100, depth: int | None = None, fold: bool = True
) -> list[str]:
    top: Row[str] = outline(
        ((name, "object" if name[-1:] == "!" else 1, name) for name in names),
        max_rows=max_rows,
        depth=depth,
        fold=fold,
    )
    return [text for text, _ in top.lines()]


def test_numbers_are_folded_and_sorted_as_numbers() -> None:
    names = [f"h.{number}.{name}" for number in (10, 2, 9, 11, 0, 1) for name in ("b", "w")]
    assert lines(names) == ["h.{0..2, 9..11}.{b, w}  x 12"]
    assert lines([*names, *(f"h.{number}.{name}" for number in range(3, 9) for name in "bw")]) == [
        "h.0..11.{b, w}  x 24"
    ]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["a.10.w", "a.9.w"], ["a.9..10.w"]),
        ([f"s.{n:06}" for n in range(64)], ["s.000000..000063  x 64"]),
        ([f"s.part_{n}_of_8" for n in range(8)], ["s.part_0..7_of_8  x 8"]),
        ([f"s.{n}" for n in range(0, 18, 2)], ["s.{0, 2, ..., 16}  x 9"]),
        (["a.k.w", "a.q.w", "a.v.w"], ["a.{k, q, v}.w"]),
        ([f"a.{name}.w" for name in "bcdefg"], ["a.{b, c, d, ..., g}.w  x 6"]),
        (["a", "a.b", "a.c.d"], ["a", "a", "  b", "  c.d"]),
        (["model.w", "ema.w"], ["ema.w", "model.w"]),
        ([f"rank {n}: m.w" for n in range(12)], ["rank 0..11: m.w  x 12"]),
        ([f"e.{a}.w{b}" for a in range(4) for b in (1, 2)], ["e.0..3.w1..2  x 8"]),
        (["", "x..y", "."], ["''", ".", "x..y"]),
    ],
)
def test_labels(names: list[str], expected: list[str]) -> None:
    assert lines(reversed(names)) == expected


def test_what_differs_is_not_folded() -> None:
    names = ["h.0.w", "h.0.b", "h.1.w", "h.2.w", "h.2.b"]
    assert lines(names) == ["h", "  {0, 2}.{b, w}", "  1.w"]


def test_levels_and_room() -> None:
    names = [f"{top}.{letter}.{end}" for top in "pq" for letter in "abc" for end in ("x", "y.z", letter)]
    assert len(lines(names, max_rows=None)) == 20
    assert lines(names, depth=1) == ["p", "q"]
    assert lines(names, depth=2) == ["p", "  a", "  b", "  c", "q", "  a", "  b", "  c"]
    assert lines(names, max_rows=9) == lines(names, depth=2)
    assert lines(names, max_rows=11)[1:5] == ["  a", "    {a, x}", "    y.z", "  b"]
    many = [f"top.{chr(97 + n // 26)}{chr(97 + n % 26)}{'z' * n}!" for n in range(300)]
    top: Row[int] = outline(((name, name, 1) for name in many), max_rows=20, depth=None, fold=True)
    assert len(list(top.lines())) == 21
    assert list(top.lines())[-1] == ("  ... and 281 more", None)


def test_nothing_is_folded_without_fold() -> None:
    names = [f"h.{n}.{name}" for n in range(3) for name in "bw"]
    assert lines(names, max_rows=None, fold=False) == [
        "h", *(line for n in range(3) for line in (f"  {n}", "    b", "    w")),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "names",
    [
        ["." * (1 << 18) + str(n) for n in range(4)],
        ["1a" * (1 << 17), "1" * (1 << 18)],
        [".".join("ab"[number >> bit & 1] for bit in range(11)) for number in range(1 << 11)],
        [f"{'x' * (number % 50)}.{number}.{number * 7}" for number in range(1500)],
    ],
    ids=["dots", "digits", "a binary tree", "many"],
)
def test_names_made_to_do_harm(names: list[str]) -> None:
    tracemalloc.start()
    try:
        assert len(lines(names, max_rows=30)) <= 60
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 64 << 20


def test_natural_order() -> None:
    names = ["a.2", "a.10", "a.01", "a", "b1c10", "b1c9"]
    assert sorted(names, key=natural) == ["a", "a.01", "a.2", "a.10", "b1c9", "b1c10"]
