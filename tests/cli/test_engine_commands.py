"""profile, generate, bench: the real engine behind the command line, on a tiny model with random weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from aspire.rundir import read_run
from tests.cli.helpers import assert_one_error, run

TINY = ["--model", "tiny-llama", "--load-format", "dummy", "--device", "cpu", "--max-num-seqs", "4"]
TINY += ["--max-model-len", "512", "--max-num-batched-tokens", "256"]
RANDOM = ["--dataset-name", "random", "--num-prompts", "3", "--input-len", "60", "--output-len", "16"]


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with samples.jsonl and cost_model.json, made by the commands on the tiny model."""
    folder = tmp_path_factory.mktemp("loop")
    options = ["--levels", 1, "--repeats", 3, "--no-refine", "-o", folder / "samples.jsonl"]
    done = run("profile", *TINY, *options, "--budget-minutes", 0.3)
    assert done.code == 0, done.err
    assert "cells measured" in done.out and "next: aspire calibrate" in done.err
    done = run("calibrate", folder / "samples.jsonl", "--form", "linear", "--bootstrap", 0, "-o", folder / "cost.json")
    assert done.code == 0, done.err
    return folder


def test_profile_goes_on_where_it_stopped(loop: Path) -> None:
    before = len((loop / "samples.jsonl").read_text(encoding="utf-8").splitlines())
    options = [
        "--levels",
        1,
        "--repeats",
        3,
        "--no-refine",
        "-o",
        loop / "samples.jsonl",
        "--budget-minutes",
        0,
        "--json",
    ]
    done = run("profile", *TINY, *options)
    assert done.code == 0, done.err
    assert json.loads(done.out)["resumed"] == before - 1
    other = run("profile", *TINY, *options, "--dtype", "bfloat16")
    assert_one_error(other, 1, "another setup", "dtype")


def test_profile_dry_run_measures_nothing(tmp_path: Path) -> None:
    done = run("profile", *TINY, "--dry-run", "-o", tmp_path / "s.jsonl")
    assert done.code == 0, done.err
    assert "cells" in done.out and not (tmp_path / "s.jsonl").exists()


def test_bench_compares_policies_on_the_same_prompts(loop: Path, tmp_path: Path) -> None:
    policies = ["--policy", "fixed:g=3", "--policy", "aspire", "--repeats", 2]
    cost = ["--cost-model", loop / "cost.json"]
    evidence = tmp_path / "evidence.json"
    done = run("bench", *TINY, *RANDOM, *policies, *cost, "-o", tmp_path / "b", "--evidence", evidence, "--json")
    assert done.code == 0, done.err
    report, means = json.loads(done.out), dict[str, float]()
    assert [row["label"] for row in report["policies"]][0] == "autoregressive"
    for row in report["policies"]:
        assert row["equal_outputs"] == row["compared_outputs"] == 3, row["differences"]
        assert row["text_equal_share"] == 1.0 and row["largest_margin"] is None
        assert row["margin_shift"]["tokens"] == 48 and row["margin_shift"]["max"] < 1e-4
        assert len(row["decode_only_throughput"]) == 2
        assert row["cost_model_check"]["predicted_tok_s"] > 0
        summary = read_run(tmp_path / "b" / row["run"]).summary
        ttft_ms = summary["repeats"]["median_ttft_ms"]
        assert summary["total_output_tokens"] == 48 and len(ttft_ms) == 2 and summary["median_ttft_ms"] in ttft_ms
        means[row["run"]] = sum(ttft_ms) / 2
    assert json.loads((tmp_path / "b" / "bench.json").read_text(encoding="utf-8"))["verdict"] == report["verdict"]
    rows = json.loads(evidence.read_text(encoding="utf-8"))["results"]
    assert rows[0]["id"] == "bench.autoregressive.decode_tok_s" and rows[0]["n"] == 2
    assert "synthetic" in done.err
    checked = run("validate", *(tmp_path / "b" / row["run"] for row in report["policies"]), "--json")
    assert checked.code == 0, checked.err
    rows = json.loads(checked.out)["runs"]
    assert [row["steps_equal_share"] for row in rows] == [1.0] * 3
    for row in rows:
        measured = {one["metric"]: one["measured"] for one in row["metrics"]}
        assert measured["median_ttft_ms"] == pytest.approx(means[Path(row["run"]).name])
    assert run("report", tmp_path / "b").code == 0


