"""Transformer Engine's state of delayed scaling: every layout is read, to the bit.

What it pickles, the script ``examples/te_state.py`` makes plain first; opfuse itself unpickles nothing.
"""

import io
import os
import pathlib
import pickle
import re
import subprocess
import sys
import traceback

import numpy as np
import opfuse_fp8 as fp8
import pytest
import torch

import opfuse
from opfuse import ops

sys.path.insert(0, str(pathlib.Path(__file__).parent))
sys.path.insert(0, str(pathlib.Path(__file__).parents[3] / "examples"))
import te_layout  # from the folders just added
import te_state

STEPS = 4
MOST = {"input": 448, "weight": 448, "grad_output": 57344}


class Quantizer:
    """One of Transformer Engine's, by its formula, in numpy."""

    def __init__(self, most, steps=STEPS):
        self.most, self.scale = np.float32(most), np.float32(1)
        self.history = np.zeros(steps, np.float32)

    def step(self, amax):
        self.history[0] = amax
        most = self.history.max()
        if most > 0:
            self.scale = self.most / most
        self.history = np.roll(self.history, -1)
        self.history[0] = 0

    @property
    def state(self):
        return float(self.scale), self.history.tolist()


def trained(count=3, seed=0):
    """Input, weight and gradient of a layer after some steps; a half step for the gradient."""
    generator = np.random.default_rng(seed)
    made = {name: Quantizer(most) for name, most in MOST.items()}
    for _ in range(count):
        for quantizer in made.values():
            quantizer.step(np.float32(generator.uniform(0.1, 40)))
    return made


def of_module(made):
    unused = (1.0, [0.0] * STEPS)
    forward = [made["input"].state, made["weight"].state, unused]
    return forward, [made["grad_output"].state, unused]


def of_op(made):
    return [made["input"].state, made["weight"].state], [made["grad_output"].state]


RECIPE = fp8.DelayedScaling(amax_history_len=STEPS)
TE_RECIPE = te_layout.DelayedScaling(amax_history_len=STEPS)
LAYOUTS = {
    "module 2": lambda made: te_layout.module_2(*of_module(made), TE_RECIPE),
    "module 1": lambda made: te_layout.module_1(*of_module(made)),
    "op 2": lambda made: te_layout.op_2(*of_op(made), TE_RECIPE),
    "op 1": lambda made: te_layout.op_1(*of_op(made)),
}


def model():
    torch.manual_seed(0)
    return opfuse.Sequential(ops.Linear(16, 32), ops.GELU(), ops.Linear(32, 16))


def checkpoint(layout, layers):
    """Of a model of two linear layers, as Transformer Engine has saved it."""
    state = dict(model().state_dict())
    inner = ".basic_ops.0" if layout.startswith("op") else ""
    for place, made in zip((0, 2), layers, strict=True):
        state[f"{place}{inner}._extra_state"] = LAYOUTS[layout](made)
    state["1._extra_state"] = torch.empty(0, dtype=torch.uint8)
    return state


def plain(state):
    """The checkpoint as the script writes it, beside Transformer Engine."""
    with te_layout.named_as_there():
        return te_state.readable(state)


def converted(state, **given):
    return fp8.from_te_extra_state(plain(state), **given)


def loaded(state):
    found = model()
    assert not any(found.load_state_dict(state))
    return found


def quantizers_of(found, place):
    return without_recipe(found.state_dict(), f"{place}.basic_ops.0.")


