"""What a fused op computes again instead of keeping it: what is saved, that the numbers stay, and where it is not done."""

import itertools
import weakref

import pytest
import right
import torch
from torch.utils.checkpoint import checkpoint

import opfuse
from opfuse import ops


class Joint(right.Recomputing):
    """The same, of both passes, with a state of its own."""

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        result = super().fuser_forward(basic_op_ctxs, input_)
        basic_op_ctxs[0].save_for_backward(input_.double())
        return result

    def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
        (x,) = basic_op_ctxs[0].saved_tensors
        return self.basic_ops[0].backward_value(grad_output, x.to(grad_output.dtype)), [()], [()]

    def again(self, x):
        return super().again(x.float())


@pytest.fixture(params=["forward", "joint"])
def fused(request, register):
    cls = {"forward": right.Recomputing, "joint": Joint}[request.param]
    register(**{f"{request.param}_fusions": [opfuse.Fusion((ops.GELU,), cls, name="gelu")]})


def gradients(chain, x, weight=None):
    leaves = [x, *(p for p in chain.parameters() if p.requires_grad)]
    y = chain(x)
    return torch.autograd.grad(
        y, [leaf for leaf in leaves if leaf.requires_grad], torch.ones_like(y)
    )


def saved(chain, x):
    shapes = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: shapes.append(tuple(t.shape)) or t, lambda t: t
    ):
        y = chain(x)
    return shapes, y


def separate(step):
    with opfuse.options(fusion_limit=0):
        return step()


def make(*widths):
    torch.manual_seed(0)
    linears = [ops.Linear(a, b) for a, b in itertools.pairwise(widths)]
    return opfuse.Sequential(*[op for linear in linears for op in (ops.GELU(), linear)])


def test_the_next_op_does_not_keep_its_input(fused):
    chain, x = make(4, 5, 6), torch.randn(3, 4, requires_grad=True)
    kept, y = saved(chain, x)
    everything, expected = separate(lambda: saved(chain, x))
    assert sorted(everything) == sorted([*kept, (3, 4), (3, 5)])
    assert torch.equal(y, expected)
    for got, want in zip(gradients(chain, x), separate(lambda: gradients(chain, x)), strict=True):
        torch.testing.assert_close(got, want)


def test_what_is_not_kept_is_let_go(fused, monkeypatch):
    given, forward = weakref.WeakSet(), ops.BasicLinear.op_forward

    def noting(self, ctx, input_, *args, **kwargs):
        given.add(input_)
        return forward(self, ctx, input_, *args, **kwargs)

    monkeypatch.setattr(ops.BasicLinear, "op_forward", noting)
    chain, x = make(4, 5, 6), torch.randn(3, 4, requires_grad=True)
    y = chain(x)
    assert len(given) == 0
    y.sum().backward()
    assert len(given) == 0


def test_a_graph_that_is_retained(fused):
    chain, x = make(4, 4), torch.randn(3, 4, requires_grad=True)
    y = chain(x)
    results = [
        torch.autograd.grad(y.sum(), [x, *chain.parameters()], retain_graph=True) for _ in range(2)
    ]
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("frozen", ["input", "weight", "everything"])
def test_what_needs_no_gradient_is_neither_kept_nor_computed_again(fused, frozen, monkeypatch):
    monkeypatch.setattr(right.Recomputing, "again", None)
    chain, x = make(4, 5), torch.randn(3, 4, requires_grad=frozen == "weight")
    chain[1].requires_grad_(frozen == "input")
    chain[1].weight.requires_grad_(False)
    if frozen == "everything":
        assert saved(chain, x)[0] == []
        return
    expected = separate(lambda: gradients(chain, x))
    for got, want in zip(gradients(chain, x), expected, strict=True):
        torch.testing.assert_close(got, want)


