"""What a module does so that it keeps less for its backward, and how that is put on and removed."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from opfuse_convert.layers import is_traced, layer_in, layered, set_class, without_layer
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.nn.modules.module import _has_any_global_hook
from torch.utils.checkpoint import checkpoint

from opfuse.core.introspection import hook_kinds
from opfuse.core.options import options
from opfuse.recipes.checkpoint import checkpoint_contexts
from opfuse.report.isolation import Traces
from opfuse.report.replaced_forward import KEPT_AS, MEMORY
from opfuse.tuning.job import one_line

_FIXED = (
    *(bool, int, float, complex, str, bytes, enum.Enum),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
)
"""Classes of arguments that no call changes."""

_PLAIN = {bool, int, float, str, type(None)}
_HOOKS = {"_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"}


@dataclasses.dataclass(frozen=True)
class Action:
    """What a call does so that it keeps less.

    Attributes:
        what: ``"recompute"``: its backward runs the forward again; ``"offload"``: what is kept is
            moved to the memory of the host until the backward; ``"compile"``: ``torch.compile``
            compiles it as one graph; ``""``: none of these.
        prefer: The option ``prefer`` of the call; ``""``: that of the caller.
        budget: The ``activation_memory_budget`` that it is compiled with.
    """

    what: str = ""
    prefer: str = ""
    budget: float = 1.0

    def __str__(self) -> str:
        how = f'prefer="{self.prefer}"' if self.prefer else ""
        how = f"budget {self.budget:g}" if self.what == "compile" else how
        return " with ".join(filter(None, (self.what, how))) or "as it is"

    def run(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a forward of a module so.

        Raises:
            AsItIsError: It has not run, and can run only as it is.
        """
        if is_dynamo_compiling():  # there the partitioner decides, except for a checkpoint
            if self.what == "recompute":
                return recomputed(forward, args, kwargs, {})
            return forward(*args, **kwargs)
        if self.what == "compile":
            take_tensors([], (args, kwargs))
            if why := _hooked(module):
                raise AsItIsError(why)
            return _run_compiled(type(module), self.budget, forward, args, kwargs)
        with options(prefer=self.prefer) if self.prefer else contextlib.nullcontext():
            if self.what == "recompute":
                same, how = _unchanged_forward(module, forward), {"context_fn": checkpoint_contexts}
                first = functools.partial(vars(module)[MEMORY].first_run, module, same)
                return recomputed(same, args, kwargs, how, first)
            with offloading() if self.what == "offload" else contextlib.nullcontext():
                return forward(*args, **kwargs)


def _hooked(module: nn.Module) -> str:
    """Which hook is called inside a module, as a sentence; a graph does not ask for new ones."""
    if _has_any_global_hook():  # type: ignore[no-untyped-call]
        return "there is a hook for all modules"
    for path, part in module.named_modules():
        if part is not module and (kinds := hook_kinds(part)):
            return f"its {path} has a {kinds} hook"
    return ""


def _run_compiled(of: type, budget: float, forward: Any, args: Any, kwargs: Any) -> Any:
    from .compiling import FAILURES, compiled

    try:
        return compiled(of, budget)(forward, args, kwargs)
    except FAILURES as error:
        raise CompileError(f"it cannot be compiled: {one_line(error)}") from error


