"""The fuser: plans once per key, keeps its contracts with ops, and never changes the answer."""

from __future__ import annotations

import copy
import itertools
import threading
from typing import ClassVar

import fusing
import pytest
import torch
from fakes import OneByOne, registered
from torch import nn

import opfuse
from opfuse import ops
from opfuse.core.introspection import op_class
from opfuse.core.op_context import Unread
from opfuse.core.plugins import manager
from opfuse.core.settings import current


@pytest.fixture(autouse=True)
def no_plugins():
    with opfuse.plugins.using(""):
        yield


def chain_and_input():
    torch.manual_seed(0)
    return opfuse.Sequential(ops.Linear(8, 8), ops.GELU(), ops.Linear(8, 8)), torch.randn(4, 8)


def fuser_of(chain):
    return chain._module_groups[0]


class Counter:
    """A plugin that counts the calls of its hooks, and of everything its fusions do."""

    def __init__(self):
        self.calls = 0

    def _count(self, *args):
        self.calls += 1
        return True

    @opfuse.hookimpl
    def opfuse_forward_fusions(self):
        self._count()
        return [
            opfuse.Fusion((ops.BasicLinear, ops.Bias), self._build, lambda ops, env: self._count())
        ]

    def _build(self, ops):
        self._count()
        return fusing.LinearBias(ops)


def test_nothing_is_planned_after_one_warm_call_per_key(monkeypatch):
    chain, x = chain_and_input()
    plugin = Counter()
    record = opfuse.plugins.register(plugin, name="counter")

    def one_of_each():
        for grad, training, limit in itertools.product((True, False), (True, False), (None, 0, 1)):
            chain.train(training)
            options = {} if limit is None else {"fusion_limit": limit}
            with (
                torch.set_grad_enabled(grad),
                opfuse.options(**options),
                opfuse.plugins.using("counter"),
            ):
                chain(x)

    try:
        one_of_each()
        planned, built = plugin.calls, []
        monkeypatch.setattr(nn.Module, "__init__", lambda self: built.append(self))
        monkeypatch.setattr(
            "opfuse.core.engine.planner.choose",
            lambda *args, **kwargs: pytest.fail("planned again"),
        )
        one_of_each()
        one_of_each()
        assert plugin.calls == planned and not built
    finally:
        opfuse.plugins.remove(record)


def test_an_op_called_alone_keeps_its_plan(monkeypatch):
    linear = ops.Linear(4, 4)
    linear(torch.ones(2, 4))
    monkeypatch.setattr(
        "opfuse.core.engine.planner.choose", lambda *args, **kwargs: pytest.fail("planned again")
    )
    linear(torch.ones(3, 4))


def test_plans_are_bounded_least_recently_used_first():
    chain, x = chain_and_input()
    chain(x)
    fuser = fuser_of(chain)
    first = next(iter(fuser._programs))
    for i in range(100):
        with opfuse.options(fusion_limit=i):
            chain(x)
        chain(x)
    assert len(fuser._programs) == 64 and first in fuser._programs


def test_changes_of_the_key_make_another_plan():
    chain, x = chain_and_input()
    plans = set()

    def plan():
        chain(x)
        plans.add(id(fuser_of(chain)._last[1]))
        return len(plans)

    assert plan() == 1 and plan() == 1
    chain[0].weight.requires_grad_(False)
    assert plan() == 2
    chain.eval()
    assert plan() == 3
    x = x.requires_grad_()
    assert plan() == 4
    handle = opfuse.register_forward_fusion(fusing.FORWARD)
    assert plan() == 5
    assert [type(op).__name__ for op, _ in fuser_of(chain)._forward_ops] == [
        "LinearBias",
        "GELU",
        "LinearBias",
    ]
    assert [indices for _, indices in fuser_of(chain)._forward_ops] == [[0, 1], [2], [3, 4]]
    assert [indices for _, indices in fuser_of(chain)._backward_ops] == [[0], [1], [2], [3], [4]]
    handle.unregister()
    handle.unregister()
    assert plan() == 6
    torch.use_deterministic_algorithms(True)
    try:
        assert plan() == 7
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_fuser_lives_while_its_ops_are_the_same():
    chain, x = chain_and_input()
    chain(x)
    fuser = fuser_of(chain)
    chain[0].weight = nn.Parameter(torch.zeros(8, 8))
    chain(x)
    assert fuser_of(chain) is fuser
    chain[1] = ops.SiLU()
    assert fuser_of(chain) is not fuser


