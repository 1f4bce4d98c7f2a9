"""The replay of recorded rounds: accounting, censoring, and goodput against the paper's rule on the real recording."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from aspire.errors import InputError
from aspire_simulator.offline import (
    PRICES,
    Recording,
    compare_share,
    evaluate_cell,
    gap_ratios,
    load_recordings,
    main,
    ratios,
    replay,
    replay_text,
    rounds_of,
    rule_makers,
)
from aspire_simulator.offline_rules import Goodput, Hindsight, Late, LengthRule, Paper, Rule, play_round

ROUNDS = Path(__file__).parents[3] / "shared" / "data" / "smollm2_rounds.npz"


def synthetic(rounds: int = 20, requests: int = 8, d_max: int = 16, seed: int = 0) -> Recording:
    """Rounds whose acceptance follows the margin, requests of different quality."""
    rng = np.random.default_rng(seed)
    margin = rng.lognormal(0.7, 1.2, (rounds, requests, d_max))
    logit = -0.3 + 2.3 * np.sqrt(margin) + rng.normal(0.0, 0.8, (1, requests, 1))
    right = rng.random(margin.shape) < 1 / (1 + np.exp(-logit))
    return Recording("synthetic", 0.7, margin, np.cumprod(right, axis=2).sum(axis=2))


def write_npz(path: Path, recording: Recording) -> Path:
    name = f"{recording.name}_{recording.temperature}"
    np.savez(path, **{f"{name}_marg": recording.margin.astype(np.float32), f"{name}_acc": recording.accepted})
    return path


def test_fixed_length_accounting() -> None:
    recording = synthetic()
    tokens, time = replay(LengthRule(8, 5), rounds_of(recording, range(20)), 0.17, 8)
    assert tokens.sum() == (np.minimum(recording.accepted, 5) + 1).sum()
    np.testing.assert_allclose(time, 20 * (1 + 5 * 0.17))


def test_rules_are_told_no_more_than_an_engine_would_see() -> None:
    class Spy(Rule):
        def __init__(self) -> None:
            self.shown: list[float] = []
            self.outcome: list[tuple[int, int]] = []

        def more(self, requests: np.ndarray, drafted: int) -> np.ndarray:
            return np.full(len(requests), drafted < 3)

        def drafted(self, requests: np.ndarray, position: int, margin: np.ndarray) -> None:
            self.shown += margin.tolist()

        def verified(self, requests: np.ndarray, drafted: np.ndarray, accepted: np.ndarray) -> None:
            self.outcome += list(zip(drafted.tolist(), accepted.tolist(), strict=True))

    spy = Spy()
    play_round(spy, np.array([0, 1]), np.arange(20.0).reshape(2, 10), np.array([9, 1]))
    assert spy.shown == [0.0, 10.0, 1.0, 11.0, 2.0, 12.0]
    assert spy.outcome == [(3, 3), (3, 1)]


def test_late_news_arrive_in_order_behind_the_next_decision() -> None:
    class Diary(Rule):
        def __init__(self) -> None:
            self.lines: list[str] = []

        def more(self, requests: np.ndarray, drafted: int) -> np.ndarray:
            self.lines.append(f"more {drafted}")
            return np.full(len(requests), drafted < 2)

        def drafted(self, requests: np.ndarray, position: int, margin: np.ndarray) -> None:
            self.lines.append(f"drafted {position}")

        def verified(self, requests: np.ndarray, drafted: np.ndarray, accepted: np.ndarray) -> None:
            self.lines.append("verified")

    diary = Diary()
    late = Late(diary)
    for _ in range(2):
        play_round(late, np.array([0]), np.ones((1, 5)), np.array([5]))
    first = ["more 0", "more 1", "drafted 0", "more 2", "drafted 1"]
    assert diary.lines == [*first, "more 0", "verified", *first[1:]]


def test_goodput_told_late_drafts_a_little_too_far_and_still_beats_the_paper() -> None:
    cells = [evaluate_cell(synthetic(40, 16, seed=seed), c, v) for seed in (1, 2) for c, v in PRICES]
    late = np.array([cell["goodput_late"]["rate"] / cell["paper"]["rate"] for cell in cells])
    assert 1.02 < late.mean() < ratios(cells).mean()


def test_paper_rule_by_hand() -> None:
    """First round 3 drafts; alpha_hat = a / min(a + 1, d), w = 0.8; then argmax of E(g) / (1 + c g)."""
    rule, who = Paper(1, 0.15, 16), np.array([0])
    drafted, _ = play_round(rule, who, np.ones((1, 16)), np.array([1]))
    assert drafted[0] == 3
    alpha = 0.8 * 0.9 + 0.2 * (1 / 2)
    best = max(range(17), key=lambda g: sum(alpha**i for i in range(g + 1)) / (1 + 0.15 * g))
    drafted, _ = play_round(rule, who, np.ones((1, 16)), np.array([0]))
    assert drafted[0] == best


def test_hindsight_is_never_beaten() -> None:
    recording = synthetic(seed=3)
    cell = evaluate_cell(recording, 0.15, 0.02)
    for name in rule_makers(recording, 0.15, 0.02):
        assert cell[name]["rate"] <= cell["hindsight"]["rate"] + 1e-12
        assert cell[name]["text_rate"] <= cell["hindsight"]["text_rate"] + 1e-12


@pytest.mark.parametrize("length", [0, 1, 5, 16])
def test_same_text_replay_writes_the_same_tokens_for_every_rule(length: int) -> None:
    """Recorded tokens: accepted drafts, and one in place of each rejected draft; the last round may overrun the end."""
    recording = synthetic(seed=5)
    expected = (recording.accepted + (recording.accepted < 16)).sum(axis=0)
    for rule in (LengthRule(8, length), Hindsight(8, 0), Goodput(8, 0.17, 16)):
        tokens, _ = replay_text(rule, recording, range(20), 0.17)
        assert ((tokens >= expected) & (tokens <= expected + 1)).all()


def test_goodput_beats_the_paper_where_margins_tell() -> None:
    cells = [evaluate_cell(synthetic(40, 16, seed=seed), c, v) for seed in (1, 2) for c, v in PRICES]
    assert ratios(cells).mean() > 1.03


def test_pricing_the_share_of_the_step_pays_most_where_the_share_is_large() -> None:
    cells = compare_share([synthetic(40, 16, seed=1)])["detail"]["cells"]
    gains = {cell["share"]: cell["rate_with_share"] / cell["rate_marginal_only"] for cell in cells}
    assert gains[0.80] > 1.1 and gains[0.80] > gains[0.02]
    assert cells[-1]["rate_with_share"] >= 0.97  # one verification a token earns 1.0


def test_evidence_file_holds_the_goal_and_its_cells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "policy_offline.json"
    assert main(["--rounds", str(write_npz(tmp_path / "rounds.npz", synthetic())), "--out", str(out)]) == 0
    results = {result["id"]: result for result in json.loads(out.read_text())["results"]}
    goal = results["policy.goodput_over_paper_offline"]
    cells = goal["detail"]["cells"]
    assert len(cells) == len(PRICES) == goal["n"]
    assert goal["value"] == pytest.approx(np.mean([c["goodput"]["rate"] / c["paper"]["rate"] for c in cells]))
    assert goal["detail"]["worst_ratio"] == pytest.approx(goal["spread"]["min"])
    assert "synthetic" in capsys.readouterr().out


def test_unusable_files_give_one_clear_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.npz"
    bad.write_bytes(b"nothing")
    for path in (tmp_path / "absent.npz", bad):
        assert main(["--rounds", str(path)]) == 1
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1 and str(path) in error
    np.savez(bad, other=np.zeros(2))
    with pytest.raises(InputError, match="_acc"):
        load_recordings(bad)


@pytest.mark.skipif(not ROUNDS.is_file(), reason="recorded rounds (../shared/data/smollm2_rounds.npz) are not here")
def test_goodput_beats_the_paper_in_every_recorded_cell() -> None:
    cells = [evaluate_cell(recording, c, v) for recording in load_recordings(ROUNDS) for c, v in PRICES]
    warm = [cell for cell in cells if cell["temperature"] > 0]
    assert len(warm) == 12
    assert ratios(warm).mean() >= 1.06
    assert gap_ratios(warm).mean() <= 0.7
    for base in ("paper", "paper_priced"):
        assert ratios(cells, base=base).min() >= 1.0
    assert ratios(warm, "cold_rate").min() >= 1.0
    assert ratios(warm, "text_rate").min() >= 1.0


@pytest.mark.skipif(not ROUNDS.is_file(), reason="recorded rounds (../shared/data/smollm2_rounds.npz) are not here")
def test_recorded_baselines_are_those_tabled_at_recording() -> None:
    """Fixed length, the paper's rule and hindsight as tabled when the rounds were recorded (to its two decimals)."""
    recordings = {(one.name, one.temperature): one for one in load_recordings(ROUNDS)}
    tabled = {
        ("gsm4k", 0.15, 0.02): (3.17, 3.28, 4.14),
        ("doc4k", 0.15, 0.02): (3.11, 3.24, 4.15),
        ("doc7k", 0.15, 0.02): (3.47, 3.50, 4.30),
        ("doc4k", 0.30, 0.03): (1.99, 2.08, 2.58),
        ("doc4k", 0.08, 0.01): (4.61, 4.73, 5.97),
    }
    for (name, c, v), expected in tabled.items():
        cell = evaluate_cell(recordings[name, 0.7], c, v)
        found = [cell[rule]["rate"] for rule in ("fixed", "paper_priced", "hindsight")]
        np.testing.assert_allclose(found, expected, atol=0.0061)
