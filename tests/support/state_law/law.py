"""Run one combination, and list where it breaks the law."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from support.state_law import runs
from support.state_law.combinations import Combination, may_be_refused
from support.state_law.worlds import WorldFailed, Worlds

_MAX_SHOWN = 6


def problem(combination: Combination, worlds: Worlds, root: str) -> str | None:
    """Return how this combination breaks the law; None if it keeps it. Raises nothing that a rank raised."""
    found = _problem(combination, worlds, root)
    if found is not None:
        worlds.close()  # a group in which a rank has failed may be of no more use
    return found


def _problem(combination: Combination, worlds: Worlds, root: str) -> str | None:
    """Judge a combination.

    On as many ranks as saved, the run that saved, one that resumed, and one that never saved end bit for bit
    equal; on others the whole state is the saved one. Or the save raised one clear error, where it may.
    """
    noisy = combination.way != "raw" and combination.phase != "window"
    ranks = int(combination.saved)
    try:
        expected = worlds.call(ranks, runs.never_saved, combination, noisy)
    except WorldFailed as error:
        return f"this cannot be trained at all: {error}"
    try:
        saved = worlds.call(ranks, runs.saved, combination, root, noisy)
    except WorldFailed as error:
        return f"the save failed, not by an error of ckpt: {error}"
    if refusals := [each["refused"] for each in saved if "refused" in each]:
        return _judged(combination, refusals, ranks)
    found = list(_saving_changed(expected, saved))
    if found:
        return "\n".join(["the save changed the training:", *found])
    try:
        resumed = worlds.call(int(combination.resumed), runs.resumed, combination, root, noisy)
    except WorldFailed as error:
        return f"acknowledged, and the restore failed: {error}"
    if combination.moves:
        found = list(differences(_merged(saved), _merged(resumed)))
        return "\n".join(["acknowledged, and the restored state differs:", *found]) if found else None
    return _compared(expected, saved, resumed)


def _judged(combination: Combination, refusals: list[str], ranks: int) -> str | None:
    allowed = may_be_refused(combination)
    if allowed is None:
        return f"the save was refused: {refusals[0]}"
    if len(refusals) < ranks:
        return f"the save was refused on {len(refusals)} of {ranks} ranks: {refusals[0]}"
    if not any(word in refusals[0] for word in allowed[1]):
        return f"the refusal names none of {allowed[1]}: {refusals[0]}"
    return None


def _saving_changed(expected: list[Any], saved: list[Any]) -> Iterator[str]:
    for rank, (never, did) in enumerate(zip(expected, saved, strict=True)):
        for name, one, other in (
            ("right after the save", did["local"], did["after the save"]),
            ("at the end", never, did["after"]),
        ):
            yield from (f"rank {rank}, {name}: {each}" for each in differences(one, other))


def _compared(expected: list[Any], saved: list[Any], resumed: list[Any]) -> str | None:
    for rank, (never, did, again) in enumerate(zip(expected, saved, resumed, strict=True)):
        at_save, restored = ({**state["local"], "losses": []} for state in (did, again))
        if found := list(differences(at_save, restored)):
            return "\n".join([f"acknowledged, and rank {rank} restored another state:", *found])
        count = len(again["after"]["losses"])
        tail = {**never, "losses": never["losses"][-count:]}
        if found := list(differences(tail, again["after"])):
            return "\n".join([f"acknowledged, and the resumed run of rank {rank} differs later:", *found])
    return None


def _merged(ranks: list[Any]) -> Any:
    """Unite the whole states of all ranks: stages, and shards of a loader, have their own names."""
    merged: Any = {}
    for rank in ranks:
        merged = _united(merged, rank["whole"])
    return merged


def _united(one: Any, other: Any) -> Any:
    if isinstance(one, dict) and isinstance(other, dict):
        return {
            key: _united(one[key], other[key])
            if key in one and key in other
            else one.get(key, other.get(key))
            for key in {**one, **other}
        }
    return one if one == other else f"ranks differ: {one} and {other}"


def differences(expected: Any, seen: Any) -> list[str]:
    """List where two states differ."""
    found = list(_differences(expected, seen, ""))
    more = [f"... and {len(found) - _MAX_SHOWN} more"] if len(found) > _MAX_SHOWN else []
    return [*found[:_MAX_SHOWN], *more]


def _differences(expected: Any, seen: Any, path: str) -> Iterator[str]:
    if isinstance(expected, Mapping) and isinstance(seen, Mapping):
        if [*expected] != [*seen] and {*expected} == {*seen} and expected.get("<kind>") == "OrderedDict":
            yield f"{path}: expected the order {[*expected]}, seen {[*seen]}"
        for key in {**expected, **seen}:
            where = f"{path}.{key}" if path else str(key)
            yield from _differences(expected.get(key, "nothing"), seen.get(key, "nothing"), where)
    elif isinstance(expected, list) and isinstance(seen, list) and len(expected) == len(seen):
        for number, (one, other) in enumerate(zip(expected, seen, strict=True)):
            yield from _differences(one, other, f"{path}[{number}]")
    elif expected != seen:
        yield f"{path}: expected {expected!s:.120}, seen {seen!s:.120}"
