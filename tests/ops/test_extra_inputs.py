"""Extra inputs of integers and bools, and extra inputs that share one argument by their name."""

import re

import pytest
import torch
from torch import nn

import opfuse
from opfuse import ops

INT, BOOL, FLOAT = torch.int64, torch.bool, torch.float32


class Take(opfuse.BasicOperation):
    """``y = x[rows]``, where ``rows`` are integers, times 1 where ``keep`` is true and 0 elsewhere."""

    num_extra_inputs = 2
    extra_input_dtypes = ("integer", "bool")
    saved_names = ("rows", "keep")
    feature_ratio = 1
    keeps_rows = differentiable = True
    seen = None

    op_forward = op_backward = None

    def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, **unused):
        ((rows, keep),) = basic_op_extra_inputs
        if basic_op_ctxs[0].requires_grad:
            basic_op_ctxs[0].save_for_backward(rows, keep)
        return input_[rows] * keep.unsqueeze(-1), [()]

    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
        rows, keep = basic_op_ctxs[0].saved_tensors
        dy = grad_output * keep.unsqueeze(-1)
        return torch.zeros_like(dy).index_add(0, rows, dy), [()], [(None, None)]


class Times(opfuse.BasicOperation):
    """``y = x * extra``; notes which tensor it got."""

    num_extra_inputs = 1
    saved_names = ("input", "extra")
    feature_ratio = 1
    keeps_rows = differentiable = True

    op_forward = op_backward = None

    def __init__(self):
        super().__init__()
        self.got = []

    def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, **unused):
        ((extra,),) = basic_op_extra_inputs
        if not torch.compiler.is_compiling():
            self.got.append(extra)
        if basic_op_ctxs[0].requires_grad:
            basic_op_ctxs[0].save_for_backward(input_, extra)
        return input_ * extra, [()]

    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
        x, extra = basic_op_ctxs[0].saved_tensors
        return grad_output * extra, [()], [(grad_output * x,)]


def named(op, name="shared"):
    return op.set_extra_input_name(0, name)


def leaves(count):
    return [torch.randn(2, 3, dtype=torch.float64, requires_grad=True) for _ in range(count)]


# Integers and bools


@pytest.mark.parametrize("others", [0, 1])
@pytest.mark.parametrize("compiled", [False, True])
def test_integers_and_bools_pass_without_gradient(near, others, compiled):
    chain = opfuse.Sequential(*[ops.SiLU()] * others, Take(), *[ops.SiLU()] * others)
    run = torch.compile(chain, fullgraph=True, backend="aot_eager") if compiled else chain
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    rows, keep = torch.tensor([2, 2, 0]), torch.tensor([True, False, True])
    silu = nn.functional.silu if others else lambda x: x
    expected = silu(silu(x)[rows] * keep.unsqueeze(-1))
    y = run(x, rows, keep)
    weight = torch.randn_like(y)
    near(y, expected)
    near(torch.autograd.grad(y, x, weight)[0], torch.autograd.grad(expected, x, weight)[0])
    with opfuse.options(double_backward=True):
        near(chain(x, rows.int(), keep), expected)
    assert "Take" in str(opfuse.explain(chain, x, rows, keep))


