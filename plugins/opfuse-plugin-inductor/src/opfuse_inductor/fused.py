"""The fused op, and its conditions."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from opfuse_convert.grammar import Unreadable
from torch import Tensor
from torch.nn import Parameter

from opfuse import Environment, FusedOperation, Fusion, OneOf, OneOrMore, PluginWarning, Subclasses
from opfuse import ops as built_in
from opfuse.ops.authoring import op_class

from . import kernels
from .conditions import DEFAULTS, benefit, option, pays
from .reads import Reads

_TENSORS = {Tensor, Parameter}


class CompiledRun(FusedOperation):
    """A run of ops in two compiled functions, one per pass.

    Its output is computed again in the backward, if the next op needs it there: reading and writing
    once more is cheap.

    Small inputs, and those that no kernel takes, go through the ops one by one, as if there were no
    fusion.
    """

    recomputes = True

    def __init__(self, basic_ops: Sequence[Any]) -> None:
        super().__init__(basic_ops)
        self._backend = DEFAULTS["inductor.backend"]
        self._min_elements = DEFAULTS["inductor.min_elements"]
        self._ops = tuple(basic_ops)
        self._sources = sources_in(self._ops)
        slots = [(i, k) for i, op in enumerate(self._ops) for k in range(op.num_extra_inputs)]
        self._external = [slot for slot in slots if slot not in self._sources]
        own = [op.feature_ratio or 1 for op in self._ops]
        self._ratios = ratios = [math.prod(own[:i]) for i in range(len(own))]
        drops = [i for i, op in enumerate(self._ops) if isinstance(op, built_in.Dropout)]
        self._dropouts = [(i, self._ops[i], ratios[i]) for i in drops]
        self._scales = [op for op in self._ops if isinstance(op, built_in.ConstantScale)]
        self._look()
        self._with_params = [i for i, op in enumerate(self._ops) if op.param_names]
        self._with_extras = [i for i, op in enumerate(self._ops) if op.num_extra_inputs]
        self._flags: tuple[kernels.Flags, ...] = ()
        self._lets_go = False
        self._latest: tuple[Any, kernels.Plan | None] = (None, None)
        self._apart = ""
        self._numbers: tuple[Any, list[Tensor]] = (None, [])
        self.grad_input = grad_input_of(self._ops)  # type: ignore[misc]

    def planned(self, env: Environment) -> None:
        """See :meth:`opfuse.FusedOperation.planned`."""
        self._backend = option(env, "inductor.backend")
        self._min_elements = option(env, "inductor.min_elements")

    def _look(self) -> None:
        """Find out what the ops read, and on what the key of their kernels depends."""
        self._reads = Reads(self._ops)
        # of the ops and of what is in them: a ScaledActivation computes as its activation does
        parts = [op.named_modules() for op in self._ops]
        classes = tuple(tuple((name, op_class(part)) for name, part in each) for each in parts)
        sources, reads = tuple(self._sources.items()), self._reads
        self._structure = classes, sources, reads.names, reads.functions

    # Forward

    def fuser_forward(
        self,
        basic_op_ctxs: list[Any],
        input_: Tensor,
        *,
        basic_op_extra_inputs: Sequence[Sequence[Any]],
        **unused: Any,
    ) -> tuple[Tensor, Any]:
        """See :meth:`opfuse.FusibleOperation.fuser_forward`."""
        extra_inputs = {"basic_op_extra_inputs": basic_op_extra_inputs}
        size = input_.numel()
        if size < self._min_elements or not input_.ndim or not size or size < 2 * input_.shape[-1]:
            return self.run_separately(basic_op_ctxs, input_, **extra_inputs)
        shape, width = input_.shape[:-1], input_.shape[-1]
        rows = size // width
        extras = [basic_op_extra_inputs[i][k] for i, k in self._external] if self._external else ()
        params = [param for i in self._with_params for param in basic_op_ctxs[i].params]
        masked = [(op, ratio) for _, op, ratio in self._dropouts if op.training and op.p]
        if not self._takes(basic_op_ctxs, input_, extras, params) or (
            masked and not input_.is_contiguous()
        ):
            return self.run_separately(basic_op_ctxs, input_, **extra_inputs)
        numbers_read = self._reads.current()
        if numbers_read is None:  # the ops read other things than before
            self._look()
            numbers_read = self._reads.current()
        key = (
            self._structure,
            numbers_read,
            input_.dtype,
            input_.device,
            width,
            torch.get_num_threads(),
            tuple([param.dtype for param in params]),
            tuple([(extra.dtype, extra.requires_grad) for extra in extras]),
        )
        latest, plan = self._latest
        if key != latest:
            plan = self._make_plan(key, basic_op_ctxs, params)
        if plan is None:
            return self.run_separately(basic_op_ctxs, input_, **extra_inputs)
        given = [input_, *params, *extras]
        numbers: list[Tensor] = []
        if self._dropouts:
            given += [draw_mask(op.p, (rows, width // ratio), input_) for op, ratio in masked]
        if self._scales:
            numbers = self._numbers_on(input_.device)
            given += numbers
        items = [fit(tensor, spec, rows) for tensor, spec in zip(given, plan.specs)]  # noqa: B905  # every call
        y, *others = results = plan.forward(items, rows)
        if plan.needs_grad:
            first = basic_op_ctxs[0]
            # not a copy of an input
            first.to_save = [given[i] if is_input else results[i] for is_input, i in plan.keeps]
            first.compiled = plan, shape, numbers
        result: Any = [()] * len(self._ops)
        for (i, _), tensor in zip(plan.outputs, others):  # noqa: B905  # what is kept comes after them
            result[i] = ((input_ if tensor is items[0] else tensor).view(*shape, tensor.shape[-1]),)
        if y is items[0]:
            return input_, result
        y = y if len(shape) == 1 else y.view(*shape, y.shape[-1])
        if plan.recomputes and basic_op_ctxs[0].may_recompute:
            basic_op_ctxs[0].recomputable_output, self._lets_go = y, True
        return y, result

    def _takes(
        self, ctxs: Sequence[Any], input_: Tensor, extras: Sequence[Any], params: Sequence[Any]
    ) -> bool:
        """Whether a kernel takes these tensors; raises what the ops would."""
        for (i, _), extra in zip(self._external, extras, strict=True) if extras else ():
            op, shape = self._ops[i], input_.shape
            if isinstance(op, built_in.AddExtraInput):
                op.check_extra(ctxs[i], extra, (*shape[:-1], shape[-1] // self._ratios[i]))
            elif extra.shape != shape[:-1]:
                return False
        if not all(map(has_rows, (input_, *extras))):  # what a kernel writes is contiguous
            return False
        return not {type(tensor) for tensor in (input_, *extras, *params)} - _TENSORS

    def _make_plan(
        self, key: Any, ctxs: Sequence[Any], params: Sequence[Tensor]
    ) -> kernels.Plan | None:
        dtype, device, width, *_, of_extras = key[2:]
        if not self._flags:
            self._flags = tuple(kernels.Flags.of(ctx) for ctx in ctxs)
        of_params = [[kernels.Spec(p.dtype, None, (*p.shape,)) for p in c.params] for c in ctxs]
        extras: list[list[Any]] = [[None] * op.num_extra_inputs for op in self._ops]
        for (i, k), (of_extra, _) in zip(self._external, of_extras, strict=True):
            one = isinstance(self._ops[i], built_in.ScaledActivation)
            extras[i][k] = kernels.Spec(of_extra, None if one else width // self._ratios[i])
        masks: list[list[Any]] = [[] for _ in self._ops]
        for i, op, ratio in self._dropouts:
            masks[i] = [kernels.Spec(torch.bool, width // ratio)] if op.training and op.p else []
        number = kernels.Spec(torch.float64, shape=())
        numbers = [[number] if isinstance(op, built_in.ConstantScale) else [] for op in self._ops]
        given = kernels.Given(of_params, extras, masks, numbers)

        def make() -> kernels.Plan | str:
            pairs = zip(self._external, of_extras, strict=True)
            wanted = {i for (i, _), (_, wants) in pairs if wants}
            wanted |= {i for i, op in enumerate(self._ops) if any(op.extra_input_channels)}
            title = " + ".join(op_class(op).__name__ for op in self._ops)
            try:
                run = kernels.Run(self._ops, self._sources, self._flags, wanted)
                options = run, title, key, kernels.Spec(dtype, width), given, device, self._backend
                return kernels.Plan(*options)
            except Unreadable as error:  # this is legal, but cannot be compiled once for all calls
                return str(error)
            except Exception as error:
                # an op that cannot be traced, or that refuses this input: then it does so again
                names = ", ".join(type(op).__name__ for op in self._ops)
                runs = f"opfuse-plugin-inductor runs [{names}] one by one"
                text = f"{runs}, since they cannot be traced: {type(error).__name__}: {error}"
                warnings.warn(PluginWarning(text), stacklevel=3)
                return f"it cannot be traced ({type(error).__name__})"

        of_plan = "plan", key, self._flags, self._backend
        plan = self._reads.refusal or kernels.cached(of_plan, make)
        self._apart = plan if isinstance(plan, str) else ""
        self._latest = key, None if self._apart else plan
        return self._latest[1]

    def _numbers_on(self, device: torch.device) -> list[Tensor]:
        """The scales as tensors, so that another scale needs no other kernel."""
        key = device, [op.scale for op in self._scales]
        if key != self._numbers[0]:
            numbers = [torch.tensor(n, dtype=torch.float64, device=device) for n in key[1]]
            self._numbers = key, numbers
        return self._numbers[1]

    # Backward

    def fuser_backward(
        self,
        basic_op_ctxs: list[Any],
        grad_output: Tensor,
        *,
        basic_op_grad_extra_outputs: Sequence[Sequence[Any]],
    ) -> tuple[Tensor | None, Any, Any]:
        """See :meth:`opfuse.FusibleOperation.fuser_backward`."""
        extra = basic_op_grad_extra_outputs
        if getattr(basic_op_ctxs[0], "compiled", None) is None:
            return self.run_separately_backward(
                basic_op_ctxs, grad_output, basic_op_grad_extra_outputs=extra
            )
        plan, shape, numbers = basic_op_ctxs[0].compiled
        rows = shape.numel()
        saved = self._saved(basic_op_ctxs, plan, rows)
        dy = matrix(grad_output, rows)
        grads = {
            (i, k): matrix(grad, rows)
            for i, of_op in enumerate(extra)
            for k, grad in enumerate(of_op or ())
            if grad is not None
        }
        owns_dy = basic_op_ctxs[-1].owns_grad_output
        found = plan.backward(saved, dy, grads, numbers, rows, owns_dy)
        if len(shape) != 1:
            for name, grad in found.items():
                if name == "x" or name[0] == "extra":
                    found[name] = grad.view(*shape, *grad.shape[1:])
        of_params: list[Any] = [()] * len(self._ops)
        of_extras: list[Any] = list(of_params)
        for i in self._with_params:
            count = len(basic_op_ctxs[i].param_requires_grad)
            of_params[i] = tuple([found.get(("param", i, k)) for k in range(count)])
        for i in self._with_extras:
            count = self._ops[i].num_extra_inputs
            of_extras[i] = tuple([found.get(("extra", i, k)) for k in range(count)])
        return found.get("x"), of_params, of_extras

    def fuser_recompute(self, basic_op_ctxs: Sequence[Any]) -> Tensor:
        """See :meth:`opfuse.FusedOperation.fuser_recompute`."""
        plan, shape, numbers = basic_op_ctxs[0].compiled
        rows = shape.numel()
        saved = self._saved(basic_op_ctxs, plan, rows)
        y = plan.recompute(saved, numbers, rows)
        return y if len(shape) == 1 else y.view(*shape, y.shape[-1])

    def _saved(self, ctxs: Sequence[Any], plan: kernels.Plan, rows: int) -> list[Tensor]:
        return [
            fit(tensor, spec, rows)
            for tensor, spec in zip(ctxs[0].saved_tensors, plan.specs_saved)  # noqa: B905
        ]

    @property
    def notes(self) -> str:  # type: ignore[override]
        """Text that ``opfuse.explain`` adds: the time spent compiling, and what is not kept."""
        plan = self._latest[1]
        if plan is None:
            why = f": {self._apart}" if self._apart else ""
            return f"nothing was compiled, the ops ran one by one{why}"
        again = "; an op after it does not keep its input, which is computed again"
        return notes_of(plan.kernels) + (again if self._lets_go else "")


def notes_of(kernels_by_pass: Mapping[str, Sequence[kernels.CompiledKernel]]) -> str:
    """The time that was spent compiling, and what Inductor did not compile."""
    parts, failed = [], []
    for name, of_pass in kernels_by_pass.items():
        if seconds := [kernel.seconds for kernel in of_pass if kernel.compiled]:
            parts.append(f"{name} {sum(seconds):.1f} s")
        if any(kernel.failed for kernel in of_pass):
            failed.append(name)
    spent = ", ".join(parts) or "none yet"
    notes = f"time spent tracing and compiling in this process: {spent}"
    if not failed:
        return notes
    return f"{notes}; Inductor does not compile this, which runs as traced: {', '.join(failed)}"


def has_rows(tensor: Tensor) -> bool:
    """Whether PyTorch's operations on a tensor give contiguous results."""
    if tensor.is_contiguous():
        return True
    strides = [s for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1]
    return 0 not in strides and strides == sorted(strides, reverse=True)


