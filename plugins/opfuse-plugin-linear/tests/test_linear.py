"""What the conformance suite does not see: which fusions a chain gets, work in place, and around the chain."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable

import opfuse_linear.conditions
import opfuse_linear.fused
import opfuse_linear.kernels
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import opfuse
from opfuse import ops
from opfuse.ops import libraries
from opfuse.testing import CubicActivation, recipes, tolerance
from opfuse.testing.machine import is_interpreting

pytestmark = pytest.mark.skipif(
    is_interpreting(), reason="TRITON_INTERPRET is set, so that Triton products are in the plans"
)
PLUGIN = "opfuse-plugin-linear"
IN, OUT = 8, 12
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def setting(monkeypatch):
    torch.set_num_threads(1)
    torch._dynamo.reset()
    monkeypatch.setattr(opfuse_linear.kernels, "MIN_FEATURES", 0)
    # a backward fusion that brings nothing on this CPU must give the right numbers all the same
    monkeypatch.setattr(opfuse_linear.conditions, "adds_nothing", lambda env: False)
    with opfuse.plugins.using("linear"):
        yield


@dataclasses.dataclass(frozen=True)
class Case:
    """A chain, and the fusions that must cover it."""

    make: Callable[[], list]
    forward: tuple[str, ...] = ()
    backward: tuple[str, ...] = ()
    extra: bool = False

    def chain(self, dtype=torch.float32):
        torch.manual_seed(0)
        chain = opfuse.Sequential(*self.make()).to(dtype)
        for op in chain.modules():
            if isinstance(op, ops.Bias):
                torch.nn.init.uniform_(op.bias)
        return chain

    def inputs(self, shape=(3, IN), dtype=torch.float32):
        generator = torch.Generator().manual_seed(1)
        shapes = [shape, (*shape[:-1], OUT)][: 2 if self.extra else 1]
        return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]


def linear(**kwargs):
    return ops.Linear(IN, OUT, **kwargs)


def parallel():
    return ops.ParallelLinear([ops.Linear(IN, OUT - 4), ops.BasicLinear(IN, 4)])


BACK, SIDES = "linear+bias+activation", "parallel linear+activation"
CASES = {
    "bias": Case(lambda: [linear()], ("linear+bias",), (BACK,)),
    "act": Case(lambda: [linear(), ops.GELU()], (BACK,), (BACK,)),
    "act, no bias": Case(lambda: [linear(bias=False), ops.SiLU()], (BACK,), (BACK,)),
    "gated": Case(lambda: [linear(), ops.SwiGLU()], (BACK,), (BACK,)),
    "bias+add": Case(lambda: [linear(), ops.AddExtraInput()], ("linear+bias+add",), (BACK,), True),
    "add": Case(
        lambda: [linear(bias=False), ops.AddExtraInput()], ("linear+bias+add",), (BACK,), True
    ),
    "scale+add": Case(
        lambda: [linear(bias=False), ops.ConstantScale(-0.75), ops.AddExtraInput()],
        ("linear+scale+add",),
        ("linear+scale",),
        True,
    ),
    "scale": Case(
        lambda: [linear(bias=False), ops.ConstantScale(0.3)], ("linear",), ("linear+scale",)
    ),
    "side by side": Case(lambda: [parallel()], ("parallel linear",), (SIDES,)),
    "side by side, act": Case(lambda: [parallel(), ops.GELU()], (SIDES,), (SIDES,)),
    "side by side, gated": Case(lambda: [parallel(), ops.SwiGLU()], (SIDES,), (SIDES,)),
    "fork": Case(lambda: [ops.MakeExtraOutput(), linear()], ("linear+bias",), ("linear+add",)),
    "fork, no bias": Case(
        lambda: [ops.MakeExtraOutput(), linear(bias=False)], ("linear",), ("linear+add",)
    ),
    "act+bias": Case(lambda: [ops.Bias(IN), ops.GELU()], (), ("activation+bias",)),
    "owned": Case(
        lambda: [linear(), ops.GELU(), ops.Linear(OUT, OUT)], (BACK, "linear+bias"), (BACK, BACK)
    ),
}


@pytest.fixture(params=list(CASES))
def case(request):
    return CASES[request.param]


def fused_steps(chain, *inputs):
    """``(forward, backward)``: the names of the plugin's fusions in the plan."""
    report = opfuse.explain(chain, *inputs).to_dict()
    for row in report["forward"] + report["backward"]:
        assert row["distribution"] == (PLUGIN if row["fusion"] else None)
    return tuple(
        sorted(row["fusion"] for row in report[side] if row["fusion"])
        for side in ("forward", "backward")
    )


