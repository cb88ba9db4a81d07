"""Name the classes and functions of a pickle, and tell torch's safe ones from others."""

from __future__ import annotations

from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Mapping
from typing import Any

from ckpt.torch_private import allowed_globals, user_allowed_globals


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
