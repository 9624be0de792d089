"""The hook of this package: its example works, and a plugin that has it works without this package."""

import inspect
import pathlib
import textwrap

import torch
from opfuse_convert import hookspecs

import opfuse

README = pathlib.Path(__file__).parents[1] / "README.md"


def test_the_example_of_the_hook_converts():
    text = inspect.getdoc(hookspecs.opfuse_converters).partition("Example::\n")[2]
    example = textwrap.dedent(text).strip()
    assert f"```python\n{example}\n```" in README.read_text(encoding="utf-8")
    namespace = {}
    exec(example, namespace)

    class Inner(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(4, 4, bias=False)

        def forward(self, x):
            return torch.nn.functional.gelu(self.inner(x))

    Inner.__module__, Inner.__qualname__ = "mypackage.layers", "Inner"
    plugin = type("Plugin", (), {"opfuse_converters": staticmethod(namespace["opfuse_converters"])})
    with opfuse.plugins.isolated():
        record = opfuse.plugins.register(plugin(), name="example")
        model, x = torch.nn.ModuleList([Inner()]), torch.randn(3, 4)
        expected = model[0](x)
        report = opfuse.convert(model)
        assert record.hooks == ("opfuse_converters",)
    assert [made.distribution for made in report.converted] == ["registered in code"]
    torch.testing.assert_close(model[0](x), expected)
