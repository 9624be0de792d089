"""What the processes of the tests of communication under a recipe run."""

from __future__ import annotations

import contextlib
import itertools

import torch
import torch.distributed as dist
from opfuse_fp8 import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from opfuse_overlap import codes, kernels
from opfuse_overlap.pieces import Link

import opfuse
from opfuse import ops
from opfuse.core.quantization import BOTH, COLUMNWISE, ROWWISE, QuantizerRole
from opfuse.core.recipe_lookup import new_quantizer

RECIPES = {
    "delayed": DelayedScaling(amax_history_len=4),
    "current": Float8CurrentScaling(),
    "block": Float8BlockScaling(),
    "square blocks": Float8BlockScaling(x_block_scaling_dim=2, w_block_scaling_dim=1),
    "mx": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(),
}
USAGES = {"rowwise": ROWWISE, "columnwise": COLUMNWISE, "both": BOTH}


def same(mine, other):
    """Every tensor that is there is the same to the bit."""
    for name in mine.tensor_names:
        a, b = getattr(mine, name), getattr(other, name)
        if a is not None:
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), name
            assert a.is_contiguous() and a.shape == b.shape


def codes_of_rows(rank, name, way, tensor, rows):
    """Rows that are cast apart and sent are what casting the gathered rows gives, to the bit."""
    size, usage = dist.get_world_size(), USAGES[way]
    link = Link(ops.AllGather())
    apart, whole = (
        new_quantizer(RECIPES[name], QuantizerRole("linear", tensor), None) for _ in range(2)
    )
    x = torch.randn(size * rows, 160 + 32 * (name == "delayed"), dtype=torch.bfloat16)
    x[-1, 3] = 77.0  # which one process does not have
    part = x.chunk(size)[rank]
    made, why = codes.quantized(link, apart, part, usage)
    if made is None:
        return why
    expected = whole(x, BOTH if codes.has_one_scale(made) else usage)
    if way != "columnwise" or codes.has_one_scale(made):
        lines, pending = link.gather(codes.lines_of(made))
        pending.wait()
        same(codes.from_lines(lines, made), expected)
        assert lines.shape[0] == len(x) and lines.shape[1] < 1.06 * x.shape[1]
    if way != "rowwise" and not codes.has_one_scale(made):
        lines, pending = link.gather(codes.columns_of(made))
        pending.wait()
        same(codes.from_columns(lines, made, size), expected)
    for state in apart.state_names:
        assert torch.equal(getattr(apart, state), getattr(whole, state)), state
    return ""


@contextlib.contextmanager
def counted():
    """Counts the bytes that this process gives to each kind of collective, for a block."""
    found = {"gather": 0, "scatter": 0, "reduce": 0}
    originals = {name: getattr(kernels, name) for name in found}

    def counting(name):
        def start(group, what, *tensors):
            found[name] += tensors[-1].nbytes
            return originals[name](group, what, *tensors)

        return start

    try:
        for name in found:
            setattr(kernels, name, counting(name))
        yield found
    finally:
        for name, original in originals.items():
            setattr(kernels, name, original)


def layers(recipe, rows, bias):
    """A column and a row layer in a chain, and its input."""
    torch.manual_seed(3)
    given = dict(sequence_parallel=True, bias=bias, dtype=torch.float32)
    chain = opfuse.Sequential(
        ops.Linear(256, 512, tensor_parallel_mode="column", **given),
        ops.GELU(),
        ops.Linear(512, 128, tensor_parallel_mode="row", **given),
    )
    return chain, torch.randn(rows, 256, requires_grad=True)


def a_step(name, override, rows, bias, overlap, frozen=(), steps=2):
    """Some steps; the output, the gradients and the state of the quantizers of the last."""
    recipe = RECIPES[name]
    if override:
        recipe = type(recipe)(backward_override=override)
    chain, x = layers(recipe, rows, bias)
    for i in frozen:
        chain[i].weight.requires_grad_(False)
    given = {"overlap.use": "always", "overlap.pieces": 3} if overlap else {}
    with opfuse.plugins.using("fp8,overlap" if overlap else "fp8"), opfuse.options(**given):
        for _ in range(steps):
            x.grad = None
            chain.zero_grad()
            with opfuse.autocast(recipe):
                y = chain(x)
                text = str(opfuse.explain(chain, x)) if overlap else ""
            with counted() as sent:
                y.square().sum().backward()
    states = [
        getattr(q, state).clone()
        for op in chain
        for basic in getattr(op, "basic_ops", [op])
        for mode, count in (("forward", 2), ("backward", 1))
        for i in range(count if type(basic) is ops.BasicLinear else 0)
        for q in [basic.get_quantizer(mode, i)]
        for state in q.state_names
    ]
    grads = [p.grad for p in chain.parameters() if p.grad is not None]
    return [y.detach(), x.grad, *grads], states, text, sent


