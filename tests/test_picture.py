"""explanation.save: every step is in the picture, nothing overlaps, nothing is cut off."""

import xml.etree.ElementTree as ElementTree

import pytest
import torch
from fakes import OneByOne
from rounding import Rounding, RoundingPlugin
from torch import nn

import opfuse
from opfuse import Fusion
from opfuse.ops import GELU, BasicLinear, Bias, Cast, Dropout, Linear, RMSNorm, SiLU

pytestmark = pytest.mark.alone

SVG = "{http://www.w3.org/2000/svg}"
LONG = "a_very_long_name_of_a_fusion_<of_norm>&linear_in_fp8"
NARROW, WIDE = 6.6, 7.23  # a character of the widest monospaced fonts, at 11 and 12 pixels


class Pair(OneByOne):
    calls = []  # noqa: RUF012


class Net(nn.Module):
    """A chain under a recipe, called twice, and one without gradients."""

    def __init__(self):
        super().__init__()
        self.chain = opfuse.Sequential(
            RMSNorm(8), Linear(8, 8), GELU(), Dropout(0.1), Linear(8, 8), SiLU()
        )
        self.other = opfuse.Sequential(Linear(8, 8), GELU())

    def forward(self, x):
        with opfuse.autocast(recipe=Rounding()):
            x = self.chain(self.chain(x))
        with torch.no_grad():
            return self.other(x)


@pytest.fixture
def explanation(register):
    register(RoundingPlugin(), name="rounding")
    register(
        name="pairs",
        distribution="opfuse-plugin-pairs",
        version="1.2",
        forward_fusions=[Fusion([RMSNorm, Cast, BasicLinear], Pair, name=LONG)],
        backward_fusions=[Fusion([Bias, SiLU], Pair, name="grad")],
        joint_fusions=[Fusion([GELU, Dropout], Pair, name="joint")],
    )
    return opfuse.explain(Net(), torch.randn(2, 8))


def drawn(explanation, folder):
    file = folder / "plan.svg"
    explanation.save(file)
    return file.read_text(encoding="utf-8")


def boxes(root):
    found = []
    for rect in root.iter(SVG + "rect"):
        x, y, width, height = (float(rect.get(name)) for name in ("x", "y", "width", "height"))
        found.append((rect.get("class"), x, y, x + width, y + height))
    return found


def texts(root):
    return [
        (t.get("class"), float(t.get("x")), float(t.get("y")), t.text)
        for t in root.iter(SVG + "text")
    ]


def inside(box, texts):
    _, left, top, right, bottom = box
    return [text for _, x, y, text in texts if left <= x <= right and top <= y <= bottom]


def test_every_step_is_there(explanation, tmp_path):
    root = ElementTree.fromstring(drawn(explanation, tmp_path))
    shown = {"forward": [], "backward": [], "cast": [], "op": []}
    page, *rest = boxes(root)
    for box in rest:
        shown[box[0]].append((inside(box, texts(root)), box))
    assert page[0] == "page"
    plans = [explanation.calls[0].plan, explanation.calls[2].plan]  # two calls alike are drawn once
    for kind in ("forward", "backward"):
        fused = [s for plan in plans for s in getattr(plan, kind) if s.fusion]
        expected = sorted([s.fusion, f"opfuse-plugin-pairs {s.version}"] for s in fused)
        assert sorted(labels for labels, _ in shown[kind]) == expected
    assert [s.fusion for plan in plans for s in plan.backward if s.fusion] == ["grad", "joint"]
    ops = [name for plan in plans for s in plan.forward for name in s.basic_ops]
    assert [labels for labels, _ in shown["op"]] == [[name] for name in ops]
    casts = [s for plan in plans for s in (*plan.forward, *plan.backward) if not s.basic_ops]
    assert casts and sorted(labels for labels, _ in shown["cast"]) == sorted([s.op] for s in casts)
    titles = [text for style, *_, text in texts(root) if style == "title"]
    assert titles == ["chain: Sequential (calls 0, 1)", "other: Sequential (call 2)"]
    sentences = [text for style, *_, text in texts(root) if style == "small"]
    assert sentences == ["nothing is fused: no plugin offers a fusion for these ops"]


def test_a_box_spans_its_ops(explanation, tmp_path):
    found = boxes(ElementTree.fromstring(drawn(explanation, tmp_path)))
    ops = [box for box in found if box[0] == "op"]
    (long, joint), (back, grad) = (
        [b for b in found if b[0] == kind] for kind in ("forward", "backward")
    )
    assert (long[2], long[4]) == (ops[0][2], ops[1][4])
    assert (joint[2], joint[4]) == (back[2], back[4]) == (ops[3][2], ops[4][4])
    assert (grad[2], grad[4]) == (ops[6][2], ops[7][4])
    casts = [box for box in found if box[0] == "cast"]
    (forward,) = [box for box in casts if box[1] == long[1]]  # before the linear that reads it
    # behind the linears whose gradient it is
    first, last = [box for box in casts if box[1] == grad[1]]
    for box, index in ((forward, 4), (last, 5), (first, 1)):
        assert ops[index][4] < box[2] and box[4] < ops[index + 1][2]


def test_nothing_overlaps_or_is_cut_off(explanation, tmp_path):
    root = ElementTree.fromstring(drawn(explanation, tmp_path))
    page, *rest = boxes(root)
    assert float(root.get("width")) > page[3] and float(root.get("height")) > page[4]
    for i, (_, left, top, right, bottom) in enumerate(rest):
        assert page[1] < left < right < page[3] and page[2] < top < bottom < page[4]
        for _, x, y, end, low in rest[i + 1 :]:
            assert right <= x or end <= left or bottom <= y or low <= top
    for style, x, y, text in texts(root):
        half = len(text) * (NARROW if "small" in style else WIDE) / 2
        first, last = (x - half, x + half) if "middle" in style else (x, x + 2 * half)
        around = [box for box in rest if box[1] <= x <= box[3] and box[2] <= y <= box[4]] or [page]
        assert around[0][1] < first and last < around[0][3], text


def test_the_same_plan_is_the_same_picture(explanation, tmp_path):
    again = opfuse.explain(Net(), torch.randn(2, 8))
    assert drawn(again, tmp_path) == drawn(explanation, tmp_path)


def test_other_names_are_refused(explanation, tmp_path):
    for name in ("plan.png", "plan", "plan.svg.txt"):
        with pytest.raises(
            ValueError, match="SVG image: expected a file name that ends with .svg, got .*" + name
        ):
            explanation.save(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_a_model_without_ops_gives_a_picture_that_says_so(tmp_path):
    text = drawn(opfuse.explain(abs, 3), tmp_path)
    assert "No opfuse op was called" in text and ElementTree.fromstring(text) is not None
