"""The head of a causal language model and its loss, which needs no logits for it.

Called with labels the model runs its own forward, on a stand-in for it whose head does
not compute the logits but returns their inputs. The loss computes both in one chain, and the output
computes the logits if they are read. That is done only for forwards of the library, and only for
those that do no more with the logits than to scale and cap them: their source is read for this.
"""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any

import torch
from opfuse_convert import Conversion
from opfuse_convert.grammar import Place, function_places
from opfuse_convert.grammar.reads import class_places
from torch import Tensor, nn
from torch.nn import functional as F

from opfuse import Environment, Sequential
from opfuse.ops import BasicLinear, Bias, ConstantScale, CrossEntropy
from opfuse.ops.authoring import op_class
from opfuse.ops.cross_entropy import capped
from opfuse.report.calls import plan_of

from . import forwards, sharded, standin
from .logits import Logits, later

IGNORED = -100


def is_causal(module: nn.Module) -> bool:
    """Return whether a module has a head, and a loss of the head's logits."""
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
        return "lm_head is not a plain torch.nn.Linear"
    if why := sharded.why_not_called(linear):
        return why
    forward = inspect.unwrap(op_class(module).forward)
    if not forward.__module__.startswith("transformers."):
        return "its forward is not that of a model of transformers"
    if not _is_librarys(inspect.getattr_static(op_class(module), "loss_function", None)):
        return "its loss_function is not that of transformers"
    reading = forwards.read(forward)
    form = reading if isinstance(reading, str) else reading.form(module)
    if isinstance(form, str):
        return form
    # None is the library's default; the library logs that it takes it
    if getattr(module, "loss_type", None) is not None and (why := _other_loss(module)):
        return why
    bias = [Bias.reading(linear)] if linear.bias is not None else []
    if bias and form.scale != 1:
        return "its head has a bias, and its logits are scaled"
    # of the input rather than of the logits: what no chain of linear and loss has between them
    scale = [ConstantScale(form.scale)] if form.scale != 1 else []
    dtype = {"output_dtype": torch.float32}
    loss = CrossEntropy(ignore_index=IGNORED, softcap=form.softcap, reduction="sum", **dtype)
    chain = Sequential(*scale, BasicLinear.reading(linear), *bias, loss)
    call, separate = _HeadCall(op_class(module), chain, form), functools.partial(_separate, form)
    places, head = _places(module, forward), ("lm_head",)
    return Conversion(chain, head, call, separate, places=places, called=head)


def _places(module: nn.Module, forward: Any) -> list[Place]:
    """The parts of a model's forward and of its loss; each call checks which loss it is."""
    library: Any = sys.modules.get("transformers.loss.loss_utils")
    losses = "ForCausalLMLoss", "fixed_cross_entropy"
    written = [getattr(library, name) for name in losses if hasattr(library, name)]
    _, places = class_places(op_class(module), "loss_function", "loss_function")
    return [*places, *[p for each in (forward, *written) for p in function_places(each)]]


def _separate(form: forwards.Form, module: Any, x: Tensor, targets: Tensor) -> Tensor:
    """The library's loss, without the division by the number of tokens."""
    head = module.lm_head  # its hooks run around this
    logits = op_class(head).forward(head, x)
    logits = logits * form.scale if form.scale != 1 else logits
    logits = capped(logits, form.softcap).float().flatten(0, -2)
    return F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum")


# What the loss is


def _is_librarys(attribute: Any) -> bool:
    """Return whether an attribute is the library's property, which reads ``_loss_function``."""
    getter = getattr(attribute, "fget", None)
    return getattr(getter, "__module__", None) == "transformers.modeling_utils"


def _other_loss(module: Any) -> str:
    """Why the chain is not the loss of a model, or ``""``."""
    loss, library = module.loss_function, sys.modules.get("transformers.loss.loss_utils")
    names = vars(library) if library is not None else {}
    if loss is not names.get("ForCausalLMLoss"):
        return f"its loss is {getattr(loss, '__qualname__', type(loss).__name__)}"
    parts = (loss, names), (names.get("fixed_cross_entropy"), names), (F.cross_entropy, vars(F))
    if any(getattr(part, "__globals__", None) is not home for part, home in parts):
        return "the library's loss was replaced"
    return ""


# The call


