"""Where the assistant's turns are in a rendered chat. TRL's are compared in end_to_end/test_data_layouts.py."""

from __future__ import annotations

import re
from typing import Any

import pytest

from megatron_mux.data.bad_record import BadRecordError
from megatron_mux.data.messages import Messages
from megatron_mux.data.tokenise import Example, Tokeniser
from tests.unit.data.tiny_tokenizers import CHATML, build

ASK, MORE = {"role": "user", "content": "hello?"}, {"role": "user", "content": "is it?"}
ANSWER, LAST = {"role": "assistant", "content": "hello world"}, {"role": "assistant", "content": "yes"}
TOOLS = [
    {"type": "function", "function": {"name": "test", "parameters": {"type": "object", "properties": {}}}}
]
CALL: dict[str, Any] = {
    "role": "assistant",
    "tool_calls": [{"type": "function", "function": {"name": "test", "arguments": {"a": 1}}}],
}
RESULT = {"role": "tool", "content": "no"}

# Renders the last answer with what came before it, earlier ones without, as Qwen3 does with thinking.
FORGETFUL = (
    "{% if tools %}{{ '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and loop.last and enable_thinking is not defined %}{{ 'thinking... ' }}{% endif %}"
    "{{ m['content'] }}{% for c in m.tool_calls or [] %}{{ 'call ' + c.function | tojson }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{%- generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def learned(tokenizer: Any, example: Example) -> str:
    return str(tokenizer.decode(example.tokens[example.labelled]))


def test_a_template_that_looks_back() -> None:
    tokenizer: Any = build(FORGETFUL)
    tokeniser = Tokeniser(tokenizer, 256)
    alone = tokeniser.encode(Messages([ASK, ANSWER]))
    assert learned(tokenizer, alone) == "thinking... hello world<|im_end|>"
    record = Messages([ASK, ANSWER, MORE, CALL, RESULT, LAST], tools=TOOLS)
    example = tokeniser.encode(record)
    rendered = tokenizer.apply_chat_template(record.messages, tools=TOOLS, return_dict=False)
    assert example.tokens.tolist() == rendered and "thinking... yes" in tokenizer.decode(rendered)
    call = 'call {"name": "test", "arguments": {"a": 1}}'
    assert learned(tokenizer, example) == f"hello world<|im_end|>{call}<|im_end|>thinking... yes<|im_end|>"
    calm = Messages(record.messages, tools=TOOLS, template_kwargs={"enable_thinking": True})
    assert "thinking" not in learned(tokenizer, tokeniser.encode(calm))


def test_a_turn_that_cannot_be_found_is_refused() -> None:
    """It is not rendered at all once more follows."""
    hidden = CHATML.replace("m['content']", "(m['content'] if loop.last or m['role'] == 'user' else '')")
    with pytest.raises(BadRecordError, match=r"the assistant's turn \(message 2\) cannot be found"):
        Tokeniser(build(hidden), 256).encode(Messages([ASK, ANSWER, MORE, LAST]))


def test_no_end_of_turn_to_look_for() -> None:
    """The content alone is learned of a turn that is rendered differently once more follows."""
    bare = re.sub(r"<\|im_\w+\|>", "", FORGETFUL)
    tokenizer = build(bare)
    example = Tokeniser(tokenizer, 256).encode(Messages([ASK, ANSWER, MORE, LAST]))
    assert learned(tokenizer, example).startswith("hello world")
    assert learned(tokenizer, example).endswith("thinking... yes\n</s>")


def test_a_templates_own_marks_are_taken() -> None:
    tokenizer = build(MARKED)
    messages = [ASK, ANSWER, MORE, LAST]
    example = Tokeniser(tokenizer, 256).encode(Messages(messages))
    theirs: Any = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    assert example.tokens.tolist() == theirs["input_ids"]
    assert example.labelled.tolist() == [bool(mark) for mark in theirs["assistant_masks"]]
    assert learned(tokenizer, example) == "hello world<|im_end|>yes<|im_end|>"
