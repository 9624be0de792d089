"""Writes what comes from the code.

These are the pages on hooks, contracts, checks and the grammar, the plugin index, a table in
from-te-ops, and the pictures plan.svg, architecture.svg, kernels.svg and memory.svg.

    python docs/generate.py

``tests/test_docs.py`` fails while they are not current.
"""

import importlib.util
import inspect
import pathlib
import re
import tempfile
import textwrap
from contextlib import contextmanager

import torch
from opfuse_convert.grammar import reader, table

import opfuse
from opfuse import ops
from opfuse.core import hookspecs

HERE = pathlib.Path(__file__).parent
GIVEN = opfuse.plugins.manager.entry_points["opfuse.ops"]
OPS = {name: getattr(ops, name) for name in sorted({*ops.__all__, *GIVEN})}
OPS = {name: op for name, op in OPS.items() if issubclass(op, opfuse.FusibleOperation)}
DO_NOT_EDIT = "<!-- Written by docs/generate.py. -->\n"

HOOKS = """# Hooks

A plugin implements hooks in the module that its entry point of group `{group}` names. Each returns
declarations. opfuse calls hooks while it loads plugins or plans, never during a forward or
backward pass. It calls each plugin on its own: if one raises, you get an
{{class}}`opfuse.PluginWarning`, and the others go on. An implementation may take fewer arguments
than the hook has.

A package may declare hooks of its own ({{doc}}`plugins`): `opfuse-convert` has
{{func}}`~opfuse_convert.hookspecs.opfuse_converters`. If your plugin works without that package,
mark the function with `opfuse.hookimpl(optionalhook=True)`.

The examples build on each other, and begin with `import opfuse`.
"""

CONTRACTS = """# The contracts

A fusion replaces ops in one pass. The other pass stays as it is, or another plugin's fusion
replaces it. That works because each op publishes what its forward leaves for its backward, by name
and in order:

- A **forward** fusion leaves exactly this in the context of each op that it replaces. An entry
  that no gradient needs is None. Where `ctx.requires_grad` is false it leaves nothing.
- A **backward** fusion may rely on exactly this.
- A **joint** fusion replaces both passes and may keep anything between them.

| Op | `saved_tensors` | Other attributes | Gradient of the input | Extra tensors |
|---|---|---|---|---|
{rows}

The {{doc}}`reference` says which dtype an entry has. Every context also has the attributes of
{{class}}`opfuse.OperationContext`, fused or not. The numbers of an op are there before a fused
forward runs; it may leave others, and the backward uses those. Parameters are not saved: a forward
finds their values in `ctx.params`, in the order of the op's `param_names`, and a backward returns
one gradient, or None, for each.

*Gradient of the input* is what `grad_input` declares: *fresh* is a new tensor that nobody else
holds, *same* is the incoming gradient itself or a new tensor, *shared* may alias something that
the caller sees. A step may write into its incoming gradient only where its context says
`owns_grad_output`, which follows from this column.

Some tensors are saved in another form. Methods of the ops know it, so call these:

- Under a recipe the input and the weights of `BasicLinear` and `ParallelLinear` are saved
  quantized, unless the recipe says otherwise. A fusion that multiplies quantized tensors calls
  {{meth}}`opfuse.ops.BasicLinear.quantized_operands`.
- Where `ctx.saves_params` (autocast, under `opfuse.options(prefer="memory")`), their weights are
  saved before autocast's cast. A forward fusion calls {{meth}}`opfuse.ops.BasicLinear.operands`, a
  backward fusion {{meth}}`opfuse.ops.BasicLinear.saved_operands`.
- With `cache_quantized_input` an activation saves its input quantized. Call
  {{meth}}`opfuse.ops.Activation.operand` and {{meth}}`opfuse.ops.Activation.saved_input`.

## Ops of your own

Your own op declares the same: `saved_names`, `context_names`, `grad_input` and `num_extra_inputs`
or `num_extra_outputs` on the class, and in `extra_input_dtypes` which extra inputs are `"integer"`
or `"bool"`; the others must be floating point. An op that declares no `saved_names` runs like any
other, but only its author's fusions can know what it saved. A new {{class}}`opfuse.ops.Activation`
inherits its row; one with its own numbers declares `number_names`, and leaves them as `numbers`.
"""


def myst(text):
    """A docstring's reStructuredText as MyST."""
    return re.sub(r"``([^`]+)``", r"`\1`", re.sub(r":(\w+):`([^`]+)`", r"{\1}`\2`", text))


