"""Fusions: what their patterns match, and what is refused when one is declared."""

import pytest
import torch
from torch import nn

import opfuse
from opfuse import Fusion, Maybe, OneOf, Some, Subclasses
from opfuse.fusion import fusion_name
from opfuse.op import op_class


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
        ([A, Maybe(B), C], "ABCAC", [(0, 3), (3, 5)]),
        ([A, Maybe(B)], "AB", [(0, 1), (0, 2)]),
        ([Maybe(A), B], "AB", [(0, 2), (1, 2)]),
        ([Some(A)], "AAB", [(0, 1), (0, 2), (1, 2)]),
        ([Some(OneOf(A, B)), C], "ABCC", [(0, 3), (1, 3)]),
        ([Some(A), A], "AAA", [(0, 2), (0, 3), (1, 3)]),
        ([Maybe(OneOf(A, B)), C], "BC", [(0, 2), (1, 2)]),
        ([A, B, C], "AB", []),
        ([C], "", []),
    ],
)
def test_match(pattern, chain, matches):
    fusion = Fusion(pattern, build)
    ops = ops_of(chain)
    assert [(start, stop) for start in range(len(ops)) for stop in fusion.match(ops, start)] == matches


def test_a_parametrized_op_counts_as_its_class():
    op = nn.utils.parametrizations.weight_norm(Weighted())
    assert type(op) is not Weighted
    assert op_class(op) is Weighted
    assert Fusion([Weighted], build).match([op], 0) == [1]
    assert Fusion([Subclasses(A)], build).match([op], 0) == [1]
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


def test_a_derived_class_is_not_taken_for_a_torch_made_one():
    class ParametrizedByName(Weighted):
        pass

    assert op_class(ParametrizedByName()) is ParametrizedByName


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"pattern": []}, ValueError, "is empty or matches nothing"),
        ({"pattern": [Maybe(A), Maybe(B)]}, ValueError, "is empty or matches nothing"),
        ({"pattern": "AB"}, TypeError, "a fusion's pattern is a sequence of elements, got 'AB'"),
        ({"pattern": A}, TypeError, "a fusion's pattern is a sequence of elements, got <class"),
        ({"pattern": [nn.Linear]}, TypeError, "patterns are made of basic ops, Linear is none"),
        ({"pattern": [opfuse.FusedOperation]}, TypeError, "patterns are made of basic ops, FusedOperation is none"),
        ({"pattern": [3]}, TypeError, "3 is not a class, Subclasses, OneOf, Maybe or Some"),
        ({"pattern": [A()]}, TypeError, "A() is not a class, Subclasses"),
        ({"pattern": [Subclasses(3)]}, TypeError, "Subclasses takes a class, got 3"),
        ({"pattern": [OneOf()]}, ValueError, "OneOf() is empty"),
        ({"pattern": [OneOf(A, int)]}, TypeError, "patterns are made of basic ops, int is none"),
        ({"pattern": [OneOf(A, Maybe(B))]}, TypeError, "OneOf takes classes, Subclasses and OneOf, got Maybe("),
        ({"pattern": [Maybe(Some(A)), B]}, TypeError, "Maybe and Some take a class, Subclasses or OneOf, got Some("),
        ({"pattern": [Some("A")]}, TypeError, "'A' is not a class, Subclasses"),
        ({"build": 3}, TypeError, "a fusion's build is a FusedOperation subclass or a function, got 3"),
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


def test_names(fused):
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


def test_benefit():
    ops = tuple(ops_of("ABC"))
    env = opfuse.Environment(torch.device("cpu"), None, torch.float32)
    assert Fusion([A, B, C], build).benefit_of(ops, env) == 4
    assert Fusion([A, B, C], build, benefit=1.5).benefit_of(ops, env) == 1.5
    assert Fusion([A, B, C], build, benefit=lambda ops, env: len(ops) * 10).benefit_of(ops, env) == 30
