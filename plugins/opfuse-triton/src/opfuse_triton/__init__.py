"""For authors of plugins with Triton kernels: launch them, record them, pick their tiles.

The rest of opfuse never imports this package, and importing opfuse never imports Triton. A plugin
imports it where its kernels are, see the page "Write a Triton kernel".
"""

try:
    import triton as _triton  # noqa: F401
except ImportError as error:
    raise ImportError(
        "opfuse_triton needs Triton, which is not installed: on Linux, python -m pip install triton"
    ) from error

from .activations import DeviceFunctions, functions_of
from .cases import KernelCase, Operand
from .configs import Config
from .kernels import Kernel
from .launches import Launch, recording
from .targets import TARGETS, Target, current_target, target

__all__ = [
    "TARGETS",
    "Config",
    "DeviceFunctions",
    "Kernel",
    "KernelCase",
    "Launch",
    "Operand",
    "Target",
    "current_target",
    "functions_of",
    "recording",
    "target",
]
