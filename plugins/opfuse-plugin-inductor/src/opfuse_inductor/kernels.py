"""From a run of ops to compiled functions: tracing, compiling, and the cache of what was compiled.

The ops' own ``op_forward`` and ``op_backward`` are traced with fake tensors into a graph of torch
operations, and Inductor compiles the graph: C++ on a CPU, Triton on a GPU. A kernel sees matrices
``(rows, features)``; the number of rows is a symbol, so one kernel serves them all. Where Inductor
decides something by the number of rows, it leaves a guard, and the rows that it excludes get a
kernel of their own.

A kernel holds no tensor and no op of the model that it was made for, so models of equal structure
share it; Inductor's cache on disk serves other processes.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import threading
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from opfuse_convert.grammar import Unreadable
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from opfuse import BasicOperation, OperationContext, PluginWarning, has_same_math
from opfuse import ops as built_in
from opfuse.ops.authoring import ModuleCache, wide

from .tracing import HINT, Spec, fake, faked, prune, trace

logger = logging.getLogger("opfuse.inductor")

CACHE_SIZE = 256
"""How many plans, and how many kernels, are kept in a process; the least recently used go first."""

MAX_VARIANTS = 4
"""How many kernels one graph may need for different numbers of rows."""

PATIENCE = 1.0
"""Seconds after which a compilation is announced."""

Variant = tuple[Callable[[int], bool], Callable[..., Any]]
"""The numbers of rows that it is for, and the function that runs."""

_skips_probes = True
"""Whether Inductor takes for granted that the C++ compiler knows the processor's instructions.

