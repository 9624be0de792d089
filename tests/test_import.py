"""Importing opfuse is cheap, and pulls in neither triton nor a plugin."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

import opfuse


def python(code, **env):
    import os

    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **env}
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_nothing_heavy_is_imported():
    heavy = "('triton', 'opfuse_linear')"
    code = f"import sys, opfuse; print([m for m in sys.modules if m.split('.')[0] in {heavy}])"
    assert python(f"{code}; print('torch._dynamo' in sys.modules)").split() == ["[]", "False"]


def test_importing_opfuse_loads_the_core_and_no_op():
    code = "import sys, opfuse; print(*[m for m in sys.modules if m.split('.')[0].startswith('opfuse')])"
    loaded = python(code).split()
    above = {name for name in loaded if not name.startswith(("opfuse.core", "opfuse.recipes"))}
    assert above == {"opfuse", "opfuse.ops"}
    assert len(loaded) <= 60


def test_loading_the_ops_outdates_no_plan():
    code = "from opfuse.core.fusible import FusibleOperation; from opfuse.ops import *; print(FusibleOperation.changes)"
    assert python(code) == "0"


HIDE = "from opfuse.core.records import metadata; found = [d for d in metadata.distributions() "
HIDE += "if not d.name.startswith('opfuse-')]; metadata.distributions = lambda: found; "
HIDE += "import opfuse; opfuse.plugins.manager.tools = []; opfuse.plugins.manager.discover(opfuse.plugins.manager.packages); "


def test_names_of_a_package_that_is_not_installed_are_not_offered():
    packages = {
        "convert": "opfuse-convert",
        "quantized_model_init": "opfuse-quantized",
        "QuantizedActivation": "opfuse-quantized",
        "from_te_extra_state": "opfuse-plugin-fp8",
    }
    code = f"""
from opfuse import *
print({{"explain", "tune"}} <= {{*dir(opfuse)}}, "convert" in dir(opfuse))
for name in {[*packages]}:
    try: getattr(opfuse, name)
    except ImportError as error: print(error)
"""
    offered, *said = python(HIDE + code).splitlines()
    assert offered == "True False"
    assert {"convert", "converted", "revert"} <= {*dir(opfuse)} or not importlib.util.find_spec(
        "opfuse_convert"
    )
    for (name, package), of_name in zip(packages.items(), said, strict=True):
        assert f"opfuse.{name} needs the package {package}, which is not installed" in of_name


def test_what_leaves_a_chain_quantized_needs_a_package():
    """A chain that uses its codes itself needs none."""
    code = """
import torch
from opfuse import ops, testing
from opfuse.testing import recipes

x = torch.randn(4, 4)
with recipes.offered(), opfuse.plugins.using(recipes.NAME), opfuse.autocast(testing.PerTensor()):
    assert type(opfuse.Sequential(ops.Quantize(), ops.BasicLinear(4, 4))(x)) is torch.Tensor
    try: opfuse.Sequential(ops.Quantize())(x)
    except ImportError as error: print(error)
"""
    said = "opfuse.QuantizedActivation needs the package opfuse-quantized, which is not installed"
    assert python(HIDE + code).startswith(said)


def test_import_adds_little_to_torch():
    code = "import sys, torch; before = set(sys.modules); import opfuse; print(*set(sys.modules) - before)"
    added = {name.partition(".")[0] for name in python(code).split()} - set(sys.stdlib_module_names)
    assert added <= {"opfuse", "pluggy", "importlib_metadata", "zipp", "lazy_importer"}


def test_the_public_names_are_these():
    for name in opfuse.__all__:
        assert getattr(opfuse, name) is not None
    names = """FusibleOperation BasicOperation FusedOperation OperationContext OperationFuser Sequential Fusion Optional
    OneOrMore OneOf Subclasses Environment FusionPlan hookimpl register_forward_fusion register_backward_fusion
    register_forward_backward_fusion explain options autocast Recipe Quantizer QuantizerRole PluginWarning CallRefusedError
    checkpoint_contexts plugins assign_names ops has_same_math tune TuningWarning"""
    assert set(names.split()) == set(opfuse.__all__)
    for name in ("LockError", "freeze", "check_ranks"):  # of tools
        assert getattr(opfuse, name) is not None and name in dir(opfuse)


@pytest.mark.alone
def test_the_fusion_limit_is_read_from_the_environment():
    code = "from opfuse.core.settings import current; print(dict(current.options))"
    assert python("import opfuse;" + code, OPFUSE_FUSION_LIMIT="2") == "{'fusion_limit': 2}"


@pytest.mark.alone
def test_a_malformed_fusion_limit_is_told_by_the_first_plan():
    code = (
        "import torch, opfuse\n"
        "try: opfuse.ops.GELU()(torch.ones(2))\n"
        "except ValueError as error: print(error)\n"
        "with opfuse.options(fusion_limit=0): opfuse.ops.GELU()(torch.ones(2))\n"
    )
    expected = "OPFUSE_FUSION_LIMIT must be a whole number of fusions to keep, got 'two'"
    assert python(code, OPFUSE_FUSION_LIMIT="two") == expected
