"""Sound fusions with random patterns under the conformance suite, which must find nothing wrong with them.

``python tests/false_alarms.py 0 200`` checks 200 seeds and writes ``false_alarms.json`` beside this file, after each of
them; seeds that are there already, checked by as many checks, are not checked again, and where there are more checks now,
only by those. About seven seconds a seed on one core.
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

import sound  # noqa: E402  # from the folder just added

from opfuse import testing  # noqa: E402

PATH = FOLDER / "false_alarms.json"


def load():
    """What was found by seed, by the checks that there are now."""
    record = json.loads(PATH.read_text(encoding="utf-8"))
    return record["found"] if record["checks"] == list(testing.CHECKS) else {}


def save(found):
    """Write what was found."""
    seeds = sorted(map(int, found))
    record = {
        "command": "python tests/false_alarms.py 0 200",
        "seeds": len(seeds),
        "fusions": dict(collections.Counter(found[str(seed)]["kind"] for seed in seeds)),
        "cases": sum(entry["cases"] for entry in found.values()),
        "seeds with no case": sum(not entry["cases"] for entry in found.values()),
        "false alarms": [alarm for seed in seeds for alarm in found[str(seed)]["alarms"]],
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


def main(first, last):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # the suite counts what matters
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
    main(*map(int, sys.argv[1:] or (0, 200)))
