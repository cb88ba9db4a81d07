"""Compare what ranks hold under one name, of which a save takes one rank's, and unite the groups of their optimizers."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ckpt.errors import ConfigurationError, SaveFailed
from ckpt.format.fqns import STRUCTURE, Path
from ckpt.ranks.group import Ranks
from ckpt.state.rank_digests import GROUPS, RankDigests, digest
from ckpt.state.state_parts import Description, texts_of
from ckpt.state.structure import Structure, structure_of

_logger = logging.getLogger(__name__)

_SHOWN = 5
_have_saved: set[tuple[str | int, ...]] = set()
"""Purposes and ranks that have saved together in this process."""
_noted_buffers: set[str] = set()


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

    def look() -> dict[str, int | None]:
        for name, value in values.items():
            kind = described.kinds.get(name, "value")
            if kind != "per rank" and name != STRUCTURE:
                own.add(name, value, kind, described.buffers)
        return {**own.digests(), GROUPS: digest(own.groups)}

    own_digests = ranks.together("comparison of values", look)
    joined = ranks.join(own_digests, _joined)
    differing = {kind for kind, found in joined.items() if found is None}
    if kinds := differing - {GROUPS}:
        digests, names = ranks.together("comparison of values", lambda: own.details(kinds))
        found = ranks.join(Compared(digests, {}), Compared.join)
        if found.differing:
            _judge(names, found.differing, ranks, url)
    return _with_groups(values, own.groups, ranks, url) if GROUPS in differing else values


def _joined(some: Mapping[str, int | None], other: Mapping[str, int | None]) -> dict[str, int | None]:
    """Keep the digests that are the same; None stands for others, also of what only some have."""
    return {
        kind: some[kind] if kind in some and kind in other and some[kind] == other[kind] else None
        for kind in {**some, **other}
    }


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
) -> None:
    """Refuse, or say, what differs; all ranks know alike."""
    own: Any = {names[number] for number in differing if number in names}
    shared: list[tuple[str, str]] = sorted(ranks.join(own, lambda some, others: {*some, *others}))
    by_kind: dict[str, list[str]] = {}
    for name, kind in shared:
        by_kind.setdefault(kind, []).append(name)
    texts = []
    if sharded := by_kind.get("sharded"):
        texts.append(
            f"groups of ranks hold other values of {_some(sharded)}, each on a mesh of its own, and one group's would "
            "stand for all: give experts names of their own, such as their number in the model, or one DTensor over "
            "the whole mesh, or save them with ckpt.per_rank"
        )
    if chunks := by_kind.get("chunk"):
        texts.append(
            f"ranks hold other values of {_some(chunks)} in the same chunk, which its hooks or fields give, and one rank's "
            "would stand for all: let one rank give it, or all the same values"
        )
    if wrong := [*by_kind.get("model", ()), *by_kind.get("optimizer", ())]:
        texts.append(
            f"ranks hold other values of {_some(wrong)}, and one rank's would stand for all: parameters and optimizer "
            "state that are no shards of one tensor have to be equal on all ranks; if each rank has its own, save "
            "them with ckpt.per_rank, or under names of their own"
        )
    if loaders := by_kind.get("loader"):
        texts.append(
            f"ranks hold other values of {_some(loaders)}, and one rank's would stand for all: save the part with "
            f"ckpt.per_rank, as in {loaders[0].partition('.')[0]}=ckpt.per_rank(...), which gives each rank its own back"
        )
    if texts:
        raise SaveFailed("; ".join(texts), url=url, failures={ranks.rank: ConfigurationError(texts[0])})
    if ranks.rank == 0:
        if buffers := [name for name in by_kind.get("buffer", ()) if name not in _noted_buffers]:
            _noted_buffers.update(buffers)
            _logger.info("buffers differ between ranks, rank 0's are saved: %s", _some(buffers))
        if others := [*by_kind.get("part", ()), *by_kind.get("value", ())]:
            _logger.warning(
                "%s: ranks hold other values of %s; one rank's are saved for all. ckpt.per_rank(part) saves each rank's own",
                url,
                _some(others),
            )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(repr, names[:_SHOWN])) + more


# -- groups of optimizers ----------------------------------------------------------------------------------


@dataclass
class _Groups:
    """The groups of ranks whose optimizers differ, by the first rank that has them."""

    by_digest: dict[int, tuple[int, Any]] = field(default_factory=dict)

    def join(self, other: _Groups) -> _Groups:
        joined = dict(self.by_digest)
        for number, (rank, groups) in other.by_digest.items():
            known = joined.get(number)
            if known is None or rank < known[0]:
                joined[number] = rank, groups
        return _Groups(joined)


def _with_groups(values: dict[str, Any], groups: Mapping[str, Any], ranks: Ranks, url: str) -> dict[str, Any]:
    """Return values in which each optimizer has the groups of all ranks, such as those of all stages of a pipeline."""
    own = _Groups(
        {digest([name, value]): (ranks.rank, (name, _on_cpu(value))) for name, value in groups.items()}
    )
    joined = ranks.join(own, _Groups.join)
    united: dict[str, list[list[dict[str, Any]]]] = {}
    for _, (name, each) in sorted(joined.by_digest.values(), key=lambda item: item[0]):
        united.setdefault(name, []).append(each)
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
            of_part = {key: text for key, text in noted.get(name, {}).items() if key != GROUPS}
            noted[name] = of_part | (texts_of(found) if found else {})
            result[STRUCTURE] = noted
    return result


def _merged(
    name: str, all_groups: Sequence[Sequence[Mapping[str, Any]]], url: str, ranks: Ranks
) -> list[dict[str, Any]]:
    """Unite groups of the same place and options; all others stay apart. Raises SaveFailed if a parameter is in two."""
    merged: list[tuple[int, int, dict[str, Any]]] = []
    homes: dict[Any, int] = {}
    for groups in all_groups:
        for place, group in enumerate(groups):
            options = digest({key: value for key, value in group.items() if key != "params"})
            number = next(
                (at for at, (where, known, _) in enumerate(merged) if (where, known) == (place, options)),
                len(merged),
            )
            if number == len(merged):
                merged.append((place, options, {**group, "params": []}))
            params = merged[number][2]["params"]
            known_params = set(params)
            for param in group["params"]:
                if homes.setdefault(param, number) != number:
                    text = (
                        f"ranks have other options for parameter {param!r} of {name!r}, or it has one name and stands for "
                        "several: give optimizers the same groups on all ranks that hold a parameter, and save "
                        "optimizers of several models by training_state(model=..., optimizer=...)"
                    )
                    raise SaveFailed(text, url=url, failures={ranks.rank: ConfigurationError(text)})
                if param not in known_params:
                    params.append(param)
    return [group for _, _, group in merged]


def _on_cpu(groups: Any) -> Any:
    """Return groups whose tensors can be sent."""
    if isinstance(groups, torch.Tensor):
        return groups.detach().cpu().clone()
    if isinstance(groups, Mapping):
        return {key: _on_cpu(value) for key, value in groups.items()}
    return [*map(_on_cpu, groups)] if type(groups) is list else groups
