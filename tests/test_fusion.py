"""Fusions: what their patterns match, and what is refused when one is declared."""

import pytest
import torch
from torch import nn

import opfuse
from opfuse import Fusion, OneOf, OneOrMore, Optional, Subclasses, ops
from opfuse.core.fusion import fusion_name
from opfuse.core.introspection import PASS_METHODS, op_class


class A(opfuse.BasicOperation):
    saved_names = ()

    def op_forward(self, ctx, input_, *, prev_op_grad_output_quantizer, next_op_input_quantizer):
        return input_

    def op_backward(self, ctx, grad_output):
        return grad_output, ()


class B(A):
    pass


class C(A):
    pass


class Weighted(A):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 3))

    def op_forward(self, ctx, input_, *, prev_op_grad_output_quantizer, next_op_input_quantizer):
        return input_ @ ctx.params[0]

    def op_backward(self, ctx, grad_output):
        return grad_output @ ctx.params[0].T, (None,)


def build(ops):
    raise AssertionError("nothing is built here")


def ops_of(letters):
    return [{"A": A, "B": B, "C": C}[letter]() for letter in letters]


@pytest.mark.parametrize(
    ("pattern", "chain", "matches"),
    [
        ([A, B], "ABAB", [(0, 2), (2, 4)]),
        ([A], "AB", [(0, 1)]),  # B is derived from A: an exact class does not match it
        ([Subclasses(A)], "ABC", [(0, 1), (1, 2), (2, 3)]),
        ([Subclasses(B)], "ABC", [(1, 2)]),
        ([OneOf(B, C), A], "BACAAA", [(0, 2), (2, 4)]),
        ([OneOf(Subclasses(B), C)], "ABC", [(1, 2), (2, 3)]),
        ([A, Optional(B), C], "ABCAC", [(0, 3), (3, 5)]),
        ([A, Optional(B)], "AB", [(0, 1), (0, 2)]),
        ([Optional(A), B], "AB", [(0, 2), (1, 2)]),
        ([OneOrMore(A)], "AAB", [(0, 1), (0, 2), (1, 2)]),
        ([OneOrMore(OneOf(A, B)), C], "ABCC", [(0, 3), (1, 3)]),
        ([OneOrMore(A), A], "AAA", [(0, 2), (0, 3), (1, 3)]),
        ([Optional(OneOf(A, B)), C], "BC", [(0, 2), (1, 2)]),
        ([A, B, C], "AB", []),
        ([C], "", []),
    ],
)
def test_a_pattern_matches_runs_of_ops(pattern, chain, matches):
    fusion = Fusion(pattern, build)
    basic = ops_of(chain)
    assert [
        (start, stop) for start in range(len(basic)) for stop in fusion.match(basic, start)
    ] == matches


def test_a_parametrized_op_counts_as_its_class():
    op = nn.utils.parametrizations.weight_norm(Weighted())
    assert type(op) is not Weighted
    assert op_class(op) is Weighted
    assert Fusion([Weighted], build).match([op], 0) == [1]
    assert Fusion([Subclasses(Weighted)], build).match([op], 0) == [1]
    nn.utils.parametrize.remove_parametrizations(op, "weight")
    assert Fusion([Weighted], build).match([op], 0) == [1]


def test_an_fsdp_op_counts_as_its_class():
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    op = Weighted()
    op.__class__ = type("FSDPWeighted", (fsdp.FSDPModule, Weighted), {})  # what fully_shard does
    assert op_class(op) is Weighted
    assert Fusion([Weighted], build).match([op], 0) == [1]
    op = nn.utils.parametrizations.weight_norm(Weighted())
    op.__class__ = type("FSDPWeighted", (fsdp.FSDPModule, type(op)), {})
    assert op_class(op) is Weighted


class Plain(ops.Activation):
    def value(self, x):
        return x.sin()

    def derivative(self, x):
        return x.cos()


class OwnForward(Plain):
    def op_forward(self, ctx, input_, **unused):
        return super().op_forward(ctx, input_, **unused) * 2


class OwnFuser(ops.SiLU):
    def fuser_backward(self, *args, **kwargs):
        return super().fuser_backward(*args, **kwargs)


class OwnValue(ops.SiLU):
    def value(self, x):
        return 2 * super().value(x)


class OwnSplit(ops.SwiGLU):
    def split(self, x):
        return super().split(x)[::-1]


