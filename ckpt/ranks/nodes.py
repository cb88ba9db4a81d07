"""Choose one rank of each node."""

from __future__ import annotations

import socket
import zlib

from ckpt.ranks.group import Ranks


def first_of_node(ranks: Ranks) -> tuple[bool, int]:
    """Tell whether this is the first of the ranks on its node, and how many nodes there are."""
    node = zlib.crc32(socket.gethostname().encode())
    first = ranks.join({node: ranks.rank}, _earliest)
    return first[node] == ranks.rank, len(first)


def _earliest(some: dict[int, int], others: dict[int, int]) -> dict[int, int]:
    return {key: min(some.get(key, rank), rank) for key, rank in others.items()} | {
        key: min(others.get(key, rank), rank) for key, rank in some.items()
    }
