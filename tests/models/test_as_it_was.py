"""What a converted model still does as it did before: its names, files, outputs, hooks, copies and modes."""

from __future__ import annotations

import copy
import io
import os
import pathlib
import subprocess
import sys
import threading

import pytest

pytest.importorskip("transformers", reason="the models are those of transformers")

import families
import torch
from other_models import MODELS
from steps import check, step, twins
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from transformers import DynamicCache

import opfuse
from opfuse.core.introspection import op_class
from opfuse.report.calls import saved_bytes
from opfuse.report.replaced_forward import replaced_forward

SUPPORT = pathlib.Path(families.__file__).parent

each_family = pytest.mark.parametrize("family", families.FAMILIES.values(), ids=families.FAMILIES)
few_families = pytest.mark.parametrize("family", families.FEW, ids=[f.name for f in families.FEW])
each_pretrained = pytest.mark.parametrize(
    "family",
    [f for f in families.FAMILIES.values() if f.pretrained],
    ids=[f.name for f in families.FAMILIES.values() if f.pretrained],
)
each_generating = pytest.mark.parametrize(
    "family",
    [f for f in families.FAMILIES.values() if f.generates],
    ids=[f.name for f in families.FAMILIES.values() if f.generates],
)


def converted_pair(family, **arguments):
    """A model and its converted copy."""
    reference, model = twins(family.make(**arguments))
    opfuse.convert(model)
    return reference, model


def fallbacks(model):
    """Why the outermost converted modules ran their own forward; those inside of a chain were not called."""
    usual = ("gives logits", "under a recipe alone", "no plugin fuses its rotations")
    usual += ("where no plugin computes the loss without them",)  # of few rows, say
    found = {n: why for n, why in opfuse.converted(model).items() if not why.endswith(usual)}
    inner = {name for name in found if any(name.startswith(f"{above}.") for above in found)}
    inner |= {name for name in found if name.endswith("embeddings")}  # positions for each row
    return {f"{name}: {why}" for name, why in found.items() if why and name not in inner}


@each_family
def test_a_step_of_training(family):
    reference, model = converted_pair(family)
    assert opfuse.converted(model)
    check(step(model, family), step(reference, family), family)
    assert not fallbacks(model)


EVERY_DTYPE = [(other, way) for other in MODELS for way in ("fp32", "bf16", "fp64", "autocast")]
FEW_DTYPES = [("opt", "fp32"), ("gpt_neox", "fp32"), ("bart", "bf16"), ("clip", "autocast")]
FEW_DTYPES += [("gpt_neox", "fp64"), ("nemotron", "fp64"), ("albert", "autocast")]


@pytest.mark.parametrize("other, way", EVERY_DTYPE if families.ALL else FEW_DTYPES)
def test_a_forward_keeps_no_more_than_before(other, way):
    torch.manual_seed(0)
    make, inputs_of = MODELS[other]
    reference, model = twins(make())
    inputs = inputs_of()
    if dtype := {"bf16": torch.bfloat16, "fp64": torch.float64}.get(way):
        reference, model = reference.to(dtype), model.to(dtype)
        floating = {
            n for n, tensor in inputs.items() if torch.is_floating_point(torch.as_tensor(tensor))
        }
        inputs |= {n: inputs[n].to(dtype) for n in floating}
    opfuse.convert(model)
    # statistics of norms are in fp32, as PyTorch keeps them on a GPU; on a CPU it rounds them to bf16
    statistics = []
    for part in reference.modules():
        if isinstance(part, nn.LayerNorm) and way == "bf16":
            part.register_forward_hook(
                lambda module, args, y: statistics.append(2 * y[..., 0].numel())
            )
    with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
        model(**inputs)  # constants are made
        apart = [
            [*each.parameters(), *each.buffers(), *inputs.values()] for each in (reference, model)
        ]
        apart = [[t for t in each if isinstance(t, torch.Tensor)] for each in apart]
        expected = saved_bytes(lambda: reference(**inputs).loss, apart[0])
        got = saved_bytes(lambda: model(**inputs).loss, apart[1])
    assert got <= expected + 2 * sum(statistics)


