"""Planning: which fusions are taken, in which order they choose, and what is said about the rest."""

import itertools
import math
import random
import threading
import time
import warnings

import pytest
import torch
from fakes import registered

import opfuse
from opfuse import Environment, Fusion, OneOrMore, PluginWarning, Subclasses, ops
from opfuse.core import plugins
from opfuse.core.engine.chain import Chain
from opfuse.core.engine.cover import best_cover
from opfuse.core.engine.facts import Candidate, Edges, Facts, Needs
from opfuse.core.engine.plan import FusionPlan, PlanStep, Refusal
from opfuse.core.engine.selection import choose
from opfuse.core.records import FusionSource, Precedence
from opfuse.report.calls import plan_of


class Op(opfuse.BasicOperation):
    saved_names = ()
    factor = 1.0

    def op_forward(self, ctx, input_, *, prev_op_grad_output_quantizer, next_op_input_quantizer):
        return input_ * self.factor

    def op_backward(self, ctx, grad_output):
        return grad_output * self.factor, ()


class A(Op):
    factor = 2.0


class B(Op):
    factor = 3.0


class C(Op):
    factor = 5.0


class D(Op):
    def op_forward(
        self, ctx, input_, *, prev_op_grad_output_quantizer, next_op_input_quantizer, by=1.0
    ):
        return input_ * by


OPS = {"A": A, "B": B, "C": C, "D": D}
USUAL = Precedence(2)


def ops_of(letters):
    return [OPS[letter]() for letter in letters]


def source(fusion, kind="forward", distribution="plugin-x", version="1.0", precedence=USUAL):
    return FusionSource(kind, fusion, distribution, version, precedence)


def decide(letters, *sources, first_backward=0, kwargs=None, excluded=frozenset(), **env):
    env = Environment(
        **{"device": torch.device("cpu"), "capability": None, "dtype": torch.float32, **env}
    )
    ops = ops_of(letters) if isinstance(letters, str) else letters
    needs = Needs(env.requires_grad, first_backward, (True,) * len(ops), ((),) * len(ops))
    empty = ((),) * len(ops)
    return choose(Facts(Chain(ops), env, needs, Edges(), empty, kwargs or empty), sources, excluded)


def taken(choice):
    return [(c.source.name, c.passes, c.start, c.stop) for c in choice.taken]


def reasons(choice):
    return {refusal.fusion: refusal.reason for refusal in choice.refused}


# The best cover


def tie(candidate):
    """What decides between covers of equal benefit."""
    return candidate.source.distribution or "", candidate.source.name


BENEFITS = [0, 1, 1, 2, 2.5, 4]


def candidate(where, start, stop, benefit):
    return Candidate(2 * start + 1, 2 * stop, (A(),) * (stop - start), where, benefit)


def test_best_cover_is_what_brute_force_finds():
    rng = random.Random(0)
    for _ in range(300):
        length = rng.randint(1, 8)
        candidates = []
        for _ in range(rng.randint(0, 9)):
            start = rng.randrange(length)
            fusion = Fusion([A], Op, name=rng.choice("abc"))
            where = source(fusion, distribution=rng.choice(["x", "y", None]))
            candidates.append(
                candidate(where, start, rng.randint(start + 1, length), rng.choice(BENEFITS))
            )
        best = min(
            (
                subset
                for size in range(len(candidates) + 1)
                for subset in itertools.combinations(
                    sorted(candidates, key=lambda c: c.start), size
                )
                if all(a.stop <= b.start for a, b in itertools.pairwise(subset))
            ),
            key=lambda subset: (
                -sum(c.benefit for c in subset),
                -sum(c.stop - c.start for c in subset),
                len(subset),
                [tie(c) for c in subset],
            ),
        )
        found = best_cover(candidates)
        assert [(tie(c), c.start, c.stop, c.benefit) for c in found] == [
            (tie(c), c.start, c.stop, c.benefit) for c in best
        ]


def test_two_short_fusions_beat_a_long_one_that_saves_less(fused):
    short = [source(Fusion([A, B], fused("AB"))), source(Fusion([C, C], fused("CC")))]
    choice = decide("ABCC", *short, source(Fusion([B, C], fused("BC"), benefit=3)))
    assert taken(choice) == [("AB", "forward", 0, 2), ("CC", "forward", 2, 4)]
    assert reasons(choice) == {
        "BC": "overlaps AB of plugin-x, which saves 4 tensor reads and writes against 3"
    }


