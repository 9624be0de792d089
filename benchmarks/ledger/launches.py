"""``python -m benchmarks.ledger launches``: the kernels of a training step of a Llama block.

It needs no GPU: one forward and backward run on meta tensors, planned as on an H100, and Triton
kernels are recorded instead of launched. Each operation of PyTorch counts as one kernel, but for
those of ``SEVERAL``; views and new memory count as none. The same counter runs over the block as it
is, in eager PyTorch.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from opfuse_triton import TARGETS, Launch, Target, target
from opfuse_triton.machine import recorded
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import opfuse
from opfuse import ops

from .pretending import planned_for

FREE = ("empty", "new_empty", "detach", "_unsafe_view", "alias", "lift_fresh", "set_")
SEVERAL = {
    "_scaled_dot_product_flash_attention_backward": 3,  # a sum per row, the gradients, dq to bf16
    "native_layer_norm_backward": 2,  # of the input, and of the weight
    "slice_backward": 2,  # zeros, and a copy
}
"""How many kernels an operation has on a GPU, where it is not one."""

OTHERS = "-inductor,-liger"
"""Plugins whose kernels come from elsewhere, and are not recorded."""


class Sizes(NamedTuple):
    """Sizes of a Llama block; the defaults are those of Llama-3-8B."""

    rows: int = 8192
    width: int = 4096
    hidden: int = 14336
    heads: int = 32
    kv_heads: int = 8


class Counted(NamedTuple):
    """What one step launches, by name.

    Attributes:
        torch: Kernels of PyTorch's operations.
        triton: Kernels of plugins.
        scales: What is launched when the step ends, to make scales of what a recipe has recorded.
    """

    torch: Counter[str]
    triton: Counter[str]
    scales: Counter[str]


class Operations(TorchDispatchMode):  # type: ignore[misc]
    """Counts the kernels of PyTorch's operations."""

    keeps_no_tensors = True

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        made = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor) and t.numel()]
        on_gpu = any(t.device.type == "meta" for t in made)
        if on_gpu and not func.is_view and not name.startswith(FREE):
            self.found[name] += SEVERAL.get(name, 1)
        return result


class _Names(list[str]):
    """Keeps a recorded launch by the name of its kernel.

    It keeps no tensor: autograd would copy each gradient that something else holds, which a launch
    on a GPU does not.
    """

    def append(self, launch: Launch) -> None:  # type: ignore[override]
        super().append(launch.kernel.name)


@contextlib.contextmanager
def _names(chosen: Target) -> Iterator[list[str]]:
    """Within the context no kernel is launched: its name is appended to the list."""
    names = _Names()
    with target(chosen):
        token = recorded.set(names)  # type: ignore[arg-type]
        try:
            yield names
        finally:
            recorded.reset(token)


def count(step: Callable[[], Any], recipe: Any = None, *, measured: bool = False) -> Counted:
    """Count what one step launches on an H100.

    Args:
        step: Runs the forward and the backward. It runs three times: before the last, scales and
            buffers are made.
        recipe: For :func:`opfuse.autocast`.
        measured: See :func:`planned_for`.
    """
    h100 = TARGETS[90]
    with planned_for(h100, measured=measured), opfuse.plugins.using(OTHERS):
        for _ in range(3):
            of_step, of_scales = Operations(), Operations()
            with contextlib.ExitStack() as stack:
                of_end = stack.enter_context(_names(h100))
                stack.enter_context(of_scales)
                stack.enter_context(opfuse.autocast(enabled=recipe is not None, recipe=recipe))
                with _names(h100) as launches, of_step:
                    step()
    triton, scales = Counter(launches), Counter(of_end)
    scales += of_scales.found - of_step.found
    return Counted(of_step.found, triton, scales)


# What is counted


class EagerMLP(nn.Module):
    """The second half of a block, in PyTorch's modules."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width, hidden = sizes.width, sizes.hidden
        self.norm = nn.RMSNorm(width)
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the half."""
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def chain(sizes: Sizes) -> nn.Module:
    """The same as a chain."""
    return opfuse.Sequential(
        ops.MakeExtraOutput().set_extra_output_channel(0, "residual", output_to_caller=False),
        ops.RMSNorm(sizes.width),
        ops.Linear(sizes.width, 2 * sizes.hidden, bias=False),
        ops.SwiGLU(),
        ops.Linear(sizes.hidden, sizes.width, bias=False),
        ops.AddExtraInput().set_extra_input_channel(0, "residual"),
    )


