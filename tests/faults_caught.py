"""How many of the wrong fusions the conformance suite catches, and by which check.

``python tests/faults_caught.py faulty_axes before`` runs every check over each fusion of ``support/faulty_axes.py`` and
writes what it found under that label into ``faults_caught.json`` next to this file.
"""

import importlib
import json
import pathlib
import sys
import time
import warnings

import torch

FOLDER = pathlib.Path(__file__).parent
sys.path.insert(0, str(FOLDER / "support"))

from opfuse_distributed import testing as rank_kit  # noqa: E402

from opfuse import testing  # noqa: E402


def caught_by(fault):
    """The first check that finds something wrong with the fusion, and what it says; None if none does."""
    chains = testing.make_chains(testing.Subject("faulty", fault.kind, fault.fusion))
    for check in testing.CHECKS.values():
        if fault.kind in check.passes:
            outcome = testing.run_all(check, chains)
            if outcome.failure is not None:
                return check.name, outcome.failure
    return None


def caught_on_ranks(fault):
    """The same for a fusion with collectives."""
    fusions = [testing.Subject("faulty", "joint", fault.fusion)]
    for name, check in rank_kit.CHECKS.items():
        for layer in rank_kit.LAYERS:
            trial = rank_kit.Trial(fusions, layer)
            try:
                if name != "casts":
                    rank_kit.CHECKS["plan"](trial)
                check(trial)
            except testing.Declined:
                continue
            except testing.Failure as failure:
                return f"{layer.name}-{name}", str(failure)
    return None


def main(module, label):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    faults, found, start = importlib.import_module(module).FAULTS, {}, time.perf_counter()
    find = caught_on_ranks if module == "faulty_distributed" else caught_by
    for fault in faults:
        caught = find(fault)
        found[fault.name] = {"axis": fault.axis, "caught by": caught and caught[0]}
        print(f"{fault.axis} {fault.name}: {caught}", flush=True)
    path = FOLDER / "faults_caught.json"
    record = json.loads(path.read_text()) if path.exists() else {}
    record[label] = {
        "command": f"python tests/faults_caught.py {module} {label}",
        "faults": len(faults),
        "caught": sum(entry["caught by"] is not None for entry in found.values()),
        "found": found,
        "torch": torch.__version__,
    }
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(record[label]["caught"], "of", len(faults), f"in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main(*sys.argv[1:])
