"""The parts of ``opfuse.testing``: tolerances, cases and their code, chains out of patterns, and shrinking."""

import contextlib
import dataclasses
import inspect
import itertools
import math
import os
import re
import subprocess
import sys

import pytest
import torch
from fakes import make_plugin

import opfuse
from opfuse import ops, testing
from opfuse.core.fusion import Fusion, OneOf, OneOrMore, Optional, Subclasses
from opfuse.core.recipe_lookup import CACHE_RECIPE
from opfuse.testing import interpreter, machine, report
from opfuse.testing import suite as suites
from opfuse.testing.checks import calls
from opfuse.testing.generate import samples_of, structures
from opfuse.testing.running import Declined, Failure, OneByOne, separate
from opfuse.testing.scenarios import FOUND, combined, covered, variants
from opfuse.testing.tensors import LAYOUTS
from opfuse.tuning.tolerance import skew

pytestmark = pytest.mark.alone

CODE = """
import sys, opfuse
assert not [name for name in sys.modules if name.split('.')[0] == 'pytest' or name.startswith('opfuse.testing')]
import opfuse.testing
print([name for name in sys.modules if name.split('.')[0] == 'triton'])
"""


def subject(*pattern, kind="forward", build=opfuse.FusedOperation, **given):
    return testing.Subject("test", kind, Fusion(pattern, build, name="fusion", **given))


def test_the_core_does_not_import_it_and_it_does_not_import_triton():
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, env={**os.environ}
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_every_check_is_listed_and_described():
    assert set(FOUND) == set(testing.CHECKS)
    for name, check in testing.CHECKS.items():
        assert check.name == name and check.run.__doc__.rstrip().endswith(".")


