"""Options that several sub-commands share, under the names that users of vLLM know, and their checks."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from aspire.errors import InputError, UsageError

Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout instead of tables.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed of everything random.")]
AllowMismatch = Annotated[
    bool, typer.Option("--allow-mismatch", help="Use files made for other hardware, another model or other settings.")
]
OnError = Annotated[str, typer.Option("--on-error", help="What a malformed line of an input file does: fail or skip.")]


def shared_options(
    templates: list[Callable[..., Any]], function: Callable[..., None], **later: Any
) -> Callable[..., None]:
    """A command with the options of every template and of ``function``, in that order.

    What the templates make of their options are the first arguments of ``function``. ``later``: names in annotations
    that are imported only when a command runs.
    """
    groups = [inspect.signature(template, locals=later, eval_str=True).parameters for template in templates]
    own = list(inspect.signature(function, locals=later, eval_str=True).parameters.values())[len(templates) :]

    def command(**given: Any) -> None:
        made = [
            template(**{name: given.pop(name) for name in group})
            for template, group in zip(templates, groups, strict=True)
        ]
        function(*made, **given)

    parameters = [parameter for group in groups for parameter in group.values()] + own
    parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__name__, command.__doc__ = function.__name__, function.__doc__
    return command


def existing_file(path: Path, what: str, made_by: str) -> Path:
    """``path`` if it is a file; otherwise `InputError` that names the command which makes one."""
    if path.is_dir():
        raise InputError(f"{what} {path} is a folder; give the file in it")
    if not path.is_file():
        raise InputError(f"{what} {path} does not exist; make one with: {made_by}")
    return path


def parse_rate(text: str) -> float:
    """Requests per second; ``inf`` = all at once. Raises `UsageError` unless positive."""
    try:
        rate = float(text)
    except ValueError:
        rate = -1.0
    if not rate > 0:
        raise UsageError(f"--request-rate '{text}' is not a rate; give requests per second, more than 0, or inf")
    return rate


def parse_ints(option: str, text: str, *, low: int = 1) -> list[int]:
    """``"1,2,8"`` -> ``[1, 2, 8]``, each at least ``low``."""
    try:
        values = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        values = []
    if not values or min(values) < low:
        raise UsageError(f"{option} '{text}' is not a list of whole numbers >= {low}; write for example {option} 1,2,8")
    return values


def parse_shares(option: str, text: str) -> list[float]:
    """``"0.03,0.07"`` -> ``[0.03, 0.07]``, each in 0..1."""
    try:
        values = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        values = []
    if not values or not all(0.0 <= value <= 1.0 for value in values):
        raise UsageError(f"{option} '{text}' is not a list of shares in 0..1; write for example {option} 0.05,0.1")
    return values
