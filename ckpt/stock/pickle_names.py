"""Find the classes and functions that a pickle names, and tell torch's safe ones from others."""

from __future__ import annotations

import re
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Mapping
from typing import Any

from ckpt.torch_private import allowed_globals, user_allowed_globals

_GLOBAL = re.compile(rb"c([\w.]+)\n([\w.]+)\n")
_SEARCHED_BYTES = 64 << 10


def name_of_today(module: str, name: str) -> str:
    """Return the full name of a class or function, of which `torch.save` writes that of Python 2."""
    if (module, name) in NAME_MAPPING:
        module, name = NAME_MAPPING[module, name]
    else:
        module = IMPORT_MAPPING.get(module, module)
    return f"{module}.{name}"


def is_safe(name: str) -> bool:
    """Tell whether torch loads it with `weights_only=True`, by itself or because it was declared safe."""
    declared: Mapping[str, Any] = user_allowed_globals()  # type: ignore[no-untyped-call]
    return name in allowed_globals() or name in declared


def unsafe_names(archive: memoryview) -> set[str]:
    """Search the begin of a `torch.save` archive for names that are not safe; texts may look like some."""
    pairs = _GLOBAL.findall(archive[:_SEARCHED_BYTES])
    names = {name_of_today(module.decode(), name.decode()) for module, name in pairs}
    return {name for name in names if not is_safe(name)}
