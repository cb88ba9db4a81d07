from __future__ import annotations

from typing import Any

import pytest
import torch

from ckpt.embeddings.quantized import dequantize, largest_error, quantize


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("width", [1, 7, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_element_is_off_by_half_a_step_at_most(bits: Any, width: int, dtype: torch.dtype) -> None:
    values = (torch.randn(50, width, generator=torch.manual_seed(0)) * 3).to(dtype)
    values[0] = 1.5
    codes, scales = quantize(values, bits)
    assert codes.dtype == torch.uint8
    assert codes.shape == (50, -(-width * bits // 8))
    back = dequantize(codes, scales, bits, width, torch.float32)
    slack = 1e-5 * values.float().abs().amax(1) + 1e-7
    assert ((back - values.float()).abs().amax(1) <= largest_error(values, bits) + slack).all()
    assert (back[0] == 1.5).all()


def test_a_row_that_is_not_finite_comes_back_as_nan() -> None:
    values = torch.tensor([[1.0, float("inf")], [float("nan"), 0.0], [1.0, 2.0]])
    back = dequantize(*quantize(values, 8), 8, 2, torch.float32)
    assert back[:2].isnan().all()
    assert torch.equal(back[2], values[2])
