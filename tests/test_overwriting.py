"""Results of torch's operations are overwritten only where nobody else can hold them."""

import ast
import functools
import pathlib

import chains
import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import opfuse
from opfuse import ops
from opfuse.core.overwriting import unseen
from opfuse.ops.authoring import added, may_write, reusable
from opfuse.testing.checks.memory import Holding

aten = torch.ops.aten
POLICIES = {"mm": [aten.mm.default, aten.addmm.default], "everything": None}


def selective(function, saved):
    """A function under checkpointing that saves the results of some operations; None: of all."""

    def policy(ctx, func, *args, **kwargs):
        chosen = saved is None or func in saved
        return CheckpointPolicy.MUST_SAVE if chosen else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    return functools.partial(checkpoint, function, use_reentrant=False, context_fn=contexts)


def gradients(function, leaves, *given):
    """The output, and the gradients of leaves."""
    outputs = function(*given)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    chosen = [y for y in outputs if y.requires_grad]
    if not chosen:
        return []
    loss = sum((y.double() * torch.linspace(1, 2, y.numel()).view(y.shape)).sum() for y in chosen)
    return torch.autograd.grad(loss, [t for t in leaves if t.requires_grad], allow_unused=True)


def assert_same(got, expected, where=""):
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, msg=lambda text: f"{where}: {text}")


# What the one predicate says


class Sees(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Counts(Sees):
    keeps_no_tensors = True


class SeesFunctions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Subclass(torch.Tensor):
    pass


def test_nothing_is_overwritten_where_somebody_may_hold_it():
    x = torch.ones(3)
    assert may_write(x, None, nn.Parameter(x)) is False  # autograd records
    with torch.no_grad():
        assert may_write(x, None, nn.Parameter(x))
        assert not may_write(x.as_subclass(Subclass))
    with Counts():
        assert may_write(x)
    with Sees(), Counts():
        assert not may_write(x)
    with Counts(), Sees():
        assert not may_write(x) and reusable(x) is None
    with forward_ad.dual_level():
        assert not may_write(x)
    with SeesFunctions():
        assert not may_write(x)
    with torch.device("cpu"):
        assert may_write(x)
    found = []
    torch.func.vmap(lambda y: found.append(may_write(x)) or y)(x)
    assert found == [False]
    assert may_write(x) and reusable(x) is x


def test_hooks_of_saved_tensors_see_no_result_that_is_overwritten():
    x, seen = torch.ones(3, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
        with torch.no_grad():
            y = x.exp()
            assert may_write(x, y) and not seen  # so they hold nothing
        y = x.exp()
        assert seen and not may_write(y)


def test_a_sum_has_the_dtype_of_its_first_part():
    for dtype, other in ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)):
        total, part = torch.randn(2, 3).to(dtype), torch.randn(2, 3).to(other)
        expected = total.clone().add_(part, alpha=0.5)
        with Sees():
            apart = added(total, part, 0.5)
        assert apart is not total and added(total, part, 0.5) is total
        assert torch.equal(apart, expected) and torch.equal(total, expected)


def test_what_a_collective_overwrites_is_seen_by_no_mode():
    x, result = torch.randn(3, 2).t(), torch.randn(3)
    with Holding() as mode:
        copies = unseen(x), unseen(result, is_result=True)
    assert not mode.held and all(copy.is_contiguous() for copy in copies)
    assert torch.equal(copies[0], x) and torch.equal(copies[1], result)
    assert copies[1] is not result and unseen(result, is_result=True) is result


# Chains that gave wrong gradients, or raised where PyTorch runs


def reported():
    joins = opfuse.Sequential(ops.BasicLinear(64, 64), ops.AddExtraInput())
    rows, targets = torch.randn(2, 5, 64), torch.randint(0, 60, (2, 5))
    grad = functools.partial(torch.Tensor.requires_grad_)
    yield "a residual", joins, (grad(rows.clone()), grad(torch.randn(2, 5, 64)))
    for dtype in (torch.float32, torch.bfloat16):
        linear = opfuse.Sequential(ops.Linear(64, 64, dtype=dtype))
        yield f"a bias in {dtype}", linear, (grad(rows.to(dtype)),)
        for gate in (ops.QGELU(), ops.ClampedSwiGLU(limit=0.5), ops.SwiGLU(), ops.SReLU()):
            chain = opfuse.Sequential(ops.Linear(64, 64, dtype=dtype), gate)
            yield f"{type(gate).__name__} in {dtype}", chain, (grad(rows.to(dtype)),)
        for loss in (
            ops.CrossEntropy(label_smoothing=0.1, softcap=3.0),
            ops.TokenLogProb(entropy=True, log_sum_squares=True),
        ):
            chain = opfuse.Sequential(ops.Linear(64, 60, dtype=dtype), loss)
            yield f"{type(loss).__name__} in {dtype}", chain, (grad(rows.to(dtype)), targets)
    sides = opfuse.Sequential(ops.ParallelLinear({"a": ops.Linear(64, 8), "b": ops.Linear(64, 4)}))
    yield "linears side by side", sides, (grad(rows.clone()),)
    into = opfuse.Sequential(ops.Linear(64, 64), ops.AddExtraInput(in_place=True))
    yield "into the extra input", into, (grad(rows.clone()), torch.randn(2, 5, 64))


