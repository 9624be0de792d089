"""Activations, with a bias or with scales per row: their kernels, twins, and operations for graphs.

Importing this imports no Triton.
"""

from __future__ import annotations

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that the kernels read and write. They compute in fp32."""
