"""What a checkpoint has of a recipe with state, in every way to save one: to the bit, or it is said."""

import contextlib
import copy
import io
import re
import warnings

import opfuse_convert
import pytest
import saved_state
import torch
from saved_state import RECIPES, WAYS, build, same, state_of, train
from torch import nn
from torch.nn import functional

import opfuse
from opfuse import ops
from opfuse.core.plugins import manager

pytest.importorskip("opfuse_fp8", reason="the recipes with state are those of opfuse-plugin-fp8")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.distributed is:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.distributed.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
]
KINDS = "chain", "converted", "quantized"


@pytest.fixture(autouse=True)
def fp8_alone():
    with opfuse.plugins.using("fp8"):
        yield


def cases():
    for kind in KINDS:
        for recipe in RECIPES if kind != "quantized" else RECIPES[:1]:
            for way in WAYS:
                if kind == "quantized" and "dcp_in_place" in way:
                    continue  # of a quantized parameter the values are copies
                for target in ("fresh", "used"):
                    yield pytest.param(kind, recipe, way, target)


@pytest.mark.costly(10)
@pytest.mark.parametrize("kind, recipe, way, target", [*cases()])
def test_training_resumes_to_the_bit(kind, recipe, way, target, tmp_path):
    if way == "accelerate" or "safetensors" in way:
        pytest.importorskip(way.partition("_")[0])
    model = build(kind)
    train(model, recipe, range(3))
    load = WAYS[way](model, tmp_path / "saved")
    # what torch.distributed.checkpoint loads into must have the keys
    other = build(kind, 5, recipe if "dcp" in way and target == "fresh" else None)
    if target == "used":
        train(other, recipe, range(7, 9))
    load(other)
    assert same(train(model, recipe, range(3, 6)), train(other, recipe, range(3, 6)))


@pytest.mark.parametrize("kind", KINDS)
def test_the_keys_do_not_depend_on_what_ran(kind):
    model = build(kind, prepare="fp8-delayed")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with opfuse.autocast("fp8-current") if kind != "quantized" else opfuse.autocast(False):
        model(saved_state.batch(0))
    train(model, "fp8-delayed", range(2))
    assert model.state_dict().keys() == before.keys()
    other = build(kind)
    train(other, "fp8-delayed", range(1))
    assert other.state_dict().keys() == before.keys()
    train(other, "nvfp4", range(1)) if kind != "quantized" else None
    assert before.keys() <= other.state_dict().keys()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
def test_each_key_is_an_attribute_and_shares_no_storage(kind, recipe):
    recipe = "fp8-delayed" if kind == "quantized" else recipe
    model = build(kind)
    train(model, recipe, range(2))
    state, storages = model.state_dict(), set()
    assert any("quantizers." in key for key in state)
    for key, value in state.items():
        place = model
        for part in key.split("."):
            place = getattr(place, part)
        assert place.shape == value.shape, key
        storage = value.untyped_storage()
        assert storage.nbytes() == value.nbytes and storage.data_ptr() not in storages, key
        storages.add(storage.data_ptr())


def test_a_layer_in_many_places_is_in_a_checkpoint_with_storages_of_its_own():
    layer = saved_state.Gated()
    model = nn.Sequential(layer, layer, layer, saved_state.Gated())
    opfuse.convert(model)
    train(model, "fp8-delayed", range(2))
    for _ in range(2):
        state = state_of(model)
        assert any(key.startswith("2.") for key in state)
        assert len({value.untyped_storage().data_ptr() for value in state.values()}) == len(state)


def test_a_quantizer_of_several_tensors_is_in_a_checkpoint_once_for_each():
    import opfuse_fp8

    shared = opfuse_fp8.DelayedQuantizer(torch.float8_e4m3fn, history=4)
    recipe = opfuse_fp8.CustomRecipe(lambda role: shared, name="one for all")
    model = opfuse.Sequential(ops.Linear(32, 32), ops.Linear(32, 32))
    train(model, recipe, range(2))
    state = state_of(model)
    assert len({value.untyped_storage().data_ptr() for value in state.values()}) == len(state)
    other = opfuse.Sequential(ops.Linear(32, 32), ops.Linear(32, 32))
    other.load_state_dict(model.state_dict())
    shared = copy.deepcopy(shared)
    assert same(train(model, recipe, range(2, 4)), train(other, recipe, range(2, 4)))


