"""Recipes at run time: the block under which chains quantize, and the state that it advances.

``tool``, a tool of the core, tells a block which chains run in it. ``scale_update`` advances the
state of their quantizers, and ``checkpoint`` restores it for a recomputation. What recipes and
quantizers are, and where a chain casts, is in the core.
"""