def test_ties_longer_then_distribution_then_name(fused):
    op = fused()
    short, long = (
        Fusion([A, B], op, name="ab", benefit=4),
        Fusion([A, B, C], op, name="abc", benefit=4),
    )
    choice = decide("ABC", source(short), source(long))
    assert taken(choice) == [("abc", "forward", 0, 3)]
    assert (
        reasons(choice)["ab"] == "overlaps abc of plugin-x, which saves as much and covers more ops"
    )
    sources = [
        source(Fusion([A, B], op, name=name), distribution=dist)
        for dist in ("y", "x")
        for name in ("q", "p")
    ]
    choice = decide("AB", *sources)
    assert [(c.source.distribution, c.source.name) for c in choice.taken] == [("x", "p")]
    assert {r.reason for r in choice.refused} == {
        "overlaps p of x, which saves as much and comes first by name"
    }


def test_a_repeated_pattern_takes_the_longest_run(fused):
    choice = decide("BAAAB", source(Fusion([OneOrMore(A)], fused("As"))))
    assert taken(choice) == [("As", "forward", 1, 4)]
    assert len(choice.refused) == 5


@pytest.mark.parametrize("seed", range(5))
def test_the_plan_does_not_depend_on_discovery_order(fused, seed):
    op = fused()
    patterns = [[A, B], [B, C], [A, B, C], [OneOrMore(A), B], [C, A], [B]]
    named = enumerate(patterns)
    fusions = [Fusion(pattern, op, name=f"f{n}", priority=n % 2) for n, pattern in named]
    sources = [
        source(fusion, kind, dist, "1", Precedence(2, 0, -fusion.priority))
        for fusion in fusions
        for kind in ("joint", "forward", "backward")
        for dist in ("x", "y", None)
    ]
    expected = decide("AABCABCAB", *sources, requires_grad=True)
    random.Random(seed).shuffle(sources)
    choice = decide("AABCABCAB", *sources, requires_grad=True)
    assert taken(choice) == taken(expected)
    assert choice.refused == expected.refused


# Precedence


def test_precedence_list_then_prepend_then_priority(fused, register):
    order = [("low", -1), ("plain", 0), ("high", 1)]
    register(
        forward_fusions=[Fusion([A, B], fused(), name=name, priority=p) for name, p in order],
        name="p1",
    )
    register(forward_fusions=[Fusion([A, B], fused(), name="other")], name="p2")
    chain = opfuse.Sequential(A(), B())

    def winner():
        (call,) = opfuse.explain(chain, torch.ones(2)).calls
        return call.plan.forward[0].fusion

    assert winner() == "high"
    handles = [opfuse.register_forward_fusion(Fusion([A, B], fused(), name="code", priority=2))]
    assert winner() == "code"
    handles.append(
        opfuse.register_forward_fusion(
            Fusion([A, B], fused(), name="first", priority=-9), prepend=True
        )
    )
    assert winner() == "first"
    handles.append(
        opfuse.register_forward_fusion(Fusion([A, B], fused(), name="second"), prepend=True)
    )
    assert winner() == "second"  # prepended last, chooses first
    with plugins.using("p2,p1"):
        assert winner() == "other"
    with plugins.using("p1,p2"):
        assert winner() == "high"
    for handle in handles:
        handle.unregister()
    assert winner() == "high"


def test_all_plugins_of_a_listed_distribution_choose_together(fused, register):
    register(forward_fusions=[Fusion([A, B], fused("Short"))], name="a", distribution="both")
    register(forward_fusions=[Fusion([A, B, C], fused("Long"))], name="b", distribution="both")
    with plugins.using("both"):
        (call,) = opfuse.explain(opfuse.Sequential(A(), B(), C()), torch.ones(2)).calls
    assert call.plan.forward[0].fusion == "Long"


def test_a_lower_class_sees_only_what_is_left(fused):
    high = source(Fusion([B, C], fused("BC")), precedence=Precedence(2, 0, -1))
    low = [
        source(Fusion([A, B, C], fused("ABC"), benefit=100)),
        source(Fusion([A, A], fused("AA"))),
    ]
    choice = decide("AABC", high, *low)
    assert taken(choice) == [("AA", "forward", 0, 2), ("BC", "forward", 2, 4)]
    assert reasons(choice) == {"ABC": "overlaps BC of plugin-x, whose priority is 1 against 0"}


