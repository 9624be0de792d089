"""What the core promises whatever the cover: what is saved, what is kept, what lasts, and in which thread."""

import copy
import functools
import gc
import os
import pathlib
import subprocess
import sys
import threading
import weakref
from collections import Counter

import chains
import pytest
import torch
from fakes import registered
from rounding import Rounding, RoundingPlugin
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import opfuse
from opfuse import ops
from opfuse.core.plugins import manager
from opfuse.core.settings import current

pytestmark = pytest.mark.alone

SEEDS = range(100)
SUPPORT = pathlib.Path(__file__).parent / "support"


@pytest.fixture(autouse=True)
def _alone(one_thread):
    with opfuse.plugins.using(""):
        yield


# What is saved


def expected_saved(op, x, y, extras, wants_input, wants_params):
    """The tensors that an op must leave, by the names it declares, None where no gradient needs them."""
    count = (
        op.num_groups if isinstance(op, ops.GroupedLinear) else len(getattr(op, "sizes", (None,)))
    )
    wants_weight = any(wants_params[:count])
    scaled, norm = (
        isinstance(op, ops.ScaledActivation),
        isinstance(op, (ops.LayerNorm, ops.RMSNorm)),
    )
    dims = tuple(range(-len(op.normalized_shape), 0)) if norm else (-1,)
    wants_scales = scaled and extras[0].requires_grad
    wants_x = (
        wants_weight
        if isinstance(op, (ops.BasicLinear, ops.GroupedLinear, ops.ParallelLinear))
        else wants_input or wants_weight or wants_scales
    )
    kept = y if getattr(op, "saves_output", False) else x
    values = {"input": kept if wants_x else None, "weight": None, "scales": None, "mask": None}
    if isinstance(op, ops.ParallelLinear):
        weights = op.param_names[:count]
        values |= {name: op.read_parameter(name) if wants_input else None for name in weights}
    if wants_input:
        values["weight"] = getattr(op, "weight", None)
        values["scales"] = extras[0] if scaled else None
        if isinstance(op, ops.Dropout) and op.training and op.p:
            values["mask"] = y != 0
    if isinstance(op, ops.GroupedLinear):
        weights = {f"weight{i}": getattr(op, f"weight{i}") for i in range(op.num_groups)}
        values |= weights if wants_input else dict.fromkeys(weights)
        values["split_sizes"] = extras[0]
        values |= {f"input{i}": None for i in range(op.num_groups)}  # for a recipe
    if norm or isinstance(op, ops.L2Normalization):
        mean = x.mean(dims, keepdim=True)
        centered = x - mean if isinstance(op, ops.LayerNorm) else x
        square = centered.square()
        square = square.mean(dims, keepdim=True) if norm else square.sum(-1, keepdim=True)
        values |= (
            {"mean": mean, "rstd": torch.rsqrt(square + op.eps)}
            if wants_x
            else {"mean": None, "rstd": None}
        )
    return [values[name] for name in op.saved_names]


class Watching(chains.Forwarding):
    """Keeps what each basic op got, and what it left."""

    seen: list

    def fuser_forward(self, *args, **given):
        watched = {*self.basic_ops}
        for op in watched:  # not by setattr, which makes plans anew
            vars(op)["fuser_forward"] = functools.partial(self.watch, op, op.fuser_forward)
        try:
            return super().fuser_forward(*args, **given)
        finally:
            for op in watched:
                del vars(op)["fuser_forward"]

    def watch(self, op, forward, ctxs, input_, **given):
        result = forward(ctxs, input_, **given)
        kept = [input_, result[0], *given["basic_op_extra_inputs"][0]]
        to_save = ctxs[0].to_save
        saved = to_save and [t if t is None else t.detach().clone() for t in to_save]
        copies = [t.detach().clone().requires_grad_(t.requires_grad) for t in kept]
        self.seen.append((op, ctxs[0], saved, *copies))
        return result