class Another(ops.SiLU):
    """Computes what its parent does."""

    def __init__(self):
        super().__init__()
        self.label = "mine"

    def extra_repr(self):
        return self.label


class Passes(opfuse.BasicOperation):
    """Leaves all to others."""


class ByFuser(Passes):
    op_forward = op_backward = None

    def fuser_forward(self, *args, **kwargs):
        raise AssertionError

    fuser_backward = fuser_forward


@pytest.mark.parametrize(
    ("op", "cls", "methods", "expected"),
    [
        (ops.SiLU(), ops.SiLU, (), True),
        (ops.SiLU(), ops.GELU, (), False),
        (ops.SiLU(), ops.Activation, PASS_METHODS, True),
        (ops.SiLU(), ops.Activation, (), False),  # it has its own forward_value
        (Plain(), ops.Activation, (), True),
        (Another(), ops.SiLU, (), True),
        (OwnValue(), ops.SiLU, (), False),
        (OwnValue(), ops.SiLU, PASS_METHODS, True),
        (OwnValue(), ops.SiLU, ("derivative",), True),
        (OwnValue(), OwnValue, (), True),
        (OwnForward(), ops.Activation, PASS_METHODS, False),
        (OwnForward(), OwnForward, (), True),
        (OwnFuser(), ops.Activation, PASS_METHODS, False),
        (OwnFuser(), ops.SiLU, ("op_forward",), True),
        (OwnSplit(), ops.SwiGLU, (), False),
        (ByFuser(), Passes, PASS_METHODS, True),  # both passes are abstract
        # BasicOperation says nothing about the arithmetic
        (ops.AddExtraInput(), opfuse.BasicOperation, (), True),
        (nn.Linear(2, 2), ops.SiLU, (), False),
    ],
)
def test_who_defines_what_an_op_computes(op, cls, methods, expected):
    assert opfuse.has_same_math(op, cls, *methods) is expected


def test_what_an_instance_carries_is_its_own():
    op = ops.RMSNorm(4)
    op.note, op.forward = "mine", op.forward  # its call is the fuser's affair
    assert opfuse.has_same_math(op, ops.RMSNorm)
    op._check_input = lambda x: None
    assert not opfuse.has_same_math(op, ops.RMSNorm)
    assert opfuse.has_same_math(op, ops.RMSNorm, *PASS_METHODS)
    assert Fusion([ops.RMSNorm], build).match([op], 0) == []
    assert Fusion([Subclasses(ops.RMSNorm)], build).match([op], 0) == [1]
    del op._check_input
    assert Fusion([ops.RMSNorm], build).match([op], 0) == [1]
    op.op_forward = op.op_forward
    assert Fusion([Subclasses(ops.RMSNorm)], build).match([op], 0) == []


def test_what_overrides_its_passes_is_not_matched_and_told(fused):
    chain = opfuse.Sequential(ops.Bias(4), OwnForward(), ops.Bias(4), Plain(), OwnFuser())
    pattern = [ops.Bias, OneOf(Subclasses(ops.Activation))]
    chain[2].op_forward = chain[2].op_forward
    fusion = Fusion(pattern, fused("Never"), name="mine")
    assert [fusion.match(list(chain), i) for i in range(5)] == [[]] * 5
    handles = [
        opfuse.register_forward_fusion(fusion),
        opfuse.register_forward_fusion(
            Fusion([OneOrMore(Subclasses(ops.Activation))], fused("NorThis"), lambda *_: "no")
        ),
    ]
    try:
        with opfuse.plugins.using(""):
            report = opfuse.explain(chain, torch.randn(2, 4))
    finally:
        for handle in handles:
            handle.unregister()
    assert [
        (row["fusion"], row["basic_ops"], row["reason"]) for row in report.to_dict()["refused"]
    ] == [
        ("mine", ["Bias", "OwnForward"], "OwnForward overrides op_forward"),
        ("NorThis", ["OwnForward"], "OwnForward overrides op_forward"),
        ("mine", ["Bias", "Plain"], "this Bias has its own op_forward"),
        ("NorThis", ["Plain"], "no"),
        ("NorThis", ["OwnFuser"], "OwnFuser overrides fuser_backward"),
    ]


