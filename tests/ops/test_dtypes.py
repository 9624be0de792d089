"""docs/dtypes.md, cell by cell: what each op gives next to torch's expression; and what norms give under autocast."""

import copy
import pathlib
import re
import warnings

import chains
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import opfuse
from opfuse import ops

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
PAGE = pathlib.Path(__file__).parents[2] / "docs" / "dtypes.md"
ROWS, WIDTH, OUT = 3, 8, 4


def halves(x):
    return x.chunk(2, -1)


def gated(value):
    return lambda x, p: value(halves(x)[0]) * halves(x)[1]


def qgelu(x):
    return x * torch.sigmoid(1.702 * x)


def srelu(x):
    return F.relu(x).square()


def situ(x):
    a, b = halves(x)
    return 4 * torch.tanh(a / 4) * torch.sigmoid(a) * 25 * torch.tanh(b / 25)


def clamped(x):
    a, b = halves(x)
    return a.clamp(max=7) * torch.sigmoid(1.702 * a) * (b.clamp(-7, 7) + 1)


def l2(x):
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


GATES = {
    "GLU": torch.sigmoid, "GEGLU": F.gelu, "QGEGLU": qgelu, "ReGLU": F.relu, "SReGLU": srelu, "SwiGLU": F.silu,
}  # fmt: skip
SCALED = {
    "ScaledSwiGLU": lambda x: gated(F.silu)(x, None), "ScaledSiTUGLU": situ, "ScaledClampedQGeGLU": clamped,
    "ScaledSReLU": srelu,
}  # fmt: skip
EXPRESSIONS = {
    "BasicLinear": lambda x, p: F.linear(x, p(OUT, WIDTH)),
    "Linear": lambda x, p: F.linear(x, p(OUT, WIDTH), p(OUT)),
    "LowRankLinear": lambda x, p: (
        F.linear(x, p(OUT, WIDTH)) + F.linear(F.linear(x, p(2, WIDTH)), p(OUT, 2))
    ),
    "GroupedLinear": lambda x, p: torch.cat([F.linear(part, p(OUT, WIDTH)) for part in x.split(1)]),
    "ParallelLinear": lambda x, p: torch.cat(
        [F.linear(x, p(OUT, WIDTH), p(OUT)), F.linear(x, p(OUT, WIDTH))], -1
    ),
    "Bias": lambda x, p: x + p(WIDTH),
    "LayerNorm": lambda x, p: F.layer_norm(x, (WIDTH,), p(WIDTH), p(WIDTH)),
    "RMSNorm": lambda x, p: F.rms_norm(x, (WIDTH,), p(WIDTH)),
    "L2Normalization": lambda x, p: l2(x),
    "GELU": lambda x, p: F.gelu(x, approximate="tanh"),
    "QGELU": lambda x, p: qgelu(x),
    "ReLU": lambda x, p: F.relu(x),
    "SReLU": lambda x, p: srelu(x),
    "SiLU": lambda x, p: F.silu(x),
    **{name: gated(value) for name, value in GATES.items()},
    "SiTUGLU": lambda x, p: situ(x),
    "ClampedSwiGLU": lambda x, p: clamped(x),
    **{
        name: lambda x, p, value=value: value(x) * p(ROWS).unsqueeze(-1)
        for name, value in SCALED.items()
    },
    "AddExtraInput": lambda x, p: x + p(ROWS, WIDTH),
    "Modulate": lambda x, p: x * (1 + p(ROWS, WIDTH)) + p(ROWS, WIDTH),
    "Dropout": lambda x, p: F.dropout(x, 0.5),
    "TrackedDropout": lambda x, p: F.dropout(x, 0.5),
    "ConstantScale": lambda x, p: x * 2.0,
    "RoPE": lambda x, p: (x.float() if x.itemsize == 2 else x).cos().to(x.dtype),
    "ApplyRoPE": lambda x, p: x * p(WIDTH) + x.roll(WIDTH // 2, -1) * p(WIDTH),
    "CrossEntropy": lambda x, p: F.cross_entropy(x, torch.zeros(ROWS, dtype=int, device=x.device)),
    "TokenLogProb": lambda x, p: x.to(torch.promote_types(x.dtype, FP32)).log_softmax(-1).amax(-1),
    "Identity": lambda x, p: x,
    "MakeExtraOutput": lambda x, p: x,
    "SwapExtraInput": lambda x, p: p(ROWS, WIDTH),
    "Quantize": lambda x, p: x,
    "Reshape": lambda x, p: x.reshape(-1),
}
"""What a user of torch writes for it; ``p(*shape)`` is a parameter or another input."""

ARGUMENTS = {
    "BasicLinear": (WIDTH, OUT),
    "Linear": (WIDTH, OUT),
    "LowRankLinear": (WIDTH, OUT, 2),
    "GroupedLinear": (ROWS, WIDTH, OUT),
    "Bias": (WIDTH,),
    "LayerNorm": (WIDTH,),
}
ARGUMENTS |= {"RoPE": (WIDTH,), "ApplyRoPE": (WIDTH,)}
ARGUMENTS |= {
    "RMSNorm": (WIDTH,),
    "Dropout": (0.5,),
    "TrackedDropout": (0.5, None),
    "ConstantScale": (2.0,),
    "Reshape": ((-1,),),
}


def ours(name, x, p):
    """The op's output; its parameters have the dtype of what ``p`` gives."""
    torch.manual_seed(1)
    linears = [ops.Linear(WIDTH, OUT), nn.Linear(WIDTH, OUT, bias=False)]
    given = (linears,) if name == "ParallelLinear" else ARGUMENTS.get(name, ())
    op = getattr(ops, name)(*given).to(p(1).dtype)
    extras = (
        [p(ROWS) if "Scaled" in name else p(ROWS, WIDTH)] * op.num_extra_inputs
        if name != "Linear"
        else []
    )
    extras = [torch.ones((), dtype=int)] if name == "RoPE" else extras
    extras = [p(WIDTH)] * 2 if name == "ApplyRoPE" else extras
    whole = name in ("GroupedLinear", "CrossEntropy", "TokenLogProb")
    extras = [torch.ones(ROWS, dtype=int)] if whole else extras
    result = op(x, *extras)
    return result[0] if isinstance(result, tuple) else result


def given(name, compute, x, of_others):
    """What comes out, as the page calls it."""
    try:
        y = compute(name, x, lambda *shape: torch.ones(shape, dtype=of_others, device=x.device))
    except (RuntimeError, TypeError):
        return "refused"
    return {BF16: "bf16", FP32: "fp32", FP64: "fp64"}[y.dtype]


def theirs(name, x, p):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of an rms_norm of two dtypes
        return EXPRESSIONS[name](x, p)


def table(title):
    """Rows of a table of the page: the ops' names, and the other cells by column."""
    section = PAGE.read_text(encoding="utf-8").partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    head, _, *rows = [
        [c.strip() for c in line.strip("|").split("|")]
        for line in section.splitlines()
        if "|" in line
    ]
    return [
        (re.findall(r"`(\w+)`", row[0]), dict(zip(head[1:], row[1:], strict=True))) for row in rows
    ]


AUTOCAST = {name: cells for names, cells in table("Under autocast") for name in names}
PLAIN = {name: cells for names, cells in table("Without autocast") for name in names}


def test_the_page_has_every_op():
    basic = {name for name in ops.__all__ if not getattr(ops, name).__abstractmethods__} - {
        "ScaledActivation"
    }
    no_dtype_of_their_own = {"Cast"}
    wanted = basic - no_dtype_of_their_own
    assert wanted == set(EXPRESSIONS), "EXPRESSIONS of this file has other ops than opfuse.ops"
    assert wanted == set(AUTOCAST), "docs/dtypes.md has other ops than opfuse.ops"
    assert set(PLAIN) == {name for name in EXPRESSIONS if takes_others(name)}


def takes_others(name):
    asked = []
    EXPRESSIONS[name](
        torch.ones(ROWS, WIDTH), lambda *shape: (asked.append(shape), torch.ones(shape))[1]
    )
    return bool(asked)


@pytest.mark.parametrize("name", AUTOCAST)
def test_dtypes_under_autocast_are_those_of_the_table(name):
    cells = AUTOCAST[name]
    for column, compute in (("opfuse", ours), ("torch, CPU", theirs)):
        with torch.autocast("cpu", BF16):
            found = [
                given(name, compute, torch.ones(ROWS, WIDTH, dtype=dtype), FP32)
                for dtype in (FP32, BF16)
            ]
            wide = given(name, compute, torch.ones(ROWS, WIDTH, dtype=FP64), FP64)
        assert (", ".join(found), wide) == (cells[column], "fp64"), column


@pytest.mark.parametrize("name", AUTOCAST)
def test_under_torchs_autocast_of_another_device(name):
    enabled, before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    with FakeTensorMode():  # which needs no such device
        try:
            torch.set_autocast_enabled("cuda", True)
            torch.set_autocast_dtype("cuda", BF16)
            inputs = [
                torch.empty(ROWS, WIDTH, dtype=dtype, device="cuda") for dtype in (FP32, BF16)
            ]
            found = [given(name, theirs, x, FP32) for x in inputs]
        finally:
            torch.set_autocast_enabled("cuda", enabled)
            torch.set_autocast_dtype("cuda", before)
    assert ", ".join(found) == AUTOCAST[name]["torch, CUDA"]


# the output of one is the other tensor
@pytest.mark.parametrize("name", [name for name in AUTOCAST if name != "SwapExtraInput"])
def test_which_ops_round_their_input(name):
    cls = getattr(ops, name)
    first = ops.BasicLinear if cls is ops.Linear else cls
    assert AUTOCAST[name]["Rounds"] == ("yes" if first.casts_input else "no")
    x = torch.randn(ROWS, WIDTH) + 0.1
    with torch.autocast("cpu", BF16):
        results = []
        for value in (x, x.to(BF16).float()):
            torch.manual_seed(0)
            results.append(ours(name, value, lambda *shape: torch.ones(shape)))
    assert torch.equal(*results) == first.casts_input


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_dtypes_without_autocast_are_those_of_the_table(name):
    for column, compute in (("opfuse", ours), ("torch, CPU", theirs)):
        for dtype, word in ((BF16, "bf16"), (FP32, "fp32"), (FP64, "fp64")):
            wide = name == "TokenLogProb" and dtype is BF16
            expected = "fp32" if wide else word
            assert given(name, compute, torch.ones(ROWS, WIDTH, dtype=dtype), dtype) == expected
        if name in PLAIN:
            pairs = (BF16, FP32), (FP32, BF16)
            found = [
                given(name, compute, torch.ones(ROWS, WIDTH, dtype=dtype), others)
                for dtype, others in pairs
            ]
            assert ", ".join(found) == PLAIN[name][column], column


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_dropout_in_evaluation_gives_the_dtype_of_its_input(dtype):
    with torch.autocast("cpu", BF16):
        assert ops.Dropout(0.5).eval()(torch.randn(2, 3, dtype=dtype)).dtype == dtype


# Norms under autocast

NORMS = {
    "LayerNorm": ops.LayerNorm,
    "RMSNorm": ops.RMSNorm,
    "L2Normalization": lambda width: ops.L2Normalization(),
}
BEHIND = {
    "BasicLinear": lambda: [ops.Linear(WIDTH, OUT)],
    "activation": lambda: [ops.SiLU()],
    "gated": lambda: [ops.SwiGLU()],
}


class Seeing(ops.Identity):
    """Keeps the dtype of what passes."""

    def op_forward(self, ctx, input_, **unused):
        self.seen = input_.dtype
        return input_


class Casting(Seeing):
    """The same, and says that it casts, which an op behind it then does."""

    casts_input = True


def step(chain, x):
    for param in chain.parameters():
        param.grad = None
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", BF16):
        y = chain(x)
    y.float().square().sum().backward()
    return [y.detach(), x.grad, *[param.grad for param in chain.parameters()]]


@pytest.mark.parametrize("behind", BEHIND)
@pytest.mark.parametrize("norm", NORMS)
def test_the_half_dtype_at_once_is_the_same_bits(norm, behind):
    torch.manual_seed(0)
    parts, x = [NORMS[norm](WIDTH), *BEHIND[behind]()], torch.randn(5, WIDTH)
    apart, at_once = Seeing(), Casting()
    expected = step(opfuse.Sequential(parts[0], apart, *parts[1:]), x)
    found = step(opfuse.Sequential(parts[0], at_once, *parts[1:]), x)
    assert (apart.seen, at_once.seen) == (FP32, BF16)
    assert all(map(torch.equal, found, expected))
    assert all(map(torch.equal, step(opfuse.Sequential(*parts), x), expected))


def test_the_residual_stream_behind_a_norm_is_as_exact_as_torchs():
    """Blocks that normalize behind the sum, against the same in fp32, next to torch's under autocast."""
    width, depth = 64, 6
    torch.manual_seed(0)
    blocks = nn.ModuleList(
        nn.ModuleList([nn.Linear(width, width, bias=False), nn.LayerNorm(width)])
        for _ in range(depth)
    )
    x = torch.randn(128, width)

    def plain(x):
        for linear, norm in blocks:
            x = norm(x + F.gelu(linear(x), approximate="tanh"))
        return x

    def fused(x):
        for block in blocks:
            fork = ops.MakeExtraOutput().set_extra_output_channel(
                0, "residual", output_to_caller=False
            )
            join = ops.AddExtraInput().set_extra_input_channel(0, "residual")
            mine = ops.Linear(width, width, bias=False), ops.LayerNorm(width)
            for module, other in zip(mine, block, strict=True):
                module.load_state_dict(other.state_dict())
            x = opfuse.Sequential(fork, mine[0], ops.GELU(), join, mine[1])(x)
        return x

    with torch.no_grad():
        exact = plain(x)
        with torch.autocast("cpu", BF16):
            errors = [(model(x) - exact).norm().item() for model in (plain, fused)]
            assert fused(x).dtype is plain(x).dtype is FP32
    assert errors[1] < 1.05 * errors[0]


@pytest.mark.parametrize("style", [chains.intervals, chains.patterns])
def test_random_chains_under_autocast_are_the_same_whatever_the_cover(style):
    mixed = 0
    for seed in range(60):
        drawn, results = chains.RandomChain(seed), []
        drawn.chain.float()
        extras = [t.detach().float() if t.is_floating_point() else t for t in drawn.extras]
        leaves = [drawn.x.detach().float(), *extras]
        for kinds in ((), tuple(chains.KINDS)):
            model = copy.deepcopy(drawn.chain)
            given = [leaf.clone().requires_grad_(leaf.is_floating_point()) for leaf in leaves]
            with chains.covers(seed, kinds, style), torch.autocast("cpu", BF16):
                torch.manual_seed(0)
                outputs = model(given[0], *[t * 1 for t in given[1:]])
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            sum([y.double().square().sum() for y in outputs]).backward()
            grads = [t.grad for t in (*given, *model.parameters())]
            results.append([*outputs, *grads])
        for a, b in zip(*results, strict=True):
            assert (a is None) == (b is None), seed
            assert a is None or (a.dtype is b.dtype and torch.equal(a, b)), seed
        mixed += {BF16, FP32} <= {y.dtype for y in results[0] if y is not None}
    assert mixed