def test_bench_with_arrivals_waits_for_them(tmp_path: Path) -> None:
    done = run("bench", *TINY, *RANDOM, "--policy", "autoregressive", "--request-rate", 20, "-o", tmp_path / "b")
    assert done.code == 0, done.err
    table = read_run(tmp_path / "b" / "00-autoregressive").requests
    assert (table.first_scheduled_s >= table.arrival_s).all()
    assert len(set(table.arrival_s.tolist())) == 3


def test_generate_writes_outputs_and_resumes(tmp_path: Path) -> None:
    file, output = tmp_path / "prompts.jsonl", tmp_path / "out" / "outputs.jsonl"
    lines = [{"id": name, "prompt_token_ids": [5, 6, 7, place + 8]} for place, name in enumerate("abc")]
    file.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    arguments = ["generate", *TINY, "--dataset-path", file, "--max-tokens", 6, "--ignore-eos", "-o", output]
    done = run(*arguments, "--policy", "fixed:g=2", "--output-dir", tmp_path / "run")
    assert done.code == 0, done.err
    whole = output.read_text(encoding="utf-8")
    records = {record["id"]: record for record in map(json.loads, whole.splitlines())}
    assert set(records) == {"a", "b", "c"}
    assert all(len(record["token_ids"]) == 6 and record["synthetic_acceptance"] for record in records.values())
    assert read_run(tmp_path / "run").summary["completed"] == 3
    assert_one_error(run(*arguments, "-q"), 2, "--resume")
    output.write_text("".join(line + "\n" for line in whole.splitlines()[:1]) + '{"id": "to', encoding="utf-8")
    done = run(*arguments, "--resume", "--json", "-q")
    assert done.code == 0, done.err
    assert len(json.loads(done.out)["outputs"]) == 2
    again = {record["id"]: record for record in map(json.loads, output.read_text(encoding="utf-8").splitlines())}
    assert {name: record["token_ids"] for name, record in again.items()} == {
        name: record["token_ids"] for name, record in records.items()
    }
    done = run(*arguments, "--resume")
    assert done.code == 0 and "already" in done.err


def test_generate_with_lossy_decoding_says_so_everywhere(loop: Path, tmp_path: Path) -> None:
    policy = tmp_path / "policy.json"
    selector = {"kind": "delta", "budget_ratio": 0.0, "min_pages": 9, "layers": [1]}
    policy.write_text(json.dumps({"kind": "autoregressive", "selector": selector}), encoding="utf-8")
    arguments = ["generate", *TINY, *RANDOM, "--input-len", 300, "--ignore-eos", "--policy", policy]
    arguments += ["--decode", "delta", "--cost-model", loop / "cost.json"]
    done = run(*arguments, "--output-dir", tmp_path / "run", "-o", tmp_path / "out.jsonl", "--json")
    assert done.code == 0, done.err
    assert "warning" in done.err and "decode delta is lossy" in done.err
    assert "autoregressive, lossy (delta): 48 tokens" in done.err
    result = json.loads(done.out)
    assert result["policy"] == "autoregressive, lossy (delta)" and result["summary"]["lossy"] is True
    records = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(records) == 3 and all(record["lossy"] for record in [*records, *result["outputs"]])
    recorded = read_run(tmp_path / "run")
    assert recorded.config["lossy"] and recorded.summary["lossy"] and recorded.config["decode"] == "delta"
    assert run("generate", *TINY, *RANDOM, "--output-dir", tmp_path / "exact", "-q").code == 0
    report = run("report", tmp_path / "run", tmp_path / "exact", "-o", tmp_path / "r")
    assert report.code == 0 and "lossy (delta)" in report.out, report.err
    assert "No policy was run beside" in report.out
    checked = run("validate", tmp_path / "run", "--json")
    assert json.loads(checked.out)["runs"][0]["steps_equal_share"] == 1.0, checked.err


