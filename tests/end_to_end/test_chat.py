"""`tools/chat.py`: adapters of a run and of directories, side by side, each in a conversation of its own."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from megatron_mux import runtime
from megatron_mux.merging.provenance import Provenance
from tests.end_to_end.forked import Server
from tests.end_to_end.workplace import TASKS, Workplace, furnish
from tests.reference import greedy, peft_solo
from tools import chat, merge_adapter

TEMPLATE = "{% for m in messages %}w80 {{ m['content'] }} </s> {% endfor %}{% if add_generation_prompt %}w81{% endif %}"
PROMPT = "w1 w2 w3"


@pytest.fixture(autouse=True)
def same_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests of the session go on in it."""
    monkeypatch.setattr(runtime, "shutdown", lambda: None)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, server: Server) -> Workplace:
    """A workplace with a run of two tasks that have learned a little."""
    workplace = furnish(tmp_path_factory.mktemp("chat"))
    lora = {key: value for key, value in TASKS["lora"].items() if key != "eval"}
    lora["training"] = {**lora["training"], "max_steps": 3, "learning_rate": 0.3}
    diff = {**TASKS["diff"], "training": {**TASKS["diff"]["training"], "max_steps": 3, "learning_rate": 0.5}}
    tasks = workplace.write_tasks("two.yaml", {"lora": lora, "diff": diff})
    run = server.run(workplace.arguments("--save", workplace.root / "run", tasks=tasks))
    assert run.status == 0, run.errors
    return workplace


def talk(place: Workplace, capsys: pytest.CaptureFixture[str], *more: str | Path) -> tuple[int, str, str]:
    """Exit status, output and errors."""
    status = chat.main([str(part) for part in ("--backbone", place.backbone, *more)])
    out, errors = capsys.readouterr()
    return status, out, errors


def wanted(place: Workplace, adapter: bool, tokens: Sequence[int], most: int) -> str:
    """What `transformers` and `peft` say."""
    tokenizer = AutoTokenizer.from_pretrained(place.backbone)
    model = peft_solo.load_model(place.backbone)
    if adapter:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, place.root / "run" / "lora" / "checkpoint-3")
    found = greedy.generate(model, torch.tensor(tokens), most, [tokenizer.eos_token_id])
    return str(tokenizer.decode(list(found.tokens), skip_special_tokens=True))


def test_everyone_answers_a_prompt(place: Workplace, capsys: pytest.CaptureFixture[str]) -> None:
    run = place.root / "run"
    own = f"mine={run / 'lora' / 'checkpoint-3'}"
    some = ("--run", run, "--adapter", own, "--with-backbone", "--prompt", PROMPT, "--max-new-tokens", "8")
    status, out, errors = talk(place, capsys, *some, "--json")
    assert status == 0, errors
    answers = {one["name"]: one for one in json.loads(out)["answers"]}
    assert list(answers) == ["mine", "lora", "diff", "backbone"]
    assert answers["mine"] == {**answers["lora"], "name": "mine"}
    tokens = AutoTokenizer.from_pretrained(place.backbone)(PROMPT)["input_ids"]
    assert answers["lora"]["text"] == wanted(place, True, tokens, 8)
    assert answers["backbone"]["text"] == wanted(place, False, tokens, 8)
    assert len({answers[name]["text"] for name in ("lora", "diff", "backbone")}) == 3
    status, out, errors = talk(place, capsys, *some, "--tasks", "diff")
    assert status == 0 and all(f" {name} " in out for name in ("mine", "diff", "backbone"))
    assert "lora " not in out and "tokens in" in out


