"""samples.jsonl: a header line, then one line per measured cell.

The file is append-safe: each line is written and synced whole, a torn last line (a killed run) is dropped with a
warning, and the same key measured again counts last. A file of other hardware, model or settings is refused with the
differences.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from aspire.errors import InputError, MismatchError, check_keys
from aspire.evidence import provenance
from aspire.fileio import write_text_atomic
from aspire.scheduler.features import FEATURES, Floats, StepFeatures
from aspire_calibration.cells import Cell

SCHEMA = "aspire-samples"
VERSION = 1
REMAKE = "measure again with `aspire profile`"
EARLIER_REST_S = 0.003  # before steps from idle in files that do not tell
UNSTEADY = 0.10  # relative spread between repeats above which a cell's median says little of its step
NOISE = 5.0  # or above so many times the spread of the median cell, on a machine that is noisy as a whole


@dataclass(frozen=True)
class SamplesHeader:
    """Where and with what the samples were measured. Plain JSON values only."""

    hardware: dict[str, Any]  # at least "name"; also driver, memory_bytes
    model: dict[str, Any]  # name and shape: layers, hidden, heads, kv_heads, head_dim, intermediate, vocab, dtype
    settings: dict[str, Any]  # attention back end, selector, eager or graphs, tensor parallel size, ...
    versions: dict[str, Any] = field(default_factory=dict)
    clocks: dict[str, Any] = field(default_factory=dict)  # informative: never compared
    num_pages: int | None = None
    graph_buckets: tuple[int, ...] = ()
    page_size: int = 16
    full_layer_share: float = 0.0  # share of layers that a draft step runs with full attention (refresh, delta)
    select_layer_share: float = 1.0  # share of layers whose page mass a selecting verification computes
    command: str = ""  # informative: never compared

    @classmethod
    def of_this_machine(
        cls,
        model: dict[str, Any],
        settings: dict[str, Any],
        *,
        num_pages: int,
        graph_buckets: Sequence[int] = (),
        page_size: int = 16,
        full_layer_share: float = 0.0,
        select_layer_share: float = 1.0,
        command: str = "",
    ) -> SamplesHeader:
        """Header with the hardware, driver, clocks and library versions of this machine, as in evidence files."""
        here = provenance(command or None)
        return cls(
            hardware={"name": here["hardware"], "driver": here["driver"]},
            model=model,
            settings=settings,
            versions={name: here[name] for name in ("torch", "triton", "numpy")},
            clocks=here["clocks"] or {},
            num_pages=num_pages,
            graph_buckets=tuple(graph_buckets),
            page_size=page_size,
            full_layer_share=full_layer_share,
            select_layer_share=select_layer_share,
            command=here["command"],
        )

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, "version": VERSION, **asdict(self), "graph_buckets": list(self.graph_buckets)}

    @classmethod
    def from_json(cls, data: Any, source: str = "samples file") -> SamplesHeader:
        """Parse a header line; raises `InputError` for another schema or version, `UsageError` for unknown keys."""
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            raise InputError(f"{source} does not begin with an {SCHEMA} header; {REMAKE}")
        if data.get("version") != VERSION:
            raise InputError(f"{source} has version {data.get('version')}, this release reads {VERSION}; {REMAKE}")
        values = {key: value for key, value in data.items() if key not in ("schema", "version")}
        check_keys(f"the header of {source}", values, cls.__dataclass_fields__)
        missing = [name for name in ("hardware", "model", "settings") if not isinstance(values.get(name), dict)]
        if missing:
            raise InputError(f"the header of {source} lacks {', '.join(missing)}; {REMAKE}")
        return cls(**{**values, "graph_buckets": tuple(values.get("graph_buckets", ()))})

    def features_of(self, cell: Cell) -> StepFeatures:
        """Features (0-d) of a cell in this setup."""
        return cell.features(
            self.graph_buckets, full_layer_share=self.full_layer_share, select_layer_share=self.select_layer_share
        )

    def differences(self, other: SamplesHeader) -> list[str]:
        """``key: mine is not other's`` for all that decides step times; empty when the samples may be mixed."""
        found = []
        for part in ("hardware", "model", "settings", "versions"):
            found += dict_differences(part, getattr(self, part), getattr(other, part))
        for part in ("num_pages", "graph_buckets", "page_size", "full_layer_share", "select_layer_share"):
            if getattr(self, part) != getattr(other, part):
                found.append(f"{part}: {_short(getattr(self, part))} is not {_short(getattr(other, part))}")
        return found


