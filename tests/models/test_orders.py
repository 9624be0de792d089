"""Converting before and after what else is done to a model: the step is that of the model that was not converted."""

from __future__ import annotations

import functools
import itertools

import pytest

pytest.importorskip("transformers", reason="the models are those of transformers")
peft = pytest.importorskip("peft", reason="the adapters are those of peft")

import families
import torch
from steps import check, step, twins
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import opfuse
from opfuse.core.introspection import op_class
from opfuse.report.calls import saved_bytes

each_family = pytest.mark.parametrize("family", families.FAMILIES.values(), ids=families.FAMILIES)
few_families = pytest.mark.parametrize("family", families.FEW, ids=[f.name for f in families.FEW])
in_either_order = pytest.mark.parametrize("order", ["before", "after"])


def convert(model, family):
    opfuse.convert(model)
    return model


def lora(model, family):
    """Adapters that change what the model gives from the first step on."""
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=list(family.adapt), init_lora_weights=False
    )
    torch.manual_seed(11)
    return peft.get_peft_model(model, config)


def checkpointing(model, family, reentrant=False):
    kwargs = {"use_reentrant": reentrant}
    if reentrant and hasattr(model, "enable_input_require_grads"):
        model.enable_input_require_grads()
    inner = model.get_base_model() if isinstance(model, peft.PeftModel) else model
    inner.gradient_checkpointing_enable(kwargs)
    return model


def compiling(model, family):
    model.compile(backend="eager", fullgraph=True)
    return model


def frozen(model, family):
    for number, param in enumerate(model.parameters()):
        param.requires_grad_(number % 2 == 0 and param.requires_grad)
    return model


DONE = {
    "convert": convert,
    "lora": lora,
    "checkpointing": checkpointing,
    "compile": compiling,
    "freeze": frozen,
}


def in_order(family, *names):
    """The model that all of this was done to in order, and that to which all but the conversion was."""
    models = []
    for which in (names, [name for name in names if name != "convert"]):
        model = family.make()
        for name in which:
            model = DONE[name](model, family)
        models.append(model)
    return models


def without_opfuse(run):
    """What the libraries give by themselves; skips where they have no whole graph of it."""
    try:
        return run()
    except torch._dynamo.exc.TorchDynamoException as error:
        pytest.skip(f"without opfuse there is no graph of it: {str(error).splitlines()[0]}")


def orders():
    others = [name for name in DONE if name != "convert"]
    if not families.ALL:
        others.remove("compile")  # below, for the whole model
    if families.ALL:
        for count in (1, 2, 3):
            for some in itertools.combinations(others[:3], count):  # freezing has no order
                yield from itertools.permutations(["convert", *some])
        return
    for other in others:
        yield "convert", other
        if other != "freeze":
            yield other, "convert"
    yield "lora", "convert", "checkpointing"


@pytest.mark.costly(8)
@few_families
@pytest.mark.parametrize("names", list(orders()), ids=lambda names: ", ".join(names))
def test_each_order_of_converting_and_wrapping_gives_the_same_step(family, names):
    if family.name == "encoder" and "lora" in names and "compile" in names:
        pytest.skip("the forward of the encoder layer looks at the type of its weights")
    model, reference = in_order(family, *names)
    expected = without_opfuse(lambda: step(reference, family))
    check(step(model, family), expected, family)


