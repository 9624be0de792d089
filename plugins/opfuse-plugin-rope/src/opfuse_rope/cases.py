"""The kernels that ``python -m opfuse_triton`` compiles; nothing else imports this."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from opfuse_triton import KernelCase, Operand
from opfuse_triton.norms import L2, RMS, Norm
from opfuse_triton.norms import twins as norm_twins
from torch import Tensor

from opfuse.ops.rope import Rotation, rotated

from . import kernels, twins
from .layouts import Angles, Heads

_BF16, _FP32 = torch.bfloat16, torch.float32
_LLAMA = {"tokens": 8192, "heads": 32, "keys": 8, "dim": 128}
_QWEN = {"tokens": 8192, "heads": 16, "keys": 8, "dim": 128}
_PHI = {"tokens": 8192, "heads": 32, "keys": 32, "dim": 80}
_SMALL = [{"tokens": 37, "heads": 3, "keys": 2, "dim": 64}]


_IN_PLACE = {
    "q_out_ptr": "q_ptr",
    "k_out_ptr": "k_ptr",
    "q_dx_ptr": "q_dy_ptr",
    "k_dx_ptr": "k_dy_ptr",
}
"""What the kernels may write over what they read; the features that stay as they are stay there."""


class _What(NamedTuple):
    """What a case computes.

    Attributes:
        norm: The norm of queries and keys, or None.
        back: Whether it is the backward.
        interleaved: As for :class:`opfuse.ops.RoPE`.
        part: The share of the features that are rotated.
        keys: Whether there are keys.
    """

    norm: str | None = None
    back: bool = False
    interleaved: bool = False
    part: float = 1.0
    keys: bool = True

    @property
    def sides(self) -> str:
        """The first letters of what is rotated."""
        return "qk" if self.keys else "q"


def _tensors(what: _What) -> Callable[..., Mapping[str, Operand]]:
    def tensors(tokens: int, heads: int, keys: int, dim: int) -> dict[str, Operand]:
        found: dict[str, Operand] = {}
        results: dict[str, Operand] = {}
        for side, count in zip(what.sides, (heads, keys), strict=False):
            full = Operand((tokens, count, dim), _BF16)
            rstd = Operand((tokens, count, 1), _FP32, "vector")
            weight = Operand((dim,), _BF16, "vector")
            found[side] = full
            results[f"{side}_out"] = Operand(full.shape, _BF16, output=True)
            if what.norm == RMS:
                found[f"{side}_weight"] = weight
            if what.norm and not what.back:
                results[f"{side}_rstd"] = Operand(rstd.shape, _FP32, "vector", output=True)
            if what.norm and what.back:
                found |= {f"{side}_dy": full, f"{side}_rstd": rstd}
            if what.norm == RMS and what.back:
                results[f"{side}_dw"] = Operand((dim,), _BF16, "vector", output=True)
        table = Operand((tokens, int(dim * what.part)), _FP32, "vector")
        return found | {"cos": table, "sin": table} | results

    return tensors


def _by(run: Any, what: _What) -> Callable[..., tuple[Tensor, ...]]:
    """A case by the kernels or by their twins."""

    def compute(cos: Tensor, sin: Tensor, **given: Tensor) -> tuple[Tensor, ...]:
        half = cos.shape[-1] // 2
        angles = Angles(cos, sin, None, 1, cos.shape[0], half, what.interleaved, True)
        heads = [
            Heads(
                *(given[side], given[side].dtype, what.norm, given.get(f"{side}_weight")),
                eps=1e-6,
                saves=what.norm is not None and not what.back,
                rstd=given.get(f"{side}_rstd"),
                needs=(True, what.norm == RMS),
            )
            for side in what.sides
        ]
        if what.norm and what.back:
            grads = [given[f"{side}_dy"] for side in what.sides]
            made = run.norm_backward(heads, grads, angles)
        else:
            made = run.forward(heads, angles, what.back)
        return tuple([tensor for pair in made for tensor in pair if tensor is not None])

    return compute


def _separate(what: _What) -> Callable[..., tuple[Tensor, ...]]:
    """The same by what the ops do one after the other."""
    norm = Norm(what.norm or RMS, 1, False)

    def compute(cos: Tensor, sin: Tensor, **given: Tensor) -> tuple[Tensor, ...]:
        half = cos.shape[-1] // 2
        rotation = Rotation(0.0, what.interleaved, 2 * half)
        made: list[Tensor | None] = []
        for side in what.sides:
            x, weight = given[side], given.get(f"{side}_weight")
            if what.norm and not what.back:
                x, _, _, rstd = norm_twins.forward(
                    x, None, weight, None, 1e-6, norm, None, False, True
                )
                made += [rotated(x, cos, sin, rotation), rstd]
                continue
            dy = given[f"{side}_dy"] if what.norm else x
            dy = rotated(dy, cos, sin, rotation, back=what.back)
            if not what.norm:
                made.append(dy)
                continue
            needs = True, what.norm == RMS, False
            rstd = given[f"{side}_rstd"]
            made += norm_twins.backward(dy, x, weight, None, rstd, None, norm, needs)[:2]
            made[-1] = made[-1] if made[-1] is None else made[-1].to(x.dtype)
        return tuple([tensor for tensor in made if tensor is not None])

    return compute


def _liger(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    """Liger-Kernel's kernel, which writes into the memory of queries and keys."""
    from liger_kernel.ops.rope import rope_forward

    q, k = (x.unsqueeze(0).transpose(1, 2) for x in (q, k))
    q, k, *_ = rope_forward(q, k, cos.unsqueeze(0), sin.unsqueeze(0))
    return tuple([x.transpose(1, 2).squeeze(0) for x in (q, k)])


def _case(name: str, what: _What, *shapes: Mapping[str, int]) -> KernelCase:
    peers = {"liger-kernel": _liger} if what == _What() else {}
    small: Sequence[Mapping[str, int]] = _SMALL
    return KernelCase(
        name,
        _by(kernels, what),
        _tensors(what),
        shapes,
        small,
        separate=_separate(what),
        twin=_by(twins, what),
        peers=peers,
        dtypes=(_BF16, _FP32),
        turn=40,
        overwrites={} if what.part < 1 else _IN_PLACE,
    )


CASES = [
    _case("RoPE of queries and keys", _What(), _LLAMA, _PHI),
    _case("RoPE of queries and keys, backward", _What(back=True), _LLAMA),
    _case("RoPE", _What(keys=False), _LLAMA),
    _case("interleaved RoPE of queries and keys", _What(interleaved=True), _LLAMA),
    _case("RoPE of half of queries and keys", _What(part=0.5), _LLAMA),
    _case("RMSNorm + RoPE of queries and keys", _What(RMS), _LLAMA, _QWEN),
    _case("RMSNorm + RoPE of queries and keys, backward", _What(RMS, True), _LLAMA, _QWEN),
    _case("L2Normalization + RoPE, backward", _What(L2, True, keys=False), _LLAMA),
]
"""Llama 3 8B, Qwen3 0.6B and Phi-2, 8192 tokens."""
