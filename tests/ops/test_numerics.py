"""Every op that computes, alone in a chain, against plain torch in fp64: values and all gradients."""

import activations
import pytest
import torch
from torch.nn import functional as F

import opfuse
from opfuse import ops
from opfuse.ops import _blocks

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
ROWS = [(), (1,), (3,), (127,), (0,), (2, 3), (0, 3), (2, 3, 2)]


def halves(x, size=None):
    """Gate and linear half, by plain indexing."""
    width = x.shape[-1]
    size = size or width // 2
    gate = [i for i in range(width) if i // size % 2 == 0]
    return x[..., gate], x[..., [i for i in range(width) if i not in gate]]


def gelu(x):
    return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


def silu(x):
    return x * torch.sigmoid(x)


def gated(act, size=None):
    def reference(x, params):
        a, b = halves(x, size)
        return act(a) * b

    return reference


def clamped(x, limit=7.0, alpha=1.702, offset=1.0, size=None):
    a, b = halves(x, size)
    # at a limit the gradient passes, which it does in torch.clamp before torch 2.14
    a, b = torch.where(a > limit, limit, a), torch.where(b > limit, limit, b)
    b = torch.where(b < -limit, -limit, b) + offset
    return a * torch.sigmoid(alpha * a) * b


def situ(x, beta1=4.0, beta2=25.0, size=None):
    a, b = halves(x, size)
    return beta1 * torch.tanh(a / beta1) * torch.sigmoid(a) * beta2 * torch.tanh(b / beta2)


def scaled(act):
    return lambda x, params, scales: act(x) * scales[..., None]


def layer_norm(x, weight, bias, eps, dims=(-1,)):
    mean = x.mean(dims, keepdim=True)
    variance = (x - mean).square().mean(dims, keepdim=True)
    return (x - mean) / torch.sqrt(variance + eps) * weight + bias


def rms_norm(x, weight, eps):
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps) * weight


