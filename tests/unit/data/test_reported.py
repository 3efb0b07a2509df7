"""Records from users' reports of other trainers: what they become, what is left out, what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from megatron_mux.data.bad_record import BadRecordError
from megatron_mux.data.dataset import TaskDataset
from megatron_mux.data.preference import PreferenceTokeniser, parse_preference
from megatron_mux.data.records import record_of
from megatron_mux.data.tokenise import Tokeniser
from megatron_mux.errors import UserError
from tests.unit.data.test_chat import FORGETFUL, MARKED, learned
from tests.unit.data.tiny_tokenizers import CHATML, build

USER, ANSWER = {"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Me."}
LAST_CLOSES_DIFFERENTLY = (
    "{% for m in messages %}{{ '<s>' + m.role + ': ' + m.content }}"
    "{% if m.role == 'assistant' and loop.last and not add_generation_prompt %}{{ '</s>' }}"
    "{% else %}{{ '<|im_end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant: ' }}{% endif %}"
)
END_AFTER_LAST = (
    "{% for m in messages %}{{ ('USER: ' if m.role == 'user' else 'ASSISTANT: ') + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT: ' }}{% else %}{{ eos_token }}{% endif %}"
)
REPEATING = CHATML.replace(
    "m['content'] +", "m['content'] + (' re ' + messages[0].content if m.role == 'assistant' else '') +"
)
EXCHANGES = [
    {"role": "user", "content": "My PIN is 1234."},
    {"role": "assistant", "content": "Noted."},
    {"role": "user", "content": "Forget it."},
    {"role": "assistant", "content": "Done."},
]


def learned_of(tokenizer: Any, row: dict[str, Any]) -> str:
    return learned(tokenizer, Tokeniser(tokenizer, 512).encode(record_of(row)))


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("end", ["</s>", "<|im_end|>"])
def test_a_sequence_has_one_beginning_and_one_end(end: str) -> None:
    """As TRL's trainers: they append the end to a text or completion that does not end in it."""
    rows: list[dict[str, str]] = [
        {"text": f"A bird sings.{end}"},
        {"prompt": "A bird", "completion": f" sings.{end}"},
        {"instruction": "Sing.", "output": f"La.{end}"},
        {"text": f"<s>A bird sings.{end}"},
        {"text": "<s>A bird sings."},
    ]
    for tokenizer in (
        build(eos_token=end, prefix=True),
        build(eos_token=end, prefix=True, suffix=end == "</s>"),
    ):
        for row in rows:
            tokens = Tokeniser(tokenizer, 64).encode(record_of(row)).tokens.tolist()
            assert tokens.count(tokenizer.eos_token_id) == 1 and tokens[-1] == tokenizer.eos_token_id
            assert tokens.count(tokenizer.bos_token_id) == 1 and tokens[0] == tokenizer.bos_token_id
        pair = parse_preference({"prompt": "<s>A", "chosen": f" bird{end}", "rejected": " cat"}, "dpo")
        for example in PreferenceTokeniser(tokenizer, "dpo").encode(pair):
            assert example.tokens.tolist().count(tokenizer.eos_token_id) == 1
            assert example.tokens.tolist().count(tokenizer.bos_token_id) == 1


@pytest.mark.parametrize(
    ("chat_template", "wanted"),
    [
        (LAST_CLOSES_DIFFERENTLY, "Noted.<|im_end|>Done.</s>"),
        (END_AFTER_LAST, "Noted.Done.\n</s>"),
        (CHATML, "Noted.<|im_end|>Done.<|im_end|>"),
    ],
)
def test_the_assistants_turns_alone_are_learned(chat_template: str, wanted: str) -> None:
    assert learned_of(build(chat_template), {"messages": EXCHANGES}) == wanted


@pytest.mark.parametrize(
    "row", [{"messages": EXCHANGES}, {"prompt": EXCHANGES[:3], "completion": EXCHANGES[3:]}]
)
def test_a_template_that_repeats_other_messages_is_refused(row: dict[str, Any]) -> None:
    with pytest.raises(BadRecordError, match=r"something of other messages.*\{% generation %\}"):
        learned_of(build(REPEATING), row)
    pair = {"prompt": EXCHANGES[:3], "chosen": EXCHANGES[3:], "rejected": EXCHANGES[1:2]}
    with pytest.raises(BadRecordError, match="something of other messages"):
        PreferenceTokeniser(build(REPEATING), "dpo").encode(parse_preference(pair, "dpo"))


