"""State of a recipe: when it advances, what it counts, and which casts of weights are used again."""

from __future__ import annotations

import copy
import gc
import re
import sys
import threading
from collections import Counter
from dataclasses import fields
from typing import ClassVar

import gloo
import pytest
import recipe_ranks
import torch
from fakes import registered
from rounding import Rounding, RoundingPlugin, RoundingQuantizer, rounding  # noqa: F401
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import opfuse
from opfuse import ops
from opfuse.core import engine
from opfuse.core.quantization import ROWWISE
from opfuse.core.quantization.formats import ScaledTensor
from opfuse.core.settings import current

RECIPE = Rounding(levels=8)


def mlp():
    torch.manual_seed(0)
    chain = opfuse.Sequential(ops.Linear(8, 8), ops.GELU(), ops.Linear(8, 8))
    return chain, torch.randn(4, 8, requires_grad=True)


def state(chain, names=("amax", "updates", "seen")):
    """Amax, number of updates, and what is pending, by op and tensor."""
    found = {}
    for index in (0, 2):
        for name, q in chain[index].basic_ops[0]._quantizers.of(RECIPE).items():
            found[index, name] = tuple(getattr(q, each).item() for each in names)
    return found


def updates(chain):
    return [count for (count,) in state(chain, ("updates",)).values()]


def step(chain, x, scale=1.0, **kwargs):
    with opfuse.autocast(RECIPE, **kwargs):
        return chain(x if scale == 1 else scale * x)


@pytest.mark.parametrize("skip", [(), ("skipped",)])
def test_a_chain_that_quantizes_nothing_may_be_in_a_checkpoint(skip):
    """Its recomputation needs neither the recipe nor its scales."""
    linear = [ops.Linear(8, 8, name="skipped")] if skip else []
    chain, x = opfuse.Sequential(ops.RMSNorm(8), *linear, ops.GELU()), torch.randn(4, 8)
    grads = []
    for checkpointed in (False, True):
        leaf = x.clone().requires_grad_()
        with opfuse.autocast(RECIPE, skip=skip):
            y = checkpoint(chain, leaf, use_reentrant=False) if checkpointed else chain(leaf)
        y.sum().backward()
        grads.append(leaf.grad)
    assert torch.equal(*grads)


def test_a_tool_is_asked_once_how_it_wraps_updates():
    """And again after it went and came; both passes of a step advance by what it made."""
    asked, ran = [], []

    class Tool:
        @opfuse.hookimpl
        def opfuse_wrap_update(self, run):
            asked.append(run)
            return lambda update: (ran.append(update.mode), run(update))

    chain, x = mlp()
    for times in (1, 2):
        record = opfuse.plugins.register(Tool(), name="updates", tool=True)
        for _ in range(2):
            step(chain, x).sum().backward()
        opfuse.plugins.remove(record)
        step(chain, x).sum().backward()
        assert len(asked) == times and ran == ["forward", "backward"] * 2 * times
    assert updates(chain) == [6] * 6


def test_what_a_plan_knows_is_not_asked_in_each_step():
    """The Python of a step under a recipe, as counts, which no machine changes."""
    chain, x = mlp()
    counts = Counter()
    for _ in range(3):
        step(chain, x).sum().backward()
    sys.setprofile(
        lambda frame, event, arg: counts.update([frame.f_code.co_name] * (event == "call"))
    )
    try:
        step(chain, x).sum().backward()
    finally:
        sys.setprofile(None)
    assert not counts.keys() & {"use", "of_mode", "quantized_parameters", "param_source", "wrap"}
    assert counts["unpack"] == counts["rebuild"] == 1


def test_state_advances_at_the_exit_of_the_outermost_block():
    chain, x = mlp()
    with opfuse.autocast(RECIPE):
        with opfuse.autocast(RECIPE):
            chain(x)
        assert updates(chain) == [0] * 6
        seen = state(chain, ("seen",))[0, "input"][0]
        assert seen == pytest.approx(x.abs().max().item())
        chain(3 * x)
    after = state(chain)
    assert updates(chain) == [1, 1, 0] * 2  # no gradient has arrived
    assert after[0, "input"][0] == pytest.approx(3 * seen) and after[0, "input"][2] == -1


