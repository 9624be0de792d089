"""The kit's recipes, the chains for patterns with casts, and how codes are compared."""

import dataclasses

import pytest
import torch
from chains import Forwarding
from opfuse_quantized.formats import MXTensor

import opfuse
from opfuse import ops, testing
from opfuse.core.fusion import Fusion, OneOrMore, Optional
from opfuse.core.quantization import BOTH, COLUMNWISE, ROWWISE, Quantizer
from opfuse.core.quantization.formats import ScaledTensor
from opfuse.testing.generate import matched
from opfuse.testing.reference import compare_codes
from opfuse.testing.running import Declined, Failure, only
from opfuse.tuning.tolerance import code_steps

pytestmark = pytest.mark.alone

TOYS = [testing.PerTensor(), testing.PerBlock(), testing.Delayed()]


def subject(passes, *pattern, **given):
    return testing.Subject("test", passes, Fusion(pattern, Forwarding, name="fusion", **given))


def classes(made):
    return [op.cls.__name__ for op in made]


PLACES = {
    "GELU, Cast": ("forward", (ops.GELU, ops.Cast), [], ["BasicLinear"], {1}),
    "Cast, BasicLinear": ("forward", (ops.Cast, ops.BasicLinear), [], [], {0}),
    "Cast": ("forward", (ops.Cast,), [], ["BasicLinear"], {0}),
    "Cast, Bias, GELU": ("backward", (ops.Cast, ops.Bias, ops.GELU), ["BasicLinear"], [], {1}),
    "BasicLinear, Cast": ("backward", (ops.BasicLinear, ops.Cast), [], [], {1}),
}


@pytest.mark.parametrize("name", PLACES)
def test_what_is_around_a_pattern_with_casts(name, no_plugins):
    passes, pattern, before, after, edges = PLACES[name]
    chains = testing.make_chains(subject(passes, *pattern))
    assert [case.recipe for case in chains.plain] == TOYS and not chains.declined
    for case in chains.plain:
        assert (classes(case.before), classes(case.after)) == (before, after)
        assert case.edges == edges
        assert [type(op) for op in matched(case)] == list(pattern)
    assert chains.residual == () and {case.recipe for case in chains.quantized} == {*TOYS}


def test_where_nothing_is_cast_a_case_is_declined(no_plugins):
    chains = testing.make_chains(subject("forward", ops.GELU, ops.Cast, ops.SiLU))
    assert not chains.all and len(chains.declined) == 3
    assert {*chains.declined.values()} == {"nothing is cast where its pattern has a cast"}
    (case, *_) = testing.make_chains(subject("backward", ops.Cast, ops.Bias)).plain
    with pytest.raises(Declined, match="nothing is cast where"):
        testing.run("codes", case.with_(frozen=("input", "0.weight")))


def test_a_case_under_a_recipe_is_code(no_plugins):
    found = subject("forward", ops.GELU, ops.Cast)
    case = testing.make_chains(found).plain[1]
    text = repr(case.with_(subject=None))
    assert "recipe=testing.PerBlock()" in text and "testing.Op(ops.Cast)" in text
    again = eval(text, {"testing": testing, "ops": ops, "torch": torch})
    assert again.with_(subject=case.subject) == case
    override = testing.PerBlock(backward_override="dequantized")
    assert "PerBlock(backward_override='dequantized')" in repr(case.with_(recipe=override))


# A plugin's own recipe


@dataclasses.dataclass(frozen=True)
class Whole(opfuse.Recipe):
    """Takes whole blocks of 32 alone, and no override but one."""

    def __post_init__(self):
        super().__post_init__()
        if self.backward_override == "dequantized":
            raise ValueError("Whole has no such backward")