def hooks():
    parts = [DO_NOT_EDIT + HOOKS.format(group=hookspecs.GROUP)]
    first = "import opfuse\n\n\n"
    for name, hook in vars(hookspecs).items():
        if name.startswith("opfuse_"):
            text, _, example = inspect.getdoc(hook).partition("\nExample:\n")
            signature = f"{name}{inspect.signature(hook)}".replace("'", "").replace(
                "FusionLike", "Fusion"
            )
            parts += [f"## {name}\n", f"```py\n{signature}\n```\n", myst(text)]
            parts += [f"```python\n{first}{textwrap.dedent(example).rstrip()}\n```\n"]
            first = ""
    return "\n".join(parts)


def contracts():
    rows = {}
    for name, op in OPS.items():
        if issubclass(op, opfuse.BasicOperation):
            kinds = "".join(f", {kind}" for kind in op.extra_input_dtypes)
            extras = [f"{op.num_extra_inputs} in{kinds}"] * bool(op.num_extra_inputs)
            extras += [f"{op.num_extra_outputs} out"] * bool(op.num_extra_outputs)
            saved = op.saved_names  # a property tells in words
            contract = (
                code(saved) if isinstance(saved, tuple) else in_words(saved),
                code(op.context_names),
                op.grad_input,
                ", ".join(extras),
            )
            rows.setdefault(contract, []).append(name)
    lines = [
        f"| {code(sorted(names, key=str.lower))} | {' | '.join(contract)} |"
        for contract, names in rows.items()
    ]
    return DO_NOT_EDIT + CONTRACTS.format(rows="\n".join(sorted(lines, key=str.lower)))


GRAMMAR = """# What convert reads in a forward

`opfuse.convert` reads the source of a `forward`. {text}

Everything else stays your own code. It runs where you wrote it, and reads its values when it runs.
A chain replaces statements between two such places. Each call checks again, where the chain
begins, everything that was looked up for it: every link of `F.silu`, the parts of a `ModuleList`
in their order, a number in a config, the code and defaults of a helper. If one has changed, your
statements run.

Source counts only if compiling it gives exactly the code of the function. So a function that was
given to `exec`, or whose file was edited after the import, is left alone. Decorators that keep
`__wrapped__` stay around the function.

## Functions

| Where | Which |
|---|---|
| `torch.nn.functional` | {functional} |
| `torch` | {torch} |
| numbers | {numbers} |
| dropout, in chains only | {random} |

## Methods and properties of tensors

| | Which |
|---|---|
| methods | {methods} |
| properties | {properties} |

## Operators

{operators}

A value of these types counts as plain: {plain}.
"""


def grammar():
    homes = {}
    for name in table.FUNCTIONS.values():
        home, _, short = name.rpartition(".")
        homes.setdefault(home, set()).add(short)
    lists = {
        "functional": code(sorted(homes["torch.nn.functional"])),
        "torch": code(sorted(homes["torch"])),
        "numbers": code(sorted(table.NUMBERS.values())),
        "random": code(sorted(table.RANDOM.values())),
        "methods": code(sorted(table.METHODS)),
        "properties": code(sorted(table.PROPERTIES)),
        "operators": code(sorted({*table.OPERATORS, "In", "Is", "IsNot", "NotIn"})),
        "plain": code(kind.__name__ for kind in table.PLAIN),
    }
    text = myst(inspect.getdoc(reader)).partition("\n\n")[2]
    return DO_NOT_EDIT + GRAMMAR.format(text=text, **lists)


def in_words(described):
    return described.__doc__.replace("``", "`").rstrip(".")


def code(names):
    return ", ".join(f"`{name}`" for name in names)


TE = {  # every public name of te.ops, and what is to be said about it
    "AddExtraInput": "",
    "AllGather": "",
    "AllReduce": "",
    "BasicLinear": "no `userbuffers_options`: communication beside products comes from a plugin",
    "BasicOperation": "",
    "Bias": "",
    "ClampedSwiGLU": "",
    "ConstantScale": "",
    "Dropout": "the probability is `p`",
    "FusedOperation": "",
    "FusibleOperation": "",
    "GEGLU": "",
    "GELU": "",
    "GLU": "",
    "GroupedLinear": "the biases do not start at zero; what `single_grouped_weight`, "
    "`single_grouped_bias` and `delay_wgrad_compute` ask for comes later; under a recipe groups "
    "of any size, and products group by group",
    "Identity": "",
    "L2Normalization": "",
    "LayerNorm": "`sm_margin` has no effect",
    "Linear": "the bias does not start at zero",
    "MakeExtraOutput": "`in_place=True` only where nobody else holds the gradient",
    "QGEGLU": "",
    "QGELU": "",
    "Quantize": "where `torch.compile` traces, what leaves the chain is not quantized",
    "RMSNorm": "`sm_margin` has no effect",
    "ReGLU": "",
    "ReLU": "keeps its output: writing into it before the backward is an error",
    "ReduceScatter": "",
    "Reshape": "",
    "SReGLU": "",
    "SReLU": "",
    "ScaledClampedQGeGLU": "",
    "ScaledSReLU": "",
    "ScaledSiTUGLU": "",
    "ScaledSwiGLU": "",
    "Sequential": "a `torch.nn.Sequential`; nested ones are fused too",
    "SiLU": "",
    "SiTUGLU": "",
    "SwiGLU": "",
    "fused": "fusions come from plugins",
    "is_op_fuser_grouped_tensor_path_supported": "",
    "register_backward_fusion": "returns a handle with `unregister()`",
    "register_forward_backward_fusion": "returns a handle with `unregister()`",
    "register_forward_fusion": "returns a handle with `unregister()`",
}


