"""Which KV pages a draft step reads, as data: the rule's parameters and the page arithmetic of engine and simulator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aspire.errors import UsageError, check_choice, check_keys

Ints = NDArray[np.int64]

PAGE_TOKENS = 16

SELECTOR_KINDS = ("window", "verify", "verify-per-layer", "refresh", "refresh-per-layer", "delta")


@dataclass(frozen=True)
class SelectorSpec:
    """Parameters of a page selector.

    A draft step reads ``budget = max(min_pages, ceil(budget_ratio * pages))`` pages: the ``sinks`` first, the
    ``recent`` newest and, for all kinds but ``window``, the pages with the most attention mass; ``window`` spends the
    whole budget on the newest. A context of at most ``budget`` pages is read in full.

    ``layer`` is the layer whose attention chooses a list shared by all layers (negative: from the end; the paper's N-2
    is -2). ``refresh-per-layer`` scores a page by its mass in each layer at verification, times (its mass in ``layer``
    now / at verification) to the power ``refresh_power``: 0 leaves the lists as they were. ``layers`` are the selection
    layers of ``delta``.
    """

    kind: str = "verify"
    budget_ratio: float = 0.07
    min_pages: int = 32
    sinks: int = 1
    recent: int = 8
    layer: int = -2
    refresh_power: float = 0.25
    layers: tuple[int, ...] = (2, 14, 22)

    def __post_init__(self) -> None:
        check_choice("selector", self.kind, SELECTOR_KINDS)
        if not 0.0 <= self.budget_ratio <= 1.0:
            raise UsageError(f"selector budget_ratio {self.budget_ratio} is not in 0..1; give a share of the pages")
        if self.sinks < 0:
            raise UsageError(f"selector sinks {self.sinks} is negative; give a number of pages >= 0")
        if not 0.0 <= self.refresh_power <= 1.0:
            raise UsageError(f"selector refresh_power {self.refresh_power} is not in 0..1; give 0 to refresh nothing")
        if self.recent < 1:
            raise UsageError(
                f"selector recent {self.recent} is too small; the newest page is always read, so give >= 1"
            )
        if self.min_pages < self.sinks + self.recent:
            raise UsageError(
                f"selector min_pages {self.min_pages} is below sinks + recent = {self.sinks + self.recent}; raise it"
            )

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SelectorSpec:
        """Build from a JSON object; unknown keys raise `UsageError`."""
        check_keys("selector", data, [field.name for field in fields(cls)])
        values = dict(data)
        if "layers" in values:
            values["layers"] = tuple(values["layers"])
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """The JSON object that `from_dict` reads."""
        return {**asdict(self), "layers": list(self.layers)}

    @property
    def needs_mass(self) -> bool:
        """Whether verification computes the attention mass of pages."""
        return self.kind != "window"

    @property
    def per_layer(self) -> bool:
        """Whether every layer has a list of its own."""
        return self.kind in ("verify-per-layer", "refresh-per-layer")

    def layer_index(self, num_layers: int) -> int:
        """``layer`` as an index in 0..num_layers-1; raises `UsageError` when it lies outside."""
        index = self.layer + num_layers if self.layer < 0 else self.layer
        if not 0 <= index < num_layers:
            raise UsageError(f"selector layer {self.layer} is outside the model's {num_layers} layers")
        return index

    def selection_layers(self, num_layers: int) -> tuple[int, ...]:
        """Layers that read everything in a draft step: none, the refresh layer, or delta's."""
        if self.kind in ("refresh", "refresh-per-layer"):
            return (self.layer_index(num_layers),)
        if self.kind == "delta":
            bad = [layer for layer in self.layers if not 0 <= layer < num_layers]
            if bad:
                raise UsageError(f"selector layers {bad} are outside the model's {num_layers} layers")
            return tuple(sorted({*range(min(2, num_layers)), *self.layers}))
        return ()

    def budget_pages(self, pages: Ints) -> Ints:
        """Pages that a draft step may read of contexts of ``pages`` pages.

        The product is rounded to float32 as on the device, so that host and device never disagree by one page.
        """
        wanted = np.ceil(np.float32(self.budget_ratio) * pages.astype(np.float32)).astype(np.int64)
        return np.asarray(np.minimum(pages, np.maximum(wanted, max(self.min_pages, self.recent))))

    def geometry(self, computed: Ints) -> tuple[Ints, Ints]:
        """``(sel_count, tail_page)`` of requests with ``computed`` committed KV tokens, seeded now.

        ``tail_page`` is the first logical page of the contiguous tail, ``sel_count`` the listed pages before it. The
        page that the next token is written to counts.
        """
        pages = computed // PAGE_TOKENS + 1
        budget = self.budget_pages(pages)
        if self.kind == "window":
            tail_page = np.maximum(pages - np.maximum(budget - self.sinks, 1), np.minimum(self.sinks, pages - 1))
            return np.minimum(self.sinks, tail_page), tail_page
        tail_page = np.maximum(0, pages - self.recent)
        return np.minimum(tail_page, np.maximum(0, budget - (pages - tail_page))), tail_page

    def max_selected(self, max_model_len: int) -> int:
        """Width of a page list: no context up to ``max_model_len`` tokens lists more pages before its tail."""
        pages = np.arange(1, max_model_len // PAGE_TOKENS + 2, dtype=np.int64)
        return max(1, int(self.geometry((pages - 1) * PAGE_TOKENS)[0].max()))
