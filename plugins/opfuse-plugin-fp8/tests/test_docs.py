"""The page on low precision: its blocks need this plugin, so they run here."""

import dataclasses
import pathlib
import re

import opfuse_fp8
import pytest
import torch

import opfuse
from opfuse import ops
from opfuse.core.settings import current

DOCS = pathlib.Path(__file__).parents[3] / "docs"


def test_the_page_on_low_precision(capsys):
    text = (DOCS / "low-precision.md").read_text(encoding="utf-8")
    namespace, printed = {}, []
    torch.manual_seed(0)
    with opfuse.plugins.using("fp8"):
        for code in re.findall(r"^```py\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            exec(code, namespace)
            printed.append(capsys.readouterr().out)
    report, table = printed[1], printed[4]
    assert "quantized by Float8CurrentScaling: 6 of 9 products of linear ops" in report
    assert "not quantized: skip names it, by 'head'" in report
    assert namespace["y"].isfinite().all()
    (shown,) = re.findall(r"^```text\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    first = [[line[:52].split() for line in lines.splitlines()] for lines in (shown, table)]
    assert first[0] == first[1]  # tensors and formats; the last digits differ from CPU to CPU
    last = [float(line.split()[-1].rstrip("%")) for line in table.splitlines()[1:]]
    assert all(2 < error < 3 for error in last[:4]) and all(error > 5 for error in last[4:])


ONE_VALUE = {"scaling_factor_compute_algo": lambda amax, scale, fp8_max, recipe: scale,
             "fp8_dpa": True, "fp8_mha": True, "nvfp4_4over6": "all", "row_scaled_activation": True}  # fmt: skip
KEYWORDS = {  # of Transformer Engine 2.20
    "DelayedScaling": "margin fp8_format amax_history_len amax_compute_algo "
    "scaling_factor_compute_algo reduce_amax fp8_dpa fp8_mha backward_override",
    "Float8CurrentScaling": "use_power_2_scales fp8_format fp8_gemm_fprop fp8_gemm_dgrad "
    "fp8_gemm_wgrad fp8_dpa fp8_mha backward_override",
    "MXFP8BlockScaling": "margin fp8_format fp8_dpa fp8_mha backward_override "
    "enable_2d_quantization",
    "Float8BlockScaling": "use_f32_scales fp8_format x_block_scaling_dim w_block_scaling_dim "
    "grad_block_scaling_dim fp8_gemm_fprop fp8_gemm_dgrad fp8_gemm_wgrad fp8_dpa fp8_mha "
    "backward_override",
    "NVFP4BlockScaling": "disable_rht disable_stochastic_rounding disable_2d_quantization "
    "row_scaled_activation nvfp4_4over6 nvfp4_4over6_e4m3_use_256 nvfp4_4over6_err_mode fp4_format "
    "fp8_format fp8_dpa fp8_mha backward_override",
}
README = (DOCS.parent / "plugins" / "opfuse-plugin-fp8" / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", KEYWORDS)
def test_the_readme_names_the_keywords_that_are_missing(name):
    recipe = getattr(opfuse_fp8, name)
    known = {field.name for field in dataclasses.fields(recipe)}
    missing = {*KEYWORDS[name].split()} - known
    assert missing <= {"fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad"}
    assert all(f"`{keyword}`" in README for keyword in missing)
    for keyword in missing:
        with pytest.raises(TypeError, match="unexpected keyword"):
            recipe(**{keyword: None})
    for keyword in known & ONE_VALUE.keys():
        with pytest.raises((TypeError, ValueError, NotImplementedError)):
            recipe(**{keyword: ONE_VALUE[keyword]})


def test_what_the_readme_says_is_missing_beside_keywords():
    recipe = opfuse_fp8.DelayedScaling()
    for method in ("delayed", "mxfp8"):
        assert not hasattr(recipe, method) and f"`{method}()`" in README
    assert not hasattr(opfuse_fp8.Format.E4M3.value, "max_fwd")
    fields = {field.name for field in dataclasses.fields(opfuse_fp8.CustomRecipe)}
    assert fields == {"qfactory", "name", "backward_override"}
    with pytest.raises(TypeError, match="expected name="):
        opfuse_fp8.CustomRecipe(lambda role: opfuse_fp8.IdentityQuantizer())


def test_the_readme_names_the_ops_whose_products_are_quantized():
    linears = ops.BasicLinear, ops.GroupedLinear, ops.ParallelLinear
    for name in ops.__all__:
        op = getattr(ops, name)
        basic = isinstance(op, type) and issubclass(op, opfuse.BasicOperation)
        if basic and op.num_quantizers is not opfuse.BasicOperation.num_quantizers:
            assert op in linears or op is ops.Quantize or issubclass(op, ops.Activation)
    assert all(f"`{op.__name__}`" in README for op in (*linears, ops.Linear))


def test_the_default_recipe_is_the_same_on_every_device():
    with opfuse.plugins.using("fp8"), opfuse.autocast():
        assert current.recipe == opfuse_fp8.DelayedScaling()
    for device in ("cpu", "meta"):
        with opfuse.plugins.using("fp8"), opfuse.autocast(), torch.device(device):
            assert current.recipe == opfuse_fp8.DelayedScaling()


def test_the_table_of_recipes_names_all():
    text = (DOCS / "low-precision.md").read_text(encoding="utf-8")
    named = re.findall(r"^\| `([\w-]+)` \| ", text, re.MULTILINE)
    offered = opfuse_fp8.opfuse_recipes()
    assert {*named} == {*offered} - {"fp8-custom"}
