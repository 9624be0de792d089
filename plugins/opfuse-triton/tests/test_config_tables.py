"""Tables of configurations: what counts, what is refused, and what a kernel makes of them."""

import dataclasses
import importlib.metadata
import json
import math

import pytest
import torch

import opfuse

pytestmark = pytest.mark.alone
pytest.importorskip("triton", reason="Triton is not installed")

from opfuse_triton import TARGETS, Config, Kernel, Predicted, config_tables, recording  # noqa: E402
from opfuse_triton import target as pretend  # noqa: E402
from opfuse_triton.gpu import winners  # noqa: E402
from triton_toys import scale_kernel  # noqa: E402

HERE = dataclasses.replace(TARGETS[90], name="NVIDIA Toy 9")
KERNEL = Kernel(scale_kernel, [Config({"BLOCK": 64}), Config({"BLOCK": 32}, num_warps=8)])
FACTS = {"x_ptr": torch.bfloat16, "s_ptr": None, "rows": 1000, "n": 40}
FAST = KERNEL.candidates(HERE, FACTS)[1]


@pytest.fixture
def path(tmp_path, monkeypatch):
    """The file of the toy GPU; each test reads it anew."""
    monkeypatch.setenv("OPFUSE_TUNING", str(tmp_path))
    config_tables._table.cache_clear()
    yield tmp_path / "nvidia-toy-9.kernels.json"
    config_tables._table.cache_clear()


def entry(config=FAST, facts=FACTS, **changed):
    return winners.entry("toys:CASES", HERE.name, KERNEL, facts, config) | changed


def slow_case(speed=1.04, shape=None, **changed):
    shape = shape or {"rows": 8, "n": 4}
    return winners.speed_entry("toys", HERE.name, "toy", shape, speed) | changed


def block(target=HERE, **changed):
    return KERNEL.pick(target, FACTS | changed)["BLOCK"]


def test_a_kernel_takes_what_was_measured_on_this_gpu(path):
    winners.write(path, [entry()])
    assert block() == 32 and block(rows=512) == 32 and block(rows=1023) == 32
    for changed in ({"rows": 1024}, {"rows": 511}, {"n": 41}, {"x_ptr": torch.float32}):
        assert block(**changed) == 64
    assert block(TARGETS[90]) == 64  # one that is only simulated: the check depends on no table
    assert KERNEL.candidates(HERE, FACTS)[0]["constants"] == {"BLOCK": 64}


def test_a_configuration_that_is_given_goes_before_the_table(path):
    winners.write(path, [entry(facts={"x_ptr": torch.float32, "s_ptr": None, "n": 40})])
    x = torch.empty(40)
    with recording(HERE) as launches:
        for config in (None, Config({"BLOCK": 16})):
            KERNEL.launch((1,), x, None, x, 40, config=config)
    with_y = {"x_ptr": torch.float32, "s_ptr": None, "y_ptr": torch.float32, "n": 40}
    assert [launch.config["BLOCK"] for launch in launches] == [64, 16]
    winners.write(path, [entry(facts=with_y)])
    with recording(HERE) as launches:
        KERNEL.launch((1,), x, None, x, 40)
    assert launches[0].config["BLOCK"] == 64  # read once: what runs already stays as it is
    config_tables._table.cache_clear()
    with recording(HERE) as launches:
        KERNEL.launch((1,), x, None, x, 40)
    assert launches[0].config["BLOCK"] == 32


@pytest.mark.parametrize(
    "changed",
    [
        {"setting": config_tables.setting("NVIDIA Toy 8")},
        {"setting": config_tables.setting(HERE.name) | {"triton": "0.1"}},
        {"package": ["opfuse-triton", "0.0.1"]},
        {"package": ["no-such-package", "1"]},
        {"kernel": "elsewhere.scale_kernel"},
        {"config": Config({"BLOCK": 48}).to_dict()},  # none that the kernel has
    ],
)
def test_what_was_measured_elsewhere_does_not_count(path, changed):
    winners.write(path, [entry(**changed)])
    assert block() == 64


