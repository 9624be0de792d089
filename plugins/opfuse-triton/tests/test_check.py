"""What ``python -m opfuse_triton check`` compiles, tells and refuses."""

import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
from dataclasses import asdict, replace

import pytest
import torch

from opfuse.testing.machine import is_interpreting

if importlib.util.find_spec("triton") is None or is_interpreting():
    pytest.skip("compiles with Triton, which must not interpret", allow_module_level=True)

import triton_toys as toys
from opfuse_triton import TARGETS, KernelCase, Operand
from opfuse_triton.accesses import find_accesses
from opfuse_triton.checking import (
    check_case,
    hash_kernels,
    refusal_sentences,
    verify_report,
    write_report,
)
from opfuse_triton.recorded import case_lists, record
from opfuse_triton.resources import Resources, occupancy

pytestmark = pytest.mark.alone

SUPPORT = pathlib.Path(__file__).parents[3] / "tests" / "support"
RULE = {80: "mma.sync", 90: "wgmma", 100: "tcgen05", "gfx942": "mfma", "gfx950": "mfma"}


def checked(name, number, arch, **options):
    return check_case("toys", f"triton_toys:{name}", number, arch, **options)


@pytest.mark.parametrize("arch", TARGETS)
def test_a_sound_kernel_passes_on_every_target(arch):
    (row,) = checked("SOUND", 0, arch)
    assert row.refusals == () and row.widths == {"x_ptr": 16, "y_ptr": 16}
    assert 8 <= row.resources.registers <= 64 and row.resources.spilled == 0
    assert (row.resources.matrix, row.resources.tma, row.occupancy) == ({}, 0, 1)


@pytest.mark.parametrize("arch", TARGETS)
def test_a_product_has_the_matrix_instructions_of_the_target(arch):
    (row,) = checked("SOUND", 1, arch)
    assert row.refusals == () and list(row.resources.matrix) == [RULE[arch]]
    assert row.resources.shared >= 2 * (128 + 128) * 64 // 2
    assert min(row.widths["a_ptr"], row.widths["b_ptr"]) == 16 and 0 < row.occupancy < 1


REFUSED = {
    0: r"spills at rows=64 features=16384: at_once_kernel for sm_90 spills registers, \d+ bytes per "
    r"thread: take smaller tiles or more warps",
    1: r"too large at m=4096 n=4096 k=1024: gemm_kernel for sm_90 needs (\d+) bytes of shared memory, "
    r"and 232448 is all that a program may have: take smaller tiles or fewer stages",
    2: r"no dot at m=4096 n=4096 k=1024: slow_gemm_kernel for sm_90 is a GEMM without wgmma, it has "
    r"no matrix instruction at all: see its tl.dot, tiles and warps",
    3: r"narrow at rows=8192 features=4096: scale_kernel for sm_90 loads x_ptr 8 bytes at a time, "
    r"where 16 are possible: give each thread more of a row",
}


@pytest.mark.parametrize("number", REFUSED)
def test_each_fault_is_refused_with_a_sentence(number):
    (row,) = checked("FAULTY", number, 90)
    assert [s for s in refusal_sentences([asdict(row)]) if re.fullmatch(REFUSED[number], s)]


def test_only_what_is_wrong_is_refused():
    of_spills, of_memory = (checked("FAULTY", number, 90)[0].refusals for number in (0, 1))
    assert (len(of_spills), len(of_memory)) == (1, 1)
    assert [
        s.split(" bytes")[0].rsplit(" ", 2)[1] for s in checked("FAULTY", 3, 90)[0].refusals
    ] == ["x_ptr", "y_ptr"]


@pytest.mark.parametrize("arch", [80, 90, "gfx950"])
def test_what_a_thread_has_read_itself_may_be_overwritten(arch):
    for number, case in enumerate(toys.OVERWRITING):
        (row,) = checked("OVERWRITING", number, arch)
        assert not [said for said in row.refusals if "overwrites" in said], case.name


