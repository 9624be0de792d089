"""Device functions: who has them, and in kernels that apply any activation what they compute.

What runs kernels needs a process with ``TRITON_INTERPRET=1``; the session ``plugin(triton)`` starts it.
"""

import importlib.util
import os
import subprocess
import sys

import activations
import pytest
import torch

from opfuse import ops
from opfuse.testing import interpreter
from opfuse.testing.machine import is_interpreting

pytestmark = pytest.mark.alone
pytest.importorskip("triton")

import triton_activation as support  # noqa: E402
from opfuse_triton import TARGETS, functions_of, recording  # noqa: E402

interpreted = pytest.mark.skipif(not is_interpreting(), reason="needs TRITON_INTERPRET=1")
compiled = pytest.mark.skipif(is_interpreting(), reason="TRITON_INTERPRET is set")
OPS = {
    "gelu": ops.GELU, "gelu erf": lambda: ops.GELU(approximate="none"), "qgelu": ops.QGELU, "relu": ops.ReLU,
    "srelu": ops.SReLU, "silu": ops.SiLU, "glu": ops.GLU, "geglu": ops.GEGLU, "qgeglu": ops.QGEGLU,
    "reglu": ops.ReGLU, "sreglu": ops.SReGLU, "swiglu": ops.SwiGLU, "situglu": ops.SiTUGLU,
    "situglu numbers": lambda: ops.SiTUGLU(beta1=2.0, beta2=3.0), "clamped": ops.ClampedSwiGLU,
    "clamped numbers": lambda: ops.ClampedSwiGLU(limit=1.0, alpha=1.0, glu_linear_offset=0.5),
    "third party": support.LeakyReLU, "third party gated": support.LeakyGLU,
    "third party gate": support.LeakyGate,
}  # fmt: skip
every = pytest.mark.parametrize("name", OPS)


def test_every_activation_has_device_functions():
    names = {type(make()).__name__ for make in OPS.values()}
    activations.check_table(names, "OPS of plugins/opfuse-triton/tests/test_functions.py")


ROWS, COLUMNS = 5, 131  # not whole tiles
LARGE = [
    0.0,
    -0.0,
    7.0,
    -7.0,
    1e-30,
    -1e-30,
    30.0,
    -30.0,
    90.0,
    -90.0,
    1e4,
    -1e4,
    1e15,
    -1e15,
    1e20,
    -1e20,
]
LARGE += [1.5e38, -1.5e38, float("inf"), -float("inf"), float("nan")]


@pytest.fixture
def exact():
    interpreter.install()