# Tolerances


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str
)
def test_what_is_close_enough(dtype):
    truth = (
        torch.randn(50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        .to(dtype)
        .double()
    )
    rtol, atol = testing.tolerance(dtype)
    largest = truth.abs().max()
    testing.assert_close(truth.to(dtype), truth)
    allowed = (atol + rtol * largest).item()
    testing.assert_close((truth + 0.4 * allowed).to(dtype), truth)
    with pytest.raises(AssertionError, match=r"y \(.*\) is wrong by .* is allowed"):
        testing.assert_close((truth + 2 * allowed).to(dtype), truth, what="y")


def test_products_in_fp32_may_be_done_in_tf32():
    truth = torch.tensor([1000.0], dtype=torch.float64)
    testing.assert_close((truth + 0.9).float(), truth, gemm=True)
    with pytest.raises(AssertionError, match="is wrong by 0.9"):
        testing.assert_close((truth + 0.9).float(), truth)


@pytest.mark.parametrize(
    "got, says",
    [
        (torch.zeros(3), r"has shape \(3,\) instead of \(2,\)"),
        (torch.tensor([torch.nan, 1.0]), "is NaN in 1 places, expected in 0"),
        (torch.tensor([torch.inf, 1.0]), "is inf in 1 places, expected in 0"),
    ],
)
def test_what_is_never_close(got, says):
    with pytest.raises(AssertionError, match=says):
        testing.assert_close(got, torch.ones(2, dtype=torch.float64))


@pytest.mark.parametrize("layout", ["strided", "transposed", "expanded", "sliced"])
def test_lay_out_changes_the_strides_and_not_the_values(layout):
    x = torch.arange(12.0).reshape(3, 4)
    laid_out = testing.lay_out(x, layout)
    assert laid_out.shape == x.shape and laid_out.stride() != x.stride()
    assert torch.equal(laid_out, x) or (
        layout == "expanded" and torch.equal(laid_out, x[:1].expand(3, 4))
    )


# Cases


def test_a_fusion_that_trades_time_is_tested_where_it_is_used():
    found = testing.make_chains(
        subject(ops.GELU, kind="joint", build=OneByOne, declares=("trades_time",))
    )
    assert found.plain and {case.prefer for case in (*found.all, *found.models)} == {"memory"}
    outcome = testing.run_all(testing.CHECKS["gradients"], found)
    assert outcome.failure is None and outcome.ran > 0 and not outcome.declined
    usual = testing.make_chains(subject(ops.GELU, kind="joint", build=OneByOne))
    assert {case.prefer for case in usual.all} == {"speed"}


def test_a_case_is_code():
    case = testing.Case(
        subject(ops.SwiGLU),
        (testing.Op(ops.SwiGLU, glu_interleave_size=2), testing.Op(testing.CubicActivation)),
        after=(testing.Op(ops.ScaledActivation, testing.Op(ops.SiLU)),),
        rows=(2, 3),
        dtype=torch.bfloat16,
        frozen=("input",),
    )
    names = {"testing": testing, "ops": ops, "torch": torch}
    text = repr(case).replace(repr(case.subject), "None")
    assert eval(text, names) == case.with_(subject=None)
    assert "layout" not in text  # what is as usual is not said


def test_a_case_has_the_same_values_every_time_and_in_fp64():
    case = testing.Case(
        subject(ops.BasicLinear),
        (testing.Op(ops.BasicLinear, 8, 12), testing.Op(ops.AddExtraInput)),
    )
    state = torch.get_rng_state()
    once, again, wide = case.build(), case.build(), case.build(torch.float64)
    assert torch.equal(torch.get_rng_state(), state)
    assert list(once.leaves) == ["input", "extra 0", "0.weight"] and once.leaves[
        "extra 0"
    ].shape == (3, 12)
    for name, leaf in once.leaves.items():
        assert torch.equal(leaf, again.leaves[name]) and torch.equal(
            leaf.double(), wide.leaves[name]
        )


def test_a_chain_that_cannot_run_is_declined():
    case = testing.Case(
        subject(ops.Bias), (testing.Op(ops.Bias, 8), testing.Op(ops.Reshape, (5, 7)))
    )
    with pytest.raises(Declined, match="the separate ops raise RuntimeError"):
        separate(case)


# Chains out of patterns


def test_optional_and_repeated_elements():
    found = list(structures((ops.BasicLinear, Optional(ops.Bias), OneOrMore(ops.GELU))))
    linear, bias, gelu = ops.BasicLinear, ops.Bias, ops.GELU
    assert found == [
        [linear, bias, gelu],
        [linear, bias, gelu, gelu],
        [linear, gelu],
        [linear, gelu, gelu],
    ]


def classes(chains):
    return [[op.cls for op in case.ops] for case in chains]


def test_every_activation_and_one_that_nobody_knows():
    chains = testing.make_chains(
        subject(ops.BasicLinear, Optional(ops.Bias), Subclasses(ops.Activation))
    )
    built_in = {getattr(ops, name) for name in ops.__all__}
    activations = {cls for cls in built_in if issubclass(cls, ops.Activation)} - {
        ops.Activation,
        ops.GatedActivation,
    }
    for with_bias in (True, False):
        seen = {chain[-1] for chain in classes(chains.all) if (ops.Bias in chain) == with_bias}
        assert seen == {*activations, testing.CubicActivation, testing.CubicGLU}
    assert classes(chains.plain) == [
        [ops.BasicLinear, ops.Bias, ops.GELU],
        [ops.BasicLinear, ops.GELU],
    ]


def test_either_class_and_both_ways_to_add():
    chains = testing.make_chains(subject(OneOf(ops.Bias, ops.BasicLinear), ops.AddExtraInput))
    assert {chain[0] for chain in classes(chains.all)} == {ops.Bias, ops.BasicLinear}
    assert {op.kwargs for case in chains.all for op in case.ops[1:]} == {(), (("in_place", True),)}
    assert chains.residual and all(
        case.before[0].cls is ops.MakeExtraOutput for case in chains.residual
    )


def test_chains_are_as_wide_as_the_condition_asks():
    def wide(matched, env):
        return True if matched[0].in_features >= 100 else "it is too narrow"

    chains = testing.make_chains(subject(ops.Bias, when=wide))
    assert [case.ops[0].args for case in chains.plain] == [(128,)]
    never = testing.make_chains(subject(ops.Bias, when=lambda matched, env: "it never applies"))
    assert not never.all and list(never.declined.values()) == ["it never applies"]


def test_chains_are_in_the_dtype_and_of_the_rows_that_the_condition_asks():
    def only_bf16(matched, env):
        return True if env.dtype is torch.bfloat16 else "it is for bf16"

    def aligned(matched, env):
        return True if env.row_alignment == 16 else "it takes blocks of 16 rows"

    (case,) = testing.make_chains(subject(ops.GELU, when=only_bf16)).plain
    assert (case.dtype, case.rows) == (torch.bfloat16, (3,))
    (case,) = testing.make_chains(subject(ops.GELU, when=aligned, needs=("row_alignment",))).plain
    assert (case.dtype, case.rows) == (torch.float32, (16,))


class Stranger(ops.Identity):
    """An op whose constructor nobody can guess."""

    def __init__(self, one, two):
        super().__init__()


def test_ops_that_are_not_built_in():
    chains = testing.make_chains(subject(Stranger))
    assert not chains.all and "makers" in chains.declined["Stranger"]
    chains = testing.make_chains(
        subject(Stranger), makers={Stranger: lambda width: testing.Op(Stranger, 1, width)}
    )
    assert [case.ops[0].args for case in chains.plain] == [(1, 8)]


# Shrinking, and what is reported


class OffInLargeHalfPrecision(opfuse.FusedOperation):
    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        act = self.basic_ops[0]
        y = act.forward_value(act.operand(basic_op_ctxs[0], input_))
        return (y + 1 if y.dtype is torch.bfloat16 and y.ndim == 3 else y), [()]


def test_the_smallest_failing_case_is_reported(register):
    fusion = Fusion([Subclasses(ops.Activation)], OffInLargeHalfPrecision, name="off")
    register(forward_fusions=[fusion], name="off")
    (found,) = testing.subjects("off")
    case = testing.Case(
        found, (testing.Op(ops.SiLU),), rows=(7, 9), dtype=torch.bfloat16, layout="strided"
    )
    check = testing.CHECKS["output"]._replace(cases=lambda chains: [case])
    outcome = testing.run_all(check, testing.make_chains(found))
    assert outcome.failure.startswith("the output is wrong by 1")
    assert (outcome.case.rows, outcome.case.dtype, outcome.case.layout) == (
        (2, 3),
        torch.bfloat16,
        "contiguous",
    )
    text = testing.snippet("output", outcome.case)
    assert "rows=(2, 3)" in text and "layout" not in text
    with pytest.raises(Failure, match="the output is wrong by 1"):
        exec(text, {})


def test_what_a_check_counts(register):
    def not_silu(matched, env):
        return "it has no SiLU" if isinstance(matched[0], ops.SiLU) else True

    fusion = Fusion([OneOf(ops.GELU, ops.SiLU)], OffInLargeHalfPrecision, not_silu, name="counts")
    register(forward_fusions=[fusion], name="counts")
    (found,) = testing.subjects("counts")
    case = testing.Case(found, (testing.Op(ops.SiLU),))
    check = testing.CHECKS["output"]._replace(
        cases=lambda chains: [case, case.with_(ops=(testing.Op(ops.GELU),))]
    )
    outcome = testing.run_all(check, testing.make_chains(found))
    assert (outcome.ran, outcome.declined, outcome.failure) == (1, ("it has no SiLU",), None)
    with pytest.raises(LookupError, match="plugin 'counts' offers no joint fusion 'counts'"):
        testing.find("counts", "joint", "counts")


# Errors of half precision, taken together


def half_errors(change):
    """What ``skew`` says of exact numbers that ``change`` makes bf16, compared with those rounded to nearest."""
    generator = torch.Generator().manual_seed(0)
    truth = torch.randn(4096, generator=generator, dtype=torch.float64)
    return skew(change(truth), truth, truth.bfloat16())


def cut(truth):
    """To bf16 without rounding."""
    return (truth.float().view(torch.int32) & -65536).view(torch.float32).bfloat16()


@pytest.mark.parametrize(
    "change, says",
    [
        (torch.Tensor.bfloat16, None),
        (lambda truth: truth.float().bfloat16().half().bfloat16(), None),
        (lambda truth: (truth * (1 + 2.0**-12)).bfloat16(), None),
        (cut, "away from zero by -.* on average"),
        (lambda truth: truth.bfloat16() + 2.0**-8, "too large by .* on average"),
        (
            lambda truth: torch.where(truth.abs() < 0.05, 0.0, truth).bfloat16(),
            "has errors of .* eighth 1 by magnitude",
        ),
    ],
)
def test_errors_that_are_small_but_all_alike(change, says):
    found = half_errors(change)
    assert found is None if says is None else re.search(says, found)


def test_few_errors_say_nothing_together():
    truth = torch.ones(100, dtype=torch.float64)
    assert skew((truth * 0.99).bfloat16(), truth, truth.bfloat16()) is None


class AlwaysTanh(opfuse.FusedOperation):
    """GELU by tanh, whatever the op says."""

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        x = self.basic_ops[0].operand(basic_op_ctxs[0], input_)
        return torch.nn.functional.gelu(x, approximate="tanh"), [()]


def test_arguments_that_are_not_the_default_are_tried(no_plugins):
    outcome = testing.run_all(
        testing.CHECKS["output"], testing.make_chains(subject(ops.GELU, build=AlwaysTanh))
    )
    assert outcome.failure and "approximate='none'" in str(outcome)


# Conditions, and what is set around the tests


def not_the_kits(ops, env):
    if type(ops[1].quantizer).__name__ == "_PerBlock":
        return "it knows no blocks"
    return True


def affine(ops, env):
    if ops[0].weight is None:
        return "it has no weight"
    return True


def not_cached(ops, env):
    if ops[0].cache_quantized_input:
        return "it keeps its input as it is"
    return True


REFUSES = {
    "width": lambda ops, env: "it is too wide" if ops[0].out_features > 2048 else True,
    "features": lambda ops, env: "it is too wide" if (env.features or 0) > 8192 else True,
    "option": lambda ops, env: "it is slow" if env.options.get("prefer") == "memory" else True,
    "setting": lambda ops, env: (
        "it adds in any order" if torch.are_deterministic_algorithms_enabled() else True
    ),
    "frozen": lambda ops, env: True if ops[0].weight.requires_grad else "it is of use in training",
    "never": lambda ops, env: "there are too many ops" if len(ops) > 7 else True,
}
"""What an author may refuse, and no case of the kit shows."""

CONDITIONS = [
    ((ops.GELU, ops.Cast), not_the_kits),
    ((ops.LayerNorm,), affine),
    ((ops.GELU,), not_cached),
    ((ops.RMSNorm,), lambda ops, env: "its eps is large" if ops[0].eps > 0.1 else True),
    *(((ops.BasicLinear, ops.Bias), when) for when in REFUSES.values()),
]


@pytest.mark.parametrize(
    "pattern, when", CONDITIONS, ids=["casts", "affine", "cached", "eps", *REFUSES]
)
def test_a_condition_may_refuse_what_no_case_shows(no_plugins, pattern, when):
    found = testing.make_chains(subject(*pattern, build=OneByOne, when=when))
    outcome = testing.run_all(testing.CHECKS["condition"], found)
    assert outcome.failure is None and outcome.ran, str(outcome)


def in_turns(answers):
    return lambda ops, env: next(answers)


@pytest.mark.parametrize(
    "when, says",
    [
        (
            in_turns(itertools.cycle([True, "not this time"])),
            "says .*'not this time'.* in Environment",
        ),
        (lambda ops, env: True if ops[0].weight is not None else 1 / 0, "raised ZeroDivisionError"),
        (lambda ops, env: ops[0].weight is not None, "returned False instead of True"),
    ],
    ids=["in turns", "raises", "no sentence"],
)
def test_an_answer_that_is_none_is_told_for_any_chain(no_plugins, when, says):
    found = testing.make_chains(subject(ops.LayerNorm, build=OneByOne, when=when))
    assert re.search(says, str(testing.run_all(testing.CHECKS["condition"], found)))


def test_recipes_of_a_plugin_that_is_gone_are_not_served(no_plugins):
    def served():
        with testing.recipes.offered(), opfuse.plugins.using(testing.recipes.NAME):
            return opfuse.core.recipe_lookup.recipe_of(CACHE_RECIPE)

    class Own(opfuse.Recipe):
        pass

    with opfuse.plugins.isolated(), opfuse.plugins.using("own"):
        opfuse.plugins.register(make_plugin(recipes={CACHE_RECIPE: Own}), name="own")
        assert opfuse.core.recipe_lookup.recipe_of(CACHE_RECIPE) == Own()
        assert served() == Own()
    assert served() == testing.PerTensor()


@pytest.mark.parametrize("weights", [None, (0.5, *[2.0] * 7)])
def test_numbers_that_hold_a_tensor_are_compared(no_plugins, weights):
    loss = testing.Op(ops.CrossEntropy, weight=weights)
    testing.run("saved_state", testing.Case(subject(ops.CrossEntropy, build=OneByOne), (loss,)))


@pytest.mark.parametrize("channels", ["hidden", "residual"])
def test_each_extra_output_has_a_channel_of_its_own(channels):
    chain = testing.Op(ops.MakeExtraOutput), testing.Op(ops.MakeExtraOutput)
    case = testing.Case(subject(ops.MakeExtraOutput), chain, channels=channels)
    own = [op.extra_output_channels for op in case.basic_ops()]
    assert len({*own}) == 2 and len(case.build()()) == (1 if channels == "hidden" else 3)


def test_how_many_extra_tensors_an_op_has_is_no_number_of_it():
    op = ops.TokenLogProb()
    assert {"num_extra_outputs", "temperature"} <= {*vars(op)}
    names = [name for _, name, _ in calls._others(op)]
    assert "temperature" in names and "num_extra_outputs" not in names


class Breaks(opfuse.BasicOperation):
    """The compiler cannot take it whole."""

    saved_names = ()

    def op_forward(self, ctx, input_, **unused):
        torch._dynamo.graph_break()
        return input_ * 2

    def op_backward(self, ctx, grad_output):
        return grad_output * 2, ()


def test_what_the_separate_ops_cannot_be_compiled_for_is_no_fault(register):
    register(joint_fusions=[Fusion([Breaks], OneByOne, name="breaks")], name="breaks")
    case = testing.Case(testing.find("breaks", "joint", "breaks"), (testing.Op(Breaks),))
    testing.run("gradients", case)
    with pytest.raises(Declined, match="the separate ops raise"):
        testing.run("compile", case)


def test_options_do_not_reach_the_checks(register):
    fusion = Fusion([ops.GELU], OffInLargeHalfPrecision, name="off")
    register(forward_fusions=[fusion], name="off")
    case = testing.Case(
        testing.find("off", "forward", "off"),
        (testing.Op(ops.GELU),),
        rows=(2, 3),
        dtype=torch.bfloat16,
    )
    with opfuse.options(fusion_limit=0), pytest.raises(Failure, match="the output is wrong by 1"):
        testing.run("output", case)
    assert opfuse.core.settings.current.options == ()


def test_dropout_draws_the_same_in_every_call():
    case = testing.Case(subject(ops.Dropout), (testing.Op(ops.Dropout, 0.5),), rows=(20,))
    built, state = case.build(), torch.get_rng_state()
    (first,), (again,) = built(), built()
    assert torch.equal(first, again) and not torch.equal(first, built.leaves["input"])
    assert torch.equal(torch.get_rng_state(), state)
    built = case.with_(training=False).build()
    assert torch.equal(built()[0], built.leaves["input"])


def test_arguments_are_not_only_the_usual_ones():
    def made(cls):
        chains = testing.make_chains(subject(cls))
        return {
            (case.rows, *case.ops[0].args, *(name for name, _ in case.ops[0].kwargs))
            for case in chains.all
        }

    assert made(ops.RMSNorm) >= {((3,), 8, "eps"), ((4, 4), (4, 8))}
    assert made(ops.Dropout) == {((3,), p) for p in (0.0, 0.5, 1.0)}
    for cls in (ops.ScaledClampedQGeGLU, ops.ClampedSwiGLU):
        assert made(cls) == {
            ((3,),),
            ((3,), "glu_interleave_size"),
            ((3,), "limit", "alpha", "glu_linear_offset"),
        }


def test_the_thorough_mode_has_every_case_of_the_quick_one_and_more():
    made = [
        testing.make_chains(subject(ops.BasicLinear, ops.Bias), thorough=thorough)
        for thorough in (False, True)
    ]
    for name, check in testing.CHECKS.items():
        quick, thorough = ({str(case) for case in check.cases(chains)} for chains in made)
        assert quick <= thorough, name
        assert name != "held_results" or quick < thorough
    for suite in (
        testing.FusionSuite,
        type("Thorough", (testing.FusionSuite,), {"thorough": True}),
    ):
        assert suite.chains(subject(ops.Bias), "cpu").thorough is suite.thorough


def test_widths_of_models_on_either_side_of_a_product():
    found = {
        case.ops[0].args for case in testing.make_chains(subject(ops.BasicLinear, ops.Bias)).models
    }
    assert found == {args for width in (768, 1536, 4096) for args in ((width, 8), (8, width))}
    assert {case.ops[0].args for case in testing.make_chains(subject(ops.RMSNorm)).models} == {
        (768,),
        (1536,),
        (4096,),
    }


def test_layouts_of_parameters_and_of_a_summed_gradient():
    ops_ = (testing.Op(ops.BasicLinear, 8, 12), testing.Op(ops.Bias, 12))
    case = testing.Case(
        subject(ops.BasicLinear), ops_, rows=(2, 5), layout="summed", params="transposed"
    )
    built, plain = case.build(), case.with_(layout="contiguous", params="contiguous").build()
    assert built.leaves["0.weight"].stride() == (1, 12) and built.leaves["input"].is_contiguous()
    assert all(torch.equal(leaf, plain.leaves[name]) for name, leaf in built.leaves.items())
    (weight,) = case.weights(built())
    assert weight.shape == (2, 5, 12) and set(weight.stride()) == {0}
    strided = case.with_(params="strided").build().leaves
    assert strided["1.bias"].stride() == (2,) and torch.equal(
        strided["1.bias"], plain.leaves["1.bias"]
    )


@pytest.mark.parametrize("interpreting, most", [(False, None), (True, 3)])
def test_rows_are_limited_in_the_interpreter_alone(monkeypatch, interpreting, most):
    rows = []
    monkeypatch.setattr(suites, "is_interpreting", lambda: interpreting)
    monkeypatch.setattr(report, "run", lambda check, case: rows.append(math.prod(case.rows)))
    limited = type("Limited", (testing.FusionSuite,), {"most_rows": 3})
    chains = limited.chains(subject(ops.Bias), "cpu")
    outcome = testing.run_all(testing.CHECKS["output"], chains)
    assert (chains.most_rows, outcome.ran) == (most, len(rows))
    assert (max(rows) <= 3) is interpreting and rows


def test_a_sample_of_cases_is_the_same_each_time(monkeypatch):
    ran = []
    monkeypatch.setattr(report, "run", lambda check, case: ran.append(case))
    every = testing.FusionSuite.chains(subject(ops.GELU), "cpu")
    for most in (None, 5, 5, 10_000):
        testing.run_all(testing.CHECKS["output"], dataclasses.replace(every, most_cases=most))
    all_of_them = ran[: (len(ran) - 10) // 2]
    some = ran[len(all_of_them) :][:5]
    assert len(all_of_them) > 20 and len(set(some)) == 5 and set(some) < set(all_of_them)
    assert ran == [*all_of_them, *some, *some, *all_of_them]


@pytest.mark.parametrize("thorough", [False, True])
def test_a_sample_of_cases_is_left_aside_where_all_are_asked_for(thorough):
    limited = type("Limited", (testing.FusionSuite,), {"most_cases": 3, "thorough": thorough})
    assert limited.chains(subject(ops.Bias), "cpu").most_cases == (None if thorough else 3)


@pytest.mark.parametrize(
    "programs, rows",
    [(lambda n: 2 * n, 256), (lambda n: 1 + n // 64, 64 * 512), (lambda n: 8 * n, 128)],
)
def test_rows_follow_from_the_grid_where_kernels_are_interpreted(monkeypatch, programs, rows):
    places = []

    @contextlib.contextmanager
    def counting():
        places.clear()
        yield places

    monkeypatch.setattr(interpreter, "count_programs", counting)
    run = lambda case: places.extend(range(programs(case.rows[0])))  # noqa: E731
    monkeypatch.setattr(machine, "fused", run)
    assert machine.rows_by_grid(testing.make_chains(subject(ops.Bias))) == rows


# Circumstances


def test_any_two_values_of_two_axes_are_together():
    axes = {"a": [1, 2, 3], "b": "xyzw", "c": [True, False], "d": range(5)}
    rows = list(combined(axes))
    for one, other in itertools.combinations(axes, 2):
        pairs = {(row[one], row[other]) for row in rows}
        assert pairs == set(itertools.product(axes[one], axes[other]))
    assert len(rows) < 2 * 4 * 5 and rows == list(combined(axes)) != list(combined(axes, 1))


def test_a_case_meets_all_pairs_of_what_its_fusion_takes():
    def no_fp16(matched, env):
        return "it has no fp16" if env.dtype is torch.float16 else True

    (case,) = testing.make_chains(subject(ops.GELU, when=no_fp16)).plain
    found = covered(case)
    assert len(found) < 100 and torch.float16 not in {one.dtype for one in found}
    pairs = {(one.dtype, one.layout, len(one.rows)) for one in found}
    for layout, rank in itertools.product(LAYOUTS, (0, 1, 2, 3)):
        assert any(pair[1:] == (layout, rank) for pair in pairs)


def test_numbers_and_flags_of_ops_come_in_pairs():
    (case, *_) = testing.make_chains(subject(ops.ClampedSwiGLU)).plain
    names = "alpha", "glu_linear_offset"
    given = {tuple(dict(one.ops[0].kwargs)[name] for name in names) for one in variants(case)}
    assert set(itertools.product((0.0, 1.0, -1.0, 2.0, 0.5), repeat=2)) <= given


def rows_of_many(matched, env):
    return True if env.rows is None or env.rows >= 64 else "it takes 64 rows or more"


def test_rows_are_doubled_until_the_condition_takes_them():
    chains = testing.make_chains(
        subject(ops.GELU, build=OneByOne, when=rows_of_many, needs=("rows",))
    )
    assert {(case.rows, case.least) for case in chains.plain} == {((64,), 64)}
    for name in ("output", "nan_and_inf", "interleaved"):
        outcome = testing.run_all(testing.CHECKS[name], chains)
        assert outcome.failure is None and outcome.ran, str(outcome)


# Limits


def limited(found, *names):
    given = {"plugin": found.plugin, "limits": dict.fromkeys(names, "it cannot")}
    return type("Limited", (testing.FusionSuite,), given)()


@pytest.mark.parametrize("fails", [True, False])
def test_a_limit_means_the_same_in_both_modes(monkeypatch, fails):
    def run(check, chains):
        found = "wrong" if chains.thorough and fails else None
        return testing.Outcome(check.name, 1, failure=found)

    monkeypatch.setattr(suites, "run_all", run)
    monkeypatch.setattr(testing.FusionSuite, "thorough", False)
    found, (tier, *_) = subject(ops.GELU, build=OneByOne), testing.tiers()
    error, says = pytest.fail.Exception, "but it works"
    if fails:
        error, says = pytest.skip.Exception, "declared limit: it cannot"
    with pytest.raises(error, match=says):
        limited(found, "nan_and_inf").test_fusion(tier, found, "nan_and_inf")


class Twice(opfuse.FusedOperation):
    """Draws otherwise, as it were."""

    again = False

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        (act,) = self.basic_ops
        y = 2 * act.forward_value(act.operand(basic_op_ctxs[0], input_))
        self.calls = getattr(self, "calls", 0) + 1
        return (y + 1 if self.again and self.calls > 1 else y), [()]


class TwiceAndThenOtherwise(Twice):
    again = True


@pytest.mark.parametrize("build", [Twice, TwiceAndThenOtherwise])
def test_numbers_of_its_own_are_compared_with_its_lone_call(register, build):
    register(forward_fusions=[Fusion([ops.GELU], build, name="fusion")], name="twice")
    (found,) = testing.subjects("twice")
    suite, (tier, *_) = limited(found, "output", "gradients"), testing.tiers()
    if build is Twice:
        suite.test_fusion(tier, found, "orders")
        return
    says = {"repeatable": "call 2", "orders": "in call 2", "interleaved": "in number 2"}
    for check, number in says.items():
        with pytest.raises(pytest.fail.Exception, match=number):
            suite.test_fusion(tier, found, check)


# What ops offer


class Offering(ops.AddExtraInput):
    """Says how to make it, with one sample that it refuses, and what it takes beside its input."""

    num_extra_inputs = 3
    extra_input_dtypes = ("floating", "floating", "integer")

    def __init__(self, one, *, positive=1.0):
        if positive < 0:
            raise ValueError(positive)
        super().__init__()

    @classmethod
    def sample_inputs(cls, op, features, out_features):
        yield op(cls, features, positive=-1.0)
        yield op(cls, features)
        yield op(cls, out_features or "any")

    def sample_extra_inputs(self, shape, generator):
        return [shape[:-1], torch.rand(7, generator=generator), torch.tensor([4])]

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        return input_.clone(), [()]

    def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
        return grad_output.clone(), [()], [(None, None, None)]


class Inheriting(Offering):
    def __init__(self, one):
        super().__init__(one, positive=2.0)


@pytest.mark.parametrize("cls", [Offering, Inheriting])
def test_an_op_says_how_to_make_it(cls):
    chains = testing.make_chains(subject(cls))
    assert [case.ops[0].args for case in chains.all[:2]] == [(8,), ("any",)]
    own = testing.make_chains(subject(cls), makers={cls: lambda width: testing.Op(cls, "own")})
    assert [case.ops[0].args for case in own.plain] == [("own",)]


def test_an_op_says_what_it_takes_beside_its_input():
    case = testing.Case(subject(Offering), (testing.Op(Offering, 1),), dtype=torch.bfloat16)
    leaves = case.build().leaves
    drawn, given, whole = (leaves[f"extra {k}"] for k in range(3))
    assert drawn.shape == (3,) and drawn.requires_grad and drawn.dtype is torch.bfloat16
    assert given.shape == (7,) and not given.requires_grad and given.dtype is torch.bfloat16
    assert whole.tolist() == [4] and whole.dtype is torch.int64
    wide = case.build(torch.float64).leaves["extra 1"]
    assert torch.equal(wide, given.double())  # the same values, rounded


class Plain(ops.Identity):
    num_extra_inputs = 3
    extra_input_dtypes = ("floating", "integer", "bool")


def test_an_op_that_offers_nothing_gets_what_is_usual():
    leaves = testing.Case(subject(Plain), (testing.Op(Plain),), rows=(2, 5)).build().leaves
    shapes = [tuple(leaf.shape) for leaf in leaves.values()]
    assert shapes == [(2, 5, 8), (2, 5, 8), (2, 5), (2, 5)]
    assert leaves["extra 1"].max() < 8 and leaves["extra 2"].dtype is torch.bool


def built_in_ops():
    every = (getattr(ops, name) for name in ops.__all__)
    basic = [cls for cls in every if issubclass(cls, opfuse.BasicOperation)]
    alone = [cls for cls in basic if not getattr(cls, "needs_tools", ())]
    return [cls for cls in alone if not inspect.isabstract(cls) and cls is not ops.Cast]


@pytest.mark.parametrize("cls", built_in_ops(), ids=lambda cls: cls.__name__)
def test_every_op_of_opfuse_can_be_made(cls):
    samples = samples_of(cls, 8, None)
    assert samples or cls is ops.TrackedDropout  # needs a function
    for op in samples:
        assert isinstance(op(), cls)
        case = testing.Case(subject(cls), (op,), rows=(4, 4))
        (y, *_) = case.build()()
        assert y.isfinite().all()