@pytest.mark.costly(3)
@few_families
@pytest.mark.parametrize("names", [("convert", "lora"), ("lora", "convert")], ids=", ".join)
def test_lora_trains_and_merges(family, names):
    model, reference = in_order(family, *names)
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in reference.named_parameters()]
    for each in (model, reference):
        trained = [param for param in each.parameters() if param.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            each(**family.inputs()).loss.backward()
            optimizer.step()
    states = [peft.get_peft_model_state_dict(each) for each in (model, reference)]
    torch.testing.assert_close(*states, rtol=1e-4, atol=1e-5)
    given = family.inputs()
    expected = reference(**given).logits
    torch.testing.assert_close(model(**given).logits, expected, rtol=1e-4, atol=1e-4)
    with model.disable_adapter(), reference.disable_adapter():
        torch.testing.assert_close(
            model(**given).logits, reference(**given).logits, rtol=1e-4, atol=1e-4
        )
    merged, theirs = model.merge_and_unload(), reference.merge_and_unload()
    assert [type(m).__name__ for m in merged.modules()] == [
        type(m).__name__ for m in theirs.modules()
    ]
    torch.testing.assert_close(merged(**given).logits, expected, rtol=1e-4, atol=1e-4)
    for each in (merged, theirs):
        each.train().requires_grad_()
    check(step(merged, family), step(theirs, family), family, 1e-4)
    opfuse.convert(merged)
    check(step(merged, family), step(theirs, family), family, 1e-4)


# Gradient checkpointing


def kept(model, family):
    return saved_bytes(lambda: model(**family.inputs()), model.parameters())


@pytest.mark.costly(4)
@few_families
@in_either_order
@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
def test_checkpointing_saves_as_much_as_without_chains(family, order, reentrant):
    reference, model = twins(family.make())
    expected = step(reference, family)
    if order == "before":
        opfuse.convert(model)
    whole = kept(model, family)
    for each in (model, reference):
        if reentrant and hasattr(each, "enable_input_require_grads"):
            each.enable_input_require_grads()
        each.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if order == "after":
        opfuse.convert(model)
    check(step(model, family), expected, family)
    mine, theirs = kept(model, family), kept(reference, family)
    assert mine <= theirs and mine < 0.7 * whole


@pytest.mark.costly(4)
@each_family
@pytest.mark.parametrize("saved", ["mm", "everything"])
def test_selective_checkpointing(family, saved):
    if not family.pretrained:
        pytest.skip("it is a switch of transformers")
    if saved == "everything" and family.name == "mixtral":
        pytest.skip("its own routing writes into results, so it raises unconverted too")
    reference, model = twins(family.make())
    opfuse.convert(model)
    step(model, family)

    def policy(ctx, func, *args, **kwargs):
        chosen = saved == "everything" or func in (
            torch.ops.aten.mm.default,
            torch.ops.aten.addmm.default,
        )
        return CheckpointPolicy.MUST_SAVE if chosen else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})
    check(step(model, family), step(reference, family), family)


@few_families
def test_checkpointing_can_be_turned_off_again(family):
    if not family.pretrained:
        pytest.skip("it is a switch of transformers")
    reference, model = twins(family.make())
    opfuse.convert(model)
    before = kept(model, family)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    step(model, family)
    model.gradient_checkpointing_disable()
    assert kept(model, family) == before
    check(step(model, family), step(reference, family), family)


# torch.compile and torch.export


def in_a_graph(family):
    """The experts of Mixtral loop over values of tensors, unless they are told otherwise."""
    return {"experts_implementation": "batched_mm"} if family.name == "mixtral" else {}


