"""What a forward does with its logits: its source is read.

That may be to multiply, divide and cap them, and to compute their loss, and nothing else.
"""

from __future__ import annotations

import ast
import functools
import inspect
import math
import textwrap
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

Step = tuple[str, Any]
"""``"*"`` or ``"/"`` and a number, ``"tanh"`` and None, or ``"to"`` and a dtype."""

_MORE = "its forward does more with the logits than to compute the loss of them"
_ELSE = "its forward does more with the logits than to scale or cap them"
_GETTERS = "get_text_config", "get_decoder"
_TANH = "torch.tanh", "nn.functional.tanh", "F.tanh"


class Form(NamedTuple):
    """The logits are ``softcap * tanh(scale * z / softcap)``, of the ``z`` that the head gives.

    Attributes:
        scale: See above.
        softcap: None: they are ``scale * z``.
    """

    scale: float = 1.0
    softcap: float | None = None


def form_of(steps: Sequence[Step]) -> Form | None:
    """The form of what is done to the result of a head; None: it has another one."""
    steps, softcap, scale = [step for step in steps if step[0] != "to"], None, 1.0
    if [name for name, _ in steps[-3:]] == ["/", "tanh", "*"] and steps[-3][1] == steps[-1][1]:
        softcap, steps = steps[-1][1], steps[:-3]
    for name, of in steps:
        if name not in ("*", "/") or of == 0:
            return None
        scale = scale * of if name == "*" else scale / of
    fits = math.isfinite(scale) and scale != 0 and (softcap is None or 0 < softcap < math.inf)
    return Form(scale, softcap) if fits else None


class Reading:
    """What a forward does with its logits before their loss.

    Args:
        written: The steps, each with the condition of its statement or None, and with expressions
            in place of numbers.
        local: The values of names that the forward assigns once, as expressions.
    """

    def __init__(
        self,
        written: Sequence[tuple[ast.expr | None, str, ast.expr | None]],
        local: Mapping[str, ast.expr],
    ) -> None:
        self._written, self._local = written, local

    def form(self, module: Any) -> Form | str:
        """The form that a module's logits have, or a sentence that says why it is not known."""
        steps: list[Step] = []
        try:
            for condition, name, number in self._written:
                if condition is not None and self._value(condition, module) is None:
                    continue
                of = None if number is None else self._value(number, module)
                if number is not None and type(of) not in (int, float):
                    what = f"{ast.unparse(number)}, a {type(of).__name__}"
                    return f"its forward scales or caps the logits by {what}"
                steps.append((name, of))
        except (LookupError, AttributeError) as error:
            return f"its forward scales or caps the logits by what is not known: {error}"
        found = form_of(steps)
        return found or "its forward scales or caps the logits in a way that is not known"

    def _value(self, node: ast.expr, module: Any) -> Any:
        """The value of an expression of attributes, which its class or its config may compute."""
        match node:
            case ast.NamedExpr(value=value):
                return self._value(value, module)
            case ast.Constant(value=value):
                return value
            case ast.Name(id="self"):
                return module
            case ast.Name(id=name) if name in self._local:
                return self._value(self._local[name], module)
            case ast.Attribute(value=of, attr=name):
                return getattr(self._value(of, module), name)
            case ast.Call(func=ast.Attribute(value=of, attr=name), args=[], keywords=[]):
                if name in _GETTERS:
                    return getattr(self._value(of, module), name)()
            case ast.Call(func=ast.Name(id="getattr"), args=args, keywords=[]):
                return getattr(*[self._value(arg, module) for arg in args])
        raise LookupError(ast.unparse(node))


