"""What processes run in the tests of their order: chains that one of them calls in another one."""

from __future__ import annotations

import copy
import datetime
import itertools
import random

import torch
import torch.distributed as dist
from opfuse_distributed import ranks as core
from torch.utils.checkpoint import checkpoint

import opfuse
from opfuse import ops

ROWS = 4


def new_group():
    """A group of its own, so that a failure in it disturbs no other test."""
    return dist.new_group(timeout=datetime.timedelta(seconds=20))


def outcome(run):
    """What a call raised, as its name and its text; or what it gave."""
    try:
        return "", run()
    except Exception as error:
        return type(error).__name__, str(error)


class Chain:
    """A chain over a group, with its input, and the outputs that wait for their backward.

    Args:
        kind: How it is built.
        group: The processes.
        size: Its features.
    """

    def __init__(self, kind, group, size):
        given = dict(tensor_parallel_group=group, sequence_parallel=True)
        number = dist.get_world_size(group)
        column = dict(tensor_parallel_mode="column", **given)
        row = dict(tensor_parallel_mode="row", **given)
        width, rows = size, ROWS
        if kind == "column":
            built = [ops.Linear(size, size, **column)]
        elif kind == "row":
            built, width, rows = [ops.Linear(size, size, **row)], size // number, ROWS * number
        elif kind == "mlp":
            built = [
                ops.Linear(size, size, **column),
                ops.GELU(),
                ops.BasicLinear(size, size, **row),
            ]
        elif kind == "norm":  # whose only collectives are sums of gradients
            built = [ops.RMSNorm(size, sequence_parallel_group=group)]
        elif kind == "gather":
            built = [ops.AllGather(group)]
        self.kind, self.run = kind, opfuse.Sequential(*built)
        self.x, self.outputs = torch.randn(rows, width).requires_grad_(), []

    def forward(self, grad=True, **others):
        with torch.set_grad_enabled(grad):
            if others.get("again"):
                y = checkpoint(self.run, self.x, use_reentrant=False)
            else:
                y = self.run(others.get("x", self.x))
        if grad:
            self.outputs.append(y)

    def backward(self):
        if self.outputs:
            self.outputs.pop().sum().backward()


class To(ops.ReLU):
    """Gives another dtype than it takes.

    Args:
        dtype: The dtype.
    """

    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype

    def op_forward(self, ctx, input_, **others):
        return super().op_forward(ctx, input_, **others).to(self.dtype)


def hidden(rank, what, grad):
    """What a collective takes differs from the first call on, by what an op does; no shape tells."""
    group = new_group()
    loss = ops.VocabParallelCrossEntropy(process_group=group, label_smoothing=0.1 * rank)
    dtype = torch.bfloat16 if rank else torch.half
    chain = {"numbers": [loss], "dtype": [To(dtype), ops.AllReduce(group)]}[what]
    x, others = torch.ones(4, 8, requires_grad=grad), [torch.arange(4)] * (what == "numbers")
    return outcome(lambda: opfuse.Sequential(*chain)(x, *others).dtype)


# Two chains in the other order


def swapped(rank, kind, sizes, warm, what):
    """Two chains of equal structure, on one process in the other order, forward or backward."""
    group = new_group()
    chains = [Chain(kind, group, size) for size in sizes]

    def step(order):
        for chain in chains if what == "backward" else chains[::order]:
            chain.forward(grad=what == "backward")
        if what == "backward":
            for chain in chains[::order]:
                chain.backward()

    for _ in range(warm):
        step(1)
    return outcome(lambda: step(-1 if rank else 1))


def copies(rank):
    """As in ``swapped``, copies of one chain, which none has called."""
    chain = Chain("column", new_group(), 8)
    both = [chain, copy.deepcopy(chain)]
    return outcome(lambda: [each.forward() for each in both[:: -1 if rank else 1]])


def shared(rank):
    """Chains that share their collective."""
    collective = ops.AllReduce(new_group())
    chains = [opfuse.Sequential(ops.BasicLinear(4, 4), collective) for _ in range(2)]

    def step(order):
        return [chain(torch.ones(2, 4)).shape for chain in chains[::order]]

    step(1), step(1)
    return outcome(lambda: step(-1 if rank else 1))


def calls_of_one(rank):
    """Two calls of one chain, whose backwards come in the other order on one process."""
    chain = Chain("column", new_group(), 8)

    def step(order):
        chain.forward(), chain.forward()
        chain.outputs = chain.outputs[::order]
        chain.backward(), chain.backward()

    step(1), step(1)
    return outcome(lambda: step(-1 if rank else 1))