@pytest.mark.costly(3)
@each_family
def test_modules_parameters_and_names_stay(family):
    reference, model = twins(family.make())
    modules, params = dict(model.named_modules()), dict(model.named_parameters())
    buffers = dict(model.named_buffers())
    classes = {name: type(module) for name, module in modules.items()}
    shown = repr(model)
    opfuse.convert(model)
    step(model, family)
    for now, before in (
        (dict(model.named_modules()), modules),
        (dict(model.named_parameters()), params),
        (dict(model.named_buffers()), buffers),
    ):
        assert list(now) == list(before)
        assert all(now[name] is before[name] for name in before)
    for name, module in model.named_modules():
        assert isinstance(module, classes[name])
        assert type(module).__name__ == classes[name].__name__
        assert type(module).__module__ == classes[name].__module__
    assert list(model.state_dict()) == list(reference.state_dict())
    assert repr(model) == shown


@few_families
def test_other_models_do_not_change(family):
    other = family.make(seed=1)
    classes = {type(module) for module in other.modules()}
    before = {cls: dict(vars(cls)) for cls in classes}
    expected = step(other, family)
    _, model = converted_pair(family)
    step(model, family)
    assert {type(module) for module in other.modules()} == classes
    for cls in classes:
        assert {k: v for k, v in vars(cls).items() if k in before[cls]} == before[cls]
        assert not [k for k in set(vars(cls)) - set(before[cls]) if "opfuse" in k]
    got = step(other, family)
    assert torch.equal(got.loss, expected.loss)
    for name, grad in expected.grads.items():
        assert grad is None or torch.equal(got.grads[name], grad)
    assert opfuse.converted(other) == {}


@pytest.mark.costly(3)
@each_family
def test_revert_restores_classes_attributes_and_results(family):
    reference, model = twins(family.make())
    classes = {name: type(module) for name, module in model.named_modules()}
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    opfuse.convert(model)
    step(model, family)
    assert opfuse.revert(model) is model
    assert {name: type(module) for name, module in model.named_modules()} == classes
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    assert opfuse.converted(model) == {}
    got, expected = step(model, family), step(reference, family)
    assert torch.equal(got.loss, expected.loss)
    for name, grad in expected.grads.items():
        assert grad is None or torch.equal(got.grads[name], grad)


@few_families
def test_converting_twice_changes_nothing(family):
    reference, model = converted_pair(family)
    classes = [type(module) for module in model.modules()]
    opfuse.convert(model)
    assert [type(module) for module in model.modules()] == classes
    check(step(model, family), step(reference, family), family)


# Outputs


@pytest.mark.costly(4)
@each_pretrained
@pytest.mark.parametrize("return_dict", [True, False], ids=["dict", "tuple"])
def test_hidden_states_and_attentions(family, return_dict):
    reference, model = converted_pair(family, attn_implementation="eager")
    asked = {"output_hidden_states": True, "output_attentions": True, "return_dict": return_dict}
    given = family.inputs()
    got, expected = (m(**given, **asked) for m in (model, reference))
    assert isinstance(got, type(expected))
    if return_dict:
        assert list(got) == list(expected)
        assert len(got.hidden_states) == 3 and len(got.attentions) == 2
        got, expected = got.to_tuple(), expected.to_tuple()
    for one, other in zip(got, expected, strict=True):
        if not isinstance(one, DynamicCache):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.costly(4)
@each_generating
@pytest.mark.parametrize("cache", ["dynamic", "static", "none"])
def test_generate_gives_the_same_tokens_for_each_cache(family, cache):
    reference, model = (m.eval() for m in converted_pair(family))
    ids = family.inputs()["input_ids"]
    asked = {"max_new_tokens": 12, "do_sample": False, "use_cache": cache != "none"}
    if cache == "static":
        asked |= {"cache_implementation": "static", "disable_compile": True}
    asked["attention_mask"] = torch.ones_like(ids).index_fill(1, torch.tensor([0, 1]), 0)
    got, expected = (m.generate(ids, **asked) for m in (model, reference))
    assert torch.equal(got, expected)
    assert not fallbacks(model)


@few_families
@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_outputs_are_the_same_without_gradients(family, mode):
    reference, model = (m.eval() for m in converted_pair(family))
    with getattr(torch, mode)():
        got, expected = (m(**family.inputs()).logits for m in (model, reference))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@few_families