_TOKENIZERS = [build(t) for t in (CHATML, MARKED, FORGETFUL, LAST_CLOSES_DIFFERENTLY, END_AFTER_LAST)]
_WORDS = st.text("ab \n?", max_size=6)


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(_TOKENIZERS),
    st.lists(_WORDS, min_size=4, max_size=4),
    st.lists(_WORDS, min_size=2, max_size=2),
)
def test_what_is_learned_does_not_depend_on_what_users_say(
    tokenizer: Any, said: list[str], other: list[str]
) -> None:
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]
    spoken = [{**m, "content": other[i // 2]} if i % 2 == 0 else m for i, m in enumerate(messages)]
    chat_template = Tokeniser(tokenizer, 64).chat_template
    found = [chat_template.render(record_of({"messages": each})) for each in (messages, spoken)]  # type: ignore[arg-type]
    first, second = ([chat.text[start:stop] for start, stop in chat.spans] for chat in found)
    assert first == second


@pytest.mark.parametrize("chat_template", [CHATML, MARKED])
@pytest.mark.parametrize(
    "said", [{"weight": 0}, {"train": False}, {"loss": False}, {"trainable": False}, {"masked": True}]
)
def test_a_turn_may_ask_not_to_be_learned(chat_template: str, said: dict[str, Any]) -> None:
    tokenizer: Any = build(chat_template)
    row = {"messages": [USER, {**ANSWER, **said}, USER, {"role": "assistant", "content": "No.", "weight": 1}]}
    example = Tokeniser(tokenizer, 512).encode(record_of(row))
    assert learned(tokenizer, example) == "No.<|im_end|>"
    plain = [USER, ANSWER, USER, {"role": "assistant", "content": "No."}]
    assert example.tokens.tolist() == tokenizer.apply_chat_template(plain, return_dict=False)


SYSTEM = {"role": "system", "content": "Answer only in capitals."}
SHARED = [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "ME."}]


def test_a_system_prompt_beside_the_messages_is_the_first_of_them(tokenizer: Any) -> None:
    capitals = [SYSTEM, USER, {"role": "assistant", "content": "ME."}]
    rows: list[dict[str, Any]] = [
        {"system": SYSTEM["content"], "conversations": SHARED},
        {"system": SYSTEM["content"], "messages": capitals[1:]},
        {"system": SYSTEM["content"], "prompt": capitals[1:2], "completion": capitals[2:]},
    ]
    for row in rows:
        example = Tokeniser(tokenizer, 512).encode(record_of(row))
        assert example.tokens.tolist() == tokenizer.apply_chat_template(capitals, return_dict=False)
        assert learned(tokenizer, example).startswith("ME.<|im_end|>")
    text = record_of({"system": "Be brief.", "instruction": "Who?", "output": "Me.", "history": []})
    assert text.prompt == "### System:\nBe brief.\n\n### Instruction:\nWho?\n\n### Response:\n"


def test_an_odd_row_is_left_out_and_named(tmp_path: Path) -> None:
    """A template that wants users and assistants in turn, and one row of many in which the assistant begins."""
    strict = (
        "{% if messages[0].role == 'assistant' %}{{ raise_exception('roles must alternate') }}{% endif %}"
        + CHATML
    )
    odd, usual = {"messages": [ANSWER, USER, ANSWER]}, {"messages": [USER, ANSWER]}
    assert learned_of(build(), odd) == learned_of(build(MARKED), odd) == "Me.<|im_end|>Me.<|im_end|>"
    path = write(tmp_path / "chats.jsonl", [usual, odd, usual])
    for _ in range(2):  # the second time from the cache
        data = TaskDataset(path, build(strict), 64, cache=tmp_path / "tokens")
        (line,) = data.cut.lines(64)
        assert len(data) == 2 and line.startswith("1 of 3 records cannot be used and were left out: ")
        assert f"{path}: line 2: " in line and "roles must alternate" in line
        data.close()
    with pytest.raises(UserError, match=r"line 1: .*roles must alternate"):
        TaskDataset(write(path, [odd, odd]), build(strict), 64, cache=tmp_path / "tokens")


def test_parts_that_are_all_text_are_joined(tokenizer: Any) -> None:
    parts = [{"type": "text", "text": "Who "}, {"type": "text", "text": "are you?"}]
    record = record_of({"messages": [{"role": "user", "content": parts}, ANSWER]})
    assert record == record_of({"messages": [{"role": "user", "content": "Who are you?"}, ANSWER]})
    with pytest.raises(BadRecordError, match=r"message 1 has a part of type 'image_url'.*\"type\": \"text\""):
        record_of({"messages": [{"role": "user", "content": [*parts, {"type": "image_url"}]}, ANSWER]})


@pytest.mark.parametrize(
    ("written", "wanted"),
    [
        ("m.tool_calls | tojson", '[{"function": {"name": "f", "arguments": {"city": "Bern"}}}]'),
        ("'' ~ m.tool_calls[0].function.arguments", '{"city": "Bern"}'),
        ("m.tool_calls[0].function.arguments + ''", '{"city": "Bern"}'),
        ("m.tool_calls[0].function.arguments.city", "Bern"),
    ],
)
def test_arguments_as_text_are_an_object_to_who_encodes_them(written: str, wanted: str) -> None:
    chat_template = CHATML.replace("m['content'] +", f"m['content'] + ({written} if m.tool_calls else '') +")
    call = {"function": {"name": "f", "arguments": '{"city": "Bern"}'}}
    row = {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [call]}]}
    assert learned_of(build(chat_template), row) == wanted + "<|im_end|>"
    with pytest.raises(BadRecordError, match='"tool_calls", and the chat template does not render them'):
        learned_of(build(), row)


