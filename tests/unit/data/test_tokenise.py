"""Which tokens a record becomes, and which of them are learned."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from megatron_mux.data.bad_record import BadRecordError
from megatron_mux.data.messages import Messages
from megatron_mux.data.records import PromptCompletion
from megatron_mux.data.tokenise import Example, Tokeniser
from megatron_mux.errors import UserError
from tests.unit.data.tiny_tokenizers import CHATML, build

SYSTEM = {"role": "system", "content": "be brief"}
ASK = {"role": "user", "content": "hello?"}
ANSWER = {"role": "assistant", "content": "hello world"}
MORE = [{"role": "user", "content": "a test"}, {"role": "assistant", "content": "is it?"}]


def learned(tokenizer: Any, example: Example) -> str:
    return str(tokenizer.decode(example.tokens[example.labelled]))


def conversation(*messages: dict[str, Any]) -> Messages:
    return Messages(list(messages))


def test_prompt_and_completion(llama_like: PreTrainedTokenizerFast) -> None:
    example = Tokeniser(llama_like, 64).encode(PromptCompletion("hello wor", "ld, yes"))
    plain = llama_like("hello wor", add_special_tokens=False)["input_ids"]
    answer = llama_like("ld, yes", add_special_tokens=False)["input_ids"]
    bos, eos = llama_like.bos_token_id, llama_like.eos_token_id
    assert example.tokens.tolist() == [bos, *plain, *answer, eos]
    assert example.labelled.tolist() == [False] * (1 + len(plain)) + [True] * (len(answer) + 1)
    assert example.completion_text == "ld, yes"
    assert example.tokens.dtype == np.int64
    assert example.labelled.dtype == np.bool_


def test_text(tokenizer: PreTrainedTokenizerFast, llama_like: PreTrainedTokenizerFast) -> None:
    for each in (tokenizer, llama_like):
        example = Tokeniser(each, 64).encode(PromptCompletion(None, "hello world"))
        assert example.tokens.tolist() == [*each("hello world")["input_ids"], each.eos_token_id]
        assert example.labelled.tolist() == [False] + [True] * (len(example.tokens) - 1)
        assert example.completion_text is None


# -- messages


def test_a_template_without_an_end_of_turn_gets_the_end_of_sequence() -> None:
    bare = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    bare += "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    tokenizer = build(bare)
    example = Tokeniser(tokenizer, 256).encode(conversation(ASK, ANSWER, *MORE))
    assert learned(tokenizer, example) == "hello world\n is it?\n</s>"  # the frame ends in the space of " is"
    assert example.tokens.tolist().count(tokenizer.eos_token_id) == 1
    unfinished = Tokeniser(tokenizer, 256).encode(conversation(ASK, ANSWER, ASK))
    assert learned(tokenizer, unfinished) == "hello world\n"


def test_conversations_that_cannot_be_rendered() -> None:
    picky = build("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(BadRecordError, match="does not take this conversation: roles must alternate"):
        Tokeniser(picky, 64).encode(conversation(ASK, ANSWER))
    with pytest.raises(UserError, match="tokenizer has none"):
        Tokeniser(build(None), 64).encode(conversation(ASK, ANSWER))


# -- properties

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    ["hello world", " yes", ""]
)
roles = st.sampled_from(["user", "assistant", "system"])
turns = st.builds(lambda r, c: {"role": r, "content": c}, roles, texts)
records = st.one_of(
    st.builds(PromptCompletion, st.none() | texts, texts),
    st.builds(lambda rest: Messages([ASK, *rest]), st.lists(turns, max_size=4)),
)
_LLAMA, _CHATML = build(prefix=True), build(CHATML)


@settings(deadline=None)
@given(st.lists(records, max_size=6), st.integers(2, 80))
def test_together_or_one_by_one(batch: list[Any], length: int) -> None:
    tokeniser = Tokeniser(_LLAMA, length)
    for record, together in zip(batch, tokeniser.encode_many(batch), strict=True):
        assert isinstance(together, Example)
        alone = tokeniser.encode(record)
        assert alone.tokens.tolist() == together.tokens.tolist()
        assert alone.labelled.tolist() == together.labelled.tolist()
        assert len(alone.tokens) == len(alone.labelled) <= length
        assert not alone.labelled[:1].any()


@settings(deadline=None)
@given(texts, texts)
def test_what_is_learned_is_the_completion(prompt: str, completion: str) -> None:
    example = Tokeniser(_LLAMA, 1000).encode(PromptCompletion(prompt, completion))
    marks = np.flatnonzero(example.labelled)
    assert marks.tolist() == list(range(marks[0], len(example.tokens)))
    assert learned(_LLAMA, example) == completion + "</s>"


@settings(deadline=None)
@given(st.lists(st.tuples(texts, texts), min_size=1, max_size=3))
def test_what_is_learned_is_the_assistants_turns(pairs: list[tuple[str, str]]) -> None:
    tokenizer = _CHATML
    messages = [m for ask, say in pairs for m in ({**ASK, "content": ask}, {**ANSWER, "content": say})]
    example = Tokeniser(tokenizer, 1000).encode(Messages(messages))
    assert example.tokens.tolist() == tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=False
    )
    # A line break that a turn begins with may share its token with the frame's.
    if all("\n" not in say for _, say in pairs):
        assert learned(tokenizer, example) == "".join(say + "<|im_end|>" for _, say in pairs)


class Busy:
    """A tokenizer that notes whether two threads call it at once."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.is_called = self.overlapped = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def __call__(self, texts: list[str], **options: Any) -> Any:
        self.overlapped |= self.is_called
        self.is_called = True
        time.sleep(0.02)
        self.is_called = False
        return self.tokenizer(texts, **options)


def test_threads_take_turns_with_a_tokenizer(llama_like: PreTrainedTokenizerFast) -> None:
    busy: Any = Busy(llama_like)
    tokenisers = [Tokeniser(busy, length) for length in (64, 3)]  # as of two data sets
    record = PromptCompletion("hello wor", "ld, yes")
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda tokeniser: tokeniser.encode(record), tokenisers))
    assert not busy.overlapped
    assert found[1].tokens.tolist() == found[0].tokens.tolist()[:3]
