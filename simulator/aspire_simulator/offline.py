"""Draft-length rules replayed on recorded rounds: how many tokens each earns per unit of verification time.

``python -m aspire_simulator.offline --rounds rounds.npz --out reports/cpu/policy_offline.json``

A recorded round holds the margins of d drafts and how many a verification accepted. A rule sees what a live engine
sees: the margins of the drafts it asked for and, of their acceptance, what lies before the first rejection.
Price: a round of g drafts takes 1 + (c + v) g, in units of one verification of one token; c = T_draft / T_verify,
v = what one more verified token adds. It commits a + 1 tokens. Throughput = all tokens / all time over all requests.
The ``goodput`` rule is `aspire.scheduler.survival`, the code that schedules live batches, not a copy of it.
"""

from __future__ import annotations

import argparse
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aspire.errors import InputError, exit_code_of
from aspire.evidence import write_evidence
from aspire.scheduler.survival import SurvivalParams
from aspire_simulator.offline_rules import (
    Goodput,
    Hindsight,
    Late,
    LengthRule,
    Paper,
    PositionSurvival,
    Rule,
    play_round,
)

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
PRICES: tuple[tuple[float, float], ...] = ((0.15, 0.02), (0.30, 0.03), (0.08, 0.01))

# What a step takes whoever is in it (weights, launches), divided by its requests; of c = 0.15 resp. 0.30 or 0.85.
SHARES: tuple[tuple[float, float, float], ...] = (
    (0.15, 0.02, 0.02),
    (0.15, 0.02, 0.08),
    (0.15, 0.02, 0.14),
    (0.30, 0.03, 0.25),
    (0.85, 0.01, 0.80),
)
ABLATIONS: dict[str, dict[str, Any]] = {  # changes of `SurvivalParams`, one at a time
    "no request effect": {"effect_variance": 1e-9},
    "no margin": {"slope": 0.0, "intercept": 2.2, "precision": (2.0, 1e9, 20.0)},
    "no position": {"precision": (2.0, 4.0, 1e9), "position_trials": 1e9},
    "vague prior": {"intercept": 0.0, "slope": 1.0},
    "population fixed": {"precision": (1e9, 1e9, 1e9)},
    "request effect slow": {"effect_carry": 0.99},
    "request effect fast": {"effect_carry": 0.8},
    "short memory": {"memory_rounds": 320.0},
}


@dataclass(frozen=True)
class Recording:
    """Rounds of one workload: ``margin`` [rounds, requests, d_max], ``accepted`` [rounds, requests] out of d_max."""

    name: str
    temperature: float
    margin: Floats
    accepted: Ints

    @property
    def half(self) -> int:
        """Rounds before this one are history, the others are evaluated."""
        return len(self.accepted) // 2