def test_autocast_is_as_near_fp32_as_the_original(family):
    reference, model = converted_pair(family)
    with torch.autocast("cpu", torch.bfloat16):
        got, expected = (step(m, family) for m in (model, reference))
    torch.testing.assert_close(got.loss, expected.loss, rtol=2e-2, atol=2e-2)
    assert {n: g is None for n, g in got.grads.items()} == {
        n: g is None for n, g in expected.grads.items()
    }
    exact = step(reference, family)
    for name, grad in exact.grads.items():
        if grad is not None and not name.endswith(family.zero or ("\n",)):
            mine, theirs = ((s.grads[name] - grad).norm() / grad.norm() for s in (got, expected))
            assert mine <= 1.5 * theirs + 1e-3, name


# Files


@pytest.mark.costly(3)
@each_pretrained
def test_save_pretrained_writes_the_original_checkpoint(family, tmp_path):
    reference, model = converted_pair(family)
    model.save_pretrained(tmp_path)
    loaded = type(reference).from_pretrained(tmp_path).train()
    assert opfuse.converted(loaded) == {}
    assert list(loaded.state_dict()) == list(reference.state_dict())
    for name, value in reference.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)
    again = family.model.from_pretrained(tmp_path).train()
    opfuse.convert(again)
    check(step(again, family), step(reference, family), family)


@few_families
def test_state_dict_goes_both_ways(family):
    reference, model = converted_pair(family)
    other = family.make(seed=3)
    expected = step(other, family)
    model.load_state_dict(other.state_dict())
    check(step(model, family), expected, family)
    reference.load_state_dict(model.state_dict())
    check(step(reference, family), expected, family)


@few_families
def test_load_state_dict_may_assign_parameters(family):
    _, model = converted_pair(family)
    step(model, family)
    other = family.make(seed=3)
    state = {name: value.clone() for name, value in other.state_dict().items()}
    model.load_state_dict(state, assign=True)
    if hasattr(model, "tie_weights"):
        model.tie_weights()
    check(step(model, family), step(other, family), family)
    assert not fallbacks(model)


@few_families
@pytest.mark.parametrize("how", ["to_empty", "assign"])
def test_a_model_converted_on_meta_may_be_loaded_later(family, how):
    reference = family.make(seed=4)
    with torch.device("meta"):
        model = family.make()
    opfuse.convert(model)
    buffers = {n: b for n, b in reference.named_buffers() if n not in reference.state_dict()}
    if how == "to_empty":
        model.to_empty(device="cpu")
        model.load_state_dict(reference.state_dict())
    else:
        state = {name: value.clone() for name, value in reference.state_dict().items()}
        model.load_state_dict(state, assign=True)
    for name, value in buffers.items():  # such as the frequencies of rotary embeddings
        above, _, key = name.rpartition(".")
        model.get_submodule(above)._buffers[key] = value.clone()
    if hasattr(model, "tie_weights"):
        model.tie_weights()
    check(step(model, family), step(reference, family), family)
    assert not fallbacks(model)


_LOAD = """
import pathlib, sys
sys.modules["opfuse"] = None
import torch, families
for path in sorted(pathlib.Path(sys.argv[1]).iterdir()):
    model = torch.load(path, weights_only=False)
    print(path.stem, repr(model(**families.FAMILIES[path.stem].inputs()).loss.item()))
assert not [name for name in sys.modules if name.startswith("opfuse") and sys.modules[name]]
"""


def test_pickles_load_without_opfuse(tmp_path):
    expected = {}
    for family in families.FAMILIES.values() if families.ALL else families.FEW:
        reference, model = converted_pair(family)
        expected[family.name] = step(reference, family).loss.item()
        step(model, family)
        torch.save(model, tmp_path / f"{family.name}.pt")
        check(step(model, family), step(reference, family), family)  # saving leaves it converted
        assert opfuse.converted(model) and not fallbacks(model)
    path = os.pathsep.join([str(SUPPORT), *[entry for entry in sys.path if entry]])
    environ = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", _LOAD, str(tmp_path)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    found = dict(line.split() for line in done.stdout.splitlines())
    assert found.keys() == expected.keys()
    for name, loss in expected.items():
        assert abs(float(found[name]) - loss) < 1e-5