@pytest.mark.parametrize(
    ("dtypes", "message"),
    [
        ((INT, INT), "extra input 1 of op 1 (Take) expected a bool tensor, got torch.int64"),
        ((BOOL, BOOL), "extra input 0 of op 1 (Take) expected an integer tensor, got torch.bool"),
        ((FLOAT, BOOL), "extra input 0 of op 1 (Take) expected an integer tensor, got torch.float"),
        ((torch.complex64, BOOL), "expected an integer tensor, got torch.complex64"),
    ],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_the_door_refuses_another_kind(dtypes, message, compiled):
    chain = opfuse.Sequential(ops.Identity(), Take())
    run = torch.compile(chain, fullgraph=True, backend="aot_eager") if compiled else chain
    with pytest.raises(Exception, match=re.escape(message)) as error:
        run(torch.ones(2, 2), *[torch.ones(2, dtype=dtype) for dtype in dtypes])
    assert compiled or error.type is TypeError


@pytest.mark.parametrize("dtype", [INT, torch.uint8, BOOL, torch.complex64])
@pytest.mark.parametrize("op", [ops.AddExtraInput, ops.ScaledSReLU, Times])
def test_an_undeclared_extra_input_is_floating_point(op, dtype):
    x = torch.ones(2, 3)
    extra = torch.ones(2, dtype=dtype) if op is ops.ScaledSReLU else torch.ones(2, 3, dtype=dtype)
    message = (
        rf"extra input 0 of op 0 \({op.__name__}\) expected a floating-point tensor, got {dtype}"
    )
    for call in (op(), opfuse.Sequential(op())):
        with pytest.raises(TypeError, match=message):
            call(x, extra)
        with pytest.raises(TypeError, match=message), torch.no_grad():
            call(x, extra)


def test_the_door_refuses_it_after_calls_that_fit():
    chain, x = opfuse.Sequential(ops.AddExtraInput()), torch.ones(2, 3)
    chain(x, x)
    with pytest.raises(TypeError, match="expected a floating-point tensor, got torch.int64"):
        chain(x, x.long())
    chain(x, x)


def test_integers_through_a_channel():
    """What a channel carries is held to the declaration too."""

    class Route(opfuse.BasicOperation):
        num_extra_outputs = 2
        saved_names = ()
        feature_ratio = 1
        keeps_rows = True
        op_forward = op_backward = None

        def fuser_forward(self, basic_op_ctxs, input_, **unused):
            return input_, [(input_.argsort(0)[:, 0].contiguous(), input_[:, 0] > 0)]

        def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
            return grad_output, [()], [()]

    def chain(*order):
        route, take = Route(), Take()
        for k, name in enumerate(("rows", "keep")):
            route.set_extra_output_channel(k, name, output_to_caller=False)
            take.set_extra_input_channel(order[k], name)
        return opfuse.Sequential(route, ops.Identity(), take)

    x = torch.randn(4, 2, requires_grad=True)
    rows, keep = x.argsort(0)[:, 0], x[:, :1] > 0
    y = chain(0, 1)(x)
    torch.testing.assert_close(y, x[rows] * keep)
    y.sum().backward()
    torch.testing.assert_close(
        x.grad, torch.zeros_like(x).index_add(0, rows, keep.expand(4, 2) * 1.0)
    )
    message = r"extra input 0 of op 2 \(Take\), out of a channel, expected an integer tensor, got torch.bool"
    with pytest.raises(TypeError, match=message):
        chain(1, 0)(x)


@pytest.mark.parametrize("declared", [("integer",), "integer", ("integer", "int"), ("bool",) * 3])
def test_a_declaration_that_cannot_be(declared):
    class Wrong(Take):
        extra_input_dtypes = declared

    message = (
        "Wrong.extra_input_dtypes must have one of 'floating', 'integer', 'bool' for each of its 2"
    )
    with pytest.raises(ValueError, match=message):
        opfuse.Sequential(Wrong())(torch.ones(1, 1), torch.zeros(1), torch.zeros(1))


def test_a_declaration_is_fixed_once_a_fuser_captured_it():
    take = Take()
    args = torch.ones(1, 1), torch.zeros(1, dtype=INT), torch.ones(1, dtype=BOOL)
    take(*args)
    take.extra_input_dtypes = ("integer", "integer")
    with pytest.raises(RuntimeError, match=r"extra_input_dtypes of op 0 \(Take\) are fixed"):
        take(*args)


# Names


def three():
    """Two ops that read one tensor, and one between them that reads another."""
    return named(Times()), Times(), named(Times())


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (0, 2, 1)])
@pytest.mark.parametrize("compiled", [False, True])
def test_inputs_of_one_name_take_one_argument(near, order, compiled):
    basic = three()
    chain = opfuse.Sequential(*[basic[i] for i in order])
    run = torch.compile(chain, fullgraph=True, backend="aot_eager") if compiled else chain
    x, shared, own = leaves(3)
    # at the place of the first
    extras = (own, shared) if order[0] == 1 else (shared, own)
    (fuser,) = chain._module_groups
    assert fuser.num_extra_inputs == 2
    y = run(x, *extras)
    expected = x * shared * own * shared
    near(y, expected)
    weight = torch.randn_like(y)
    got = torch.autograd.grad(y, (x, shared, own), weight, retain_graph=True)
    wanted = torch.autograd.grad(expected, (x, shared, own), weight)
    for one, other in zip(got, wanted, strict=True):
        near(one, other)
    if not compiled:  # the same object
        assert basic[0].got[-1] is basic[2].got[-1] is not basic[1].got[-1]


