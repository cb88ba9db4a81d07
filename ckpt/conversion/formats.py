"""Name the formats that are converted. Without torch, so that a wrong name is reported at once."""

from __future__ import annotations

from typing import Literal, cast, get_args

from ckpt.errors import ConfigurationError

Format = Literal["ckpt", "dcp", "torch", "safetensors"]


def check_format(name: str) -> Format:
    """Return the name of a format. Raises ConfigurationError if there is none of that name."""
    if name not in get_args(Format):
        raise ConfigurationError(f"{name!r} is not a format; use one of {', '.join(get_args(Format))}")
    return cast(Format, name)