# name: (op, reference, features of the input)
POINTWISE = {
    "GELU": (ops.GELU, lambda x, p: gelu(x), 6),
    "GELU by erf": (
        lambda: ops.GELU(approximate="none"),
        lambda x, p: 0.5 * x * (1 + torch.erf(x / 2**0.5)),
        6,
    ),
    "QGELU": (ops.QGELU, lambda x, p: x * torch.sigmoid(1.702 * x), 6),
    "ReLU": (ops.ReLU, lambda x, p: x.clamp(min=0), 6),
    "SReLU": (ops.SReLU, lambda x, p: x.clamp(min=0) ** 2, 6),
    "SiLU": (ops.SiLU, lambda x, p: silu(x), 6),
    "GLU": (ops.GLU, gated(torch.sigmoid), 8),
    "GEGLU": (ops.GEGLU, gated(gelu), 8),
    "QGEGLU": (ops.QGEGLU, gated(lambda x: x * torch.sigmoid(1.702 * x)), 8),
    "ReGLU": (ops.ReGLU, gated(torch.relu), 8),
    "SReGLU": (ops.SReGLU, gated(lambda x: torch.relu(x) ** 2), 8),
    "SwiGLU": (ops.SwiGLU, gated(silu), 8),
    "SwiGLU interleaved": (lambda: ops.SwiGLU(glu_interleave_size=2), gated(silu, 2), 8),
    "SiTUGLU": (ops.SiTUGLU, lambda x, p: situ(x), 8),
    "SiTUGLU tight": (
        lambda: ops.SiTUGLU(beta1=0.5, beta2=0.7, glu_interleave_size=1),
        lambda x, p: situ(x, 0.5, 0.7, 1),
        8,
    ),
    "ClampedSwiGLU": (ops.ClampedSwiGLU, lambda x, p: clamped(x), 8),
    "ClampedSwiGLU tight": (
        lambda: ops.ClampedSwiGLU(
            limit=0.5, alpha=1.3, glu_linear_offset=0.25, glu_interleave_size=4
        ),
        lambda x, p: clamped(x, 0.5, 1.3, 0.25, 4),
        16,
    ),
    "L2Normalization": (
        ops.L2Normalization,
        lambda x, p: x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6),
        6,
    ),
    "ConstantScale": (lambda: ops.ConstantScale(-1.5), lambda x, p: x * -1.5, 6),
    "Identity": (ops.Identity, lambda x, p: x * 1, 6),
    "Quantize": (ops.Quantize, lambda x, p: x * 1, 6),
    "Dropout eval": (lambda: ops.Dropout(0.5).eval(), lambda x, p: x * 1, 6),
    "Dropout 0": (lambda: ops.Dropout(0), lambda x, p: x * 1, 6),
    "Dropout 1": (lambda: ops.Dropout(1), lambda x, p: x * 0, 6),
}
WITH_PARAMETERS = {
    "BasicLinear": (
        lambda dtype: ops.BasicLinear(6, 5, dtype=dtype),
        lambda x, p: x @ p["weight"].T,
        6,
    ),
    "Linear": (
        lambda dtype: ops.Linear(6, 5, dtype=dtype),
        lambda x, p: x @ p["weight"].T + p["bias"],
        6,
    ),
    "Linear no bias": (
        lambda dtype: ops.Linear(6, 5, bias=False, dtype=dtype),
        lambda x, p: x @ p["weight"].T,
        6,
    ),
    "Bias": (lambda dtype: ops.Bias(6, dtype=dtype), lambda x, p: x + p["bias"], 6),
    "LayerNorm": (
        lambda dtype: ops.LayerNorm(6, dtype=dtype),
        lambda x, p: layer_norm(x, p["weight"], p["bias"], 1e-5),
        6,
    ),
    "LayerNorm centered": (
        lambda dtype: ops.LayerNorm(6, dtype=dtype, eps=0.1, zero_centered_gamma=True),
        lambda x, p: layer_norm(x, 1 + p["weight"], p["bias"], 0.1),
        6,
    ),
    "LayerNorm no bias": (
        lambda dtype: ops.LayerNorm(6, bias=False, zero_centered_gamma=True, dtype=dtype),
        lambda x, p: layer_norm(x, 1 + p["weight"], 0, 1e-5),
        6,
    ),
    "LayerNorm bare": (
        lambda dtype: ops.LayerNorm(6, elementwise_affine=False, eps=0.1, dtype=dtype),
        lambda x, p: layer_norm(x, 1, 0, 0.1),
        6,
    ),
    "RMSNorm bare": (
        lambda dtype: ops.RMSNorm(6, elementwise_affine=False, dtype=dtype),
        lambda x, p: rms_norm(x, 1, 1e-5),
        6,
    ),
    "RMSNorm": (
        lambda dtype: ops.RMSNorm(6, dtype=dtype),
        lambda x, p: rms_norm(x, p["weight"], 1e-5),
        6,
    ),
    "RMSNorm centered": (
        lambda dtype: ops.RMSNorm(6, dtype=dtype, eps=0.1, zero_centered_gamma=True),
        lambda x, p: rms_norm(x, 1 + p["weight"], 0.1),
        6,
    ),
}
WITH_SCALES = {
    "ScaledSwiGLU": (ops.ScaledSwiGLU, scaled(lambda x: gated(silu)(x, {})), 8),
    "ScaledSwiGLU interleaved": (
        lambda: ops.ScaledSwiGLU(glu_interleave_size=2),
        scaled(lambda x: gated(silu, 2)(x, {})),
        8,
    ),
    "ScaledSiTUGLU": (ops.ScaledSiTUGLU, scaled(situ), 8),
    "ScaledClampedQGeGLU": (ops.ScaledClampedQGeGLU, scaled(clamped), 8),
    "ScaledSReLU": (ops.ScaledSReLU, scaled(lambda x: torch.relu(x) ** 2), 8),
}


def make(name, dtype=torch.float32):
    """The op, its reference, its width; parameters random, so that none hides."""
    table = next(table for table in (POINTWISE, WITH_PARAMETERS, WITH_SCALES) if name in table)
    factory, reference, width = table[name]
    op = factory(dtype) if table is WITH_PARAMETERS else factory()
    with torch.no_grad():
        for param in op.parameters():
            param.copy_(torch.randn(param.shape, dtype=torch.float64))
    return op, reference, width


def randn(*shape, dtype=torch.float64, requires_grad=True):
    return torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_(requires_grad)


def extras_of(name, rows, dtype, requires_grad=True):
    return [randn(*rows, dtype=dtype, requires_grad=requires_grad)] if name in WITH_SCALES else []


HALF = (torch.bfloat16, torch.float16)
NAMES = [*POINTWISE, *WITH_PARAMETERS, *WITH_SCALES]


