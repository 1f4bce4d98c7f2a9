"""`aspire doctor`: what this machine can do, and what is missing."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import typer

from aspire.cli.console import Console
from aspire.cli.options import Json, Quiet
from aspire.evidence import package_version


@dataclass(frozen=True)
class Check:
    """One line of the report. ``state``: ok, missing (something works less well) or broken (fix it)."""

    name: str
    state: str
    found: str
    advice: str = ""


def command(quiet: Quiet = False, json: Json = False) -> None:
    """Say what this machine can do: packages, GPU, memory, the embedded model. Exit 1 if something is broken."""
    console = Console(quiet=quiet, json=json)
    checks = [_python(), *_packages(), *_torch(), _memory(), _disk(), _model()]
    console.table(["check", "state", "found", "advice"], [[c.name, c.state, c.found, c.advice] for c in checks])
    broken = [check.name for check in checks if check.state == "broken"]
    engine = not any(check.name in ("torch", "transformers") and check.state != "ok" for check in checks)
    can = ["calibrate", "simulate", "tune", "validate", "report"] + (["profile", "generate", "bench"] if engine else [])
    console.data(f"this machine can run: {', '.join(can)}")
    console.result({"checks": [vars(check) for check in checks], "broken": broken, "engine": engine})
    if broken:
        raise typer.Exit(1)


def _python() -> Check:
    good = sys.version_info >= (3, 10)
    advice = "" if good else "install Python 3.10 or newer"
    return Check("python", "ok" if good else "broken", f"{platform.python_version()} on {platform.platform()}", advice)


def _packages() -> list[Check]:
    checks = []
    for name in ("numpy", "scipy", "simpy", "matplotlib"):
        version = package_version(name)
        advice = "" if version else "pip install aspire-llm"
        checks.append(Check(name, "ok" if version else "broken", version or "-", advice))
    extras = {"transformers": "engine", "safetensors": "engine", "gguf": "engine", "optuna": "tune", "ray": "tune"}
    for name, extra in extras.items():
        version = package_version(name)
        advice = "" if version else f"pip install 'aspire-llm[{extra}]'"
        checks.append(Check(name, "ok" if version else "missing", version or "-", advice))
    return checks


def _torch() -> list[Check]:
    version = package_version("torch")
    if version is None:
        return [Check("torch", "missing", "-", "pip install 'aspire-llm[engine]' to run models")]
    try:
        import torch
    except (ImportError, OSError) as error:
        return [Check("torch", "broken", f"{version} does not import: {error}", "install torch again")]
    checks = [Check("torch", "ok", torch.__version__)]
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            free_bytes, total_bytes = torch.cuda.mem_get_info(index)
            capability = f"sm_{properties.major}{properties.minor}"
            found = f"{properties.name}, {capability}, {free_bytes / 2**30:.1f} of {total_bytes / 2**30:.1f} GiB free"
            checks.append(Check(f"cuda:{index}", "ok", found))
    else:
        checks.append(Check("cuda", "missing", "no CUDA device", "models run on the CPU, in the reference back end"))
    triton = package_version("triton")
    usable = triton is not None and torch.cuda.is_available()
    advice = "" if usable else "the torch reference kernels are used instead"
    found = triton if usable or triton is None else f"{triton}, but no GPU"
    checks.append(Check("triton", "ok" if usable else "missing", found or "-", advice))
    return checks


def _memory() -> Check:
    try:
        total_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return Check("memory", "missing", "size unknown")
    good = total_bytes >= 3 * 2**30
    found = f"{total_bytes / 2**30:.1f} GiB, {os.cpu_count()} CPU cores"
    return Check("memory", "ok" if good else "missing", found, "" if good else "the demo needs about 3 GiB")


def _disk() -> Check:
    free_bytes = shutil.disk_usage(Path.cwd()).free
    good = free_bytes >= 2**30
    advice = "" if good else "free some space: run directories and models need it"
    return Check("disk", "ok" if good else "missing", f"{free_bytes / 2**30:.1f} GiB free in {Path.cwd()}", advice)


def _model() -> Check:
    if package_version("torch") is None:
        return Check("smollm2-135m", "missing", "-", "needs the engine extra")
    from aspire.errors import ModelError
    from aspire.models import embedded

    try:
        path = embedded.find_local()
    except ModelError as error:
        return Check("smollm2-135m", "broken", str(error), f"correct or unset {embedded.FILE_VARIABLE}")
    if path is None:
        return Check("smollm2-135m", "missing", "not downloaded yet", "the first use downloads 98 MB from PyPI")
    return Check("smollm2-135m", "ok", f"{path} ({path.stat().st_size / 2**20:.0f} MiB)")