def a_chain(rank, name, override, rows, bias, frozen=()):
    """A chain under a recipe: in pieces of codes it gives what its ops give."""
    # explain runs the forward once more, and would record
    fused, states, text, _ = a_step(name, override, rows, bias, True, frozen)
    separate, expected, _, _ = a_step(name, override, rows, bias, False, frozen)
    assert "gather+linear" in text and "linear+scatter" in text
    assert len(fused) == len(separate)
    for mine, other in zip(fused, separate, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5 * other.abs().max().item())
    for mine, other in zip(states, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=0)
    return text


def one_linear(rank, name, mode, bias, trains):
    """A linear whose rows are split: the fused ops, and values beside the whole layer in fp64."""
    torch.manual_seed(7)
    size, column = dist.get_world_size(), mode == "column"
    layer = torch.nn.Linear(256, 256, bias=bias, dtype=torch.float64)
    op = ops.Linear(256, 256, bias=bias, tensor_parallel_mode=mode, sequence_parallel=True)
    op.load_whole(layer.weight.float(), layer.bias.float() if bias else None)
    op.weight.requires_grad_(trains)
    whole = torch.randn(128, 256, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(128, 256, dtype=torch.float64)
    x = whole.detach().float().chunk(size, 0 if column else 1)[rank].clone().requires_grad_()
    expected = layer(whole)
    expected.backward(dy)
    with opfuse.plugins.using("fp8,overlap"), opfuse.options(**{"overlap.use": "always"}):
        with opfuse.autocast(RECIPES[name]) if name else contextlib.nullcontext():
            y = op(x)
            plan = opfuse.explain(op, x).calls[0].plan
        y.backward(dy.float().chunk(size, 1 if column else 0)[rank])
    steps = [step for step in (*plan.forward, *plan.backward) if "BasicLinear" in step.basic_ops]
    kinds = {(step.op, "AllGather" in step.basic_ops or "ReduceScatter" in step.basic_ops)
             for step in steps}  # fmt: skip
    assert len(steps) == 2 and kinds == {("GatherLinear" if column else "LinearScatter", True)}
    found = {"y": y, "dx": x.grad}
    wanted = {
        "y": expected.chunk(size, 1 if column else 0)[rank],
        "dx": whole.grad.chunk(size, 0 if column else 1)[rank],
    }
    if trains:
        found["dw"] = op.weight.grad
        wanted["dw"] = layer.weight.grad.chunk(size, 0 if column else 1)[rank]
    if bias:
        found["db"] = op.bias.grad
        wanted["db"] = layer.bias.grad.chunk(size)[rank] if column else layer.bias.grad
    limit = {None: 1e-5, "nvfp4": 0.35}.get(name, 0.08)
    for what, value in found.items():
        apart = (value.double() - wanted[what]).norm() / wanted[what].norm()
        assert apart < limit, (what, float(apart))
    assert (op.weight.grad is None) != trains


def linears(rank, name):
    """The eight cases of Transformer Engine's test of userbuffers under a recipe, or none."""
    for mode, bias, trains in itertools.product(("column", "row"), (False, True), (True, False)):
        one_linear(rank, name, mode, bias, trains)


def bytes_sent(rank, name):
    """Bytes of values and of codes that a process gives to the gathers of a step in bf16."""
    found = []
    for recipe in (None, RECIPES[name]):
        torch.manual_seed(3)
        given = dict(sequence_parallel=True, bias=False, dtype=torch.bfloat16)
        column = ops.Linear(256, 512, tensor_parallel_mode="column", **given)
        row = ops.Linear(512, 512, tensor_parallel_mode="row", **given)
        chain = opfuse.Sequential(column, row)
        x = torch.randn(128, 256, dtype=torch.bfloat16, requires_grad=True)
        using = opfuse.plugins.using("fp8,overlap")
        with using, opfuse.options(**{"overlap.use": "always"}), counted() as forward:
            with opfuse.autocast(recipe is not None, recipe=recipe):
                y = chain(x)
        with counted() as backward:
            y.sum().backward()
        found.append((forward["gather"], backward["gather"]))
    return found


def what_reports_say(rank, rows):
    """Why values are gathered, and then cast."""
    chain, x = layers(RECIPES["mx"], rows, False)
    given = opfuse.options(**{"overlap.use": "always"})
    with opfuse.plugins.using("fp8,overlap"), given, opfuse.autocast(RECIPES["mx"]):
        return opfuse.explain(chain, x).details
