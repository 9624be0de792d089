"""Every fusion of the plugin: it is used, and gives what the separate ops give."""

from __future__ import annotations

import copy
import dataclasses
import subprocess
import sys
from collections.abc import Callable

import opfuse_linear.fused
import opfuse_linear.kernels
import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import opfuse
from opfuse import ops
from opfuse.quantization import QuantizedTensor

PLUGIN = "opfuse-plugin-linear"
IN, OUT = 8, 12
TOLERANCE = {  # the result of a sum is held against the largest of its kind: rtol, atol
    torch.float64: (1e-7, 1e-7),
    torch.float32: (1e-3, 1e-5),
    torch.float16: (1e-3, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-5),
}
DTYPES = list(TOLERANCE)


class Cubic(ops.Activation):
    """A third party's activation."""

    def value(self, x):
        return x + 0.1 * x**3

    def derivative(self, x):
        return 1 + 0.3 * x**2


@pytest.fixture(autouse=True)
def no_size_is_too_small(monkeypatch):
    monkeypatch.setattr(opfuse_linear.kernels, "MIN_FEATURES", 0)


def gated(function):
    def apply(x):
        a, b = x.chunk(2, -1)
        return function(a) * b

    return apply


def clamped(x):
    a, b = x.chunk(2, -1)
    a = a.clamp(max=7.0)
    return a * torch.sigmoid(1.702 * a) * (b.clamp(-7, 7) + 1)


def gelu(x):
    return F.gelu(x, approximate="tanh")


def qgelu(x):
    return x * torch.sigmoid(1.702 * x)


def srelu(x):
    return torch.relu(x) ** 2


def situ(op):
    def apply(x):
        a, b = x.chunk(2, -1)
        gate = op.beta1 * torch.tanh(a / op.beta1) * torch.sigmoid(a)
        return gate * op.beta2 * torch.tanh(b / op.beta2)

    return apply


ACTIVATIONS = {
    ops.GELU: gelu,
    ops.QGELU: qgelu,
    ops.ReLU: torch.relu,
    ops.SReLU: srelu,
    ops.SiLU: F.silu,
    ops.GLU: gated(torch.sigmoid),
    ops.GEGLU: gated(gelu),
    ops.QGEGLU: gated(qgelu),
    ops.ReGLU: gated(torch.relu),
    ops.SReGLU: gated(srelu),
    ops.SwiGLU: gated(F.silu),
    ops.SiTUGLU: None,
    ops.ClampedSwiGLU: clamped,
    Cubic: lambda x: x + 0.1 * x**3,
}


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

    def inputs(self, shape=(3, IN), dtype=torch.float32, layout="contiguous"):
        generator = torch.Generator().manual_seed(1)
        shapes = [shape, (*shape[:-1], OUT)][: 2 if self.extra else 1]
        return [lay_out(torch.randn(s, generator=generator, dtype=torch.float64).to(dtype), layout) for s in shapes]


def lay_out(x, layout):
    if layout == "strided":
        return torch.stack((x, x), -1)[..., 0]
    if layout == "transposed":
        return x.t().contiguous().t()
    if layout == "expanded":
        return x[:1].expand(x.shape)
    return x


def linear(**kwargs):
    return ops.Linear(IN, OUT, **kwargs)


BACK = "linear+bias+activation"
CASES = {
    "bias": Case(lambda: [linear()], ("linear+bias",), (BACK,)),
    "act": Case(lambda: [linear(), ops.GELU()], (BACK,), (BACK,)),
    "act, no bias": Case(lambda: [linear(bias=False), ops.SiLU()], (BACK,), (BACK,)),
    "gated": Case(lambda: [linear(), ops.SwiGLU()], (BACK,), (BACK,)),
    "bias+add": Case(lambda: [linear(), ops.AddExtraInput()], ("linear+bias+add",), (BACK,), True),
    "add": Case(lambda: [linear(bias=False), ops.AddExtraInput()], ("linear+bias+add",), (BACK,), True),
    "scale+add": Case(
        lambda: [linear(bias=False), ops.ConstantScale(-0.75), ops.AddExtraInput()],
        ("linear+scale+add",),
        ("linear+scale",),
        True,
    ),
    "scale": Case(lambda: [linear(bias=False), ops.ConstantScale(0.3)], (), ("linear+scale",)),
    "fork": Case(lambda: [ops.MakeExtraOutput(), linear()], ("linear+bias",), ("linear+add",)),
    "fork, no bias": Case(lambda: [ops.MakeExtraOutput(), linear(bias=False)], (), ("linear+add",)),
    "act+bias": Case(lambda: [ops.Bias(IN), ops.GELU()], (), ("activation+bias",)),
    "owned": Case(lambda: [linear(), ops.GELU(), ops.Linear(OUT, OUT)], (BACK, "linear+bias"), (BACK, BACK)),
}


