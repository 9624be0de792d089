"""Random forwards, converted and as they are, before and after something that they read changes: both give the same.

``python tests/support/fuzz_convert.py --seconds 60 --seed 1`` says how many forwards were tried, how many ran as chains, how many
changes altered the original's answer, and prints the source of each in which the converted copy gave another one than the
original. ``--replay 1:42`` runs one of them again.
"""

import argparse
import collections
import contextlib
import copy
import importlib.util
import linecache
import pathlib
import random
import sys
import tempfile
import time
import typing
import warnings
from unittest import mock

import random_forwards
import torch
import twins
from opfuse_convert import choosing, converted_forward, guard, site
from opfuse_convert.grammar import Attributes
from opfuse_convert.grammar.reads import Keys
from torch import nn

import opfuse

WIDTH = random_forwards.WIDTH


class Twice(nn.Parameter):
    """A parameter of a class of its own."""


class Tripled(nn.Module):
    """A parametrization."""

    def forward(self, weight):
        return weight * 3


class Case(typing.NamedTuple):
    """What was seen of one forward.

    Attributes:
        index: Its number.
        grammar: Whether it has only what the grammar names.
        chained: Whether its chain ran at the first call.
        reason: Why not.
        changes: Pairs of a kind of change, and whether it altered what the original gives.
        mismatch: What the copy gave other than the original; ``""``: nothing.
        text: The source, and the changes that were made.
    """

    index: int
    grammar: bool
    chained: bool
    reason: str
    changes: list
    mismatch: str
    text: str


@contextlib.contextmanager
def imported(source, name, folder):
    """A module with this source, from a file of its own."""
    path = pathlib.Path(folder, f"{name}.py")
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        del sys.modules[name]
        linecache.cache.pop(str(path), None)
        path.unlink()


def stepping(model, number):
    """A model whose parameters are about one step of half precision away from what they were."""
    generator = torch.Generator().manual_seed(number)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(1 + 2**-8 * torch.randn(param.shape, generator=generator).to(param.dtype))
    return model


class Twins:
    """A drawn model and its converted copy.

    Args:
        d: The draft.
        g: The module that was drawn.
        rng: Says which changes are made.
        stack: Takes back what changes do to the world.
    """

    def __init__(self, d, g, rng, stack):
        self._d, self._g, self._rng, self._stack = d, g, rng, stack
        torch.manual_seed(0)
        self.model = g.make()
        self.copy = copy.deepcopy(self.model)
        self.told, self.call = [], "{}"

    def convert(self):
        """Convert the copy; what it draws and counts is none of a call."""
        twins.seed(2)
        left = opfuse.convert(self.copy).left
        self.reason = next((row.reason for row in left if not row.path), "it is no chain")
        if self._rng.random() < 0.1:
            self.copy = copy.deepcopy(self.copy)

    @property
    def is_half(self):
        """Whether something is of half precision."""
        return "bfloat16" in f"{self._d.source()} {self.told}"

    def run(self):
        """What the original gives, and how the copy differs."""
        before = {name: saved(getattr(self._g, name)) for name in self._d.state}
        twin = copy.deepcopy(self.model) if self.is_half else None
        theirs, mine = [self._called(each, before) for each in (self.model, self.copy)]
        rtol = 0.15 if self.is_half else 1e-4
        why = twins.difference(mine, theirs, rtol)
        if (
            twin is not None and " off by " in why
        ):  # numbers of half precision one step away may do the same
            for number in range(16):
                stepped = self._called(stepping(copy.deepcopy(twin), number), before)
                if twins.difference(stepped, theirs, rtol):
                    return theirs, ""
        return theirs, why

    def _called(self, model, before):
        for name, state in before.items():
            restore(getattr(self._g, name), state)
        x, kwargs = self._given(model)
        return twins.outcome(model, [x], kwargs, self._observed)

    def _given(self, model):
        torch.manual_seed(3)
        dtypes = [p.dtype for p in model.parameters() if p is not None] or [torch.float32]
        x = torch.randn(*self._g.ROWS, WIDTH).to(dtypes[0])
        if self._g.TRANSPOSED:
            x = x.transpose(0, -2).contiguous().transpose(0, -2)
        x = nn.Parameter(x) if self._g.AS_PARAMETER else x
        if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
            x.requires_grad_()
        kwargs = eval(self.call, {"torch": torch})
        return x, {
            k: v.to(x.dtype) if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()
        }

    def _observed(self, model):
        return model.calls, {name: saved(getattr(self._g, name)) for name in self._d.state}

    def change(self):
        """Make one change to both; its kind."""
        if len(self._d.calls) > 1 and self._rng.random() < 0.25:
            self.call = self._rng.choice([each for each in self._d.calls if each != self.call])
            self.told.append(f"called with {self.call}")
            return "arguments"
        own = self._d.changes and self._rng.random() < 0.85
        change = self._rng.choice(self._d.changes if own else random_forwards.ANY)
        self.told.append(change.code)
        for each in [None] if change.shared else [self.model, self.copy]:
            torch.manual_seed(4)
            scope = {
                "__name__": "changes",
                "m": each,
                "g": self._g,
                "stack": self._stack,
                "mock": mock,
                "Twice": Twice,
                "Tripled": Tripled,
            }
            with contextlib.suppress(Exception):  # both fail alike, or a call tells
                exec(HEAD, scope)
                exec(change.code, scope)
        return change.kind


