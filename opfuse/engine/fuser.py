"""The operation fuser: plans a run of ops once per key, and runs it under one autograd function."""

from __future__ import annotations

import dataclasses
import math
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from ..environment import Environment
from ..fusion import FusionLike
from ..op import FusedOperation, FusibleOperation
from ..overrides import has_hooks, hook_dicts, kwarg_names, op_class, own_call, why_apart
from ..plugins import Registration, manager
from ..settings import Options, Settings, checkpoint_frames, current
from .chain import Routing, flatten
from .choose import check_expansion, choose, warn_about
from .cutting import Cut, cut, run_cut
from .execute import Kwargs, Pipeline, apply_eager, run_differentiable, run_forward
from .plan import FusionPlan
from .program import Program, compile_program

_CACHE_SIZE = 64
_not_traced: Any = torch.compiler.disable
_CPU = torch.device("cpu")
_any_autocast = torch._C._is_any_autocast_enabled
_deterministic = torch._C._get_deterministic_algorithms
_functorch_active = torch._C._are_functorch_transforms_active


_ELSEWHERE: dict[str, Any] = {"_parameters": {}}
"""Stands for the attributes of a module that is looked for anew at every call."""


class OperationFuser:
    """Runs a run of fusible ops, with the fusions that plugins offer.

    A plan is made once per key: the ops, which of them carry hooks, the names of keyword arguments given,
    the recipe, which tensors need gradients, dtype, device, training, options and the plugins in force.
    The last 64 plans are kept. Parameters are read by attribute at every call.

    Args:
        ops: Basic ops, or fused ops that stand for several.
        owner: The op whose own call this fuser serves; its module hooks have run already.
        part: Whether the ops are part of a longer chain, whose channels are passed on by who runs it.

    Raises:
        ValueError: A channel without (earlier) producer, or with two; widths that cannot fit.
        TypeError: An item that is not a fusible op.
    """

    def __init__(self, ops: Iterable[FusibleOperation], *, owner: nn.Module | None = None, part: bool = False) -> None:
        self.ops = tuple(ops)
        self._owner = owner
        self._routing = Routing(flatten(self.ops), part=part or owner is not None)
        self.num_extra_inputs = len(self._routing.external_inputs)
        units = dict.fromkeys([*self.ops, *self._routing.ops])
        self._units = [unit for unit in units if unit is not owner]
        self._capture()
        self._programs: OrderedDict[Any, Any] = OrderedDict()
        self._last: tuple[Any, Program | Cut | None] = (None, None)
        self._lock = threading.RLock()
        self._prepares = [
            (i, op)
            for i, op in enumerate(self._routing.ops)
            if type(op).pre_fuser_forward is not FusibleOperation.pre_fuser_forward
        ]
        for op in units:
            vars(op)["_captured"] = True
        for op in self._routing.ops:
            op.pre_first_fuser_forward()

    def _capture(self) -> None:
        """Keep what every call looks at: looking up an attribute of a module is slow."""
        self._unit_dicts = [vars(unit) for unit in self._units]
        self._params: list[tuple[Any, Any, str]] = []
        for op in self._routing.ops:
            for name in op.param_names or ():  # that of a module inside the op is looked for anew at every call
                module, leaf = op.param_source(name)
                self._params.append((_ELSEWHERE, op, name) if "." in name else (vars(module), module, leaf))

    # The latest plan, in Transformer Engine's form

    @property
    def _forward_ops(self) -> list[tuple[FusibleOperation, list[int]]]:
        steps = self._last[1].forward if isinstance(self._last[1], Program) else ()
        return [(step.op, list(range(step.start, step.stop))) for step in steps]

    @property
    def _backward_ops(self) -> list[tuple[FusibleOperation, list[int]]]:
        steps = self._last[1].backward[::-1] if isinstance(self._last[1], Program) else ()
        return [(step.op, list(range(step.start, step.stop))) for step in steps]

    def notes(self, plan: FusionPlan) -> tuple[str, ...]:
        """What the fused ops of a plan say about themselves."""
        kept = [program for _, programs in self._programs.values() for program in programs.values()]
        planned = [program for program in kept if isinstance(program, Program)]
        ops = [step.op for program in planned if program.plan is plan for step in program.forward]
        noted = [op for op in ops if isinstance(op, FusedOperation) and op.notes]
        return tuple(f"{' + '.join(op_class(basic).__name__ for basic in op.basic_ops)}: {op.notes}" for op in noted)

    # Calling

    def run(self, input: Tensor, *extra_inputs: Tensor, basic_op_kwargs: Kwargs | None = None) -> Any:
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
        routing = self._routing
        compiling = is_dynamo_compiling() or torch.compiler._is_compiling_flag  # is_compiling(), faster
        if (type(input) is not Tensor and not isinstance(input, Tensor)) or len(extra_inputs) != self.num_extra_inputs:
            self._refuse(input, extra_inputs)
        training: list[bool] = []
        if compiling:
            training = [unit.training for unit in self._units if not any(hook_dicts(unit))]
        else:  # the same, faster
            for unit in self._unit_dicts:
                if unit["_forward_hooks"] or unit["_forward_pre_hooks"]:
                    break
                if unit["_backward_hooks"] or unit["_backward_pre_hooks"]:
                    break
                training.append(unit["training"])
        if len(training) != len(self._units):
            name = _cut_untraced(self, FusibleOperation.changes, *has_hooks(self._units))
            return run_cut(getattr(self, name), routing, input, extra_inputs, basic_op_kwargs)
        if self._owner is not None:
            training.append(self._owner.training)
        if routing.width is not None and (not input.ndim or input.shape[-1] != routing.width):
            self._refuse(input, extra_inputs)
        tensors: list[Tensor] = []
        try:
            for attributes, _, name in self._params if not compiling else ():
                if (param := attributes["_parameters"][name]) is None:
                    break
                tensors.append(param)
        except KeyError:
            pass
        if len(tensors) != len(self._params):
            tensors = self._read_params()
        if extra_inputs:
            if not all([isinstance(tensor, Tensor) for tensor in extra_inputs]):
                self._refuse(input, extra_inputs)
            tensors += extra_inputs
        autocast = None
        device = _CPU if input.is_cpu else input.device  # to make one, and to compare it, takes longer than to ask
        if compiling or _any_autocast():
            if input.dtype is not torch.float64 and not input.is_meta and torch.is_autocast_enabled(device.type):
                autocast = torch.get_autocast_dtype(device.type)
        settings = current.values
        if _functorch_active() or (forward_ad._current_level >= 0 and _any_dual(input, tensors)):
            settings = _differentiable(settings)
        grads: tuple[bool, ...] | None = None
        if torch.is_grad_enabled():
            grads = (input.requires_grad, *[t.requires_grad for t in tensors]) if tensors else (input.requires_grad,)
        key = (
            grads,
            input.dtype,
            device,
            autocast,
            tuple(training),
            manager.generation,
            FusibleOperation.changes,
            torch.are_deterministic_algorithms_enabled() if compiling else _deterministic(),
            compiling,
            tuple([tuple(kwargs) for kwargs in basic_op_kwargs]) if basic_op_kwargs else None,
            tuple([(t.dtype, t.device) for t in extra_inputs]) if extra_inputs else None,
            settings,
        )
        if compiling:
            program = getattr(self, _plan_untraced(self, *settings, *key[:-1]))
        else:
            last, program = self._last
            if key != last or program is None or ((facts := program.row_facts) and program.rows != _rows(facts, input)):
                program = self._program(key, input)
        if program.is_special:
            if isinstance(program, Cut):
                return run_cut(program, routing, input, extra_inputs, basic_op_kwargs)
            if not compiling:
                _refuse_checkpoint(program)
        if basic_op_kwargs and not program.double_backward and torch.is_grad_enabled():
            self._check_constants(basic_op_kwargs)
        for index, op in self._prepares:
            op.pre_fuser_forward(requires_grad=program.templates[index]["requires_grad"])
        if current.recorder is not None:
            current.recorder.record(self, program.plan)
        if program.double_backward:
            return run_differentiable(program, basic_op_kwargs, input, tensors)
        if compiling or autocast is not None:
            return _execute(program, basic_op_kwargs, input, tensors, autocast)
        try:
            if program.requires_grad:
                return apply_eager(program, basic_op_kwargs, input, *tensors)
            return run_forward(None, program, basic_op_kwargs, input, *tensors)
        except Exception:
            self._check_tensors(input.dtype, device, None, extra_inputs)  # says more than a kernel can
            raise

    __call__ = run

    def _read_params(self) -> list[Tensor]:
        """The parameters, as attributes: some are computed, or were replaced."""
        tensors: list[Tensor] = []
        for attributes, module, name in self._params:
            if attributes is _ELSEWHERE:
                module, name = module.param_source(name)
            tensor = getattr(module, name)
            if tensor is None:
                raise TypeError(f"{self._name()} expected a tensor as {type(module).__name__}.{name}, got None")
            tensors.append(tensor)
        return tensors

    # Planning

    def _program(self, key: tuple[Any, ...], input: Tensor | None) -> Program | Cut:
        with self._lock:
            self._capture()
            facts, programs = self._programs.get(key, ((), {}))  # one for each value of these facts about the rows
            program: Program | Cut | None = programs.get(_rows(facts, input))
            if program is None and any(why_apart(unit) for unit in self._units):
                program = getattr(self, _cut_untraced(self, FusibleOperation.changes))
                self._programs[key] = (), {(): program}
            elif program is None:
                # where torch.compile gave up on what calls it, it would trace planning by itself
                plan = _not_traced(self._plan) if "torch._dynamo" in sys.modules else self._plan
                program = plan(key, input)
                program.row_facts = tuple(sorted({*facts, *program.row_facts}))
                program.rows = _rows(program.row_facts, input)
                self._programs[key] = program.row_facts, {**programs, program.rows: program}
            self._programs.move_to_end(key)
            while len(self._programs) > _CACHE_SIZE:
                self._programs.popitem(last=False)
        self._last = key, program
        return program

    def _plan(self, key: tuple[Any, ...], input: Tensor | None) -> Program:
        """Make the program for a key."""
        grads, dtype, device, autocast, training, *_, compiling, kwargs, extras, settings = key
        self._check_tensors(dtype, device, autocast, extras or ())
        self._check_kwargs(kwargs)
        env = Environment(
            device=device,
            capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
            dtype=autocast or dtype,
            recipe=settings[2],
            training=any(training),
            requires_grad=grads is not None and any(grads),
            **{fact: _rows((fact,), input)[0] for fact in ("row_alignment", "rows")},
            deterministic=torch.are_deterministic_algorithms_enabled(),
            options=dict(settings[0]),
            compiling=compiling,
        )
        grads = grads or (False,) * (1 + len(self._routing.param_sources))
        before, current.values = current.values, settings  # ops ask for them; not set in tracing
        try:
            return self._compile(env, autocast, grads, kwargs, settings[1])
        finally:
            current.values = before

    def _compile(
        self,
        env: Environment,
        autocast: torch.dtype | None,
        grads: tuple[bool, ...],
        kwargs: Any,
        selection: str | None,
    ) -> Program:
        routing = self._routing
        names = kwargs or ((),) * len(routing.ops)
        boundary = self._boundary(env, grads)
        for i, op in enumerate(routing.ops):
            op.reset_recipe_state(recipe=env.recipe)
            if env.requires_grad and not env.options.get("double_backward"):
                self._check_attributes(i, op)
        sources = () if env.options.get("double_backward") else manager.sources(selection)
        manager.check_options(tuple(env.options.items()), selection)
        excluded: frozenset[tuple[Any, int, int]] = frozenset()
        while True:
            options: dict[str, Any] = dict(boundary=boundary, kwargs=names, excluded=excluded, widths=routing.widths)
            choice = choose(routing.ops, sources, env, **options)
            built = []
            for candidate in choice.taken:
                ops = routing.ops[candidate.start : candidate.stop]
                fused: Any = candidate.op
                try:
                    if fused is None:
                        fused = candidate.source.fusion.build(ops)  # type: ignore[union-attr]
                    if isinstance(fused, FusedOperation):
                        fused.planned(env)
                except Exception as error:
                    what = "build" if fused is None else "planned"
                    warn_about(candidate.source, f"its {what} raised {type(error).__name__}: {error}")
                    excluded |= {(candidate.source, candidate.start, candidate.stop)}
                    break
                check_expansion(candidate.source, fused, ops)
                built.append(dataclasses.replace(candidate, op=fused))
            else:
                choice = dataclasses.replace(choice, taken=tuple(built))
                return compile_program(routing, choice, env, autocast, grads=grads, boundary=boundary, kwargs=names)

    def _boundary(self, env: Environment, grads: tuple[bool, ...]) -> int:
        """The first op that takes part in the backward; the number of ops if none does."""
        routing = self._routing
        if not env.requires_grad:
            return len(routing.ops)
        if grads[0]:
            return 0
        params, extras = grads[1 : 1 + len(routing.param_sources)], grads[1 + len(routing.param_sources) :]
        wanting = {i for (i, _), wants in zip(routing.external_inputs, extras, strict=True) if wants}
        wanting |= {i for i, (first, last) in enumerate(routing.param_ranges) if any(params[first:last])}
        return min(wanting)

    # Refusing

    def _refuse(self, input: Any, extra_inputs: Sequence[Any]) -> NoReturn:
        """Say what is wrong with the arguments of a call."""
        routing, who = self._routing, f"{self._name()} expected"
        if len(extra_inputs) != self.num_extra_inputs:
            wanting = ", ".join(routing.name(i) for i, _ in routing.external_inputs) or "no op takes one"
            raise ValueError(f"{who} {self.num_extra_inputs} extra inputs, got {len(extra_inputs)} ({wanting})")
        if not isinstance(input, Tensor):
            raise TypeError(f"{who} a tensor, got {type(input).__name__}")
        if not all(isinstance(tensor, Tensor) for tensor in extra_inputs):
            raise TypeError(f"{who} tensors as extra inputs, got {', '.join(type(t).__name__ for t in extra_inputs)}")
        raise ValueError(f"{who} {routing.width} features in the last dimension, got shape {tuple(input.shape)}")

    def _check_tensors(
        self, dtype: torch.dtype, device: torch.device, autocast: torch.dtype | None, extras: Sequence[Any]
    ) -> None:
        """Refuse dtypes and devices that do not go together."""
        routing, chain = self._routing, self._name()
        if not dtype.is_floating_point:
            raise TypeError(f"{chain} expected a floating-point input, got {dtype}")
        for i, op in enumerate(routing.ops):
            for module, name in routing.param_sources[slice(*routing.param_ranges[i])]:
                param = module._parameters.get(name)  # a parametrized one is not computed just to look at it
                if param is None:
                    continue
                who = f"{routing.name(i)} of {chain}"
                if param.device != device:
                    raise ValueError(f"{who} has its {name} on {param.device}, the input is on {device}")
                if op.params_in_compute_dtype and autocast is None and param.dtype != dtype:
                    raise TypeError(f"{who} expected {param.dtype}, the dtype of its {name}, got an input of {dtype}")
            self._check_parameters(i)
        for (i, k), extra in zip(routing.external_inputs, extras, strict=True):
            extra_dtype, extra_device = (extra.dtype, extra.device) if isinstance(extra, Tensor) else extra
            who = f"extra input {k} of {routing.name(i)}"
            if extra_dtype.is_complex:
                raise TypeError(f"{who} expected a floating-point, integer or bool tensor, got {extra_dtype}")
            if extra_device != device:
                raise ValueError(f"{who} is on {extra_device}, the input is on {device}")
            strict = routing.ops[i].params_in_compute_dtype and autocast is None
            if strict and extra_dtype.is_floating_point and extra_dtype != dtype:
                raise TypeError(f"{who} expected {dtype} as the input, got {extra_dtype}")

    def _check_parameters(self, index: int) -> None:
        """Refuse parameters whose gradients would be lost, since the op did not have them at the end of its init."""
        op = self._routing.ops[index]
        names = op.param_names or ()
        if op is self._owner and own_call(op):  # which uses them
            return
        for name, _ in op.named_parameters():
            derived = name.startswith(("parametrizations.", *(f"{known}_" for known in names)))  # weight_orig, weight_g
            if name not in names and not derived and "_owner" not in vars(op):
                who = f"{self._routing.name(index)} of {self._name()}"
                raise TypeError(
                    f"{who} has a parameter {name} that it does not take, or that it got after its __init__: its "
                    "gradient would be lost; register it in __init__, and use it in op_forward or in its own forward"
                )

    def _check_kwargs(self, kwargs: Any) -> None:
        if kwargs is None:
            return
        if len(kwargs) != (count := len(self._routing.ops)):
            raise ValueError(f"{self._name()} expected keyword arguments for {count} basic ops, got {len(kwargs)}")
        for i, names in enumerate(kwargs):
            takes = kwarg_names(self._routing.ops[i])
            for name in names:
                if takes is not None and name not in takes:
                    who, known = f"{self._routing.name(i)} of {self._name()}", ", ".join(takes) or "none"
                    raise TypeError(f"{who} does not take the keyword argument {name!r}; it takes {known}")

    def _check_attributes(self, index: int, op: FusibleOperation) -> None:
        """Refuse tensors on an op whose gradient would be lost, since they are no parameters."""
        for name, value in vars(op).items():
            if isinstance(value, Tensor) and value.requires_grad and value.is_leaf:
                if name not in (op.param_names or ()):
                    what = f"{self._routing.name(index)} of {self._name()} has the tensor {name!r}, which requires grad"
                    raise TypeError(f"{what} and would get none: make it an nn.Parameter, and give its gradient")

    def _check_constants(self, kwargs: Sequence[dict[str, Any]]) -> None:
        """Refuse tensors whose gradient would be lost, since only parameters and extra inputs have one."""
        for i, given in enumerate(kwargs):
            for name, value in given.items():
                if any(tensor.requires_grad for tensor in _tensors_in(value)):
                    who = f"{self._routing.name(i)} of {self._name()} got a tensor that requires grad as {name!r}"
                    raise TypeError(f"{who}, and a keyword argument gets no gradient: use an extra input, or detach it")

    def _name(self) -> str:
        """The chain as error messages call it."""
        return "chain [" + ", ".join(op_class(op).__name__ for op in self.ops) + "]"


