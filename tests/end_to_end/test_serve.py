"""The service as its clients and its operator meet it: real processes, OpenAI's client, kills."""

from __future__ import annotations

import csv
import http.client
import io
import os
import subprocess
import sys
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from safetensors.torch import load, load_file

from megatron_mux.split import certificates
from tests.end_to_end.forked import Server as Runs
from tests.end_to_end.outcome import metrics
from tests.end_to_end.service_process import ROOT, ServiceProcess, until
from tests.end_to_end.workplace import Workplace

ADAPTER = {"peft_type": "LORA", "r": 4, "lora_dropout": 0.1, "target_modules": ["q_proj", "v_proj"]}


@pytest.fixture
def service(workplace: Workplace, tmp_path: Path) -> Iterator[ServiceProcess]:
    own = ServiceProcess(workplace.backbone, tmp_path / "state")
    try:
        yield own
    finally:
        own.kill()
        own.kill_instances()


def submit(service: ServiceProcess, workplace: Workplace, steps: int, suffix: str, **training: Any) -> str:
    client = service.client
    files = [
        client.files.create(file=workplace.root / name, purpose="fine-tune").id
        for name in ("pairs.jsonl", "held-out.jsonl")
    ]
    usual = {"max_steps": steps, "per_device_train_batch_size": 4, "learning_rate": 3e-3}
    sections = {
        "adapter": ADAPTER,
        "data": {"max_length": 24},
        "training": {**usual, **training},
        "eval": {"eval_steps": 1000},
    }
    return client.fine_tuning.jobs.create(
        model="tiny",
        training_file=files[0],
        validation_file=files[1],
        suffix=suffix,
        seed=7,
        extra_body=sections,
    ).id


def alone(workplace: Workplace, runs: Runs, steps: int) -> Path:
    """The same task by `pretrain_mux.py`."""
    task = {
        "adapter": ADAPTER,
        "data": {"path": "pairs.jsonl", "max_length": 24},
        "training": {"max_steps": steps, "per_device_train_batch_size": 4, "learning_rate": 3e-3, "seed": 7},
        "eval": {"path": "held-out.jsonl", "eval_steps": 1000},
    }
    directory = workplace.root / f"alone-{steps}"
    flags: list[str | Path] = ["--save", directory, "--mux-fp32", "--mux-policy", "temporal"]
    run = runs.run(
        workplace.arguments(*flags, tasks=workplace.write_tasks(f"alone-{steps}.yaml", {"job": task}))
    )
    assert run.status == 0, run.errors
    return directory


MESSAGES: Any = [{"role": "user", "content": "what is new"}]


def said(client: openai.OpenAI, model: str) -> str | None:
    answer = client.chat.completions.create(model=model, messages=MESSAGES, temperature=0, max_tokens=12)
    assert answer.usage is not None and answer.usage.completion_tokens <= 12
    return answer.choices[0].message.content


def said_in_pieces(client: openai.OpenAI, model: str) -> str:
    stream = client.chat.completions.create(
        model=model, messages=MESSAGES, temperature=0, max_tokens=12, stream=True
    )
    return "".join(own.choices[0].delta.content or "" for own in stream if own.choices)


