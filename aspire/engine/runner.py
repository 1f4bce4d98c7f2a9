"""The model runner: executes a `StepPlan` on torch. One upload, one forward (a graph replay on a GPU), one download."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aspire.engine.graphs import GraphCache
from aspire.engine.kv_pool import KVPool
from aspire.engine.logit_edits import LogitEdits
from aspire.engine.selectors import SELECTORS_KEPT, PageLists
from aspire.engine.sequences import SAMPLING_COLUMNS, Sequences
from aspire.engine.step_input import Shape, StepInput, host_buffer, to_device
from aspire.errors import EngineError
from aspire.models import Decoder, rope_tables
from aspire.scheduler import PAGE_TOKENS, SchedulerConfig, SelectorSpec, StepPlan
from aspire.scheduler.features import GRAPH_WIDTHS
from aspire.scheduler.pages import PageTable
from aspire_kernels import MAX_VERIFY_QUERIES, Backend, SamplingRows, SlotState

_NO_EDITS = LogitEdits.none()


@dataclass(frozen=True)
class StepBounds:
    """Host-known sizes of a step. They choose which kernels run and with which shapes, so they key CUDA graphs."""

    max_q: int
    max_verify_q: int
    max_full_kv: int  # of full rows; 0 = there are none
    max_sparse_kv: int  # tokens that a drafting row reads; 0 = none drafts
    max_kv: int  # of all rows
    any_selects: bool  # some row verifies or ends its prefill, and gets page lists

    @classmethod
    def of(cls, plan: StepPlan) -> StepBounds:
        """The bounds of ``plan``, exactly but for `StepPlan.slack`."""
        reads_list = plan.sparse
        kv = plan.start + plan.query_tokens + plan.slack
        max_q, max_kv = (1 if plan.single else int(plan.query_tokens.max())), int(kv.max())
        lists = int(np.count_nonzero(reads_list))
        max_full_kv = max_sparse_kv = max_verify_q = 0
        if lists:
            # one page more may be listed where a verification in flight commits up to the slack
            sparse = (plan.sel_count - plan.tail_page + (plan.slack > 0)) * PAGE_TOKENS + kv
            max_sparse_kv = int((sparse if lists == len(kv) else sparse[reads_list]).max())
        if lists < len(kv):
            max_full_kv = int(kv[~reads_list].max()) if lists else max_kv
            max_verify_q = max_q  # of full rows, since a row that drafts has one query token
            if plan.lossy or max_q > MAX_VERIFY_QUERIES:
                full_q = plan.query_tokens[~reads_list]
                max_verify_q = int(full_q[full_q <= MAX_VERIFY_QUERIES].max(initial=0))
        return cls(
            max_q=max_q,
            max_verify_q=max_verify_q,
            max_full_kv=max_full_kv,
            max_sparse_kv=max_sparse_kv,
            max_kv=max_kv,
            any_selects=plan.selects and bool(np.count_nonzero(plan.finds)),
        )

    @classmethod
    def for_graph(cls, plan: StepPlan, max_model_len: int, tokens: int) -> StepBounds:
        """Bounds of a step of ``tokens`` padded query tokens rounded up, so that few graphs serve all steps."""
        exact = cls.of(plan)
        if plan.num_prefills:
            return cls(
                max_q=tokens,
                max_verify_q=min(tokens, MAX_VERIFY_QUERIES) if exact.max_verify_q else 0,
                max_full_kv=max_model_len,
                max_sparse_kv=_power(exact.max_sparse_kv),
                max_kv=max_model_len,
                any_selects=exact.any_selects,
            )
        queries = int(_VERIFY_WIDTHS[np.searchsorted(_VERIFY_WIDTHS, exact.max_verify_q)])
        longest = min(max_model_len, _power(exact.max_kv))
        return cls(
            max_q=max(1, queries),
            max_verify_q=queries,
            max_full_kv=longest if exact.max_full_kv else 0,
            max_sparse_kv=_power(exact.max_sparse_kv),
            max_kv=longest,
            any_selects=exact.any_selects,
        )


_VERIFY_WIDTHS = np.array([0, *GRAPH_WIDTHS])


def _power(value: int) -> int:
    """The power of two that is not below ``value``; 0 stays 0."""
    return 1 << (value - 1).bit_length() if value else 0


@dataclass(frozen=True)
class StepResult:
    """What the device found, on the host. Tokens of row r are ``tokens[sample_start[r] : + count]``."""

    tokens: NDArray[np.int32]  # [samples]
    margin: NDArray[np.float32]  # [samples]
    logprob: NDArray[np.float32]  # [samples] of the raw logits; NaN where the logits are not finite
    accepted: NDArray[np.int32]  # [rows]
    sample_start: NDArray[np.int64]  # [rows]
    top_logprobs: tuple[NDArray[np.float32], NDArray[np.int32]] | None = None  # [samples, k] values and tokens


class ModelRunner:
    """Owns everything on the device: KV pool, block table, page lists, sampling parameters, graphs."""

    def __init__(
        self,
        model: Decoder,
        pool: KVPool,
        config: SchedulerConfig,
        pages: PageTable,
        sequences: Sequences,
        backend: Backend,
        *,
        selector: SelectorSpec,
        drafts: bool,
        use_graphs: bool,
    ) -> None:
        self.model = model
        self.pool = pool
        self.config = config
        self.backend = backend
        self.device = model.device
        self._pages = pages
        self._sequences = sequences
        slots = config.max_num_seqs
        # one spare row: padded entries of a step's new pages are written there
        self._table = torch.zeros((slots + 1, config.pages_per_slot), dtype=torch.int32, device=self.device)
        self.block_table = self._table[:slots]
        self.state = SlotState.empty(slots, self.device)
        self._sampling = {
            name: torch.zeros(slots, dtype=getattr(torch, np.dtype(kind).name), device=self.device)
            for name, kind in SAMPLING_COLUMNS.items()
        }
        self._cos, self._sin = rope_tables(model.config, config.max_model_len + MAX_VERIFY_QUERIES, self.device)
        self._scale = model.config.head_dim**-0.5
        # the fused kernel normalises q and k together with rope; the reference leaves it to the decoder
        model.ops = backend
        model.qk_norm_in_attend = backend.name == "triton" and model.config.qk_norm
        if self.device.type == "cuda" and backend.fuses(model.weights.layers[0].gate_up):
            model.fold_norms()
        self._graphs = GraphCache(self, config.graph_buckets) if use_graphs else None
        self.capture_s = 0.0  # spent capturing graphs, all in all
        self._kept_lists: dict[tuple[SelectorSpec, bool], PageLists] = {}
        self.set_selector(selector, drafts)

    def set_selector(self, selector: SelectorSpec, drafts: bool) -> None:
        """Use ``selector`` from the next step on; what its lists hold is old until rows verify.

        The lists of a few selectors are kept with their graphs, so that policies can be switched to and fro.
        """
        key = (selector, drafts)
        lists = self._kept_lists.pop(key, None)
        if lists is None:
            lists = PageLists(
                selector,
                self.backend,
                num_layers=self.model.config.num_layers,
                max_slots=self.config.max_num_seqs,
                max_model_len=self.config.max_model_len,
                max_pages=self.config.pages_per_slot,
                state=self.state,
                drafts=drafts,
            )
        self._kept_lists[key] = self.lists = lists
        while len(self._kept_lists) > SELECTORS_KEPT:
            dropped = self._kept_lists.pop(next(iter(self._kept_lists)))  # the longest unused
            if self._graphs is not None:
                self._graphs.forget(dropped)
        self.sync_pages()

    def sync_pages(self) -> None:
        """Copy the host's whole page table to the device (steps upload only what is new)."""
        owner, logical = np.nonzero(self._pages.table)
        self.block_table.copy_(torch.from_numpy(self._pages.table))
        self.lists.note_pages(np.stack([owner, logical, self._pages.table[owner, logical]], axis=1))

    @property
    def uses_graphs(self) -> bool:
        """Whether decode steps replay CUDA graphs."""
        return self._graphs is not None

    def replay_seconds(self) -> float:
        """GPU time of the newest graph, replayed alone; raises `EngineError` without graphs."""
        if self._graphs is None:
            raise EngineError("this engine runs eagerly and has no graph to replay; leave out enforce_eager")
        return self._graphs.replay_seconds()

    def launch(self, plan: StepPlan, forced: NDArray[np.int64] | None = None) -> Callable[[], StepResult]:
        """Start one step; the returned call waits for its result. The host is free to work in between, and to launch
        one more step. ``forced`` [rows]: drafts to accept in place of what the tokens say, -1 = none."""
        self._upload_state(plan)
        edits = _NO_EDITS
        if self._sequences.edits[plan.slots].any():
            edits = LogitEdits.of(plan, self._sequences, self.device)
        top = int(self._sequences.logprobs[plan.slots].max(initial=-1))
        if self._graphs is not None and edits.empty and top < 0:
            return self._graphs.launch(plan, forced)
        samples = max(1, plan.num_samples)  # an unfinished prefill samples nothing; one row keeps the shapes simple
        shape = Shape(plan.num_query_tokens, plan.num_rows, samples, len(plan.new_pages))
        host, view = host_buffer(shape.size, self.device.type == "cuda")
        self.fill(StepInput(shape, view), plan, forced)
        inp = StepInput(shape, host.to(self.device, non_blocking=True))
        packed, best = self.forward(inp, StepBounds.of(plan), edits, top)
        # copied now: asked for later, the copies would queue behind a step launched in between
        copies = [_to_host(each) for each in (packed, *(best or ()))]
        done = torch.cuda.Event() if self.device.type == "cuda" else None
        if done is not None:
            done.record()

        def wait() -> StepResult:
            if done is not None:
                done.synchronize()
            found, *top_two = [copy.numpy() for copy in copies]
            return self.unpack(found, plan, samples, (top_two[0], top_two[1]) if top_two else None)

        return wait

    def write_pages(self, entries: NDArray[np.int64]) -> None:
        """Enter new block-table entries [n, 3] ahead of a step that has no room for them in its input."""
        slot, logical, physical = to_device(entries.T, self.device)
        self._table[slot, logical] = physical.int()

    def fill(self, inp: StepInput, plan: StepPlan, forced: NDArray[np.int64] | None) -> None:
        """Write ``plan`` into the host input ``inp``."""
        inp.fill(plan, self._sequences, self.lists.selects and plan.selects, forced, self.config.max_num_seqs)

    @torch.inference_mode()
    def forward(
        self,
        inp: StepInput,
        bounds: StepBounds,
        edits: LogitEdits = _NO_EDITS,
        top: int = -1,
        before_layer: Callable[[int], None] | None = None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """The whole step on the device: model, sampling, acceptance, page lists. Returns the packed int32 results."""
        backend, lists = self.backend, self.lists
        weights = self.model.weights.layers
        config = self.model.config
        self._table[inp.page_slot.long(), inp.page_logical.long()] = inp.page_physical
        rows = inp.step_rows()
        at = backend.resolve(rows, self.state, self.block_table)
        state = lists.begin(inp, at, self.block_table, bounds)
        for batch in {id(state.mixed): state.mixed, id(state.full): state.full}.values():
            backend.prepare(
                batch, config.num_heads, config.num_kv_heads, config.head_dim, self.model.dtype, inp.shape.tokens
            )

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
            fused = self.model.qk_norm_in_attend
            q = backend.rope_and_kv_write(
                q,
                k,
                v,
                positions,
                at.slot_mapping,
                self._cos,
                self._sin,
                self.pool.keys[layer],
                self.pool.values[layer],
                q_weight=weights[layer].q_norm if fused else None,
                k_weight=weights[layer].k_norm if fused else None,
                eps=config.rms_norm_eps,
            )
            return lists.attend(state, layer, q, self.pool.keys[layer], self.pool.values[layer], self._scale)

        hidden = self.model.forward(at.input_ids, at.positions, attend, before_layer)
        logits = self.model.logits(hidden[inp.logit_row.long()])
        best = own = None
        if top >= 0 or not edits.empty:
            own = torch.log_softmax(logits, dim=-1)  # of the model's own logits, before they are edited
            best = _top(own, max(1, top)) if top >= 0 else None
        edits.apply(logits)
        slot = inp.sample_slot.long()
        sampling = {name: column[slot] for name, column in self._sampling.items()}
        sampled = backend.sample(logits, SamplingRows(position=at.sample_position, **sampling))
        logprob = sampled.logprob if own is None else own.gather(1, sampled.token.long()[:, None])[:, 0]
        window = lists.spec.kind == "window"
        accepted, length = backend.advance(rows, at, sampled.token, self.state, lists.budget, window)
        lists.finish(state, length)
        packed = torch.cat((sampled.token, sampled.margin.view(torch.int32), logprob.view(torch.int32), accepted))
        return packed, best

    @staticmethod
    def unpack(
        packed: NDArray[np.int32],
        plan: StepPlan,
        samples: int,
        best: tuple[NDArray[np.float32], NDArray[np.int32]] | None = None,
    ) -> StepResult:
        """Split the packed results of ``plan``, padded to ``samples`` samples."""
        rows, count = plan.num_rows, plan.num_samples
        return StepResult(
            tokens=packed[:count],
            margin=packed[samples : samples + count].view(np.float32),
            logprob=packed[2 * samples : 2 * samples + count].view(np.float32),
            accepted=packed[3 * samples : 3 * samples + rows],
            sample_start=plan.sample_start,
            top_logprobs=best,
        )

    def _upload_state(self, plan: StepPlan) -> None:
        """Sampling parameters of new requests, and the first pages where a window lists them."""
        self.lists.note_pages(plan.new_pages)
        changed = self._sequences.changed
        if changed:
            slots = np.unique(np.array(changed, dtype=np.int64))
            where = to_device(slots, self.device)
            for name, column in self._sequences.sampling.items():
                self._sampling[name][where] = to_device(column[slots], self.device)
            changed.clear()


def _top(logprobs: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Values and int32 tokens [rows, count] of the largest ``logprobs`` [rows, vocab]."""
    values, tokens = torch.topk(logprobs, count, dim=-1)
    return values, tokens.int()


def _to_host(tensor: Tensor) -> Tensor:
    """A copy on the host; of a CUDA tensor in page-locked memory, without waiting for it."""
    if tensor.device.type != "cuda":
        return tensor
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)
