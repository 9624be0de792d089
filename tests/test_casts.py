"""Casts between ops: where they stand, which patterns match them, who owns them."""

from __future__ import annotations

import pytest
import torch
from rounding import Rounding, RoundingQuantizer, round_to, rounding  # noqa: F401

import opfuse
from opfuse import ops
from opfuse.core.quantization import QuantizedActivation, QuantizedTensor, Usage
from opfuse.testing.running import OneByOne

CAST = "Cast[RoundingQuantizer]"


@pytest.fixture
def register():
    """Registers fusions for one test."""
    handles = []

    def register(passes, *fusions):
        function = getattr(opfuse, f"register_{passes}_fusion")
        handles.extend(function(fusion) for fusion in fusions)

    yield register
    for handle in handles:
        handle.unregister()


class Seen(OneByOne):
    """The same, and keeps what it is given."""

    seen: list

    def fuser_forward(self, basic_op_ctxs, input_, **given):
        self.seen.append((basic_op_ctxs, input_, given))
        return super().fuser_forward(basic_op_ctxs, input_, **given)

    def fuser_backward(self, basic_op_ctxs, grad_output, **given):
        self.seen.append((basic_op_ctxs, grad_output, given))
        return super().fuser_backward(basic_op_ctxs, grad_output, **given)


def mlp(width=8):
    torch.manual_seed(0)
    chain = opfuse.Sequential(ops.Linear(width, width), ops.GELU(), ops.Linear(width, width))
    return chain, torch.randn(4, width, requires_grad=True)


def run(chain, x, recipe=None, weight=None):
    """Output and gradients under a recipe."""
    with opfuse.autocast(recipe or Rounding()):
        y = chain(x)
    torch.manual_seed(1)
    params = [p for p in chain.parameters() if p.requires_grad]
    leaves = [*([x] if x.requires_grad else []), *params]
    return [y, *torch.autograd.grad(y, leaves, torch.randn_like(y) if weight is None else weight)]


def plan(chain):
    return chain._module_groups[0]._last[1].plan


def parts(chain, which="forward"):
    return [" + ".join(step.parts) for step in getattr(plan(chain), which)]


def same(one, other):
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a, b)


def test_casts_are_put_in_front_of_each_product():
    chain, x = mlp()
    run(chain, x)
    linear = [CAST, "BasicLinear", "Bias"]
    assert parts(chain) == [*linear, "GELU", *linear]
    assert parts(chain, "backward") == [
        *["Bias", CAST, "BasicLinear", "GELU", "Bias", CAST, "BasicLinear"]
    ]


USAGES = {
    (True, True, True): ([(True, True)] * 2, [(True, True)] * 2),
    (False, True, True): ([(True, True)] * 2, [(True, True), (False, True)]),
    (True, False, True): ([(True, False), (True, True)], [(True, True), (True, False)]),
    (True, True, False): ([(True, True), (True, False)], [(True, False), (True, True)]),
    (False, False, True): ([(True, False), (True, True)], [(False, True)]),
    (False, False, False): ([(True, False)] * 2, []),
}


@pytest.mark.parametrize("wanted", USAGES)
def test_usages_follow_from_the_gradients_that_are_needed(wanted, monkeypatch):
    seen = []
    plain = RoundingQuantizer.quantize

    def quantize(self, tensor, usage, out=None):
        seen.append((self.role.tensor_type, tuple(usage)))
        return plain(self, tensor, usage, out)

    monkeypatch.setattr(RoundingQuantizer, "quantize", quantize)
    chain = opfuse.Sequential(ops.Linear(4, 4, bias=False), ops.Linear(4, 4, bias=False))
    x = torch.randn(3, 4, requires_grad=wanted[0])
    for linear, needs in zip(chain, wanted[1:], strict=True):
        linear.weight.requires_grad_(needs)
    with opfuse.autocast(Rounding()):
        y = chain(x)
    if y.requires_grad:
        y.sum().backward()
    inputs, gradients = USAGES[wanted]
    assert [usage for kind, usage in seen if kind == "input"] == inputs
    assert [usage for kind, usage in seen if kind == "grad_output"] == gradients
    weights = [usage for kind, usage in seen if kind == "weight"]
    assert weights == [(True, wanted[0]), (True, wanted[0] or wanted[1])]


def test_dequantized_backward_asks_for_the_rowwise_copy_alone():
    chain, x = mlp()
    run(chain, x, Rounding(backward_override="dequantized"))
    edges = chain._module_groups[0]._last[1].forward
    assert [step.op.usage for step in edges if step.casts] == [Usage(True, False)] * 2