def without_recipe(state, prefix=""):
    """The quantizer state of an op, of one recipe."""
    keys = re.compile(rf"{re.escape(prefix)}quantizers\.\w{{8}}\.(.*)")
    return {found[1]: value for key, value in state.items() if (found := keys.fullmatch(key))}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_goes_on_with_the_same_scales(layout):
    """To the bit, over more steps, compared with a run of the formula in numpy."""
    layers = [trained(seed=seed) for seed in range(2)]
    state = checkpoint(layout, layers)
    before = [*state]
    found = loaded(converted(state))
    assert [*state] == before, "the checkpoint is changed"
    for seed in range(3):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        with opfuse.autocast(RECIPE):
            y = found(x)
        amaxes = quantizers_of(found, 0)
        assert amaxes["input.scale"].item() != 1
        for name in ("input", "weight"):  # of the layer whose input is known
            source = x if name == "input" else found[0].weight
            layers[0][name].step(source.detach().abs().max().item())
            assert amaxes[f"{name}.scale"].item() == layers[0][name].scale, name
            assert amaxes[f"{name}.amax_history"].tolist() == layers[0][name].history.tolist()
        y.square().sum().backward()
        scale = layers[1]["grad_output"]
        scale.step((2 * y).abs().max().item())
        assert quantizers_of(found, 2)["grad_output.scale"].item() == scale.scale


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_entry_of_a_te_checkpoint_is_converted(layout):
    made = trained()
    state = converted(checkpoint(layout, [made, trained(seed=1)]))
    assert not any(key.endswith("_extra_state") for key in state)
    prefix = "0.basic_ops.0.quantizers.0."
    assert bytes(state[f"{prefix}recipe"].tolist()).decode() == RECIPE.to_json("fp8-delayed")
    for name, quantizer in made.items():
        assert state[f"{prefix}{name}.scale"].tolist() == [quantizer.scale]
        assert state[f"{prefix}{name}.amax"].tolist() == [-1]
        assert state[f"{prefix}{name}.amax_history"].tolist() == quantizer.history.tolist()
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    again = torch.load(file, weights_only=True)
    assert again.keys() == state.keys() and all(
        torch.equal(again[key], state[key]) for key in state
    )


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_pickle_protocol_is_read(protocol):
    """Python has changed its default, and may again."""
    recipe = te_layout.DelayedScaling(2, te_layout.Format.E4M3, STEPS, "most_recent", None, False)
    history = torch.arange(12.0).view(STEPS, 3)
    fields = {"recipe": recipe, "scale_fwd": torch.arange(1.0, 4), "amax_history_fwd": history,
              "scale_bwd": torch.ones(2), "amax_history_bwd": torch.zeros(STEPS, 2),
              "extra_fp8_variables": {"a": (1, 2, 3, 4), "b": [1, 1.5, None, True, -(2**40)], "c": "x" * 300}}  # fmt: skip
    state = converted({"fc._extra_state": te_layout.pickled(fields, protocol)})
    expected = fp8.DelayedScaling(
        2, fp8.Format.E4M3, amax_history_len=STEPS, amax_compute_algo="most_recent",
        reduce_amax=False,
    )  # fmt: skip
    prefix = "fc.basic_ops.0.quantizers.0."
    assert bytes(state[f"{prefix}recipe"].tolist()).decode() == expected.to_json("fp8-delayed")
    assert state[f"{prefix}weight.amax"].item() == 1 and state[f"{prefix}input.amax"].item() == -1
    assert state[f"{prefix}weight.amax_history"].tolist() == [0, 4, 7, 10]


def test_a_module_with_two_products():
    """Each goes to the op that is named for it; the names of the message are those to pass."""
    layers = [trained(seed=seed) for seed in range(2)]
    parts = [of_module(made) for made in layers]
    forward, backward = (parts[0][i] + parts[1][i] for i in range(2))
    state = {"mlp._extra_state": te_layout.module_2(forward, backward, TE_RECIPE)}
    with pytest.raises(ValueError, match=r"scales of 2 products.*names=\{'mlp': \[the op"):
        converted(state)
    names = {"mlp": ["0.basic_ops.0", "2.basic_ops.0"]}
    found = loaded({**model().state_dict(), **converted(state, names=names)})
    with torch.no_grad(), opfuse.autocast(RECIPE):
        found(torch.randn(8, 16))
    for place, made in zip((0, 2), layers, strict=True):
        state = quantizers_of(found, place)
        assert state["weight.scale"].item() == made["weight"].scale
        assert state["grad_output.scale"].item() == made["grad_output"].scale
    with pytest.raises(ValueError, match=r"names has 'fc'.*no _extra_state; it has none"):
        fp8.from_te_extra_state({}, names={"fc": "0"})


def test_groups_of_one_op():
    """In Transformer Engine's order: input and weight of each group, then the gradient of each."""
    layers = [trained(seed=seed) for seed in range(3)]
    forward = [made[name].state for made in layers for name in ("input", "weight")]
    extra = te_layout.op_2(forward, [made["grad_output"].state for made in layers], TE_RECIPE)
    op = ops.GroupedLinear(3, 16, 32)
    state = converted({**op.state_dict(), "_extra_state": extra})
    assert not any(op.load_state_dict(state))
    with opfuse.autocast(RECIPE), torch.no_grad():
        op(torch.randn(4, 16), torch.tensor([1, 0, 3]))
    found = without_recipe(op.state_dict())
    for i, made in enumerate(layers):
        for name, quantizer in made.items():
            assert found[f"{name}{i}.scale"].item() == quantizer.scale
    for backward in ([1], [1, 2]):
        bad = te_layout.op_2(forward, [layers[i]["grad_output"].state for i in backward], TE_RECIPE)
        with pytest.raises(ValueError, match="as many for each group of one, got 6 and"):
            converted({"_extra_state": bad})


