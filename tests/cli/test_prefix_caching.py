"""The flag of prefix caching, as a user sees it work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from aspire.rundir import read_run
from tests.cli.helpers import run
from tests.faults.helpers import TINY


def test_prefix_caching_can_be_turned_off(tmp_path: Path) -> None:
    cached = {}
    for flag in ("--enable-prefix-caching", "--no-enable-prefix-caching"):
        file = tmp_path / "prompts.jsonl"
        lines = [{"id": name, "prompt_token_ids": [*[7] * 256, place + 8]} for place, name in enumerate("abc")]
        file.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
        done = run("generate", *TINY, flag, "--dataset-path", file, "-q", "--output-dir", tmp_path / flag)
        assert done.code == 0, done.err
        cached[flag] = read_run(tmp_path / flag).requests.cached_tokens.tolist()
    assert list(cached.values()) == [[0, 256, 256], [0, 0, 0]]
