"""Equal prefixes of many requests as two numbers each: an earlier request, and how many tokens are shared with it.

So a run records what its scheduler knew of prefixes, and a trace tells what the simulator's scheduler shall find.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from aspire.scheduler.prefix_cache import Name
from aspire.scheduler.selector_spec import PAGE_TOKENS

Ints = NDArray[np.int64]


def shared_prefixes(names: Sequence[Sequence[Name]], block_tokens: int = PAGE_TOKENS) -> tuple[Ints, Ints]:
    """``(prefix_of, prefix_tokens)`` [requests] of the chained names of each request's blocks.

    ``prefix_of`` is the first request with the longest equal prefix, -1 if none has an equal first block.
    """
    owner: dict[Name, int] = {}
    prefix_of = np.full(len(names), -1, dtype=np.int64)
    blocks = np.zeros(len(names), dtype=np.int64)
    for index, chain in enumerate(names):
        shared = next((place for place, name in enumerate(chain) if name not in owner), len(chain))
        if shared:
            prefix_of[index], blocks[index] = owner[chain[shared - 1]], shared
        owner.update(dict.fromkeys(chain[shared:], index))
    return prefix_of, blocks * block_tokens


def names_from_links(prefix_of: Ints, prefix_tokens: Ints, tokens: Ints) -> list[Sequence[int]]:
    """Names for the full pages of ``tokens`` [requests] tokens, equal exactly where the links say so.

    The inverse of `shared_prefixes`. A link to a later request counts as none.
    """
    names: list[Sequence[int]] = []
    links = zip(prefix_of.tolist(), prefix_tokens.tolist(), tokens.tolist(), strict=True)
    for index, (parent, shared_tokens, count) in enumerate(links):
        own = range(index << 32, (index << 32) + count // PAGE_TOKENS)
        shared = shared_tokens // PAGE_TOKENS if 0 <= parent < index else 0
        names.append((*names[parent][:shared], *own[min(shared, len(names[parent])) :])[: len(own)] if shared else own)
    return names


def links_among(chosen: Ints, prefix_of: Ints, prefix_tokens: Ints) -> tuple[Ints, Ints]:
    """Links of the requests ``chosen`` (indices, in their new order); those to others, or to later ones, are cut."""
    place = np.full(len(prefix_of) + 1, -1, dtype=np.int64)  # the last entry: of no request
    place[chosen] = np.arange(len(chosen))
    parent = place[prefix_of[chosen]]
    parent[parent >= np.arange(len(chosen))] = -1
    return parent, np.where(parent < 0, 0, prefix_tokens[chosen])