def test_the_reason_is_the_highest_precedence_in_the_way(fused):
    high = source(Fusion([C, D], fused("CD")), precedence=Precedence(2, 0, -1))
    choice = decide(
        "ABCD",
        source(Fusion([A, B], fused("AB"))),
        source(Fusion([B, C], fused("BC"), benefit=9)),
        high,
    )
    assert reasons(choice) == {"BC": "overlaps CD of plugin-x, whose priority is 1 against 0"}


@pytest.mark.parametrize(
    ("precedence", "why"),
    [
        ((1, -3, 0), "which is registered with prepend=True"),
        ((0, 1, 0), "which is the first of these in the selection of plugins"),
    ],
)
def test_the_reason_says_which_precedence(fused, precedence, why):
    high = source(
        Fusion([B, C], fused("BC")), precedence=Precedence(*precedence), distribution=None
    )
    choice = decide("ABC", high, source(Fusion([A, B, C], fused("ABC"), benefit=100)))
    assert [(r.reason, r.lost_to) for r in choice.refused] == [(f"overlaps BC, {why}", "")]


def test_a_condition_that_speaks_of_overlaps_lost_to_nobody(fused):
    choice = decide("AB", source(Fusion([A, B], fused("AB"), when=lambda *_: "overlaps the edge")))
    assert [(r.reason, r.lost_to) for r in choice.refused] == [("overlaps the edge", None)]


def test_joint_fusions_choose_before_forward_and_backward(fused):
    both = [
        source(Fusion([A, B, C], fused(kind.title()), benefit=100), kind)
        for kind in ("forward", "backward")
    ]
    choice = decide(
        "ABCAB", source(Fusion([A, B], fused("Joint")), "joint"), *both, requires_grad=True
    )
    assert taken(choice) == [("Joint", "joint", 0, 2), ("Joint", "joint", 3, 5)]
    assert set(reasons(choice).values()) == {
        "overlaps Joint of plugin-x, and joint fusions choose first"
    }
    above = both[0]._replace(precedence=Precedence(1, 0, 0))
    assert taken(decide("ABC", source(Fusion([A, B], fused("Joint")), "joint"), above)) == [
        ("Forward", "forward", 0, 3)
    ]


def test_forward_and_backward_choose_independently(fused):
    choice = decide(
        "ABC",
        source(Fusion([A, B], fused("AB"))),
        source(Fusion([B, C], fused("BC")), "backward"),
        requires_grad=True,
    )
    assert taken(choice) == [("AB", "forward", 0, 2), ("BC", "backward", 1, 3)]


def test_backward_fusions_only_where_a_gradient_is_needed(fused):
    backward = source(Fusion([A, B], fused("AB")), "backward")
    assert decide("AB", backward) == decide("AB")
    choice = decide("ABAB", backward, first_backward=2, requires_grad=True)
    assert taken(choice) == [("AB", "backward", 2, 4)]
    assert reasons(choice) == {"AB": "no gradient is needed before op 2"}


@pytest.mark.parametrize(
    ("limit", "kept"),
    [
        (0, []),
        (1, ["J"]),
        (2, ["J", "F"]),
        (3, ["J", "F", "F"]),
        (4, ["J", "F", "F", "G"]),
        (9, ["J", "F", "F", "G"]),
    ],
)
def test_fusion_limit_takes_the_first_fusions_and_refuses_the_rest(fused, limit, kept):
    sources = [
        source(Fusion([B, C], fused("G")), "backward"),
        source(Fusion([A, B], fused("F"))),
        source(Fusion([C, C], fused("J")), "joint"),
    ]
    choice = decide("BCABABCC", *sources, requires_grad=True, options={"fusion_limit": limit})
    assert [c.source.name for c in choice.taken] == kept
    beyond = [
        r.fusion for r in choice.refused if r.reason == f"beyond the limit of {limit} fusions"
    ]
    assert len(beyond) == 4 - len(kept)


# Conditions


def test_a_condition_says_why_not(fused):
    seen = []

    def when(ops, env):
        seen.append((tuple(type(op) for op in ops), env.dtype, env.training))
        return "only on Tuesdays"

    choice = decide("AB", source(Fusion([A, B], fused("AB"), when)), dtype=torch.bfloat16)
    assert choice.taken == ()
    assert choice.refused == (
        Refusal("AB", "forward", ("A", "B"), 0, "only on Tuesdays", "plugin-x"),
    )
    assert seen == [((A, B), torch.bfloat16, True)]


