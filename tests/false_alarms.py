"""Sound fusions with random patterns under the conformance suite, which must find nothing wrong with them.

``python tests/false_alarms.py 0 200`` checks 200 seeds and writes ``false_alarms.json`` next to this file, after each of
them; seeds that are there already, checked by as many checks, are not checked again, and where there are more checks now,
only by those. About eight seconds a seed on one core. ``python tests/false_alarms.py ordinary`` checks the six fusions of
``support/ordinary.py``.
"""

import collections
import json
import pathlib
import platform
import sys
import warnings

import torch

FOLDER = pathlib.Path(__file__).parent
sys.path.insert(0, str(FOLDER / "support"))

import ordinary  # noqa: E402  # from the folder just added
import sound  # noqa: E402

from opfuse import testing  # noqa: E402

PATH = FOLDER / "false_alarms.json"


def load():
    """What was found by seed, by the checks that there are now."""
    record = json.loads(PATH.read_text(encoding="utf-8"))
    return record["found"] if record["checks"] == list(testing.CHECKS) else {}


def save(found, ordinary_ones=None):
    """Write what was found."""
    before = json.loads(PATH.read_text(encoding="utf-8")).get("ordinary", {})
    seeds = sorted(map(int, found))
    record = {
        "command": "python tests/false_alarms.py 0 200",
        "seeds": len(seeds),
        "fusions": dict(collections.Counter(found[str(seed)]["kind"] for seed in seeds)),
        "cases": sum(entry["cases"] for entry in found.values()),
        "seeds with no case": sum(not entry["cases"] for entry in found.values()),
        "false alarms": [alarm for seed in seeds for alarm in found[str(seed)]["alarms"]],
        "ordinary": before if ordinary_ones is None else ordinary_ones,
        "device": "cpu",
        "dtypes": ["float64", "float32", "bfloat16", "float16"],
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "checks": list(testing.CHECKS),
        "found": {str(seed): found[str(seed)] for seed in seeds},
    }
    PATH.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def extend():
    """Check the seeds of the record by the checks that it lacks."""
    record = json.loads(PATH.read_text(encoding="utf-8"))
    new = [name for name in testing.CHECKS if name not in record["checks"]]
    if not new or {*record["checks"]} - {*testing.CHECKS}:
        return
    for seed, before in record["found"].items():
        found = sound.report(int(seed), new)
        print(f"{seed}: {', '.join(new)}: {found['cases']} cases, {len(found['alarms'])} alarms")
        before["cases"] += found["cases"]
        before["alarms"] += found["alarms"]
    save(record["found"])


def check_ordinary():
    """Check the fusions with ordinary conditions, of which each must run in some case."""
    found = {name: sound.look(*given) for name, given in ordinary.FUSIONS.items()}
    print(json.dumps(found, indent=1))
    save(load(), found)


def main(first, last):
    extend()
    for seed in range(first, last):
        if str(seed) in load():
            continue
        found = sound.report(seed)
        print(
            f"{seed}: {found['kind']} {found['pattern']}: {found['cases']} cases, {len(found['alarms'])} alarms"
        )
        print(*found["alarms"], sep="\n\n", flush=True)
        save({**load(), str(seed): {name: found[name] for name in ("kind", "cases", "alarms")}})


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # the suite counts what matters
    if sys.argv[1:] == ["ordinary"]:
        check_ordinary()
    else:
        main(*map(int, sys.argv[1:] or (0, 200)))