def calls_apart(rank):
    """Two calls of one chain, one of them before an error that all processes caught."""
    chain = Chain("column", new_group(), 8)
    chain.forward()
    assert outcome(lambda: chain.forward(x=torch.ones(2 + rank, 8)))[0] == "RankError"
    chain.forward()
    chain.outputs = chain.outputs[:: -1 if rank else 1]
    return outcome(chain.backward)


def named(rank):
    """Two chains of one structure that were never called, of which each process calls another."""
    group = new_group()
    model = torch.nn.ModuleList([Chain("column", group, 8).run for _ in range(2)])
    opfuse.assign_names(model)
    return outcome(lambda: model[rank](torch.ones(2, 8)).shape)


def recomputed(rank):
    """A forward that one process runs again in a backward, and the other one for a new batch."""
    group = new_group()
    chain = opfuse.Sequential(ops.ReLU(), ops.AllReduce(group))
    x = torch.ones(4, 8, requires_grad=True)
    for _ in range(3):
        y = chain(x)
        y.sum().backward()
    y = checkpoint(chain, x, use_reentrant=False) if rank else chain(x)
    return outcome(y.sum().backward if rank else lambda: chain(x).shape)


class Fault(torch.autograd.Function):
    """Raises in its backward, if it is told to: an error of the user's own code."""

    told = False

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        if Fault.told:
            raise ArithmeticError("no luck")
        return grad


def lost_backward(rank, kind, sizes):
    """An error of one process in a backward, between two chains; its user goes on with the next step."""
    group = new_group()
    first, second = (Chain(kind, group, size) for size in sizes)

    def step():
        x = Fault.apply(first.run(first.x)).sum() * torch.ones_like(second.x)
        second.run(x).sum().backward()

    step(), step()
    Fault.told = rank == 1
    caught = outcome(step)[0]
    Fault.told = False
    return caught, outcome(step)


def old_and_new(rank, what):
    """What one process calls is known, and what the other calls is new."""
    chain = Chain("row", new_group(), 8)
    step = torch.ones(12, 4)
    for _ in range(2):
        chain.forward(False)
    if not rank:
        return outcome(lambda: chain.forward(grad=False))
    return outcome(chain.forward if what == "gradients" else lambda: chain.forward(False, x=step))


def interrupted(rank):
    """One process leaves a pass in the middle, which no code of opfuse sees, and goes on."""
    group = new_group()
    chain = opfuse.Sequential(ops.AllReduce(group), Interrupts(), ops.AllReduce(group))
    for told in (False, False, rank == 1):
        Interrupts.told = told
        try:
            found = outcome(lambda: chain(torch.ones(2)).tolist())
        except KeyboardInterrupt:
            Interrupts.told = False
            found = outcome(lambda: chain(torch.ones(2)).tolist())
    return found


class Interrupts(ops.Identity):
    """Raises what is no ``Exception``, as Ctrl-C does."""

    told = False

    def op_forward(self, ctx, input_, *unread):
        if self.told:
            raise KeyboardInterrupt
        return input_


def sizes_of_its_own(rank):
    """An op whose collective takes what one process has changed."""
    op = Wide(new_group())
    found = [outcome(lambda: op(torch.ones(2)).shape[0]) for _ in range(2)]
    op.many += rank
    return *found, outcome(lambda: op(torch.ones(2)).shape[0])


class Wide(ops.AllReduce):
    """Adds up more than it is given."""

    many = 2

    def op_forward(self, ctx, input_, *unread):
        return self._all_reduce(input_.repeat(self.many))


# What is fine


def one_plans_more(rank):
    """A process may have made more chains, and call more that have no collective."""
    group = new_group()
    if rank:
        Chain("column", group, 8)
        ops.GELU()(torch.ones(2))
    chains = [Chain("column", group, 8) for _ in range(2)]
    for _ in range(3):
        for chain in chains:
            chain.forward()
        if rank:
            opfuse.Sequential(ops.RMSNorm(4, sequence_parallel_group=group))(torch.ones(2, 4))
            opfuse.FusibleOperation._count_change()
        for chain in chains:
            chain.backward()


def group_again(rank):
    """A group that takes the place of another one has none of its turns."""
    for size in (8, 16, 8):
        group = new_group()
        chain = Chain("mlp", group, size)
        for _ in range(2):
            chain.forward(), chain.backward()
        dist.destroy_process_group(group)


def subgroups(rank):
    """Each process has a group with each of the others, whose turns are counted by themselves."""
    groups = {pair: dist.new_group(pair) for pair in itertools.combinations(range(3), 2)}
    chains = {pair: Chain("mlp", groups[pair], 8) for pair in groups if rank in pair}
    for _ in range(3):
        for pair in sorted(chains):
            for _ in range(sum(pair)):
                chains[pair].forward(), chains[pair].backward()


# Random programs


