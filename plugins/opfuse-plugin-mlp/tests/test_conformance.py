"""The plugin against the contract."""

import dataclasses

import pytest

from opfuse import ops
from opfuse.testing import FusionSuite
from opfuse.testing.machine import is_interpreting

OPTIONAL = ops.RMSNorm, ops.LayerNorm, ops.Bias


@pytest.mark.costly(0.15, always=("output", "gradients"), each=12)
class TestConformance(FusionSuite):
    plugin = "mlp"

    @classmethod
    def chains(cls, subject, device):
        """With all that is optional, and with nothing of it; the others once; thorough: all of each.

        Every norm and activation is in the longest chain of one fusion, since both have them in
        common. Where a kernel is interpreted, activations alone matter to it.
        """
        found = super().chains(subject, device)
        if cls.thorough or subject.name in ("recomputed norm", "recomputed activation"):
            return found

        def count(case):
            return sum(op.cls in OPTIONAL for op in case.ops)

        def alike(case):
            pairs = zip(case.ops, longest.ops, strict=False)
            same = [one.cls is other.cls for one, other in pairs]
            varied = {1} if subject.name.startswith("parallel") else {0, 3}
            varied = {0, 2} if subject.name.endswith("again") else varied
            varied &= {3} if is_interpreting() else varied
            return len(case.ops) == len(longest.ops) and all(
                is_same or place in varied for place, is_same in enumerate(same)
            )

        *others, longest = sorted(found.plain, key=count)
        plain = [longest]
        if is_interpreting():
            others = []
        elif not subject.name.startswith("parallel"):
            plain.append(others[0])
        every = [*plain, *others, *[case for case in found.all if alike(case)]]
        models = [case for case in found.models if len(case.ops) == len(longest.ops)]
        few = {"plain": plain, "all": dict.fromkeys(every), "models": models[-1:]}
        few["quantized"] = found.quantized[:1]
        return dataclasses.replace(found, **{name: tuple(cases) for name, cases in few.items()})