class _HeadCall:
    """The forward of the model, on a stand-in."""

    why = ""

    def __init__(self, cls: Any, chain: Any, form: forwards.Form) -> None:
        self._signature = inspect.signature(cls.forward)
        self._ops, self._form = chain, form

    def __call__(self, module: Any, chain: Any, *args: Any, **kwargs: Any) -> Any:
        """See :class:`opfuse_convert.Conversion`."""
        self.why = why = self._refusal(module, args, kwargs)
        if why:
            return NotImplemented
        trains = module.training and torch.is_grad_enabled()
        ops = None if trains else self._ops
        loss = _Loss(chain, ops, self._form, module.loss_function)
        head = {"lm_head": _Head(module.lm_head)}
        result = standin.run(module, head, {"_loss_function": loss}, args, kwargs)
        self.why = loss.why
        return _settled(result, module)

    def _refusal(self, module: Any, args: Any, kwargs: Any) -> str:
        """Why the module's own forward must run, or ``""``."""
        if torch.compiler.is_compiling():
            return "under torch.compile it gives logits"
        try:
            given = self._signature.bind(module, *args, **kwargs).arguments
        except TypeError:
            return "it was called with other arguments"
        if not isinstance(given.get("labels"), Tensor):
            return "without labels it gives logits"
        if "ignore_index" in kwargs:
            return "it was called with ignore_index"
        if why := sharded.why_not_called(module.lm_head) or _other_loss(module):
            return why
        if module.lm_head.weight.dtype is torch.float64:
            return "its loss is computed in fp32, which keeps less than the chain's fp64"
        return ""


class _Head(standin.ChildInPlace):
    """Replaces the head; it computes nothing yet."""

    def __call__(self, x: Any) -> Logits:
        return Logits(self._child, x)


class _Loss:
    """Replaces the loss of a model.

    Args:
        chain: Runs the chain.
        ops: The chain, if it is to run only where it does not hold all logits; else None.
        form: That of the logits which the chain computes the loss of.
        original: The loss.
    """

    why = ""

    def __init__(self, chain: Any, ops: Any, form: forwards.Form, original: Any) -> None:
        self._chain, self._ops, self._form, self._original = chain, ops, form, original

    def __call__(self, logits: Any, labels: Any, vocab_size: Any, **kwargs: Any) -> Any:
        """The mean over the tokens, or their sum divided by ``num_items_in_batch``."""
        if type(logits) is not Logits:
            return self._original(logits, labels, vocab_size, **kwargs)
        targets = kwargs.get("shift_labels")
        if targets is None:
            targets = F.pad(labels, (0, 1), value=IGNORED)[..., 1:].contiguous()
        shape = logits.hidden.shape[:-1]
        fits = targets.numel() == shape.numel() and vocab_size == logits.linear.out_features
        if forwards.form_of(logits.steps) != self._form:
            self.why = "its logits are scaled or capped otherwise than when it was converted"
        if not fits or "ignore_index" in kwargs or self.why:
            return self._original(logits.value, labels, vocab_size, **kwargs)
        targets = targets.to(logits.hidden.device).reshape(shape)

        def computed(x: Tensor) -> Any:
            logits.start(x)
            if self._ops is not None and (why := _holds_all(self._ops, x, targets)):
                self.why = why
                return op_class(logits.linear).forward(logits.linear, x)
            return self._chain(x, targets)

        total, result = sharded.within(logits.linear, logits.hidden, computed)
        if self.why:  # whoever evaluates may read the logits too, and they are there
            vars(logits)["value"] = value = logits.stepped(result)
            return self._original(value, labels, vocab_size, **kwargs)
        count = kwargs.get("num_items_in_batch")
        if count is not None:
            return total / (count.to(total.device) if isinstance(count, Tensor) else count)
        count = (targets != IGNORED).sum().to(total.dtype)
        # the mean over no tokens is NaN, as 0 / 0 is, and its gradient is zero, as in torch
        return total / count.clamp(min=1) + 0 / count


def _holds_all(chain: Any, x: Tensor, targets: Tensor) -> str:
    """Why a chain would hold all logits, or ``""``."""
    plan = plan_of(chain, x, targets)
    if plan is not None and len(plan.forward[-1].basic_ops) > 1:
        return ""
    return "outside of training it gives logits, where no plugin computes the loss without them"


def _settled(result: Any, module: Any) -> Any:
    """The result of the forward; an output without logits computes them when they are read."""
    if isinstance(result, tuple):
        return tuple(_settled_logits(each) if type(each) is Logits else each for each in result)
    if type(result.logits) is Logits:
        states = sharded.states_around(module, module.lm_head)
        if "value" not in vars(result.logits) and states is not None:
            return later(result, states)
        result.logits = _settled_logits(result.logits)
    return result


def _settled_logits(logits: Logits) -> Tensor:
    """The logits now; the very ones that the loss was computed from, if it was."""
    return logits.value if "value" in vars(logits) else logits.apart