def check_plan(case, chain, inputs):
    forward, backward = fused_steps(chain, *inputs)
    assert forward == sorted(case.forward)
    assert backward == sorted(case.backward)


def run(fn, params, inputs, selection="linear"):
    """Outputs, then gradients of inputs and parameters."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    with opfuse.plugins.using(selection):
        outputs = fn(*inputs)
    return differentiate(outputs, [*inputs, *params])


def incoming(outputs):
    generator = torch.Generator().manual_seed(2)
    return [
        torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.dtype) for y in outputs
    ]


def differentiate(outputs, wanted):
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    grads = incoming(outputs)
    kept = [g.clone() for g in grads]
    wanted = [t if t.requires_grad else None for t in wanted]
    result = iter(torch.autograd.grad(outputs, [t for t in wanted if t is not None], grads))
    for g, k in zip(grads, kept, strict=True):
        assert torch.equal(g, k), "the incoming gradient was modified"
    return [*[y.detach() for y in outputs], *[None if t is None else next(result) for t in wanted]]


def check(got, expected, dtype):
    rtol, atol = tolerance(dtype, gemm=True)
    for a, b in zip(got, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None and a.numel():
            torch.testing.assert_close(
                a.double(), b.double(), rtol=0, atol=atol + rtol * b.abs().max().item()
            )


# Which fusions


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_which_fusions_are_used(case, dtype):
    chain, inputs = case.chain(dtype), case.inputs(dtype=dtype)
    check_plan(case, chain, [x.requires_grad_() for x in inputs])
    with torch.no_grad():
        assert fused_steps(chain, *inputs) == (sorted(case.forward), [])


@pytest.mark.parametrize("name", ["owned", "bias+add", "scale+add", "fork"])
def test_fused_forward_and_backward_match_the_unfused_chain(name):
    case = CASES[name]
    chain, inputs = case.chain(), case.inputs((5, IN))
    params = list(chain.parameters())
    check(run(chain, params, inputs), run(chain, params, inputs, ""), torch.float32)


@pytest.mark.parametrize("size", [(0, 4), (4, 0)], ids=str)
@pytest.mark.parametrize("shape", [(3,), (2, 3)], ids=str)
def test_sizes_of_zero_match_the_unfused_chain(size, shape):
    chain = opfuse.Sequential(ops.Linear(*size), ops.GELU())
    x = torch.randn(*shape, size[0])
    params = list(chain.parameters())
    check(run(chain, params, [x]), run(chain, params, [x], ""), torch.float32)


def test_a_frozen_start_uses_no_backward_fusion_there():
    chain = opfuse.Sequential(linear(), ops.GELU(), ops.Linear(OUT, OUT), ops.GELU())
    for param in chain[0].parameters():
        param.requires_grad_(False)
    x = torch.randn(3, IN)
    report = opfuse.explain(chain, x).to_dict()
    assert [row["fusion"] for row in report["backward"]] == [BACK]
    params = [p for p in chain.parameters() if p.requires_grad]
    fused, separate = [], []
    for selection, grads in (("linear", fused), ("", separate)):
        with opfuse.plugins.using(selection):
            grads += torch.autograd.grad(chain(x).square().sum(), params)
    check(fused, separate, torch.float32)


@pytest.mark.parametrize("autocast", [False, True])
def test_gradients_go_to_main_grad(case, autocast):
    chain, inputs = case.chain(), case.inputs()
    if isinstance(chain[0], ops.ParallelLinear):
        pytest.skip("ParallelLinear refuses accumulate_into_main_grad")
    weights = [op.weight for op in chain.modules() if isinstance(op, ops.BasicLinear)]
    expected = run(under_autocast(chain) if autocast else chain, weights, inputs, "")
    for op in chain.modules():
        # what its constructor does with accumulate_into_main_grad=True
        if isinstance(op, ops.BasicLinear):
            op.accumulates_grads, op.weight.main_grad = (
                True,
                torch.zeros_like(op.weight, dtype=torch.float64),
            )
    inputs = [x.requires_grad_() for x in inputs]
    outputs = (under_autocast(chain) if autocast else chain)(*inputs)
    check_plan(case, chain, inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    torch.autograd.backward(outputs, incoming(outputs))
    assert not any(weight.grad is not None for weight in weights)
    found = [
        *[y.detach() for y in outputs],
        *[x.grad for x in inputs],
        *[weight.main_grad for weight in weights],
    ]
    check(found, expected, torch.bfloat16 if autocast else torch.float32)


# Memory that belongs to others


def under_autocast(fn):
    def call(*inputs):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return fn(*inputs)

    return call


@pytest.mark.parametrize("owns", [True, False])
@pytest.mark.parametrize("act", [ops.GELU, ops.SiLU, ops.ReLU, CubicActivation, ops.SwiGLU])
def test_a_gradient_is_overwritten_only_if_the_chain_owns_it(act, owns):
    for basic in ([ops.Bias(OUT), act()], [ops.BasicLinear(IN, OUT), ops.Bias(OUT), act()]):
        (fusion,) = [
            f for f in opfuse_linear.fused.BACKWARD if f.match(basic, 0)[-1:] == [len(basic)]
        ]
        op = fusion.build(tuple(basic))
        ctxs = [opfuse.OperationContext() for _ in basic]
        hidden = torch.randn(3, OUT)
        saved = [(torch.randn(3, IN), basic[0].weight.detach())] if len(basic) == 3 else []
        for ctx, tensors in zip(ctxs, [*saved, (), (hidden,)], strict=True):
            ctx.saved_tensors, ctx.owns_grad_output, ctx.param_requires_grad = (
                tensors,
                owns,
                (True,),
            )
        dy = torch.randn(3, OUT // (2 if act is ops.SwiGLU else 1))
        kept, kept_hidden = dy.clone(), hidden.clone()
        with torch.no_grad():
            dx, grads, _ = op.fuser_backward(
                ctxs, dy, basic_op_grad_extra_outputs=[()] * len(basic)
            )
            expected = basic[-1].backward_value(kept, hidden)
        check([grads[-2][0]], [expected.sum(0)], torch.float32)
        assert torch.equal(hidden, kept_hidden)
        assert torch.equal(dy, kept) != (owns and act is not ops.SwiGLU)
        assert dx.data_ptr() != kept.data_ptr()


def test_a_scaled_gradient_is_overwritten_only_if_the_chain_owns_it():
    basic = [ops.BasicLinear(IN, OUT), ops.ConstantScale(0.5)]
    op = opfuse_linear.fused.BackwardLinearScale(basic)
    for owns in (True, False):
        ctxs = [opfuse.OperationContext() for _ in basic]
        for ctx in ctxs:
            ctx.owns_grad_output, ctx.saved_tensors = owns, ()
        ctxs[0].saved_tensors = torch.randn(3, IN), basic[0].weight.detach()
        ctxs[1].scale = 0.5
        dy = torch.randn(3, OUT)
        kept = dy.clone()
        dx, ((dw,), _), _ = op.fuser_backward(ctxs, dy, basic_op_grad_extra_outputs=[(), ()])
        check(
            [dx, dw],
            [kept @ basic[0].weight.detach() / 2, kept.T @ ctxs[0].saved_tensors[0] / 2],
            torch.float32,
        )
        assert torch.equal(dy, kept) != owns


@pytest.mark.parametrize("backward", ["linear", ""])
@pytest.mark.parametrize("name", ["scale", "scale+add"])
def test_the_backward_uses_the_scale_of_the_forward(monkeypatch, name, backward):
    if not backward:  # the op's own, behind a forward that is fused
        monkeypatch.setattr(opfuse_linear.conditions, "adds_nothing", lambda env: True)
    chain, inputs = CASES[name].chain(), CASES[name].inputs()
    assert fused_steps(chain, *inputs)[1] == (["linear+scale"] if backward else [])
    inputs, params = [x.requires_grad_() for x in inputs], list(chain.parameters())
    expected = differentiate(chain(*inputs), [*inputs, *params])
    y = chain(*inputs)
    chain[1].scale = 7.0
    check(differentiate(y, [*inputs, *params]), expected, torch.float32)


@pytest.mark.parametrize("middle", [[], [ops.ConstantScale(2.0)]], ids=["plain", "scaled"])
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_adding_in_place_writes_into_the_extra_input(middle, compute):
    chain = opfuse.Sequential(linear(bias=not middle), *middle, ops.AddExtraInput(in_place=True))
    x, extra = torch.randn(3, IN), torch.randn(3, OUT, dtype=compute)
    results = []
    for selection in ("linear", ""):
        given = extra.clone()
        with opfuse.plugins.using(selection):
            y = (under_autocast(chain) if compute is torch.bfloat16 else chain)(x, given)
        assert y.data_ptr() == given.data_ptr()
        results.append(
            [y.detach(), *torch.autograd.grad(y.float().sum(), list(chain.parameters()))]
        )
    check(*results, compute)
    with pytest.raises(RuntimeError, match="must not write into it"):
        chain(x, torch.nn.Parameter(torch.zeros(3, OUT)))


@pytest.mark.parametrize("in_place", [True, False])
def test_an_extra_input_out_of_a_channel(in_place):
    def make():
        torch.manual_seed(0)
        fork, add = ops.MakeExtraOutput(), ops.AddExtraInput(in_place=in_place)
        fork.set_extra_output_channel(0, "residual", output_to_caller=False)
        add.set_extra_input_channel(0, "residual")
        return opfuse.Sequential(fork, ops.Linear(IN, OUT), ops.GELU(), ops.Linear(OUT, IN), add)

    chain, x = make(), torch.randn(3, IN)
    kept = x.clone()
    forward, backward = fused_steps(chain, x.clone().requires_grad_())
    assert forward == [BACK, "linear+bias+add"]
    assert backward == [BACK, BACK]
    params = list(chain.parameters())
    check(run(chain, params, [x]), run(chain, params, [x], ""), torch.float32)
    assert torch.equal(x, kept)


# What may replace an op


class Doubled(ops.SiLU):
    """Another function than its parent's, by its formulas."""

    def value(self, x):
        return 2 * torch.nn.functional.silu(x)

    def derivative(self, x):
        return 2 * super().derivative(x)