FORWARD = {
    "(GELU, Cast)": (ops.GELU, ops.Cast),
    "(Cast,)": (ops.Cast,),
    "(Cast, BasicLinear)": (ops.Cast, ops.BasicLinear),
    "(BasicLinear, Bias, GELU, Cast)": (ops.BasicLinear, ops.Bias, ops.GELU, ops.Cast),
    "across": (ops.GELU, ops.Cast, ops.BasicLinear, ops.Bias),
    "optional": (ops.GELU, opfuse.Optional(ops.Cast), ops.BasicLinear),
}


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("name", FORWARD)
def test_forward_patterns_with_casts(name, debug, register):
    chain, x = mlp()
    expected = run(chain, x)
    register("forward", opfuse.Fusion(FORWARD[name], OneByOne, name="with casts"))
    with opfuse.options(debug=debug):
        same(run(chain, x), expected)
    fused = [step for step in plan(chain).forward if step.fusion]
    assert fused and any("Cast" in " + ".join(step.parts) for step in fused)
    forward = chain._module_groups[0]._last[1].forward
    assert [index for step in forward for index in range(step.start, step.stop)] == [*range(5)]


def test_what_has_extra_tensors_may_end_in_a_cast(register):
    chain = opfuse.Sequential(
        ops.MakeExtraOutput(), ops.AddExtraInput(), ops.GELU(), ops.Linear(4, 4)
    )
    x, extra = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)

    def both():
        with opfuse.autocast(Rounding()):
            outputs = chain(x, extra)
        return [*outputs, *torch.autograd.grad(outputs[1].sum(), [x, extra], allow_unused=True)]

    expected = both()
    pattern = (ops.MakeExtraOutput, ops.AddExtraInput, ops.GELU, ops.Cast)
    register("forward", opfuse.Fusion(pattern, OneByOne))
    got = both()
    assert any(step.fusion for step in plan(chain).forward)
    same(got[:3], expected[:3])
    assert got[3] is expected[3] is None


BACKWARD = {
    "(Cast, Bias, GELU)": (ops.Cast, ops.Bias, ops.GELU),
    "(Cast,)": (ops.Cast,),
    "(BasicLinear, Cast)": (ops.BasicLinear, ops.Cast),
    "(BasicLinear, Cast, Bias)": (ops.BasicLinear, ops.Cast, ops.Bias),
}


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("name", BACKWARD)
def test_backward_patterns_with_casts(name, debug, register):
    chain, x = mlp()
    expected = run(chain, x)
    register("backward", opfuse.Fusion(BACKWARD[name], OneByOne, name="with casts"))
    with opfuse.options(debug=debug):
        same(run(chain, x), expected)
    assert any(step.fusion and step.casts for step in plan(chain).backward)


def test_what_a_fused_cast_is_given(register):
    seen = []

    class Watching(Seen):
        pass

    Watching.seen = seen
    register("forward", opfuse.Fusion((ops.GELU, ops.Cast), Watching))
    chain, x = mlp()
    run(chain, x)
    ((ctxs, _, given),) = seen
    assert len(ctxs) == 2 and given["basic_op_extra_inputs"] == [(), ()]
    assert isinstance(ctxs[1].quantizer, RoundingQuantizer) and ctxs[1].usage == (True, True)
    assert given["next_op_input_quantizer"] is ctxs[1].quantizer
    step = next(step for step in plan(chain).forward if step.fusion)
    assert (step.start, step.basic_ops, step.casts) == (2, ("GELU",), ((3, "RoundingQuantizer"),))


def test_what_stands_before_a_fused_cast_is_not_asked_to_quantize(register):
    class Ported(ops.Identity):
        def op_forward(self, ctx, input_, prev_op_grad_output_quantizer, next_op_input_quantizer):
            assert next_op_input_quantizer is None
            return input_

    register("forward", opfuse.Fusion((ops.Cast, ops.BasicLinear), OneByOne))
    chain = opfuse.Sequential(Ported(), ops.Linear(4, 4))
    with opfuse.autocast(Rounding()):
        chain(torch.randn(2, 4))
    assert "OneByOne" in [step.op for step in plan(chain).forward]