@pytest.mark.costly(3)
@each_family
def test_a_pickle_is_unconverted(family):
    reference, model = converted_pair(family)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert opfuse.converted(loaded) == {}
    assert [type(m) for m in loaded.modules()] == [type(m) for m in reference.modules()]
    check(step(loaded, family), step(reference, family), family)
    opfuse.convert(loaded)
    check(step(loaded, family), step(reference, family), family)


@pytest.mark.costly(3)
@each_family
@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_a_deepcopy_stays_converted_and_independent(family, warm):
    reference, model = converted_pair(family)
    if warm:
        step(model, family)
    twin = copy.deepcopy(model)
    assert [type(m) for m in twin.modules()] == [type(m) for m in model.modules()]
    assert opfuse.converted(twin).keys() == opfuse.converted(model).keys()
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2)
    check(step(twin, family), step(reference, family), family)
    assert not fallbacks(twin)


# What changes later


@few_families
def test_forward_hooks_on_every_module(family):
    reference, model = converted_pair(family)
    seen = {}
    for which, each in (("reference", reference), ("model", model)):
        seen[which] = []
        for name, module in each.named_modules():
            module.register_forward_hook(lambda *_, name=name, rows=seen[which]: rows.append(name))
    check(step(model, family), step(reference, family), family)
    assert seen["model"] == seen["reference"]


@pytest.mark.costly(4)
@few_families
@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_a_hook_on_one_module(family, kind):
    reference, model = converted_pair(family)
    step(model, family)
    names = [name for name, module in model.named_modules() if name]
    if not families.ALL:
        names = [name for name in names if name.endswith(("." + family.replaced, ".0", "norm"))]
    for name in names:
        counts = []
        for each in (reference, model):
            called = []
            handle = getattr(each.get_submodule(name), f"register_{kind}_hook")(
                lambda *args, called=called: called.append(1)
            )
            step(each, family)
            handle.remove()
            counts.append(len(called))
        assert counts[0] == counts[1], name
    step(model, family)
    assert not fallbacks(model)


@few_families
def test_a_hook_that_changes_what_a_layer_gives(family):
    reference, model = converted_pair(family)
    for each in (reference, model):
        layer = family.layers(each)[0].get_submodule(family.replaced)
        layer.register_forward_hook(lambda module, args, output: output * 0.5)
    check(step(model, family), step(reference, family), family)
    assert family.name == "mixtral" or fallbacks(model)


@few_families
def test_a_global_hook_sees_the_replaced_layer(family):
    _, model = converted_pair(family)
    called = []
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, args, output: called.append(id(module))
    )
    try:
        step(model, family)
    finally:
        handle.remove()
    layer = family.layers(model)[0].get_submodule(family.replaced)
    assert id(layer) in called


@pytest.mark.costly(3)
@few_families
@pytest.mark.parametrize("when", ["before", "after"])
def test_replacing_a_child_changes_what_runs(family, when):
    reference, model = twins(family.make())

    def replace():
        for each in (reference, model):
            layer = family.layers(each)[0]
            above, _, key = family.replaced.rpartition(".")
            old = layer.get_submodule(family.replaced)
            twin = copy.deepcopy(old)
            with torch.no_grad():
                twin.weight.mul_(0.5)
            setattr(layer.get_submodule(above), key, nn.Sequential(twin, Halved()))

    if when == "before":
        replace()
    opfuse.convert(model)
    step(model, family)
    if when == "after":
        replace()
    check(step(model, family), step(reference, family), family)


class Halved(nn.Module):
    """A module that nobody knows."""

    def forward(self, x):
        """Half of it, sorted back and forth."""
        return x * 0.5 + x.sort(-1)[0] * 0.0


@few_families
def test_replacing_a_parameter_changes_what_runs(family):
    reference, model = converted_pair(family)
    step(model, family)
    for each in (reference, model):
        layer = family.layers(each)[0].get_submodule(family.replaced)
        layer.weight = nn.Parameter(layer.weight.detach() * 0.5)
    check(step(model, family), step(reference, family), family)
    assert not fallbacks(model)