@pytest.mark.parametrize("answer", [False, None, "", 1])
def test_a_condition_that_gives_no_reason_is_warned_about(fused, answer):
    with pytest.warns(
        PluginWarning,
        match=r"fusion AB \(plugin plugin-x 1.0\) is not used: its condition returned ",
    ):
        choice = decide("AB", source(Fusion([A, B], fused("AB"), lambda ops, env: answer)))
    assert taken(choice) == []
    assert reasons(choice) == {
        "AB": f"its condition returned {answer!r} instead of True or a sentence"
    }


def test_a_condition_that_raises_is_warned_about(fused):
    def when(ops, env):
        return 1 / 0

    with pytest.warns(PluginWarning, match="its condition raised ZeroDivisionError"):
        choice = decide("AB", source(Fusion([A, B], fused("AB"), when)))
    assert taken(choice) == []
    assert reasons(choice) == {"AB": "its condition raised ZeroDivisionError: division by zero"}


def test_a_negative_benefit_is_a_refusal(fused):
    choice = decide("AB", source(Fusion([A, B], fused("AB"), benefit=lambda ops, env: -1.5)))
    assert (taken(choice), reasons(choice)) == ([], {"AB": "it declares a benefit of -1.5"})


def test_a_benefit_of_zero_is_taken(fused):
    assert taken(decide("AB", source(Fusion([A, B], fused("AB"), benefit=0)))) == [
        ("AB", "forward", 0, 2)
    ]
    assert taken(decide("A", source(Fusion([A], fused("A"))))) == [("A", "forward", 0, 1)]


@pytest.mark.parametrize(
    "benefit",
    [
        "much",
        None,
        float("nan"),
        math.inf,
        1e300,
        pytest.param(10**400, id="huge"),
        ZeroDivisionError,
    ],
)
def test_a_benefit_that_is_no_number_is_warned_about(fused, benefit):
    def compute(ops, env):
        return 1 / 0 if benefit is ZeroDivisionError else benefit

    with pytest.warns(PluginWarning, match="fusion AB .* is not used: its benefit "):
        choice = decide("AB", source(Fusion([A, B], fused("AB"), benefit=compute)))
    assert taken(choice) == []
    assert reasons(choice)["AB"].startswith("its benefit ")


def test_keyword_arguments_that_a_fusion_does_not_take(fused):
    with_kwarg = ((), ("by",))
    ignorant, knowing = fused("Ignorant", kwarg_names=()), fused("Knowing", kwarg_names=("by",))
    choice = decide("AD", source(Fusion([A, D], ignorant)), kwargs=with_kwarg)
    assert reasons(choice) == {"Ignorant": "it does not take the keyword argument 'by' given to D"}
    assert taken(decide("AD", source(Fusion([A, D], knowing)), kwargs=with_kwarg)) == [
        ("Knowing", "forward", 0, 2)
    ]
    built_by_function = Fusion([A, D], lambda ops: knowing(ops), name="function")
    assert taken(decide("AD", source(built_by_function), kwargs=with_kwarg)) == []


# Fusion functions


def test_a_fusion_function_returns_the_ops_that_run(fused):
    pair = fused("Pair")
    seen = []

    def fuse_pairs(ops, *, recipe):
        seen.append((list(ops), recipe))
        return [ops[0], pair(ops[1:3]), *ops[3:]]

    ops = ops_of("AABC")
    choice = decide(ops, source(fuse_pairs))
    assert taken(choice) == [("fuse_pairs", "forward", 1, 3)]
    assert choice.taken[0].benefit == 2
    assert isinstance(choice.taken[0].op, pair)
    assert seen == [(ops, None)]


def test_a_fusion_function_competes(fused):
    pair = fused("Pair")
    choice = decide(
        "ABC",
        source(lambda ops, *, recipe: [pair(ops[:2]), ops[2]]),
        source(Fusion([A, B, C], fused("All"))),
    )
    assert taken(choice) == [("All", "forward", 0, 3)]


