"""The studies that write evidence: speed of the simulator, oracle gaps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aspire.errors import UsageError
from aspire_simulator import benchmark, gap
from tests.simulator.helpers import real_data


def test_speed_is_measured_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(benchmark, "OFFLINE", benchmark.OFFLINE.with_(output_len=4, max_num_seqs=64, input_len=64))
    benchmark.main(["--quick", "--out", str(tmp_path / "speed.json")])
    assert "steps/s" in capsys.readouterr().out
    (result,) = json.loads((tmp_path / "speed.json").read_text())["results"]
    assert result["id"] == "sim.seconds_1k_requests" and result["value"] > 0
    assert result["detail"]["finished"] == 1000 and set(result["detail"]["policies"]) == set(benchmark.POLICIES)


def test_oracle_gaps_on_recorded_rounds(tmp_path: Path) -> None:
    rounds = str(real_data("smollm2_rounds.npz"))
    cells = gap.oracle_gaps(
        rounds,
        "analytic:h200:smollm2-135m",
        policies=("aspire", "autoregressive"),
        batches=(16,),
        workloads={"doc7k_0.7": 7100},
    )
    (cell,) = cells
    assert 0 < cell["gap"]["aspire"] < cell["gap"]["autoregressive"] < 1
    assert gap.mean_gaps(cells) == cell["gap"]
    with pytest.raises(UsageError):
        gap.oracle_gaps(rounds, "analytic:h200:smollm2-135m", policies=("best",))
