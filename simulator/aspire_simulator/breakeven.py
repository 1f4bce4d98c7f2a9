"""Where speculation pays: steady-state gain of a policy over autoregressive decoding, by batch and context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aspire_simulator.parallel import Inline, Workers
from aspire_simulator.scenario import Scenario

OUTPUT_TOKENS = 96
PAYS = 1.02  # gains below this are within what a cost model cannot resolve


@dataclass(frozen=True)
class BreakEven:
    """Gains by cell; cells that do not fit the KV pool are absent."""

    label: str
    cells: tuple[dict[str, Any], ...]  # batch, context, gain, tok_s, autoregressive_tok_s

    @property
    def sentence(self) -> str:
        """One sentence: where speculation pays and where it stops."""
        return verdict(self.label, self.cells)

    def to_dict(self) -> dict[str, Any]:
        """JSON object."""
        return {"sentence": self.sentence, "cells": list(self.cells)}


def break_even(
    scenario: Scenario,
    changes: Mapping[str, Any],
    label: str,
    *,
    batches: Sequence[int] = (),
    contexts: Sequence[int] = (),
    pool: Workers | None = None,
) -> BreakEven:
    """Simulate the policy of ``changes`` and autoregressive decoding on a full batch of equal contexts, cell by cell.

    Batches default to powers of four up to ``max_num_seqs``, contexts to 1k, 4k, 16k, 64k as far as the scenario's
    longest request, and its own. The figure is the throughput of steps with a full batch: no prefill, no tail.
    """
    config = scenario.limits(scenario.load_workload())
    longest = max(config.max_model_len, 1024 + OUTPUT_TOKENS)
    most = int(changes.get("max_num_seqs", scenario.max_num_seqs))
    batches = batches or sorted({b for b in (1, 4, 16, 64, 256) if b < most} | {most})
    wanted = (1024, 4096, 16384, 65536, 131072)
    contexts = contexts or sorted({longest - OUTPUT_TOKENS, *(c for c in wanted if c + OUTPUT_TOKENS <= longest)})
    jobs = []
    for batch in batches:
        for context in contexts:
            pages = batch * -(-(context + OUTPUT_TOKENS + 17) // 16)
            if pages > config.num_pages - 1 and scenario.load_cost_model().file.num_pages is not None:
                continue
            cell = scenario.with_(
                **{
                    **changes,
                    "dataset_path": None,
                    "num_prompts": batch,
                    "input_len": context,
                    "output_len": OUTPUT_TOKENS,
                    "request_rate": "inf",
                    "time_scale": 1.0,
                    "length_scale": 1.0,
                    "limit": None,
                    "max_num_seqs": batch,
                    # all prompts in one step, so that the whole batch begins to decode at once
                    "max_num_batched_tokens": batch * (context + 1),
                    "max_model_len": context + OUTPUT_TOKENS,
                    "num_pages": pages + 1,
                    "max_concurrency": None,
                    "goodput": "",
                    "noise": 0.0,
                }
            )
            jobs.append(((batch, context), (cell.to_dict(),)))
    found = dict((pool or Inline()).run(jobs, cell_gain))
    return BreakEven(label, tuple(found[key] for key, _ in jobs))


def cell_gain(scenario: Mapping[str, Any]) -> dict[str, Any]:
    """One cell: both throughputs and their ratio."""
    cell = Scenario.from_dict(scenario)
    rates = []
    for one in (cell, cell.with_(policy="autoregressive", selector=None, budget_ratio=None)):
        summary = one.run().summary
        rates.append(float(summary.get("full_batch_throughput") or summary["decode_only_throughput"]))
    return {
        "batch": cell.num_prompts,
        "context": int(cell.input_len),
        "gain": rates[0] / rates[1],
        "tok_s": rates[0],
        "autoregressive_tok_s": rates[1],
    }


def verdict(label: str, cells: Sequence[Mapping[str, Any]]) -> str:
    """Where ``label`` beats autoregressive decoding by more than 2 %, from cells with batch, context and gain."""
    if not cells:
        return f"{label}: no batch and context could be simulated, so nothing can be said about where it pays."
    good = [cell for cell in cells if cell["gain"] > PAYS]
    low, high = min(cell["gain"] for cell in cells), max(cell["gain"] for cell in cells)
    if not good:
        return (
            f"{label} pays nowhere in {len(cells)} cells of batch and context (best {high:.2f}x): "
            "decode autoregressively."
        )
    best = max(cells, key=lambda cell: float(cell["gain"]))
    top = f"up to {high:.2f}x at batch {best['batch']}, context {tokens(best['context'])}"
    if len(good) == len(cells):
        return f"{label} pays in all {len(cells)} cells of batch and context, {low:.2f}x to {high:.2f}x; {top}."
    starts = []
    for batch in sorted({cell["batch"] for cell in cells}):
        row = sorted((cell for cell in cells if cell["batch"] == batch), key=lambda cell: int(cell["context"]))
        losing = [index for index, cell in enumerate(row) if cell["gain"] <= PAYS]
        if not losing:
            starts.append(f"batch {batch}: everywhere")
        elif losing[-1] + 1 < len(row):
            starts.append(f"batch {batch}: from context {tokens(row[losing[-1] + 1]['context'])}")
        elif len(losing) == len(row):
            starts.append(f"batch {batch}: nowhere")
        else:
            paying = [tokens(cell["context"]) for cell in row if cell["gain"] > PAYS]
            starts.append(f"batch {batch}: at {', '.join(paying)}")
    return (
        f"{label} pays in {len(good)} of {len(cells)} cells of batch and context ({'; '.join(starts)}), {top}; "
        "elsewhere autoregressive decoding is as fast or faster."
    )


def tokens(count: int) -> str:
    """``4k`` for 4096."""
    return f"{count // 1024}k" if count >= 1024 and count % 1024 == 0 else str(count)
