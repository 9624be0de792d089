"""The operation fuser: plans a run of ops once per key, and runs it under one autograd function."""

from __future__ import annotations

import functools
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad, profiler
from torch.compiler import is_dynamo_compiling

from ..fusible import Engine, FusibleOperation, bind_engine, dynamo_traces
from ..introspection import hook_dicts, is_dtensor, own_call, why_apart
from ..op_context import ModuleCache
from ..overwriting import without_modes
from ..plugins import manager
from ..recipe_lookup import new_quantizer, recipe_name
from ..settings import Settings, current
from ..tools import check_options, require, wrap_call
from . import checks
from .chain import Chain, Cut, cut
from .planner import Key, make_program, rows_of
from .program import Kwargs, Program

_CACHE_SIZE = 64
_not_traced: Any = torch.compiler.disable
_unpack: Any = forward_ad.unpack_dual
_CPU = torch.device("cpu")
_any_autocast = torch._C._is_any_autocast_enabled
_deterministic = torch._C._get_deterministic_algorithms
_functorch_active = torch._C._are_functorch_transforms_active


_ELSEWHERE: dict[str, Any] = {"_parameters": {}}
"""Replaces the attributes of a module that is looked up again at every call.

A look-up here raises ``KeyError``, as one of a parameter that was replaced does.
"""