Otherwise it first compiles and loads a file for each set of them, which takes longer than the
kernels do. The first kernel that fails to compile ends it, and is compiled again.
"""

_lock = threading.RLock()  # Inductor compiles one thing at a time
_cache: OrderedDict[Any, Any] = OrderedDict()


def cached(key: Any, make: Callable[[], Any]) -> Any:
    """The result of ``make`` for this key, in this process."""
    with _lock:
        if key not in _cache:
            _cache[key] = make()
            while len(_cache) > CACHE_SIZE:
                _cache.popitem(last=False)
        _cache.move_to_end(key)
        return _cache[key]


# Compiling


class NotCompiled(RuntimeError):
    """A kernel that overwrites one of its inputs cannot be compiled."""


class CompiledKernel:
    """A function of tensors, traced once, whose graph is compiled when it is first called.

    Args:
        title: Its name in messages.
        function: Takes a tensor for each of ``specs``, returns tensors by name.
        specs: Its inputs.
        device: Where it runs.
        backend: ``"inductor"``, or ``"eager"``: run the graph as it was traced.

    Attributes:
        seconds: Time spent tracing and compiling so far.
        used: Which inputs the graph reads.
        names: The names of the tensors that the function returns.
        in_place: Whether it overwrites one of them.
        failed: Whether Inductor could not compile it, so that it runs as it was traced.
        of: The object that it was made for.
        slots: For each of them whether it is one of the inputs, and which input, or which output of
            the graph.
    """

    def __init__(
        self,
        title: str,
        function: Callable[..., Any],
        specs: Sequence[Spec],
        device: torch.device,
        backend: str,
    ) -> None:
        self.title = title
        self.seconds = 0.0
        self.names: tuple[Any, ...] = ()
        self.in_place = self.failed = False
        self.of: Any = ()
        self._specs, self._device, self._backend = tuple(specs), device, backend
        self._variants: list[Variant] = []
        self._by_rows: dict[int, Callable[..., Any]] = {}
        self._threads = torch.get_num_threads()

        def named(*tensors: Tensor) -> list[Tensor]:
            result = function(*tensors)
            self.names = tuple(result)
            return list(result.values())

        with announced(title, self):
            graph, _, env = trace(named, specs, device, HINT)
        if env.guards:
            raise Unreadable(f"it depends on the number of rows ({env.guards[0].expr})")
        self.used, self.slots = prune(graph)
        self._graph = graph

    @property
    def compiled(self) -> bool:
        """Whether it has been called."""
        return bool(self._variants)

    def __call__(self, tensors: Sequence[Tensor | None], rows: int) -> list[Any]:
        """The results of the function.

        Args:
            tensors: A contiguous tensor for each spec; those that are not ``used`` may be None.
            rows: The number of rows.
        """
        read = [tensors[i] for i in self.used]
        if is_dynamo_compiling():  # compiled autograd traces a backward: let it see the operations
            computed = self._graph(*read)
        else:
            computed = (self._by_rows.get(rows) or self._for_rows(rows))([rows, *read])
        return [tensors[i] if is_input else computed[i] for is_input, i in self.slots]

    def _for_rows(self, rows: int) -> Callable[..., Any]:
        with _lock:
            run = next((run for holds, run in self._variants if holds(rows)), None)
            if run is None:
                hint = HINT if not self._variants and rows <= HINT else max(rows, 2)
                hint = hint if len(self._variants) < MAX_VARIANTS else rows
                before = self.seconds
                with announced(self.title, self):
                    try:
                        holds, run = self._compile(hint)
                    except Exception as error:
                        holds, run = self._as_traced(error)
                what = "failed to compile" if self.failed else "compiled"
                logger.info("%s %s in %.1f s", what, self.title, self.seconds - before)
                self._variants.append((holds, run))
                if not holds(rows):  # the hint was for more rows
                    return self._for_rows(rows)
            if len(self._by_rows) > 1024:
                self._by_rows.clear()
            self._by_rows[rows] = run
            return run

    def _as_traced(self, error: Exception | None = None) -> Variant:
        """The graph as it was traced, with a warning if an error is the reason."""
        if error is not None:
            if self.in_place:  # the caller has another way
                raise NotCompiled(self.title) from error
            outcome = f"Inductor does not compile {self.title}, which runs as it was traced"
            switch = "OPFUSE_PLUGINS=-inductor runs without this plugin"
            lines = str(error).splitlines()
            told = [line for line in lines if "error:" in line] or lines  # the C++ compiler's own
            text = f"{outcome}; {switch}: {type(error).__name__}: {' '.join(told)[:500]}"
            warnings.warn(PluginWarning(text), stacklevel=3)
            self.failed = True
        return lambda rows: True, lambda args: self._graph(*args[1:])

    def _compile(self, hint: int) -> Variant:
        if self._backend == "eager" or (self.slots and all(is_input for is_input, _ in self.slots)):
            return self._as_traced()
        specs = [self._specs[i] for i in self.used]
        graph, inputs, env = trace(self._graph, specs, self._device, hint, decompose=True)
        used, slots = prune(graph)  # which has already been done
        assert [*used] == [*range(len(specs))]
        assert [*slots] == [(False, i) for i in range(len(slots))]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of what Inductor imports
            from torch._inductor import config
            from torch._inductor.compile_fx import compile_fx_inner

        # Inductor's cache on disk keeps those guards that it can write in terms of numbers among
        # the inputs
        pairs = zip(specs, inputs, strict=True)
        rows = next(fake.shape[0] for spec, fake in pairs if spec.shape is None)
        with graph.graph.inserting_before(next(iter(graph.graph.nodes))):
            graph.graph.placeholder("rows").meta["val"] = rows
        graph.recompile()
        settings: dict[str, Any] = {"cpp.threads": self._threads}
        skips = _skips_probes and config.cpp.vec_isa_ok is None
        settings |= {"cpp.vec_isa_ok": True} if skips else {}
        try:
            with torch._guards.tracing(torch._guards.TracingContext(inputs[0].fake_mode)):
                with config.patch(settings), warnings.catch_warnings():
                    warnings.simplefilter("ignore", DeprecationWarning)
                    run: Any = compile_fx_inner(graph, [rows, *inputs])
        except Exception:
            if not skips:
                raise
            _probe_from_now_on()
            return self._compile(hint)
        guards = [(guard.expr, tuple(guard.expr.free_symbols)) for guard in env.guards]

        def holds(rows: int) -> bool:
            return all(bool(e.subs(dict.fromkeys(symbols, rows))) for e, symbols in guards)

        return holds, run


def _probe_from_now_on() -> None:
    """Let Inductor find out again which instructions the C++ compiler knows."""
    global _skips_probes
    from torch._inductor import cpu_vec_isa

    _skips_probes = False
    cpu_vec_isa.valid_vec_isa_list.cache_clear()
    for isa in cpu_vec_isa.supported_vec_isa_list:
        if hasattr(type(isa).__bool__, "cache_clear"):
            type(isa).__bool__.cache_clear()


@contextlib.contextmanager
def announced(title: str, kernel: CompiledKernel) -> Iterator[None]:
    """Count the time on ``kernel``, and log a line when it takes long."""
    started = time.perf_counter()
    hint = "the log level ERROR of %r silences this"
    message = f"opfuse-plugin-inductor is compiling %s, or loading it; {hint}"
    timer = threading.Timer(PATIENCE, logger.warning, (message, title, logger.name))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        kernel.seconds += time.perf_counter() - started


# Runs of ops


class Flags(NamedTuple):
    """The attributes that the fuser writes on a context, and that the ops read."""

    requires_grad: bool
    input_requires_grad: bool
    param_requires_grad: tuple[bool, ...]
    dtype: torch.dtype | None

    @classmethod
    def of(cls, ctx: OperationContext) -> Flags:
        """The attributes of a context."""
        return cls(ctx.requires_grad, ctx.input_requires_grad, ctx.param_requires_grad, ctx.dtype)


class Given(NamedTuple):
    """The tensors that the ops of a run read besides what passes from op to op: a list per op.

    Attributes:
        params: Parameters.
        extras: Extra inputs; None where the producer is in the run.
        masks: The mask of a dropout.
        scales: The number of a ConstantScale.
    """

    params: list[list[Any]]
    extras: list[list[Any]]
    masks: list[list[Any]]
    scales: list[list[Any]]

    def flat(self) -> list[Any]:
        """All tensors that are present."""
        return [item for kind in self for group in kind for item in group if item is not None]

    def rebuilt(self, items: Sequence[Any]) -> Given:
        """The same structure with other items."""
        left = iter(items)

        def fill(group: list[Any]) -> list[Any]:
            return [item if item is None else next(left) for item in group]

        return Given(*([fill(group) for group in kind] for kind in self))


class Run:
    """A run of ops as functions of tensors: the source of one kernel per pass.

    Args:
        ops: The basic ops; they are copied, without their parameters.
        sources: For an extra input whose producer is in the run: ``(op, slot)`` -> ``(op, slot)``.
        flags: Per op.
        wanted: Ops whose extra input needs a gradient, for those that ask.
    """

    def __init__(
        self,
        ops: Sequence[BasicOperation],
        sources: dict[tuple[int, int], tuple[int, int]],
        flags: Sequence[Flags],
        wanted: Collection[int] = (),
    ) -> None:
        self.sources = dict(sources)
        self.flags = tuple(flags)
        self.ops = []
        for i, op in enumerate(ops):
            twin = twin_of(op)
            # traced tensors do not tell; those out of a channel count as wanted
            if isinstance(op, built_in.ScaledActivation):
                vars(twin)["wants_gradient"] = lambda scales, answer=i in wanted: answer
            self.ops.append(twin)

    def forward(
        self,
        x: Any,
        given: Given,
        start: int = 0,
        stop: int | None = None,
        made: dict[Any, Any] | None = None,
    ) -> Passed:
        """Run the ops from ``start`` to ``stop``, each in a context of its own.

        ``made`` are the extra outputs of the ops before.
        """
        passed = Passed()
        passed.extras |= made or {}
        for i in range(start, len(self.ops) if stop is None else stop):
            op, ctx = self.ops[i], self.context(i, given)
            passed.inputs[i], passed.contexts[i] = x, ctx
            if isinstance(op, built_in.Dropout):
                (mask,) = given.masks[i] or (None,)
                ctx.to_save, ctx.p = (mask if ctx.input_requires_grad else None,), op.p
                x = x if mask is None else x * mask * (1 / (1 - op.p) if op.p < 1 else 0.0)
            elif isinstance(op, built_in.MakeExtraOutput):
                passed.extras[i, 0] = x
            elif isinstance(op, built_in.AddExtraInput):
                x = op.sum(x, self.extras_of(i, given, passed.extras)[0])
            elif isinstance(op, built_in.ScaledActivation):
                extras = self.extras_of(i, given, passed.extras)
                arguments = {"basic_op_extra_inputs": [extras], "basic_op_kwargs": [{}]}
                x, _ = op.fuser_forward([ctx], x, **arguments)
            else:
                if isinstance(op, built_in.ConstantScale):
                    vars(op)["scale"] = given.scales[i][0]
                x = op.op_forward(ctx, x)
        passed.output = x
        return passed

    def context(self, i: int, given: Given) -> OperationContext:
        """A new context of op ``i``."""
        ctx = OperationContext()
        vars(ctx).update(self.flags[i]._asdict())
        ctx.params = tuple(given.params[i])
        return ctx

    def extras_of(self, i: int, given: Given, made: dict[tuple[int, int], Any]) -> list[Any]:
        """The extra inputs of op ``i``."""
        return [made[self.sources[i, k]] if e is None else e for k, e in enumerate(given.extras[i])]

    def backward(
        self,
        contexts: dict[int, OperationContext],
        dy: Any,
        grads: dict[tuple[int, int], Any],
        given: Given,
    ) -> tuple[Any, dict[int, list[Any]], dict[tuple[int, int], Any]]:
        """The gradients of the input, of parameters by op, and of extra inputs from outside."""
        grads, param_grads, extra_grads = dict(grads), {}, {}
        for i in reversed(range(len(self.ops))):
            op, ctx = self.ops[i], contexts[i]
            if not ctx.requires_grad:
                return None, param_grads, extra_grads
            ctx.saved_tensors = ctx.to_save
            if op.num_extra_inputs or op.num_extra_outputs:
                outputs = [grads.get((i, k)) for k in range(op.num_extra_outputs)]
                dy, _, (mine,) = op.fuser_backward([ctx], dy, basic_op_grad_extra_outputs=[outputs])
                for k, grad in enumerate(mine):
                    source = self.sources.get((i, k))
                    if source is None:
                        extra_grads[i, k] = grad
                    elif grad is not None:
                        grads[source] = grad if grads.get(source) is None else grads[source] + grad
            else:
                dy, of_params = op.op_backward(ctx, dy)
                param_grads[i] = list(of_params or ())
        return dy, param_grads, extra_grads


def twin_of(op: Any) -> Any:
    """A copy to trace, without parameters."""
    twin = copy.copy(op)
    modules = {name: twin_of(child) for name, child in op.named_children()}
    vars(twin).update(_parameters={}, _modules=modules, _cache=ModuleCache())
    vars(twin).pop("_sources", None)
    if has_same_math(op, built_in.GatedActivation, "backward_value"):
        vars(twin)["backward_value"] = functools.partial(joined_gradient, twin)
    return twin


def joined_gradient(
    op: built_in.GatedActivation, grad_output: Tensor, x: Tensor, out: Tensor | None = None
) -> Tensor:
    """``op.backward_value(grad_output, x)``, with the halves of its result joined.

    In eager mode that method writes into the halves.
    """
    dtype = wide(x.dtype)
    a, b = op.split(x)
    a, b, dy = a.to(dtype), b.to(dtype), grad_output.to(dtype)
    slope = op.linear_derivative(b)
    da = op.gate_gradient(dy * op.linear_value(b), a)
    db = op.value(a) * (dy if slope is None else dy * slope)
    return op.join(da.to(x.dtype), db.to(x.dtype))


class Passed:
    """The state after a forward pass: inputs and contexts of the ops, extra outputs, output."""

    def __init__(self) -> None:
        self.inputs: dict[int, Any] = {}
        self.contexts: dict[int, OperationContext] = {}
        self.extras: dict[tuple[int, int], Any] = {}
        self.output: Any = None


_CHEAP = built_in.Bias, built_in.ConstantScale, built_in.Identity
"""To do these again is cheaper than to write the result."""


def _spec_of(matrix: Tensor) -> Spec:
    return Spec(matrix.dtype, matrix.shape[-1])


class Plan:
    """The kernels of a run of ops, for tensors of certain dtypes and widths.

    The forward keeps as little as the backward needs to compute the rest again: the input of the
    first op that saves something, tensors that enter the run after it, and the norms' number per
    row.

    Args:
        run: The ops.
        title: Their name in messages.
        key: The key of their kernels, equal for equal runs.
        x: The input.
        given: A spec, or None, for each tensor that enters.
        device: Where they are.
        backend: See :class:`CompiledKernel`.

    Attributes:
        specs: The input, and what enters.
        outputs: The extra outputs, as ``(op, number)``.
        needs_grad: Whether there is a backward.
        saves: What the backward reads of what is kept and what enters, counted through.
        specs_saved: The specs of these.
        keeps: Where the forward finds them: whether it is one of its inputs, and which, or which of
            its results.
        recomputes: Whether the output can be computed again from what the backward reads and
            parameters.
    """

    def __init__(
        self,
        run: Run,
        title: str,
        key: Any,
        x: Spec,
        given: Given,
        device: torch.device,
        backend: str,
    ) -> None:
        self._run, self._title, self._key = run, title, key
        self._given, self._device, self._backend = given, device, backend
        self._flat = given.flat()
        self.specs = [x, *self._flat]
        self.needs_grad = any(flags.requires_grad for flags in run.flags)
        first_is_bias = isinstance(run.ops[0], built_in.Bias)
        self._outside_bias = device.type == "cpu" and self.needs_grad and first_is_bias
        self._analyse()
        keeps = self._start, *self._carried, *self._statistics, *self._kept_specs
        forward_key = ("forward", key, tuple(flags.dtype for flags in run.flags), keeps, backend)
        self._forward = self._kernel(forward_key, "forward", self._forward_function, self.specs)
        self._backwards: dict[Any, CompiledKernel] = {}
        self._again: CompiledKernel | None = None
        self.recomputes = False
        self._latest: tuple[Any, Any] = (None, None)
        self.saves: tuple[int, ...] = ()
        self.specs_saved: tuple[Spec, ...] = ()
        self.keeps: tuple[tuple[bool, int], ...] = ()
        if self.needs_grad:
            kernel = self._backward(self._y, dict(zip(self.outputs, self._extras, strict=True)))
            entering = [*self._kept_specs, *self._flat]
            numbers = sum(map(len, given.scales))  # read again in the backward
            self.saves = tuple(i for i in kernel.used if i < len(entering) - numbers)
            kept = [slot if slot[0] else (False, n) for n, slot in enumerate(self._forward.slots)]
            kept = kept[1 + len(self.outputs) :]
            kept += [(True, 1 + n) for n in range(len(self._flat))]
            self.saves += self._parameters_to_recompute()
            self.specs_saved = tuple(entering[i] for i in self.saves)
            self.keeps = tuple(kept[i] for i in self.saves)

    def _kernel(
        self, key: Any, what: str, function: Callable[..., Any], specs: Sequence[Spec]
    ) -> CompiledKernel:
        """The kernel for a key, made if there is none: the forward, the backward or the output."""
        given = f"the {what} of {self._title}", function, specs, self._device, self._backend
        return cached(key, lambda: CompiledKernel(*given))  # type: ignore[no-any-return]

    def _analyse(self) -> None:
        """Find out what the ops save, and what of it must be kept to compute the rest."""
        with faked(HINT) as (rows, _):
            x, *items = [fake(spec, rows, self._device) for spec in self.specs]
            given = self._given.rebuilt(items)
            passed = self._run.forward(x, given)
            known = {id(item): n for n, item in enumerate(items)}
            left = [passed.contexts[i].to_save or () for i in range(len(self._run.ops))]
            self._saved = [
                [None if t is None else known.get(id(t), -1) for t in tensors] for tensors in left
            ]
            self._attributes = [
                {n: v for n, v in vars(ctx).items() if not isinstance(v, Tensor)}
                | {"params": (), "to_save": None}
                for ctx in passed.contexts.values()
            ]
            reading = [i for i, saved in enumerate(self._saved) if -1 in saved]
            self._start, self._stop = (reading[0], reading[-1] + 1) if reading else (0, 0)
            while self._start and isinstance(self._run.ops[self._start - 1], _CHEAP):
                self._start -= 1
            inside = range(self._start, self._stop)
            sources = {source for (i, _), source in self._run.sources.items() if i in inside}
            self._carried = sorted(source for source in sources if source[0] < self._start)
            self._statistics = [  # as small as they are, they are kept too, if the ops keep them
                (i, k)
                for i in inside
                for k, t in enumerate(left[i])
                if self._saved[i][k] == -1 and t.shape[-1] == 1 < passed.inputs[i].shape[-1]
            ]
            kept = self._kept(passed) if self.needs_grad else []
            self.outputs = sorted(passed.extras)
            self._kept_specs = list(map(_spec_of, kept))
            self._y = _spec_of(passed.output)
            self._extras = [_spec_of(passed.extras[slot]) for slot in self.outputs]

    def _kept(self, passed: Passed) -> list[Any]:
        if self._stop == self._start:
            return []
        op, z = self._run.ops[self._start], passed.inputs[self._start]
        left = passed.contexts[self._start].to_save or ()
        saved = dict(zip(op.saved_names or (), left, strict=False)).get("input")
        if saved is not None and saved.dtype.itemsize < z.dtype.itemsize:  # it casts first
            z = saved
        statistics = [(passed.contexts[i].to_save or ())[k] for i, k in self._statistics]
        return [z, *[passed.extras[slot] for slot in self._carried], *statistics]

    def _forward_function(self, x: Any, *items: Any) -> dict[Any, Any]:
        passed = self._run.forward(x, self._given.rebuilt(items))
        kept = self._kept(passed) if self.needs_grad else []
        made = {"y": passed.output, **{slot: passed.extras[slot] for slot in self.outputs}}
        return made | dict(enumerate(kept))

    def forward(self, items: Sequence[Tensor], rows: int) -> list[Any]:
        """The output, the extra outputs, and what is kept."""
        return self._forward(items, rows)

    def _backward(
        self, dy: Spec, grads: dict[tuple[int, int], Spec], in_place: bool = False
    ) -> CompiledKernel:
        """The kernel for incoming gradients like these.

        With ``in_place`` it overwrites ``dy``, where that can be.
        """
        kept = len(self._kept_specs)
        after = kept + len(self._flat)
        norms = built_in.RMSNorm, built_in.L2Normalization
        in_place = in_place and not any(isinstance(op, norms) for op in self._run.ops)
        if in_place:
            kernel = self._backward(dy, grads)
            slots = dict(zip(kernel.names, kernel.slots, strict=True))
            fits = (dy.dtype, dy.width) == (self.specs[0].dtype, self.specs[0].width)
            if not fits or slots.get("x", (True, 0))[0] or (True, after) in slots.values():
                return kernel
        key = dy, tuple(grads.items()), in_place
        if key not in self._backwards:
            specs = [*self._kept_specs, *self._flat, dy, *grads.values()]

            def function(*tensors: Any) -> dict[Any, Any]:
                given = self._given.rebuilt(tensors[kept:after])
                contexts = self._again_from(tensors[:kept], tensors[kept:after], given)
                incoming = dict(zip(grads, tensors[after + 1 :], strict=True))
                dx, params, extras = self._run.backward(contexts, tensors[after], incoming, given)
                found = {"x": dx}
                for i, of_op in params.items():
                    found |= {("param", i, k): grad for k, grad in enumerate(of_op)}
                found |= {("extra", *slot): grad for slot, grad in extras.items()}
                if in_place:
                    tensors[after].copy_(found.pop("x"))
                return {name: grad for name, grad in found.items() if grad is not None}

            full = ("backward", self._key, self._run.flags, tuple(self.specs), key, self._backend)
            self._backwards[key] = self._kernel(full, "backward", function, specs)
            self._backwards[key].in_place = in_place
            self._backwards[key].of = dy, grads
        return self._backwards[key]

    def _parameters_to_recompute(self) -> tuple[int, ...]:
        """Make the kernel that computes the output again.

        The result says what it reads that the backward does not.
        """
        inner = self._run.sources.items()
        behind = {source for (i, _), source in inner if i >= self._start > source[0]}
        if self._stop == self._start or not behind <= set(self._carried):
            return ()
        key = "again", self._key, self._run.flags, tuple(self.specs), self._backend
        specs = [*self._kept_specs, *self._flat]
        self._again = self._kernel(key, "output", self._output_again, specs)
        first = len(self._kept_specs)
        parameters = range(first, first + sum(map(len, self._given.params)))
        scales = range(len(specs) - sum(map(len, self._given.scales)), len(specs))
        more = tuple(i for i in self._again.used if i not in self.saves and i not in scales)
        self.recomputes = all(i in parameters for i in more)
        return more if self.recomputes else ()

    def _output_again(self, *tensors: Any) -> dict[Any, Any]:
        """The output, with the numbers per row.

        These make it the forward of a run that begins here, so that both are compiled once.
        """
        count = len(self._kept_specs)
        kept, given = tensors[:count], self._given.rebuilt(tensors[count:])
        made = dict(zip(self._carried, kept[1:], strict=False))
        passed = self._run.forward(kept[0], given, self._start, None, made)
        numbers = [(passed.contexts[i].to_save or ())[k] for i, k in self._statistics]
        return {"y": passed.output} | dict(enumerate(numbers))

    def recompute(self, saved: Sequence[Tensor], numbers: Any, rows: int) -> Tensor:
        """The output again."""
        assert self._again is not None
        y: Tensor = self._again([*self._saved_tensors(saved, numbers), *numbers], rows)[0]
        return y

    def _saved_tensors(self, saved: Sequence[Tensor], numbers: Any) -> list[Any]:
        """What is kept and what enters, where it was saved."""
        tensors: list[Any] = [None] * (len(self._kept_specs) + len(self._flat) - len(numbers))
        for i, tensor in zip(self.saves, saved, strict=True):
            tensors[i] = tensor
        return tensors

    def _again_from(
        self, kept: Sequence[Any], items: Sequence[Any], given: Given
    ) -> dict[int, OperationContext]:
        """Contexts as the forward left them, computed again where that is needed."""
        contexts: dict[int, OperationContext] = {}
        for i, (saved, attributes) in enumerate(zip(self._saved, self._attributes, strict=True)):
            contexts[i] = ctx = OperationContext()
            vars(ctx).update(attributes)
            if given.scales[i]:
                ctx.scale = given.scales[i][0]
            if -1 not in saved:
                ctx.to_save = tuple(None if n is None else items[n] for n in saved)
        if self._stop > self._start:
            made = dict(zip(self._carried, kept[1:], strict=False))
            passed = self._run.forward(kept[0], given, self._start, self._stop, made)
            contexts |= {i: passed.contexts[i] for i in range(self._start, self._stop)}
            for (i, k), tensor in zip(self._statistics, kept[1 + len(made) :], strict=True):
                saved = contexts[i].to_save or ()
                contexts[i].to_save = (*saved[:k], tensor, *saved[k + 1 :])
        if self._outside_bias:
            contexts[0].param_requires_grad = (False,)
        return contexts

    def backward(
        self,
        saved: Sequence[Tensor],
        dy: Tensor,
        grads: dict[tuple[int, int], Tensor],
        numbers: Any,
        rows: int,
        owns_dy: bool = False,
    ) -> dict[Any, Any]:
        """The gradients that exist.

        Their names are ``"x"``, ``("param", op, number)`` and ``("extra", op, number)``.
        """
        latest, kernel = self._latest  # at once: other threads write it
        key = owns_dy, dy.dtype, [(slot, grad.dtype) for slot, grad in grads.items()]
        if key != latest:
            specs = {slot: Spec(grad.dtype, grad.shape[-1]) for slot, grad in grads.items()}
            kernel = self._backward(Spec(dy.dtype, dy.shape[-1]), specs, owns_dy)
            self._latest = key, kernel
        tensors = self._saved_tensors(saved, numbers)
        given = [*tensors, *numbers, dy, *grads.values()]
        try:
            results = kernel(given, rows)
        except NotCompiled:
            (of_dy, of_grads), kernel = kernel.of, self._backward(*kernel.of)
            self._latest = key, kernel
            # and do not try again
            self._backwards[of_dy, tuple(of_grads.items()), True] = kernel
            results = kernel(given, rows)
        found = dict(zip(kernel.names, results, strict=True))
        if kernel.in_place:
            found["x"] = dy
        if self._outside_bias and self._run.flags[0].param_requires_grad[0]:
            found["param", 0, 0] = found["x"].sum(0)
        return found

    @property
    def kernels(self) -> dict[str, list[CompiledKernel]]:
        """By pass."""
        again = [self._again] if self._again is not None else []
        backwards = list(self._backwards.values())
        return {"forward": [self._forward], "backward": backwards, "output again": again}