def matrix(tensor: Tensor, rows: int) -> Tensor:
    """The tensor with one row dimension, contiguous; the tensor itself if it is that."""
    if tensor.ndim != 2:
        tensor = tensor.reshape(rows, tensor.shape[-1])
    tensor = tensor.resolve_neg()  # a view that negates another tensor has to be computed
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def fit(tensor: Tensor, spec: kernels.Spec, rows: int) -> Tensor:
    """The tensor as a kernel takes it."""
    if spec.width is not None:
        return matrix(tensor, rows)
    if spec.shape is None and tensor.ndim != 1:
        tensor = tensor.reshape(rows)
    tensor = tensor.resolve_neg()
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def draw_mask(p: float, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """The mask of a dropout, drawn as the op draws it: a seed gives the same one, fused or not."""
    if like.device.type == "cpu":
        return torch.bernoulli(torch.empty(shape, dtype=torch.bool), 1 - p)
    return torch.native_dropout(like.new_empty(shape), p, True)[1]


def sources_in(ops: Sequence[Any]) -> dict[tuple[int, int], tuple[int, int]]:
    """Extra inputs whose channel is written by an op of the run: consumer -> producer."""
    producers, sources = {}, {}
    for i, op in enumerate(ops):
        producers |= {name: (i, k) for k, name in enumerate(op.extra_output_channels) if name}
    for i, op in enumerate(ops):
        channels = enumerate(op.extra_input_channels)
        sources |= {(i, k): producers[channel] for k, channel in channels if channel in producers}
    return sources


def grad_input_of(ops: Sequence[Any]) -> str:
    """How the gradient that the backward returns relates to others.

    See :class:`opfuse.FusibleOperation`.
    """
    return next((op.grad_input for op in ops if op.grad_input != "same"), "same")


_POINTWISE = OneOf(
    *(built_in.RMSNorm, Subclasses(built_in.Activation), built_in.L2Normalization),
    *(built_in.Bias, built_in.ConstantScale, built_in.AddExtraInput, built_in.MakeExtraOutput),
    *(built_in.Dropout, built_in.Identity, Subclasses(built_in.ScaledActivation)),
)
_RUN = (OneOrMore(_POINTWISE),)

JOINT = [
    Fusion(_RUN, CompiledRun, pays, benefit, priority=-100, name="compiled run", needs=("rows",))
]
