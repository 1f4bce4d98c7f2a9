"""cost_model.json: what a step costs, where that holds, and how well it was checked.

`CostModelFile` is the file, `LoadedCostModel` (module `predict`) answers the scheduler. Readable JSON: terms with
units, feature definitions, valid ranges, held-out error per regime, bootstrap intervals, and the setup it was
measured on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from aspire.errors import AspireError, InputError, MismatchError, UsageError, check_choice, check_keys
from aspire.fileio import read_json, write_json_atomic
from aspire.scheduler.features import FEATURES, Floats
from aspire_calibration.forms import Fitted, fitted_from_json
from aspire_calibration.samples import SamplesHeader, dict_differences
from aspire_calibration.score import ErrorReport
from aspire_calibration.variables import VARIABLES

SCHEMA = "aspire-cost-model"
VERSION = 1
KINDS = ("measured", "analytic", "scaled")
REMAKE = "make it again with `aspire calibrate`"
# Parts of the hardware, model and settings that do not decide step times.
INFORMATIVE = ("name_or_path", "driver", "memory_bytes", "label", "revision", "weights", "host", "cores_used")


@dataclass(frozen=True)
class CostModelFile:
    """The content of a cost_model.json."""

    kind: str  # measured, analytic (public figures) or scaled (carried from another GPU)
    form: str  # name of the fitted form
    fitted: Fitted
    hardware: dict[str, Any]
    model: dict[str, Any]
    settings: dict[str, Any]
    ranges: dict[str, tuple[float, float]]  # per feature: smallest and largest fitted value; empty = not bounded
    graph_buckets: tuple[int, ...] = ()
    num_pages: int | None = None
    page_size: int = 16
    start_latency: tuple[tuple[float, float], ...] = ()  # after a rest of so many seconds a step takes so much longer
    start_latency_per_request_s: float = 0.0  # and so much for each request beyond the first that begins in it
    versions: dict[str, Any] = field(default_factory=dict)
    clocks: dict[str, Any] = field(default_factory=dict)
    accuracy: dict[str, dict[str, float]] = field(default_factory=dict)  # held-out, per regime
    comparison: list[dict[str, Any]] = field(default_factory=list)  # all forms that were tried
    intervals: dict[str, dict[str, float]] = field(default_factory=dict)  # bootstrap, see fit.py
    data: dict[str, Any] = field(default_factory=dict)  # hash, cells, spread, seed
    limits: list[str] = field(default_factory=list)  # known limits, in words

    def __post_init__(self) -> None:
        check_choice("kind of cost model", self.kind, KINDS)

    def to_json(self) -> dict[str, Any]:
        body = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "fitted"}
        body |= {
            "fitted": self.fitted.to_json(),
            "graph_buckets": list(self.graph_buckets),
            "ranges": {name: list(pair) for name, pair in self.ranges.items()},
        }
        definitions = {name: {"unit": unit, "is": text} for name, (unit, text) in VARIABLES.items()}
        return {"schema": SCHEMA, "version": VERSION, **body, "features": definitions}

    def save(self, path: str | Path) -> Path:
        """Write the file in one piece."""
        return write_json_atomic(path, self.to_json())

    @classmethod
    def from_json(cls, data: Any, source: str = "cost model") -> CostModelFile:
        """Validate and build; raises `InputError` or `UsageError` (unknown keys, with a suggestion)."""
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            raise InputError(f"{source} is not a cost model (no schema '{SCHEMA}'); {REMAKE}")
        if data.get("version") != VERSION:
            raise InputError(f"{source} has version {data.get('version')}, this release reads {VERSION}; {REMAKE}")
        values = {key: value for key, value in data.items() if key not in ("schema", "version", "features")}
        if "start_latency_s" in values:  # of earlier releases: one latency, whatever the rest before it
            values["start_latency"] = [(1.0, values.pop("start_latency_s"))]
        check_keys(source, values, cls.__dataclass_fields__)
        required = ("kind", "form", "fitted", "hardware", "model", "settings", "ranges")
        if missing := [name for name in required if name not in values]:
            raise InputError(f"{source} lacks {', '.join(missing)}; {REMAKE}")
        for name in ("fitted", "hardware", "model", "settings", "ranges", "accuracy"):
            if not isinstance(values.get(name, {}), dict):
                raise InputError(f"{source}: {name} must be an object; {REMAKE}")
        if unknown := [name for name in values["ranges"] if name not in FEATURES]:
            raise InputError(f"{source} is of features that steps do not have: {', '.join(unknown)}; {REMAKE}")
        try:
            ranges = {name: (float(low), float(high)) for name, (low, high) in values["ranges"].items()}
            fitted = fitted_from_json(values["fitted"])
            buckets = tuple(int(size) for size in values.get("graph_buckets", ()))
            start = tuple((float(rest), float(more)) for rest, more in values.get("start_latency", ()))
            per_request_s = float(values.get("start_latency_per_request_s", 0.0))  # earlier releases: not told apart
        except AspireError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{source} is damaged ({type(error).__name__}: {error}); {REMAKE}") from error
        if not all(rest > 0 and 0 <= more < np.inf for rest, more in start) or list(start) != sorted(start):
            raise InputError(
                f"{source}: start_latency must be pairs of a rest > 0 and finite seconds >= 0, by rest, got {start}; "
                f"{REMAKE}"
            )
        if not 0 <= per_request_s < np.inf:
            raise InputError(
                f"{source}: start_latency_per_request_s must be finite seconds >= 0, got {per_request_s}; {REMAKE}"
            )
        parsed = {"ranges": ranges, "fitted": fitted, "graph_buckets": buckets, "start_latency": start}
        return cls(**{**values, **parsed, "start_latency_per_request_s": per_request_s})

    @classmethod
    def load(cls, path: str | Path) -> CostModelFile:
        """Read and validate a cost_model.json."""
        return cls.from_json(read_json(path, "cost model"), f"cost model {path}")

    def differences(
        self,
        hardware: Mapping[str, Any] | None = None,
        model: Mapping[str, Any] | None = None,
        settings: Mapping[str, Any] | None = None,
        graph_buckets: tuple[int, ...] | None = None,
        num_pages: int | None = None,
    ) -> list[str]:
        """In words, all that differs from this setup. Parts not given, and informative keys, are not compared."""
        found: list[str] = []
        for what, given in (("hardware", hardware), ("model", model), ("settings", settings)):
            if given is not None:
                mine = {k: v for k, v in getattr(self, what).items() if k in given and k not in INFORMATIVE}
                theirs = {k: v for k, v in given.items() if k in mine}
                found += dict_differences(what, mine, theirs)
        if graph_buckets is not None and tuple(graph_buckets) != self.graph_buckets:
            found.append(f"graph_buckets: {list(self.graph_buckets)} is not {list(graph_buckets)}")
        if num_pages is not None and self.num_pages is not None and num_pages > self.num_pages:
            found.append(f"num_pages: calibrated up to {self.num_pages}, the pool has {num_pages}")
        return found

    def check_matches(
        self,
        hardware: Mapping[str, Any] | None = None,
        model: Mapping[str, Any] | None = None,
        settings: Mapping[str, Any] | None = None,
        *,
        graph_buckets: tuple[int, ...] | None = None,
        num_pages: int | None = None,
        allow_mismatch: bool = False,
    ) -> list[str]:
        """Raise `MismatchError` that spells out each difference (file first, setup second); return them if allowed."""
        found = self.differences(hardware, model, settings, graph_buckets, num_pages)
        if found and not allow_mismatch:
            raise MismatchError(
                f"the {self.kind} cost model was made for another setup ({'; '.join(found)}); "
                "profile and calibrate here, or pass --allow-mismatch"
            )
        return found

    def summary_text(self) -> str:
        """For people: what, where, how well, and what it cannot do."""
        name = self.hardware.get("name", "unknown hardware")
        lines = [f"{self.kind} cost model, form '{self.form}', {name}, {self.model.get('name', 'unnamed model')}"]
        if self.accuracy:
            lines.append("held-out error (relative):")
            lines += [f"  {regime:8s} {ErrorReport(**row).text()}" for regime, row in self.accuracy.items()]  # type: ignore[arg-type]
        if self.start_latency:
            after = [f"{1e3 * more:.2f} ms after {1e3 * rest:g} ms" for rest, more in self.start_latency]
            each = f"; {1e3 * self.start_latency_per_request_s:.3f} ms more for each further request that begins in it"
            lines.append(
                f"a step that starts from idle takes longer, by the rest before it: {', '.join(after)}"
                f"{each if self.start_latency_per_request_s else ''}"
            )
        for row in self.comparison:
            kept = "  <- kept" if row.get("form") == self.form else ""
            extreme = row.get("extreme_mape")
            far = f", extremes {extreme:.1%}" if extreme is not None else ""
            lines.append(f"  form {row['form']:11s} cross-validated MAPE {row['cv_mape']:6.1%}{far}{kept}")
        lines += ["known limits:", *(f"  - {limit}" for limit in self.limits)] if self.limits else []
        return "\n".join(lines)


def setup_of(header: SamplesHeader) -> dict[str, Any]:
    """The fields of a cost model that a samples header decides."""
    names = ("hardware", "model", "settings", "versions", "clocks", "num_pages", "graph_buckets", "page_size")
    values = asdict(header)
    return {name: values[name] for name in names} | {"graph_buckets": tuple(header.graph_buckets)}


def ranges_of(features: Floats) -> dict[str, tuple[float, float]]:
    """Smallest and largest value of each feature, from [steps, len(FEATURES)]."""
    if features.ndim != 2 or not len(features):
        raise UsageError("ranges need at least one step")
    low, high = np.min(features, axis=0), np.max(features, axis=0)
    return {name: (float(low[i]), float(high[i])) for i, name in enumerate(FEATURES)}