def inputs(op, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    x = 3 * torch.randn(ROWS, COLUMNS * op.feature_ratio, generator=generator)
    x[0] *= 0.01  # where a difference of two large numbers shows
    x[1] = x[1].clamp(-7, 7)  # some are at a limit
    dy = torch.randn(ROWS, COLUMNS, generator=generator)
    return dy.to(dtype), x.to(dtype)


@interpreted
@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_value_and_derivative_match_fp64(name, dtype, exact):
    op = OPS[name]()
    dy, x = inputs(op, dtype)
    tolerance = {"rtol": 1e-5, "atol": 2e-6}
    if dtype is not torch.float32:
        eps = torch.finfo(dtype).eps
        tolerance = {"rtol": eps, "atol": eps / 100}
    y, dx = support.forward(op, x), support.backward(op, dy, x)
    torch.testing.assert_close(y.double(), op.forward_value(x.double()), **tolerance)
    torch.testing.assert_close(dx.double(), op.backward_value(dy.double(), x.double()), **tolerance)


@interpreted
@every
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_small_values_keep_their_digits(name, exact):
    op = OPS[name]()
    x = torch.logspace(-6, 0, 64).repeat(1, op.feature_ratio)
    y = support.forward(op, x).double()
    torch.testing.assert_close(y, op.forward_value(x.double()), rtol=2e-6, atol=0)


@interpreted
@every
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_nan_infinities_and_large_values(name, exact):
    op, large = OPS[name](), torch.tensor(LARGE)
    x = large[:, None]
    if op.gated:  # one of the halves is large
        halves = [
            (large, torch.tensor(1.5)),
            (large, torch.tensor(-0.5)),
            (torch.tensor(0.5), large),
        ]
        x = torch.cat([torch.stack(torch.broadcast_tensors(*pair), -1) for pair in halves])
    dy = torch.ones(len(x), 1)
    # one by one: torch's kernels for many values at once treat infinities in another way
    values = torch.cat([op.forward_value(row[None]) for row in x])
    gradients = torch.cat([op.backward_value(dy[:1], row[None]) for row in x])
    close = {"rtol": 1e-5, "atol": 1e-6, "equal_nan": True}
    torch.testing.assert_close(support.forward(op, x), values, **close)
    torch.testing.assert_close(support.backward(op, dy, x), gradients, **close)


@interpreted
def test_numbers_are_those_of_the_call(exact):
    op = support.LeakyReLU()
    x = torch.tensor([[-1.0, 2.0]])
    op.slope = 0.5
    assert support.forward(op, x).tolist() == [[-0.5, 2.0]]
    of, then = functions_of(op), op.numbers_of()
    op.slope = 2
    assert of.numbers(then) == (0.5,) and of.numbers(op.numbers_of()) == (2.0,)
    assert support.forward(op, x).tolist() == [[-2.0, 2.0]]


@pytest.mark.costly(30)
@compiled
@every
@pytest.mark.parametrize("arch", TARGETS)
def test_the_functions_compile_for_the_architecture(name, arch):
    op = OPS[name]()
    with recording(arch) as launches:
        x = torch.empty(4096, 1024 * op.feature_ratio, dtype=torch.bfloat16, device="meta")
        y = support.forward(op, x)
        dx = support.backward(op, y, x)
    assert y.shape == (4096, 1024) and dx.shape == x.shape
    assert [launch.kernel.name for launch in launches] == ["forward_kernel", "backward_kernel"]
    for launch in launches:
        asm = launch.compile().asm
        assert len(asm["cubin" if isinstance(arch, int) else "hsaco"]) > 1000


class Doubled(ops.SiLU):
    def value(self, x):
        return 2 * super().value(x)


class DoubledWithFunctions(Doubled):
    number_names = ()

    def derivative(self, x):
        return 2 * super().derivative(x)

    def device_functions(self):
        return support.leaky, support.leaky_derivative


class Overridden(support.LeakyReLU):
    def value(self, x):
        return x


class OtherLinear(ops.SwiGLU):
    def linear_value(self, b):
        return b + 1


class OtherLinearHalf(support.LeakyGLU):
    def linear_derivative(self, b):
        return torch.zeros_like(b)


class Named(support.LeakyReLU):
    mode = "fast"
    number_names = ("slope", "mode")


class Splits(support.LeakyGLU):
    def split(self, x):
        return super().split(x)[::-1]


class Passes(support.LeakyReLU):
    def op_forward(self, ctx, input_):
        return 2 * super().op_forward(ctx, input_)


class HalfGiven(support.LeakyGLU):
    number_names = ("slope",)

    def device_functions(self):
        return super().device_functions()[:2]


class Plain(ops.GatedActivation):
    number_names = ()
    value, derivative = ops.SiLU.value, ops.SiLU.derivative

    def device_functions(self):
        return support.leaky, support.leaky_derivative


@pytest.mark.parametrize(
    "cls",
    [
        Doubled,
        Overridden,
        OtherLinear,
        OtherLinearHalf,
        Named,
        Splits,
        Passes,
        HalfGiven,
        ops.Identity,
    ],
)
def test_an_op_whose_math_may_differ_has_no_functions(cls):
    assert functions_of(cls()) is None


def test_an_op_with_known_math_has_functions():
    class Tagged(ops.GELU):
        slope, tag = 2.0, "x"  # GELU's functions do not take them

    assert functions_of(Tagged()) == functions_of(ops.GELU()) != functions_of(OPS["gelu erf"]())
    assert functions_of(ops.GELU()).numbers(Tagged().numbers_of()) == ()
    assert functions_of(DoubledWithFunctions()).value is support.leaky
    plain = functions_of(Plain())
    assert plain.linear_value is functions_of(ops.SwiGLU()).linear_value is not None
    assert functions_of(support.LeakyGLU()).linear_value is support.leaky
    assert functions_of(support.LeakyGLU()).names == ("slope",)
    situ = functions_of(ops.SiTUGLU(beta1=2, beta2=3))
    assert situ.numbers(ops.SiTUGLU(beta1=2, beta2=3).numbers_of()) == (2.0, 3.0)


def test_functions_of_a_class_that_does_not_say_which_numbers_they_take():
    class Undeclared(ops.SiLU):
        slope = 2.0

        def device_functions(self):
            return support.leaky, support.leaky_derivative

    text = "Undeclared.device_functions gave functions: declare number_names, of the numbers that"
    with pytest.raises(ValueError, match=text):
        functions_of(Undeclared())


def test_a_wrong_number_of_functions_is_an_error():
    class Three(ops.SiLU):
        def device_functions(self):
            return support.leaky, support.leaky_derivative, None

    with pytest.raises(ValueError, match="Three.device_functions gave 3 functions: expected value"):
        functions_of(Three())


@compiled
def test_without_triton_the_package_says_so():
    code = "import sys; sys.modules['triton'] = None; import opfuse; print(1); import opfuse_triton; print(opfuse_triton.why_no_kernel.__name__); opfuse_triton.Kernel"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "1\nwhy_no_kernel\n" and importlib.util.find_spec("triton") is not None
    assert "opfuse_triton.Kernel needs Triton, which is not installed: on Linux" in done.stderr


@compiled
def test_without_triton_the_command_says_so():
    code = (
        "import runpy, sys; sys.modules['triton'] = None; sys.argv = ['opfuse_triton', 'check']; "
    )
    code += "runpy.run_module('opfuse_triton', run_name='__main__')"
    environ = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "opfuse_triton needs Triton, which is not installed: on Linux" in done.stderr