def test_the_scale_of_a_step_is_that_of_the_steps_before():
    chain, x = mlp()
    first, second = step(chain, x), step(chain, x)
    assert not torch.equal(first, second) and torch.equal(second, step(chain, x))


def test_two_forwards_before_their_backwards():
    """Gradients that arrive in one backward fold into one row, at its end."""
    chain, x = mlp()
    first, second = step(chain, x), step(chain, 3 * x)
    assert updates(chain) == [2, 2, 0] * 2
    (second.sum() + first.mul(5).sum()).backward()
    assert updates(chain) == [2, 2, 1] * 2 and state(chain)[2, "grad_output"][::2] == (5, -1)
    step(chain, x).mul(7).sum().backward()
    assert updates(chain) == [3, 3, 2] * 2 and state(chain)[2, "grad_output"][::2] == (7, -1)


def test_an_evaluation_moves_nothing():
    chain, x = mlp()
    step(chain, x)
    before = state(chain)
    with torch.no_grad():
        step(chain, 100 * x)
    with torch.inference_mode():
        step(chain, 100 * x)
    assert state(chain) == before
    with opfuse.autocast(RECIPE):
        chain(x)
        with torch.no_grad():
            chain(100 * x)
    assert state(chain)[0, "input"][0] == before[0, "input"][0]
    with torch.no_grad():  # it casts with the scale of the training all the same
        evaluated = step(chain, x)
    assert torch.equal(evaluated, step(chain, x))


class AsksItself(ops.Identity):
    """Written for te.ops: it takes its quantizer from get_quantizer, in both passes."""

    saved_names = None

    def num_quantizers(self, mode):
        return 1

    def get_input_quantizer(self):
        return None

    get_grad_output_quantizer = get_input_quantizer

    def op_forward(self, ctx, input_):
        return self.get_quantizer("forward", 0)(input_).dequantize()

    def op_backward(self, ctx, grad_output):
        return self.get_quantizer("backward", 0)(grad_output).dequantize(), ()


def test_an_op_that_asks_for_its_quantizers_records_nothing_in_an_evaluation():
    op, x = AsksItself(), torch.randn(4, 8, requires_grad=True)
    chain = opfuse.Sequential(op, ops.Linear(8, 8))
    with opfuse.autocast(RECIPE):
        y = chain(x)
        with torch.no_grad():
            chain(100 * x)
            y.detach().sum()
        y.sum().backward()  # after an evaluation: a gradient is recorded all the same
    quantizers = op._quantizers.of(RECIPE)
    assert quantizers["input"].amax.item() == pytest.approx(max(1, x.abs().max().item()))
    with torch.no_grad(), opfuse.autocast(RECIPE):
        chain(100 * x)
    assert quantizers["input"].seen.item() == -1 and quantizers["grad_output"].updates.item() == 1


def test_between_calls_an_op_gives_the_quantizers_of_the_last_recipe():
    op, x, other = AsksItself(), torch.randn(4, 8, requires_grad=True), Rounding(levels=4)
    assert op.get_quantizer("forward", 0) is None
    chain = opfuse.Sequential(op, ops.Linear(8, 8))
    for recipe in (RECIPE, other, RECIPE):  # the last time with a plan from before
        with opfuse.autocast(recipe):
            y = chain(x)
        made = op._quantizers.of(recipe)
        assert op.get_quantizer("forward", 0) is made["input"]
        assert op.get_quantizer("backward", 0) is made["grad_output"]
        y.sum().backward()  # the op asks there too


class AsksIfAny(AsksItself):
    def op_forward(self, ctx, input_):
        quantizer = self.get_quantizer("forward", 0)
        return input_ if quantizer is None else quantizer(input_).dequantize()

    def op_backward(self, ctx, grad_output):
        return grad_output, ()


@pytest.mark.parametrize("planned", [True, False])
def test_without_a_recipe_an_op_has_no_quantizer_in_its_forward(planned):
    op, x = AsksIfAny(), torch.randn(4, 8)
    chain = opfuse.Sequential(op)
    if planned:
        assert torch.equal(chain(x), x)
    with opfuse.autocast(RECIPE):
        assert not torch.equal(chain(x), x)
    assert torch.equal(chain(x), x)
    assert op.get_quantizer("forward", 0) is not None