class DoubledPasses(ops.GELU):
    """The same by its passes."""

    def op_forward(self, ctx, input_, **unused):
        return 2 * super().op_forward(ctx, input_, **unused)

    def op_backward(self, ctx, grad_output):
        dx, grads = super().op_backward(ctx, grad_output)
        return 2 * dx, grads


class Learned(ops.Activation):
    """It has a parameter."""

    saved_names = ("input", "slope")

    def __init__(self):
        super().__init__()
        self.slope = torch.nn.Parameter(torch.tensor(1.5))

    def value(self, x):
        return x * x * self.slope

    def derivative(self, x):
        return 2 * x * self.slope

    def op_forward(self, ctx, input_, **unused):
        if ctx.requires_grad:
            ctx.save_for_backward(input_, ctx.params[0])
        return input_ * input_ * ctx.params[0]

    def op_backward(self, ctx, grad_output):
        x, slope = ctx.saved_tensors
        return grad_output * 2 * x * slope, ((grad_output * x * x).sum(),)


class OneSided(Learned):
    """It gives the gradient of its parameter, and leaves the forward to its parent."""

    saved_names = ("input",)
    op_forward = ops.Activation.op_forward

    def op_backward(self, ctx, grad_output):
        (x,) = ctx.saved_tensors
        return grad_output * 2 * x * self.slope, ((grad_output * x * x).sum(),)


