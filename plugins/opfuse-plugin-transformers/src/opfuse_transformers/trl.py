"""The log-probabilities that trl's trainers ask their models for, by a chain of head and tokens.

A trainer gives its model, and that of the reference, another forward (``add_fused_lm_head``): with
``fused_lm_head=True`` it runs the model's body, and one function of trl computes the numbers of
each token from hidden states and the weights of the head. That forward runs as trl wrote it. In it,
and for this model alone, the name of that function stands for the chain. The function is known by
its values: for small numbers, it has to give what the chain gives.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
import types
from typing import Any

import torch
from opfuse_convert import NOTHING, Conversion, Held, functions_of, reaches
from opfuse_convert.grammar import Place, function_places
from opfuse_convert.parallel import is_inner
from torch import Tensor, nn
from torch.nn import functional as F

from opfuse import Environment, Sequential, options
from opfuse.ops import BasicLinear, Bias, TokenLogProb
from opfuse.ops.authoring import op_class, wide
from opfuse.ops.token_log_prob import row_log_probs
from opfuse.report.calls import plan_of

from .rotations import renamed

OPTION = "transformers.log_probs"
_HOME, _ADDS, _NAME = "trl.trainer.utils", "add_fused_lm_head", "_ChunkedLogProbFunction"
_TAKES = (
    "hidden weight bias targets temperature chunk_size final_logit_softcapping logit_scale outputs"
).split()
_GIVES = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
_CHUNK = 1 << 15


# The forward


def is_fused(module: nn.Module) -> bool:
    """Return whether trl gave a model its forward, whatever is around that by now."""
    return _forward_of(module) is not None


def _forward_of(module: nn.Module) -> Any:
    """The forward that trl gave a model, or None."""
    code = getattr(getattr(sys.modules.get(_HOME), _ADDS, None), "__code__", None)
    found = functions_of(module) if code is not None else ()
    return next((each for each in found if is_inner(each, code)), None)


def build(module: Any, env: Environment) -> Conversion | str:
    """The head, and the numbers of each token."""
    function = _forward_of(module)
    if not reaches(module, function):
        return "what is around the forward that trl gave it calls that in an unknown way"
    kernel = function.__globals__.get(_NAME)
    if _NAME not in function.__code__.co_names or not _takes_as_known(kernel):
        return f"trl's {_ADDS} does not call the {_NAME} that is known"
    found = _head_of(module)
    numbers = _numbers_of(inspect.getclosurevars(function).nonlocals)
    if isinstance(found, str) or isinstance(numbers, str):
        return found if isinstance(found, str) else str(numbers)
    name, head = found
    if not _computes_as_known(kernel, numbers, head.bias is not None):
        return f"trl's {_NAME} computes something else than is known"
    chain = Sequential(*numbers.ops(head))
    call = _Call(function, kernel, chain, head, numbers, env.options.get(OPTION) == "chain")
    places = [
        p for each in (function, kernel.forward, kernel.backward) for p in function_places(each)
    ]
    places.append(Place(function.__globals__, _NAME, kernel, f"trl's {_NAME}"))
    separate = None if "is_top1" in numbers.outputs else call.separate
    return Conversion(chain, (name,), call, separate, places=places, function=function)


def _takes_as_known(kernel: Any) -> bool:
    """Return whether a function of autograd has the arguments that are known."""
    if not (isinstance(kernel, type) and issubclass(kernel, torch.autograd.Function)):
        return False
    return [*inspect.signature(kernel.forward).parameters][1:] == _TAKES


def _head_of(module: Any) -> tuple[str, Any] | str:
    """The linear layer whose weights trl reads, with its name; or why there is none."""
    head = module.get_output_embeddings()
    for name, each in module.named_modules() if isinstance(head, nn.Module) else ():
        inside = any(each is part for part in head.modules())
        if inside and op_class(each) is nn.Linear and each.weight is head.weight:
            return name, each
    return f"its head is a {type(head).__name__}, and not a torch.nn.Linear"


# The chain


class _Numbers:
    """What the numbers of each token depend on.

    Args:
        temperature: What logits are divided by.
        softcap: What limits them before, or None.
        scale: What they are multiplied by first.
        outputs: The names of what trl asks for.
    """

    def __init__(
        self, temperature: float, softcap: float | None, scale: float, outputs: tuple[str, ...]
    ) -> None:
        self.given, self.outputs = (temperature, softcap, scale), outputs
        # softcap * tanh(scale * x / softcap) / temperature, with the scale in the others
        self.temperature = temperature / scale
        self._softcap = None if softcap is None else softcap / scale

    def ops(self, head: Any) -> list[Any]:
        """The ops of the chain."""
        last = TokenLogProb(
            temperature=self.temperature,
            softcap=self._softcap,
            entropy="entropy" in self.outputs,
            log_sum_squares="log_sum_sq_probs" in self.outputs,
            top_k=int("is_top1" in self.outputs),
        )
        bias = [] if head.bias is None else [Bias.reading(head)]
        return [BasicLinear.reading(head), *bias, last]

    def as_trl(self, found: Any, hidden: Tensor, targets: Tensor, head: Any) -> list[Any]:
        """What trl's function gives, from what the chain gave."""
        first, *others = found if isinstance(found, tuple) else (found,)
        given = dict.fromkeys(_GIVES) | {"log_probs": first}
        for name in ("entropy", "log_sum_sq_probs"):
            if name in self.outputs:
                given[name] = others.pop(0)
        if "log_sum_sq_probs" in self.outputs:
            given["log_sum_sq_probs"] = given["log_sum_sq_probs"].detach()
        if "is_top1" in self.outputs:
            given["is_top1"] = others[0][..., 0] == targets
        if "mean_logits" in self.outputs:
            given["mean_logits"] = self._means(hidden, head)
        return [given[name] for name in _GIVES]

    @torch.no_grad()
    def _means(self, hidden: Tensor, head: Any) -> Tensor:
        """The mean logit of each row, which is its logit by the mean weight."""
        dtype = wide(hidden.dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            found = hidden.to(dtype) @ head.weight.mean(0, dtype=dtype)
        found = found if head.bias is None else found + head.bias.mean(dtype=dtype)
        return found / self.temperature


def _numbers_of(held: Any) -> _Numbers | str:
    """What the forward that trl made holds, or why no chain computes it."""
    names = "temperature", "final_logit_softcapping", "logit_scale", "outputs"
    if not held.keys() >= {*names}:
        return f"trl's {_ADDS} is not the one that is known"
    temperature, softcap, scale, outputs = [held[name] for name in names]
    for name, number in (("temperature", temperature), ("logit_scale", scale)):
        if not isinstance(number, (int, float)) or not 0 < number < float("inf"):
            return f"its {name} is {number!r}, and a chain takes one above 0"
    if softcap is not None and not 0 < softcap < float("inf"):
        return f"its final_logit_softcapping is {softcap!r}, and a chain takes one above 0"
    if not {"log_probs"} <= {*outputs} <= {*_GIVES}:
        return f"trl asks for {', '.join(outputs)}; known are {', '.join(_GIVES)}"
    if softcap is not None and "mean_logits" in outputs:
        return "trl asks for the mean of capped logits, which no op gives"
    return _Numbers(temperature, softcap, scale, tuple(outputs))


def _computes_as_known(kernel: Any, numbers: _Numbers, has_bias: bool) -> bool:
    """Return whether trl's function gives what the chain gives, and its gradients, for few rows."""
    rows, features, classes = 7, 3, 11
    draw = functools.partial(
        torch.randn,
        generator=torch.Generator("cpu").manual_seed(0),
        device="cpu",
        dtype=torch.float32,
    )
    sizes = [(rows, features), (classes, features), *[(classes,)] * has_bias]
    read = [draw(size).requires_grad_() for size in sizes]
    hidden, weight, bias = (*read, None)[:3]
    logits = F.linear(hidden, weight, bias)
    targets = logits.detach().argmax(-1)
    targets[::2] = 5
    temperature, *others = numbers.given
    given = hidden, weight, bias, targets, temperature, _CHUNK, *others, numbers.outputs
    *_, last = numbers.ops(nn.Linear(features, classes, bias=has_bias, device="meta"))
    found = row_log_probs(logits, targets, last.numbers_of())
    head = types.SimpleNamespace(weight=weight, bias=bias)
    ours, theirs = numbers.as_trl(found, hidden, targets, head), kernel.apply(*given)
    if [each is None for each in ours] != [each is None for each in theirs]:
        return False
    pairs = [pair for pair in zip(ours, theirs, strict=True) if pair[0] is not None]
    if any(mine.requires_grad != their.requires_grad for mine, their in pairs):
        return False
    trained = [pair for pair in pairs if pair[0].requires_grad]
    dys = [draw(rows) for _ in trained]
    grads = [torch.autograd.grad(ys, read, dys) for ys in zip(*trained, strict=True)]
    return all(
        mine.shape == their.shape and torch.allclose(mine.float(), their.float(), 1e-4, 1e-5)
        for mine, their in [*pairs, *zip(*grads, strict=True)]
    )


class _Call:
    """The forward that trl gave a model, whose function of log-probabilities is the chain.

    Attributes:
        why: Why the chain did not run; ``""``: it did.
    """

    why = ""

    def __init__(
        self, function: Any, kernel: Any, chain: Any, head: Any, numbers: _Numbers, anywhere: bool
    ) -> None:
        self._function, self._kernel, self._chain = function, kernel, chain
        self._head, self._numbers, self._anywhere = head, numbers, anywhere

    def __call__(self, module: Any, run: Any, *args: Any, **kwargs: Any) -> Any:
        """See :class:`opfuse_convert.Conversion`."""
        self.why = ""
        if not kwargs.get("fused_lm_head"):
            self.why = "it was called for logits, not for log-probabilities"
        elif torch.compiler.is_compiling():
            self.why = "under torch.compile trl's own function runs"
        if self.why:
            return NotImplemented
        of, instead = self._function, types.SimpleNamespace(apply=functools.partial(self._of, run))
        return renamed(of, {_NAME: instead})(module, *args, **kwargs)

    def _of(self, run: Any, *given: Any) -> Any:
        """What trl's function gives: by the chain, if that needs no logits."""
        hidden, _, _, targets, *_ = given
        with options(prefer="memory"):
            self.why = self._refusal(*given)
            if self.why:
                return self._kernel.apply(*given)
            found = run(hidden, targets)
        return self._numbers.as_trl(found, hidden, targets, self._head)

    def _refusal(
        self, hidden: Tensor, weight: Any, bias: Any, targets: Tensor, temperature: Any, *more: Any
    ) -> str:
        """Why trl's function is to run, or ``""``."""
        head, numbers, (_, *others, outputs) = self._head, self._numbers, more
        if weight is not head.weight or bias is not head.bias:
            return "trl reads other weights than those of the head"
        if ((temperature, *others), tuple(outputs)) != (numbers.given, numbers.outputs):
            return "trl asks for other numbers than when it was converted"
        if not (hidden.is_cpu or self._anywhere):
            return f"no chain was compared with trl's kernel there; {OPTION}='chain' has it run"
        autocast = torch.is_autocast_enabled(hidden.device.type)
        if not autocast and hidden.dtype is not weight.dtype:
            return f"its input is of {hidden.dtype}, its parameters are of {weight.dtype}"
        plan = plan_of(self._chain, hidden, targets)
        if plan is not None and len(plan.forward) == 1:
            return ""
        if plan is None:
            return "its chain would run in parts, and hold all logits"
        whole = [each.reason for each in plan.refused if len(each.basic_ops) == len(self._chain)]
        return f"its chain would hold all logits: {whole[0] if whole else 'no plugin fuses it'}"

    def separate(self, module: Any, x: Tensor, targets: Tensor) -> Any:
        """What the chain gives, by trl's function."""
        head, (temperature, *others) = self._head, self._numbers.given
        names = [name for name in self._numbers.outputs if name != "mean_logits"]
        given = x.reshape(-1, x.shape[-1]), head.weight, head.bias, targets.flatten()
        found = self._kernel.apply(*given, temperature, _CHUNK, *others, tuple(names))
        kept = [
            each.view(targets.shape).to(wide(x.dtype))
            for name, each in zip(_GIVES, found, strict=True)
            if name in names
        ]
        return kept[0] if len(kept) == 1 else tuple(kept)


# Trainers

_ASKING = (
    "compute_loss",
    "_compute_loss",
    "compute_ref_log_probs",
    "_get_per_token_logps_and_entropies",
)


def is_trainer(module: nn.Module) -> bool:
    """Return whether modules are those that a trainer of trl holds."""
    return isinstance(module, Held) and any(map(_is_trls, type(module.of).__mro__))


def _is_trls(cls: type) -> bool:
    return cls.__module__.partition(".")[0] == "trl"


def about(module: Any, env: Environment) -> str:
    """What is to be said of a trainer as such, apart from its models."""
    written = itertools.takewhile(lambda cls: not _is_trls(cls), type(module.of).__mro__)
    for attributes in (vars(module.of), *map(vars, written)):
        for name in filter(attributes.__contains__, _ASKING):
            return f"its {name} is not trl's, and what that asks its models for is not known"
    if any(map(is_fused, module.modules())):
        return NOTHING
    return f"its log-probabilities come from logits, and not from a model with trl's {_ADDS}"
