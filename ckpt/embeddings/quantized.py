"""Store rows of floats in 8 or 4 bits, each row with a scale of its own (Check-N-Run, NSDI 2022)."""

from __future__ import annotations

from typing import Literal

import torch

Bits = Literal[8, 4]


def largest_error(values: torch.Tensor, bits: Bits) -> torch.Tensor:
    """Return the largest error of each row's elements: half a step of (largest - smallest) / (2^bits - 1)."""
    error: torch.Tensor = (values.amax(1).float() - values.amin(1).float()) / (2 * (2**bits - 1))
    return error


def quantize(values: torch.Tensor, bits: Bits) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes [rows, bytes] (uint8) and, for each row, its step and its smallest element [rows, 2].

    Rows with an infinity or NaN come back as rows of NaN.
    """
    exact = values.float()
    lowest, highest = exact.amin(1), exact.amax(1)
    step = (highest - lowest) / (2**bits - 1)
    scaled = (exact - lowest.unsqueeze(1)) / step.masked_fill(step == 0, 1).unsqueeze(1)
    codes = scaled.nan_to_num(0).round().clamp(0, 2**bits - 1).to(torch.uint8)
    if bits == 4:
        padded = torch.nn.functional.pad(codes, (0, codes.shape[1] % 2))
        codes = padded[:, 0::2] | padded[:, 1::2] << 4
    return codes.contiguous(), torch.stack([step, lowest], 1)


def dequantize(
    codes: torch.Tensor, scales: torch.Tensor, bits: Bits, width: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return the rows [rows, width] that were quantized, to within `largest_error`."""
    if bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], 2).reshape(len(codes), -1)[:, :width]
    return (codes.float() * scales[:, :1] + scales[:, 1:]).to(dtype)