def programs(seed, groups):
    """Builds a random program: kinds, groups and sizes of chains; and the steps.

    A step is a list of ``(what, chain)``.
    """
    draw = random.Random(seed)
    kinds = [
        (draw.choice(["column", "row", "mlp", "norm", "gather"]), draw.randrange(groups), draw.choice([12, 24]))
        for _ in range(draw.randint(2, 4))
    ]  # fmt: skip

    def step():
        found = []
        for _ in range(draw.randint(1, 4)):
            which = [draw.randrange(len(kinds)) for _ in range(draw.randint(1, 3))]
            how = draw.choice(["forward", "forward", "again", "evaluate"])
            found += [(how, i) for i in which]
            if how != "evaluate":
                found += [("backward", i) for i in which[:: draw.choice([1, -1])]]
        return found

    steps = [step() for _ in range(draw.randint(1, 2))]
    return kinds, steps * 2 + [step() for _ in range(draw.randint(0, 1))] + steps


def mutated(program, seed):
    """A program in which a process leaves something out, adds something, or has another order."""
    draw, kinds, steps = random.Random(f"other {seed}"), *copy.deepcopy(program)
    turns = [  # what has a turn, in all processes
        (n, i)
        for n, step in enumerate(steps)
        for i, (what, chain) in enumerate(step)
        if not (kinds[chain][0] == "norm" and what != "backward")
    ]
    how = draw.choice(["leave out", "add", "swap", "lose"])
    n, i = draw.choice(turns)
    step = steps[n]
    pairs = [k for k, (one, next_) in enumerate(itertools.pairwise(step)) if one[1] != next_[1]]
    if how == "add":
        step.insert(draw.randint(0, len(step)), ("evaluate", step[i][1]))
    elif how == "lose":  # as if an error was caught behind it
        del step[i:]
    elif how == "swap" and pairs:
        k = draw.choice(pairs)
        step[k : k + 2] = step[k + 1], step[k]
    else:
        del step[i]
    return steps


def turns_of(kinds, steps):
    """What of a program the processes see of each other, by group."""
    seen, waiting = {}, {}
    for step in steps:
        for what, chain in step:
            kind, group, _ = kinds[chain]
            stack = waiting.setdefault(chain, [])
            if what == "backward":
                if not stack:
                    continue
                seen.setdefault(group, []).append((what, chain, stack.pop()))
            else:
                if what != "evaluate":
                    stack.append(what)
                if kind != "norm":
                    seen.setdefault(group, []).append((what, chain))
    return seen


def run_program(chains, steps, last):
    for step in steps:
        for what, i in step:
            if what == "backward":
                chains[i].backward()
            else:
                chains[i].forward(grad=what != "evaluate", again=what == "again")
    for each in last:
        each(torch.ones(3))


def random_program(rank, seed, other):
    """Runs a program; one process runs it otherwise, if ``other`` says so."""
    number = 1 if other else 2  # those that wait in two groups for each other see no difference
    kinds, steps = programs(seed, number)
    groups = [new_group() for _ in range(number)]
    chains = [Chain(kind, groups[group], size) for kind, group, size in kinds]
    last = [opfuse.Sequential(ops.AllReduce(group), ops.Identity()) for group in groups]
    if other and rank == dist.get_world_size() - 1:
        steps = mutated((kinds, steps), seed)
    return outcome(lambda: run_program(chains, steps, last))


def random_programs(rank, seeds, other):
    return [random_program(rank, seed, other) for seed in seeds]


def compared(rank):
    """How often the processes compare in each of some equal steps."""
    group, found = new_group(), []
    kinds = itertools.product(("column", "mlp", "row", "norm"), (8, 8, 16))
    chains = [Chain(kind, group, size) for kind, size in kinds]
    talk = core.Group(group).talk
    for _ in range(4):
        before = talk._compared
        for how in ("forward", "again", "forward"):
            for chain in chains:
                chain.forward(again=how == "again")
            for chain in chains[::-1]:
                chain.backward()
        for chain in chains:
            chain.forward(grad=False)
        found.append(talk._compared - before)
    return found


def kept(rank, most):
    """What a group keeps does not grow with the number of its turns, nor do its keys in the store."""
    group, before, core._KEPT = new_group(), core._KEPT, most
    found, store = [], dist.distributed_c10d._get_default_store()
    for _ in range(2):
        for rows in range(40):
            for _ in range(2):
                opfuse.Sequential(ops.AllReduce(group))(torch.ones(rows % 7, 8))
        dist.barrier()
        found.append(store.num_keys())
        dist.barrier()
    core._KEPT, talk = before, core.Group(group).talk
    return len(talk._past), len(talk._latest), len(talk._orders), found[1] - found[0]
