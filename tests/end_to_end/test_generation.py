"""Generation with several tasks' adapters in one batch gives the tokens that `transformers` and `peft` give."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from rouge_score.rouge_scorer import RougeScorer

from megatron_mux.runtime import Parallel
from tests.end_to_end.conftest import BackboneOf, PathOf
from tests.end_to_end.forked import Server
from tests.end_to_end.generated import cases_of, frequent, generated, prompts_of, reference
from tests.end_to_end.outcome import metrics
from tests.end_to_end.workplace import TASKS, furnish
from tests.reference.greedy import differences


def test_tokens_are_those_of_transformers_and_peft(
    backbone_of: BackboneOf, path_of: PathOf, parallel: Parallel
) -> None:
    path = path_of("llama")
    cases = cases_of(path)
    prompts = prompts_of(cases)
    stop = [int(frequent(reference(path, cases, prompts[::4], [])).argmax())]
    wanted = reference(path, cases, prompts, stop)
    found = generated(backbone_of("llama"), parallel, cases, prompts, stop)
    problems, ties = differences([one.tokens for one in found], wanted)
    assert not problems, problems
    assert {one.finish for one in found} == {"stop", "length"} and ties < 5


def test_a_run_writes_what_it_generates(tmp_path: Path, server: Server) -> None:
    workplace = furnish(tmp_path)
    held_out = workplace.root / "held-out.jsonl"
    asked = {"path": str(held_out), "eval_steps": 5}
    every = {**asked, "metrics": ["token_accuracy", "exact_match", "rouge", "perplexity"]}
    every["generate"] = {"max_new_tokens": 5, "samples": 6}
    few = {**asked, "generate": {"max_new_tokens": 3, "samples": 1}}
    tasks = {
        "lora": {**TASKS["lora"], "eval": every},
        "prefix": {**TASKS["prefix"], "eval": few},
    }
    save = workplace.root / "run"
    arguments = workplace.arguments("--save", save, tasks=workplace.write_tasks("texts.yaml", tasks))
    run = server.run(arguments)
    assert run.status == 0, run.errors
    evaluations = [line for line in metrics(save, "lora") if "eval_loss" in line]
    assert [line["step"] for line in evaluations] == [0, 5, 10, 14]
    samples = [json.loads(line) for line in (save / "lora" / "samples.jsonl").read_text().splitlines()]
    scorer = RougeScorer(["rouge1", "rouge2", "rougeL"])
    for line in evaluations:
        own = [sample for sample in samples if sample["step"] == line["step"]]
        assert len(own) == 6
        exact = [sample["completion"] == sample["reference"] for sample in own]
        assert line["eval_exact_match"] == pytest.approx(sum(exact) / 6)
        scores = [scorer.score(sample["reference"], sample["completion"]) for sample in own]
        for name in ("rouge1", "rouge2", "rougeL"):
            assert line[f"eval_{name}"] == pytest.approx(sum(s[name].fmeasure for s in scores) / 6)
        assert line["eval_perplexity"] == pytest.approx(math.exp(line["eval_loss"]))
        assert 0 <= line["eval_token_accuracy"] <= 1 and "eval_accuracy" not in line
    records = [json.loads(line) for line in held_out.read_text().splitlines()]
    for sample, record in zip(samples, records, strict=False):
        assert (sample["prompt"], sample["reference"]) == (record["prompt"], record["completion"])
    assert len((save / "prefix" / "samples.jsonl").read_text().splitlines()) == 3
    assert 'lora: prompt "' in run.output and "prefix: accuracy is the share of labelled tokens" in run.output