@pytest.fixture(autouse=True)
def setting(monkeypatch):
    torch.set_num_threads(1)
    torch._dynamo.reset()
    # a backward fusion that brings nothing on this CPU must give the right numbers all the same
    monkeypatch.setattr(opfuse_linear.fused, "adds_nothing", lambda env: False)
    with opfuse.plugins.using("linear"):
        yield


@pytest.fixture(params=list(CASES))
def case(request):
    return CASES[request.param]


def fused_steps(chain, *inputs):
    """``(forward, backward)``: the names of the plugin's fusions in the plan."""
    report = opfuse.explain(chain, *inputs).to_dict()
    for row in report["forward"] + report["backward"]:
        assert row["distribution"] == (PLUGIN if row["fusion"] else None)
    return tuple(sorted(row["fusion"] for row in report[side] if row["fusion"]) for side in ("forward", "backward"))


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


def differentiate(outputs, wanted):
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    generator = torch.Generator().manual_seed(2)
    grads = [torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.dtype) for y in outputs]
    kept = [g.clone() for g in grads]
    wanted = [t if t.requires_grad else None for t in wanted]
    result = iter(torch.autograd.grad(outputs, [t for t in wanted if t is not None], grads))
    for g, k in zip(grads, kept, strict=True):
        assert torch.equal(g, k), "the incoming gradient was modified"
    return [*[y.detach() for y in outputs], *[None if t is None else next(result) for t in wanted]]


def reference(chain, inputs):
    """The same as :func:`run` in fp64, from torch functions and autograd."""
    inputs = [x.detach().double().requires_grad_() for x in inputs]
    params = {id(p): p.detach().double().requires_grad_(p.requires_grad) for p in chain.parameters()}
    y, *extras = inputs
    more = []
    for op in chain[0]._own_fuser()._routing.ops if len(chain) == 1 else basic_ops(chain):
        if isinstance(op, ops.BasicLinear):
            y = y @ params[id(op.weight)].T
        elif isinstance(op, ops.Bias):
            y = y + params[id(op.bias)]
        elif isinstance(op, ops.ConstantScale):
            y = op.scale * y
        elif isinstance(op, ops.AddExtraInput):
            y = y + extras.pop()
        elif isinstance(op, ops.MakeExtraOutput):
            more.append(y * 1)
        else:
            function = situ(op) if type(op) is ops.SiTUGLU else ACTIVATIONS[type(op)]
            y = function(y)
    return differentiate((y, *more), [*inputs, *params.values()])


def basic_ops(chain):
    return [basic for op in chain for basic in (op.basic_ops if isinstance(op, opfuse.FusedOperation) else [op])]


def check(got, expected, dtype, roundings=1):
    rtol, atol = TOLERANCE[dtype]
    rtol *= roundings
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None and a.numel():
            largest = b.abs().max().item()
            torch.testing.assert_close(a.double(), b.double(), rtol=0, atol=atol + rtol * largest)


def check_case(case, dtype=torch.float32, shape=(3, IN), layout="contiguous", prepare=lambda chain: None):
    chain, inputs = case.chain(dtype), case.inputs(shape, dtype, layout)
    prepare(chain)
    kept = [x.clone() for x in inputs]
    params = list(chain.parameters())
    fused = run(chain, params, inputs)
    roundings = 2 if dtype is torch.float16 else 1  # each op of a chain rounds its result
    check(fused, run(chain, params, inputs, ""), dtype, roundings)
    check(fused, reference(chain, inputs), dtype, roundings)
    for x, k in zip(inputs, kept, strict=True):
        assert torch.equal(x, k), "an input was modified"
    return chain, inputs


# Numbers


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(case, dtype):
    chain, inputs = check_case(case, dtype)
    check_plan(case, chain, [x.requires_grad_() for x in inputs])


