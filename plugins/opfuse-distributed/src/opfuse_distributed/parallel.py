"""Styles of ``torch.distributed.tensor.parallel`` for ops, in which a chain runs on local parts.

A plan of ``parallelize_module`` with them splits ops and modules of torch alike::

    from torch.distributed.tensor.parallel import parallelize_module
    from opfuse_distributed.parallel import ColwiseParallel, RowwiseParallel

    chain = opfuse.Sequential(ops.Linear(64, 256), ops.GELU(), ops.Linear(256, 64))
    parallelize_module(chain, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})

Each parameter becomes a ``DTensor``, also in the state dict. The collectives of the placements run
around each op as ops of the chain, and what flows between ops is local. If a chain begins with such
an op, it takes a ``DTensor`` as well; if it ends with one whose ``use_local_output`` is False, it
gives one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import style

from opfuse.core.fusible import FusibleOperation
from opfuse.core.op import BasicOperation
from opfuse.core.plugins import manager
from opfuse.ops.authoring import expected
from opfuse.ops.basic_linear import BasicLinear
from opfuse.ops.linear import Bias, Linear
from opfuse.ops.norm import LayerNorm, RMSNorm
from opfuse.ops.parallel_linear import ParallelLinear

from .collectives import AllGather, AllReduce, CopyToTensorParallelRegion, ReduceScatter
from .layout import Ends, Layout
from .ranks import Group
from .tensor_parallel import TensorParallel

_FEATURES = Shard(-1)


class Split(NamedTuple):
    """How an op is split among the processes of a mesh.

    Attributes:
        mode: ``"column"``, ``"row"`` or ``"sequence"``.
        mesh: The ``DeviceMesh``, of one dimension.
        takes: The placement of its input.
        gives: The placement of its output.
        local: Whether a chain that ends with it gives a local tensor.
    """

    mode: str
    mesh: Any
    takes: Any
    gives: Any
    local: bool = True

    @property
    def group(self) -> Group:
        """The processes."""
        return Group(self.mesh.get_group())

    def dim(self, name: str) -> int | None:
        """The dimension of a parameter that is split; None: each process has all of it."""
        if self.mode == "column":
            return 0
        return 1 if self.mode == "row" and name.endswith("weight") else None

    def part(self, name: str) -> Layout:
        """The part of a parameter that each process has."""
        dim = self.dim(name)  # where there are some of the rows, so are parts of the gradient
        return Layout(self.group, dim, dim is None and self.gives.is_shard())

    def refusal(self) -> str:
        """Return why no collective of a chain does this, or ``""``."""
        takes, gives, rows = self.takes, self.gives, (_rows(self.takes), _rows(self.gives))
        if self.mesh.ndim != 1:
            return f"a mesh of one dimension, got {self.mesh}"
        if self.mode == "column" and not (gives == _FEATURES and (takes.is_replicate() or rows[0])):
            return f"input as Replicate() or Shard of rows, output as Shard(-1), got {takes, gives}"
        if self.mode == "row" and not (takes == _FEATURES and (gives.is_replicate() or rows[1])):
            return f"input as Shard(-1), output as Replicate() or Shard of rows, got {takes, gives}"
        return ""

    def around(self) -> tuple[list[BasicOperation], list[BasicOperation]]:
        """The collectives before and after the product."""
        takes, gives, group = self.takes, self.gives, self.group.given
        if self.mode == "column":
            rows = isinstance(takes, Shard)
            return [AllGather(group, takes.dim) if rows else CopyToTensorParallelRegion(group)], []
        if self.mode == "row":
            return [], [ReduceScatter(group, gives.dim) if _rows(gives) else AllReduce(group)]
        return [], []


def _rows(placement: Any) -> bool:
    return isinstance(placement, Shard) and placement.dim >= 0


def split(op: BasicOperation, how: Split) -> None:
    """Let a basic op run with its process's part of its parameters.

    Args:
        op: A ``BasicLinear``, ``ParallelLinear``, ``Bias``, ``LayerNorm`` or ``RMSNorm`` that is
            not split yet, with the sizes of all processes together.
        how: How it is split.

    Raises:
        ValueError: No collectives do that, a size does not divide, or the op is split already.
        TypeError: The op is another one.
    """
    if op._layouts or op._around != ((), ()):
        raise ValueError(expected(op, "an op that is not split among processes", "one that is"))
    if refusal := how.refusal():
        raise ValueError(expected(op, *refusal.split(", got ")))
    if isinstance(op, (BasicLinear, ParallelLinear)) and how.mode != "sequence":
        _split_linear(op, how)
    elif isinstance(op, Bias) and how.mode != "sequence":
        mode = "column" if how.mode == "column" else None
        size = TensorParallel(mode, how.group).part(op, "size", op.local_size, "column")
        op.local_size = op.in_features = op.out_features = size
    elif not (isinstance(op, (LayerNorm, RMSNorm)) and how.mode == "sequence"):
        raise TypeError(expected(op, "an op that can be split", f"the style {how.mode!r}"))
    vars(op)["_layouts"] = {name: how.part(name) for name in op.param_names or ()}
    op.needs_tools = ("distributed",)
    _forget(op)


def _split_linear(op: BasicLinear | ParallelLinear, how: Split) -> None:
    mode = TensorParallel(how.mode, how.group, _rows(how.takes) or _rows(how.gives))
    inputs = mode.part(op, "in_features", op.in_features or 0, "row")
    if isinstance(op, ParallelLinear):
        if how.mode == "row":
            raise ValueError(expected(op, "the columns of its linears to be split", "rows"))
        op.sizes = tuple([mode.part(op, "a size", size, "column") for size in op.sizes])
        op._shapes = [(shape[0] // mode.size, *shape[1:]) for shape in op._shapes]
        outputs = sum(op.sizes)
    else:
        outputs, op._split = mode.part(op, "out_features", op.out_features or 0, "column"), mode
    op.in_features, op.out_features = inputs, outputs
    before, after = how.around()
    op.surround(before=before, after=after)


def _forget(op: BasicOperation) -> None:
    """Let the chains that an op is in be made again."""
    for fuser in list(manager.fusers):
        if op in fuser._chain.ops:
            fuser.holder.key = ()


def _parallel(module: Any, how: Split, source: int | None) -> Any:
    """Split an op, and make each of its parameters a ``DTensor``."""
    ops: list[Any] = [*module.basic_ops] if isinstance(module, Linear) else [module]
    if module._sources or not isinstance(ops[0], BasicOperation):
        what = "Linear, or a basic op with parameters of its own"
        raise TypeError(expected(module, f"to be {what}", "another one"))
    for op in ops:
        split(op, how)
        ends = how.takes if op is ops[0] else None, how.gives if op is ops[-1] else None
        vars(op)["_ends"] = Ends(how.mesh, *ends, not how.local)
    if isinstance(module, Linear):
        module.in_features, module.out_features = ops[0].in_features, ops[0].out_features
    for holder, name, param, layout in _held(module, ops):
        placed = [Replicate() if layout.dim is None else Shard(layout.dim)]
        if how.mode == "sequence":  # each process has made the same, as torch's style assumes
            made = DTensor.from_local(param, how.mesh, placed, run_check=False)
        else:
            made = distribute_tensor(param, how.mesh, placed, src_data_rank=source)
        holder.register_parameter(name, nn.Parameter(made, param.requires_grad))
    return module


def _held(module: Any, ops: list[Any]) -> Iterator[tuple[nn.Module, str, Any, Layout]]:
    """The parameters of ops: the module that holds each, its name there, and its layout."""
    for op in ops:
        for name, layout in op._layouts.items():
            holder, leaf = op.param_source(name)
            yield holder, leaf, holder._parameters[leaf], layout


class _StyleOfOps:
    """Splits an op as a style says, and lets torch split other modules."""

    _mode = ""

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        given: Any = self
        if not isinstance(module, FusibleOperation):
            return super()._apply(module, device_mesh)  # type: ignore[misc, no-any-return]
        rows = getattr(given, "sequence_sharding", None)
        (takes,), (gives,) = (rows, rows) if rows else (given.input_layouts, given.output_layouts)
        how = Split(self._mode, device_mesh, takes, gives, given.use_local_output)
        return _parallel(module, how, given.src_data_rank)  # type: ignore[no-any-return]


class ColwiseParallel(_StyleOfOps, style.ColwiseParallel):
    """Torch's style, which also splits ``Linear``, ``BasicLinear`` and ``ParallelLinear``.

    The output of an op is ``Shard(-1)``, and its input ``Replicate()``, or ``Shard`` of rows. Other
    modules are given to torch's style.
    """

    _mode = "column"


class RowwiseParallel(_StyleOfOps, style.RowwiseParallel):
    """Torch's style, which also splits ``Linear`` and ``BasicLinear``.

    The input of an op is ``Shard(-1)``, and its output ``Replicate()``, or ``Shard`` of rows. A
    bias is added once, after the sum over the processes. Other modules are given to torch's style.
    """

    _mode = "row"


class SequenceParallel(_StyleOfOps, style.SequenceParallel):
    """Torch's style, also for ``LayerNorm`` and ``RMSNorm``: each process has some of the rows.

    Each process has all of the parameters. Their gradients are summed over the processes. Other
    modules are given to torch's style.
    """

    _mode = "sequence"
