"""Did tuning keep its word? The tuned policy's gain in the engine beside the gain that the simulator promised.

``python -m aspire_simulator.observed_gain policy.json BENCH_DIR [--out reports/h200/tuning.json]``

BENCH_DIR is the output of one ``aspire bench`` with ``--policy autoregressive --policy aspire --policy policy.json``:
the same prompts in one engine, repeats in turn. Gains are ratios of decode-only throughput.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from aspire.errors import InputError, exit_code_of
from aspire.fileio import read_json, write_json_atomic
from aspire.scheduler import PolicySpec
from aspire_simulator.fidelity import measured_meta, run_directories

BASELINES = {"aspire": "tune.observed_gain_over_aspire_default", "autoregressive": "tune.observed_gain_over_ar"}


def without_provenance(policy: Mapping[str, Any]) -> dict[str, Any]:
    """What a policy does, whoever made it."""
    spec = PolicySpec.from_dict(dict(policy)).to_dict()
    spec.pop("provenance", None)
    return spec


def observed_gains(policy: PolicySpec, bench: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Evidence entries: gain of ``policy`` over each baseline of the ``bench`` (bench.json), observed and predicted.

    A baseline is the policy of its kind without parameters of its own, which is what `aspire tune` compares with.
    Raises `InputError` when a run is missing.
    """
    entries = bench.get("policies")
    if not isinstance(entries, list) or not entries:
        raise InputError("the bench.json holds no policies; make it with: aspire bench")
    tuned = without_provenance(policy.to_dict())
    mine = next((entry for entry in entries if without_provenance(entry["policy"]) == tuned), None)
    promised = {gain["over"]: gain for gain in policy.provenance.get("gains", ())}
    ours = _throughputs(mine, f"the tuned policy {policy.label}")
    results = []
    for kind, name in BASELINES.items():
        plain = [entry for entry in entries if entry["policy"]["kind"] == kind and not entry["policy"]["params"]]
        base = next((entry for entry in plain if entry is not mine), plain[0] if plain else None)
        theirs = _throughputs(base, f"the baseline '{kind}'")
        pairs = [one / other for one, other in zip(ours, theirs, strict=False)]  # repeats are run in turn
        value = median(ours) / median(theirs)
        detail: dict[str, Any] = {
            "tuned": policy.label,
            "over": base["label"] if base else kind,
            "tuned_tok_s": ours,
            "baseline_tok_s": theirs,
            "ratios_of_repeats": pairs,
            "predicted": promised.get(kind),
            "cost_model": policy.provenance.get("cost_model"),
        }
        if (promise := promised.get(kind)) is not None:
            detail["observed_over_predicted"] = value / promise["mean"]
            detail["within_interval"] = promise["low"] <= value <= promise["high"]
        spread = {"min": min(pairs), "max": max(pairs)}
        results.append({"id": name, "value": value, "unit": "x", "n": len(pairs), "spread": spread, "detail": detail})
    return results


def _throughputs(entry: Mapping[str, Any] | None, what: str) -> list[float]:
    """Decode-only tok/s of every repeat."""
    if entry is None:
        raise InputError(f"{what} was not in this bench; run it with --policy aspire --policy policy.json")
    rates = [float(rate) for rate in entry["decode_only_throughput"]]
    if not rates or min(rates) <= 0:
        raise InputError(f"{what} has no decode-only throughput in this bench; give longer outputs")
    return rates


@exit_code_of
def main(arguments: Sequence[str] | None = None) -> None:
    """Print the gains, write the evidence file."""
    parser = argparse.ArgumentParser(prog="python -m aspire_simulator.observed_gain", description=__doc__)
    parser.add_argument("policy", help="policy.json of aspire tune")
    parser.add_argument("bench", help="output directory of aspire bench")
    parser.add_argument("--out", help="evidence file to write, e.g. reports/h200/tuning.json")
    given = parser.parse_args(arguments)
    policy = PolicySpec.from_dict(read_json(given.policy, "policy file"), f"policy file {given.policy}")
    folder = Path(given.bench)
    results = observed_gains(policy, read_json(folder / "bench.json", "bench file"))
    for result in results:
        promise = result["detail"]["predicted"]
        told = f"predicted {promise['mean']:.3f} ({promise['low']:.3f} to {promise['high']:.3f})" if promise else ""
        print(f"{policy.label} over {result['detail']['over']}: observed {result['value']:.3f}x {told}".rstrip())
    if given.out:
        command = f"python -m aspire_simulator.observed_gain {Path(given.policy).name} {folder.name} --out {given.out}"
        meta = measured_meta(run_directories([folder]), command)
        print(f"wrote {write_json_atomic(given.out, {'meta': meta, 'results': results})}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
