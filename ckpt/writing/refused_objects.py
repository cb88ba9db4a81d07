"""Warn of objects that are saved as they are, but that a load will refuse to unpickle."""

from __future__ import annotations

import logging
from collections import OrderedDict, defaultdict
from collections.abc import Collection
from fnmatch import fnmatchcase

from ckpt.stock.safe_load import load_fault, refused_names, surely_refused_names, unknown_names

_SHOWN = 3
_MAX_BYTES = 4 << 20
"""Of a larger object only the begin of its pickle is searched; others are loaded once, to be sure."""
_MAX_RUNS = 64
_MAX_NAMES = 100_000

_logger = logging.getLogger(__name__)
_looked_at: OrderedDict[str, set[tuple[str, frozenset[str]]]] = OrderedDict()
"""Names of objects, with those of their classes, that were looked at, by the folder of their run."""


class RefusedObjects:
    """Collects such objects of one save by their class; each of them once in a run."""

    def __init__(self, url: str, trusted: Collection[str] = ()) -> None:
        self._url = url
        self._trusted = trusted
        self._fqns: dict[str, list[str]] = defaultdict(list)
        self._tensors: set[str] = set()
        self._known = _known(url.rstrip("/").rpartition("/")[0])

    def look(self, fqn: str, pickled: memoryview, *, is_tensor: bool) -> None:
        """Check the pickle of an object, or of a tensor."""
        is_large = pickled.nbytes > _MAX_BYTES
        names = surely_refused_names(pickled) if is_large else refused_names(pickled)
        known = fqn, frozenset(names)
        if not names or known in self._known or any(fnmatchcase(fqn, name) for name in self._trusted):
            return
        self._known.add(known)
        fault = None if is_large else load_fault(pickled)
        if not is_large and fault is None:
            return
        unknown = sorted(unknown_names(names))
        for reason in [f"{name} is none of torch's safe types" for name in unknown] or [f"it has {fault}"]:
            self._fqns[reason].append(fqn)
        if is_tensor:
            self._tensors.add(fqn)

    def warn(self) -> None:
        """Log a warning for each class, and what to do."""
        for reason, fqns in self._fqns.items():
            shown = ", ".join(map(repr, fqns[:_SHOWN]))
            more = f" and {len(fqns) - _SHOWN} more" if len(fqns) > _SHOWN else ""
            trusted = ", ".join(repr(fqn) for fqn in fqns[:_SHOWN] if fqn not in self._tensors)
            by_name = f"load with trusted_objects=[{trusted}] (of ckpt.load, CheckpointReader and ckpt.install), or "
            _logger.warning(
                "a load of %s will refuse %s%s, as %s: save plain values or tensors in "
                "their place, or %sdeclare the class with torch.serialization.add_safe_globals",
                self._url,
                shown,
                more,
                reason,
                by_name if trusted else "",
            )


def _known(run: str) -> set[tuple[str, frozenset[str]]]:
    known = _looked_at.setdefault(run, set())
    _looked_at.move_to_end(run)
    while len(_looked_at) > _MAX_RUNS:
        _looked_at.popitem(last=False)
    if len(known) > _MAX_NAMES:
        known.clear()
    return known