def test_what_the_template_does_not_use_is_said(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    row = {"messages": [{**USER, "mood": "curious"}, ANSWER], "tools": [{"name": "f"}], "id": 3}
    data = TaskDataset(write(tmp_path / "a.jsonl", [row]), tokenizer, 64, cache=tmp_path)
    assert data.cut.lines(64) == ['not used by the chat template, and left out: "mood" of messages, "tools"']
    data.close()


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"messages": [USER, {**ANSWER, "weight": 0.5}]}, '"weight" of message 2 must be true or false'),
        ({"messages": [USER, {**ANSWER, "weight": 0, "train": True}]}, "both to be learned and not to be"),
        ({"messages": [{**USER, "train": True}, ANSWER]}, "message 1 asks to be learned"),
        ({"prompt": [USER], "completion": [{**ANSWER, "weight": 0}]}, "a completion is learned as a whole"),
        ({"messages": [USER, {**ANSWER, "function_call": {"name": "f"}}]}, 'write it as "tool_calls"'),
        ({"messages": [USER, ANSWER], "history": [["a", "b"]]}, '"history" beside messages is not supported'),
        ({"messages": [USER, ANSWER], "images": ["a.png"]}, '"images" beside messages is not supported'),
        ({"messages": [SYSTEM, USER, ANSWER], "system": "Else."}, "first message of the role system"),
        ({"messages": [USER, {**ANSWER, "loss_mask": 0}]}, 'write "weight": 1 to learn it, 0 not to'),
        (
            {"messages": [USER, ANSWER], "weight": 0},
            '"weight" beside messages is not supported: write it into',
        ),
        ({"messages": [USER, ANSWER], "system_prompt": "Be kind."}, 'call it "system"'),
        ({"messages": [USER, ANSWER], "enable_thinking": False}, 'write it into "chat_template_kwargs"'),
        (
            {"messages": [USER, ANSWER], "chat_template_kwargs": {"chat_template": "{{ 9 ** 9 }}"}},
            '"chat_template_kwargs" cannot set chat_template',
        ),
        ({"instruction": "a", "output": "b", "history": [["a", "b"]]}, '"history" has no place'),
        ({"prompt": "a", "completion": "b", "system": "c"}, '"system" has no place'),
        ({"messages": [USER, {**ANSWER, "role": "Assistant"}]}, 'must be "assistant", got "Assistant"'),
    ],
)
def test_instructions_that_are_not_supported_are_refused_by_name(row: dict[str, Any], said: str) -> None:
    with pytest.raises(BadRecordError) as caught:
        record_of(row)
    assert said in str(caught.value)


def test_an_empty_list_of_calls_is_none(tokenizer: Any) -> None:
    rows = ({"messages": [USER, answer]} for answer in ({**ANSWER, "tool_calls": []}, ANSWER))
    empty, without = (Tokeniser(tokenizer, 64).encode(record_of(row)).tokens.tolist() for row in rows)
    assert empty == without


def test_nothing_to_learn_is_not_blamed_on_the_length(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    unusable = {"messages": [USER, {**ANSWER, "tool_calls": [{"function": {"name": "f"}}]}]}
    path = write(tmp_path / "a.jsonl", [unusable, {"messages": [USER, {"role": "bot", "content": "Me."}]}])
    with pytest.raises(UserError, match=r'those of "assistant" are learned.*has user, bot') as caught:
        TaskDataset(path, tokenizer, 64, cache=tmp_path)
    assert "max_length" not in str(caught.value)


def test_a_token_that_the_embedding_lacks_is_named_by_row(tmp_path: Path) -> None:
    tokenizer = build()
    rows = len(tokenizer)
    tokenizer.add_tokens(["<tool_a>"])
    assert len(tokenizer) == rows + 1
    good, bad = {"prompt": "Use ", "completion": "it"}, {"prompt": "Use ", "completion": "<tool_a> now"}
    data = TaskDataset(write(tmp_path / "a.jsonl", [good, bad, good]), tokenizer, 64, cache=tmp_path)
    data.check_tokens(rows + 1)
    with pytest.raises(UserError, match=rf"a.jsonl: line 2: becomes token {rows} \('<tool_a>'\)"):
        data.check_tokens(rows)
    data.close()
