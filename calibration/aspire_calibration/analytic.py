"""What-if models for hardware one does not own, from public figures, and measured models carried to another GPU.

    step = overhead + layers x kernels x launch + weights / bandwidth
         + GEMM FLOPs beyond the tokens at which compute takes as long as reading the weights
         + KV tokens x bytes / bandwidth + prefill attention FLOPs + selection (scores written and read)
A roofline: every term is a lower bound divided by an efficiency. Labelled *analytic*, never *measured*.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from aspire.errors import MismatchError, UsageError, check_choice, check_keys
from aspire_calibration.forms import Fitted
from aspire_calibration.kriging import KrigedModel
from aspire_calibration.launches import LaunchModel
from aspire_calibration.model import CostModelFile
from aspire_calibration.ramps import Ramp, RampModel
from aspire_calibration.table import TableModel


@dataclass(frozen=True)
class ModelShape:
    """What the cost of a decoder depends on. ``dtype_bytes``: of weights and KV."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    dtype_bytes: int = 2
    tied_head: bool = True

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name != "tied_head" and (not isinstance(value, int) or value < 1):
                raise UsageError(f"model shape: {name} must be a whole number >= 1, got {value!r}")

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ModelShape:
        """From a dictionary with exactly these keys; raises `UsageError` for others."""
        check_keys("model shape", data, cls.__dataclass_fields__)
        try:
            return cls(**data)
        except TypeError as error:
            raise UsageError(f"model shape needs {', '.join(cls.__dataclass_fields__)}: {error}") from error

    @property
    def layer_weights(self) -> int:
        """Parameters of the GEMMs of one layer: q, k, v, o and the gated MLP."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate

    @property
    def gemm_weights(self) -> int:
        """Parameters read by every step: all layers and the head (the embedding is a look-up)."""
        return self.layers * self.layer_weights + self.hidden * self.vocab

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype_bytes


@dataclass(frozen=True)
class Hardware:
    """Public figures of a device: peak memory bandwidth, dense bf16 compute, memory."""

    name: str
    bandwidth_bytes_per_s: float
    flop_per_s: float
    memory_bytes: float
    launch_s: float = 3.0e-6  # one dependent kernel of a CUDA graph, latency of small work included
    overhead_s: float = 3.0e-4  # host: compose, upload, replay, download
    bandwidth_efficiency: float = 0.85
    flop_efficiency: float = 0.65


# Vendors' data sheets: memory bandwidth and dense (not sparse) bf16 tensor throughput.
HARDWARE: dict[str, Hardware] = {
    "h100": Hardware("NVIDIA H100 SXM", 3.35e12, 989e12, 80e9),
    "h100-nvl": Hardware("NVIDIA H100 NVL", 3.9e12, 835e12, 94e9),
    "h200": Hardware("NVIDIA H200", 4.8e12, 989e12, 141e9),
    "a100": Hardware("NVIDIA A100 80GB SXM", 2.04e12, 312e12, 80e9),
    "l40s": Hardware("NVIDIA L40S", 0.864e12, 362e12, 48e9),
    "rtx4090": Hardware("NVIDIA GeForce RTX 4090", 1.008e12, 165e12, 24e9),
    "b200": Hardware("NVIDIA B200", 8.0e12, 2250e12, 192e9),
    # Two server cores with AVX-512 and their share of memory bandwidth: an order of magnitude, not a data sheet.
    "cpu": Hardware("generic CPU, 2 cores", 20e9, 0.15e12, 16e9, launch_s=2.0e-5, overhead_s=2.0e-3),
}

MODELS: dict[str, ModelShape] = {
    "smollm2-135m": ModelShape(30, 576, 9, 3, 64, 1536, 49152),
    "qwen3-1.7b": ModelShape(28, 2048, 16, 8, 128, 6144, 151936),
    "qwen3-8b": ModelShape(36, 4096, 32, 8, 128, 12288, 151936, tied_head=False),
    "llama-3.1-8b": ModelShape(32, 4096, 32, 8, 128, 14336, 128256, tied_head=False),
}

KERNELS_PER_LAYER = 8  # norm, qkv, rope + KV write, attention, o, norm, gate-up + act, down


def hardware_named(name: str) -> Hardware:
    """Public figures by short name; raises `UsageError` that lists the names."""
    return HARDWARE[check_choice("hardware", name.lower(), HARDWARE)]


def analytic_for(hardware: str, model: dict[str, Any]) -> CostModelFile | None:
    """The what-if model of a device by the name that its driver gives and a model by its shape; None if unknown.

    ``model``: as in the header of samples, with the keys of `ModelShape` among others.
    """
    plain = hardware.lower().replace(" ", "")
    device = next((known for short, known in HARDWARE.items() if short.removeprefix("rtx") in plain), None)
    needed = [name for name in ModelShape.__dataclass_fields__ if name not in ("dtype_bytes", "tied_head")]
    if device is None or not set(needed) <= set(model):
        return None
    return analytic_model(device, ModelShape.from_dict({name: model[name] for name in needed}))


def analytic_model(
    hardware: str | Hardware,
    shape: str | ModelShape,
    *,
    graph_buckets: tuple[int, ...] = (),
    select_layers: int = 1,
    page_size: int = 16,
) -> CostModelFile:
    """A roofline what-if model of kind *analytic*. ``select_layers``: layers whose page mass is computed."""
    device = hardware_named(hardware) if isinstance(hardware, str) else hardware
    model = MODELS[check_choice("model shape", shape, MODELS)] if isinstance(shape, str) else shape
    bandwidth = device.bandwidth_bytes_per_s * device.bandwidth_efficiency
    compute = device.flop_per_s * device.flop_efficiency
    weights_s = model.gemm_weights * model.dtype_bytes / bandwidth
    token_flop_s = 2 * model.gemm_weights / compute
    free_tokens = weights_s / token_flop_s  # below this many tokens reading the weights hides the arithmetic
    kv_s = model.kv_bytes_per_token / bandwidth
    floor_s = device.overhead_s + model.layers * KERNELS_PER_LAYER * device.launch_s
    score_s = (
        8 * model.heads * select_layers / bandwidth
    )  # fp32 weight of each head written and read per token of context
    logits_s = 12 * model.vocab / bandwidth  # fp32 logits: written, filtered, read by the sampler
    activation_s = 20 * model.layers * model.hidden * model.dtype_bytes / bandwidth
    attention_s = 4 * model.layers * model.heads * model.head_dim / compute
    priced = {
        Ramp("one"): floor_s + weights_s,
        Ramp("padded_tokens"): activation_s,
        Ramp("padded_tokens", free_tokens): token_flop_s,
        Ramp("logits_rows"): logits_s,
        Ramp("sparse_kv_tokens"): kv_s,
        Ramp("verify_kv_tokens"): kv_s,
        Ramp("prefill_pairs"): attention_s,
        Ramp("select_kv_tokens"): score_s,
        Ramp("select_rows"): device.launch_s / 4,
    }
    return CostModelFile(
        kind="analytic",
        form="analytic-roofline",
        fitted=RampModel((tuple(priced),), (tuple(priced.values()),)),
        hardware={"name": device.name, "label": f"analytic {device.name}"},
        model={**asdict(model), **({"name": shape} if isinstance(shape, str) else {})},
        settings={"async_scheduling": device is not HARDWARE["cpu"]},  # as the engine does by default
        ranges={},
        graph_buckets=graph_buckets,
        page_size=page_size,
        data={"public_figures": asdict(device), "kernels_per_layer": KERNELS_PER_LAYER},
        limits=[
            "analytic: from public peak figures and assumed efficiencies; expect errors of tens of percent",
            "no efficiency loss of small batches, no cache effects, no contention with the host",
            "prefill attention is priced as compute only, its KV reads as hidden",
        ],
    )


@dataclass(frozen=True)
class Ratios:
    """Seconds on the target over seconds on the source, by what binds."""

    memory: float
    compute: float
    overhead: float


# variable -> what binds it; GEMM tokens are memory bound up to the crossover and compute bound beyond.
BOUND = {
    "one": "overhead",
    "rows": "overhead",
    "padded_rows": "overhead",
    "draft_rows": "overhead",
    "verify_rows": "overhead",
    "full_rows": "overhead",
    "select_rows": "overhead",
    "query_tokens": "overhead",
    "logits_rows": "memory",
    "sparse_kv_tokens": "memory",
    "full_kv_tokens": "memory",
    "kv_tokens": "memory",
    "verify_kv_tokens": "memory",
    "select_kv_tokens": "memory",
    "wide_select_kv_tokens": "memory",
    "mean_context_octaves": "overhead",
    "select_context_octaves": "overhead",
    "mean_drafted": "overhead",
    "verify_width": "overhead",
    "widest_verify": "overhead",
    "longest_full_kv": "memory",
    "longest_sparse_kv": "memory",
    "full_spread": "overhead",
    "sparse_spread": "overhead",
    "wide_kv_tokens": "memory",
    "widest_kv_tokens": "memory",
    "padded_tokens": "compute",
    "verify_extra_qkv": "compute",
    "prefill_tokens": "compute",
    "prefill_pairs": "compute",
}


def scale_from(model: CostModelFile, from_gpu: str, to_gpu: str) -> CostModelFile:
    """Carry a measured model to another GPU by ratios of bandwidth and FLOP/s; kind *scaled*.

    The constant of the model (launches and reading the weights) is split: the weights' share, known from the model
    shape, follows bandwidth, the rest the launch overhead. ``start_latency`` and its price per request, the host's,
    stay. Raises `MismatchError` when the model was not made on ``from_gpu``.
    """
    source, target = hardware_named(from_gpu), hardware_named(to_gpu)
    base = model.fitted.base if isinstance(model.fitted, TableModel) else model.fitted
    if not isinstance(base, (RampModel, LaunchModel)):
        raise UsageError(f"a cost model of form '{model.form}' cannot be scaled; calibrate with --form roofline")
    short = from_gpu.lower().split("-")[0].removeprefix("rtx")
    if short != "cpu" and short not in str(model.hardware.get("name", "")).lower().replace(" ", ""):
        raise MismatchError(
            f"the cost model was made on {model.hardware.get('name')}, not on {from_gpu}; "
            "give --scale-from the GPU it was made on"
        )
    ratios = Ratios(
        memory=source.bandwidth_bytes_per_s / target.bandwidth_bytes_per_s,
        compute=source.flop_per_s / target.flop_per_s,
        overhead=(target.overhead_s + target.launch_s) / (source.overhead_s + source.launch_s),
    )
    fitted: Fitted
    if isinstance(base, LaunchModel):
        fitted = base.changed(
            lambda part: (
                replace(part, base=_scaled(part.base, ratios, model, source))  # what launches lose, they lose there too
                if isinstance(part, KrigedModel)
                else _scaled(part, ratios, model, source)
            )
        )
    else:
        fitted = _scaled(base, ratios, model, source)
    return replace(
        model,
        kind="scaled",
        fitted=fitted,
        hardware={"name": target.name, "label": f"scaled from {model.hardware.get('name')}"},
        accuracy={},
        comparison=[],
        intervals={},
        versions={},
        clocks={},
        data={**model.data, "scaled": {"from": source.name, "to": target.name, **asdict(ratios)}},
        limits=[
            f"scaled from a model measured on {model.hardware.get('name')} by bandwidth x{1 / ratios.memory:.2f} "
            f"and FLOP/s x{1 / ratios.compute:.2f}; not measured on {target.name}",
            *model.limits,
        ],
    )


def _scaled(base: RampModel, ratios: Ratios, model: CostModelFile, source: Hardware) -> RampModel:
    factors = []
    for terms, slopes in zip(base.branches, base.slopes, strict=True):
        constant = sum(s for t, s in zip(terms, slopes, strict=True) if t.variable == "one")
        share = _weights_share(model, source, constant)
        whole = share * ratios.memory + (1 - share) * ratios.overhead
        factors.append([whole if t.variable == "one" else getattr(ratios, BOUND[t.variable]) for t in terms])
    return base.scaled(factors)


def _weights_share(model: CostModelFile, source: Hardware, constant_s: float) -> float:
    """Share of the constant term that is reading the weights; 0 when the file does not tell the shape."""
    names = [name for name in ModelShape.__dataclass_fields__ if name in model.model]
    if constant_s <= 0 or not {"layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab"} <= set(
        names
    ):
        return 0.0
    shape = ModelShape.from_dict({name: model.model[name] for name in names})
    weights_s = shape.gemm_weights * shape.dtype_bytes / (source.bandwidth_bytes_per_s * source.bandwidth_efficiency)
    return min(1.0, weights_s / constant_s)
