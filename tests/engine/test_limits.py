"""What an engine may hold, worked out from its configuration and model before anything runs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")
import torch

from aspire.engine.config import EngineConfig
from aspire.engine.limits import GRAPH_BUCKETS, device_of, scheduler_config_of
from aspire.errors import UsageError
from aspire.scheduler import MAX_DRAFT
from aspire.scheduler.features import GRAPH_WIDTHS
from aspire_kernels import MAX_VERIFY_QUERIES
from tests.invariants.models import tiny_model

MODEL = "llama"


def _config(**settings: int) -> EngineConfig:
    return EngineConfig(model=MODEL, device="cpu", load_format="dummy", **settings)


@given(rows=st.integers(1, 512), tokens=st.integers(512, 40_000))
def test_graphs_serve_every_step_that_may_come_and_none_that_may_not(rows: int, tokens: int) -> None:
    config = _config(max_num_seqs=rows, max_num_batched_tokens=tokens, max_model_len=64, num_pages=9)
    buckets = scheduler_config_of(config, tiny_model(MODEL), use_graphs=True).graph_buckets
    assert list(buckets) == sorted(set(buckets))
    assert buckets[0] == 1 and buckets[-1] == max(tokens, rows * (MAX_DRAFT + 1))
    assert set(buckets[:-1]) <= set(GRAPH_BUCKETS)
    assert scheduler_config_of(config, tiny_model(MODEL), use_graphs=False).graph_buckets == ()


def test_the_pool_has_the_pages_of_full_slots_and_the_trash_page_where_they_fit() -> None:
    limits = scheduler_config_of(_config(max_num_seqs=3, max_model_len=50), tiny_model(MODEL), use_graphs=False)
    assert (limits.max_model_len, limits.num_pages) == (50, 3 * 4 + 1)
    asked = scheduler_config_of(
        _config(max_num_seqs=3, max_model_len=50, num_pages=7), tiny_model(MODEL), use_graphs=False
    )
    assert asked.num_pages == 7


def test_a_context_beyond_the_positions_of_the_model_is_refused() -> None:
    longest = tiny_model(MODEL).config.max_position_embeddings
    whole = scheduler_config_of(_config(max_num_seqs=1), tiny_model(MODEL), use_graphs=False)
    assert whole.max_model_len == longest
    with pytest.raises(UsageError, match=rf"max_model_len {longest + 1} is more than the model's {longest} positions"):
        scheduler_config_of(_config(max_model_len=longest + 1), tiny_model(MODEL), use_graphs=False)


def test_a_device_that_torch_does_not_know_is_refused_by_name() -> None:
    assert device_of("cpu") == torch.device("cpu")
    assert device_of("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    with pytest.raises(UsageError, match="device 'gpu' is not known; allowed: auto, cpu, cuda, cuda:N"):
        device_of("gpu")


def test_the_widest_graph_holds_the_widest_verification() -> None:
    assert GRAPH_WIDTHS[-1] == MAX_VERIFY_QUERIES == MAX_DRAFT + 1