def test_tensors_for_a_cast_are_refused(register):
    class Wrong(OneByOne):
        def fuser_forward(self, basic_op_ctxs, input_, **given):
            y, _ = super().fuser_forward(basic_op_ctxs, input_, **given)
            return y, [(), (input_,)]

    register("forward", opfuse.Fusion((ops.GELU, ops.Cast), Wrong))
    chain, x = mlp()
    with pytest.raises(RuntimeError, match="Wrong: fuser_forward gave tensors for a Cast"):
        run(chain, x)


def test_tensors_saved_for_a_cast_are_refused(register):
    class Wrong(OneByOne):
        def fuser_forward(self, basic_op_ctxs, input_, **given):
            basic_op_ctxs[1].save_for_backward(input_)
            return super().fuser_forward(basic_op_ctxs, input_, **given)

    register("forward", opfuse.Fusion((ops.GELU, ops.Cast), Wrong))
    chain, x = mlp()
    with pytest.raises(RuntimeError, match="save_for_backward of a Cast, which saves nothing"):
        run(chain, x)


def test_the_context_of_a_cast_serves_later_calls_and_takes_no_attributes(register):
    class Writes(OneByOne):
        seen, leaves = [], False

        def fuser_forward(self, basic_op_ctxs, input_, **given):
            self.seen.append(basic_op_ctxs[1])
            if self.leaves:
                basic_op_ctxs[1].other = input_
            return super().fuser_forward(basic_op_ctxs, input_, **given)

    register("forward", opfuse.Fusion((ops.GELU, ops.Cast), Writes))
    chain, x = mlp()
    run(chain, x), run(chain, x)
    first, second = Writes.seen
    assert first is second
    Writes.leaves = True
    with pytest.raises(AttributeError, match="other"):
        run(chain, x)


@pytest.mark.parametrize("passes", ["forward", "backward"])
def test_a_fused_cast_that_is_forgotten_is_refused(passes, register):
    class Forgets(OneByOne):
        def fuser_forward(self, basic_op_ctxs, input_, **given):
            y, extras = super().fuser_forward(basic_op_ctxs, input_, **given)
            return y.dequantize(), extras

        def fuser_backward(self, basic_op_ctxs, grad_output, **given):
            dx, *others = super().fuser_backward(basic_op_ctxs, grad_output, **given)
            return (dx.dequantize(), *others)

    pattern = (ops.GELU, ops.Cast) if passes == "forward" else (ops.Cast, ops.Bias, ops.GELU)
    register(passes, opfuse.Fusion(pattern, Forgets))
    chain, x = mlp()
    with pytest.raises(
        TypeError, match="Forgets: .* since it ends with a Cast; got a plain tensor"
    ):
        run(chain, x)


SPANNING = (ops.GELU, ops.BasicLinear)
DOES_NOT = ", and this fusion does not cast there"


@pytest.mark.parametrize("passes", ["forward", "backward", "forward_backward"])
def test_what_spans_a_cast_is_refused_with_a_sentence(passes, register):
    pattern = (ops.BasicLinear, ops.Bias) if passes == "backward" else SPANNING
    register(passes, opfuse.Fusion(pattern, OneByOne, name="spanning"))
    chain, x = mlp()
    expected = [*map(torch.clone, run(chain, x))]
    reasons = [refusal.reason for refusal in plan(chain).refused]
    wanted = {
        "forward": [f"the input of op 3 is cast by RoundingQuantizer{DOES_NOT}"],
        "backward": [
            f"the gradient of the output of op {op} is cast by RoundingQuantizer{DOES_NOT}"
            for op in (0, 3)
        ],
    }
    assert reasons == wanted[passes if passes == "backward" else "forward"]
    assert not any(step.fusion for step in plan(chain).forward)
    same(run(chain, x), expected)


@pytest.mark.parametrize("passes", ["forward", "backward", "forward_backward"])
def test_a_fusion_that_does_its_casts_itself(passes, register):
    pattern = (ops.BasicLinear, ops.Bias) if passes == "backward" else SPANNING
    chain, x = mlp()
    expected = run(chain, x)
    register(passes, opfuse.Fusion(pattern, OneByOne, declares=("casts",), name="spanning"))
    same(run(chain, x), expected)
    assert any(step.fusion for step in (*plan(chain).forward, *plan(chain).backward))


@pytest.mark.parametrize("casts", [False, True])
def test_a_fusion_function_over_casts(casts, register):
    class Fused(OneByOne):
        pass

    Fused.casts = casts

    def function(chain, *, recipe=None):
        return [*chain[:2], Fused(chain[2:4]), *chain[4:]]

    chain, x = mlp()
    expected = run(chain, x)
    register("forward", function)
    same(run(chain, x), expected)
    assert any(step.fusion for step in plan(chain).forward) == casts
    if not casts:
        (refusal,) = plan(chain).refused
        assert "the input of op 3 is cast" in refusal.reason