class Steep(ops.BasicLinear):
    """Another product."""

    def op_forward(self, ctx, input_, **unused):
        return 3 * super().op_forward(ctx, input_, **unused)

    def op_backward(self, ctx, grad_output):
        return super().op_backward(ctx, 3 * grad_output)


def carrying(op):
    """An op of a known class that carries a method of its own."""
    known = op.op_forward
    op.op_forward = lambda *args, **kwargs: -known(*args, **kwargs)
    known_backward = op.op_backward
    op.op_backward = lambda ctx, dy: known_backward(ctx, -dy)
    return op


NOT_COVERED = {
    "passes": (lambda: [linear(), DoubledPasses()], "DoubledPasses overrides op_forward"),
    "parameter": (lambda: [linear(), Learned()], "Learned overrides op_forward"),
    "parameter, backward": (lambda: [linear(), OneSided()], "OneSided overrides op_backward"),
    "instance": (lambda: [linear(), carrying(ops.GELU())], "this GELU has its own op_forward"),
    "linear": (lambda: [Steep(IN, OUT), ops.Bias(OUT), ops.SiLU()], None),
    "instance, linear": (
        lambda: [carrying(ops.BasicLinear(IN, OUT)), ops.Bias(OUT), ops.SiLU()],
        "this BasicLinear has its own op_forward",
    ),
}


