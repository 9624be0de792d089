"""The option ``prefer``: whether a linear under autocast saves its weight, or what autocast made of it."""

from __future__ import annotations

import contextlib
import copy

import gloo
import prefer_ranks
import pytest
import torch
from functorch.compile import nop
from fusing import VARIANTS, fusions
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn.utils import parametrize
from torch.optim import SGD, AdamW
from torch.utils.checkpoint import CheckpointError, checkpoint

import opfuse
from opfuse import ops

pytestmark = pytest.mark.usefixtures("no_plugins")

WIDTH = 32
BYTES = WIDTH * WIDTH * 2
"""Of what autocast makes of a weight."""


def make_chain(bias=True):
    torch.manual_seed(0)
    return opfuse.Sequential(
        ops.Linear(WIDTH, WIDTH, bias=bias), ops.GELU(), ops.Linear(WIDTH, WIDTH, bias=bias)
    )


def make_input(rows=(8,), dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(*rows, WIDTH, dtype=torch.float64, generator=generator).to(dtype)
    return x.requires_grad_()


@contextlib.contextmanager
def preferring(prefer, dtype=torch.bfloat16):
    with opfuse.options(prefer=prefer):
        with torch.autocast("cpu", dtype) if dtype else contextlib.nullcontext():
            yield


def saved_by(model, x, own=()):
    """Bytes that a forward saves, but for parameters; and the dtypes of the parameters that it saves."""
    storages, dtypes = {}, []
    own = {p.untyped_storage()._cdata for p in (*model.parameters(), *own, x)}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata in own:
            dtypes.append(tensor.dtype)
        else:
            storages[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = model(x)
    return sum(storages.values()), dtypes, y


def grads_of(model, x, **given):
    y = model(x, **given)
    wanted = [t for t in (x, *model.parameters()) if t.requires_grad]
    return [y.detach(), *torch.autograd.grad(y.float().square().sum(), wanted)]


def same_bits(one, other):
    return all(torch.equal(a, b) and a.dtype is b.dtype for a, b in zip(one, other, strict=True))


# What is saved, and what comes out


def test_the_bytes_of_the_casts_are_spared():
    chain, x = make_chain(bias=False), make_input()
    theirs = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False))
    with torch.autocast("cpu", torch.bfloat16):
        default, _, _ = saved_by(chain, x)
        torchs, _, _ = saved_by(theirs, x)
    with preferring("speed"):
        assert saved_by(chain, x)[:2] == (default, [])
    with preferring("memory"):
        spared, dtypes, _ = saved_by(chain, x)
    assert default - spared == 2 * BYTES and dtypes == [torch.float32] * 2
    # torch keeps its casts too: two inputs, two weights; opfuse also has what the GELU saves
    assert torchs == default - 8 * WIDTH * 2


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [(8,), (), (0,), (127,), (2, 3), (2, 1, 3)])
def test_gradients_are_the_same_bits(variant, dtype, rows):
    chain, x = make_chain(), make_input(rows)
    with fusions(variant):
        with preferring("speed", dtype):
            expected = grads_of(chain, x)
        with preferring("memory", dtype):
            assert same_bits(grads_of(chain, x), expected)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("way", ["held", "reading"])
@pytest.mark.parametrize("frozen", ["", "input", "a.weight", "b.bias"])
@pytest.mark.parametrize("rows", [(8,), (2, 3)])
def test_linears_side_by_side(fused, way, frozen, rows):
    handles = []
    if fused:
        module = pytest.importorskip("opfuse_linear.fused")
        forward = opfuse.Fusion((ops.ParallelLinear,), module.ForwardParallelLinear)
        backward = opfuse.Fusion((ops.ParallelLinear,), module.BackwardParallelLinear)
        handles = [
            opfuse.register_forward_fusion(forward),
            opfuse.register_backward_fusion(backward),
        ]
    torch.manual_seed(0)
    linears = nn.ModuleDict(
        {"a": nn.Linear(WIDTH, WIDTH, bias=False), "b": nn.Linear(WIDTH, WIDTH)}
    )
    op = ops.ParallelLinear(linears) if way == "held" else ops.ParallelLinear.reading(linears)
    chain, x = opfuse.Sequential(op, ops.SwiGLU()), make_input(rows)
    (x if frozen == "input" else dict(linears.named_parameters()).get(frozen, x)).requires_grad_(
        not frozen
    )
    wanted, found = [t for t in (x, *linears.parameters()) if t.requires_grad], []
    for prefer in ("speed", "memory"):
        with preferring(prefer):
            saved = saved_by(chain, x, linears.parameters())[:2]
            y = chain(x)
        found.append((saved, torch.autograd.grad(y.float().square().sum(), wanted)))
    steps = str(opfuse.explain(chain, x))
    for handle in handles:
        handle.unregister()
    assert ("BackwardParallelLinear" in steps) == fused
    (speed, expected), (memory, got) = found
    assert same_bits(got, expected)
    assert speed[0] - memory[0] == (0 if frozen else 2 * BYTES)
    assert memory[1] == ([] if frozen else [torch.float32] * 2)


