"""What every fusion must hold, checked by opfuse on cases that it makes from the patterns.

Without a GPU, Liger's kernels run in Triton's interpreter: TRITON_INTERPRET=1 python -m pytest.
"""

import dataclasses
import math

from opfuse.testing import FusionSuite, machine

MOST_ROWS, MODELS = 5, 2
"""In the interpreter, since Liger starts a program for each row: more rows, and more widths of real
models, take minutes.
"""


class TestConformance(FusionSuite):
    plugin = "liger"

    @classmethod
    def chains(cls, subject, device):
        chains = super().chains(subject, device)
        if not machine.is_interpreting():
            return chains
        fields = ("plain", "all", "models", "residual", "quantized")
        few = {
            name: tuple([c for c in getattr(chains, name) if math.prod(c.rows) <= MOST_ROWS])
            for name in fields
        }
        few["models"] = few["models"][:MODELS]
        return dataclasses.replace(chains, **few)
