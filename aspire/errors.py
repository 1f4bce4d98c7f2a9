"""Typed errors. Each message says what was given, what is allowed and how to mend it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from functools import wraps
from typing import ParamSpec

P = ParamSpec("P")


class AspireError(Exception):
    """Base of every error that a user can cause. The command line prints its message as one line and exits 1."""

    exit_code = 1


class UsageError(AspireError):
    """An option, parameter or key that is not allowed. Exit code 2."""

    exit_code = 2


class InputError(AspireError):
    """A file or a prompt that cannot be used: missing, malformed, too long, empty."""


class ModelError(AspireError):
    """A model folder, configuration or weight file that cannot be loaded."""


class MismatchError(AspireError):
    """A file made for other hardware, another model or other settings than those in use."""


class CapacityError(AspireError):
    """A request or a pool that cannot fit in memory, ever."""


class EngineError(AspireError):
    """A step that failed while running, e.g. out of device memory or non-finite logits."""


def did_you_mean(given: str, allowed: Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` for the allowed name closest to ``given``, or an empty string."""
    close = get_close_matches(given, list(allowed), n=1)
    return f" (did you mean '{close[0]}'?)" if close else ""


def check_choice(what: str, given: str, allowed: Iterable[str]) -> str:
    """Return ``given`` if it is one of ``allowed``; raise `UsageError` that lists them otherwise."""
    names = sorted(allowed)
    if given in names:
        return given
    raise UsageError(f"{what} '{given}' is not known{did_you_mean(given, names)}; allowed: {', '.join(names)}")


def check_keys(what: str, given: Iterable[str], allowed: Iterable[str]) -> None:
    """Raise `UsageError` for the first key of ``given`` that is not in ``allowed``."""
    names = sorted(allowed)
    for key in given:
        if key not in names:
            raise UsageError(f"{what} has no key '{key}'{did_you_mean(key, names)}; allowed: {', '.join(names)}")


def exit_code_of(work: Callable[P, None]) -> Callable[P, int]:
    """The ``main`` of a script: ``work`` with its exit code, an `AspireError` being told in one line on stderr."""

    @wraps(work)
    def main(*args: P.args, **kwargs: P.kwargs) -> int:
        try:
            work(*args, **kwargs)
        except AspireError as error:
            print(f"error: {error}", file=sys.stderr)
            return error.exit_code
        return 0

    return main