@pytest.mark.parametrize("rows", [3, 4096])
@pytest.mark.parametrize("name", NOT_COVERED)
def test_an_op_that_overrides_its_passes_keeps_them(name, rows, monkeypatch):
    monkeypatch.setattr(libraries, "onednn_is_faster", lambda: True)
    make, reason = NOT_COVERED[name]
    chain, x = Case(make).chain(), torch.randn(rows, IN)
    params = list(chain.parameters())
    check(run(chain, params, [x]), run(chain, params, [x], ""), torch.float32)
    with torch.no_grad():
        results = []
        for selection in ("linear", ""):
            with opfuse.plugins.using(selection):
                results.append(chain(x))
        check(results[:1], results[1:], torch.float32)
    assert reason is None or reason in opfuse.explain(chain, x.requires_grad_()).details


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [3, 4096])
def test_a_subclass_with_its_own_formulas_computes_them(rows, dtype, monkeypatch):
    monkeypatch.setattr(libraries, "onednn_is_faster", lambda: True)
    chain, x = Case(lambda: [linear(), Doubled()]).chain(dtype), torch.randn(rows, IN, dtype=dtype)
    params = list(chain.parameters())
    forward, backward = fused_steps(chain, x.clone().requires_grad_())
    assert forward == backward == [BACK]

    def expected(x):
        hidden = torch.nn.functional.linear(x, chain[0].weight, chain[0].bias)
        return 2 * torch.nn.functional.silu(hidden)

    check(run(chain, params, [x]), run(expected, params, [x], ""), dtype)
    with torch.no_grad():
        check([chain(x)], [expected(x)], dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [3, 4096])
def test_both_forms_of_gelu(rows, dtype, monkeypatch):
    monkeypatch.setattr(libraries, "onednn_is_faster", lambda: True)
    for form in ("tanh", "none"):
        chain = Case(lambda form=form: [linear(), ops.GELU(approximate=form)]).chain(dtype)
        x = 3 * torch.randn(rows, IN, dtype=dtype)
        with torch.no_grad():
            hidden = torch.nn.functional.linear(
                x.double(), chain[0].weight.double(), chain[0].bias.double()
            )
            check([chain(x)], [torch.nn.functional.gelu(hidden, approximate=form)], dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [3, 4096])