def test_forward_fusions_save_what_is_declared(monkeypatch):
    classes = set()
    for seed in range(300):
        drawn = chains.RandomChain(seed, cuts=False)
        monkeypatch.setattr(Watching, "seen", [], raising=False)
        with registered("forward", lambda basic, *, recipe: [Watching(basic)]):
            y, *_ = drawn.forward()
        wants, declared = drawn.x.requires_grad, []
        for op, ctx, saved, x, out, *extras in Watching.seen:
            params = [op.read_parameter(name) for name in op.param_names]
            wants_params = [p.requires_grad for p in params]
            publics = [
                e
                for e, channel in zip(extras, op._extra_input_channels, strict=True)
                if channel is None
            ]
            needed = wants or any(t.requires_grad for t in (*params, *publics))
            assert (ctx.requires_grad, ctx.input_requires_grad) == (needed, wants)
            if not needed:
                assert saved is None
            expected = (
                expected_saved(op, x, out, extras, wants, wants_params)
                if needed
                else [None] * len(op.saved_names)
            )
            for name, got, wanted in zip(
                op.saved_names, (saved or ()) if needed else expected, expected, strict=True
            ):
                assert (got is None) == (wanted is None), (seed, op, name)
                if name == "mask" and got is not None:
                    got, wanted = x * got / (1 - op.p), out
                if got is not None and got.numel():
                    torch.testing.assert_close(got.detach(), wanted.detach(), equal_nan=True)
            declared.extend(expected if needed else ())
            wants, classes = needed, classes | {type(op).__name__}
        if wants:
            (node,) = nodes_of([y])
            assert [t is None for t in node.saved_tensors] == [t is None for t in declared], seed
    built_in = {n for n in ops.__all__ if issubclass(getattr(ops, n), opfuse.BasicOperation)}
    bases = {"Activation", "GatedActivation", "ScaledActivation"}
    apart = {
        "CrossEntropy",
        "LowRankLinear",
        "Modulate",
        "RoPE",
        "ApplyRoPE",
        "SwapExtraInput",
        "TokenLogProb",
        "TrackedDropout",
    }  # tests of their own: one ends a chain, others take heads, have an adapter, take extra
    # inputs of several shapes, or go on with another tensor
    wanted = bases | apart | {"Cast"}
    assert built_in - classes == wanted, "tests/support/chains.py draws other ops than these"


def nodes_of(outputs):
    """The autograd nodes of every chain behind the outputs."""
    todo, seen = [y.grad_fn for y in outputs], {}
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen[node] = node
            todo += [following for following, _ in node.next_functions]
    return [node for node in seen if hasattr(node, "program")]


@pytest.mark.parametrize("style", [chains.intervals, chains.patterns])
def test_backward_twice_is_bitwise_the_same_and_changes_no_context(style):
    kept = 0
    for seed in SEEDS:
        drawn = chains.RandomChain(seed)
        leaves = [t for t in drawn.leaves() if t.requires_grad]
        with chains.covers(seed, style=style):
            outputs = [y for y in drawn.forward() if y.requires_grad]
        if not outputs:
            continue
        kept_on = [pair for node in nodes_of(outputs) for pair in vars(node).items()]
        contexts = [value[0] for name, value in kept_on if name.startswith("left_")]
        before = [dict(attributes) for attributes in contexts]
        first, second = (
            torch.autograd.grad(outputs, leaves, drawn.weights(outputs), retain_graph=True)
            for _ in "12"
        )
        assert all(map(torch.equal, first, second)), seed
        assert contexts == before
        kept += len(contexts)
    assert kept


def test_nothing_is_held_between_calls():
    chain = opfuse.Sequential(opfuse.ops.Linear(4, 4), opfuse.ops.GELU(), opfuse.ops.Identity())
    alive = weakref.WeakSet()
    for _ in range(3):
        x = torch.randn(3, 4, requires_grad=True)
        y = chain(x)
        alive |= {x, y}
        y.sum().backward()
        del x, y
    with torch.no_grad():
        alive.add(chain(torch.randn(3, 4)))
    assert not alive


class Undeclared(opfuse.ops.Identity):
    """Declares nothing, and leaves a note on every context."""

    saved_names = None

    def op_forward(self, ctx, input_, **unused):
        assert not hasattr(ctx, "note")
        ctx.note = input_.shape
        return input_

    def op_backward(self, ctx, grad_output):
        assert ctx.note == grad_output.shape
        return grad_output, ()