def test_a_case_that_was_measured_decides_in_place_of_the_model(path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # and the GPU is the toy
    on_gpu = opfuse.Environment(torch.device("cuda"), (9, 0), torch.bfloat16)
    table = Predicted("toys", {"one": (1.05, ["toy"]), "two": (1.2, ["toy", "other"])})

    def said(env=on_gpu, target=HERE):
        config_tables._table.cache_clear()
        with pretend(target):
            return [table.why_not(name, env) for name in table.fusions]

    one, two = said()
    assert "not measured on this GPU" in one and "1.05x" in one and not two
    winners.write(path, [slow_case(), slow_case(3.0, {"rows": 1, "n": 1})])
    one, two = said()
    assert one == two and "measured by opfuse_triton gpu: 1.04x" in one  # the lowest over shapes
    assert "1.05x" in said(target=TARGETS[90])[0]  # one that is only simulated has no table
    assert (
        said(on_gpu._replace(measured=1.0))
        == said(on_gpu._replace(device=torch.device("cpu")))
        == ["", ""]
    )
    winners.write(path, [slow_case(1.1), slow_case(0.5, case="toys: unknown"), entry()])
    assert said() == ["", ""] and block() == 32
    winners.write(path, [slow_case(0.5, setting=config_tables.setting("NVIDIA Toy 8"))])
    assert said() == ["", ""]


def test_an_empty_variable_means_no_table(path, monkeypatch):
    winners.write(path, [entry()])
    monkeypatch.setenv("OPFUSE_TUNING", "")
    assert block() == 64


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("{", "JSONDecodeError"),
        ('{"format": 2, "entries": []}', "format 2 instead of 1"),
        ('{"format": 1, "entries": [{"subject": {}, "shape": [1, 2, true]}]}', "KeyError"),
        (json.dumps({"format": 1, "entries": [entry(facts={}) | {"facts": {"n": 4}}]}), "strings"),
        (json.dumps({"format": 1, "entries": [entry(config={"BLOCK": 32})]}), "BLOCK"),
        (json.dumps({"format": 1, "entries": [entry(package=["x"])]}), "x"),
        (json.dumps({"format": 1, "entries": [slow_case(math.nan)]}), "speed nan"),
        (json.dumps({"format": 1, "entries": [slow_case(case=7)]}), "strings"),
    ],
)
def test_a_file_that_is_no_table_is_refused_with_a_sentence(path, content, what, monkeypatch):
    path.write_text(content)
    with pytest.warns(opfuse.TuningWarning, match="not a table of configurations") as told:
        assert block() == 64
    assert what in str(told[0].message) and "it is not used" in str(told[0].message)
    assert block() == 64  # told once
    config_tables._table.cache_clear()
    monkeypatch.setenv("OPFUSE_STRICT", "1")
    with pytest.raises(opfuse.TuningWarning, match="delete it"):
        block()


def test_a_file_that_is_too_large_is_not_read(path, monkeypatch):
    winners.write(path, [entry()])
    monkeypatch.setattr(config_tables, "LARGEST", 100)
    with pytest.warns(opfuse.TuningWarning, match="more than 100 bytes"):
        assert block() == 64


def test_new_entries_replace_those_of_the_same_and_of_other_versions(path):
    name, version = "opfuse-triton", importlib.metadata.version("opfuse-triton")
    old = [entry(package=[name, "0.0.1"]), entry(package=["other", "1"])]
    winners.write(path, old)
    slow = KERNEL.candidates(HERE, FACTS)[0]
    winners.write(path, [entry(package=[name, version], config=slow)])
    winners.write(path, [entry(package=[name, version]), entry(slow, package=[name, version])])
    found = {tuple(one["package"]): one["config"] for one in config_tables.read(path)}
    assert found == {(name, version): FAST, ("other", "1"): FAST}
    assert block() == 32


def test_device_functions_are_facts_by_name():
    from opfuse_triton import functions_of

    functions = functions_of(opfuse.ops.GELU())
    text = config_tables.as_text({"VALUE": functions.value, "PAIR": (functions.value, None)})
    assert text == {
        "VALUE": "opfuse_triton.functions.gelu_tanh",
        "PAIR": "(opfuse_triton.functions.gelu_tanh, None)",
    }
