"""The Triton product: against fp64 in the interpreter, and compiled for GPUs that need not be there."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
from torch.nn import functional as F

import opfuse
from opfuse import ops
from opfuse.testing import assert_close, interpreter
from opfuse.testing.machine import is_interpreting

pytest.importorskip("triton")

import triton
import triton.language as tl
from opfuse_linear import cases, choice, gemm
from opfuse_triton import TARGETS, Config, functions_of, recording, target
from opfuse_triton.resources import read_resources

interpreted = pytest.mark.skipif(not is_interpreting(), reason="needs TRITON_INTERPRET=1")
compiled = pytest.mark.skipif(is_interpreting(), reason="TRITON_INTERPRET is set")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter

if is_interpreting():
    interpreter.install()  # exact for bf16, which Triton's own is not

DTYPES = torch.float32, torch.bfloat16, torch.float16
SIZES = [(3, 64, 40), (129, 128, 264), (127, 72, 48), (1, 8, 8)]  # rows, depth, features
GELU, SWIGLU = ops.GELU(), ops.SwiGLU()


@contextlib.contextmanager
def tf32(allowed):
    """How fp32 is multiplied, which also decides whether the kernel takes it on a GPU."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def draw(dtype, *shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=generator).to(dtype) for s in shapes]


@interpreted
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_match_fp64(dtype, sizes):
    rows, depth, features = sizes
    x, w, bias = draw(dtype, (rows, depth), (features, depth), (features,))
    bias = bias.float()  # as where autocast casts
    for b in (bias, None):
        assert gemm.takes(x, w, b)
        product = F.linear(x.double(), w.double(), None if b is None else b.to(dtype).double())
        y, hidden = gemm.multiply(x, w, b, functions_of(GELU), keep=True)
        assert_close(hidden, product, gemm=True)
        assert_close(y, GELU.value(hidden.double()), gemm=True)
        again, nothing = gemm.multiply(x, w, b, functions_of(GELU))
        assert nothing is None and torch.equal(again, y)


@interpreted
@pytest.mark.parametrize("lead", [(), (5,), (2, 3), (2, 1, 3)], ids=str)
def test_leading_dimensions_and_layouts(lead):
    x, w, bias = draw(torch.float32, (*lead, 2, 32), (48, 64), (96,))
    w, bias = w[:, 16:48], bias[::2]
    for left in (x[..., 0, :], x[..., 1, :].clone()):
        assert gemm.takes(left, w, bias)
        y, _ = gemm.multiply(left, w, bias, functions_of(GELU))
        assert y.is_contiguous()
        expected = GELU.value(F.linear(left.double(), w.double(), bias.double()))
        assert_close(y, expected, gemm=True)


@interpreted
@pytest.mark.parametrize("arch", TARGETS)
def test_every_configuration_gives_the_same(arch):
    dtype = torch.bfloat16
    x, w, bias = draw(dtype, (130, 208), (272, 208), (272,))
    product = F.linear(x.double(), w.double(), bias.double())
    with target(arch):
        offered = gemm.configurations(x.device, dtype, 130, 272)
        assert 3 <= len(offered) <= 8
        for config in offered:
            y, hidden = gemm.multiply(x, w, bias, functions_of(GELU), keep=True, config=config)
            assert_close(hidden, product, gemm=True, what=str(config))
            assert_close(y, GELU.value(hidden.double()), gemm=True, what=str(config))


class Softsign(ops.Activation):
    """An activation of another package, with a number of its own."""

    slope = 2.0
    number_names = ("slope",)

    def value(self, x):
        return x / (1 + self.slope * x.abs())

    def derivative(self, x):
        return (1 + self.slope * x.abs()) ** -2

    def device_functions(self):
        return _softsign, _softsign_derivative


@triton.jit
def _softsign(x, slope):
    return x / (1.0 + slope * tl.abs(x))