def test_state_that_starts_over_after_a_load_is_told_with_its_ops():
    for kind in ("chain", "converted"):
        model = build(kind)
        other = build(kind, 5)
        other.load_state_dict(model.state_dict())
        first = "0, " if kind == "chain" else "0.gate, "
        says = rf'checkpoint that was loaded.* has none for .*"fp8-delayed".*none was restored in .*{first}'
        with pytest.warns(UserWarning, match=says) as seen, torch.no_grad():
            with opfuse.autocast("fp8-delayed"):
                other(saved_state.batch(0))
        assert len(seen) == 1
        train(other, "fp8-delayed", range(2))  # it is said once
        third = build(kind, 5)
        third.load_state_dict(model.state_dict())
        with opfuse.autocast(enabled=False, calibrating=True), torch.no_grad():
            third(saved_state.batch(0))
        train(third, "fp8-delayed", range(1))  # its scales were found


def test_what_dcp_did_not_load_is_told(tmp_path):
    """Into a fresh model whose keys are not there yet."""
    model = build("converted")
    train(model, "fp8-delayed", range(2))
    load = WAYS["dcp"](model, tmp_path)
    other = build("converted", 5)
    load(other)
    with pytest.warns(UserWarning, match=r"0.gate, .*1.down.*assign_names\(model, rec"):
        train(other, "fp8-delayed", range(1))


def test_a_copy_of_a_converted_model_goes_on_with_its_state():
    model = build("converted")
    train(model, "fp8-delayed", range(3))
    twin = copy.deepcopy(model)
    assert same(state_of(twin).values(), state_of(model).values())
    saved = copy.deepcopy(twin.state_dict())
    assert same(train(twin, "fp8-delayed", range(3, 5)), train(model, "fp8-delayed", range(3, 5)))
    third = copy.deepcopy(build("converted", 5))
    third.load_state_dict(saved)  # before its chains are made
    twin.load_state_dict(saved)
    assert same(train(twin, "fp8-delayed", range(3, 5)), train(third, "fp8-delayed", range(3, 5)))


LOOKS = {
    "explain": opfuse.explain,
    "plan_memory": lambda model, x: opfuse.plan_memory(model, x, measure=False),
    "convert": opfuse.convert,
}


@pytest.mark.parametrize("before", ["nothing", "steps", "a copy", "a load", "a load into a copy"])
@pytest.mark.parametrize("look", LOOKS)
def test_what_looks_at_a_model_inside_of_a_block_changes_no_state(look, before):
    found = []
    for looks in (False, True):
        model = build("converted")
        if before != "nothing":
            train(model, "fp8-delayed", range(3))
        if "copy" in before:
            twin = copy.deepcopy(build("converted", 5) if "load" in before else model)
        if "load" in before:
            twin = twin if "copy" in before else build("converted", 5)
            twin.load_state_dict(model.state_dict())
        model = twin if before not in ("nothing", "steps") else model
        with opfuse.autocast("fp8-delayed"):
            if looks:
                LOOKS[look](model, 100 * saved_state.batch(3))
            model(saved_state.batch(3)).sum().backward()
        model.zero_grad()
        found.append((train(model, "fp8-delayed", range(4, 6)), model.state_dict()))
    assert same(found[0][0], found[1][0])
    torch.testing.assert_close(found[0][1], found[1][1], rtol=0, atol=0)


def test_a_copy_of_a_converted_model_has_the_names_of_its_ops():
    model = nn.ModuleDict({"inner": build("converted")})
    opfuse.assign_names(model)
    twin = copy.deepcopy(model["inner"])
    for one in (model["inner"], twin):
        with opfuse.watch_quantization() as seen, torch.no_grad():
            with opfuse.autocast("fp8-current", skip=["inner.1"]):
                one(saved_state.batch(0))
        assert {name.split()[0] for name in seen.tensors} == {"inner.0.gate", "inner.0.down"}


def test_a_copy_of_a_wrapper_that_forwards_attributes_is_a_wrapper():
    class Wrapper(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def __getattr__(self, name):  # as a PeftModel's
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(super().__getattr__("inner"), name)

    wrapper = Wrapper(build("converted"))
    train(wrapper.inner, "fp8-delayed", range(1))
    twin = copy.deepcopy(wrapper)
    assert type(twin) is Wrapper and twin.inner is not wrapper.inner
    assert same(state_of(twin).values(), state_of(wrapper).values()) and state_of(twin)


def test_state_of_another_chain_is_refused():
    model, other = build("converted"), nn.Sequential(saved_state.Gated(), saved_state.Gated())
    assert "All keys matched" in str(model.load_state_dict(other.state_dict()))
    assert "All keys matched" in str(other.load_state_dict(model.state_dict()))
    model = build("converted")
    train(model, "fp8-delayed", range(1))
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\).*"0._opfuse.chain'):
        other.load_state_dict(model.state_dict())
    moved = {
        re.sub(r"chain\.\d+\.", "chain.77.", key): value
        for key, value in model.state_dict().items()
    }
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\).*"0._opfuse.chain.77'):
        model.load_state_dict(moved)