class FusedAsks(opfuse.FusedOperation):
    """A fused op as in te.ops: it takes a quantizer from an op of the library."""

    meanwhile: ClassVar = staticmethod(lambda: None)
    asked: ClassVar = []

    def fuser_forward(self, basic_op_ctxs, input_, **given):
        self.meanwhile()
        self.asked.append(self.basic_ops[0].get_quantizer("forward", 0))
        return self.run_separately(basic_op_ctxs, input_, **given)


@pytest.mark.parametrize("in_a_thread", [False, True])
def test_an_op_that_runs_under_a_recipe_elsewhere_has_no_quantizer_here(in_a_thread, monkeypatch):
    linear, x = ops.BasicLinear(8, 8), torch.randn(4, 8)
    here, there = opfuse.Sequential(linear), opfuse.Sequential(ops.Identity(), linear)

    def elsewhere():
        with opfuse.plugins.using("rounding"), opfuse.autocast(RECIPE), torch.no_grad():
            there(x)

    def meanwhile():
        monkeypatch.undo()
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()

    with registered("forward", opfuse.Fusion([ops.BasicLinear], FusedAsks)):
        here(x)  # its plan is made
        FusedAsks.asked.clear()
        if in_a_thread:
            monkeypatch.setattr(FusedAsks, "meanwhile", staticmethod(meanwhile))
        else:
            elsewhere()
        here(x)
    assert [quantizer is None for quantizer in FusedAsks.asked] == [False, True]


class AsksInItsBackward(opfuse.BasicOperation):
    saved_names = ()

    def num_quantizers(self, mode):
        return 1

    def get_input_quantizer(self):
        return None  # the engine casts nothing for it

    get_grad_output_quantizer = get_input_quantizer

    def op_forward(self, ctx, input_):
        return input_ * 1

    def op_backward(self, ctx, grad_output):
        quantizer = self.get_quantizer("backward", 0)
        return grad_output if quantizer is None else quantizer(grad_output).dequantize(), ()


def test_a_backward_has_the_quantizers_of_its_forward():
    """Whatever other calls the op had since, and whether the block has ended."""
    op, grad = AsksInItsBackward(name="asks"), torch.randn(4, 8)
    chain, x = opfuse.Sequential(op), torch.randn(4, 8, requires_grad=True)
    plain = chain(x)
    with opfuse.autocast(RECIPE):
        quantized = chain(x)
    with opfuse.autocast(RECIPE, skip=["asks"]):
        skipped = chain(x)
    (rounded,) = torch.autograd.grad(quantized, x, grad)
    assert not torch.equal(rounded, grad)
    for y in (plain, skipped):
        assert torch.equal(*torch.autograd.grad(y, x, grad), grad)


def test_finding_casts_leaves_no_quantizers_behind():
    """The kit asks for them outside of any plan."""
    chain = engine.chain.Chain([ops.BasicLinear(8, 8)])
    env = opfuse.Environment(torch.device("cpu"), None, torch.float32, RECIPE)
    needs = engine.facts.Needs(False, 1, (False,), ((False,),))
    engine.planner.edges_of(chain, env, needs, current.values._replace(recipe=RECIPE))
    assert current.quantizers is None


@pytest.mark.parametrize("weights", ["fresh", "cached"])
def test_an_evaluation_in_inference_mode_comes_first(weights):
    chain, x = mlp()
    with torch.inference_mode():
        first = step(chain, x.detach(), weights=weights)
    with torch.no_grad():
        assert torch.equal(step(chain, x, weights=weights), first)
    step(chain, x, weights=weights).sum().backward()
    step(chain, x, weights=weights)
    assert updates(chain) == [2, 2, 1] * 2