class WholeQuantizer(Quantizer):
    def quantize(self, tensor, usage, out=None):
        values, copies = tensor.detach().flatten(0, -2), []
        for used, matrix in zip(usage, (values, values.t()), strict=True):
            one = torch.ones(matrix.shape[0], matrix.shape[1] // 32, device=tensor.device)
            codes = matrix.to(torch.float8_e4m3fn).contiguous()
            copies += [codes, one.to(torch.float8_e8m0fnu)] if used else [None, None]
        if copies[0] is not None:
            copies[0] = copies[0].reshape(tensor.shape)
        return MXTensor(tensor.shape, tensor.dtype, self, *copies)


def _quantizer(recipe, role):
    return WholeQuantizer() if isinstance(recipe, Whole) else None


def not_the_toys(matched, env):
    return isinstance(env.recipe, Whole) or "it knows another recipe"


def test_own_recipes_come_first_with_sizes_that_they_take(register):
    fusions = [
        Fusion([ops.GELU, ops.Cast], Forwarding, not_the_toys, name="own"),
        Fusion([ops.Bias, ops.GELU], Forwarding, name="plain"),
    ]
    register(forward_fusions=fusions, recipes={"whole": Whole}, quantizer=_quantizer)
    chains = testing.make_chains(testing.find("test", "forward", "own"))
    (case,) = chains.plain
    assert (case.recipe, case.rows, case.after[0].args) == (Whole(), (32,), (64, 64))
    assert set(chains.declined.values()) == {"it knows another recipe"}
    for check in ("codes", "output", "gradients", "saved_state", "recipe"):
        outcome = testing.run_all(testing.CHECKS[check], chains)
        assert outcome.ran and outcome.failure is None, str(outcome)
    chains = testing.make_chains(testing.find("test", "forward", "plain"))
    assert [case.recipe for case in chains.plain] == [None]
    assert [case.recipe for case in chains.quantized] == [Whole(), *TOYS]
    outcome = testing.run_all(testing.CHECKS["recipe"], chains)
    assert outcome.ran == 2 + 3 * 3 and outcome.failure is None, str(outcome)


# The kit's recipes


def quantizer(recipe, tensor_type="input"):
    role = opfuse.QuantizerRole("linear", tensor_type)
    with only():
        return opfuse.core.recipe_lookup.new_quantizer(recipe, role, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(3, 300), (130, 8), (2, 3, 5), (7,), (0, 4), ()], ids=str)
@pytest.mark.parametrize("recipe", TOYS, ids=lambda recipe: type(recipe).__name__)
@pytest.mark.parametrize("kind", ["input", "weight", "grad_output"])
def test_toys_round_to_a_few_bits(recipe, kind, shape, dtype):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = x.to(dtype)
    made = quantizer(recipe, kind).quantize(x, BOTH)
    step = 0.125 if kind == "grad_output" else 0.0625
    for usage in (ROWWISE, COLUMNWISE):
        error = (made.dequantize(usage).double() - x.double()).abs()
        assert (error <= step * x.double().abs() + 1e-2).all()


def test_copies_of_blocks_hold_different_values():
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    for kind in ("input", "weight", "grad_output"):
        made = quantizer(testing.PerBlock(), kind).quantize(x, BOTH)
        assert not torch.equal(made.dequantize(ROWWISE), made.dequantize(COLUMNWISE))


def test_delayed_scales_follow_from_earlier_steps():
    one, x = quantizer(testing.Delayed()), torch.full((2, 2), 224.0)
    first = one.quantize(x, ROWWISE)
    assert first.scale_inv.item() == 1 and one.seen.item() == 224
    testing.Delayed().update([one], None)
    assert (one.scale.item(), one.seen.item(), one.count.item()) == (0.5, -1, 1)
    again = one.requantize(x, first.without_data(), ROWWISE)
    assert torch.equal(again.dequantize(), first.dequantize()) and one.seen.item() == -1
    for _ in range(2):
        testing.Delayed().update([one], None)
    assert one.scale.item() == 0.5  # two steps that saw nothing, which says nothing


# Codes


