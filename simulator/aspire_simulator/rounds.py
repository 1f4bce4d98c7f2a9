"""Recorded rounds of drafting: from an npz of recorded rounds or from a run directory; and outcomes by position."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from aspire.errors import InputError, check_choice
from aspire.rundir import read_run
from aspire.runlog import VERIFY, StepLog

Ints = NDArray[np.int64]
Singles = NDArray[np.float32]


@dataclass(frozen=True)
class Draws:
    """One entry per draft whose outcome was seen: accepted ones and the first rejected one of each round."""

    request: Ints
    index: Ints  # place in its round, from 0
    accepted: NDArray[np.bool_]
    after_accept: NDArray[np.bool_]  # the position before it was right (or committed without a draft to judge)


@dataclass(frozen=True)
class Rounds:
    """Verified rounds, ordered by request, then time."""

    request: Ints  # [rounds] from 0
    drafted: Ints  # [rounds] >= 1
    accepted: Ints  # [rounds]
    margin: Singles  # [rounds, longest draft], NaN where not drafted or unknown

    def __len__(self) -> int:
        return len(self.request)

    @classmethod
    def load(cls, path: str | Path, workload: str | None = None) -> Rounds:
        """From a run directory, or from an npz with ``<workload>_acc`` and ``<workload>_marg`` [rounds, requests(,
        drafts)].
        """
        source = Path(path)
        if source.is_dir():
            return cls.from_steps(read_run(source).steps)
        if not source.is_file():
            raise InputError(f"recorded rounds {source} do not exist; give a run directory or a rounds .npz")
        try:
            with np.load(source, allow_pickle=False) as arrays:
                names = sorted(name[: -len("_acc")] for name in arrays.files if name.endswith("_acc"))
                if not names:
                    raise InputError(f"{source} has no array named <workload>_acc; it is no file of recorded rounds")
                if workload is None and len(names) > 1:
                    raise InputError(f"{source} holds several workloads; choose one of: {', '.join(names)}")
                name = check_choice("recorded workload", workload or names[0], names)
                accepted, margin = arrays[f"{name}_acc"], arrays[f"{name}_marg"]
        except (ValueError, OSError, KeyError, zipfile.BadZipFile) as error:
            raise InputError(f"recorded rounds {source} cannot be read: {error}") from error
        rounds, requests = accepted.shape
        return cls(
            request=np.repeat(np.arange(requests), rounds),
            drafted=np.full(rounds * requests, margin.shape[2], dtype=np.int64),
            accepted=accepted.T.reshape(-1).astype(np.int64),
            margin=margin.transpose(1, 0, 2).reshape(rounds * requests, -1).astype(np.float32),
        )

    @classmethod
    def from_steps(cls, steps: StepLog) -> Rounds:
        """The verified rounds of a run that drafted at least one token."""
        request = steps.column("request")
        order = np.argsort(request, kind="stable")
        drafted = steps.column("drafted")[order]
        verified = np.flatnonzero((steps.column("mode")[order] == VERIFY) & (drafted > 0))
        if not len(verified):
            raise InputError("the run verified no drafts; record one with a policy that drafts, e.g. fixed")
        depth = drafted[verified].astype(np.int64)
        # the d rows of the request before its verification are its d draft rows, in order
        offsets = np.arange(int(depth.max()))
        index = np.minimum(verified[:, None] - depth[:, None] + offsets, len(order) - 1)
        margin = np.where(offsets < depth[:, None], steps.margin[order][index], np.nan).astype(np.float32)
        _, dense = np.unique(request[order][verified], return_inverse=True)
        return cls(dense.astype(np.int64), depth, steps.column("accepted")[order][verified].astype(np.int64), margin)

    def split(self, share: float = 0.5) -> tuple[Rounds, Rounds]:
        """(train, test): the first ``share`` of every request's rounds, and the rest."""
        counts = np.bincount(self.request)
        place = np.arange(len(self)) - (np.cumsum(counts) - counts)[self.request]
        early = place < np.ceil(share * counts)[self.request]
        return self.take(early), self.take(~early)

    def take(self, which: NDArray[np.bool_]) -> Rounds:
        """The rounds of the mask ``which``."""
        return Rounds(self.request[which], self.drafted[which], self.accepted[which], self.margin[which])

    def draws(self) -> Draws:
        """Every draft whose outcome was seen, in order."""
        seen = np.minimum(self.accepted + 1, self.drafted)
        owner = np.repeat(np.arange(len(self)), seen)
        index = np.arange(len(owner)) - np.repeat(np.cumsum(seen) - seen, seen)
        accepted = index < self.accepted[owner]
        rejected_before = np.zeros(len(self), dtype=bool)
        same = self.request[1:] == self.request[:-1]
        rejected_before[1:] = same & (self.accepted[:-1] < self.drafted[:-1])
        return Draws(self.request[owner], index, accepted, (index > 0) | ~rejected_before[owner])

    def margins_by_fate(self) -> tuple[Singles, Singles, Singles]:
        """Margins of accepted drafts, of first rejected ones, and of drafts behind a rejected one."""
        place = np.arange(self.margin.shape[1])
        accepted, drafted = self.accepted[:, None], self.drafted[:, None]
        return (
            self.margin[place < accepted],
            self.margin[(place == accepted) & (place < drafted)],
            self.margin[(place > accepted) & (place < drafted)],
        )


