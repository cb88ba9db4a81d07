"""Compare what ranks hold under one name, of which a save takes one rank's, and unite the groups of their optimizers."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ckpt.errors import ConfigurationError, SaveFailed
from ckpt.format.fqns import STRUCTURE, Path
from ckpt.ranks.group import Ranks
from ckpt.state.rank_digests import GROUPS, PLACED, Key, RankDigests, digest, number_of
from ckpt.state.rank_layouts import (
    LAYOUT,
    WITH_LAYOUT,
    Layout,
    judge_layouts,
    key_of_layout,
    layout_of,
    shown_names,
)
from ckpt.state.state_parts import Description, texts_of
from ckpt.state.structure import Structure, children, decode, is_flattened, structure_of

_logger = logging.getLogger(__name__)

_CALL = "comparison of values"
_GROUPS: Key = (GROUPS, 0, 0)
_have_saved: set[tuple[str | int, ...]] = set()
"""Purposes and ranks that have saved together in this process."""
_noted_buffers: set[str] = set()

_OF_ONE = ("buffer", "part")  # of plain values, replicas are compared when they are written
_NOTHING: Any = object()


def agree_on_values(
    values: dict[str, Any], described: Description, ranks: Ranks, url: str, *, number: int | None = None
) -> dict[str, Any]:
    """Compare values on all ranks; return those to save, with the groups of all ranks' optimizers.

    `number`: of the save, from 1 on, the same on all ranks; default that of the call. In the first save of these ranks
    large tensors are compared whole.

    Parameters, optimizer state and loaders that differ are refused. Of buffers rank 0's are saved, as DDP has them;
    other values that differ are warned of, by rank 0. `ckpt.per_rank` says that a part is each rank's own.

    Raises SaveFailed, on all ranks.
    """
    if ranks.size == 1:
        return values
    is_first = number == 1 or (number is None and (ranks.purpose, *ranks.members) not in _have_saved)
    if number is None:
        _have_saved.add((ranks.purpose, *ranks.members))
    own = RankDigests(ranks.call if number is None else number, is_whole=is_first)
    layouts: dict[str, Layout] = {}

    def look() -> dict[Key, int | None]:
        for name, value in values.items():
            kind = described.kinds.get(name, "value")
            if kind != "per rank" and name != STRUCTURE:
                own.add(name, value, kind, described.buffers)
                if (
                    kind in WITH_LAYOUT
                    and name not in described.united
                    and not isinstance(value, torch.Tensor)
                ):
                    layouts[name] = layout_of(name, value, values.get(STRUCTURE, {}).get(name))
        of_layouts = {key_of_layout(name): layout.digest() for name, layout in layouts.items()}
        return {**own.digests(), **of_layouts, _GROUPS: digest(own.groups)}

    own_digests = ranks.together(_CALL, look)
    joined = ranks.join(own_digests, _joined)
    differing = {key for key, found in joined.items() if found is None}
    if any(key[0] == LAYOUT for key in differing):
        others = {name: layout for name, layout in layouts.items() if key_of_layout(name) in differing}
        judge_layouts(others, described.kinds, ranks, url)
    shared = _shared_names(own, joined.keys(), ranks)
    if (keys := {key for key in differing if key[0] not in (GROUPS, LAYOUT)}) or shared:
        digests, names = ranks.together(_CALL, lambda: own.details(keys, shared))
        found = ranks.join(Compared(digests, {}), Compared.join)
        if found.differing:
            values = _of_one_rank(values, own, _judge(names, found.differing, ranks, url), ranks)
    return _with_groups(values, own.groups, ranks, url) if _GROUPS in differing else values


def _joined(some: Mapping[Key, int | None], other: Mapping[Key, int | None]) -> dict[Key, int | None]:
    """Keep the digests that are the same; None stands for others, also of kinds that only some have."""
    joined = {**some, **other}
    for key in joined:
        if key[0] not in (*PLACED, LAYOUT) or (key in some and key in other):
            joined[key] = some[key] if some.get(key) == other.get(key) else None
    return joined


def _shared_names(own: RankDigests, keys: Collection[Key], ranks: Ranks) -> set[int]:
    """Return the numbers of names with places that ranks have among other names: their places may be the same."""
    kinds = {kind for kind in PLACED if len({key[1] for key in keys if key[0] == kind}) > 1}
    if not kinds:
        return set()
    own_names: dict[int, int | None] = {**ranks.together(_CALL, lambda: own.names(kinds))}
    among = ranks.join(own_names, _one_each)
    return {number for number, names in among.items() if names is None}


def _one_each(some: dict[int, int | None], other: dict[int, int | None]) -> dict[int, int | None]:
    joined = {**some, **other}
    joined.update((number, None) for number in some.keys() & other.keys() if some[number] != other[number])
    return joined


@dataclass
class Compared:
    """Digests by the number of a name, and the numbers of those that differ."""

    digests: dict[int, int]
    differing: dict[int, None]

    def join(self, other: Compared) -> Compared:
        differing = {**self.differing, **other.differing}
        for number in self.digests.keys() & other.digests.keys():
            if self.digests[number] != other.digests[number]:
                differing[number] = None
        return Compared({**other.digests, **self.digests}, differing)


# -- what differs ------------------------------------------------------------------------------------------


def _judge(
    names: Mapping[int, tuple[str, str]], differing: Mapping[int, None], ranks: Ranks, url: str
) -> list[tuple[str, str]]:
    """Refuse, or say, what differs; return the names and kinds of what is saved all the same, on all ranks alike."""
    own: Any = {names[number] for number in differing if number in names}
    shared: list[tuple[str, str]] = sorted(ranks.join(own, lambda some, others: {*some, *others}))
    by_kind: dict[str, list[str]] = {}
    for name, kind in shared:
        by_kind.setdefault(kind, []).append(name)
    texts = []
    if sharded := by_kind.get("sharded"):
        texts.append(
            f"groups of ranks hold other values of {shown_names(sharded)}, each on a mesh of its own, and one group's would "
            "stand for all: give experts names of their own, such as their number in the model, or one DTensor over "
            "the whole mesh, or save them with ckpt.per_rank"
        )
    if chunks := by_kind.get("chunk"):
        texts.append(
            f"ranks hold other values of {shown_names(chunks)} in the same chunk, which its hooks or fields give, and one rank's "
            "would stand for all: let one rank give it, or all the same values"
        )
    if wrong := [*by_kind.get("model", ()), *by_kind.get("optimizer", ())]:
        texts.append(
            f"ranks hold other values of {shown_names(wrong)}, and one rank's would stand for all: parameters and optimizer "
            "state that are no shards of one tensor have to be equal on all ranks; if each rank has its own, save "
            "them with ckpt.per_rank, or under names of their own"
        )
    if loaders := by_kind.get("loader"):
        texts.append(
            f"ranks hold other values of {shown_names(loaders)}, and one rank's would stand for all: save the part with "
            f"ckpt.per_rank, as in {loaders[0].partition('.')[0]}=ckpt.per_rank(...), which gives each rank its own back"
        )
    if texts:
        raise SaveFailed("; ".join(texts), url=url, failures={ranks.rank: ConfigurationError(texts[0])})
    if ranks.rank == 0:
        if buffers := [name for name in by_kind.get("buffer", ()) if name not in _noted_buffers]:
            _noted_buffers.update(buffers)
            _logger.info("buffers differ between ranks, rank 0's are saved: %s", shown_names(buffers))
        if others := [*by_kind.get("part", ()), *by_kind.get("value", ())]:
            _logger.warning(
                "%s: ranks hold other values of %s; one rank's are saved for all. ckpt.per_rank(part) saves each rank's own",
                url,
                shown_names(others),
            )
    return shared


def _of_one_rank(
    values: dict[str, Any], own: RankDigests, differing: Sequence[tuple[str, str]], ranks: Ranks
) -> dict[str, Any]:
    """Return values of which only the first rank that has them holds a part's, or a model's buffers, where some differ.

    Else each would be written by another rank, and together they would be what no rank has ever had.
    """
    found = {(_part_of(name, values), kind) for name, kind in differing if kind in _OF_ONE}

    def held() -> dict[int, int]:
        names = (name for part, kind in found if part is not None for name in own.names_below(part, kind))
        return {number_of(name): ranks.rank for name in names}

    own_names = ranks.together(_CALL, held)
    first = ranks.join(own_names, _lowest)
    dropped = {number for number in own_names if first[number] != ranks.rank}
    parts = {part for part, _ in found} if dropped else set()
    kept = {
        name: _without(value, name, dropped) if name in parts else value for name, value in values.items()
    }
    return {name: value for name, value in kept.items() if value is not _NOTHING}


def _part_of(name: str, values: Mapping[str, Any]) -> str | None:
    """Return the part that a value belongs to; None if this rank has no such part."""
    keys = name.split(".")
    return next((part for at in range(1, len(keys) + 1) if (part := ".".join(keys[:at])) in values), None)


def _without(value: Any, name: str, dropped: Collection[int]) -> Any:
    """Return a value without some of its leaves, by the numbers of their names; a list with gaps as a dict by number."""
    if not is_flattened(value):
        return _NOTHING if number_of(name) in dropped else value
    kept = {key: _without(item, f"{name}.{key}", dropped) for key, item in children(value)}
    if all(kept[key] is item for key, item in children(value)):
        return value
    return {key: item for key, item in kept.items() if item is not _NOTHING} or _NOTHING


def _lowest(some: dict[int, int], other: dict[int, int]) -> dict[int, int]:
    return {key: min(some.get(key, rank), rank) for key, rank in {**some, **other}.items()}


# -- groups of optimizers ----------------------------------------------------------------------------------


@dataclass
class _Groups:
    """The groups of ranks whose optimizers differ: the first rank that has them, the part, and the groups, pickled."""

    by_digest: dict[int, tuple[int, str, bytes]]

    def join(self, other: _Groups) -> _Groups:
        joined = dict(self.by_digest)
        for number, found in other.by_digest.items():
            joined[number] = min(found, joined.get(number, found))
        return _Groups(joined)


def _own_groups(groups: Mapping[str, Any], rank: int) -> _Groups:
    """Return a rank's groups. Raises ConfigurationError for those that cannot be sent."""
    found: dict[int, tuple[int, str, bytes]] = {}
    for name, value in groups.items():
        try:
            found[digest([name, value])] = rank, name, pickle.dumps(_on_cpu(value))
        except Exception as error:
            raise ConfigurationError(
                f"the groups of {name!r} hold an option that cannot be sent to the other ranks, whose groups differ: "
                f"{type(error).__name__}: {error}"
            ) from error
    return _Groups(found)