def test_a_call_that_does_not_agree_keeps(fused, monkeypatch):
    chain, x = make(4, 5), torch.randn(3, 4, requires_grad=True)
    before = right.Recomputing.fuser_forward

    def disagree(self, basic_op_ctxs, input_, **unused):
        y, extras = before(self, basic_op_ctxs, input_)
        if basic_op_ctxs[0].may_recompute:
            basic_op_ctxs[0].recomputable_output = y.clone()  # not what the next op saves
        return y, extras

    monkeypatch.setattr(right.Recomputing, "fuser_forward", disagree)
    monkeypatch.setattr(right.Recomputing, "again", None)
    assert (3, 4) in saved(chain, x)[0]
    for got, want in zip(gradients(chain, x), separate(lambda: gradients(chain, x)), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("run", ["checkpoint", "reentrant", "compile"])
def test_with_what_torch_does_to_a_forward(fused, run):
    chain, x = make(4, 5), torch.randn(3, 4, requires_grad=True)
    expected = separate(lambda: gradients(chain, x))
    if run == "compile":
        wrapped = torch.compile(chain, fullgraph=True, backend="aot_eager")
    else:
        wrapped = lambda x: checkpoint(chain, x, use_reentrant=run == "reentrant")  # noqa: E731
    x.grad = None
    wrapped(x).sum().backward()
    got = [x.grad, *(p.grad for p in chain.parameters())]
    for mine, want in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, want)


def test_an_op_that_declares_nothing_keeps_what_it_likes(fused):
    class Foreign(ops.BasicLinear):
        saved_names = None

    chain, x = opfuse.Sequential(ops.GELU(), Foreign(4, 4)), torch.randn(3, 4, requires_grad=True)
    assert saved(chain, x)[0].count((3, 4)) == 2
    for got, want in zip(gradients(chain, x), separate(lambda: gradients(chain, x)), strict=True):
        torch.testing.assert_close(got, want)


def test_an_op_whose_context_is_kept_keeps_its_input(fused):
    chain = opfuse.Sequential(ops.GELU(), ops.ScaledSwiGLU())
    x, scales = torch.randn(3, 4, requires_grad=True), torch.rand(3, requires_grad=True)

    def step():
        return torch.autograd.grad(chain(x, scales).sum(), [x, scales])

    for got, want in zip(step(), separate(step), strict=True):
        torch.testing.assert_close(got, want)


def test_one_after_the_other(fused):
    chain = opfuse.Sequential(
        ops.Linear(4, 4), ops.GELU(), ops.GELU(), ops.GELU(), ops.Linear(4, 2)
    )
    x = torch.randn(3, 4, requires_grad=True)
    y = chain(x)
    results = [
        torch.autograd.grad(y.sum(), [x, *chain.parameters()], retain_graph=True) for _ in range(2)
    ]
    for got in results:
        for mine, want in zip(got, separate(lambda: gradients(chain, x)), strict=True):
            torch.testing.assert_close(mine, want)


def test_who_recomputes_says_how(register):
    class Forgetful(right.Recomputing):
        fuser_recompute = opfuse.FusedOperation.fuser_recompute

    register(forward_fusions=[opfuse.Fusion((ops.GELU,), Forgetful)])
    with pytest.raises(TypeError, match="Forgetful recomputes, but has no fuser_recompute"):
        opfuse.Sequential(ops.GELU())(torch.ones(2))


# Linears behind, and calls of other kinds


def side_by_side(bias):
    return ops.ParallelLinear([ops.Linear(5, width, bias=bias) for width in (7, 2)])


BEHIND = {
    "a linear": lambda: ops.BasicLinear(5, 6),
    "a linear with a bias": lambda: ops.Linear(5, 6),
    "linears side by side": lambda: side_by_side(bias=False),
    "linears side by side with biases": lambda: side_by_side(bias=True),
}


@pytest.mark.parametrize("rows", [(3,), (2, 3), (0,), (1,), (2, 3, 2)])
@pytest.mark.parametrize("behind", BEHIND)
def test_a_linear_behind_keeps_no_input(fused, behind, rows):
    torch.manual_seed(0)
    chain = opfuse.Sequential(ops.Linear(4, 5), ops.GELU(), BEHIND[behind]())
    x = torch.randn(*rows, 4, requires_grad=True)
    assert saved(chain, x)[0].count((*rows, 5)) == 1  # the input of GELU
    for mine, want in zip(gradients(chain, x), separate(lambda: gradients(chain, x)), strict=True):
        torch.testing.assert_close(mine, want)