@triton.jit
def _softsign_derivative(x, slope):
    d = 1.0 + slope * tl.abs(x)
    return 1.0 / (d * d)


@interpreted
@pytest.mark.parametrize(
    "act", [GELU, ops.ReLU(), ops.SiLU(), Softsign()], ids=lambda act: type(act).__name__
)
def test_a_linear_and_each_activation_fuse_into_one_step(act, monkeypatch):
    kept, multiply = [], gemm.multiply
    monkeypatch.setattr(
        gemm,
        "multiply",
        lambda *given, **more: kept.append(more["keep"]) or multiply(*given, **more),
    )
    chain = opfuse.Sequential(ops.Linear(24, 32), act)
    x, dy = draw(torch.float32, (5, 24), (5, 32))
    results = []
    for selection in ("linear", ""):
        with opfuse.plugins.using(selection):
            leaf = x.clone().requires_grad_()
            y = chain(leaf)
            given = [leaf, *chain.parameters()]
            with torch.no_grad():
                alone = chain(x)
            results.append([y, alone, *torch.autograd.grad(y, given, dy)])
            if selection:
                assert kept == [not act.saves_output, False]
                step = opfuse.explain(chain, leaf).to_dict()["forward"][0]
                assert step["fusion"] == "linear+bias+activation"
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected)


@interpreted
def test_what_the_kernel_does_not_take_goes_to_the_library(monkeypatch):
    monkeypatch.setattr(gemm, "multiply", None)
    chain = opfuse.Sequential(ops.Linear(24, 30), GELU)
    (x,) = draw(torch.float32, (5, 24))
    with opfuse.plugins.using("linear"):
        got = chain(x)
    with opfuse.plugins.using(""):
        torch.testing.assert_close(got, chain(x))


@interpreted
@pytest.mark.parametrize("case", cases.CASES[:2], ids=lambda case: case.name)
def test_each_tile_is_stored_once(case):
    """Tiles are read again by other programs, from the cache; what is written is written once."""
    from ledger import counting
    from opfuse_triton.recorded import storage_of

    for shape in case.small:
        with counting() as launches:
            given = case.run(**case.inputs(shape, "cpu"))
        (launch,) = launches
        outputs = given if isinstance(given, tuple) else (given,)
        assert launch.total("written") == {storage_of(y): y.nbytes for y in outputs}


def test_tensors_that_the_kernel_does_not_take():
    x, w, bias = torch.ones(4, 8), torch.ones(12, 8), torch.ones(12)
    assert gemm.takes(x, w, bias) and gemm.takes(x[0], w, None)
    assert gemm.takes(torch.ones(4, 16)[:, 8:], w, None)

    class Mine(torch.Tensor):
        pass

    for given in (
        (x.as_subclass(Mine), w, bias),
        (x.double(), w.double(), None),
        (x, w.bfloat16(), bias),
        (x[:0], w, bias),
        (x, w[:0], bias[:0]),
        (x, w[:, :4], bias),
        (x, w, bias[:4]),
        (x, w.to("meta"), bias),
        (x.to_sparse(), w, bias),
        (x, torch.ones(11, 8), None),  # rows of the output
        (torch.ones(4, 10)[:, :8], w, None),
        (torch.ones(4, 12)[:, 1:9], w, None),
        (torch.ones(8, 4).t(), w, None),
        (x, torch.ones(8, 12).t(), None),
        (torch.ones(1, 8).expand(4, 8), w, None),
    ):
        assert not gemm.takes(*given)