def _refuse_checkpoint(program: Program) -> None:
    """Refuse a recipe inside of a checkpoint that would compute the forward again without it, or update state twice."""
    if (current.recorder is not None and current.recorder.restoring) or not (depth := checkpoint_frames()):
        return
    stateful = any(q.state_names for ctx in program.templates for kind in ctx["quantizers"] for q in kind)
    if depth != current.recipe_depth or stateful:
        raise RuntimeError(
            "a chain under a recipe inside of torch.utils.checkpoint: the recomputation would not know the recipe, "
            "or would update its state twice; pass use_reentrant=False, context_fn=opfuse.checkpoint_contexts"
        )


def _any_dual(input: Tensor, tensors: Sequence[Tensor]) -> bool:
    """Whether one of the tensors carries a tangent of forward-mode AD, which a kernel would lose."""
    unpack: Any = forward_ad.unpack_dual
    return any(unpack(tensor).tangent is not None for tensor in (input, *tensors))


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in a tensor, list, tuple or dict, however deep."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple, Mapping)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors_in(item)


def _differentiable(settings: Settings) -> Settings:
    return ((*settings[0], ("double_backward", True)), *settings[1:])


def _rows(facts: tuple[str, ...], input: Tensor | None) -> tuple[Any, ...]:
    """Facts about the number of rows, as :class:`Environment` names them."""
    alignment, floor = 1, None
    if input is not None:
        rows = input.shape[:-1].numel()
        alignment, floor = math.gcd(rows, 16), rows and 1 << rows.bit_length() - 1
    return tuple([alignment if fact == "row_alignment" else floor for fact in facts])


