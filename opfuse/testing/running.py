"""Running a case with its fusion alone or with none, and watching what the fused op does."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..core.engine.fuser import OperationFuser
from ..core.engine.plan import FusionPlan
from ..core.engine.program import Program
from ..core.errors import PluginWarning
from ..core.fused_op import FusedOperation
from ..core.fusion import Fusion
from ..core.hookspecs import TOOLS, hookimpl
from ..core.plugins import manager
from ..core.records import PluginRecord
from ..core.settings import Recorder, Settings, current
from ..tuning.comparing import gradients
from . import recipes
from .cases import Built, Case, Subject, seeded
from .failures import UNUSED, Declined, Failure, blamed

R = TypeVar("R")


@contextlib.contextmanager
def only(*fusions: Subject | None) -> Iterator[None]:
    """Only the plugin with the kit's recipes, only these fusions, only options of plugins.

    A warning about a plugin is an error.
    """
    settings = current.values
    options = tuple(option for option in settings.options if "." in option[0])
    tools = [tool for tool in manager.tools if tool.name != "tuning"]  # no measurements
    bare = manager.temporarily(_registered=[], tools=tools)
    with bare, recipes.offered(), warnings.catch_warnings():
        warnings.simplefilter("error", PluginWarning)
        for subject in filter(None, fusions):
            manager.register_fusion(subject.passes, subject.fusion, False)
        current.values = Settings(options, recipes.NAME)
        try:
            yield
        finally:
            current.values = settings


class Plans(Recorder):
    """Collects the plans of every call in this thread, for a ``with`` block."""

    def __init__(self) -> None:
        self.plans: list[FusionPlan] = []

    def record(self, fuser: OperationFuser, program: Program, given: Any) -> None:
        """Keep the plan."""
        self.plans.append(program.plan)

    def require(self, case: Case) -> None:
        """Raise unless the case's fusion is in the plans, in the passes it is for.

        Raises:
            Declined: It refused, or the pass it is for does not run there.
            Failure: It is not used, and nothing says why.
        """
        subject, passes = case.subject, case.subject.passes
        plans = [plan for plan in self.plans if plan.backward or passes != "backward"]
        if self.plans and not plans:
            raise Declined("there is no backward")
        for plan in plans:
            steps = plan.backward if passes == "backward" else plan.forward
            if subject.name in {step.fusion for step in steps}:
                return
            reasons = [refusal.reason for refusal in plan.refused if refusal.fusion == subject.name]
            if reasons:
                raise Declined(reasons[0])
            if not case.edges <= {edge for step in steps for edge, _ in step.casts}:
                raise Declined("nothing is cast where its pattern has a cast")
        if (case.before or case.after) and not isinstance(subject.fusion, Fusion):
            raise Declined("a fusion function decides for itself which chains it takes")
        raise Failure(UNUSED)


@dataclasses.dataclass
class RunResult:
    """The results of one forward and backward.

    Attributes:
        built: The chain and its tensors.
        given: The arguments of the chain.
        outputs: With their autograd graph.
        weights: The incoming gradients, of the outputs that have one.
        grads: By leaf, for those that need one.
        states: Of torch's generator after the forward, and after the backward.
    """

    built: Built
    given: list[Tensor]
    outputs: tuple[Tensor, ...]
    weights: list[Tensor] = dataclasses.field(default_factory=list)
    grads: dict[str, Tensor | None] = dataclasses.field(default_factory=dict)
    states: list[Tensor] = dataclasses.field(default_factory=list)

    def detached(self) -> RunResult:
        """The outputs alone, without a graph."""
        return RunResult(self.built, self.given, tuple(y.detach() for y in self.outputs))


def forward(
    case: Case, dtype: torch.dtype | None = None, *, built: Built | None = None, chain: Any = None
) -> RunResult:
    """Run the forward of a case with the plugins and options that are in force.

    Args:
        case: The case.
        dtype: See :meth:`Case.build`.
        built: The chain, if it was built before.
        chain: Makes the function to call from the chain.
    """
    built = built or case.build(dtype)
    given = built.inputs()
    outputs, state = built.run(given, chain(built.chain) if chain else built.chain)
    return RunResult(built, given, outputs, states=[state])


def backward(case: Case, result: RunResult, retain_graph: bool = False) -> RunResult:
    """Add the gradients to a forward's result.

    Args:
        case: The case.
        result: The result of :func:`forward`.
        retain_graph: Let the backward run again.
    """
    reached = {"first": slice(1), "extra": slice(1, None)}.get(case.reached, slice(None))
    pairs = [*zip(result.outputs, case.weights(result.outputs), strict=True)][reached]
    result.weights = [weight for y, weight in pairs if y.requires_grad]
    wanted = {name: leaf for name, leaf in result.built.leaves.items() if leaf.requires_grad}
    outputs = [y for y, _ in pairs if y.requires_grad]
    with seeded(case.device, 1) as state:
        found = gradients(outputs, [*wanted.values()], result.weights, again=retain_graph)
        result.states = [*result.states[:1], *[state()] * bool(found)]
    result.grads = dict(zip(wanted, found or [None] * len(wanted), strict=True))
    return result


def fused(case: Case, *, grads: bool = True) -> RunResult:
    """Run a case with its fusion.

    Args:
        case: The case.
        grads: Run the backward too.

    Raises:
        Declined: The fusion refused, or the separate ops do.
        Failure: It is not used, or it raised.
    """
    separate(case)
    with only(case.subject), Plans() as plans, blamed():
        result = forward(case)
        plans.require(case)
        return backward(case, result) if grads else result


def both(case: Case, step: Callable[[], R]) -> tuple[R, R]:
    """The results of ``step`` with the fusion, and without any.

    Raises:
        Declined: The fusion refused, or the separate ops do.
        Failure: It is not used.
    """
    with references_only(case):
        expected = step()
    with only(case.subject), Plans() as plans:
        got = step()
    plans.require(case)
    return got, expected


def with_truth(case: Case, step: Callable[[torch.dtype | None], R]) -> tuple[R, R, R]:
    """The results of :func:`both`, and the truth: of ``step`` in fp64, where there is one."""
    with references_only(case):
        truth = step(None if alone.get() else case.exact)
    return (*both(case, lambda: step(None)), truth)


def separate(case: Case, dtype: torch.dtype | None = None) -> RunResult:
    """The same case without any fusion; with ``dtype`` fp64, the truth.

    Raises:
        Declined: The separate ops do not take it.
    """
    if not alone.get():  # whatever watches the fusion, or however it is called
        none: Any = None
        case = case.with_(subject=case.subject._replace(fusion=none, makers=()))
    return _separate(case, dtype and case.exact, bool(alone.get()))


@functools.lru_cache(maxsize=2048)
def _separate(case: Case, dtype: torch.dtype | None, itself: bool) -> RunResult:
    with references_only(case):
        return backward(case, forward(case, None if itself else dtype))


def references(case: Case) -> tuple[RunResult, RunResult]:
    """The references for a fused result: the separate ops', and the truth in fp64.

    Raises:
        Declined: The separate ops do not take it.
    """
    return separate(case), separate(case, torch.float64)


checked: contextvars.ContextVar[Any] = contextvars.ContextVar("checked", default=None)
"""The chains whose cases a check runs on, or None."""

alone: contextvars.ContextVar[str] = contextvars.ContextVar("alone", default="")
"""Whether a fusion is compared with "itself"; "lone": the call is one that it is compared with."""


@contextlib.contextmanager
def holding(variable: contextvars.ContextVar[R], value: R) -> Iterator[None]:
    """For a ``with`` block: The variable has this value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@contextlib.contextmanager