def kind_of(place):
    """What kind of place something was looked up in."""
    where = place.where
    if isinstance(where, Attributes):
        of = type(where.of).__name__
        return {"function": "functions", "cell": "cells"}.get(of, "objects")
    if type(where) is Keys:
        return "keys"
    if isinstance(where, dict):
        return "modules" if "_modules" in where or "__name__" not in where else "globals"
    return "classes"


def without_places(kind):
    """Guards that do not ask for one kind of places."""
    made = guard.Guard.__init__

    def init(self, module, *given):
        made(self, module, *given)
        self._places = [row for row in self._places if kind_of(row[-1]) != kind]

    return lambda: mock.patch.object(guard.Guard, "__init__", init)


def without(owner, name, result=""):
    """A guard that finds nothing."""
    return lambda: mock.patch.object(owner, name, lambda *given: result)


def without_parts(name):
    """Guards that have an empty list of something."""
    made = guard.Guard.__init__

    def init(self, *given):
        made(self, *given)
        setattr(self, name, [])

    return lambda: mock.patch.object(guard.Guard, "__init__", init)


GUARDS = {
    "places": without_parts("_places"),
    **{
        f"places: {kind}": without_places(kind)
        for kind in "functions cells objects modules globals classes keys".split()
    },
    "classes of modules": without_parts("_classes"),
    "hooks": without_parts("_hooked"),
    "forwards of classes": without_parts("_methods"),
    "hooks on every module": without_parts("_calls"),
    "parameters": without(guard.Guard, "_of_parameters"),
    "arguments": without(site.Site, "refusal"),
    "the forward itself": without(site.Site, "change"),
    "modes of functions": without(converted_forward, "watched_elsewhere"),
    "dtypes and shapes": without(choosing, "fits"),
}
"""Ways to take a guard out, by its name."""


HEAD = compile(
    "import contextlib, functools, math, operator, os, random, types\nimport numpy as np\nimport torch\nfrom torch import nn\n"
    "from torch.nn import functional as F\nfrom torch.nn.utils import parametrize",
    "head",
    "exec",
)


def saved(value):
    """The state of a global that calls change."""
    if isinstance(value, list):
        return [*value]
    if isinstance(value, random.Random):
        return value.getstate()
    if hasattr(value, "bit_generator"):
        return copy.deepcopy(value.bit_generator.state)
    return dict(vars(value))


def restore(value, state):
    """Let a global have a state again, and be what it is."""
    if isinstance(value, list):
        value[:] = state
    elif isinstance(value, random.Random):
        value.setstate(state)
    elif hasattr(value, "bit_generator"):
        value.bit_generator.state = copy.deepcopy(state)
    else:
        vars(value).clear()
        vars(value).update(state)


def tried(seed, index, folder):
    """One forward, converted, run, and run again after each of a few changes."""
    d = random_forwards.drawn(seed, index)
    source, rng = d.source(), random.Random(f"changes {seed}:{index}")
    changes, chained, reason = [], False, ""
    with contextlib.ExitStack() as stack:
        g = stack.enter_context(imported(source, f"drawn_{seed}_{index}", folder))
        both = Twins(d, g, rng, stack)
        both.convert()
        why, before = "", None
        if d.grammar or rng.random() < 0.9:  # else the first call comes after the first change
            before, why = both.run()
            found = opfuse.converted(both.copy)
            chained, reason = (found.get("") == "", found.get("", both.reason))
        for _ in range(2):
            if why:
                break
            kind = both.change()
            now, why = both.run()
            changes.append((kind, before is not None and bool(twins.difference(before, now, 1e-6))))
            before = now
    text = f"{source}\n# changes: {'; '.join(both.told)}"
    return Case(index, not d.beyond, chained, reason, changes, why, text)