def _plan_untraced(fuser: OperationFuser, options: Options, selection: str | None, recipe: Any, *key: Any) -> str:
    """Plan while ``torch.compile`` traces: the call is a constant of the graph, and so is each argument.

    Returns:
        The fuser's attribute that holds the program, where traced code can read it by a name it can guard.
    """
    for module, name in fuser._routing.param_sources:
        if nn.utils.parametrize.is_parametrized(module, name):
            kinds = [type(p).__name__ for p in module.parametrizations[name]]  # type: ignore[index]
            if "_SpectralNorm" in kinds:
                raise RuntimeError(
                    f"{fuser._name()}: spectral_norm on {name} updates its state whenever the parameter is read, "
                    "which torch.compile does not see; run this chain in eager mode"
                )
    program = fuser._program((*key, (options, selection, recipe)), None)
    name = f"_traced_{id(program)}"
    setattr(fuser, name, program)
    return name


_plan_untraced._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compiler.assume_constant_result


def _cut_untraced(fuser: OperationFuser, changes: int, *hooked: bool) -> str:
    """Cut a chain at the ops that run through their own call; see :func:`_plan_untraced`.

    Args:
        fuser: Of the chain.
        changes: Counts what may have changed about that; the code that is traced is guarded by it.
        *hooked: Which ops have hooks, for the same reason.
    """
    apart = [op for op in fuser._units if why_apart(op)]
    name = "_cut_" + "".join("01"[op in apart] for op in fuser._units)
    if not hasattr(fuser, name):
        setattr(fuser, name, cut(fuser.ops, fuser._routing, apart, lambda ops: OperationFuser(ops, part=True)))
    return name


