"""The scripts of the acceptance evidence, end to end on a tiny model: every cell, what was left out, the page."""

from __future__ import annotations

import importlib
import json
import random
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("matplotlib")

from aspire.compare import Comparison, Difference
from aspire.scheduler import SELECTOR_KINDS, SelectorSpec
from tests.cli.helpers import ROOT

TINY = ["--model", "tiny-qwen3", "--load-format", "dummy", "--num-prompts", "3", "--max-model-len", "256"]
FEW = ["--draft-length", "4", "--rounds", "2", "--reasoning-tokens", "20"]
SETTINGS = {
    "verify-per-layer@0.1": SelectorSpec("verify-per-layer", 0.1, 9),
    "refresh@0.1": SelectorSpec("refresh", 0.1, 9),
    "refresh-per-layer@0.1": SelectorSpec("refresh-per-layer", 0.1, 9),
}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "reports"))
    return importlib.import_module("measure_acceptance")


@pytest.fixture
def workloads(tmp_path: Path, script: ModuleType) -> Path:
    random.seed(0)
    for name in script.WORKLOADS:
        lines = [{"id": f"{name}-{index}", "prompt_token_ids": random.choices(range(60), k=180)} for index in range(3)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return tmp_path


def _run(module: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, arguments)])
    module.main()


def test_every_cell_is_measured_and_drawn(script: ModuleType, workloads: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = {"verify-per-layer@0.1": SETTINGS["verify-per-layer@0.1"]}
    others = {label: spec for label, spec in SETTINGS.items() if label not in first}
    monkeypatch.setattr(script, "settings", lambda num_layers: (first, others))
    evidence, figure, table = (workloads / name for name in ("acceptance.json", "figure.svg", "table.md"))
    _run(script, monkeypatch, "--workloads", workloads, *TINY, *FEW, "-o", evidence)
    results = {row["id"]: row for row in json.loads(evidence.read_text(encoding="utf-8"))["results"]}
    cells = [row for name, row in results.items() if name.startswith("acceptance.") and "label" in row["detail"]]
    assert len(cells) == 4 * 2 * len(SETTINGS) and results["acceptance.cells_left_out"]["value"] == 0
    assert all(row["n"] == 3 * 2 and len(row["detail"]["accepted_by_request"]) == 3 for row in cells)
    assert {row["detail"]["prompt_tokens"] for row in cells if row["detail"]["workload"] == "reasoning"} == {200}
    # float32: every text is that of plain decoding
    assert results["lossless.gpu_text_equal_share"]["value"] == 1.0
    assert results["lossless.gpu_text_equal_share"]["n"] == 3 * len(cells)
    assert results["lossless.gpu_largest_gap"]["detail"]["margin_shift"]["max"] < 1e-3
    _run(importlib.import_module("draw_acceptance"), monkeypatch, evidence, "--figure", figure, "--table", table)
    page = table.read_text(encoding="utf-8")
    assert all(f"| `{name.partition('@')[0]}` | 10% |" in page for name in SETTINGS)
    assert "100.00% of 72 texts equal plain decoding" in page and figure.stat().st_size > 1000


def test_what_there_is_no_time_for_is_named(
    script: ModuleType, workloads: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "settings", lambda num_layers: (SETTINGS, {}))
    evidence = workloads / "acceptance.json"
    _run(script, monkeypatch, "--workloads", workloads, *TINY, *FEW, "--seconds", 0, "-o", evidence)
    results = {row["id"]: row for row in json.loads(evidence.read_text(encoding="utf-8"))["results"]}
    assert results["acceptance.cells_left_out"]["value"] == 4 * 2 * len(SETTINGS)
    assert "acceptance.gsm8k.T0.refresh@0.1" in results["acceptance.cells_left_out"]["detail"]["cells"]


def test_differences_are_told_largest_gap_first(script: ModuleType) -> None:
    differences = [Difference("a", 3, 0.01, 0.002), Difference("b", 7, 0.05, 0.5), Difference("c", 0, None, None)]
    same = Comparison(10, differences, np.array([0.0, 0.1], dtype=np.float32))
    share, gap = script.lossless(same, ["x", "y", "z"])
    assert share["value"] == 0.7 and gap["value"] == 0.05 and gap["n"] == 3
    assert share["detail"]["differences"][0] == "y b token 7: 0.0500 0.5000"
    assert share["detail"]["beyond_margin_shift"] == 1


def test_settings_cover_every_selector_and_budget(script: ModuleType) -> None:
    settings = importlib.import_module("acceptance_settings")
    first, others = settings.settings(30)
    found = first | others
    assert len(found) == len(first) + len(others) and all(f"{kind}@0.07" in first for kind in SELECTOR_KINDS)
    assert {f"{kind}@{share:g}" for kind in SELECTOR_KINDS for share in settings.BUDGETS} <= set(found)
    assert found["delta@0.07"].layers == (2, 14, 22)
    assert len({str(spec) for spec in found.values()}) == len(found), "a setting is measured twice"
    for spec in found.values():
        spec.selection_layers(30)
