"""The page on low precision: its blocks need this plugin, so they run here."""

import pathlib
import re

import opfuse_fp8
import torch

import opfuse

DOCS = pathlib.Path(__file__).parents[3] / "docs"


def test_the_page_on_low_precision(capsys):
    text = (DOCS / "low-precision.md").read_text(encoding="utf-8")
    namespace, printed = {}, []
    torch.manual_seed(0)
    with opfuse.plugins.using("fp8"):
        for code in re.findall(r"^```py\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            exec(code, namespace)
            printed.append(capsys.readouterr().out)
    report, table = printed[1], printed[3]
    assert "quantized by Float8CurrentScaling: 6 of 9 products of linear ops" in report
    assert "not quantized: skip names it, by 'head'" in report
    assert namespace["y"].isfinite().all()
    (shown,) = re.findall(r"^```text\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    first = [[line[:52].split() for line in lines.splitlines()] for lines in (shown, table)]
    assert first[0] == first[1]  # tensors and formats; the last digits differ from CPU to CPU
    last = [float(line.split()[-1].rstrip("%")) for line in table.splitlines()[1:]]
    assert all(2 < error < 3 for error in last[:4]) and all(error > 5 for error in last[4:])


def test_the_table_of_recipes_names_all():
    text = (DOCS / "low-precision.md").read_text(encoding="utf-8")
    named = re.findall(r"^\| `([\w-]+)` \| ", text, re.MULTILINE)
    offered = opfuse_fp8.opfuse_recipes()
    assert {*named} == {*offered} - {"fp8-custom"}