def _with_groups(values: dict[str, Any], groups: Mapping[str, Any], ranks: Ranks, url: str) -> dict[str, Any]:
    """Return values in which each optimizer has the groups of all ranks, such as those of all stages of a pipeline."""
    joined = ranks.join(ranks.together(_CALL, lambda: _own_groups(groups, ranks.rank)), _Groups.join)
    united: dict[str, list[list[dict[str, Any]]]] = {}
    for _, name, each in sorted(joined.by_digest.values()):
        united.setdefault(name, []).append(pickle.loads(each))
    result = dict(values)
    for name, all_groups in united.items():
        if name not in values or len(all_groups) == 1:
            continue
        merged = _merged(name, all_groups, url, ranks)
        result[name] = {**values[name], GROUPS: merged}
        found: dict[Path, Structure] = {
            (GROUPS, number): structure_of(group, name) for number, group in enumerate(merged)
        }
        found = {unit: structure for unit, structure in found.items() if structure}
        noted = dict(result.get(STRUCTURE, {}))
        if found or name in noted:
            noted[name] = _with_texts(noted.get(name, {}), found, name)
            result[STRUCTURE] = noted
    return result


def _with_texts(noted: Any, found: Mapping[Path, Structure], name: str) -> Any:
    """Return the notes of an optimizer with those of its united groups."""
    if isinstance(noted, str):  # one text for all, as where parameters have numbers
        others = {path: node for path, node in decode(noted, name).items() if path[:1] != (GROUPS,)}
        return texts_of(
            {(): others | {(*unit, *path): node for unit, at in found.items() for path, node in at.items()}}
        )
    of_part = {key: text for key, text in noted.items() if key != GROUPS}
    return of_part | (texts_of(found) if found else {})


