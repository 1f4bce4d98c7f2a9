"""The frame of the command line: help, errors, exit codes, start-up time."""

from __future__ import annotations

import json
import resource

import pytest

from aspire.cli.main import COMMANDS
from tests.cli.helpers import assert_one_error, run, run_process


def test_help_lists_every_command_and_starts_fast() -> None:
    seconds = []
    for _ in range(3):
        before = _cpu_seconds_of_children()
        done = run_process("--help")
        seconds.append(_cpu_seconds_of_children() - before)
        assert done.code == 0
        assert all(name in done.out for name in COMMANDS)
    assert min(seconds) < 1.0, seconds  # of processor time, which other processes do not stretch; 0.3 s when measured


def _cpu_seconds_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str) -> None:
    done = run(name, "--help")
    assert done.code == 0
    assert "--json" in done.out and "--quiet" in done.out


def test_unknown_command_names_the_closest() -> None:
    assert_one_error(run("doctr"), 2, "no such command 'doctr'", "did you mean 'doctor'?")


def test_unknown_option_names_the_closest() -> None:
    assert_one_error(run("doctor", "--jsn"), 2, "no such option --jsn", "did you mean '--json'?")


def test_extra_argument_is_an_error() -> None:
    assert_one_error(run("doctor", "now"), 2, "unexpected extra argument", "aspire doctor --help")


def test_no_arguments_shows_help_and_exits_2() -> None:
    done = run()
    assert done.code == 2
    assert "Usage" in done.err + done.out


def test_unexpected_error_is_one_line_with_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise KeyError("inner")

    monkeypatch.delenv("ASPIRE_DEBUG", raising=False)
    monkeypatch.setattr("aspire.cli.doctor._memory", broken)
    assert_one_error(run("doctor"), 1, "unexpected KeyError", "ASPIRE_DEBUG=1")
    monkeypatch.setenv("ASPIRE_DEBUG", "1")
    with pytest.raises(KeyError):
        run("doctor")


def test_out_of_memory_says_what_to_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise MemoryError

    monkeypatch.delenv("ASPIRE_DEBUG", raising=False)
    monkeypatch.setattr("aspire.cli.doctor._memory", broken)
    assert_one_error(run("doctor"), 1, "out of memory", "--max-num-seqs")


def test_doctor_json_is_one_document() -> None:
    done = run("doctor", "--json")
    assert done.code == 0
    report = json.loads(done.out)
    assert {"python", "numpy", "memory"} <= {check["name"] for check in report["checks"]}
    assert report["broken"] == []


def test_doctor_table_names_missing_extras_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aspire.cli.doctor.package_version", lambda name: None if name in ("ray", "torch") else "1.0")
    done = run("doctor")
    assert "pip install 'aspire-llm[tune]'" in done.out


def test_no_color_and_pipes_have_no_escape_codes() -> None:
    done = run_process("doctor", env={"NO_COLOR": "1", "FORCE_COLOR": ""})
    assert "\x1b" not in done.out + done.err