def references_only(case: Case) -> Iterator[None]:
    """For a ``with`` block: :func:`only` what a fusion is compared with, no fusion or itself.

    Raises:
        Declined: It does not take the case either.
    """
    kept = case.subject if alone.get() else None
    try:
        with holding(alone, alone.get() and "lone"), only(kept):
            yield
    except (Failure, Declined):
        raise
    except Exception as error:
        raise Declined(f"the separate ops raise {type(error).__name__}: {error}") from error


class Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls ``before`` and ``after`` with every operation."""

    keeps_no_tensors = True

    def __init__(self, before: Callable[[Any, Any, Any], None] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._before = before

    def after(self, func: Any, given: Any, result: Any) -> None:
        """Look at a result, and at the arguments."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._before is not None:
            self._before(func, args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        self.after(func, (args, kwargs), result)
        return result


Callback = Callable[[FusedOperation, list[Any], Any, Any], None]


class _Watch:
    """The tool by which fused ops call back."""

    callbacks: Mapping[str, Any] = {}

    @hookimpl
    def opfuse_wrap_step(self, step: Any, pass_name: str, run: Any) -> Any:
        """See :func:`opfuse.core.hookspecs.opfuse_wrap_step`."""
        callback = self.callbacks.get(pass_name)

        def call(ctxs: Any, *tensor: Any, **given: Any) -> Any:
            result = run(ctxs, *tensor, **given)
            callback(step.op, ctxs, *(tensor or (None,)), result)  # type: ignore[misc]
            return result

        return call if callback and isinstance(step.op, FusedOperation) else None


_WATCH = _Watch()


_WATCHING = PluginRecord("opfuse-testing-watch", recipes.NAME, "0", TOOLS, load=lambda: _WATCH)
"""The tool, which is among the others in :func:`watched` alone."""


@contextlib.contextmanager
def watched(*callbacks: Callback | None) -> Iterator[None]:
    """For a ``with`` block: Fused ops call back after forward, backward and recomputation.

    The callback gets the op, its contexts, the incoming tensor (None where the output is computed
    again) and the result.
    """
    _WATCH.callbacks = dict(zip(("forward", "backward", "recompute"), callbacks))  # noqa: B905
    with manager.temporarily(tools=[*manager.tools, _WATCHING]):
        yield


class OneByOne(FusedOperation):
    """Its basic ops and casts, one after the other."""

    kwarg_names = None

    def fuser_forward(self, basic_op_ctxs: Any, input_: Tensor, **given: Any) -> tuple[Tensor, Any]:
        """See :meth:`opfuse.FusibleOperation.fuser_forward`."""
        return self.run_separately(basic_op_ctxs, input_, **given)

    def fuser_backward(self, basic_op_ctxs: Any, grad_output: Tensor, **given: Any) -> Any:
        """See :meth:`opfuse.FusibleOperation.fuser_backward`."""
        return self.run_separately_backward(basic_op_ctxs, grad_output, **given)


def one_by_one(case: Case) -> Case:
    """The case with a fusion of the same ops that runs them, and their casts, one by one."""
    declares = {"casts"} & {*getattr(case.subject.fusion, "declares", ())}
    fusion = Fusion([op.cls for op in case.ops], OneByOne, name="one by one", declares=declares)
    return case.with_(subject=case.subject._replace(fusion=fusion))
