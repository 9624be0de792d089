"""``opfuse.tune``: find the candidates of a model, measure each once, write the table."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ..core.engine.fuser import OperationFuser
from ..core.engine.program import Program
from ..core.environment import shape_of
from ..core.options import options
from ..core.plugins import manager
from ..core.settings import Recorder, current
from ..report.isolation import isolated
from ..report.replaced_forward import ReplacedForward
from . import table as tables
from .job import Job, add, check_writable
from .parts import MeasuredCall, as_compiled, candidates, extent
from .reference import Reference
from .report import TuningReport
from .trial import Trial
from .whole import Whole, switched_off

Progress = Callable[[int, int, str], None]


def tune(
    model: Callable[..., Any],
    *inputs: Any,
    compiled: bool = False,
    progress: Progress | None = None,
    **kwargs: Any,
) -> TuningReport:
    """Measure on this machine which fusions are right and not slower for a model.

    The forward pass runs in the caller's grad and autocast mode, with the plugins, options and
    recipe in force: once, and again for each level of converted modules whose own forward is
    faster. Each fusion that fits is then compared with the separate ops at these shapes: values and
    gradients first, within the tolerances of the dtype, then time in turns, and the bytes kept for
    the backward. What is alike is measured once. The results go into the table of this device, see
    :mod:`opfuse.tuning.table`, and plans are then made again with them.

    Parameters, buffers, gradients and the state of quantizers stay as they are, and so do the
    random number generators of PyTorch, Python and NumPy, and what forwards set or write into: the
    attributes of modules and of their classes, with tensors, arrays and generators in them. Lists,
    tuples, dicts, sets and deques are followed to any depth, other objects to their own attributes.
    A copy of all of that is kept meanwhile, so it needs memory for a second model. What a forward
    changes elsewhere stays changed: in objects that other objects hold, in globals, in objects of
    PyTorch's or Python's own classes, and in attributes that opfuse's ops set.

    If chains have collectives, each process of their group must call it. They measure together:
    each time is that of the slowest process, and all write the same entries.

    To tune for inference, call it under ``torch.no_grad()``. Give inputs of the size that matters:
    an entry applies to numbers of rows between the same powers of two.

    Args:
        model: A module, or any callable that calls some.
        *inputs: Its inputs.
        compiled: Measure each fusion, and each converted module, under ``torch.compile``, for plans
            that are made there; that takes seconds for each. Entries of eager calls apply to eager
            calls only.
        progress: Called as ``progress(done, of, what)`` before each comparison and at the end.
        **kwargs: Its keyword arguments.

    Returns:
        The report: ``str()`` fits a screen, ``details`` has every candidate, ``to_dict()`` is for
        programs.

    Raises:
        ValueError: The table's file is there, and is not a table.
        OSError: The table cannot be written.
        RuntimeError: Called in code that ``torch.compile`` or ``torch.export`` traces.
    """
    jobs: list[Job] = []
    with isolated(model, who="opfuse.tune"), contextlib.ExitStack() as off:
        recorder, again = _Collector(compiled), True
        while again:  # what is inside a module that declines its chain runs by itself
            recorder.hear(model, inputs, kwargs)
            off.enter_context(_together(recorder.groups))
            _run(recorder.candidates, recorder.wholes, len(jobs), progress)
            jobs += [*recorder.candidates, *recorder.wholes]
            slower = [whole.replaced for whole in recorder.wholes if whole.declines]
            off.enter_context(switched_off(slower))
            again = bool(slower)
    path = tables.path_for(jobs[0].device) if jobs else None
    unmeasured = dict.fromkeys(job.unmeasured for job in jobs if job.unmeasured)
    return TuningReport([job.result() for job in jobs if job.found], path, tuple(unmeasured))


@contextlib.contextmanager
def _together(groups: Sequence[Any]) -> Iterator[None]:
    """A block in which the processes of the largest of these groups tune together."""
    largest = max(groups, key=lambda group: group.size, default=None)
    once = largest.comparing_once("tuning") if largest else contextlib.nullcontext()
    with current.temporarily(tuning_group=largest), once:  # comparing takes time
        yield


def _run(
    candidates: Sequence[Trial], wholes: Sequence[Whole], done: int, progress: Progress | None
) -> None:
    """Measure the candidates of a call, then the modules, and write what is found."""
    paths = {job.device: tables.path_for(job.device) for job in (*candidates, *wholes)}
    for existing in filter(None, paths.values()):
        tables.read_rows(existing)  # refuses a file that is not a table before it measures
        check_writable(existing)
    progress, of = progress or (lambda *unused: None), done + len(candidates) + len(wholes)
    batches: tuple[Sequence[Job], ...] = candidates, wholes  # modules with the plans that follow
    for jobs in batches:
        try:
            for job in jobs:
                progress(done, of, job.title)
                job.run()
                done += 1
        finally:  # whatever ends it, what is known by then is written
            for device, path in paths.items():
                if path is not None:
                    add(path, [job.row() for job in jobs if job.found and job.device == device])
            tables.reload()
    progress(done, of, "")


class _Collector(Recorder):
    """Collects every candidate of the calls in its scope, those alike once."""

    def __init__(self, compiled: bool) -> None:
        self.candidates: list[Trial] = []
        self.wholes: list[Whole] = []
        self.groups: list[Any] = []
        self._compiled = compiled
        self._seen: set[Any] = set()

    def hear(self, model: Any, inputs: Any, kwargs: Any) -> None:
        """Make a call, and keep its new candidates."""
        self.candidates, self.wholes = [], []
        # a wrong fusion must not disturb it, and a compiled call is not recorded
        with self, options(fusion_limit=0), torch.compiler.set_stance("force_eager"):
            model(*inputs, **kwargs)

    def record(self, fuser: OperationFuser, program: Program, given: Any) -> None:
        """Keep the candidates, and the call if there are new ones."""
        if program.double_backward:
            return
        groups = [getattr(op, "collective_group", None) for op in program.chain.ops]
        self.groups += [group for group in groups if group is not None and group.size > 1]
        x, tensors, kwargs = given
        program = as_compiled(program) if self._compiled else program
        extras = tensors[program.num_params :]
        call = MeasuredCall(program, x.detach(), extras, kwargs or ({},) * len(program.chain.ops))
        found = candidates(call, manager.sources(current.selection))
        extents = [extent(candidate) for candidate in found]
        for span in dict.fromkeys(extents):  # together: they are compared with the same results
            reference = functools.cache(functools.partial(Reference, call, span))
            for candidate, own_span in zip(found, extents, strict=True):
                trial = Trial(call, candidate, reference)
                if own_span == span and self._is_new(trial, shape_of(x)):
                    self.candidates.append(trial)

    def replaced(self, replaced: ReplacedForward, module: nn.Module, tensors: Any) -> None:
        """Keep the two ways of a module, if it is not like one before."""
        whole = Whole(replaced, module, tensors, self._compiled)
        if current.recipe is None and self._is_new(whole, whole.shape):
            self.wholes.append(whole)

    def _is_new(self, job: Job, coming: Any) -> bool:
        """Return whether none was like it before, for such an input of the chain."""
        key = tables.subject_key(job.subject), *coming
        if key in self._seen:
            return False
        self._seen.add(key)
        return True
