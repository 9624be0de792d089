"""Infinite values: the numbers are Transformer Engine's, and reports and checkpoints tell of them."""

import copy
import warnings

import opfuse_fp8 as fp8
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import opfuse
from opfuse import ops
from opfuse.core.quantization import BOTH, ROWWISE
from opfuse.testing import interpreter
from opfuse.testing.machine import is_interpreting

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter

if is_interpreting():
    interpreter.install()

RECIPES = {"delayed": fp8.DelayedScaling(), "current": fp8.Float8CurrentScaling()}
SAID = {"delayed": "its scale stayed as it was", "current": "its scale was 1"}
every = pytest.mark.parametrize("name", RECIPES)


class NoReads(TorchDispatchMode):
    """Refuses to read a number from a device."""

    keeps_no_tensors = True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "item", "nonzero", "is_nonzero"), name
        return func(*args, **(kwargs or {}))


def step(chain, recipe, x):
    with opfuse.autocast(recipe):
        y = chain(x)
    y.nan_to_num().sum().backward()


def values(infinite):
    x = torch.ones(16, 32, requires_grad=True)
    if infinite:
        x.data[3, 5] = torch.inf
    return x


def quantizer_of(chain, recipe, name):
    return next(iter(chain)).quantizer_states.of(recipe)[name]


@every
def test_a_report_and_a_checkpoint_tell_of_infinite_values(name):
    chain, recipe = opfuse.Sequential(ops.Linear(32, 16)), RECIPES[name]
    with NoReads():
        for infinite in (False, True, False, True):
            step(chain, recipe, values(infinite))
    with opfuse.autocast(recipe):
        report = opfuse.explain(chain, values(False))
    said = f"its largest magnitude was infinite 2 times: {SAID[name]}"
    (row,) = report.to_dict()["quantized"]
    assert [tensor["remark"] for tensor in row["tensors"]] == [said, "", ""]
    assert f"input: {said}" in " ".join(str(report).split())
    with pytest.warns(UserWarning, match="remark on values that they cast: opfuse.explain tells"):
        chain.state_dict()


@every
def test_without_infinite_values_nothing_is_said(name):
    chain, recipe = opfuse.Sequential(ops.Linear(32, 16)), RECIPES[name]
    step(chain, recipe, values(False))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        saved = chain.state_dict()
    with opfuse.autocast(recipe):
        assert "infinite" not in str(opfuse.explain(chain, values(False)))
    assert not [key for key in saved if "infinite" in key]


@every
def test_a_warning_of_a_model_is_shown_once(name):
    chain, recipe = opfuse.Sequential(ops.Linear(32, 32), ops.Linear(32, 16)), RECIPES[name]
    step(chain, recipe, values(True))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        chain.state_dict()
        chain.state_dict()
    assert len(seen) == 1


def test_counts_stay_where_scales_go_together_and_copies_count_apart():
    some = [fp8.DelayedQuantizer(torch.float8_e4m3fn, history=4) for _ in range(3)]
    for x in (1.0, torch.inf, torch.inf, 2.0):
        some[1].quantize(torch.tensor([x, 0.5]), BOTH)
        fp8.DelayedScaling().update(some, None)
    assert [int(quantizer.infinite) for quantizer in some] == [0, 2, 0]
    other = copy.deepcopy(some[1])
    other.quantize(torch.tensor([torch.inf]), ROWWISE)
    fp8.DelayedScaling().update([other], None)
    fp8.DelayedScaling().update(some, None)
    assert (int(other.infinite), int(some[1].infinite)) == (3, 2)
    assert (some[0].remark(), other.unrecorded().remark()) == ("", other.remark())


@pytest.mark.skipif(not is_interpreting(), reason="needs TRITON_INTERPRET=1")
def test_kernels_count_as_the_reference_does(monkeypatch):
    from opfuse_fp8 import direct

    monkeypatch.setattr(direct, "by_kernels", lambda x, quantizer: True)
    finite, infinite = torch.ones(32, 48), torch.ones(32, 48)
    infinite[31, 47] = -torch.inf
    quantizer = fp8.CurrentQuantizer(torch.float8_e4m3fn)
    for x, count in ((finite, 0), (infinite, 1), (infinite, 2), (finite, 2)):
        made = quantizer.quantize(x, BOTH)
        assert int(quantizer.infinite) == count
        assert torch.equal(made.scale_inv, quantizer.reference(x, ROWWISE).scale_inv)
        quantizer.infinite.fill_(count)
    quantizer.quantize_parts([infinite[:16], infinite[16:]], ROWWISE)
    assert int(quantizer.infinite) == 3
    ends = torch.tensor([16, 16, 32], dtype=torch.int32)
    each = [fp8.CurrentQuantizer(torch.float8_e4m3fn) for _ in range(3)]
    each[0].quantize_groups(infinite, ends, ROWWISE, each)
    assert int(each[0].infinite) == 1