@dataclass(frozen=True)
class RecordedTraces:
    """Outcomes by output position: each request's seen drafts, one after the other.

    Positions whose outcome nobody saw (the bonus token behind a fully accepted draft) are left out. ``wrong_margin``
    holds, at the positions behind a rejection, the margins that the drafts behind it showed; elsewhere a margin of
    such a draft of the same recording.
    """

    first: Ints  # [requests + 1]: request i owns positions first[i]:first[i+1]
    accepted: NDArray[np.bool_]  # [positions]
    margin: Singles
    wrong_margin: Singles

    @classmethod
    def of(cls, rounds: Rounds) -> RecordedTraces:
        """Concatenate the rounds of each request."""
        draws = rounds.draws()
        seen = np.minimum(rounds.accepted + 1, rounds.drafted)
        owner = np.repeat(np.arange(len(rounds)), seen)
        margin = rounds.margin[owner, draws.index]
        pool = rounds.margins_by_fate()[2]
        pool = pool[np.isfinite(pool)]
        if not len(pool):
            pool = margin[np.isfinite(margin)] if np.isfinite(margin).any() else np.zeros(1, dtype=np.float32)
        rng = np.random.default_rng(0)
        wrong = rng.choice(pool, size=len(owner)).astype(np.float32)
        start = np.cumsum(seen) - seen
        limit = np.append(np.flatnonzero(np.diff(rounds.request)), len(rounds) - 1)
        end_of = (start + seen)[limit][np.searchsorted(limit, np.arange(len(rounds)))]
        # late rounds overwrite early ones, so that a position shows the margins of the rejection nearest before it
        for index in np.flatnonzero(rounds.accepted + 1 < rounds.drafted).tolist():
            behind = rounds.margin[index, int(rounds.accepted[index]) + 1 : int(rounds.drafted[index])]
            low = int(start[index] + seen[index])
            room = min(len(behind), int(end_of[index]) - low)
            wrong[low : low + room] = behind[:room]
        counts = np.bincount(draws.request)
        first = np.concatenate([[0], np.cumsum(counts)])
        return cls(first, draws.accepted, np.nan_to_num(margin, nan=0.0), np.nan_to_num(wrong, nan=0.0))

    def __len__(self) -> int:
        return len(self.first) - 1

    def window(self, request: int, rng: np.random.Generator, length: int) -> tuple[NDArray[np.bool_], Singles, Singles]:
        """(accepted, margin, wrong margin), each [length], of trace ``request`` mod n from a drawn start, wrapping."""
        trace = request % len(self)
        low, high = int(self.first[trace]), int(self.first[trace + 1])
        index = low + (int(rng.integers(high - low)) + np.arange(length)) % (high - low)
        return self.accepted[index], self.margin[index], self.wrong_margin[index]
