"""Whether each thread of a kernel reads what it overwrites itself, by Triton's IR for GPUs.

A tensor may be read and overwritten in place where one thread has both in the same tile and layout,
or where a barrier keeps all threads from writing before the others have read. The places in memory
are not compared: those of a load and a store of one argument count as the same.
"""

from __future__ import annotations

import itertools
import re
from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

_VALUE = re.compile(r"%[-\w$.#]+")
_PARAMETER = re.compile(r"(%[-\w$.]+): !tt\.(?:ptr|tensordesc)<")
_CARRIED = re.compile(r"(%[-\w$.]+) = (%[-\w$.#]+)")
_ACCESS = re.compile(
    r"(?:^|= )(?:tt\.(?:descriptor_)?(?:load|store)|amdg(?:pu)?\.buffer_(?:load|store)\w*"
    r"|tt[ngp]+\.async_(?:tma_)?copy_(?:global_to_local|local_to_global))\b"
)
_TILE = re.compile(r"tensor<(\d+(?:x\d+)*)x[^#]*(#.+?)>(?=$|\]| ->|,)")
_BARRIER = re.compile(r"^(?:gpu|ttg|rocdl)\.\w*barrier\b|^\}\) : \(tensor<.* -> \(?[a-z]+\d+\b")
"""A barrier; or a sum of a whole tile, or the like, which no thread has before all have read."""


_NONE: frozenset[str] = frozenset()


class Place(NamedTuple):
    """One load or store of a kernel.

    Attributes:
        line: Where it is in the text.
        stores: Whether it writes.
        names: The parameters that its address is computed from.
        layout: The tile and which thread has what of it; of one number for all threads, or of TMA,
            empty.
    """

    line: int
    stores: bool
    names: frozenset[str]
    layout: str


def refuse_races(
    ttgir: str, pointers: Sequence[str], overwrites: Mapping[str, str]
) -> Iterator[str]:
    """The faults of a kernel that overwrites what it reads, each as a sentence without subject.

    Args:
        ttgir: What Triton compiled the kernel to, ``asm["ttgir"]``.
        pointers: Names of the kernel's parameters that are pointers or descriptors, in order.
        overwrites: See :class:`opfuse_triton.KernelCase`.
    """
    lines = [re.sub(r" loc\((?!.*\{$).*$", "", line).strip() for line in ttgir.splitlines()]
    barriers = [number for number, line in enumerate(lines) if _BARRIER.search(line)]
    places = _places(lines, pointers)
    for store, load in itertools.product(places, places):
        read = {*store.names, *(overwrites.get(name, name) for name in store.names)} & load.names
        first, last = sorted((load.line, store.line))
        apart = any(first < barrier < last for barrier in barriers)
        same = load.layout == store.layout != ""
        if store.stores and not load.stores and read and not apart and not same:
            both = " and ".join(_described(place.layout, lines) for place in (load, store))
            what = f"overwrites {min(read)}, which other threads read, {both}"
            yield f"{what}: give both one layout, or put tl.debug_barrier() between"


def _places(lines: Sequence[str], pointers: Sequence[str]) -> list[Place]:
    """The loads and stores. A pointer that a branch or a ``while`` chooses is not followed."""
    head = next(line for line in lines if line.startswith("tt.func public"))
    parameters = zip(_PARAMETER.findall(head), pointers, strict=False)
    known = ChainMap({value: frozenset({name}) for value, name in parameters})
    places = []
    for number, line in enumerate(lines):
        if line.startswith("}"):  # names mean something else in another region
            known = known.parents
        value, is_definition, rest = line.partition(" = ")
        carried = _CARRIED.findall(line.partition(" iter_args(")[2])
        if access := _ACCESS.search(line):
            rest, tile = line[access.end() :], _TILE.search(line)
            base = re.search(r"(%[-\w$.#]+)\[", rest) or re.search(r"(%[-\w$.#]+)", rest)
            names = known.get(base[1], _NONE) if base else _NONE
            stores = "store" in access[0] or "local_to_global" in access[0]
            places.append(Place(number, stores, names, " ".join(tile.groups()) if tile else ""))
        elif is_definition:
            used = [known.get(name, _NONE) for name in _VALUE.findall(rest)]
            known[value] = _NONE.union(*used)
            for place, (_, outer) in enumerate(carried):
                known[f"{value.partition(':')[0]}#{place}"] = known.get(outer, _NONE)
        if line.endswith("{"):
            known = known.new_child({inner: known.get(outer, _NONE) for inner, outer in carried})
    return places


def _described(layout: str, lines: Sequence[str]) -> str:
    """A layout, with what its name stands for."""
    known = dict(line.partition(" = ")[::2] for line in lines)
    return re.sub(r"#\w+\b(?!\.)", lambda name: known[name[0]], layout) or "one number for all"