@pytest.mark.parametrize("case", ["none", "bf16 weights", "fp64", "no grad"])
def test_where_nothing_is_cast_nothing_changes(case):
    dtype = {"bf16 weights": torch.bfloat16, "fp64": torch.float64}.get(case, torch.float32)
    chain, x = make_chain().to(dtype), make_input(dtype=dtype)
    autocast = None if case == "none" else torch.bfloat16
    found = []
    for prefer in ("speed", "memory"):
        with preferring(prefer, autocast), torch.set_grad_enabled(case != "no grad"):
            found.append(saved_by(chain, x))
    assert found[0][:2] == found[1][:2] and torch.equal(found[0][2], found[1][2])


@pytest.mark.parametrize("frozen", ["input", "bias", "weight"])
def test_what_needs_no_gradient(frozen):
    """No weight is saved where the input needs no gradient; a frozen one is saved as torch does."""
    chain, x = opfuse.Sequential(ops.Linear(WIDTH, WIDTH)), make_input()
    {"input": x, "bias": chain[0].bias, "weight": chain[0].weight}[frozen].requires_grad_(False)
    found = []
    for prefer in ("speed", "memory"):
        with preferring(prefer):
            found.append((saved_by(chain, x)[:2], grads_of(chain, x)))
    (speed, expected), (memory, got) = found
    assert same_bits(got, expected)
    assert speed[0] - memory[0] == (BYTES if frozen == "bias" else 0)
    assert memory[1] == ([torch.float32] if frozen == "bias" else [])


class Scaled(nn.Module):
    def forward(self, weight):
        return weight * 2


class Wrapped(torch.Tensor):
    """A tensor of another class, with torch's operations."""


def parametrized(op):
    parametrize.register_parametrization(op, "weight", Scaled())


def of_another_class(op):
    op.weight = nn.Parameter(op.weight.detach().as_subclass(Wrapped))


def normed(op):
    nn.utils.weight_norm(op, "weight")


def made_for_inference(op):
    with torch.inference_mode():
        op.weight = nn.Parameter(op.weight.clone())


@pytest.mark.parametrize("change", [parametrized, of_another_class, normed, made_for_inference])
@pytest.mark.parametrize("when", ["before the first call", "after it"])
@pytest.mark.filterwarnings("ignore:.*weight_norm")
def test_other_weights_are_saved_as_they_were(change, when):
    chain, x = opfuse.Sequential(ops.BasicLinear(WIDTH, WIDTH)), make_input()
    if when == "after it":
        with preferring("memory"):
            assert saved_by(chain, x)[1] == [torch.float32]
    change(chain[0])
    found = []
    for prefer in ("speed", "memory"):
        with preferring(prefer):
            found.append((saved_by(chain, x)[:2], grads_of(chain, x)))
    assert found[0][0] == found[1][0] and same_bits(found[0][1], found[1][1])


def test_a_weight_that_a_call_replaces_is_saved_as_it_was():
    """By torch.func.functional_call, which no plan knows of."""
    chain, x = opfuse.Sequential(ops.BasicLinear(WIDTH, WIDTH)), make_input()
    computed = chain[0].weight * 1
    with preferring("memory"):
        assert saved_by(chain, x)[1] == [torch.float32]
        call = chain.forward
        chain.forward = lambda x: call(x)

        class Calling(nn.Module):
            def forward(self, x):
                return torch.func.functional_call(chain, {"0.weight": computed}, (x,))

        spared, dtypes, _ = saved_by(Calling(), x, own=(computed,))
    assert dtypes == [] and spared >= BYTES


def test_a_dtensor_is_saved_as_it_was(tmp_path):
    dist = pytest.importorskip("torch.distributed")
    if not dist.is_available():
        pytest.skip("this PyTorch has no torch.distributed")
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/one", rank=0, world_size=1)
    try:
        mesh = DeviceMesh("cpu", [0])
        chain = opfuse.Sequential(ops.BasicLinear(WIDTH, WIDTH))
        chain[0].weight = nn.Parameter(distribute_tensor(chain[0].weight, mesh, [Replicate()]))
        x = distribute_tensor(make_input().detach(), mesh, [Replicate()]).requires_grad_()
        kept = []
        for prefer in ("speed", "memory"):
            with preferring(prefer):
                y = chain(x)
            kept.append([t.dtype for t in y.grad_fn.saved_tensors if t is not None])
            y.sum().backward()
        assert kept[0] == kept[1] == [torch.bfloat16] * 2
    finally:
        dist.destroy_process_group()


def test_one_weight_of_two_ops():
    chain, x = make_chain(), make_input()
    chain[2].weight = chain[0].weight
    found = []
    for prefer in ("speed", "memory"):
        with preferring(prefer):
            found.append((saved_by(chain, x)[:2], grads_of(chain, x)))
    (speed, expected), (memory, got) = found
    # autocast casts it once
    assert speed[0] - memory[0] == BYTES and memory[1] == [torch.float32] * 2
    assert same_bits(got, expected)


# A weight that changes between the passes


