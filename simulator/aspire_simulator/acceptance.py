"""Acceptance models: is the next draft accepted, and how large is its margin?

Under shared sampling noise the text of a request does not depend on the schedule, and a draft is accepted iff it equals
that text. So the outcome belongs to *(request, output position)*, not to the round that happens to draft it. A model
therefore draws, once per request, everything that any policy could ask (`Outcomes`): all policies see common random
numbers, whatever their batches, preemptions or draft lengths.

| kind     | a draft at position k of the output, j-th of its round, is accepted with probability        |
|----------|---------------------------------------------------------------------------------------------|
| iid      | alpha                                                                                       |
| position | rates[j] (the last one beyond its end): staleness of the page list                          |
| markov   | after_accept or after_reject, by the outcome at position k - 1: runs of easy and hard text    |
| beta     | alpha_i ~ low + (high - low) Beta(a, b) of its request: requests differ                       |
| recorded | as recorded, with the recorded margins                                                       |
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.random.bit_generator import ISeedSequence
from numpy.typing import NDArray

from aspire.errors import InputError, UsageError, check_choice, check_keys
from aspire.fileio import read_json, write_json_atomic
from aspire_simulator.margins import MarginModel
from aspire_simulator.rounds import RecordedTraces, Rounds

Singles = NDArray[np.float32]
Floats = NDArray[np.float64]
ACCEPTANCE_VERSION = 1
_STREAM = 0xA5B1  # keeps these draws apart from arrivals and lengths of the same seed


@dataclass(frozen=True)
class Outcomes:
    """All that can happen to the drafts of one request, by output position k (0 = first generated token).

    A draft at position k, j-th of its round, whose predecessors were right, is right iff ``difficulty[k] < gain[j]``
    with the model's ``gain``. Its margin is ``accepted_margin[k]`` or ``rejected_margin[k]``; a draft behind a wrong
    one shows
    ``wrong_margin[k]``. All float32 [positions].
    """

    difficulty: Singles
    accepted_margin: Singles
    rejected_margin: Singles
    wrong_margin: Singles


@dataclass(frozen=True)
class AcceptanceModel(ABC):
    """Draws the outcomes of requests. Models are data: `to_dict` and `acceptance_from_dict`."""

    kind: ClassVar[str]
    margins: MarginModel = field(default_factory=MarginModel, kw_only=True)
    provenance: Mapping[str, Any] = field(default_factory=dict, kw_only=True, compare=False)

    @property
    def gain(self) -> Singles:
        """[1 or more]: threshold by draft index; the last entry holds for all later ones."""
        return np.zeros(1, dtype=np.float32)

    @abstractmethod
    def draw(self, seed: int, request: int, length: int) -> Outcomes:
        """Outcomes of the first ``length`` output positions of request number ``request``; a function of the
        arguments.
        """

    def to_dict(self) -> dict[str, Any]:
        """JSON object of the model."""
        return {"version": ACCEPTANCE_VERSION, "kind": self.kind, **asdict(self)}

    def save(self, path: str | Path) -> Path:
        """Write acceptance.json."""
        return write_json_atomic(path, self.to_dict())

    @property
    def label(self) -> str:
        """Short name for tables."""
        return self.kind


class RandomAcceptance(AcceptanceModel):
    """A model that draws its outcomes, and so has a likelihood; the others read recorded ones."""

    @abstractmethod
    def _difficulty(self, rng: np.random.Generator, length: int) -> Floats:
        """[length]: below ``gain`` where the draft is right."""

    def draw(self, seed: int, request: int, length: int) -> Outcomes:
        rng = _generator(seed, request)
        difficulty = self._difficulty(rng, length).astype(np.float32)
        return Outcomes(difficulty, *self.margins.draw(rng, length))

    @abstractmethod
    def log_likelihood(self, train: Rounds, test: Rounds) -> Floats:
        """[draws of test]: log probability of each outcome; requests' own effects may be learned from ``train``."""


class _Key(ISeedSequence):
    """The key of a Philox, as its seed sequence: one that is given a ``key`` asks the system for entropy, for nothing,
    and takes several times as long to make."""

    def __init__(self, *key: int) -> None:
        self._key = key

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> NDArray[Any]:
        return np.array(self._key, dtype=dtype)


def _generator(seed: int, request: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(_Key((seed << 16) ^ _STREAM, request)))  # type: ignore[arg-type]


def _check_rate(what: str, *rates: float) -> None:
    for rate in rates:
        if not 0.0 <= rate <= 1.0:
            raise UsageError(f"acceptance {what} {rate} is not in 0..1")