def _unchanged_forward(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward that is refused in the backward if what it depends on is another then.

    Where nothing is computed again the mode does not matter, and autograd has the parameters of the
    forward, or finds them changed.
    """
    before = _facts(module)

    def same(*args: Any, **kwargs: Any) -> Any:
        after = _facts(module)
        if after != before:
            keys = dict.fromkeys([*before, *after])
            (path, name) = next(key for key in keys if before.get(key) != after.get(key))
            raise RuntimeError(
                f"{type(module).__name__}: {f'{path}.{name}'.lstrip('.')} was changed between the "
                f"forward and this backward, which runs the forward again for opfuse.plan_memory"
            )
        return forward(*args, **kwargs)

    # so that no other gets the id of one
    vars(same)["tensors"] = [*module.parameters(), *module.buffers()]
    return same


def _facts(module: nn.Module) -> dict[tuple[str, str], Any]:
    """What a forward may depend on, by path and name: tensors, modes, numbers and hooks."""
    found: dict[tuple[str, str], Any] = {}
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if type(value) in _PLAIN:
                found[path, name] = value
            elif name in _HOOKS:
                found[path, name] = (*value,)
        for name, tensor in {**part._parameters, **part._buffers}.items():
            is_counted = tensor is not None and not tensor.is_inference()
            found[path, name] = id(tensor), tensor._version if is_counted else 0
    return found


class AsItIsError(RuntimeError):
    """A forward that can only run as it is, in this call; the message says why."""


class CompileError(AsItIsError):
    """A forward that cannot be compiled, now or later."""


def recomputed(forward: Any, args: Any, kwargs: Any, how: Any, first_run: Any = None) -> Any:
    """Call a forward and keep only its tensors, wherever they are among the arguments.

    ``torch.utils.checkpoint`` saves, and guards against changes in place, what it is given by
    position. Lists and dicts among the arguments are those of the caller in the first run, which
    may add to them, and copies in the second.

    Raises:
        AsItIsError: An argument is an object that a second run would change again, such as a cache.
    """
    tensors: list[Tensor] = []
    form = take_tensors(tensors, (args, kwargs))
    first = [] if is_dynamo_compiling() else [(args, kwargs)]

    def again(*tensors: Tensor) -> Any:
        run = (first and first_run) or forward
        args, kwargs = first.pop() if first else put_tensors(iter(tensors), form)
        return run(*args, **kwargs)

    return checkpoint(again, *tensors, use_reentrant=False, **how)


class _Tensor:
    """The place of a tensor among arguments."""


_A_TENSOR = _Tensor()


def take_tensors(tensors: list[Tensor], value: Any) -> Any:
    """Arguments without their tensors, which go into a list."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return _A_TENSOR
    cls = type(value)
    if cls is tuple or cls is list:
        return cls([take_tensors(tensors, each) for each in value])
    if cls is dict:
        return {key: take_tensors(tensors, each) for key, each in value.items()}
    if value is None or isinstance(value, _FIXED):
        return value
    raise AsItIsError(f"it is called with a {cls.__name__}, which a second run would change again")


def put_tensors(tensors: Iterator[Tensor], form: Any) -> Any:
    """Arguments with their tensors again."""
    if form is _A_TENSOR:
        return next(tensors)
    cls = type(form)
    if cls is tuple or cls is list:
        return cls([put_tensors(tensors, each) for each in form])
    if cls is dict:
        return {key: put_tensors(tensors, each) for key, each in form.items()}
    return form


def offloading(kind: str = "cuda") -> Any:
    """A block whose forward keeps its tensors in the memory of the host, pinned for CUDA.

    Parameters stay where they are, and so does what is on another kind of device. A tensor that is
    kept twice is copied once.
    """
    copies: dict[Any, tuple[Tensor, Tensor]] = {}

    def pack(tensor: Tensor) -> Any:
        base = tensor if tensor._base is None else tensor._base
        if tensor.device.type != kind or isinstance(base, nn.Parameter):
            return tensor
        if type(tensor) is not Tensor:  # such as a quantized one
            return tensor.device, tensor.to("cpu")
        place = tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor._version
        key = (*place, tensor.shape, tensor.stride(), tensor.dtype)
        if key not in copies:
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=kind == "cuda")
            copies[key] = tensor, host.copy_(tensor, non_blocking=True)
        return tensor.device, copies[key][1]

    def unpack(packed: Any) -> Any:
        if isinstance(packed, Tensor):
            return packed
        device, host = packed
        return host.to(device, non_blocking=True)

    @contextlib.contextmanager
    def block() -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            try:
                yield
            finally:
                copies.clear()  # lets go of what is on the GPU

    return block()