def test_a_joint_pattern_that_names_casts(register):
    register("forward_backward", opfuse.Fusion((ops.GELU, ops.Cast), OneByOne, name="wrong"))
    chain, x = mlp()
    with pytest.warns(opfuse.PluginWarning, match="its pattern must not name Cast"):
        run(chain, x)
    with pytest.raises(
        ValueError, match="where it declares casts, its pattern is of the ops alone"
    ):
        opfuse.Fusion((ops.GELU, ops.Cast), OneByOne, declares=("casts",))


def test_a_cast_is_matched_by_its_name_alone(register):
    """A pattern of any pointwise op does not mean casts."""
    register("forward", opfuse.Fusion((opfuse.Subclasses(opfuse.BasicOperation),) * 2, OneByOne))
    chain = opfuse.Sequential(ops.Identity(), ops.Linear(4, 4, bias=False))
    with opfuse.autocast(Rounding()):
        chain(torch.randn(2, 4))
    assert parts(chain) == ["Identity", CAST, "BasicLinear"]


def test_without_a_recipe_a_pattern_with_casts_matches_nothing(register):
    register("forward", opfuse.Fusion((ops.GELU, ops.Cast), OneByOne))
    chain, x = mlp()
    chain(x)
    assert parts(chain) == ["BasicLinear", "Bias", "GELU", "BasicLinear", "Bias"]


def test_ends_of_the_chain():
    """Whatever is cast at an end leaves the chain quantized, and nothing else does."""
    chain = opfuse.Sequential(ops.Quantize(True, True), ops.Identity())
    last = opfuse.Sequential(ops.Identity(), ops.Quantize(True, True))
    kinds = torch.Tensor, QuantizedActivation
    for each, given in ((chain, kinds), (last, kinds[::-1])):
        x = torch.randn(3, 4, requires_grad=True)
        y, dx = run(each, x, weight=(weight := torch.randn(3, 4)))
        assert (type(y), type(dx)) == given
        torch.testing.assert_close(y, round_to(x))
        torch.testing.assert_close(dx, round_to(weight))


def test_quantize_before_an_op_that_quantizes_leaves_it_to_that_op():
    torch.manual_seed(0)
    linear = ops.Linear(4, 4, bias=False)
    chain = opfuse.Sequential(ops.Quantize(True), linear, ops.Quantize(False, True))
    x = torch.randn(3, 4, requires_grad=True)
    got = run(chain, x)
    assert parts(chain) == ["Quantize", CAST, "BasicLinear", "Quantize"]
    assert parts(chain, "backward") == ["Quantize", CAST, "BasicLinear", "Quantize"]
    same(got, run(opfuse.Sequential(linear), x))


@pytest.mark.parametrize("passes", ["forward", "backward", "forward_backward"])
def test_ops_one_by_one_read_no_codes_that_quantize_passes_on(register, passes):
    """They do not take them, in a fused op either."""
    chain = opfuse.Sequential(ops.Quantize(), ops.GELU(), ops.GELU(), ops.Quantize(False, True))
    x = torch.randn(3, 4, requires_grad=True)
    expected = run(chain, x)
    register(passes, opfuse.Fusion([type(op) for op in chain], OneByOne))
    same(run(chain, x), expected)
    which = "backward" if passes == "backward" else "forward"
    assert "Quantize + GELU + GELU + Quantize" in parts(chain, which)


def test_what_somebody_else_quantized_is_refused():
    class Own(ops.Identity):
        saved_names = None

        def op_forward(self, ctx, input_):
            other = RoundingQuantizer(Rounding(), opfuse.QuantizerRole())
            return other.quantize(input_, Usage(True, True))

    chain = opfuse.Sequential(Own(), ops.Linear(4, 4))
    with opfuse.autocast(Rounding()), pytest.raises(TypeError, match="starts from the unquantized"):
        chain(torch.randn(2, 4))
    with opfuse.autocast(Rounding()):
        y = opfuse.Sequential(Own(), ops.GELU())(torch.ones(2, 4))  # made plain for others
    torch.testing.assert_close(y, torch.nn.functional.gelu(torch.ones(2, 4), approximate="tanh"))


def test_a_cast_is_not_for_chains_of_users():
    cast = ops.Cast(RoundingQuantizer(Rounding(), opfuse.QuantizerRole()), Usage())
    with pytest.raises(TypeError, match="only the engine puts a Cast into a chain"):
        opfuse.Sequential(cast)(torch.ones(2))


