"""The head of a causal language model and its loss, which needs no logits for it.

In a training step with labels the model runs its own forward, on a stand-in for it whose head gives
no logits but what they are computed from. The loss computes both in one chain. Where the forward
does something else with the logits, they are computed, and the loss is the library's.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from opfuse import Conversion, Environment, Sequential
from opfuse.authoring import op_class
from opfuse.ops import BasicLinear, Bias, CrossEntropy

from . import standin

IGNORED = -100
_LOSS = "transformers.loss.loss_utils", "ForCausalLMLoss"


def is_causal(module: nn.Module) -> bool:
    """Whether a module has a head, and gives its logits and labels to a loss of the library's."""
    code = getattr(inspect.unwrap(op_class(module).forward), "__code__", None)
    return "lm_head" in module._modules and {"lm_head", "loss_function"} <= set(
        code.co_names if code is not None else ()
    )


def build(module: Any, env: Environment) -> Conversion | str:
    """The linear layer of the head, and the sum of the tokens' losses."""
    linear = module._modules["lm_head"]
    if "forward" in vars(module):
        return "its forward was replaced"
    if op_class(linear) is not nn.Linear or "forward" in vars(linear):
        return "lm_head is no plain torch.nn.Linear"
    # None is the library's default, of which it logs that it takes it
    if getattr(module, "loss_type", None) is not None and (why := _other_loss(module)):
        return why
    bias = [Bias.reading(linear)] if linear.bias is not None else []
    loss = CrossEntropy(ignore_index=IGNORED, reduction="sum", output_dtype=torch.float32)
    chain = Sequential(BasicLinear.reading(linear), *bias, loss)
    return Conversion(chain, ("lm_head",), _Call(op_class(module)), _separate)


def _separate(module: Any, x: Tensor, targets: Tensor) -> Tensor:
    """What the library computes, but for the division by the number of tokens."""
    logits = module.lm_head(x).float().flatten(0, -2)
    return F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum")


def _other_loss(module: Any) -> str:
    """Why the chain is not the loss of a model, or ``""``."""
    loss = module.loss_function
    name = getattr(loss, "__module__", ""), getattr(loss, "__qualname__", "")
    return "" if name == _LOSS else f"its loss is {name[1] or type(loss).__name__}"


class _Call:
    """The forward of the model, on a stand-in."""

    why = _apart = ""

    def __init__(self, cls: Any) -> None:
        self._signature = inspect.signature(cls.forward)

    def __call__(self, module: Any, chain: Any, *args: Any, **kwargs: Any) -> Any:
        """See :class:`opfuse.Conversion`."""
        self.why = self._apart or self._refusal(module, args, kwargs)
        if self.why:
            return NotImplemented
        loss = _Loss(chain, module.loss_function)
        head = {"lm_head": _Head(module.lm_head)}
        result = standin.run(module, head, {"_loss_function": loss}, args, kwargs)
        if not loss.is_by_chain:
            self._apart = "the loss it computes is not that of what lm_head gives"
        return _without_logits(result)

    def _refusal(self, module: Any, args: Any, kwargs: Any) -> str:
        """Why the module's own forward is to run, or ``""``."""
        if not (module.training and torch.is_grad_enabled()):
            return "outside of training it gives logits"
        try:
            given = self._signature.bind(module, *args, **kwargs).arguments
        except TypeError:
            return "it was called with other arguments"
        if not isinstance(given.get("labels"), Tensor):
            return "without labels it gives logits"
        if "ignore_index" in kwargs:
            return "it was called with ignore_index"
        return _other_loss(module)


class _Head(standin.Part):
    """What stands for the head: it computes nothing yet."""

    def __call__(self, x: Any) -> Any:
        return Logits(self._child, x)


class Logits:
    """Logits that are computed where something asks for more than their shape.

    Args:
        linear: The head.
        hidden: What it is given.
    """

    def __init__(self, linear: Any, hidden: Tensor) -> None:
        self.linear, self.hidden = linear, hidden
        self._value: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """The shape they would have."""
        return torch.Size((*self.hidden.shape[:-1], self.linear.out_features))

    @property
    def is_computed(self) -> bool:
        """Whether something asked."""
        return self._value is not None

    def value(self) -> Tensor:
        """The logits."""
        if self._value is None:
            self._value = self.linear(self.hidden)
        return self._value

    def __getattr__(self, name: str) -> Any:
        return getattr(self.value(), name)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = torch.utils._pytree.tree_map_only(cls, cls.value, (args, kwargs or {}))
        return function(*args, **kwargs)


def _forwarded(name: str) -> Any:
    return lambda self, *args: getattr(self.value(), name)(*args)


for (
    _name
) in "add radd sub rsub mul rmul truediv rtruediv pow matmul neg getitem setitem len".split():
    setattr(Logits, f"__{_name}__", _forwarded(f"__{_name}__"))


class _Loss:
    """What stands for the loss of a model.

    Attributes:
        is_by_chain: Whether the chain computed it.
    """

    is_by_chain = False

    def __init__(self, chain: Any, original: Any) -> None:
        self._chain, self._original = chain, original

    def __call__(self, logits: Any, labels: Any, vocab_size: Any, *args: Any, **kwargs: Any) -> Any:
        """The mean over the tokens, or their sum divided by ``num_items_in_batch``."""
        if args or type(logits) is not Logits or logits.is_computed:
            return self._by_library(logits, labels, vocab_size, *args, **kwargs)
        targets = kwargs.get("shift_labels")
        if targets is None:
            targets = F.pad(labels, (0, 1), value=IGNORED)[..., 1:]
        shape = logits.shape
        if targets.numel() != shape[:-1].numel() or vocab_size != shape[-1]:
            return self._by_library(logits, labels, vocab_size, **kwargs)
        self.is_by_chain = True
        targets = targets.to(logits.hidden.device).reshape(shape[:-1])
        total = self._chain(logits.hidden, targets)
        count = kwargs.get("num_items_in_batch")
        if count is None:
            count = (targets != IGNORED).sum()
        return total / (count.to(total.device) if isinstance(count, Tensor) else count)

    def _by_library(self, logits: Any, *args: Any, **kwargs: Any) -> Any:
        logits = logits.value() if isinstance(logits, Logits) else logits
        return self._original(logits, *args, **kwargs)


def _without_logits(result: Any) -> Any:
    """What the forward gave, without what only stands for logits."""
    if not dataclasses.is_dataclass(result):
        return torch.utils._pytree.tree_map_only(Logits, Logits.value, result)
    fields = {key: value for key, value in vars(result).items() if type(value) is Logits}
    found = {key: value.value() if value.is_computed else None for key, value in fields.items()}
    return dataclasses.replace(result, **found) if found else result
