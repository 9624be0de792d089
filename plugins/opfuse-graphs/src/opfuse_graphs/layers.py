"""Which layers of a model are captured, how they are called, and what graphs cannot hold."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from opfuse.core.settings import current

from . import replaying
from .replaying import HOOKS, Call, GraphedForward

M = TypeVar("M", bound=nn.Module)
_WARM_UPS = 3
_DEVICE = "cuda"
_PLAIN = type(None), bool, int, float, str, torch.dtype, torch.device


def graphed(
    model: M, *args: Any, layers: Iterable[str] | None = None, recipe: Any = None, **kwargs: Any
) -> M:
    """Replay the forward and the backward of each layer from CUDA graphs, in training.

    The host then queues two graphs for a layer instead of every kernel. The GPU computes the same.
    In ``eval()`` or with grad mode off a layer runs as before.

    A graph has one set of memory. So the backward of a forward runs once, and before the next
    forward; results, and the gradients of parameters, are written over by the next step; and what
    layers keep for their backward stays allocated between steps. Each training call has the shapes
    of the sample. The scales of a recipe advance as before, with those of the whole step.

    Args:
        model: A model in training mode, on one GPU. Convert it before.
        *args: Arguments of a training call of the model.
        layers: Names of the modules; None: all entries of each ``nn.ModuleList`` with several,
            but for those within another.
        recipe: The recipe or its name, if you train in :class:`opfuse.autocast`.
        **kwargs: More arguments of that call.

    Returns:
        The model. :func:`ungraphed` undoes it.

    Raises:
        ValueError: There are no layers, or a layer is not called once in that call, with tensors
            and plain values alone.
        RuntimeError: Something that a graph cannot hold: no GPU, hooks of inner modules,
            checkpoints, sharded parameters, a block of :class:`opfuse.autocast` around this call,
            or an operation that cannot be captured.

    Example::

        model = opfuse.graphed(opfuse.convert(model), input_ids=tokens, labels=tokens)
    """
    found = _layers(model, layers)
    if current.block is not None:
        raise RuntimeError("graphed: give it the recipe, and call it outside of opfuse.autocast")
    for name, layer in found:
        _refuse(name, layer)
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            calls = _calls(model, found, args, kwargs)
            made = [
                GraphedForward(name, layer, call, recipe)
                for (name, layer), call in zip(found, calls, strict=True)
            ]
            _warm_up(made)
            _capture(made)
    finally:  # nothing of this is a step
        for buffer, before in buffers:
            buffer.copy_(before)
    for each in made:
        each.layer.forward = each
    return model


def ungraphed(model: M) -> M:
    """Undo :func:`graphed`: every layer runs as before, and the graphs' memory is free.

    Args:
        model: The model.

    Returns:
        The model.
    """
    for layer in model.modules():
        if isinstance(found := vars(layer).get("forward"), GraphedForward):
            del layer.forward
            if found.outer is not None:
                layer.forward = found.outer
    return model


def _layers(model: nn.Module, names: Iterable[str] | None) -> list[tuple[str, nn.Module]]:
    """The layers by name, in the order of the model."""
    if names is not None:
        return [(name, model.get_submodule(name)) for name in names]
    found: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        if any(name.startswith(f"{outer}.") for outer, _ in found):
            continue
        if isinstance(module, nn.ModuleList) and len(module) > 1:
            found += [(f"{name}.{key}", child) for key, child in module.named_children()]
    if not found:
        raise ValueError(
            f"graphed: expected an nn.ModuleList with several layers, got a {type(model).__name__} "
            f"without: name the modules with layers="
        )
    return found


def _refuse(name: str, layer: nn.Module) -> None:
    """Raise for what no graph can hold."""
    what = f"graphed: {name}"
    if isinstance(vars(layer).get("forward"), GraphedForward):
        raise RuntimeError(f"{what} is captured already: call opfuse.ungraphed(model) first")
    if not layer.training:
        raise RuntimeError(f"{what} is in eval mode: expected training, call model.train()")
    for below, module in layer.named_modules():
        hooks = [kind for kind in HOOKS if below and getattr(module, kind)]
        if hooks:
            kind = hooks[0].strip("_")
            raise RuntimeError(f"{what}.{below} has {kind}, which a replay would not call")
        if getattr(module, "gradient_checkpointing", False):
            raise RuntimeError(
                f"{what} computes its forward again in the backward (gradient_checkpointing), "
                f"which a graph cannot"
            )
    for key, param in layer.named_parameters():
        if type(param) is not nn.Parameter or param.device.type != _DEVICE:
            kind, where = type(param).__name__, param.device.type
            raise RuntimeError(f"{what}.{key} is a {kind} on {where}: expected a Parameter on cuda")


def _calls(
    model: nn.Module,
    layers: Sequence[tuple[str, nn.Module]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> list[Call]:
    """How the model calls its layers, each tensor in memory of its own."""
    seen: dict[nn.Module, list[tuple[Any, Any]]] = {layer: [] for _, layer in layers}
    hooks = [
        layer.register_forward_pre_hook(
            lambda module, given, named: seen[module].append((given, named)), with_kwargs=True
        )
        for layer in seen
    ]
    try:
        model(*args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()

    def own(name: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.detach().clone().requires_grad_(value.requires_grad)
        if isinstance(value, _PLAIN):
            return value
        kind = type(value).__name__
        raise ValueError(f"graphed: {name} is called with {kind}: expected tensors and numbers")

    made = []
    for name, layer in layers:
        if len(seen[layer]) != 1:
            raise ValueError(
                f"graphed: the sample called {name} {len(seen[layer])} times: expected 1"
            )
        whole = torch.utils._pytree.tree_map(lambda x: own(name, x), seen[layer][0])  # noqa: B023
        made.append(Call.of(*whole))
    return made


def _warm_up(made: Sequence[GraphedForward]) -> None:
    """Run each layer as often as PyTorch asks for before a capture."""
    with replaying.beside():
        for each in made:
            with _named(each.name):
                for _ in range(_WARM_UPS):
                    each.warm_up()


def _capture(made: Sequence[GraphedForward]) -> None:
    """Capture all layers into one pool of memory, in the order in which they run."""
    pool = torch.cuda.graph_pool_handle()
    for each in made:
        with _named(each.name):
            each.capture_forward(pool)
    for each in reversed(made):
        with _named(each.name):
            each.capture_backward(pool)
        each.captured.discard()


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    """Name the layer in what a capture raises."""
    try:
        yield
    except Exception as error:
        raise RuntimeError(f"graphed: {name} cannot be captured: {error}") from error
