"""Comparison tables and the HTML report."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from aspire.errors import InputError
from aspire.rundir import write_run
from aspire_simulator.comparison import COLUMNS, compare, load_runs, pays, text_table
from aspire_simulator.report import save_figures, write_report
from aspire_simulator.scenario import Scenario


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four policies on two workloads, as `aspire simulate` would write them."""
    folder = tmp_path_factory.mktemp("runs")
    base = Scenario("analytic:h200:llama-3.1-8b", num_prompts=8, output_len=40, max_num_seqs=8)
    for context in (1000, 64000):
        for policy in ("autoregressive", "fixed:g=5", "staggered:g=5", "oracle"):
            run = base.with_(policy=policy, input_len=context).run()
            run.config["note"] = "<script>alert(1)</script>"
            write_run(folder / f"{policy.split(':')[0]}-{context}", run)
    return folder


def test_gains_and_gaps_within_each_workload(runs: Path) -> None:
    rows = compare(load_runs([runs]))
    assert len(rows) == 8 and len({row.group for row in rows}) == 2
    for row in rows:
        assert row.gain is not None and (row.gain == 1.0) == (row.kind == "autoregressive")
        assert (row.gap is None) == (row.kind == "oracle")
        assert row.gap is None or 0 <= row.gap < 1
    assert any(row.efficient for row in rows) and not all(row.efficient for row in rows)
    long = [row.gain or 0.0 for row in rows if row.kind == "fixed"]
    assert max(long) > 1.2
    table = text_table(rows)
    assert len(table.splitlines()) == 9 and all(name in table for name in COLUMNS)
    assert "pays" in pays(rows)
    assert "No policy" in pays([row for row in rows if row.kind == "autoregressive"])
    one = [row for row in rows if row.context > 10_000]
    assert "Speculation pays at batch" in pays(one)


def test_report_is_one_self_contained_well_formed_page(runs: Path, tmp_path: Path) -> None:
    path = write_report([runs], tmp_path / "report.html")
    text = path.read_text()
    assert "<script" not in text and "&lt;script&gt;" in text
    links = [link for link in re.findall(r'(?:src|href)\s*=\s*["\']([^"\']*)', text) if not link.startswith("#")]
    assert links == []
    assert text.count("<svg") == text.count("</svg>") >= 5

    class Balance(HTMLParser):
        depth = 0
        void = ("meta", "br", "img")

        def handle_starttag(self, tag: str, attrs: object) -> None:
            self.depth += tag not in self.void and tag not in ("li", "p")

        def handle_endtag(self, tag: str) -> None:
            self.depth -= tag not in ("li", "p")

    parser = Balance()
    parser.feed(text)
    assert parser.depth == 0


def test_figures_as_files(runs: Path, tmp_path: Path) -> None:
    made = save_figures([runs / "fixed-1000", runs / "autoregressive-1000"], tmp_path)
    assert {path.stem for path in made} == {"throughput", "pareto", "acceptance", "phases", "timeline"}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in made)


def test_no_runs(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds none"):
        load_runs([tmp_path])


def test_importing_the_simulator_needs_neither_torch_nor_matplotlib() -> None:
    import subprocess
    import sys

    code = (
        "import sys; sys.modules['torch'] = None; sys.modules['matplotlib'] = None; sys.modules['optuna'] = None\n"
        "import aspire_simulator as s\n"
        "for name in s.__all__: getattr(s, name)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
