"""``python -m benchmarks.ledger experts``: launches and bytes of a step of a mixture's experts.

It needs no GPU: see :mod:`.launches`. An operation reads its operands once and writes its results,
and a launch of a plugin moves each of its tensors once, or twice a sum to which it adds. Experts
have as many rows as one another, but for the first, which has none.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import opfuse_triton
import torch
from opfuse_triton import TARGETS
from opfuse_triton.floor import TorchBytes
from torch import Tensor, nn

import opfuse
from opfuse import ops
from opfuse.ops import grouped_linear
from opfuse.ops.grouped import Groups

from .launches import OTHERS, Operations
from .pretending import planned_for


class Sizes(NamedTuple):
    """Sizes of a mixture; the defaults are those of Qwen3-30B-A3B."""

    tokens: int = 8192
    width: int = 2048
    hidden: int = 768
    experts: int = 128
    chosen: int = 8

    @property
    def rows(self) -> int:
        """Tokens, once for each of their experts."""
        return self.tokens * self.chosen

    @property
    def of_groups(self) -> Tensor:
        """The rows of each expert, on the CPU."""
        sizes = torch.zeros(self.experts, dtype=torch.int64)
        sizes[1:] = self.rows // (self.experts - 1)
        sizes[-1] += self.rows - sizes.sum()
        return sizes


class Measured(NamedTuple):
    """What one forward and backward does.

    Attributes:
        torch: Kernels of PyTorch's operations.
        triton: Kernels of plugins.
        bytes: Bytes that they move.
    """

    torch: int
    triton: int
    bytes: int


def measure(
    step: Callable[[], Any], recipe: Any = None, plugins: str = OTHERS, arch: int = 90
) -> Measured:
    """Count what a step does on an H100, or on another GPU.

    Args:
        step: Runs the forward and the backward. It runs twice: the first time scales are made.
        recipe: For :func:`opfuse.autocast`.
        plugins: For ``opfuse.plugins.using``.
        arch: Key of the GPU in :data:`opfuse_triton.TARGETS`.
    """
    target, on = TARGETS[arch], recipe is not None
    with planned_for(target, measured=True), opfuse.plugins.using(plugins):
        for _ in range(2):
            launched, moved = Operations(), TorchBytes()
            with opfuse.autocast(enabled=on, recipe=recipe):
                with opfuse_triton.recording(target) as launches, launched, moved:
                    step()
    for launch in launches:
        moved.add(launch.args)
        moved.add([launch.arguments["dw"]] if launch.arguments.get("ADDS") else [])
    return Measured(launched.found.total(), len(launches), moved.moved.total())


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def experts_step(
    sizes: Sizes, *, looped: bool = False, into: str = "", adds: bool = True
) -> Callable[[], None]:
    """A step of the chain of the experts, on rows that are sorted.

    The matrices are two parameters, as those of transformers are.

    Args:
        sizes: The sizes.
        looped: Whether the host has read the sizes of the groups, as it does where groups are cast
            or multiplied one after the other.
        into: The gradients of the matrices are added to a ``main_grad`` in fp32: ``"one"`` of all
            experts, or those of a ``"list"`` of parameters, one for each expert; these follow one
            another in memory. Empty: they are not.
        adds: Whether the product adds them, where it can.
    """
    up, down, parameters = _products(sizes, into)
    for product in (up, down):
        product.set_extra_input_name(0, "split sizes")
    chain = opfuse.Sequential(up, ops.ScaledSwiGLU(), down)
    groups, read = _empty(sizes.experts, dtype=torch.int64), sizes.of_groups
    known = Groups(read, read.tolist())
    found = mock.patch.object(grouped_linear, "groups_of", lambda *unused: known)
    after = mock.patch.object(ops.GroupedLinear, "grad_sum", lambda *unused: None)
    x, scales = _empty(sizes.rows, sizes.width), _empty(sizes.rows)

    def step() -> None:
        given = [t.detach().requires_grad_() for t in (x, scales)]
        with contextlib.ExitStack() as stack:
            for patch in [found] * looped + [after] * (not adds):
                stack.enter_context(patch)
            if into:
                y = chain(_Sink.apply(given[0]), groups, _Sink.apply(given[1]))
                y.backward(torch.empty_like(y))
            else:
                y = chain(given[0], groups, given[1])
                # not into .grad: a tensor that a recorded launch holds would be copied
                torch.autograd.grad(y, [*given, *parameters], torch.empty_like(y))

    return step


class _Sink(torch.autograd.Function):
    """Takes a gradient that a step computes, and keeps it nowhere."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        return None