def from_te_ops():
    """The page, with a new table of names."""
    where = {name: f"opfuse.{name}" for name in opfuse.__all__} | {
        name: f"opfuse.ops.{name}" for name in OPS
    }
    rows = [
        f"| `{name}` | {f'`{where[name]}`' if name in where else 'absent'} | {TE[name]} |"
        for name in sorted(TE)
    ]
    new = [name for name in OPS if name not in TE]
    rows += ["", f"Only opfuse has these, as bases of your ops or as ops: {code(sorted(new))}."]
    table = "\n".join(["| `te.ops` | Here | Differs |", "|---|---|---|", *rows])
    page = (HERE / "from-te-ops.md").read_text(encoding="utf-8")
    return re.sub(
        r"(from here \.\.\. -->\n).*?(<!-- \.\.\. to here)",
        rf"\1\n{table}\n\n\2",
        page,
        flags=re.DOTALL,
    )


class OneByOne(opfuse.FusedOperation):
    """Stands in for a kernel."""

    def fuser_forward(self, basic_op_ctxs, input_, **given):
        return self.run_separately(basic_op_ctxs, input_, **given)

    def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
        raise NotImplementedError("the picture needs a plan, not a backward")


class Fast:
    """The plugin of the picture."""

    @opfuse.hookimpl
    def opfuse_forward_fusions(self):
        linear, act, add = (
            (ops.BasicLinear, ops.Bias),
            opfuse.Subclasses(ops.Activation),
            ops.AddExtraInput,
        )
        return [
            opfuse.Fusion((*linear, act), OneByOne, name="linear+bias+activation"),
            opfuse.Fusion((*linear, add), OneByOne, name="linear+bias+add"),
        ]

    @opfuse.hookimpl
    def opfuse_backward_fusions(self):
        return [
            opfuse.Fusion(
                (ops.Bias, opfuse.Subclasses(ops.Activation)), OneByOne, name="activation+bias"
            )
        ]


@contextmanager
def only(plugin, **names):
    """No plugin but this one."""
    with opfuse.plugins.isolated(), opfuse.options(fusion_limit=100):
        opfuse.plugins.register(plugin, **names)
        yield


def picture():
    block = opfuse.Sequential(
        ops.MakeExtraOutput().set_extra_output_channel(0, "residual", output_to_caller=False),
        ops.RMSNorm(64),
        ops.Linear(64, 256),
        ops.GELU(),
        ops.Linear(256, 64),
        ops.AddExtraInput().set_extra_input_channel(0, "residual"),
    )
    with only(Fast(), name="fast", distribution="opfuse-plugin-fast", version="1.0"):
        explanation = opfuse.explain(block, torch.zeros(8, 64, requires_grad=True))
    with tempfile.TemporaryDirectory() as folder:
        explanation.save(pathlib.Path(folder) / "plan.svg")
        return (pathlib.Path(folder) / "plan.svg").read_text(encoding="utf-8")


def load(name):
    """A module of this folder, which is no package."""
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def generated():
    """The text of every generated file, by name."""
    pages = {"hooks.md": hooks(), "contracts.md": contracts(), "from-te-ops.md": from_te_ops()}
    pictures = {"plan.svg": picture(), "architecture.svg": load("house").draw()}
    gallery, index = load("gallery"), DO_NOT_EDIT + load("plugin_index").page()
    pictures |= {"kernels.svg": gallery.kernels(), "memory.svg": gallery.memory()}
    pages |= {"grammar.md": grammar(), "checks.md": DO_NOT_EDIT + load("checks").page()}
    return pages | {"plugin-index.md": index} | pictures


if __name__ == "__main__":
    for name, text in generated().items():
        (HERE / name).write_text(text, encoding="utf-8", newline="\n")
