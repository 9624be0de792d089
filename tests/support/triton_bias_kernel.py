"""The kernel of ``triton_bias``, apart because Triton is imported here."""

import torch
import triton
import triton.language as tl


@triton.jit
def _bias_activation(
    x, bias, hidden, y, size, columns, FORM: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    total = tl.load(x + at, inside).to(tl.float32) + tl.load(bias + at % columns, inside).to(
        tl.float32
    )
    rounded = total.to(DTYPE).to(hidden.dtype.element_ty)
    tl.store(hidden + at, rounded, inside)
    h = rounded.to(tl.float32)
    if FORM == 0:
        u = 0.7978845608028654 * (h + 0.044715 * h * h * h)
        result = h * tl.sigmoid(2 * u)
    else:
        result = tl.where(h < 0, 0.0, h)  # keeps NaN
    tl.store(y + at, result.to(y.dtype.element_ty), inside)


TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def bias_activation(x, bias, dtype, form):
    """``(sum, result)`` of ``bias + x`` and its activation."""
    x, bias = x.contiguous(), bias.contiguous()
    hidden, y = (torch.empty(x.shape, dtype=dtype, device=x.device) for _ in range(2))
    if x.numel():
        grid = (triton.cdiv(x.numel(), 1024),)
        _bias_activation[grid](
            x, bias, hidden, y, x.numel(), x.shape[-1], form, TYPES[x.dtype], BLOCK=1024
        )
    return hidden, y