@pytest.mark.parametrize(
    ("rewrite", "text"),
    [
        (lambda ops, pair: ops[::-1], r"expected \[A\], got \[C\]"),
        (lambda ops, pair: ops[:2], r"expected \[A, B, C\], got \[A, B\]"),
        (lambda ops, pair: [pair([ops[1], ops[0]]), ops[2]], r"expected \[A, B\], got \[B, A\]"),
        (lambda ops, pair: [pair([A(), B()]), ops[2]], r"expected \[A, B\], got \[A, B\]"),
        (lambda ops, pair: [*ops, A()], r"expected \[\], got \[A\]"),
    ],
)
def test_a_fusion_function_must_keep_the_ops(fused, rewrite, text):
    pair = fused("Pair")

    def rearrange(ops, *, recipe):
        return rewrite(ops, pair)

    with pytest.raises(
        RuntimeError, match=r"fusion rearrange \(plugin plugin-x 1.0\) does not expand .*" + text
    ):
        decide("ABC", source(rearrange))


def test_a_fusion_function_must_return_a_list():
    with pytest.raises(
        TypeError,
        match=r"fusion none \(plugin plugin-x 1.0\) must return a list of ops, got NoneType",
    ):

        def none(ops, *, recipe):
            return None

        decide("ABC", source(none))


def test_a_fusion_function_of_a_plugin_that_raises_is_warned_about():
    def broken(ops, *, recipe):
        raise KeyError("gone")

    with pytest.warns(
        PluginWarning,
        match=r"fusion broken \(plugin plugin-x 1.0\) is not used: it raised KeyError: 'gone'",
    ):
        assert taken(decide("AB", source(broken))) == []
    with pytest.raises(KeyError):  # registered in code: it is the user's own
        decide("AB", source(broken, distribution=None, version=None))


# Through a fuser


@pytest.mark.usefixtures("register")
def test_a_build_that_fails_leaves_the_rest(fused):
    def build(ops):
        raise ValueError("no such kernel")

    opfuse.register_forward_fusion(Fusion([A, B], build, name="broken", benefit=9))
    opfuse.register_forward_fusion(Fusion([B, C], fused("BC")))
    chain = opfuse.Sequential(A(), B(), C())
    x = torch.ones(2, requires_grad=True)
    message = r"fusion broken \(registered in code\) is not used: its build raised ValueError: no such kernel"
    with pytest.warns(PluginWarning, match=message):
        y = chain(x)
    y.sum().backward()
    assert y.tolist() == x.grad.tolist() == [30, 30]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (call,) = opfuse.explain(chain, x).calls  # planned already: not warned again
    assert [step.fusion for step in call.plan.forward] == [None, "BC"]
    assert [r.reason for r in call.plan.refused] == ["its build failed, see the warning"]


@pytest.mark.parametrize(
    ("build", "error", "text"),
    [
        (lambda ops: None, TypeError, "must build a FusedOperation, got NoneType"),
        (lambda ops: ops[0], TypeError, "must build a FusedOperation, got A"),
        (lambda ops: opfuse.FusedOperation(ops[::-1]), RuntimeError, "expected [A, B], got [B, A]"),
        (lambda ops: opfuse.FusedOperation(ops[:1]), RuntimeError, "expected [A, B], got [A]"),
    ],
)
def test_a_build_must_stand_for_the_ops_it_got(register, build, error, text):
    register(
        forward_fusions=[Fusion([A, B], build, name="wrong")],
        distribution="plugin-y",
        version="2.1",
    )
    with pytest.raises(error) as caught:
        opfuse.Sequential(A(), B())(torch.ones(2))
    assert "fusion wrong (plugin plugin-y 2.1)" in str(caught.value)
    assert text in str(caught.value)


@pytest.mark.parametrize("kind", ["forward", "backward", "joint"])
def test_a_fused_op_implements_the_pass_it_is_for(register, kind):
    class Nothing(opfuse.FusedOperation):
        pass

    class Half(opfuse.FusedOperation):
        def fuser_forward(self, basic_op_ctxs, input_, **unused):
            return input_, [()]

    for cls in (Nothing, Half) if kind == "joint" else (Nothing,):
        record = register(**{f"{kind}_fusions": [Fusion([A], cls, name="half")]})
        text = (
            rf"fusion half \(.*\) is a {kind} fusion, but {cls.__name__} does not implement fuser_"
        )
        with pytest.raises(TypeError, match=text):
            opfuse.Sequential(A())(torch.ones(2, requires_grad=True))
        plugins.remove(record)