def test_a_context_that_may_hold_anything_serves_once():
    chain = opfuse.Sequential(opfuse.ops.Linear(4, 4), Undeclared())
    for rows in (2, 3, 2):
        chain(torch.randn(rows, 4)).sum().backward()
        with torch.no_grad():
            chain(torch.randn(rows, 4))


class Careless(opfuse.ops.Identity):
    """Declares that it leaves nothing, and writes a number on its context all the same."""

    saved_names = context_names = ()

    def op_forward(self, ctx, input_, **unused):
        ctx.factor = float(input_.detach().max())
        return input_ * ctx.factor


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_context_takes_nothing_that_its_op_did_not_declare(requires_grad):
    chain = opfuse.Sequential(Careless())
    with pytest.raises(
        AttributeError, match="context_names declare nothing' object has no attribute 'factor'"
    ):
        chain(torch.ones(2, requires_grad=requires_grad))


class Halves(opfuse.BasicOperation):
    """Changes what the fuser has set on its context, in some calls."""

    saved_names = ()
    halves = False

    def op_forward(self, ctx, input_):
        if self.halves:
            ctx.dtype, ctx.input_requires_grad = torch.bfloat16, False
        return input_.to(ctx.dtype or input_.dtype) * 2

    def op_backward(self, ctx, grad_output):
        return (2 * grad_output if ctx.input_requires_grad else None), ()


def test_what_an_op_changes_on_its_context_is_gone_in_the_next_call():
    op, x = Halves(), torch.randn(3, 3, requires_grad=True)
    chain = opfuse.Sequential(op)
    for halves, dtype in ((False, torch.float32), (True, torch.bfloat16), (False, torch.float32)):
        vars(op)["halves"] = halves
        y = chain(x)
        assert y.dtype == dtype
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], torch.full((3, 3), 2.0))


class Hoarder(opfuse.ops.GELU):
    """Saves its input although nobody asks for a gradient."""

    saved_names, differentiable = ("input",), True

    def op_forward(self, ctx, input_, **unused):
        ctx.save_for_backward(input_)
        return input_.clone()


@pytest.mark.parametrize(
    "mode", [torch.no_grad, torch.enable_grad, lambda: opfuse.options(double_backward=True)]
)
def test_what_is_saved_in_vain_is_not_held(mode):
    chain = opfuse.Sequential(Hoarder())
    with mode():
        x = torch.ones(2)
        held = weakref.ref(x)
        chain(x)
    del x
    assert held() is None


# Plans


def test_plans_do_not_depend_on_the_order_of_registration():
    plan = chains.plan_in_some_order(0)
    for seed in range(1, 12):
        other = chains.plan_in_some_order(seed)
        assert (other, hash(other), str(other)) == (plan, hash(plan), str(plan))
    assert {step.fusion.split()[0] for step in (*plan.forward, *plan.backward) if step.fusion} == {
        "joint",
        "forward",
        "backward",
    }


def test_plans_are_the_same_in_a_fresh_process():
    code = "import chains; print(chains.plan_in_some_order(5))"
    environ = {**os.environ, "PYTHONPATH": str(SUPPORT)}
    runs = [{"PYTHONHASHSEED": "1"}, {"PYTHONHASHSEED": "2", "OPFUSE_FUSION_LIMIT": "2"}]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code], env={**environ, **more}, text=True, stdout=subprocess.PIPE
        )
        for more in runs
    ]
    whole, limited = (process.communicate(timeout=60)[0].rstrip("\n") for process in processes)
    assert whole == str(chains.plan_in_some_order(0))
    assert limited == str(chains.plan_in_some_order(0, fusion_limit=2)) != whole


def fused_steps(chain):
    """The fusions of every plan, in the order in which a limit counts them."""
    found = []
    for group in chain._module_groups:
        plan = group._last[1].plan
        forward = [s for s in plan.forward if s.fusion]
        backward = [s for s in plan.backward[::-1] if s.fusion and s.op != "Joint"]
        found += (
            [s for s in forward if s.op == "Joint"]
            + [s for s in forward if s.op != "Joint"]
            + backward
        )
    return found


