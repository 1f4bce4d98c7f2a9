"""What a run leaves behind: its requests as a table, and what a cost model must have been made for to hold for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aspire.engine.live import LiveRequest
from aspire.models import LoadedModel
from aspire.runlog import RequestTable, StepLog, status_of, table_from_log
from aspire.scheduler import FinishReason
from aspire.scheduler.prefix_links import shared_prefixes


def request_table(log: StepLog, submitted: Sequence[LiveRequest]) -> RequestTable:
    """The requests of a run in the order of submission, with the times that its ``log`` tells."""
    table = table_from_log(log, len(submitted))
    for row, live in enumerate(submitted):
        table.request_id[row] = live.request.request_id
        table.arrival_s[row] = live.metrics.arrival_s
        table.queued_s[row] = live.metrics.queued_s
        table.prompt_tokens[row] = live.request.prompt_tokens
        table.max_tokens[row] = live.params.max_tokens
        table.priority[row] = live.request.priority
        table.cached_tokens[row] = live.request.cached_tokens
        table.preemptions[row] = live.request.preemptions
        table.status[row] = status_of(live.request)
        if live.request.finish_reason == FinishReason.ABORT and live.metrics.finish_s is not None:
            table.finish_s[row] = live.metrics.finish_s
    table.prefix_of[:], table.prefix_tokens[:] = shared_prefixes([live.request.page_hashes for live in submitted])
    return table


def model_identity(loaded: LoadedModel) -> dict[str, Any]:
    """Name and shape of a model, under the names of cost-model files."""
    shape = loaded.config
    return {
        "name": loaded.name,
        "architecture": shape.architecture,
        "layers": shape.num_layers,
        "hidden": shape.hidden_size,
        "heads": shape.num_heads,
        "kv_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "intermediate": shape.intermediate_size,
        "vocab": shape.vocab_size,
    }
