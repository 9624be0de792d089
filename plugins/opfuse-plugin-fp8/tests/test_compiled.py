"""The twins that PyTorch compiles on a CPU: codes, state, where they run, and that ``opfuse tune`` asks for them."""

import functools
import sys
import threading
import warnings

import opfuse_fp8 as fp8
import pytest
import torch
from opfuse_fp8 import compiled, conditions, twins
from opfuse_fp8.twins import Into
from tuned import tables_in

import opfuse
from opfuse import ops
from opfuse.core.quantization import BOTH, COLUMNWISE
from opfuse.testing.machine import is_interpreting
from opfuse.tuning import trial
from opfuse.tuning.timing import Timing
from opfuse.tuning.tolerance import code_steps

pytestmark = [
    pytest.mark.skipif(is_interpreting(), reason="Triton's interpreter runs the kernels instead"),
    # torch's own, of what Inductor imports
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
compiles = pytest.mark.skipif(bool(conditions.no_compiler()), reason=conditions.no_compiler())

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
QUANTIZERS = {
    "delayed": fp8.DelayedQuantizer,
    "current": fp8.CurrentQuantizer,
    "1 x 128": lambda dtype: fp8.BlockQuantizer(dtype, (1, 128)),
    "128 x 128": lambda dtype: fp8.BlockQuantizer(dtype, (128, 128)),
    "MX": fp8.MXQuantizer,
}


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Nothing is compiled yet."""
    monkeypatch.setattr(compiled, "_functions", {})
    torch._dynamo.reset()


@pytest.fixture
def traced(monkeypatch):
    """Traced, and then run by PyTorch: for what is not about compiled code."""
    count = []

    def backend(graph, inputs):
        count.append(graph)
        return graph

    make = functools.partial(torch.compile, fullgraph=True, dynamic=False, backend=backend)
    monkeypatch.setattr(compiled, "compile_exactly", make)
    return count


def quantizer_of(form, dtype=E4M3):
    quantizer = QUANTIZERS[form](dtype)
    if form == "delayed":
        quantizer.scale.fill_(37.3)
    return quantizer


def drawn(dtype, *shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def assert_same(got, expected, exact=False):
    """Codes at most one step off, in at most one of a thousand; scales almost the same."""
    assert (type(got), got.shape, got.dtype) == (type(expected), expected.shape, expected.dtype)
    count = total = 0
    for name, mine, other in zip(got.tensor_names, got.tensors(), expected.tensors(), strict=True):
        assert (mine is None) == (other is None), name
        if mine is None:
            continue
        assert (mine.shape, mine.dtype, mine.stride()) == (other.shape, other.dtype, other.stride())
        if name not in got.data_names:
            torch.testing.assert_close(mine.float(), other.float(), rtol=1e-6, atol=0)
            continue
        nan = mine.float().isnan()
        assert torch.equal(nan, other.float().isnan())
        steps = code_steps(mine, other)[~nan]
        assert steps.max() <= 1
        count, total = count + int((steps > 0).sum()), total + steps.numel()
    assert count <= (0 if exact else max(1, 1e-3 * total)), f"{count} of {total} codes differ"


def assert_state(one, other):
    for name in one.state_names:
        torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=1e-6, atol=0)


# Codes


DTYPES = [torch.bfloat16, torch.float32, torch.bfloat16, torch.float32, torch.bfloat16]
CASES = list(zip(QUANTIZERS, DTYPES, strict=True))
"""Each with the dtype of the forward; the backward has the other one."""


def rows_of(form):
    """How many rows come first, and then; others take odd numbers of them."""
    return (96, 160) if form == "MX" else (131, 201)


@pytest.mark.costly(1)
@compiles
@pytest.mark.parametrize(("form", "dtype"), CASES, ids=str)
def test_the_compiled_activation_and_cast_match_the_twin(form, dtype):
    """Of a GELU or, gated, a SwiGLU; more rows come later, and what is not finite."""
    op = ops.SwiGLU() if form in ("current", "MX") else ops.GELU()
    for rows in rows_of(form):
        x, bias = drawn(dtype, (rows, 128 * op.feature_ratio), (128 * op.feature_ratio,))
        one, other = quantizer_of(form), quantizer_of(form)
        made, kept = compiled.activation(op, x, bias, dtype, True, Into(one, BOTH))
        expected, hidden = twins.activation(op, x, bias, dtype, True, Into(other, BOTH))
        assert_same(made, expected)
        assert_state(one, other)
        assert torch.equal(kept, hidden)
        x[3, 5], x[4, 7], x[5, 100] = torch.inf, -torch.inf, torch.nan
        got = compiled.activation(op, x, bias, dtype, True, Into(one, BOTH))[0]
        assert_same(got, twins.activation(op, x, bias, dtype, True, Into(other, BOTH))[0])
    (function,) = compiled._functions.values()
    assert not function.failed


@pytest.mark.costly(1)
@compiles
@pytest.mark.parametrize(("form", "dtype"), CASES, ids=str)
def test_the_compiled_gradient_and_cast_match_the_twin(form, dtype):
    """Of a SwiGLU, whose factors are rounded one by one in bf16, or of a GELU; with its sums."""
    dtype = torch.float32 if dtype is torch.bfloat16 else torch.bfloat16
    op = ops.SwiGLU() if form == "current" else ops.GELU()
    for rows in rows_of(form):
        x, dy = drawn(dtype, (rows, 128 * op.feature_ratio), (rows, 128))
        one, other = quantizer_of(form, E5M2), quantizer_of(form, E5M2)
        given = op, op.numbers_of(), dy, x, True
        made, sums = compiled.gradient(*given, Into(one, BOTH))
        expected, right = twins.gradient(*given, Into(other, BOTH))
        assert_same(made, expected)
        assert_state(one, other)
        assert sums.dtype is right.dtype
        torch.testing.assert_close(sums.float(), right.float(), rtol=0.02, atol=0.05)
    (function,) = compiled._functions.values()
    assert not function.failed


@pytest.mark.costly(1)
@compiles
@pytest.mark.parametrize("kind", [ops.RMSNorm, ops.LayerNorm])
def test_the_compiled_norm_and_cast_match_the_separate_ops(kind):
    op = kind(192, zero_centered_gamma=True)
    x, extra, weight, bias = drawn(torch.bfloat16, (67, 192), (67, 192), (192,), (192,))
    bias = bias if kind is ops.LayerNorm else None
    one, other = quantizer_of("delayed"), quantizer_of("delayed")
    made = compiled.norm(op, (x, extra, weight, bias), None, True, True, Into(one, BOTH))
    ctx = opfuse.OperationContext()
    ctx.params = (weight,) if bias is None else (weight, bias)
    ctx.param_requires_grad = (True,) * len(ctx.params)
    separate = other.quantize(op.op_forward(ctx, x + extra), BOTH)
    assert_same(made.output, separate)
    assert_state(one, other)
    assert torch.equal(made.total, x + extra)
    for got, right in zip((made.mean, made.rstd)[-len(ctx.to_save) + 2 :], ctx.to_save[2:]):  # noqa: B905
        torch.testing.assert_close(got, right)


# State, and where it runs


@pytest.mark.parametrize("form", ["delayed", "current"])
def test_a_repeated_cast_uses_the_first_scale(form, traced):
    """It has the scale of then, and records nothing."""
    (x,) = drawn(torch.bfloat16, (64, 128))
    quantizer, op = quantizer_of(form), ops.GELU()
    first, _ = compiled.activation(op, x, None, x.dtype, False, Into(quantizer, BOTH))
    if form == "delayed":
        quantizer.discard()
        quantizer.scale.fill_(2.0)
    again, _ = compiled.activation(op, x, None, x.dtype, False, Into(quantizer, BOTH, first))
    assert_same(again, first, exact=True)
    assert all((getattr(quantizer, name) == -1).all() for name in quantizer.pending_names)
    assert len(traced) == 1


def test_equal_ops_share_what_is_compiled(traced):
    """Other numbers, copies and dtypes have code of their own, as many as there are; rows do not."""
    quantizer = quantizer_of("delayed")
    for rows in (2, 3, 40, 41, 1000, 7):
        (x,) = drawn(torch.bfloat16, (rows, 64))
        for op in (ops.GELU(), ops.GELU()):
            compiled.activation(op, x, None, x.dtype, False, Into(quantizer, BOTH))
    assert len(traced) == 1
    acts = [functools.partial(ops.SiTUGLU, beta1=1.0 + n, beta2=2.0)() for n in range(9)]
    for op in (*acts, *acts):
        made, _ = compiled.activation(op, x, None, x.dtype, False, Into(quantizer, BOTH))
        assert_same(made, twins.activation(op, x, None, x.dtype, False, Into(quantizer, BOTH))[0])
    assert len(traced) == 1 + len(acts)
    acts[0].beta1 = 30.0
    compiled.activation(acts[0], x, None, x.dtype, False, Into(quantizer, BOTH))
    numbers = (("beta1", 1.0), ("beta2", 2.0))
    (dy,) = drawn(torch.bfloat16, (7, 32))
    got = compiled.gradient(acts[0], numbers, dy, x, False, Into(quantizer, BOTH))[0]
    then = ops.SiTUGLU(beta1=1.0, beta2=2.0)
    assert_same(got, twins.gradient(then, numbers, dy, x, False, Into(quantizer, BOTH))[0])
    assert len(traced) == 3 + len(acts)


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(
    "mode",
    [
        torch.no_grad,
        torch.inference_mode,
        functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16),
        functools.partial(torch.set_grad_enabled, True),
    ],
    ids=["no_grad", "inference_mode", "autocast", "grad mode"],
)
def test_compiled_casts_work_in_each_grad_mode_and_thread(mode):
    """Also of tensors that come from there, and in another thread."""
    one, other, made = quantizer_of("delayed"), quantizer_of("delayed"), []
    (x,) = drawn(torch.bfloat16, (64, 128))

    def call():
        with mode():
            given = x.clone().requires_grad_(mode is not torch.inference_mode)
            given = given * 1
            made.append(compiled.cast(given, Into(one, BOTH)))

    with warnings.catch_warnings():
        warnings.simplefilter("error", opfuse.PluginWarning)
        compiled.cast(x, Into(one, COLUMNWISE))
        call()
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
    expected = other(x, BOTH)
    assert len(made) == 2
    for got in made:
        assert_same(got, expected, exact=True)
        assert not any(t.requires_grad for t in got.tensors() if t is not None)
    assert_state(one, other)


def test_what_does_not_compile_runs_uncompiled(monkeypatch):
    """With one warning, and with what it records recorded once."""

    def backend(graph, inputs):
        raise RuntimeError("no compiler today")

    make = functools.partial(torch.compile, fullgraph=True, dynamic=False, backend=backend)
    monkeypatch.setattr(compiled, "compile_exactly", make)
    (x,) = drawn(torch.bfloat16, (64, 128))
    one, other, op = quantizer_of("delayed"), quantizer_of("delayed"), ops.GELU()
    with pytest.warns(opfuse.PluginWarning, match="cannot compile GELU with a cast.*no compiler"):
        made, _ = compiled.activation(op, x, None, x.dtype, False, Into(one, BOTH))
    again, _ = compiled.activation(
        op, x, None, x.dtype, False, Into(one, BOTH)
    )  # a second is an error
    expected, _ = twins.activation(op, x, None, x.dtype, False, Into(other, BOTH))
    assert_same(made, expected, exact=True)
    assert_same(again, expected, exact=True)
    assert_state(one, other)


def test_what_it_leaves_to_the_twins(traced):
    """One row, nothing, what is no matrix, subclasses, and errors."""
    quantizer = quantizer_of("current")
    for shape in ((1, 64), (64,), (0, 64), (64, 0), ()):
        (x,) = drawn(torch.bfloat16, shape)
        assert_same(compiled.cast(x, Into(quantizer, BOTH)), quantizer(x, BOTH), exact=True) if (
            x.numel()
        ) else compiled.cast(x, Into(quantizer, BOTH))
    (x,) = drawn(torch.bfloat16, (4, 130))
    quantizer = quantizer_of("1 x 128")
    assert_same(compiled.cast(x, Into(quantizer, BOTH)), quantizer(x, BOTH), exact=True)
    with pytest.raises(ValueError, match="multiple of 32 rows"):
        compiled.cast(torch.randn(33, 64), Into(quantizer_of("MX"), BOTH))
    with pytest.raises(ValueError, match="multiple of 2 features"):
        compiled.activation(
            ops.SwiGLU(), torch.randn(4, 7), None, torch.float32, False, Into(quantizer, BOTH)
        )
    assert not traced
    for tensor in (
        torch.randn(64, 96).t(),
        torch.randn(1, 96).expand(64, 96),
        torch.randn(2, 3, 8),
    ):
        assert_same(
            compiled.cast(tensor, Into(quantizer, BOTH)), quantizer(tensor, BOTH), exact=True
        )


# Plans


def chain(norm=True):
    torch.manual_seed(0)
    first = [ops.RMSNorm(64)] if norm else []
    return opfuse.Sequential(*first, ops.Linear(64, 128), ops.GELU(), ops.Linear(128, 64)).to(
        torch.bfloat16
    )


def planned(model, x, recipe):
    with opfuse.autocast(recipe):
        report = opfuse.explain(model, x)
    data = report.to_dict()
    steps = [step["fusion"] for name in ("forward", "backward") for step in data[name]]
    return {*filter(None, steps)}, {row["reason"] for row in data["refused"]}


@pytest.fixture
def table(monkeypatch, tmp_path):
    """A folder for tables, and a clock by which every candidate is twice as fast."""
    monkeypatch.setattr(trial, "compare", lambda *given, **more: Timing(2.0, 0.01, 2e-3, 1e-3))
    with tables_in(tmp_path), opfuse.plugins.using("fp8"):
        yield


CASTS = {"norm+cast", "activation+cast", "cast+activation", "cast+bias"}


@compiles
@pytest.mark.usefixtures("table")
@pytest.mark.parametrize("recipe", ["fp8-delayed", "fp8-current"])
def test_what_tune_measured_is_planned(recipe, traced):
    """And gives what the separate ops give, over steps; without a table nothing is fused."""
    x = drawn(torch.bfloat16, (64, 64))[0].requires_grad_()
    unmeasured, why = planned(chain(), x, recipe)
    assert not unmeasured
    assert any("this is cpu: opfuse tune measures compiled code here" in reason for reason in why)
    assert not traced
    with opfuse.autocast(recipe):
        report = opfuse.tune(chain(), x)
    assert CASTS <= {result.fusion for result in report.results} and not report.wrong
    taken, _ = planned(chain(), x, recipe)
    assert taken >= CASTS
    made = len(traced)
    got, state = trained(chain(), x, recipe)
    assert made and len(traced) <= made + 4  # what is found in the table was compiled already
    with opfuse.options(fusion_limit=0):
        expected, right = trained(chain(), x, recipe)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.05)
    for name, value in state.items():
        # of gradients it follows from what was rounded to bf16 before
        torch.testing.assert_close(value, right[name], rtol=5e-2, atol=0)


def trained(model, x, recipe, steps=3):
    """What some steps give: outputs, gradients, and the state of quantizers."""
    leaf, results = x.detach().clone().requires_grad_(), []
    for _ in range(steps):
        with opfuse.autocast(recipe):
            y = model(leaf)
        y.square().mean().backward()
        results.append(y.detach())
    grads = [leaf.grad, *(p.grad for p in model.parameters())]
    return results + grads, {k: v for k, v in model.state_dict().items() if "quantizers" in k}


@compiles
@pytest.mark.usefixtures("table")
def test_what_is_slower_is_not_planned(monkeypatch, traced):
    monkeypatch.setattr(trial, "compare", lambda *given, **more: Timing(0.8, 0.01, 1e-3, 1.2e-3))
    x = torch.randn(64, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        with opfuse.autocast("fp8-current"):
            opfuse.tune(chain(norm=False), x)
        taken, why = planned(chain(norm=False), x, "fp8-current")
    assert not taken and any("measured" in reason for reason in why)
    assert traced


class Drawing(ops.GELU):
    """Says nothing of whether it is deterministic."""

    def value(self, x):
        return super().value(x)


class Holding(ops.GELU):
    """Holds more than numbers."""

    deterministic = True

    def __init__(self):
        super().__init__()
        self.table = [1.0, 2.0]


def env(**given):
    facts = {"device": torch.device("cpu"), "capability": None, "dtype": torch.bfloat16}
    return opfuse.Environment(**{**facts, "measured": 2.0, **given})


@compiles
def test_where_they_are_compiled(monkeypatch):
    quantizer = quantizer_of("current")
    assert conditions.runs(quantizer, env()) is True
    assert conditions.runs(quantizer, env(), ops.SwiGLU()) is True
    assert "opfuse tune" in conditions.runs(quantizer, env(measured=None))
    assert "compiles" not in conditions.runs(quantizer, env(device=torch.device("meta")))
    assert "graphs" in conditions.runs(quantizer, env(compiling=True))
    assert "float64" in conditions.runs(quantizer, env(dtype=torch.float64))
    assert "deterministic" in conditions.runs(quantizer, env(), Drawing())
    assert "more attributes" in conditions.runs(quantizer, env(), Holding())
    with monkeypatch.context() as patch:  # nothing is interpreted where Triton is missing
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setitem(sys.modules, "triton", None)
        assert conditions.runs(quantizer, env()) is True
    monkeypatch.setenv("CXX", "no-such-compiler -O3")
    assert "'no-such-compiler' is not found" in conditions.runs(quantizer, env())