def _products(sizes: Sizes, into: str) -> tuple[Any, Any, list[nn.Parameter]]:
    """The two products of the experts, and their parameters; see :func:`experts_step`."""
    features = {"up": (2 * sizes.hidden, sizes.width), "down": (sizes.width, sizes.hidden)}
    held, made, main = nn.Module(), list[Any](), {"accumulate_into_main_grad": bool(into)}
    for name, shape in features.items():
        whole = nn.Parameter(_empty(sizes.experts, *shape))
        whole.main_grad = torch.empty_like(whole, dtype=torch.float32)  # type: ignore[attr-defined]
        setattr(held, name, whole)
        made.append(ops.GroupedLinear.reading(held, name, **main))
        if into == "list":
            given = {"bias": False, "device": "meta", "dtype": torch.bfloat16, **main}
            made[-1] = ops.GroupedLinear(sizes.experts, *shape[::-1], **given)
            for i, parameter in enumerate(made[-1].parameters()):
                parameter.data, parameter.main_grad = whole.data[i], whole.main_grad[i]
    return *made, list(held.parameters())


def sorting_step(sizes: Sizes) -> Callable[[], None]:
    """What is around the experts: rows and scales sorted by expert, and summed by token."""
    x, scales = _empty(sizes.tokens, sizes.width), _empty(sizes.tokens, sizes.chosen)
    chosen = _empty(sizes.tokens, sizes.chosen, dtype=torch.int64)

    def step() -> None:
        given = [t.detach().requires_grad_() for t in (x, scales)]
        _, order = torch.sort(chosen.reshape(-1))
        weights, rows = given[1].reshape(-1)[order], given[0][order // sizes.chosen]
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device="meta")
        y = rows[back].view(sizes.tokens, sizes.chosen, sizes.width).sum(1)
        torch.autograd.grad([y, weights], given, [torch.empty_like(t) for t in (y, weights)])

    return step


def rows(sizes: Sizes) -> Iterator[tuple[str, Measured]]:
    """The rows of the table, by name."""
    from opfuse_fp8 import DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling

    yield "Sort, gather, sum by token", measure(sorting_step(sizes))
    plain, with_values = experts_step(sizes), experts_step(sizes, looped=True)
    yield "Experts, without opfuse-plugin-moe", measure(plain, plugins=f"{OTHERS},-moe")
    yield "Experts", measure(plain)
    for into, what in (("one", "one parameter"), ("list", f"{sizes.experts} parameters")):
        for adds, how in ((False, "after the product"), (True, "by the product")):
            found = measure(experts_step(sizes, into=into, adds=adds))
            yield f"Experts, {what}, added to main_grad {how}", found
    name = "Experts, DelayedScaling, without opfuse-plugin-moe"
    yield name, measure(with_values, DelayedScaling(), plugins=f"{OTHERS},-moe")
    for recipe in (DelayedScaling(), Float8CurrentScaling(), MXFP8BlockScaling()):
        yield f"Experts, {type(recipe).__name__}", measure(with_values, recipe)
    name = "Experts, MXFP8BlockScaling, on a B200"
    yield name, measure(with_values, MXFP8BlockScaling(), arch=100)


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ledger experts")
    for name, value in Sizes()._asdict().items():
        parser.add_argument(f"--{name}", type=int, default=value)
    asked, os.environ["OPFUSE_TUNING"] = vars(parser.parse_args(arguments)), ""
    print("| One training step | PyTorch | Triton | GB |\n|---|---|---|---|")
    for name, found in rows(Sizes(**asked)):
        print(f"| {name} | {found.torch} | {found.triton} | {found.bytes / 1e9:.2f} |", flush=True)
