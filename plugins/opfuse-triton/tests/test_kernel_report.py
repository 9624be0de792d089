"""The report of all compiled kernels that is in the repository, against the plugins that are installed."""

import json
import pathlib

import pytest

pytest.importorskip("triton")
from opfuse_triton import TARGETS
from opfuse_triton.checking import verify_report
from opfuse_triton.recorded import case_lists, describe, load_cases

REPORT = pathlib.Path(__file__).parents[3] / "benchmarks" / "results" / "kernels.json"
CASES = case_lists(None)


@pytest.mark.parametrize("plugin", CASES or [pytest.param("", marks=pytest.mark.skip(
    reason="no plugin with kernels is installed"
))])  # fmt: skip
def test_every_case_was_compiled_for_every_target(plugin):
    report = json.loads(REPORT.read_text(encoding="utf-8"))
    found = {}
    for row in report["launches"]:
        if row["plugin"] == plugin:
            found.setdefault((row["case"], row["shape"]), set()).add(row["target"])
            assert row["resources"] is not None and not row["refusals"], row
    for case in load_cases(CASES[plugin]):
        wanted = {str(target) for target in TARGETS.values() if case.fits(target)}
        for shape in case.shapes:
            assert found[case.name, describe(shape)] == wanted


def test_it_is_of_the_kernels_as_they_are():
    if sentences := verify_report(REPORT, None):
        pytest.skip(f"run nox -s check_all before a release: {'; '.join(sentences)}")
