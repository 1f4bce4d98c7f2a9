"""One decoder for Llama, Mistral, Qwen2 and Qwen3 over flattened tokens.

The decoder knows nothing of batches, masks or caches: tokens of all requests lie in one dimension, and attention is a
callable that the engine gives; elementwise operations come from a back end of `aspire_kernels`. Inference only. No host
synchronisation and no shape that depends on values, so that a forward can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, scaled_dot_product_attention

from aspire.models.config import ModelConfig
from aspire.models.rope import apply_rope, rope_tables
from aspire_kernels.backend import REFERENCE


class Attend(Protocol):
    """Attention of one layer, given by the engine."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        """Rotate q and k, store k and v, attend; returns [tokens, heads, head_dim] in the dtype of q.

        ``q`` [tokens, heads, head_dim] and ``k``, ``v`` [tokens, kv_heads, head_dim] come BEFORE rope: applying it
        (`aspire.models.rope.apply_rope` is the reference) is the callee's work, so that it can be fused with the KV
        write. They come AFTER q/k norm, unless `Decoder.qk_norm_in_attend` is set: then that too is the callee's work,
        with the ``q_norm`` and ``k_norm`` of the layer's weights. q, k, v may be views of one qkv buffer, contiguous
        in their last two dimensions only. ``positions`` [tokens] is what `Decoder.forward` was given.
        """
        ...


class Ops(Protocol):
    """Elementwise operations; every `aspire_kernels.backend.Backend` has them. No host synchronisation."""

    @property
    def rms_norm(self) -> Callable[..., Tensor]:
        """``(x [rows, width], weight [width], eps)`` -> x over its root mean square, times weight; dtype of x."""

    @property
    def add_rms_norm(self) -> Callable[..., tuple[Tensor, Tensor]]:
        """``(x, residual, weight, eps)`` -> (norm of residual, residual) after ``residual += x``, in place or not."""

    @property
    def norm_linear(self) -> Callable[..., tuple[Tensor, Tensor]]:
        """``(pending, residual, norm weight, weight, bias, eps)`` -> (product of the norm of residual, residual), after
        ``residual += pending`` unless that is None."""

    @property
    def norm_gated(self) -> Callable[..., tuple[Tensor, Tensor]]:
        """``(pending, residual, norm weight, gate_up, eps)`` -> (silu(gate) * up [tokens, width], residual), alike."""

    @property
    def linear_add(self) -> Callable[..., tuple[Tensor | None, Tensor]]:
        """``(x, weight, bias, residual)`` -> (pending, residual): a product still to be added, or None and the sum."""


@dataclass
class LayerWeights:
    """Weights of one layer; matrices are [output, input] as in torch.nn.functional.linear."""

    input_norm: Tensor | None  # [hidden]; None: folded into qkv
    qkv: Tensor  # [q_size + 2 * kv_size, hidden]
    qkv_bias: Tensor | None  # [q_size + 2 * kv_size]
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None  # [head_dim]
    output: Tensor  # [hidden, q_size]
    output_bias: Tensor | None  # [hidden]
    mlp_norm: Tensor | None  # [hidden]; None: folded into gate_up
    gate_up: Tensor  # [2 * intermediate, hidden]
    down: Tensor  # [hidden, intermediate]


@dataclass
class DecoderWeights:
    """All weights; ``lm_head`` is the same tensor as ``embed`` when they are tied."""

    embed: Tensor  # [vocab, hidden]
    layers: list[LayerWeights]
    norm: Tensor  # [hidden]
    lm_head: Tensor  # [vocab, hidden]


class Decoder:
    """A config, its weights, and the forward pass. ``ops`` may be replaced, e.g. by `get_backend("triton")`."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights, ops: Ops = REFERENCE) -> None:
        self.config = config
        self.weights = weights
        self.ops = ops
        self.qk_norm_in_attend = False  # True: `Attend` normalises q and k itself, fused with rope

    @property
    def device(self) -> torch.device:
        return self.weights.embed.device

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.embed.dtype

    @torch.inference_mode()
    def fold_norms(self) -> None:
        """Multiply the weight of every layer's two norms into the product that follows it, in place.

        The same function up to the rounding of the products' weights; afterwards a norm only divides by the root mean
        square, which a kernel can do after the product.
        """
        for layer in self.weights.layers:
            for norm, weight in ((layer.input_norm, layer.qkv), (layer.mlp_norm, layer.gate_up)):
                if norm is not None:
                    weight.copy_(weight.float() * norm.float())
            layer.input_norm = layer.mlp_norm = None

    @torch.inference_mode()
    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attend: Attend,
        before_layer: Callable[[int], None] | None = None,
    ) -> Tensor:
        """Hidden states after the final norm, [tokens, hidden], for ``input_ids`` and ``positions`` [tokens].

        ``before_layer`` is called with the index of every layer that is about to run.
        """
        eps, ops = self.config.rms_norm_eps, self.ops
        residual = embedding(input_ids, self.weights.embed)
        pending: Tensor | None = None  # output of the newest product, where it is not yet in the residual
        for index, layer in enumerate(self.weights.layers):
            if before_layer is not None:
                before_layer(index)
            qkv, residual = ops.norm_linear(pending, residual, layer.input_norm, layer.qkv, layer.qkv_bias, eps)
            x = self._attention(index, layer, qkv, positions, attend)
            pending, residual = ops.linear_add(x, layer.output, layer.output_bias, residual)
            x, residual = ops.norm_gated(pending, residual, layer.mlp_norm, layer.gate_up, eps)
            pending, residual = ops.linear_add(x, layer.down, None, residual)
        if pending is None:
            return ops.rms_norm(residual, self.weights.norm, eps)
        return ops.add_rms_norm(pending, residual, self.weights.norm, eps)[0]

    def _attention(self, index: int, layer: LayerWeights, qkv: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """q/k norm and ``attend``: fused projections [tokens, q_size + 2 * kv_size] -> [tokens, q_size]."""
        config, tokens = self.config, qkv.shape[0]
        heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        q, k, v = qkv.view(tokens, sum(heads), config.head_dim).split(heads, dim=1)
        if layer.q_norm is not None and layer.k_norm is not None and not self.qk_norm_in_attend:
            q = self._head_norm(q, layer.q_norm)
            k = self._head_norm(k, layer.k_norm)
        return attend(index, q, k, v, positions).reshape(tokens, config.q_size)

    def _head_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Norm of every head of ``x`` [tokens, heads, head_dim] by itself."""
        return self.ops.rms_norm(x.reshape(-1, x.shape[-1]), weight, self.config.rms_norm_eps).view(x.shape)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """float32 logits [rows, vocab] of ``hidden`` [rows, hidden].

        On CUDA the product of half-precision operands is accumulated and returned in float32: rounding it to bfloat16
        first would make ties among the best tokens common (steps of 0.125 near 20).
        """
        head = self.weights.lm_head
        if hidden.is_cuda and hidden.dtype != torch.float32:
            return torch.mm(hidden, head.t(), out_dtype=torch.float32)
        return linear(hidden, head).float()


class DenseAttend:
    """Full causal attention over one sequence with a growing KV cache: the oracle of tests, and the plain way to run.

    Tokens must come in order of position, each once; chunks of any length continue the sequence.
    """

    def __init__(self, config: ModelConfig, max_positions: int, device: torch.device | str = "cpu") -> None:
        self._scale = config.head_dim**-0.5
        self._cos, self._sin = rope_tables(config, max_positions, device)
        self._keys: dict[int, Tensor] = {}  # layer -> [tokens so far, kv_heads, head_dim], rope applied
        self._values: dict[int, Tensor] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        cos, sin = self._cos[positions], self._sin[positions]
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        if layer in self._keys:
            k, v = torch.cat((self._keys[layer], k)), torch.cat((self._values[layer], v))
        self._keys[layer], self._values[layer] = k, v
        visible = torch.arange(k.shape[0], device=q.device)[None, :] <= positions[:, None]
        out = scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            k.transpose(0, 1)[None],
            v.transpose(0, 1)[None],
            attn_mask=visible,
            scale=self._scale,
            enable_gqa=True,
        )
        return out[0].transpose(0, 1)