def test_row_alignment_is_told_to_those_who_ask(fused, register):
    seen = {"asks": [], "does not": []}

    def when(who):
        def condition(ops, env):
            seen[who].append(env.row_alignment)
            return True if env.row_alignment >= 8 else "rows are not a multiple of 8"

        return condition

    asking = Fusion([A, B], fused("Asking"), when("asks"), needs=("row_alignment",))
    other = Fusion([B, C], fused("Other"), when("does not"))
    register(forward_fusions=[asking, other])
    chain = opfuse.Sequential(A(), B(), C())
    fusions = []
    for shape in [(16, 2), (48, 2), (8, 2), (4, 2, 2), (3, 2), (2,), (16, 2), (3, 2), (8, 2)]:
        (call,) = opfuse.explain(chain, torch.ones(shape)).calls
        fusions.append(call.plan.forward[0].fusion)
    assert fusions == ["Asking", "Asking", "Asking", "Asking", None, None, "Asking", None, "Asking"]
    assert seen == {"asks": [16, 8, 1], "does not": [1, 1, 1]}  # one plan per alignment


def test_a_benefit_sees_the_row_alignment_that_the_condition_sees(fused, register):
    seen = {"asks": [], "does not": []}

    def benefit(who):
        return lambda ops, env: seen[who].append(env.row_alignment) or 2

    asking = Fusion([A, B], fused("Asking"), benefit=benefit("asks"), needs=("row_alignment",))
    register(forward_fusions=[asking, Fusion([B, C], fused("Other"), benefit=benefit("does not"))])
    opfuse.Sequential(A(), B(), C())(torch.ones(8, 2))
    assert seen == {"asks": [8], "does not": [1]}


def test_rows_and_features_are_told_to_those_who_ask(fused, register):
    seen = []

    def when(ops, env):
        seen.append((env.rows, env.features))
        return True if env.rows is None or env.rows * env.features >= 32 else "too few"

    register(joint_fusions=[Fusion([ops.RMSNorm], fused("Asking"), when, needs=("rows",))])
    chain = opfuse.Sequential(ops.RMSNorm(8))
    fusions = []
    for shape in [(4, 8), (7, 8), (2, 2, 8), (3, 8), (8,), (0, 8), (9, 8), (3, 8), (5, 8)]:
        (call,) = opfuse.explain(chain, torch.ones(shape)).calls
        fusions.append(call.plan.forward[0].fusion is not None)
    assert fusions == [True, True, True, False, False, False, True, False, True]
    assert seen == [
        (None, 8),
        (4, 8),
        (None, 8),
        (2, 8),
        (None, 8),
        (1, 8),
        (None, 8),
        (0, 8),
        (None, 8),
        (8, 8),
    ]


def test_who_would_refuse_any_number_of_rows_is_not_asked_about_them(fused, register):
    refusing = Fusion([A, B], fused("AB"), lambda ops, env: "never", needs=("rows",))
    register(forward_fusions=[refusing])
    chain = opfuse.Sequential(A(), B())
    for rows in (16, 8, 3, 1):
        chain(torch.ones(rows, 2))
    assert len(chain._module_groups[0]._programs) == 1


def test_two_who_ask_for_different_facts_are_asked_once_per_row_count(fused, register):
    asked = []

    def large(ops, env):
        asked.append(env.rows)
        return True if env.rows is None or env.rows >= 64 else "too few"

    high = Fusion([A, B], fused("Large"), large, priority=5, needs=("rows",))
    register(
        forward_fusions=[
            high,
            Fusion([A, B], fused("Aligned"), lambda ops, env: True, needs=("row_alignment",)),
        ]
    )
    chain = opfuse.Sequential(A(), B())
    counts = []
    for _ in range(4):
        for rows in (128, 16):
            (call,) = opfuse.explain(chain, torch.ones(rows, 2)).calls
            assert call.plan.forward[0].fusion == ("Large" if rows == 128 else "Aligned")
        counts.append(len(asked))
    assert counts[-3:] == [counts[-1]] * 3


def test_row_counts_do_not_push_other_keys_out(fused, register):
    planned = []
    fusion = Fusion(
        [A, B], fused("AB"), lambda ops, env: planned.append(env) is None, needs=("rows",)
    )
    register(forward_fusions=[fusion])
    chain = opfuse.Sequential(A(), B())

    def cycle():
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                for power in range(40):
                    chain(torch.empty(2**power, 0))

    cycle()
    before = len(planned)
    cycle()
    assert len(planned) == before


