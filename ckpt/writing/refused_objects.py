"""Warn of objects that are saved as they are, but that a load will refuse to unpickle."""

from __future__ import annotations

import logging
from collections import defaultdict

from ckpt.stock.safe_load import is_refused, refused_names

_SHOWN = 3
_MAX_BYTES = 4 << 20
"""A larger object is not looked at: to be sure, it is made once more."""

_logger = logging.getLogger(__name__)
_known: set[str] = set()
"""Names that were warned of, or that are part of a text."""


class RefusedObjects:
    """Collects such objects of one save by their class; for each class once in this process."""

    def __init__(self) -> None:
        self._fqns: dict[str, list[str]] = defaultdict(list)

    def look(self, fqn: str, pickled: memoryview) -> None:
        """Look at the pickle of an object."""
        names = refused_names(pickled) - _known if pickled.nbytes <= _MAX_BYTES else set()
        if names <= self._fqns.keys() or is_refused(pickled):
            for name in names:
                self._fqns[name].append(fqn)
        else:
            _known.update(names)

    def warn(self, url: str) -> None:
        """Log a warning for each class, and what to do."""
        for name, fqns in self._fqns.items():
            _known.add(name)
            shown = ", ".join(map(repr, fqns[:_SHOWN]))
            more = f" and {len(fqns) - _SHOWN} more" if len(fqns) > _SHOWN else ""
            _logger.warning(
                "a load of %s will refuse %s%s, as %s is none of torch's safe types: save plain values or tensors in "
                "their place, or load with trusted_objects=[%s] (of ckpt.load, CheckpointReader and ckpt.install), or "
                "declare the class with torch.serialization.add_safe_globals",
                url,
                shown,
                more,
                name,
                shown,
            )
