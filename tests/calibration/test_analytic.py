"""What-if models and models carried to another GPU."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aspire.errors import MismatchError, UsageError
from aspire.scheduler.features import StepFeatures
from aspire_calibration import (
    HARDWARE,
    MODELS,
    CostModelFile,
    LoadedCostModel,
    ModelShape,
    analytic_for,
    analytic_model,
    calibrate,
    scale_from,
)
from aspire_calibration.analytic import hardware_named
from tests.calibration.machine import measured_samples

AR = StepFeatures.of(rows=32, query_tokens=32, verify_rows=32, full_kv_tokens=32 * 16384)


def seconds(hardware: str, shape: str, features: StepFeatures = AR) -> float:
    return float(LoadedCostModel(analytic_model(hardware, shape)).predict(features))


@pytest.mark.parametrize("hardware", HARDWARE)
@pytest.mark.parametrize("shape", MODELS)
def test_every_pair_gives_a_labelled_file(hardware, shape, tmp_path):
    file = analytic_model(hardware, shape, graph_buckets=(1, 2, 4))
    again = CostModelFile.load(file.save(tmp_path / "m.json"))
    assert again.kind == "analytic" and any("not measured" in limit or "analytic" in limit for limit in again.limits)
    assert not again.accuracy and "analytic" in again.summary_text()


def test_shapes_have_the_published_sizes():
    assert MODELS["smollm2-135m"].gemm_weights == pytest.approx(134.5e6, rel=0.01)
    assert MODELS["llama-3.1-8b"].gemm_weights == pytest.approx(7.5e9, rel=0.01)  # 8.03e9 less the embedding
    assert MODELS["llama-3.1-8b"].kv_bytes_per_token == 131072 and MODELS["smollm2-135m"].kv_bytes_per_token == 23040


def test_order_of_gpus_and_the_scale_of_published_decode_times():
    order = ("b200", "h200", "h100", "a100", "rtx4090", "l40s", "cpu")
    times = [seconds(name, "llama-3.1-8b") for name in order]
    assert times == sorted(times)
    # The floor of 32 x 16k on an H200 is about 19.6 ms; efficiency and launches come on top.
    assert 19e-3 < seconds("h200", "llama-3.1-8b") < 26e-3


def test_weights_hide_the_arithmetic_of_few_tokens_but_not_of_many():
    def of(tokens):
        return seconds("h100", "llama-3.1-8b", StepFeatures.of(rows=1, query_tokens=tokens, verify_rows=1))

    assert of(128) < 1.15 * of(1) and of(4096) > 5 * of(1)


@given(st.sampled_from(sorted(HARDWARE)), st.integers(1, 200), st.integers(1, 40_000), st.integers(0, 16))
def test_prices_are_positive_and_more_costs_more(hardware, rows, context, drafted):
    model = LoadedCostModel(analytic_model(hardware, "qwen3-1.7b"))
    base = StepFeatures.of(rows=rows, query_tokens=rows, verify_rows=rows, full_kv_tokens=rows * context)
    one = StepFeatures.of(rows=1, query_tokens=drafted + 1, verify_rows=1, full_kv_tokens=context)
    assert float(model.predict(base)) > 0 and float(model.marginal(base, one)) > 0


def test_scaling_by_ratios():
    header_name = {"name": "NVIDIA H200"}
    measured = dataclasses.replace(
        calibrate(measured_samples(most=150), forms=["linear"], bootstrap=0), hardware=header_name
    )
    scaled = scale_from(measured, "h200", "h100")
    assert scaled.kind == "scaled" and scaled.hardware["name"] == "NVIDIA H100 SXM" and not scaled.accuracy
    assert any("not measured on NVIDIA H100 SXM" in limit for limit in scaled.limits)
    big = StepFeatures.of(rows=8, query_tokens=8, verify_rows=8, full_kv_tokens=8e5)
    more = StepFeatures.of(full_kv_tokens=np.float64(1e5))
    ratio = LoadedCostModel(scaled).marginal(big, more) / LoadedCostModel(measured).marginal(big, more)
    assert float(ratio) == pytest.approx(4.8 / 3.35)
    assert analytic_model("h200", "smollm2-135m").start_latency == ()
    slow_host = dataclasses.replace(measured, start_latency=((0.003, 1e-3),), start_latency_per_request_s=3e-5)
    carried = scale_from(slow_host, "h200", "h100")
    assert carried.start_latency == ((0.003, 1e-3),) and carried.start_latency_per_request_s == 3e-5, "the host's"
    same = scale_from(measured, "h200", "h200")
    assert same.fitted.to_json() == measured.fitted.to_json()


def test_scaling_of_the_launches_form_scales_both_parts():
    measured = dataclasses.replace(
        calibrate(measured_samples(most=150), forms=["launches"], bootstrap=0), hardware={"name": "NVIDIA H200"}
    )
    fitted, scaled = measured.fitted, scale_from(measured, "h200", "h100").fitted
    for mine, carried in ((fitted.graph, scaled.graph), (fitted.prompts, scaled.prompts), (fitted.eager, scaled.eager)):
        for term, before, after in zip(mine.branches[0], mine.slopes[0], carried.slopes[0], strict=True):
            if term.variable == "full_kv_tokens":
                assert after == pytest.approx(before * 4.8 / 3.35)


def test_scaling_of_the_kriging_form_scales_its_prices_and_keeps_its_corrections():
    measured = dataclasses.replace(
        calibrate(measured_samples(most=150), forms=["kriging"], bootstrap=0), hardware={"name": "NVIDIA H200"}
    )
    assert any(name.startswith("graph.") for name in calibrate(measured_samples(most=60), forms=["kriging"]).intervals)
    scaled = scale_from(measured, "h200", "h100")
    big = StepFeatures.of(rows=64, query_tokens=64, verify_rows=64, full_kv_tokens=64 * 14e3, verify_width=1)
    ratio = float(LoadedCostModel(scaled).predict(big) / LoadedCostModel(measured).predict(big))
    assert 1.2 < ratio <= 4.8 / 3.35
    assert scaled.fitted.graph.pulls == pytest.approx(measured.fitted.graph.pulls)
    assert scale_from(measured, "h200", "h200").fitted.to_json() == measured.fitted.to_json()


def test_scaling_an_analytic_model_comes_near_the_analytic_model_of_the_target():
    carried = LoadedCostModel(scale_from(analytic_model("h200", "llama-3.1-8b"), "h200", "a100"))
    assert float(carried.predict(AR)) == pytest.approx(seconds("a100", "llama-3.1-8b"), rel=0.05)


def test_refusals():
    with pytest.raises(MismatchError, match="made on NVIDIA H200, not on a100"):
        scale_from(analytic_model("h200", "smollm2-135m"), "a100", "h100")
    with pytest.raises(UsageError, match=r"hardware 'h20' is not known.*allowed: a100, b200, cpu, h100"):
        hardware_named("h20")
    with pytest.raises(UsageError, match="layers must be a whole number >= 1"):
        ModelShape(0, 1, 1, 1, 1, 1, 1)
    with pytest.raises(UsageError, match=r"no key 'layer' \(did you mean 'layers'\?\)"):
        ModelShape.from_dict({"layer": 3})
    with pytest.raises(UsageError, match="model shape needs"):
        ModelShape.from_dict({"layers": 3})


def test_a_device_is_known_by_the_name_its_driver_gives() -> None:
    shape = {**{name: getattr(MODELS["qwen3-8b"], name) for name in ("layers", "hidden", "heads", "kv_heads")}}
    shape |= {"head_dim": 128, "intermediate": 12288, "vocab": 151936, "name": "mine", "architecture": "qwen3"}
    for name in ("NVIDIA H200", "NVIDIA A100-SXM4-80GB", "NVIDIA GeForce RTX 4090", "x86_64 CPU, 2 cores"):
        known = analytic_for(name, shape)
        assert known is not None and known.kind == "analytic" and known.model["hidden"] == 4096
    assert analytic_for("TPU v9", shape) is None
    assert analytic_for("NVIDIA H200", {"name": "of unknown shape"}) is None