@functools.lru_cache(maxsize=256)
def read(forward: types.FunctionType) -> Reading | str:
    """What a forward does with its logits, or why that is more than to compute the loss of them.

    It has to be, in this order and with statements about other things between them::

        logits = self.lm_head(...)
        logits = logits * number
        if number is not None:
            logits = torch.tanh(logits / number) * number
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=..., **kwargs)
        return Output(logits=logits, ...)
    """
    try:
        (function,) = ast.parse(textwrap.dedent(inspect.getsource(forward))).body
    except (OSError, SyntaxError, ValueError):
        return "the source of its forward is not there"
    body: list[Any] = function.body  # type: ignore[attr-defined]
    every = list(ast.walk(function))
    heads = [n for n, of in enumerate(body) if isinstance(of, ast.Assign) and _calls_head(of.value)]
    losses = [(n, call) for n, of in enumerate(body) for call in _guarded_losses(of)]
    single = all(_count(every, name) == 1 for name in ("lm_head", "loss_function"))
    if not (len(heads) == len(losses) == 1 and single and isinstance(body[-1], ast.Return)):
        return _MORE
    (first,), ((last, loss),), output = heads, losses, body[-1].value
    ((target,),) = [body[first].targets]
    if not isinstance(target, ast.Name) or not isinstance(output, ast.Call):
        return _MORE
    uses = {id(n) for n in every if isinstance(n, ast.Name) and n.id == target.id}
    written, known = [], [*loss.args[:1]]
    for statement in body[first:last]:
        inside = {id(node) for node in ast.walk(statement)}
        if uses & inside:
            steps = [*_steps_of(statement, target.id)]
            if not steps or len(uses & inside) != 2 * len(steps) - (statement is body[first]):
                return f"{_ELSE}: {textwrap.shorten(ast.unparse(statement), 80)}"
            uses -= inside
            written += [(condition, *step) for condition, found in steps for step in found]
    known += [k.value for k in (*loss.keywords, *output.keywords) if k.arg == "logits"]
    others = {k.arg for k in loss.keywords} <= {"logits", "labels", "vocab_size", None}
    returns = any(isinstance(node, ast.Return) for node in every if node is not body[-1])
    if uses != {id(node) for node in known} or len(known) != 2 or not others or returns:
        return _MORE
    return Reading(written, _assigned_once(every))


def _guarded_losses(statement: ast.stmt) -> Iterator[ast.Call]:
    """The calls of the loss in ``if labels is not None: loss = self.loss_function(...)``."""
    if isinstance(statement, ast.If) and ast.unparse(statement.test) == "labels is not None":
        for node in () if statement.orelse else statement.body:
            if isinstance(node, ast.Assign) and isinstance(call := node.value, ast.Call):
                if ast.unparse(call.func) == "self.loss_function":
                    yield call


def _steps_of(statement: Any, logits: str) -> Iterator[tuple[ast.expr | None, list[Any]]]:
    """For each assignment to logits its condition and steps; nothing, if there is an other one."""
    condition, body = None, [statement]
    match statement:
        case ast.If(test=ast.Compare(left=condition, ops=[ast.IsNot()], comparators=[none])):
            if statement.orelse or ast.unparse(none) != "None":
                return
            body = statement.body
    found = []
    for each in body:
        match each:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if name == logits:
                found.append((condition, _steps(value, logits)))
            case _:
                return
    if all(steps is not None for _, steps in found):
        yield from found  # type: ignore[misc]


def _steps(node: Any, logits: str) -> list[tuple[str, Any]] | None:
    """What an expression does to logits; None: something else than is known."""
    match node:
        case ast.Name(id=name) if name == logits:
            return []
        case ast.Call() if _calls_head(node) and ast.unparse(node.func) == "self.lm_head":
            return []
        case ast.BinOp(left=of, op=ast.Mult() | ast.Div() as op, right=number):
            step = "*" if isinstance(op, ast.Mult) else "/", number
        case ast.Call(func=ast.Attribute(value=of, attr="float"), args=[], keywords=[]):
            step = "to", None
        case ast.Call(func=function, args=[of], keywords=[]) if ast.unparse(function) in _TANH:
            step = "tanh", None
        case _:
            return None
    before = _steps(of, logits)
    return None if before is None else [*before, step]


def _calls_head(node: ast.expr) -> bool:
    """Return whether ``self.lm_head(...)`` is called in an expression."""
    calls = [each for each in ast.walk(node) if isinstance(each, ast.Call)]
    return any(ast.unparse(call.func) == "self.lm_head" for call in calls)


def _count(nodes: list[ast.AST], name: str) -> int:
    """Return how often an attribute is read."""
    return sum(isinstance(node, ast.Attribute) and node.attr == name for node in nodes)


def _assigned_once(nodes: list[ast.AST]) -> dict[str, ast.expr]:
    """The values of the names that are assigned once."""
    stored = [n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    values = {}
    for node in nodes:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.NamedExpr(target=ast.Name(id=name)):
                if stored.count(name) == 1:
                    values[name] = node.value
    return values