def _bad_prompt_file(folder: Path, text: str) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("options", "code", "parts"),
    [
        (["--model", "no-such-model"], 1, ["no-such-model"]),
        (["--model", "/no/such/folder"], 1, ["/no/such/folder"]),
        (["--model", "tiny-lama"], 1, ["did you mean 'tiny-llama'?"]),
        (["--load-format", "auto"], 1, ["dummy"]),
        (["--load-format", "gguff"], 2, ["did you mean 'gguf'?"]),
        (["--dtype", "float31"], 2, ["did you mean 'float32'?"]),
        (["--device", "gpu"], 2, ["device 'gpu'"]),
        (["--max-model-len", "100000"], 2, ["100000", "4096"]),
        (["--max-num-seqs", "0"], 2, ["--max-num-seqs"]),
        (["--max-num-batched-tokens", "2"], 2, ["max_num_batched_tokens 2"]),
        (["--block-size", "32"], 2, ["block_size 32"]),
        (["--tensor-parallel-size", "2"], 2, ["tensor_parallel_size 2"]),
        (["--gpu-memory-utilization", "1.5"], 2, ["gpu_memory_utilization 1.5"]),
        (["--attention-backend", "flash"], 2, ["attention back end 'flash'"]),
        (["--policy", "fixt"], 2, ["did you mean 'fixed'?"]),
        (["--policy", "aspire"], 2, ["cost model", "aspire calibrate"]),
        (["--selector", "windo", "--policy", "fixed"], 2, ["did you mean 'window'?"]),
        (["--num-speculative-tokens", "100", "--policy", "fixed"], 2, ["100"]),
        (["--cost-model", "none.json"], 1, ["none.json does not exist", "aspire calibrate"]),
        (["--synthetic-acceptance-rates", "high"], 2, ["--synthetic-acceptance-rates"]),
        (["--synthetic-acceptance-rates", "2.0"], 2, ["2.0"]),
        (["--input-len", "600"], 1, ["600", "512"]),
        (["--input-len", "-5"], 2, ["--input-len"]),
        (["--output-len", "0"], 2, ["--output-len"]),
        (["--temperature", "-1"], 2, ["--temperature"]),
        (["--top-p", "1.5"], 2, ["top_p"]),
        (["--dataset-name", "doc"], 2, ["did you mean 'docs'?"]),
        (["--dataset-name", "docs"], 2, ["tokenizer"]),
        (["--dataset-path", "none.jsonl"], 2, ["jsonl"]),
        (["--resume"], 2, ["--output"]),
        (["--decode", "dleta"], 2, ["did you mean 'delta'?"]),
        (["--decode", "delta", "--policy", "fixed"], 2, ["policy 'fixed'", "leave it out"]),
        (["--decode", "delta", "--selector", "window"], 2, ["--selector delta"]),
        (["--decode", "delta", "--num-speculative-tokens", "3"], 2, ["num_speculative_tokens"]),
        (["--prompt", "hello"], 1, ["no tokenizer"]),
    ],
)
def test_bad_input_is_one_line(options: list[str], code: int, parts: list[str]) -> None:
    assert_one_error(run("generate", *TINY, *RANDOM, "-q", *options), code, *parts)