@pytest.mark.parametrize("used", ["x", "shared", "own", "none"])
def test_only_what_needs_a_gradient_gets_one(used):
    x, shared, own = torch.randn(3, 2, 3)
    given = {"x": x, "shared": shared, "own": own}
    if used != "none":
        given[used].requires_grad_()
    y = opfuse.Sequential(*three())(x, shared, own)
    assert y.requires_grad == (used != "none")
    if used != "none":
        y.sum().backward()
        expected = {"x": shared**2 * own, "shared": 2 * x * shared * own, "own": x * shared**2}
        torch.testing.assert_close(given[used].grad, expected[used].detach())


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward"])
@pytest.mark.parametrize("apart", [0, 1, 2])
def test_a_shared_input_reaches_every_part_of_a_cut_chain(near, kind, apart):
    chain = opfuse.Sequential(*three(), named(Times()))
    x, shared, own = leaves(3)
    expected = chain(x, shared, own)
    calls = []
    handle = getattr(chain[apart], f"register_{kind}_hook")(lambda *args: calls.append(1))
    y = chain(x, shared, own)
    near(y, expected)
    for one, other in zip(
        torch.autograd.grad(y.sum(), (x, shared, own)),
        torch.autograd.grad(expected.sum(), (x, shared, own)),
        strict=True,
    ):
        near(one, other)
    assert calls == [1]
    assert (
        f"cut at Times, which has {kind.removeprefix('full_').replace('_pre', ' pre-')} hooks"
        in str(opfuse.explain(chain, x, shared, own).details)
    )
    with pytest.raises(ValueError, match="expected 2 extra inputs, got 3"):
        chain(x, shared, own, own)
    handle.remove()
    near(chain(x, shared, own), expected)


def test_an_adapter_with_two_inputs_of_one_name(near):
    """What an op takes when it runs by itself is what its place in the chain gives it."""

    class Two(opfuse.BasicOperation):
        num_extra_inputs = 2
        saved_names = ()
        feature_ratio = 1
        op_forward = op_backward = None

        def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, **unused):
            ((a, b),) = basic_op_extra_inputs
            return input_ + a + 2 * b, [()]

        def fuser_backward(self, basic_op_ctxs, dy, **unused):
            return dy, [()], [(dy, 2 * dy)]

    class Adapted(Two):
        def forward(self, x, *extras):
            assert len(extras) == 1
            return super().forward(x, *extras)

    for cls in (Two, Adapted):
        op = cls().set_extra_input_name(0, "a").set_extra_input_name(1, "a")
        a = torch.ones(2, requires_grad=True)
        for call in (op, opfuse.Sequential(op, ops.Identity())):
            a.grad = None
            y = call(torch.ones(2), a)
            assert y.eq(4).all()
            y.sum().backward()
            assert a.grad.eq(3).all()


