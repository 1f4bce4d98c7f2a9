"""How much attention do page lists miss while drafting, and does refreshing them help? On the CPU, without drafting.

    python reports/make_workloads.py --gsm8k FILE --aime FILE -o runs/workloads
    python reports/measure_page_lists.py --workloads runs/workloads -o reports/cpu/page_lists.json

A few prompts are decoded (T = 0.7) with plain full attention, and the attention mass of every page is kept for every
step and layer: of the strongest head, which is what lists are chosen by, and the mean of the heads, which is what is
missed. A *rule* makes the lists of a draft step from what it may know: the mass at the last verification (mean of two
rows, as in the engine), and the mass of one layer in the draft step before. The figure of a rule is the share of the
heads' attention that falls on pages outside its lists, mean over the ten draft steps after a verification, all layers.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / part) for part in (".", "kernels", "calibration", "simulator")]

from aspire.evidence import write_evidence  # noqa: E402
from aspire.models import DenseAttend, LoadedModel, apply_rope, load_model  # noqa: E402
from aspire.prompts import read_jsonl  # noqa: E402
from aspire.scheduler import PAGE_TOKENS  # noqa: E402

PROMPTS = (("documents", 0), ("documents", 5), ("gsm8k", 0), ("gsm8k", 7), ("code", 0), ("code", 9))
ROUND, RECENT, CHUNK = 10, 8, 256
BUDGETS = (14, 20, 32)  # pages, of about 200
LEAST_MASS = 1e-3

Floats = NDArray[np.float32]
Rule = Callable[[Floats, Floats, int], Floats]
"""(mass at verification, mass one draft step ago, both [layers, pages]; pages to choose) -> scores [layers, pages]."""


class MassTracer(DenseAttend):
    """Plain attention that also keeps the attention weights of single-token steps."""

    def __init__(self, loaded: LoadedModel, max_positions: int) -> None:
        super().__init__(loaded.config, max_positions)
        self._group = loaded.config.num_heads // loaded.config.num_kv_heads
        self.weights: list[Tensor] = []  # per layer [heads, tokens]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        out = super().__call__(layer, q, k, v, positions)
        if len(positions) == 1:
            query = apply_rope(q, self._cos[positions], self._sin[positions])[0]
            keys = self._keys[layer].repeat_interleave(self._group, dim=1)
            self.weights.append(torch.softmax(torch.einsum("hd,nhd->hn", query, keys) * self._scale, dim=-1))
        return out


def trace(loaded: LoadedModel, prompt: list[int], steps: int, seed: int) -> tuple[Floats, Floats]:
    """``(of the strongest head, mean of the heads)`` [steps, layers, pages]: attention mass of each page."""
    attend = MassTracer(loaded, len(prompt) + steps + 1)
    model = loaded.model
    for first in range(0, len(prompt), CHUNK):
        chunk = torch.tensor(prompt[first : first + CHUNK])
        hidden = model.forward(chunk, torch.arange(first, first + len(chunk)), attend)
    generator = torch.Generator().manual_seed(seed)
    pages = -(-(len(prompt) + steps) // PAGE_TOKENS)
    found = np.zeros((2, steps, loaded.config.num_layers, pages), dtype=np.float32)
    for step in range(steps):
        probability = torch.softmax(model.logits(hidden[-1:])[0] / 0.7, dim=-1)
        token = torch.multinomial(probability, 1, generator=generator)
        attend.weights.clear()
        hidden = model.forward(token, torch.tensor([len(prompt) + step]), attend)
        padded = torch.zeros(loaded.config.num_layers, loaded.config.num_heads, pages * PAGE_TOKENS)
        padded[:, :, : len(prompt) + step + 1] = torch.stack(attend.weights)
        for kind, heads in enumerate((padded.amax(dim=1), padded.mean(dim=1))):
            found[kind, step] = heads.view(len(heads), pages, PAGE_TOKENS).sum(dim=2).numpy()
    return found[0], found[1]


def rules(num_layers: int) -> dict[str, Rule]:
    """Every rule by name."""
    late, early = num_layers - 2, num_layers * 4 // 5
    found: dict[str, Rule] = {
        "verify": lambda seed, now, count: np.broadcast_to(seed[late], seed.shape),
        "verify-per-layer": lambda seed, now, count: seed,
        "refresh": lambda seed, now, count: np.broadcast_to(now[late], seed.shape),
        f"refresh[layer={early}]": lambda seed, now, count: np.broadcast_to(now[early], seed.shape),
        # every layer renewed by its own attention, which a drafter cannot have without reading everything
        "every layer renewed": lambda seed, now, count: now,
    }
    for layer in (late, early, num_layers // 2):
        for pages in (1, 2, 4):
            found[f"part renewed[layer={layer},pages={pages}]"] = part_renewed(layer, pages)
        for power in (0.25, 0.5, 1.0):
            found[f"refresh-per-layer[layer={layer},power={power:g}]"] = reweighted(layer, power)
    return found


def part_renewed(layer: int, renewed: int) -> Rule:
    """Lists of verification, whose ``renewed`` weakest pages give way to those that ``layer`` attends to most now."""

    def scores(seed: Floats, now: Floats, count: int) -> Floats:
        return now[layer][None] + 1e6 * largest(seed, max(1, count - renewed))

    return scores


def reweighted(layer: int, power: float) -> Rule:
    """Mass of verification times how far that of ``layer`` has moved since: the engine's refresh-per-layer."""

    def scores(seed: Floats, now: Floats, count: int) -> Floats:
        moved = (now[layer] + LEAST_MASS) / (seed[layer] + LEAST_MASS)
        return np.asarray(seed * moved[None] ** power)

    return scores