def _merged(
    name: str, all_groups: Sequence[Sequence[Mapping[str, Any]]], url: str, ranks: Ranks
) -> list[dict[str, Any]]:
    """Unite groups of the same place and options; all others stay apart. Raises SaveFailed if a parameter is in two."""
    merged: dict[tuple[int, int], dict[str, Any]] = {}
    homes: dict[Any, tuple[int, int]] = {}
    for groups in all_groups:
        for place, group in enumerate(groups):
            home = place, digest({key: value for key, value in group.items() if key != "params"})
            params = merged.setdefault(home, {**group, "params": {}})["params"]
            for param in group["params"]:
                known = homes.setdefault(param, home)
                if known == home:
                    params[param] = None
                else:
                    text = (
                        f"ranks have other options for parameter {param!r} of {name!r}, or it has one name and stands for "
                        "several: give optimizers the same groups on all ranks that hold a parameter, and save "
                        "optimizers of several models by training_state(model=..., optimizer=...)"
                    )
                    raise SaveFailed(text, url=url, failures={ranks.rank: ConfigurationError(text)})
    return [{**group, "params": [*group["params"]]} for group in merged.values()]


def _on_cpu(groups: Any) -> Any:
    """Return groups whose tensors can be sent."""
    if isinstance(groups, torch.Tensor):
        return groups.detach().cpu().clone()
    if isinstance(groups, Mapping):
        return {key: _on_cpu(value) for key, value in groups.items()}
    return [*map(_on_cpu, groups)] if type(groups) is list else groups