_cut_untraced._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compiler.assume_constant_result


def _execute(
    program: Program, kwargs: Kwargs | None, x: Tensor, tensors: Sequence[Tensor], autocast: torch.dtype | None
) -> Any:
    if autocast is not None:  # the ops cast themselves
        with torch.autocast(program.autocast_device, enabled=False):
            return _execute(program, kwargs, x, tensors, None)
    if program.requires_grad:
        return Pipeline.apply(program, kwargs, x, *tensors)  # type: ignore[no-untyped-call]
    return run_forward(None, program, kwargs, x, *tensors)


def register_forward_fusion(fusion: FusionLike, prepend: bool = False) -> Registration:
    """Add a forward fusion in code.

    Args:
        fusion: A :class:`Fusion`, or a function ``func(ops, *, recipe) -> ops`` that replaces some of the
            basic ops it is given by fused ops.
        prepend: Let it choose before every fusion but those of the plugins that the user listed.

    Returns:
        A handle with ``unregister()``.
    """
    return manager.register_fusion("forward", fusion, prepend)


def register_backward_fusion(fusion: FusionLike, prepend: bool = False) -> Registration:
    """Add a backward fusion in code; see :func:`register_forward_fusion`."""
    return manager.register_fusion("backward", fusion, prepend)


def register_forward_backward_fusion(fusion: FusionLike, prepend: bool = False) -> Registration:
    """Add a joint fusion of both passes in code; see :func:`register_forward_fusion`."""
    return manager.register_fusion("joint", fusion, prepend)
