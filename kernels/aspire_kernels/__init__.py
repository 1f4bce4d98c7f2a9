"""ASPIRE's kernels, each beside its torch reference.

get_backend(name, device)   -> Backend: paged_attention, prepare, rms_norm, add_rms_norm, rope_and_kv_write,
silu_mul,
                               select_pages, sample, accept
AttentionBatch              rows of one forward (attention/interface.py)
SamplingRows, Sampled       sampling parameters and outcome (sample.py)
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

__all__ = [
    "MAX_VERIFY_QUERIES",
    "PAGE_SIZE",
    "AttentionBatch",
    "Backend",
    "PageBudget",
    "Sampled",
    "SamplingRows",
    "counters",
    "get_backend",
    "gumbel_reference",
]
