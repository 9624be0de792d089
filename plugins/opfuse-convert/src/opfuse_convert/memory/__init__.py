"""``opfuse.plan_memory``: what of a model to compute again, so that it keeps no more than a budget.

- :mod:`.actions`: what can be done about one module, and how it is put on and removed;
- :mod:`.compiling`: that ``torch.compile`` compiles it;
- :mod:`.units`: the parts of a model about which something can be done;
- :mod:`.checking`: whether one gives the same gradients;
- :mod:`.costs`: the bytes and seconds of each;
- :mod:`.choosing`: the choice;
- :mod:`.plan`: the plan as text, data and picture;
- :mod:`.planning`: the function itself.
"""
