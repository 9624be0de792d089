"""The kernels against fp64 and against their twins, in graphs, and compiled without a GPU.

``python -m pytest`` compiles; ``TRITON_INTERPRET=1 python -m pytest`` computes, on a CPU.
"""

import functools

import pytest
import torch
from torch.nn import functional as F

import opfuse
from opfuse import ops
from opfuse.testing import assert_close, interpreter
from opfuse.testing.machine import is_interpreting

pytest.importorskip("triton")

import compiled
import triton
import triton.language as tl
from opfuse_activation import cases, conditions, fused
from opfuse_triton import TARGETS, recording
from opfuse_triton.elementwise import formulas, kernels, library

GPU = torch.cuda.is_available() and not is_interpreting()
DEVICE = "cuda" if GPU else "cpu"
computes = pytest.mark.skipif(
    not (GPU or is_interpreting()), reason="no GPU, and Triton does not interpret"
)
compiles = pytest.mark.skipif(is_interpreting(), reason="TRITON_INTERPRET is set")
# numpy's, in the interpreter
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

if is_interpreting():
    interpreter.install()  # exact for bf16, which Triton's own is not

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@triton.jit
def soft_step(x, slope):
    return x * tl.sigmoid(slope * x)


@triton.jit
def soft_step_derivative(x, slope):
    s = tl.sigmoid(slope * x)
    return s + slope * x * s * (1 - s)


class SoftStep(ops.Activation):
    """An activation of another package, with a number of its own."""

    slope = 2.0
    number_names = ("slope",)

    def value(self, x):
        return x * torch.sigmoid(self.slope * x)

    def derivative(self, x):
        s = torch.sigmoid(self.slope * x)
        return s + self.slope * x * s * (1 - s)

    def device_functions(self):
        return soft_step, soft_step_derivative


class SoftGLU(ops.GatedActivation):
    slope = 0.5
    number_names = ("slope",)
    value, derivative = SoftStep.value, SoftStep.derivative

    def device_functions(self):
        return soft_step, soft_step_derivative


OPS = {
    "GELU": ops.GELU,
    "GELU erf": functools.partial(ops.GELU, approximate="none"),
    "QGELU": ops.QGELU,
    "ReLU": ops.ReLU,
    "SReLU": ops.SReLU,
    "SiLU": ops.SiLU,
    "GLU": ops.GLU,
    "GEGLU": ops.GEGLU,
    "QGEGLU": ops.QGEGLU,
    "ReGLU": ops.ReGLU,
    "SReGLU": ops.SReGLU,
    "SwiGLU": ops.SwiGLU,
    "SwiGLU by 1": functools.partial(ops.SwiGLU, glu_interleave_size=1),
    "SwiGLU by 2": functools.partial(ops.SwiGLU, glu_interleave_size=2),
    "SwiGLU by 3": functools.partial(ops.SwiGLU, glu_interleave_size=3),
    "SwiGLU by 32": functools.partial(ops.SwiGLU, glu_interleave_size=32),
    "SiTUGLU": functools.partial(ops.SiTUGLU, beta1=2.0, beta2=3.0),
    "ClampedSwiGLU by 4": functools.partial(
        ops.ClampedSwiGLU, limit=1.0, alpha=1.1, glu_linear_offset=0.5, glu_interleave_size=4
    ),
    "another package's": SoftStep,
    "another package's, gated": SoftGLU,
}
every = pytest.mark.parametrize("op", [pytest.param(make(), id=name) for name, make in OPS.items()])


def halves(op, x):
    return (x, None) if not op.gated else op.split(x)


def true_value(op, x):
    a, b = halves(op, x)
    return op.value(a) if b is None else op.value(a) * op.linear_value(b)


def true_gradient(op, dy, x):
    a, b = halves(op, x)
    if b is None:
        return dy * op.derivative(a)
    slope = op.linear_derivative(b)
    db = op.value(a) * dy * (1 if slope is None else slope)
    return op.join(op.derivative(a) * dy * op.linear_value(b), db)


def drawn(*shapes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in shapes]


def forward(op, x, bias, scales, dtype, keep):
    formula = formulas.formula_of(op, scales is not None)
    return library.LibraryActivation(op, formula).forward(x, bias, scales, dtype, keep)