class ModuleMemory:
    """What one module does so that it keeps less, under :data:`MEMORY` in its ``vars()``.

    Args:
        own: For its calls.
        chain: For the calls of the chain that a conversion put into its forward.

    Attributes:
        fallback: Why it ran as it is at its latest call, as a sentence, or ``""``.
        note: What the plan says about the whole model, in the module that it was attached to.
    """

    fallback, note = "", ""
    _compiles = True
    _once = ""

    def __init__(self, own: Action | None = None, chain: Action | None = None) -> None:
        self.own, self.chain = own, chain
        self._traces: Traces | None = None

    def __str__(self) -> str:
        said = [str(self.own)] if self.own else []
        said += [f"{self.chain} (its chain)"] if self.chain else []
        return ", ".join(said) + (f"; it ran as it is: {self.fallback}" if self.fallback else "")

    def again(self, memo: Any) -> ModuleMemory:
        """The same for a copy of the module."""
        twin = ModuleMemory(self.own, self.chain)
        twin.note = self.note
        return twin

    def call(self, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        """The module's forward: ``forward(module, *args, **kwargs)``."""
        by_user = module.training and vars(module).get("gradient_checkpointing", False)
        own = None if by_user is True else self.own
        return self._run(own, module, functools.partial(forward, module), args, kwargs)

    def call_chain(self, module: nn.Module, chain: Any, run: Any, given: Any) -> Any:
        """The chain of the module's forward: ``run(*given)``, now and perhaps in the backward."""
        return self._run(self.chain, module, run, given, {})

    def _run(self, action: Action | None, module: Any, forward: Any, args: Any, kwargs: Any) -> Any:
        if action is None or not torch.is_grad_enabled() or is_traced():
            return forward(*args, **kwargs)
        if action.what == "compile" and not self._compiles:  # trying takes seconds
            return forward(*args, **kwargs)
        try:
            if action.what == "recompute" and self._once and not is_dynamo_compiling():
                raise AsItIsError(self._once)
            result = action.run(module, forward, args, kwargs)
        except AsItIsError as error:
            if not is_dynamo_compiling():
                self.fallback, self._compiles = str(error), not isinstance(error, CompileError)
            return forward(*args, **kwargs)
        if not is_dynamo_compiling():
            self.fallback = self._once
        return result

    def first_run(self, module: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
        """Make the first run of a forward inside of a checkpoint.

        Until it ends, everything is kept. If it has changed something then, which a second run
        would do again, that stays so: this call does not run again, and neither does a later one.
        """
        kept: list[tuple[Tensor, int]] = []
        self._traces = self._traces or Traces(module)
        hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)

        def keep(tensor: Tensor) -> Any:
            kept.append((tensor, tensor._version))
            return len(kept) - 1, hooks[0](tensor)

        def give(packed: Any) -> Any:
            number, held = packed
            if not kept:
                return hooks[1](held)
            tensor, version = kept[number]
            if tensor._version != version:
                raise RuntimeError(
                    "a tensor that is kept for the backward was changed in place since the forward"
                )
            return tensor

        change = self._traces.begin()
        with torch.autograd.graph.saved_tensors_hooks(keep, give):
            result = forward(*args, **kwargs)
        if changed := change():
            self._once, self._traces = f"its forward changes {changed}", None
        else:
            kept.clear()
        return result


def put_on(module: nn.Module, memory: Any) -> None:
    """Let the calls of a module go through a :class:`ModuleMemory`, or what has its methods."""
    cls: Any = type(module)
    if layer_in(cls) is None:
        set_class(module, layered(cls))
    vars(module)[MEMORY] = memory


def attach(actions: Iterable[tuple[nn.Module, bool, Action]]) -> list[nn.Module]:
    """Let modules, or their chains, act so; returns the modules."""
    by: dict[nn.Module, dict[str, Action]] = {}
    for module, is_chain, action in actions:
        by.setdefault(module, {})["chain" if is_chain else "own"] = action
    for module, those in by.items():
        put_on(module, ModuleMemory(**those))
    return list(by)


def take_off(module: nn.Module) -> None:
    """Undo :func:`put_on`; the chain of a converted module stays.

    Raises:
        RuntimeError: A class that others derived from the module's cannot be derived again.
    """
    below = type(module) if KEPT_AS in vars(module) else without_layer(type(module))
    vars(module).pop(MEMORY, None)
    set_class(module, below)