def test_bisecting_with_the_fusion_limit():
    counts = []
    for seed in range(30):
        drawn = chains.RandomChain(seed, cuts=False)
        leaves = [t for t in drawn.leaves() if t.requires_grad]
        weights = drawn.weights(drawn.forward())

        def step(drawn=drawn, leaves=leaves, weights=weights):
            outputs = drawn.forward()
            pairs = [(y, w) for y, w in zip(outputs, weights, strict=True) if y.requires_grad]
            grads = ()
            if pairs:
                grads = torch.autograd.grad([y for y, _ in pairs], leaves, [w for _, w in pairs])
            return [*outputs, *grads], fused_steps(drawn.chain)

        expected, _ = step()
        with chains.covers(seed, style=(chains.intervals, chains.patterns)[seed % 2]):
            _, full = step()
            counts.append(len(full))
            for limit in range(len(full) + 2):
                with opfuse.options(fusion_limit=limit):
                    got, taken = step()
                assert taken == full[:limit], (seed, limit)
                for a, b in zip(got, expected, strict=True):
                    torch.testing.assert_close(a, b)
    assert max(counts) >= 5


# Settings


def test_settings_are_of_one_thread_and_end_with_an_exception():
    record = manager.register(RoundingPlugin(), name="rounding", distribution="rounding-plugin")
    barrier, failures = threading.Barrier(2, timeout=20), []

    def work(number):
        before = current.values
        try:
            for depth in range(20):
                with pytest.raises(ZeroDivisionError), opfuse.plugins.using("rounding"):
                    with (
                        opfuse.options(**{"test.number": number}),
                        opfuse.options(fusion_limit=depth),
                    ):
                        with opfuse.autocast(recipe=Rounding(step=number + 1.0)):
                            barrier.wait()
                            options, selection, recipe, *_ = current.values
                            assert dict(options) == {"test.number": number, "fusion_limit": depth}
                            assert (selection, recipe) == ("rounding", Rounding(step=number + 1.0))
                            barrier.wait()
                            raise ZeroDivisionError
                assert current.values == before
        except BaseException as error:
            barrier.abort()
            failures.append(error)

    here = current.values
    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        manager.remove(record)
    assert not failures and current.values == here


class FailsLater(ops.Identity):
    """Raises in every forward but the first."""

    calls = 0

    def op_forward(self, ctx, input_, **unused):
        self.calls += 1
        if self.calls > 1:
            raise ZeroDivisionError
        return input_


def test_an_exception_while_recomputing_restores_settings_and_state():
    record = manager.register(RoundingPlugin(), name="rounding", distribution="rounding-plugin")
    recipe, linear = Rounding(levels=8), ops.Linear(4, 4)
    chain = opfuse.Sequential(linear, FailsLater(), ops.GELU())
    try:
        with (
            opfuse.plugins.using("rounding"),
            opfuse.autocast(recipe=recipe),
            opfuse.options(fusion_limit=3),
        ):
            x = 5 * torch.ones(2, 4, requires_grad=True)
            y = checkpoint(chain, x, use_reentrant=False, context_fn=opfuse.checkpoint_contexts)
        quantizer = linear.basic_ops[0]._quantizers.of(recipe)["input"]
        state = quantizer.updates.clone(), quantizer.amax.clone()
        with opfuse.options(fusion_limit=7):
            outside = current.values
            with pytest.raises(ZeroDivisionError):
                y.sum().backward()
            assert current.values == outside and not current.recorders
        assert (
            all(map(torch.equal, state, (quantizer.updates, quantizer.amax)))
            and state[1].item() == 5
        )
    finally:
        manager.remove(record)


# Memory, size and threads


