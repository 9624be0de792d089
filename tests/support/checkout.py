"""``benchmarks`` by its path: the checkout must not be on ``sys.path``, where it would hide the installed opfuse."""

import importlib.util
import pathlib
import sys

ROOT = pathlib.Path(__file__).parents[2]

if "benchmarks" not in sys.modules:
    _place = ROOT / "benchmarks"
    _spec = importlib.util.spec_from_file_location(
        "benchmarks", _place / "__init__.py", submodule_search_locations=[str(_place)]
    )
    sys.modules["benchmarks"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["benchmarks"])
