"""ASPIRE's kernels, each beside its torch reference.

get_backend(name, device)   -> Backend: paged_attention, prepare, rms_norm, add_rms_norm, rope_and_kv_write,
                               silu_mul, norm_linear, norm_gated, linear_add, fuses,
                               select_pages, sample, resolve, advance
AttentionBatch              rows of one forward (attention/interface.py)
SamplingRows, Sampled       sampling parameters and outcome (sample.py)
SlotState, StepRows         what the device knows of its slots, rows of a step (step_state.py)
PageBudget                  size of a drafting row's page list (select.py)
gumbel_reference            the shared noise (noise.py)
counters                    launches per path
"""

from aspire_kernels import counters
from aspire_kernels.attention.interface import MAX_VERIFY_QUERIES, PAGE_SIZE, AttentionBatch
from aspire_kernels.backend import Backend, get_backend
from aspire_kernels.noise import gumbel_reference
from aspire_kernels.sample import Sampled, SamplingRows
from aspire_kernels.select import PageBudget
from aspire_kernels.step_state import Resolved, SlotState, StepRows

__all__ = [
    "MAX_VERIFY_QUERIES",
    "PAGE_SIZE",
    "AttentionBatch",
    "Backend",
    "PageBudget",
    "Resolved",
    "Sampled",
    "SamplingRows",
    "SlotState",
    "StepRows",
    "counters",
    "get_backend",
    "gumbel_reference",
]