def test_a_backbone_quantised_on_load_is_quantised_again(
    place: Workplace, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    run, adapter = place.root / "quantised", place.root / "quantised/lora/checkpoint-1"
    lora = {key: value for key, value in TASKS["lora"].items() if key != "eval"}
    tasks = place.write_tasks(
        "one.yaml", {"lora": {**lora, "training": {**lora["training"], "max_steps": 1}}}
    )
    how = "--mux-backbone-dtype", "int8", "--bf16"
    done = server.run(place.arguments(*how, "--save", run, tasks=tasks))
    assert done.status == 0, done.errors
    assert Provenance.read(adapter).header.keys() >= {"backbone_fingerprint", "backbone_quantised"}
    assert Provenance.read(adapter).rounded_to == torch.bfloat16
    assert "Quantisation of the backbone: INT8, made on load" in (adapter / "README.md").read_text()
    some = ("--prompt", PROMPT, "--max-new-tokens", "2")
    status, _, errors = talk(place, capsys, *some, "--run", run, "--adapter", f"mine={adapter}")
    assert status == 0 and not errors, errors
    status, _, errors = talk(place, capsys, *some, "--adapter", f"mine={adapter}")
    assert status == 2 and "give --backbone-dtype int8" in errors, errors
    words = ["--backbone", place.backbone, "--adapter", adapter, "--output", place.root / "merged"]
    assert merge_adapter.main([*map(str, words), "--backbone-dtype", "int8"]) == 0


def test_a_conversation_goes_on_until_it_is_reset(
    place: Workplace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = place.backbone / "tokenizer_config.json"
    before = config.read_text()
    config.write_text(json.dumps({**json.loads(before), "chat_template": TEMPLATE}))
    turns = ["w1", "/only nobody", "/only lora", "w2", "/help", "/reset", "/only", "w1", "/quit", "w3"]
    heard: list[Any] = []
    ask = chat_module().Conversation.ask

    def note(self: Any, text: str, names: Any = None) -> Any:
        prompts = {name: self._prompt(name, text).tolist() for name in names}
        heard.append((prompts, ask(self, text, names)))
        return heard[-1][1]

    monkeypatch.setattr(chat_module().Conversation, "ask", note)
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{turn}\n" for turn in turns)))
    try:
        status, out, errors = talk(place, capsys, "--run", place.root / "run", "--max-new-tokens", "5")
    finally:
        config.write_text(before)
    assert status == 0, errors
    assert "nobody is called nobody: there are lora, diff" in out and "/reset begins anew" in out
    (first, answers), (second, _), (third, again) = heard
    assert list(first) == ["lora", "diff"] and list(second) == ["lora"] and list(third) == list(first)
    tokenizer = AutoTokenizer.from_pretrained(place.backbone)
    said = answers["lora"].text.strip()
    text = f"w80 w1 </s> w80 {said} </s> w80 w2 </s> w81"
    assert second["lora"] == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert third == first and again == answers, "a conversation that begins anew is the first one again"


def chat_module() -> Any:
    from megatron_mux.chat import conversation

    return conversation


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--adapter", "=broken"], "must be NAME=DIR"),
        (
            ["--adapter", "a=no-such-directory", "--prompt", "w1"],
            "no-such-directory: no such directory: give that of an adapter, a task or a run",
        ),
        (["--run", "no-such-run", "--prompt", "w1"], "--run no-such-run: no run was saved there"),
        (["--json"], "--json: needs --prompt TEXT"),
        (["--tasks", "a"], "--tasks: needs --run DIR"),
        (
            ["--run", "RUN", "--tasks", "lora,other", "--prompt", "w1"],
            "no checkpoint of other (but of: lora, diff)",
        ),
        (
            ["--run", "RUN", "--adapter", "lora=RUN/lora/checkpoint-3", "--prompt", "w1"],
            "another adapter 'lora'",
        ),
        (["--prompt", " "], "the text has no token"),
    ],
)
def test_what_is_refused(
    more: list[str], said: str, place: Workplace, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(place.root / "run")
    try:
        status, _, errors = talk(place, capsys, *(part.replace("RUN", run) for part in more))
    except SystemExit as exit_:
        status, errors = int(exit_.code or 0), capsys.readouterr().err
    assert status == 2 and said in errors, errors
