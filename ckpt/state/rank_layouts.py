"""Compare which names ranks have in a part: a checkpoint holds those of all, and a restore gives them to each rank."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckpt.errors import ConfigurationError, SaveFailed
from ckpt.format.fqns import Path
from ckpt.ranks.group import Ranks
from ckpt.state.rank_digests import Key, digest, number_of
from ckpt.state.rank_keys import rank_of
from ckpt.state.structure import leaves, name_of

_logger = logging.getLogger(__name__)

LAYOUT = "layout"
"""The kind of a key for the names in a part: only ranks that have the part are compared."""

WITH_LAYOUT = ("loader", "part", "value")
"""Kinds of parts that are compared. Stages of a pipeline have other names in models and optimizers."""

_SHOWN = 5


@dataclass(frozen=True)
class Layout:
    """The values in a part, and what flattening loses of it; without what `per_rank` marks as each rank's own.

    Attributes:
        paths: of the values.
        notes: texts, nested as they are stored.
    """

    paths: frozenset[Path]
    notes: Any

    def digest(self) -> int:
        return digest([sorted(map(str, self.paths)), self.notes])


def layout_of(name: str, value: Any, notes: Any) -> Layout:
    paths = {(name, *path) for path, _ in leaves(value) if not any(rank_of(key) is not None for key in path)}
    return Layout(frozenset(paths), _shared(notes))


def key_of_layout(name: str) -> Key:
    return LAYOUT, number_of(name), 0


def judge_layouts(layouts: Mapping[str, Layout], kinds: Mapping[str, str], ranks: Ranks, url: str) -> None:
    """Refuse parts whose names differ between ranks if they cannot be united, and loaders; warn of others.

    All ranks call it. Raises SaveFailed.
    """
    own = {(name, kinds[name]): layout.paths for name, layout in layouts.items()}
    united: dict[tuple[str, str], frozenset[Path]] = ranks.join(own, _united)
    texts = []
    for paths in united.values():
        containers = {path[:at] for path in paths for at in range(1, len(path))}
        if clash := sorted(map(name_of, containers & paths)):
            texts.append(f"a value on some ranks, and a container on others: {shown_names(clash)}")
    if loaders := sorted(name for name, kind in united if kind == "loader"):
        texts.append(f"ranks hold other keys of {shown_names(loaders)}")
    if texts:
        part = min(united)[0]
        texts.append(
            f"save such a part with ckpt.per_rank, as in {part}=ckpt.per_rank(...), which gives each rank its own back"
        )
        raise SaveFailed("; ".join(texts), url=url, failures={ranks.rank: ConfigurationError(texts[0])})
    if ranks.rank == 0:
        _logger.warning(
            "%s: ranks hold other keys of %s; a restore gives each rank those of all. ckpt.per_rank(part) saves each rank's own",
            url,
            shown_names(sorted(name for name, _ in united)),
        )


def shown_names(names: Sequence[str]) -> str:
    """List names, five at most."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(repr, names[:_SHOWN])) + more


def _shared(notes: Any) -> Any:
    """Return notes without those of each rank's own."""
    if not isinstance(notes, Mapping):
        return notes
    return {key: _shared(note) for key, note in notes.items() if rank_of(key) is None}


def _united(
    some: dict[tuple[str, str], frozenset[Path]], other: dict[tuple[str, str], frozenset[Path]]
) -> dict[tuple[str, str], frozenset[Path]]:
    nothing: frozenset[Path] = frozenset()
    return {key: some.get(key, nothing) | other.get(key, nothing) for key in {**some, **other}}