def dict_differences(what: str, mine: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """``what.key: a is not b`` for each key on which two flat dictionaries differ."""
    return [
        f"{what}.{key}: {_short(mine.get(key))} is not {_short(other.get(key))}"
        for key in sorted({*mine, *other})
        if mine.get(key) != other.get(key)
    ]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


@dataclass(frozen=True)
class Sample:
    """One measured cell."""

    cell: Cell
    features: StepFeatures  # 0-d
    repeats_s: tuple[float, ...]
    skipped: str = ""  # reason why the cell could not be measured; then there are no repeats
    took_s: float = 0.0  # wall time that measuring the cell took, set-up and warm-up included
    visits: int = 1  # times at which it was measured, far apart

    @property
    def median_s(self) -> float:
        return float(np.median(self.repeats_s)) if self.repeats_s else float("nan")

    @property
    def spread(self) -> float:
        """Interquartile range over median."""
        return relative_spread(self.repeats_s)

    def undisturbed(self) -> Sample:
        """Without the visits that took over `UNSTEADY` longer than the fastest, where two or more are left: what else a
        machine does only lengthens steps, for as long as a visit lasts or longer."""
        if self.visits < 3 or len(self.repeats_s) % self.visits:
            return self
        visits = np.reshape(self.repeats_s, (self.visits, -1))
        medians = np.median(visits, axis=1)
        kept = medians <= (1.0 + UNSTEADY) * medians.min()
        if kept.all() or np.count_nonzero(kept) < 2:
            return self
        return replace(self, repeats_s=tuple(visits[kept].ravel().tolist()), visits=int(np.count_nonzero(kept)))

    def joined(self, later: Sample) -> Sample:
        """This sample with the repeats of a later visit; a visit that was skipped adds nothing but its time."""
        took_s = self.took_s + later.took_s
        repeats = self.repeats_s + later.repeats_s
        return replace(self, repeats_s=repeats, took_s=took_s, visits=self.visits + 1)

    def to_json(self) -> dict[str, Any]:
        head = {
            "key": self.cell.key,
            "regime": self.cell.regime,
            "heldout": self.cell.heldout,
            "rest_s": self.cell.rest_s,
            "cell": self.cell.to_json(),
        }
        if self.skipped:
            return {**head, "skipped": self.skipped, "took_s": self.took_s}
        return {
            **head,
            "median_s": self.median_s,
            "spread": self.spread,
            "repeats_s": list(self.repeats_s),
            "took_s": self.took_s,
            "visits": self.visits,
        }

    @classmethod
    def from_json(cls, data: Any, header: SamplesHeader) -> Sample:
        """Inverse of `to_json`; the features are those of the cell, whatever earlier releases wrote beside it."""
        rest_s = float(data.get("rest_s", EARLIER_REST_S if data.get("idle", False) else 0.0))
        cell = Cell.from_json(data["cell"], heldout=bool(data.get("heldout", False)), rest_s=rest_s)
        repeats = tuple(float(value) for value in data.get("repeats_s", ()))
        if not repeats and "skipped" not in data:
            raise ValueError("no repeats_s")
        if not all(np.isfinite(value) and value > 0 for value in repeats):
            raise ValueError("repeats_s must be positive and finite")
        skipped, took_s = str(data.get("skipped", "")), float(data.get("took_s", 0.0))
        return cls(cell, header.features_of(cell), repeats, skipped, took_s, int(data.get("visits", 1)))


def relative_spread(repeats_s: Sequence[float]) -> float:
    """Interquartile range of the repeats over their median; 0 for a single repeat."""
    if len(repeats_s) < 2:
        return 0.0
    low, middle, high = np.percentile(repeats_s, [25, 50, 75])
    return float((high - low) / middle)


@dataclass(frozen=True)
class Samples:
    """A read samples file: last measurement of every key, in order of first appearance."""

    header: SamplesHeader
    by_key: dict[str, Sample]

    @property
    def measured(self) -> list[Sample]:
        """Those that were not skipped; without the cells that start from idle, which `idle` holds."""
        return [sample for sample in self.by_key.values() if not sample.skipped and not sample.cell.idle]

    @property
    def idle(self) -> list[Sample]:
        """Measured cells that start from idle."""
        return [sample for sample in self.by_key.values() if not sample.skipped and sample.cell.idle]

    def steady(self) -> Samples:
        """Without disturbed visits (`Sample.undisturbed`), and without the cells whose repeats disagree all the same:
        those that spread by more than `UNSTEADY`, and by more than `NOISE` times as much as the median cell."""
        by_key = {key: sample if sample.cell.idle else sample.undisturbed() for key, sample in self.by_key.items()}
        measured = Samples(self.header, by_key).measured
        most = max(UNSTEADY, NOISE * float(np.median([s.spread for s in measured]))) if measured else UNSTEADY
        unsteady = {s.cell.key for s in measured if s.spread > most}
        return Samples(self.header, {key: sample for key, sample in by_key.items() if key not in unsteady})

    def matrix(self) -> tuple[Floats, Floats]:
        """(features [samples, len(FEATURES)], medians [samples] in seconds) of the measured cells."""
        measured = self.measured
        if not measured:
            return np.zeros((0, len(FEATURES))), np.zeros(0)
        return np.stack([s.features.matrix() for s in measured]), np.array([s.median_s for s in measured])

    def heldout(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """[samples]: True for the cells that the plan marked held-out."""
        return np.array([sample.cell.heldout for sample in self.measured], dtype=bool)

    def within(self, budget_s: float) -> Samples:
        """The cells that a profile of ``budget_s`` seconds would have measured: the first ones, by time taken."""
        spent, kept = 0.0, {}
        for key, sample in self.by_key.items():
            spent += sample.took_s
            if spent > budget_s:
                break
            kept[key] = sample
        return Samples(self.header, kept)

    def data_hash(self) -> str:
        """Short digest of features and repeats, independent of the order of lines."""
        digest = hashlib.sha256()
        for key in sorted(self.by_key):
            digest.update(json.dumps([key, self.by_key[key].repeats_s]).encode())
        return digest.hexdigest()[:16]


def read_samples(path: str | Path) -> Samples:
    """Read a samples file; a torn last line is dropped with a warning. Raises `InputError` that names file and line."""
    return _parse(Path(path))[0]


def _parse(path: Path) -> tuple[Samples, int]:
    """(samples, number of bytes up to the last whole line)."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError as error:
        raise InputError(f"samples file {path} does not exist; check the path, or {REMAKE}") from error
    except OSError as error:
        raise InputError(f"samples file {path} cannot be read: {error.strerror or error}") from error
    lines = raw.split(b"\n")
    torn = lines.pop()  # what follows the last newline
    good_bytes = len(raw) - len(torn)
    if not lines:
        raise InputError(f"samples file {path} has no complete header line; {REMAKE}")
    if torn:
        warnings.warn(f"{path}: the last line is incomplete (a killed run) and is dropped", stacklevel=3)
    header: SamplesHeader | None = None
    by_key: dict[str, Sample] = {}
    for number, line in enumerate(lines, start=1):
        try:
            data = json.loads(line)
            if header is None:
                header = SamplesHeader.from_json(data, f"samples file {path}")
                continue
            sample = Sample.from_json(data, header)
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"samples file {path}, line {number} is not a sample ({error}); remove the line or {REMAKE}"
            ) from error
        by_key[sample.cell.key] = sample
    if header is None:
        raise InputError(f"samples file {path} has no header line; {REMAKE}")
    return Samples(header, by_key), good_bytes


class SamplesWriter:
    """Appends samples to a file; continues one that is there when its header agrees.

    Raises `MismatchError` with the differences when the file was made for other hardware, model, settings or versions.
    """

    def __init__(self, path: str | Path, header: SamplesHeader) -> None:
        self.path = Path(path)
        self.header = header
        self.done: dict[str, Sample] = {}
        if self.path.exists() and self.path.stat().st_size > 0:
            samples, good_bytes = _parse(self.path)
            if differences := samples.header.differences(header):
                raise MismatchError(
                    f"{self.path} holds samples of another setup ({'; '.join(differences)}); "
                    "give another --output or remove it"
                )
            self.header, self.done = samples.header, dict(samples.by_key)
            if good_bytes < self.path.stat().st_size:
                os.truncate(self.path, good_bytes)
        else:
            write_text_atomic(self.path, json.dumps(header.to_json(), allow_nan=False) + "\n")

    def append(self, sample: Sample) -> None:
        """Write one line and sync it to disk."""
        line = json.dumps(sample.to_json(), allow_nan=False) + "\n"
        try:
            with open(self.path, "ab") as stream:
                stream.write(line.encode())
                stream.flush()
                os.fsync(stream.fileno())
        except OSError as error:
            raise InputError(
                f"cannot append to {self.path}: {error.strerror or error}; free space or choose another path"
            ) from error
        self.done[sample.cell.key] = sample

    def compact(self) -> None:
        """Rewrite the file with one line per cell: visiting a cell again appended another."""
        lines = [self.header.to_json(), *(sample.to_json() for sample in self.done.values())]
        write_text_atomic(self.path, "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines))


def merge_samples(many: Sequence[Samples]) -> Samples:
    """One set from files of one setup; raises `MismatchError` that spells out the differences otherwise."""
    if not many:
        raise InputError("no samples given; pass at least one samples.jsonl")
    for other in many[1:]:
        if differences := many[0].header.differences(other.header):
            raise MismatchError(
                f"samples of different setups cannot be mixed ({'; '.join(differences)}); calibrate them apart"
            )
    return Samples(many[0].header, {key: sample for samples in many for key, sample in samples.by_key.items()})