def test_a_pass_that_nothing_would_run_is_refused():
    class Mine(ops.Linear):
        def op_forward(self, ctx, input_, **unused):
            raise AssertionError

    with pytest.raises(
        TypeError,
        match=r"^Mine.op_forward would never run, since it runs as \[BasicLinear, Bias\]: ov",
    ):
        opfuse.Sequential(Mine(2, 2))(torch.ones(1, 2))


def test_a_derived_class_is_not_taken_for_a_torch_made_one():
    class ParametrizedByName(Weighted):
        pass

    assert op_class(ParametrizedByName()) is ParametrizedByName


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"pattern": []}, ValueError, "is empty or matches nothing"),
        ({"pattern": [Optional(A), Optional(B)]}, ValueError, "is empty or matches nothing"),
        ({"pattern": "AB"}, TypeError, "a fusion's pattern is a sequence of elements, got 'AB'"),
        ({"pattern": A}, TypeError, "a fusion's pattern is a sequence of elements, got <class"),
        ({"pattern": [nn.Linear]}, TypeError, "patterns are made of basic ops, Linear is none"),
        (
            {"pattern": [opfuse.FusedOperation]},
            TypeError,
            "patterns are made of basic ops, FusedOperation is none",
        ),
        ({"pattern": [3]}, TypeError, "3 is not a class, Subclasses, OneOf, Optional or OneOrMore"),
        ({"pattern": [A()]}, TypeError, "A() is not a class, Subclasses"),
        ({"pattern": [Subclasses(3)]}, TypeError, "Subclasses takes a class, got 3"),
        ({"pattern": [OneOf()]}, ValueError, "OneOf() is empty"),
        ({"pattern": [OneOf(A, int)]}, TypeError, "patterns are made of basic ops, int is none"),
        (
            {"pattern": [OneOf(A, Optional(B))]},
            TypeError,
            "OneOf takes classes, Subclasses and OneOf, got Optional(",
        ),
        (
            {"pattern": [Optional(OneOrMore(A)), B]},
            TypeError,
            "Optional and OneOrMore take a class, Subclasses or OneOf, got OneOrMore(",
        ),
        ({"pattern": [OneOrMore("A")]}, TypeError, "'A' is not a class, Subclasses"),
        (
            {"build": 3},
            TypeError,
            "a fusion's build is a FusedOperation subclass or a function, got 3",
        ),
        ({"when": True}, TypeError, "when is a function of (ops, env), got True"),
        ({"priority": 1.5}, TypeError, "priority is an int, got 1.5"),
        ({"priority": "high"}, TypeError, "priority is an int, got 'high'"),
        ({"benefit": "much"}, TypeError, "benefit is a number or a function, got 'much'"),
    ],
)
def test_what_a_fusion_refuses(arguments, error, text):
    with pytest.raises(error) as caught:
        Fusion(**{"pattern": [A, B], "build": build, **arguments})
    assert text in str(caught.value)


def test_errors_name_the_fusion():
    with pytest.raises(TypeError, match=r"^fusion mine: "):
        Fusion([int], build, name="mine")
    with pytest.raises(ValueError, match=r"^fusion build: "):
        Fusion([], build)


def test_a_fusion_is_a_value(fused):
    op = fused("Both")
    fusion = Fusion([A, B], op)
    assert fusion == Fusion((A, B), op)
    assert hash(fusion) == hash(Fusion((A, B), op))
    assert fusion != Fusion([A, B], op, priority=1)
    with pytest.raises(AttributeError):
        fusion.priority = 3


def test_a_fusion_is_named_after_what_builds_it(fused):
    class Builder:
        def __call__(self, ops):
            pass

    def function(ops, *, recipe):
        return ops

    assert Fusion([A], fused("Both")).name == "Both"
    assert Fusion([A], build).name == "build"
    assert Fusion([A], Builder()).name == "Builder"
    assert Fusion([A], build, name="mine").name == "mine"
    assert fusion_name(function) == "function"
    assert fusion_name(Builder()) == "Builder"


def test_benefit_is_a_number_a_function_or_counted():
    basic = tuple(ops_of("ABC"))
    env = opfuse.Environment(torch.device("cpu"), None, torch.float32)
    assert Fusion([A, B, C], build).benefit_of(basic, env) == 4
    assert Fusion([A, B, C], build, benefit=1.5).benefit_of(basic, env) == 1.5
    assert (
        Fusion([A, B, C], build, benefit=lambda ops, env: len(ops) * 10).benefit_of(basic, env)
        == 30
    )