@pytest.mark.parametrize("arch", [80, 90, "gfx950"])
def test_what_other_threads_read_may_not_be_overwritten(arch):
    (turns,), (first,) = (checked("RACING", number, arch) for number in (0, 1))
    (said,) = [said for said in turns.refusals if "overwrites" in said]
    layouts = re.findall(r"64x64 #ttg.blocked<\{[^}]*order = \[(\d, \d)\]", said)
    assert said.startswith("overwrites x_ptr, which other threads read, ")
    assert sorted(layouts) == ["0, 1", "1, 0"] and said.endswith("put tl.debug_barrier() between")
    (said,) = [said for said in first.refusals if "overwrites" in said]
    assert "which other threads read, one number for all and one number for all" in said


def test_the_same_tile_is_too_small_for_more_threads():
    """A program of an AMD GPU has twice the threads for its warps."""
    assert checked("FAULTY", 3, "gfx942")[0].widths == {"x_ptr": 4, "y_ptr": 4}


def test_rows_that_are_not_aligned_cannot_have_wide_accesses(monkeypatch):
    odd = KernelCase("odd", toys.TWICE.run, toys.one_to_one, [{"rows": 64, "features": 1001}], [])
    monkeypatch.setattr(toys, "ODD", [odd], raising=False)
    (row,) = checked("ODD", 0, 90)
    assert row.widths["x_ptr"] < 16 and row.refusals == ()


def test_what_does_not_compile_is_refused(monkeypatch):
    kernel = toys.Kernel(toys.scale_kernel, [toys.Config({"BLOCK": 1000})])
    case = KernelCase("broken", toys.scaled(kernel), toys.rows_of, [toys.REAL], [])
    monkeypatch.setattr(toys, "BROKEN", [case], raising=False)
    (row,) = checked("BROKEN", 0, 90)
    (sentence,) = row.refusals
    assert row.resources is None
    assert re.fullmatch(
        r"does not compile: at \d+:\d+: arange's range must be a power of 2", sentence
    )


def test_every_candidate_is_compiled_when_asked():
    rows = checked("SOUND", 0, 90, candidates=True)
    assert [row.config["constants"] for row in rows] == [{"BLOCK": 2048}, {"BLOCK": 4096}]
    assert [row.resources.warps for row in rows] == [4, 8]


@pytest.mark.parametrize(
    "arch, registers, shared, warps, share",
    [  # by the occupancy calculators' rules
        (90, 32, 0, 4, 1.0),
        (90, 168, 0, 8, 8 / 64),  # 16384 // (168 * 32) = 3 warps per scheduler, 12 in all
        (90, 33, 0, 4, 48 / 64),  # as if 40
        (90, 32, 100 * 1024, 4, 8 / 64),  # two programs with 101 of 228 KB each
        (80, 32, 100 * 1024, 4, 4 / 64),  # one, of 164 KB
        (90, 16, 0, 1, 32 / 64),  # no more than 32 programs
        ("gfx942", 128, 0, 4, 16 / 32),  # 512 // 128 = 4 waves per scheduler
        ("gfx942", 64, 40 * 1024, 4, 4 / 32),
        ("gfx950", 64, 40 * 1024, 4, 16 / 32),
    ],
)
def test_occupancy_is_limited_by_registers_memory_and_warps(arch, registers, shared, warps, share):
    taken = Resources(registers, 0, shared, warps, {}, 0)
    assert occupancy(TARGETS[arch], taken) == share


AMD = """
define amdgpu_kernel void @k(ptr addrspace(1) inreg %0, i32 inreg %1, ptr addrspace(1) %2, ptr addrspace(1) %3) {
  %5 = tail call ptr addrspace(8) @llvm.amdgcn.make.buffer.rsrc.p8.p1(ptr addrspace(1) %0, i16 0, i64 9, i32 9)
  %6 = tail call <4 x float> @llvm.amdgcn.raw.ptr.buffer.load.v4f32(ptr addrspace(8) %5, i32 %1, i32 0, i32 0)
  br label %7
7:
  %8 = phi ptr addrspace(1) [ %2, %4 ], [ %9, %7 ]
  %9 = getelementptr i8, ptr addrspace(1) %8, i64 64
  %10 = load <2 x i16>, ptr addrspace(1) %9, align 4
  %11 = select i1 true, ptr addrspace(1) %0, ptr addrspace(1) %2
  store <8 x bfloat> zeroinitializer, ptr addrspace(1) %11, align 16
  %12 = load ptr addrspace(1), ptr addrspace(1) %0, align 8
  %13 = load i8, ptr addrspace(1) %12, align 1
  %14 = atomicrmw fadd ptr addrspace(1) %3, float 1.0 syncscope("agent") monotonic, align 4
  store <4 x float> %6, ptr addrspace(3) null, align 16
  tail call void @llvm.amdgcn.global.load.async.lds(ptr addrspace(1) %8, ptr addrspace(3) null, i32 16, i32 0, i32 0)
  %15 = tail call range(i32 0, 1024) i32 @llvm.amdgcn.workitem.id.x()
  %16 = shl i32 %15, 4
  %17 = tail call <4 x float> @llvm.amdgcn.raw.ptr.buffer.load.v4f32(ptr addrspace(8) %5, i32 %16, i32 0, i32 0)
  ret void
}
"""


