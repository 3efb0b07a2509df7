"""What a line may hold."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_mux.data.bad_record import BadRecordError
from megatron_mux.data.messages import Messages
from megatron_mux.data.records import PromptCompletion, Record, instruction_prompt, parse_json, record_of


def parse_line(line: bytes) -> Record:
    return record_of(parse_json(line))


def parse(value: Any) -> Any:
    return parse_line(json.dumps(value).encode())


def test_the_four_shapes() -> None:
    assert parse({"prompt": "a", "completion": "b", "id": 3}) == PromptCompletion("a", "b")
    assert parse({"text": "a"}) == PromptCompletion(None, "a")
    turns = [{"role": "user", "content": "a"}]
    assert parse({"messages": turns}) == Messages(turns)
    with_input, without = instruction_prompt("a", "c"), instruction_prompt("a")
    assert parse({"instruction": "a", "output": "b"}) == PromptCompletion(without, "b")
    assert parse({"instruction": "a", "input": None, "output": "b"}) == PromptCompletion(without, "b")
    assert parse({"instruction": "a", "input": "c", "output": "b"}) == PromptCompletion(with_input, "b")
    assert with_input == "### Instruction:\na\n\n### Input:\nc\n\n### Response:\n"
    assert without == "### Instruction:\na\n\n### Response:\n"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"text": "a"', "not valid JSON: Expecting ',' delimiter (column 13)"),
        (b'{"text": "a"\r\n', "(column 13)"),
        (b'{"text": "\xe9"}', "not UTF-8 text (byte 10 of the line)"),
        (b"[" * 100_000, "nested too deeply"),
        (b"9" * 5000, "not valid JSON"),
        (b"3", "holds a JSON number"),
        (b"null", "holds a JSON null"),
        (b'{"text": 3}', '"text" must be text, got a JSON number'),
        (b'{"prompt": "a", "completion": ["b"]}', '"completion" must be text, got a JSON array'),
        (b'{"prompt": "a"}', "no known form"),
        (
            b'{"prompt": "a", "completion": "b", "text": "c"}',
            "keys of several forms: choose one with columns: {prompt: prompt, completion: completion} or {text: text}",
        ),
        (
            b'{"instruction": "a", "input": "b", "output": "c", "text": "d"}',
            "{text: text} or {instruction: instruction, input: input, output: output}",
        ),
        (b'{"text": "a", "output": "b"}', "choose one with columns: {text: text}"),
        (b"{}", "got nothing"),
        (b'{"text": "\\ud800"}', "half a surrogate pair"),
        (b'{"messages": []}', "at least one message"),
        (b'{"messages": [{"role": "user"}]}', 'message 1 must be an object with "role" and "content"'),
        (b'{"messages": [{"role": "user", "content": null}]}', '"content" of message 1 must be text'),
        (
            b'{"messages": [{"role": "user", "content": "a"}], "tools": [1]}',
            '"tools" must be a list of JSON schemas',
        ),
        (b'{"messages": [{"role": "user", "content": "a"}], "tools": "[1"}', "or one as JSON text"),
        (
            b'{"messages": [{"role": "user", "content": "a"}], "documents": [1]}',
            '"documents" beside messages is not',
        ),
        (b'{"prompt": [{"role": "user", "content": "a"}], "completion": "b"}', '"completion" must be a list'),
        (
            b'{"prompt": [{"role": "user", "content": 1}], "completion": []}',
            '"content" of message 1 of "prompt"',
        ),
        (b'{"messages": [{"role": "user", "content": "a", "tool_calls": [1]}]}', '"tool_calls" of message 1'),
    ],
)
def test_bad_lines(line: bytes, said: str) -> None:
    with pytest.raises(BadRecordError) as caught:
        parse_line(line)
    assert said in str(caught.value)


@given(st.binary(max_size=40) | st.recursive(
    st.none() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["text", "prompt", "messages", "role", "content", "output"]), inner, max_size=3),
).map(lambda value: json.dumps(value).encode()))  # fmt: skip
def test_any_line_is_answered_not_crashed_on(line: bytes) -> None:
    try:
        parse_line(line)
    except BadRecordError as error:
        assert "\n" not in str(error)


def test_conversations() -> None:
    """ShareGPT's keys, a prompt and a completion of messages, tools as a list or as JSON text."""
    ask, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    shared = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    assert parse({"conversations": shared}) == parse({"messages": [ask, answer]}) == Messages([ask, answer])
    assert parse({"prompt": [ask], "completion": [answer]}) == Messages([ask, answer], prompt=1)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"default": None}}}]
    for given_tools in (tools, json.dumps(tools)):
        assert parse({"messages": [ask], "tools": given_tools}) == Messages([ask], tools=tools)
    assert (
        parse({"messages": [ask], "tools": []}) == parse({"messages": [ask], "tools": ""}) == Messages([ask])
    )
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}], "name": None}
    wanted = {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}
    assert parse({"messages": [ask, call]}) == Messages([ask, wanted])
    assert parse({"text": "a", "prompt": None, "completion": None}) == PromptCompletion(None, "a")
