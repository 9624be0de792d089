"""Right fusions of linears with collectives, in plain torch; the faulty ones change one method of them."""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist
from opfuse_distributed.ranks import gather_into, scatter_into, start_collective
from torch.nn import functional as F

import opfuse
from opfuse.ops import (
    AllGather,
    AllReduce,
    BasicLinear,
    Bias,
    CopyToTensorParallelRegion,
    ReduceScatter,
)
from opfuse.testing.running import OneByOne


def matrix(tensor):
    return tensor.reshape(-1, tensor.shape[-1])


class Pending:
    """A collective that was started, and what it gives."""

    def __init__(self, work, result):
        self.work, self.result = work, result

    def wait(self):
        self.work.wait()
        return self.result()


class Communicating(opfuse.FusedOperation):
    """What both have in common."""

    kwarg_names = None

    @property
    def collective(self):
        """The op with the collective."""
        raise NotImplementedError

    @property
    def group(self):
        return self.collective.process_group

    def start(self, function, *tensors):
        """Starts a collective, whose wait ends where another rank raises."""
        return start_collective(self.collective.collective_group, "it", function, *tensors)

    @property
    def size(self):
        return self.collective.process_group_size

    def start_gather(self, part):
        """Joins the parts of all ranks."""
        dim = self.collective.dim
        part = part.movedim(dim, 0).contiguous()
        whole = part.new_empty((self.size * part.shape[0], *part.shape[1:]))
        work = self.start(gather_into, whole, part)
        return Pending(work, lambda: whole.movedim(0, dim).contiguous())

    def start_scatter(self, whole):
        """Adds up what all ranks have; each gets its part."""
        dim = self.collective.dim
        whole = whole.movedim(dim, 0).contiguous()
        part = whole.new_empty((whole.shape[0] // self.size, *whole.shape[1:]))
        work = self.start(scatter_into, part, whole)
        return Pending(work, lambda: part.movedim(0, dim).contiguous())

    def start_reduce(self, tensor):
        """Adds up what all ranks have."""
        total = tensor.clone(memory_format=torch.contiguous_format)
        work = self.start(dist.all_reduce, total)
        return Pending(work, lambda: total)

    def grad_weight(self, dy, x):
        return matrix(dy).t().mm(matrix(x))

    def grad_bias(self, dy):
        return matrix(dy).sum(0)


class Column(Communicating):
    """Right: all features in, a part of the features out."""

    @property
    def collective(self):
        return self.basic_ops[0]

    @property
    def gathers(self):
        return isinstance(self.collective, AllGather)

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        linear = basic_op_ctxs[1]
        x, weight = BasicLinear.operands(linear, input_)
        if linear.requires_grad:
            linear.to_save = self.kept(linear, x, *linear.to_save)
        y = self.product(basic_op_ctxs, self.whole(x), weight)
        return y, [()] * len(basic_op_ctxs)

    def kept(self, ctx, x, saved_x, saved_weight):
        return saved_x, saved_weight

    def whole(self, x):
        return self.start_gather(x).wait() if self.gathers else x

    def product(self, ctxs, x, weight):
        y = F.linear(x, weight)
        return y if len(ctxs) == 2 else y + ctxs[2].params[0].to(y.dtype)

    def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
        linear, dy = basic_op_ctxs[1], grad_output
        if linear.dtype is not None:
            dy = dy.to(linear.dtype)
        x, weight = None, None
        if linear.saved_tensors:
            x, weight = BasicLinear.saved_operands(linear)
        dx, dw = self.grads(dy, x, weight)
        grads = [(), (dw,)]
        if len(basic_op_ctxs) == 3:
            needed = basic_op_ctxs[2].param_requires_grad[0]
            grads.append((self.grad_bias(dy) if needed else None,))
        return dx, grads, [()] * len(basic_op_ctxs)

    def grads(self, dy, x, weight):
        """The gradient of the input is sent while that of the weight is computed."""
        again = self.start_gather(x) if x is not None and self.gathers else None
        sent = None if weight is None else self.start_back(dy @ weight)
        x = again.wait() if again else x
        dw = None if x is None else self.grad_weight(dy, x)
        return sent and sent.wait(), dw

    def start_back(self, dx):
        return self.start_scatter(dx) if self.gathers else self.start_reduce(dx)


class Row(Communicating):
    """Right: a part of the features in, all features out."""

    @property
    def collective(self):
        return self.basic_ops[-1]

    @property
    def scatters(self):
        return isinstance(self.collective, ReduceScatter)

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        x, weight = BasicLinear.operands(basic_op_ctxs[0], input_)
        bias = basic_op_ctxs[1].params[0] if len(basic_op_ctxs) == 3 else None
        y = self.output(x, weight, bias)
        return y, [()] * len(basic_op_ctxs)

    def output(self, x, weight, bias):
        y = F.linear(x, weight)
        return self.total(y if bias is None else y + bias.to(y.dtype))

    def total(self, y):
        if not self.scatters:
            return self.start_reduce(y).wait()
        dim = self.collective.dim
        if y.ndim <= dim or y.shape[dim] % self.size:
            raise ValueError(f"{type(self).__name__} expected rows for {self.size} ranks")
        return self.start_scatter(y).wait()

    def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
        linear, biased = basic_op_ctxs[0], len(basic_op_ctxs) == 3
        dy = grad_output if linear.dtype is None else grad_output.to(linear.dtype)
        dy = self.whole_gradient(dy)
        dx = dw = None
        if linear.saved_tensors:
            x, weight = BasicLinear.saved_operands(linear)
            dx = None if weight is None else dy @ weight
            dw = None if x is None else self.grad_weight(dy, x)
        grads = [(dw,), ()]
        if biased:
            db = self.grad_bias(dy) if basic_op_ctxs[1].param_requires_grad[0] else None
            grads.insert(1, (db,))
        return dx, grads, [()] * len(basic_op_ctxs)

    def whole_gradient(self, dy):
        return self.start_gather(dy).wait() if self.scatters else dy


class ColumnOfCodes(OneByOne, Column):
    """Right under a recipe: what is gathered is cast."""


def plain_calls(ops, env):
    """Not under a recipe."""
    return True if env.recipe is None else "it does not quantize"


PATTERNS = {
    Column: [
        opfuse.OneOf(AllGather, CopyToTensorParallelRegion),
        BasicLinear,
        opfuse.Optional(Bias),
    ],
    Row: [BasicLinear, opfuse.Optional(Bias), opfuse.OneOf(ReduceScatter, AllReduce)],
}


def fusion_of(cls, when=plain_calls):
    """The declaration of one, which is right or derived from one that is."""
    (pattern,) = [pattern for base, pattern in PATTERNS.items() if issubclass(cls, base)]
    return opfuse.Fusion(pattern, cls, when, name=cls.__name__)


@opfuse.hookimpl
def opfuse_joint_fusions():
    """All, as a plugin offers them."""
    codes = dataclasses.replace(
        fusion_of(ColumnOfCodes, None), declares=("casts",), needs=("recipe",)
    )
    return [fusion_of(Column), fusion_of(Row), codes]
