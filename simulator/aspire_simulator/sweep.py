"""Run a grid of scenarios. Each finished cell is a file of its own, so a killed sweep resumes where it stopped."""

from __future__ import annotations

import csv
import hashlib
import io
import itertools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aspire.errors import AspireError, InputError, UsageError, check_keys
from aspire.fileio import read_json, write_json_atomic, write_text_atomic
from aspire_simulator.parallel import workers
from aspire_simulator.scenario import Scenario

TABLE_METRICS = (
    "decode_only_throughput",
    "output_throughput",
    "request_throughput",
    "request_goodput",
    "goodput_share",
    "mean_ttft_ms",
    "p99_ttft_ms",
    "mean_tpot_ms",
    "p99_tpot_ms",
    "mean_e2el_ms",
    "acceptance_length",
    "acceptance_rate",
    "preemptions",
    "rejected",
)


@dataclass(frozen=True)
class Sweep:
    """``base``: values that all cells share; ``grid``: for each name, the values to combine."""

    base: Mapping[str, Any]
    grid: Mapping[str, list[Any]]

    @classmethod
    def load(cls, path: str | Path) -> Sweep:
        """Read ``{"base": {...}, "grid": {"name": [values]}}`` from JSON or YAML."""
        source = Path(path)
        data = _read_yaml(source) if source.suffix in (".yaml", ".yml") else read_json(source, "sweep file")
        if not isinstance(data, dict) or not isinstance(data.get("grid"), dict):
            raise InputError(f"sweep file {source} needs an object 'grid' with a list of values for each name")
        check_keys(f"sweep file {source}", data, ["base", "grid"])
        sweep = cls(data.get("base", {}), data["grid"])
        for name, values in sweep.grid.items():
            if not isinstance(values, list) or not values:
                raise InputError(f"sweep file {source}: grid '{name}' needs a list of at least one value")
        sweep.cells()
        return sweep

    def cells(self) -> list[Scenario]:
        """All combinations, the last name varying fastest. Unknown names raise `UsageError`."""
        if both := set(self.base) & set(self.grid):
            raise UsageError(f"'{sorted(both)[0]}' stands in both base and grid of the sweep; keep one")
        names = list(self.grid)
        combined = itertools.product(*self.grid.values())
        return [Scenario.from_dict({**self.base, **dict(zip(names, values, strict=True))}) for values in combined]


def cell_key(scenario: Scenario) -> str:
    """Short hash of a scenario: the name of its result file."""
    return hashlib.sha256(json.dumps(scenario.to_dict(), sort_keys=True).encode()).hexdigest()[:16]


def run_sweep(
    sweep: Sweep,
    out: str | Path,
    *,
    num_workers: int = 1,
    ray_address: str | None = None,
    resume: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> list[dict[str, Any]]:
    """Run every cell and write ``out/cells/<hash>.json``, ``out/sweep.json`` and ``out/sweep.csv``.

    With ``resume`` cells that are already there are not run again; without it, a folder with cells is an error. A cell
    that fails holds its error instead of metrics, and the others go on.
    """
    folder = Path(out)
    cells = sweep.cells()
    done = {path.stem for path in (folder / "cells").glob("*.json")}
    if done and not resume:
        raise UsageError(f"{folder} holds {len(done)} finished cells; continue with --resume or choose another folder")
    keys = [cell_key(cell) for cell in cells]
    todo = [(key, (cell.to_dict(),)) for key, cell in zip(keys, cells, strict=True) if key not in done]
    finished = len(cells) - len(todo)
    pool = workers(num_workers, ray_address)
    try:
        for key, result in pool.run(todo, run_cell):
            write_json_atomic(folder / "cells" / f"{key}.json", result)
            finished += 1
            if progress is not None:
                progress(finished, len(cells))
    finally:
        pool.close()
    results = [read_json(folder / "cells" / f"{key}.json", "sweep cell") for key in keys]
    write_json_atomic(folder / "sweep.json", {"base": dict(sweep.base), "grid": dict(sweep.grid), "cells": results})
    write_text_atomic(folder / "sweep.csv", table_csv(sweep, results))
    return results


def run_cell(scenario: Mapping[str, Any]) -> dict[str, Any]:
    """Simulate one scenario: ``{"scenario", "summary"}`` or ``{"scenario", "error"}``."""
    try:
        summary = Scenario.from_dict(scenario).run().summary
    except AspireError as error:
        return {"scenario": dict(scenario), "error": str(error)}
    return {"scenario": dict(scenario), "summary": json.loads(json.dumps(summary))}


def table_csv(sweep: Sweep, results: list[dict[str, Any]]) -> str:
    """One line per cell: its grid values, then the main metrics."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow([*sweep.grid, *TABLE_METRICS, "error"])
    for result in results:
        values = [result["scenario"][name] for name in sweep.grid]
        shown = [json.dumps(value) if isinstance(value, (dict, list)) else value for value in values]
        summary = result.get("summary", {})
        writer.writerow([*shown, *(summary.get(name, "") for name in TABLE_METRICS), result.get("error", "")])
    return stream.getvalue()


def _read_yaml(source: Path) -> Any:
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError as error:
        raise UsageError(f"{source} needs the package pyyaml; install it or write the sweep as JSON") from error
    try:
        return yaml.safe_load(source.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        first = str(error).splitlines()[0]
        raise InputError(f"sweep file {source} cannot be read as YAML: {first}") from error