def load_recordings(path: str | Path) -> list[Recording]:
    """All ``<workload>_<temperature>_{acc,marg}`` of an npz; `InputError` when there are none or they disagree."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            names = sorted(name[: -len("_acc")] for name in arrays.files if name.endswith("_acc"))
            found = []
            for name in names:
                workload, _, temperature = name.rpartition("_")
                margin, accepted = arrays[f"{name}_marg"].astype(np.float64), arrays[f"{name}_acc"].astype(np.int64)
                if margin.ndim != 3 or margin.shape[:2] != accepted.shape or len(accepted) < 2:
                    raise InputError(
                        f"{path}: {name}_marg {margin.shape} and {name}_acc {accepted.shape} are not "
                        "[rounds, requests, drafts] and [rounds, requests] with at least 2 rounds"
                    )
                if accepted.min() < 0 or accepted.max() > margin.shape[2]:
                    raise InputError(f"{path}: {name}_acc is not within 0..{margin.shape[2]}, the drafts of a round")
                found.append(Recording(workload, float(temperature), margin, accepted))
    except FileNotFoundError as error:
        raise InputError(f"recorded rounds {path} do not exist; give a rounds .npz") from error
    except (ValueError, OSError, KeyError, zipfile.BadZipFile) as error:
        raise InputError(
            f"{path} is no file of recorded rounds ({error}); it needs <workload>_<T>_acc and _marg"
        ) from error
    if not found:
        raise InputError(f"{path} has no array named <workload>_<T>_acc; it is no file of recorded rounds")
    return found


def rounds_of(recording: Recording, rounds: range) -> Iterator[tuple[Ints, Floats, Ints]]:
    """Recorded rounds as they are: every rule plays every round once, from where the recording began it."""
    everyone = np.arange(recording.accepted.shape[1])
    for index in rounds:
        yield everyone, recording.margin[index], recording.accepted[index]


def replay(
    rule: Rule, rounds: Iterator[tuple[Ints, Floats, Ints]], price: float, requests: int
) -> tuple[Floats, Floats]:
    """Tokens [requests] and time [requests] of the rule over ``rounds``."""
    tokens, time = np.zeros(requests), np.zeros(requests)
    for who, margin, runs in rounds:
        drafted, accepted = play_round(rule, who, margin, runs)
        tokens[who] += accepted + 1
        time[who] += 1.0 + price * drafted
    return tokens, time


def replay_text(rule: Rule, recording: Recording, rounds: range, price: float) -> tuple[Floats, Floats]:
    """Like `replay`, but every rule writes the same text: a round starts where the rule's last one ended.

    The text of a request is its recorded rounds laid end to end. A round cut short goes on in the recorded one, with
    margins taken as those of the recording (acceptance hardly depends on the draft's position there).
    """
    count, d_max = recording.accepted.shape[1], recording.margin.shape[2]
    place, offset = np.full(count, rounds.start), np.zeros(count, dtype=np.int64)  # recorded round, drafts into it
    tokens, time = np.zeros(count), np.zeros(count)
    while True:
        who = np.nonzero(place < rounds.stop)[0]
        if len(who) == 0:
            return tokens, time
        # Draft j of the new round is draft offset + j of the recorded one, then of the next if all d_max were right.
        row, col = np.repeat(place[who, None], d_max, axis=1), offset[who, None] + np.arange(d_max)
        whole = recording.accepted[place[who], who] == d_max
        over = (col >= d_max) & whole[:, None] & (row + 1 < rounds.stop)
        row, col = row + over, np.where(over, col - d_max, np.minimum(col, d_max - 1))
        margin = recording.margin[row, who[:, None], col]
        left = recording.accepted[place[who], who] - offset[who]
        after = recording.accepted[np.minimum(place[who] + 1, rounds.stop - 1), who] * (place[who] + 1 < rounds.stop)
        runs = np.minimum(np.where(whole, left + after, left), d_max)
        drafted, accepted = play_round(rule, who, margin, runs)
        time[who] += 1.0 + price * drafted
        tokens[who] += accepted + 1
        # The bonus token takes the place of the next draft, right or wrong; a whole round has no wrong one at its end.
        offset[who] += accepted + 1
        for _ in range(2):
            length = recording.accepted[np.minimum(place, rounds.stop - 1), np.arange(count)]
            length = length + (length < d_max)
            done = (offset >= length) & (place < rounds.stop)
            offset, place = np.where(done, offset - length, offset), place + done


def rule_makers(recording: Recording, c: float, v: float) -> dict[str, Callable[[], Rule]]:
    """Name -> maker of a fresh rule. ``fixed`` has the length that is best on the first half; ``paper`` knows c alone,
    as published, ``paper_priced`` also v.
    """
    requests, d_max = recording.accepted.shape[1], recording.margin.shape[2]
    lengths = np.arange(d_max + 1)
    history = np.minimum(recording.accepted[: recording.half, :, None], lengths).mean(axis=(0, 1)) + 1.0
    best = int(np.argmax(history / (1.0 + (c + v) * lengths)))
    return {
        "fixed": lambda: LengthRule(requests, best),
        "paper": lambda: Paper(requests, c, d_max),
        "paper_priced": lambda: Paper(requests, c + v, d_max),
        "survival": lambda: PositionSurvival(requests, c + v, d_max),
        "goodput": lambda: Goodput(requests, c + v, d_max),
        "goodput_late": lambda: Late(Goodput(requests, c + v, d_max)),
        "hindsight": lambda: Hindsight(requests, 0),
    }


def evaluate_cell(recording: Recording, c: float, v: float) -> dict[str, Any]:
    """Rates of every rule: second half after the first, cold (first half, nothing known), and of the same text."""
    requests, total, price = recording.accepted.shape[1], len(recording.accepted), c + v
    cell: dict[str, Any] = {"workload": recording.name, "temperature": recording.temperature, "c": c, "v": v}
    for name, make in rule_makers(recording, c, v).items():
        rule = make()
        cold = replay(rule, rounds_of(recording, range(recording.half)), price, requests)
        tokens, time = replay(rule, rounds_of(recording, range(recording.half, total)), price, requests)
        text_rule = make()
        replay_text(text_rule, recording, range(recording.half), price)
        text = replay_text(text_rule, recording, range(recording.half, total), price)
        cell[name] = {
            "rate": float(tokens.sum() / time.sum()),
            "rate_request_mean": float(np.mean(tokens / time)),
            "cold_rate": float(cold[0].sum() / cold[1].sum()),
            "text_rate": float(text[0].sum() / text[1].sum()),
        }
    return cell


def ablate(recordings: Sequence[Recording], changes: dict[str, Any]) -> dict[str, float]:
    """Goodput with ``changes`` of its parameters over the paper's rule: mean and worst cell, second half and cold."""
    warm: list[float] = []
    cold: list[float] = []
    for recording in (one for one in recordings if one.temperature > 0):
        requests, total = recording.accepted.shape[1], len(recording.accepted)
        for c, v in PRICES:
            ours = Goodput(requests, c + v, recording.margin.shape[2], SurvivalParams(**changes))
            paper = rule_makers(recording, c, v)["paper"]()
            for part, into in ((range(recording.half), cold), (range(recording.half, total), warm)):
                rates = [replay(rule, rounds_of(recording, part), c + v, requests) for rule in (ours, paper)]
                (a, b), (x, y) = rates
                into.append(float(a.sum() / b.sum() / (x.sum() / y.sum())))
    return {"mean": float(np.mean(warm)), "worst": min(warm), "cold_mean": float(np.mean(cold))}


def compare_share(recordings: Sequence[Recording]) -> dict[str, Any]:
    """Evidence entry: drafts priced with their share of the step over drafts priced by their row; same text, T > 0."""
    lines: list[dict[str, Any]] = []
    for recording in (one for one in recordings if one.temperature > 0):
        requests, half, total = recording.accepted.shape[1], recording.half, len(recording.accepted)
        for c, v, share in SHARES:
            rates = []
            for believed in (c + v, c + v - share):
                rule = Goodput(requests, c + v, recording.margin.shape[2], believed=believed)
                replay_text(rule, recording, range(half), c + v)
                tokens, time = replay_text(rule, recording, range(half, total), c + v)
                rates.append(float(tokens.sum() / time.sum()))
            named = {"workload": recording.name, "c": c, "v": v, "share": share}
            lines.append({**named, "rate_with_share": rates[0], "rate_marginal_only": rates[1]})
    values = np.array([line["rate_with_share"] / line["rate_marginal_only"] for line in lines])
    what = "goodput whose draft price holds the request's share of the step over goodput with marginal prices alone"
    return {
        "id": "policy.step_share_over_marginal_offline",
        "value": float(values.mean()),
        "unit": "x",
        "n": len(values),
        "spread": {"min": float(values.min()), "max": float(values.max())},
        "detail": {"what": what, "cells": lines},
    }


def ratios(cells: Sequence[dict[str, Any]], key: str = "rate", base: str = "paper") -> Floats:
    """[cells] goodput over ``base`` in the measure ``key``."""
    return np.array([cell["goodput"][key] / cell[base][key] for cell in cells])


def gap_ratios(cells: Sequence[dict[str, Any]], key: str = "rate") -> Floats:
    """[cells] (hindsight - goodput) / (hindsight - paper): the part of the paper's gap that is left."""
    best, ours, paper = (np.array([cell[name][key] for cell in cells]) for name in ("hindsight", "goodput", "paper"))
    return np.asarray((best - ours) / (best - paper))


def results_of(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Evidence entries: mean over cells, with every cell in the first one's detail."""
    warm = [cell for cell in cells if cell["temperature"] > 0]
    greedy = [cell for cell in cells if cell["temperature"] == 0]

    def entry(name: str, values: Floats, what: str, **detail: Any) -> dict[str, Any]:
        value = float(values.mean())
        spread = {"min": float(values.min()), "max": float(values.max())}
        return {
            "id": name,
            "value": value,
            "unit": "x",
            "n": len(values),
            "spread": spread,
            "detail": {"what": what, **detail},
        }

    results = []
    if warm:
        name = "policy.goodput_over_paper_offline"
        worst = warm[int(np.argmin(ratios(warm)))]
        results += [
            entry(
                name,
                ratios(warm),
                "tokens per verification-time, goodput over the paper's rule, second half of rounds, T > 0",
                convention="a round of g drafts, a accepted: a + 1 tokens, time 1 + (c + v) g; totals over requests",
                worst_cell={key: worst[key] for key in ("workload", "temperature", "c", "v")},
                worst_ratio=float(ratios(warm).min()),
                request_mean_ratio=float(ratios(warm, "rate_request_mean").mean()),
                cells=list(cells),
            ),
            entry(f"{name}_priced", ratios(warm, base="paper_priced"), "the same, the paper's rule told v as well"),
            entry(f"{name}_cold", ratios(warm, "cold_rate"), "first half, both rules start without history"),
            entry(
                "policy.goodput_late_over_paper_offline",
                np.array([cell["goodput_late"]["rate"] / cell["paper"]["rate"] for cell in warm]),
                "goodput told of margins and outcomes one decision late, as when steps are planned ahead",
                over_goodput=float(np.mean([cell["goodput_late"]["rate"] / cell["goodput"]["rate"] for cell in warm])),
            ),
            entry(f"{name}_text", ratios(warm, "text_rate"), "second half, every rule writes the same text"),
            entry(
                "policy.goodput_gap_over_paper_offline",
                gap_ratios(warm),
                "(hindsight - goodput) / (hindsight - paper), second half, T > 0",
                text_gap=float(gap_ratios(warm, "text_rate").mean()),
            ),
        ]
    if greedy:
        gap = float(gap_ratios(greedy).mean())
        what = "goodput over the paper's rule, second half, T = 0"
        results.append(entry("policy.goodput_over_paper_offline_greedy", ratios(greedy), what, gap_ratio=gap))
    return results


def table(cells: Sequence[dict[str, Any]]) -> str:
    """One line per cell: rates of the rules on the second half, goodput / paper, what is left of the gap."""
    rules = ("fixed", "paper", "paper_priced", "survival", "goodput", "hindsight")
    lines = [
        f"{'workload':10}{'T':>5}{'c':>6}{'v':>6}"
        + "".join(f"{name:>13}" for name in rules)
        + f"{'/paper':>8}{'cold':>8}{'text':>8}{'gap':>7}"
    ]
    for cell in cells:
        one = [cell]
        shares = (ratios(one)[0], ratios(one, "cold_rate")[0], ratios(one, "text_rate")[0])
        lines.append(
            f"{cell['workload']:10}{cell['temperature']:5.1f}{cell['c']:6.2f}{cell['v']:6.2f}"
            + "".join(f"{cell[name]['rate']:13.3f}" for name in rules)
            + "".join(f"{share:8.3f}" for share in shares)
            + f"{gap_ratios(one)[0]:7.3f}"
        )
    return "\n".join(lines)


@exit_code_of
def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, write the evidence file."""
    parser = argparse.ArgumentParser(prog="python -m aspire_simulator.offline", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", required=True, help="npz of recorded rounds")
    parser.add_argument("--out", help="evidence file to write, e.g. reports/cpu/policy_offline.json")
    options = parser.parse_args(arguments)
    recordings = sorted(load_recordings(options.rounds), key=lambda one: (-one.temperature, one.name))
    cells = [evaluate_cell(recording, c, v) for recording in recordings for c, v in PRICES]
    results = results_of(cells)
    print(table(cells))
    if any(cell["temperature"] > 0 for cell in cells):
        results.append(compare_share(recordings))
        results[0]["detail"]["ablations"] = {name: ablate(recordings, made) for name, made in ABLATIONS.items()}
    for result in results:
        low, high = result["spread"]["min"], result["spread"]["max"]
        print(f"{result['id']} {result['value']:.4f} ({low:.4f} .. {high:.4f}, {result['n']} cells)")
    for name, found in results[0]["detail"].get("ablations", {}).items():
        figures = ", ".join(f"{key} {value:.4f}" for key, value in found.items())
        print(f"goodput / paper, {name}: {figures}")
    if options.out:
        command = f"python -m aspire_simulator.offline --rounds {Path(options.rounds).name} --out {options.out}"
        print(f"wrote {write_evidence(options.out, results, command=command)}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
