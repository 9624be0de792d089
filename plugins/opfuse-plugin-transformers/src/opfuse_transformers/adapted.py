"""Linear layers with adapters as PEFT computes them: in two dtypes, and several side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from opfuse.ops import LowRankLinear
from opfuse.ops.arithmetic import multiplied, plus_product
from opfuse.ops.authoring import added, may_write, rows_of, shows, tiled

_SAVED = 5  # tensors of each linear, beside the input that they share


class LoRALinear(LowRankLinear):
    """:class:`opfuse.ops.LowRankLinear` whose adapter may have another dtype than the weight.

    PEFT's has by default, in fp32 beside a weight in bf16. The adapter's products and the sum are
    computed in its dtype then, and the result is rounded to that of the input; so is the gradient
    of the input. The input is kept as it came. Under autocast all products are in its dtype. What
    PyTorch casts of a frozen weight is not kept there: the backward casts it again.
    """

    takes_params = LowRankLinear.takes_params
    params_in_compute_dtype = False

    @property
    def linears(self) -> Sequence[LowRankLinear]:
        """The linears side by side: this one, or those of a subclass, which take its parameters."""
        return (self,)

    @property
    def params_apart(self) -> Sequence[str]:
        """Names of the parameters that may have another dtype than the rest."""
        return [name for name in self.param_names or () if "lora_" in name]

    def takes_input(self, ctx: Any) -> bool:
        """See :meth:`opfuse.ops.LowRankLinear.takes_input`."""
        wanted = ctx.param_requires_grad[: 3 * len(self.linears)]
        return any((*wanted[::3], *wanted[1::3]))

    # The forward

    def value(self, ctx: Any, input_: Tensor) -> Tensor:
        """The output; leaves on ``ctx`` what the backward needs.

        Raises:
            TypeError: A weight has another dtype than the input.
        """
        x = input_ if ctx.dtype is None else input_.to(ctx.dtype)
        rows, each = rows_of(x), []
        saved: list[Any] = [x if self.takes_input(ctx) else None]
        casts = kept = ctx.params
        if ctx.dtype is not None:
            casts = [param.to(ctx.dtype) for param in kept]
            kept = [p if _may_keep(p) else q for p, q in zip(kept, casts, strict=True)]
        biases = self._by_linear(casts)
        for n, (linear, bias) in enumerate(zip(self.linears, biases, strict=True)):
            weight, a, b = casts[3 * n : 3 * n + 3]
            if weight.dtype is not x.dtype:
                who = f"{type(self).__name__} expected {weight.dtype}, the dtype of its weight"
                raise TypeError(f"{who}, got an input of {x.dtype}")
            dropped, mask = rows.to(a.dtype), None
            if linear.training and linear.dropout:
                dropped, mask = _drop(dropped, linear.dropout, ctx.params[3 * n + 1].dtype)
            low = F.linear(*tiled(dropped, a)) * linear.scaling
            each.append((*tiled(rows, weight), *tiled(low, b), bias))
            saved += [mask, low, *kept[3 * n : 3 * n + 3]]
        saved += kept[3 * len(each) :]
        if ctx.requires_grad:
            ctx.scaling = tuple([linear.scaling for linear in self.linears])
            ctx.dropout = tuple([linear.dropout for linear in self.linears])
            ctx.save_for_backward(*saved)
        y = self._product(each)
        return y.view(*x.shape[:-1], y.shape[1])

    def again(self, ctx: Any, x: Tensor) -> Tensor:
        """The output once more, from the input as a matrix and what the forward left."""
        each = []
        for n in range(len(self.linears)):
            _, low, weight, _, b = ctx.saved_tensors[1 + _SAVED * n :][:_SAVED]
            each.append((x, weight.to(x.dtype), low, b.to(low.dtype)))
        biases = ctx.saved_tensors[1 + _SAVED * len(each) :]
        pairs = zip(each, self._by_linear(biases), strict=True)
        return self._product(
            [(*of, bias if bias is None else bias.to(x.dtype)) for of, bias in pairs]
        )

    def _product(self, each: Sequence[tuple[Any, ...]]) -> Tensor:
        """The output as a matrix: input, weight, small product, ``lora_b`` and bias of each."""
        places: Any = [None] * len(each)
        y = None
        operands = [operand for of in each for operand in of if operand is not None]
        if len(each) > 1 and may_write(*operands):
            y = each[0][0].new_empty(each[0][0].shape[0], self.out_features)
            places = self._parts(y)
        parts = []
        for place, (x, weight, low, b, bias) in zip(places, each, strict=True):
            if bias is None:
                part = torch.mm(x, weight.t(), out=place)
            else:
                part = torch.addmm(bias, x, weight.t(), out=place)
            parts.append(_plus(part, low, b))
        return y if y is not None else parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def _by_linear(self, biases: Sequence[Any]) -> Sequence[Any]:
        """The bias of each linear, or None, from those at the end of all parameters."""
        return (None,) * len(self.linears)

    def _parts(self, y: Tensor) -> Sequence[Tensor]:
        """Views of the last dimension, one for each linear."""
        return torch.split_with_sizes(y, [linear.out_features for linear in self.linears], -1)

    # The backward

    def input_grad(self, ctx: Any, dy: Tensor) -> tuple[Tensor | None, Any]:
        """See :meth:`opfuse.ops.LowRankLinear.input_grad`."""
        dx = more = None
        left = []
        for n, part in enumerate(self._parts(dy)):
            mask, low, weight, a, b = ctx.saved_tensors[1 + _SAVED * n :][:_SAVED]
            wide, a, b = part.to(low.dtype), a.to(low.dtype), b.to(low.dtype)
            dlow = wide.mm(b).mul(ctx.scaling[n])
            db = low.t().mm(wide).t() if ctx.param_requires_grad[3 * n + 2] else None
            left.append((part, dlow, mask, db))
            if not ctx.input_requires_grad:
                continue
            dx = plus_product(dx, part, weight.to(dy.dtype))
            if mask is None and dlow.dtype is dx.dtype:
                dx = plus_product(dx, dlow, a)
            else:
                of_adapter = self.dropped(dlow.mm(a), mask, ctx.dropout[n])
                more = of_adapter if more is None else added(more, of_adapter)
        return (dx if dx is None or more is None else added(dx, more)), left

    def param_grads(self, ctx: Any, left: Any, x: Any) -> Sequence[Tensor | None]:
        """See :meth:`opfuse.ops.LowRankLinear.param_grads`."""
        grads: list[Tensor | None] = []
        for n, (part, dlow, mask, db) in enumerate(left):
            of_weight, of_a, _ = ctx.param_requires_grad[3 * n : 3 * n + 3]
            da = None
            if of_a and x is not None:
                da = dlow.t().mm(self.dropped(x.to(dlow.dtype), mask, ctx.dropout[n]))
            grads += [part.t().mm(x) if of_weight and x is not None else None, da, db]
        of_biases = self._by_linear(ctx.param_requires_grad)
        pairs = [(part, wanted) for (part, *_), wanted in zip(left, of_biases, strict=True)]
        return [
            *grads,
            *[part.sum(0) if wanted else None for part, wanted in pairs if wanted is not None],
        ]

    @staticmethod
    def dropped(x: Tensor, mask: Tensor | None, p: float) -> Tensor:
        """See :meth:`opfuse.ops.LowRankLinear.dropped`."""
        if mask is None or not x.is_cpu:
            return LowRankLinear.dropped(x, mask, p)
        # a CPU is slow with booleans
        return multiplied(mask.view(torch.uint8).to(x.dtype), x).mul(1 / (1 - p) if p < 1 else 0.0)


def _may_keep(param: Tensor) -> bool:
    """Whether a parameter is kept as it is: nobody trains it, and its version shows changes."""
    return type(param) is nn.Parameter and not (param.requires_grad or param.is_inference())


def _drop(x: Tensor, p: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A dropout of a matrix, and where its values stay, drawn as PyTorch draws it for a dtype."""
    if not (x.is_cpu and may_write(x)):
        dropped, mask = torch.native_dropout(x.to(dtype), p, True)
        return dropped.to(x.dtype), mask
    mask = torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - p)
    return LoRALinear.dropped(x, mask, p), mask


