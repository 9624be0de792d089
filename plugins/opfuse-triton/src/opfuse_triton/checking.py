"""Compile the launches of plugins at the shapes of real models, with no GPU."""

from __future__ import annotations

import hashlib
import json
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from typing import Any

import torch
import triton

from .accesses import THREAD, Access, find_accesses
from .cases import KernelCase
from .launches import Launch, kind_of
from .overwriting import refuse_races
from .recorded import CaseRun, case_lists, load_cases, record, storage_of, tensors_of
from .resources import Resources, occupancy, read_resources
from .targets import TARGETS, Target

WIDEST = 16
"""Bytes that one thread moves in one access on every target."""

_GEMM = {80: "mma.sync", 90: "wgmma", 100: "tcgen05", "gfx942": "mfma", "gfx950": "mfma"}


@dataclass(frozen=True)
class CheckedLaunch:
    """A launch that was compiled, and the faults that were found.

    Attributes:
        plugin: Name of the plugin.
        case: Name of the case.
        shape: The shape, as text, with the dtype if it is not bfloat16.
        kernel: Name of the kernel.
        target: The target, as text.
        constants: The ``tl.constexpr`` arguments that the caller gave, as text.
        config: The configuration, as :meth:`opfuse_triton.Config.to_dict` has it.
        resources: The resources of the kernel, None if it does not compile.
        occupancy: The share of a multiprocessor's warps that its programs can fill.
        widths: The narrowest access in bytes to each full-size operand.
        refusals: The faults, each as a sentence whose subject is the kernel.
    """

    plugin: str
    case: str
    shape: str
    kernel: str
    target: str
    constants: Mapping[str, str]
    config: Mapping[str, Any]
    resources: Resources | None
    occupancy: float
    widths: Mapping[str, int]
    refusals: tuple[str, ...]


def check(plugin: str | None = None, *, candidates: bool = False) -> list[CheckedLaunch]:
    """Compile every launch of every case for every target, in two processes.

    Args:
        plugin: Name of an installed plugin, or ``module:object``, a list of cases; None: every
            installed plugin that has cases.
        candidates: Compile every candidate of each kernel at the case's ``shapes`` in bfloat16, not
            only the one that is launched.

    Raises:
        ValueError: There is no such plugin, or a case does not do what it declares.
    """
    work: list[tuple[Any, ...]] = [
        (name, where, number, arch, candidates)
        for name, where in case_lists(plugin).items()
        for number, case in enumerate(load_cases(where))
        for arch, target in TARGETS.items()
        if case.fits(target)
    ]
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        found = pool.map(check_case, *zip(*work, strict=True)) if work else ()
        return [row for rows in found for row in rows]


def check_case(
    plugin: str, where: str, number: int, arch: int | str, candidates: bool = False
) -> list[CheckedLaunch]:
    """Compile every launch of one case for one target.

    Args:
        plugin: Name of the plugin.
        where: ``module:object``, its cases.
        number: Which of the cases.
        arch: Key of the target in :data:`opfuse_triton.TARGETS`.
        candidates: See :func:`check`.
    """
    rows: dict[str, CheckedLaunch] = {}
    for run, launch in _to_compile(load_cases(where)[number], arch, candidates):
        row = check_launch(plugin, run, launch)
        rows.setdefault(repr(row), row)  # a kernel may be launched twice
    return [*rows.values()]


def _to_compile(
    case: KernelCase, arch: int | str, candidates: bool
) -> Iterator[tuple[CaseRun, Launch]]:
    for shape, dtype, offset in case.compiled():
        run = record(case, shape, arch, None, dtype, offset)
        for launch in run.launches:
            configs = [launch.config]
            if candidates and dtype is torch.bfloat16 and not offset:
                configs = launch.kernel.possible(launch.target, launch.facts)
            yield from ((run, replace(launch, config=config)) for config in configs)


def hash_kernels(where: str) -> str:
    """A hash of what :func:`check` compiles, with all candidates: code, constants, configurations.

    Python around the kernels is not in it, nor is Triton's version.

    Args:
        where: ``module:object``, the cases.
    """
    digest = hashlib.sha256()
    for case in load_cases(where):
        for target in TARGETS.values():
            for run, launch in _to_compile(case, target.arch, True) if case.fits(target) else ():
                digest.update(f"{case.name} {run} {target} {launch.key}\n".encode())
    return digest.hexdigest()


def check_launch(plugin: str, run: CaseRun, launch: Launch) -> CheckedLaunch:
    """Compile one launch of a case, and look for faults."""
    row = CheckedLaunch(
        plugin, run.case.name, str(run), launch.kernel.name, str(launch.target),
        {name: _as_text(value) for name, value in launch.constants.items()},
        launch.config.to_dict(), None, 0.0, {}, (),
    )  # fmt: skip
    try:
        compiled = launch.compile()
    except Exception as error:  # any error of Triton, LLVM or ptxas
        said = (str(error).strip() or type(error).__name__).splitlines()
        where = f"{said[0]} " if len(said) > 1 else ""  # the source is between
        return replace(row, refusals=(f"does not compile: {where}{said[-1]}",))
    resources = read_resources(compiled)
    full = _full_parameters(run, launch)
    pointers = _pointers(launch)
    narrowest = _narrowest(find_accesses(compiled.asm["llir"], pointers), full)
    product = run.dtype if launch.kernel.name in run.case.gemms else None
    refusals = [
        *_refuse_resources(launch.target, resources),
        *_refuse_product(launch, resources, product),
        *_refuse_narrow(launch, narrowest, full, product),
        *refuse_races(compiled.asm["ttgir"], pointers, _overwrites(run.case, launch)),
    ]
    return replace(
        row,
        resources=resources,
        occupancy=occupancy(launch.target, resources),
        widths={name: min(kinds.values()) for name, kinds in narrowest.items()},
        refusals=tuple(refusals),
    )


