"""Pickled objects from a checkpoint, made harmless before anybody unpickles them."""

from __future__ import annotations

import io
import pickle

import torch

from ckpt.errors import FormatError, UnsafeContent

Buffer = bytes | bytearray | memoryview

__all__ = ["load_tensor_item", "safe_object"]


def safe_object(data: Buffer, *, fqn: str, url: str, key: str) -> io.BytesIO:
    """A pickle that a load planner may unpickle freely, of the same object as `data`.

    DCP's own load planner unpickles with `weights_only=False`. So the object is loaded here with
    `weights_only=True`, and what the planner gets is our pickle of the result, not the stored bytes: no
    difference between two parsers can let anything through. Tensors inside come back on the CPU.

    Raises:
        UnsafeContent: loading it needs more than torch's safe types.
        FormatError: it is not something that torch saved.
    """
    try:
        value = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UnsafeContent(
            f"{fqn!r} is a pickled object that could run code ({_reason(error)}); if you trust who wrote this "
            f"checkpoint, pass trusted_objects=[{fqn!r}] to CheckpointReader or ckpt.load, "
            "or declare its class with torch.serialization.add_safe_globals",
            url=url,
            key=key,
        ) from None
    except Exception as error:
        raise FormatError(
            f"{fqn!r} cannot be read: {type(error).__name__}: {error}", url=url, key=key
        ) from error
    safe = io.BytesIO()
    torch.save(value, safe)
    safe.seek(0)
    return safe


def load_tensor_item(data: Buffer, *, fqn: str, url: str, key: str) -> torch.Tensor:
    """The tensor in a `torch.save` item that is read as a whole.

    Raises:
        UnsafeContent, FormatError: as above, or it is no tensor.
    """
    try:
        value = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UnsafeContent(
            f"{fqn!r} is not a tensor of torch's safe types ({_reason(error)})", url=url, key=key
        ) from None
    except Exception as error:
        raise FormatError(
            f"{fqn!r} cannot be read: {type(error).__name__}: {error}", url=url, key=key
        ) from error
    if not isinstance(value, torch.Tensor):
        raise FormatError(f"{fqn!r} is a {type(value).__name__} in place of a tensor", url=url, key=key)
    return value


def _reason(error: Exception) -> str:
    """The heart of torch's message, which otherwise fills a screen with advice for another interface."""
    text = str(error)
    for start in (
        "Unsupported global:",
        "Unsupported operand",
        "Unsupported class",
        "WeightsUnpickler error:",
    ):
        if start in text:
            text = text[text.index(start) :]
            break
    return text.split("\n")[0].split(". Please")[0][:200].strip()
