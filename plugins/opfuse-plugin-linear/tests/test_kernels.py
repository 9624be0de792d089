"""The arithmetic: oneDNN called directly gives what the default library gives, and only where it is allowed."""

from __future__ import annotations

import pytest
import torch
from opfuse_linear import kernels
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from opfuse.ops import libraries
from opfuse.testing import tolerance
from opfuse.testing.machine import is_interpreting

ROWS, IN, OUT = 1024, 32, 48
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# the warning is torch's own, of mkldnn.flags
pytestmark = [
    pytest.mark.filterwarnings("ignore:TF32 acceleration:UserWarning"),
    pytest.mark.skipif(
        is_interpreting(), reason="TRITON_INTERPRET is set: these are of PyTorch's libraries"
    ),
]
needs_onednn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="torch without oneDNN"
)
needs_bf16 = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available() or not libraries.onednn_has_bf16(),
    reason="no bf16 in oneDNN",
)


@pytest.fixture(autouse=True)
def setting(monkeypatch):
    torch.set_num_threads(1)
    monkeypatch.setattr(libraries, "onednn_is_faster", lambda: True)


class Calls(TorchDispatchMode):
    """Counts direct calls of oneDNN."""

    keeps_no_tensors = True

    def __init__(self):
        super().__init__()
        self.onednn = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.onednn += func.namespace == "mkldnn"
        return func(*args, **kwargs or {})


def calls_of(fn, *args):
    """The result, and how often oneDNN was called directly."""
    with Calls() as calls:
        result = fn(*args)
    return result, calls.onednn


def tensors(*shapes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes
    ]


def check(got, expected):
    """Against fp64: the largest error, held against the largest value."""
    assert got.shape == expected.shape
    if got.numel():
        error, largest = (got.double() - expected).abs().max(), expected.abs().max()
        assert error <= tolerance(got.dtype, gemm=True)[0] * largest + 1e-5


def gelu(x):
    return F.gelu(x, approximate="tanh")


FUNCTIONS = {  # kernel -> (shapes of its arguments but the rows, the same in fp64)
    "linear": (
        lambda x, w, b: libraries.linear(x, w, b),
        (IN, (OUT, IN), (OUT,)),
        lambda x, w, b: x @ w.T + b,
    ),
    "no bias": (lambda x, w: libraries.linear(x, w, None), (IN, (OUT, IN)), lambda x, w: x @ w.T),
    "dgrad": (kernels.linear_dgrad, (OUT, (OUT, IN)), lambda dy, w: dy @ w),
    "wgrad": (kernels.linear_wgrad, (OUT, IN), lambda dy, x: rows(dy).T @ rows(x)),
    "wgrad, wide": (kernels.linear_wgrad, (256, 16), lambda dy, x: rows(dy).T @ rows(x)),
    "add": (kernels.linear_add, (IN, (OUT, IN), (OUT,), OUT), lambda x, w, b, e: x @ w.T + b + e),
    "scale, add": (
        lambda x, w, e: kernels.linear_add(x, w, None, e, -0.5),
        (IN, (OUT, IN), OUT),
        lambda x, w, e: e - 0.5 * (x @ w.T),
    ),
    "dgrad, add": (kernels.linear_dgrad_add, (OUT, (OUT, IN), IN), lambda dy, w, e: dy @ w + e),
}


def rows(x):
    return x.reshape(-1, x.shape[-1])


@pytest.fixture(params=list(FUNCTIONS))
def kernel(request):
    return FUNCTIONS[request.param]


def arguments(shapes, lead, dtype=torch.float32, layout=lambda x: x):
    full = [(*lead, shape) if isinstance(shape, int) else shape for shape in shapes]
    return [
        layout(x) if isinstance(s, int) else x
        for x, s in zip(tensors(*full, dtype=dtype), shapes, strict=True)
    ]


def strided(x):
    return torch.stack((x, x), -1)[..., 0]


def expanded(x):
    return x[:1].expand(x.shape)


def transposed(x):
    return x.transpose(0, -1).contiguous().transpose(0, -1)