def test_a_step_that_raises_a_version_is_an_error():
    chain, x = make_chain(), make_input()
    optimizer = AdamW(chain.parameters(), lr=0.1, foreach=True)
    for p in chain.parameters():
        p.grad = torch.ones_like(p)
    with preferring("speed"):
        expected = grads_of(chain, x)[1:]
        y = chain(x)
    with preferring("memory"):
        z = chain(x)
    optimizer.step()
    wanted = [x, *chain.parameters()]
    assert same_bits(torch.autograd.grad(y.float().square().sum(), wanted), expected)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(z.float().square().sum(), wanted)


@pytest.mark.parametrize("make", [AdamW, SGD])
def test_a_fused_step_is_seen_by_neither(make):
    """By default nothing is wrong; with "memory" the documentation says what is."""
    chain, x = make_chain(), make_input()
    before = copy.deepcopy(chain)
    optimizer = make(chain.parameters(), lr=0.1, fused=True)
    for p in chain.parameters():
        p.grad = torch.ones_like(p)
    with preferring("speed"):
        y = chain(x)
        expected = grads_of(before, x)[1:]
    with preferring("memory"):
        z = chain(x)
    optimizer.step()
    wanted = [x, *chain.parameters()]
    assert same_bits(torch.autograd.grad(y.float().square().sum(), wanted), expected)
    # no error, and wrong: as soon as torch raises the version, the documentation can say less
    assert not same_bits(torch.autograd.grad(z.float().square().sum(), wanted), expected)
    documented = " ".join(opfuse.options.__doc__.split())
    assert "**fused** optimizer step" in documented and "wrong without an error" in documented


# With the rest of torch


def test_fsdp2_frees_and_gathers_the_saved_weight():
    if not torch.distributed.is_available():
        pytest.skip("this PyTorch has no torch.distributed")
    gloo.together(prefer_ranks.worker)


def test_a_compiled_chain_saves_what_prefer_says():
    """A backend that saves what the graph says; Inductor's partitioner makes its own choice of what to save."""
    chain, x = make_chain(), make_input()
    backend = aot_autograd(fw_compiler=nop, bw_compiler=nop)
    compiled = torch.compile(chain, fullgraph=True, backend=backend)
    for prefer, kept in (("memory", torch.float32), ("speed", torch.bfloat16)):
        with preferring(prefer):
            assert same_bits(grads_of(compiled, x), grads_of(chain, x))
            y = compiled(x)
            saved = y.grad_fn.saved_tensors
        weights = [t.dtype for t in saved if t.shape == (WIDTH, WIDTH)]
        assert weights == [kept] * 2


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_gives_the_same_bits(reentrant):
    chain, x = make_chain(), make_input()

    def run(x):
        known = {} if reentrant else {"context_fn": opfuse.checkpoint_contexts}
        return checkpoint(chain, x, use_reentrant=reentrant, **known)

    def grads(run):
        with preferring("memory"):
            y = run(x)
        chain.zero_grad()
        x.grad = None
        y.float().square().sum().backward()
        return [y.detach(), *(t.grad for t in (x, *chain.parameters()))]

    assert same_bits(grads(run), grads(chain))


def test_a_checkpoint_that_forgets_the_option_says_so():
    chain, x = make_chain(), make_input()
    with preferring("memory"):
        y = checkpoint(chain, x, use_reentrant=False)
    with pytest.raises(CheckpointError, match="different metadata"):
        y.float().sum().backward()


def test_main_grad_has_the_same_bits():
    grads = []
    for prefer in ("speed", "memory"):
        op = ops.BasicLinear(WIDTH, WIDTH, accumulate_into_main_grad=True)
        with torch.no_grad():
            op.weight.copy_(torch.eye(WIDTH))
        op.weight.main_grad = torch.zeros(WIDTH, WIDTH)
        x = make_input()
        with preferring(prefer):
            y = op(x)
        y.float().square().sum().backward()
        grads.append([op.weight.main_grad, x.grad])
    assert same_bits(*grads)


def test_second_derivatives_have_the_same_bits():
    chain, x = make_chain(), make_input()
    found = []
    for prefer in ("speed", "memory"):
        with preferring(prefer), opfuse.options(double_backward=True):
            (dx,) = torch.autograd.grad(chain(x).float().square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(dx.square().sum(), [x, *chain.parameters()]))
    assert same_bits(*found)


# The option itself


@pytest.mark.parametrize(
    ("value", "error", "says"),
    [
        ("size", ValueError, "option prefer must be 'speed' or 'memory', got 'size'"),
        ("", ValueError, "option prefer must be 'speed' or 'memory', got ''"),
        (None, TypeError, "option prefer must be of type str, got None"),
        (True, TypeError, "option prefer must be of type str, got True"),
    ],
)
def test_other_values_are_refused(value, error, says):
    with pytest.raises(error, match=says):
        opfuse.options(prefer=value)


def test_it_is_part_of_the_key():
    chain, x = make_chain(), make_input()
    for prefer, count in (("speed", 0), ("memory", 2), ("speed", 0), ("memory", 2)):
        with preferring(prefer):
            assert len(saved_by(chain, x)[1]) == count