def test_a_pickle_of_a_converted_model_has_no_state_of_its_chains():
    model = build("converted")
    train(model, "fp8-delayed", range(1))
    file = io.BytesIO()
    with pytest.warns(
        UserWarning, match="pickle, .* leaves out the state .* [01].gate, .*state_dict"
    ):
        torch.save(model, file)
    file.seek(0)
    assert not state_of(torch.load(file, weights_only=False))


def test_a_conversion_that_goes_says_that_its_state_goes():
    model = build("converted")
    train(model, "fp8-delayed", range(1))
    with pytest.warns(UserWarning, match="revert leaves out the state .* [01].gate, .*state_dict"):
        opfuse.revert(model)
    opfuse.revert(build("converted"))  # it has none


class Wrapper(nn.Module):
    """A part around a linear layer, as an adapter is."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x).clone()


@pytest.mark.parametrize("how", ("copied", "converted"))
@pytest.mark.parametrize("part", ("gate", "up", "down"))
def test_a_chain_of_another_structure_has_the_state_of_what_it_reads_or_says_not(part, how):
    model = build("converted")
    train(model, "fp8-delayed", range(2))
    before = copy.deepcopy(state_of(model))
    setattr(model[0], part, Wrapper(getattr(model[0], part)))
    if how == "copied":
        model = copy.deepcopy(model)
    else:
        opfuse.convert(model)
    with contextlib.ExitStack() as stack:
        if part == "up":  # the gate was quantized together with it
            stack.enter_context(pytest.warns(UserWarning, match=r"none was restored in 0.gate\. "))
        if part == "gate":
            why = {"copied": "there is nothing to fuse in it", "converted": "gate was replaced"}
            said = f"DelayedScaling quantizes nothing: {why[how]}"
            stack.enter_context(pytest.warns(opfuse.PluginWarning, match=said))
        train(model, "fp8-delayed", range(1))
    for key, value in before.items():
        if key.startswith("1.") and key.endswith("recipe"):
            assert torch.equal(model.state_dict()[key], value)


def test_chains_inside_of_a_chain_go_on_with_its_state():
    model = build("converted")
    train(model, "fp8-delayed", range(2))
    twin = copy.deepcopy(model)
    hook = model[1].register_forward_hook(lambda *args: None)
    assert same(train(model, "fp8-delayed", range(2, 5)), train(twin, "fp8-delayed", range(2, 5)))
    reasons = opfuse_convert.converted(model)
    assert "hooks" in reasons[""] and not reasons["0"] and not opfuse_convert.converted(twin)[""]
    hook.remove()
    assert same(train(model, "fp8-delayed", range(5, 7)), train(twin, "fp8-delayed", range(5, 7)))
    assert same(state_of(model).values(), state_of(twin).values())


@pytest.mark.parametrize("kind", ("chain", "converted"))
@pytest.mark.parametrize("target", ("used", "prepared", "loaded", "copied"))
def test_a_checkpoint_without_state_is_told_whatever_it_is_loaded_into(kind, target):
    plain = build(kind).state_dict()
    other = build(kind, 5, "fp8-delayed" if target == "prepared" else None)
    if target == "used":
        train(other, "fp8-delayed", range(1))
    if target == "loaded":  # state of this one waits
        third = build(kind)
        train(third, "fp8-delayed", range(1))
        other.load_state_dict(third.state_dict())
    other.load_state_dict(plain)
    if target == "copied":
        other = copy.deepcopy(copy.deepcopy(other))
    with pytest.warns(
        UserWarning, match="the checkpoint .* has none for .*none was restored in .*0"
    ):
        train(other, "fp8-delayed", range(1))
    train(other, "fp8-delayed", range(1))


@pytest.mark.parametrize("kind", ("chain", "converted"))
@pytest.mark.parametrize("how", ("to_empty", "assign", "plain"))
def test_state_that_was_on_the_meta_device_is_loaded_or_told(kind, how):
    model, other = build(kind), build(kind, 5, "fp8-delayed")
    train(model, "fp8-delayed", range(2))
    saved = copy.deepcopy(model.state_dict())
    other.to("meta")
    assert all(value.is_meta for key, value in state_of(other).items() if key[-7:] != ".recipe")
    if how == "assign":
        other.load_state_dict(saved, assign=True)
    else:
        other.to_empty(device="cpu")
        kept = saved if how == "to_empty" else [key for key in saved if "quantizers." not in key]
        other.load_state_dict({key: saved[key] for key in kept})
    if how == "plain":
        with pytest.warns(UserWarning, match="none was restored in .*0"):
            train(other, "fp8-delayed", range(1))
        assert all(value.isfinite().all() for value in state_of(other).values())
    else:
        assert same(
            train(model, "fp8-delayed", range(2, 4)), train(other, "fp8-delayed", range(2, 4))
        )


def test_state_on_the_meta_device_is_refused():
    with torch.device("meta"):
        model = opfuse.Sequential(ops.Linear(32, 32))
    with pytest.raises(RuntimeError, match=r"BasicLinear '0' on the meta device: call .*to_empty"):
        opfuse.assign_names(model, "fp8-delayed")
    opfuse.assign_names(model.to_empty(device="cpu"), "fp8-delayed", skip=["1"])
    assert state_of(model)
    named = opfuse.assign_names(build("chain"), "fp8-delayed", skip=["2"])
    assert {key.partition(".")[0] for key in state_of(named)} == {"0"}


def test_a_trainer_resumes_to_the_bit(tmp_path):
    hf = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    sizes = dict(hidden_size=32, intermediate_size=64, vocab_size=64, num_hidden_layers=1)
    config = hf.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.arange(12 * 16).view(12, 16) % 64]

    class Trainer(hf.Trainer):
        def compute_loss(self, *args, **kwargs):
            with opfuse.autocast("fp8-delayed"):
                return super().compute_loss(*args, **kwargs)

    def trained(folder, steps, resume=None):
        torch.manual_seed(0)
        model = hf.LlamaForCausalLM(config)
        opfuse.convert(model)
        given = dict(max_steps=steps, save_steps=3, per_device_train_batch_size=2, seed=3)
        given |= dict(use_cpu=True, report_to=[], disable_tqdm=True, logging_steps=100)
        trainer = Trainer(
            model,
            hf.TrainingArguments(str(tmp_path / folder), **given, lr_scheduler_type="constant"),
            train_dataset=rows,
        )
        trainer.train(resume_from_checkpoint=resume)
        return model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = trained("one", 6)
    warnings.filterwarnings("error", "the checkpoint that was loaded")
    other = trained("two", 6, str(tmp_path / "one" / "checkpoint-3"))
    assert state_of(model)
    assert same(model.state_dict().values(), other.state_dict().values())


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch has no torch.distributed")
@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize("group", [False, True])
@pytest.mark.parametrize("kind, recipe", [("chain", "nvfp4"), ("converted", "fp8-delayed")])
def test_two_processes_resume_to_the_bit_and_one_goes_on(kind, recipe, group, tmp_path):
    import gloo

    saved, _ = gloo.together(saved_state.resumed, tmp_path, kind, recipe, group)
    assert state_of(saved_state.loaded_alone(saved, kind, recipe))


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch has no torch.distributed")
@pytest.mark.xdist_group("gloo")
def test_processes_with_other_models_are_refused_and_one_alone_is_told_so():
    import gloo

    (one, scale), (other, other_scale) = gloo.together(saved_state.not_prepared)
    assert len(one) == len(other) == 1 and "call opfuse.assign_names(model), so" in one[0]
    assert scale == other_scale == 57344 / 2  # of the larger gradient
    for says in gloo.together(saved_state.other_models):
        assert "rank 0 and rank 1 differ in the model whose maxima they take together" in says
        assert "'0.0' against '0'" in says or "0.0 against 0" in says


class ByMode(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x, mode="a"):
        h = self.up(x)
        h = functional.gelu(h) if mode == "a" else functional.silu(h)
        return self.down(h)


def test_a_chain_that_does_not_run_under_a_recipe_is_warned_of_once():
    """Its module computes in full precision, and scales that were loaded are of no use."""
    model, x = ByMode(), torch.randn(4, 32)
    opfuse.convert(model)
    with torch.no_grad():
        model(x, "b")
    said = "a converted ByMode runs its own forward, in which .* quantizes nothing: mode is 'a'"
    with opfuse.autocast("fp8-current"):
        with pytest.warns(opfuse.PluginWarning, match=said):
            model(x, "a")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(x, "a")


class Sometimes(ByMode):
    def forward(self, x, mode="a"):
        if mode == "a":
            return self.down(functional.gelu(self.up(x)))
        return self.down(self.up(x).cumsum(-1))


PASSED_BY = {
    "its forward did not reach the statements": lambda model, x: model(x, "b"),
    "a trace or a transform sees it": lambda model, x: torch.func.vmap(model)(x[None]),
    "torch.compile traces the own forwards .*, in which Float8CurrentScaling": lambda model, x: (
        torch.compile(model, backend="eager", fullgraph=True)(x)
    ),
}


@pytest.mark.parametrize("said", PASSED_BY)
def test_a_chain_that_is_passed_by_under_a_recipe_is_warned_of_once(said, monkeypatch):
    monkeypatch.setattr(manager, "_warned", set())
    model, x = Sometimes(), torch.randn(4, 32)
    opfuse.convert(model)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        PASSED_BY[said](model, x)
    with opfuse.autocast("fp8-current"):
        with pytest.warns(opfuse.PluginWarning, match=said):
            PASSED_BY[said](model, x)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            PASSED_BY[said](model, x)