def test_each_chain_counts_its_own(near):
    chain = opfuse.Sequential(named(Times()), named(Times()), nn.Tanh(), named(Times()))
    x, a, b = torch.randn(3, 2, 3, dtype=torch.float64)
    near(chain(x, a, b), torch.tanh(x * a * a) * b)
    message = r"Sequential expected 2 extra inputs, got 1 \('shared' of op 0 \(Times\) and op 1 "
    with pytest.raises(ValueError, match=message + r"\(Times\), 'shared' of op 0 \(Times\)\)"):
        chain(x, a)
    chain = opfuse.Sequential(named(Times()), Times(), named(Times()))
    message = (
        r"expected 2 extra inputs, got 3 \('shared' of op 0 \(Times\) and op 2 \(Times\), op 1 "
    )
    with pytest.raises(ValueError, match=message):
        chain(x, a, b, b)


@pytest.mark.parametrize("hooked", [False, True])
def test_names_of_nested_chains_are_their_own(near, hooked):
    """How many arguments there are does not depend on whether a nested chain joins the one around."""
    inner = [opfuse.Sequential(named(Times()), named(Times())) for _ in range(2)]
    chain = opfuse.Sequential(*inner)
    if hooked:
        inner[0].register_forward_hook(lambda *args: None)
    x, a, b = torch.randn(3, 2, 3, dtype=torch.float64)
    near(chain(x, a, b), x * a * a * b * b)
    why = "its extra input 'shared' has the name of another one in the chain around it"
    assert hooked or why in " ".join(opfuse.explain(chain, x, a, b).details.split())
    alone = opfuse.Sequential(ops.SiLU(), opfuse.Sequential(named(Times()), named(Times())))
    assert len(alone._module_groups) == 1
    near(alone(x, a), nn.functional.silu(x) * a * a)


def test_a_branch_that_the_loss_does_not_use():
    chain = opfuse.Sequential(named(ops.AddExtraInput()), ops.MakeExtraOutput(), named(Times()))
    x = torch.randn(2, 3)
    shared = torch.randn(2, 3, requires_grad=True)
    _, middle = chain(x, shared)
    middle.sum().backward()
    torch.testing.assert_close(shared.grad, torch.ones(2, 3))


def test_the_gradient_of_a_shared_input_is_a_tensor_of_its_own():
    chain = opfuse.Sequential(named(ops.AddExtraInput()), named(ops.AddExtraInput()))
    x, shared = torch.randn(2, 3, requires_grad=True), torch.randn(2, 3, requires_grad=True)
    dy = torch.ones(2, 3)
    chain(x, shared).backward(dy)
    assert dy.eq(1).all() and x.grad.eq(1).all() and shared.grad.eq(2).all()
    assert len({t.data_ptr() for t in (dy, x.grad, shared.grad)}) == 3


def test_second_derivatives_of_a_shared_input(near):
    x, shared = leaves(2)
    results = []
    for call in (opfuse.Sequential(named(Times()), named(Times())), lambda x, s: x * s * s):
        with opfuse.options(double_backward=True):
            (first,) = torch.autograd.grad(call(x, shared).sum(), shared, create_graph=True)
        results.append(torch.autograd.grad(first.sum(), (x, shared), retain_graph=True))
    for one, other in zip(*results, strict=True):
        near(one, other)


class Product(opfuse.FusedOperation):
    """Two ``Times`` in one, which wants to know whether they share their tensor."""

    def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, **given):
        (a,), (b,) = basic_op_extra_inputs
        assert a is b
        return self.run_separately(
            basic_op_ctxs, input_, basic_op_extra_inputs=basic_op_extra_inputs, **given
        )


@pytest.mark.parametrize("shared", [True, False])
def test_a_fusion_sees_the_names_and_the_same_tensor(near, register, shared):
    def share(matched, env):
        first, other = (op.extra_input_names[0] for op in matched)
        return True if first is not None and first == other else "they read different tensors"

    register(forward_fusions=[opfuse.Fusion((Times, Times), Product, share, name="product")])
    chain = opfuse.Sequential(named(Times()), named(Times(), "shared" if shared else "other"))
    x, a = leaves(2)
    y = chain(x, *[a] * (1 if shared else 2))
    near(y, x * a * a)
    near(torch.autograd.grad(y.sum(), a)[0], 2 * x * a)
    text = str(opfuse.explain(chain, x, *[a] * (1 if shared else 2)))
    assert ("fused by product" in text, "different tensors" in text) == (shared, not shared)