@pytest.mark.costly(3)
@few_families
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_forward_replaced_on_an_instance(family, when):
    reference, model = twins(family.make())

    def replace():
        for each in (reference, model):
            layer = family.layers(each)[0].get_submodule(family.replaced)
            own = layer.forward
            layer.forward = lambda x, own=own: own(x) * 0.5

    if when == "before":
        replace()
    opfuse.convert(model)
    step(model, family)
    if when == "after":
        replace()
    check(step(model, family), step(reference, family), family)


@few_families
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_forward_replaced_on_the_instances_of_layers(family, when):
    """As Liger does with a model that is there already: ``types.MethodType`` on what is converted itself."""
    reference, model = twins(family.make())

    def replace():
        for each in (reference, model):
            for layer in [*family.layers(each), *_norms(each)]:
                own = type(layer).forward

                def forward(self, *args, _own=own, **kwargs):
                    result = _own(self, *args, **kwargs)
                    if isinstance(result, tuple):
                        return (result[0] * 0.5, *result[1:])
                    return result * 0.5

                layer.forward = forward.__get__(layer)

    if when == "before":
        replace()
    opfuse.convert(model)
    if when == "after":
        step(model, family)
        replace()
    check(step(model, family), step(reference, family), family)


def _norms(model):
    return [m for m in model.modules() if type(m).__name__.endswith("Norm")]


