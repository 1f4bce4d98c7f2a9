"""The `aspire` command: sub-commands, and every error as one line with its exit code.

Exit codes: 0 done, 1 failure or a missed threshold, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

import typer
import typer.main

from aspire.errors import AspireError, did_you_mean

# The loop first, in order; then what looks at it.
COMMANDS = (
    "profile",
    "calibrate",
    "simulate",
    "tune",
    "generate",
    "bench",
    "validate",
    "report",
    "acceptance",
    "fit-acceptance",
    "sweep",
    "capacity",
    "trace",
    "doctor",
)

_INTERRUPTED = 130  # as a shell reports SIGINT

_EPILOG = (
    "The loop: profile -> calibrate -> simulate -> tune -> generate or bench -> validate, report. "
    "Each step reads the file of the step before and names the next command."
)


def build_app() -> typer.Typer:
    """The typer application with every sub-command registered; imports no heavy library."""
    app = typer.Typer(
        name="aspire",
        help="Self-speculative decoding for long contexts: measure, simulate, tune, generate.",
        epilog=_EPILOG,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    for name in COMMANDS:
        module = import_module(f"aspire.cli.{name.replace('-', '_')}")
        app.command(name)(module.command)
    return app


def _show_version(value: bool) -> None:
    if value:
        from aspire.evidence import package_version

        print(f"aspire {package_version('aspire-llm') or 'from a source tree'}")
        raise typer.Exit()


def _root(
    version: bool = typer.Option(False, "--version", is_eager=True, callback=_show_version, help="Show the version."),
) -> None:
    """Self-speculative decoding for long contexts: measure, simulate, tune, generate."""


def _fail(message: str, code: int) -> NoReturn:
    print(f"aspire: error: {' '.join(message.split())}", file=sys.stderr, flush=True)
    raise SystemExit(code)


def _usage_message(error: Any, group: Any) -> str:
    """One line for a parser error, with the closest option or command name."""
    context = getattr(error, "ctx", None)
    command = getattr(context, "command", None)
    where = (getattr(context, "command_path", None) or "aspire") + " --help"
    option = getattr(error, "option_name", None)
    if type(error).__name__ == "NoSuchOption" and option and command is not None:
        known = [name for parameter in command.get_params(context) for name in parameter.opts if name.startswith("--")]
        return f"no such option {option}{did_you_mean(option, known)}; see: {where}"
    message = " ".join(error.format_message().split()).rstrip(".")
    if message.startswith("No such command"):
        given = message.split("'")[1] if "'" in message else ""
        return f"no such command '{given}'{did_you_mean(given, COMMANDS)}; allowed: {', '.join(COMMANDS)}"
    return f"{message[:1].lower()}{message[1:]}; see: {where}"


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line ``arguments`` (default: of this process) and exit."""
    # On busy cores, threads that spin while they wait for each other make a CPU step ten times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        group = typer.main.get_command(build_app())
        given = None if arguments is None else list(arguments)
        code = group.main(args=given, prog_name="aspire", standalone_mode=False)
        if code == _INTERRUPTED:  # typer makes a code of KeyboardInterrupt
            raise KeyboardInterrupt
        sys.stdout.flush()
        raise SystemExit(code if isinstance(code, int) else 0)
    except SystemExit:
        raise
    except AspireError as error:
        if os.environ.get("ASPIRE_DEBUG"):
            raise
        _fail(str(error), error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        _fail("interrupted; what was finished is on disk", _INTERRUPTED)
    except BrokenPipeError:  # the reader of stdout went away, e.g. `aspire ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except Exception as error:
        if hasattr(error, "format_message"):  # a parser error of click, whichever copy of click raised it
            if type(error).__name__ == "NoArgsIsHelpError":
                print(error.format_message(), file=sys.stderr)
                raise SystemExit(2) from None
            _fail(_usage_message(error, None), 2)
        if os.environ.get("ASPIRE_DEBUG"):
            raise
        _fail(_unexpected(error), 1)


def _unexpected(error: Exception) -> str:
    """One line for an error that no part of the program foresaw."""
    name = type(error).__name__
    if isinstance(error, MemoryError) or name == "OutOfMemoryError":
        return f"out of memory ({error}); lower --max-num-seqs, --max-num-batched-tokens or --max-model-len"
    if isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith("aspire"):
        missing = error.name.split(".")[0]
        extra = {"optuna": "tune", "ray": "tune"}.get(missing, "engine")
        return f"the package {missing} is not installed; install it with: pip install 'aspire-llm[{extra}]'"
    return f"unexpected {name}: {error}; run again with ASPIRE_DEBUG=1 for the traceback"


if __name__ == "__main__":
    main()