def backward(op, dy, x, *, needs_x=True, needs_sums=True, owns=False):
    formula = formulas.formula_of(op)
    call = library.LibraryActivation(op, formula).backward
    return call(op.numbers_of(), dy, x, needs_x, needs_sums, owns=owns)[:2]


def of_separate(kernel_result, separate_result, truth):
    """Within the tolerance, or within twice the error of the separate operations."""
    own = (separate_result.double() - truth).abs().max()
    if (kernel_result.double() - truth).abs().max() > 2 * own:
        assert_close(kernel_result, truth)


# The values. 201 features do not fill a tile, and are no multiple of 16 bytes


@computes
@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.bfloat16) for name in OPS]
    + [(name, dtype) for name in ("GELU", "SwiGLU", "SiTUGLU") for dtype in DTYPES[::2]],
    ids=str,
)
def test_forward_and_backward_match_the_separate_ops(name, dtype):
    op = OPS[name]()
    width = 192 if op.gated else 201
    x, bias, dy = drawn((35, width), (width,), (35, width // op.feature_ratio), dtype=dtype)
    y, hidden = forward(op, x, bias, None, dtype, True)
    assert torch.equal(hidden, (x.float() + bias.float()).to(dtype))
    of_separate(y, op.forward_value(hidden), true_value(op, hidden.double()))
    dx, sums = backward(op, dy, hidden)
    truth = true_gradient(op, dy.double(), hidden.double())
    of_separate(dx, op.backward_value(dy, hidden), truth)
    assert_close(sums, truth.sum(0))
    assert (y.dtype, dx.dtype, sums.dtype) == (dtype, dtype, dtype)


@computes
@every
def test_what_is_nan_or_large(op):
    values = [0.0, -0.0, 7.0, -7.0, 30.0, -30.0, 1e4, -1e4, 1e18, -1e18, 1e-30, torch.nan]
    values += [torch.inf, -torch.inf, 1.0, -1.0] * 3
    width = 192
    x = torch.tensor(values * 16, device=DEVICE)[: 2 * width].reshape(2, width)
    y, _ = forward(op, x, None, None, torch.float32, False)
    expected = true_value(op, x.double()).float()
    torch.testing.assert_close(y, expected, equal_nan=True, rtol=1e-5, atol=1e-5)


@computes
@pytest.mark.parametrize("rounds", DTYPES, ids=str)
def test_bfloat16_is_rounded_where_the_separate_ops_round(rounds):
    op = ops.SReGLU()  # nothing in it is inexact but the rounding
    x, dy = drawn((17, 64), (17, 32), dtype=rounds)
    assert torch.equal(forward(op, x, None, None, rounds, False)[0], op.forward_value(x))
    assert torch.equal(backward(op, dy, x)[0], op.backward_value(dy, x))


SHAPES = [(1,), (7,), (1, 1), (3, 127), (2, 3, 129), (2, 1, 3, 40), (257, 8), (5, 1536), (0, 8)]


@computes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_inputs_of_any_shape_give_the_right_values(shape):
    op = ops.QGELU()
    x, bias, dy = drawn(shape, shape[-1:], shape)
    y, hidden = forward(op, x, bias, None, torch.float32, True)
    dx, sums = backward(op, dy, hidden)
    assert_close(y, true_value(op, (x + bias).double()))
    truth = true_gradient(op, dy.double(), hidden.double())
    assert_close(dx, truth)
    assert_close(sums, truth.reshape(-1, shape[-1]).sum(0))


@computes
@pytest.mark.parametrize("make", ["transposed", "strided", "expanded", "of a subclass"])
def test_what_the_kernels_do_not_take(make, monkeypatch):
    """It is computed by the twins: the kernels are not launched."""
    for name in ("forward", "backward"):
        monkeypatch.setattr(kernels, name, None)
    from torch.testing._internal.two_tensor import TwoTensor

    op, (x,) = ops.SwiGLU(), drawn((16, 16))
    tensor = {
        "transposed": lambda: x.t(),
        "strided": lambda: torch.stack([x, x], -1)[..., 0],
        "expanded": lambda: x[:1].expand(16, 16),
        "of a subclass": lambda: TwoTensor(x, x.clone()),
    }[make]()
    y, _ = forward(op, tensor, None, None, torch.float32, False)
    dx, _ = backward(op, torch.ones_like(y), tensor)
    plain = getattr(tensor, "a", tensor).contiguous()
    assert_close(getattr(y, "a", y), true_value(op, plain.double()))
    assert getattr(dx, "a", dx).shape == plain.shape


@computes
def test_a_gradient_that_is_expanded_or_of_another_dtype():
    op, (x,) = ops.QGELU(), drawn((5, 24), dtype=torch.bfloat16)
    for dy in (torch.ones((), device=DEVICE).expand(5, 24), drawn((24, 5))[0].t()):
        dx, _ = backward(op, dy, x, needs_sums=False)
        assert_close(dx, true_gradient(op, dy.bfloat16().double(), x.double()))


@computes
def test_what_nobody_needs_is_not_written():
    op, (x, dy) = ops.QGELU(), drawn((40, 24), (40, 24))
    both, expected = backward(op, dy, x), true_gradient(op, dy.double(), x.double())
    assert torch.equal(backward(op, dy, x, needs_sums=False)[0], both[0])
    none, sums = backward(op, dy, x, needs_x=False)
    assert none is None and torch.equal(sums, both[1])
    given = dy.clone()
    dx, _ = backward(op, given, x, owns=True)
    assert dx is given and torch.equal(dx, both[0])
    assert_close(dx, expected)


@computes
def test_sums_over_several_strips_are_the_same_each_time(monkeypatch):
    monkeypatch.setattr(kernels, "strip_of", lambda *_: 256)
    for op in (ops.QGELU(), ops.SwiGLU(glu_interleave_size=1)):
        x, dy = drawn((700, 32), (700, 32 // op.feature_ratio))
        first, again = backward(op, dy, x)[1], backward(op, dy, x)[1]
        assert torch.equal(first, again)
        assert_close(first, true_gradient(op, dy.double(), x.double()).sum(0))


@computes
@pytest.mark.parametrize("name", ["GELU", "SwiGLU", "SwiGLU by 1"])
def test_every_configuration_computes_the_same(name):
    act = OPS[name]()
    env = opfuse.Environment(torch.device(DEVICE), (9, 0), torch.float32, features=192)
    x, bias, dy = drawn((300, 192), (192,), (300, 192 // act.feature_ratio))
    (scales,) = drawn((300,))
    numbers = act.numbers_of()
    for fused_op, call in (
        (fused.ForwardActivation, lambda run: run(x, bias, None, torch.float32, True)),
        (fused.BackwardActivation, lambda run: run(numbers, dy, x, True, True, False)),
        (fused.BackwardScaledActivation, lambda run: run(numbers, dy, x, scales, True)),
    ):
        found = fused_op([act]).configurations(env)
        assert 1 < len(found) <= 8
        results = []
        for chosen in found[:: 2 if is_interpreting() else 1]:
            op = fused_op([act])
            op.planned(env._replace(configuration=chosen))
            results.append(call(op._run))
        assert op._run.__self__._config.to_dict() in found
        for result in results[1:]:
            for got, expected in zip(result, results[0], strict=True):
                torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("features", [1, 16, 64, 200, 256, 768, 4096, 100000])
@pytest.mark.parametrize("rows", [1, 65, 4096, 10**6])
def test_a_strip_has_whole_tiles(rows, features):
    for target in TARGETS.values():
        strip = kernels.strip_of(rows, features, target)
        for op in (ops.QGELU(), ops.SwiGLU()):
            formula = formulas.formula_of(op)
            found = kernels.candidates("backward", formula, features * op.feature_ratio, target)
            assert all(strip % one["constants"]["BLOCK_ROWS"] == 0 for one in found)
            assert 1 <= len(found) <= 8


@computes
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["SReLU", "SwiGLU", "SiTUGLU", "SwiGLU by 1", "another package's"])
def test_scaled_activations_give_the_right_values_and_gradients(name, dtype):
    op = OPS[name]()
    x, dy = drawn((5, 192), (5, 192 // op.feature_ratio), dtype=dtype)
    (scales,) = drawn((5,))
    y, _ = forward(op, x, None, scales, dtype, False)
    wide = true_value(op, x.double())
    assert_close(y, wide * scales.double()[:, None])
    formula = formulas.formula_of(op, True)
    scaled_backward = library.LibraryActivation(op, formula).scaled_backward
    given = op.numbers_of(), dy, x
    dx, dscales = scaled_backward(*given, scales, True)
    scaled_dy = dy.double() * scales.double()[:, None]
    assert_close(dx, true_gradient(op, scaled_dy, x.double()))
    assert_close(dscales, (wide * dy.double()).sum(-1))
    assert torch.equal(scaled_backward(*given, scales, False)[0], dx)
    none, alone = scaled_backward(*given, None, True)
    assert none is None and torch.equal(alone, dscales)


# Which activations


class Twice(ops.SiLU):
    """It overrides a formula, and brings no device functions for it."""

    def value(self, x):
        return 2 * F.silu(x)

    def derivative(self, x):
        return 2 * super().derivative(x)


def plan_of(chain, x):
    row = opfuse.explain(chain, x).to_dict()
    steps = [step["fusion"] for step in (*row["forward"], *row["backward"])]
    return steps, {step["reason"] for step in row["refused"]}


@pytest.fixture
def alone():
    with opfuse.plugins.using("activation"):
        yield


def chain_of(act, width=16):
    torch.manual_seed(0)
    chain = opfuse.Sequential(ops.Bias(width), act, ops.Bias(width // act.feature_ratio))
    with torch.no_grad():
        chain[0].bias.normal_()
    return chain.to(DEVICE)


@computes
@pytest.mark.usefixtures("alone")
def test_an_activation_without_device_functions_is_left_to_the_ops():
    (x,) = drawn((3, 16))
    steps, reasons = plan_of(chain_of(Twice()), x.requires_grad_())
    assert not any(steps)
    assert reasons == {"Twice has no device functions (Activation.device_functions)"}


@computes
@pytest.mark.usefixtures("alone")
def test_the_numbers_are_those_of_the_call_and_of_its_forward():
    act = SoftStep()
    chain, (x,) = chain_of(act), drawn((3, 16))
    for slope in (0.5, 3.0):
        act.slope = slope
        leaf = x.clone().requires_grad_()
        y = chain(leaf)
        act.slope = -7.0
        (dx,) = torch.autograd.grad(y.sum(), leaf)
        act.slope = slope
        hidden = (x + chain[0].bias).detach().double()
        assert_close(y.detach(), true_value(act, hidden))
        assert_close(dx, act.derivative(hidden))
    assert plan_of(chain, leaf)[0][0] == "bias+activation"


@pytest.mark.usefixtures("alone")
def test_where_no_kernel_runs_nothing_is_fused_unless_the_twins_are_wanted():
    chain, x = chain_of(ops.SwiGLU()).cpu().double(), torch.randn(3, 16, dtype=torch.float64)
    x.requires_grad_()
    assert not any(plan_of(chain, x)[0])
    with opfuse.options(**{"activation.twins": True}):
        assert plan_of(chain, x)[0].count("bias+activation") == 2
        text = str(opfuse.explain(chain, x))
    assert "PyTorch" in text or "the ops in float64" in text


# Graphs


def local_functions():
    @triton.jit
    def value(x):
        return 2.0 * x

    @triton.jit
    def derivative(x):
        return tl.zeros_like(x) + 2.0

    class Double(ops.Activation):
        number_names = ()

        def value(self, x):
            return 2.0 * x

        def derivative(self, x):
            return torch.full_like(x, 2.0)

        def device_functions(self):
            return value, derivative

    return Double()


@computes
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("GELU", torch.bfloat16),
        ("ClampedSwiGLU by 4", torch.float32),
        ("another package's", torch.bfloat16),
    ],
    ids=str,
)
def test_a_compiled_chain_gives_the_same_bits(name, dtype):
    torch._dynamo.reset()
    chain, (x,) = chain_of(OPS[name]()).to(dtype), drawn((5, 16), dtype=dtype)
    params, results = list(chain.parameters()), []
    for call in (torch.compile(chain, fullgraph=True, backend="aot_eager", dynamic=True), chain):
        leaf = x.clone().requires_grad_()
        y = call(leaf)
        results.append([y.detach(), *torch.autograd.grad(y.sum(), [leaf, *params])])
    for got, expected in zip(*results, strict=True):
        assert torch.equal(got, expected)


@computes
@pytest.mark.usefixtures("alone")
def test_a_graph_has_one_operation_per_kernel():
    torch._dynamo.reset()
    chain, graphs = chain_of(ops.QGELU()), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    with torch.no_grad():
        torch.compile(chain, fullgraph=True, backend=backend)(drawn((5, 16))[0])
    called = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert called.count("opfuse_triton.activation_forward") == 1, called


@computes
@pytest.mark.usefixtures("alone")
def test_functions_without_a_name_are_not_in_graphs():
    chain, (x,) = chain_of(local_functions()), drawn((3, 16))
    assert plan_of(chain, x)[0][0] == "bias+activation"  # eagerly, they need none
    torch._dynamo.reset()
    compiled = torch.compile(chain, fullgraph=True, backend="aot_eager")
    assert_close(compiled(x).detach(), 2 * (x + chain[0].bias).detach().double())


@computes
def test_the_operations_are_as_they_declare():
    names = formulas.formula_of(ops.ClampedSwiGLU()).names
    what = names, [1.0, 1.1, 0.5], 0, False
    x, dy, bias, scales = drawn((3, 32), (3, 16), (32,), (3,))
    of = torch.ops.opfuse_triton
    checks = ("test_schema", "test_faketensor")
    for op, args in (
        (of.activation_forward, (x, bias, None, torch.bfloat16, True, *what)),
        (of.activation_forward, (x, None, scales, torch.float32, False, *what)),
        (of.activation_backward, (dy, x, True, True, False, *what)),
        (of.activation_backward, (dy, x, True, False, True, *what)),
        (of.activation_scaled_backward, (dy, x, scales, True, *what)),
    ):
        torch.library.opcheck(op.default, args, test_utils=checks)


# Without a GPU


@compiles
@pytest.mark.parametrize("number", range(0, len(cases.CASES), 8))
def test_it_compiles_for_every_target(number, monkeypatch, tmp_path):
    from opfuse_triton.checking import check_case

    if number:
        compiled.skip_if_reported("activation")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for arch in TARGETS:
        rows = check_case("activation", "opfuse_activation.cases:CASES", number, arch)
        assert rows and not [sentence for row in rows for sentence in row.refusals]


@pytest.mark.skipif(not is_interpreting(), reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_every_byte_is_moved_once(case):
    from opfuse_triton.floor import assert_floor

    assert_floor(case)


@pytest.mark.skipif(not is_interpreting(), reason="needs TRITON_INTERPRET=1")
def test_predictions_are_those_of_the_model():
    from ledger import assert_predicted

    assert_predicted(conditions.PREDICTED, cases.CASES)


@compiles
def test_each_fusion_waits_where_it_would_gain_little(monkeypatch):
    cuda = opfuse.Environment(torch.device("cuda"), (9, 0), torch.bfloat16)
    glu = ops.SwiGLU()
    matched = {
        "bias+activation": (ops.Bias(8), glu),
        "activation": (glu,),
        "scaled activation": (ops.ScaledSwiGLU(),),
    }
    for passes, fusions in (("", fused.FORWARD), (" backward", fused.BACKWARD)):
        assert [fusion.name for fusion in fusions] == [*matched]
        for fusion in fusions:
            assert fusion.when(matched[fusion.name], cuda) is True
            name = f"{fusion.name}{passes}"
            monkeypatch.setitem(conditions.PREDICTED.fusions, name, (1.05, ()))
            assert "1.05x" in fusion.when(matched[fusion.name], cuda)


def test_rows_and_features_may_pass_32_bits():
    """The row is of 64 bits before anything is multiplied by it."""
    (case,) = [case for case in cases.CASES if case.name == "bias + GELU backward"]
    with recording(90) as launches:
        case.run(**case.inputs({"rows": 1 << 20, "features": 1 << 14}))
    programs = launches[0].grid[0]
    assert programs * 512 * launches[0].constants["STRIP"] == 1 << 34
