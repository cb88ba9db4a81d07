from __future__ import annotations

from typing import Any

import msgspec
import pytest

from ckpt.embeddings.chain import Chain, Costs, Generation, StoredColumn, decode_chain, first_to_merge
from ckpt.errors import FormatError

GENERATIONS = [
    Generation(number=3, kind="base", rows=10, evicted=0, block_rows=4),
    Generation(number=5, kind="delta", rows=2, evicted=1, block_rows=4),
]
CHAIN = Chain(
    table="user",
    shard=1,
    shards=3,
    order="hash",
    columns=[StoredColumn(name="values", width=4, dtype="float32")],
    generations=GENERATIONS,
)
NAME = "user.shard-00001-of-00003.chain"


def test_a_chain_is_what_was_encoded() -> None:
    assert decode_chain(CHAIN.encode(), url="x", name=NAME) == CHAIN
    assert CHAIN.prefix(GENERATIONS[1]) == "user.shard-00001-of-00003.000005"
    assert GENERATIONS[0].blocks == 3


@pytest.mark.parametrize(
    "change",
    [
        {"generations": []},
        {"generations": GENERATIONS[1:]},
        {"generations": GENERATIONS[::-1]},
        {"generations": [GENERATIONS[0]] * 2},
        {"generations": [msgspec.structs.replace(GENERATIONS[0], rows=-1)]},
        {"generations": [msgspec.structs.replace(GENERATIONS[0], number=1 << 32)]},
        {"generations": [msgspec.structs.replace(GENERATIONS[0], block_rows=0)]},
        {"shard": 3},
        {"shard": -1},
        {"table": "item"},
        {"version": 3},
        {"columns": []},
        {"columns": CHAIN.columns * 2},
        {"columns": [StoredColumn(name="values", width=0, dtype="float32")]},
        {"columns": [StoredColumn(name="values", width=1, dtype="float32", bits=7)]},
    ],
)
def test_a_chain_that_cannot_be_is_refused(change: dict[str, Any]) -> None:
    data = msgspec.structs.replace(CHAIN, **change).encode()
    with pytest.raises(FormatError):
        decode_chain(data, url="x", name=NAME)


@pytest.mark.parametrize("data", [b"", b"{}", b"[1", b'{"version": "x"}'])
def test_what_is_no_chain_is_refused(data: bytes) -> None:
    with pytest.raises(FormatError, match="describe a table's shard"):
        decode_chain(data, url="x", name=NAME)


def test_deltas_follow_one_another_until_they_are_too_many_or_too_large() -> None:
    def choice(deltas: list[int], merged: list[int]) -> int | None:
        # Two shards of one table decide together.
        halves = [Costs(500, [n // 2 for n in deltas], [n // 2 for n in merged], 4, 0.5)] * 2
        return first_to_merge(halves)

    assert choice([10], [10]) == 0
    assert choice([10, 10, 10], [20, 16, 10]) == 2
    # The fifth: at most two of four may be left, so all from the second on become one.
    assert choice([10] * 5, [40, 30, 26, 20, 10]) == 1
    # Too large for half of the bound: a base.
    assert choice([300, 300], [400, 300]) is None
    # Merged they are small, as the same rows changed each time.
    assert choice([300, 300], [240, 300]) == 0
    assert choice([600], [600]) is None


def test_shards_whose_chains_differ_begin_anew() -> None:
    one = Costs(500, [5], [5], 4, 0.5)
    assert first_to_merge([one, None]) is None
    assert first_to_merge([None]) is None
    assert first_to_merge([]) is None
    assert first_to_merge([one, Costs(500, [5, 5], [10, 5], 4, 0.5)]) is None
