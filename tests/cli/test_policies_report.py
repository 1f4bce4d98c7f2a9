"""Benches of several cells, gathered: the worst gain of goodput, and what is missing is an error."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from aspire.errors import InputError
from tests.cli.helpers import ROOT, run
from tests.cli.test_engine_commands import RANDOM, TINY


def test_benches_are_gathered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, count in (("small", 2), ("large", 3)):
        options = ["--num-prompts", count, "--policy", "goodput:cost_ratio=0.2", "--policy", "fixed:g=3+window"]
        done = run("bench", *TINY, *RANDOM, *options, "--ignore-eos", "-o", tmp_path / name)
        assert done.code == 0, done.err
    monkeypatch.syspath_prepend(str(ROOT / "reports"))
    script = importlib.import_module("collect_policies")
    evidence = tmp_path / "policies.json"
    arguments = [str(tmp_path / "small"), str(tmp_path / "large"), "-o", str(evidence)]
    monkeypatch.setattr(sys, "argv", ["collect_policies.py", *arguments])
    script.main()
    document = json.loads(evidence.read_text(encoding="utf-8"))
    results = {row["id"]: row for row in document["results"]}
    assert document["meta"]["hardware"] and len(results) == 2 + 2 * 3
    gains = [
        row["detail"]["gain"] for name, row in results.items() if ".goodput" in name and name.startswith("policies.")
    ]
    assert len(gains) == 2 and results["policy.goodput_worst_over_ar"]["value"] == min(gains)
    assert results["policies.small.autoregressive"]["detail"]["gain"] == 1.0
    assert results["lossless.bench_text_equal_share"]["value"] == 1.0
    assert results["lossless.bench_text_equal_share"]["n"] == 2 * 2 + 2 * 3
    assert "| large | `fixed(g=3)+window` |" in capsys.readouterr().out
    with pytest.raises(InputError, match="goodput"):
        script.worst([row for name, row in results.items() if ".fixed" in name])