def _plus(y: Tensor, low: Tensor, b: Tensor) -> Tensor:
    """``y + low b^T`` of matrices, computed in the dtype of the adapter; overwrites if it may."""
    if y.dtype is low.dtype:
        return plus_product(y, low, b.t())
    total = torch.addmm(y.to(low.dtype), low, b.t())
    return y.copy_(total) if may_write(y, low, b) else total.to(y.dtype)


class ParallelLoRALinear(LoRALinear):
    """``y = concat(linear(x) + bias for ...)``: several :class:`LoRALinear` of one input.

    Each linear is written to its place in one buffer, and the input is kept once. The linears are
    its submodules, and none is called. Each has its own scaling, dropout and mode, and draws its
    own mask, in their order. The parameters of all linears come first, then the biases.

    Attributes:
        sizes: ``out_features`` of each linear.

    Args:
        linears: The linears by name.
        biased: For each linear that has a bias its name, and the module whose ``bias`` is read.

    Raises:
        ValueError: There is none, or one takes another number of features than the first.
    """

    takes_params = None

    def __init__(
        self,
        linears: Mapping[str, LowRankLinear],
        biased: Mapping[str, nn.Module] = MappingProxyType({}),
    ) -> None:
        super(LowRankLinear, self).__init__()
        widths = {linear.in_features for linear in linears.values()}
        if len(widths) != 1:
            who = "ParallelLoRALinear expected linears of one number of features"
            raise ValueError(f"{who}, got {sorted(widths) or 'no linear'}")
        for name, linear in linears.items():
            self.add_module(name, linear)
        (self.in_features,) = widths
        self.sizes = tuple([linear.out_features for linear in linears.values()])
        self.out_features = sum(self.sizes)
        owns = LowRankLinear.takes_params or ()
        of_linears = [f"{name}.{param}" for name in linears for param in owns]
        self.param_names = (*of_linears, *[f"{name}.bias" for name in biased])
        self._biased = dict(biased)  # torch registers no module of a dict

    extra_repr = shows("in_features", "sizes")

    @classmethod
    def sample_inputs(cls, op: Any, features: int, out_features: int | None) -> list[Any]:
        """How tests make the op."""
        out = out_features or features + features % 2
        sizes = out - out // 4, out // 4
        linears = [op(LowRankLinear, features, size, 2, scaling=0.5) for size in sizes]
        return [op(cls, dict(zip("ab", linears, strict=True)))]

    @property
    def linears(self) -> Sequence[LowRankLinear]:
        """The linears."""
        return tuple(self._modules.values())  # type: ignore[arg-type]

    @property
    def saved_names(self) -> tuple[str, ...]:  # type: ignore[override]
        """``input``, what each linear saves beside it, and the biases."""
        (shared, *others), linears = LowRankLinear.saved_names, self._modules
        of_linears = [f"{name}.{other}" for name in linears for other in others]
        return (shared, *of_linears, *[f"{name}.bias" for name in self._biased])

    def _by_linear(self, biases: Sequence[Any]) -> Sequence[Any]:
        count = len(self._biased)
        found = dict(zip(self._biased, biases[len(biases) - count :], strict=True))
        return [found.get(name) for name in self._modules]

    @property
    def batch_invariant(self) -> tuple[str, ...]:  # type: ignore[override]
        """That of all linears."""
        return ("rows",) if all(linear.batch_invariant for linear in self.linears) else ()

    def param_source(self, name: str) -> tuple[nn.Module, str]:
        """The module and attribute from which a parameter is read at every call."""
        linear, leaf = name.split(".")
        if leaf == "bias":
            return self._biased[linear], leaf
        return self._modules[linear].param_source(leaf)  # type: ignore[union-attr,operator]

    def reset_parameters(self) -> None:
        """Draw the parameters again that the linears hold."""
        for linear in self.linears:
            linear.reset_parameters()