def made(codes, scale=1.0):
    data = torch.tensor(codes, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scale = torch.full((1,), scale)
    return ScaledTensor(data.shape, torch.float32, None, rowwise_data=data, scale_inv=scale)


def judge(got, expected, inexact):
    found = subject("forward", ops.GELU)._replace(inexact=inexact)
    compare_codes(testing.Case(found, ()), "it", got, expected)


CODES = [8 * k % 120 for k in range(2000)]


@pytest.mark.parametrize(
    "changed, inexact, says",
    [
        ({}, False, None),
        ({5: 1}, False, r"1 of 2000 codes differ \(0.05 %\), by up to 1 steps; round where"),
        ({5: 1, 6: 1}, True, None),
        ({5: 1, 6: 1, 7: 1}, True, r"3 of 2000 codes differ \(0.15 %\).*0.1% by one step are"),
        ({5: 2}, True, "1 of 2000 codes differ .*by up to 2 steps"),
    ],
)
def test_a_code_may_be_one_step_off_where_that_is_declared(changed, inexact, says, capsys):
    other = made([code + changed.get(k, 0) for k, code in enumerate(CODES)])
    if says is None:
        judge(other, made(CODES), inexact)
        assert ("2 of 2000 codes differ (0.1 %)" in capsys.readouterr().out) == bool(changed)
    else:
        with pytest.raises(Failure, match=says):
            judge(other, made(CODES), inexact)


def test_a_step_over_zero_and_of_packed_codes():
    below, above = made([0x81]), made([0x01])  # minus and plus the smallest number
    assert code_steps(below.rowwise_data, above.rowwise_data).item() == 2
    packed = [torch.tensor([byte], dtype=torch.uint8) for byte in (0x19, 0x21)]
    powers = [torch.tensor([k], dtype=torch.uint8) for k in (127, 128)]
    assert code_steps(*(k.view(torch.float8_e8m0fnu) for k in powers)).item() == 1
    steps = code_steps(*(byte.view(torch.float4_e2m1fn_x2) for byte in packed))
    assert steps.flatten().tolist() == [2, 1]  # low nibble first: -1 and 1, then 1 and 2


def test_scales_and_formats_are_compared():
    judge(made(CODES, 1 + 5e-7), made(CODES), True)
    with pytest.raises(Failure, match=r"scale_inv is 1.0000005 instead of 1 at \(0,\)"):
        judge(made(CODES, 1 + 5e-7), made(CODES), False)
    with pytest.raises(Failure, match="it is a Tensor instead of a ScaledTensor"):
        judge(torch.ones(2), made(CODES), False)
    turned = dataclasses.replace(
        made(CODES), rowwise_data=None, columnwise_data=made(CODES).rowwise_data.reshape(-1, 1)
    )
    judge(turned, made(CODES), False)  # one copy serves as both
    with pytest.raises(Failure, match="represents other values"):
        judge(turned, made(CODES[1:] + CODES[:1]), False)


def test_the_suite_knows_whose_codes_are_inexact(register):
    declared = {"plugin": "test", "inexact": {"own": "tanh in another way"}}
    suite = type("Suite", (testing.FusionSuite,), declared)
    register(forward_fusions=[Fusion([ops.GELU], Forwarding, name="own")])
    (found,) = testing.subjects("test")
    assert suite.chains(found, "cpu").subject.inexact
    suite.inexact = {"other": "misspelt"}
    with pytest.raises(pytest.fail.Exception, match="inexact names 'other', which is not a fusion"):
        suite().test_offers_something()


@pytest.mark.parametrize(
    "pattern",
    [(ops.BasicLinear,), (ops.BasicLinear, Optional(ops.Bias)), (OneOrMore(ops.BasicLinear),)],
    ids=str,
)
def test_a_linear_after_the_chain_may_be_taken_too(no_plugins, pattern):
    found = testing.make_chains(subject("forward", *pattern))
    assert any(case.after for case in found.quantized)
    found = dataclasses.replace(found, most_cases=8)
    for check in ("saved_state", "codes", "recompute", "recipe"):
        outcome = testing.run_all(testing.CHECKS[check], found)
        assert outcome.failure is None, str(outcome)
        assert outcome.ran or check in ("codes", "recompute")