def test_saved_tensors_are_the_quantized_ones_and_own_their_scales():
    chain, x = mlp()
    with opfuse.autocast(Rounding(levels=8)):
        y = chain(x)
    tensors = [t for t in y.grad_fn.saved_tensors if t is not None]
    quantizers = [
        q
        for linear in (chain[0], chain[2])
        for q in linear.basic_ops[0]._quantizers.of(Rounding(levels=8)).values()
    ]
    state = {getattr(q, name).data_ptr() for q in quantizers for name in q.state_names}
    assert state.isdisjoint(t.data_ptr() for t in tensors)
    before = torch.autograd.grad(y.sum(), x, retain_graph=True)
    for quantizer in quantizers:
        quantizer.amax.fill_(100)
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert not torch.equal(dx, before[0])  # the gradient's scale is that of the backward
    # x, the weight twice: columnwise data alone, and a scale each; the plain input of GELU
    assert sorted(t.numel() for t in tensors) == [1] * 4 + [32] * 3 + [64] * 2


class Recomputing(OneByOne):
    recomputes = True

    def fuser_forward(self, basic_op_ctxs, input_, **given):
        y, extras = super().fuser_forward(basic_op_ctxs, input_, **given)
        if basic_op_ctxs[0].may_recompute:
            basic_op_ctxs[0].recomputable_output = y
        return y, extras

    def fuser_recompute(self, basic_op_ctxs):
        (x,) = basic_op_ctxs[-1 if len(self.basic_ops) == len(basic_op_ctxs) else 0].saved_tensors
        return torch.nn.functional.gelu(x, approximate="tanh")


class RecomputingCast(Recomputing):
    def fuser_recompute(self, basic_op_ctxs):
        gelu, cast = basic_op_ctxs
        (scales,) = cast.saved_tensors
        y = torch.nn.functional.gelu(gelu.saved_tensors[0], approximate="tanh")
        return cast.quantizer.requantize(y, scales, cast.usage)


@pytest.mark.parametrize("levels", [0, 8])
@pytest.mark.parametrize(
    "pattern, op",
    [((ops.GELU,), Recomputing), ((ops.GELU, ops.Cast), RecomputingCast)],
    ids=["cast by itself", "cast in the fusion"],
)
def test_an_input_that_is_cast_is_computed_again(pattern, op, levels, register):
    recipe = Rounding(levels=levels)
    results = []
    for fused in (False, True):
        if fused:
            register("forward", opfuse.Fusion(pattern, op, benefit=1))
        chain, x = mlp()
        for _ in range(2):
            with opfuse.autocast(recipe):
                y = chain(x)
            tensors = [t for t in y.grad_fn.saved_tensors if t is not None]
            results.append(sum(t.numel() for t in tensors))
            y.square().sum().backward()
        quantizers = chain[2].basic_ops[0]._quantizers.of(recipe).values()
        state = [float(q.amax) for q in quantizers]
        results.append(([x.grad, *[p.grad for p in chain.parameters()]], state))
    (kept, _, (grads, state)), (less, _, (again, other)) = results[:3], results[3:]
    assert less == kept - 32 and state == other  # what GELU gave is not kept, nor cast and counted
    same(grads, again)


def test_a_quantizer_that_cannot_cast_again_keeps_the_input_and_says_so(register, monkeypatch):
    monkeypatch.setattr(RoundingQuantizer, "requantize", opfuse.Quantizer.requantize)
    register("forward", opfuse.Fusion((ops.GELU,), Recomputing, benefit=1))
    chain, x = mlp()
    run(chain, x, Rounding(levels=8))
    notes = [step.note for step in plan(chain).backward if step.note]
    assert notes == [
        "its input is not computed again: RoundingQuantizer cannot cast it again with the scale of "
        "the forward"
    ]


def test_precedence_and_benefit_hold_for_casts(register):
    """An avoided cast counts: (GELU, Cast) saves 2, and a larger fusion over it wins."""
    register(
        "forward",
        opfuse.Fusion((ops.GELU, ops.Cast), OneByOne, name="small"),
        opfuse.Fusion((ops.Bias, ops.GELU, ops.Cast), OneByOne, name="large"),
    )
    chain, x = mlp()
    run(chain, x)
    assert [step.fusion for step in plan(chain).forward if step.fusion] == ["large"]
    (refusal,) = plan(chain).refused
    assert refusal.basic_ops == ("GELU", "Cast")
    assert "saves 4 tensor reads and writes against 2" in refusal.reason