def _as_text(value: Any) -> str:
    """A constant: a device function by its name."""
    if isinstance(value, tuple):
        return f"({', '.join(map(_as_text, value))})"
    return str(getattr(value, "__name__", value))


def _refuse_resources(target: Target, resources: Resources) -> Iterator[str]:
    if resources.spilled:
        spills = f"spills registers, {resources.spilled} bytes per thread"
        yield f"{spills}: take smaller tiles or more warps"
    if resources.shared > target.shared_memory:
        most = f"and {target.shared_memory} is all that a program may have"
        needs = f"needs {resources.shared} bytes of shared memory, {most}"
        yield f"{needs}: take smaller tiles or fewer stages"


def _refuse_product(
    launch: Launch, resources: Resources, product: torch.dtype | None
) -> Iterator[str]:
    wanted = _GEMM[launch.target.arch]
    # fp32 is multiplied exactly, without them
    if product not in (None, torch.float32) and not resources.matrix.get(wanted):
        others = ", ".join(resources.matrix) or "no matrix instruction at all"
        yield f"is a GEMM without {wanted}, it has {others}: see its tl.dot, tiles and warps"


def _refuse_narrow(
    launch: Launch,
    narrowest: Mapping[str, Mapping[str, int]],
    full: Mapping[str, Any],
    product: torch.dtype | None,
) -> Iterator[str]:
    each = [(kind, name, n) for name, kinds in narrowest.items() for kind, n in kinds.items()]
    for kind, name, width in sorted(each):
        # in AMD's layout of a product each thread holds 4 values of a row: 8 bytes, full lines
        direct = product is not None and launch.target.backend == "hip" and kind == "store"
        least = WIDEST // 2 if direct else WIDEST
        if product is torch.float32 and launch.target.arch == "gfx950" and kind == "load":
            least = 4  # whatever the tile, Triton moves fp32 to shared memory like that there
        if width < least and _is_aligned(full[name]):
            what = f"{kind}s {name} {width} bytes at a time, where {WIDEST} are possible"
            yield f"{what}: give each thread more of a row"


def _is_aligned(tensor: torch.Tensor) -> bool:
    """Return whether every row of a tensor begins at a multiple of 16 bytes."""
    size = tensor.dtype.itemsize
    steps = [stride * size for stride in tensor.stride() if stride != 1]
    contiguous = 1 in tensor.stride()
    starts = [tensor.storage_offset() * size, *steps]
    return contiguous and not any(start % WIDEST for start in starts)


def _full_parameters(run: CaseRun, launch: Launch) -> dict[str, torch.Tensor]:
    """The kernel's parameters that are full-size operands, with their tensors."""
    found = {}
    for name, value in launch.arguments.items():
        for tensor in tensors_of([value]):
            known = run.operands.get(storage_of(tensor))
            if known is not None and known[1].role == "full":
                found[name] = tensor
    return found


def _overwrites(case: KernelCase, launch: Launch) -> dict[str, str]:
    """The pairs of a case that may be one tensor in this launch: of one dtype, and as aligned."""
    of = launch.arguments
    pairs = case.overwrites.items()
    return {to: read for to, read in pairs if kind_of(of.get(to)) == kind_of(of.get(read))}


def _pointers(launch: Launch) -> list[str]:
    names = launch.kernel.fn.arg_names
    return [name for name in names if [*tensors_of([launch.arguments.get(name)])]]


def _narrowest(accesses: Iterable[Access], full: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """The bytes of the narrowest load and store of each full-size operand, but of one element."""
    found: dict[str, dict[str, int]] = {}
    for access in accesses:
        for name in sorted(access.operands & full.keys()):
            if access.kind in ("load", "store") and THREAD in access.operands:
                kinds = found.setdefault(name, {})
                kinds[access.kind] = min(kinds.get(access.kind, access.width), access.width)
    return found


def refusal_sentences(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """The refusals as whole sentences. One that holds for several targets is one sentence.

    Args:
        rows: Launches as mappings, as ``dataclasses.asdict`` or a report has them.
    """
    targets: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for refusal in row["refusals"]:
            subject = f"{row['case']} at {row['shape']}: {row['kernel']}"
            targets.setdefault((subject, refusal), []).append(row["target"])
    return [
        f"{subject} for {', '.join(dict.fromkeys(names))} {refusal}"
        for (subject, refusal), names in targets.items()
    ]


def write_report(path: pathlib.Path, plugin: str | None, rows: Sequence[CheckedLaunch]) -> None:
    """Write what was compiled, and the hash of the kernels, as JSON."""
    kernels = {name: hash_kernels(where) for name, where in case_lists(plugin).items()}
    head = json.dumps({"triton": triton.__version__, "kernels": kernels}, indent=1)
    lines = ",\n  ".join(json.dumps(asdict(row)) for row in rows)  # a change is a line of a diff
    path.write_text(f'{head[:-2]},\n "launches": [\n  {lines}\n ]\n}}\n', encoding="utf-8")


def verify_report(path: pathlib.Path, plugin: str | None) -> list[str]:
    """Compare a report with the kernels as they are.

    Args:
        path: A report that :func:`write_report` wrote.
        plugin: As for :func:`check`.

    Returns:
        A sentence for each plugin whose kernels have changed since, and for each refusal.
    """
    report = json.loads(path.read_text(encoding="utf-8"))
    lists = case_lists(plugin)
    stale = [
        f"{path} is not of these kernels of {name}: check them again with --report {path}"
        for name, where in lists.items()
        if report["kernels"].get(name) != hash_kernels(where)
    ]
    return stale + refusal_sentences(row for row in report["launches"] if row["plugin"] in lists)
