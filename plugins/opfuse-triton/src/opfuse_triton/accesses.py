"""The global accesses of a compiled kernel: their operands and widths.

Triton's LLVM IR is read, of NVIDIA and AMD targets alike. There every value has one definition, so
an address is followed from the access back to the parameter that it was computed from. On NVIDIA
the accesses are inline PTX, on AMD loads, stores and intrinsics.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

THREAD = "thread"
"""Stands among operands for the index of the thread: without it all threads access one element."""

_BITS = {"half": 16, "bfloat": 16, "float": 32, "double": 64, "ptr": 64}
_VALUE = re.compile(r"%[-\w$.]+")
_PTX = re.compile(r"\b(ld|st|atom|red)\.global([.:\w]*)")
_PTX_COPY = re.compile(r"cp\.async\.c[ag]\.shared\.global\b[^,]*,[^,]*, (0x[0-9a-f]+|\d+)")
_GLOBAL = re.compile(r"ptr addrspace\([18]\) (?:\w+ )*(%[-\w$.]+)")
_LOAD = re.compile(
    r"= load (?:atomic |volatile )*(<\d+ x \w+>|\w+)(?: addrspace\(\d\))?, ptr addrspace\(1\)"
)
_STORE = re.compile(r"^\s*store (?:atomic |volatile )*(<\d+ x \w+>|\w+) .*, ptr addrspace\(1\)")
_CALL = re.compile(r"call (?:\w+ )*?(<\d+ x \w+>|\w+) @llvm\.([\w.]+)\((.*)\)")


class Access(NamedTuple):
    """One access of a thread to global memory.

    Attributes:
        operands: What its address is computed from: parameters of the kernel, usually one, and
            :data:`THREAD`. None where the address itself was read from memory.
        kind: ``"load"``, ``"store"``, ``"atomic"``, or ``"TMA"`` for a whole tile at once.
        width: Bytes that one thread moves; 0 for TMA.
    """

    operands: frozenset[str]
    kind: str
    width: int


def find_accesses(llir: str, pointers: Sequence[str]) -> list[Access]:
    """Find the global accesses of a kernel.

    Args:
        llir: What Triton compiled the kernel to, ``asm["llir"]``.
        pointers: Names of the kernel's parameters that are pointers or descriptors, in order.

    Raises:
        ValueError: There is no kernel in the text.
    """
    head = re.search(r"^define [^\n]*_kernel void @[^\n]*", llir, re.MULTILINE)
    if head is None:
        raise ValueError("there is no kernel in this LLVM IR")
    lines = llir[head.end() : llir.index("\n}", head.end())].splitlines()
    origins = _origins(lines, dict(zip(_pointer_parameters(head[0]), pointers, strict=False)))
    return [
        Access(frozenset().union(*(origins.get(name, frozenset()) for name in names)), kind, width)
        for line in lines
        for names, kind, width in _accesses_of(line)
    ]


def _pointer_parameters(head: str) -> list[str]:
    """The values of a kernel's pointers. Descriptors begin with one; Triton's own come last."""
    inside = head[head.index("(") + 1 :]
    return re.findall(r"(?:^|, )ptr[^%]*?(%[-\w$.]+)(?=[,)])", inside)


def _origins(lines: Sequence[str], parameters: dict[str, str]) -> dict[str, frozenset[str]]:
    """What each value is computed from, see :class:`Access`. Loops need more than one turn."""
    found = {value: frozenset({name}) for value, name in parameters.items()}
    definitions = []
    for line in lines:
        value, is_definition, rest = line.strip().partition(" = ")
        if "sreg.tid" in rest or "workitem.id" in rest:
            found[value] = frozenset({THREAD})
        elif is_definition and not re.match(r"load\b|.*@llvm\.\S*load|.*asm ", rest):
            definitions.append((value, _VALUE.findall(rest)))
    changed = True
    while changed:
        changed = False
        for value, used in definitions:
            known = found.get(value, frozenset())
            new = known.union(*(found.get(name, known) for name in used))
            if new != known:
                found[value], changed = new, True
    return found


def _accesses_of(line: str) -> Iterator[tuple[list[str], str, int]]:
    """The accesses in one line: the values that are addresses, the kind and the width."""
    if " asm " in line:
        yield from _inline(line)
        return
    for pattern, kind in ((_LOAD, "load"), (_STORE, "store")):
        if found := pattern.search(line):
            pointer = line[found.end() - len("ptr addrspace(1)") :]
            yield _GLOBAL.findall(pointer)[:1], kind, _size(found[1])
    if "= atomicrmw " in line or "= cmpxchg " in line:
        if names := _GLOBAL.findall(line):
            yield names[:1], "atomic", 0
    elif found := _CALL.search(line):
        yield from _intrinsic(*found.groups())


def _inline(line: str) -> Iterator[tuple[list[str], str, int]]:
    line = line.replace(r"\0A", " ").replace(r"\09", " ")
    names = _GLOBAL.findall(line)
    for operation, modifiers in _PTX.findall(line):
        vector = re.search(r"\.v(\d)", modifiers)
        bits = re.search(r"\.(?:b|u|s|f|bf)(\d+)", modifiers)
        width = (int(vector[1]) if vector else 1) * (int(bits[1]) if bits else 0) // 8
        yield names, {"ld": "load", "st": "store"}.get(operation, "atomic"), width
    for size in _PTX_COPY.findall(line):
        yield names, "load", int(size, 0)
    if "cp.async.bulk.tensor" in line or "cp.reduce.async.bulk.tensor" in line:
        yield re.findall(r"ptr (?:\w+ )*(%[-\w$.]+)", line), "TMA", 0


def _intrinsic(result: str, name: str, arguments: str) -> Iterator[tuple[list[str], str, int]]:
    """The accesses of LLVM's and AMD's intrinsics: plain, masked, or by buffer descriptors."""
    if not (names := _GLOBAL.findall(arguments)[:1]) or "make.buffer" in name or "prefetch" in name:
        return
    if "atomic" in name:
        yield names, "atomic", 0
    elif "lds" in name:  # straight to shared memory: the size is an argument
        size = re.search(r"ptr addrspace\(3\) [^,]*, i32 (\d+)", arguments)
        yield _VALUE.findall(arguments), "load", int(size[1]) if size else 0
    elif "store" in name:
        stored = re.match(r"<\d+ x \w+>|\w+", arguments)
        yield _VALUE.findall(arguments), "store", _size(stored[0]) if stored else 0
    elif "load" in name:
        yield _VALUE.findall(arguments), "load", _size(result)


def _size(type_: str) -> int:
    """Bytes of an LLVM type."""
    count, element = re.fullmatch(r"(?:<(\d+) x )?(\w+)>?", type_).groups()  # type: ignore[union-attr]
    return int(count or 1) * (_BITS.get(element) or int(element.removeprefix("i"))) // 8
