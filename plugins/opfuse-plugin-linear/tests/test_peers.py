"""The calls of other packages' kernels: they compute what the case computes."""

import fake_quack
import pytest

pytestmark = pytest.mark.alone
pytest.importorskip("triton", reason="Triton is not installed")

from opfuse_linear.cases import CASES  # noqa: E402

THEIRS = [(case, peer) for case in CASES for peer in case.peers]


@pytest.mark.parametrize(
    ("case", "peer"), THEIRS, ids=[f"{case.name}, {peer}" for case, peer in THEIRS]
)
def test_quack_computes_the_same(case, peer, monkeypatch):
    fake_quack.install(monkeypatch)
    fake_quack.check(case, peer)


def test_which_cases_it_has_kernels_for():
    assert [case.name for case in CASES if case.peers] == ["linear + GELU", "linear + GELU, kept"]
