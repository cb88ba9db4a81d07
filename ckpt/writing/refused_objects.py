"""Warn of objects that are saved as they are, but that a load will refuse to unpickle."""

from __future__ import annotations

import logging
from collections import defaultdict

from ckpt.stock.safe_load import is_refused, refused_names, surely_refused_names

_SHOWN = 3
_MAX_BYTES = 4 << 20
"""Of a larger object only the begin of its pickle is searched; others are loaded once, to be sure."""

_logger = logging.getLogger(__name__)
_known: set[str] = set()
"""Names that were warned of, or that are part of a text."""


class RefusedObjects:
    """Collects such objects of one save by their class; for each class once in this process."""

    def __init__(self) -> None:
        self._fqns: dict[str, list[str]] = defaultdict(list)
        self._tensors: set[str] = set()

    def look(self, fqn: str, pickled: memoryview, *, is_tensor: bool) -> None:
        """Check the pickle of an object, or of a tensor."""
        if pickled.nbytes > _MAX_BYTES:
            names = surely_refused_names(pickled) - _known
        else:
            names = refused_names(pickled) - _known
            if not names <= self._fqns.keys() and not is_refused(pickled):
                _known.update(names)
                return
        for name in names:
            self._fqns[name].append(fqn)
        if is_tensor:
            self._tensors.add(fqn)

    def warn(self, url: str) -> None:
        """Log a warning for each class, and what to do."""
        for name, fqns in self._fqns.items():
            _known.add(name)
            shown = ", ".join(map(repr, fqns[:_SHOWN]))
            more = f" and {len(fqns) - _SHOWN} more" if len(fqns) > _SHOWN else ""
            trusted = ", ".join(repr(fqn) for fqn in fqns[:_SHOWN] if fqn not in self._tensors)
            by_name = f"load with trusted_objects=[{trusted}] (of ckpt.load, CheckpointReader and ckpt.install), or "
            _logger.warning(
                "a load of %s will refuse %s%s, as %s is none of torch's safe types: save plain values or tensors in "
                "their place, or %sdeclare the class with torch.serialization.add_safe_globals",
                url,
                shown,
                more,
                name,
                by_name if trusted else "",
            )