def test_threads_that_call_together_plan_once(fused, register):
    planned, barrier = [], threading.Barrier(4)
    fusion = Fusion([A, B], fused("AB"), lambda ops, env: planned.append(time.sleep(0.01)) is None)
    register(forward_fusions=[fusion])
    chain = opfuse.Sequential(A(), B())

    def run():
        barrier.wait()
        chain(torch.ones(2))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(planned) == 1


def test_a_planned_that_raises_leaves_the_ops_alone(fused, register):
    def planned(self, env):
        raise KeyError("gone")

    register(forward_fusions=[Fusion([A, B], fused("AB", planned=planned), name="broken")])
    with pytest.warns(
        PluginWarning,
        match=r"fusion broken \(.*\) is not used: its planned raised KeyError: 'gone'",
    ):
        opfuse.Sequential(A(), B())(torch.ones(2))


def test_features_are_told_where_the_chain_tells(fused, register):
    seen = []
    watching = Fusion(
        [Subclasses(ops.Activation)],
        fused("X"),
        lambda matched, env: seen.append(env.features) or "no",
    )
    register(forward_fusions=[watching])
    for chain in (
        [ops.GELU(), ops.SwiGLU(), ops.Linear(4, 6), ops.SwiGLU(), ops.Bias(3)],
        [ops.GELU()],
        [ops.Reshape((2, 4)), ops.GELU(), ops.Bias(4), ops.ReLU()],
    ):
        opfuse.Sequential(*chain)(torch.ones(1, 8))
    assert seen == [8, 8, 6, None, 4, 4]


def test_without_anybody_who_asks_row_alignment_is_no_part_of_the_key(fused, register):
    planned = []
    register(
        forward_fusions=[Fusion([A, B], fused("AB"), lambda ops, env: planned.append(env) is None)]
    )
    chain = opfuse.Sequential(A(), B())
    for rows in (16, 8, 3, 1):
        chain(torch.ones(rows, 2))
    assert len(planned) == 1


# The plan as data


def test_a_plan_is_a_value(fused, register):
    register(
        forward_fusions=[Fusion([A, B], fused("AB")), Fusion([B, C], fused("BC"), benefit=1)],
        backward_fusions=[Fusion([B, C], fused("Grad"))],
    )
    x = torch.ones(2, requires_grad=True)
    plans = [opfuse.explain(opfuse.Sequential(A(), B(), C()), x).calls[0].plan for _ in range(2)]
    assert plans[0] == plans[1]
    assert hash(plans[0]) == hash(plans[1])
    test = ("opfuse-plugin-test", "1.0")
    assert plans[0] == FusionPlan(
        forward=(PlanStep("AB", ("A", "B"), 0, "AB", *test), PlanStep("C", ("C",), 2)),
        backward=(PlanStep("Grad", ("B", "C"), 1, "Grad", *test), PlanStep("A", ("A",), 0)),
        refused=(
            Refusal("BC", "forward", ("B", "C"), 1, plans[0].refused[0].reason, test[0], test[0]),
        ),
    )
    text = str(plans[0])
    for part in (
        "A + B",
        "fused by AB, opfuse-plugin-test 1.0",
        "B + C",
        "fused by Grad",
        "refused forward BC, opfuse-plugin-test, on B + C: overlaps AB",
    ):
        assert part in text


def test_the_text_of_an_empty_plan():
    plan = FusionPlan(forward=(PlanStep("A", ("A",), 0),), backward=())
    assert str(plan).splitlines() == ["forward", "  A, not fused", "backward: none"]


def test_the_plan_of_a_call_is_known_without_the_call():
    calls = []

    class Pair(opfuse.FusedOperation):
        def fuser_forward(self, basic_op_ctxs, input_, **unused):
            calls.append(input_)
            return input_ * 4, [(), ()]

    chain, x = opfuse.Sequential(A(), A()), torch.ones(3)
    with registered("forward", Fusion((A, A), Pair, name="pair")):
        plan = plan_of(chain, x)
        assert [step.fusion for step in plan.forward] == ["pair"] and not calls
        chain(x)
        assert len(calls) == 1 and plan_of(chain, x) is plan
        with torch.no_grad():
            assert not plan_of(chain, x.requires_grad_()).backward
        assert plan_of(chain, x).backward
        with pytest.raises(ValueError, match="extra input"):
            plan_of(chain, x, x)
        assert plan_of(opfuse.Sequential(A(), torch.nn.ReLU(), A()), x) is None
        chain[0].register_forward_hook(lambda *unused: None)
        assert plan_of(chain, x) is None