@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_under_selective_checkpointing(policy):
    for name, chain, given in reported():
        leaves = [*given, *chain.parameters()]

        def more(*given, chain=chain):  # the region goes on after the chain
            given = [t * 1 if t.is_floating_point() else t for t in given]
            result = chain(*given)
            result = result if isinstance(result, tuple) else (result,)
            return tuple(torch.tanh(y) if y.is_floating_point() else y for y in result)

        expected = gradients(more, leaves, *given)
        assert_same(gradients(selective(more, POLICIES[policy]), leaves, *given), expected, name)


@pytest.mark.costly(10)
@pytest.mark.parametrize("start", range(0, 200, 10))
@pytest.mark.alone  # it runs without plugins
def test_random_chains_under_selective_checkpointing(start):
    for seed in range(start, start + 10):
        drawn = chains.RandomChain(seed)
        if drawn.x.ndim < 2:  # torch's own product of a vector is squeezed in place
            continue
        with opfuse.plugins.using(""):
            expected = gradients(lambda drawn=drawn: drawn.forward(), drawn.leaves())
            with Holding() as mode:
                drawn.forward()
            assert not mode.changed(), seed
            for func in mode.operations:
                run = selective(lambda drawn=drawn: drawn.forward(), [func])
                assert_same(gradients(run, drawn.leaves()), expected, f"{seed}, {func}")


def test_a_backward_writes_into_no_gradient_that_a_mode_may_hold():
    chain = opfuse.Sequential(ops.BasicLinear(8, 8), ops.GELU(), ops.GELU(), ops.BasicLinear(8, 8))
    x = torch.randn(4, 8, requires_grad=True)
    y = chain(x)
    for _ in range(2):  # the contexts of the first may serve again
        with Holding() as mode:
            y.sum().backward(retain_graph=True)
        assert not mode.changed() and mode.held
    y.sum().backward()


# Who writes

ROOT = pathlib.Path(__file__).parents[1]
FOLDERS = [ROOT / "opfuse", *(path for path in ROOT.glob("plugins/*/src/*") if path.is_dir())]
SOURCES = {
    ".".join([folder.name, *path.relative_to(folder).with_suffix("").parts]): path
    for folder in FOLDERS
    for path in folder.rglob("*.py")
}

GUARDS = {"may_write", "reusable", "in_blocks"}
NO_PASS = {"testing", "cli", "report", "tuning", "gpu", "cases", "_samples"}
"""Parts of the names of modules that run no pass of a chain."""

