"""The calls of other packages' kernels: they compute what the case computes."""

import fake_quack
import pytest

pytestmark = pytest.mark.alone
pytest.importorskip("triton", reason="Triton is not installed")

from opfuse_norm.cases import CASES  # noqa: E402

THEIRS = [case for case in CASES if case.small and "quack-kernels" in case.peers]


@pytest.mark.parametrize("case", THEIRS, ids=lambda case: case.name)
def test_quack_computes_the_same(case, monkeypatch):
    with pytest.raises(ImportError, match="quack"):  # how the report knows that it is not there
        case.peers["quack-kernels"](**case.inputs({"rows": 2, "features": 8}, "cpu"))
    fake_quack.install(monkeypatch)
    fake_quack.check(case, "quack-kernels")
