"""Plans of bytes: what of a model to compute again, so that it keeps no more than a budget.

Users call ``opfuse.plan_memory``.

- :mod:`.actions`: what can be done about one module, and how it is put on and removed;
- :mod:`.compiling`: that ``torch.compile`` compiles it;
- :mod:`.units`: the parts of a model about which something can be done;
- :mod:`.checking`: whether one gives the same gradients;
- :mod:`.costs`: the bytes and seconds of each;
- :mod:`.plan`: the plan as text, data and picture;
- :mod:`.planning`: the choice, and the function itself.
"""

from .plan import MemoryPlan
from .planning import plan_memory

__all__ = ["MemoryPlan", "plan_memory"]
