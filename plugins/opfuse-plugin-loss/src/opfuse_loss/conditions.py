"""The conditions that the fused ops share, asked while planning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from opfuse_distributed.vocab_parallel_log_prob import VocabParallelTokenLogProb
from opfuse_triton import Predicted, is_interpreting, why_no_kernel

from opfuse import Environment, Fusion

HALF = torch.bfloat16, torch.float16
DTYPES = torch.float32, *HALF
"""The dtypes of logits that the kernels take."""

Condition = Callable[[Any, Environment], bool | str]

PREDICTED = Predicted(
    "loss",
    {
        "cross entropy": (9.51, ["cross entropy", "cross entropy with all options"]),
        "log-probabilities": (9.51, ["log-probabilities", "log-probabilities, all outputs"]),
    },
)
"""The speed of each fusion by the model."""

_ELSEWHERE = {
    True: "on a GPU the same chunks have a fusion that trades time for memory",
    False: "on a CPU the same chunks have a fusion that takes no more time",
}


def cannot_run(env: Environment) -> str:
    """Why no kernel can run, as a sentence; empty: one can."""
    if env.dtype not in DTYPES:
        return f"its kernel takes no {str(env.dtype)[6:]}"
    return why_no_kernel(env.device, env.capability)


def no_top_tokens(op: Any, env: Environment) -> str:
    """Why kernels do not compute the op, as a sentence; empty: they do, or nothing runs them."""
    if not op.top_k or isinstance(op, VocabParallelTokenLogProb):  # PyTorch's operations
        return ""
    return "" if cannot_run(env) else "its kernel gives no top tokens"


def is_frozen(op: Any, *names: str) -> bool:
    """Whether its parameters, or these, need no gradients, as told without computing them."""
    sources = [op.param_source(name) for name in names or op.param_names]
    params = [module._parameters.get(name) for module, name in sources]
    return all(param is not None and not param.requires_grad for param in params)


def chunks_pay(ops: Any, env: Environment) -> bool | str:
    """Whether a linear and what follows may run by chunks of rows."""
    if env.compiling:
        return "under torch.compile the chunks would be one after the other in the graph"
    if env.device.type != "cpu" and (reason := cannot_run(env)):
        return f"{reason}, and PyTorch's operations by chunks are many small ones"
    if env.recipe is not None:
        name = type(env.recipe).__name__
        return f"{name} quantizes the linear, and this fusion multiplies plain tensors"
    return smoothed(ops[-1]) or True


def smoothed(op: Any) -> str:
    """Why nothing here computes a loss, as a sentence; empty: its class weights factor rows."""
    both = getattr(op, "label_smoothing", 0) and op.weight is not None  # others have neither
    return "what label smoothing spreads has class weights of its own" if both else ""


def gradients_in_forward(ops: Any, env: Environment) -> bool | str:
    """Whether a forward that computes the gradients pays, for a loss."""
    if not env.requires_grad:
        return True
    if not env.training:
        return "outside of training no gradient is computed before it is asked for"
    least = ops[0].in_features * (2 if env.dtype in HALF else 1)
    if env.rows is not None and env.rows <= least and not is_frozen(ops[0], "weight"):
        what = "the gradient of the weight, in fp32, is not smaller than the logits"
        return f"for at most {least} rows {what}"
    return True


def by_chunks(
    pattern: Any, build: type, pays: Condition, name: str, *, interpreted: bool = True, **how: Any
) -> list[Fusion]:
    """A fusion by chunks of rows for a CPU, and one for a GPU, where it trades time for memory.

    Args:
        pattern: The pattern.
        build: The fused op.
        pays: The condition on both.
        name: The name on a CPU.
        interpreted: Whether kernels run in the fused op, so that Triton's interpreter is a GPU.
        **how: More arguments of both fusions.
    """

    def only(on_gpu: bool) -> Condition:
        def asked(ops: Any, env: Environment) -> bool | str:
            here = env.device.type != "cpu" or (interpreted and is_interpreting())
            return pays(ops, env) if here is on_gpu else _ELSEWHERE[here]

        return asked

    return [
        Fusion(pattern, build, only(False), name=name, **how),
        Fusion(
            pattern, build, only(True), name=f"{name}, on a GPU", declares=("trades_time",), **how
        ),
    ]


def computed_again(pattern: Any, build: type, pays: Condition, name: str) -> Fusion:
    """A fusion whose backward computes the logits again; others go first."""

    def asked(ops: Any, env: Environment) -> bool | str:
        if not env.requires_grad:
            return "no backward follows, in which something would be computed again"
        return pays(ops, env)

    name = f"{name}, computed again"
    return Fusion(pattern, build, asked, benefit=1, name=name, declares=("trades_time",))