def test_every_set_of_fusions_gives_the_same_answer():
    results = []
    for variant in fusing.VARIANTS:
        chain, x = chain_and_input()
        x.requires_grad_()
        with fusing.fusions(variant):
            y = chain(x)
            y.square().sum().backward()
        results.append([y.detach(), x.grad, *[p.grad for p in chain.parameters()]])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b)


def in_a_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    thread.join(timeout=60)


TODO = []


class Interrupted(ops.Bias):
    """An op that calls what is in a list while a fuser asks where its parameters are."""

    def param_source(self, name):
        while TODO:
            in_a_thread(TODO.pop())
        return super().param_source(name)


def test_a_thread_that_plans_takes_no_parameters_from_another():
    chain, x, found = opfuse.Sequential(ops.Linear(8, 8), Interrupted(8)), torch.randn(2, 8), []

    @torch.no_grad()
    def call():
        found.append(chain(x))

    in_a_thread(call)
    TODO.append(call)
    chain(x)  # with gradients, which is another plan
    assert len(found) == 2 and torch.equal(*found)


def test_threads_share_a_model():
    chain, x = chain_and_input()
    expected = chain(x)
    failures = []

    def work(i):
        try:
            with torch.set_grad_enabled(i % 2 == 0), opfuse.options(fusion_limit=i):
                for _ in range(20):
                    torch.testing.assert_close(chain(x), expected)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


# Contexts


class Spy(opfuse.BasicOperation):
    """Records its contexts."""

    grad_input = "same"
    feature_ratio = 1

    def __init__(self, allocates="same"):
        super().__init__()
        self.forward_ctxs, self.backward_ctxs = [], []
        self.grad_input = allocates

    def op_forward(self, ctx, input_, *, prev_op_grad_output_quantizer, next_op_input_quantizer):
        ctx.note = "left in forward"
        ctx.save_for_backward(input_, None)
        self.forward_ctxs.append((ctx, dict(vars(ctx))))
        return input_ * 1

    def op_backward(self, ctx, grad_output):
        self.backward_ctxs.append(ctx)
        assert ctx.note == "left in forward" and ctx.saved_tensors[1] is None
        return grad_output * 1 if self.grad_input == "fresh" else grad_output, ()


@pytest.mark.parametrize("base", [opfuse.BasicOperation, opfuse.FusedOperation])
def test_a_misspelt_grad_input_is_refused_with_its_class(base):
    with pytest.raises(
        ValueError, match="Typo.grad_input must be 'fresh', 'same' or 'shared', got 'frsh'"
    ):
        type("Typo", (base,), {"grad_input": "frsh"})


def test_a_context_is_an_open_bag_and_backward_gets_a_new_one():
    assert {"requires_grad", "saved_tensors", "param_requires_grad"} <= set(
        vars(opfuse.OperationContext())
    )
    spy = Spy()
    x = torch.ones(2, 2, requires_grad=True)
    y = opfuse.Sequential(spy)(x)
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    forward, first, second = spy.forward_ctxs[0][0], *spy.backward_ctxs
    assert len({id(forward), id(first), id(second)}) == 3
    assert forward.saved_tensors is None and first.saved_tensors[0] is not None


def test_requires_grad_flags_and_where_the_backward_ends():
    a, b, c = Spy(), Spy(), Spy()
    linear = ops.BasicLinear(2, 2)
    chain = opfuse.Sequential(a, linear, b, c)
    chain(torch.ones(1, 2)).sum().backward()
    assert [spy.forward_ctxs[0][1]["requires_grad"] for spy in (a, b, c)] == [False, True, True]
    assert [spy.forward_ctxs[0][1]["input_requires_grad"] for spy in (a, b, c)] == [
        False,
        True,
        True,
    ]
    assert [len(spy.backward_ctxs) for spy in (a, b, c)] == [0, 1, 1]
    assert linear.weight.grad is not None
    with torch.no_grad():
        chain(torch.ones(1, 2))
    assert not any(spy.forward_ctxs[1][1]["requires_grad"] for spy in (a, b, c))


