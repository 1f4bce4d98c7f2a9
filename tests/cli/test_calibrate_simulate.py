"""calibrate, simulate, trace: files in, files and tables out, and the line for each kind of bad input."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import numpy as np
import pytest

from aspire.cli.workload_options import acceptance_by_selector
from aspire.rundir import read_run
from aspire.scheduler import FEATURES
from aspire_calibration import PlanLimits, SamplesHeader, profile_plan, run_profile
from tests.cli.helpers import assert_one_error, run


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """samples.jsonl of a machine whose step times are known: linear in the features, 1 % noise."""
    path = tmp_path_factory.mktemp("samples") / "samples.jsonl"
    price = dict.fromkeys(FEATURES, 0.0) | {"rows": 2e-5, "query_tokens": 4e-5, "sparse_kv_tokens": 6e-8}
    price |= {"full_kv_tokens": 6e-8, "prefill_tokens": 1e-5}
    rng = np.random.default_rng(0)

    def time_cell(cell: object) -> list[float]:
        features = cell.features()  # type: ignore[attr-defined]
        seconds = 2e-3 + sum(price[name] * float(getattr(features, name)) for name in FEATURES)
        return [seconds * float(np.exp(0.01 * rng.normal())) for _ in range(3)]

    limits = PlanLimits(max_num_seqs=8, max_model_len=4096, num_pages=2048, max_num_batched_tokens=2048)
    header = SamplesHeader(
        hardware={"name": "paper machine"},
        model={"name": "tiny", "layers": 2},
        settings={"max_num_seqs": 8, "max_model_len": 4096, "max_num_batched_tokens": 2048},
        num_pages=2048,
    )
    run_profile(time_cell, profile_plan(limits, levels=1), path, header, repeats=3)
    return path


@pytest.fixture(scope="module")
def cost_model(samples: Path) -> Path:
    """cost_model.json made from `samples` by the command itself."""
    output = samples.parent / "cost_model.json"
    done = run("calibrate", samples, "-o", output, "--form", "linear", "--bootstrap", 5, "--json")
    assert done.code == 0, done.err
    report = json.loads(done.out)
    assert report["form"] == "linear" and report["accuracy"]["ar"]["mape"] < 0.03
    assert f"wrote {output}" in done.err and "next: aspire simulate" in done.err
    return output


def test_calibrate_prints_error_by_regime(samples: Path, tmp_path: Path) -> None:
    figure = tmp_path / "c.png"
    done = run(
        "calibrate", samples, "-o", tmp_path / "c.json", "--form", "linear", "--bootstrap", 0, "--figure", figure
    )
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert done.code == 0, done.err
    assert all(word in done.out for word in ("MAPE", "P90", "bias", "draft", "verify"))


def test_missed_threshold_exits_1_and_still_writes(samples: Path, tmp_path: Path) -> None:
    output = tmp_path / "c.json"
    done = run("calibrate", samples, "-o", output, "--form", "linear", "--bootstrap", 0, "--max-mape", 0.0001)
    assert done.code == 1
    assert "above --max-mape" in done.err and output.is_file()


def test_calibrate_bad_input(samples: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text(samples.read_text(encoding="utf-8").replace('"repeats_s"', '"repeats"', 1), encoding="utf-8")
    output = tmp_path / "c.json"
    assert_one_error(run("calibrate", tmp_path / "no.jsonl", "-o", output), 1, "does not exist", "aspire profile")
    assert_one_error(run("calibrate", tmp_path, "-o", output), 1, "is a folder")
    assert_one_error(run("calibrate", broken, "-o", output), 1, "line 2")
    assert_one_error(run("calibrate", "-o", output), 2, "aspire profile")
    assert_one_error(run("calibrate", samples, "--form", "lineer", "-o", output), 2, "did you mean 'linear'?")
    assert_one_error(run("calibrate", samples, "--scale-from", "h100", "-o", output), 2, "--scale-to")
    assert_one_error(run("calibrate", "--analytic", "h1000", "-o", output), 2, "h100")
    assert_one_error(run("calibrate", samples, "--folds", "-3", "-o", output), 2, "--folds")
    assert not output.exists()


def test_analytic_model_needs_no_samples(tmp_path: Path) -> None:
    done = run("calibrate", "--analytic", "h200", "--model", "qwen3-8b", "-o", tmp_path / "h200.json")
    assert done.code == 0, done.err
    assert "analytic" in done.out


def test_simulate_writes_a_run_per_policy(cost_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    arguments = ["simulate", "--cost-model", cost_model, "-o", folder, "--num-prompts", 12, "--input-len", "2000"]
    arguments += [
        "--output-len",
        "40",
        "--policy",
        "autoregressive",
        "--policy",
        "fixed:g=3+window",
        "--policy",
        "oracle",
    ]
    done = run(*arguments, "--goodput", "ttft:100000 tpot:500")
    assert done.code == 0, done.err
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["00-autoregressive", "01-fixed_g=3__window", "02-oracle_verify"]
    for name in names:
        one = read_run(folder / name)
        assert one.summary["completed"] == 12 and one.summary["total_output_tokens"] == 12 * 40
        assert one.summary["goodput_share"] == 1.0
        assert one.meta["command"] and one.config["cost_model"]["kind"] == "measured"
        assert name.split("-", 1)[1].split("_")[0] in done.out
    again = run(*arguments, "--json", "--quiet")
    assert again.code == 0 and again.err == ""
    assert [row["summary"]["total_output_tokens"] for row in json.loads(again.out)["runs"]] == [480] * 3


@pytest.mark.parametrize(
    ("options", "code", "parts"),
    [
        (["--policy", "asprie"], 2, ["did you mean 'aspire'?"]),
        (["--policy", "fixed:gg=3"], 2, ["gg"]),
        (["--policy", "none.json"], 1, ["none.json does not exist"]),
        (["--acceptance", "iid:2"], 2, ["2"]),
        (["--acceptance", "idd:0.5"], 2, ["did you mean 'iid'?"]),
        (["--num-prompts", "-1"], 2, ["--num-prompts"]),
        (["--input-len", "-5"], 2, ["length distribution"]),
        (["--request-rate", "0"], 2, ["--request-rate"]),
        (["--burstiness", "-1"], 2, ["burstiness"]),
        (["--goodput", "tttft:1"], 2, ["did you mean 'ttft'?"]),
        (["--trace", "none.csv"], 1, ["does not exist"]),
        (["--time-scale", "0"], 2, ["time_scale 0"]),
        (["--max-num-seq", "4"], 2, ["did you mean '--max-num-seqs'?"]),
        (["--max-num-batched-tokens", "4"], 2, ["--max-num-batched-tokens 4"]),
        (["--strict-range", "--input-len", "30000", "--max-model-len", "40000"], 1, ["outside the fitted range"]),
    ],
)
def test_simulate_bad_input(
    cost_model: Path, tmp_path: Path, options: list[str], code: int, parts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run("simulate", "--cost-model", cost_model, "--quiet", *options)
    assert_one_error(done, code, *parts)
    assert list(tmp_path.rglob("summary.json")) == []


def test_broken_or_missing_cost_model(tmp_path: Path) -> None:
    broken = tmp_path / "c.json"
    assert_one_error(run("simulate", "--cost-model", broken), 1, "does not exist", "aspire calibrate")
    broken.write_text("{broken", encoding="utf-8")
    assert_one_error(run("simulate", "--cost-model", broken), 1, "is not valid JSON")
    broken.write_text("{}", encoding="utf-8")
    assert_one_error(run("simulate", "--cost-model", broken), 1, "is not a cost model")


def test_extrapolation_warns_and_is_counted(cost_model: Path, tmp_path: Path) -> None:
    options = ["--input-len", "30000", "--max-model-len", "40000", "--num-pages", 30000, "--num-prompts", 2]
    done = run("simulate", "--cost-model", cost_model, "-o", tmp_path / "r", "--json", "--policy", "fixed", *options)
    assert done.code == 0, done.err
    assert "aspire: warning: cost model:" in done.err
    assert json.loads(done.out)["extrapolated"]["full_kv_tokens"] > 0


def test_a_folder_with_other_files_is_left_alone(cost_model: Path, tmp_path: Path) -> None:
    target = tmp_path / "r" / "00-fixed_verify"
    target.mkdir(parents=True)
    (target / "mine.txt").write_text("keep", encoding="utf-8")
    done = run("simulate", "--cost-model", cost_model, "--policy", "fixed", "-o", tmp_path / "r", "--num-prompts", 2)
    assert_one_error(done, 1, "mine.txt")
    assert (target / "mine.txt").read_text(encoding="utf-8") == "keep"


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root writes everywhere")
def test_folder_without_write_permission(samples: Path, tmp_path: Path) -> None:
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        assert_one_error(run("calibrate", samples, "-o", tmp_path / "c.json"), 1, "cannot write")
    finally:
        tmp_path.chmod(stat.S_IRWXU)


def test_trace_statistics_and_replay(cost_model: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    lines = [f"2023-11-16 18:17:{second:02d}.0,{200 + 10 * second},{20}" for second in range(40)]
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(lines) + "\n", encoding="utf-8")
    done = run("trace", trace, "--json")
    assert done.code == 0, done.err
    stats = json.loads(done.out)["stats"]
    assert stats["requests"] == 40 and stats["mean_output_tokens"] == 20
    options = ["--trace", trace, "--limit", 10, "--time-scale", "0.5", "--policy", "fixed", "-o", tmp_path / "r"]
    done = run("simulate", "--cost-model", cost_model, *options, "--json")
    assert done.code == 0, done.err
    (one,) = json.loads(done.out)["runs"]
    assert one["summary"]["completed"] == 10
    fitted = run("fit-acceptance", tmp_path / "r" / one["run"], "-o", tmp_path / "acceptance.json", "--json")
    assert fitted.code == 0, fitted.err
    assert (tmp_path / "acceptance.json").is_file() and json.loads(fitted.out)["best"]
    trace.write_text("a,b\n1,2\n", encoding="utf-8")
    assert_one_error(run("trace", trace), 1, "line 1", "is no trace")


def test_validate_accepts_a_simulated_run_and_notices_a_wrong_cost_model(cost_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "r"
    options = ["--num-prompts", 6, "--input-len", "1000", "--output-len", "30", "--policy", "fixed:g=2", "-o", folder]
    assert run("simulate", "--cost-model", cost_model, *options).code == 0
    (one,) = folder.iterdir()
    done = run("validate", one, "--strict", "--json", "-o", tmp_path / "v.json")
    assert done.code == 0, done.err + done.out
    report = json.loads(done.out)
    assert report["passed"] and report["runs"][0]["steps_equal_share"] == 1.0
    assert report["runs"][0]["step_times"]["run_error"] < 1e-9
    assert json.loads((tmp_path / "v.json").read_text(encoding="utf-8")) == report
    other = tmp_path / "h200.json"
    assert run("calibrate", "--analytic", "h200", "-o", other).code == 0
    done = run("validate", "--run", one, "--cost-model", other, "--strict")
    assert done.code == 1 and "WARN" in done.out
    assert run("validate", one, "--cost-model", other).code == 0


def test_validate_bad_input(tmp_path: Path) -> None:
    assert_one_error(run("validate", tmp_path / "none"), 1, "run directory", "does not exist")
    assert_one_error(run("validate", tmp_path), 1, "config.json")
    assert_one_error(run("validate"), 2, "run directory")


def test_sweep_writes_cells_resumes_and_names_failures(cost_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "sweep.json"
    base = {"cost_model": str(cost_model), "num_prompts": 4, "output_len": 20, "max_num_seqs": 4, "num_pages": 500}
    grid = {"policy": ["autoregressive", "fixed:g=3"], "input_len": [500, 1000]}
    file.write_text(json.dumps({"base": base, "grid": grid}), encoding="utf-8")
    assert "4 cells" in run("sweep", file, "--dry-run").out
    done = run("sweep", file, "-o", tmp_path / "out", "--json")
    assert done.code == 0, done.err
    assert len(json.loads(done.out)["cells"]) == 4
    assert (tmp_path / "out" / "sweep.csv").is_file()
    assert_one_error(run("sweep", file, "-o", tmp_path / "out", "-q"), 2, "--resume")
    assert run("sweep", file, "-o", tmp_path / "out", "--resume").code == 0
    file.write_text(json.dumps({"base": base, "grid": {"polici": ["fixed"]}}), encoding="utf-8")
    assert_one_error(run("sweep", file), 2, "did you mean 'policy'?")
    file.write_text(json.dumps({"base": base, "grid": {"input_len": [500, -5]}}), encoding="utf-8")
    failed = run("sweep", file, "-o", tmp_path / "failed")
    assert failed.code == 1 and "length distribution" in failed.out


def test_capacity_finds_a_rate_and_needs_limits(cost_model: Path, tmp_path: Path) -> None:
    options = ["--num-prompts", 40, "--input-len", "300", "--output-len", "20", "--policy", "fixed:g=2"]
    limits = ["--goodput", "ttft:40 tpot:40", "--tolerance", 0.3, "-o", tmp_path / "c.json"]
    done = run("capacity", "--cost-model", cost_model, *options, *limits, "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert 0 < found["request_rate"] < 1e3 and len(found["probes"]) >= 2
    assert_one_error(run("capacity", "--cost-model", cost_model, "-q"), 2, "--goodput")


def test_tune_writes_a_policy_that_simulate_reads(cost_model: Path, tmp_path: Path) -> None:
    work = ["--cost-model", cost_model, "--num-prompts", 8, "--input-len", "3000", "--output-len", "40"]
    options = ["--method", "grid", "--repeats", 2, "--kind", "autoregressive", "--kind", "fixed", "--no-break-even"]
    policy = tmp_path / "policy.json"
    models = ["--acceptance", "verify=iid:0.9", "--acceptance", "window=iid:0.5"]
    done = run("tune", *work, *options, *models, "-o", policy)
    assert done.code == 0, done.err
    assert "tuned policy:" in done.out and "expected gain over autoregressive:" in done.out
    options = f"--policy {policy} --cost-model {cost_model}"
    assert f"wrote {policy}" in done.err and f"next: aspire generate {options}  or  aspire bench {options}" in done.err
    written = json.loads(policy.read_text(encoding="utf-8"))
    assert written["provenance"]["cost_model"]["sha256"] and written["provenance"]["gains"]
    again = run("simulate", *work, *models, "--policy", policy, "-o", tmp_path / "r")
    assert again.code == 0, again.err
    assert_one_error(run("tune", *work, "-q", "--method", "gird"), 2, "did you mean 'grid'?")
    assert_one_error(run("tune", *work, "-q", "--kind", "fixt"), 2, "did you mean 'fixed'?")
    assert_one_error(run("tune", *work, "-q", "--objective", "goodput"), 2, "--goodput")
    assert_one_error(run("tune", *work, "-q", "--acceptance", "windo=iid:0.5"), 2, "did you mean 'window'?")
    policy.write_text(json.dumps({**written, "kidn": 1}), encoding="utf-8")
    assert_one_error(run("simulate", *work, "--policy", policy, "-q"), 2, "did you mean 'kind'?")


def test_report_is_one_page_with_figures(cost_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "r"
    work = ["--num-prompts", 6, "--input-len", "1000", "--output-len", "30", "-o", folder]
    assert run("simulate", "--cost-model", cost_model, *work).code == 0
    done = run("report", folder, "--figures", tmp_path / "f", "--json")
    assert done.code == 0, done.err
    document = json.loads(done.out)
    assert document["verdict"] and len(document["runs"]) == 3
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "<svg" in page and "<script" not in page and 'href="http' not in page
    assert list((tmp_path / "f").glob("*.svg"))
    assert_one_error(run("report", tmp_path / "none"), 1, "no run directory")
    assert_one_error(run("report", folder, "--figure-format", "gif"), 2, "allowed: pdf, png, svg")


def test_a_recorded_run_may_have_an_equals_sign_in_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aspire_simulator.acceptance.parse_acceptance", lambda text: text)
    name = "recorded:runs/bench/03-fixed_g=6__verify-per-layer"
    assert acceptance_by_selector([name]) == name
    assert acceptance_by_selector([f"window={name}", "iid:0.8"]) == {"window": name, "*": "iid:0.8"}
