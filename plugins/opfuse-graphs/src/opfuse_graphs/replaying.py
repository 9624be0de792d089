"""A layer whose forward and backward are replayed from CUDA graphs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

import opfuse
from opfuse.core.settings import current
from opfuse.recipes.scale_update import begin_backward

from .captured_block import CapturedBlock

HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
_TENSOR = "a tensor"
Replay = Callable[[], None]


def capture(run: Callable[[], list[Any]], pool: Any) -> tuple[Replay, list[Any]]:
    """Capture a call into a CUDA graph; return what replays it, and the tensors that it writes."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        results = run()
    return graph.replay, results


@contextlib.contextmanager
def beside() -> Iterator[None]:
    """A stream of its own, on which PyTorch asks to run before a capture."""
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        yield
    torch.cuda.synchronize()


class Call(NamedTuple):
    """The arguments of a call.

    Attributes:
        tensors: The tensors among them.
        leaves: All of them, with a word where a tensor is.
        spec: How they nest.
    """

    tensors: list[Tensor]
    leaves: list[Any]
    spec: TreeSpec

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """The call with these arguments."""
        leaves, spec = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        return cls(tensors, [_TENSOR if isinstance(x, Tensor) else x for x in leaves], spec)

    def facts(self) -> list[Any]:
        """What is the same in each call that a graph serves."""
        kinds = [(tuple(x.shape), x.dtype, x.device, x.requires_grad) for x in self.tensors]
        return [kinds, self.leaves, self.spec]

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments again."""
        tensors = iter(self.tensors)
        leaves = [next(tensors) if leaf is _TENSOR else leaf for leaf in self.leaves]
        return tree_unflatten(leaves, self.spec)  # type: ignore[no-any-return]


class Modes(NamedTuple):
    """The settings that a captured forward has built in.

    Attributes:
        opfuse: Options, plugins and recipe.
        autocast: The dtype of ``torch.autocast``, or False.
        deterministic: Whether torch uses deterministic algorithms.
        precision: How torch multiplies fp32 matrices.
    """

    opfuse: Any
    autocast: Any
    deterministic: bool
    precision: str

    @classmethod
    def now(cls) -> Modes:
        """Those in force."""
        return cls(
            current.values,
            torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
            torch.are_deterministic_algorithms_enabled(),
            torch.get_float32_matmul_precision(),
        )


_NUMBERS = bool, int, float, str
_ABSENT = object()


def built_in(layer: nn.Module) -> Iterator[tuple[str, dict[str, Any], str, Any]]:
    """What a capture of a layer has built in, beside the values of tensors.

    Yields:
        A name for errors, and a dictionary, its key, and what is there: every submodule, every
        number and flag among the attributes of a module, and a ``forward`` that was put there.
    """
    for path, module in layer.named_modules():
        attributes, prefix = vars(module), f"{path}." if path else ""
        for key, child in module._modules.items():
            yield prefix + key, module._modules, key, child
        for key, value in attributes.items():
            if isinstance(value, _NUMBERS) and (module is not layer or key != "training"):
                yield prefix + key, attributes, key, value
        if module is not layer:
            yield f"{prefix}forward", attributes, "forward", attributes.get("forward", _ABSENT)


class GraphedForward:
    """Stands for the forward of a layer: in training it replays graphs.

    Args:
        name: Of the layer, for errors.
        layer: The layer.
        call: A call with the tensors that the graphs read; each has memory of its own.
        recipe: The recipe or its name, or None.
    """

    def __init__(self, name: str, layer: nn.Module, call: Call, recipe: Any) -> None:
        self.name, self.layer, self.call, self.recipe = name, layer, call, recipe
        self.original = layer.forward
        self.outer = vars(layer).get("forward")  # what another tool put there
        self._held = [
            (tensors, key, tensor, tensor.data_ptr(), tensor.requires_grad)
            for module in layer.modules()
            for tensors in (module._parameters, module._buffers)
            for key, tensor in tensors.items()
            if tensor is not None
        ]
        self._built_in = [*built_in(layer)]
        below = [module for module in layer.modules() if module is not layer]
        self._hooks = [getattr(module, kind) for module in below for kind in HOOKS]
        unique = {id(tensor): tensor for _, _, tensor, _, wants in self._held if wants}
        self.trained = [*unique.values()]
        self._wanted = [x for x in [*call.tensors, *self.trained] if x.requires_grad]
        self._facts = call.facts()
        self.results: list[Tensor] = []
        self._turn, self._ready = 0, False

    @contextlib.contextmanager
    def _around(self) -> Iterator[None]:
        """The contexts in which a layer is captured."""
        automatic = torch.is_autocast_enabled("cuda")
        # a weight that autocast had cast would be read in every replay
        uncached = torch.autocast("cuda", enabled=automatic, cache_enabled=False)
        low = contextlib.nullcontext() if self.recipe is None else opfuse.autocast(self.recipe)
        self.block = CapturedBlock()
        with uncached, current.temporarily(block=self.block), low:
            yield

    def run(self) -> list[Tensor]:
        """Run the layer on the tensors of its graphs."""
        args, kwargs = self.call.arguments()
        with self._around():
            self._modes = Modes.now()
            results, self._spec = tree_flatten(self.original(*args, **kwargs))
        others = [type(x).__name__ for x in results if not isinstance(x, Tensor)]
        if others or not any(x.requires_grad for x in results):
            what = others[0] if others else "no tensor with a gradient"
            raise ValueError(f"graphed: {self.name} returns {what}; expected tensors")
        self.results = results
        return results

    def differentiate(self) -> list[Tensor | None]:
        """Gradients of what was wanted, from those in ``grads``."""
        outputs = [x for x in self.results if x.requires_grad]
        grads = [x for x in self.grads if x is not None]
        return [*torch.autograd.grad(outputs, self._wanted, grads, allow_unused=True)]

    def warm_up(self) -> None:
        """Run both passes, with gradients of zero."""
        self.run()
        self._make_grads()
        self.differentiate()
        self.block.discard()

    def capture_forward(self, pool: Any) -> None:
        """Capture the forward."""
        self._replay, results = capture(self.run, pool)
        self.outputs = [x.detach() for x in results]
        self._make_grads()

    def capture_backward(self, pool: Any) -> None:
        """Capture the backward; the layers are captured in the order in which they will run."""
        self._replay_backward, found = capture(self.differentiate, pool)
        by_tensor = dict(zip(map(id, self._wanted), found, strict=True))
        given = [*self.call.tensors, *self.trained]
        self._gradients = [by_tensor.get(id(x)) for x in given]
        self.captured = self.block  # no later run of the layer adds to it

    def _make_grads(self) -> None:
        """Gradients of the results, in memory of their own."""
        self.grads = [torch.zeros_like(x) if x.requires_grad else None for x in self.results]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replay the forward; outside of training, and where a report looks, run the layer."""
        is_watched = bool(current.recorders) or torch.compiler.is_compiling()
        if is_watched or not (self.layer.training and torch.is_grad_enabled()):
            return self.original(*args, **kwargs)
        call = Call.of(args, kwargs)
        self._check(call)
        results: Any = _Replay.apply(self, *call.tensors, *self.trained)  # type: ignore[no-untyped-call]
        return tree_unflatten(results, self._spec)

    def _check(self, call: Call) -> None:
        """Refuse a call that the graphs do not serve.

        Raises:
            ValueError: Other shapes, dtypes or arguments.
            RuntimeError: Other settings, or a layer that changed.
        """
        what = f"graphed: {self.name} was captured"
        hint = "call opfuse.ungraphed(model), and then opfuse.graphed again"
        for expected, got in zip(self._facts, call.facts(), strict=True):
            if expected != got:
                raise ValueError(f"{what} with {expected}, got {got}: {hint}")
        for name, expected, got in zip(Modes._fields, self._modes, Modes.now(), strict=True):
            if expected != got:
                raise RuntimeError(f"{what} under {name} {expected}, got {got}: {hint}")
        for path, holder, key, value in self._built_in:
            if (found := holder.get(key, _ABSENT)) is not value and found != value:
                raise RuntimeError(f"{what} before its {path} changed: {hint}")
        if any(self._hooks):
            raise RuntimeError(f"{what} before a module in it got hooks: {hint}")
        for tensors, key, tensor, pointer, wants in self._held:
            same = tensors.get(key) is tensor and tensor.data_ptr() == pointer
            if not same or tensor.requires_grad is not wants:
                raise RuntimeError(f"{what} before its {key} was replaced, moved or frozen: {hint}")

    def replay(self, given: Sequence[Tensor]) -> int:
        """Replay the forward; return the number of the turn."""
        with torch.no_grad():
            for place, tensor in zip(self.call.tensors, given, strict=True):
                if place.data_ptr() != tensor.data_ptr():
                    place.copy_(tensor)
        self._replay()
        for ran in self.captured.forward if current.block is not None else ():
            current.block.begin(*ran)
        self._turn, self._ready = self._turn + 1, True
        return self._turn

    def replay_backward(self, turn: int, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Replay the backward of a turn; return the gradients of the inputs and parameters.

        Raises:
            RuntimeError: Another forward came in between, or this backward ran before.
        """
        if turn != self._turn or not self._ready:
            raise RuntimeError(
                f"graphed: {self.name} keeps what one backward needs, for its last forward alone: "
                f"run the backward of a forward once, and before the next forward"
            )
        self._ready = False
        for place, grad in zip(self.grads, grads, strict=True):
            if place is not None and grad is None:
                place.zero_()
            elif place is not None and grad is not None and place.data_ptr() != grad.data_ptr():
                place.copy_(grad)
        for param, found in zip(self.trained, self._gradients[-len(self.trained) :], strict=False):
            # autograd took the memory of a graph as this gradient: it would be written over
            if found is not None and param.grad is not None:
                if param.grad.data_ptr() == found.data_ptr():
                    param.grad = param.grad.clone()
        self._replay_backward()
        for ran in self.captured.backward:
            begin_backward(ran)
        return [None if x is None else x.detach() for x in self._gradients]

    def __reduce__(self) -> Any:
        raise TypeError(
            f"graphed: {self.name} is replayed from CUDA graphs, which no copy and no file can "
            f"hold: call opfuse.ungraphed(model) first"
        )


class _Replay(torch.autograd.Function):
    """The replay of a layer, as one node of autograd."""

    @staticmethod
    def forward(ctx: Any, layer: GraphedForward, *given: Tensor) -> tuple[Tensor, ...]:
        ctx.layer, ctx.turn = layer, layer.replay(given[: len(layer.call.tensors)])
        results = [x.detach() for x in layer.outputs]
        fixed = [x for x, grad in zip(results, layer.grads, strict=True) if grad is None]
        ctx.mark_non_differentiable(*fixed)
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return None, *ctx.layer.replay_backward(ctx.turn, grads)