def test_a_checkpoint_of_one_layer():
    """Its keys have no prefix; a layer may get another name."""
    for layout, prefix in (("op 2", ""), ("module 2", "basic_ops.0.")):
        made = converted({"_extra_state": LAYOUTS[layout](trained())})
        assert f"{prefix}quantizers.0.input.scale" in made and len(made) == 10
    state = {"fc._extra_state": LAYOUTS["op 2"](trained())}
    made = converted(state, names={"fc": "proj"})
    assert made["proj.quantizers.0.weight.scale"].item() == trained()["weight"].scale


def test_beside_what_is_there():
    """State of another recipe stays, under the number that it has."""
    found, other, x = model(), fp8.DelayedScaling(margin=1, amax_history_len=2), torch.randn(8, 16)
    with opfuse.autocast(other):
        found(x)
    kept = quantizers_of(found, 0)
    state = {**found.state_dict(), "0._extra_state": LAYOUTS["module 2"](trained())}
    again = loaded(converted(state))
    with torch.no_grad():
        with opfuse.autocast(other):
            again(x)
        with pytest.warns(UserWarning, match="has none for the recipe"):  # in the other layer
            with opfuse.autocast(RECIPE):
                again(x)
    groups = {}
    for key, value in again.state_dict().items():
        if key.startswith("0.basic_ops.0.quantizers."):
            number, name = key.removeprefix("0.basic_ops.0.quantizers.").split(".", 1)
            groups.setdefault(number, {})[name] = value
    by_recipe = {bytes(group["recipe"].tolist()).decode(): group for group in groups.values()}
    assert len(by_recipe) == 2
    mine = by_recipe[other.to_json("fp8-delayed")]
    assert all(torch.equal(mine[name], value) for name, value in kept.items())
    new = by_recipe[RECIPE.to_json("fp8-delayed")]
    assert new["input.scale"].item() == trained()["input"].scale


def test_a_given_recipe_replaces_that_of_the_checkpoint():
    state = {"fc._extra_state": LAYOUTS["module 1"](trained())}
    mine = fp8.DelayedScaling(margin=1, amax_history_len=STEPS)
    made = fp8.from_te_extra_state(state, recipe=mine)
    text = bytes(made["fc.basic_ops.0.quantizers.0.recipe"].tolist()).decode()
    assert text == mine.to_json("fp8-delayed")
    with pytest.raises(ValueError, match=r"history of 1024 steps, .*got 4"):
        fp8.from_te_extra_state(state, recipe=fp8.DelayedScaling())


def test_a_recipe_without_state_leaves_nothing():
    """Transformer Engine saved those too, until 2.15."""
    recipe = te_layout.MXFP8BlockScaling()
    state = {"fc._extra_state": te_layout.pickled({"recipe": recipe, "extra_fp8_variables": {}}), "w": 1}  # fmt: skip
    assert converted(state) == {"w": 1}
    for nothing in (None, torch.empty(0), te_layout.pickled({}), te_layout.pickled(None)):
        assert converted({"_extra_state": nothing}) == {}