def test_who_owns_the_incoming_gradient():
    last, fresh, middle, shared, first = Spy(), Spy("fresh"), Spy("same"), Spy("shared"), Spy()
    x = torch.ones(1, 1, requires_grad=True)
    opfuse.Sequential(first, shared, middle, fresh, last)(x).sum().backward()
    owns = [spy.backward_ctxs[0].owns_grad_output for spy in (last, fresh, middle, shared, first)]
    assert owns == [False, False, True, True, False]


class Foreign(opfuse.BasicOperation):
    """Written for te.ops: positional quantizers, reads self.weight, declares nothing."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), 2.0))

    def op_forward(self, ctx, input_, prev_op_grad_output_quantizer, next_op_input_quantizer):
        if ctx.requires_grad:
            ctx.save_for_backward(input_)
        return input_ * self.weight

    def op_backward(self, ctx, grad_output):
        (x,) = ctx.saved_tensors
        return grad_output * self.weight, [(grad_output * x).sum(0)]


@pytest.mark.parametrize("compiled", [False, True])
def test_an_op_written_for_te_runs_unchanged(compiled):
    op = Foreign()
    assert op.param_names == ("weight",)
    chain = opfuse.Sequential(op, ops.GELU())
    x = torch.randn(4, 3, requires_grad=True)
    fn = torch.compile(chain, fullgraph=True, backend="aot_eager") if compiled else chain
    fn(x).sum().backward()
    reference, weight = (
        x.detach().clone().requires_grad_(),
        op.weight.detach().clone().requires_grad_(),
    )
    nn.functional.gelu(reference * weight, approximate="tanh").sum().backward()
    torch.testing.assert_close(x.grad, reference.grad)
    torch.testing.assert_close(op.weight.grad, weight.grad)


def by_name(self, ctx, input_, *, prev_op_grad_output_quantizer, next_op_input_quantizer, by=2.0):
    return input_ * by


def by_position(self, ctx, input_, prev_op, next_op, by=2.0):
    assert prev_op is next_op is None
    return input_ * by


def plain(self, ctx, input_, by=2.0):
    return input_ * by


def one_unread(
    self, ctx, input_, *, prev_op_grad_output_quantizer: Unread = 0, next_op_input_quantizer, by=2.0
):
    assert prev_op_grad_output_quantizer == 0 and next_op_input_quantizer is None
    return input_ * by


def bag(self, ctx, input_, **given):
    return input_ * given.pop("by", 2.0) + len(given)


@pytest.mark.parametrize("forward", [by_name, by_position, one_unread, plain, bag])
@pytest.mark.parametrize("fused_", [False, True])
def test_quantizers_are_given_to_who_asks_for_them(register, fused, forward, fused_):
    given = dict(op_forward=forward, op_backward=lambda self, ctx, dy: (2 * dy, ()), saved_names=())
    op = type("Op", (opfuse.BasicOperation,), given)()
    if fused_:
        register(forward_fusions=[opfuse.Fusion([type(op)], fused(), benefit=1)])
    x, chain = torch.ones(2, 3, requires_grad=True), opfuse.Sequential(op)
    torch.testing.assert_close(chain(x), 2 * x)
    torch.testing.assert_close(chain(x, op_kwargs={op: {"by": 3.0}}), 3 * x)
    if forward is not bag:
        with pytest.raises(TypeError, match="does not take the keyword argument 'too'"):
            chain(x, op_kwargs={op: {"too": 3.0}})


def test_two_required_arguments_of_an_op_are_its_own():
    def forward(self, ctx, input_, gain, offset):
        return input_ * gain + offset

    given = dict(op_forward=forward, op_backward=lambda self, ctx, dy: (2 * dy, ()), saved_names=())
    op = type("Op", (opfuse.BasicOperation,), given)()
    x, chain = torch.ones(2, 3, requires_grad=True), opfuse.Sequential(op)
    torch.testing.assert_close(chain(x, op_kwargs={op: {"gain": 2.0, "offset": 1.0}}), 2 * x + 1)
    with pytest.raises(TypeError, match="'gain' and 'offset'"):
        chain(x)


def test_pre_forward_callbacks_run_before_each_call():
    class Prepared(ops.Identity):
        def __init__(self):
            super().__init__()
            self.seen = []

        def pre_first_fuser_forward(self):
            self.seen.append("first")

        def pre_fuser_forward(self, *, requires_grad):
            self.seen.append(requires_grad)

    op = Prepared()
    chain = opfuse.Sequential(op)
    chain(torch.ones(1, 1, requires_grad=True))
    chain(torch.ones(1, 1))
    assert op.seen == ["first", True, False]


# Contracts that a fused op can break


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (lambda x: (x, [()]), "must give extra outputs for 2 basic ops, gave 1"),
        (lambda x: (x, [(), ()]), r"must give 1 extra outputs for op 0 \(MakeExtraOutput\), gave 0"),
        (lambda x: (x, [(None,), ()]), r"gave None for extra output 0 of op 0 \(MakeExtraOutput\), which is used outside of it"),
    ],
)  # fmt: skip
def test_wrong_extra_outputs_of_a_fusion_are_refused(result, text):
    class Wrong(opfuse.FusedOperation):
        def fuser_forward(self, basic_op_ctxs, input_, **unused):
            return result(input_)

    handle = opfuse.register_forward_fusion(opfuse.Fusion((ops.MakeExtraOutput, ops.GELU), Wrong))
    try:
        with pytest.raises(RuntimeError, match=text):
            opfuse.Sequential(ops.MakeExtraOutput(), ops.GELU())(torch.ones(1, 1))
    finally:
        handle.unregister()


@pytest.mark.parametrize(
    ("grads", "text"),
    [
        (lambda dy: (dy, [(None, None), ()], [(), (None,)]), r"op 0 \(Bias\) must give 1 parameter gradients, gave 2"),
        (lambda dy: (dy, [(None,)], [(), ()]), "must give parameter gradients for 2 basic ops"),
        (lambda dy: (dy, [(None,), ()], [()]), "must give extra-input gradients for 2 basic ops"),
        (lambda dy: (dy, [(None,), ()], [(), ()]), r"must give 1 extra-input gradients for op 1 \(AddExtraInput\), gave 0"),
    ],
)  # fmt: skip
def test_wrong_gradients_of_a_fusion_are_refused(grads, text):
    class Wrong(opfuse.FusedOperation):
        def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
            return grads(grad_output)

    with registered("backward", opfuse.Fusion((ops.Bias, ops.AddExtraInput), Wrong)):
        x = torch.ones(1, 2, requires_grad=True)
        y = opfuse.Sequential(ops.Bias(2), ops.AddExtraInput())(x, torch.ones(1, 2))
        with pytest.raises(RuntimeError, match=text):
            y.sum().backward()


def test_a_failing_kernel_is_the_users_to_see():
    class Broken(opfuse.FusedOperation):
        def fuser_forward(self, basic_op_ctxs, input_, **unused):
            raise ZeroDivisionError("in the kernel")

    with registered("forward", opfuse.Fusion((ops.Identity, ops.GELU), Broken)):
        with pytest.raises(ZeroDivisionError, match="in the kernel"):
            opfuse.Sequential(ops.Identity(), ops.GELU())(torch.ones(1, 1))


def test_a_fusion_that_expands_to_other_ops_names_its_plugin():
    class Plugin:
        @opfuse.hookimpl
        def opfuse_forward_fusions(self):
            return [
                opfuse.Fusion(
                    (ops.Identity, ops.GELU),
                    lambda matched: fusing.LinearBias(matched[:1]),
                    name="short",
                )
            ]

    record = opfuse.plugins.register(
        Plugin(), name="bad", distribution="opfuse-plugin-bad", version="1.2"
    )
    try:
        text = r"fusion short \(plugin opfuse-plugin-bad 1.2\) does not expand .* expected \[Identity, GELU\], got \[Identity\]"
        with opfuse.plugins.using("bad"), pytest.raises(RuntimeError, match=text):
            opfuse.Sequential(ops.Identity(), ops.GELU())(torch.ones(1, 1))
    finally:
        opfuse.plugins.remove(record)


def test_a_fusion_that_does_not_take_a_kwarg_is_not_used():
    class Keyword(ops.Identity):
        def op_forward(
            self, ctx, input_, *, prev_op_grad_output_quantizer, next_op_input_quantizer, add=0.0
        ):
            return input_ + add

    class Fused(opfuse.FusedOperation):
        def fuser_forward(self, basic_op_ctxs, input_, **unused):
            return input_ * 100, [(), ()]

    with registered("forward", opfuse.Fusion((Keyword, ops.Identity), Fused)):
        chain = opfuse.Sequential(Keyword(), ops.Identity())
        x = torch.ones(1, 1)
        assert chain(x).item() == 100
        assert chain(x, op_kwargs={0: {"add": 1.0}}).item() == 2
        assert "does not take the keyword argument 'add' given to Keyword" in str(
            fuser_of(chain)._last[1].plan.refused
        )


def test_an_op_of_another_class_is_not_matched_and_torch_derived_classes_are():
    class MyGELU(ops.GELU):
        pass

    linear = ops.Linear(4, 4)
    nn.utils.parametrizations.weight_norm(linear)
    assert op_class(linear) is ops.Linear and type(linear) is not ops.Linear
    with fusing.fusions("joint"):
        chain = opfuse.Sequential(ops.Linear(4, 4), MyGELU())
        chain(torch.ones(1, 4))
        assert len(fuser_of(chain)._forward_ops) == 3


def test_lent_parameters_live_on_their_owner():
    linear = ops.Linear(4, 4)
    basic = linear.basic_ops[0]
    assert basic.weight is linear.weight and not list(basic.parameters())
    with pytest.raises(
        RuntimeError, match="BasicLinear.weight is the parameter of its Linear: set it there"
    ):
        basic.weight = nn.Parameter(torch.zeros(4, 4))
    for value in (None, torch.zeros(4, 4)):
        with pytest.raises(RuntimeError, match="set it there"):
            basic.weight = value


def test_row_alignment_is_part_of_the_key_only_where_it_is_asked_for():
    class Both(OneByOne):
        calls: ClassVar[list[str]] = []

    seen = []

    def when(matched, env):
        seen.append(env.row_alignment)
        return env.row_alignment >= 8 or f"rows are a multiple of {env.row_alignment} only"

    fusion = opfuse.Fusion((ops.Identity, ops.GELU), Both, when, needs=("row_alignment",))
    chain = opfuse.Sequential(ops.Identity(), ops.GELU())
    with registered("forward", fusion):
        for rows in (3, 5, 6, 8, 16, 7, 96, 384, 512):
            chain(torch.ones(rows, 2, requires_grad=True))
        assert seen == [1, 2, 8, 16, 32, 128]
    assert manager.generation


def test_fused_operations_need_basic_ops():
    with pytest.raises(ValueError, match="FusedOperation needs at least one basic op"):
        opfuse.FusedOperation([])
    with pytest.raises(TypeError, match="replaces basic ops, got Tanh"):
        opfuse.FusedOperation([nn.Tanh()])


def test_unknown_and_bad_options_are_refused():
    with pytest.raises(ValueError, match="unknown option 'fusion_limt'"):
        opfuse.options(fusion_limt=1)
    with pytest.raises(TypeError, match="option fusion_limit must be of type int, got '1'"):
        opfuse.options(fusion_limit="1")
    with pytest.raises(ValueError, match="must not be negative"):
        opfuse.options(fusion_limit=-1)
    with pytest.raises(TypeError, match="expected a hashable value"):
        opfuse.options(**{"x.y": []})
    with opfuse.options(fusion_limit=1):
        with opfuse.options(double_backward=True):
            assert dict(current.options) == {"fusion_limit": 1, "double_backward": True}
        assert dict(current.options) == {"fusion_limit": 1}
    assert current.options == ()


def test_overwriting_what_another_op_saved_is_refused():
    chain = opfuse.Sequential(ops.BasicLinear(2, 2), ops.AddExtraInput(in_place=True))
    h = torch.ones(1, 2, requires_grad=True) * 1
    with pytest.raises(
        RuntimeError, match="overwrote an extra input that the backward of another op"
    ):
        chain(h, h)
    with pytest.raises(
        RuntimeError, match="overwrote an extra input that the backward of another op"
    ):
        opfuse.Sequential(ops.Reshape((2,)), *chain, ops.Reshape((1, 2)))(h, h.view(2))
    chain(h, h.detach().clone()).sum().backward()


# What must not pass silently


def test_a_forward_fusion_that_saves_nothing_is_named():
    class Forgetful(opfuse.FusedOperation):
        def fuser_forward(self, basic_op_ctxs, input_, **unused):
            return nn.functional.linear(
                input_, basic_op_ctxs[0].params[0], basic_op_ctxs[1].params[0]
            ), [(), ()]

    class Plugin:
        @opfuse.hookimpl
        def opfuse_forward_fusions(self):
            return [opfuse.Fusion((ops.BasicLinear, ops.Bias), Forgetful)]

    record = opfuse.plugins.register(
        Plugin(), name="forgetful", distribution="opfuse-plugin-forgetful", version="2"
    )
    try:
        text = r"op 0 \(BasicLinear\) declares 2 saved tensors, but the forward of Forgetful \(opfuse-plugin-forgetful\) saved 0"
        with opfuse.plugins.using("forgetful"):
            chain = opfuse.Sequential(ops.Linear(2, 2))
            with torch.no_grad():
                chain(torch.ones(1, 2))
            with pytest.raises(RuntimeError, match=text):
                chain(torch.ones(1, 2))
    finally:
        opfuse.plugins.remove(record)


@pytest.mark.parametrize("grads", [[], [None, None], ()])
def test_an_op_that_gives_the_wrong_number_of_gradients(grads):
    class Wrong(Foreign):
        def op_backward(self, ctx, grad_output):
            return grad_output, grads

    y = opfuse.Sequential(Wrong())(torch.ones(2, 3, requires_grad=True))
    with pytest.raises(
        RuntimeError, match=rf"op 0 \(Wrong\) must give 1 parameter gradients, gave {len(grads)}"
    ):
        y.sum().backward()


def test_a_parameter_or_extra_input_that_is_no_tensor():
    linear = ops.Linear(2, 2)
    linear.bias = None
    for mode in (torch.enable_grad, torch.no_grad):
        with (
            mode(),
            pytest.raises(
                TypeError, match=r"chain \[Linear\] expected a tensor as Linear.bias, got None"
            ),
        ):
            linear(torch.ones(1, 2))
    with pytest.raises(TypeError, match="expected tensors as extra inputs, got int"):
        opfuse.Sequential(ops.AddExtraInput())(torch.ones(1, 2), 3)


def test_batched_gradients_work_or_say_what_does():
    chain, x = chain_and_input()
    x.requires_grad_()
    with pytest.raises(
        RuntimeError, match=r"batched \(vectorize=True\), unless .*double_backward=True"
    ):
        torch.autograd.functional.jacobian(chain, x, vectorize=True)
    with opfuse.options(double_backward=True):
        fast = torch.autograd.functional.jacobian(chain, x, vectorize=True)
    torch.testing.assert_close(fast, torch.autograd.functional.jacobian(chain, x))


def test_an_extra_input_made_in_inference_mode():
    with torch.inference_mode():
        extra = torch.ones(1, 2)
    x = torch.ones(1, 2, requires_grad=True)
    opfuse.Sequential(ops.AddExtraInput())(x, extra).sum().backward()
    assert x.grad.eq(1).all()


@pytest.mark.parametrize(
    "linear", [ops.BasicLinear(2, 2), ops.Linear(2, 2)], ids=["basic", "container"]
)
def test_a_shallow_copy_uses_its_own_parameters(linear):
    x = torch.ones(1, 2)
    assert linear(x).abs().sum() > 0
    twin = copy.copy(linear)
    twin._parameters = {
        name: nn.Parameter(torch.zeros_like(p)) for name, p in linear._parameters.items()
    }
    assert twin(x).abs().sum() == 0
    twin(x).sum().backward()
    assert all(p.grad is not None for p in twin.parameters()) and all(
        p.grad is None for p in linear.parameters()
    )
    assert linear(x).abs().sum() > 0
    assert opfuse.Sequential(twin, ops.Identity())(x).abs().sum() == 0
    ours, theirs = (
        [module._cache for module in m.modules() if hasattr(module, "_cache")]
        for m in (twin, linear)
    )
    # or one thread would run what another one made for the original
    assert ours and not set(ours) & set(theirs)


def test_resetting_every_module_draws_like_torch():
    def reset(model):
        torch.manual_seed(7)
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        return list(model.parameters())

    plain = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    chain = opfuse.Sequential(ops.Linear(3, 4), ops.LayerNorm(4))
    for a, b in zip(reset(plain), reset(chain), strict=True):
        assert torch.equal(a, b)


def test_a_forward_sees_new_fusions_with_the_new_generation(monkeypatch):
    manager._sources["stale"] = ()
    seen = []
    generation = property(lambda self: 0, lambda self, number: seen.append(dict(self._sources)))
    monkeypatch.setattr(type(manager), "generation", generation, raising=False)
    manager.changed()
    assert seen == [{}]


class Bare(opfuse.FusedOperation):
    """Returns a bare tensor, which unpacks by rows."""

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        return input_ * 6

    def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
        return grad_output * 6


@pytest.mark.parametrize("kind", ["forward", "backward"])
@pytest.mark.parametrize("rows", [2, 3])
def test_a_fused_op_that_returns_a_bare_tensor_is_named(kind, rows):
    fusion = opfuse.Fusion((ops.ConstantScale,) * 2, Bare)
    handle = getattr(opfuse, f"register_{kind}_fusion")(fusion)
    try:
        chain = opfuse.Sequential(ops.ConstantScale(2.0), ops.ConstantScale(3.0))
        message = (
            rf"Bare \(registered in code\): fuser_{kind} must return a tuple of .*, got Tensor"
        )
        with pytest.raises(TypeError, match=message):
            chain(torch.ones(rows, 3, requires_grad=True)).sum().backward()
    finally:
        handle.unregister()


def test_an_op_whose_backward_returns_a_bare_tensor_is_named():
    class BareOp(ops.Identity):
        def op_backward(self, ctx, grad_output):
            return grad_output

    with pytest.raises(
        TypeError, match="BareOp: op_backward must return a tuple of .*, got Tensor"
    ):
        opfuse.Sequential(BareOp())(torch.ones(2, 3, requires_grad=True)).sum().backward()


class InRows(opfuse.FusedOperation):
    """Computes a matrix, as kernels do, and gives it in the shape of the input."""

    saves = False

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        rows = input_.reshape(-1, input_.shape[-1]).exp()
        basic_op_ctxs[0].save_for_backward(rows if self.saves else rows.clone())
        return rows.view(input_.shape), [()]

    def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
        (rows,) = basic_op_ctxs[0].saved_tensors
        return grad_output * rows.view(grad_output.shape), [()], [()]


@pytest.mark.parametrize(("channel", "given"), [(False, False), (True, False), (True, True)])
def test_an_output_in_the_shape_of_the_input_can_be_written_to(register, channel, given):
    register(joint_fusions=[opfuse.Fusion([ops.SiLU], InRows)])
    fork = ops.MakeExtraOutput().set_extra_output_channel(0, "x", output_to_caller=given)
    twice = [fork, ops.AddExtraInput().set_extra_input_channel(0, "x")] if channel else []
    x, factor = torch.randn(2, 3, 4, requires_grad=True), 1 + channel
    y, *_ = torch.utils._pytree.tree_leaves(opfuse.Sequential(*twice, ops.SiLU())(x))
    y += 1
    y.sum().backward()
    torch.testing.assert_close(y, (factor * x).exp() + 1)
    torch.testing.assert_close(x.grad, factor * (factor * x).exp())


def test_several_outputs_in_the_shape_of_the_tokens_can_be_written_to():
    logits, tokens = torch.randn(2, 3, 4, requires_grad=True), torch.zeros(2, 3, dtype=torch.long)
    for output in opfuse.Sequential(ops.TokenLogProb(entropy=True))(logits, tokens):
        output[tokens == 0] = 0.0


def test_an_output_that_the_backward_reads_cannot_be_written_to(register, monkeypatch):
    monkeypatch.setattr(InRows, "saves", True)
    register(joint_fusions=[opfuse.Fusion([ops.SiLU], InRows)])
    y = opfuse.Sequential(ops.SiLU())(torch.randn(2, 3, 4, requires_grad=True))
    with pytest.raises(RuntimeError, match="is being modified inplace"):
        y += 1


def test_a_view_of_the_input_stays_one():
    x = torch.randn(2, 3, 4, requires_grad=True)
    y = opfuse.Sequential(ops.Reshape((-1, 4)))(x)
    assert y.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    with pytest.raises(RuntimeError, match="is being modified inplace"):
        y += 1


def test_a_value_of_somebody_else_is_looked_at_though_the_pass_is_of_the_library():
    class Pair(ops.ReLU):
        number_names = ()

        def value(self, x):
            return x, x

        forward_value = value

    with opfuse.plugins.using(""), pytest.raises(TypeError, match="must return its output"):
        opfuse.Sequential(Pair())(torch.randn(2, 3, requires_grad=True))