def test_state_that_nobody_records_does_not_advance(monkeypatch):
    """A calibrated scale, say: there is no update to call."""
    monkeypatch.setattr(RoundingQuantizer, "pending_names", ())
    monkeypatch.setattr(Rounding, "update", opfuse.Recipe.update)
    chain, x = mlp()
    compiled = torch.compile(chain, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(step(compiled, x), step(chain, x))


def test_an_evaluation_follows_the_state_wherever_it_goes():
    chain, x = mlp()
    with torch.no_grad():
        before = step(chain, x)
    step(chain, 3 * x)
    saved = copy.deepcopy(chain.state_dict())
    chain.to(torch.float64).to(torch.float32)  # replaces the tensors
    with torch.no_grad():
        after = step(chain, x)
        assert not torch.equal(after, before)
        twin, _ = mlp()
        step(twin, x)
        twin.load_state_dict(saved)
        assert torch.equal(step(twin, x), after)
        assert torch.equal(step(copy.deepcopy(chain), x), after)


def test_a_block_that_raises_moves_nothing():
    chain, x = mlp()
    step(chain, x)
    before = state(chain)
    with pytest.raises(ZeroDivisionError), opfuse.autocast(RECIPE):
        chain(100 * x)
        _ = 1 / 0
    assert state(chain) == before
    step(chain, x)
    assert state(chain)[0, "input"][0] == before[0, "input"][0]


def test_a_block_that_ends_with_grad_mode_off_moves_nothing():
    chain, x = mlp()
    step(chain, x)
    before = state(chain)
    with torch.no_grad(), opfuse.autocast(RECIPE), torch.enable_grad():
        chain(100 * x)
    assert state(chain) == before


def test_state_keeps_its_values_when_the_model_becomes_half():
    chain, x = mlp()
    step(chain, x)
    quantizer = chain[0].basic_ops[0]._quantizers.of(RECIPE)["input"]
    quantizer.amax.fill_(1e-9)
    chain.half()
    assert quantizer.amax.dtype is torch.float32 and quantizer.amax.item() == pytest.approx(1e-9)


class OnTheClass(RoundingQuantizer):
    amax = torch.ones(1)


class NotSet(RoundingQuantizer):
    state_names = ("amax", "missing")

    def __init__(self, recipe, role):
        super().__init__(recipe, role)
        del self.state_names


class NotState(RoundingQuantizer):
    def __init__(self, recipe, role):
        super().__init__(recipe, role)
        self.pending_names = ("seen", "other")


class GivesPlain(RoundingQuantizer):
    def quantize(self, tensor, usage, out=None):
        return tensor


class Strict(ScaledTensor):
    """Unlike its base, it does not read one copy as the other."""

    usage = property(lambda self: self.copies)


class GivesTooFew(RoundingQuantizer):
    def quantize(self, tensor, usage, out=None):
        made = super().quantize(tensor, ROWWISE, out)
        return Strict(**{field.name: getattr(made, field.name) for field in fields(made)})


class GivesAnothers(RoundingQuantizer):
    def __init__(self, recipe, role):
        super().__init__(recipe, role)
        self.other = RoundingQuantizer(recipe, role)

    def quantize(self, tensor, usage, out=None):
        return self.other.quantize(tensor, usage, out)


class GivesARow(RoundingQuantizer):
    def quantize(self, tensor, usage, out=None):
        return super().quantize(tensor.flatten(), usage, out)


class GivesFP64(RoundingQuantizer):
    def quantize(self, tensor, usage, out=None):
        return super().quantize(tensor.double(), usage, out)


@pytest.mark.parametrize(
    "cls, text",
    [
        (
            GivesTooFew,
            r"GivesTooFew.quantize must return the copies that it is asked for, "
            r"Usage\(rowwise=True, columnwise=True\), got Usage\(rowwise=True, columnwise=False\)",
        ),
        (
            GivesAnothers,
            "GivesAnothers.quantize must return a .* whose quantizer is itself, "
            "got one of RoundingQuantizer",
        ),
        (GivesARow, r"shape and dtype of its input, \(\d+, \d+\) and .*, got \(\d+,\) and"),
        (GivesFP64, "shape and dtype of its input, .* and torch.float32, got .* torch.float64"),
        (OnTheClass, "OnTheClass.amax is state: set it in __init__ only"),
        (NotSet, "names of tensors that its __init__ sets, got 'missing'"),
        (NotState, "pending_names expected names of its state, got .'other'."),
        (GivesPlain, "GivesPlain.quantize must return one of the formats .* got Tensor"),
    ],
)
def test_quantizers_that_cannot_work(cls, text):
    class Plugin:
        @opfuse.hookimpl
        def opfuse_quantizer(self, recipe, role):
            return cls(recipe, role)

    record = opfuse.plugins.register(Plugin(), name="a-wrong", distribution="a")
    chain, x = mlp()
    try:
        with opfuse.plugins.using("a-wrong,rounding"), pytest.raises(TypeError, match=text):
            step(chain, x)
    finally:
        opfuse.plugins.remove(record)


def test_equal_recipes_have_one_json_and_fields_can_be_hashed():
    assert Rounding(step=1) == Rounding(step=1.0)
    assert Rounding(step=1).to_json() == Rounding(step=1.0).to_json()
    with pytest.raises(TypeError, match="expected fields that can be hashed.*a tuple instead"):
        Rounding(step=[1, 2])


def test_what_is_pending_is_in_a_checkpoint():
    chain, x = mlp()
    twin, _ = mlp()
    step(twin, x)
    with opfuse.autocast(RECIPE):
        chain(x)
        twin.load_state_dict(chain.state_dict())
    assert state(twin, ["seen"])[0, "input"][0] == x.abs().max()


def test_a_backward_that_raises_is_folded_with_the_next():
    chain, x = mlp()
    y = step(chain, x)
    x.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        y.mul(5).sum().backward(retain_graph=True)
    assert updates(chain) == [1, 1, 0] * 2
    y.sum().backward(inputs=[*chain.parameters()])
    assert updates(chain) == [1, 1, 1] * 2 and state(chain)[2, "grad_output"][0] == 5


def test_the_recipe_in_a_checkpoint_has_its_registered_name():
    chain, x = mlp()
    step(chain, x)
    texts = [bytes(v.tolist()) for k, v in chain.state_dict().items() if k.endswith(".recipe")]
    assert len(texts) == 2 and all(b'"recipe": "rounding"' in text for text in texts)
    places = {re.sub("[0-9a-f]{8}", "*", key) for key in chain.state_dict()}
    assert "0.basic_ops.0.quantizers.*.input.amax" in places


def test_only_what_ran_advances_unless_the_model_is_prepared():
    (chain, x), (other, _) = mlp(), mlp()
    step(other, x)
    step(chain, x)
    assert updates(other) == [1, 1, 0] * 2
    (chain, x), (other, _) = mlp(), mlp()
    opfuse.assign_names(nn.ModuleDict({"chain": chain, "other": other}))
    step(chain, x)
    assert updates(other) == [1, 1, 0] * 2  # forward quantizers, with 0


def test_prepare_names_the_ops():
    asked = []

    class Names(RoundingPlugin):
        @opfuse.hookimpl
        def opfuse_quantizer(self, recipe, role, env):
            asked.append((role, env.device.type))
            return RoundingQuantizer(recipe, role)

    record = opfuse.plugins.register(Names(), name="names", distribution="a")
    try:
        chain = opfuse.Sequential(ops.Linear(8, 8), ops.GELU(name="act"), ops.Quantize(name="q"))
        model = nn.ModuleDict({"block": chain, "head": ops.BasicLinear(8, 8, name="mine")})
        assert chain[0].name == "" and opfuse.assign_names(model) is model
        assert [chain[0].name, chain[0].basic_ops[0].name] == ["block.0"] * 2
        assert (chain[1].name, chain[2].name, model["head"].name) == ("act", "q", "mine")
        named = ops.Linear(2, 2, name="given")
        assert opfuse.assign_names(nn.ModuleList([named]))[0].basic_ops[0].name == "given"
        with opfuse.plugins.using("names"), opfuse.autocast(RECIPE):
            model["head"](chain(torch.randn(2, 8)))
        roles = [("linear", "input"), ("linear", "weight"), ("linear", "grad_output")]
        expected = [(*role, "block.0") for role in roles]
        expected += [("quantize", "input", "q"), *[(*role, "mine") for role in roles]]
        assert [tuple(role) for role, _ in asked] == expected
        assert {device for _, device in asked} == {"cpu"}
        with pytest.raises(RuntimeError, match="know it as 'block.0'"):
            opfuse.assign_names(chain)
    finally:
        opfuse.plugins.remove(record)
    with pytest.raises(TypeError, match="GELU expected a string as name, got 3"):
        ops.GELU(name=3)
    with pytest.raises(TypeError, match="GELU expected a string as name, got 3"):
        ops.GELU().name = 3


def test_a_name_can_be_set():
    linear = ops.Linear(2, 2, name="before")
    linear.name = "after"
    assert [linear.name, *[op.name for op in linear.basic_ops]] == ["after"] * 3

    class Own(ops.Identity):
        def __init__(self, name, late=False):
            if not late:
                self.name = name
            super().__init__()
            if late:
                self.name = name

    assert (Own("a").name, Own("b", late=True).name) == ("a", "b")
    assert opfuse.assign_names(nn.ModuleList([Own("a")]))[0].name == "a"
    with opfuse.autocast(RECIPE):
        linear(torch.randn(3, 2))
    with pytest.raises(RuntimeError, match="know it as 'after', not 'later'"):
        linear.name = "later"


def test_copies_of_a_prepared_op_are_not_prepared():
    chain, x = mlp()
    opfuse.assign_names(chain)
    twin = copy.deepcopy(chain)
    step(twin, x)
    assert not chain[0].basic_ops[0]._quantizers._by_recipe and twin[0].name == "0"


def test_a_group_needs_a_prepared_model():
    chain, x = mlp()
    with pytest.raises(RuntimeError, match=r"call opfuse.assign_names\(model\) first"):
        step(chain, x, amax_reduction_group=object())
    with opfuse.autocast(RECIPE), pytest.raises(ValueError, match="is for the outermost block"):
        step(chain, x, amax_reduction_group=object())


def test_two_ranks_of_which_one_skips_an_op():
    gloo.apart(recipe_ranks.worker)


@pytest.mark.parametrize(
    "worker", [recipe_ranks.other_than_the_update, recipe_ranks.one_block_or_two]
)
def test_maxima_are_a_turn_of_their_group(worker):
    for told in gloo.together(worker):
        assert "differ in what runs" in str(told) and "the update of" in str(told)


# Recomputation


def region(chain):
    def run(x):
        with opfuse.autocast(RECIPE):
            return chain(x)

    return run


@pytest.mark.parametrize("inside", [False, True])
def test_checkpoint_with_a_context_fn(inside):
    """The recomputation uses the scales of the forward, and counts nothing."""
    results = []
    for recompute in (False, True):
        chain, x = mlp()
        run = region(chain)
        for _ in range(3):
            if not recompute:
                y = run(x)
            elif inside:
                how = dict(use_reentrant=False, context_fn=opfuse.checkpoint_contexts)
                y = checkpoint(run, x, **how)
            else:
                with opfuse.autocast(RECIPE):
                    how = dict(use_reentrant=False, context_fn=opfuse.checkpoint_contexts)
                    y = checkpoint(chain, x, **how)
            y.square().sum().backward()
        results.append(([y, x.grad, *[p.grad for p in chain.parameters()]], state(chain)))
    assert results[0][1] == results[1][1]
    for a, b in zip(results[0][0], results[1][0], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_checkpoint_without_one_is_refused(inside, reentrant):
    chain, x = mlp()
    text = "put autocast around" if inside else "the recomputation would not know the recipe"
    with pytest.raises(RuntimeError, match=text):
        if inside:  # a reentrant checkpoint computes its forward without grad: no scale moves
            checkpoint(region(chain), x, use_reentrant=reentrant).sum().backward()
        else:
            with opfuse.autocast(RECIPE):
                checkpoint(chain, x, use_reentrant=reentrant)
    assert not any(updates(chain) if chain[0].basic_ops[0]._quantizers._by_recipe else [])


def test_torch_compile_of_a_state_that_advances_is_refused():
    chain, x = mlp()
    compiled = torch.compile(chain, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="has state that advances once per step"):
        step(compiled, x)
    with torch.no_grad():
        assert torch.equal(step(compiled, x), step(chain, x))
    torch._dynamo.reset()
    loose = torch.compile(chain, backend="aot_eager")  # breaks the graph, and runs as always
    step(loose, x).sum().backward()  # after the block, when the scales are others
    assert updates(chain) == [1, 1, 1] * 2
    expected, x.grad = x.grad, None
    twin, _ = mlp()
    step(twin, x).sum().backward()
    assert torch.equal(x.grad, expected)


@pytest.mark.parametrize("recipe", [RECIPE, Rounding()])
def test_checkpoint_uses_the_casts_of_weights_of_its_forward(recipe):
    """Microbatches, all forwards before their backwards: the cache holds later casts by then."""
    results = []
    for recompute in (False, True):
        chain, x = mlp()
        how = dict(use_reentrant=False, context_fn=opfuse.checkpoint_contexts)
        for _ in range(2):
            outputs = []
            for weights in ("fresh", "cached", "fresh", "cached"):
                with opfuse.autocast(recipe, weights=weights):
                    outputs.append(checkpoint(chain, x, **how) if recompute else chain(x))
            for y in outputs:
                y.square().sum().backward()
        results.append([*outputs, x.grad, *[p.grad for p in chain.parameters()]])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


# Weights


class Counting:
    """Counts the casts of weights."""

    def __init__(self, monkeypatch):
        self.casts = []
        plain = RoundingQuantizer.quantize

        def quantize(quantizer, tensor, usage, out=None):
            if quantizer.role.tensor_type == "weight":
                self.casts.append(tuple(usage))
            return plain(quantizer, tensor, usage, out)

        monkeypatch.setattr(RoundingQuantizer, "quantize", quantize)


@pytest.fixture
def counting(monkeypatch):
    return Counting(monkeypatch)


def linear():
    torch.manual_seed(0)
    return ops.BasicLinear(8, 8), torch.randn(4, 8, requires_grad=True)


@pytest.mark.parametrize("recipe", [RECIPE, Rounding()])
def test_one_cast_for_four_microbatches(recipe, counting):
    op, x = linear()
    results = []
    for weights in (["fresh"] * 4, ["fresh", *["cached"] * 3]):
        op, x = linear()
        counting.casts.clear()
        for way in weights:
            with opfuse.autocast(Rounding(), weights=way):
                y = op(x)
            y.square().sum().backward()
        results.append((len(counting.casts), y, op.weight.grad))
    assert [result[0] for result in results] == [4, 1]
    assert torch.equal(results[0][1], results[1][1]) and torch.equal(results[0][2], results[1][2])


def test_a_cast_that_is_used_again_records_nothing(counting):
    op, x = linear()
    with opfuse.autocast(RECIPE):
        first = op(x)
    with opfuse.autocast(RECIPE, weights="cached"):
        op(x)
        assert op._quantizers.of(RECIPE)["weight"].seen.item() == -1
        assert op._quantizers.of(RECIPE)["input"].seen.item() > 0
    assert len(counting.casts) == 1 and first is not None


def test_a_missing_copy_casts_all_anew(counting):
    op, x = linear()
    with opfuse.autocast(Rounding(), weights="cached"):
        op(x.detach())  # no gradient of the input: rowwise alone
        op(x)
        op(x)
    assert counting.casts[0] == (True, False)
    # the toy's format serves both uses with one copy, so nothing is missing
    assert len(counting.casts) == 1


def changed_in_place(op):
    with torch.no_grad():
        op.weight.mul_(2)


def replaced(op):
    op.weight = nn.Parameter(2 * op.weight.detach())


def loaded(op):
    op.load_state_dict({"weight": 2 * op.weight.detach()}, assign=True)


def converted(op):
    op.weight.data = op.weight.detach().double()  # as module.double() does: no new version


@pytest.mark.parametrize("change", [changed_in_place, replaced, loaded, converted])
def test_what_torch_shows_is_cast_anew_even_if_cached(change, counting):
    op, x = linear()
    with opfuse.autocast(Rounding(), weights="cached"):
        op(x)
        change(op)
        x = x.to(op.weight.dtype)
        y = op(x)
    assert len(counting.casts) == 2
    with opfuse.autocast(Rounding()):
        assert torch.equal(y, op(x))


def fused_adamw(op):
    optimizer = torch.optim.AdamW(op.parameters(), lr=0.5, fused=True)
    op.weight.grad = torch.ones_like(op.weight)
    optimizer.step()


def data_copy(op):
    op.weight.data.copy_(2 * op.weight.data)


def data_set(op):
    op.weight.data = 2 * op.weight.data


@pytest.mark.parametrize("change", [fused_adamw, data_copy, data_set])
def test_fresh_is_right_where_no_version_tells(change, counting):
    """A key of storage and version would give the old cast here."""
    op, x = linear()
    version = op.weight._version
    with opfuse.autocast(Rounding()):
        before = op(x)
        change(op)
        after = op(x)
    assert op.weight._version == version or change is data_set
    assert not torch.equal(before, after) and len(counting.casts) == 2
    with opfuse.autocast(Rounding(), weights="cached"):
        assert torch.equal(after, op(x))


def capture(patch, captured=True):
    """As while a CUDA graph is captured, but for what makes the state."""
    for module in (opfuse.recipes.tool, opfuse.recipes.scale_update):
        patch.setattr(module, "is_captured", lambda device: captured)


def test_a_graph_and_eager_calls_use_no_cast_of_each_other(counting, monkeypatch):
    """A replay would read the codes of a weight of long ago, or memory that is free."""
    op, x = linear()
    with opfuse.autocast(Rounding()):
        op(x)
    for captured, casts in ((True, 2), (True, 2), (False, 3), (False, 3)):
        capture(monkeypatch, captured)
        with opfuse.autocast(Rounding(), weights="cached"):
            op(x)
        assert len(counting.casts) == casts


def test_a_graph_without_the_end_of_its_block_is_refused(monkeypatch):
    """Its replays would never advance the scales."""
    chain, x = mlp()
    step(chain, x), step(chain, x)
    with pytest.raises(RuntimeError, match=r"captured a forward without that end.*inside of what"):
        with opfuse.autocast(RECIPE):
            with monkeypatch.context() as patch:
                capture(patch)
                chain(x)
    with monkeypatch.context() as patch:
        capture(patch)
        step(chain, x)
    before = updates(chain)
    with opfuse.autocast(RECIPE), torch.no_grad(), monkeypatch.context() as patch:
        capture(patch)
        chain(x)  # reads the scales alone
    assert updates(chain) == before == [3, 3, 0] * 2


class Twice(nn.Module):
    def forward(self, weight):
        return 2 * weight


def test_a_weight_that_is_computed_is_never_cached(counting):
    op, x = linear()
    parametrize.register_parametrization(op, "weight", Twice())
    with opfuse.autocast(Rounding(), weights="cached"):
        first = op(x)
        op.parametrizations.weight.original.data.mul_(3)  # maybe at the same address
        assert not torch.equal(op(x), first) and len(counting.casts) == 2


def test_a_frozen_weight_under_a_recipe_with_state(counting):
    op, x = linear()
    op.weight.requires_grad_(False)
    with opfuse.autocast(RECIPE):
        op(x)
    with opfuse.autocast(RECIPE):  # the scale is another one by now
        second = op(x)
    assert len(counting.casts) == 2
    with opfuse.autocast(RECIPE, weights="cached"):
        assert torch.equal(op(x), second) and len(counting.casts) == 2


def test_a_cache_holds_no_weight_and_is_not_copied():
    op, x = linear()
    with opfuse.autocast(Rounding()):
        op(x)
    twin = copy.deepcopy(op)
    assert not twin._weights._entries and op._weights._entries
    weight = op.weight
    gone = op._weights._entries["weight"].param
    assert gone() is weight
    op.weight = nn.Parameter(torch.ones(8, 8))
    del weight
    gc.collect()
    assert gone() is None


def test_state_for_a_recipe_with_other_fields_waits_and_says_so():
    (chain, x), (other, _) = mlp(), mlp()
    step(chain, x)
    other.load_state_dict(chain.state_dict())
    with pytest.warns(
        UserWarning, match='quantizer state for .*"levels": 8.*none for .*"levels": 9'
    ):
        with opfuse.autocast(Rounding(levels=9)):
            other(x)
    step(other, x)  # here it is used, and nothing is said
    assert state(other) == state(chain) or updates(other) == [2, 2, 0] * 2