def test_an_access_is_followed_to_its_parameter():
    found = [(sorted(a.operands), a.kind, a.width) for a in find_accesses(AMD, ["x", "y"])]
    assert found == [
        (["x"], "load", 16),
        (["y"], "load", 4),
        (["x", "y"], "store", 16),
        (["x"], "load", 8),
        ([], "load", 1),  # an address that was read itself
        ([], "atomic", 0),  # Triton's own memory
        (["y"], "load", 16),
        (["thread", "x"], "load", 16),  # all others are of one element for all threads
    ]


def test_what_a_case_declares_is_compared_with_what_it_gives():
    scale = toys.SCALE

    def wrong_dtype(rows, features):
        made = toys.rows_of(rows, features)
        return {**made, "y": Operand(made["y"].shape, torch.float32, output=True)}

    with pytest.raises(ValueError, match=r"y is \(8192, 4096\) torch.bfloat16, and the case says"):
        record(KernelCase("scale", scale.run, wrong_dtype, [], []), toys.REAL, 90)
    with pytest.raises(ValueError, match="run gives 2 tensors, and the case has 1 outputs: y"):
        record(
            KernelCase("a", lambda x, s: (scale.run(x, s), x), toys.rows_of, [], []), toys.REAL, 90
        )
    with pytest.raises(ValueError, match="a launches no kernel at rows=8192 features=4096"):
        record(KernelCase("a", lambda x, s: x * 2, toys.rows_of, [], []), toys.REAL, 90)


def test_a_report_is_of_its_kernels(tmp_path, monkeypatch):
    source = tmp_path / "reported_toys.py"
    source.write_text("from triton_toys import SOUND, FAULTY\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    path, plugin = tmp_path / "report.json", "reported_toys:SOUND"
    rows = check_case(plugin, plugin, 0, 90)
    write_report(path, plugin, rows)
    assert json.loads(path.read_text())["launches"][0]["resources"]["spilled"] == 0
    assert verify_report(path, plugin) == []
    faulty = check_case(plugin, "reported_toys:FAULTY", 3, 90)
    write_report(path, plugin, faulty)
    assert verify_report(path, plugin) == refusal_sentences(map(asdict, faulty))
    write_report(path, plugin, rows)
    source.write_text("from triton_toys import SOUND, FAULTY  # no other kernel\n")
    assert verify_report(path, plugin) == []
    (sentence,) = verify_report(path, "reported_toys:FAULTY")
    assert "is not of these kernels" in sentence


CODE = """
import triton, triton.language as tl
from opfuse_triton import Config, Kernel, KernelCase
from triton_toys import REAL, rows_of

@triton.jit
def helped(x):
    return x * 2

@triton.jit
def doubling_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, helped(tl.load(x_ptr + i, mask=i < n)), mask=i < n)

KERNEL = Kernel(doubling_kernel, lambda target, facts: [Config({"BLOCK": 1024})])

def doubled(x, s):
    y = x.new_empty(x.shape)
    KERNEL.launch(lambda config: (1,), x, y, x.numel())
    return y

CASES = [KernelCase("doubled", doubled, rows_of, [REAL], [])]
"""


@pytest.mark.parametrize(
    "old, new, same",
    [
        ("[REAL], []", "[REAL], (),", True),
        ("return x * 2", "return x * 3", False),
        ("1024", "2048", False),
        ("x.new_empty(x.shape)", "x.new_empty(x.shape, dtype=x.dtype)", True),
        ("x, y, x.numel()", "x, y, 1", False),
    ],
)
def test_a_hash_is_of_what_is_compiled(tmp_path, monkeypatch, old, new, same):
    monkeypatch.syspath_prepend(str(tmp_path))
    hashes = []
    for name, code in (("before", CODE), ("after", CODE.replace(old, new))):
        (tmp_path / f"{name}.py").write_text(code)
        hashes.append(hash_kernels(f"{name}:CASES"))
        del sys.modules[name]
    assert code != CODE and (hashes[0] == hashes[1]) == same


@pytest.fixture
def installed(tmp_path):
    """A folder that makes the toys look like an installed plugin's cases."""
    info = tmp_path / "opfuse_plugin_toys-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.4\nName: opfuse-plugin-toys\nVersion: 1.0\n"
    )
    (info / "entry_points.txt").write_text("[opfuse_triton.cases]\ntoys = triton_toys:SOUND\n")
    return tmp_path