@pytest.mark.parametrize("name", ["bias", "act", "add", "scale"])
def test_forward_mode_tangents_match_the_unfused_chain(name, rows, dtype, monkeypatch):
    monkeypatch.setattr(libraries, "onednn_is_faster", lambda: True)
    chain, inputs = (
        CASES[name].chain(dtype).requires_grad_(False),
        CASES[name].inputs((rows, IN), dtype),
    )
    found = []
    for selection in ("linear", ""):
        with opfuse.plugins.using(selection), torch.autograd.forward_ad.dual_level():
            duals = [torch.autograd.forward_ad.make_dual(x, x.cos()) for x in inputs]
            found.append(torch.autograd.forward_ad.unpack_dual(chain(*duals)).tangent)
    check(found[:1], found[1:], dtype)
    assert found[0] is not None and found[0].any()


# Around the chain


@pytest.mark.costly(1)
@pytest.mark.parametrize("name", ["owned", "scale+add"])
def test_compile_with_inductor(name):
    chain, inputs = CASES[name].chain(), CASES[name].inputs((4, IN))
    params = list(chain.parameters())
    compiled = torch.compile(chain, fullgraph=True)
    check(run(compiled, params, inputs), run(chain, params, inputs, ""), torch.float32)


def test_compile_over_row_counts_makes_few_graphs():
    torch._dynamo.utils.counters.clear()
    chain = CASES["owned"].chain()
    compiled = torch.compile(chain, fullgraph=True, backend="aot_eager")
    # 2100 rows are enough for oneDNN, which is not asked while tracing
    for rows in (3, 5, 2100, 4):
        x = torch.randn(rows, IN)
        check([compiled(x).detach()], [chain(x).detach()], torch.float32)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


def test_an_exported_chain_gives_the_same_values(case):
    chain, inputs = case.chain(), case.inputs()
    program = torch.export.export(chain.eval(), tuple(inputs))
    outputs = [
        y if isinstance(y, tuple) else (y,) for y in (program.module()(*inputs), chain(*inputs))
    ]
    check(*[[y.detach() for y in part] for part in outputs], torch.float32)


@pytest.mark.parametrize("name", ["owned", "scale+add"])
def test_reentrant_checkpointing_gives_the_same_gradients(name):
    chain, inputs = CASES[name].chain(), CASES[name].inputs()
    results = []
    for fn in (lambda *xs: checkpoint(chain, *xs, use_reentrant=True), chain):
        xs = [x.clone().requires_grad_() for x in inputs]
        chain.zero_grad()
        fn(*xs).square().sum().backward()
        results.append([t.grad for t in (*xs, *chain.parameters())])
    check(*results, torch.float32)


# Conditions


