"""The page with the checks of the conformance kit: the kit has their meaning, this their causes."""

import inspect
import re

from opfuse.testing import CHECKS, QuantizerSuite
from opfuse.testing.processes import PLUGIN_CHECKS

PASSES = {"joint", "forward", "backward"}

PAGE = """# The checks

What the conformance kit requires, and the usual cause of a failure. A failing check prints the
smallest case as code: run that first. {{doc}}`write-a-plugin` says how to run the kit.

## Of a fusion

{{class}}`opfuse.testing.FusionSuite` runs these checks on each fusion of a plugin. A test's name
ends in one of these names, and `limits` takes them.

| Check | Meaning | Usual cause of a failure |
|---|---|---|
{fusions}

If `runs`, `output` or `gradients` fails, the checks that would fail for the same reason are
skipped. Mend these first.

## Of a plugin

| Check | Meaning | Usual cause of a failure |
|---|---|---|
{plugins}

## Of a quantizer

{{class}}`opfuse.testing.QuantizerSuite` runs these tests on each quantizer of your recipes.

| Test | Meaning | Usual cause of a failure |
|---|---|---|
{quantizers}

{{doc}}`write-a-plugin` has the checks of {{class}}`opfuse_distributed.testing.DistributedSuite`.
"""

CAUSES = {
    # of a fusion
    "condition": "`when` returns False, None or a single word; it reads a parameter's data",
    "settings": (
        "a setting of torch, or an attribute of an op, is set for a kernel and not set back where "
        "it raises"
    ),
    "pattern": (
        "`when` refuses without a sentence; another fusion of the plugin takes these ops first"
    ),
    "runs": (
        "a width, a dtype or a layout that nobody thought of; an assumption about `input_.ndim`"
    ),
    "codes": (
        "a plain tensor where the pattern has a `Cast`; values rounded to another dtype before "
        "they are quantized; the quantizer's own scales in place of a copy"
    ),
    "unmodified_inputs": (
        "an in-place operation on the result of `.to()` or `.contiguous()`, which may be the same "
        "tensor"
    ),
    "saved_state": (
        "a tensor that no gradient needs, or none where one does; the output of a cast in place "
        "of its input; another order than that of `saved_names`"
    ),
    "unmodified_gradients": (
        "the backward writes into `grad_output` where `ctx.owns_grad_output` is false"
    ),
    "output": (
        "a value is rounded where the ops do not round, or not computed in fp32 where they do; a "
        "mask ends at the wrong row; a number of the op is not used"
    ),
    "strides": (
        "`torch.empty` or `.contiguous()` where the ops keep the order of dimensions, as "
        "`torch.empty_like` does"
    ),
    "recompute": (
        "the output is computed again from something that has changed since, such as a number of "
        "the op"
    ),
    "gradients": (
        "a sum over rows in half precision; a missing factor; a broadcast dimension that is not "
        "summed; a division by a weight that may be 0; an activation's input read without "
        "`saved_input`"
    ),
    "aliasing": (
        "the output is a view of the input; a buffer is kept on the fused op and used by the next "
        "call"
    ),
    "requires_grad": (
        "`tensor.requires_grad` is asked in place of `ctx.input_requires_grad` or "
        "`ctx.param_requires_grad`"
    ),
    "grad_input": (
        '`grad_input = "fresh"` is declared, and the backward returns `grad_output` or a view'
    ),
    "autocast": "`ctx.dtype` is ignored, or taken for the dtype of the output where it is None",
    "repeatable": (
        "atomic additions in a kernel; a workspace that is not cleared; a plan kept from the "
        "first call"
    ),
    "interleaved": (
        "something of a call, such as whether the kernel ran, is kept on the fused op and not on "
        "a context"
    ),
    "orders": (
        "a grid, a workspace or a choice of code is made at the first call, and kept for others"
    ),
    "follows_values": (
        "a parameter, a buffer or a number is read in `__init__` or `planned`; a cache by a "
        "tensor's version or address"
    ),
    "keeps_numbers": (
        "the backward reads `self.basic_ops[0].scale` or `training`, and not the context"
    ),
    "nan_and_inf": (
        "a maximum or a comparison drops NaN; a mask multiplies by zero in place of choosing; "
        "`ctx.is_reached` is not asked"
    ),
    "magnitude": (
        "a square, an exponential or a product leaves the range of the dtype; a difference of two "
        "large numbers; an epsilon in half precision"
    ),
    "errors": (
        "an exception is caught; a shape that the ops refuse is broadcast; what a call sets is "
        "not set back"
    ),
    "together": (
        "a fusion relies on what another one of the plugin leaves, or leaves something else"
    ),
    "neighbours": (
        "the pattern matches more than the kernel computes; `Subclasses(...)` with a formula of a "
        "base class: call the op's own methods"
    ),
    "saved_bytes": (
        "both an input and its cast are saved; a mask in a wide dtype; a view that keeps its "
        "whole storage"
    ),
    "released": (
        "a tensor is kept on the fused op, on a module or in a closure, or is an attribute of a "
        "context and not in `save_for_backward`"
    ),
    "versions": "a `detach()` of other memory, or `.data` of what the op got, is saved",
    "generator": "a seed is set, or drawn where the ops draw none",
    "threads": "state of a call on the fused op or in a global",
    "host_reads": "`.item()`, `float(tensor)`, `if tensor:` or `nonzero()`",
    "without_grad": (
        "`ctx.requires_grad` is not asked before saving; memory of the first call is used again"
    ),
    "batch_invariance": (
        "`batch_invariant` is declared, and the order of a sum depends on the number of rows"
    ),
    "main_grad": (
        "the fused op adds to `main_grad` itself, or changes a gradient after `ctx.grad_sum` has "
        "it: see `adds_to_sum`"
    ),
    "recipe": "a tensor is cast twice, or by another quantizer; a quantizer's state is read late",
    "held_results": (
        "an in-place operation or `out=` on what an operation of PyTorch gave, without asking "
        "`opfuse.ops.authoring.may_write`"
    ),
    "opcheck": (
        "a custom operator without a fake implementation, or whose schema says that it changes "
        "nothing"
    ),
    "compile": (
        "a side effect, a read of a tensor's value, or what Dynamo cannot trace: refuse where "
        "`env.compiling`, or register a custom operator"
    ),
    # of a plugin
    "entry_point": "the package is not installed, or its entry point names another module",
    "imports": "the module of the entry point, or a hook, imports Triton or asks for a CUDA device",
    "processes": "the order of a set or of a directory; a name with an address in it",
    # of a quantizer
    "test_recipes": "the suite has no `recipes`",
    "test_copies": "both copies are made whatever `usage` says; the shape is that of the matrix",
    "test_round_trip": (
        "the columnwise copy is not transposed; a scale and its reciprocal are mixed up"
    ),
    "test_shapes": "`.view` of a tensor that is not contiguous; one row or one dimension only",
    "test_zeros": "a division by the largest magnitude, which is 0",
    "test_not_finite": "`clamp` makes a number of an infinity; the scale stays finite",
    "test_extremes": "the scale of a tiny tensor is 0 or not normal, its reciprocal infinite",
    "test_out": "a new tensor is returned, or only some of the tensors of `out` are written",
    "test_owns_its_scales": "the result holds the quantizer's own scale, and not a copy",
    "test_again": "the cast draws from torch's generator; `requantize` records",
    "test_what_evaluation_sees_is_not_recorded": (
        "state that a cast writes is not in `pending_names`"
    ),
    "test_a_step_is_one_update": "a cast overwrites the record of an earlier one: take the maximum",
    "test_copies_of_it_are_apart": "state is in a global, or in a class attribute",
    "test_a_checkpoint_resumes_to_the_bit": "a tensor of the state is not in `state_names`",
}
"""The usual cause of a failure, by check."""


def checks():
    """Every check of the kit as ``(name, what it is)``, in three lists."""
    of_fusions = [(name, check.run) for name, check in CHECKS.items()]
    tests = [pair for pair in vars(QuantizerSuite).items() if pair[0].startswith("test_")]
    return of_fusions, [*PLUGIN_CHECKS.items()], tests


def page():
    fusions, plugins, quantizers = ("\n".join(map(row, found)) for found in checks())
    return PAGE.format(fusions=fusions, plugins=plugins, quantizers=quantizers)


def row(found):
    name, function = found
    passes = CHECKS[name].passes if name in CHECKS else PASSES
    only = "" if set(passes) == PASSES else f" Of {' and '.join(passes)} fusions."
    meaning = re.sub(r"``([^`]+)``", r"`\1`", " ".join(inspect.getdoc(function).split()))
    return f"| `{name}` | {meaning}{only} | {CAUSES.get(name, '')} |"
