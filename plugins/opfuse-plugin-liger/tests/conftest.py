"""Lets Triton's interpreter run Liger's kernels, where it is what runs kernels.

It has no libdevice, and gives kernels Python floats as they are, which have no methods there.
"""

import importlib.util

import pytest
from opfuse_liger import kernels

from opfuse.testing import machine

INTERPRETING = machine.is_interpreting() and importlib.util.find_spec("liger_kernel") is not None


@pytest.fixture(autouse=INTERPRETING, scope="session")
def interpreted():
    """What is missing in the interpreter, for the whole run."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    from opfuse.testing.interpreter import install

    install()
    original = interpreter._implicit_cvt

    def convert(value):
        if isinstance(value, float):
            handle = interpreter.TensorHandle(np.array([value], np.float32), tl.float32)
            return tl.tensor(handle, tl.float32)
        return original(value)

    def rsqrt(x):
        return tl.rsqrt(x)

    def tanh(x):
        return 2 * tl.sigmoid(2 * x) - 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_implicit_cvt", convert)
        for module in ("rms_norm", "layer_norm", "fused_add_rms_norm", "geglu"):
            for function in (rsqrt, tanh):
                patch.setattr(kernels._of(module), function.__name__, function, raising=False)
        yield
