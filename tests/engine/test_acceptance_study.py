"""The study of acceptance: whole rounds, in step from the start, prompts computed once, texts compared."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")

from aspire.acceptance import AcceptanceStudy
from aspire.prompts import Prompt
from aspire.runlog import PREFILL, VERIFY
from aspire.sampling_params import SamplingParams
from tests.invariants.cases import KINDS, prompt_of, small
from tests.invariants.harness import Limits, make_engine

G, ROUNDS = 4, 3


@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async"])
def test_every_request_has_its_rounds_and_prompts_are_computed_once(ahead: bool) -> None:
    engine = make_engine("qwen3", limits=Limits(5, 256, 256, async_scheduling=ahead))
    prompts = [Prompt(str(index), token_ids=tuple(prompt_of(100 + 9 * index, model="qwen3"))) for index in range(5)]
    params = [SamplingParams(temperature=0.7, max_tokens=60, ignore_eos=True, seed=index) for index in range(5)]
    study = AcceptanceStudy(engine, prompts, params, draft_length=G, rounds=ROUNDS)
    plain = study.plain()
    assert (plain.run.steps.column("query_tokens")[plain.run.steps.column("mode") == PREFILL]).sum() == 5 * 118
    for kind in KINDS:
        found = study.measure(small(kind))
        steps = found.run.steps
        mode, drafted = steps.column("mode"), steps.column("drafted")
        assert steps.column("query_tokens")[mode == PREFILL].sum() <= 5 * 16, "prompts were computed again"
        rounds = (mode == VERIFY) & (drafted > 0)
        assert (drafted[rounds] == G).all()
        assert np.bincount(steps.column("request")[rounds]).tolist() == [ROUNDS] * 5
        report = found.to_json()
        assert report["rounds"] == 5 * ROUNDS and len(report["accepted_by_request"]) == 5
        assert report["accepted_mean"] == pytest.approx(np.mean(report["accepted_by_request"]))
        assert report["text_equal_share"] == 1.0 and report["margin_shift"]["max"] < 1e-3
        # the first token comes with the end of the prompt, then accepted drafts and a bonus token a round
        assert report["margin_shift"]["tokens"] == 5 + 5 * ROUNDS + int(steps.column("accepted")[rounds].sum())
    assert not engine.has_unfinished_requests