def test_a_backward_that_begins_late_goes_through_a_fused_cast(register):
    """No gradient comes to the main output: the ops of a fused step run one by one, casts too."""
    torch.manual_seed(0)
    chain = opfuse.Sequential(
        ops.Linear(4, 4, bias=False), ops.Bias(4), ops.MakeExtraOutput(), ops.GELU()
    )
    x = torch.randn(3, 4, requires_grad=True)

    def grads():
        with opfuse.autocast(Rounding()):
            _, extra = chain(x)
        return torch.autograd.grad(extra.square().sum(), [x, *chain.parameters()])

    expected = grads()
    pattern = (ops.Cast, ops.Bias, ops.MakeExtraOutput, ops.GELU)
    register("backward", opfuse.Fusion(pattern, OneByOne))
    same(grads(), expected)
    assert any(step.fusion for step in plan(chain).backward)


def test_a_backward_that_begins_late_records_nothing_behind_what_a_gradient_reaches(register):
    """The shape is known behind the fused linear only: zeros go through its cast, and count nowhere."""
    register("forward", opfuse.Fusion((ops.MakeExtraOutput, ops.Cast, ops.BasicLinear), OneByOne))
    torch.manual_seed(0)
    linears = [ops.BasicLinear(4, 4), ops.BasicLinear(4, 4)]
    chain = opfuse.Sequential(linears[0], ops.MakeExtraOutput(), linears[1])
    recipe, x = Rounding(levels=8), torch.randn(3, 4, requires_grad=True)
    with opfuse.autocast(recipe):
        y, extra = chain(x)
    extra.sum().backward(retain_graph=True)
    assert any(step.fusion for step in plan(chain).forward) and linears[1].weight.grad is None
    quantizers = [linear._quantizers.of(recipe)["grad_output"] for linear in linears]
    assert [quantizer.updates.item() for quantizer in quantizers] == [1, 0]
    y.sum().backward()
    assert quantizers[1].updates.item() == 1


def test_torch_compile_with_a_fused_cast(register):
    register("forward", opfuse.Fusion((ops.GELU, ops.Cast), OneByOne))
    register("backward", opfuse.Fusion((ops.Cast, ops.Bias, ops.GELU), OneByOne))
    chain, x = mlp()
    expected = run(chain, x)
    compiled = torch.compile(chain, fullgraph=True, backend="aot_eager")
    with opfuse.autocast(Rounding()):
        y = compiled(x)
    torch.manual_seed(1)
    got = [y, *torch.autograd.grad(y, [x, *chain.parameters()], torch.randn_like(y))]
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_explain_shows_casts(register):
    register("forward", opfuse.Fusion((ops.GELU, ops.Cast), OneByOne, name="gelu and cast"))
    chain, x = mlp()

    def step(x):
        with opfuse.autocast(Rounding()):
            return chain(x)

    report = opfuse.explain(step, x)
    assert f"GELU + {CAST}" in str(report) and "gelu and cast" in str(report)
    rows = report.to_dict()["forward"]
    assert [row["casts"] for row in rows if row["fusion"]] == [[[3, "RoundingQuantizer"]]]


def test_quantized_tensors_pass_a_cut(register):
    chain, x = mlp()
    expected = run(chain, x)
    seen = []
    chain[1].register_forward_hook(lambda module, args, out: seen.append(type(out)))
    same(run(chain, x), expected)
    assert seen == [torch.Tensor] and not issubclass(seen[0], QuantizedTensor)


def test_a_fusion_that_needs_a_recipe_is_not_looked_for_without(register):
    asked = []

    def when(ops, env):
        asked.append(env.recipe)
        return "not here" if env.recipe.step == 1.0 else True

    register("forward", opfuse.Fusion((ops.GELU,), OneByOne, when, needs=("recipe",)))
    chain, x = opfuse.Sequential(ops.GELU()), torch.randn(3, 4)
    assert not opfuse.explain(chain, x).to_dict()["refused"] and not asked
    with opfuse.autocast(Rounding(step=1.0)):
        (refusal,) = opfuse.explain(chain, x).to_dict()["refused"]
    assert refusal["reason"] == "not here"
    with opfuse.autocast(Rounding()):
        (row,) = opfuse.explain(chain, x).to_dict()["forward"]
    assert row["op"] == "OneByOne" and asked == [Rounding(step=1.0), Rounding()]