def greedy(workplace: Workplace, adapter: Path | None) -> str:
    """The same by `transformers` and `peft`."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(workplace.backbone)
    model: Any = AutoModelForCausalLM.from_pretrained(workplace.backbone, dtype=torch.float32)
    model = model if adapter is None else PeftModel.from_pretrained(model, adapter)
    prompt = tokenizer(MESSAGES[0]["content"], return_tensors="pt")  # it has no chat template
    found = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    return str(tokenizer.decode(found[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))


@pytest.mark.slow
def test_jobs_survive_kills_of_the_server_and_of_instances_and_train_as_alone(
    workplace: Workplace, service: ServiceProcess, server: Runs
) -> None:
    steps = 60
    expected = alone(workplace, server, steps)
    client = service.client
    first = submit(service, workplace, steps, "first")
    other = submit(service, workplace, 400, "other")
    jobs = client.fine_tuning.jobs
    until(lambda: (jobs.retrieve(first).model_extra or {})["step"] >= 6)
    assert said(client, "tiny") == greedy(workplace, None), "beside jobs, which it does not change: see below"
    service.kill()
    before = service.instances()
    service.start()
    until(lambda: (jobs.retrieve(first).model_extra or {})["step"] >= 12)
    assert service.instances() == before, "the instance was found again"
    jobs.pause(first)
    until(lambda: str(jobs.retrieve(first).status) == "paused")
    service.kill_instances()
    assert client.fine_tuning.jobs.resume(first).status == "queued"
    until(lambda: jobs.retrieve(first).status == "succeeded")
    done = jobs.retrieve(first)
    tuned = str(done.fine_tuned_model)
    assert (
        said(client, tuned)
        == said_in_pieces(client, tuned)
        == greedy(workplace, expected / "job" / f"checkpoint-{steps}")
    )
    jobs.cancel(other)
    until(lambda: jobs.retrieve(other).status == "cancelled")

    table, archive = (client.files.content(own).read() for own in done.result_files)
    rows = [row for row in csv.DictReader(io.StringIO(table.decode())) if row["loss"]]
    alone_rows = [line for line in metrics(expected, "job") if "loss" in line]
    assert [int(row["step"]) for row in rows] == [*range(1, steps + 1)], "each step once"
    assert [float(row["loss"]) for row in rows] == [line["loss"] for line in alone_rows]
    assert done.trained_tokens == sum(line["tokens"] for line in alone_rows)
    zipped = zipfile.ZipFile(io.BytesIO(archive))
    found = load(zipped.read("adapter_model.safetensors"))
    wanted = load_file(expected / "job" / f"checkpoint-{steps}" / "adapter_model.safetensors")
    assert found.keys() == wanted.keys() and all(torch.equal(found[key], wanted[key]) for key in wanted)
    told = [event.message for event in jobs.list_events(other, limit=100).data if event.type == "message"]
    assert any("has died; it goes on from step" in text for text in told)
    assert {"tiny", done.fine_tuned_model} <= {model.id for model in client.models.list()}


def test_what_no_service_can_be_started_with_is_refused(workplace: Workplace, tmp_path: Path) -> None:
    def refused(*words: str) -> str:
        run = subprocess.run(
            [sys.executable, "-m", "megatron_mux.cli", "serve", *words],
            capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False,
        )  # fmt: skip
        assert run.returncode == 2 and not (tmp_path / "s").exists(), run.stderr
        return run.stderr

    state = ["--state", str(tmp_path / "s")]
    text = refused("--backbone", "tiny", "--backbone", "a=/nowhere", *state)
    assert "NAME=DIR" in text and "/nowhere: no such directory" in text
    backbone = ["--backbone", f"tiny={workplace.backbone}"]
    assert "in the open" in refused(*backbone, *state, "--listen", "0.0.0.0:80")
    assert "the service chooses that" in refused(*backbone, *state, "--save", "x")


def test_clients_reach_it_over_tls_and_nothing_without(
    workplace: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "certificates"
    assert certificates.main([str(home), "--server", "localhost"]) == 0
    tls = ["--tls-cert", str(home / "server.pem"), "--tls-key", str(home / "server.key")]
    service = ServiceProcess(
        workplace.backbone, tmp_path / "state", *tls, address="0.0.0.0", ca=home / "ca.pem"
    )
    try:
        with pytest.raises(openai.APIConnectionError):
            service.client.with_options(max_retries=0).models.list()
        monkeypatch.setenv("SSL_CERT_FILE", str(home / "ca.pem"))  # as docs say
        assert [model.id for model in service.client.models.list()] == ["tiny"]
        monkeypatch.delenv("SSL_CERT_FILE")
        assert f"at https://localhost:{service.port}/v1" in service.log.read_text()
        with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
            urllib.request.urlopen(f"{service.url}/healthz")
        with pytest.raises((OSError, http.client.HTTPException)):
            urllib.request.urlopen(service.url.replace("https", "http"))
    finally:
        service.kill()