def llama(sizes: Sizes, *, convert: bool) -> Callable[[], Any]:
    """A step of a decoder layer of transformers; :func:`opfuse.convert` has to see its values."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    config = LlamaConfig(
        hidden_size=sizes.width,
        intermediate_size=sizes.hidden,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        attn_implementation="sdpa",
    )
    with torch.device("meta"):
        layer = LlamaDecoderLayer(config, 0).bfloat16()
    if convert:
        layer.to_empty(device="cpu")
        with torch.no_grad():
            for param in layer.parameters():
                param.copy_(torch.randn(1) / 64).add_(torch.arange(param.shape[-1]) % 7 / 64)
        opfuse.convert(layer)
    angles = torch.empty(1, sizes.rows, sizes.width // sizes.heads, device="meta").bfloat16()
    return step_of(layer.to("meta"), sizes, position_embeddings=(angles, angles))


def around_blocks(*, convert: bool) -> Callable[[], None]:
    """A step of a Llama without blocks: the embedding, the angles, a norm, the head and the loss.

    It is small, and has one launch for what a large one has: the head's rows are taken at once up
    to some thousands.
    """
    from transformers import LlamaConfig, LlamaForCausalLM, masking_utils

    config = LlamaConfig(
        hidden_size=256, num_attention_heads=4, num_hidden_layers=0, vocab_size=512, use_cache=False
    )
    model = LlamaForCausalLM(config).bfloat16()
    if convert:
        opfuse.convert(model)
    model.to("meta")
    tokens = torch.empty(2, 128, dtype=torch.int64, device="meta")

    def step() -> None:
        model.zero_grad()
        # it looks at values
        with mock.patch.object(masking_utils, "find_packed_sequence_indices", lambda ids: None):
            model(input_ids=tokens, labels=tokens).loss.backward()

    return step


def step_of(module: nn.Module, sizes: Sizes, **given: Any) -> Callable[[], None]:
    """A forward and backward of a module on one sequence, with no gradient there before."""
    module.to(device="meta", dtype=torch.bfloat16)
    x = torch.empty(1, sizes.rows, sizes.width, dtype=torch.bfloat16, device="meta")
    x.requires_grad_()

    def step() -> None:
        module.zero_grad()
        x.grad = None
        y = module(x, **given)
        y.backward(torch.empty_like(y))

    return step


def rows(sizes: Sizes) -> Iterator[tuple[str, Counted]]:
    """The rows of the table, by name."""
    from opfuse_fp8 import DelayedScaling

    recipe = DelayedScaling()
    converted = llama(sizes, convert=True)
    yield "Block, eager", count(llama(sizes, convert=False))
    yield "Block, converted", count(converted)
    yield "Block, converted, measured", count(converted, measured=True)
    yield "Block, converted, delayed FP8", count(converted, recipe)
    yield "Block, converted, delayed FP8, measured", count(converted, recipe, measured=True)
    shared = DelayedScaling(shared_weight_scale=True)
    yield "Block, converted, delayed FP8, weights share scales", count(converted, shared)
    fused = step_of(chain(sizes), sizes)
    around = around_blocks(convert=True)
    yield "Around the blocks, eager", count(around_blocks(convert=False))
    yield "Around the blocks, converted", count(around)
    yield "Around the blocks, converted, delayed FP8", count(around, recipe)
    yield "MLP, eager", count(step_of(EagerMLP(sizes), sizes))
    yield "MLP, chain", count(fused)
    yield "MLP, chain, measured", count(fused, measured=True)
    yield "MLP, chain, delayed FP8", count(fused, recipe)
    yield "MLP, chain, delayed FP8, measured", count(fused, recipe, measured=True)


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ledger launches")
    parser.add_argument("--details", action="store_true", help="each kernel, and how often")
    for name, value in Sizes()._asdict().items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    asked = vars(parser.parse_args(arguments))
    details, os.environ["OPFUSE_TUNING"] = asked.pop("details"), ""
    print("| One training step | PyTorch | Triton | Both | Scales |\n|---|---|---|---|---|")
    for name, found in rows(Sizes(**asked)):
        numbers = [found.torch.total(), found.triton.total()]
        numbers += [sum(numbers), found.scales.total()]
        print(f"| {name} | {' | '.join(map(str, numbers))} |", flush=True)
        for each, often in (found.torch + found.triton).most_common() if details else ():
            print(f"    {often:4} {each}")


if __name__ == "__main__":
    main()