class Runs:
    """Would write a file if it were unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("make, says", [
    (te_layout.pickled, r"fc._extra_state: it is pickled with classes of Transformer Engine: .*by examples/te_state.py"),
    (lambda state: bytes(te_layout.pickled(state).tolist()), r"fc._extra_state: it is pickled .*, or leave the key out"),
    (te_layout.saved, r"fc._extra_state: torch.load\(weights_only=True\) refuses it: .*(posix|nt).mkdir.*by examples/te_state.py"),
])  # fmt: skip
def test_reading_a_checkpoint_runs_no_code_in_it(make, says, tmp_path):
    path = tmp_path / "made"
    state = {"recipe": Runs(path), "scale_fwd": torch.ones(3)}
    with pytest.raises(ValueError, match=says):
        fp8.from_te_extra_state({"fc._extra_state": make(state)})
    assert not path.exists()
    pickle.loads(pickle.dumps(state))  # the test can fail
    assert path.exists()


def broken(**changes):
    forward, backward = of_module(trained())
    state = plain({"_extra_state": te_layout.module_2(forward, backward, TE_RECIPE)})[
        "_extra_state"
    ]
    fields = {
        "recipe": TE_RECIPE,
        **{k: v for k, v in state.items() if isinstance(v, torch.Tensor)},
    }
    return te_layout.pickled({**fields, **changes})


def overridden():
    recipe = te_layout.DelayedScaling(amax_history_len=STEPS)
    recipe.override_linear_precision = te_layout._OverrideLinearPrecision(False, True, True)
    return broken(recipe=recipe)


@pytest.mark.parametrize("value, error, says", [
    (lambda: te_layout.pickled({"forward": [1]}), ValueError, "expected a dictionary in 'forward', got list"),
    (lambda: te_layout.pickled({"forward": 7}), ValueError, "expected a dictionary in 'forward', got int"),
    (lambda: te_layout.pickled({"scales": 7}), ValueError, r"expected one of .*scale_fwd, got \['scales'\]"),
    (lambda: te_layout.pickled({"recipe": 7}), ValueError, "expected a recipe, got 7"),
    (lambda: broken(scale_fwd=torch.ones(3) + 0j), ValueError, r"got \(3,\) of torch.complex64"),
    (lambda: broken(amax_history_bwd=torch.zeros(5, 2)), ValueError, "one length, got 4 steps forward and 5 backward"),
    *[(lambda scale=scale: broken(scale_fwd=torch.tensor([scale] * 3, dtype=torch.float64)), ValueError, "float32 holds")
      for scale in (1e300, 1e-300, 1e-40)],
    (lambda: broken(amax_history_fwd=torch.full((4, 3), 1e300, dtype=torch.float64)), ValueError, "float32 holds"),
    (lambda: broken(amax_history_fwd=torch.ones(0, 3), amax_history_bwd=torch.ones(0, 2), recipe=None), ValueError, "amax_history_len: expected at least 1"),
    (lambda: te_layout.pickled([1]), TypeError, "expected what .*, or a dictionary of it, got list"),
    (lambda: broken(scale_fwd=torch.ones(2)), ValueError, r"scale_fwd of shape \(n,\).*got \(2,\) and \(4, 3\)"),
    (lambda: broken(scale_bwd=None), ValueError, r"got None and \(4, 2\)"),
    (lambda: broken(scale_fwd=torch.zeros(3)), ValueError, "positive scales"),
    (lambda: broken(amax_history_bwd=torch.full((4, 2), torch.nan)), ValueError, "positive scales"),
    (lambda: broken(scale_fwd=torch.ones(2), amax_history_fwd=torch.ones(4, 2)), ValueError, "3 forward and 2 backward scales.*got 2 and 2"),
    (lambda: broken(recipe=te_layout.SomethingNew()), ValueError, "state of DelayedScaling, got that of .*SomethingNew"),
    (lambda: broken(recipe="delayed"), ValueError, "got that of 'delayed'"),
    (lambda: broken(recipe=te_layout.DelayedScaling(fp8_format=te_layout.Format.E5M2)), ValueError, "expected Format.E4M3 or Format.HYBRID"),
    (lambda: broken(recipe=te_layout.DelayedScaling(amax_compute_algo="mean", amax_history_len=4)), ValueError, "none of opfuse: .*got 'mean'"),
    (lambda: broken(recipe=te_layout.DelayedScaling(amax_compute_algo=max, amax_history_len=4)), ValueError, "none of opfuse: .*got 'builtins.max'"),
    (lambda: overridden(), ValueError, "has override_linear_precision, which"),
    (lambda: broken(recipe=te_layout.DelayedScaling(amax_history_len=5)), ValueError, "history of 5 steps, .*got 4"),
    (lambda: te_layout.op_2(of_op(trained())[0][:1], of_op(trained())[1], TE_RECIPE), ValueError, "2 forward scales.*got 1 and 1"),
], ids=lambda value: None)  # fmt: skip
def test_malformed_entries_are_refused_with_a_reason(value, error, says):
    with pytest.raises(error, match=rf"fc._extra_state: .*{says}"):
        converted({"fc._extra_state": value()})


@pytest.mark.parametrize("value", ["text", torch.ones(3)], ids=str)
def test_what_nobody_saves_is_no_extra_state(value):
    with pytest.raises(TypeError, match=rf"Engine saves.*got {type(value).__name__}"):
        fp8.from_te_extra_state({"fc._extra_state": value})


def test_an_old_checkpoint_file_is_loaded_with_weights_only(tmp_path):
    """A file of before 2.0 holds ``io.BytesIO``, which has to be named as safe."""
    script = """