# What is refused


def test_names_that_cannot_be():
    op = Times()
    for bad in ("", 3, ("a",)):
        with pytest.raises(ValueError, match="a name is a non-empty string or None, Times got"):
            op.set_extra_input_name(0, bad)
    for index in (1, -1):
        with pytest.raises(
            IndexError, match=f"Times has 1 extra inputs, there is no extra input {index}"
        ):
            op.set_extra_input_name(index, "a")
    assert op.set_extra_input_name(0, "a") is op and op.extra_input_names == ("a",)
    assert op.set_extra_input_name(0, None).extra_input_names == (None,)
    op(torch.ones(1), torch.ones(1))
    with pytest.raises(RuntimeError, match="the names of this Times are fixed: a fuser captured"):
        op.set_extra_input_name(0, "a")
    with pytest.raises(
        RuntimeError, match="the channels of this Times are fixed: a fuser captured"
    ):
        op.set_extra_input_channel(0, "a")


def test_a_name_or_a_channel_not_both():
    message = r"extra input 0 of Times has the name 'n', .* or the channel 'c', .* not both"
    with pytest.raises(ValueError, match=message):
        named(Times(), "n").set_extra_input_channel(0, "c")
    with pytest.raises(ValueError, match=message):
        Times().set_extra_input_channel(0, "c").set_extra_input_name(0, "n")
    named(Times(), "n").set_extra_input_name(0, None).set_extra_input_channel(0, "c")


def test_one_name_for_two_kinds():
    chain = opfuse.Sequential(Take().set_extra_input_name(0, "n"), named(Times(), "n"))
    message = (
        r"extra input name 'n' is wanted as an integer tensor by op 0 \(Take\) as extra input 0 but "
        r"a floating-point tensor by op 1 \(Times\) as extra input 0"
    )
    with pytest.raises(ValueError, match=message):
        chain(torch.ones(1, 1), torch.ones(1))


@pytest.mark.parametrize("writer", [0, 1])
def test_one_name_for_what_is_written_into(writer):
    add = named(ops.AddExtraInput(in_place=True))
    chain = opfuse.Sequential(*[add, named(Times())][:: 1 if writer == 0 else -1])
    with pytest.raises(ValueError, match=rf"op {writer} \(AddExtraInput\) writes into it"):
        chain(torch.ones(1), torch.ones(1))
    alone = opfuse.Sequential(named(ops.AddExtraInput(in_place=True)))
    extra = torch.ones(1)
    assert alone(torch.ones(1), extra) is not None and extra.item() == 2


def test_shapes_and_dtypes_that_two_ops_demand():
    chain = opfuse.Sequential(named(ops.AddExtraInput()), named(ops.ScaledSReLU()))
    x = torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"ScaledSReLU expected scales of shape \(2,\)"):
        chain(x, torch.ones(2, 3))
    with pytest.raises(ValueError, match="AddExtraInput expected an extra input of shape"):
        chain(x, torch.ones(2))
    chain = opfuse.Sequential(named(Times()), named(ops.AddExtraInput()))
    message = r"extra input 0 \('shared'\) of op 1 \(AddExtraInput\) expected torch.float32"
    with pytest.raises(TypeError, match=message):
        chain(x, x.double())


def test_a_copy_has_a_name_of_its_own():
    import copy

    op = named(Times(), "a")
    for twin in (copy.copy(op), copy.deepcopy(op)):
        twin.set_extra_input_name(0, "b")
        assert (op.extra_input_names, twin.extra_input_names) == (("a",), ("b",))