@pytest.mark.costly(4)
@few_families
@pytest.mark.parametrize("which", ["leaf", "layer"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_forward_replaced_on_a_class(family, which, when, monkeypatch):
    """As Liger does before a model is made."""
    reference, model = twins(family.make())
    layer = family.layers(model)[0]
    cls = op_class(layer.get_submodule(family.replaced) if which == "leaf" else layer)

    def replace():
        own = cls.forward

        def forward(self, *args, **kwargs):
            result = own(self, *args, **kwargs)
            if isinstance(result, tuple):
                return (result[0] * 0.5, *result[1:])
            return result * 0.5

        monkeypatch.setattr(cls, "forward", forward)

    if when == "before":
        replace()
    opfuse.convert(model)
    step(model, family)
    if when == "after":
        replace()
    check(step(model, family), step(reference, family), family)
    if when == "after":
        monkeypatch.undo()
        for each in model.modules():  # what is inside of a chain is not called again
            if (standing := replaced_forward(each)) is not None:
                standing.fallback = ""
        check(step(model, family), step(reference, family), family)
        assert not fallbacks(model)


@pytest.mark.costly(4)
@few_families
@pytest.mark.parametrize("kind", ["weight_norm", "spectral_norm"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_parametrization_may_come_before_or_after_converting(family, kind, when):
    reference, model = twins(family.make())

    def register():
        for each in (reference, model):
            for layer in family.layers(each):
                torch.manual_seed(5)
                getattr(parametrizations, kind)(layer.get_submodule(family.replaced))

    if when == "before":
        register()
    opfuse.convert(model)
    if when == "after":
        step(model, family)
        register()
    for _ in range(2):
        check(step(model, family), step(reference, family), family)
    for each in (reference, model):
        for layer in family.layers(each):
            parametrize.remove_parametrizations(layer.get_submodule(family.replaced), "weight")
    check(step(model, family), step(reference, family), family)


@few_families
def test_parametrizing_what_is_converted(family):
    """The layer itself, whose class torch derives again."""

    class Twice(nn.Module):
        def forward(self, x):
            return x * 2

    reference, model = converted_pair(family)
    for each in (reference, model):
        for norm in _norms(each):
            parametrize.register_parametrization(norm, "weight", Twice())
    check(step(model, family), step(reference, family), family)
    opfuse.revert(model)
    check(step(model, family), step(reference, family), family)


@few_families
def test_freezing_parameters_later_gives_the_right_gradients(family):
    reference, model = converted_pair(family)
    step(model, family)
    names = [name for name, _ in model.named_parameters()]
    for frozen in (names[::2], names[1::2], names[:-1]):
        for each in (reference, model):
            for name, param in each.named_parameters():
                param.requires_grad_(name not in frozen)
        check(step(model, family), step(reference, family), family)
    assert not fallbacks(model)


@pytest.mark.costly(3)
@few_families
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=["bf16", "fp64"])
def test_a_converted_model_may_change_its_dtype(family, dtype):
    reference, model = converted_pair(family)
    step(model, family)
    given = {k: v for k, v in family.inputs(dtype).items() if k == "pixel_values"}
    exact = step(reference, family)
    reference.to(dtype), model.to(dtype)
    got, expected = step(model, family, **given), step(reference, family, **given)
    assert all("its loss is computed in fp32" in why for why in fallbacks(model))
    if dtype is torch.float64:
        check(got, expected, family, 1e-6)  # the norms of transformers compute in fp32
    else:
        torch.testing.assert_close(got.loss, expected.loss, rtol=2e-2, atol=2e-2)
        for name, grad in exact.grads.items():
            if grad is not None and not name.endswith(family.zero or ("\n",)):
                assert got.grads[name].dtype is dtype
                mine, theirs = (
                    (s.grads[name].float() - grad).norm() / grad.norm() for s in (got, expected)
                )
                assert mine <= 1.5 * theirs + 1e-3, name
    reference.float(), model.float()
    check(step(model, family), step(reference, family), family)


@few_families
def test_training_and_evaluation_with_dropout(family):
    reference, model = converted_pair(family, dropout=0.5)
    reference.eval(), model.eval()
    check(step(model, family), step(reference, family), family)
    model.train()
    torch.manual_seed(7)
    first = step(model, family)
    second = step(model, family)
    torch.manual_seed(7)
    again = step(model, family)
    assert torch.equal(first.loss, again.loss)
    if family.name != "vit" or not torch.equal(first.loss, second.loss):
        assert not torch.equal(first.loss, second.loss)
    reference.train()
    losses = [[step(m, family).loss.item() for _ in range(24)] for m in (model, reference)]
    mine, theirs = (torch.tensor(rows) for rows in losses)
    error = ((mine.var() + theirs.var()) / 24).sqrt()
    assert abs(mine.mean() - theirs.mean()) < 4 * error + 1e-6
    model.eval(), reference.eval()
    check(step(model, family), step(reference, family), family)
    assert not fallbacks(model)


@few_families
def test_a_layer_in_evaluation_mode(family):
    """One layer frozen in evaluation mode, the rest in training: dropout is off there, and only there."""
    reference, model = converted_pair(family, dropout=0.5)
    for each in (reference, model):
        each.eval()
        each.train()
        for layer in family.layers(each):
            layer.eval()
    drops = [m for m in model.modules() if isinstance(m, nn.Dropout) and m.training]
    for each in (reference, model):
        for module in each.modules():
            if isinstance(module, nn.Dropout) and module.training:
                module.eval()
    assert drops or family.name in ("llama", "mixtral", "encoder", "gemma", "qwen3", "phi3")
    check(step(model, family), step(reference, family), family)


@few_families
def test_threads_share_a_converted_model(family):
    reference, model = converted_pair(family)
    expected = step(reference, family)
    params = dict(model.named_parameters())
    results, errors = [], []
    start = threading.Barrier(4)

    def work():
        try:
            start.wait()
            for _ in range(3):
                loss = model(**family.inputs()).loss
                results.append(
                    (loss, torch.autograd.grad(loss, list(params.values()), allow_unused=True))
                )
        except Exception as error:
            errors.append(error)

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not errors
    for loss, grads in results:
        got = type(expected)(loss.detach(), dict(zip(params, grads, strict=True)))
        check(got, expected, family)


@few_families
def test_fsdp_wrap_policies_find_the_converted_layers(family):
    """By the name of the class, as transformers and accelerate do it, and by ``isinstance``."""
    import functools

    from torch.distributed.fsdp.wrap import ModuleWrapPolicy, transformer_auto_wrap_policy

    reference, model = converted_pair(family)
    cls = type(family.layers(reference)[0])
    policy = ModuleWrapPolicy({cls})
    by_isinstance = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={cls})
    for rule in (policy, by_isinstance):
        found = [
            [
                name
                for name, module in each.named_modules()
                if rule(module=module, recurse=False, nonwrapped_numel=0)
            ]
            for each in (reference, model)
        ]
        assert found[0] == found[1] and len(found[0]) == 2
    if family.pretrained:
        assert model._no_split_modules == reference._no_split_modules
        names = [n for n in model._no_split_modules if n == family.layer]
        assert names == [family.layer]
        assert len([m for m in model.modules() if m.__class__.__name__ in names]) == 2