class Births(TorchDispatchMode):
    """Weak references to every tensor that comes out of an operation."""

    keeps_no_tensors = True

    def __init__(self):
        super().__init__()
        self.tensors = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.tensors += [weakref.ref(t) for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        return result


@pytest.mark.parametrize("kinds", [(), ("forward", "backward"), ("joint",)])
def test_nothing_lives_on_after_the_backward(kinds):
    basic = [
        ops.Linear(4, 8),
        ops.GELU(),
        ops.MakeExtraOutput().set_extra_output_channel(0, "c"),
        ops.SwiGLU(),
    ]
    more = [
        ops.LayerNorm(4),
        ops.Dropout(0.5),
        ops.Linear(4, 8),
        ops.AddExtraInput().set_extra_input_channel(0, "c"),
    ]
    chain = opfuse.Sequential(*basic, *more, ops.Reshape((-1,)))
    with chains.covers(0, kinds):
        for _ in range(2):
            x, births = torch.randn(3, 4), Births()
            births.tensors.append(weakref.ref(x))
            with births:
                y, extra = chain(x)
                (y.sum() + extra.sum()).backward()
            alive = {
                t.untyped_storage().data_ptr()
                for t in (y, extra, *[p.grad for p in chain.parameters()])
            }
            del x
            gc.collect()
            left = [
                ref().untyped_storage().data_ptr() for ref in births.tensors if ref() is not None
            ]
            assert len(births.tensors) > 20 and set(left) <= alive
            chain.zero_grad()


@pytest.mark.parametrize("kinds", [(), tuple(chains.KINDS)])
@pytest.mark.parametrize("style", [chains.intervals, chains.patterns])
def test_planning_a_long_chain_takes_time_in_proportion(kinds, style):
    def first_call(blocks):
        some = [
            ops.Bias(4),
            ops.GELU(),
            ops.Identity(),
            ops.ConstantScale(1.5),
            ops.RMSNorm(4),
            ops.SiLU(),
        ]
        chain = opfuse.Sequential(*[copy.deepcopy(op) for _ in range(blocks) for op in some])
        x = torch.randn(2, 4, requires_grad=True)
        counts = Counter()
        with chains.covers(0, kinds, style=style):
            sys.setprofile(lambda frame, event, arg: counts.update([event]))
            try:
                chain(x).sum().backward()
            finally:
                sys.setprofile(None)
        (fuser,) = chain._module_groups
        assert len(fuser._chain.ops) == 6 * blocks
        assert (len(fuser._last[1].forward) < 6 * blocks) == bool(kinds)
        got, x.grad = x.grad, None
        chain(x).sum().backward()
        torch.testing.assert_close(got, x.grad)
        return counts["call"]

    assert first_call(50) < 3 * first_call(25)


def test_two_threads_train_as_one_does():
    def train(chain, results):
        optimizer = torch.optim.SGD(chain.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(1)
        for _ in range(15):
            x, extra = torch.randn(2, 4, 4, generator=generator)
            optimizer.zero_grad()
            chain(x, extra).square().mean().backward()
            optimizer.step()
        results.append([p.detach().clone() for p in chain.parameters()])

    torch.manual_seed(0)
    chain = opfuse.Sequential(
        ops.Linear(4, 8), ops.SwiGLU(), ops.AddExtraInput(), ops.RMSNorm(4), ops.Linear(4, 1)
    )
    with chains.covers(3):
        copies, alone, results = [copy.deepcopy(chain) for _ in range(2)], [], []
        train(chain, alone)
        threads = [threading.Thread(target=train, args=(twin, results)) for twin in copies]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(results) == 2
    for other in results:
        assert all(map(torch.equal, other, alone[0]))


# Known to fail


def test_in_place_without_rows():
    chain = opfuse.Sequential(ops.BasicLinear(2, 2), ops.AddExtraInput(in_place=True))
    assert chain(torch.ones(0, 2), torch.ones(0, 2)).shape == (0, 2)


def test_gradients_of_two_leaves_do_not_share_memory():
    x, extra = torch.ones(4, requires_grad=True), torch.ones(2, 2, requires_grad=True)
    chain = opfuse.Sequential(ops.Reshape((2, 2)), ops.AddExtraInput(), ops.ConstantScale(1.0))
    for _ in range(2):
        chain(x, extra).sum().backward()
    assert x.grad.eq(2).all() and extra.grad.eq(2).all()