class OperationFuser:
    """Runs a run of fusible ops, with the fusions that plugins offer.

    A plan is made once per key, see :class:`opfuse.core.engine.planner.Key`. The plans of the last
    64 keys are kept. Parameters are read by attribute at every call.

    Args:
        ops: Basic ops, or fused ops that replace several.
        owner: The op whose own call this fuser serves; its module hooks have run already.
        part: Whether the ops are part of a longer chain, whose runner passes channels on.

    Raises:
        ValueError: A channel without (earlier) producer, or with two; widths that cannot fit.
        TypeError: An item that is not a fusible op.
    """

    def __init__(
        self, ops: Iterable[FusibleOperation], *, owner: nn.Module | None = None, part: bool = False
    ) -> None:
        self.ops = tuple(ops)
        self._owner = owner
        self._chain = Chain(self.ops, part=part or owner is not None)
        self.num_extra_inputs = len(self._chain.external_inputs)
        units = dict.fromkeys([*self.ops, *self._chain.ops])
        self._units = [unit for unit in units if unit is not owner]
        self._capture()
        self._programs: OrderedDict[Any, Any] = OrderedDict()
        self._last: tuple[Any, Any] = (None, None)  # no key is None
        self._lock = threading.RLock()
        self.holder = ModuleCache()  # the cache that holds this fuser
        run = functools.partial(OperationFuser.run, self)
        if not part and (wrapped := wrap_call(run, chain=self._chain)) is not run:
            self.run = wrapped  # type: ignore[method-assign]
        self._width = self._chain.width
        manager.fusers.add(self)
        for op in units:
            vars(op)["_captured"] = True
        for op in self._chain.ops:
            op.pre_first_fuser_forward()

    def _capture(self) -> None:
        """Cache what every call reads: looking up an attribute of a module is slow."""
        self._changes = FusibleOperation.changes
        self._has_own_calls = any(own_call(unit) for unit in self._units)
        self._unit_dicts = [vars(unit) for unit in self._units]
        self._watching = [op for op in self._chain.ops if op._absent]
        params: list[tuple[Any, Any, str]] = []
        for op in self._chain.ops:
            for name in op.param_names or ():
                # looked up at every call: a module inside the op, and a transposed view
                module, leaf = op.param_source(name)
                source = op._sources.get(name)
                elsewhere = "." in name if source is None else source.transposed
                elsewhere |= name in op._layouts
                params.append((_ELSEWHERE, op, name) if elsewhere else (vars(module), module, leaf))
        self._params = params  # at once: other threads read it

    # The latest plan, in Transformer Engine's form

    _forward_ops = property(lambda self: self._ops_of("forward"))
    _backward_ops = property(lambda self: self._ops_of("backward")[::-1])

    def _ops_of(self, pass_name: str) -> list[tuple[FusibleOperation, list[int]]]:
        steps = getattr(self._last[1], pass_name, ())
        return [(step.op, list(range(step.start, step.stop))) for step in steps]

    # Calling

    def run(
        self, input: Tensor, *extra_inputs: Tensor, basic_op_kwargs: Kwargs | None = None
    ) -> Any:
        """Run the chain.

        Args:
            input: Input of the first op.
            *extra_inputs: Extra inputs that no channel feeds, in op order.
            basic_op_kwargs: Keyword arguments per basic op.

        Returns:
            The output, or ``(output, *extra_outputs)``.

        Raises:
            ValueError: The wrong number of extra inputs, or the wrong last dimension.
            TypeError: The wrong type, dtype or device; an unknown keyword argument.
        """
        if basic_op_kwargs is not None:
            basic_op_kwargs = self._chain.kwargs_of_all(basic_op_kwargs)
        if is_dynamo_compiling() or torch.compiler._is_compiling_flag:  # is_compiling(), faster
            return self._run_traced(input, extra_inputs, basic_op_kwargs)
        if self._changes != FusibleOperation.changes:
            self._capture()
        apart, training = self._has_own_calls, []
        for unit in self._unit_dicts:
            if unit["_forward_hooks"] or unit["_forward_pre_hooks"]:
                apart = True
            if unit["_backward_hooks"] or unit["_backward_pre_hooks"]:
                apart = True
            training.append(unit["training"])
        if apart and (parts := self._cut()) is not None:
            checks.check_arguments(self._chain, input, extra_inputs)
            return parts.run(self, input, extra_inputs, basic_op_kwargs)
        if self._owner is not None:
            training.append(self._owner.training)
        tensors = self._tensors(input, extra_inputs)
        key = key_of(input, tensors, extra_inputs, basic_op_kwargs, training)
        last, program = self._last
        if key != last or (program.row_facts and _has_other_rows(program, input)):
            program = self.program_for(key, input, tensors)
        watched = bool(current.recorders) | profiler._is_profiler_enabled
        if not program.is_plain or type(input) is not Tensor or basic_op_kwargs or watched:
            call = program.call
            if program.recipe is not None and "torch._dynamo" in sys.modules:
                call = program.untraced_call
            return call(self, program, input, tensors, extra_inputs, basic_op_kwargs)
        try:
            return program.run(None, input, *tensors)
        except Exception:
            self.explain_failure(input, extra_inputs)
            raise

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the chain; see :meth:`run`."""
        return self.run(*args, **kwargs)

    def _tensors(self, input: Tensor, extra_inputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the parameters, then the extra inputs; refuse wrong kinds and widths."""
        width = self._width
        if (
            not isinstance(input, Tensor)
            or len(extra_inputs) != self.num_extra_inputs
            or (width is not None and (not input.ndim or input.shape[-1] != width))
            or (extra_inputs and not all([isinstance(tensor, Tensor) for tensor in extra_inputs]))
        ):
            checks.check_arguments(self._chain, input, extra_inputs)
        for op in self._watching:
            op._refuse_late_parameters()
        tensors: list[Tensor] = []
        try:
            for attributes, _, name in self._params:
                if (param := attributes["_parameters"][name]) is None:
                    raise KeyError
                tensors.append(param)
        except KeyError:
            tensors = self._read_params()
        tensors.extend(extra_inputs)
        return tensors

    def _read_params(self) -> list[Tensor]:
        """Read the parameters as attributes: some are computed, or were replaced."""
        tensors: list[Tensor] = []
        given = current.part_params or {}
        for attributes, module, name in self._params:
            tensor = given.get((module, name))
            if tensor is None:  # no call around this one has read it
                there = attributes is _ELSEWHERE
                tensor = module.read_parameter(name) if there else getattr(module, name)
            if tensor is None:
                who = f"{self._chain.title} expected a tensor as {type(module).__name__}.{name}"
                raise TypeError(f"{who}, got None")
            tensors.append(tensor)
        return tensors

    def _cut(self) -> Cut | None:
        """The chain, cut at the ops that run through their own call; None: none does."""
        hooked = [bool(any(hook_dicts(unit))) for unit in self._units]
        name = _cut_untraced(self, FusibleOperation.changes, *hooked)
        return getattr(self, name) if name else None

    def explain_failure(self, input: Tensor, extra_inputs: Sequence[Tensor]) -> None:
        """Raise a clearer error than a kernel's if dtypes or devices do not match."""
        given = input.dtype, input.device, None, extra_inputs, is_dtensor(input)
        checks.check_tensors(self._chain, self._owner, *given)

    # While torch.compile traces: the same, in code that it can trace and guard

    def _run_traced(
        self, input: Tensor, extra_inputs: Sequence[Tensor], kwargs: Kwargs | None
    ) -> Any:
        dynamo_traces()  # refuses an old Dynamo
        checks.check_arguments(self._chain, input, extra_inputs)
        if (parts := self._cut()) is not None:
            return parts.run(self, input, extra_inputs, kwargs)
        training = [unit.training for unit in self._units]
        if self._owner is not None:
            training.append(self._owner.training)
        for op in self._watching:
            op._refuse_late_parameters()
        tensors = [*self._read_params(), *extra_inputs]
        *key, settings = key_of(input, tensors, extra_inputs, kwargs, training, compiling=True)
        program = getattr(self, _program_untraced(self, *settings, *key))
        return program.call(self, program, input, tensors, extra_inputs, kwargs)

    # Planning

    def program_for(
        self, given: tuple[Any, ...], input: Tensor | None, tensors: Sequence[Tensor] | None
    ) -> Program:
        """The program for a key: an earlier one, or a new one.

        Args:
            given: The fields of the key; a lookup needs only a plain tuple, which is faster.
            input: The input, for its number of rows; None while tracing.
            tensors: The parameters, and maybe extra inputs; None while tracing.
        """
        key, params = Key(*given), tensors and tensors[: len(self._params)]
        with self._lock:
            self._capture()
            # one program for each value of these facts about the rows
            facts, programs = self._programs.get(key, ((), {}))
            program: Program | None = programs.get(rows_of(facts, input))
            if program is None:
                make = _never_traced(without_modes()(make_program))
                with current.temporarily(quantizers={}):
                    made = make(self._chain, self._owner, key, input, params)
                # a tool may have failed meanwhile: without it no option that it serves is in force
                check_options(key.settings.options, key.settings.selection)
                for tool in (*self._chain.needs_tools, *key.settings.tools):
                    require(tool, self._chain.title, key.settings.selection)
                made.row_facts = tuple(sorted({*facts, *made.row_facts}))
                made.rows = rows_of(made.row_facts, input)
                self._programs[key] = made.row_facts, {**programs, made.rows: made}
                program = made
            self._programs.move_to_end(key)
            while len(self._programs) > _CACHE_SIZE:
                self._programs.popitem(last=False)
        self._last = key, program
        return program


