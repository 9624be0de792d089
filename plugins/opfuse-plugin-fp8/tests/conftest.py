"""Where Triton's interpreter is on, only what looks at kernels runs: it would change nothing else."""

import os
import pathlib

OF_KERNELS = (
    "test_block_kernels.py",
    "test_conformance.py",
    "test_delayed.py",
    "test_group_casts.py",
    "test_infinite.py",
    "test_kernels.py",
    "test_products_of_kernels.py",
)

if os.environ.get("TRITON_INTERPRET", "") not in ("", "0"):
    here = pathlib.Path(__file__).parent
    collect_ignore = [p.name for p in here.glob("test_*.py") if p.name not in OF_KERNELS]
