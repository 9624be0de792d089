"""The machine code of casts for Hopper: ptxas before CUDA 13 gets halves of converted pairs wrong.

It takes a half from a register that it only writes afterwards, or from the stack pointer. An H100
showed both: a quarter of the columnwise codes of fp32 tensors were wrong, and an eighth of the
codes of some gradients. So kernels convert four values into a word, and never see a half.
"""

import pathlib
import re
import subprocess

import pytest
import torch

from opfuse.testing.machine import is_interpreting

if is_interpreting():
    pytest.skip("nothing is compiled while Triton interprets", allow_module_level=True)
triton = pytest.importorskip("triton", reason="Triton is not installed")

from opfuse_fp8.cases import CASES  # noqa: E402
from opfuse_triton.recorded import record  # noqa: E402

TOOLS = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
INSTRUCTION = re.compile(r"/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.]+)\s*(.*?)\s*;")


def early_reads(text):
    """How many halves of converted pairs are read before they are moved to where they are read."""
    found, code = 0, [(op, args.replace(".reuse", "").split(", ")) for op, args in INSTRUCTION.findall(text)]  # fmt: skip
    for number, (op, args) in enumerate(code):
        if op != "PRMT" or args[2] not in ("0x7610", "0x7632") or args[0] != args[3]:
            continue
        written = [i for i in range(number) if code[i][1][0] == args[1]]
        if not written or not code[written[-1]][0].startswith("F2FP"):
            continue
        for op, (into, *read) in reversed(code[written[-1] + 1 : number]):
            if into == args[0]:
                break
            if op == "LOP3.LUT" and read[:2] == [args[0], "0xffff"]:
                found += 1
                break
    return found


def stack_pointer_reads(text):
    """How many instructions compute with the stack pointer; PRMT may fill what nobody reads."""
    return sum(
        op not in ("PRMT", "LDC") and "R1" in args.replace(".reuse", "").split(", ")[1:]
        for op, args in INSTRUCTION.findall(text)
        if not args.startswith("R1,")
    )


@pytest.mark.costly(5)
@pytest.mark.parametrize("rows, features", [(64, 96), (1, 64), (160, 256)])
@pytest.mark.parametrize(
    "name, dtype, offset",
    [
        ("cast, delayed", torch.float32, 0),
        ("cast, current", torch.float32, 0),
        ("SwiGLU + cast, delayed", torch.float32, 0),
        ("cast + bias, current", torch.bfloat16, 1),
        ("cast + SwiGLU by 32, 1 x 128", torch.float32, 1),
    ],
)
def test_halves_of_pairs_are_read_when_they_are_there(
    name, dtype, offset, rows, features, tmp_path
):
    tool = TOOLS / "nvdisasm"
    if not tool.exists():
        pytest.skip("this Triton comes without nvdisasm")
    (case,) = [case for case in CASES if case.name == name]
    shape = {"rows": rows, "features": features}
    converted = 0
    for number, launch in enumerate(record(case, shape, 90, None, dtype, offset).launches):
        cubin = tmp_path / f"{number}.cubin"
        cubin.write_bytes(launch.compile().asm["cubin"])
        done = subprocess.run([tool, "-c", cubin], capture_output=True, text=True, check=True)
        converted += len(re.findall(r"F2FP\S*E[45]M", done.stdout))
        assert early_reads(done.stdout) == stack_pointer_reads(done.stdout) == 0
    assert converted


def test_it_is_seen_where_it_is():
    code = """
        /*0000*/  F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C R4, R5, R4, R19 ;
        /*0010*/  LOP3.LUT R17, R16, 0xffff, RZ, 0xc0, !PT ;
        /*0020*/  PRMT R16, R4.reuse, 0x7610, R16 ;
    """
    assert early_reads(code) == 1
    assert early_reads(code.replace("R17, R16,", "R17, R18,")) == 0
    code = """
        /*0000*/  LDC R1, c[0x0][0x28] ;
        /*0010*/  IADD3 R1, R1, -0x8, RZ ;
        /*0020*/  PRMT R24, R1, 0x3340, R1 ;
        /*0030*/  LOP3.LUT R23, R1, 0xffff, RZ, 0xc0, !PT ;
    """
    assert stack_pointer_reads(code) == 1