class Tally:
    """What was seen of many forwards."""

    def __init__(self, seed):
        self.seed, self.cases, self.mismatches = seed, 0, []
        self.grammar, self.beyond = collections.Counter(), collections.Counter()
        self.kinds, self.altering = collections.Counter(), collections.Counter()
        self.reasons = collections.Counter()

    def add(self, case):
        """Count one more."""
        self.cases += 1
        of = self.grammar if case.grammar else self.beyond
        of[case.chained] += 1
        if case.grammar and not case.chained:
            self.reasons[case.reason] += 1
        for kind, altered in case.changes:
            self.kinds[kind] += 1
            self.altering[kind] += altered
        if case.mismatch:
            self.mismatches.append(case)

    @property
    def chained(self):
        """The share of the forwards that are all grammar that ran as chains."""
        return self.grammar[True] / max(self.grammar.total(), 1)

    @property
    def altered(self):
        """The share of the changes that altered what the original gives."""
        return self.altering.total() / max(self.kinds.total(), 1)

    def __str__(self):
        beyond = self.beyond[True] / max(self.beyond.total(), 1)
        return (
            f"seed {self.seed}: {self.cases} forwards\n"
            f"all grammar: {self.grammar.total()}, {self.chained:.0%} of them ran as chains\n"
            f"beyond: {self.beyond.total()}, {beyond:.0%} of them ran as chains\n"
            f"changes: {self.kinds.total()}, {self.altered:.0%} of them altered the original's answer\n"
            f"mismatches: {len(self.mismatches)}"
        )


def fuzz(seed, indices, sabotage=None, until=lambda tally: False):
    """Try forwards until there are no more, or enough.

    Args:
        seed: Says which they are.
        indices: The numbers of those to try.
        sabotage: A function that gives a context for each of them, such as one without a guard.
        until: Asked after each; whether this is enough.
    """
    tally = Tally(seed)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for index in indices:
                with sabotage() if sabotage is not None else contextlib.nullcontext():
                    tally.add(tried(seed, index, folder))
                if until(tally):
                    break
    finally:
        torch.set_num_threads(threads)
    return tally


def told(tally):
    """Each mismatch: how to run it again, what differs, and the source."""
    lines = []
    for case in tally.mismatches:
        lines += [f"{'=' * 30} --replay {tally.seed}:{case.index}"]
        lines += [case.text.partition("Pair = ")[2] or case.text, case.mismatch]
    return "\n".join(lines)


def missed(given):
    """The guards that may be taken out without a mismatch."""
    names = [*GUARDS] if given.without == "all" else [given.without]
    found = []
    for name in names:
        begin = time.monotonic()
        tally = fuzz(
            given.seed,
            iter(range(10**9)),
            GUARDS[name],
            lambda tally, begin=begin: tally.mismatches or time.monotonic() > begin + given.seconds,
        )
        seconds = time.monotonic() - begin
        found += [name] * (not tally.mismatches)
        said = "fails" if tally.mismatches else "passes"
        print(f"without {name}: {said} after {tally.cases} forwards, {seconds:.1f} s", flush=True)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--without", metavar="GUARD", help="take a guard out: all, or one of them")
    parser.add_argument("--replay", metavar="SEED:INDEX")
    parser.add_argument("--kinds", action="store_true", help="what changed, how often")
    parser.add_argument("--quiet", action="store_true", help="mismatches in one line each")
    given = parser.parse_args()
    if given.without:
        sys.exit(bool(missed(given)))
    if given.replay:
        seed, index = map(int, given.replay.split(":"))
        tally = fuzz(seed, [index])
    else:
        end = time.monotonic() + given.seconds
        numbers = iter(range(10**9))
        tally = fuzz(given.seed, numbers, until=lambda tally: time.monotonic() > end)
    if given.quiet:
        for case in tally.mismatches:
            last = case.text.rpartition("# changes: ")[2]
            print(f"{tally.seed}:{case.index} {last[:90]!r}: {case.mismatch[:150]}")
    else:
        print(told(tally))
    if given.kinds:
        for kind, count in sorted(tally.kinds.items()):
            print(f"  {kind}: {count}, {tally.altering[kind]} altered the answer")
        for reason, count in tally.reasons.most_common(30):
            print(f"  {count} x {reason}")
    print(tally)
    sys.exit(bool(tally.mismatches))


if __name__ == "__main__":
    main()