def largest(scores: Floats, count: int) -> NDArray[np.bool_]:
    """Mask of the first page and the ``count`` - 1 others of largest score in each layer."""
    ranked = scores.copy()
    ranked[:, 0] = np.inf
    mask = np.zeros(scores.shape, dtype=bool)
    np.put_along_axis(mask, np.argpartition(-ranked, count - 1, axis=1)[:, :count], True, axis=1)
    return mask


def missed(mass: tuple[Floats, Floats], prompt_tokens: int, rule: Rule, budget: int) -> float:
    """Share of the attention outside the lists of ``rule``, over all rounds of a trace."""
    strongest, mean = mass
    shares = []
    for verified in range(ROUND, len(mean) - ROUND - 1, ROUND + 1):
        tail = (prompt_tokens + verified) // PAGE_TOKENS + 1 - RECENT
        seed = (strongest[verified, :, :tail] + strongest[verified - ROUND // 2, :, :tail]) / 2
        for step in range(verified + 1, verified + ROUND + 1):
            chosen = largest(rule(seed, strongest[step - 1, :, :tail], budget - RECENT), budget - RECENT)
            read = (mean[step, :, :tail] * chosen).sum(axis=1) + mean[step, :, tail:].sum(axis=1)
            shares.append(1.0 - read.mean())
    return float(np.mean(shares))


def main() -> None:
    """Trace the prompts, score the rules, write the evidence file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", type=Path, required=True, help="folder of make_workloads.py")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--prompt-tokens", type=int, default=3072, help="the last ones of each prompt")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("-o", "--out", type=Path, required=True)
    given = parser.parse_args()
    loaded = load_model(given.model, "float32", "cpu", given.load_format)
    traces = []
    for workload, index in PROMPTS:
        prompt = read_jsonl(given.workloads / f"{workload}.jsonl")[index].token_ids or ()
        traces.append(trace(loaded, list(prompt[-given.prompt_tokens :]), given.steps, index))
        print(f"{workload} {index} traced", flush=True)
    results: list[dict[str, Any]] = []
    for budget in BUDGETS:
        for name, rule in rules(loaded.config.num_layers).items():
            shares = [missed(mass, given.prompt_tokens, rule, budget) for mass in traces]
            results.append(
                {
                    "id": f"lists.missed.{name}@{budget}pages",
                    "value": float(np.mean(shares)),
                    "unit": "of attention",
                    "n": len(shares),
                    "spread": [min(shares), max(shares)],
                    "detail": {
                        f"{workload} {index}": share for (workload, index), share in zip(PROMPTS, shares, strict=True)
                    },
                }
            )
            print(f"{budget} pages, {name}: {np.mean(shares):.4f}", flush=True)
    write_evidence(given.out, results)


if __name__ == "__main__":
    main()