import io, sys, torch, opfuse_fp8
torch.serialization.add_safe_globals([io.BytesIO])
state = opfuse_fp8.from_te_extra_state(torch.load(sys.argv[1], weights_only=True))
assert "fc.basic_ops.0.quantizers.0.input.scale" in state
"""
    file = tmp_path / "checkpoint.pt"
    torch.save({"fc._extra_state": LAYOUTS["module 1"](trained())}, file)
    subprocess.run([sys.executable, "-c", script, str(file)], check=True)


def test_without_it_the_message_says_so():
    state = checkpoint("op 2", [trained(), trained()])
    with pytest.raises(RuntimeError, match=r"0._extra_state is .*opfuse.from_te_extra_state"):
        model().load_state_dict(state)


def test_the_advice_of_torch_is_left_out_everywhere(tmp_path):
    value = te_layout.saved({"scale_fwd": Runs(tmp_path / "made")})
    for content in (value, io.BytesIO(b"garbage"), io.BytesIO(b"")):
        with pytest.raises(ValueError, match="fc._extra_state: ") as caught:
            fp8.from_te_extra_state({"fc._extra_state": content})
        text = "".join(traceback.format_exception(caught.value))
        assert "Re-running" not in text and "add_safe_globals" not in text


@pytest.mark.parametrize("field", ["margin", "fp8_format", "amax_compute_algo", "reduce_amax"])
def test_a_recipe_of_values_in_values(field):
    """Neither compared nor printed."""
    value = ()
    for _ in range(60):
        value = value, value
    forward, backward = of_module(trained())
    state = plain({"_extra_state": te_layout.module_2(forward, backward, TE_RECIPE)})
    state["_extra_state"]["recipe"][field] = value
    with pytest.raises(ValueError, match=rf"its recipe .*{field}") as caught:
        fp8.from_te_extra_state(state)
    assert len(str(caught.value)) < 1000


def test_a_recipe_by_name():
    forward, backward = of_module(trained())
    state = {"fc._extra_state": te_layout.module_1(forward, backward)}
    with pytest.raises(ValueError, match=r"history of 1024 steps, .*got 4"):
        fp8.from_te_extra_state(state, recipe="fp8-delayed")
    for other in ("fp8-current", fp8.Float8CurrentScaling(), 7):
        with pytest.raises(TypeError, match="expected a DelayedScaling or 'fp8-delayed', got"):
            fp8.from_te_extra_state(state, recipe=other)


TE = """
from dataclasses import dataclass
import enum, typing

class _FormatHelper(typing.NamedTuple):
    max_fwd: float
    max_bwd: float

class Format(enum.Enum):
    HYBRID = _FormatHelper(448, 57344)

@dataclass
class DelayedScaling:
    margin: int = 0
"""


def test_the_script_writes_a_file_that_is_loaded_with_weights_only(tmp_path):
    """It runs where Transformer Engine is, and needs no opfuse there."""
    package = tmp_path / "transformer_engine" / "common"
    package.mkdir(parents=True)
    (package / "recipe.py").write_text(TE)
    made = {layout: LAYOUTS[layout](trained()) for layout in LAYOUTS}
    state = {"model": {f"{layout}._extra_state": value for layout, value in made.items()}}
    file, out = tmp_path / "checkpoint.pt", tmp_path / "plain.pt"
    torch.save({**state, "step": 7, "w": torch.ones(2)}, file)
    code = "import runpy, sys; sys.modules['opfuse'] = None; runpy.run_path(sys.argv.pop(1), run_name='__main__')"
    command = [sys.executable, "-c", code, te_state.__file__, str(file), str(out)]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    found = torch.load(out, weights_only=True)
    assert found["step"] == 7 and found["w"].tolist() == [1, 1]
    for layout, recipe in (("module 2", RECIPE), ("op 2", RECIPE), ("module 1", RECIPE)):
        one = {"fc._extra_state": found["model"][f"{layout}._extra_state"]}
        prefix = "fc." if layout.startswith("op") else "fc.basic_ops.0."
        read = fp8.from_te_extra_state(one)
        assert bytes(read[f"{prefix}quantizers.0.recipe"].tolist()).decode() == recipe.to_json(
            "fp8-delayed"
        )
        assert read[f"{prefix}quantizers.0.weight.scale"].item() == trained()["weight"].scale
