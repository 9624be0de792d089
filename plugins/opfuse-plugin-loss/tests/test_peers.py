"""The calls of other packages' kernels: they compute what the case computes."""

import dataclasses

import fake_quack
import pytest

pytestmark = pytest.mark.alone
pytest.importorskip("triton", reason="Triton is not installed")

from opfuse_loss.cases import CASES  # noqa: E402

THEIRS = [(case, peer) for case in CASES for peer in case.peers if peer != "liger_kernel"]


@pytest.mark.parametrize(
    ("case", "peer"), THEIRS, ids=[f"{case.name}, {peer}" for case, peer in THEIRS]
)
def test_quack_computes_the_same(case, peer, monkeypatch):
    fake_quack.install(monkeypatch)
    if "one kernel" in peer:  # whose gradient is that of a sum of losses
        draw = case.draw

        def kept(**shape):
            drawn = draw(**shape)
            return drawn | {"weights": (drawn["weights"] > 0).float()}

        case = dataclasses.replace(case, draw=kept)
    fake_quack.check(case, peer)


def test_which_cases_it_has_kernels_for():
    assert [case.name for case in CASES if case.peers] == [
        "softmax of a loss", "cross entropy", "cross entropy with all options",
    ]  # fmt: skip