def _log_bernoulli(p: Any, accepted: NDArray[np.bool_]) -> Floats:
    clipped = np.clip(p, 1e-6, 1 - 1e-6)
    return np.asarray(np.where(accepted, np.log(clipped), np.log1p(-clipped)), dtype=np.float64)


@dataclass(frozen=True)
class Iid(RandomAcceptance):
    """Every draft is accepted with probability ``alpha``: the paper's assumption."""

    kind = "iid"
    alpha: float = 0.9

    def __post_init__(self) -> None:
        _check_rate("rate alpha", self.alpha)

    def _difficulty(self, rng: np.random.Generator, length: int) -> Floats:
        return rng.random(length) - self.alpha

    def log_likelihood(self, train: Rounds, test: Rounds) -> Floats:
        return _log_bernoulli(self.alpha, test.draws().accepted)


@dataclass(frozen=True)
class ByPosition(RandomAcceptance):
    """The j-th draft of a round is accepted with probability ``rates[j]`` given that those before it were."""

    kind = "position"
    rates: tuple[float, ...] = (0.9,)

    def __post_init__(self) -> None:
        if not self.rates:
            raise UsageError("acceptance model 'position' needs at least one rate")
        _check_rate("rate by position", *self.rates)

    @property
    def gain(self) -> Singles:
        return np.asarray(self.rates, dtype=np.float32)

    def _difficulty(self, rng: np.random.Generator, length: int) -> Floats:
        return rng.random(length)

    def log_likelihood(self, train: Rounds, test: Rounds) -> Floats:
        draws = test.draws()
        return _log_bernoulli(np.asarray(self.rates)[np.minimum(draws.index, len(self.rates) - 1)], draws.accepted)


@dataclass(frozen=True)
class Markov(RandomAcceptance):
    """Acceptance depends on the outcome at the position before; the first position is drawn from the stationary law."""

    kind = "markov"
    after_accept: float = 0.93
    after_reject: float = 0.8

    def __post_init__(self) -> None:
        _check_rate("rate", self.after_accept, self.after_reject)

    @property
    def stationary(self) -> float:
        """Long-run acceptance rate."""
        leave = 1.0 - self.after_accept + self.after_reject
        return self.after_reject / leave if leave > 0 else 1.0

    def _difficulty(self, rng: np.random.Generator, length: int) -> Floats:
        u = rng.random(length)
        if not length:
            return u
        # u below both rates accepts, above both rejects; between them the outcome copies or negates the one before
        low, high = sorted((self.after_accept, self.after_reject))
        certain = (u < low) | (u >= high)
        certain[0] = True
        outcome = u < low
        outcome[0] = u[0] < self.stationary
        last = np.maximum.accumulate(np.where(certain, np.arange(length), 0))
        outcome = outcome[last]
        if self.after_accept < self.after_reject:
            outcome ^= ((np.arange(length) - last) % 2).astype(bool)
        return np.where(outcome, -1.0, 1.0)

    def log_likelihood(self, train: Rounds, test: Rounds) -> Floats:
        draws = test.draws()
        return _log_bernoulli(np.where(draws.after_accept, self.after_accept, self.after_reject), draws.accepted)


@dataclass(frozen=True)
class BetaEffect(RandomAcceptance):
    """Each request has a rate of its own; with ``as_run_length`` the scaled Beta is its mean run of accepted drafts."""

    kind = "beta"
    a: float = 9.0
    b: float = 1.0
    low: float = 0.0
    high: float = 1.0
    as_run_length: bool = False

    def __post_init__(self) -> None:
        if not (self.a > 0 and self.b > 0):
            raise UsageError(f"acceptance model 'beta' needs a > 0 and b > 0, not {self.a}, {self.b}")
        if not 0.0 <= self.low < self.high or (self.high > 1.0 and not self.as_run_length):
            raise UsageError(f"acceptance model 'beta' needs 0 <= low < high <= 1, not {self.low}, {self.high}")

    def rate(self, rng: np.random.Generator) -> float:
        """Draw the acceptance rate of one request."""
        value = self.low + (self.high - self.low) * rng.beta(self.a, self.b)
        return value / (1.0 + value) if self.as_run_length else value

    def _difficulty(self, rng: np.random.Generator, length: int) -> Floats:
        alpha = self.rate(rng)
        return rng.random(length) - alpha

    def log_likelihood(self, train: Rounds, test: Rounds) -> Floats:
        if self.as_run_length or (self.low, self.high) != (0.0, 1.0):
            raise UsageError("the likelihood of a 'beta' model needs low=0, high=1 and rates, not run lengths")
        learned, draws = train.draws(), test.draws()
        count = 1 + int(max(learned.request.max(initial=0), draws.request.max(initial=0)))
        accepted = np.bincount(learned.request, weights=learned.accepted, minlength=count)
        seen = np.bincount(learned.request, minlength=count)
        rate = (self.a + accepted) / (self.a + self.b + seen)
        return _log_bernoulli(rate[draws.request], draws.accepted)


