"""An instance's completions: adapters that come and go, choices that end once each, and their share of the time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from megatron_mux.backbone.model import Backbone
from megatron_mux.data.tokenizer import load_tokenizer
from megatron_mux.engine import Engine
from megatron_mux.runtime import Parallel
from megatron_mux.serve.channel.messages import Abandon, Broken, Complete, Message, Piece
from megatron_mux.serve.instance import completions as module
from megatron_mux.serve.instance.completions import Completions
from tests.end_to_end.families import lora
from tests.end_to_end.workplace import Workplace
from tests.reference import peft_solo

ADAPTERS = ("one", "two", "three")


class Instance:
    """Completions on a backbone, and what they tell the server."""

    def __init__(self, workplace: Workplace, parallel: Parallel, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: list[Message] = []
        self.lines: list[str] = []
        self.root = workplace.root
        self.engine = Engine(Backbone.load(workplace.backbone, parallel, torch.float32), parallel)
        registry = SimpleNamespace(
            engine=self.engine,
            files=SimpleNamespace(tokenizer=load_tokenizer(workplace.backbone)),
            info=self.engine.backbone.info,
            reporter=SimpleNamespace(say=self.lines.append),
        )
        self.completions = Completions(workplace.root, self.sent.append)
        self.completions.set_up(cast(Any, registry))
        monkeypatch.setattr(module, "MOST_ADAPTERS", 2)

    def ask(self, own: str, adapter: str = "", **fields: Any) -> None:
        usual: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8}
        messages = [{"role": "user", "content": "what is new"}]
        asked = Complete(id=own, adapter=adapter, messages=messages, **{**usual, **fields})
        self.completions.told(asked)

    def run(self) -> None:
        while self.completions.between_steps():
            pass

    def text(self, own: str, choice: int = 0) -> str:
        pieces = [p for p in self.sent if isinstance(p, Piece) and (p.id, p.choice) == (own, choice)]
        assert [p.finish for p in pieces if p.finish] == [pieces[-1].finish], (
            "it ends once, with its last piece"
        )
        return "".join(p.text for p in pieces)

    def broken(self) -> dict[str, Broken]:
        return {own.id: own for own in self.sent if isinstance(own, Broken)}


@pytest.fixture
def instance(workplace: Workplace, parallel: Parallel, monkeypatch: pytest.MonkeyPatch) -> Iterator[Instance]:
    for seed, name in enumerate(ADAPTERS):
        section = {**lora(["q_proj", "v_proj"], r=4 + seed), "lora_alpha": 64}  # they say different things
        tensors = peft_solo.random_adapter(workplace.backbone, section, seed=seed)
        model: Any = peft_solo.wrap(peft_solo.load_model(workplace.backbone), section, tensors)
        model.save_pretrained(workplace.root / name)
    yield Instance(workplace, parallel, monkeypatch)


def test_adapters_answer_together_as_alone_and_the_one_used_longest_ago_leaves(instance: Instance) -> None:
    for name in ("one", "two"):
        instance.ask(name, name)
        instance.ask(f"again {name}", name)
    instance.ask("bare")
    instance.run()
    texts = [instance.text(name) for name in ("one", "two", "bare")]
    assert len(set(texts)) == 3 and [instance.text(f"again {name}") for name in ("one", "two")] == texts[:2]
    assert len(instance.engine.adapters.tasks) == 2
    instance.ask("more", "one")
    instance.ask("new", "three")  # "two" was used longest ago
    instance.run()
    assert instance.text("more") == texts[0]
    assert [name.partition("@")[2] for name in instance.engine.adapters.tasks] == ["one", "three"]
    assert not instance.broken() and not instance.engine.active


def test_one_adapter_too_many_is_told_to_come_later_and_an_unreadable_one_what_is_wrong(
    instance: Instance,
) -> None:
    for name in ADAPTERS:
        instance.ask(name, name)
    instance.ask("none", "nowhere")
    broken = instance.broken()
    assert broken.keys() == {"three", "none"} and not any(own.is_clients for own in broken.values())
    assert "try again later" in broken["three"].message
    instance.run()
    instance.ask("nothing", "nowhere")
    told = instance.broken()["nothing"].message
    assert told == "its adapter cannot be read" and any("nowhere" in line for line in instance.lines)
    assert instance.text("one") and instance.text("two")


def test_choices_have_seeds_of_their_own_and_stops_and_end_once(instance: Instance) -> None:
    instance.ask("drawn", "one", choices=3, temperature=1.5, seed=4, max_tokens=12, top_log_probs=2)
    instance.ask("again", "one", choices=3, temperature=1.5, seed=4, max_tokens=12)
    instance.ask("greedy", "one", max_tokens=12)
    instance.run()
    drawn = [instance.text("drawn", choice) for choice in range(3)]
    assert len(set(drawn)) == 3 and drawn == [instance.text("again", choice) for choice in range(3)]
    pieces = [own for own in instance.sent if isinstance(own, Piece) and own.id == "drawn"]
    assert {len(p.top) for own in pieces for p in own.log_probs} == {2}
    assert all(len([p for own in pieces if own.choice == i for p in own.log_probs]) <= 12 for i in range(3))
    words = instance.text("greedy").split()
    instance.ask("stopped", "one", max_tokens=12, stop=[words[2]])
    instance.run()
    assert instance.text("stopped").split() == words[: words.index(words[2])]
    last = [own for own in instance.sent if isinstance(own, Piece) and own.id == "stopped"][-1]
    assert last.finish == "stop" and last.completion_tokens <= 12 and last.prompt_tokens > 0


def test_who_leaves_is_forgotten_and_the_end_of_the_run_breaks_the_others(instance: Instance) -> None:
    instance.ask("leaves", "one", max_tokens=1000)
    instance.ask("stays", "two", max_tokens=1000)
    instance.completions.between_steps()
    instance.completions.told(Abandon(id="leaves"))
    count = len([own for own in instance.sent if isinstance(own, Piece) and own.id == "leaves"])
    instance.completions.between_steps()
    assert count == len([own for own in instance.sent if isinstance(own, Piece) and own.id == "leaves"])
    instance.completions.close()
    assert instance.broken().keys() == {"stays"} and not instance.completions.between_steps()


def test_a_conversation_that_is_too_long_is_the_clients(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LONGEST", 6)
    instance.ask("fits", max_tokens=1000)
    monkeypatch.setattr(module, "LONGEST", 2)
    instance.ask("long")
    assert instance.broken()["long"].is_clients and "may have 2" in instance.broken()["long"].message
    instance.completions.told(Complete(id="huge", messages=[{"role": "user", "content": "a" * 65}]))
    assert "more than the 2 tokens" in instance.broken()["huge"].message, "it is not even tokenised"
    instance.run()
    ends = [own for own in instance.sent if isinstance(own, Piece) and own.id == "fits"][-1]
    assert ends.finish and ends.prompt_tokens + ends.completion_tokens <= 7


def test_completions_get_their_share_of_the_time(instance: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    own, clock = instance.completions, [0.0]
    assert not [*own.due(3.0)], "steps go on without a stop while nobody asks"
    instance.ask("own", max_tokens=1000)
    assert [*own.due(3.0)] == [(1, 1)], "they get their turn after each step"

    def slow() -> list[Any]:
        clock[0] += 0.25
        return []

    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(type(own._completions), "run_pass", lambda _: slow())
    monkeypatch.setattr(type(instance.engine), "active", ("a",))
    shares = {}
    for share, step in ((0.25, 3.0), (0.5, 3.0), (0.5, 0.02)):  # a pass may take longer than a step
        own.share = share
        for turn in range(230):
            if turn == 30:  # by now the seconds of a pass are known
                clock[0] = 0.0
            assert [*own.due(step)] == [(1, 1)]
            own.after_steps(1)
            while own.between_steps():
                pass
        shares[share, step] = clock[0] / (clock[0] + 200 * step)
    assert shares == pytest.approx({(0.25, 3.0): 0.25, (0.5, 3.0): 0.5, (0.5, 0.02): 0.5}, abs=0.03)


def test_a_token_that_the_model_has_not_is_refused(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocab = instance.engine.backbone.shape.vocab
    monkeypatch.setattr(module, "prompt_tokens", lambda *_: [1, vocab])
    instance.ask("own")
    assert instance.broken()["own"].is_clients and str(vocab) in instance.broken()["own"].message
