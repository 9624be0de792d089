"""A result is a tensor, not only values: its strides, and whose memory it has, are those of PyTorch's operations."""

import itertools

import pytest
import torch
from torch.nn import functional as F

import opfuse
from opfuse import ops
from opfuse.ops import AddExtraInput, Bias, Dropout, LayerNorm, Linear, MakeExtraOutput, RMSNorm

WIDTH = 64
LAYOUTS = {
    "contiguous": torch.randn,
    "sequence first": lambda a, *rest: torch.randn(rest[0], a, *rest[1:]).transpose(0, 1),
    "features first": lambda *shape: torch.randn(shape[-1], *shape[:-1]).movedim(0, -1),
    "expanded": lambda a, *rest: torch.randn(1, *rest).expand(a, *rest),
    "half of the features": lambda *shape: torch.randn(*shape[:-1], 2 * shape[-1])[
        ..., : shape[-1]
    ],
    "every second row": lambda a, b, *rest: torch.randn(a, 2 * b, *rest)[:, ::2],
    "every second feature": lambda *shape: torch.randn(*shape[:-1], 2 * shape[-1])[..., ::2],
}
SHAPES = [(2, 3, WIDTH), (40, WIDTH), (2, 3, 4, WIDTH)]


def first(op):
    op.input_first = True
    return op


def pointwise_norm():
    norm = RMSNorm(WIDTH)
    norm.dense = False
    return norm


def linear(op, x):
    return F.linear(x, op.weight, op.bias)


def rms_norm(op, x):
    return F.rms_norm(x, (WIDTH,), op.weight)


# each with the ops of a chain, and the same in PyTorch's operations
ONE = {
    "gelu": ([ops.GELU()], lambda x: F.gelu(x, approximate="tanh")),
    "relu": ([ops.ReLU()], F.relu),
    "swiglu": ([ops.SwiGLU()], lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]),
    "scale": ([ops.ConstantScale(2.0)], lambda x: x * 2),
    "dropout": ([Dropout(0.5)], lambda x: F.dropout(x, 0.5)),
    "reshape": ([ops.Reshape((-1, WIDTH))], lambda x: x.reshape(-1, WIDTH)),
    "bias": ([b := Bias(WIDTH)], lambda x, b=b: x + b.bias),
    "layer norm": (
        [n := LayerNorm(WIDTH)],
        lambda x, n=n: F.layer_norm(x, (WIDTH,), n.weight, n.bias),
    ),
    "rms norm": ([n := RMSNorm(WIDTH)], lambda x, n=n: rms_norm(n, x)),
    "pointwise rms norm": (
        [n := pointwise_norm()],
        lambda x, n=n: x * torch.rsqrt(x.square().mean(-1, True) + n.eps) * n.weight,
    ),
    "linear": ([n := Linear(WIDTH, WIDTH)], lambda x, n=n: linear(n, x)),
    "linear, gelu": (
        [n := Linear(WIDTH, WIDTH), ops.GELU()],
        lambda x, n=n: F.gelu(linear(n, x), approximate="tanh"),
    ),
}
BRANCHES = {  # what is before a sum
    "nothing": ([], lambda x: x),
    "bias": ([b], lambda x, b=b: x + b.bias),
    "dropout": ([Dropout(0.5)], lambda x: F.dropout(x, 0.5)),
    "linear": ([n := Linear(WIDTH, WIDTH)], lambda x, n=n: linear(n, x)),
    "product": ([n := Linear(WIDTH, WIDTH, bias=False)], lambda x, n=n: linear(n, x)),
    "product, scale": (
        [n := ops.BasicLinear(WIDTH, WIDTH), ops.ConstantScale(2.0)],
        lambda x, n=n: F.linear(x, n.weight) * 2,
    ),
    "linear, dropout": (
        [n := Linear(WIDTH, WIDTH), Dropout(0.5)],
        lambda x, n=n: F.dropout(linear(n, x), 0.5),
    ),
}
NORM = RMSNorm(WIDTH)


def layout(results, x):
    """Strides, and whether the memory is that of ``x``."""
    results = results if isinstance(results, tuple) else (results,)
    memory = x.untyped_storage().data_ptr()
    return [(y.shape, y.stride(), y.untyped_storage().data_ptr() == memory) for y in results]


def check(chain, function, names, plugins):
    wrong = []
    for shape in SHAPES:
        for layouts in names:
            given = [LAYOUTS[name](*shape).requires_grad_() for name in layouts]
            with opfuse.plugins.using(plugins):
                got = layout(chain(*given), given[0])
            expected = layout(function(*given), given[0])
            if got != expected:
                wrong.append(f"{shape}, {', '.join(layouts)}: {got}, not {expected}")
    assert not wrong, "\n".join(wrong)


either = pytest.mark.parametrize("plugins", ["", None], ids=["separate", "fused"])


@either
@pytest.mark.parametrize("name", ONE)
def test_one_input(name, plugins):
    of, function = ONE[name]
    check(opfuse.Sequential(*of), function, [(each,) for each in LAYOUTS], plugins)


@either
@pytest.mark.parametrize("follows", ["", "norm"])
@pytest.mark.parametrize("order", ["extra first", "input first"])
@pytest.mark.parametrize("name", BRANCHES)
def test_a_sum_has_the_strides_of_its_first_operand(name, order, follows, plugins):
    of, branch = BRANCHES[name]
    is_first = order == "input first"
    add = first(AddExtraInput()) if is_first else AddExtraInput()
    more = [MakeExtraOutput(), NORM] if follows else []

    def function(x, extra):
        y = branch(x) + extra if is_first else extra + branch(x)
        return (rms_norm(NORM, y), y) if follows else y

    chain = opfuse.Sequential(*of, add, *more)
    check(chain, function, [*itertools.product(LAYOUTS, LAYOUTS)], plugins)
