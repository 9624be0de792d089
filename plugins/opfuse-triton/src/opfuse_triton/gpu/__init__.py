"""``python -m opfuse_triton gpu``: what the kernels of the installed plugins do on this GPU.

``session`` divides the time and starts a process for each plugin; ``worker`` is that process;
``judging`` compares results, ``timing`` measures, ``table`` prints.
"""
