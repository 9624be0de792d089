"""``opfuse.tune``: find the candidates of a model, measure each once, write the table."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..core import tuning_table as tables
from ..core.context_managers import options
from ..core.engine.fuser import OperationFuser
from ..core.engine.planner import rows_of
from ..core.engine.program import Program
from ..core.engine.step import Step
from ..core.introspection import op_class
from ..core.plugins import manager
from ..core.replaced_forward import ReplacedForward
from ..core.settings import Recorder, current
from .parts import as_compiled, candidates
from .report import Result, TuningReport
from .trial import Call, Trial
from .unchanged import unchanged
from .whole import Whole
from .writing import add, check_writable

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
    :mod:`opfuse.core.tuning_table`, and plans are then made again with them.

    Parameters, buffers, gradients and the state of quantizers stay as they are, and so do the
    random number generators of PyTorch, Python and NumPy, and what forwards set or write into: the
    attributes of modules, with tensors, arrays and generators in them. Lists, tuples, dicts, sets
    and deques are followed to any depth, other objects to their own attributes. A copy of all of
    that is kept meanwhile, so it needs memory for a second model. What a forward changes elsewhere
    stays changed: in objects that other objects hold, in attributes of classes, in globals, in
    objects of PyTorch's or Python's own classes, and in attributes that opfuse's ops set.

    To tune for inference, call it under ``torch.no_grad()``. Give inputs of the size that matters:
    an entry counts for numbers of rows between the same powers of two.

    Args:
        model: A module, or any callable that calls some.
        *inputs: Its inputs.
        compiled: Measure each fusion, and each converted module, under ``torch.compile``, for plans
            that are made there; that takes seconds for each. Entries of eager calls count for eager
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
    if torch.compiler.is_compiling():
        raise RuntimeError(
            "opfuse.tune cannot be traced by torch.compile or torch.export: call it outside"
        )
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    recorder, report = _Candidates(compiled), TuningReport([], None)
    off: list[ReplacedForward] = []
    again = True
    with torch.random.fork_rng(devices), unchanged(model):
        try:
            while again:  # what is inside those that give way runs by itself
                recorder.hear(model, inputs, kwargs)
                report = _measured(recorder, report, progress)
                slower = [whole.replaced for whole in recorder.wholes if whole.gives_way]
                for each in slower:
                    each.off = True
                off, again = off + slower, bool(slower)
        finally:
            for each in off:
                each.off = False
    return report


def _measured(
    recorder: _Candidates, before: TuningReport, progress: Progress | None
) -> TuningReport:
    """Measure the candidates of a call, and add them to the tables and to a report."""
    found, wholes = recorder.found, recorder.wholes
    jobs: list[Any] = [*found, *wholes]
    paths = {job.device: tables.path_for(job.device) for job in jobs}
    for existing in filter(None, paths.values()):
        tables.read_rows(existing)  # refuses a file that is not a table before it measures
        check_writable(existing)
    buffers = {id(b): (b, b.clone()) for job in found for b in job.buffers()}
    done = len(before.results)

    def measure(number: int, job: Any) -> None:
        if progress is not None:
            progress(done + number, done + len(jobs), job.title)
        job.measure()

    try:
        for number, job in enumerate(found):
            measure(number, job)
    except KeyboardInterrupt:
        _written(found, paths)  # what is known by then
        raise
    finally:
        for buffer, value in buffers.values():
            buffer.copy_(value)
    report = _written(found, paths)
    for number, whole in enumerate(wholes, len(found)):  # with the plans that follow from the rest
        measure(number, whole)
    if progress is not None:
        progress(done + len(jobs), done + len(jobs), "")
    return before.joined(_with_wholes(report, wholes, paths))


def _written(found: list[_Job], paths: dict[torch.device, Path | None]) -> TuningReport:
    """Write the measurements into the tables, and report them."""
    measured = [job for job in found if job.measured]
    _write(measured, paths)
    unmeasured = dict.fromkeys(job.unmeasured for job in found if job.unmeasured)
    first = next(iter(paths.values()), None)
    return TuningReport([job.result() for job in measured], first, tuple(unmeasured))


def _write(measured: Any, paths: dict[torch.device, Path | None]) -> None:
    """Add entries to the tables of their devices."""
    for device, path in paths.items():
        if path is not None:
            add(path, [each.row() for each in measured if each.device == device])
    tables.reload()


def _with_wholes(
    report: TuningReport, wholes: list[Whole], paths: dict[torch.device, Path | None]
) -> TuningReport:
    """Write and report the measurements of converted modules too."""
    measured = [whole for whole in wholes if whole.found is not None]
    _write(measured, paths)
    prefer = dict(current.options).get("prefer", "speed")
    results = [*report.results, *[whole.result(prefer) for whole in measured]]
    unmeasured = dict.fromkeys(whole.unmeasured for whole in wholes if whole.unmeasured)
    return TuningReport(results, report.path, (*report.unmeasured, *unmeasured))


@dataclasses.dataclass
class _Job:
    """One candidate to measure."""

    call: Call
    step: Step
    measured: Any = None
    unmeasured: str = ""

    @property
    def device(self) -> torch.device:
        return self.call.program.env.device

    @property
    def title(self) -> str:
        return str(self.step.source.name)

    def buffers(self) -> list[Any]:
        return [buffer for op in self.call.program.chain.ops for buffer in op.buffers()]

    def measure(self) -> None:
        try:
            trial = Trial(self.call, self.step)
            self.measured = trial.shape, trial.measure()
        except Exception as error:  # not of the fusion: nothing is known of that
            text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            self.unmeasured = f"{self.step.source.name}: it cannot be run by itself here, {text}"

    def row(self) -> dict[str, Any]:
        shape, found = self.measured
        return {
            "setting": tables.setting(self.device),
            "subject": self.call.program.measurements.subject(self.step),
            "shape": list(shape),
            "found": dataclasses.asdict(found),
        }

    def result(self) -> Result:
        (shape, found), source = self.measured, self.step.source
        trades = getattr(source.fusion, "trades_time", False)
        prefer = self.call.program.env.options.get("prefer", "speed")
        names = tuple(op_class(op).__name__ for op in self.step.matched)
        refusal = found.refusal(trades_time=trades, prefer=prefer)
        return Result(source.name, source.distribution, source.passes, names, shape, found, refusal)


class _Candidates(Recorder):
    """Collects every candidate of the calls in its scope, those alike once."""

    def __init__(self, compiled: bool) -> None:
        self.found: list[_Job] = []
        self.wholes: list[Whole] = []
        self._compiled = compiled
        self._seen: set[Any] = set()

    def hear(self, model: Any, inputs: Any, kwargs: Any) -> None:
        """Make a call, and keep its new candidates."""
        self.found, self.wholes = [], []
        # a fusion that is wrong is not to disturb it, and a compiled call tells nothing
        with self, options(fusion_limit=0), torch.compiler.set_stance("force_eager"):
            model(*inputs, **kwargs)

    def record(self, fuser: OperationFuser, program: Program, given: Any) -> None:
        """Keep the candidates, and the call if there are new ones."""
        super().record(fuser, program, given)
        if program.double_backward:
            return
        x, tensors, kwargs = given
        program = as_compiled(program) if self._compiled else program
        extras = tensors[program.num_params :]
        call = Call(program, x.detach(), extras, kwargs or ({},) * len(program.chain.ops))
        sources = manager.sources(current.selection)
        coming = rows_of(("rows", "features", "contiguous"), x)
        for step in candidates(program, sources, call.names):
            key = tables.subject_key(program.measurements.subject(step)), *coming
            if key not in self._seen:
                self._seen.add(key)
                self.found.append(_Job(call, step))

    def replaced(self, replaced: ReplacedForward, module: nn.Module, tensors: Any) -> None:
        """Keep the two ways of a module, if it is not like one before."""
        super().replaced(replaced, module, tensors)
        whole = Whole.of(replaced, module, tensors, self._compiled)
        key = tables.subject_key(whole.subject), whole.shape
        if key not in self._seen and current.recipe is None:
            self._seen.add(key)
            self.wholes.append(whole)