@dataclass(frozen=True)
class Recorded(AcceptanceModel):
    """Replays recorded requests: request i follows trace i mod n from a drawn start, around its end to its
    beginning.
    """

    kind = "recorded"
    path: str = ""
    workload: str = ""
    traces: RecordedTraces | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.traces is None:
            object.__setattr__(self, "traces", RecordedTraces.of(Rounds.load(self.path, self.workload or None)))

    @property
    def _loaded(self) -> RecordedTraces:
        if self.traces is None:
            raise InputError("this recorded acceptance model has no traces; give the path of a recording")
        return self.traces

    def draw(self, seed: int, request: int, length: int) -> Outcomes:
        accepted, margin, wrong = self._loaded.window(request, _generator(seed, request), length)
        difficulty = np.where(accepted, -1.0, 1.0).astype(np.float32)
        return Outcomes(difficulty, margin, margin, wrong)

    def log_likelihood(self, train: Rounds, test: Rounds) -> Floats:
        raise UsageError("a recorded acceptance model has no likelihood; compare fitted models")

    def to_dict(self) -> dict[str, Any]:
        return {"version": ACCEPTANCE_VERSION, "kind": self.kind, "path": self.path, "workload": self.workload}

    @property
    def label(self) -> str:
        return f"recorded {self.workload}".strip()


# Spread of the accepted length per request in the ASPIRE paper (arXiv 2609.17943): 2.6 to 20, mean 11.5. Read as the
# request's mean run of accepted drafts before the first rejection, L = alpha / (1 - alpha), drawn as 2.6 + 17.4 Beta
# with that mean.
LONGBENCH_LIKE = BetaEffect(a=1.023, b=0.977, low=2.6, high=20.0, as_run_length=True)

MODELS: dict[str, type[AcceptanceModel]] = {m.kind: m for m in (Iid, ByPosition, Markov, BetaEffect, Recorded)}
_FORMS: dict[str, tuple[str, Callable[[list[float]], AcceptanceModel]]] = {
    "iid": ("iid:RATE", lambda v: Iid(*v)),
    "position": ("position:RATE,RATE,...", lambda v: ByPosition(tuple(v))),
    "markov": ("markov:AFTER_ACCEPT,AFTER_REJECT", lambda v: Markov(*v)),
    "beta": ("beta:A,B", lambda v: BetaEffect(a=v[0], b=v[1])),
}


def acceptance_from_dict(data: Any, source: str = "acceptance model") -> AcceptanceModel:
    """Read the object of `AcceptanceModel.to_dict`; unknown kinds and keys raise `UsageError`."""
    if not isinstance(data, dict) or "kind" not in data:
        raise InputError(f"{source} has no 'kind'; make it with: aspire fit-acceptance")
    kind = check_choice("acceptance model", data["kind"], MODELS)
    if data.get("version", ACCEPTANCE_VERSION) != ACCEPTANCE_VERSION:
        raise InputError(
            f"{source} has version {data['version']}; this program reads {ACCEPTANCE_VERSION}, fit it again"
        )
    cls = MODELS[kind]
    values = {key: value for key, value in data.items() if key not in ("kind", "version")}
    check_keys(source, values, [name for name in cls.__dataclass_fields__ if name not in ("kind", "traces")])
    if "margins" in values:
        values["margins"] = MarginModel.from_dict(values["margins"])
    if "rates" in values:
        values["rates"] = tuple(values["rates"])
    try:
        return cls(**values)
    except TypeError as error:
        raise InputError(f"{source}: {error}") from error


def parse_acceptance(text: str) -> AcceptanceModel:
    """A model from ``iid:0.9``, ``position:0.9,0.85``, ``markov:0.95,0.7``, ``beta:9,1``, ``longbench-like``,
    ``recorded:FILE[:WORKLOAD]`` (rounds npz or run directory) or an acceptance.json.
    """
    if text == "longbench-like":
        return LONGBENCH_LIKE
    if text.endswith(".json"):
        return acceptance_from_dict(read_json(text, "acceptance file"), f"acceptance file {text}")
    kind, _, rest = text.partition(":")
    if kind == "recorded":
        path, _, workload = rest.partition(":")
        return Recorded(path, workload)
    check_choice("acceptance model", kind, [*_FORMS, "recorded", "longbench-like"])
    form, build = _FORMS[kind]
    try:
        return build([float(word) for word in rest.split(",") if word])
    except (ValueError, TypeError, IndexError) as error:
        raise UsageError(f"acceptance model '{text}' is not {form}") from error