def test_every_activation_has_a_reference():
    activations.check_table(POINTWISE, "POINTWISE of tests/ops/test_numerics.py")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_values_and_gradients(compare, name, dtype):
    for rows in ROWS:
        op, reference, width = make(name, dtype)
        extras = extras_of(name, rows, dtype)
        x = randn(*rows, width, dtype=dtype)
        y = compare(op, rounding(name, reference, dtype), x, *extras, gemm="Linear" in name)
        assert y.dtype is dtype


def rounding(name, reference, dtype):
    """Linear is two ops, and between them half precision is rounded."""
    if name != "Linear" or dtype not in HALF:
        return reference

    def twice(x, params):
        product = x.to(dtype).double() @ params["weight"].to(dtype).double().T
        return product.to(dtype).double() + params["bias"]

    return twice


@pytest.mark.parametrize("rows", [(7,), (2, 3)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [name for name in NAMES if "Linear" not in name])
def test_two_rows_at_a_time_match_the_reference(monkeypatch, compare, call, name, dtype, rows):
    """As large tensors are computed on a CPU: two rows at a time."""
    op, reference, width = make(name, dtype)
    monkeypatch.setattr(_blocks, "LEAST", 0)
    monkeypatch.setattr(_blocks, "BLOCK", 2 * width)
    extras = extras_of(name, rows, dtype)
    x = randn(*rows, width, dtype=dtype)
    y = compare(op, reference, x, *extras)
    grad = torch.ones((), dtype=dtype).expand(y.shape)
    compare(op, reference, x, *extras, grad=grad)
    for param in op.parameters():
        compare(op, reference, x, *extras)
        param.requires_grad_(False)
    if name in POINTWISE and not name.startswith("Dropout"):
        given = randn(*y.shape, dtype=dtype, requires_grad=False)
        kept = call(op, x.detach()).backward(given.clone())[0]
        assert torch.equal(call(op, x.detach(), owns=True).backward(given)[0], kept)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "name", ["GELU", "QGELU", "SwiGLU", "QGEGLU", "SiTUGLU", "L2Normalization"]
)
def test_a_large_tensor_matches_the_reference(compare, name, dtype):
    op, reference, _ = make(name, dtype)
    compare(op, reference, randn(601, 1024, dtype=dtype))


