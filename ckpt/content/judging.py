"""Judge the content of a save by that of the save before."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from ckpt.content.checks import Checks
from ckpt.content.counters import gone_back
from ckpt.content.counters import known as known_counters
from ckpt.content.parts import MAX_PARTS, MODELS, OPTIMIZER_PREFIX, parts_of
from ckpt.content.rank_content import PartSeen, RankContent, as_one_part
from ckpt.content.replicas import Difference
from ckpt.format.columns import Columns, ObjectRow
from ckpt.format.figures import PartContent
from ckpt.format.table_names import is_of_table, rows_of_tables

_MAX_NAMED = 4
_NO_TENSORS = PartContent(tensors=0, elements=0, names="")


@dataclass(frozen=True)
class Saved:
    """What is known of a save: where, of which step (None: unknown), with which content, of how many ranks.

    `refers` if it names others' bytes.
    """

    url: str
    step: int | None
    parts: Mapping[str, PartContent]
    ranks: int
    refers: bool = False


@dataclass(frozen=True)
class Finding:
    """Something that is probably wrong: which check found it, in which words, on which rank (if one is to blame).

    One that is `often_meant` refuses no save.
    """

    check: str
    text: str
    rank: int | None = None
    tensors: tuple[str, ...] = ()
    often_meant: bool = False


class Descriptions:
    """What plans say of each part, without values: that of the last plan is remembered."""

    def __init__(self) -> None:
        self._last: tuple[int | None, dict[str, PartContent]] = None, {}

    def of(self, columns: Columns, plan: int | None) -> dict[str, PartContent]:
        """Count what the columns describe; they are those of the plan of this number, if it has one."""
        last = self._last  # another save may replace it meanwhile
        if plan is None or plan != last[0]:
            last = self._last = plan, _described(columns)
        return last[1]


def content_of(
    described: Mapping[str, PartContent], ranks: Mapping[int, RankContent]
) -> dict[str, PartContent]:
    """Add what all ranks have seen to what a plan says."""
    if described.keys() == {""}:
        ranks = {rank: replace(each, parts=as_one_part(each.parts)) for rank, each in ranks.items()}
    parts: dict[str, PartContent] = {}
    for part, content in described.items():
        seen = [(rank, each.parts[part]) for rank, each in sorted(ranks.items()) if part in each.parts]
        parts[part] = replace(
            content,
            values=_values(seen),
            looked_at=sum(each.looked_at for _, each in seen),
            zero=sum(each.zero for _, each in seen),
            not_finite=sum(each.not_finite for _, each in seen),
            infinite=sum(each.infinite for _, each in seen),
        )
    for (part, name), (value, *_) in _highest(ranks).items():
        if part in parts or len(parts) < MAX_PARTS:
            content = parts.get(part, _NO_TENSORS)
            parts[part] = replace(content, counters=content.counters | {name: value})
    return parts


def with_known(
    parts: Mapping[str, PartContent], before: Saved | None, *, refers: bool = False
) -> dict[str, PartContent]:
    """Remember of the same tensors what was not finite before: a sample may miss it, a save with a base leave it out.

    A save that `refers` to others' bytes has not met the counters that are as they were either.
    """
    merged: dict[str, PartContent] = {}
    for part, content in parts.items():
        known = None if before is None else before.parts.get(part)
        if known is not None and known.names == content.names:
            content = replace(
                content,
                not_finite=max(known.not_finite, content.not_finite),
                infinite=max(known.infinite, content.infinite),
            )
        if known is not None and known.names == content.names and refers:
            content = replace(content, counters=known_counters(known.counters) | content.counters)
        merged[part] = content
    return merged


def judge(
    now: Saved,
    before: Saved | None,
    ranks: Mapping[int, RankContent],
    differences: Iterable[Difference],
) -> list[Finding]:
    """List what is probably wrong with a save; `before` is one that it `follows`."""
    findings = [*_of_replicas(differences)]
    if before is not None:
        for part, content in now.parts.items():
            known = before.parts.get(part)
            if known is not None:
                findings += _values_of(part, content, known, ranks) if content.names == known.names else ()
                findings += _size(part, content, known, before)
        findings += _gone_parts(now, before)
        findings += _went_back(now, before, ranks)
        findings += _stale(now, before)
    return findings


def sort_out(findings: Iterable[Finding], checks: Checks) -> tuple[list[Finding], list[Finding]]:
    """Return the findings for which a save is refused, and those that are told."""
    levels = checks.levels()
    findings = [each for each in findings if levels[each.check] != "off"]
    refused = [each for each in findings if levels[each.check] == "refuse" and not each.often_meant]
    return refused, [each for each in findings if each not in refused]


def follows(now: Saved, before: Saved) -> bool:
    """Tell whether a save is that of a later step, or one in the place of the other."""
    if now.step is None or before.step is None:
        return now.url == before.url
    return now.step > before.step or now.url == before.url


def _values_of(
    part: str, now: PartContent, known: PartContent, ranks: Mapping[int, RankContent]
) -> Iterable[Finding]:
    """Compare the values of the same tensors."""
    seen = {rank: each.parts[part] for rank, each in ranks.items() if part in each.parts}
    if now.not_finite and not known.not_finite:
        names, rank = _names({rank: each.not_finite_names for rank, each in seen.items()})
        what = "NaN or infinity" if part.startswith(OPTIMIZER_PREFIX) else "NaN"
        text = f"{what} in {_counted(now.not_finite)} of {_named(part)}, none before: {_some(names)}"
        yield Finding("not_finite", text, rank, tuple(names))
    # Records of older versions count infinities in `not_finite`.
    if now.infinite and not known.infinite and not known.not_finite:
        names, rank = _names({rank: each.infinite_names for rank, each in seen.items()})
        text = f"infinity in {_counted(now.infinite)} of {_named(part)}, none before: {_some(names)}"
        yield Finding("not_finite", text, rank, tuple(names), often_meant=True)
    # Of the same chunks: in a job of another size, or with a base, a tensor is written in more or fewer of them.
    if now.looked_at == known.looked_at and now.zero - known.zero > (
        known.tensors // 4 if part.startswith(OPTIMIZER_PREFIX) else 0
    ):
        names, rank = _names({rank: each.zero_names for rank, each in seen.items()})
        text = f"only zeros in {_counted(now.zero)} of {_named(part)}, in {known.zero} before: {_some(names)}"
        yield Finding("zeroed", text, rank, tuple(names))


def _size(part: str, now: PartContent, known: PartContent, before: Saved) -> Iterable[Finding]:
    for table, rows in known.tables.items():
        own = now.tables.get(table)
        if own is None:
            yield Finding("missing", f"the table {table!r} is in {before.url}, and not in this save")
        elif own.rows + own.evicted < rows.rows:
            evicted = f", of which {own.evicted:,} were evicted" if own.evicted else ""
            text = f"the table {table!r} has {own.rows:,} rows; it had {rows.rows:,} in {before.url}{evicted}"
            yield Finding("missing", text)
    if now.tables and not known.tables:
        return  # an older version counted their entries
    if now.tensors < known.tensors or now.elements < known.elements:
        text = (
            f"{_named(part)} has {_counted(now.tensors)} with {now.elements:,} elements; it had {known.tensors:,} with "
            f"{known.elements:,} in {before.url}"
        )
        yield Finding("missing", text)


def _gone_parts(now: Saved, before: Saved) -> Iterable[Finding]:
    if before.parts.keys() == {""} or now.parts.keys() == {""}:
        return  # there the parts have no names
    gone = [part for part, each in before.parts.items() if _has_any(each) and part not in now.parts]
    if gone:
        yield Finding("missing", f"{_some(list(map(_named, gone)))}: there in {before.url}, not in this save")


def _has_any(part: PartContent) -> bool:
    return part.tensors > 0 or bool(part.tables)


def _stale(now: Saved, before: Saved) -> Iterable[Finding]:
    """Find out whether nothing has changed: at all, in all optimizers, or in the model while they went on."""
    if now.step is None or before.step is None or now.step <= before.step or now.refers or before.refers:
        return
    is_same: dict[str, bool] = {}
    for part, content in now.parts.items():
        known = before.parts.get(part)
        if known is not None and content.values and known.values and content.names == known.names:
            is_same[part] = content.values == known.values
    if not is_same:
        return
    since = f"step {before.step} ({before.url})"
    optimizers = [part for part in is_same if part.startswith(OPTIMIZER_PREFIX)]
    models = [part for part in is_same if part in MODELS]
    if all(is_same.values()):
        yield Finding("stale", f"step {now.step} is, bit by bit, {since}: no tensor has changed")
    elif optimizers and all(is_same[part] for part in optimizers):
        yield Finding("stale", f"no tensor of {_all(optimizers)} has changed since {since}, and others have")
    elif models and all(is_same[part] for part in models) and not all(is_same[part] for part in optimizers):
        yield Finding(
            "stale", f"no tensor of {_all(models)} has changed since {since}, and its optimizer has"
        )


def _went_back(now: Saved, before: Saved, ranks: Mapping[int, RankContent]) -> Iterable[Finding]:
    """Find what counts steps, epochs or samples, and is lower than at an earlier step."""
    if now.step is None or before.step is None or now.step <= before.step or now.refers:
        return
    same = {
        part for part, each in now.parts.items() if each.names == before.parts.get(part, _NO_TENSORS).names
    }
    values, known = (
        {(part, name): value for part, each in parts.items() for name, value in each.counters.items()}
        for parts in (now.parts, before.parts)
    )
    lower = gone_back(values, known, same_ranks=now.ranks == before.ranks)
    wrong = [(part, name) for part, name in lower if part in same]
    if not wrong:
        return
    highest = _highest(ranks)
    names = [highest[each][2] for each in wrong]
    told = [
        f"{name!r:.200} from {known[each]:,.12g} to {values[each]:,.12g}"
        for each, name in zip(wrong, names, strict=True)
    ]
    text = f"step {now.step} comes after step {before.step} ({before.url}), but went back: {_some(told)}"
    yield Finding("went_back", text, highest[wrong[0]][1], tuple(names[:_MAX_NAMED]))


def _all(parts: Sequence[str]) -> str:
    return _some([_named(part) for part in parts])


def _of_replicas(differences: Iterable[Difference]) -> Iterable[Finding]:
    for is_declared, check in ((True, "diverged"), (False, "collided")):
        differing = [each for each in differences if each.is_declared is is_declared]
        if not differing:
            continue
        first = differing[0]
        where = f" from {list(first.offsets)} on" if any(first.offsets) else ""
        text = f"{first.name!r}{where}: {_ranks(first.ranks)} other values than {_ranks(first.others, verb=False)}"
        if len(differing) > 1:
            text += f"; so do {_some([repr(each.name) for each in differing[1:]])}"
        text += (
            "; replicas must be equal"
            if is_declared
            else "; only one of them would be saved under this name: give each rank's a name of its own"
        )
        yield Finding(check, text, first.ranks[0], tuple(each.name for each in differing[:_MAX_NAMED]))


def _described(columns: Columns) -> dict[str, PartContent]:
    """Count and digest what the columns describe, part by part."""
    paths = columns.planner_data if isinstance(columns.planner_data, Mapping) else None
    counts: dict[str, list[int]] = {}
    names: dict[str, list[str]] = {}
    sizes: dict[str, list[tuple[str, Sequence[int]]]] = {}
    for (fqn, entry), part in zip(
        columns.entries.items(), parts_of(list(columns.entries), paths), strict=True
    ):
        if isinstance(entry, ObjectRow):
            continue
        count = counts.setdefault(part, [0, 0])
        if is_of_table(fqn):  # of a chain, whose entries come and go
            sizes.setdefault(part, []).append((fqn, entry.size))
        else:
            count[0] += 1
            count[1] += math.prod(entry.size)
        names.setdefault(part, []).append(f"{fqn}\0{entry.dtype}\0{entry.size}")
    parts = {
        part: PartContent(
            tensors=count,
            elements=elements,
            names=_hex("\0".join(sorted(names[part])).encode()),
            tables=rows_of_tables(sizes.get(part, ())),
        )
        for part, (count, elements) in counts.items()
    }
    if len(parts) <= MAX_PARTS:
        return parts
    return {
        "": PartContent(
            tensors=sum(each.tensors for each in parts.values()),
            elements=sum(each.elements for each in parts.values()),
            names=_hex("".join(each.names for _, each in sorted(parts.items())).encode()),
            tables=rows_of_tables(each for of_part in sizes.values() for each in of_part),
        )
    }


def _highest(ranks: Mapping[int, RankContent]) -> dict[tuple[str, str], tuple[float, int, str]]:
    """Return of each counter, by part and name, the highest value, the first rank that told it, and the FQN."""
    highest: dict[tuple[str, str], tuple[float, int, str]] = {}
    for rank, each in sorted(ranks.items()):
        for part, seen in each.parts.items():
            for name, (value, fqn) in seen.counters.items():
                if (part, name) not in highest or value > highest[part, name][0]:
                    highest[part, name] = value, rank, fqn
    return highest


def _values(seen: Sequence[tuple[int, PartSeen]]) -> str:
    told = b"".join(rank.to_bytes(4, "little") + each.values for rank, each in seen if each.values)
    return _hex(told) if told else ""


def _hex(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _names(by_rank: Mapping[int, Sequence[str]]) -> tuple[list[str], int | None]:
    """Return some names, and the lowest rank that told one."""
    ranks = sorted(rank for rank, names in by_rank.items() if names)
    names = list(dict.fromkeys(name for rank in ranks for name in by_rank[rank]))
    return names[:_MAX_NAMED], ranks[0] if ranks else None


def _named(part: str) -> str:
    return f"{part!r:.100}" if part else "the state"


def _counted(tensors: int) -> str:
    return "1 tensor" if tensors == 1 else f"{tensors:,} tensors"


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more


def _ranks(ranks: Sequence[int], *, verb: bool = True) -> str:
    shown = ", ".join(map(str, ranks[:_MAX_NAMED])) + (" ..." if len(ranks) > _MAX_NAMED else "")
    text = f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
    return f"{text} {'holds' if len(ranks) == 1 else 'hold'}" if verb else text