@pytest.mark.parametrize("value", ["ieee", "tf32", "none"])
@pytest.mark.parametrize("home", [torch.backends, torch.backends.cuda.matmul], ids=["all", "cuda"])
def test_on_a_gpu_it_takes_fp32_where_pytorch_multiplies_it_in_tf32(home, value, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    try:
        home.fp32_precision = value
        assert gemm.takes(torch.ones(4, 8), torch.ones(12, 8), None) == (value == "tf32")
    finally:
        torch.backends.fp32_precision = torch.backends.cuda.matmul.fp32_precision = "none"


# Compiled


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def launched(arch, act=GELU, *, config=None, keep=True, sizes=(8192, 1024, 4096)):
    rows, depth, features = sizes
    given = meta(rows, depth), meta(features, depth), meta(features), functions_of(act)
    with recording(arch) as launches:
        gemm.multiply(*given, keep=keep, config=config)
    return launches[0]


def test_the_grid_is_persistent():
    for rows in (8192, 128):
        launch = launched(90, sizes=(rows, 1024, 1024))
        count = math.prod(
            -(-n // launch.config[k]) for n, k in ((rows, "BLOCK_M"), (1024, "BLOCK_N"))
        )
        assert launch.grid == (min(132, count),)


@pytest.mark.costly(3)
@compiled
@pytest.mark.parametrize("arch", TARGETS)
def test_it_compiles_to_matrix_instructions(arch):
    found = read_resources(launched(arch).compile())
    wanted = {80: "mma.sync", 90: "wgmma", 100: "tcgen05"}.get(arch, "mfma")
    assert set(found.matrix) == {wanted} and not found.spilled
    assert found.shared <= TARGETS[arch].shared_memory
    assert (found.tma > 0) == (arch in (90, 100))


# Where it is used


def environment(**changes):
    on_gpu = {"device": torch.device("cuda"), "capability": (9, 0), "dtype": torch.bfloat16}
    base = opfuse.Environment(torch.device("cpu"), None, torch.float32)
    return base._replace(**on_gpu | changes)


LINEAR = ops.BasicLinear(16, 24)
TILES = Config({"BLOCK_M": 64}, num_warps=4).to_dict()


def test_a_product_is_used_only_where_it_was_measured():
    chain = LINEAR, GELU
    unmeasured = choice.refusal(chain, environment())
    assert "it was not measured on this GPU" in unmeasured and "1.07x as fast" in unmeasured
    assert choice.refusal(chain, environment(measured=math.inf)) == ""
    slow = choice.refusal(chain, environment(measured=1.0))
    assert slow == "opfuse tune found no Triton product faster than the library's"
    assert choice.refusal(chain, environment(measured=1.2, configuration=TILES)) == ""
    assert choice.product(chain, environment(measured=math.inf)) is None
    assert choice.product(chain, environment(measured=1.2, configuration=TILES)) is not None


@pytest.mark.parametrize(
    "said, chain, changes",
    [
        ("under torch.compile", (LINEAR, GELU), {"compiling": True}),
        ("takes no float64", (LINEAR, GELU), {"dtype": torch.float64}),
        ("run on a GPU, and this is meta", (LINEAR, GELU), {"device": torch.device("meta")}),
        ("compute capability 8.0", (LINEAR, GELU), {"capability": (7, 5)}),
        ("Softsign has no device", (LINEAR, type("Softsign", (Softsign,), {"value": abs})()), {}),
        ("that is not gated", (LINEAR, SWIGLU), {}),
        ("takes one linear", (ops.ParallelLinear([LINEAR, LINEAR]), GELU), {}),
    ],
)
def test_each_refusal_gives_its_reason(said, chain, changes):
    assert said in choice.refusal(chain, environment(measured=math.inf, **changes))


@compiled
def test_on_a_cpu_it_needs_the_interpreter():
    said = choice.refusal((LINEAR, GELU), environment(device=torch.device("cpu")))
    assert said == "its kernels run on a GPU, and this is cpu"


def test_tune_measures_at_most_eight_configurations():
    env = environment(measured=math.inf)
    with target(90):
        offered = choice.configurations((LINEAR, GELU), env)
        assert 1 <= len(offered) <= 8
        assert all(Config(**config).to_dict() == config for config in offered)
        assert choice.configurations((LINEAR, GELU), env._replace(compiling=True)) == ()
        assert choice.configurations((LINEAR, SWIGLU), env) == ()
