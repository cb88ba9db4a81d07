"""Undo stock's stream extensions (compression), and expand no more than an item can be."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import IO

from ckpt.errors import FormatError
from ckpt.torch_private import ExtensionRegistry, StreamTransformExtension

_MAX_EXTENSIONS = 4
_STEP_BYTES = 4 << 20


def untransformed(data: bytearray, descriptors: Sequence[str], max_bytes: int) -> bytearray:
    """Undo the extensions in the order of the descriptors, as stock does.

    Raises FormatError if one is unknown, its data are damaged, or they hold more than `max_bytes`.
    """
    if len(descriptors) > _MAX_EXTENSIONS:
        raise FormatError(f"is said to be transformed {len(descriptors)} times")
    try:
        extensions = ExtensionRegistry().from_descriptor_list(descriptors)
    except Exception as error:
        names = ", ".join(descriptors)[:200]
        raise FormatError(f"needs an extension that cannot be had: {names} ({error})") from error
    try:
        for extension in extensions:
            if isinstance(extension, StreamTransformExtension):
                data = _read(extension.transform_from(io.BytesIO(data)), max_bytes)
    except Exception as error:
        raise FormatError(f"cannot be expanded: {type(error).__name__}: {error}") from error
    return data


def _read(stream: IO[bytes], max_bytes: int) -> bytearray:
    data = bytearray()
    while part := stream.read(_STEP_BYTES):
        data += part
        if len(data) > max_bytes:
            raise ValueError(f"it holds more than the {max_bytes} bytes that it may have")
    return data
