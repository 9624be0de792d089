"""A clock that counts instead of measuring: each product and each byte has its cost.

Products keep one resource busy and collectives another, each in the order in which they are called. What is waited for
must have arrived. Everything really runs, so that the values are right too.
"""

from __future__ import annotations

import contextlib

from opfuse_overlap import kernels


class Clock:
    """Time goes on with products, and where a collective is waited for.

    Args:
        multiplication: What a multiplication takes.
        byte: What a byte that this process sends takes.
    """

    def __init__(self, multiplication, byte):
        self._multiplication, self._byte = multiplication, byte
        self.now = self._link = self.computed = self.sent = 0.0
        self.events, self.bytes, self.count = [], {}, {}

    def compute(self, what, multiplications):
        self.now += multiplications * self._multiplication
        self.computed += multiplications * self._multiplication
        self.events.append(what)

    def send(self, what, size):
        """When it has arrived."""
        self.bytes[what] = self.bytes.get(what, 0) + size
        self.count[what] = self.count.get(what, 0) + 1
        self.sent += size * self._byte
        self._link = max(self._link, self.now) + size * self._byte
        self.events.append(f"start {what}")
        return self._link

    def arrived(self, what, when):
        self.now = max(self.now, when)
        self.events.append(f"wait {what}")

    @property
    def serial(self):
        """The time of all that was done, one after the other."""
        return self.computed + self.sent


class _Timed:
    def __init__(self, clock, what, pending, when):
        self._given = clock, what, pending, when

    def wait(self):
        clock, what, pending, when = self._given
        pending.wait()
        clock.arrived(what, when)


def _collective(clock, name, original):
    def start(group, what, *tensors):
        whole = max(tensors, key=lambda tensor: tensor.numel())
        times = 2 if name == "reduce" else 1  # there and back
        size = times * whole.nbytes * (group.size - 1) // group.size
        when = clock.send(name, size)
        return _Timed(clock, name, original(group, what, *tensors), when)

    return start


def _product(clock, name, original, count):
    def run(*given):
        clock.compute(name, count(*given))
        return original(*given)

    return run


MULTIPLICATIONS = {
    "product": lambda rows, weight, bias, out: rows.shape[0] * weight.numel(),
    "grad_of_input": lambda dy, weight, out: dy.shape[0] * weight.numel(),
    "grad_of_weight": lambda ctx, dy, x: dy.numel() * x.shape[1],
}


@contextlib.contextmanager
def watching(multiplication=1.0, byte=1.0):
    """A clock for all that the fused ops do in the block."""
    clock = Clock(multiplication, byte)
    names = (*MULTIPLICATIONS, "gather", "scatter", "reduce")
    originals = {name: getattr(kernels, name) for name in names}
    try:
        for name, original in originals.items():
            if name in MULTIPLICATIONS:
                made = _product(clock, name, original, MULTIPLICATIONS[name])
            else:
                made = _collective(clock, name, original)
            setattr(kernels, name, made)
        yield clock
    finally:
        for name, original in originals.items():
            setattr(kernels, name, original)
