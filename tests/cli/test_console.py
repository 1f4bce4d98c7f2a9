"""Progress, tables and the shared option parsers."""

from __future__ import annotations

import math

import pytest

from aspire.cli import console as console_module
from aspire.cli.console import Console, cell, duration, plain
from aspire.cli.options import parse_ints, parse_rate
from aspire.errors import UsageError


def test_data_goes_to_stdout_and_progress_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console()
    console.say("working")
    console.data("42")
    console.wrote("a.json", "a file")
    captured = capsys.readouterr()
    assert captured.out == "42\n"
    assert captured.err == "working\nwrote a.json  (a file)\n"


def test_quiet_keeps_data_and_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(quiet=True)
    console.say("working")
    console.warn("careful")
    console.data("42")
    captured = capsys.readouterr()
    assert captured.out == "42\n"
    assert captured.err == "aspire: warning: careful\n"


def test_heartbeat_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [0.0]
    monkeypatch.setattr(console_module.time, "monotonic", lambda: now_s[0])
    with Console().progress("profile", total=10) as progress:
        for step in range(10):
            now_s[0] += 3.0
            progress.update(step + 1, "cell")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2  # 30 s at a line each 10 s; the last one falls on the end
    assert lines[0] == "profile  4/10 (40%)  12s elapsed  about 18s left  cell"


def test_table_is_plain_and_complete_off_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    long_text = "x" * 60
    Console().table(["name", "tok/s", "note"], [["[ar]", 1234.5, long_text], ["b", float("nan"), ""]])
    out = capsys.readouterr().out
    assert "[ar]" in out and "1,234" in out and long_text in out and "\x1b" not in out
    assert all(line == line.rstrip() for line in out.splitlines())


def test_json_mode_prints_one_document_only(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(json=True)
    console.data("text")
    console.table(["a"], [[1]])
    console.result({"x": math.nan, "y": (1, 2)})
    assert capsys.readouterr().out == '{\n "x": null,\n "y": [\n  1,\n  2\n ]\n}\n'


def test_cells_and_durations() -> None:
    assert [cell(v) for v in (None, math.nan, True, 12345, 0.123456, 98765.4, "a")] == [
        "-",
        "-",
        "yes",
        "12,345",
        "0.1235",
        "98,765",
        "a",
    ]
    assert [duration(s) for s in (5, 75, 3700)] == ["5s", "1m15s", "1h01m"]
    assert plain({"a": float("inf"), 1: [2]}) == {"a": None, "1": [2]}


def test_rates_and_lists() -> None:
    assert parse_rate("inf") == math.inf
    assert parse_rate("2.5") == 2.5
    for bad in ("0", "-1", "nan", "fast"):
        with pytest.raises(UsageError, match="--request-rate"):
            parse_rate(bad)
    assert parse_ints("--rows", "1, 2,8") == [1, 2, 8]
    with pytest.raises(UsageError, match="--rows"):
        parse_ints("--rows", "0,2")
