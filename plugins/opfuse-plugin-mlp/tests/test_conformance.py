"""The plugin against the contract."""

import dataclasses

from opfuse import ops
from opfuse.testing import FusionSuite
from opfuse.testing.machine import is_interpreting

OPTIONAL = ops.RMSNorm, ops.LayerNorm, ops.Bias


class TestConformance(FusionSuite):
    plugin = "mlp"

    @classmethod
    def chains(cls, subject, device):
        """With all that is optional and with nothing of it; the others once; thorough: all of each.

        Every norm and activation is in the longest chain. The two fusions have them in common, and
        where a kernel is interpreted, norms do not matter to it.
        """
        found = super().chains(subject, device)
        if cls.thorough:
            return found

        def count(case):
            return sum(op.cls in OPTIONAL for op in case.ops)

        def alike(case):
            pairs = zip(case.ops, longest.ops, strict=False)
            same = [one.cls is other.cls for one, other in pairs]
            varied = {"mlp": (0, 3), "parallel mlp": (1,)}[subject.name]
            varied = [place for place in varied if place or not is_interpreting()]
            return len(case.ops) == len(longest.ops) and all(
                is_same or place in varied for place, is_same in enumerate(same)
            )

        plain = sorted(found.plain, key=count)
        plain, longest, others = [plain[-1], plain[0]], plain[-1], plain[1:-1]
        if is_interpreting():
            others = []
        every = [*plain, *others, *[case for case in found.all if alike(case)]]
        models = [case for case in found.models if len(case.ops) == len(longest.ops)]
        few = {"plain": plain, "all": dict.fromkeys(every), "models": models[-2:]}
        few["quantized"] = found.quantized[:2]
        return dataclasses.replace(found, **{name: tuple(cases) for name, cases in few.items()})