LAYOUTS = {
    "transposed": lambda rows, width, dtype: randn(width, rows, dtype=dtype).t(),
    "strided": lambda rows, width, dtype: randn(rows, 2 * width, dtype=dtype)[:, ::2],
    "one row, expanded": lambda rows, width, dtype: randn(width, dtype=dtype).expand(rows, width),
    "3-D, permuted": lambda rows, width, dtype: randn(width, 2, rows, dtype=dtype).permute(1, 2, 0),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_inputs_and_gradients_of_any_layout_match_the_reference(compare, name, dtype, layout):
    op, reference, width = make(name, dtype)
    reference = rounding(name, reference, dtype)
    x = LAYOUTS[layout](5, width, dtype).detach().requires_grad_()
    extras = extras_of(name, x.shape[:-1], dtype)
    y = compare(op, reference, x, *extras, gemm="Linear" in name)
    grad = torch.ones((), dtype=dtype).expand(y.shape)  # what y.sum() gives
    compare(op, reference, x, *extras, gemm="Linear" in name, grad=grad)
    grad = randn(*y.shape[::-1], dtype=dtype).permute(*range(y.ndim - 1, -1, -1)).detach()
    compare(op, reference, x, *extras, gemm="Linear" in name, grad=grad)


@pytest.mark.parametrize("name", [*WITH_PARAMETERS, *WITH_SCALES])
def test_every_choice_of_frozen_tensors_matches_the_reference(compare, name):
    op, reference, width = make(name)
    names = [key for key, _ in op.named_parameters()]
    for wanted in [*[{key} for key in names], set(names), set()]:
        for key, param in op.named_parameters():
            param.requires_grad_(key in wanted)
        for input_requires_grad in (True, False):
            for scale_requires_grad in (True, False) if name in WITH_SCALES else (False,):
                x = randn(3, width, dtype=torch.float32, requires_grad=input_requires_grad)
                extras = extras_of(name, (3,), torch.float32, scale_requires_grad)
                compare(op, reference, x, *extras, gemm=True)


@pytest.mark.parametrize("name", NAMES)
def test_without_gradients_values_match_and_no_graph_is_recorded(near, name):
    op, reference, width = make(name, torch.float64)
    x, extras = randn(3, width), extras_of(name, (3,), torch.float64)
    with torch.no_grad():
        y = opfuse.Sequential(op)(x, *extras)
        expected = reference(x, dict(op.named_parameters()), *extras)
    assert y.grad_fn is None
    near(y, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_autocast_gives_the_documented_dtype_and_values(compare, name, dtype):
    """Linear and activations compute in autocast's dtype; norms give fp32, from the input as it comes."""
    op, reference, width = make(name)  # parameters in fp32
    reference = rounding(name, reference, torch.bfloat16)
    exact = ("Norm", "Identity", "Quantize", "Dropout", "Bias", "ConstantScale")
    rounds = name != "Linear" and not any(kind in name for kind in exact)
    x = randn(5, width, dtype=dtype)
    extras = extras_of(name, (5,), dtype)
    keeps = any(
        kind == name.split()[0]
        for kind in ("Identity", "Quantize", "Dropout", "Bias", "ConstantScale")
    )
    through = torch.bfloat16 if rounds else None
    coarsest = dtype if "Norm" in name else torch.bfloat16
    y = compare(
        op,
        reference,
        x,
        *extras,
        autocast=torch.bfloat16,
        through=through,
        dtype=coarsest,
        gemm=True,
    )
    assert y.dtype is (dtype if keeps else torch.float32 if "Norm" in name else torch.bfloat16)


@pytest.mark.parametrize("name", ["Linear", "GELU", "SwiGLU", "LayerNorm", "RMSNorm"])
def test_autocast_leaves_fp64_alone(compare, name):
    op, reference, width = make(name, torch.float64)
    assert compare(op, reference, randn(3, width), autocast=torch.bfloat16).dtype is torch.float64


@pytest.mark.parametrize("name", NAMES)
def test_gradients_match_finite_differences(name):
    if name.startswith("Dropout"):
        pytest.skip("nothing to differentiate")
    op, _, width = make(name, torch.float64)
    chain = opfuse.Sequential(op)
    inputs = [randn(2, width), *extras_of(name, (2,), torch.float64), *op.parameters()]

    def run(x, *tensors):
        return chain(x, *tensors[: chain._module_groups[0].num_extra_inputs])

    assert torch.autograd.gradcheck(run, inputs)


@pytest.mark.parametrize("name", NAMES)
def test_second_derivatives_match_the_reference(name):
    op, reference, width = make(name, torch.float64)
    x, extras = randn(2, width), extras_of(name, (2,), torch.float64)
    params = dict(op.named_parameters())

    def second(y):
        (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    with opfuse.options(double_backward=True):
        y = opfuse.Sequential(op)(x, *extras)
        torch.testing.assert_close(second(y), second(reference(x, params, *extras)))


@pytest.mark.parametrize("owned", [False, True])
@pytest.mark.parametrize("name", [*POINTWISE, *WITH_PARAMETERS])
def test_a_gradient_that_is_not_owned_stays_as_it_is(call, name, owned):
    op, _, width = make(name)
    if not isinstance(op, opfuse.BasicOperation):
        pytest.skip("runs as two basic ops")
    ran = call(op, randn(3, width, dtype=torch.float32).detach(), owns=owned)
    grad = torch.randn_like(ran.y)
    before = grad.clone()
    dx, grad_params, _ = ran.backward(grad)
    if not owned:
        assert torch.equal(grad, before)
        if op.grad_input == "fresh":
            assert dx.untyped_storage().data_ptr() != grad.untyped_storage().data_ptr()
    for grad_param in grad_params:  # never an alias of a gradient that a later step may overwrite
        storage = grad_param.untyped_storage().data_ptr()
        assert storage not in {grad.untyped_storage().data_ptr(), dx.untyped_storage().data_ptr()}


def test_a_bias_gradient_is_no_alias_even_for_one_row(call):
    for shape in [(4,), (1, 4), (1, 1, 4)]:
        ran = call(ops.Bias(4), torch.randn(shape))
        dx, (db,), _ = ran.backward(torch.ones(shape))
        assert db.untyped_storage().data_ptr() != dx.untyped_storage().data_ptr()
        assert db.shape == (4,)


def test_reference_agrees_with_torch():
    """The formulas above are the ones torch has, where torch has them."""
    x = randn(3, 8)
    torch.testing.assert_close(gelu(x), F.gelu(x, approximate="tanh"))
    torch.testing.assert_close(
        gated(torch.sigmoid)(x, {}), F.glu(torch.cat((x[:, 4:], x[:, :4]), 1))
    )
    torch.testing.assert_close(rms_norm(x, 1.0, 1e-5), F.rms_norm(x, (8,), eps=1e-5))