def test_bad_prompt_files(tmp_path: Path) -> None:
    base = ["generate", *TINY, "--max-tokens", 4]
    assert_one_error(run(*base, "-q", "--dataset-path", tmp_path / "none.jsonl"), 1, "none.jsonl does not exist")
    file = _bad_prompt_file(tmp_path, '{"prompt_token_ids": [1, 2]}\n{"prompt_token_ids": []}\n')
    assert_one_error(run(*base, "-q", "--dataset-path", file), 1, "line 2", "--on-error skip")
    done = run(*base, "--dataset-path", file, "--on-error", "skip")
    assert done.code == 0 and "skipped" in done.err and "line 2" in done.err
    file = _bad_prompt_file(tmp_path, '{"prompt_token_ids": [1, 999]}\n')
    assert_one_error(run(*base, "-q", "--dataset-path", file), 1, "999", "vocabulary")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{broken", encoding="utf-8")
    done = run("generate", "--model", folder, "-q", *RANDOM)
    assert_one_error(done, 1, "config.json")


def test_cost_model_of_another_machine_is_refused(loop: Path, tmp_path: Path) -> None:
    data = json.loads((loop / "cost.json").read_text(encoding="utf-8"))
    data["hardware"]["name"] = "another machine"
    other = tmp_path / "cost.json"
    other.write_text(json.dumps(data), encoding="utf-8")
    arguments = ["generate", *TINY, *RANDOM, "--policy", "aspire", "--cost-model", other]
    assert_one_error(run(*arguments, "-q"), 1, "another machine", "--allow-mismatch")
    done = run(*arguments, "--allow-mismatch")
    assert done.code == 0 and "another machine" in done.err


def test_acceptance_of_selectors_feeds_the_tuner(loop: Path, tmp_path: Path) -> None:
    options = ["--selectors", "window,verify", "--budget-ratios", "0.05,0.5", "--min-pages", 10, "--draft-length", 3]
    work = ["--dataset-name", "random", "--num-prompts", 3, "--input-len", 300, "--output-len", 40, "--ignore-eos"]
    folder, figure, evidence = tmp_path / "a", tmp_path / "a.svg", tmp_path / "e.json"
    done = run("acceptance", *TINY, *work, *options, "-o", folder, "--figure", figure, "--evidence", evidence, "--json")
    assert done.code == 0, done.err
    results = json.loads(done.out)["results"]
    assert [row["selector"] for row in results] == ["window@0.05", "window@0.5", "verify@0.05", "verify@0.5"]
    assert all(len(row["accepted_by_request"]) == 3 and row["synthetic"] for row in results)
    assert all(row["text_equal_share"] == 1.0 and row["margin_shift"]["tokens"] == 120 for row in results)
    assert figure.is_file() and len(json.loads(evidence.read_text(encoding="utf-8"))["results"]) == 4
    models = json.loads((folder / "acceptance.json").read_text(encoding="utf-8"))
    assert set(models) == {row["selector"] for row in results}
    tune = ["tune", "--cost-model", loop / "cost.json", "--acceptance", folder / "acceptance.json", "--method", "grid"]
    tune += ["--repeats", 2, "--kind", "fixed", "--num-prompts", 3, "--input-len", "300", "--output-len", "40"]
    done = run(*tune, "--no-break-even", "-o", tmp_path / "policy.json")
    assert done.code == 0, done.err
    assert_one_error(run("acceptance", *TINY, "-q", "--selectors", "windo"), 2, "did you mean 'window'?")
    assert_one_error(run("acceptance", *TINY, "-q", "--budget-ratios", "7"), 2, "--budget-ratios")
    assert_one_error(run("acceptance", *TINY, "-q", "--selector", "window"), 2, "--selector ", "--selectors")
    assert_one_error(run("acceptance", *TINY, "-q", "--stop", "x"), 2, "--stop")


def test_acceptance_of_a_few_rounds_a_request(tmp_path: Path) -> None:
    work = ["--dataset-name", "random", "--num-prompts", 6, "--input-len", 300, "--output-len", 60, "--ignore-eos"]
    options = ["--selectors", "verify", "--budget-ratios", "0.05", "--min-pages", 10, "--draft-length", 4]
    done = run("acceptance", *TINY, *work, *options, "--rounds", 3, "-o", tmp_path, "--json", "-q")
    assert done.code == 0, done.err
    (row,) = json.loads(done.out)["results"]
    assert row["rounds"] == 6 * 3 and row["text_equal_share"] == 1.0
    table = read_run(tmp_path / "00-verify@0.05").requests
    assert table.status == ["abort"] * 6 and (table.output_tokens < 3 * 5 + 2).all()


def test_bench_runs_a_policy_given_twice_once(tmp_path: Path) -> None:
    policy = tmp_path / "policy.json"
    policy.write_text(json.dumps({"kind": "autoregressive", "provenance": {"by": "tune"}}), encoding="utf-8")
    done = run(
        "bench", *TINY, *RANDOM, "--policy", "autoregressive", "--policy", policy, "-o", tmp_path / "b", "--json"
    )
    assert done.code == 0, done.err
    assert len(json.loads(done.out)["policies"]) == 1 and "run once" in done.err
