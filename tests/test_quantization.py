"""The quantizer side of the contract, with a small rounding recipe: negotiation, both passes, state."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re

import pytest
import torch
from rounding import Rounding, RoundingPlugin, RoundingQuantizer, round_to
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import opfuse
from opfuse import ops
from opfuse.core.settings import current


@pytest.fixture(autouse=True)
def rounding():
    record = opfuse.plugins.register(
        RoundingPlugin(), name="rounding", distribution="rounding-plugin", version="1"
    )
    with opfuse.plugins.using("rounding"):
        yield
    opfuse.plugins.remove(record)


def two_linears():
    torch.manual_seed(0)
    return opfuse.Sequential(ops.Linear(8, 8, bias=False), ops.Linear(8, 8)), torch.randn(4, 8)


def steps(chain, which="forward"):
    return [step.op for step in getattr(chain._module_groups[0]._last[1].plan, which)]


def test_what_no_recipe_quantizes_says_so():
    x, chain = torch.randn(4, 5), opfuse.Sequential(ops.LowRankLinear(5, 7, 2), ops.Linear(7, 3))
    with opfuse.autocast(Rounding()):
        found = opfuse.explain(chain, x)
    assert "quantized by Rounding: 3 of 5 products of linear ops" in found.details
    assert "no recipe quantizes a linear with a LoRA adapter" in found.details
    assert "LoRA" not in opfuse.explain(chain, x).details


class RoundBoth(torch.autograd.Function):
    """Rounds a tensor on the way there, its gradient on the way back."""

    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.backward_ = backward
        return round_to(x) if forward else x.clone()

    @staticmethod
    def backward(ctx, grad):
        return round_to(grad) if ctx.backward_ else grad, None, None


def test_linear_to_linear_in_both_passes():
    chain, x = two_linears()
    x.requires_grad_()
    with opfuse.autocast(recipe=Rounding()):
        y = chain(x)
    y.square().sum().backward()

    reference = x.detach().clone().requires_grad_()
    weights = [chain[i].weight.detach().clone().requires_grad_() for i in range(2)]
    bias = chain[1].bias.detach().clone().requires_grad_()
    hidden = RoundBoth.apply(reference, True, False)
    for weight in weights:
        hidden = F.linear(
            RoundBoth.apply(hidden, True, False), RoundBoth.apply(weight, True, False)
        )
        hidden = RoundBoth.apply(hidden, False, True)
    expected = hidden + bias
    expected.square().sum().backward()
    torch.testing.assert_close(y, expected)
    for got, want in (
        (x, reference),
        (chain[0].weight, weights[0]),
        (chain[1].weight, weights[1]),
        (chain[1].bias, bias),
    ):
        torch.testing.assert_close(got.grad, want.grad)


def test_casts_are_steps_of_the_plan():
    chain, x = two_linears()
    with opfuse.autocast(recipe=Rounding()):
        chain(x)
    cast = "Cast[RoundingQuantizer]"
    assert steps(chain) == [cast, "BasicLinear", cast, "BasicLinear", "Bias"]
    assert steps(chain, "backward") == ["Bias", cast, "BasicLinear", cast, "BasicLinear"]


def test_an_op_ported_from_te_may_quantize_for_its_neighbours():
    class Writes(ops.Identity):
        saved_names = None

        def op_forward(
            self, ctx, input_, *, prev_op_grad_output_quantizer, next_op_input_quantizer
        ):
            assert ctx.next_op_input_quantizer is next_op_input_quantizer is not None
            written.append(next_op_input_quantizer(input_))
            return written[-1]

        def op_backward(self, ctx, grad_output):
            assert isinstance(ctx.prev_op_grad_output_quantizer, RoundingQuantizer)
            return ctx.prev_op_grad_output_quantizer(grad_output), ()

    torch.manual_seed(0)
    first, second = ops.Linear(4, 4, bias=False), ops.Linear(4, 4, bias=False)
    x = torch.randn(2, 4, requires_grad=True)
    results, written = [], []
    for middle in (ops.Identity(), Writes()):
        chain = opfuse.Sequential(first, middle, second)
        with opfuse.autocast(recipe=Rounding()):
            y = chain(x)
        (grad,) = torch.autograd.grad(y.square().sum(), x)
        results.append((y, grad))
    torch.testing.assert_close(results[0], results[1])
    cast = "Cast[RoundingQuantizer]"  # lets pass what is quantized already
    assert steps(chain) == [cast, "BasicLinear", "Writes", cast, "BasicLinear"] and written


@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
def test_a_backward_override_leaves_the_gradient_unrounded(override):
    chain, x = two_linears()
    with opfuse.autocast(recipe=Rounding(backward_override=override)):
        y = chain(x)
    y.sum().backward()
    operand = x if override == "high_precision" else round_to(x)
    weight = chain[1].weight.detach()
    weight = weight if override == "high_precision" else round_to(weight)
    expected = (torch.ones(4, 8) @ weight).t() @ operand
    torch.testing.assert_close(chain[0].weight.grad, expected)
    assert steps(chain, "backward") == ["Bias", "BasicLinear", "BasicLinear"]


def test_quantize_rounds_only_under_a_recipe():
    x = torch.randn(3, 4, requires_grad=True)
    chain = opfuse.Sequential(ops.Quantize(forward=True, backward=True))
    assert torch.equal(chain(x), x)
    with opfuse.autocast(recipe=Rounding()):
        y = chain(x)
    grad = torch.randn(3, 4)
    y.backward(grad)
    torch.testing.assert_close(y, round_to(x))
    torch.testing.assert_close(x.grad, round_to(grad))


# The recipe is a value


def test_equal_recipes_share_plans_and_quantizers():
    chain, x = two_linears()
    with opfuse.autocast(recipe=Rounding()):
        chain(x)
    program = chain._module_groups[0]._last[1]
    with opfuse.autocast(recipe=Rounding(step=0.25)):
        chain(x)
    assert chain._module_groups[0]._last[1] is program


def test_two_recipes_alternate_without_planning(monkeypatch):
    chain, x = two_linears()

    def alternate():
        results = []
        for recipe in (Rounding(step=0.5), Rounding(step=0.125), Rounding(levels=8)):
            with opfuse.autocast(recipe=recipe):
                results.append(chain(x).detach())
        return results

    first = alternate()
    monkeypatch.setattr(
        "opfuse.core.engine.planner.choose", lambda *args, **kwargs: pytest.fail("planned again")
    )
    second = alternate()
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])
    assert not torch.equal(first[0], first[1])


def test_recipes_are_strict_frozen_values():
    with pytest.raises(TypeError, match="unexpected keyword"):
        Rounding(stp=1)
    with pytest.raises(ValueError, match="backward_override must be one of"):
        Rounding(backward_override="none")
    with pytest.raises(AttributeError):
        Rounding().step = 1
    assert Rounding() == Rounding() and hash(Rounding()) == hash(Rounding())


@pytest.mark.alone
def test_the_default_recipe_is_that_of_a_plugin():
    with pytest.raises(ValueError, match="'fp8-delayed'; install opfuse-plugin-fp8"):
        opfuse.autocast()


def test_autocast_arguments_and_nesting():
    chain, x = two_linears()
    plain = chain(x)
    with opfuse.autocast(recipe=Rounding()):
        quantized = chain(x)
        with opfuse.autocast(enabled=False):
            assert torch.equal(chain(x), plain)
        assert torch.equal(chain(x), quantized)
    assert torch.equal(chain(x), plain) and not torch.equal(quantized, plain)
    with pytest.raises(TypeError, match="expected an opfuse.Recipe, or the name of one, got int"):
        opfuse.autocast(recipe=3)
    with pytest.raises(TypeError, match="got two recipes"):
        opfuse.autocast("rounding", recipe=Rounding())
    with pytest.raises(
        ValueError, match="no plugin offers a recipe 'fp9'; those in use offer .*rounding"
    ):
        opfuse.autocast("fp9")
    with pytest.raises(ValueError, match="weights must be 'fresh' or 'cached', got 'old'"):
        opfuse.autocast(Rounding(), weights="old")
    for same in (opfuse.autocast("rounding"), opfuse.autocast(Rounding())):
        with same:
            assert torch.equal(chain(x), quantized)
    assert opfuse.plugins.recipes()["rounding"] is Rounding


def test_a_recipe_whose_plugin_is_off_quantizes_nothing_and_says_so():
    chain, x = two_linears()
    why = "not quantized by Rounding: the plugin rounding is off"
    with opfuse.autocast(Rounding()), opfuse.plugins.using("-rounding"):
        with pytest.warns(opfuse.PluginWarning, match=f"autocast: {why} in the selection"):
            got = chain(x)
    assert torch.equal(got, chain(x))
    with opfuse.autocast(Rounding()), opfuse.plugins.using(""):  # said once
        report = opfuse.explain(chain, x)
    assert [row["note"] for row in report.to_dict()["forward"]] == [why, why, ""]
    assert f"BasicLinear: {why} (2 times)" in str(report)
    with opfuse.autocast(Rounding()):
        assert not torch.equal(chain(x), got)


def test_a_recipe_that_no_installed_plugin_offers():
    @dataclasses.dataclass(frozen=True)
    class Nobodys(opfuse.Recipe):
        pass

    with pytest.raises(ValueError, match="no plugin offers Nobodys.* offer .*rounding"):
        opfuse.autocast(Nobodys())


def test_a_recipe_without_a_quantizer():
    class OnlyTheName:
        @opfuse.hookimpl
        def opfuse_recipes(self):
            return {"mine": Rounding}

    record = opfuse.plugins.register(OnlyTheName(), name="mine")
    chain, x = two_linears()
    text = "no plugin offers a quantizer for Rounding.* and QuantizerRole.*linear"
    try:
        with opfuse.plugins.using("mine"), opfuse.autocast("mine"):
            with pytest.raises(RuntimeError, match=text):
                chain(x)
    finally:
        opfuse.plugins.remove(record)


def test_a_failing_quantizer_hook_is_a_warning():
    class Broken:
        @opfuse.hookimpl
        def opfuse_quantizer(self, recipe, role):
            return 3

    chain, x = two_linears()
    record = opfuse.plugins.register(Broken(), name="a-broken", distribution="broken", version="2")
    try:
        with opfuse.plugins.using("a-broken,rounding"), opfuse.autocast(recipe=Rounding()):
            with pytest.warns(
                opfuse.PluginWarning,
                match=r"broken 2.*opfuse_quantizer must return a Quantizer, got int",
            ):
                chain(x)
    finally:
        opfuse.plugins.remove(record)


def test_whose_quantizer_it_is_follows_the_precedence_of_fusions():
    """The user's list, and without one the distribution's name; the alphabet of plugins is not it."""
    asked = []

    def offering(name):
        class Plugin(RoundingPlugin):
            @opfuse.hookimpl
            def opfuse_quantizer(self, recipe, role):
                asked.append(name)
                return RoundingQuantizer(recipe, role)

        return Plugin()

    records = [
        opfuse.plugins.register(offering("a"), name="a", distribution="z-distribution"),
        opfuse.plugins.register(offering("b"), name="b", distribution="b-distribution"),
    ]
    try:
        for selection, first in (("a,b", "a"), ("b,a", "b"), (None, "b")):
            chain, x = two_linears()
            asked.clear()
            with opfuse.plugins.using(selection), opfuse.autocast(Rounding()):
                chain(x)
            assert {*asked} == {first}
    finally:
        for record in records:
            opfuse.plugins.remove(record)


# State


def amax_of(chain):
    recipe = Rounding(levels=8)
    return [
        q.amax.item()
        for linear in chain
        for q in linear.basic_ops[0]._quantizers.of(recipe).values()
    ]


def run(chain, x):
    with opfuse.autocast(recipe=Rounding(levels=8)):
        y = chain(x)
    y.square().sum().backward()
    return y.detach()


def test_state_lasts_over_steps_and_survives_a_checkpoint():
    chain, x = two_linears()
    first = run(chain, x)
    run(chain, 3 * x)
    assert not torch.equal(run(chain, x), first)
    file = io.BytesIO()
    torch.save(chain.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    first = sorted(k for k in state if k.endswith("amax"))[0]
    assert re.fullmatch(r"0\.basic_ops\.0\.quantizers\.[0-9a-f]{8}\.grad_output\.amax", first)
    twin, _ = two_linears()
    twin.load_state_dict(state)  # before any recipe was used
    kept = twin.state_dict()
    assert sorted(kept) == sorted(state) and all(torch.equal(kept[k], state[k]) for k in state)
    assert torch.equal(run(twin, x), run(chain, x)) and amax_of(twin) == amax_of(chain)
    third, _ = two_linears()
    run(third, 0 * x)
    third.load_state_dict(state)  # after
    assert torch.equal(run(third, x), run(third, x))


def test_checkpoints_without_recipe_state_have_the_plain_keys():
    chain, x = two_linears()
    with opfuse.autocast(recipe=Rounding()):
        chain(x)
    assert [k for k in chain.state_dict() if "quantizers" not in k] == [
        "0.weight",
        "1.weight",
        "1.bias",
    ]


def test_state_of_the_wrong_shape():
    chain, x = two_linears()
    run(chain, x)
    state = {k: torch.ones(3) if k.endswith("amax") else v for k, v in chain.state_dict().items()}
    with pytest.raises(RuntimeError, match=r"expected shape \(1,\), the checkpoint has \(3,\)"):
        chain.load_state_dict(state)


@pytest.mark.parametrize("rename", [{"input.amax": None}, {"input.amax": "output.amax"}])
def test_state_of_other_quantizers(rename):
    chain, x = two_linears()
    run(chain, x)
    state = {}
    for key, value in chain.state_dict().items():
        number, _, name = re.sub("[0-9a-f]{8}", "0", key).partition(".quantizers.0.")
        if (name := rename.get(name, name)) is not None:
            state[f"{number}.quantizers.0.{name}" if name else key] = value
    with pytest.raises(RuntimeError, match=r"expected .*input\.amax.*; the checkpoint has "):
        chain.load_state_dict(state)
    twin, _ = two_linears()
    twin.load_state_dict(state)  # whether it fits is known when its recipe is used
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the checkpoint has"):
            run(twin, x)


BAD_STATE = {
    "missing": ("recipe", None, r"\w{8}\.grad_output\.amax belongs to no recipe: .*is missing"),
    "no text": ("recipe", torch.tensor([255]), "recipe's JSON as bytes"),
    "no bytes": ("recipe", torch.tensor([0.5]), "recipe's JSON as bytes"),
    "no tensor": ("amax", 1.0, "amax: expected a tensor, got float"),
}


@pytest.mark.parametrize("name", BAD_STATE)
def test_state_that_belongs_to_no_recipe(name):
    ending, other, text = BAD_STATE[name]
    chain, x = two_linears()
    run(chain, x)
    state = {
        key: other if key.endswith(ending) else value for key, value in chain.state_dict().items()
    }
    state = {key: value for key, value in state.items() if value is not None}
    for model in (chain, two_linears()[0]):
        kept = {key: value.clone() for key, value in model.state_dict().items()}
        with pytest.raises(RuntimeError, match=text):
            model.load_state_dict(state)
        now = model.state_dict()
        assert (
            all(torch.equal(now[key], kept[key]) for key in kept if "quantizers" in key)
            and now.keys() == kept.keys()
        )


def test_state_keeps_its_dtype_when_the_module_moves():
    chain, x = two_linears()
    run(chain, x)
    chain.to(torch.bfloat16)
    quantizer = chain[0].basic_ops[0]._quantizers.of(Rounding(levels=8))["input"]
    assert quantizer.amax.dtype is torch.float32 and chain[0].weight.dtype is torch.bfloat16


def test_deepcopy_copies_the_state():
    import copy

    chain, x = two_linears()
    run(chain, x)
    twin = copy.deepcopy(chain)
    run(twin, 10 * x)
    assert max(amax_of(twin)) > max(amax_of(chain))


# Recomputation


@pytest.mark.parametrize("backward_in_block", [False, True])
@pytest.mark.parametrize("levels", [0, 8])
def test_checkpoint_recomputes_under_the_recipe_and_with_the_same_state(levels, backward_in_block):
    recipe = Rounding(levels=levels)
    results = []
    for recompute in (False, True):
        chain, x = two_linears()
        x.requires_grad_()
        for _ in range(2):
            x.grad = None
            with opfuse.autocast(recipe=recipe):
                if recompute:
                    y = checkpoint(
                        chain, 2 * x, use_reentrant=False, context_fn=opfuse.checkpoint_contexts
                    )
                else:
                    y = chain(2 * x)
            with opfuse.autocast(recipe=recipe) if backward_in_block else contextlib.nullcontext():
                y.square().sum().backward()
        state = [
            (q.amax.item(), q.updates.item())
            for linear in chain
            for q in linear.basic_ops[0]._quantizers.of(recipe).values()
        ]
        results.append(([y.detach(), x.grad, *[p.grad for p in chain.parameters()]], state))
    assert results[0][1] == results[1][1]
    for a, b in zip(results[0][0], results[1][0], strict=True):
        assert torch.equal(a, b)
    assert current.recipe is None and not current.recorders


def test_reentrant_checkpoint_with_the_recipe_inside():
    def region(x):
        with opfuse.autocast(recipe=Rounding()):
            return chain(x)

    chain, x = two_linears()
    x.requires_grad_()
    region(x).sum().backward()
    expected, x.grad = x.grad, None
    checkpoint(region, x, use_reentrant=True).sum().backward()
    assert torch.equal(x.grad, expected)


@pytest.mark.parametrize("inside", [False, True])
def test_compile_with_a_recipe(inside):
    recipe = Rounding()
    chain, x = two_linears()
    x.requires_grad_()

    def region(x):
        with opfuse.autocast(recipe=recipe):
            return chain(x)

    region(x).square().sum().backward()
    expected, x.grad = x.grad, None
    if inside:
        compiled = torch.compile(region, fullgraph=True, backend="aot_eager")
        y = compiled(x)
    else:
        compiled = torch.compile(chain, fullgraph=True, backend="aot_eager")
        with opfuse.autocast(recipe=recipe):
            y = compiled(x)
    y.square().sum().backward()
    torch.testing.assert_close(x.grad, expected)
    assert current.recipe is None


def test_checkpoint_with_a_recipe_inside_a_compiled_region():
    recipe = Rounding()
    chain, x = two_linears()
    x.requires_grad_()

    def region(x):
        with opfuse.autocast(recipe=recipe):
            return checkpoint(chain, x, use_reentrant=False)

    with opfuse.autocast(recipe=recipe):
        chain(x).square().sum().backward()
    expected, x.grad = x.grad, None
    torch.compile(region, fullgraph=True, backend="aot_eager")(x).square().sum().backward()
    torch.testing.assert_close(x.grad, expected)


# Second derivatives would differentiate the rounding


def test_second_derivatives_and_functorch_under_a_recipe_are_refused():
    chain, x = two_linears()
    text = "second derivatives and functorch transforms do not pass the rounding of Rounding"
    with opfuse.autocast(recipe=Rounding()):
        with opfuse.options(double_backward=True), pytest.raises(RuntimeError, match=text):
            chain(x)
        with pytest.raises(RuntimeError, match=text):
            torch.func.grad(lambda x: chain(x).sum())(x)


def test_a_recipe_that_is_not_json_able_is_told_when_it_is_made():
    @dataclasses.dataclass(frozen=True)
    class Odd(opfuse.Recipe):
        levels: int = 4
        dtype: torch.dtype = torch.float16

    with pytest.raises(TypeError, match=r"Odd\.dtype must be JSON-able, got torch\.float16"):
        Odd(levels=3)
    assert (
        Odd(dtype=None).to_json()
        == '{"backward_override": null, "dtype": null, "levels": 4, "recipe": "Odd"}'
    )


@pytest.mark.parametrize("count", [1, 3])
def test_another_context_fn_returns_two_contexts(count):
    with pytest.raises(ValueError, match=f"checkpoint_contexts: .* two contexts.*returned {count}"):
        opfuse.checkpoint_contexts(lambda: [contextlib.nullcontext()] * count)