@pytest.mark.costly(2)
@few_families
@pytest.mark.parametrize("order", ["before", "after a step", *["after"] * families.ALL])
def test_a_whole_model_compiles_before_and_after_converting(family, order):
    """In one graph. What runs in it is the model's own forward, which the compiler fuses itself."""
    reference, model = twins(family.make(**in_a_graph(family)))
    if order == "before":
        opfuse.convert(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    if order == "after a step":
        step(compiled, family)
    if order != "before":
        opfuse.convert(model)
    check(step(compiled, family), step(reference, family), family)
    check(step(model, family), step(reference, family), family)
    opfuse.revert(model)
    check(step(compiled, family), step(reference, family), family)


@pytest.mark.skipif(not families.ALL, reason="Inductor compiles for a minute: OPFUSE_MODELS=all")
@pytest.mark.parametrize("name", ["llama", "gpt2", "encoder"])
def test_a_converted_model_compiles_with_inductor(name):
    family = families.FAMILIES[name]
    reference, model = twins(family.make())
    opfuse.convert(model)
    compiled = torch.compile(model, fullgraph=True)
    check(step(compiled, family), step(reference, family), family)


@pytest.mark.costly(2)
@each_family
def test_export_records_the_original_forward(family):
    reference, model = (m.eval() for m in twins(family.make(**in_a_graph(family))))
    opfuse.convert(model)
    given = {k: v for k, v in family.inputs().items() if k != "labels"}
    if family.generates:
        given["use_cache"] = False
    programs = [torch.export.export(each, (), given) for each in (model, reference)]
    got, expected = (program.module()(**given).logits for program in programs)
    assert torch.equal(got, expected)
    targets = [
        [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
        for program in programs
    ]
    assert targets[0] == targets[1]


# Quantization


@pytest.mark.costly(4)
@each_family
@in_either_order
def test_torchao_quantizes_a_converted_model(family, order):
    """torchao finds every linear layer, and the model gives what the quantized original gives."""
    quantization = pytest.importorskip("torchao.quantization", reason="torchao quantizes")
    config = quantization.Int8WeightOnlyConfig()
    reference, model = (m.eval() for m in twins(family.make()))
    if order == "before":
        opfuse.convert(model)
        with torch.no_grad():
            model(**family.inputs())
    for each in (reference, model):
        quantization.quantize_(each, config)
    if order == "after":
        opfuse.convert(model)
    plain = nn.Linear(1, 1).weight.__class__
    found = [
        {
            name
            for name, module in each.named_modules()
            if op_class(module) is nn.Linear and type(module.weight) is not plain
        }
        for each in (model, reference)
    ]
    assert found[0] == found[1] and (found[1] or family.name == "gpt2")
    with torch.no_grad():
        got, expected = (each(**family.inputs()).logits for each in (model, reference))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


# accelerate


@few_families
@in_either_order
def test_cpu_offload_may_come_before_or_after_converting(family, order):
    accelerate = pytest.importorskip("accelerate", reason="the hooks are those of accelerate")
    if family.name == "encoder":
        pytest.skip("MultiheadAttention reads the weight of a layer that it does not call")
    reference, model = (m.eval() for m in twins(family.make()))
    if order == "before":
        opfuse.convert(model)
        with torch.no_grad():
            model(**family.inputs())
    accelerate.cpu_offload(model, execution_device="cpu")
    if order == "after":
        opfuse.convert(model)
    with torch.no_grad():
        for _ in range(2):
            got, expected = (each(**family.inputs()).logits for each in (model, reference))
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    accelerate.hooks.remove_hook_from_submodules(model)
    with torch.no_grad():
        got = model(**family.inputs()).logits
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@few_families
@in_either_order
def test_a_dispatched_model_may_be_converted_before_or_after(family, order):
    """A device map with a part that lives elsewhere between calls."""
    accelerate = pytest.importorskip("accelerate", reason="the hooks are those of accelerate")
    reference, model = (m.eval() for m in twins(family.make()))
    if order == "before":
        opfuse.convert(model)
    names = [name for name, _ in model.named_children()]
    places = dict.fromkeys(names, "cpu")
    accelerate.dispatch_model(model, places, main_device="cpu", force_hooks=True)
    if order == "after":
        opfuse.convert(model)
    with torch.no_grad():
        got, expected = (each(**family.inputs()).logits for each in (model, reference))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


# Trainer


@pytest.mark.costly(1)
@pytest.mark.parametrize(
    "family",
    [f for f in families.FEW if f.pretrained],
    ids=[f.name for f in families.FEW if f.pretrained],
)
def test_the_trainer_resumes_from_a_checkpoint_alike(family, tmp_path):
    """Three steps, once in one go and once from the checkpoint of the first, with and without chains."""
    hf = pytest.importorskip("transformers")

    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 6

        def __getitem__(self, number):
            return {key: value[number] for key, value in family.inputs(rows=6).items()}

    def trainer(model, steps, folder):
        arguments = hf.TrainingArguments(
            output_dir=str(tmp_path / folder),
            per_device_train_batch_size=2,
            max_steps=3,
            save_steps=1,
            learning_rate=1e-2,
            adam_epsilon=1e-3,  # else the signs of gradients that are all but zero decide
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            logging_strategy="no",
            seed=3,
        )
        made = hf.Trainer(model, arguments, train_dataset=Rows())
        if steps < 3:
            made.add_callback(StopBehind(steps))
        return made

    class StopBehind(hf.TrainerCallback):
        def __init__(self, steps):
            self.steps = steps

        def on_step_end(self, args, state, control, **kwargs):
            control.should_save = True
            control.should_training_stop = state.global_step >= self.steps

    # some models of the library lose parameters on the way, so what it does is the measure
    found = []
    for folder in ("reference", "converted"):
        models = [*twins(family.make()), family.make(seed=9)]
        if folder == "converted":
            for model in models:
                opfuse.convert(model)
        whole, first, again = models
        trainer(whole, 3, f"{folder} whole").train()
        trainer(first, 1, folder).train()
        checkpoint = str(tmp_path / folder / "checkpoint-1")
        trainer(again, 3, folder).train(resume_from_checkpoint=checkpoint)
        found.append((whole, again))
    for reference, model in zip(*found, strict=True):
        for name, value in reference.state_dict().items():
            if not name.endswith(family.zero or ("\n",)):
                got = model.state_dict()[name]
                torch.testing.assert_close(got, value, rtol=1e-3, atol=2e-4)
    assert list(model.state_dict()) == list(reference.state_dict())