def test_cases_are_found_by_their_entry_point(installed, monkeypatch):
    monkeypatch.syspath_prepend(str(installed))
    assert case_lists("toys") == {"toys": "triton_toys:SOUND"} and "toys" in case_lists(None)
    with pytest.raises(ValueError, match="no installed plugin 'tois' has kernel cases; .*toys"):
        case_lists("tois")


def command(*arguments, cwd, **variables):
    path = os.pathsep.join([str(cwd), str(SUPPORT), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": path, **variables}
    return subprocess.run(
        [sys.executable, "-m", "opfuse_triton", *arguments],
        cwd=cwd, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def test_the_check_command_reports_and_verifies(installed):
    done = command("check", "toys", "--all", "--report", "r.json", cwd=installed)
    assert (done.returncode, done.stderr) == (0, "")
    assert "toys: scale\n  rows=8192 features=4096\n" in done.stdout
    assert re.search(r"\n    gemm_kernel: BM=128 BN=128 BK=64, 4 warps, 2 stages\n", done.stdout)
    assert re.search(
        r"\n      sm_90 +\d+ +- +\d+ +\d+% +\d+ wgmma +- +a:16 b:16 c:16\n", done.stdout
    )
    assert done.stdout.endswith("15 compiled kernels, nothing is refused\n")
    assert max(map(len, done.stdout.splitlines())) <= 100
    again = command("check", "toys", "--verify", "r.json", cwd=installed)
    assert (again.returncode, again.stdout) == (
        0,
        "r.json is of these kernels, and refuses nothing\n",
    )


def test_an_exact_product_in_fp32_needs_no_matrix_instructions(monkeypatch):
    both = replace(toys.NO_DOT, dtypes=(torch.bfloat16, torch.float32))
    monkeypatch.setattr(toys, "NO_GEMM", [both])
    refused = {row.shape: row.refusals for row in check_case("toys", "triton_toys:NO_GEMM", 0, 80)}
    (bf16, fp32) = sorted(refused)
    assert "without mma.sync" in refused[bf16][0] and fp32.endswith("float32")
    assert not any("without" in said for said in refused[fp32])


def test_the_check_command_refuses_bad_kernels_and_arguments(installed):
    done = command("check", "triton_toys:NO_GEMM", cwd=installed)
    assert done.returncode == 1
    words = " ".join(done.stdout.split("refused: ")[1].split())
    assert words.startswith(
        "no dot at m=4096 n=4096 k=1024: slow_gemm_kernel for sm_80 is a GEMM without mma.sync, it has"
    )
    assert "slow_gemm_kernel for gfx942, gfx950 is a GEMM without mfma" in " ".join(
        done.stdout.split()
    )
    assert max(map(len, done.stdout.splitlines())) <= 100
    for wrong, variables in (
        (("check", "tois"), {}),
        (("check", "toys", "--verify", "gone.json"), {}),
        (("check", "toys"), {"TRITON_INTERPRET": "1"}),
    ):
        done = command(*wrong, cwd=installed, **variables)
        assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
