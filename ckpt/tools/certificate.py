"""Certify that a live state equals a checkpoint bit for bit, or list the names that differ."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpt import notebook
from ckpt.words import count, printable, size

if TYPE_CHECKING:
    from ckpt.ranks.group import Ranks
    from ckpt.reading.delivered import DeliveredDigests
    from ckpt.state.load_planner import StateLoadPlanner

_MAX_NAMES = 20
"""Of each kind, in a text."""


class Cast(NamedTuple):
    """A tensor whose values are those in the checkpoint, cast to another dtype."""

    name: str
    stored_dtype: str
    live_dtype: str

    def __str__(self) -> str:
        return f"{self.name} ({self.stored_dtype} to {self.live_dtype})"


@dataclass(frozen=True)
class Certificate:
    """A comparison of a live state with a checkpoint, byte by byte. A notebook shows it as a table.

    Attributes:
        url: of the checkpoint, without credentials.
        cast: tensors of another dtype than stored, whose values are the stored ones after the cast.
        resized: tensors of another size than stored.
        different: names whose bytes, or objects whose values, are not those that were loaded.
        missing: names that the state has, and the checkpoint lacks.
        left_over: names that the checkpoint has, and the state lacks on every rank.
        untouched: names of which some part was not loaded, or has no memory.
        unchecked: names that cannot be compared, such as tensors that were resharded after the load.
        tensors, objects: how many of each were compared: of several ranks together.
        compared_bytes: of tensors, as they are live.
        took_s: how long the comparison took, on the slowest rank.
        ranks: how many of them it covers.
    """

    url: str
    cast: tuple[Cast, ...] = ()
    resized: tuple[str, ...] = ()
    different: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    left_over: tuple[str, ...] = ()
    untouched: tuple[str, ...] = ()
    unchecked: tuple[str, ...] = ()
    tensors: int = 0
    objects: int = 0
    compared_bytes: int = 0
    took_s: float = 0.0
    ranks: int = 1

    @property
    def is_exact(self) -> bool:
        """True if the state and the checkpoint have the same names, and each name the same bytes."""
        return not any(self._lists().values())

    def join(self, other: Certificate) -> Certificate:
        """Return the certificate of both ranks: findings of either, and names that both leave over."""
        own, others = self._lists(), other._lists()
        lists: dict[str, Any] = {name: tuple(sorted({*own[name], *others[name]})) for name in own}
        lists["left_over"] = tuple(sorted({*self.left_over} & {*other.left_over}))
        return Certificate(
            url=self.url or other.url,
            **lists,
            tensors=self.tensors + other.tensors,
            objects=self.objects + other.objects,
            compared_bytes=self.compared_bytes + other.compared_bytes,
            took_s=max(self.took_s, other.took_s),
            ranks=self.ranks + other.ranks,
        )

    def of_all(self, ranks: Ranks) -> Certificate:
        """Return the certificate of all ranks, on all of them; each calls it with its own."""
        return ranks.join(self, Certificate.join)

    def __str__(self) -> str:
        if self.is_exact:
            return f"bit for bit: {self._figures()}"
        lines = [f"not bit for bit: {self._figures()}"]
        lines += [f"  {title}: {shown}" for title, shown in self._shown()]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        verdict = "bit for bit" if self.is_exact else "not bit for bit"
        facts = [(verdict, notebook.text(self._figures()))]
        facts += [(title, notebook.text(shown)) for title, shown in self._shown()]
        return notebook.titled(self.url, facts)

    def _lists(self) -> dict[str, tuple[Any, ...]]:
        names = ("different", "untouched", "missing", "resized", "cast", "unchecked", "left_over")
        return {name: getattr(self, name) for name in names}

    def _figures(self) -> str:
        figures = [count(self.tensors, "tensor"), size(self.compared_bytes)]
        if self.objects:
            figures.append(count(self.objects, "object"))
        if self.ranks > 1:
            figures.append(f"on {self.ranks:,} ranks")
        return ", ".join(figures)

    def _shown(self) -> list[tuple[str, str]]:
        """List the findings, each with its names, of many the first."""
        shown = []
        for kind, names in self._lists().items():
            if not names:
                continue
            text = ", ".join(printable(name) for name in names[:_MAX_NAMES])
            if len(names) > _MAX_NAMES:
                text += f" and {len(names) - _MAX_NAMES:,} more"
            shown.append((f"{kind.replace('_', ' ')} ({len(names):,})", text))
        return shown


def certificate(live: Mapping[str, Any], delivered: DeliveredDigests) -> Certificate:
    """Compare this rank's part of a live state with the delivered digests.

    No storage is read, and nothing of the state is changed: each byte is read once, where it is.

    Args:
        live: the state by flat names, as the load had them: tensors of any kind, and objects.
        delivered: of the reader: see `CheckpointReader.record_delivered`.
    """
    from ckpt.tools.live_compare import Comparing

    began_s = time.monotonic()
    found = Comparing(live, delivered).run()
    found["cast"] = tuple(Cast(*each) for each in found["cast"])
    return Certificate(delivered.url, **found, took_s=time.monotonic() - began_s)


def certificate_of(live: Mapping[str, Any], planner: StateLoadPlanner) -> Certificate:
    """Compare this rank's part of a live state with what the load of a planner delivered, and add what that found."""
    made = certificate(live, planner.delivered)
    targets = planner.targets
    return replace(
        made,
        missing=tuple(sorted({*made.missing, *planner.missing})),
        left_over=planner.left_over,
        resized=tuple(sorted({*made.resized, *targets.resized})),
        unchecked=tuple(sorted({*made.unchecked, *targets.unchecked})),
    )
