"""`aspire calibrate`: samples.jsonl -> cost_model.json with its held-out error."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from aspire.cli.console import Console
from aspire.cli.options import Json, Quiet, Seed, existing_file
from aspire.errors import UsageError


def command(
    samples: Annotated[
        list[Path] | None, typer.Argument(help="Samples of one setup, written by aspire profile.", show_default=False)
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Cost model to write.")] = Path("cost_model.json"),
    form: Annotated[
        list[str] | None, typer.Option("--form", help="Fit only this form (repeatable); default: compare all.")
    ] = None,
    folds: Annotated[int, typer.Option("--folds", min=2, help="Cross-validation folds.")] = 5,
    bootstrap: Annotated[int, typer.Option("--bootstrap", min=0, help="Resamples for intervals; 0: none.")] = 30,
    max_mape: Annotated[
        float | None, typer.Option("--max-mape", min=0.0, help="Exit 1 when a held-out MAPE exceeds this share.")
    ] = None,
    analytic: Annotated[
        str | None, typer.Option("--analytic", help="A what-if model of this hardware from public figures; no samples.")
    ] = None,
    model: Annotated[str, typer.Option("--model", help="Model shape of --analytic.")] = "smollm2-135m",
    scale_from: Annotated[
        str | None, typer.Option("--scale-from", help="The GPU the samples come from; needs --scale-to.")
    ] = None,
    scale_to: Annotated[
        str | None, typer.Option("--scale-to", help="Carry the model to this GPU by bandwidth and FLOP ratios.")
    ] = None,
    figure: Annotated[
        Path | None,
        typer.Option("--figure", help="Draw predicted against measured (png, svg, pdf).", show_default=False),
    ] = None,
    seed: Seed = 0,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Fit the latency cost model of a step and print its held-out error by regime."""
    from aspire_calibration import LoadedCostModel, analytic_model, calibrate, merge_samples, read_samples
    from aspire_calibration import scale_from as carry
    from aspire_calibration.figures import calibration_figure

    console = Console(quiet=quiet, json=json)
    if (scale_from is None) != (scale_to is None):
        raise UsageError("--scale-from and --scale-to go together: the GPU of the samples and the GPU to carry them to")
    if (analytic is None) == (not samples):
        raise UsageError("give samples.jsonl files (made with: aspire profile), or --analytic HARDWARE, not both")
    if figure is not None and (analytic is not None or scale_to is not None):
        raise UsageError("--figure compares with samples; analytic and scaled models have none of their own")
    if analytic is not None:
        file = analytic_model(analytic, model)
    else:
        paths = [existing_file(path, "samples file", "aspire profile") for path in samples or ()]
        merged = merge_samples([read_samples(path) for path in paths])
        console.say(f"{len(merged.measured)} measured cells from {', '.join(map(str, paths))}")
        file = calibrate(merged, forms=form, seed=seed, folds=folds, bootstrap=bootstrap, progress=console.say)
    if scale_from is not None and scale_to is not None:
        file = carry(file, scale_from, scale_to)
    file.save(output)
    console.data(file.summary_text())
    console.wrote(output, f"{file.kind} cost model, form {file.form}")
    if figure is not None:
        calibration_figure(figure, LoadedCostModel(file), merged, title=str(file.hardware.get("name", "")))
        console.wrote(figure, "predicted against measured")
    console.next(f"aspire simulate --cost-model {output}")
    missed = _missed(file.accuracy, max_mape)
    console.result({"cost_model": output, **_figures(file), "missed": missed})
    if missed:
        console.warn(f"held-out MAPE above --max-mape {max_mape:g}: {', '.join(missed)}; profile longer or more finely")
        raise typer.Exit(1)


def _missed(accuracy: dict[str, dict[str, float]], max_mape: float | None) -> list[str]:
    if max_mape is None:
        return []
    if not accuracy:
        raise UsageError("--max-mape needs a measured model; analytic and scaled ones have no held-out error")
    return [f"{regime} {row['mape']:.1%}" for regime, row in accuracy.items() if row["mape"] > max_mape]


def _figures(file: Any) -> dict[str, Any]:
    names = ("kind", "form", "hardware", "model", "accuracy", "comparison", "intervals", "limits", "start_latency")
    names += ("start_latency_per_request_s",)
    return {name: getattr(file, name) for name in names}
