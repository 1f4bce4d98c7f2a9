"""Time `make demo` and `make test` on a fresh clone, from nothing, and write reports/cpu/spine.json.

    python reports/measure_spine.py [--only demo|test]

Each includes making the virtual environment. One run each: they take minutes. Other load on the machine counts.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from aspire.evidence import write_evidence  # noqa: E402
from aspire.fileio import read_json  # noqa: E402


def measure(target: str) -> dict[str, Any]:
    """Run ``make target`` on a clone of the committed tree; raises `CalledProcessError` when it fails."""
    with tempfile.TemporaryDirectory(prefix="aspire-spine-") as folder:
        clone = Path(folder) / "clone"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
        environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        load = os.getloadavg()[0]
        start = time.perf_counter()
        done = subprocess.run(["make", target], cwd=clone, env=environment, capture_output=True, text=True)
        seconds = time.perf_counter() - start
        lines = (done.stdout + done.stderr).splitlines()
        if done.returncode:
            print("\n".join(lines[-40:]), file=sys.stderr)
            done.check_returncode()
        detail: dict[str, Any] = {"load_before": load, "seconds": seconds, "cores": os.cpu_count()}
        if target == "demo":
            bench = read_json(clone / "runs" / "demo" / "bench" / "bench.json", "bench result")
            detail["verdict"] = bench["verdict"]
            detail["gains"] = {row["label"]: row["gain"] for row in bench["policies"]}
            detail["equal_outputs"] = {
                row["label"]: [row["equal_outputs"], row["compared_outputs"]] for row in bench["policies"]
            }
        else:
            detail["pytest"] = next(line for line in reversed(lines) if re.search(r"\d+ passed", line)).strip("= ")
    return {
        "id": f"spine.{target}_minutes",
        "value": seconds / 60,
        "unit": "min",
        "n": 1,
        "spread": None,
        "detail": detail,
    }


def main() -> int:
    """Measure what was asked for; what the file already holds of the rest is kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("demo", "test"))
    parser.add_argument("--out", type=Path, default=ROOT / "reports" / "cpu" / "spine.json")
    given = parser.parse_args()
    targets = [given.only] if given.only else ["demo", "test"]
    old = read_json(given.out)["results"] if given.out.exists() else []
    results = {row["id"]: row for row in old}
    for target in targets:
        row = measure(target)
        print(f"make {target}: {row['value']:.2f} minutes  {row['detail']}", flush=True)
        results[row["id"]] = row
    write_evidence(given.out, list(results.values()), command=" ".join(["python", *sys.argv]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