@pytest.mark.parametrize("behind", BEHIND)
def test_for_frozen_linears_nothing_is_computed_again(fused, behind, monkeypatch):
    monkeypatch.setattr(right.Recomputing, "again", None)
    chain = opfuse.Sequential(ops.GELU(), BEHIND[behind]()).requires_grad_(False)
    x = torch.randn(3, 5, requires_grad=True)
    assert saved(chain, x)[0].count((3, 5)) == 1  # the input of GELU
    for mine, want in zip(gradients(chain, x), separate(lambda: gradients(chain, x)), strict=True):
        torch.testing.assert_close(mine, want)


def test_a_norm_behind_keeps_no_input_if_its_weight_is_frozen(fused):
    torch.manual_seed(0)
    chain = opfuse.Sequential(ops.Linear(4, 5), ops.GELU(), ops.RMSNorm(5))
    chain[2].requires_grad_(False)
    x = torch.randn(3, 4, requires_grad=True)
    assert saved(chain, x)[0].count((3, 5)) == 1  # the input of GELU
    for mine, want in zip(gradients(chain, x), separate(lambda: gradients(chain, x)), strict=True):
        torch.testing.assert_close(mine, want)


def test_under_autocast_a_linear_behind_gives_fp32_gradients(register):
    register(forward_fusions=[opfuse.Fusion((ops.GELU,), right.Recomputing, name="gelu")])
    chain, x = make(4, 5), torch.randn(3, 4, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = chain(x)
    got = torch.autograd.grad(y.float().sum(), [x, *chain.parameters()])
    assert [g.dtype for g in got] == [torch.float32] * 3


def test_a_loss_that_does_not_use_the_output(fused):
    torch.manual_seed(0)
    fork = ops.MakeExtraOutput()
    chain = opfuse.Sequential(fork, ops.GELU(), ops.Linear(4, 5))
    x = torch.randn(3, 4, requires_grad=True)
    y, extra = chain(x)
    got = torch.autograd.grad(extra.sum(), [x, *chain.parameters()], allow_unused=True)
    assert torch.equal(got[0], torch.ones_like(x)) and got[1:] == (None, None)
    y, extra = chain(x)
    both = torch.autograd.grad(y.sum() + extra.sum(), [x, *chain.parameters()])
    y, extra = separate(lambda: chain(x))
    for mine, want in zip(
        both, torch.autograd.grad(y.sum() + extra.sum(), [x, *chain.parameters()]), strict=True
    ):
        torch.testing.assert_close(mine, want)


class KeepsItsOutput(opfuse.FusedOperation):
    """Agrees wherever it is asked, and keeps what it gives by itself."""

    recomputes = True

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        (op,), (ctx,) = self.basic_ops, basic_op_ctxs
        y = op.forward_value(input_)
        if ctx.may_recompute:
            ctx.recomputable_output = y
        ctx.save_for_backward(input_, y)
        return y, [()]

    def fuser_recompute(self, basic_op_ctxs):
        return basic_op_ctxs[0].saved_tensors[1]

    def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
        x, _ = basic_op_ctxs[0].saved_tensors
        return self.basic_ops[0].backward_value(grad_output, x), [()], [()]


@pytest.mark.parametrize("needs", [True, False])
def test_an_op_that_takes_no_part_in_the_backward_is_not_asked(register, needs):
    register(joint_fusions=[opfuse.Fusion((ops.GELU,), KeepsItsOutput, name="gelu")])
    chain, x = make(8, 4), torch.randn(3, 8, requires_grad=needs)
    got, expected = gradients(chain, x), separate(lambda: gradients(chain, x))
    first, *_ = opfuse.explain(chain, x).calls[0].plan.forward
    assert first.fusion == "gelu"
    torch.testing.assert_close(got, expected)