def test_where_nothing_is_gained_the_ops_run_one_by_one(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(opfuse_linear.kernels, "MIN_FEATURES", 0)
    for faster in (True, False):
        monkeypatch.setattr(libraries, "onednn_is_faster", lambda faster=faster: faster)
        for dtype in DTYPES:
            chain = CASES["bias"].chain(dtype)
            report = opfuse.explain(chain, torch.randn(3, IN, dtype=dtype))
            used = faster and dtype is torch.float32
            assert [row["fusion"] for row in report.to_dict()["backward"]] == (
                [BACK] if used else [None, None]
            )
            assert ("it would do what the ops do one by one" in report.details) != used
            gelu = CASES["act"].chain(dtype)
            back = BACK if used else "activation+bias"
            assert fused_steps(gelu, torch.randn(3, IN, dtype=dtype)) == ([BACK], [back])


def test_on_another_device_an_activation_is_left_to_who_compiles_it(monkeypatch):
    monkeypatch.undo()
    chain = CASES["owned"].chain(torch.bfloat16).to("meta")
    x = torch.randn(3, IN, dtype=torch.bfloat16, device="meta", requires_grad=True)
    assert fused_steps(chain, x) == (["linear+bias"] * 2, ["activation+bias"])


@pytest.mark.parametrize("name", ["act", "gated"])
def test_under_a_recipe_the_activation_is_still_fused_with_the_bias(name):
    chain, inputs = CASES[name].chain(), CASES[name].inputs()

    def quantized(*inputs):
        with opfuse.autocast(recipes.PerTensor()):
            return chain(*inputs)

    with recipes.offered():
        with opfuse.plugins.using(f"linear,{recipes.NAME}"):
            report = opfuse.explain(quantized, *[x.clone().requires_grad_() for x in inputs])
        params = list(chain.parameters())
        check(
            run(quantized, params, inputs, f"linear,{recipes.NAME}"),
            run(quantized, params, inputs, recipes.NAME),
            torch.float32,
        )
    assert "activation+bias" in [row["fusion"] for row in report.to_dict()["backward"]]
    assert "PerTensor quantizes the linear, and this fusion multiplies plain tensors" in str(report)


def test_importing_the_plugin_imports_nothing_heavy():
    code = (
        "import sys, opfuse; before = set(sys.modules); import opfuse_linear; new = set(sys.modules) - before; "
        "assert new == {'opfuse_linear'}, new; assert 'triton' not in sys.modules and 'numpy.testing' not in new"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_sparse_inputs_and_weight_subclasses_take_the_default_path():
    class Wrapped(torch.Tensor):
        """A weight with operations of its own."""

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func is not torch.nn.functional.linear:
                return super().__torch_function__(func, types, args, kwargs or {})
            x, weight, *rest = args
            return func(x, weight.as_subclass(torch.Tensor) * 2, *rest, **(kwargs or {}))

    x = torch.eye(256)
    linear = opfuse.ops.BasicLinear(256, 256)
    chain = opfuse.Sequential(linear, opfuse.ops.Bias(256))
    with torch.no_grad():
        torch.testing.assert_close(chain(x.to_sparse()), chain(x))
        plain = chain(x)
        linear.weight = torch.nn.Parameter(linear.weight.detach().as_subclass(Wrapped))
        torch.testing.assert_close(chain(x), 2 * plain)


def test_few_features_are_left_to_the_ops_in_backward(monkeypatch):
    monkeypatch.undo()
    chain = opfuse.Sequential(ops.Linear(16, 16), ops.GELU(), ops.Bias(8 * 2), ops.SiLU())
    data = opfuse.explain(chain, torch.randn(4, 16, requires_grad=True)).to_dict()
    assert not [step["fusion"] for step in data["backward"] if step["fusion"]]
    reasons = {row["reason"] for row in data["refused"] if row["pass"] == "backward"}
    assert "16 features are too few for it to pay on a CPU" in reasons


def mlp(act, widths=(6, 8, 4)):
    torch.manual_seed(0)
    first = widths[1] * act.feature_ratio
    return opfuse.Sequential(ops.Linear(widths[0], first), act, ops.Linear(*widths[1:]))


def test_a_large_activation_is_left_to_others_in_training(monkeypatch):
    chain, x = mlp(ops.GELU(), (8, 128, 8)), torch.randn(4, 8)
    fused = [["linear+bias", "linear+bias+activation"], []]
    # the backward of linear + bias, without the activation
    apart = [["linear+bias", "linear+bias"], [BACK, BACK]]
    monkeypatch.setattr(libraries, "onednn_is_faster", lambda: False)
    with torch.no_grad():
        assert [*fused_steps(chain, x)] == fused
    assert [*fused_steps(chain, x.requires_grad_())] == apart
    params = list(chain.parameters())
    check(run(chain, params, [x]), run(chain, params, [x], ""), torch.float32)
    assert "the backward needs the activation's input" in opfuse.explain(chain, x).details


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "bias"), [(5, True), (600, True), (600, False)])
def test_a_subclass_of_tensor_brings_its_own_addition(dtype, rows, bias):
    from torch.testing._internal.two_tensor import TwoTensor

    chain = opfuse.Sequential(ops.Linear(64, 48, bias=bias, dtype=dtype), ops.AddExtraInput())
    x, extra = torch.randn(rows, 64, dtype=dtype), torch.randn(rows, 48, dtype=dtype)
    with opfuse.plugins.using("linear"), torch.no_grad():
        got, expected = chain(x, TwoTensor(extra, extra.clone())), chain(x, extra)
    assert type(got) is TwoTensor
    torch.testing.assert_close(got.a, expected, rtol=2e-2, atol=2e-2)
    linear = opfuse.Sequential(ops.Linear(64, 48, dtype=dtype))
    linear[0].bias = torch.nn.Parameter(TwoTensor(extra[0], extra[0].clone()), requires_grad=False)
    with opfuse.plugins.using("linear"), torch.no_grad():
        got = linear(x)
    with opfuse.plugins.using(""), torch.no_grad():
        expected = linear(x)
    torch.testing.assert_close(getattr(got, "a", got), expected.a)


