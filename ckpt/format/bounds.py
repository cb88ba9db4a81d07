"""Bound the numbers and ids of records, which may be hostile: decoders refuse all others as no valid record."""

from __future__ import annotations

from typing import Annotated

import msgspec

MAX_RANKS = 1 << 20
MAX_FILES_OF_RANK = 1 << 16

Amount = Annotated[int, msgspec.Meta(ge=0, le=(1 << 62) - 1)]
"""A size, offset or number of things."""

Number = Annotated[int, msgspec.Meta(ge=-(1 << 62), le=(1 << 62) - 1)]
"""An integer that may be negative."""

Seconds = Annotated[float, msgspec.Meta(ge=-(1 << 53), le=1 << 53)]
"""A duration, or a time since 1970."""

RankNumber = Annotated[int, msgspec.Meta(ge=0, lt=MAX_RANKS)]
WorldSize = Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]
FileCount = Annotated[int, msgspec.Meta(ge=0, le=MAX_FILES_OF_RANK)]

Token = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{16}\Z")]
"""16 hexadecimal digits: the id of a commit or of a run."""