def key_of(
    input: Tensor,
    tensors: Sequence[Tensor],
    extra_inputs: Sequence[Tensor],
    kwargs: Kwargs | None,
    training: Sequence[bool],
    compiling: bool = False,
) -> tuple[Any, ...]:
    """The fields of :class:`Key`; a lookup needs only a plain tuple, which is faster."""
    settings = current.values
    if (
        _functorch_active()
        or (
            forward_ad._current_level >= 0
            and any(_unpack(t).tangent is not None for t in (input, *tensors))
        )
        # what is exported has no autograd functions, and would lose their gradients
        or (compiling and torch.compiler.is_exporting() and torch.is_grad_enabled())
    ):  # unfused: kernels lose these
        settings = settings._replace(options=(*settings.options, ("double_backward", True)))
    grads: tuple[bool, ...] | None = None
    if torch.is_grad_enabled() and (compiling or not torch.is_inference_mode_enabled()):
        # an empty comprehension takes longer than this check
        others = [t.requires_grad for t in tensors] if tensors else ()
        grads = (input.requires_grad, *others)
    # creating and comparing a device takes longer than this check
    device, autocast = _CPU if input.is_cpu else input.device, None
    if (compiling or _any_autocast()) and torch.is_autocast_enabled(device.type):
        stays = input.dtype is torch.float64 or input.is_meta
        autocast = None if stays else torch.get_autocast_dtype(device.type)
    deterministic = torch.are_deterministic_algorithms_enabled if compiling else _deterministic
    names = tuple([tuple(given) for given in kwargs]) if kwargs else None
    extras = tuple([(t.dtype, t.device) for t in extra_inputs]) if extra_inputs else None
    return (
        grads, input.dtype, device, autocast, tuple(training), manager.generation,
        FusibleOperation.changes, deterministic(), compiling, names, extras, settings,
    )  # fmt: skip


