"""Wrong fusions of linears with collectives, written from the documentation before the suite that is to find them.

Each changes one thing of a right one of ``communicating.py``.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist
from communicating import Column, Pending, Row, fusion_of, gather_into, matrix, scatter_into
from torch.nn import functional as F

import opfuse
from opfuse.ops import BasicLinear


@dataclasses.dataclass(frozen=True)
class Fault:
    """A wrong joint fusion; ``axis`` says what about it is wrong."""

    axis: str
    fusion: opfuse.Fusion

    @property
    def name(self):
        return self.fusion.name


FAULTS = []


def fault(axis):
    """A decorator of a fused op."""

    def add(cls):
        FAULTS.append(Fault(axis, fusion_of(cls)))
        return cls

    return add


@fault("order of parts")
class MineFirst(Column):
    """The own part is there already, so it comes first."""

    def whole(self, x):
        if not self.gathers:
            return x
        whole, dim = super().whole(x), self.collective.dim
        return whole.roll(-dist.get_rank(self.group) * x.shape[dim], dim)


@fault("order of parts")
class EveryOtherRow(Row):
    """Of the sum each rank takes every other row."""

    def total(self, y):
        if not self.scatters:
            return super().total(y)
        rank, dim = dist.get_rank(self.group), self.collective.dim
        rows = torch.arange(rank, y.shape[dim], self.size)
        return self.start_reduce(y).wait().index_select(dim, rows)


@fault("gradient of the input")
class OwnGradient(Column):
    """The gradient of an input that all ranks have is the own one."""

    def start_back(self, dx):
        return super().start_back(dx) if self.gathers else Pending(_Done(), lambda: dx)


class _Done:
    def wait(self):
        return True


@fault("gradient of the input")
class ReducedOnce(Column):
    """Where the weight is frozen it has nothing to overlap with, and forgets the reduction."""

    def grads(self, dy, x, weight):
        if x is None and weight is not None and not self.gathers:
            return dy @ weight, None
        return super().grads(dy, x, weight)


@fault("gradient of the input")
class SumOfSums(Row):
    """The adjoint of a sum is a sum, it says."""

    def whole_gradient(self, dy):
        return super().whole_gradient(dy) if self.scatters else self.start_reduce(dy).wait()


@fault("gradient of the weight")
class OwnRows(Column):
    """The gradient of the weight is that of the rows of this rank."""

    def grads(self, dy, x, weight):
        if not self.gathers or x is None:
            return super().grads(dy, x, weight)
        dx, _ = super().grads(dy, None, weight)
        own = dy.chunk(self.size, self.collective.dim)[dist.get_rank(self.group)]
        return dx, self.grad_weight(own, x)


@fault("bias")
class OneBias(Row):
    """The bias is added to the sum, that of the rank itself."""

    def output(self, x, weight, bias):
        y = self.total(F.linear(x, weight))
        return y if bias is None else y + bias


@fault("bias")
class BiasForEach(Row):
    """The sum has one bias for each rank, it says."""

    def output(self, x, weight, bias):
        y = self.total(F.linear(x, weight))
        return y if bias is None else y + self.size * bias


@fault("bias")
class BiasSummedTwice(Column):
    """The gradient of the bias is summed over the group too."""

    def grad_bias(self, dy):
        return self.start_reduce(super().grad_bias(dy)).wait()


@fault("precision")
class ReducesInHalf(Row):
    """Half the bytes."""

    def total(self, y):
        return super().total(y.bfloat16()).to(y.dtype)


@fault("precision")
class SendsInHalf(Column):
    """Half the bytes, in the backward."""

    def start_back(self, dx):
        pending = super().start_back(dx.bfloat16())
        return Pending(pending.work, lambda: pending.result().to(dx.dtype))


@fault("caches")
class RoomOfTheFirstCall(Column):
    """What is gathered goes into the tensor of the first call, as long as it fits."""

    room, saves = None, False

    def start_gather(self, part):
        if self.collective.dim:
            return super().start_gather(part)
        shape = (self.size * part.shape[0], *part.shape[1:])
        count = torch.Size(shape).numel()
        if self.room is None or self.room.numel() < count or self.room.dtype != part.dtype:
            self.room = part.new_empty(count)
        whole = self.room[:count].view(shape)
        return Pending(
            gather_into(whole, part.contiguous(), group=self.group, async_op=True), lambda: whole
        )

    def kept(self, ctx, x, saved_x, saved_weight):
        self.saves = saved_x is not None and self.gathers and not self.collective.dim
        return saved_x, saved_weight

    def grads(self, dy, x, weight):
        if not self.saves:
            return super().grads(dy, x, weight)
        whole = self.room[: x.numel() * self.size].view(-1, x.shape[-1])  # it is still there
        dx = None if weight is None else self.start_back(dy @ weight).wait()
        return dx, matrix(dy).t().mm(whole)


@fault("caches")
class OnItself(Column):
    """What it gathered is on the op, for the backward."""

    def whole(self, x):
        self.gathered = super().whole(x)
        return self.gathered

    def grads(self, dy, x, weight):
        dx, _ = super().grads(dy, None, weight)
        return dx, None if x is None else self.grad_weight(dy, self.gathered)


@fault("caches")
class TwoBuffers(Column):
    """It has two places for what it gathers, in turn."""

    turn = 0

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        self.places = getattr(self, "places", [None, None])
        self.turn = basic_op_ctxs[0].turn = 1 - self.turn
        return super().fuser_forward(basic_op_ctxs, input_, **unused)

    def whole(self, x):
        self.places[self.turn] = super().whole(x)
        return self.places[self.turn]

    def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
        self.back = basic_op_ctxs[0].turn
        return super().fuser_backward(basic_op_ctxs, grad_output, **unused)

    def grads(self, dy, x, weight):
        dx, _ = super().grads(dy, None, weight)
        return dx, None if x is None else self.grad_weight(dy, self.places[self.back])


@fault("rows")
class NothingToSend(Column):
    """Where there are no rows there is nothing to send."""

    def whole(self, x):
        return super().whole(x) if x.numel() else x


@fault("rows")
class EvenPieces(Row):
    """It sums two pieces of the features one after the other, and there is a last one."""

    def total(self, y):
        half = y.shape[-1] // 2
        if self.scatters or not half:
            return super().total(y)
        out = torch.zeros_like(y)
        for piece in (slice(0, half), slice(half, 2 * half)):
            out[..., piece] = self.start_reduce(y[..., piece]).wait()
        return out


@fault("rows")
class RowsFirst(Column):
    """Whatever the dimension, rows are joined."""

    def start_gather(self, part):
        whole = part.new_empty((self.size * part.shape[0], *part.shape[1:]))
        work = gather_into(whole, part.contiguous(), group=self.group, async_op=True)
        return Pending(work, lambda: whole)

    def start_scatter(self, whole):
        part = whole.new_empty((whole.shape[0] // self.size, *whole.shape[1:]))
        work = scatter_into(part, whole.contiguous(), group=self.group, async_op=True)
        return Pending(work, lambda: part)


@fault("bytes")
class SumsAll(Row):
    """Sums all rows on every rank, and takes its part."""

    def total(self, y):
        if not self.scatters:
            return super().total(y)
        dim = self.collective.dim
        part = self.start_reduce(y).wait().chunk(self.size, dim)[dist.get_rank(self.group)]
        return part.contiguous()


@fault("bytes")
class GathersForNobody(Column):
    """Gathers again where the weight is frozen, too."""

    def kept(self, ctx, x, saved_x, saved_weight):
        return x, saved_weight

    def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
        dx, grads, extras = super().fuser_backward(basic_op_ctxs, grad_output, **unused)
        if not basic_op_ctxs[1].param_requires_grad[0]:
            grads[1] = (None,)
        return dx, grads, extras


@fault("memory")
class KeepsTheWhole(Column):
    """Saves what it gathered."""

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        y, extras = super().fuser_forward(basic_op_ctxs, input_, **unused)
        linear = basic_op_ctxs[1]
        if linear.requires_grad and linear.to_save[0] is not None and self.gathers:
            linear.to_save = self.gathered, linear.to_save[1]
        return y, extras

    def whole(self, x):
        self.gathered = super().whole(x)
        return self.gathered

    def grads(self, dy, x, weight):
        dx, _ = super().grads(dy, None, weight)
        return dx, None if x is None else self.grad_weight(dy, x)


@fault("order of calls")
class OddOnesFirst(Column):
    """Ranks start their two collectives of the backward in different orders."""

    def grads(self, dy, x, weight):
        if x is None or weight is None or not self.gathers or not dist.get_rank(self.group) % 2:
            return super().grads(dy, x, weight)
        sent = self.start_back(dy @ weight)
        whole = self.start_gather(x).wait()
        return sent.wait(), self.grad_weight(dy, whole)


@fault("order of calls")
class NeverWaits(Column):
    """The gradient of the input will have come when somebody reads it."""

    def grads(self, dy, x, weight):
        _, dw = super().grads(dy, x, None)
        return None if weight is None else self.start_back(dy @ weight).result(), dw


@fault("order of calls")
class WritesWhatIsSent(Row):
    """Adds the bias while the product is on its way."""

    def output(self, x, weight, bias):
        if self.scatters or bias is None:
            return super().output(x, weight, bias)
        y = F.linear(x, weight) + bias
        whole = y.new_empty((self.size * y.numel(),))
        flat = y.reshape(-1)
        work = gather_into(whole, flat, group=self.group, async_op=True)
        flat.zero_()  # it is no longer needed
        work.wait()
        return whole.view(self.size, *y.shape).sum(0)


@fault("errors")
class GoesOn(Column):
    """What a collective raises is not its business."""

    def whole(self, x):
        if not self.gathers:
            return x
        pending = self.start_gather(x)
        try:
            return pending.wait()
        except RuntimeError:
            return pending.result()


@fault("modes")
class OnlyWithGradients(Row):
    """Without gradients it takes another path, and forgets the sum."""

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        self.needed = any(ctx.requires_grad for ctx in basic_op_ctxs)
        return super().fuser_forward(basic_op_ctxs, input_, **unused)

    def total(self, y):
        return y if not self.needed and not self.scatters else super().total(y)


@fault("modes")
class FrozenInput(Column):
    """Where the input needs no gradient it believes that nothing does."""

    def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
        if not basic_op_ctxs[0].input_requires_grad:
            grads = [(), *((torch.zeros_like(p),) for p in self._params())]
            return None, grads, [()] * len(basic_op_ctxs)
        return super().fuser_backward(basic_op_ctxs, grad_output, **unused)

    def _params(self):
        return [op.read_parameter(op.param_names[0]).detach() for op in self.basic_ops[1:]]


@fault("plans")
class EvenRanksOnly(Row):
    """Its condition asks which rank it is."""


def _even_ranks_only(ops, env):
    if dist.get_rank(ops[-1].process_group) % 2:
        return "it is for even ranks"
    return env.recipe is None or "it does not quantize"


FAULTS[-1] = Fault("plans", fusion_of(EvenRanksOnly, _even_ranks_only))


@fault("casts")
class CastsItsPart(Column):
    """Under a recipe it casts the part of this rank, and gathers what the codes say."""

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        linear = basic_op_ctxs[1]
        if not linear.quantizers:
            return super().fuser_forward(basic_op_ctxs, input_, **unused)
        x, weight = BasicLinear.quantized_operands(linear, input_)
        whole = self.whole(x.dequantize())
        y = self.product(basic_op_ctxs, whole, weight.dequantize())
        return y, [()] * len(basic_op_ctxs)

    def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
        linear = basic_op_ctxs[1]
        if linear.quantizers and linear.saved_tensors:
            linear.saved_tensors = tuple(t and t.dequantize() for t in linear.saved_tensors)
        return super().fuser_backward(basic_op_ctxs, grad_output, **unused)


FAULTS[-1] = Fault(
    "casts",
    dataclasses.replace(fusion_of(CastsItsPart, None), declares=("casts",), needs=("recipe",)),
)
