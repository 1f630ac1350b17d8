"""``points.py JOBS``: the benchmarks' memory of each job of a JSON list, a line each."""

from __future__ import annotations

import gc
import json
import sys

from tests.harness.launching import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import synthetic


def main(jobs: str) -> None:
    for job in json.loads(jobs):
        measured = synthetic.measure_point(job)
        if measured is not None:
            print(json.dumps(measured))
        gc.collect()


if __name__ == "__main__":
    main(sys.argv[1])