@needs_onednn
@pytest.mark.parametrize("layout", [lambda x: x, strided, expanded, transposed])
@pytest.mark.parametrize("lead", [(ROWS,), (4, ROWS // 4)], ids=str)
def test_several_linears_of_one_input(lead, layout):
    x, w, b, v = arguments((IN, (OUT, IN), (OUT,), (8, IN)), lead, layout=layout)
    wide = [t.double() for t in (x, w, b, v)]
    got, calls = calls_of(kernels.linears, x, [w, v], [b, None])
    assert calls == 2 and got.is_contiguous()
    check(got, torch.cat([wide[0] @ wide[1].T + wide[2], wide[0] @ wide[3].T], -1))
    (dy,) = arguments((OUT + 8,), (ROWS,), layout=layout)
    parts = dy.split((OUT, 8), 1)
    check(
        kernels.linears_dgrad(parts, [w, v]),
        parts[0].double() @ wide[1] + parts[1].double() @ wide[3],
    )
    assert kernels.linears_dgrad(parts, [None, None]) is None
    for given in (
        [x.bfloat16(), [w.bfloat16()], [None]],
        [x[:1, :3], [w], [b]],
        [x, [w[:3]], [None]],
    ):
        assert kernels.linears(*given) is None
    with torch.backends.mkldnn.flags(enabled=False):
        assert kernels.linears(x, [w, v], [b, None]) is None


@needs_onednn
@pytest.mark.parametrize(
    "layout",
    [lambda x: x, strided, expanded, transposed],
    ids=["plain", "strided", "expanded", "t"],
)
@pytest.mark.parametrize("lead", [(ROWS,), (4, ROWS // 4), (2, 2, ROWS // 4)], ids=str)
def test_onednn_gives_what_the_default_library_gives(kernel, lead, layout):
    fn, shapes, reference = kernel
    args = arguments(shapes, lead, layout=layout)
    kept = [a.clone() for a in args]
    got, calls = calls_of(fn, *args)
    assert calls == 1
    check(got, reference(*[a.double() for a in args]))
    with torch.backends.mkldnn.flags(enabled=False):
        default, calls = calls_of(fn, *args)
    assert calls == 0
    check(default, reference(*[a.double() for a in args]))
    check(got, default.double())
    assert got.is_contiguous()
    for a, k in zip(args, kept, strict=True):
        assert torch.equal(a, k), "an argument was modified"
        assert got.untyped_storage().data_ptr() != a.untyped_storage().data_ptr()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lead", [(), (0,), (1,), (3,), (2, 0), (2, 3), (2, 1, 3)], ids=str)
def test_small_ones_stay_with_the_default_library(kernel, lead, dtype):
    fn, shapes, reference = kernel
    args = arguments(shapes, lead, dtype)
    got, calls = calls_of(fn, *args)
    assert calls == 0
    assert got.dtype is dtype
    check(got, reference(*[a.double() for a in args]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
def test_other_dtypes_stay_with_the_default_library(kernel, dtype):
    fn, shapes, reference = kernel
    args = arguments(shapes, (ROWS,), dtype)
    got, calls = calls_of(fn, *args)
    assert calls == 0
    check(got, reference(*[a.double() for a in args]))


@needs_bf16
def test_bf16_goes_directly_to_onednn_where_something_follows(kernel):
    fn, shapes, reference = kernel
    args = arguments(shapes, (ROWS,), torch.bfloat16)
    got, calls = calls_of(fn, *args)
    followed = [FUNCTIONS[name][0] for name in ("linear", "add")]
    assert calls == (fn in followed)
    check(got, reference(*[a.double() for a in args]))


@needs_onednn
def test_where_onednn_is_not_faster_it_is_not_used(kernel, monkeypatch):
    monkeypatch.setattr(libraries, "onednn_is_faster", lambda: False)
    fn, shapes, _ = kernel
    assert calls_of(fn, *arguments(shapes, (ROWS,)))[1] == 0


@needs_onednn
@pytest.mark.parametrize(
    "shape, out",
    [((4, 8192), 64), ((16384, 64), 4), ((1, 1 << 15), 64)],
    ids=["few rows", "few columns", "one row"],
)
def test_products_with_narrow_results_stay_with_the_default_library(shape, out):
    x, w, b = tensors(shape, (out, shape[1]), (out,))
    got, calls = calls_of(libraries.linear, x, w, b)
    assert calls == 0
    check(got, x.double() @ w.double().T + b.double())


def test_a_tensor_subclass_stays_with_its_own_operations():
    class Mine(torch.Tensor):
        pass

    x, w, b = tensors((ROWS, IN), (OUT, IN), (OUT,))
    y, calls = calls_of(libraries.linear, x.as_subclass(Mine), w, b)
    assert type(y) is Mine and calls == 0


@pytest.mark.parametrize("scale", [0.5, -3.0, 0.0])
@pytest.mark.parametrize("lead", [(), (0,), (5,), (2, 3), (ROWS,)], ids=str)
def test_scaled_gradients_match_fp64(lead, scale):
    for dtype in DTYPES:
        dy, x, w = arguments((OUT, IN, (OUT, IN)), lead, dtype)
        wide = [t.double() for t in (dy, x, w)]
        check(kernels.linear_dgrad(dy, w, scale), scale * (wide[0] @ wide[2]))
        check(kernels.linear_wgrad(dy, x, scale), scale * (rows(wide[0]).T @ rows(wide[1])))


@pytest.mark.parametrize("lead", [(), (0,), (1,), (5,), (2, 3), (2, 0)], ids=str)
def test_the_gradient_of_a_bias_is_a_new_tensor(lead):
    (dy,) = arguments((OUT,), lead)
    got = kernels.bias_grad(dy)
    check(got, rows(dy.double()).sum(0))
    assert got.numel() == OUT and (not dy.numel() or got.data_ptr() != dy.data_ptr())


@pytest.mark.parametrize(
    "name, form, function",
    [("gelu", "tanh", gelu), ("gelu", "none", F.gelu), ("swish", "", F.silu)],
)
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=needs_bf16)], ids=str
)
@pytest.mark.parametrize("lead", [(ROWS,), (4, ROWS // 4)], ids=str)
@needs_onednn
def test_activations_in_the_epilogue(name, form, function, dtype, lead):
    x, w, b = arguments((IN, (OUT, IN), (OUT,)), lead, dtype)
    for bias in (b, None):
        expected = x.double() @ w.double().T + (0 if bias is None else b.double())
        y, calls = calls_of(kernels.linear_activation, x, w, bias, name, form)
        assert calls == 1 and y.dtype is dtype
        check(y, function(expected))
    with torch.backends.mkldnn.flags(enabled=False):
        assert kernels.linear_activation(x, w, b, name, form) is None
    assert (
        kernels.linear_activation(x[..., :3, :], w, b, name, form) is None
        or dtype is torch.bfloat16
    )


@pytest.mark.parametrize("name, form", [("gelu", "tanh"), ("gelu", "none"), ("swish", "")])
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=needs_bf16)], ids=str
)
@needs_onednn
def test_the_epilogue_keeps_nan_and_large_values(name, form, dtype):
    x = torch.zeros(ROWS, IN, dtype=dtype)
    x[0], x[1], x[2] = float("nan"), 300.0, -300.0
    y = kernels.linear_activation(x, torch.eye(IN, dtype=dtype), None, name, form)
    assert y[0].isnan().all()
    assert torch.equal(y[1], x[1]) and not y[2].any() and not y[3:].any()


@needs_onednn
def test_onednn_is_not_asked_while_compiling():
    torch._dynamo.reset()
    x, w, b = tensors((ROWS, IN), (OUT, IN), (OUT,))
    graphs = []

    def backend(graph, _):
        graphs.append(str(graph.code))
        return graph

    compiled = torch.compile(libraries.linear, fullgraph=True, backend=backend)
    check(compiled(x, w, b), x.double() @ w.double().T + b.double())
    assert graphs and "mkldnn" not in graphs[0]
