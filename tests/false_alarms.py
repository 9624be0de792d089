"""Sound fusions with random patterns under the conformance suite, which must find nothing wrong with them.

``python tests/false_alarms.py 200`` checks 200 seeds and writes ``false_alarms.json`` beside this file. Needs about
four seconds a seed on one core.
"""

import collections
import json
import pathlib
import platform
import sys
import time
import warnings

import torch

FOLDER = pathlib.Path(__file__).parent
sys.path.insert(0, str(FOLDER / "support"))

import sound  # noqa: E402  # from the folder just added

from opfuse import testing  # noqa: E402


def main(count):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # the suite counts what matters
    start, results, kinds = time.perf_counter(), [], collections.Counter()
    for seed in range(count):
        found = sound.report(seed)
        results.append(found)
        kinds[found["kind"]] += 1
        print(f"{seed}: {found['kind']} {found['pattern']}: {found['cases']} cases, {len(found['alarms'])} alarms")
        print(*found["alarms"], sep="\n\n")
    record = {
        "command": f"python tests/false_alarms.py {count}",
        "seeds": count,
        "fusions": dict(kinds),
        "checks": len(testing.CHECKS),
        "cases": sum(found["cases"] for found in results),
        "seeds with no case": sum(not found["cases"] for found in results),
        "false alarms": [alarm for found in results for alarm in found["alarms"]],
        "seconds": round(time.perf_counter() - start),
        "device": "cpu",
        "dtypes": ["float64", "float32", "bfloat16", "float16"],
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
    (FOLDER / "false_alarms.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 200)