def _has_other_rows(program: Program, input: Tensor) -> bool:
    """Return whether the program is for other rows than those of an input.

    Computing that takes a microsecond; comparing the shape with the last call's, a fifth of it.
    """
    seen = input.shape, input.is_contiguous()
    if program.seen == seen:
        return False
    if program.rows != rows_of(program.row_facts, input):
        return True
    program.seen = seen
    return False


def _never_traced(function: Any) -> Any:
    """Wrap a function that torch.compile must not trace alone after it gave up on the caller."""
    return _not_traced(function) if "torch._dynamo" in sys.modules else function


def _program_untraced(fuser: OperationFuser, *key: Any) -> str:
    """Plan while ``torch.compile`` traces: the call and its arguments are constants of the graph.

    Args:
        fuser: The fuser of the chain.
        *key: The settings one by one, since a tuple with a recipe is not a constant; then the rest.

    Returns:
        The name of the fuser's attribute that holds the program, which traced code can guard.
    """
    for module, name in fuser._chain.param_sources:
        if nn.utils.parametrize.is_parametrized(module, name):
            kinds = [type(p).__name__ for p in module.parametrizations[name]]  # type: ignore[index]
            if "_SpectralNorm" in kinds:
                what = f"spectral_norm on {name} updates its state whenever the parameter is read"
                how = "which torch.compile does not see; run this chain in eager mode"
                raise RuntimeError(f"{fuser._chain.title}: {what}, {how}")
    settings = Settings(*key[: len(Settings._fields)])
    program = fuser.program_for((*key[len(settings) :], settings), None, None)
    name = f"_traced_{id(program)}"
    setattr(fuser, name, program)
    return name


_program_untraced._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compiler.assume_constant_result


def _cut_untraced(fuser: OperationFuser, changes: int, *hooked: bool) -> str:
    """Cut a chain at the ops that run through their own call; see :func:`_program_untraced`.

    Args:
        fuser: The fuser of the chain.
        changes: A count of changes that may affect the cut; it guards the traced code.
        *hooked: Whether each op has hooks; it guards the traced code too.

    Returns:
        The name of the fuser's attribute; ``""`` if no op does.
    """
    fuser._capture()
    if not (apart := [op for op in fuser._units if why_apart(op)]):
        return ""
    name = "_cut_" + "".join("01"[op in apart] for op in fuser._units)
    if not hasattr(fuser, name):
        setattr(fuser, name, cut(fuser, apart))
    return name


_cut_untraced._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compiler.assume_constant_result


bind_engine(Engine(OperationFuser, new_quantizer, recipe_name))