@pytest.mark.parametrize("shape", [(IN,), (1, IN), (127, IN), (2, 3, IN), (2, 1, 3, IN), (0, IN), (2, 0, IN)], ids=str)
def test_shapes(case, shape):
    check_case(case, shape=shape)


@pytest.mark.parametrize("layout", ["strided", "transposed", "expanded"])
def test_layouts(case, layout):
    check_case(case, layout=layout, shape=(5, IN))
    if layout != "transposed":
        check_case(case, layout=layout, shape=(2, 5, IN))


@pytest.mark.parametrize("size", [(0, 4), (4, 0)], ids=str)
@pytest.mark.parametrize("shape", [(3,), (2, 3)], ids=str)
def test_sizes_of_zero(size, shape):
    chain = opfuse.Sequential(ops.Linear(*size), ops.GELU())
    x = torch.randn(*shape, size[0])
    params = list(chain.parameters())
    check(run(chain, params, [x]), run(chain, params, [x], ""), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_activations(act, bias, dtype):
    case = Case(lambda: [linear(bias=bias), act()], (BACK,), (BACK,))
    chain, inputs = check_case(case, dtype)
    check_plan(case, chain, [x.requires_grad_() for x in inputs])


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_activations_after_a_bias_alone(act):
    case = Case(lambda: [ops.Bias(IN), act()], (), ("activation+bias",))
    chain, inputs = check_case(case)
    check_plan(case, chain, [x.requires_grad_() for x in inputs])


def test_gradcheck(case):
    chain, inputs = case.chain(torch.float64), case.inputs(dtype=torch.float64)
    inputs = [x.requires_grad_() for x in inputs]
    check_plan(case, chain, inputs)
    params = list(chain.parameters())
    assert torch.autograd.gradcheck(lambda *_: chain(*inputs), (*inputs, *params))


def test_a_scale_that_changes_is_followed():
    case = CASES["scale+add"]
    chain, inputs = check_case(case)
    chain[1].scale = 2.5
    check(run(chain, list(chain.parameters()), inputs), reference(chain, inputs), torch.float32)


# What needs a gradient


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_frozen_parameters(case, name):
    def freeze(chain):
        for full, param in chain.named_parameters():
            if full.endswith(name):
                param.requires_grad_(False)

    check_case(case, prepare=freeze)


@pytest.mark.parametrize("wants", ["weight", "bias", "extra"])
def test_only_one_gradient(case, wants):
    chain, inputs = case.chain(), case.inputs()
    for name, param in chain.named_parameters():
        param.requires_grad_(name.endswith(wants))
    results = []
    for selection in ("linear", ""):
        params = [p for p in chain.parameters() if p.requires_grad]
        given = [x.clone() for x in inputs]
        if wants == "extra" and case.extra:
            params.append(given[1].requires_grad_())
        if not params:
            return
        with opfuse.plugins.using(selection):
            outputs = chain(*given)
        y = outputs[0] if isinstance(outputs, tuple) else outputs
        results.append([y.detach(), *torch.autograd.grad(y.square().sum(), params)])
    check(*results, torch.float32)


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


def test_an_unused_extra_output():
    chain, (x,) = CASES["fork"].chain(), CASES["fork"].inputs()
    x.requires_grad_()
    y, _ = chain(x)
    (got,) = torch.autograd.grad(y.sum(), x)
    check([got], [chain[1].weight.sum(0).detach().expand(3, IN)], torch.float32)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(case, mode):
    chain = case.chain()
    inputs = case.inputs((64, IN))
    with mode():
        forward, backward = fused_steps(chain, *inputs)
        assert forward == sorted(case.forward) and not backward
        fused = chain(*inputs)
        with opfuse.plugins.using(""):
            separate = chain(*inputs)
    fused, separate = [y if isinstance(y, tuple) else (y,) for y in (fused, separate)]
    check(fused, separate, torch.float32)
    assert not any(y.requires_grad for y in fused)


def under_autocast(fn):
    def call(*inputs):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return fn(*inputs)

    return call


def test_autocast(case):
    chain = case.chain()
    x, *extras = case.inputs()
    inputs = [x, *[extra.bfloat16() for extra in extras]]
    params = list(chain.parameters())
    autocast = under_autocast(chain)
    check_plan(case, autocast, [t.clone().requires_grad_() for t in inputs])
    fused, separate = run(autocast, params, inputs), run(autocast, params, inputs, "")
    assert [t.dtype for t in fused] == [t.dtype for t in separate]
    check(fused, separate, torch.bfloat16)
    check(fused, reference(chain, inputs), torch.bfloat16)


@pytest.mark.parametrize("name", ["bias+add", "add", "scale+add"])
def test_autocast_with_a_wider_residual(name):
    chain, inputs = CASES[name].chain(), CASES[name].inputs()
    autocast = under_autocast(chain)
    with torch.no_grad():
        fused = autocast(*inputs)
        with opfuse.plugins.using(""):
            separate = autocast(*inputs)
    assert fused.dtype is separate.dtype is torch.float32
    check([fused], [separate], torch.bfloat16)
    check(run(autocast, list(chain.parameters()), inputs), reference(chain, inputs), torch.bfloat16)


# What is saved for the backward


def saved_by(case, selection, freeze=""):
    """Every saved tensor: shape, dtype, strides, value, and which of inputs and parameters it is."""
    chain, inputs = case.chain(), case.inputs()
    for name, param in chain.named_parameters():
        param.requires_grad_(not freeze or not name.endswith(freeze))
    inputs = [x.requires_grad_() for x in inputs]
    known = {t.data_ptr(): i for i, t in enumerate([*inputs, *chain.parameters()])}
    saved = []
    with opfuse.plugins.using(selection):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            outputs = chain(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    known |= {y.data_ptr(): f"output {i}" for i, y in enumerate(outputs) if y.data_ptr() not in known}
    return [(t.shape, t.dtype, t.stride(), known.get(t.data_ptr())) for t in saved], [t.detach() for t in saved]


@pytest.mark.parametrize("freeze", ["", "weight", "bias"])
def test_the_same_tensors_are_saved(case, freeze):
    fused, values = saved_by(case, "linear", freeze)
    separate, expected = saved_by(case, "", freeze)
    assert fused == separate
    check(values, expected, torch.float32)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("needs", [True, False])
@pytest.mark.parametrize("name", ["bias", "act", "gated", "bias+add", "scale+add"])
def test_contexts_are_left_as_by_the_basic_ops(name, needs, autocast):
    basic = basic_ops(CASES[name].chain())
    x, *extras = CASES[name].inputs()
    (fusion,) = [f for f in opfuse_linear.fused.FORWARD if f.name in CASES[name].forward and f.match(basic, 0)]
    op = fusion.build(tuple(basic))

    def contexts():
        made = []
        for part in basic:
            ctx = opfuse.OperationContext()
            ctx.requires_grad = ctx.input_requires_grad = needs
            ctx.params = tuple(p.detach() for p in part.parameters()) or tuple(
                getattr(part, p).detach() for p in part.param_names
            )
            ctx.param_requires_grad = (needs,) * len(ctx.params)
            ctx.dtype = autocast
            made.append(ctx)
        return made

    no_quantizers = {"prev_op_grad_output_quantizer": None, "next_op_input_quantizer": None}
    together, alone = contexts(), contexts()
    extra_inputs = [()] * (len(basic) - len(extras)) + [(e,) for e in extras]
    no_kwargs = [{}] * len(basic)
    with torch.no_grad():
        y, outputs = op.fuser_forward(
            together, x, basic_op_extra_inputs=extra_inputs, basic_op_kwargs=no_kwargs, **no_quantizers
        )
        z = x
        for ctx, part, extra in zip(alone, basic, extra_inputs, strict=True):
            z, _ = part.fuser_forward([ctx], z, basic_op_extra_inputs=[extra], basic_op_kwargs=[{}], **no_quantizers)
    assert [len(out) for out in outputs] == [0] * len(basic)
    assert y.dtype is z.dtype
    check([y], [z], autocast or torch.float32)
    for ctx, other, part in zip(together, alone, basic, strict=True):
        assert vars(ctx).keys() == vars(other).keys()
        assert (ctx.to_save is None) == (other.to_save is None)
        if ctx.to_save is not None:
            assert len(ctx.to_save) == len(other.to_save) == len(part.saved_names)
            assert [None if t is None else t.dtype for t in ctx.to_save] == [
                None if t is None else t.dtype for t in other.to_save
            ]
            check(ctx.to_save, other.to_save, autocast or torch.float32)


# Memory that belongs to others


@pytest.mark.parametrize("owns", [True, False])
@pytest.mark.parametrize("act", [ops.GELU, ops.SiLU, ops.ReLU, Cubic, ops.SwiGLU])
def test_a_gradient_is_overwritten_only_if_the_chain_owns_it(act, owns):
    for basic in ([ops.Bias(OUT), act()], [ops.BasicLinear(IN, OUT), ops.Bias(OUT), act()]):
        (fusion,) = [f for f in opfuse_linear.fused.BACKWARD if f.match(basic, 0)[-1:] == [len(basic)]]
        op = fusion.build(tuple(basic))
        ctxs = [opfuse.OperationContext() for _ in basic]
        hidden = torch.randn(3, OUT)
        saved = [(torch.randn(3, IN), basic[0].weight.detach())] if len(basic) == 3 else []
        for ctx, tensors in zip(ctxs, [*saved, (), (hidden,)], strict=True):
            ctx.saved_tensors, ctx.owns_grad_output, ctx.param_requires_grad = tensors, owns, (True,)
        dy = torch.randn(3, OUT // (2 if act is ops.SwiGLU else 1))
        kept, kept_hidden = dy.clone(), hidden.clone()
        with torch.no_grad():
            dx, grads, _ = op.fuser_backward(ctxs, dy, basic_op_grad_extra_outputs=[()] * len(basic))
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
        dy = torch.randn(3, OUT)
        kept = dy.clone()
        dx, ((dw,), _), _ = op.fuser_backward(ctxs, dy, basic_op_grad_extra_outputs=[(), ()])
        check([dx, dw], [kept @ basic[0].weight.detach() / 2, kept.T @ ctxs[0].saved_tensors[0] / 2], torch.float32)
        assert torch.equal(dy, kept) != owns


@pytest.mark.parametrize("middle", [[], [ops.ConstantScale(2.0)]], ids=["plain", "scaled"])
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_adding_in_place(middle, compute):
    chain = opfuse.Sequential(linear(bias=not middle), *middle, ops.AddExtraInput(in_place=True))
    x, extra = torch.randn(3, IN), torch.randn(3, OUT, dtype=compute)
    results = []
    for selection in ("linear", ""):
        given = extra.clone()
        with opfuse.plugins.using(selection):
            y = (under_autocast(chain) if compute is torch.bfloat16 else chain)(x, given)
        assert y.data_ptr() == given.data_ptr()
        results.append([y.detach(), *torch.autograd.grad(y.float().sum(), list(chain.parameters()))])
    check(*results, compute)
    leaf = torch.zeros(3, OUT, requires_grad=True)
    with pytest.raises(RuntimeError, match="must not write into it"):
        chain(x, leaf)


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
    assert backward == ["activation+bias", "linear+add", BACK]
    params = list(chain.parameters())
    check(run(chain, params, [x]), run(chain, params, [x], ""), torch.float32)
    assert torch.equal(x, kept)


def test_an_extra_input_of_another_shape_is_refused():
    chain = CASES["bias+add"].chain()
    for selection in ("linear", ""):
        with opfuse.plugins.using(selection), pytest.raises(ValueError, match=r"expected an extra input of shape"):
            chain(torch.randn(3, IN), torch.randn(1, OUT))


# Around the chain


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(case, dynamic):
    chain, inputs = case.chain(), case.inputs((4, IN))
    params = list(chain.parameters())
    compiled = torch.compile(chain, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    check(run(compiled, params, inputs), run(chain, params, inputs, ""), torch.float32)


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
    for rows in (3, 5, 2100, 4):  # 2100 rows are enough for oneDNN, which is not asked while tracing
        x = torch.randn(rows, IN)
        check([compiled(x).detach()], [chain(x).detach()], torch.float32)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


def test_export(case):
    chain, inputs = case.chain(), case.inputs()
    program = torch.export.export(chain.eval(), tuple(inputs))
    outputs = [y if isinstance(y, tuple) else (y,) for y in (program.module()(*inputs), chain(*inputs))]
    check(*[[y.detach() for y in part] for part in outputs], torch.float32)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint(case, reentrant):
    chain, inputs = case.chain(), case.inputs()
    params = list(chain.parameters())
    results = []
    for fn in (lambda *xs: checkpoint(chain, *xs, use_reentrant=reentrant), chain):
        xs = [x.clone().requires_grad_() for x in inputs]
        outputs = fn(*xs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        sum(y.square().sum() for y in outputs).backward()
        results.append([t.grad for t in (*xs, *params)])
        for param in params:
            param.grad = None
    check(*results, torch.float32)


def test_deepcopy(case):
    chain, inputs = case.chain(), case.inputs()
    before = run(chain, list(chain.parameters()), inputs)
    twin = copy.deepcopy(chain)
    for param in twin.parameters():
        param.data += 1
    check(run(chain, list(chain.parameters()), inputs), before, torch.float64)
    check(run(twin, list(twin.parameters()), inputs), reference(twin, inputs), torch.float32)
    check_plan(case, twin, [x.requires_grad_() for x in inputs])


# Conditions


def test_where_nothing_is_gained_the_ops_run_one_by_one(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(opfuse_linear.kernels, "MIN_FEATURES", 0)
    for faster in (True, False):
        monkeypatch.setattr(opfuse_linear.kernels, "onednn_is_faster", lambda faster=faster: faster)
        for dtype in DTYPES:
            chain = CASES["bias"].chain(dtype)
            report = opfuse.explain(chain, torch.randn(3, IN, dtype=dtype))
            used = faster and dtype is torch.float32
            assert [row["fusion"] for row in report.to_dict()["backward"]] == ([BACK] if used else [None, None])
            assert ("it would do what the ops do one by one" in str(report)) != used
            gelu = CASES["act"].chain(dtype)
            back = BACK if used else "activation+bias"
            assert fused_steps(gelu, torch.randn(3, IN, dtype=dtype)) == ([BACK], [back])


def test_on_another_device_nothing_is_declined(monkeypatch):
    monkeypatch.undo()
    chain = CASES["owned"].chain(torch.bfloat16).to("meta")
    x = torch.randn(3, IN, dtype=torch.bfloat16, device="meta", requires_grad=True)
    assert fused_steps(chain, x) == (sorted(CASES["owned"].forward), [BACK, BACK])


@dataclasses.dataclass(frozen=True)
class Grid(opfuse.Recipe):
    """Round to multiples of a step."""

    step: float = 0.25


class GridQuantizer(opfuse.Quantizer):
    def __init__(self, recipe):
        self.step = recipe.step

    def quantize(self, tensor):
        return QuantizedTensor((tensor / self.step).round(), torch.tensor([self.step]), self, tensor.dtype)

    def dequantize(self, quantized):
        return quantized.data * quantized.scale


class GridPlugin:
    @opfuse.hookimpl
    def opfuse_recipes(self):
        return {"grid": Grid}

    @opfuse.hookimpl
    def opfuse_quantizer(self, recipe, role):
        return GridQuantizer(recipe) if isinstance(recipe, Grid) else None


@pytest.fixture
def grid():
    record = opfuse.plugins.register(GridPlugin(), name="grid", distribution="opfuse-plugin-grid")
    yield lambda: opfuse.autocast(recipe=Grid())
    opfuse.plugins.remove(record)


@pytest.mark.parametrize("override", [None, "high_precision", "dequantized"])
def test_under_a_recipe(case, grid, override):
    chain, inputs = case.chain(), case.inputs()
    params = list(chain.parameters())
    recipe = Grid(backward_override=override)

    def quantized(*inputs):
        with opfuse.autocast(recipe=recipe):
            return chain(*inputs)

    with opfuse.plugins.using("linear,grid"):
        report = opfuse.explain(quantized, *[x.clone().requires_grad_() for x in inputs])
    rows = report.to_dict()["backward"]
    linears = [row for row in rows if "BasicLinear" in row["basic_ops"]]
    assert all(row["fusion"] is None for row in linears)
    if linears:
        assert "Grid quantizes the linear, and this fusion multiplies plain tensors" in str(report)
    named = [op for row in rows for op in row["basic_ops"]]
    if {"Bias", "GELU"} <= set(named) or {"Bias", "SwiGLU"} <= set(named):
        assert "activation+bias" in [row["fusion"] for row in rows]
    check(run(quantized, params, inputs, "linear,grid"), run(quantized, params, inputs, "grid"), torch.float32)


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
