"""Train the model of ``train_lm.py`` on two processes, each with its part of every layer.

Each process has half of the attention heads, half of every MLP and half of the classes of the
loss. The first one also trains the whole model by itself, with the same weights and batches. The
script prints both losses of each step, and fails if they differ.

    torchrun --nproc-per-node 2 examples/train_tensor_parallel.py
    torchrun --nproc-per-node 2 examples/train_tensor_parallel.py --steps 50 --width 512

It runs on CPUs, over gloo.
"""

import argparse
import sys

import torch
import torch.distributed as dist
import train_lm as whole
from torch import nn
from torch.nn import functional as F

import opfuse
from opfuse.ops import (
    GELU,
    AddExtraInput,
    BasicLinear,
    Bias,
    Linear,
    MakeExtraOutput,
    RMSNorm,
    VocabParallelCrossEntropy,
)

LIMIT = 1e-4  # of the relative difference of the losses


def column(inputs, outputs, bias=True):
    """Each process has its part of the outputs."""
    return Linear(inputs, outputs, bias=bias, tensor_parallel_mode="column")


def row(inputs, outputs):
    """Each process has its part of the inputs; the bias is added once, behind the sum."""
    return BasicLinear(inputs, outputs, tensor_parallel_mode="row"), Bias(outputs)


class Block(nn.Module):
    """As :class:`train_lm.Block`, with this process's heads and its part of the MLP."""

    def __init__(self, width):
        super().__init__()
        heads = width // whole.HEAD
        self.all_heads = [heads, 2, 2]
        self.heads = [count // dist.get_world_size() for count in self.all_heads]
        self.qkv = opfuse.Sequential(
            RMSNorm(width), column(width, whole.HEAD * sum(self.all_heads), bias=False)
        )
        self.project = opfuse.Sequential(*row(width, width), AddExtraInput())
        self.mlp = opfuse.Sequential(
            MakeExtraOutput().set_extra_output_channel(0, "residual", output_to_caller=False),
            RMSNorm(width),
            column(width, 4 * width),
            GELU(),
            *row(4 * width, width),
            AddExtraInput().set_extra_input_channel(0, "residual"),
        )

    forward = whole.Block.forward

    def load(self, other):
        """Copy this process's part of a whole block."""
        self.qkv[0].load_state_dict(other.qkv[0].state_dict())
        weight = other.qkv[1].weight.unflatten(0, (-1, whole.HEAD)).split(self.all_heads)
        parts = [part(each).flatten(0, 1) for each in weight]  # of queries, keys and values
        self.qkv[1].weight.data.copy_(torch.cat(parts))
        self.mlp[1].load_state_dict(other.mlp[1].state_dict())
        self.mlp[2].load_whole(other.mlp[2].weight, other.mlp[2].bias)
        for mine, theirs in ((self.project[:2], other.project[0]), (self.mlp[4:6], other.mlp[4])):
            mine[0].weight.data.copy_(part(theirs.weight, 1))
            mine[1].bias.data.copy_(theirs.bias)


class LanguageModel(nn.Module):
    """As :class:`train_lm.LanguageModel`, from bytes to the loss."""

    def __init__(self, width, layers):
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.head = opfuse.Sequential(
            RMSNorm(width), column(width, 256, bias=False), VocabParallelCrossEntropy()
        )

    def forward(self, tokens, targets):
        """Takes bytes and those that follow them, both ``(batch, length)``."""
        return self.head(self.blocks(self.embedding(tokens)), targets)

    def load(self, other):
        """Copy this process's part of a whole model."""
        self.embedding.load_state_dict(other.embedding.state_dict())
        for mine, theirs in zip(self.blocks, other.blocks, strict=True):
            mine.load(theirs)
        self.head[0].load_state_dict(other.head[0].state_dict())
        self.head[1].load_whole(other.head[1].weight)


def part(tensor, dim=0):
    """This process's part of a tensor."""
    return tensor.detach().chunk(dist.get_world_size(), dim)[dist.get_rank()]


def is_split(module, name):
    """Whether each process has a part of a parameter, and not the whole."""
    return getattr(module, "tensor_parallel_mode", None) is not None and name in ("weight", "bias")


def clip_gradients(model, most=1.0):
    """As ``clip_grad_norm_``: what is split counts on every process, the rest once."""
    squares = {True: torch.zeros(()), False: torch.zeros(())}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            squares[is_split(module, name)] += parameter.grad.square().sum()
    dist.all_reduce(squares[True])
    norm = sum(squares.values()).sqrt()
    for parameter in model.parameters():
        parameter.grad.mul_((most / (norm + 1e-6)).clamp(max=1))


def main():
    """Train, compare, report; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    sizes = {"steps": 20, "batch": 8, "context": 64, "width": 128, "layers": 2}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    first = dist.get_rank() == 0
    torch.manual_seed(0)
    reference = whole.LanguageModel(args.width, args.layers)
    model = LanguageModel(args.width, args.layers)
    model.load(reference)
    models = {"two processes": model, "one process": reference}
    optimizers = {
        name: torch.optim.AdamW(each.parameters(), lr=whole.LEARNING_RATE)
        for name, each in models.items()
    }
    text, _ = whole.load_text()
    generator = torch.Generator().manual_seed(0)
    apart = 0.0
    for step in range(1, args.steps + 1):
        tokens, targets = whole.draw_batch(text, args, generator)
        losses = {"two processes": model(tokens, targets)}
        losses["two processes"].backward()
        clip_gradients(model)
        if first:
            logits = reference(tokens)
            losses["one process"] = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            losses["one process"].backward()
            nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        for name in losses:
            optimizers[name].step()
            optimizers[name].zero_grad()
        if first:
            both = [losses[name].item() for name in models]
            apart = max(apart, abs(both[0] / both[1] - 1))
            print(
                f"step {step:3}: {both[0]:.6f} on two processes, {both[1]:.6f} on one", flush=True
            )
    report = opfuse.explain(model, tokens, targets)  # which runs the forward, so on all of them
    good = apart <= LIMIT
    if first:
        print(f"{report}\n\nThe losses {'agree' if good else 'DO NOT AGREE'}: {apart:.1e} apart.")
    dist.barrier()
    dist.destroy_process_group()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