STATE = "it updates what is kept from call to call"
OWN = "the caller of the chain gives the memory"
GIVEN = "its callers give the memory, and ask"
LIST = "it is a list"
ALLOWED = {
    "opfuse.core.engine.write_backward.Backward._leave_out_unreached": LIST,
    "opfuse.core.overwriting.put_back": STATE,
    "opfuse.ops.arithmetic._library_adds": "it asks a library, once",
    "opfuse.ops.arithmetic.add_product": GIVEN,
    "opfuse.ops.arithmetic.widened": GIVEN,
    "opfuse.core.quantization.quantizer.Quantizer.discard": STATE,
    "opfuse.core.quantization.state.QuantizerStates._restore": STATE,
    "opfuse_distributed.ranks._Summed.wait": "a collective fills it",
    "opfuse.ops._blocks.gradients_by_blocks": GIVEN,
    "opfuse.ops._blocks.scaled_by_blocks": GIVEN,
    "opfuse.ops._main_grad.accumulate_main_grad": STATE,
    "opfuse.ops.activation.Activation._gradient": GIVEN,
    "opfuse.ops.activation.Activation.op_backward": "by owns_grad_output, for which the core asks",
    "opfuse.ops.activation.QGELU._gradient": GIVEN,
    "opfuse.ops.activation.SReLU.backward_value": GIVEN,
    "opfuse.ops.activation._backward_kernel.backward_value": GIVEN,
    "opfuse.ops.cross_entropy._gradients": GIVEN,
    "opfuse.ops.cross_entropy._losses": GIVEN,
    "opfuse.ops.cross_entropy.capped": GIVEN,
    "opfuse.ops.cross_entropy.uncapped": GIVEN,
    "opfuse.ops.gated.GLU._write_gradients": GIVEN,
    "opfuse.ops.gated.GatedActivation._write_gradients": GIVEN,
    "opfuse.ops.grouped._loop_weights": GIVEN,
    "opfuse.ops.grouped_linear.GroupedLinear.backward_in": OWN,
    "opfuse.ops.grouped_linear.GroupedLinear.forward_in": OWN,
    "opfuse.ops.linear.Linear.load_whole": STATE,
    "opfuse.ops.norm._mixed_layer_norm_backward": GIVEN,
    "opfuse.ops.token_log_prob._gradients_of": GIVEN,
    "opfuse.ops.token_log_prob._of_rows": GIVEN,
    "opfuse.ops.token_log_prob.cooled": GIVEN,
    "opfuse_distributed.vocab_parallel_log_prob.LogProbPart.row_gradients": GIVEN,
    "opfuse_convert.grammar.rewriting._replace": LIST,
    "opfuse_fp8.delayed.ScaleBuffer.__init__": STATE,
    "opfuse_fp8.delayed.advance": STATE,
    "opfuse_fp8.kernels.launch_groups.cast_mx": LIST,
    "opfuse_fp8.nvfp4.StochasticNVFP4Quantizer.advance": STATE,
    "opfuse_fp8.nvfp4.StochasticNVFP4Quantizer.tensors_of": STATE,
    "opfuse_fp8.quantizers.DelayedQuantizer.record": STATE,
    "opfuse_fp8.quantizers._written": OWN,
    "opfuse_graphs.layers.graphed": STATE,
    "opfuse_graphs.replaying.GraphedForward.replay": OWN,
    "opfuse_graphs.replaying.GraphedForward.replay_backward": OWN,
    "opfuse_inductor.kernels.Plan._backward.function": "by owns_grad_output, for which the core asks",
    "opfuse_linear.fused.BackwardLinearScale.fuser_backward": "by owns_grad_output, for which the core asks",
    "opfuse_loss.chunks.Sums._put_dx": GIVEN,
    "opfuse_loss.chunks._of_part": GIVEN,
    "opfuse_loss.chunks._put": GIVEN,
    "opfuse_memory.actions.offloading.pack": STATE,
    "opfuse_overlap.kernels.add_grad_of_input": GIVEN,
    "opfuse_overlap.kernels.grad_of_input": GIVEN,
    "opfuse_overlap.kernels.product": GIVEN,
    "opfuse_overlap.operands.CodedGradients.multiply": GIVEN,
    "opfuse_overlap.operands._by_values.multiply": GIVEN,
    "opfuse_overlap.pieces.Link.scatter": GIVEN,
    "opfuse_overlap.pieces.gather_multiply": GIVEN,
    "opfuse_quantized.checkpoint.read_codes": STATE,
    "opfuse_quantized.codes.overwrite": STATE,
    "opfuse_quantized.codes.settled": STATE,
    "opfuse_quantized.sharding.gather_into": OWN,
    "opfuse_quantized.weight.QuantizedWeight.__setitem__": STATE,
    "opfuse_quantized.weight.QuantizedWeight._set_data": STATE,
    "opfuse_quantized.weight._cast_for": STATE,
    "opfuse_transformers.trl._computes_as_known": "it tries a function, once",
    "opfuse_triton.elementwise.twins.backward": GIVEN,
    "opfuse_triton.norms.twins.forward": GIVEN,
}
"""The functions that write and do not ask themselves, and why."""


def name_of(node):
    return getattr(node, "attr", getattr(node, "id", None))


def writes(node):
    """Whether a node writes into a tensor, as far as its text tells."""
    if isinstance(node, ast.Call):
        name, owner = name_of(node.func) or "", getattr(node.func, "value", None)
        if name.endswith("_") and name[0] != "_" and hasattr(torch.Tensor, name):
            return name_of(owner) != "init" and name != "requires_grad_"
        values = [k.value for k in node.keywords if k.arg in ("out", "grad_input", "inplace")]
        return any(not isinstance(value, ast.Constant) for value in values)
    if isinstance(node, ast.Assign):
        parts = [target.slice for target in node.targets if isinstance(target, ast.Subscript)]
        return any(isinstance(part, ast.Slice) for whole in parts for part in ast.walk(whole))
    return False


def writers():
    """The functions that write into tensors and do not ask, by module and name."""
    for module, path in SOURCES.items():
        todo = [(ast.parse(path.read_text(encoding="utf-8")), module)]
        while todo and NO_PASS.isdisjoint(module.split(".")):
            node, where = todo.pop()
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                where = f"{where}.{node.name}"
            if isinstance(node, ast.FunctionDef):
                names = [name_of(getattr(each, "func", each)) for each in node.decorator_list]
                if "jit" in names or any(name_of(inner) in GUARDS for inner in ast.walk(node)):
                    continue
            if writes(node):
                yield where
            todo += [(child, where) for child in ast.iter_child_nodes(node)]


def test_every_write_is_asked_for():
    found = set(writers())
    hint = "ask opfuse.core.overwriting.may_write, or say here why not"
    assert found == {*ALLOWED}, f"{sorted(found ^ {*ALLOWED})}: {hint}"