GPU = {
    "device": torch.device("cuda"),
    "capability": (9, 0),
    "dtype": torch.bfloat16,
    "requires_grad": False,
}
CHAIN = ops.BasicLinear(IN, OUT), ops.Bias(OUT)


def refusal(name, *chain, **changes):
    """What the forward fusion of a name says of a chain on a GPU, or the backward one."""
    env = opfuse.Environment(torch.device("cpu"), None, torch.float32)._replace(**GPU | changes)
    side = opfuse_linear.fused.BACKWARD if env.requires_grad else opfuse_linear.fused.FORWARD
    return next(fusion.when(chain, env) for fusion in side if fusion.name == name)


def test_on_a_gpu_an_activation_is_fused_where_the_library_has_it():
    assert refusal(BACK, *CHAIN, ops.GELU()) is True
    apart = [
        refusal(BACK, *CHAIN, ops.GELU(), dtype=torch.float32),
        refusal(BACK, *CHAIN, ops.GELU(), compiling=True),
        refusal(BACK, *CHAIN, ops.GELU(approximate="none")),
        refusal(BACK, *CHAIN, ops.SwiGLU()),
        refusal(BACK, *CHAIN[:1], ops.GELU()),
        refusal(BACK, *CHAIN, CubicActivation()),
    ]
    assert [str(reason)[:8] for reason in apart] == ["on a GPU"] * len(apart)


def test_on_a_gpu_a_backward_that_is_the_same_kernels_is_left_to_the_ops(monkeypatch):
    monkeypatch.undo()
    said = refusal(BACK, *CHAIN, requires_grad=True)
    assert said == "on this CUDA, in bfloat16, it would do what the ops do one by one"
    assert refusal("linear+scale", *CHAIN[:1], ops.ConstantScale(2.0), requires_grad=True) is True


@pytest.mark.parametrize("shape", [(3, IN), (IN,), (2, 3, IN), (129, IN)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_product_with_a_gelu_in_its_epilogue(shape, dtype):
    """The call that is made on a GPU. On a CPU the same call takes the other form of GELU, so it is not made there."""
    device, form = ("cuda", "tanh") if torch.cuda.is_available() else ("cpu", "none")
    generator = torch.Generator().manual_seed(0)
    given = [
        torch.randn(s, generator=generator, dtype=torch.float64) for s in (shape, (OUT, IN), (OUT,))
    ]
    x, weight, bias = (t.to(device, dtype) for t in given)
    got = opfuse_linear.kernels.linear_gelu(x, weight, bias)
    product = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    check([got], [torch.nn.functional.gelu(product, approximate=form)], dtype)
    strided = torch.stack([x, x], dim=-1)[..., 0]
    assert torch.equal(opfuse_linear.kernels.linear_gelu(strided, weight, bias), got)


def test_zero_times_nan_is_nan_in_every_product():
    x, weight, addend = torch.full((2, 3), torch.nan), torch.ones(4, 3), torch.ones(2, 4)
    assert opfuse_linear.kernels.linear_add(x, weight, None, addend, 0.0).isnan().all()
    assert opfuse_linear.kernels.linear_dgrad(x, torch.ones(3, 4), 0.0).isnan().all()
