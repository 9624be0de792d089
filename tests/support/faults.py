"""What a wrong fusion is, and how its fault is shown without the conformance kit: by running its chain twice."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import threading
from collections.abc import Callable

import torch
from fakes import registered

import opfuse


@dataclasses.dataclass(frozen=True)
class Fault:
    """A wrong fusion.

    Attributes:
        axis: Along which a test has to look to see that it is wrong.
        kind: "forward", "backward" or "joint".
        fusion: Its declaration.
        chain: ``chain(width)`` is a chain that it fuses.
        shows: Says whether the fault shows: a script of about ten lines.
    """

    axis: str
    kind: str
    fusion: opfuse.Fusion
    chain: Callable[[int], opfuse.Sequential]
    shows: Callable[[Fault], bool]

    @property
    def name(self):
        return self.fusion.name

    @contextlib.contextmanager
    def on(self):
        """This fusion and no other."""
        with registered(self.kind, self.fusion), opfuse.plugins.using(""):
            yield


def plain_calls(ops, env):
    """Nothing here is to be found out by what it does not support."""
    if env.compiling:
        return "it is not for compiled code"
    return True if env.recipe is None else "it does not quantize"


def collect(faults, axis, kind, pattern, ops):
    """A decorator of a fused op: the op gives ``shows(fault)``; ``ops(width)`` are the ops of a chain that it fuses."""

    def add(cls):
        fusion = opfuse.Fusion(pattern, cls, plain_calls, benefit=len(pattern))
        faults.append(
            Fault(axis, kind, fusion, lambda width: opfuse.Sequential(*ops(width)), cls.shows)
        )
        return cls

    return add


def run(chain, x, grad=None):
    """The output and every gradient; the gradients are not left anywhere."""
    y = chain(x)
    wanted = [t for t in (x, *chain.parameters()) if t.requires_grad]
    grads = torch.autograd.grad(
        y, wanted, torch.ones_like(y) if grad is None else grad, allow_unused=True
    )
    return [y.detach(), *grads]


def differ(left, right, tolerance=1e-3):
    """Whether any of the results differs by more than rounding; None (no gradient) is no zero."""
    for a, b in zip(left, right, strict=True):
        if (a is None) is not (b is None):
            return True
        if a is not None and (a.dtype is not b.dtype or a.shape != b.shape):
            return True
        if a is not None and not torch.allclose(
            a, b, rtol=tolerance, atol=tolerance * float(b.detach().abs().max())
        ):
            return True
    return False


def unlike(fault, chain, x, grad=None):
    """Whether the fusion changes the answer of this call."""
    with opfuse.plugins.using(""):
        right = run(chain, x, grad)
    with fault.on():
        return differ(run(chain, x, grad), right)


def only_there(fault, wrong, right):
    """Whether the fusion changes the answer for an input of one shape, and not for one of another."""
    here, there = (unlike(fault, fault.chain(shape[-1]), rows(*shape)) for shape in (wrong, right))
    return here and not there


def after_fewer_rows(fault):
    """Whether a call gives something else behind one with fewer rows."""
    chain = fault.chain(8)
    with opfuse.plugins.using(""):
        right = run(chain, rows(100, 8))
    with fault.on():
        run(chain, rows(4, 8))
        return differ(run(chain, rows(100, 8)), right)


def after_another_call(fault):
    """Whether the gradient of a call is another one behind the forward of a second call."""
    chain, first, second = fault.chain(8), rows(4, 8), rows(5, 8)[1:]
    with opfuse.plugins.using(""):
        (right,) = torch.autograd.grad(chain(first).sum(), first)
    with fault.on():
        y, _ = chain(first), chain(second)
        return differ(torch.autograd.grad(y.sum(), first), [right])


def disturbed(call, other):
    """What ``call()`` gives if another thread makes the whole of ``other()`` before each line of a fused op.

    Both make their calls with the fusion and no other.
    """

    def body():
        with opfuse.plugins.using(""):
            other()

    def trace(frame, event, _):
        if frame.f_code.co_name not in ("fuser_forward", "fuser_backward"):
            return None
        if event == "line":
            thread = threading.Thread(target=body)
            thread.start()
            thread.join()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        return call()
    finally:
        sys.settrace(before)


def plain(fault):
    """Whether the fusion is right where a first look would look; what is random is not compared."""
    chain = shuffled(fault.chain(16))
    for op in chain:
        op.train(not isinstance(op, opfuse.ops.Dropout))
    return not unlike(fault, chain, rows(5, 16))


def rows(*shape, dtype=torch.float32, requires_grad=True):
    """An input."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator).to(dtype).requires_grad_(requires_grad)


def shuffled(chain):
    """The chain with parameters that are neither 0 nor 1."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for param in chain.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) * 0.5)
    return chain


def as_if_contiguous(tensor):
    """What a kernel reads that gets a pointer and a shape and never looks at the strides; zeros past the end."""
    memory = torch.empty(0, dtype=tensor.dtype).set_(tensor.detach().untyped_storage())[
        tensor.storage_offset() :
    ]
    read = memory[: tensor.numel()]
    return torch.nn.functional.pad(read, (0, tensor.numel() - read.numel())).view(tensor.shape)


def leave_numbers(ctx, op):
    """Leave the numbers that the op declares as context attributes, as every forward must."""
    for name in op.context_names if ctx.requires_grad else ():
        setattr(ctx, name, getattr(op, name))
